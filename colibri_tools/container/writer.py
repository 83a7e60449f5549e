"""Writing a container: a partial file under its own name, complete and on disk before it gets the
final one, and a journal beside it that lets a later job go on where this one stops.

Nothing is created until the plan is checked against every rule, the output name is usable and
the space is there. A refusal leaves nothing behind; a failure or an interruption leaves both
files if the journal has anything to go on with. docs/reliability.md says what is promised.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import format as fmt
from colibri_tools.container import reader
from colibri_tools.container.destination import (
    available_bytes,
    check_output,
    check_space,
    no_space,
    partial_path,
)
from colibri_tools.container.encode import SUM_DTYPE, encode_metadata, encode_page0
from colibri_tools.container.fileops import allocate, fsync_directory, publish, pwrite_all
from colibri_tools.container.flusher import Flusher
from colibri_tools.container.journal import Entry, EntryKind, Key
from colibri_tools.container.layout import ContainerPlan
from colibri_tools.container.workfiles import SourceState, WorkFiles
from colibri_tools.errors import (
    ColibriError,
    JobError,
    ReadError,
    UsageError,
    add_hint,
    quote,
    quote_some,
)

__all__ = ["ContainerWriter", "check_output", "check_plan", "check_space", "partial_path"]

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
PathLike = str | os.PathLike[str]

_ZEROS = memoryview(bytes(fmt.MAX_ALIGNMENT))
_CHECK_BYTES = 4 << 20
"""What an earlier job wrote is read back in pieces of this size, one for each thread."""


def check_plan(plan: ContainerPlan) -> None:
    """Check a plan against every rule that does not concern payload bytes. Raises RuleError.

    This is the reader's own check of the metadata that the plan gives, with zero checksums for
    data.
    """
    sections, page0 = _encode(
        plan, np.zeros(len(plan.tensors), SUM_DTYPE), np.zeros(plan.cells.shape, SUM_DTYPE)
    )
    head = bytearray(plan.data_offset)
    head[: len(page0)] = page0
    for _, offset, data in sections:
        head[offset : offset + len(data)] = data
    reader.open_bytes(head, plan.file_size, "plan").close()


class ContainerWriter:
    """Writes the container of a plan; use it as a context manager.

    ```
    with ContainerWriter(plan, "model.colibri", sources=states) as writer:
        if not writer.keep_tensor(name):               # every tensor that is no alias, once
            writer.write_tensor(name, data)
        if not writer.keep_block(row, expert):         # every block, once
            writer.write_block(row, expert, payload)
        writer.seal()
    ```
    Tensors and blocks may be kept or written by several threads in any order. Leaving without
    `seal` keeps what is journaled for a later job with the same plan and sources, and says so in
    the exception on its way; after a refusal (any ColibriError but JobError and ReadError)
    both files are removed.
    """

    def __init__(
        self,
        plan: ContainerPlan,
        out_path: PathLike,
        *,
        force: bool = False,
        restart: bool = False,
        forbid_identities: Collection[tuple[int, int]] = (),
        sources: Sequence[SourceState] = (),
    ) -> None:
        """`restart` discards what an earlier job left; `sources` must be equal to go on with it."""
        self.plan = plan
        self.out_path = Path(out_path)
        self.partial_path = partial_path(out_path)
        self.n_kept = 0
        self.n_damaged = 0
        self._force = force
        self._restart = restart
        self._forbid_identities = forbid_identities
        self._sources = sources
        self._files: WorkFiles | None = None
        self._flusher: Flusher | None = None
        self._lock = threading.Condition()
        self._n_users = 0
        self._tensor_numbers = {
            tensor.item.name: i
            for i, tensor in enumerate(plan.tensors)
            if tensor.alias_index is None
        }
        self._tensor_sums = np.zeros(len(plan.tensors), SUM_DTYPE)
        self._block_sums = np.zeros(plan.cells.shape, SUM_DTYPE)
        self._begun: set[Key] = set()
        self._done: set[Key] = set()

    def __enter__(self) -> ContainerWriter:
        """Check everything, then create the partial file with its full size, or take it over.

        Raises UsageError (the output name, a partial file of another plan), RuleError (the plan),
        JobError (space, another job, a failing file system).
        """
        self._check_output()
        check_plan(self.plan)
        check_space(self.out_path, self.plan.file_size)
        try:
            self._files = WorkFiles(
                self.out_path,
                self.plan,
                self._sources,
                check=lambda: self._check_output(sweep=False),
                restart=self._restart,
            )
        except OSError as error:
            raise self._failed("creating the file", error) from error
        try:
            self._prepare(self._files)
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    @property
    def resumed(self) -> bool:
        """True if an earlier job's files were taken over."""
        return self._files is not None and self._files.resumed

    def keep_tensor(self, name: str) -> bool:
        """Return True if an earlier job wrote the tensor, then it must not be written again.

        Its bytes are read back and compared with the journal's checksums.
        """
        number = self._tensor_numbers.get(name)
        if number is None:
            return False
        planned = self.plan.tensors[number]
        key = (int(EntryKind.TENSOR), number, 0)
        return self._keep(key, self._tensor_sums[number], planned.offset, planned.n_bytes, 0)

    def keep_block(self, row: int, expert: int) -> bool:
        """Return True if an earlier job wrote the block, as `keep_tensor`."""
        n_bytes = self.plan.layout_of(row, expert).n_bytes
        offset = int(self.plan.cells[row, expert]["offset"])
        key = (int(EntryKind.BLOCK), row, expert)
        tail = -n_bytes % self.plan.alignment
        return self._keep(key, self._block_sums[row, expert], offset, n_bytes, tail)

    def write_tensor(self, name: str, data: Buffer | Iterable[Buffer]) -> None:
        """Write all bytes of a resident tensor, whole or in consecutive chunks.

        Raises UsageError for a tensor that the plan does not have, an alias or a wrong number of
        bytes, JobError if it was written before or writing fails.
        """
        number = self._tensor_numbers.get(name)
        if number is None:
            planned = self.plan.tensor(name)
            raise UsageError(f"tensor {quote(name)} is an alias of {quote(planned.item.alias_of)}")
        planned = self.plan.tensors[number]
        what = f"tensor {quote(name)}"
        key = (int(EntryKind.TENSOR), number, 0)
        self._begin(key, what)
        crc, digest, done = 0, hashlib.sha256(), 0
        for chunk in _chunks(data):
            view = _byte_view(chunk)
            if done + len(view) > planned.n_bytes:
                raise UsageError(f"{what}: expected {planned.n_bytes} bytes, found more")
            crc = _crc32c(view, crc)
            digest.update(view)
            self._write(planned.offset + done, [view], what)
            done += len(view)
        if done != planned.n_bytes:
            raise UsageError(f"{what}: expected {planned.n_bytes} bytes, found {done}")
        self._finish(Entry(key, crc, digest.digest()), self._tensor_sums[number])

    def write_block(self, row: int, expert: int, payload: Buffer) -> None:
        """Write one expert's block: the parts of its layout with zero bytes between them.

        Raises UsageError for a block that the plan does not have or a wrong number of bytes,
        JobError if it was written before or writing fails.
        """
        layout = self.plan.layout_of(row, expert)
        what = f"layer {self.plan.rows[row].layer} expert {expert} (row {row})"
        view = _byte_view(payload)
        if len(view) != layout.n_bytes:
            raise UsageError(f"{what}: expected {layout.n_bytes} bytes, found {len(view)}")
        key = (int(EntryKind.BLOCK), row, expert)
        self._begin(key, what)
        crc, digest = _crc32c(view, 0), hashlib.sha256(view).digest()
        tail = -len(view) % self.plan.alignment
        self._write(int(self.plan.cells[row, expert]["offset"]), [view, _ZEROS[:tail]], what)
        self._finish(Entry(key, crc, digest), self._block_sums[row, expert])

    def seal(self) -> str:
        """Finish the file, give it its final name, and return the container's id (hex).

        Raises JobError if a tensor or block is missing, writing fails, or the final name appeared
        meanwhile.
        """
        try:
            return self._seal()
        except OSError as error:
            failed = self._failed("finishing the file", error)
            self._end(failed)
            raise failed from error
        except BaseException as error:
            self._end(error)
            raise

    def _prepare(self, files: WorkFiles) -> None:
        try:
            allocate(files.fd, self.plan.file_size)
            if files.resumed:
                for offset, n_bytes in _gaps(self.plan):
                    _write_zeros(files.fd, offset, n_bytes)
        except OSError as error:
            raise self._failed("reserving space", error) from error
        self._flusher = Flusher(files.fd, files.journal)

    def _end(self, error: BaseException | None) -> None:
        """Close both files, unless that is done, and keep or remove them."""
        with self._lock:
            files, self._files = self._files, None
            self._lock.wait_for(lambda: self._n_users == 0)
        if files is None:
            return
        done = _is_refusal(error) or _is_published(self.out_path, files.fd)
        self._stop_flusher(flush=not done)
        if done or not files.is_worth_keeping:
            with contextlib.suppress(OSError):  # a leftover is swept by a later job
                files.discard()
            return
        if error is not None:
            add_hint(error, files.describe())
        files.close()

    def _stop_flusher(self, *, flush: bool) -> None:
        if self._flusher is None:
            return
        with contextlib.suppress(OSError):  # reported before, or the job has another error
            self._flusher.stop()
            if flush:
                self._flusher.flush()

    @contextlib.contextmanager
    def _using(self) -> Iterator[WorkFiles]:
        """Keep the files open while a thread works on them."""
        with self._lock:
            if self._files is None:
                raise UsageError(f"{self.out_path}: the writer is not open")
            files = self._files
            self._n_users += 1
        try:
            yield files
        finally:
            with self._lock:
                self._n_users -= 1
                self._lock.notify_all()

    def _keep(
        self, key: Key, sums: npt.NDArray[np.void], offset: int, n_bytes: int, tail: int
    ) -> bool:
        with self._using() as files:
            entry = files.kept.get(key)
            if entry is None or key in self._begun:
                return False
            sound = _is_sound(files.fd, offset, n_bytes, tail, entry)
        with self._lock:
            self.n_kept += sound
            self.n_damaged += not sound
            if sound:
                self._begun.add(key)
                self._record(entry, sums)
        return sound

    def _begin(self, key: Key, what: str) -> None:
        with self._lock:
            if key in self._begun:
                raise JobError(f"{self.out_path}: {what} is written twice")
            self._begun.add(key)

    def _finish(self, entry: Entry, sums: npt.NDArray[np.void]) -> None:
        assert self._flusher is not None
        with self._lock:
            self._record(entry, sums)
        self._flusher.finished(entry)

    def _record(self, entry: Entry, sums: npt.NDArray[np.void]) -> None:
        sums["crc32c"] = entry.crc32c
        sums["sha256"] = np.frombuffer(entry.sha256, np.uint8)
        self._done.add(entry.key)

    def _write(self, offset: int, buffers: list[memoryview], what: str) -> None:
        with self._using() as files:
            assert self._flusher is not None
            try:
                self._flusher.wrote(pwrite_all(files.fd, offset, buffers))
            except OSError as error:
                raise self._failed(f"writing {what} at {offset}", error) from error

    def _seal(self) -> str:
        with self._using() as files:
            assert self._flusher is not None
            self._check_complete()
            self._flusher.stop()
            sections, page0 = _encode(self.plan, self._tensor_sums, self._block_sums)
            for _, offset, data in sections:
                pwrite_all(files.fd, offset, [memoryview(data)])
            self._flusher.sync()
            pwrite_all(files.fd, 0, [memoryview(page0)])
            self._flusher.sync()
            with reader.open(self.partial_path) as written:
                container_id = written.id
            if self._force:  # what has the name now is not what was checked at the start
                self._check_output(sweep=False)
            publish(self.partial_path, self.out_path, replace=self._force)
        try:
            fsync_directory(self.out_path.parent)
        except OSError as error:
            raise JobError(
                f"{self.out_path}: the file is complete, but a power cut may take its name away: "
                f"syncing the directory failed: {error.strerror}"
            ) from error
        self._end(None)
        return container_id

    def _check_output(self, *, sweep: bool = True) -> None:
        check_output(
            self.out_path,
            force=self._force,
            forbid_identities=self._forbid_identities,
            sweep=sweep,
        )

    def _check_complete(self) -> None:
        missing = [
            f"tensor {name}"
            for name, number in self._tensor_numbers.items()
            if (EntryKind.TENSOR, number, 0) not in self._done
        ]
        missing += [
            f"layer {self.plan.rows[row].layer} expert {expert}"
            for row, expert in self.plan.order
            if (EntryKind.BLOCK, row, expert) not in self._done
        ]
        if missing:
            raise JobError(
                f"{self.out_path}: {len(missing)} tensors and blocks were not written: "
                f"{quote_some(missing)}"
            )

    def _failed(self, doing: str, error: OSError) -> JobError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            available = available_bytes(self.out_path)
            return JobError(no_space(self.out_path, self.plan.file_size, available))
        if error.errno == errno.EFBIG:
            return JobError(
                f"{self.out_path}: {doing} failed: a file of {self.plan.file_size} bytes is above "
                "the limit of the file system or of this process (ulimit -f)"
            )
        if isinstance(error, FileExistsError):
            return JobError(
                f"{self.out_path}: another file appeared there meanwhile; it is left as it is"
            )
        return JobError(f"{self.out_path}: {doing} failed: {error.strerror or error}")


