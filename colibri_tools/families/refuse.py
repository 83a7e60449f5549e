"""Refusals by name: storage schemes whose bytes are not the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.common import REFUSALS
from colibri_tools.families.detect import Detected
from colibri_tools.sources import Source

__all__ = ["refuse_schemes"]

_TP_FILE = re.compile(r".+[-._]TP[-._]?\d+.*\.safetensors")


def refuse_schemes(source: Source, detected: Detected) -> None:
    """Raise SourceError, naming the scheme, if the source is quantized or sliced in a way that
    cannot be carried."""
    for rule in REFUSALS:
        pattern = re.compile(rule.regex)
        names = [name for name in source.tensors if pattern.fullmatch(name)]
        if names:
            raise SourceError(
                f"{source.path}: {rule.scheme} are not supported: {quote_some(names)}; "
                "use the unquantized checkpoint, or a GGUF file of it"
            )
    sliced = [file.name for file in source.files if _TP_FILE.fullmatch(file.name)]
    if sliced:
        raise SourceError(
            f"{source.path}: tensor-parallel slices (TP) are not supported: {quote_some(sliced)}; "
            "merge them with the tools of the model's authors"
        )
    for level in detected.levels if source.kind == "safetensors" else ():
        scheme = level.get("quantization_config")
        if scheme:
            raise SourceError(f"{source.path}: config.json: {_quantization(scheme)}")


def _quantization(scheme: object) -> str:
    method = "?"
    if isinstance(scheme, Mapping):
        found = [scheme.get("quant_method"), scheme.get("quant_algo"), scheme.get("format")]
        method = " ".join(str(part) for part in found if isinstance(part, str)) or "?"
    return (
        f"quantization_config: the scheme {quote(method)} is not supported; use the unquantized "
        "checkpoint, or a GGUF file of it"
    )
