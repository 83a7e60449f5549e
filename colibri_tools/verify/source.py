"""Verifying a source: complete, readable, and made of finite numbers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from colibri_tools.container import Group
from colibri_tools.errors import ColibriError, quote
from colibri_tools.mapping import map_source
from colibri_tools.sources import Source, SourceTensor, open_source
from colibri_tools.verify.finite import finder, needs_scan
from colibri_tools.verify.report import VerifyError, VerifyReport, structure_error
from colibri_tools.verify.scan import Progress, Region, Segment, run_regions

__all__ = ["verify_source"]


def verify_source(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    threads: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a source; what is wrong with it is in the report, never raised.

    All headers are checked, and by the census that each tensor has its place and no expert lacks
    a part. Unless `quick`, every tensor that is used and can hold NaN or infinity is searched for
    them. `threads` = 0 uses all cores. `progress` is called with (bytes done, bytes in total) from
    the calling thread.
    """
    report = VerifyReport(os.fspath(path), kind="source", quick=quick)
    with report.timed(), ExitStack() as stack:
        try:
            source = stack.enter_context(open_source(path))
        except ColibriError as error:
            report.add(structure_error(error))
            return report
        report.warnings += source.warnings
        tensors = _take_census(source, report)
        if not quick:
            _scan(tensors, source, report, threads, progress)
    return report


def _take_census(source: Source, report: VerifyReport) -> list[SourceTensor]:
    """Return the tensors that a computation uses, as weights; other numbers do not matter."""
    try:
        mapping = map_source(source)
    except ColibriError as error:
        report.add(VerifyError("census", error.message))
        return list(source.tensors.values())
    report.warnings += [text for text in mapping.warnings if text not in report.warnings]
    for problem in mapping.problems:
        report.add(VerifyError("census", problem))
    unused = {r.tensor.name for r in mapping.residents if r.group == Group.OPTIONAL}
    unused = unused.union(*mapping.dropped.values())
    return [tensor for name, tensor in mapping.tensors.items() if name not in unused]


def _scan(
    tensors: Sequence[SourceTensor],
    source: Source,
    report: VerifyReport,
    threads: int,
    progress: Progress | None,
) -> None:
    unscanned: Counter[str] = Counter()
    regions = []
    for tensor in tensors:
        if not tensor.dtype.is_known or (needs_scan(tensor.dtype) and not finder(tensor.dtype)):
            unscanned[tensor.dtype.name] += 1
        elif needs_scan(tensor.dtype) and tensor.n_bytes:
            regions.append(_region(source, tensor))
    for name, count in sorted(unscanned.items()):
        report.warnings.append(f"{count} tensors of type {name} were not searched for NaN")
    run_regions(regions, report, threads=threads, progress=progress)


def _region(source: Source, tensor: SourceTensor) -> Region:
    label = f"tensor {quote(tensor.name)}"
    shape = tensor.shape or (1,)

    def read(offset: int, out: memoryview) -> None:
        source.read_into(tensor, offset - tensor.offset, out)

    segment = Segment(tensor.offset, tensor.n_bytes, label, tensor.dtype, shape)
    return Region("tensor", label, read, (segment,), tensor=tensor.name)
