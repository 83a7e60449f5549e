"""The rules about tables in memory (docs/format.md): pure functions that return or raise RuleError.

Counts and sizes are compared with the bytes that exist before anything is computed from them, and
sums that could overflow are made of Python integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import format as fmt
from colibri_tools.container.format import Group, PartRole, Role, SectionKind, Stream, align
from colibri_tools.dtypes import FIRST_OTHER_ID, DType, find_dtype
from colibri_tools.errors import FormatError, quote

__all__ = [
    "RuleError",
    "check_alignment",
    "check_cells",
    "check_layouts",
    "check_moe_rows",
    "check_page0",
    "check_rows",
    "check_section_table",
    "check_tensors",
]

Array = npt.NDArray[Any]
Checksum = Callable[[bytes], int]

# Built once: `x in set(Enum)` in a loop over a large table would dominate it.
_ROLES, _GROUPS, _PART_ROLES, _STREAMS = map(frozenset, (Role, Group, PartRole, Stream))
_SECTION_KINDS = frozenset(SectionKind)

_NO_CONTAINER = "this is no container, 'colibri repack' makes one from a checkpoint"
_NEWER = "a newer colibri-tools is needed"


class RuleError(FormatError):
    """A container breaks a numbered rule of docs/format.md.

    `rule` is its number; `layer`, `expert`, `tensor` and `offset` say where, as far as known.
    """

    def __init__(
        self,
        rule: int,
        place: str,
        what: str,
        expected: object,
        found: object,
        *,
        layer: int | None = None,
        expert: int | None = None,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(
            f"{place}: {what}: expected {expected}, found {found} (format rule {rule})"
        )
        self.rule = rule
        self.layer = layer
        self.expert = expert
        self.tensor = tensor
        self.offset = offset


# -- page 0 --------------------------------------------------------------------------------------


def check_page0(raw: bytes, real_size: int, crc32c: Checksum) -> np.void:
    """Check page 0 and return it as a PAGE0_DTYPE record (rules 1-6, 10)."""
    if len(raw) != fmt.PAGE0_BYTES:
        found = f"a file of {len(raw)} bytes; {_NO_CONTAINER}"
        raise RuleError(1, "page 0", "bytes", fmt.PAGE0_BYTES, found)
    page: np.void = np.frombuffer(raw, fmt.PAGE0_DTYPE)[0]
    _check_identity(page, raw, crc32c)
    check_alignment(int(page["alignment"]))
    if int(page["file_size"]) != real_size:
        change = "cut" if real_size < int(page["file_size"]) else "grown"
        found = f"{page['file_size']}; the file was {change}, get it again"
        raise RuleError(5, "page 0", "file_size", f"{real_size}, the file's real size", found)
    n_sections = int(page["n_sections"])
    if not len(fmt.REQUIRED_SECTIONS) <= n_sections <= fmt.MAX_SECTIONS:
        raise RuleError(6, "page 0", "n_sections", f"7 ... {fmt.MAX_SECTIONS}", n_sections)
    unused = raw[128 + n_sections * fmt.SECTION_DTYPE.itemsize : 4092]
    if any(unused) or any(int(page[name]) for name in ("zero0", "zero1", "zero2")):
        raise RuleError(10, "page 0", "undescribed bytes", "zero", "other values")
    return page


def _check_identity(page: np.void, raw: bytes, crc32c: Checksum) -> None:
    if raw[:8] != fmt.MAGIC:
        found = f"{quote(raw[:8].decode('latin-1'))}; {_NO_CONTAINER}"
        if not any(raw):
            found = "zeros, as in an unfinished file"
        raise RuleError(1, "page 0", "magic", quote(fmt.MAGIC.decode()), found)
    if page["version"] != fmt.VERSION:
        raise RuleError(1, "page 0", "version", fmt.VERSION, page["version"])
    if page["page0_bytes"] != fmt.PAGE0_BYTES:
        raise RuleError(1, "page 0", "page0_bytes", fmt.PAGE0_BYTES, page["page0_bytes"])
    found_crc = crc32c(raw[:-4])
    if found_crc != page["crc32c"]:
        raise RuleError(
            4, "page 0", "CRC-32C", f"{int(page['crc32c']):08x}", f"{found_crc:08x}; it is damaged"
        )
    features = int(page["required_features"])
    if features:
        bits = ", ".join(str(bit) for bit in range(64) if features >> bit & 1)
        found = f"bit {bits}; {_NEWER}"
        raise RuleError(2, "page 0", "required_features", "none", found)


def check_alignment(alignment: int) -> None:
    """Check the alignment (rule 3)."""
    power = alignment & (alignment - 1) == 0
    if not power or not fmt.MIN_ALIGNMENT <= alignment <= fmt.MAX_ALIGNMENT:
        expected = f"a power of two, {fmt.MIN_ALIGNMENT} ... {fmt.MAX_ALIGNMENT}"
        raise RuleError(3, "page 0", "alignment", expected, alignment)


def section_label(kind: int) -> str:
    """Return a section's name for messages."""
    known = kind in _SECTION_KINDS
    return SectionKind(kind).label if known else f"unknown section {kind}"


