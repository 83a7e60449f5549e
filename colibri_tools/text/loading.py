"""The tokenizer of a container, of a checkpoint's folder or of a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from colibri_tools.errors import FormatError, UsageError
from colibri_tools.sources import parse_gguf_metadata
from colibri_tools.sources.gguf import METADATA_BLOB
from colibri_tools.text.derive import TOKENIZER_BLOB, made_tokenizer
from colibri_tools.text.gguf_tokenizer import TokenizerUnknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "TokenizerMissing",
    "carried_metadata",
    "decode_text",
    "load_tokenizer",
    "without_surrogates",
]


class TokenizerMissing(UsageError):
    """There is no tokenizer that can encode text; the message says why."""


def load_tokenizer(blobs: Mapping[str, bytes], path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of the carried files `blobs` of `path`.

    Raises TokenizerMissing where there is none, FormatError for one that cannot be used.
    """
    where = os.fspath(path)
    document = blobs.get(TOKENIZER_BLOB)
    if document is None:
        document = _make(blobs, where)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(document.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise FormatError(f"{where}: {TOKENIZER_BLOB} cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _make(blobs: Mapping[str, bytes], where: str) -> bytes:
    try:
        made = made_tokenizer(blobs, carried_metadata(blobs, where))
    except TokenizerUnknown as error:
        raise TokenizerMissing(
            f"{where}: {error.message}; give the prompt as ids with --tokens"
        ) from error
    if made is None:
        raise TokenizerMissing(
            f"{where}: it has no tokenizer that can encode text; "
            "give the prompt as ids with --tokens"
        )
    return made[0]


def carried_metadata(blobs: Mapping[str, bytes], where: str) -> Mapping[str, Any]:
    """Return the GGUF metadata among carried files, empty if there are none."""
    if METADATA_BLOB not in blobs:
        return {}
    metadata: Mapping[str, Any] = parse_gguf_metadata(
        blobs[METADATA_BLOB], f"{where}/{METADATA_BLOB}"
    )
    return metadata


def decode_text(raw: bytes) -> tuple[str, int | None]:
    """Return text, and the place of the first byte that is no UTF-8, None if all is.

    Every such byte becomes U+FFFD, as the C tokenizer and llama.cpp take it.
    """
    try:
        return raw.decode("utf-8"), None
    except UnicodeDecodeError as error:
        first = error.start
    return without_surrogates(raw.decode("utf-8", "surrogateescape")), first


def without_surrogates(text: str) -> str:
    """Return `text` with U+FFFD for each byte, or half of a pair, that is no character."""
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
