"""From the bytes of a file to its checked metadata (rules 1-20, 23, 24; docs/format.md)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from colibri_tools.container import checks
from colibri_tools.container import format as fmt
from colibri_tools.container.checks import RuleError, section_label
from colibri_tools.container.format import SectionKind, align
from colibri_tools.container.kv import KvType, decode_kv
from colibri_tools.container.spec import check_spec
from colibri_tools.errors import quote

__all__ = ["BlobPlace", "ByteSource", "Metadata", "parse_metadata"]

_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)

Array = npt.NDArray[np.void]


class ByteSource(Protocol):
    """Something with a size from which ranges are read."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return exactly these bytes, which the caller knows to be within the size."""


@dataclass(frozen=True, slots=True)
class BlobPlace:
    """Where a carried source file lies in the container."""

    offset: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Metadata:
    """The checked metadata of a container; arrays are read-only."""

    page: np.void
    sections: tuple[tuple[int, int, int], ...]
    spec: dict[str, Any]
    spec_types: Mapping[str, KvType]
    provenance: dict[str, Any]
    blobs: dict[str, BlobPlace]
    tensors: Array
    names: tuple[str, ...]
    rows: Array
    cells: Array
    layouts: Array


def parse_metadata(source: ByteSource, crc32c: Callable[..., int]) -> Metadata:
    """Read and check everything in front of the data. Raises RuleError."""
    head = source.read(0, min(fmt.PAGE0_BYTES, source.size))
    page = checks.check_page0(head, source.size, crc32c)
    sections = checks.check_section_table(page)
    _check_zero_gaps(source, sections, int(page["data_offset"]))
    _check_checksums(source, page, crc32c)
    places = {kind: (offset, n_bytes) for kind, offset, n_bytes in sections}

    def load(kind: SectionKind) -> bytes:
        return source.read(*places[kind])

    _bound_kv(places)
    spec, spec_types = decode_kv(load(SectionKind.SPEC), "spec")
    check_spec(spec, spec_types)
    provenance, _ = decode_kv(load(SectionKind.PROVENANCE), "provenance")
    n_layers = spec["n_layers"] + spec["n_mtp_layers"]
    tensors, names = _parse_directory(load(SectionKind.DIRECTORY))
    checks.check_tensors(tensors, names, page, n_layers)
    rows, n_columns = _parse_rows(load(SectionKind.ROWS))
    layouts = _parse_layouts(load(SectionKind.LAYOUTS))
    checks.check_layouts(layouts, spec["hidden_size"], source.size)
    cells = _parse_cells(source, places[SectionKind.INDEX], len(rows), n_columns)
    checks.check_cells(cells, rows, layouts, page)
    checks.check_moe_rows(spec, rows, tensors)
    return Metadata(
        page=page,
        sections=tuple(sections),
        spec=spec,
        spec_types=spec_types,
        provenance=provenance,
        blobs=_parse_blobs(source, *places[SectionKind.BLOBS]),
        tensors=tensors,
        names=names,
        rows=rows,
        cells=cells,
        layouts=layouts,
    )


def _check_zero_gaps(
    source: ByteSource, sections: list[tuple[int, int, int]], data_offset: int
) -> None:
    end = fmt.PAGE0_BYTES
    for _, offset, n_bytes in sections:
        if any(source.read(end, offset - end)):
            raise RuleError(7, f"bytes {end} ... {offset}", "gap", "zero", "other values")
        end = offset + n_bytes
    for start in range(end, data_offset, _CHUNK):
        n_bytes = min(_CHUNK, data_offset - start)
        chunk = source.read(start, n_bytes)
        if chunk != _ZEROS[:n_bytes]:
            at = start + next(i for i, byte in enumerate(chunk) if byte)
            raise RuleError(8, "reserve", f"byte {at}", "zero", "another value", offset=at)