def _encode(
    plan: ContainerPlan, tensor_sums: npt.NDArray[np.void], block_sums: npt.NDArray[np.void]
) -> tuple[list[tuple[Any, int, bytes]], bytes]:
    sections = encode_metadata(plan, tensor_sums, block_sums)
    return sections, encode_page0(plan, sections, _crc32c)


def _crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    from colibri_tools import native  # late: importing the package must not need the C extension

    return native.crc32c(data, crc)


def _chunks(data: Buffer | Iterable[Buffer]) -> Iterable[Buffer]:
    return [data] if isinstance(data, (bytes, bytearray, memoryview, np.ndarray)) else data


def _byte_view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy arrays are buffers
    if not view.c_contiguous:
        raise UsageError("a buffer to write must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _write_zeros(fd: int, offset: int, n_bytes: int) -> None:
    for start in range(0, n_bytes, len(_ZEROS)):
        pwrite_all(fd, offset + start, [_ZEROS[: min(len(_ZEROS), n_bytes - start)]])


def _gaps(plan: ContainerPlan) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of all that no tensor and no block covers: metadata and padding."""
    end = 0
    starts = sorted((t.offset, t.end) for t in plan.tensors if t.alias_index is None)
    for start, next_end in [*starts, (plan.expert_offset, 0)]:
        if start > end:
            yield end, start - end
        end = next_end


def _is_sound(fd: int, offset: int, n_bytes: int, tail: int, entry: Entry) -> bool:
    """Tell whether the file has the bytes of an entry, and `tail` zeros behind them."""
    buffer = memoryview(bytearray(min(n_bytes + tail, _CHECK_BYTES)))
    crc, digest = 0, hashlib.sha256()
    try:
        for start in range(0, n_bytes, len(buffer)):
            piece = buffer[: min(len(buffer), n_bytes - start)]
            _pread_all(fd, offset + start, piece)
            crc = _crc32c(piece, crc)
            digest.update(piece)
        padding = buffer[:tail] if tail <= len(buffer) else memoryview(bytearray(tail))
        _pread_all(fd, offset + n_bytes, padding)
        os.posix_fadvise(fd, offset, n_bytes + tail, os.POSIX_FADV_DONTNEED)
    except OSError:  # a bad sector: writing it again may help
        return False
    return crc == entry.crc32c and digest.digest() == entry.sha256 and padding == _ZEROS[:tail]


def _pread_all(fd: int, offset: int, buffer: memoryview) -> None:
    while len(buffer):
        n = os.preadv(fd, [buffer], offset)
        if n == 0:
            raise OSError(errno.EIO, "the file has become shorter")
        buffer = buffer[n:]
        offset += n


def _is_refusal(error: BaseException | None) -> bool:
    """True if nothing that was made can be of use: the input or the call is wrong."""
    return isinstance(error, ColibriError) and not isinstance(error, (JobError, ReadError))


def _is_published(out_path: Path, fd: int) -> bool:
    """True if the file has its final name, whatever was raised since."""
    try:
        return os.path.samestat(out_path.lstat(), os.fstat(fd))
    except OSError:
        return False
