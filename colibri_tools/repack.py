"""The repack command: a checkpoint becomes one container, its numbers carried over bit for bit."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_tools.container.layout import Accounting
from colibri_tools.container.workfiles import SourceState
from colibri_tools.container.writer import ContainerWriter, check_output, check_space
from colibri_tools.errors import JobError, SourceError, UsageError, quote
from colibri_tools.mapping import SourceMapping, map_source
from colibri_tools.planner import (
    BlockTask,
    RepackOptions,
    RepackPlan,
    TensorTask,
    plan_mapping,
    source_provenance,
)
from colibri_tools.profile.fingerprint import mapping_fingerprint
from colibri_tools.profile.routing import load_routing
from colibri_tools.quantize.encoding import Encoding
from colibri_tools.quantize.estimate import estimate
from colibri_tools.quantize.importance import load_importance
from colibri_tools.quantize.report import EncodingReport, report_on
from colibri_tools.report_file import check_report, write_report
from colibri_tools.sources import Source, SourceTensor, open_source
from colibri_tools.sources.encoded import EncodedView, WeightError
from colibri_tools.text.derive import text_parts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Job", "Meter", "RepackResult", "convert", "give_importance", "repack"]

Progress = Callable[[int, int], None]

CHUNK_BYTES = 16 << 20
"""Resident tensors pass through memory in pieces of at most this size."""

BUFFER_BUDGET = 192 << 20
"""All buffers together, unless a single block is larger."""


@dataclass(frozen=True, slots=True)
class RepackResult:
    """What a repack did, or would do (`dry_run`).

    `dropped` maps rules to source tensor names. `quantization` is there where types changed.
    """

    out: Path
    dry_run: bool
    id: str
    source_kind: str
    family: str
    why: str
    executable: bool
    n_layers: int
    n_moe_layers: int
    experts_per_layer: tuple[int, ...]
    n_blocks: int
    n_tensors: int
    n_aliases: int
    total_params: int
    active_params: int
    accounting: Accounting
    file_bytes: int
    n_kept: int
    threads: int
    seconds: float
    bytes_per_second: float
    types: dict[str, int]
    dropped: dict[str, list[str]]
    missing_blobs: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    quantization: EncodingReport | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold."""
        return {**asdict(self), "out": str(self.out)}

    def render(self, console: Console) -> None:
        """Print a summary for a person."""
        from colibri_tools.repack_view import render_repack  # late: only people need rich

        render_repack(self, console)


@dataclass(frozen=True, slots=True)
class Job:
    """How a conversion runs; none of it changes the result.

    `threads` 0 means all cores. `progress` is called with bytes done and in total. With `dry_run`
    everything is planned and checked and nothing is written. What an earlier call with the same
    source and options left when it was interrupted is checked and used; `restart` discards it.
    `report` is a JSON file for what encoding did and lost, which is measured for it.
    """

    threads: int = 0
    dry_run: bool = False
    force: bool = False
    restart: bool = False
    progress: Progress | None = None
    report: Path | None = None

    def check(self, encoding: Encoding | None) -> None:
        """Raise UsageError for values that make no sense."""
        if self.threads < 0:
            raise UsageError(f"threads: expected 0 or more, found {self.threads}")
        if self.dry_run and self.restart:
            raise UsageError(
                "--dry-run writes nothing, so it excludes --restart, which discards files"
            )
        if self.report is None:
            return
        if encoding is None:
            raise UsageError("--report is about encoding: it needs --type or --target-bpw")
        if self.dry_run:
            raise UsageError("--dry-run writes nothing, so it excludes --report; --json has it all")
        check_report(self.report, force=self.force)
        encoding.measure = True


