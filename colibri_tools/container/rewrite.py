"""Rewriting the metadata of a container in place (docs/format.md, rules 25-27).

Everything in front of the data is replaced, nothing behind it is touched. Before the first byte
changes, a copy of what was there is on disk beside the container; until the last one is, page 0
is zero, so that no reader takes a mixture for a container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from colibri_tools.container import format as fmt
from colibri_tools.container import reader
from colibri_tools.container.encode import fill_section_table
from colibri_tools.container.fileops import backup_path, fsync_directory, pwrite_all
from colibri_tools.container.format import align
from colibri_tools.errors import FormatError, JobError, SourceError, quote

__all__ = ["NoRoomError", "locked", "rebuilt_head", "restore", "write_head"]

_MAX_HEAD_BYTES = fmt.PAGE0_BYTES + 4 * (fmt.MAX_METADATA_BYTES + (8 << 20))  # rule 8


class NoRoomError(JobError):
    """The new metadata do not fit in front of the data."""


def rebuilt_head(head: bytes, replaced: Mapping[int, bytes], path: str) -> bytes:
    """Return `head`, the bytes before a sound container's data, with some sections replaced or new.

    Raises JobError if it holds something that this version does not know and could break, or if
    the new sections do not fit.
    """
    from colibri_tools import native  # late: importing the package must not need the C extension

    page = np.frombuffer(head[: fmt.PAGE0_BYTES], fmt.PAGE0_DTYPE)[0].copy().reshape(())
    table = page["sections"][: int(page["n_sections"])]
    kinds = set(table["kind"].tolist())
    strangers = sorted(kinds - {*fmt.REQUIRED_SECTIONS, fmt.SectionKind.TOKENIZER})
    if strangers or page["optional_features"]:
        what = f"section kind {strangers[0]}" if strangers else "an optional feature"
        raise JobError(
            f"{path}: it has {what}, which this version does not know and might break; "
            "use the version that made it"
        )
    places = {int(entry["kind"]): (int(entry["offset"]), int(entry["n_bytes"])) for entry in table}
    sections: list[tuple[int, int, bytes]] = []
    end = fmt.PAGE0_BYTES
    for kind in sorted(kinds | set(replaced)):
        old, n_bytes = places.get(kind, (0, 0))
        data = replaced.get(kind, head[old : old + n_bytes])
        sections.append((kind, align(end, fmt.DATUM_ALIGN), data))
        end = sections[-1][1] + len(data)
    if end > len(head):
        raise NoRoomError(
            f"{path}: the new metadata need {end - len(head)} bytes more than the "
            f"{len(head)} in front of the data; repack the checkpoint"
        )
    fill_section_table(page, sections, native.crc32c)
    new = bytearray(len(head))
    new[: fmt.PAGE0_BYTES] = page.tobytes()
    for _, offset, data in sections:
        new[offset : offset + len(data)] = data
    return bytes(new)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open a container for writing, this process alone. Raises JobError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise JobError(f"{path}: cannot be opened for writing: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"{path}: another job is rewriting it; wait for it") from None
        except OSError as error:
            raise JobError(f"{path}: cannot be locked: {error.strerror}") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not os.path.samestat(status, path.stat()):
            raise JobError(f"{path}: expected a container, found that it is being replaced")
        yield fd
    finally:
        os.close(fd)


def write_head(fd: int, path: Path, old: bytes, new: bytes) -> None:
    """Replace `old`, which is in front of the data, by `new` of the same size.

    A failure brings `old` back and raises JobError. After a kill or a power cut, `restore` does.
    """
    assert len(old) == len(new)
    reader.open_bytes(new, os.fstat(fd).st_size, str(path)).close()
    backup = backup_path(path)
    try:
        _write_backup(backup, old, os.fstat(fd).st_mode)
        try:
            _overwrite(fd, new)
        except BaseException:
            _overwrite(fd, old)
            raise
    except OSError as error:
        raise _failed(path, backup, error) from error
    except BaseException:
        _remove(backup)
        raise
    _remove(backup)


def restore(fd: int, path: Path) -> str | None:
    """Undo a rewrite that was interrupted; return what was done, None if there was none.

    Raises JobError, touching nothing, if neither the container nor the copy can be trusted.
    """
    backup = backup_path(path)
    if not os.path.lexists(backup):
        return None
    try:
        reader.open(path).close()
    except FormatError:
        _overwrite_checked(fd, path, _read_backup(fd, path, backup))
        _remove(backup)
        return "an earlier respec was interrupted; its changes are undone"
    if not _begins_like_a_copy(backup):
        raise JobError(
            f"{backup}: expected the copy of metadata, found something else; move it away"
        )
    _remove(backup)
    return f"an earlier respec was interrupted; the container is whole, {backup.name} is removed"


def _begins_like_a_copy(backup: Path) -> bool:
    """True for a copy, also for one of which only a part or zeros reached the disk."""
    if not stat.S_ISREG(backup.lstat().st_mode):
        return False
    with backup.open("rb") as file:
        begin = file.read(len(fmt.MAGIC))
    return fmt.MAGIC.startswith(begin) or not any(begin)


def _overwrite(fd: int, head: bytes) -> None:
    """Page 0 becomes zero, then everything else new, then page 0, each on disk before the next."""
    for offset, data in (
        (0, bytes(fmt.PAGE0_BYTES)),
        (fmt.PAGE0_BYTES, head[fmt.PAGE0_BYTES :]),
        (0, head[: fmt.PAGE0_BYTES]),
    ):
        pwrite_all(fd, offset, [memoryview(data)])
        os.fsync(fd)


def _overwrite_checked(fd: int, path: Path, head: bytes) -> None:
    try:
        _overwrite(fd, head)
    except OSError as error:
        raise _failed(path, backup_path(path), error) from error


def _write_backup(backup: Path, head: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(backup, flags, stat.S_IMODE(mode) & 0o666)
    try:
        pwrite_all(fd, 0, [memoryview(head)])
        os.fsync(fd)
        fsync_directory(backup.parent)
    except BaseException:
        backup.unlink()
        raise
    finally:
        os.close(fd)


def _remove(backup: Path) -> None:
    # Left behind it does no harm: the container is whole, and the next respec removes it.
    with contextlib.suppress(OSError):
        backup.unlink()
        fsync_directory(backup.parent)


def _read_backup(fd: int, path: Path, backup: Path) -> bytes:
    """Return the copy if it is whole and belongs to the data of this file."""
    size = os.fstat(fd).st_size
    try:
        copy = os.open(backup, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise JobError(f"{backup}: cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(copy)
        if not stat.S_ISREG(status.st_mode) or status.st_size > min(size, _MAX_HEAD_BYTES):
            raise JobError(f"{backup}: expected a copy of metadata, found something else")
        with os.fdopen(os.dup(copy), "rb") as file:
            head = file.read()
    finally:
        os.close(copy)
    try:
        with reader.open_bytes(head, size, str(backup)) as container:
            fits = len(head) == container.data_offset and _data_is_of(fd, container)
    except (FormatError, SourceError) as error:
        raise JobError(
            f"{path}: left damaged by an interrupted respec, and the copy of its metadata cannot "
            f"be used: {error.message}; repack the checkpoint"
        ) from error
    if not fits:
        raise JobError(
            f"{path}: it is damaged, and {quote(backup.name)} is the copy of another container's "
            "metadata; remove it, and repack the checkpoint"
        )
    return head


def _data_is_of(fd: int, container: reader.Container) -> bool:
    """True if the first and the last block of the file are those that the index describes."""
    cells = container.index[container.index["flags"] == fmt.CELL_PRESENT]
    for cell in (cells[cells["rank"].argmin()], cells[cells["rank"].argmax()]):
        digest, offset, left = hashlib.sha256(), int(cell["offset"]), int(cell["n_bytes"])
        while left and (data := os.pread(fd, min(left, 1 << 20), offset)):
            digest.update(data)
            offset, left = offset + len(data), left - len(data)
        if left or digest.digest() != cell["sha256"].tobytes():
            return False
    return True


def _failed(path: Path, backup: Path, error: OSError) -> JobError:
    reason = "no space left" if error.errno == errno.ENOSPC else error.strerror or str(error)
    if isinstance(error, FileExistsError):
        return JobError(f"{path}: {quote(backup.name)} appeared beside it meanwhile")
    try:
        reader.open(path).close()
    except FormatError:
        return JobError(
            f"{path}: rewriting its metadata failed: {reason}; it cannot be read until 'colibri "
            f"respec' brings them back from {quote(backup.name)}"
        )
    _remove(backup)
    return JobError(f"{path}: rewriting its metadata failed: {reason}; it is as it was")
