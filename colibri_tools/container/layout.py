"""From *what* a container holds to *where* every byte of it lies. Pure functions, no I/O.

Checksums are fixed-size fields, so all offsets and sizes are known before any data is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import format as fmt
from colibri_tools.container.format import Group, PartRole, Role, SectionKind, align
from colibri_tools.container.kv import encode_kv
from colibri_tools.container.spec import SPEC_KEYS
from colibri_tools.dtypes import FIRST_OTHER_ID, DType
from colibri_tools.errors import FormatError, UsageError, quote

__all__ = [
    "Accounting",
    "ContainerPlan",
    "PartSpec",
    "PlannedLayout",
    "PlannedPart",
    "PlannedSection",
    "PlannedTensor",
    "ResidentItem",
    "RowSpec",
    "account",
    "plan_container",
]


@dataclass(frozen=True, slots=True)
class ResidentItem:
    """A tensor outside the experts. `alias_of` names the tensor whose bytes it shares."""

    name: str
    role: Role
    group: Group
    layer: int
    dtype: DType
    shape: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of an expert block: `rows` outputs by `cols` inputs (a bias is 1 by n)."""

    role: PartRole
    dtype: DType
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One MoE layer of a stream (`Stream`); `layouts` has the layout number of each expert."""

    layer: int
    stream: int
    n_experts: int
    layouts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A resident tensor with its place. An alias has the place of its target."""

    item: ResidentItem
    offset: int
    n_bytes: int
    alias_index: int | None

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.n_bytes


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part with its place in the payload."""

    role: PartRole
    dtype: DType
    rows: int
    cols: int
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """The inside of a block."""

    n_bytes: int
    parts: tuple[PlannedPart, ...]

    def part(self, role: PartRole) -> PlannedPart | None:
        """Return the part with this role, or None."""
        return next((part for part in self.parts if part.role == role), None)


@dataclass(frozen=True, slots=True)
class PlannedSection:
    """A metadata section with its place in the file."""

    kind: int
    offset: int
    n_bytes: int

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.n_bytes


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where the bytes of a file are; all but the last two add up to `file_bytes`.

    `metadata_bytes` runs from page 0 to the data and includes the reserve; `index_bytes` is the
    expert index alone, a part of it.
    """

    page0_bytes: int
    metadata_bytes: int
    resident_bytes: int
    expert_bytes: int
    padding_bytes: int
    file_bytes: int
    padding_share: float
    index_bytes: int


@dataclass(frozen=True, eq=False)
class ContainerPlan:
    """Everything about a container but the checksums and the payload bytes.

    `tensors` is in the order of the directory and of the file. `cells` is the expert index,
    [n_rows, n_columns] CELL_DTYPE, read-only, with offset, n_bytes, layout, rank and flags set.
    `order[rank]` is the (row, expert) of a block.
    """

    alignment: int
    spec: Mapping[str, Any]
    blobs: Mapping[str, bytes]
    provenance: Mapping[str, Any]
    tokenizer: bytes | None
    tensors: tuple[PlannedTensor, ...]
    layouts: tuple[PlannedLayout, ...]
    rows: tuple[RowSpec, ...]
    order: tuple[tuple[int, int], ...]
    cells: npt.NDArray[np.void]
    sections: tuple[PlannedSection, ...]
    metadata_bytes: int
    data_offset: int
    expert_offset: int
    file_size: int

    @property
    def n_blocks(self) -> int:
        """The number of experts of all rows."""
        return len(self.order)

    def tensor(self, name: str) -> PlannedTensor:
        """Return the tensor with this name. Raises UsageError if there is none."""
        for planned in self.tensors:
            if planned.item.name == name:
                return planned
        raise UsageError(f"the plan has no tensor {quote(name)}")

    def layout_of(self, row: int, expert: int) -> PlannedLayout:
        """Return the layout of a block. Raises UsageError if there is no such block."""
        if not (0 <= row < len(self.rows) and 0 <= expert < self.rows[row].n_experts):
            raise UsageError(f"the plan has no block of row {row}, expert {expert}")
        return self.layouts[self.rows[row].layouts[expert]]

    def accounting(self) -> Accounting:
        """Return where the bytes of the file are."""
        return account(
            data_offset=self.data_offset,
            resident_bytes=sum(t.n_bytes for t in self.tensors if t.alias_index is None),
            expert_bytes=int(self.cells["n_bytes"].sum()),
            file_size=self.file_size,
            index_bytes=int(self.cells.nbytes),
        )