def repack(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    align: int = 4096,
    hash_sources: bool = False,
    encoding: Encoding | None = None,
    importance: str | os.PathLike[str] | None = None,
    routing: str | os.PathLike[str] | None = None,
    order: str | None = None,
    threads: int = 0,
    dry_run: bool = False,
    force: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    report: str | os.PathLike[str] | None = None,
) -> RepackResult:
    """Repack the checkpoint `src` into the container `out`.

    `hash_sources` records the SHA-256 of whole source files. `encoding` gives matrices other
    types, by the `importance` in a file, if one is given (see `load_importance`). `routing`
    is the path of a routing profile of this model, `order` the name of the physical order of
    blocks: "hotness" with a profile, else "id". For the others see `Job`.

    Raises SourceError (the source is incomplete, unsupported or has NaN or Inf), FormatError (a
    file of it is broken), UsageError (options, an output that exists or is an input), JobError
    (space, memory, a failing write). None of them leaves an output file; what an interruption, a
    failing disk or a JobError leaves to go on with is named in the message.
    """
    job = Job(threads, dry_run, force, restart, progress, None if report is None else Path(report))
    job.check(encoding)
    started = time.monotonic()
    with open_source(os.fspath(src)) as source:
        check_output(out, force=force, forbid_identities=source.identities())
        meter = Meter(progress)
        digests = _hash_sources(source, meter, dry_run) if hash_sources else None
        mapping = map_source(source)
        mapping.require_complete(source.path)
        profile = None
        if routing is not None:
            profile = load_routing(Path(routing), mapping_fingerprint(source, mapping))
        give_importance(encoding, importance, mapping, lambda: mapping_fingerprint(source, mapping))
        options = RepackOptions(
            alignment=align,
            file_sha256=digests,
            encoding=encoding,
            order=order or ("id" if profile is None else "hotness"),
            routing=profile,
        )
        provenance = source_provenance(source, mapping, options)
        plan = plan_mapping(source, mapping, options, provenance, text_parts(source))
        return convert(plan, source, Path(out), job, meter, started)


def convert(
    plan: RepackPlan, source: Source, out: Path, job: Job, meter: Meter, started: float
) -> RepackResult:
    """Carry out a plan. `started` is when the command began, in seconds of `time.monotonic`."""
    n_threads = _thread_count(job.threads, plan)
    done, takes = _Done(), None
    if job.dry_run:
        check_space(out, plan.container.file_size)
        if plan.encoding is not None:
            takes = estimate(plan.encoding, source, n_threads, _buffer_bytes(plan))
    else:
        meter.total += plan.payload_bytes
        writer = ContainerWriter(
            plan.container,
            out,
            force=job.force,
            restart=job.restart,
            forbid_identities=source.identities(),
            sources=_states(source),
        )
        done = _execute(plan, source, writer, n_threads, meter)
    seconds = time.monotonic() - started
    report = None if plan.encoding is None else report_on(plan.encoding, takes)
    if job.report is not None and report is not None:
        write_report(job.report, report.to_json())
    result = _result(plan, source, out, job.dry_run, done, n_threads, seconds)
    return replace(result, quantization=report)


def give_importance(
    encoding: Encoding | None,
    path: str | os.PathLike[str] | None,
    mapping: SourceMapping,
    fingerprint: Callable[[], str],
) -> None:
    """Load the importance that an encoding is to use, and say what is odd about it."""
    if path is None:
        return
    if encoding is None:
        raise UsageError("--importance is about encoding: it needs --type or --target-bpw")
    encoding.importance = load_importance(path, mapping, fingerprint)
    mapping.warnings.extend(encoding.importance.warnings())
    mapping.notes.extend(encoding.importance.notes)


def _hash_sources(source: Source, meter: Meter, dry_run: bool) -> tuple[str, ...]:
    """Return the SHA-256 of each source file; a dry run needs only their size."""
    if dry_run:
        return ("0" * 64,) * len(source.files)
    meter.total += sum(file.size for file in source.files)
    return tuple(digest for _, digest in source.hash_files(meter.add))


class Meter:
    """Adds up bytes from several threads and tells the callback."""

    def __init__(self, callback: Progress | None) -> None:
        self.total = 0
        self._done = 0
        self._callback = callback
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self._done += n_bytes
            if self._callback is not None:
                self._callback(self._done, self.total)


