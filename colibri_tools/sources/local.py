"""Local files and folders, opened so that a hostile checkpoint cannot reach outside itself.

Path rules
1. A *name* from inside a checkpoint (index, split set) is judged as text first: relative, no "..",
   no backslash, no drive letter, no NUL, no empty part.
2. Every folder on the way is a real directory, not a link.
3. The file is a regular file; FIFOs and devices are refused without opening them.
4. The file may be a link if each of at most `MAX_LINK_HOPS` hops stays inside the folder, or inside
   the `blobs/` of the Hub cache repository that the folder belongs to.
What the *user* typed is trusted: links in it are followed before the rules start.
"""

# The rules tell text from what it resolves to; pathlib blurs that ("a//b", "./a").
# ruff: noqa: PTH112, PTH114, PTH115, PTH116, PTH118, PTH119, PTH120, PTH208

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colibri_tools.errors import ReadError, SourceError, quote
from colibri_tools.sources.files import check_name

__all__ = [
    "MAX_LINK_HOPS",
    "MAX_NAMES",
    "LocalFile",
    "LocalFolder",
    "is_directory",
    "user_file",
]

MAX_LINK_HOPS = 2
"""Hub cache snapshots need one hop; deduplicated caches two."""

MAX_NAMES = 100_000
"""A folder with more entries is not a checkpoint."""

_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO swapped in after the check must not hang us
    | getattr(os, "O_BINARY", 0)
)
_MAX_PREAD = 1 << 30
_MAX_USER_LINKS = 40  # as the system does
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r".+\.(incomplete|aria2|part|crdownload|partial|download)")
_FILE_TYPES = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What identifies one state of a file's contents."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> _Stamp:
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


class LocalFile:
    """A regular file opened read-only; see `RangeFile` for the contract of each member."""

    def __init__(self, name: str, path: str, real_path: str) -> None:
        """Open `real_path`, which must not be a link. Raises SourceError if that fails."""
        self.name = name
        self.path = path
        self._real_path = real_path
        self._fd = _open_regular(path, real_path)
        self._stamp = _Stamp.of(os.fstat(self._fd))
        self.size = self._stamp.size

    @property
    def identity(self) -> tuple[int, int] | None:
        return self._stamp.device, self._stamp.inode

    @property
    def stamp(self) -> str:
        return str(self._stamp.mtime_ns)

    @property
    def blob_sha256(self) -> str | None:
        # The Hub cache names a large file's blob by its SHA-256; a small file's by a git hash.
        base = os.path.basename(self._real_path)
        in_blobs = os.path.basename(os.path.dirname(self._real_path)) == "blobs"
        return base if in_blobs and _SHA256_NAME.fullmatch(base) else None

    def read_into(self, offset: int, out: memoryview, what: str) -> None:
        done = 0
        while done < out.nbytes:
            n_bytes = self._pread(offset + done, out[done : done + _MAX_PREAD], what)
            if n_bytes == 0:
                raise SourceError(
                    f"{self.path}: {what}: expected {out.nbytes} bytes at offset {offset}, found "
                    f"{done}; the file has become shorter, it had {self.size} bytes when opened"
                )
            done += n_bytes

    def _pread(self, offset: int, out: memoryview, what: str) -> int:
        # Python itself repeats a call interrupted by a signal (PEP 475).
        if self._fd < 0:
            raise SourceError(f"{self.path}: {what}: read after the source was closed")
        try:
            return _pread_into(self._fd, out, offset)
        except OSError as error:
            raise ReadError(
                f"{self.path}: {what}: cannot read {out.nbytes} bytes at offset {offset}: "
                f"{error.strerror}; check the drive, or fetch the file again"
            ) from error

    def check_unchanged(self) -> None:
        try:
            now = _Stamp.of(os.stat(self._real_path, follow_symlinks=False))
        except OSError as error:
            raise ReadError(f"{self.path}: the source went away: {error.strerror}") from error
        if now != self._stamp:
            raise SourceError(
                f"{self.path}: the source changed while it was read (expected {self._stamp.size} "
                f"bytes, found {now.size}, or another inode or time); run again once it is still"
            )

    def advise_sequential(self) -> None:
        self._advise(0, 0, "POSIX_FADV_SEQUENTIAL")

    def will_need(self, offset: int, n_bytes: int) -> None:
        self._advise(offset, n_bytes, "POSIX_FADV_WILLNEED")

    def drop(self, offset: int, n_bytes: int) -> None:
        if n_bytes > 0:  # a length of 0 would mean the whole file
            self._advise(offset, n_bytes, "POSIX_FADV_DONTNEED")

    def _advise(self, offset: int, n_bytes: int, advice: str) -> None:
        if self._fd >= 0 and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, offset, n_bytes, getattr(os, advice))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class LocalFolder:
    """A real directory; see `Folder` for the contract of each member."""

    def __init__(self, path: str, follow_links: bool = False) -> None:
        """Links in `path` itself are followed. `follow_links` lifts rule 4 for the files in it."""
        self.path = path
        self._root = os.path.realpath(path)
        self._follow_links = follow_links
        self._blobs = _hub_blobs(self._root)

    def names(self) -> Sequence[str]:
        found: list[str] = []
        with _reading(self.path), os.scandir(self._root) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) > MAX_NAMES:
                    raise SourceError(
                        f"{self.path}: more than {MAX_NAMES} entries; this is not a checkpoint"
                    )
        return sorted(found)

    def unfinished(self) -> Sequence[str]:
        places = [self._root, os.path.join(self._root, ".cache", "huggingface", "download")]
        if self._blobs:
            places.append(self._blobs)
        found: set[str] = set()
        for place in places:
            with contextlib.suppress(OSError):
                found.update(name for name in os.listdir(place) if _UNFINISHED.fullmatch(name))
        return sorted(found)

    def holds(self, name: str) -> bool:
        check_name(name, self.path)
        return os.path.lexists(os.path.join(self._root, name))

    def open(self, name: str) -> LocalFile:
        check_name(name, self.path)
        return LocalFile(name, os.path.join(self.path, name), self.resolve(name))

    def resolve(self, name: str) -> str:
        """Return the path of the regular file behind `name`, every rule checked."""
        shown = os.path.join(self.path, name)
        self._check_parents(name, shown)
        path = os.path.join(self._root, name)
        if self._follow_links:
            return os.path.realpath(path)
        for _ in range(MAX_LINK_HOPS + 1):
            if not stat.S_ISLNK(_lstat(path, shown).st_mode):
                return path
            path = self._next_hop(path, shown)
        raise SourceError(f"{shown}: more than {MAX_LINK_HOPS} links lead to the file")

    def _check_parents(self, name: str, shown: str) -> None:
        parent = self._root
        for part in name.split("/")[:-1]:
            parent = os.path.join(parent, part)
            if not stat.S_ISDIR(_lstat(parent, shown).st_mode):
                raise SourceError(
                    f"{shown}: {quote(part)} on the way is not a real directory (links to "
                    "directories are not followed inside a checkpoint)"
                )

    def _next_hop(self, link: str, shown: str) -> str:
        with _reading(shown):
            text = os.readlink(link)
        target = os.path.normpath(os.path.join(os.path.dirname(link), text))
        allowed = [self._root, *([self._blobs] if self._blobs else [])]
        inside = any(os.path.commonpath([place, target]) == place for place in allowed)
        # A link among the target's parents could still lead away from where the text points.
        parent = os.path.dirname(target)
        if not inside or os.path.realpath(parent) != parent:
            raise SourceError(
                f"{shown}: the link leads to {quote(target)}, outside the checkpoint's folder; "
                "put the file itself there (cp -L), or name the folder that has it"
            )
        return target