def account(
    *, data_offset: int, resident_bytes: int, expert_bytes: int, file_size: int, index_bytes: int
) -> Accounting:
    """Return the accounting of docs/format.md, section 6."""
    padding = file_size - data_offset - resident_bytes - expert_bytes
    return Accounting(
        page0_bytes=fmt.PAGE0_BYTES,
        metadata_bytes=data_offset - fmt.PAGE0_BYTES,
        resident_bytes=resident_bytes,
        expert_bytes=expert_bytes,
        padding_bytes=padding,
        file_bytes=file_size,
        padding_share=padding / file_size,
        index_bytes=index_bytes,
    )


def plan_container(
    *,
    spec: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    provenance: Mapping[str, Any],
    residents: Sequence[ResidentItem],
    layouts: Sequence[Sequence[PartSpec]],
    rows: Sequence[RowSpec],
    order: Sequence[tuple[int, int]] | None = None,
    alignment: int = fmt.MIN_ALIGNMENT,
    tokenizer: bytes | None = None,
) -> ContainerPlan:
    """Return where everything goes.

    `residents` are sorted by group, keeping their order within one. `layouts` are lists of parts
    with ascending roles. `order` is every (row, expert), the hottest first; without it the rows
    follow each other and experts ascend. `tokenizer` is the section of tables for C. The plan is
    not checked against the rules as a whole; `ContainerWriter` does that before it creates a file.
    Raises UsageError for arguments that contradict each other, FormatError for what the format
    cannot hold.
    """
    if alignment not in (1 << i for i in range(12, 22)):
        raise UsageError(f"alignment: expected a power of two, 4096 ... 2097152, found {alignment}")
    items = sorted(residents, key=lambda item: item.group)
    planned_layouts = tuple(_plan_layout(parts) for parts in layouts)
    order = _plan_order(rows, order)
    sizes = _section_sizes(spec, blobs, provenance, items, rows, len(planned_layouts))
    if tokenizer is not None:
        sizes[SectionKind.TOKENIZER] = len(tokenizer)
    sections, metadata_bytes = _plan_sections(sizes)
    reserve = max(fmt.MIN_RESERVE_BYTES, -(-metadata_bytes // 4))
    data_offset = align(fmt.PAGE0_BYTES + metadata_bytes + reserve, alignment)
    tensors, end = _plan_tensors(items, data_offset, alignment)
    expert_offset = align(end, alignment)
    cells, file_size = _plan_cells(rows, planned_layouts, order, expert_offset, alignment)
    return ContainerPlan(
        alignment=alignment,
        spec=dict(spec),
        blobs=dict(sorted(blobs.items(), key=lambda pair: pair[0].encode())),
        provenance=dict(provenance),
        tokenizer=tokenizer,
        tensors=tensors,
        layouts=planned_layouts,
        rows=tuple(rows),
        order=tuple(order),
        cells=cells,
        sections=sections,
        metadata_bytes=metadata_bytes,
        data_offset=data_offset,
        expert_offset=expert_offset,
        file_size=file_size,
    )


def tensor_bytes(dtype: DType, shape: Sequence[int], what: str) -> int:
    """Return the size of a tensor. Raises FormatError, naming `what`, if it cannot be stored."""
    if dtype.id >= FIRST_OTHER_ID or not dtype.is_known:
        raise FormatError(f"{what}: the container format has no type {dtype.name}")
    if not 1 <= len(shape) <= fmt.MAX_DIMS or not all(1 <= dim <= fmt.MAX_DIM for dim in shape):
        raise FormatError(
            f"{what}: expected 1 ... {fmt.MAX_DIMS} dimensions of at least 1, found {tuple(shape)}"
        )
    if shape[-1] % dtype.block_weights:
        raise FormatError(
            f"{what}: a row of {shape[-1]} weights is not a multiple of "
            f"{dtype.name}'s block of {dtype.block_weights}"
        )
    n_bytes = dtype.row_bytes(shape[-1])
    for dim in shape[:-1]:
        n_bytes *= dim
    return n_bytes


def blob_layout(blobs: Mapping[str, bytes]) -> tuple[list[tuple[str, int, int]], int]:
    """Return (name, offset in the section, bytes) of each blob in order, and the section's size."""
    names = sorted(blobs, key=str.encode)
    end = 8 + len(names) * fmt.BLOB_ENTRY_DTYPE.itemsize + sum(len(n.encode()) for n in names)
    places = []
    for name in names:
        start = align(end, fmt.DATUM_ALIGN)
        places.append((name, start, len(blobs[name])))
        end = start + len(blobs[name])
    return places, end


def _plan_layout(parts: Sequence[PartSpec]) -> PlannedLayout:
    planned: list[PlannedPart] = []
    end = 0
    for part in parts:
        n_bytes = tensor_bytes(part.dtype, (part.rows, part.cols), f"part {part.role.label}")
        start = align(end, fmt.DATUM_ALIGN)
        planned.append(PlannedPart(part.role, part.dtype, part.rows, part.cols, start, n_bytes))
        end = start + n_bytes
    return PlannedLayout(end, tuple(planned))


def _plan_order(
    rows: Sequence[RowSpec], order: Sequence[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    by_id = [(row, expert) for row, spec in enumerate(rows) for expert in range(spec.n_experts)]
    for row, spec in enumerate(rows):
        if len(spec.layouts) != spec.n_experts:
            raise UsageError(
                f"row {row}: expected a layout for each of its {spec.n_experts} experts, "
                f"found {len(spec.layouts)}"
            )
    if order is None:
        return by_id
    if sorted(order) != by_id:
        raise UsageError(
            f"order: expected every (row, expert) once, {len(by_id)} in all, "
            f"found {len(order)}, {len(set(order) & set(by_id))} of them right"
        )
    return list(order)


def _section_sizes(
    spec: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    provenance: Mapping[str, Any],
    items: Sequence[ResidentItem],
    rows: Sequence[RowSpec],
    n_layouts: int,
) -> dict[SectionKind, int]:
    n_columns = max((row.n_experts for row in rows), default=0)
    names_bytes = sum(len(item.name.encode()) for item in items)
    return {
        SectionKind.SPEC: len(encode_kv(spec, SPEC_KEYS)),
        SectionKind.BLOBS: blob_layout(blobs)[1],
        SectionKind.PROVENANCE: len(encode_kv(provenance)),
        SectionKind.DIRECTORY: fmt.DIRECTORY_HEAD_DTYPE.itemsize
        + len(items) * fmt.TENSOR_DTYPE.itemsize
        + names_bytes,
        SectionKind.ROWS: fmt.ROW_HEAD_DTYPE.itemsize + len(rows) * fmt.ROW_DTYPE.itemsize,
        SectionKind.INDEX: len(rows) * n_columns * fmt.CELL_DTYPE.itemsize,
        SectionKind.LAYOUTS: fmt.LAYOUT_HEAD_DTYPE.itemsize + n_layouts * fmt.LAYOUT_DTYPE.itemsize,
    }


def _plan_sections(
    sizes: Mapping[SectionKind, int],
) -> tuple[tuple[PlannedSection, ...], int]:
    sections: list[PlannedSection] = []
    end = fmt.PAGE0_BYTES
    for kind in sorted(sizes):
        section = PlannedSection(kind, align(end, fmt.DATUM_ALIGN), sizes[kind])
        sections.append(section)
        end = section.end
    return tuple(sections), end - fmt.PAGE0_BYTES


def _plan_tensors(
    items: Sequence[ResidentItem], data_offset: int, alignment: int
) -> tuple[tuple[PlannedTensor, ...], int]:
    index = {item.name: i for i, item in enumerate(items)}
    if len(index) != len(items):
        raise UsageError("residents: two tensors have the same name")
    places: dict[str, tuple[int, int]] = {}
    end, group = data_offset, None
    for item in items:
        n_bytes = tensor_bytes(item.dtype, item.shape, f"tensor {quote(item.name)}")
        if item.alias_of is not None:
            continue
        start = align(end, fmt.DATUM_ALIGN if item.group == group else alignment)
        places[item.name] = (start, n_bytes)
        end, group = start + n_bytes, item.group
    tensors = []
    for item in items:
        target = item.name if item.alias_of is None else item.alias_of
        if target not in places:
            raise UsageError(
                f"tensor {quote(item.name)}: expected alias_of to name a tensor with bytes, "
                f"found {quote(target)}"
            )
        alias_index = None if item.alias_of is None else index[target]
        tensors.append(PlannedTensor(item, *places[target], alias_index))
    return tuple(tensors), end


def _plan_cells(
    rows: Sequence[RowSpec],
    layouts: Sequence[PlannedLayout],
    order: Sequence[tuple[int, int]],
    expert_offset: int,
    alignment: int,
) -> tuple[npt.NDArray[np.void], int]:
    n_columns = max((row.n_experts for row in rows), default=0)
    cells = np.zeros((len(rows), n_columns), fmt.CELL_DTYPE)
    offset = expert_offset
    for rank, (row, expert) in enumerate(order):
        layout_id = rows[row].layouts[expert]
        if not 0 <= layout_id < len(layouts):
            raise UsageError(
                f"row {row}, expert {expert}: expected a layout below {len(layouts)}, "
                f"found {layout_id}"
            )
        cell = cells[row, expert]
        cell["offset"] = offset
        cell["n_bytes"] = layouts[layout_id].n_bytes
        cell["layout"] = layout_id
        cell["rank"] = rank
        cell["flags"] = fmt.CELL_PRESENT
        offset += align(layouts[layout_id].n_bytes, alignment)
    cells.flags.writeable = False
    return cells, offset