def _thread_count(wanted: int, plan: RepackPlan) -> int:
    """Return how many threads may each hold a block within the budget. Raises JobError."""
    buffer_bytes = max(plan.largest_block, 1)
    available = _available_memory()
    if available is not None and buffer_bytes > available:
        raise JobError(
            f"an expert block of {buffer_bytes} bytes does not fit into the {available} bytes of "
            "available memory"
        )
    cores = len(os.sched_getaffinity(0))
    return max(1, min(wanted or cores, len(plan.tasks), BUFFER_BUDGET // buffer_bytes))


def _buffer_bytes(plan: RepackPlan) -> int:
    return max(plan.largest_block, 1) + CHUNK_BYTES


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


# ---------------------------------------------------------------- execution


@dataclass(frozen=True, slots=True)
class _Done:
    """What came out of writing."""

    id: str = ""
    notes: tuple[str, ...] = ()
    n_kept: int = 0


def _states(source: Source) -> list[SourceState]:
    return [
        SourceState(file.name, file.size, stamp, file.header_sha256)
        for file, stamp in zip(source.files, source.stamps(), strict=True)
    ]


def _execute(
    plan: RepackPlan, source: Source, writer: ContainerWriter, n_threads: int, meter: Meter
) -> _Done:
    """Copy everything and seal the container."""
    with writer:
        notes = []
        resumed = writer.resumed
        source.advise_sequential()
        _Copier(plan, source, writer, meter).run(n_threads)
        source.check_unchanged()
        if resumed:
            damaged = f", {writer.n_damaged} damaged ones written again" if writer.n_damaged else ""
            notes.append(
                f"went on with an earlier job: {writer.n_kept} of {len(plan.tasks)} tensors and "
                f"blocks kept{damaged}"
            )
        return _Done(writer.seal(), tuple(notes), writer.n_kept)


class _Stopped(Exception):
    """Another thread failed; what this one was doing is given up."""


class _Copier:
    """Runs the tasks in order of the source, each thread with one buffer of its own."""

    def __init__(
        self, plan: RepackPlan, source: Source, writer: ContainerWriter, meter: Meter
    ) -> None:
        self._source = source
        self._writer = writer
        self._meter = meter
        self._tasks = plan.tasks
        self._next = 0
        self._ahead = 0
        self._buffer_bytes = plan.largest_block
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._encodes = plan.encoding is not None
        self._measures = plan.encoding is not None and plan.encoding.measure
        self._reads_left = Counter(
            read.tensor.name
            for task in plan.tasks
            if isinstance(task, BlockTask)
            for read in task.reads
        )

    def run(self, n_threads: int) -> None:
        """Run all tasks; after the first error no new one is begun and it is raised."""
        if self._encodes:
            self._ahead = n_threads
        with ThreadPoolExecutor(n_threads, thread_name_prefix="repack") as pool:
            try:
                futures = [pool.submit(self._work) for _ in range(n_threads)]
                wait(futures, return_when=FIRST_EXCEPTION)
            except RuntimeError as error:  # a thread that the system does not grant
                raise JobError(f"{error}: a limit of memory or processes (ulimit -a)") from error
            finally:
                self._stop.set()
        for future in futures:
            future.result()

    def _work(self) -> None:
        buffer = memoryview(bytearray(self._buffer_bytes))
        while not self._stop.is_set():
            with self._lock:
                number, self._next = self._next, self._next + 1
            if number >= len(self._tasks):
                return
            task = self._tasks[number]
            try:
                self._read_ahead(number + self._ahead)
                if isinstance(task, BlockTask):
                    self._do_block(task, buffer[: task.n_bytes])
                else:
                    self._do_tensor(task)
            except _Stopped:
                return
            except BaseException:
                self._stop.set()
                raise

    def _read_ahead(self, number: int) -> None:
        """Let the drive read what a thread will encode next, while it encodes this."""
        if not self._ahead or number >= len(self._tasks):
            return
        task = self._tasks[number]
        if isinstance(task, BlockTask):
            for read in task.reads:
                self._source.will_need_range(read.tensor, read.start, read.n_bytes)

    def _do_block(self, task: BlockTask, block: memoryview) -> None:
        kept = self._writer.keep_block(task.row, task.expert)
        if not kept or self._measures:
            self._read_block(task, block)
        if not kept:
            self._writer.write_block(task.row, task.expert, block)
        self._meter.add(task.n_bytes)
        for read in task.reads:
            self._done_reading(read.tensor)

    def _do_tensor(self, task: TensorTask) -> None:
        if self._writer.keep_tensor(task.name):
            if self._measures:
                for _ in self._chunks(task):
                    pass
            else:
                self._meter.add(task.n_bytes)
            return
        self._writer.write_tensor(task.name, self._chunks(task))
        self._source.drop(task.tensor)

    def _read_block(self, task: BlockTask, block: memoryview) -> None:
        end = 0
        for read in task.reads:
            block[end : read.offset] = bytes(read.offset - end)
            end = read.offset + read.n_bytes
            part = block[read.offset : end]
            dtype = read.tensor.dtype
            first = read.start // dtype.block_bytes * dtype.block_weights
            place = f"layer {task.layer} expert {task.expert} {read.part.label}"
            try:
                self._source.read_into(read.tensor, read.start, part)
            except WeightError as error:
                row, col = divmod(error.index - first, read.cols)
                raise error.within(f"{place} [{row}, {col}]") from None
            bad = _find_nonfinite(read.tensor, part, read.rows * read.cols)
            if bad is not None:
                inner = divmod(bad[0], read.cols)
                raise _not_finite(read.tensor, first + bad[0], bad[1], place, inner)

    def _done_reading(self, tensor: SourceTensor) -> None:
        with self._lock:
            self._reads_left[tensor.name] -= 1
            finished = self._reads_left[tensor.name] == 0
        if finished:
            self._source.drop(tensor)

    def _chunks(self, task: TensorTask) -> Iterator[memoryview]:
        """Yield a tensor piece by piece, each checked before it is written."""
        dtype = task.tensor.dtype
        step = CHUNK_BYTES // dtype.block_bytes * dtype.block_bytes
        buffer = memoryview(bytearray(min(step, task.n_bytes)))
        for start in range(0, task.n_bytes, step):
            if self._stop.is_set():
                raise _Stopped
            chunk = buffer[: min(step, task.n_bytes - start)]
            self._source.read_into(task.tensor, start, chunk)
            n_weights = len(chunk) // dtype.block_bytes * dtype.block_weights
            bad = _find_nonfinite(task.tensor, chunk, n_weights) if task.checked else None
            if bad is not None:
                index = start // dtype.block_bytes * dtype.block_weights + bad[0]
                raise _not_finite(task.tensor, index, bad[1], task.name, None)
            yield chunk
            self._meter.add(len(chunk))


def _find_nonfinite(
    tensor: SourceTensor, buffer: memoryview, n_weights: int
) -> tuple[int, float] | None:
    """Return the index and the value of the first weight that is NaN or infinite, or None."""
    from colibri_tools import native

    if isinstance(tensor.view, EncodedView):  # it was looked at before it was encoded
        return None
    dtype = tensor.dtype
    index = native.find_nonfinite(dtype.id, buffer, n_weights)
    if index is None:
        return None
    block, rest = divmod(index, dtype.block_weights)
    start = block * dtype.block_bytes
    values = native.dequantize(
        dtype.id, buffer[start : start + dtype.block_bytes], dtype.block_weights
    )
    return index, float(values[rest])


def _not_finite(
    tensor: SourceTensor, index: int, value: float, place: str, inner: tuple[int, int] | None
) -> SourceError:
    where = ", ".join(str(number) for number in tensor.locate(index))
    within = "" if inner is None else f" [{inner[0]}, {inner[1]}]"
    return SourceError(
        f"tensor {quote(tensor.name)}: {value} at [{where}] ({place}{within}); the checkpoint is "
        "damaged, fetch or save it again"
    )


# ---------------------------------------------------------------- result


def _result(
    plan: RepackPlan,
    source: Source,
    out: Path,
    dry_run: bool,
    done: _Done,
    n_threads: int,
    seconds: float,
) -> RepackResult:
    container, mapping = plan.container, plan.mapping
    types: Counter[str] = Counter()
    for task in plan.tasks:
        if isinstance(task, BlockTask):
            for read in task.reads:
                types[read.tensor.dtype.name] += read.n_bytes
        else:
            types[task.tensor.dtype.name] += task.n_bytes
    file_bytes = container.file_size
    return RepackResult(
        out=out,
        dry_run=dry_run,
        id=done.id,
        source_kind=source.kind,
        family=mapping.family,
        why=mapping.why,
        executable=mapping.spec["executable"],
        n_layers=mapping.spec["n_layers"],
        n_moe_layers=sum(mapping.spec["moe_layers"]),
        experts_per_layer=tuple(row.n_experts for row in container.rows),
        n_blocks=container.n_blocks,
        n_tensors=len(container.tensors),
        n_aliases=sum(t.alias_index is not None for t in container.tensors),
        total_params=mapping.spec["total_params"],
        active_params=mapping.spec["active_params"],
        accounting=container.accounting(),
        file_bytes=file_bytes,
        n_kept=done.n_kept,
        threads=n_threads,
        seconds=seconds,
        bytes_per_second=0.0 if dry_run else file_bytes / max(seconds, 1e-9),
        types=dict(sorted(types.items())),
        dropped=mapping.dropped,
        missing_blobs=tuple(source.missing_blobs),
        warnings=tuple(mapping.warnings),
        notes=(*mapping.notes, *_missing(source), *done.notes),
    )


def _missing(source: Source) -> list[str]:
    if not source.missing_blobs:
        return []
    return [f"not in the checkpoint, so not carried: {', '.join(source.missing_blobs)}"]
