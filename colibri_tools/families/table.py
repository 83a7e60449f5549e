"""The family table. Adding a family of a known shape is adding a row to a module of `rows`."""

from __future__ import annotations

from colibri_tools.families.rows.deepseek import DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V3
from colibri_tools.families.rows.mixtral import MIXTRAL
from colibri_tools.families.rows.olmo import OLMOE
from colibri_tools.families.rows.qwen import QWEN2_MOE, QWEN3_MOE
from colibri_tools.families.schema import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    DEEPSEEK,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)
"""All families, one row each, in the order of the documentation."""
