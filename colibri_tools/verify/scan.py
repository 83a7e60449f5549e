"""Reading regions of a file piece by piece on several threads, and checking them.

A region is what one pair of checksums covers, with the zero bytes behind it. It is a sequence of
segments: numbers of one type, or bytes that have to be zero.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import numpy as np

from colibri_tools import native
from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, quote
from colibri_tools.verify.finite import finder
from colibri_tools.verify.report import MAX_LISTED_ERRORS, ErrorKind, VerifyError, VerifyReport

__all__ = ["Origin", "Progress", "Reader", "Region", "Segment", "Sums", "run_regions"]

Progress = Callable[[int, int], None]
Reader = Callable[[int, memoryview], None]
"""Fills a buffer with bytes from an offset on; raises SourceError."""

_PIECE_BYTES = 4 << 20
_PROGRESS_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sums:
    """The checksums that a container states."""

    crc32c: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the numbers of a segment came from."""

    name: str
    read: Reader


@dataclass(frozen=True, slots=True)
class Segment:
    """`n_bytes` from `start`: numbers of `dtype` in `shape`, or zeros if `dtype` is None.

    Bytes outside the payload (`in_payload` false) are not in the checksums. `finite` asks for a
    search for NaN and infinity.
    """

    start: int
    n_bytes: int
    what: str
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    in_payload: bool = True
    finite: bool = True
    tensor: str | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor or a block with what has to be true of it. `label` names it in messages."""

    kind: Literal["tensor", "block", "padding"]
    label: str
    reader: Reader
    segments: tuple[Segment, ...]
    sums: Sums | None = None
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None

    @property
    def n_bytes(self) -> int:
        """All bytes that are read."""
        return sum(segment.n_bytes for segment in self.segments)


def run_regions(
    regions: Sequence[Region],
    report: VerifyReport,
    *,
    threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Check all regions and put what is wrong into `report`, in the order of the regions."""
    run = _Run(regions)
    n_threads = threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(n_threads, len(regions)))) as pool:
        futures = [pool.submit(run.work) for _ in range(n_threads)]
        try:
            _wait(futures, run, progress)
        finally:
            run.stop = True  # after an interrupt the threads end with the piece they are at
    run.fill(report)


def _wait(futures: list[Future[None]], run: _Run, progress: Progress | None) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _PROGRESS_SECONDS, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if progress is not None:
            progress(run.n_bytes, run.total_bytes)


