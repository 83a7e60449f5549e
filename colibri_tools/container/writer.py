"""Writing a container: a partial file under its own name, complete and on disk before it gets the
final one.

Nothing is created until the plan is checked against every rule, the output name is usable and
the space is there. Whatever ends the job before `seal` removes the partial file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import format as fmt
from colibri_tools.container import reader
from colibri_tools.container.encode import SUM_DTYPE, encode_metadata, encode_page0
from colibri_tools.container.fileops import allocate, fsync_directory, publish
from colibri_tools.container.flusher import Flusher
from colibri_tools.container.layout import ContainerPlan
from colibri_tools.errors import JobError, UsageError, quote, quote_some

__all__ = ["ContainerWriter", "check_output", "check_plan", "check_space", "partial_path"]

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
PathLike = str | os.PathLike[str]

_ZEROS = memoryview(bytes(fmt.MAX_ALIGNMENT))


def partial_path(out_path: PathLike) -> Path:
    """Return the name under which a container is written."""
    out = Path(out_path)
    return out.with_name(f"{out.name}.partial")


def check_output(
    out_path: PathLike,
    *,
    force: bool = False,
    forbid_identities: Collection[tuple[int, int]] = (),
) -> None:
    """Check that a container may be written to `out_path`, touching nothing.

    `forbid_identities` are the (device, inode) of the inputs. Raises UsageError.
    """
    out = Path(out_path)
    place = f"output {quote(os.fspath(out_path))}"
    if not out.name or os.fspath(out_path).endswith(("/", "/.")):
        raise UsageError(f"{place}: expected a file name, found a directory name")
    if not out.parent.is_dir():
        raise UsageError(f"{place}: directory {quote(out.parent)} does not exist")
    for path in (out, partial_path(out)):
        try:
            status = path.stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in forbid_identities:
            raise UsageError(f"{place}: {quote(path)} is an input of this job")
        if path == out and not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise UsageError(f"{place}: expected a file name, found {kind}")
    if os.path.lexists(out) and not force:
        raise UsageError(f"{place} exists; use --force to replace it")


def check_space(out_path: PathLike, n_bytes: int) -> None:
    """Check that the file system of `out_path` has room for `n_bytes`. Raises JobError."""
    available = _available(Path(out_path))
    if available < n_bytes:
        raise JobError(_no_space(Path(out_path), n_bytes, available))


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
    with ContainerWriter(plan, "model.colibri") as writer:
        writer.write_tensor(name, data)            # every tensor that is no alias, once
        writer.write_block(row, expert, payload)   # every block, once
        writer.seal()
    ```
    Tensors and blocks may be written by several threads in any order. Leaving the block without
    `seal`, by an exception or not, removes the partial file.
    """

    def __init__(
        self,
        plan: ContainerPlan,
        out_path: PathLike,
        *,
        force: bool = False,
        forbid_identities: Collection[tuple[int, int]] = (),
    ) -> None:
        self.plan = plan
        self.out_path = Path(out_path)
        self.partial_path = partial_path(out_path)
        self._force = force
        self._forbid_identities = forbid_identities
        self._fd = -1
        self._flusher: Flusher | None = None
        self._lock = threading.Lock()
        self._tensor_numbers = {
            tensor.item.name: i
            for i, tensor in enumerate(plan.tensors)
            if tensor.alias_index is None
        }
        self._tensor_sums = np.zeros(len(plan.tensors), SUM_DTYPE)
        self._block_sums = np.zeros(plan.cells.shape, SUM_DTYPE)
        self._begun: set[str | tuple[int, int]] = set()
        self._done: set[str | tuple[int, int]] = set()

    def __enter__(self) -> ContainerWriter:
        """Check everything, then create the partial file with its full size.

        Raises UsageError (the output name), RuleError (the plan), JobError (space, a partial file
        that exists, a failing file system).
        """
        check_output(self.out_path, force=self._force, forbid_identities=self._forbid_identities)
        check_plan(self.plan)
        check_space(self.out_path, self.plan.file_size)
        self._fd = self._create()
        try:
            allocate(self._fd, self.plan.file_size)
        except BaseException as error:
            self.abort()
            if isinstance(error, OSError):
                raise self._failed("reserving space", error) from error
            raise
        self._flusher = Flusher(self._fd)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

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
        self._begin(name, what)
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
        self._finish(name, self._tensor_sums[number], crc, digest.digest())

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
        self._begin((row, expert), what)
        crc, digest = _crc32c(view, 0), hashlib.sha256(view).digest()
        tail = -len(view) % self.plan.alignment
        self._write(int(self.plan.cells[row, expert]["offset"]), [view, _ZEROS[:tail]], what)
        self._finish((row, expert), self._block_sums[row, expert], crc, digest)

    def seal(self) -> str:
        """Finish the file, give it its final name, and return the container's id (hex).

        Raises JobError if a tensor or block is missing, writing fails, or the final name appeared
        meanwhile; then the partial file is removed.
        """
        try:
            return self._seal()
        except OSError as error:
            raise self._failed("finishing the file", error) from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the partial file, unless the container is sealed. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if self._flusher is not None:
                with contextlib.suppress(OSError):  # the file is going away
                    self._flusher.stop()
        finally:
            # Removed before it is closed: the lock goes with the descriptor.
            _unlink_if_same(self.partial_path, fd)
            os.close(fd)

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self.partial_path, flags, 0o666)
        except FileExistsError:
            raise JobError(_partial_exists(self.partial_path)) from None
        except OSError as error:
            raise self._failed("creating the file", error) from error
        # Only for a clearer message to a second job; O_EXCL is what keeps the two apart.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def _begin(self, key: str | tuple[int, int], what: str) -> None:
        with self._lock:
            if key in self._begun:
                raise JobError(f"{self.out_path}: {what} is written twice")
            self._begun.add(key)

    def _finish(
        self, key: str | tuple[int, int], sums: npt.NDArray[np.void], crc: int, digest: bytes
    ) -> None:
        with self._lock:
            sums["crc32c"] = crc
            sums["sha256"] = np.frombuffer(digest, np.uint8)
            self._done.add(key)

    def _write(self, offset: int, buffers: list[memoryview], what: str) -> None:
        if self._flusher is None or self._fd < 0:
            raise UsageError(f"{self.out_path}: the writer is not open")
        try:
            self._flusher.wrote(_pwrite_all(self._fd, offset, buffers))
        except OSError as error:
            raise self._failed(f"writing {what} at {offset}", error) from error

    def _seal(self) -> str:
        if self._flusher is None or self._fd < 0:
            raise UsageError(f"{self.out_path}: the writer is not open")
        self._check_complete()
        self._flusher.stop()
        sections, page0 = _encode(self.plan, self._tensor_sums, self._block_sums)
        for _, offset, data in sections:
            _pwrite_all(self._fd, offset, [memoryview(data)])
        os.fsync(self._fd)
        _pwrite_all(self._fd, 0, [memoryview(page0)])
        os.fsync(self._fd)
        with reader.open(self.partial_path) as written:
            container_id = written.id
        if self._force:  # what has the name now is not what was checked at the start
            check_output(self.out_path, force=True, forbid_identities=self._forbid_identities)
        publish(self.partial_path, self.out_path, replace=self._force)
        os.close(self._fd)
        self._fd = -1
        fsync_directory(self.out_path.parent)
        return container_id

    def _check_complete(self) -> None:
        missing = [f"tensor {name}" for name in self._tensor_numbers if name not in self._done]
        missing += [
            f"layer {self.plan.rows[row].layer} expert {expert}"
            for row, expert in self.plan.order
            if (row, expert) not in self._done
        ]
        if missing:
            raise JobError(
                f"{self.out_path}: {len(missing)} tensors and blocks were not written: "
                f"{quote_some(missing)}"
            )

    def _failed(self, doing: str, error: OSError) -> JobError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            available = _available(self.out_path)
            return JobError(_no_space(self.out_path, self.plan.file_size, available))
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


def _pwrite_all(fd: int, offset: int, buffers: list[memoryview]) -> int:
    """Write all buffers one after the other from `offset` on and return their size."""
    todo = [buffer for buffer in buffers if len(buffer)]
    total = sum(map(len, todo))
    while todo:
        n = os.pwritev(fd, todo, offset)
        offset += n
        while todo and n >= len(todo[0]):
            n -= len(todo.pop(0))
        if n:
            todo[0] = todo[0][n:]
    return total


def _unlink_if_same(path: Path, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            path.unlink()


def _partial_exists(path: Path) -> str:
    if _is_locked(path):
        return f"{path}: another job is writing this file; wait for it or choose another output"
    return f"{path} is left from a job that was interrupted; delete it and start again"


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _available(out: Path) -> int:
    status = os.statvfs(out.parent)
    return status.f_bavail * status.f_frsize


def _no_space(out: Path, needed: int, available: int) -> str:
    return f"{out}: not enough disk space: {needed} bytes needed, {available} available"
