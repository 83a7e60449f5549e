"""The GGUF header: counts, key-value metadata, tensor table. Versions 2 and 3, little-endian.

Written after ggml's `docs/gguf.md`. The header is read in windows of bounded size and parsed from
memory that grows only as far as the file really reaches; the tensor data is never touched.
Limits are constants below; each is far above what real models need.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from colibri_tools.dtypes import DType, find_dtype, unknown_dtype
from colibri_tools.errors import FormatError, quote
from colibri_tools.sources.detect import kind_of, wrong_kind
from colibri_tools.sources.files import RangeFile

__all__ = [
    "DEFAULT_ALIGNMENT",
    "MAX_ALIGNMENT",
    "MAX_ARRAY_DEPTH",
    "MAX_ARRAY_ITEMS",
    "MAX_DIMS",
    "MAX_HEADER_BYTES",
    "MAX_KEY_BYTES",
    "MAX_KV",
    "MAX_NAME_BYTES",
    "MAX_NESTED_ARRAYS",
    "MAX_STRING_BYTES",
    "MAX_STRING_ITEMS",
    "MAX_TENSORS",
    "MAX_TEXT_BYTES",
    "GgufArray",
    "GgufHeader",
    "GgufTensor",
    "parse_gguf_metadata",
    "read_gguf_header",
]

MAX_HEADER_BYTES = 32 << 20  # a vocabulary of 262,144 with its merges takes 15 MB
MAX_KV = 1 << 16
MAX_KEY_BYTES = 65_535  # the specification's own limit
MAX_STRING_BYTES = 16 << 20
MAX_TEXT_BYTES = 32 << 20  # of all strings outside arrays, as Python holds them
MAX_ARRAY_ITEMS = 1 << 24
MAX_STRING_ITEMS = 1 << 21  # of all arrays: each is walked one by one
MAX_ARRAY_DEPTH = 2
MAX_NESTED_ARRAYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 64  # the specification's own limit
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_WINDOW = 1 << 20
_MIN_KV_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_TYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool"),
    *("string", "array", "uint64", "int64", "float64"),
)


class GgufArray(Sequence[Any]):
    """An array of GGUF metadata, kept as its bytes; items are decoded when they are asked for.

    `type_name` is the item type ("uint32", "string", ...). Strings are decoded as UTF-8, bytes that
    are not UTF-8 as lone surrogates (`surrogateescape`), so that nothing is lost.
    """

    __slots__ = ("_data", "_starts", "_type", "type_name")

    def __init__(self, item_type: int, data: bytes, starts: Sequence[int] | None) -> None:
        """`starts` holds len + 1 offsets of strings (each with its 8-byte length) in `data`."""
        self._type = item_type
        self._data = data
        self._starts = starts
        self.type_name = _TYPE_NAMES[item_type]

    def __len__(self) -> int:
        if self._starts is not None:
            return len(self._starts) - 1
        return len(self._data) // _SCALARS[self._type].size

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return self._item(index % len(self))

    def __iter__(self) -> Iterator[Any]:
        if self._starts is None:
            return (value for (value,) in _SCALARS[self._type].iter_unpack(self._data))
        return (self._item(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<GgufArray of {len(self)} {self.type_name}>"

    def tolist(self) -> list[Any]:
        """Return all items as a list."""
        return list(self)

    def _item(self, i: int) -> Any:
        if self._starts is None:
            scalar = _SCALARS[self._type]
            return scalar.unpack_from(self._data, i * scalar.size)[0]
        return _text(self._data[self._starts[i] + 8 : self._starts[i + 1]])


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table; `offset` is absolute in the file, `shape` in numpy order."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A checked header.

    `prefix` are the file's bytes up to the end of the metadata: magic, version, both counts, the
    key-value section; `parse_gguf_metadata` reads them again. `tensors` are by ascending
    offset. `warnings` tell what is odd but readable.
    """

    version: int
    metadata: dict[str, Any]
    types: dict[str, str]
    prefix: bytes
    alignment: int
    tensors: list[GgufTensor]
    sha256: str
    data_offset: int
    warnings: list[str]