def is_directory(path: str) -> bool:
    """True for a directory or a link to one; False if it cannot be told."""
    return os.path.isdir(path)


def user_file(path: str) -> tuple[str, str]:
    """Split the path of a file that the user typed into folder and base name.

    The user may point anywhere, so links are followed; but only until the file is in its own
    folder, so that one in a Hub cache snapshot keeps its logical name and its neighbours.
    Raises SourceError if there is no such file or its links lead nowhere.
    """
    for _ in range(_MAX_USER_LINKS):
        folder, name = os.path.split(path.rstrip("/"))
        folder = folder or "."
        if name in ("", ".", ".."):
            raise SourceError(f"{path}: expected a file or a model directory")
        root = os.path.realpath(folder)
        here = os.path.join(root, name)
        if not stat.S_ISLNK(_lstat(here, path).st_mode):
            return folder, name
        with _reading(path):
            target = os.path.join(root, os.readlink(here))
        if os.path.realpath(os.path.dirname(target)) in (root, _hub_blobs(root)):
            return folder, name
        path = target
    raise SourceError(f"{path}: too many links lead to the file")


def _hub_blobs(root: str) -> str | None:
    """Return REPO/blobs if `root` is REPO/snapshots/REVISION or below it."""
    place = root
    while (parent := os.path.dirname(place)) != place:
        if os.path.basename(parent) == "snapshots":
            blobs = os.path.join(os.path.dirname(parent), "blobs")
            real = os.path.isdir(blobs) and not os.path.islink(blobs)
            return blobs if real else None
        place = parent
    return None


def _lstat(path: str, shown: str) -> os.stat_result:
    with _reading(shown):
        return os.lstat(path)


def _open_regular(shown: str, path: str) -> int:
    info = _lstat(path, shown)
    _require_regular(info, shown)
    with _reading(shown):
        fd = os.open(path, _OPEN_FLAGS)
    try:
        _require_regular(os.fstat(fd), shown)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(info: os.stat_result, shown: str) -> None:
    if stat.S_ISREG(info.st_mode):
        return
    found = next((text for test, text in _FILE_TYPES if test(info.st_mode)), "something else")
    raise SourceError(f"{shown}: expected a regular file, found {found}")


@contextlib.contextmanager
def _reading(shown: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"{shown}: no such file") from error
    except OSError as error:
        hint = ""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "; raise the limit of open files (ulimit -n)"
        raise SourceError(f"{shown}: cannot open: {error.strerror}{hint}") from error
    except ValueError as error:  # e.g. a NUL byte in a name
        raise SourceError(f"{shown}: cannot open: {error}") from error


def _pread_into(fd: int, out: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], offset)
    data = os.pread(fd, out.nbytes, offset)
    out[: len(data)] = data
    return len(data)
