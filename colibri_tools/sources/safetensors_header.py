"""The safetensors header: 8-byte little-endian length, JSON, then the data area.

Written after the format's description (github.com/huggingface/safetensors). Stricter than the
library in one thing (duplicate keys are refused), equally strict in the rest: no holes, no
overlaps, no bytes after the last tensor. Every check happens before anything is allocated by it.
"""

from __future__ import annotations

import gc
import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from colibri_tools.dtypes import DType, dtype_by_safetensors
from colibri_tools.errors import ColibriError, FormatError, quote
from colibri_tools.sources.detect import kind_of, wrong_kind
from colibri_tools.sources.files import RangeFile
from colibri_tools.sources.strict_json import parse_json_object

__all__ = ["MAX_HEADER_BYTES", "MAX_TENSORS", "HeaderTensor", "SafetensorsHeader", "read_header"]

MAX_HEADER_BYTES = 50_000_000
"""Half of the safetensors library's own limit: the text is held twice while it is parsed."""

MAX_TENSORS = 1 << 16
"""In one file. The largest checkpoints known have about 200,000 in some 60 files. Objects cost ten
times the memory of their text, so this is what keeps a hostile header below 1 s and 200 MB."""

MAX_DIMS = 32
_MAX_DEPTH = 4
_ENTRY_FIELD = b'"data_offsets"'


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One entry; `offset` is absolute in the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header: tensors by ascending offset, `__metadata__`, hash, start of the data."""

    tensors: list[HeaderTensor]
    metadata: dict[str, str]
    sha256: str
    data_offset: int


def read_header(file: RangeFile) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises FormatError naming the file, the tensor and the broken rule; a file that is something
    else (Git LFS pointer, web page, zip, ...) is called by its name.
    """
    prefix, text = _read_text(file)
    data_offset = len(prefix) + len(text)
    sha256 = hashlib.sha256(prefix)
    sha256.update(text)
    with _without_gc():
        fields = _parse_text(text, file.path)
        del text
        metadata = _metadata(fields.pop("__metadata__", None), file.path)
        tensors = _entries(fields, data_offset, file.size - data_offset, file.path)
    return SafetensorsHeader(tensors, metadata, sha256.hexdigest(), data_offset)


def _read_text(file: RangeFile) -> tuple[bytearray, bytearray]:
    kind = kind_of(file)
    if kind != "safetensors":
        _refuse_kind(file)
    prefix = _read(file, 0, 8)
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"{file.path}: header of {length} bytes, expected at most {MAX_HEADER_BYTES}; "
            "the file is damaged or no safetensors file"
        )
    if length > file.size - 8:
        raise FormatError(
            f"{file.path}: truncated: the header needs {length} bytes after the first 8, the file "
            f"has {file.size - 8}; fetch the file again"
        )
    return prefix, _read(file, 8, length)


def _refuse_kind(file: RangeFile) -> None:
    kind = kind_of(file)
    if kind == "unknown" and file.size < 10:
        raise FormatError(
            f"{file.path}: truncated: expected at least 10 bytes, found {file.size};"
            " fetch the file again"
        )
    head = _read(file, 0, min(8, file.size)).hex(" ")
    raise FormatError(
        f"{file.path}: not a safetensors file (first bytes {head or 'none'}): {wrong_kind(kind)}"
    )


def _read(file: RangeFile, offset: int, n_bytes: int) -> bytearray:
    out = bytearray(n_bytes)
    file.read_into(offset, memoryview(out), "header")
    return out


def _parse_text(text: bytearray, where: str) -> dict[str, Any]:
    n_entries = text.count(_ENTRY_FIELD)
    if n_entries > MAX_TENSORS:
        raise FormatError(f"{where}: {n_entries} tensors, expected at most {MAX_TENSORS}")
    fields = parse_json_object(text, f"{where}: header", _MAX_DEPTH)
    if len(fields) > MAX_TENSORS + 1:  # with escapes in the field's name, they were not counted
        raise FormatError(f"{where}: {len(fields)} tensors, expected at most {MAX_TENSORS}")
    return fields


