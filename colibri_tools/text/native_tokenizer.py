"""The C tokenizer, from Python: what `colibri-run --prompt` uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from colibri_tools.errors import FormatError, JobError
from colibri_tools.native import ffi, lib

__all__ = ["NativeTokenizer"]


class NativeTokenizer:
    """The tokenizer of tables, immutable. Raises FormatError for tables that break their rules."""

    def __init__(self, tables: bytes) -> None:
        self._handle = self._open(
            lambda *out: lib.colibri_tokenizer_parse(tables, len(tables), *out)
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> NativeTokenizer:
        """Return the tokenizer of a container. Raises JobError if it has no tables."""
        self = cls.__new__(cls)
        self._handle = cls._open(lambda *out: lib.colibri_tokenizer_open(os.fsencode(path), *out))
        return self

    @staticmethod
    def _open(call: Any) -> Any:
        handle = ffi.new("colibri_tokenizer **")
        text = ffi.new("char[]", lib.COLIBRI_ERROR_BYTES)
        status = call(handle, text, len(text))
        if status != lib.COLIBRI_OK:
            kind = FormatError if status == lib.COLIBRI_ERROR_FORMAT else JobError
            raise kind(ffi.string(text).decode("utf-8", "replace"))
        return ffi.gc(handle[0], lib.colibri_tokenizer_close)

    @property
    def n_tokens(self) -> int:
        """Ids are below it."""
        return int(lib.colibri_tokenizer_n_tokens(self._handle))

    def encode(self, text: str | bytes, *, add_special: bool = True) -> list[int]:
        """Return the ids of a text. Raises JobError for one that takes unreasonably long."""
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        capacity = len(raw) + 64
        n_ids = ffi.new("size_t *")
        while True:
            ids = ffi.new("uint32_t[]", capacity)
            status = lib.colibri_tokenizer_encode(
                self._handle, raw, len(raw), add_special, ids, capacity, n_ids
            )
            if status != lib.COLIBRI_OK:
                raise JobError("the text takes too long, or too much memory, to encode")
            if n_ids[0] <= capacity:
                return list(ids[0 : n_ids[0]])
            capacity = n_ids[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        n_bytes, capacity = ffi.new("size_t *"), 16 * len(ids) + 64
        while True:
            text = ffi.new("char[]", capacity)
            status = lib.colibri_tokenizer_decode(
                self._handle, list(ids), len(ids), text, capacity, n_bytes
            )
            if status != lib.COLIBRI_OK:
                raise JobError("no memory for the text")
            if n_bytes[0] <= capacity:
                return bytes(ffi.buffer(text, n_bytes[0])).decode("utf-8")
            capacity = n_bytes[0]
