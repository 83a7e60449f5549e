"""The quantize and reorder commands: one container becomes another one.

What is not asked to change stays: types, order, spec, carried files. Logical expert ids never
change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colibri_tools import __version__
from colibri_tools.container import Container
from colibri_tools.container.format import Group, PartRole, Role, SectionKind, Stream
from colibri_tools.container.writer import check_output
from colibri_tools.errors import JobError, quote
from colibri_tools.families.result import (
    ExpertSlots,
    MappedResident,
    MappedRow,
    Slice,
    SourceMapping,
)
from colibri_tools.planner import RepackOptions, plan_mapping
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.profile.orders import order_blocks
from colibri_tools.profile.routing import load_routing
from colibri_tools.quantize.encoding import Encoding
from colibri_tools.repack import Job, Meter, Progress, RepackResult, convert, give_importance
from colibri_tools.sources import Source
from colibri_tools.sources.container import open_container_source, part_name
from colibri_tools.text.derive import TextParts

__all__ = [
    "container_mapping",
    "expert_slots",
    "provenance_of",
    "quantize",
    "reorder",
    "rows_by_rank",
]

PathLike = str | os.PathLike[str]


def quantize(
    path: PathLike,
    out: PathLike,
    encoding: Encoding,
    *,
    importance: PathLike | None = None,
    routing: PathLike | None = None,
    order: str | None = None,
    threads: int = 0,
    dry_run: bool = False,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    report: PathLike | None = None,
) -> RepackResult:
    """Give the matrices of the container `path` other types; write the container `out`.

    `importance` is a routing profile or an importance matrix file. `routing`, a profile of
    this model, is for rules by hotness; with `order` blocks are moved, else they stay in the order
    they have. The rest is as in `Job`. Raises as `repack`.
    """
    report = None if report is None else Path(report)
    job = Job(threads, dry_run, force, restart, progress, report)
    return _rewrite(path, Path(out), job, encoding, importance, routing, order)


def reorder(
    path: PathLike,
    out: PathLike,
    *,
    routing: PathLike | None = None,
    order: str | None = None,
    threads: int = 0,
    dry_run: bool = False,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> RepackResult:
    """Write the container `path` with its blocks in another order.

    `order` is "hotness" by default; "id" needs no profile. The rest is as in `Job`. Raises as
    `repack`.
    """
    job = Job(threads, dry_run, force, restart, progress)
    return _rewrite(path, Path(out), job, None, None, routing, order or "hotness")


def _rewrite(
    path: PathLike,
    out: Path,
    job: Job,
    encoding: Encoding | None,
    importance: PathLike | None,
    routing: PathLike | None,
    order: str | None,
) -> RepackResult:
    job.check(encoding)
    started = time.monotonic()
    source, container = open_container_source(path)
    with source, container:
        check_output(out, force=job.force, forbid_identities=source.identities())
        profile = None
        if routing is not None:
            profile = load_routing(Path(routing), container_fingerprint(container))
        options = RepackOptions(
            alignment=container.alignment,
            encoding=encoding,
            order=order or str(container.spec["order"]),
            routing=profile,
            blocks=None if order else rows_by_rank(container),
        )
        mapping = container_mapping(source, container)
        give_importance(encoding, importance, mapping, lambda: container_fingerprint(container))
        provenance = provenance_of(source, container)
        if encoding is None and _is_in_place(container, options):
            provenance = dict(container.provenance)  # nothing changes, to the last byte
        plan = plan_mapping(source, mapping, options, provenance, _text(container))
        return convert(plan, source, out, job, Meter(job.progress), started)


def _text(container: Container) -> TextParts:
    """What a container holds about text is carried: its blobs and spec with all others."""
    places = {kind: (offset, n_bytes) for kind, offset, n_bytes in container.sections}
    place = places.get(SectionKind.TOKENIZER)
    return TextParts(tables=None if place is None else container.read(*place))


def _is_in_place(container: Container, options: RepackOptions) -> bool:
    """Whether a container is what reordering it would make."""
    profile = None if options.routing is None else options.routing.profile
    recorded = {} if options.routing is None else options.routing.provenance()
    recorded["recipe.order"] = container.spec["order"]
    if options.order != container.spec["order"] or any(
        container.provenance.get(key) != value for key, value in recorded.items()
    ):
        return False
    n_experts = tuple(row.n_experts for row in container.rows)
    return order_blocks(options.order, n_experts, profile) == rows_by_rank(container)


def rows_by_rank(container: Container) -> list[tuple[int, int]]:
    """Return (row, expert) of every block, in the order of the file."""
    ranked = [
        (int(container.cell(row, expert)["rank"]), row, expert)
        for row, its in enumerate(container.rows)
        for expert in range(its.n_experts)
    ]
    return [(row, expert) for _, row, expert in sorted(ranked)]


def container_mapping(source: Source, container: Container) -> SourceMapping:
    """Return the census of a container: everything is where the container says.

    Raises JobError for a role of a later version.
    """
    spec = {key: value for key, value in container.spec.items() if key != "order"}
    mapping = SourceMapping(
        family=str(spec.get("family", "unknown")),
        known=bool(spec.get("executable", False)),
        why="as the container says",
        source_kind="container",
        spec=spec,
        tensors=source.tensors,
    )
    for tensor in container.tensors.values():
        if tensor.role not in set(Role):
            raise JobError(
                f"{container.path}: tensor {quote(tensor.name)} has a role that this version does "
                "not know; use the version that made it"
            )
        mapping.residents.append(
            MappedResident(
                name=tensor.name,
                tensor=source.tensor(tensor.alias_of or tensor.name),
                role=Role(tensor.role),
                group=Group(tensor.group),
                layer=tensor.layer,
                shape=tensor.shape,
                alias_of=tensor.alias_of,
            )
        )
    for number, row in enumerate(container.rows):
        experts = (expert_slots(source, container, number, e) for e in range(row.n_experts))
        mapping.rows.append(MappedRow(row.layer, row.stream, tuple(experts)))
    return mapping


def expert_slots(source: Source, container: Container, number: int, expert: int) -> ExpertSlots:
    """Return where the parts of a block are in a container that is opened as a source."""
    row = container.rows[number]
    slots: ExpertSlots = {}
    for part in container.layout_of(number, expert).parts:
        name = part_name(row.layer, Stream(row.stream), expert, part.role)
        tensor = source.tensor(name)
        slots[PartRole(part.role)] = Slice(tensor, 0, part.n_bytes, part.rows, part.cols)
    return slots


def provenance_of(source: Source, container: Container) -> dict[str, Any]:
    """Return what the new container says of its making, the old one's own record kept below it."""
    file = source.files[0]
    found: dict[str, Any] = {
        "tool": "colibri-tools",
        "tool_version": __version__,
        "recipe.align": container.alignment,
        "source.kind": "container",
        "source.files": [file.name],
        "source.bytes": [file.size],
        "source.header_sha256": [container.id],
    }
    found |= dict(_earlier(container.provenance))
    return found


_MAX_EARLIER = 8
"""Rewrites of rewrites that are remembered."""


def _earlier(provenance: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in provenance.items():
        if key.count("from.") < _MAX_EARLIER:
            yield f"from.{key}", value
