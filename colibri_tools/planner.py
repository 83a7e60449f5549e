"""The plan of a repack: every byte's destination, and the independent tasks that bring it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from colibri_tools import __version__
from colibri_tools.container.format import MIN_ALIGNMENT, Group, PartRole
from colibri_tools.container.layout import (
    ContainerPlan,
    PartSpec,
    PlannedLayout,
    ResidentItem,
    RowSpec,
    plan_container,
)
from colibri_tools.mapping import ExpertSlots, MappedResident, MappedRow, SourceMapping, map_source
from colibri_tools.profile.orders import order_blocks
from colibri_tools.profile.routing import Routing
from colibri_tools.quantize.encoding import Encoding, encode_mapping
from colibri_tools.sources import Source, SourceTensor
from colibri_tools.sources.encoded import EncodedView
from colibri_tools.text.derive import TextParts, text_parts

__all__ = [
    "BlockTask",
    "PartRead",
    "RepackOptions",
    "RepackPlan",
    "TensorTask",
    "plan_mapping",
    "plan_repack",
    "source_provenance",
]


@dataclass(frozen=True, eq=False, slots=True)
class RepackOptions:
    """What may differ between two containers of one source.

    `file_sha256` are the digests of the whole source files, in order, if they are to be recorded.
    `encoding` is what changes types; without it numbers are carried over. `order` is the physical
    order of blocks by name, made from `routing` (a profile and its digest) unless it is "id";
    `blocks` gives that order where it is known already.
    """

    alignment: int = MIN_ALIGNMENT
    file_sha256: tuple[str, ...] | None = None
    encoding: Encoding | None = None
    order: str = "id"
    routing: Routing | None = None
    blocks: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class PartRead:
    """`n_bytes` of a source tensor from `start` on go to `offset` of a block."""

    part: PartRole
    tensor: SourceTensor
    start: int
    n_bytes: int
    rows: int
    cols: int
    offset: int


@dataclass(frozen=True, slots=True)
class BlockTask:
    """One expert block: reads that leave only the alignment gaps between parts, which are zero."""

    row: int
    layer: int
    expert: int
    n_bytes: int
    reads: tuple[PartRead, ...]

    @property
    def position(self) -> tuple[int, int]:
        """Where its first bytes are in the source."""
        first = self.reads[0]
        return first.tensor.place(first.start)


@dataclass(frozen=True, slots=True)
class TensorTask:
    """One resident tensor, copied whole. `checked` asks for a search for NaN and Inf."""

    name: str
    tensor: SourceTensor
    checked: bool

    @property
    def n_bytes(self) -> int:
        """The bytes to copy."""
        return self.tensor.n_bytes

    @property
    def position(self) -> tuple[int, int]:
        """Where it is in the source."""
        return self.tensor.place(0)


Task = BlockTask | TensorTask


@dataclass(frozen=True, eq=False, slots=True)
class RepackPlan:
    """A container to be, and what to copy where. `tasks` follow the source from front to back.

    Large tensors that are encoded come first: each is the work of one thread, and the last one
    would keep the others waiting.
    """

    container: ContainerPlan
    mapping: SourceMapping
    tasks: tuple[Task, ...]
    encoding: Encoding | None = None

    @property
    def payload_bytes(self) -> int:
        """The bytes that all tasks copy."""
        return sum(task.n_bytes for task in self.tasks)

    @property
    def largest_block(self) -> int:
        """The bytes of the largest block."""
        return max((layout.n_bytes for layout in self.container.layouts), default=0)


def plan_repack(source: Source, options: RepackOptions) -> RepackPlan:
    """Plan the container of `source`. Reads no more of it than its small tensors.

    Raises SourceError if the census finds anything that does not fit, UsageError for an alignment
    that the format does not have.
    """
    mapping = map_source(source)
    mapping.require_complete(source.path)
    provenance = source_provenance(source, mapping, options)
    return plan_mapping(source, mapping, options, provenance, text_parts(source))


def plan_mapping(
    source: Source,
    mapping: SourceMapping,
    options: RepackOptions,
    provenance: dict[str, Any],
    text: TextParts,
) -> RepackPlan:
    """Plan the container of what a census, or another container, has put in place.

    `text` is what it holds about text.

    Raises UsageError for options that do not fit the model, SourceError for weights that are
    lossy already.
    """
    profile = None if options.routing is None else options.routing.profile
    order = options.blocks
    if order is None:
        n_experts = tuple(len(row.experts) for row in mapping.rows)
        order = order_blocks(options.order, n_experts, profile)
    if options.encoding is not None:
        mapping = encode_mapping(mapping, options.encoding, profile, source)
        provenance |= options.encoding.provenance()
    if options.routing is not None:
        provenance |= options.routing.provenance()
    mapping.warnings.extend(text.warnings)
    layouts, rows = _layouts(mapping.rows)
    container = plan_container(
        spec={**mapping.spec, **text.spec, "order": options.order},
        blobs={**text.blobs, **source.blobs},
        provenance={**provenance, **text.provenance, "recipe.order": options.order},
        tokenizer=text.tables,
        residents=[_item(resident) for resident in mapping.residents],
        layouts=layouts,
        rows=rows,
        order=order,
        alignment=options.alignment,
    )
    tasks: list[Task] = [*_tensor_tasks(mapping.residents)]
    tasks += _block_tasks(mapping.rows, container)
    tasks.sort(key=lambda task: (not _is_long(task), task.position))
    return RepackPlan(container, mapping, tuple(tasks), options.encoding)


_LONG_WEIGHTS = 1 << 24


def _is_long(task: Task) -> bool:
    if not isinstance(task, TensorTask) or not isinstance(task.tensor.view, EncodedView):
        return False
    return task.tensor.n_weights >= _LONG_WEIGHTS


def _item(resident: MappedResident) -> ResidentItem:
    return ResidentItem(
        resident.name,
        resident.role,
        resident.group,
        resident.layer,
        resident.tensor.dtype,
        resident.shape,
        resident.alias_of,
    )


def _layouts(rows: Sequence[MappedRow]) -> tuple[list[tuple[PartSpec, ...]], list[RowSpec]]:
    """Number the distinct layouts in the order in which blocks first use them."""
    numbers: dict[tuple[PartSpec, ...], int] = {}
    specs = []
    for row in rows:
        used = tuple(numbers.setdefault(_parts(slots), len(numbers)) for slots in row.experts)
        specs.append(RowSpec(row.layer, row.stream, len(row.experts), used))
    return list(numbers), specs


def _parts(slots: ExpertSlots) -> tuple[PartSpec, ...]:
    return tuple(
        PartSpec(part, slots[part].dtype, slots[part].rows, slots[part].cols)
        for part in sorted(slots)
    )


def _tensor_tasks(residents: Sequence[MappedResident]) -> Iterator[TensorTask]:
    for resident in residents:
        if resident.alias_of is None:
            yield TensorTask(resident.name, resident.tensor, resident.group != Group.OPTIONAL)


def _block_tasks(rows: Sequence[MappedRow], container: ContainerPlan) -> Iterator[BlockTask]:
    for number, row in enumerate(rows):
        for expert, slots in enumerate(row.experts):
            layout = container.layout_of(number, expert)
            reads = tuple(_reads(slots, layout))
            yield BlockTask(number, row.layer, expert, layout.n_bytes, reads)


def _reads(slots: ExpertSlots, layout: PlannedLayout) -> Iterator[PartRead]:
    for part in layout.parts:
        piece = slots[part.role]
        assert piece.n_bytes == part.n_bytes
        yield PartRead(
            part.role,
            piece.tensor,
            piece.start,
            piece.n_bytes,
            piece.rows,
            piece.cols,
            part.offset,
        )


def source_provenance(
    source: Source, mapping: SourceMapping, options: RepackOptions
) -> dict[str, Any]:
    rules = sorted(mapping.dropped)
    found: dict[str, Any] = {
        "tool": "colibri-tools",
        "tool_version": __version__,
        "recipe.align": options.alignment,
        "source.kind": source.kind,
        "source.files": [_plain(file.name) for file in source.files],
        "source.bytes": [file.size for file in source.files],
        "source.header_sha256": [file.header_sha256 for file in source.files],
    }
    if rules:
        found["dropped.rules"] = rules
        found["dropped.counts"] = [len(mapping.dropped[rule]) for rule in rules]
    if mapping.conversions:
        found["recipe.conversions"] = list(mapping.conversions)
        found["recipe.conversion_counts"] = list(mapping.conversions.values())
    if options.file_sha256 is not None:
        found["source.sha256"] = list(options.file_sha256)
    return found


def _plain(name: str) -> str:
    # A file name is bytes; those that are not UTF-8 arrive as lone surrogates.
    return name.encode("utf-8", "replace").decode("utf-8").replace("\0", "?")