def check_section_table(page: np.void) -> list[tuple[int, int, int]]:
    """Return (kind, offset, bytes) of every section (rules 6-8, all but the zero bytes)."""
    table = page["sections"][: int(page["n_sections"])]
    end, previous = fmt.PAGE0_BYTES, 0
    sections = []
    for entry in table:
        kind, offset, n_bytes = int(entry["kind"]), int(entry["offset"]), int(entry["n_bytes"])
        label = f"section {quote(section_label(kind))}"
        _check_section_kind(entry, previous, label)
        expected = align(end, fmt.DATUM_ALIGN)
        if offset != expected:
            raise RuleError(7, "page 0", f"{label}: offset", expected, offset)
        end = offset + n_bytes
        if end - fmt.PAGE0_BYTES > fmt.MAX_METADATA_BYTES:
            raise RuleError(7, "page 0", f"{label}: end of the metadata", "at most 128 MiB", end)
        previous = kind
        sections.append((kind, offset, n_bytes))
    missing = set(fmt.REQUIRED_SECTIONS) - {kind for kind, _, _ in sections}
    if missing:
        raise RuleError(6, "page 0", "sections", "kinds 1 ... 7", f"no {min(missing).label}")
    _check_regions(page, end)
    return sections


def _check_section_kind(entry: np.void, previous: int, label: str) -> None:
    kind, flags = int(entry["kind"]), int(entry["flags"])
    if kind <= previous:
        raise RuleError(6, "page 0", f"{label}: kind", f"above {previous}", kind)
    if flags & ~fmt.SECTION_REQUIRED or int(entry["zero"]):
        raise RuleError(10, "page 0", f"{label}: undescribed bits", "zero", "other values")
    required = bool(flags & fmt.SECTION_REQUIRED)
    if kind in fmt.REQUIRED_SECTIONS:
        if not required:
            raise RuleError(6, "page 0", f"{label}: flags", "bit 0 set", flags)
    elif required:
        raise RuleError(6, "page 0", label, "kinds 1 ... 7", f"an unknown kind; {_NEWER}")


def _check_regions(page: np.void, metadata_end: int) -> None:
    metadata_bytes, data_offset = int(page["metadata_bytes"]), int(page["data_offset"])
    expert_offset, alignment = int(page["expert_offset"]), int(page["alignment"])
    if metadata_bytes != metadata_end - fmt.PAGE0_BYTES:
        raise RuleError(
            7, "page 0", "metadata_bytes", metadata_end - fmt.PAGE0_BYTES, metadata_bytes
        )
    highest = fmt.PAGE0_BYTES + 2 * (metadata_bytes + (8 << 20))
    if not metadata_end <= data_offset <= highest or data_offset % alignment:
        expected = f"a multiple of {alignment} in {metadata_end} ... {highest}"
        raise RuleError(8, "page 0", "data_offset", expected, data_offset)
    if not data_offset <= expert_offset <= int(page["file_size"]) or expert_offset % alignment:
        expected = f"a multiple of {alignment} in {data_offset} ... {page['file_size']}"
        raise RuleError(14, "page 0", "expert_offset", expected, expert_offset)


# -- resident directory --------------------------------------------------------------------------


_TENSOR_FIELDS = tuple(
    name for name in fmt.TENSOR_DTYPE.names or () if name not in ("zero", "sha256")
)


