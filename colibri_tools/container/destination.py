"""The names of a container that is being written, checked before anything is touched."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from colibri_tools.container.journal import Journal, journal_path
from colibri_tools.errors import ColibriError, JobError, UsageError, quote

__all__ = ["available_bytes", "check_output", "check_space", "no_space", "partial_path"]

PathLike = str | os.PathLike[str]


def partial_path(out_path: PathLike) -> Path:
    """Return the name under which a container is written."""
    out = Path(out_path)
    return out.with_name(f"{out.name}.partial")


def check_output(
    out_path: PathLike,
    *,
    force: bool = False,
    forbid_identities: Collection[tuple[int, int]] = (),
    sweep: bool = True,
) -> None:
    """Check that a container may be written to `out_path`.

    `forbid_identities` are the (device, inode) of the inputs. Raises UsageError. Touches nothing
    but, with `sweep`, the leftovers of a job that was ended between its last two steps.
    """
    out = Path(out_path)
    place = f"output {quote(os.fspath(out_path))}"
    if not out.name or os.fspath(out_path).endswith(("/", "/.")):
        raise UsageError(f"{place}: expected a file name, found a directory name")
    if not out.parent.is_dir():
        raise UsageError(f"{place}: directory {quote(out.parent)} does not exist")
    for path in (out, partial_path(out), journal_path(out)):
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
        if sweep:
            _sweep(out)
        raise UsageError(f"{place} exists; use --force to replace it")


def check_space(out_path: PathLike, n_bytes: int) -> None:
    """Check that the file system of `out_path` has room for `n_bytes`. Raises JobError.

    What a partial file of an earlier job occupies counts as free: it is used or discarded.
    """
    out = Path(out_path)
    available = available_bytes(out) + _occupied(partial_path(out))
    if available < n_bytes:
        raise JobError(no_space(out, n_bytes, available))


def available_bytes(out: Path) -> int:
    """Return the bytes that may still be written to the file system of `out`."""
    status = os.statvfs(out.parent)
    return status.f_bavail * status.f_frsize


def no_space(out: Path, needed: int, available: int) -> str:
    """Return the message for a full disk."""
    return f"{out}: not enough disk space: {needed} bytes needed, {available} available"


def _occupied(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _sweep(out: Path) -> None:
    """Remove the journal of a finished container, left by a kill between rename and removal."""
    partial, journal_name = partial_path(out), journal_path(out)
    if not journal_name.is_file() or journal_name.is_symlink():
        return
    if os.path.lexists(partial) and not partial.samefile(out):
        return
    try:
        journal = Journal(journal_name)
    except (ColibriError, OSError):
        return
    if journal.facts is None:
        journal.close()
        return
    partial.unlink(missing_ok=True)
    journal.remove()