def read_gguf_header(file: RangeFile, split_alignment: int | None = None) -> GgufHeader:
    """Read and check the header of a GGUF file.

    `split_alignment` is the alignment of a split set's first file: later files of some writers
    use it without saying so. Raises FormatError naming file, place and broken rule.
    """
    _refuse_other_kinds(file)
    cursor = _Cursor(_FileBytes(file), file.path)
    version, n_tensors, n_kv = _counts(cursor)
    metadata, types = _metadata(cursor, n_kv)
    prefix = cursor.bytes_so_far()
    raw = _raw_tensors(cursor, n_tensors)
    alignment = _alignment(metadata, types, file.path)
    if split_alignment is not None and "general.alignment" not in metadata:
        alignment = _inherited_alignment(raw, cursor.position, split_alignment, file)
    data_offset = _align(cursor.position, alignment)
    warnings: list[str] = []
    tensors = _place(raw, data_offset, alignment, file, warnings)
    return GgufHeader(
        version,
        metadata,
        types,
        prefix,
        alignment,
        tensors,
        _hash_header(cursor, data_offset, file),
        data_offset,
        warnings,
    )


def _refuse_other_kinds(file: RangeFile) -> None:
    kind = kind_of(file)
    if kind != "gguf":
        raise FormatError(f"{file.path}: not a GGUF file: {wrong_kind(kind)}")


def parse_gguf_metadata(prefix: bytes, where: str = "gguf-metadata.bin") -> dict[str, Any]:
    """Parse the carried `gguf-metadata.bin`: a GGUF file's bytes up to the end of its metadata.

    Returns str, int, float, bool and GgufArray values by key. Raises FormatError.
    """
    cursor = _Cursor(_PlainBytes(prefix), where)
    _, _, n_kv = _counts(cursor)
    metadata, _ = _metadata(cursor, n_kv)
    if cursor.position != len(prefix):
        raise FormatError(f"{where}: {len(prefix) - cursor.position} bytes after the metadata")
    return metadata


# ---------------------------------------------------------------- bytes