def check_tensors(table: Array, names: Sequence[str], page: np.void, n_layers: int) -> None:
    """Check the entries of the resident directory (rules 14, 15, 17); names are checked already."""
    columns = [table[field].tolist() for field in _TENSOR_FIELDS]
    entries = [dict(zip(_TENSOR_FIELDS, row, strict=True)) for row in zip(*columns, strict=True)]
    for i in np.flatnonzero(table["zero"].any(axis=1))[:1]:
        raise _tensor_error(14, entries[i], names[i], "undescribed bits", "zero", "other values")
    seen: set[tuple[int, int]] = set()
    for entry, name in zip(entries, names, strict=True):
        _check_tensor_fields(entry, name, n_layers)
        _check_role(entry, name, seen)
        _check_tensor_size(entry, name)
    _check_sequence(entries, names, page)
    _check_aliases(table, entries, names)


def _tensor_error(
    rule: int, entry: Mapping[str, Any], name: str, what: str, expected: object, found: object
) -> RuleError:
    layer = entry["layer"] if entry["layer"] >= 0 else None
    return RuleError(rule, f"tensor {quote(name)}", what, expected, found, tensor=name, layer=layer)


def _check_tensor_fields(entry: Mapping[str, Any], name: str, n_layers: int) -> None:
    if entry["flags"] & ~fmt.TENSOR_ALIAS:
        raise _tensor_error(14, entry, name, "undescribed bits", "zero", "other values")
    if not entry["flags"] and entry["alias_of"]:
        raise _tensor_error(14, entry, name, "alias_of", 0, entry["alias_of"])
    if entry["group"] not in _GROUPS:
        raise _tensor_error(14, entry, name, "group", "1, 2 or 3", entry["group"])
    if not -1 <= entry["layer"] < n_layers:
        raise _tensor_error(17, entry, name, "layer", f"-1 ... {n_layers - 1}", entry["layer"])


def _check_role(entry: Mapping[str, Any], name: str, seen: set[tuple[int, int]]) -> None:
    role, optional = entry["role"], entry["group"] == Group.OPTIONAL
    if role == Role.OTHER or role not in _ROLES:
        if not optional:
            raise _tensor_error(17, entry, name, "role", "a role of the table", role)
        return
    key = (role, entry["layer"])
    if key in seen:
        raise _tensor_error(17, entry, name, f"role {Role(role).label}", "once per layer", "twice")
    seen.add(key)


def _check_tensor_size(entry: Mapping[str, Any], name: str) -> None:
    n_dims = entry["n_dims"]
    if not 1 <= n_dims <= fmt.MAX_DIMS:
        raise _tensor_error(15, entry, name, "n_dims", f"1 ... {fmt.MAX_DIMS}", n_dims)
    shape = entry["shape"]
    if any(shape[n_dims:]):
        raise _tensor_error(15, entry, name, "unused dimensions", "zero", shape[n_dims:])
    problem = size_problem(entry["type"], shape[:n_dims], entry["n_bytes"])
    if problem:
        raise _tensor_error(15, entry, name, *problem)


def size_problem(
    type_id: int, shape: Sequence[int], n_bytes: int
) -> tuple[str, object, object] | None:
    """Return (what, expected, found) if a tensor's type, shape and size do not agree (rule 15)."""
    dtype = stored_dtype(type_id)
    if dtype is None:
        return "type", "a GGML type number", type_id
    if not all(1 <= dim <= fmt.MAX_DIM for dim in shape):
        return "shape", f"1 ... {fmt.MAX_DIM}", list(shape)
    if math.prod(shape) > fmt.MAX_SIZE:
        return "number of weights", "below 2^63", math.prod(shape)
    if shape[-1] % dtype.block_weights:
        return "last dimension", f"a multiple of {dtype.block_weights} for {dtype.name}", shape[-1]
    expected = math.prod(shape) // dtype.block_weights * dtype.block_bytes
    if expected > fmt.MAX_SIZE or n_bytes != expected:
        return "bytes", f"{expected} for {list(shape)} of {dtype.name}", n_bytes
    return None


