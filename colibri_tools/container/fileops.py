"""What the os module lacks for writing a file safely: fallocate, whole writes, rename
without replacing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from pathlib import Path

__all__ = [
    "allocate",
    "backup_path",
    "fsync_directory",
    "publish",
    "pwrite_all",
    "unlink_if_same",
]

_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def allocate(fd: int, n_bytes: int) -> None:
    """Give a file `n_bytes`, new ones zero, with disk space behind them where possible.

    glibc's posix_fallocate would write a byte per page where the file system has no support, so
    the system call is used and such a file system gets a sparse file. Raises OSError (ENOSPC).
    """
    if os.fstat(fd).st_size > n_bytes:
        os.ftruncate(fd, n_bytes)
    if sys.platform == "linux":
        libc = _libc()
        # off_t is 64-bit in the LFS entry points; on 64-bit systems the plain name is the same.
        call = getattr(libc, "fallocate64", None) or libc.fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        while call(fd, 0, 0, n_bytes) != 0:
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        else:
            return
    os.ftruncate(fd, n_bytes)


def backup_path(path: str | os.PathLike[str]) -> Path:
    """Return where a rewrite of a container's metadata keeps what was there before."""
    real = Path(os.path.realpath(path))
    return real.with_name(f"{real.name}.respec")


def publish(partial: Path, final: Path, *, replace: bool) -> None:
    """Give `partial` the name `final` in one step.

    Raises FileExistsError if `final` exists and `replace` is false, also when it appeared a
    moment ago; OSError if the file system refuses.
    """
    if replace:
        partial.replace(final)
    elif not _rename_noreplace(partial, final):
        final.hardlink_to(partial)
        partial.unlink()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable, where directories can be synced."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def pwrite_all(fd: int, offset: int, buffers: list[memoryview]) -> int:
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


def unlink_if_same(path: Path, fd: int) -> None:
    """Remove the name `path` if it still leads to the open file."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            path.unlink()


def _rename_noreplace(old: Path, new: Path) -> bool:
    """Rename; return False, having done nothing, where the system has no such call."""
    call = getattr(_libc(), "renameat2", None) if sys.platform == "linux" else None
    if call is None:
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    result = call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(new))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