class _PlainBytes:
    """Bytes that are all in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.size = len(data)

    def require(self, end: int) -> None:
        """Nothing to fetch."""


class _FileBytes:
    """The front of a file, fetched window by window as far as it is asked for."""

    def __init__(self, file: RangeFile) -> None:
        self.data = bytearray()
        self.size = file.size
        self._file = file

    def require(self, end: int) -> None:
        """Make `data` reach `end`, which the caller has checked against `size`."""
        start = len(self.data)
        if end <= start:
            return
        if end > MAX_HEADER_BYTES:
            raise FormatError(f"{self._file.path}: header above {MAX_HEADER_BYTES} bytes")
        window = bytearray(min(max(end - start, _WINDOW), self.size - start))
        self._file.read_into(start, memoryview(window), "header")
        self.data += window


class _Cursor:
    """Reads typed values one after another, never past the end."""

    def __init__(self, source: _PlainBytes | _FileBytes, where: str) -> None:
        self.where = where
        self.position = 0
        self._source = source
        self._spent: dict[str, int] = {}

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file."""
        return self._source.size - self.position

    def skip(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes`, which are then in memory; return where they start."""
        if n_bytes > self.left:
            raise FormatError(
                f"{self.where}: truncated: {what} needs {n_bytes} bytes at offset "
                f"{self.position}, {self.left} are left; fetch the file again"
            )
        start = self.position
        self._source.require(start + n_bytes)
        self.position += n_bytes
        return start

    def take(self, n_bytes: int, what: str) -> bytes:
        """Return the next `n_bytes`."""
        start = self.skip(n_bytes, what)
        return bytes(self._source.data[start : start + n_bytes])

    def number(self, scalar: struct.Struct, what: str) -> Any:
        """Return the next number."""
        start = self.skip(scalar.size, what)
        return scalar.unpack_from(self._source.data, start)[0]

    def u32(self, what: str) -> int:
        """Return the next uint32."""
        return int(self.number(_SCALARS[4], what))

    def u64(self, what: str) -> int:
        """Return the next uint64."""
        return int(self.number(_SCALARS[10], what))

    def string(self, limit: int, what: str) -> bytes:
        """Return the next length-prefixed string, still as bytes."""
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise FormatError(f"{self.where}: {what} has {length} bytes, expected at most {limit}")
        return self.take(length, what)

    def strings(self, n_items: int, what: str) -> tuple[bytes, array[int]]:
        """Step over `n_items` strings; return their bytes and the n_items + 1 offsets in them."""
        data, begin = self._source.data, self.position
        unpack_length = _SCALARS[10].unpack_from
        starts = array("Q", [0])
        for _ in range(n_items):  # a vocabulary has 10^5 of them: no calls for what is in memory
            if self.position + 8 > len(data):
                self.skip(8, what)
                self.position -= 8
            (length,) = unpack_length(data, self.position)
            if length > MAX_STRING_BYTES:
                raise FormatError(
                    f"{self.where}: a string of {what} has {length} bytes, expected at most "
                    f"{MAX_STRING_BYTES}"
                )
            self.position += 8
            if self.position + length > len(data):
                self.skip(length, what)
            else:
                self.position += length
            starts.append(self.position - begin)
        return bytes(data[begin : self.position]), starts

    def spend(self, amount: int, limit: int, what: str) -> None:
        """Count `amount` of `what` in the whole header; refuse more than `limit`."""
        spent = self._spent[what] = self._spent.get(what, 0) + amount
        if spent > limit:
            raise FormatError(f"{self.where}: {spent} {what}, expected at most {limit}")

    def sha256_so_far(self) -> str:
        """Return the hash of everything before the current position, without a copy."""
        with memoryview(self._source.data) as data:
            return hashlib.sha256(data[: self.position]).hexdigest()

    def bytes_so_far(self) -> bytes:
        """Return everything before the current position."""
        return bytes(self._source.data[: self.position])


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _strict_text(raw: bytes, where: str, what: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{where}: {what} {quote(_text(raw))} is not UTF-8") from None
    if not text:
        raise FormatError(f"{where}: {what} is empty")
    if "\0" in text:
        raise FormatError(f"{where}: {what} {quote(text)} has a NUL byte")
    return text


# ---------------------------------------------------------------- counts and metadata


def _counts(cursor: _Cursor) -> tuple[int, int, int]:
    """Check magic and version; return (version, tensor count, key-value count)."""
    where = cursor.where
    magic = cursor.take(4, "the magic")
    if magic == b"FUGG":
        raise FormatError(f"{where}: big-endian GGUF is not supported; convert it to little-endian")
    if magic != b"GGUF":
        raise FormatError(f"{where}: expected the magic 'GGUF', found {magic.hex(' ')}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise FormatError(f"{where}: big-endian GGUF is not supported; convert it to little-endian")
    if version == 1:
        raise FormatError(f"{where}: GGUF version 1 is not supported; convert the model again")
    if version not in (2, 3):
        raise FormatError(f"{where}: GGUF version {version} is not supported, only 2 and 3")
    n_tensors = cursor.u64("the tensor count")
    n_kv = cursor.u64("the metadata count")
    for count, limit, what in (
        (n_tensors, MAX_TENSORS, "tensors"),
        (n_kv, MAX_KV, "metadata entries"),
    ):
        if count > limit:
            raise FormatError(f"{where}: {count} {what}, expected at most {limit}")
    _require_room(cursor, n_kv, _MIN_KV_BYTES, "metadata entries")
    return version, n_tensors, n_kv


def _require_room(cursor: _Cursor, count: int, min_bytes: int, what: str) -> None:
    """Refuse a count that the rest of the file cannot hold, before looping over it."""
    if count * min_bytes > cursor.left:
        raise FormatError(
            f"{cursor.where}: truncated: {count} {what} need at least {count * min_bytes} bytes, "
            f"{cursor.left} are left; fetch the file again"
        )


def _metadata(cursor: _Cursor, n_kv: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values and type names by key."""
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    for i in range(n_kv):
        raw = cursor.string(MAX_KEY_BYTES, f"metadata key {i}")
        key = _strict_text(raw, cursor.where, f"metadata key {i}")
        if key in values:
            raise FormatError(f"{cursor.where}: metadata key {quote(key)} appears twice")
        what = f"metadata {quote(key)}"
        value_type = cursor.u32(f"the type of {what}")
        values[key] = _value(cursor, value_type, what, 0)
        types[key] = _TYPE_NAMES[value_type]
    return values, types


def _value(cursor: _Cursor, value_type: int, what: str, depth: int) -> Any:
    if value_type == _STRING:
        raw = cursor.string(MAX_STRING_BYTES, what)
        cursor.spend(len(raw) * (1 if raw.isascii() else 4), MAX_TEXT_BYTES, "bytes of strings")
        return _text(raw)
    if value_type == _ARRAY:
        return _array(cursor, what, depth + 1)
    scalar = _SCALARS.get(value_type)
    if scalar is None:
        raise FormatError(f"{cursor.where}: {what} has the unknown value type {value_type}")
    if value_type == _BOOL:
        return _bool(cursor, what)
    return cursor.number(scalar, what)


def _bool(cursor: _Cursor, what: str) -> bool:
    found = cursor.take(1, what)[0]
    if found > 1:
        raise FormatError(f"{cursor.where}: {what}: expected a bool of 0 or 1, found {found}")
    return bool(found)


def _array(cursor: _Cursor, what: str, depth: int) -> GgufArray | list[Any]:
    if depth > MAX_ARRAY_DEPTH:
        raise FormatError(f"{cursor.where}: {what}: arrays nest deeper than {MAX_ARRAY_DEPTH}")
    item_type = cursor.u32(f"the item type of {what}")
    n_items = cursor.u64(f"the length of {what}")
    if n_items > MAX_ARRAY_ITEMS:
        raise FormatError(
            f"{cursor.where}: {what} has {n_items} items, expected at most {MAX_ARRAY_ITEMS}"
        )
    scalar = _SCALARS.get(item_type)
    if scalar is not None:
        return GgufArray(item_type, cursor.take(n_items * scalar.size, what), None)
    if item_type == _STRING:
        return _string_array(cursor, n_items, what)
    if item_type == _ARRAY:
        _require_room(cursor, n_items, 12, f"arrays of {what}")
        cursor.spend(n_items, MAX_NESTED_ARRAYS, "nested arrays")
        return [_array(cursor, what, depth + 1) for _ in range(n_items)]
    raise FormatError(f"{cursor.where}: {what} has the unknown item type {item_type}")


def _string_array(cursor: _Cursor, n_items: int, what: str) -> GgufArray:
    if n_items > MAX_STRING_ITEMS:
        raise FormatError(
            f"{cursor.where}: {what} has {n_items} strings, expected at most {MAX_STRING_ITEMS}"
        )
    _require_room(cursor, n_items, 8, f"strings of {what}")
    cursor.spend(n_items, MAX_STRING_ITEMS, "strings in arrays")
    data, starts = cursor.strings(n_items, what)
    return GgufArray(_STRING, data, starts)


# ---------------------------------------------------------------- tensor table


@dataclass(frozen=True, slots=True)
class _RawTensor:
    """A table entry as stored: `ne` innermost first, `offset` relative to the data."""

    name: str
    type_id: int
    ne: tuple[int, ...]
    offset: int


def _raw_tensors(cursor: _Cursor, n_tensors: int) -> list[_RawTensor]:
    _require_room(cursor, n_tensors, _MIN_TENSOR_BYTES, "tensors")
    found: dict[str, _RawTensor] = {}
    for i in range(n_tensors):
        tensor = _raw_tensor(cursor, i)
        if tensor.name in found:
            raise FormatError(f"{cursor.where}: tensor {quote(tensor.name)} appears twice")
        found[tensor.name] = tensor
    return list(found.values())


def _raw_tensor(cursor: _Cursor, i: int) -> _RawTensor:
    raw = cursor.string(MAX_NAME_BYTES, f"the name of tensor {i}")
    name = _strict_text(raw, cursor.where, f"the name of tensor {i}")
    what = f"tensor {quote(name)}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise FormatError(
            f"{cursor.where}: {what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}"
        )
    ne = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, what))
    if 0 in ne:
        raise FormatError(f"{cursor.where}: {what} has a dimension of 0: ne={list(ne)}")
    if math.prod(ne) >= 1 << 63:
        raise FormatError(
            f"{cursor.where}: {what}: the product of ne={list(ne)} does not fit 63 bits"
        )
    return _RawTensor(name, cursor.u32(what), ne, cursor.u64(what))


def _alignment(metadata: dict[str, Any], types: dict[str, str], where: str) -> int:
    if "general.alignment" not in metadata:
        return DEFAULT_ALIGNMENT
    if types["general.alignment"] != "uint32":
        raise FormatError(
            f"{where}: general.alignment: expected a uint32, found "
            f"{types['general.alignment']}; the file is damaged"
        )
    alignment = int(metadata["general.alignment"])
    if alignment == 0 or alignment & (alignment - 1) or alignment > MAX_ALIGNMENT:
        raise FormatError(
            f"{where}: general.alignment: expected a power of two up to {MAX_ALIGNMENT}, found "
            f"{alignment}; the file is damaged"
        )
    return alignment


def _inherited_alignment(
    raw: list[_RawTensor], header_end: int, first: int, file: RangeFile
) -> int:
    """Return the alignment of a split member that states none.

    The format says the default; gguf-py uses the first file's and does not repeat the key. The
    file's size tells them apart, because both writers pad the last tensor.
    """
    starts = {_align(header_end, alignment): alignment for alignment in (first, DEFAULT_ALIGNMENT)}
    if len(starts) == 1 or not raw:
        return DEFAULT_ALIGNMENT
    last = max(raw, key=lambda tensor: tensor.offset)
    end = last.offset + _n_bytes(last, file.path)
    fits = [a for start, a in starts.items() if file.size == start + _align(end, a)]
    if len(fits) != 1:
        raise FormatError(
            f"{file.path}: no general.alignment, and the size fits neither the default "
            f"{DEFAULT_ALIGNMENT} nor the first file's {first}; merge the split set first"
        )
    return fits[0]


def _n_bytes(tensor: _RawTensor, where: str) -> int:
    """Return the size that type and shape give, 0 for an unknown type."""
    dtype = find_dtype(tensor.type_id)
    if dtype is None:
        return 0
    if tensor.ne[0] % dtype.block_weights:
        raise FormatError(
            f"{where}: tensor {quote(tensor.name)}: a row of {tensor.ne[0]} weights is not a "
            f"multiple of {dtype.name}'s block of {dtype.block_weights}"
        )
    return dtype.row_bytes(tensor.ne[0]) * math.prod(tensor.ne[1:])


def _place(
    raw: list[_RawTensor], data_offset: int, alignment: int, file: RangeFile, warnings: list[str]
) -> list[GgufTensor]:
    """Return the tensors by ascending offset; check that they fit, in order, without overlap."""
    found: list[GgufTensor] = []
    ordered = sorted(raw, key=lambda tensor: tensor.offset)
    limits = [*(tensor.offset for tensor in ordered), file.size - data_offset][1:]
    position, previous = 0, "the header"
    for entry, limit in zip(ordered, limits, strict=True):
        what = f"{file.path}: tensor {quote(entry.name)}"
        _check_position(entry.offset, position, previous, alignment, what)
        if entry.offset - position >= alignment:
            warnings.append(
                f"{what}: {entry.offset - position} unused bytes between {quote(previous)} and it"
            )
        tensor = _tensor(entry, data_offset, limit, file)
        if not tensor.dtype.is_known:
            warnings.append(f"{what}: tensor type number {entry.type_id} is not known")
        _check_end(tensor, file.size, what)
        found.append(tensor)
        position, previous = entry.offset + tensor.n_bytes, entry.name
    _warn_trailing(file, data_offset + position, alignment, warnings)
    return found


def _check_position(offset: int, expected: int, previous: str, alignment: int, what: str) -> None:
    if offset % alignment:
        raise FormatError(
            f"{what}: data offset {offset} is not a multiple of the alignment {alignment}"
        )
    if offset < expected:
        raise FormatError(
            f"{what}: data offset {offset} overlaps {quote(previous)}, which ends at {expected}"
        )


def _tensor(entry: _RawTensor, data_offset: int, limit: int, file: RangeFile) -> GgufTensor:
    """Return the finished tensor; one of unknown type reaches to `limit`, the next one's offset."""
    dtype = find_dtype(entry.type_id)
    if dtype is None:
        dtype, n_bytes = unknown_dtype(entry.type_id), max(0, limit - entry.offset)
    else:
        n_bytes = _n_bytes(entry, file.path)
    return GgufTensor(entry.name, dtype, entry.ne[::-1], data_offset + entry.offset, n_bytes)


def _check_end(tensor: GgufTensor, file_size: int, what: str) -> None:
    end = tensor.offset + tensor.n_bytes
    if end > file_size:
        raise FormatError(
            f"{what}: truncated: expected {tensor.n_bytes} bytes at offset {tensor.offset}, but "
            f"the file has {file_size} bytes: {end - file_size} bytes missing; fetch the file again"
        )


def _warn_trailing(file: RangeFile, end: int, alignment: int, warnings: list[str]) -> None:
    surplus = file.size - _align(end, alignment)
    if surplus > 0:
        warnings.append(f"{file.path}: {surplus} bytes after the last tensor and its padding")


def _hash_header(cursor: _Cursor, data_offset: int, file: RangeFile) -> str:
    """Hash [0, data start), or the whole file if it has no data and ends earlier."""
    end = min(data_offset, file.size)
    cursor.skip(end - cursor.position, "the padding before the data")
    return cursor.sha256_so_far()
