"""The journal beside a partial container: what of it is on disk for certain.

```
 header   magic 8 | u32 version | u32 n_bytes of facts | facts (JSON, padded) | u32 CRC-32C
 records  64 bytes each, written after the bytes they speak of have been synced; then zeros
```
A record counts only if its CRC holds and all records before it do: what a power cut left of the
last append is ignored. The record CRC continues the header's, so that records of another journal
never match. The journal is locked as long as a job has it open. docs/reliability.md has the layout.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from colibri_tools.container.fileops import allocate, fsync_directory, pwrite_all
from colibri_tools.errors import JobError

__all__ = ["Entry", "EntryKind", "Journal", "Key", "journal_path"]

MAGIC = b"CLBJRNL\0"
VERSION = 1
MAX_FACTS_BYTES = 64 << 20
_HEAD = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIIII32s8x")  # kind, sequence, number, expert, CRC-32C, SHA-256
RECORD_BYTES = _RECORD.size + _CRC.size
_READ_BYTES = 1 << 20

Key = tuple[int, int, int]
"""(kind, tensor number or row, expert); the expert of a tensor is 0."""


class EntryKind(IntEnum):
    """What a record speaks of."""

    TENSOR = 1
    BLOCK = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or a block whose bytes are on disk, with the checksums of its payload."""

    key: Key
    crc32c: int
    sha256: bytes


def journal_path(out_path: str | os.PathLike[str]) -> Path:
    """Return the name of the journal of a container that is being written."""
    out = Path(out_path)
    return out.with_name(f"{out.name}.journal")


class Journal:
    """A journal, open and locked. `facts` is None unless a sound header was found.

    `entries` has the last record of each key; `entries` and `facts` are read when it is opened.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path` and lock it.

        Raises JobError if another job has it or it is no journal, OSError if the system refuses.
        """
        self.path = path
        self.facts: dict[str, Any] | None = None
        self.entries: dict[Key, Entry] = {}
        self._fd = _open_locked(path)
        self._end = 0
        self._crc = 0
        self._sequence = 0
        self._has_tail = False  # something a power cut left behind the last good record
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    @property
    def n_bytes(self) -> int:
        """The size of the file, 0 once it is closed."""
        return 0 if self._fd < 0 else os.fstat(self._fd).st_size

    def begin(self, facts: dict[str, Any], n_entries: int) -> None:
        """Start afresh: a durable header with these facts and no records. Raises OSError.

        Space for `n_entries` records is reserved: a disk that is full later must not keep the
        journal from saying what was written before.
        """
        text = json.dumps(facts, sort_keys=True).encode()
        padding = -(_HEAD.size + len(text) + _CRC.size) % RECORD_BYTES
        head = _HEAD.pack(MAGIC, VERSION, len(text) + padding) + text + b" " * padding
        self._crc = _crc32c(head)
        os.ftruncate(self._fd, 0)
        self._end = pwrite_all(self._fd, 0, [memoryview(head + _CRC.pack(self._crc))])
        allocate(self._fd, self._end + n_entries * RECORD_BYTES)
        self.entries.clear()
        self._sequence = 0
        os.fsync(self._fd)
        # The name must be durable before a partial file exists: without its journal a partial
        # file is nobody's.
        fsync_directory(self.path.parent)
        self.facts = facts
        self._has_tail = False

    def append(self, entries: Iterable[Entry]) -> None:
        """Append records and make them durable. The bytes they speak of must be. Raises OSError."""
        added = {entry.key: entry for entry in entries}
        if not added:
            return
        records = b"".join(self._pack(entry) for entry in added.values())
        if self._has_tail:
            os.ftruncate(self._fd, self._end)
            self._has_tail = False
        end = self._end + pwrite_all(self._fd, self._end, [memoryview(records)])
        os.fsync(self._fd)
        self._end = end
        self.entries.update(added)

    def remove(self) -> None:
        """Remove the file, then give up the lock. May be called twice."""
        if self._fd >= 0:
            if _is_same(self.path, self._fd):
                self.path.unlink()
            self.close()

    def close(self) -> None:
        """Give up the lock. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _pack(self, entry: Entry) -> bytes:
        body = _RECORD.pack(
            entry.key[0], self._sequence, *entry.key[1:], entry.crc32c, entry.sha256
        )
        self._sequence += 1
        return body + _CRC.pack(_crc32c(body, self._crc))

    def _load(self) -> None:
        head = os.pread(self._fd, _HEAD.size, 0)
        # An empty file, or what a power cut may make of a new one: nothing was ever journaled.
        if not head.strip(b"\0"):
            return
        if not MAGIC.startswith(head[: len(MAGIC)]):
            raise JobError(f"{self.path}: this is no journal of colibri; rename or delete it")
        self.facts = self._load_facts(head)
        if self.facts is not None:
            self.entries = {entry.key: entry for entry in self._load_records()}
            self._has_tail = True

    def _load_facts(self, head: bytes) -> dict[str, Any] | None:
        if len(head) < _HEAD.size:
            return None
        _, version, n_bytes = _HEAD.unpack(head)
        if version != VERSION or n_bytes > MAX_FACTS_BYTES:
            return None
        body = os.pread(self._fd, _HEAD.size + n_bytes, 0)
        sealed = os.pread(self._fd, _CRC.size, len(body))
        self._crc = _crc32c(body)
        if len(body) != _HEAD.size + n_bytes or sealed != _CRC.pack(self._crc):
            return None
        self._end = len(body) + _CRC.size
        facts = json.loads(body[_HEAD.size :])
        return facts if isinstance(facts, dict) else None

    def _load_records(self) -> Iterator[Entry]:
        while data := os.pread(self._fd, _READ_BYTES, self._end):
            for start in range(0, len(data), RECORD_BYTES):
                entry = self._unpack(data[start : start + RECORD_BYTES])
                if entry is None:
                    return
                self._sequence += 1
                self._end += RECORD_BYTES
                yield entry

    def _unpack(self, record: bytes) -> Entry | None:
        body = record[: _RECORD.size]
        if len(record) != RECORD_BYTES or record != body + _CRC.pack(_crc32c(body, self._crc)):
            return None
        kind, sequence, number, expert, crc, digest = _RECORD.unpack(body)
        if kind not in tuple(EntryKind) or sequence != self._sequence:
            return None
        return Entry((kind, number, expert), crc, digest)


def _open_locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        fd = os.open(path, flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise JobError(f"{path}: expected a file, found something else")
            _lock(fd, path)
            # The job that had the lock may have removed the file while this one waited to open it.
            if _is_same(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JobError(
            f"{path}: another job is writing this output; wait for it or choose another name"
        ) from None
    except OSError as error:
        if os.fstat(fd).st_size == 0:
            path.unlink(missing_ok=True)
        raise JobError(
            f"{path}: this file system cannot lock files ({error.strerror}); choose an output "
            "on another one"
        ) from error


def _is_same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _crc32c(data: bytes, crc: int = 0) -> int:
    from colibri_tools import native  # late: importing the package must not need the C extension

    return native.crc32c(data, crc)
