"""What a container holds about text: a tokenizer.json where the source has another form of it, and
the tables for the C tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.sources import Source
from colibri_tools.sources.gguf import METADATA_BLOB
from colibri_tools.text.gguf_tokenizer import TokenizerUnknown, gguf_tokenizer_json
from colibri_tools.text.hf_files import TOKENIZER_FILES, hf_tokenizer_json
from colibri_tools.text.tables import TablesUnsupported, tokenizer_tables

__all__ = ["TOKENIZER_BLOB", "TextParts", "made_tokenizer", "text_parts"]

TOKENIZER_BLOB = "tokenizer.json"
LACKS = "tokenizer_lacks"


@dataclass(frozen=True, slots=True)
class TextParts:
    """`blobs` are carried besides the source's own; `spec` and `provenance` are keys to set.

    `tables` is None for a tokenizer that the C code cannot do; the spec then says what it has.
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    tables: bytes | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def text_parts(source: Source) -> TextParts:
    """Return what a container of `source` holds about text. Reads no tensors."""
    document = source.blobs.get(TOKENIZER_BLOB)
    made: tuple[bytes, str] | None = None
    if document is None:
        try:
            made = made_tokenizer(source.blobs, source.metadata)
        except TokenizerUnknown as error:
            warning = f"no tokenizer: {error.message}; prompts are given as ids with --tokens"
            return TextParts(spec={LACKS: error.message}, warnings=(warning,))
        if made is None:
            return TextParts()
        document = made[0]
    blobs = {TOKENIZER_BLOB: made[0]} if made else {}
    spec: dict[str, Any] = {"tokenizer": "hf-json"} if made else {}
    provenance = {"tokenizer.made_from": made[1]} if made else {}
    try:
        tables = tokenizer_tables(json.loads(document))
    except (TablesUnsupported, ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        return TextParts(blobs, None, {**spec, LACKS: reason}, provenance)
    return TextParts(blobs, tables, spec, provenance)


def made_tokenizer(
    blobs: Mapping[str, bytes], metadata: Mapping[str, Any]
) -> tuple[bytes, str] | None:
    """Return a tokenizer.json and the name of what it was made from; None if there is nothing.

    Raises TokenizerUnknown for what cannot be made exactly.
    """
    if METADATA_BLOB in blobs:
        if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            return None
        return gguf_tokenizer_json(metadata), METADATA_BLOB
    for name in TOKENIZER_FILES:
        if name in blobs:
            return hf_tokenizer_json(blobs, name), name
    return None
