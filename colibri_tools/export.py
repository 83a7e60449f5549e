"""`colibri export`: the hottest blocks of a container once more, for a faster drive.

The file is a container of format version 1 that cannot run: its rows have the chosen experts only,
and the spec key `part.experts` says which of the model's they are (docs/format.md, section 13).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from colibri_tools.container import Container
from colibri_tools.container.format import Stream, align
from colibri_tools.container.writer import check_output
from colibri_tools.errors import UsageError
from colibri_tools.families.result import MappedRow, SourceMapping
from colibri_tools.planner import RepackOptions, plan_mapping
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.profile.routing import Routing, load_routing
from colibri_tools.profile.stats import hottest_first
from colibri_tools.repack import Job, Meter, Progress, RepackResult, convert
from colibri_tools.rewrite import expert_slots, provenance_of, rows_by_rank
from colibri_tools.sources import Source
from colibri_tools.sources.container import open_container_source
from colibri_tools.text.derive import TextParts

__all__ = ["export"]

PathLike = str | os.PathLike[str]

_LACKS = "it is a part of a container, with some of its experts; give it to 'run --mirror'"


def export(
    path: PathLike,
    out: PathLike,
    *,
    share: float | None = None,
    n_bytes: int | None = None,
    routing: PathLike | None = None,
    threads: int = 0,
    dry_run: bool = False,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> RepackResult:
    """Write the hottest blocks of the container `path` to `out`.

    `share` of all blocks, or as many as `n_bytes` hold. Which are hottest says the profile
    `routing`, or the order of a container that was made hottest first. The rest is as in `Job`.
    Raises UsageError where neither is known, and as `reorder`.
    """
    job = Job(threads, dry_run, force, restart, progress)
    job.check(None)
    started = time.monotonic()
    source, container = open_container_source(path)
    with source, container:
        check_output(Path(out), force=force, forbid_identities=source.identities())
        _check_whole(container)
        profile = None
        if routing is not None:
            profile = load_routing(Path(routing), container_fingerprint(container))
        chosen = _choose(container, profile, share, n_bytes)
        mapping, order = _part_mapping(source, container, chosen)
        options = RepackOptions(
            alignment=container.alignment, order="hotness", routing=profile, blocks=order
        )
        plan = plan_mapping(source, mapping, options, provenance_of(source, container), TextParts())
        return convert(plan, source, Path(out), job, Meter(job.progress), started)


def _check_whole(container: Container) -> None:
    if "part.experts" in container.spec:
        raise UsageError(f"{container.path}: is a part itself; export from the whole container")


def _choose(
    container: Container, routing: Routing | None, share: float | None, n_bytes: int | None
) -> list[tuple[int, int]]:
    """Return (row, expert) of the chosen blocks, the hottest first."""
    hottest = _hottest(container, routing)
    if (share is None) == (n_bytes is None):
        raise UsageError("give the share of blocks to export, or how many bytes")
    if share is not None:
        return hottest[: max(1, round(share * len(hottest)))]
    assert n_bytes is not None
    chosen, left = [], n_bytes
    for row, expert in hottest:
        left -= align(container.layout_of(row, expert).n_bytes, container.alignment)
        if left < 0:
            break
        chosen.append((row, expert))
    if not chosen:
        raise UsageError(f"--hottest: {n_bytes} bytes hold no block of {container.path}")
    return chosen


def _hottest(container: Container, routing: Routing | None) -> list[tuple[int, int]]:
    main = [i for i, row in enumerate(container.rows) if row.stream == Stream.MAIN]
    if routing is not None:
        p = routing.profile
        return [(main[row], int(e)) for row, e in hottest_first(p.counts(), p.mask()).tolist()]
    if container.spec["order"] != "hotness":
        raise UsageError(
            f"{container.path}: its blocks are in the order {container.spec['order']}, which does "
            "not say which are hottest; give a profile with --routing"
        )
    return [(row, expert) for row, expert in rows_by_rank(container) if row in main]


def _part_mapping(
    source: Source, container: Container, chosen: list[tuple[int, int]]
) -> tuple[SourceMapping, list[tuple[int, int]]]:
    """Return the census of the part, and the order of its blocks in its own numbers."""
    experts: dict[int, list[int]] = {}
    for row, expert in chosen:
        experts.setdefault(row, []).append(expert)
    rows = sorted(experts)
    for row in rows:
        experts[row].sort()
    spec = _part_spec(container, experts)
    mapping = SourceMapping(
        family=str(spec["family"]),
        known=False,
        why="as the container says",
        source_kind="container",
        spec=spec,
        tensors=source.tensors,
    )
    for row in rows:
        slots = tuple(expert_slots(source, container, row, e) for e in experts[row])
        mapping.rows.append(MappedRow(container.rows[row].layer, container.rows[row].stream, slots))
    order = [(rows.index(row), experts[row].index(expert)) for row, expert in chosen]
    return mapping, order


def _part_spec(container: Container, experts: dict[int, list[int]]) -> dict[str, Any]:
    """Return the container's spec, as far as it is true of the rows that are left."""
    spec = {key: value for key, value in container.spec.items() if key != "order"}
    layers = {container.rows[row].layer for row in experts}
    top_k = int(spec["top_k"])
    spec["moe_layers"] = [int(layer in layers) for layer in range(int(spec["n_layers"]))]
    spec |= {
        "executable": False,
        "executable_lacks": _LACKS,
        "tokenizer": "none",
        "total_params": sum(
            part.rows * part.cols
            for row, own in experts.items()
            for expert in own
            for part in container.layout_of(row, expert).parts
        ),
        "active_params": 0,
        "part.of": container.id,
        "part.top_k": top_k,
        "part.experts": [e for row in sorted(experts) for e in experts[row]],
        "top_k": min(top_k, *map(len, experts.values())),
    }
    return spec
