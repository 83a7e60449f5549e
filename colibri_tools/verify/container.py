"""Verifying a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import colibri_tools.container as containers
from colibri_tools.container import Container, Group, ResidentTensor, SectionKind
from colibri_tools.container.census import census
from colibri_tools.errors import ColibriError, FormatError, UsageError, quote
from colibri_tools.sources import open_source
from colibri_tools.verify.against import Origins, compare_with_source
from colibri_tools.verify.report import VerifyError, VerifyReport, structure_error
from colibri_tools.verify.scan import Progress, Region, Segment, Sums, run_regions

__all__ = ["verify_container"]

PathLike = str | os.PathLike[str]


def verify_container(
    path: PathLike,
    *,
    quick: bool = False,
    against: PathLike | None = None,
    importance: PathLike | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a container; what is wrong with it is in the report, never raised.

    Quick means structure, census and the padding between and behind tensors and blocks: everything
    but the payload bytes. With `against` also the spec, the carried files and the numbers are
    compared with that source; carried numbers have to be the same bytes, encoded ones those of
    encoding the source again, with the `importance` that was used. `threads` = 0 uses all cores.
    `progress` is called with (bytes done, bytes in total) from the calling thread. Raises
    UsageError for options that do not fit each other or the container, and as `open_source` for
    the source.
    """
    if quick and against is not None:
        raise UsageError("--quick reads no payload, so it excludes --against")
    if importance is not None and against is None:
        raise UsageError("--importance is for --against, which encodes the source again")
    source_name = None if against is None else os.fspath(against)
    report = VerifyReport(os.fspath(path), quick=quick, against=source_name)
    with report.timed(), ExitStack() as stack:
        source = None if against is None else stack.enter_context(open_source(against))
        try:
            container = stack.enter_context(containers.open(path))
        except ColibriError as error:
            report.add(structure_error(error))
            return report
        for problem in census(container):
            report.add(
                VerifyError("census", problem.message, layer=problem.layer, tensor=problem.tensor)
            )
        for found in _tokenizer_errors(container):
            report.add(found)
        origins = Origins()
        if source is not None:
            origins = compare_with_source(container, source, report, importance)
        regions = [*_tensor_regions(container, origins), *_block_regions(container, origins)]
        if quick:
            regions = [padding for region in regions for padding in _padding_of(region)]
        run_regions(regions, report, threads=threads, progress=progress)
        report.bytes += container.data_offset
    return report


def _tokenizer_errors(container: Container) -> Iterator[VerifyError]:
    """The tables for C, which their reader has to accept."""
    from colibri_tools.text.native_tokenizer import NativeTokenizer

    for kind, offset, n_bytes in container.sections:
        if kind == SectionKind.TOKENIZER:
            try:
                NativeTokenizer(container.read(offset, n_bytes))
            except FormatError as error:
                yield VerifyError("structure", error.message, offset=offset)


def _tensor_regions(container: Container, origins: Origins) -> Iterator[Region]:
    """Yield each tensor with the gap behind it."""
    tensors = [tensor for tensor in container.tensors.values() if tensor.alias_of is None]
    starts = [*(tensor.offset for tensor in tensors), container.expert_offset]
    for tensor, end in zip(tensors, starts[1:], strict=True):
        yield _tensor_region(container, tensor, end, origins)


def _tensor_region(
    container: Container, tensor: ResidentTensor, end: int, origins: Origins
) -> Region:
    label = f"tensor {quote(tensor.name)}"
    numbers = Segment(
        tensor.offset,
        tensor.n_bytes,
        label,
        tensor.dtype,
        tensor.shape,
        # Buffers that nothing computes with may hold anything; repack carries them as they are.
        finite=tensor.group != Group.OPTIONAL,
        origin=origins.tensors.get(tensor.name),
    )
    segments = [numbers, *_zeros(tensor.offset + tensor.n_bytes, end, "padding", False)]
    return Region(
        "tensor",
        label,
        container.read_into,
        tuple(segments),
        Sums(tensor.crc32c, tensor.sha256),
        layer=tensor.layer if tensor.layer >= 0 else None,
        tensor=tensor.name,
    )


def _block_regions(container: Container, origins: Origins) -> Iterator[Region]:
    """Yield each block with the padding behind it, in the order of the file."""
    order = sorted(
        (int(container.index["rank"][row, expert]), row, expert)
        for row, spec in enumerate(container.rows)
        for expert in range(spec.n_experts)
    )
    for _, row, expert in order:
        yield _block_region(container, row, expert, origins)


def _block_region(container: Container, row: int, expert: int, origins: Origins) -> Region:
    cell = container.cell(row, expert)
    start = int(cell["offset"])
    segments: list[Segment] = []
    end = start
    for part in container.layout_of(row, expert).parts:
        segments += _zeros(end, start + part.offset, f"gap in front of {part.role.label}", True)
        segments.append(
            Segment(
                start + part.offset,
                part.n_bytes,
                part.role.label,
                part.dtype,
                (part.rows, part.cols),
                tensor=part.role.label,
                origin=origins.parts.get((row, expert, part.role)),
            )
        )
        end = start + part.offset + part.n_bytes
    segments += _zeros(end, start + container.padded_bytes(end - start), "padding", False)
    where = container.rows[row]
    stream = " (MTP)" if where.stream else ""
    return Region(
        "block",
        f"layer {where.layer}{stream} expert {expert}",
        container.read_into,
        tuple(segments),
        Sums(int(cell["crc32c"]), cell["sha256"].tobytes()),
        layer=where.layer,
        expert=expert,
    )


def _zeros(start: int, end: int, what: str, in_payload: bool) -> list[Segment]:
    if start == end:
        return []
    return [Segment(start, end - start, what, in_payload=in_payload)]


def _padding_of(region: Region) -> Iterator[Region]:
    segments = tuple(segment for segment in region.segments if not segment.in_payload)
    if segments:
        yield Region(
            "padding",
            region.label,
            region.reader,
            segments,
            layer=region.layer,
            expert=region.expert,
            tensor=region.tensor,
        )