def _check_checksums(source: ByteSource, page: np.void, crc32c: Callable[..., int]) -> None:
    table = page["sections"][: int(page["n_sections"])]
    if hashlib.sha256(table.tobytes()).digest() != page["id"].tobytes():
        raise RuleError(9, "page 0", "id", "the SHA-256 of the section table", "another value")
    for entry in table:
        crc, digest = 0, hashlib.sha256()
        start, n_bytes = int(entry["offset"]), int(entry["n_bytes"])
        for offset in range(start, start + n_bytes, _CHUNK):
            chunk = source.read(offset, min(_CHUNK, start + n_bytes - offset))
            crc = crc32c(chunk, crc)
            digest.update(chunk)
        label = f"section {quote(section_label(int(entry['kind'])))}"
        if crc != entry["crc32c"]:
            expected = f"{int(entry['crc32c']):08x}"
            found = f"{crc:08x}; it is damaged"
            raise RuleError(9, label, "CRC-32C", expected, found, offset=start)
        if digest.digest() != entry["sha256"].tobytes():
            raise RuleError(9, label, "SHA-256", "that of page 0", "another one", offset=start)


def _bound_kv(places: Mapping[int, tuple[int, int]]) -> None:
    for kind in (SectionKind.SPEC, SectionKind.PROVENANCE):
        n_bytes = places[kind][1]
        if n_bytes > fmt.MAX_KV_BYTES:
            raise RuleError(11, kind.label, "bytes", f"at most {fmt.MAX_KV_BYTES}", n_bytes)


def _parse_directory(data: bytes) -> tuple[Array, tuple[str, ...]]:
    place = "resident directory"
    head_bytes, entry_bytes = fmt.DIRECTORY_HEAD_DTYPE.itemsize, fmt.TENSOR_DTYPE.itemsize
    head = _parse_head(data, fmt.DIRECTORY_HEAD_DTYPE, place, 16)
    n_tensors, names_bytes = int(head["n_tensors"]), int(head["names_bytes"])
    if head["entry_bytes"] != entry_bytes:
        raise RuleError(16, place, "entry_bytes", entry_bytes, head["entry_bytes"])
    if n_tensors > fmt.MAX_TENSORS:
        raise RuleError(16, place, "n_tensors", f"at most {fmt.MAX_TENSORS}", n_tensors)
    names_start = head_bytes + n_tensors * entry_bytes
    if names_start + names_bytes != len(data):
        raise RuleError(16, place, "bytes", names_start + names_bytes, len(data))
    table = np.frombuffer(data, fmt.TENSOR_DTYPE, n_tensors, head_bytes)
    return table, _parse_names(table, data[names_start:])


def _parse_names(table: Array, raw: bytes) -> tuple[str, ...]:
    names: list[str] = []
    end = 0
    offsets, sizes = table["name_offset"].tolist(), table["name_bytes"].tolist()
    for i, (offset, n_bytes) in enumerate(zip(offsets, sizes, strict=True)):
        place = f"resident directory, entry {i}"
        if offset != end:
            raise RuleError(16, place, "name_offset", end, offset)
        end += n_bytes
        if not 1 <= n_bytes <= fmt.MAX_NAME_BYTES or end > len(raw):
            raise RuleError(16, place, "name_bytes", f"1 ... {fmt.MAX_NAME_BYTES}", n_bytes)
        names.append(_decode_name(raw[offset:end], 16, place))
    if end != len(raw):
        raise RuleError(16, "resident directory", "end of the names", len(raw), end)
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise RuleError(16, f"tensor {quote(twice)}", "name", "unique", "twice", tensor=twice)
    return tuple(names)


