"""Refusals by name: storage schemes whose bytes are not the weights."""

from __future__ import annotations

import re

from colibri_tools.errors import SourceError, quote_some
from colibri_tools.families.common import REFUSALS
from colibri_tools.families.precision import Scheme
from colibri_tools.sources import Source

__all__ = ["refuse_schemes"]

_TP_FILE = re.compile(r".+[-._]TP[-._]?\d+.*\.safetensors")


def refuse_schemes(source: Source, scheme: Scheme | None) -> None:
    """Raise SourceError, naming the scheme, if weights of `source` are quantized or sliced in a way
    that is not understood. `scheme` is the one that was, and whose tensors are weights by now."""
    for rule in REFUSALS:
        pattern = re.compile(rule.regex)
        stored = (name for name, tensor in source.tensors.items() if tensor.view is None)
        names = [name for name in stored if pattern.fullmatch(name)]
        if names:
            raise SourceError(
                f"{source.path}: {rule.scheme} are not supported{_why(source, scheme)}: "
                f"{quote_some(names)}; use the unquantized checkpoint, or a GGUF file of it"
            )
    sliced = [file.name for file in source.files if _TP_FILE.fullmatch(file.name)]
    if sliced:
        raise SourceError(
            f"{source.path}: tensor-parallel slices (TP) are not supported: {quote_some(sliced)}; "
            "merge them with the tools of the model's authors"
        )


def _why(source: Source, scheme: Scheme | None) -> str:
    if source.kind == "gguf":
        return ""
    if scheme is None:
        return " without a quantization_config in config.json that says how they are stored"
    return f" in this place by {scheme.name}, the scheme that config.json names"