def stored_dtype(type_id: int) -> DType | None:
    """Return the type with this number if a container can hold it, else None."""
    return find_dtype(type_id) if type_id < FIRST_OTHER_ID else None


def _check_sequence(
    entries: Sequence[Mapping[str, Any]], names: Sequence[str], page: np.void
) -> None:
    end, group, previous = int(page["data_offset"]), 0, 0
    alignment = int(page["alignment"])
    for entry, name in zip(entries, names, strict=True):
        if entry["group"] < previous:
            raise _tensor_error(14, entry, name, "group", f"at least {previous}", entry["group"])
        previous = entry["group"]
        if entry["flags"]:
            continue
        start = align(end, fmt.DATUM_ALIGN if entry["group"] == group else alignment)
        if entry["offset"] != start:
            raise _tensor_error(14, entry, name, "offset", start, entry["offset"])
        end, group = start + entry["n_bytes"], entry["group"]
        if end > int(page["expert_offset"]):
            raise _tensor_error(14, entry, name, "end", f"at most {page['expert_offset']}", end)
    if int(page["expert_offset"]) != align(end, alignment):
        raise RuleError(14, "page 0", "expert_offset", align(end, alignment), page["expert_offset"])


_ALIAS_FIELDS = ("offset", "n_bytes", "type", "n_dims", "shape", "crc32c", "sha256")