def _decode_name(raw: bytes, rule: int, place: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise RuleError(rule, place, "name", "UTF-8", quote(raw)) from None


def _parse_rows(data: bytes) -> tuple[Array, int]:
    place = "row table"
    head = _parse_head(data, fmt.ROW_HEAD_DTYPE, place, 18)
    if head["entry_bytes"] != fmt.ROW_DTYPE.itemsize or head["zero"]:
        raise RuleError(18, place, "entry_bytes", fmt.ROW_DTYPE.itemsize, head["entry_bytes"])
    rows = _parse_entries(data, fmt.ROW_HEAD_DTYPE, fmt.ROW_DTYPE, int(head["n_rows"]), place, 18)
    checks.check_rows(rows, int(head["n_columns"]))
    return rows, int(head["n_columns"])


def _parse_layouts(data: bytes) -> Array:
    place = "layout table"
    head = _parse_head(data, fmt.LAYOUT_HEAD_DTYPE, place, 23)
    if head["entry_bytes"] != fmt.LAYOUT_DTYPE.itemsize:
        raise RuleError(23, place, "entry_bytes", fmt.LAYOUT_DTYPE.itemsize, head["entry_bytes"])
    n_layouts = int(head["n_layouts"])
    return _parse_entries(data, fmt.LAYOUT_HEAD_DTYPE, fmt.LAYOUT_DTYPE, n_layouts, place, 23)


def _parse_cells(
    source: ByteSource, section: tuple[int, int], n_rows: int, n_columns: int
) -> Array:
    offset, n_bytes = section
    expected = n_rows * n_columns * fmt.CELL_DTYPE.itemsize
    if n_bytes != expected:
        raise RuleError(19, "expert index", "bytes", f"{expected} for the row table", n_bytes)
    cells = np.frombuffer(source.read(offset, n_bytes), fmt.CELL_DTYPE)
    return cells.reshape(n_rows, n_columns)


def _parse_head(data: bytes, dtype: np.dtype[np.void], place: str, rule: int) -> np.void:
    if len(data) < dtype.itemsize:
        raise RuleError(rule, place, "bytes", f"at least {dtype.itemsize}", len(data))
    head: np.void = np.frombuffer(data, dtype, 1)[0]
    return head


def _parse_entries(
    data: bytes,
    head: np.dtype[np.void],
    entry: np.dtype[np.void],
    count: int,
    place: str,
    rule: int,
) -> Array:
    expected = head.itemsize + count * entry.itemsize
    if len(data) != expected:
        raise RuleError(rule, place, "bytes", f"{expected} for {count} entries", len(data))
    return np.frombuffer(data, entry, count, head.itemsize)


def _parse_blobs(source: ByteSource, start: int, n_bytes: int) -> dict[str, BlobPlace]:
    place = "blobs"
    if n_bytes < 8:
        raise RuleError(13, place, "bytes", "at least 8", n_bytes)
    count, zero = np.frombuffer(source.read(start, 8), "<u4").tolist()
    entry_bytes = fmt.BLOB_ENTRY_DTYPE.itemsize
    if zero or count > fmt.MAX_BLOBS or 8 + count * entry_bytes > n_bytes:
        raise RuleError(13, place, "count", f"at most {fmt.MAX_BLOBS}", count | zero << 32)
    table = np.frombuffer(source.read(start + 8, count * entry_bytes), fmt.BLOB_ENTRY_DTYPE)
    names, end = _parse_blob_names(source, start, n_bytes, table)
    blobs: dict[str, BlobPlace] = {}
    for name, entry in zip(names, table.tolist(), strict=True):
        _, _, data_offset, data_bytes, zero = entry
        label = f"blob {quote(name)}"
        if data_offset != align(end, fmt.DATUM_ALIGN) or zero:
            raise RuleError(13, label, "data_offset", align(end, fmt.DATUM_ALIGN), data_offset)
        if data_bytes > n_bytes - data_offset:
            raise RuleError(13, label, "data_bytes", f"at most {n_bytes - data_offset}", data_bytes)
        if any(source.read(start + end, data_offset - end)):
            raise RuleError(13, label, "gap in front", "zero", "other values")
        end = data_offset + data_bytes
        blobs[name] = BlobPlace(start + data_offset, data_bytes)
    if end != n_bytes:
        raise RuleError(13, place, "end of the last blob", n_bytes, end)
    return blobs


def _parse_blob_names(
    source: ByteSource, start: int, section_bytes: int, table: Array
) -> tuple[list[str], int]:
    end = 8 + table.nbytes
    names: list[str] = []
    previous = b""
    for i, (offset, n_bytes) in enumerate(table[["name_offset", "name_bytes"]].tolist()):
        place = f"blobs, entry {i}"
        if offset != end:
            raise RuleError(13, place, "name_offset", end, offset)
        if not 1 <= n_bytes <= fmt.MAX_NAME_BYTES or end + n_bytes > section_bytes:
            raise RuleError(13, place, "name_bytes", f"1 ... {fmt.MAX_NAME_BYTES}", n_bytes)
        raw = source.read(start + end, n_bytes)
        name = _decode_name(raw, 13, place)
        if raw <= previous or any(c in name for c in "\0/\\"):
            raise RuleError(13, place, "name", "ascending, without NUL, / and \\", quote(name))
        names.append(name)
        previous, end = raw, end + n_bytes
    return names, end
