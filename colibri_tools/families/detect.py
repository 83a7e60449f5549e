"""Which family a source belongs to, and on what evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colibri_tools.errors import quote
from colibri_tools.families.hyper import config_levels
from colibri_tools.families.schema import Family
from colibri_tools.families.table import FAMILIES
from colibri_tools.sources import Source

__all__ = ["Detected", "detect_family"]


@dataclass(frozen=True, slots=True)
class Detected:
    """`family` is None for a source that no row of the table names; `claimed` is what it says."""

    family: Family | None
    claimed: str
    why: str
    levels: Sequence[Mapping[str, Any]]
    arch: str

    @property
    def where(self) -> str:
        """The place of the hyper-parameters, for messages."""
        return "GGUF metadata" if self.arch else "config.json"


def detect_family(source: Source) -> Detected:
    """Look at the model type (Hugging Face) or the architecture (GGUF)."""
    if source.kind == "gguf":
        return _detect_gguf(source.metadata)
    return _detect_hf(source.config)


def _detect_gguf(metadata: Mapping[str, Any]) -> Detected:
    arch = metadata.get("general.architecture")
    claimed = arch if isinstance(arch, str) else ""
    family = next((f for f in FAMILIES if f.gguf is not None and claimed in f.gguf.ids), None)
    why = f"general.architecture is {quote(claimed)}"
    return Detected(family, claimed, why, [metadata], claimed or "unknown")


def _detect_hf(config: Mapping[str, Any]) -> Detected:
    levels = config_levels(config)
    for level in levels:
        model_type = level.get("model_type")
        family = next((f for f in FAMILIES if model_type in f.hf.ids), None)
        if family is not None:
            inside = " of the text config" if level is not config else ""
            why = f"model_type{inside} in config.json is {quote(model_type)}"
            return Detected(family, str(model_type), why, levels, "")
    claimed = next((str(x["model_type"]) for x in levels if x.get("model_type")), "")
    if claimed:
        why = f"model_type in config.json is {quote(claimed)}"
        return Detected(None, claimed, why, levels, "")
    return _by_class(levels)


def _by_class(levels: Sequence[Mapping[str, Any]]) -> Detected:
    for level in levels:
        classes = level.get("architectures")
        if not isinstance(classes, Sequence) or isinstance(classes, str):
            continue
        for name in classes:
            why = f"architectures in config.json has {quote(name)}"
            family = next((f for f in FAMILIES if name in f.hf.architectures), None)
            return Detected(family, str(name), why, levels, "")
    return Detected(None, "", "there is no model type (no config.json?)", levels, "")
