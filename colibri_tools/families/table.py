"""The family table. Adding a family of a known shape is adding a row to a module of `rows`."""

from __future__ import annotations

from colibri_tools.families.rows.arcee import AFMOE
from colibri_tools.families.rows.baidu import ERNIE4_5_MOE
from colibri_tools.families.rows.deepseek import DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V3
from colibri_tools.families.rows.granite import GRANITE_MOE
from colibri_tools.families.rows.hunyuan import HUNYUAN_MOE
from colibri_tools.families.rows.jetbrains import MELLUM
from colibri_tools.families.rows.lg import EXAONE_MOE
from colibri_tools.families.rows.llama4 import LLAMA4
from colibri_tools.families.rows.minimax import MINIMAX_M2
from colibri_tools.families.rows.mixtral import MIXTRAL
from colibri_tools.families.rows.olmo import FLEX_OLMO, OLMOE
from colibri_tools.families.rows.openai import GPT_OSS
from colibri_tools.families.rows.phi import PHIMOE
from colibri_tools.families.rows.qwen import QWEN2_MOE, QWEN3_MOE
from colibri_tools.families.rows.rednote import DOTS1
from colibri_tools.families.rows.zhipu import GLM4_MOE
from colibri_tools.families.schema import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    MELLUM,
    OLMOE,
    FLEX_OLMO,
    DEEPSEEK,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    GLM4_MOE,
    ERNIE4_5_MOE,
    MINIMAX_M2,
    EXAONE_MOE,
    AFMOE,
    GRANITE_MOE,
    HUNYUAN_MOE,
    GPT_OSS,
    PHIMOE,
    LLAMA4,
)
"""All families, one row each, in the order of the documentation."""