def _check_aliases(
    table: Array, entries: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    aliases = np.flatnonzero(table["flags"])
    targets = table["alias_of"][aliases]

    def check(field: str, bad: Array, expected: str) -> None:
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            i, target = int(aliases[at]), int(targets[at])
            found = target if field == "alias_of" else f"another value than entry {target}"
            raise _tensor_error(14, entries[i], names[i], field, expected, found)

    check("alias_of", targets >= len(table), "an entry that is no alias")
    check("alias_of", table["flags"][targets] != 0, "an entry that is no alias")
    for field in _ALIAS_FIELDS:
        differs = table[field][aliases] != table[field][targets]
        check(field, differs.any(axis=tuple(range(1, differs.ndim))), "that of its target")


# -- rows, expert index, layouts -----------------------------------------------------------------


def check_rows(rows: Array, n_columns: int) -> None:
    """Check the row table (rule 18)."""
    if not len(rows) <= fmt.MAX_ROWS or not n_columns <= fmt.MAX_COLUMNS:
        raise RuleError(18, "row table", "size", "at most 65536 by 65536", (len(rows), n_columns))
    if len(rows) * n_columns > fmt.MAX_CELLS:
        expected = f"at most {fmt.MAX_CELLS} for {len(rows)} rows of {n_columns}"
        raise RuleError(18, "row table", "cells", expected, len(rows) * n_columns)
    previous = (-1, -1)
    for i, row in enumerate(rows.tolist()):
        layer, stream, n_experts, flags, zero = row
        place = f"row {i}"
        if flags or np.any(zero):
            raise RuleError(18, place, "undescribed bytes", "zero", "other values", layer=layer)
        if stream not in _STREAMS or layer < 0:
            expected = "stream 0 or 1, layer 0 or more"
            raise RuleError(18, place, "stream and layer", expected, (stream, layer))
        if (stream, layer) <= previous:
            raise RuleError(18, place, "(stream, layer)", f"above {previous}", (stream, layer))
        if not 1 <= n_experts <= n_columns:
            raise RuleError(18, place, "n_experts", f"1 ... {n_columns}", n_experts, layer=layer)
        previous = (stream, layer)
    most = int(rows["n_experts"].max(initial=0))
    if most != n_columns:
        raise RuleError(18, "row table", "n_columns", most, n_columns)


def check_layouts(layouts: Array, hidden_size: int, file_size: int) -> None:
    """Check the layout table (rule 23, all but that each layout is used)."""
    if not 1 <= len(layouts) <= fmt.MAX_LAYOUTS:
        raise RuleError(23, "layout table", "layouts", f"1 ... {fmt.MAX_LAYOUTS}", len(layouts))
    raw = [entry.tobytes() for entry in layouts]
    if len(set(raw)) != len(raw):
        raise RuleError(23, "layout table", "layouts", "no two equal", "equal ones")
    _check_layout_zeros(layouts)
    parts = layouts["parts"]
    columns = [parts[name].tolist() for name in ("role", "type", "offset", "n_bytes", "shape")]
    sizes, counts = layouts["n_bytes"].tolist(), layouts["n_parts"].tolist()
    for i, (n_bytes, n_parts) in enumerate(zip(sizes, counts, strict=True)):
        fields = list(zip(*(column[i] for column in columns), strict=True))[:n_parts]
        _check_layout(f"layout {i}", n_bytes, fields, hidden_size, file_size)


def _check_layout_zeros(layouts: Array) -> None:
    counts, parts = layouts["n_parts"], layouts["parts"]
    wrong = (counts < 3) | (counts > len(PartRole))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise RuleError(23, f"layout {i}", "n_parts", f"3 ... {len(PartRole)}", counts[i])
    used = np.arange(fmt.MAX_PARTS) < counts[:, None]
    filled = np.ascontiguousarray(parts).view(np.uint64).reshape(*parts.shape, 8).any(axis=2)
    undescribed = (filled & ~used) | (parts["permutation"] != 0) | parts["zero"].any(axis=2)
    bad = undescribed.any(axis=1) | (layouts["flags"] != 0) | layouts["zero"].any(axis=1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        what = "flags, permutations and undescribed bytes"
        raise RuleError(23, f"layout {i}", what, "zero", "other values")


def _check_layout(
    place: str, n_bytes: int, parts: Sequence[Any], hidden_size: int, file_size: int
) -> None:
    """`parts` are (role, type, offset, bytes, shape)."""
    end, previous = 0, 0
    shapes: dict[int, list[int]] = {}
    for role, type_id, offset, part_bytes, shape in parts:
        if role <= previous or role not in _PART_ROLES:
            raise RuleError(23, place, "part role", f"above {previous}, at most 6", role)
        label = f"{place}, part {PartRole(role).label}"
        start = align(end, fmt.DATUM_ALIGN)
        if offset != start:
            raise RuleError(23, label, "offset", start, offset)
        problem = size_problem(type_id, shape, part_bytes)
        if problem:
            raise RuleError(23, label, *problem)
        shapes[role] = shape
        end, previous = offset + part_bytes, role
    if n_bytes != end or end > file_size:
        raise RuleError(23, place, "bytes", f"{end}, within the file of {file_size}", n_bytes)
    _check_part_shapes(place, shapes, hidden_size)


def _check_part_shapes(place: str, shapes: Mapping[int, list[int]], hidden_size: int) -> None:
    gate = shapes.get(PartRole.GATE)
    if gate is None or PartRole.UP not in shapes or PartRole.DOWN not in shapes:
        raise RuleError(23, place, "parts", "gate, up and down", sorted(shapes))
    width = gate[0]
    expected = {
        PartRole.GATE: [width, hidden_size],
        PartRole.UP: [width, hidden_size],
        PartRole.DOWN: [hidden_size, width],
        PartRole.GATE_BIAS: [1, width],
        PartRole.UP_BIAS: [1, width],
        PartRole.DOWN_BIAS: [1, hidden_size],
    }
    for role, shape in shapes.items():
        if shape != expected[PartRole(role)]:
            label = f"part {PartRole(role).label}: shape"
            raise RuleError(23, place, label, expected[PartRole(role)], shape)


def check_cells(cells: Array, rows: Array, layouts: Array, page: np.void) -> None:
    """Check the expert index (rules 19, 20, and of 23 that every layout is used)."""
    counts = rows["n_experts"].astype(np.int64)
    present = np.arange(cells.shape[1]) < counts[:, None]
    _check_absent_cells(cells, rows, present)
    blocks = cells[present]
    where = np.argwhere(present)
    _check_block_fields(blocks, where, rows, layouts)
    used = np.bincount(blocks["layout"], minlength=len(layouts))
    if not used.all():
        unused = int(np.flatnonzero(used == 0)[0])
        raise RuleError(23, f"layout {unused}", "use", "at least one block", "none")
    _check_block_places(blocks, where, rows, used, layouts, page)


def _cell_error(
    rule: int, rows: Array, row: int, expert: int, what: str, expected: object, found: object
) -> RuleError:
    layer = int(rows["layer"][row])
    place = f"layer {layer} expert {expert} (row {row})"
    return RuleError(rule, place, what, expected, found, layer=layer, expert=expert)


def _check_absent_cells(cells: Array, rows: Array, present: Array) -> None:
    raw = cells.view(np.uint64).reshape(*cells.shape, 8)
    bad = ~present & raw.any(axis=2)
    if bad.any():
        row, expert = (int(i) for i in np.argwhere(bad)[0])
        raise _cell_error(
            19, rows, row, expert, "cell", f"zero beyond {rows['n_experts'][row]}", "other values"
        )


def _check_block_fields(blocks: Array, where: Array, rows: Array, layouts: Array) -> None:
    def check(field: str, bad: Array, expected: str) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            row, expert = (int(n) for n in where[i])
            raise _cell_error(19, rows, row, expert, field, expected, blocks[field][i])

    check("flags", blocks["flags"] != fmt.CELL_PRESENT, "1")
    check("part", blocks["part"] != 0, "0")
    check("layout", blocks["layout"] >= len(layouts), f"below {len(layouts)}")
    expected = layouts["n_bytes"][blocks["layout"]]
    check("n_bytes", blocks["n_bytes"] != expected, "the bytes of its layout")


def _check_block_places(
    blocks: Array, where: Array, rows: Array, used: Array, layouts: Array, page: np.void
) -> None:
    alignment, expert_offset = int(page["alignment"]), int(page["expert_offset"])
    padded = [align(int(n), alignment) for n in layouts["n_bytes"]]
    end = expert_offset + sum(int(n) * size for n, size in zip(used, padded, strict=True))
    if end != int(page["file_size"]):
        expected_size = f"{end}, the end of all blocks"
        raise RuleError(20, "page 0", "file_size", expected_size, page["file_size"])

    def check(field: str, bad: Array, expected: object) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            row, expert = (int(n) for n in where[i])
            shown = expected[i] if isinstance(expected, np.ndarray) else expected
            raise _cell_error(20, rows, row, expert, field, shown, blocks[field][i])

    ranks = blocks["rank"]
    check("rank", ranks >= len(blocks), f"below {len(blocks)}")
    by_rank = np.full(len(blocks), -1, np.int64)
    by_rank[ranks] = np.arange(len(blocks))
    check("rank", by_rank[ranks] != np.arange(len(blocks)), "each rank once")
    sizes = np.array(padded, np.uint64)[blocks["layout"][by_rank]]
    starts = np.empty(len(blocks), np.uint64)
    # The sum is below 2^63: `end` above is a Python integer and equals the file's real size.
    starts[by_rank] = np.cumsum(sizes, dtype=np.uint64) - sizes + np.uint64(expert_offset)
    check("offset", blocks["offset"] != starts, starts)


def check_moe_rows(spec: Mapping[str, Any], rows: Array, table: Array) -> None:
    """Check the rows and routers against the spec (rule 24)."""
    main = rows[rows["stream"] == Stream.MAIN]
    expected = [layer for layer, is_moe in enumerate(spec["moe_layers"]) if is_moe]
    found = main["layer"].tolist()
    if found != expected:
        wrong = min(set(found) ^ set(expected))
        want = "a row" if wrong in expected else "no row"
        raise RuleError(24, f"layer {wrong}", "rows in stream 0", want, "not so", layer=wrong)
    n_layers = spec["n_layers"] + spec["n_mtp_layers"]
    last = int(rows["layer"].max())
    if last >= n_layers:
        raise RuleError(24, f"layer {last}", "rows", f"layers below {n_layers}", "a row")
    fewest = int(rows["n_experts"].min())
    if spec["top_k"] > fewest:
        raise RuleError(24, "spec", "top_k", f"at most the smallest row {fewest}", spec["top_k"])
    if not spec["executable"]:
        return
    routers = table[table["role"] == Role.ROUTER]
    n_rows = dict(zip(routers["layer"].tolist(), routers["shape"][:, 0].tolist(), strict=True))
    for layer, n_experts in zip(found, main["n_experts"].tolist(), strict=True):
        rows_found = n_rows.get(layer, "no router")
        if rows_found != n_experts:
            place = f"layer {layer}"
            raise RuleError(24, place, "rows of its router", n_experts, rows_found, layer=layer)