class _Run:
    """The state that the threads share."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.total_bytes = sum(region.n_bytes for region in regions)
        self.n_bytes = 0
        self.stop = False
        self._todo: Iterator[tuple[int, Region]] = iter(enumerate(regions))
        self._lock = threading.Lock()
        self._errors: dict[int, list[VerifyError]] = {}
        self._n_listed = 0
        self._n_errors = 0
        self._checked = {"tensor": 0, "block": 0, "padding": 0}

    def work(self) -> None:
        """Check regions until there are none left."""
        buffers = memoryview(bytearray(_PIECE_BYTES)), memoryview(bytearray(_PIECE_BYTES))
        while not self.stop:
            with self._lock:
                number, region = next(self._todo, (-1, None))
            if region is None:
                return
            self._record(number, region, list(_check_region(region, buffers, self._count)))

    def fill(self, report: VerifyReport) -> None:
        """Move the results into a report."""
        report.checked_tensors += self._checked["tensor"]
        report.checked_blocks += self._checked["block"]
        report.bytes += self.n_bytes
        unlisted = self._n_errors
        for number in sorted(self._errors):
            for error in self._errors[number]:
                report.add(error)
                unlisted -= 1
        report.n_errors += unlisted

    def _count(self, n_bytes: int) -> bool:
        with self._lock:
            self.n_bytes += n_bytes
        return not self.stop

    def _record(self, number: int, region: Region, errors: list[VerifyError]) -> None:
        with self._lock:
            self._checked[region.kind] += 1
            self._n_errors += len(errors)
            room = MAX_LISTED_ERRORS - self._n_listed
            if errors and room > 0:
                self._errors[number] = errors[:room]
                self._n_listed += len(errors[:room])


def _check_region(
    region: Region, buffers: tuple[memoryview, memoryview], count: Callable[[int], bool]
) -> Iterator[VerifyError]:
    crc, digest = 0, hashlib.sha256()
    try:
        for segment in region.segments:
            check = _SegmentCheck(region, segment)
            for start, n_bytes in _pieces(segment):
                piece = buffers[0][:n_bytes]
                region.reader(start, piece)
                if segment.in_payload and region.sums is not None:
                    crc = native.crc32c(piece, crc)
                    digest.update(piece)
                yield from check.piece(start, piece, buffers[1])
                if not count(n_bytes):
                    return
    except SourceError as error:
        yield _error(region, None, "read", f"{region.label}: {error.message}", None)
        return
    if region.sums is not None:
        yield from _check_sums(region, crc, digest.digest())


def _check_sums(region: Region, crc: int, digest: bytes) -> Iterator[VerifyError]:
    assert region.sums is not None
    broken = []
    if crc != region.sums.crc32c:
        broken.append(f"CRC-32C: expected {region.sums.crc32c:08x}, found {crc:08x}")
    if digest != region.sums.sha256:
        expected, found = region.sums.sha256.hex()[:16], digest.hex()[:16]
        broken.append(f"SHA-256: expected {expected}..., found {found}...")
    if broken:
        start = region.segments[0].start
        text = f"{region.label} at offset {start} is damaged: {'; '.join(broken)} (format rule 22)"
        yield _error(region, None, "checksum", text, start)


def _pieces(segment: Segment) -> Iterator[tuple[int, int]]:
    unit = 1 if segment.dtype is None else segment.dtype.block_bytes
    size = _PIECE_BYTES // unit * unit
    end = segment.start + segment.n_bytes
    for start in range(segment.start, end, size):
        yield start, min(size, end - start)


class _SegmentCheck:
    """Checks the pieces of one segment; of each kind of error only the first is reported."""

    def __init__(self, region: Region, segment: Segment) -> None:
        self._region = region
        self._segment = segment
        self._find = finder(segment.dtype) if segment.dtype and segment.finite else None
        self._reported: set[ErrorKind] = set()

    def piece(self, start: int, piece: memoryview, scratch: memoryview) -> Iterator[VerifyError]:
        """Check one piece; `scratch` is a buffer of at least its size."""
        segment = self._segment
        if segment.dtype is None:
            yield from self._check_zero(start, piece)
            return
        if self._find is not None and "nonfinite" not in self._reported:
            index = self._find(piece)
            if index is not None:
                weight = self._weight_at(start) + index
                text = f"weight {self._index(weight)} is NaN or infinite"
                at = start + index // segment.dtype.block_weights * segment.dtype.block_bytes
                yield self._report("nonfinite", text, at)
        if segment.origin is not None and "difference" not in self._reported:
            yield from self._check_origin(segment.origin, start, piece, scratch[: len(piece)])

    def _check_zero(self, start: int, piece: memoryview) -> Iterator[VerifyError]:
        array = np.frombuffer(piece, np.uint8)
        if "padding" not in self._reported and array.any():
            at = int(np.flatnonzero(array)[0])
            text = f"byte {start + at}: expected zero, found {array[at]}"
            yield self._report("padding", text, start + at)

    def _check_origin(
        self, origin: Origin, start: int, piece: memoryview, other: memoryview
    ) -> Iterator[VerifyError]:
        dtype = self._segment.dtype
        assert dtype is not None
        origin.read(start - self._segment.start, other)
        ours, theirs = np.frombuffer(piece, np.uint8), np.frombuffer(other, np.uint8)
        differ = ours != theirs
        if not differ.any():
            return
        block = int(np.flatnonzero(differ)[0]) // dtype.block_bytes
        place = slice(block * dtype.block_bytes, (block + 1) * dtype.block_bytes)
        weight = self._weight_at(start) + block * dtype.block_weights
        what = "weight" if dtype.block_weights == 1 else "the quant block of weight"
        text = (
            f"{what} {self._index(weight)}: expected {_show(dtype, piece_of(other, place))} as in "
            f"source tensor {quote(origin.name)}, found {_show(dtype, piece_of(piece, place))}"
        )
        yield self._report("difference", text, start + place.start)

    def _weight_at(self, offset: int) -> int:
        dtype = self._segment.dtype
        assert dtype is not None
        return (offset - self._segment.start) // dtype.block_bytes * dtype.block_weights

    def _index(self, weight: int) -> str:
        return str([int(i) for i in np.unravel_index(weight, self._segment.shape)])

    def _report(self, kind: ErrorKind, text: str, offset: int) -> VerifyError:
        self._reported.add(kind)
        message = f"{self._region.label}, {self._segment.what}: {text}"
        if self._segment.what == self._region.label:
            message = f"{self._region.label}: {text}"
        return _error(self._region, self._segment, kind, message, offset)


def piece_of(view: memoryview, place: slice) -> bytes:
    """Return a part of a view as bytes."""
    return bytes(view[place])


def _show(dtype: DType, raw: bytes) -> str:
    if dtype.block_weights == 1 and finder(dtype) is not None and dtype.np_dtype is not None:
        return str(np.frombuffer(raw, dtype.np_dtype)[0])
    if dtype.name == "bf16":
        return str(native.dequantize(dtype.id, raw, 1)[0])
    return f"bytes {raw[:16].hex()}{'...' if len(raw) > 16 else ''}"


def _error(
    region: Region, segment: Segment | None, kind: ErrorKind, message: str, offset: int | None
) -> VerifyError:
    tensor = region.tensor
    if segment is not None and segment.tensor is not None:
        tensor = segment.tensor
    return VerifyError(kind, message, region.layer, region.expert, tensor, offset)