@contextmanager
def _without_gc() -> Iterator[None]:
    # A header is a tree of fresh objects; scanning it again and again takes half of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _metadata(found: object, where: str) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FormatError(f"{where}: __metadata__: expected an object, found {_type(found)}")
    for key, value in found.items():
        if not isinstance(value, str):
            raise FormatError(
                f"{where}: __metadata__ {quote(key)}: expected a string, found {_type(value)}"
            )
    return found


def _entries(
    fields: dict[str, Any], data_offset: int, data_bytes: int, where: str
) -> list[HeaderTensor]:
    found: list[HeaderTensor] = []
    for name, entry in fields.items():
        try:
            found.append(_entry(name, entry, data_offset))
        except ColibriError as error:
            raise FormatError(f"{where}: tensor {quote(name)}: {error.message}") from None
    found.sort(key=lambda tensor: (tensor.offset, tensor.n_bytes))
    _check_cover(found, data_offset, data_bytes, where)
    return found


def _entry(name: str, entry: object, data_offset: int) -> HeaderTensor:
    if not name:
        raise FormatError("the name is empty")
    if not isinstance(entry, dict):
        raise FormatError(f"expected an object, found {_type(entry)}")
    dtype = _dtype(entry.get("dtype"))
    shape, n_weights = _shape(entry.get("shape"))
    begin, end = _span(entry.get("data_offsets"))
    n_bytes = dtype.n_bytes(n_weights)
    if n_bytes != end - begin:
        raise FormatError(
            f"shape {list(shape)} of {dtype.safetensors} needs {n_bytes} bytes, its data_offsets "
            f"[{begin}, {end}] hold {end - begin}"
        )
    return HeaderTensor(name, dtype, shape, data_offset + begin, n_bytes)


def _dtype(found: object) -> DType:
    if not isinstance(found, str):
        raise FormatError(f"dtype: expected a string, found {_type(found)}")
    return dtype_by_safetensors(found)


def _shape(found: object) -> tuple[tuple[int, ...], int]:
    """Return the checked shape and its product, which fits 63 bits."""
    if not isinstance(found, list):
        raise FormatError(f"shape: expected a list, found {_type(found)}")
    if len(found) > MAX_DIMS:
        raise FormatError(f"shape: {len(found)} dimensions, expected at most {MAX_DIMS}")
    product = 1
    for dim in found:
        if type(dim) is not int or not 0 <= dim < 1 << 63:
            raise FormatError(f"shape: expected whole numbers below 2^63, found {quote(dim)}")
        product *= dim or 1  # a zero must not hide dimensions that nothing could index
    if product >= 1 << 63:
        raise FormatError(f"shape {found}: the product of the dimensions does not fit 63 bits")
    return tuple(found), 0 if 0 in found else product


def _span(found: object) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2:
        raise FormatError(f"data_offsets: expected [begin, end], found {quote(found)}")
    begin, end = found
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 1 << 63:
        raise FormatError(f"data_offsets: expected 0 <= begin <= end < 2^63, found {quote(found)}")
    return begin, end


def _check_cover(
    tensors: list[HeaderTensor], data_offset: int, data_bytes: int, where: str
) -> None:
    """Check that the tensors, by ascending offset, fill the data area exactly."""
    position = data_offset
    previous = "the header"
    for tensor in tensors:
        if tensor.offset != position:
            begin, expected = tensor.offset - data_offset, position - data_offset
            fault = _cover_fault(tensor, begin, expected, previous)
            raise FormatError(f"{where}: {fault}")
        position += tensor.n_bytes
        previous = tensor.name
    surplus = data_bytes - (position - data_offset)
    if surplus < 0:
        raise FormatError(
            f"{where}: truncated: {-surplus} bytes missing (expected {position} bytes, found "
            f"{data_offset + data_bytes}); fetch the file again"
        )
    if surplus > 0:
        raise FormatError(
            f"{where}: {surplus} trailing bytes after the last tensor (expected {position} bytes, "
            f"found {data_offset + data_bytes}); the file is damaged"
        )


def _cover_fault(tensor: HeaderTensor, begin: int, expected: int, previous: str) -> str:
    fault = "overlaps" if begin < expected else f"leaves a hole of {begin - expected} bytes after"
    return (
        f"tensor {quote(tensor.name)} at data offset {begin} {fault} {quote(previous)}, which ends "
        f"at {expected}; the file is damaged"
    )


def _type(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
