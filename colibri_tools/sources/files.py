"""The seam between formats and storage: something that reads byte ranges, and a folder of them.

The format readers know only `RangeFile` and `Folder`. Local files implement them in `local.py`; an
HTTP source (a Hub repository read by ranges) would implement the same two and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from colibri_tools.errors import FormatError, quote

__all__ = ["Folder", "RangeFile", "check_name"]


class RangeFile(Protocol):
    """A file of known size that can be read at any offset, from any thread."""

    @property
    def name(self) -> str:
        """Base name, or posix path relative to its folder."""

    @property
    def path(self) -> str:
        """Full name, for messages only."""

    @property
    def size(self) -> int:
        """Size in bytes when it was opened."""

    @property
    def identity(self) -> tuple[int, int] | None:
        """(device, inode) of a local file, None for a remote one."""

    @property
    def stamp(self) -> str:
        """Text that changes with the contents: a local file's time of modification in ns."""

    @property
    def blob_sha256(self) -> str | None:
        """SHA-256 that the storage claims for the whole file, if it claims one."""

    def read_into(self, offset: int, out: memoryview, what: str) -> None:
        """Fill `out` from `offset`; `what` names the contents in errors.

        Raises SourceError, naming file, contents and offset, if not all bytes can be had.
        """

    def check_unchanged(self) -> None:
        """Raise SourceError if the contents may differ from what was opened."""

    def advise_sequential(self) -> None:
        """Hint: the file will be read from front to back. Never fails."""

    def will_need(self, offset: int, n_bytes: int) -> None:
        """Hint: the range will be read soon. Never fails."""

    def drop(self, offset: int, n_bytes: int) -> None:
        """Hint: the range will not be read again. Never fails."""

    def close(self) -> None:
        """Release the file; may be called twice."""


class Folder(Protocol):
    """A flat view of the files beside each other; names are relative posix paths."""

    @property
    def path(self) -> str:
        """Where it is, for messages only."""

    def names(self) -> Sequence[str]:
        """Sorted names directly in the folder, whatever their kind."""

    def unfinished(self) -> Sequence[str]:
        """Names of downloads that were begun and not finished."""

    def holds(self, name: str) -> bool:
        """True if the name exists, even if `open` would refuse it. Raises on an unsafe name."""

    def open(self, name: str) -> RangeFile:
        """Open a file by name. Raises SourceError if it is unsafe, absent or no regular file."""


def check_name(name: str, where: str) -> str:
    """Return `name` if it is a safe relative posix path as text; else raise FormatError."""
    reason = _unsafe(name)
    if reason:
        raise FormatError(
            f"{where}: unsafe file name {quote(name)}: {reason}; "
            "only plain names below the checkpoint's own folder are opened"
        )
    return name


def _unsafe(name: str) -> str | None:
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it has a NUL byte"
    if "\\" in name:
        return "it has a backslash"
    if name.startswith("/"):
        return "it is absolute"
    if re.match(r"[A-Za-z]:", name):
        return "it has a drive letter"
    if len(name.encode("utf-8", "replace")) > 4096:
        return "it is longer than 4096 bytes"
    for part in name.split("/"):
        if part == "..":
            return "it has '..'"
        if part in ("", "."):
            return "it has an empty part"
    return None
