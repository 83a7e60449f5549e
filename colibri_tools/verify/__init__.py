"""Verify: is every byte of a container, or of a source, what it should be?

A container is checked for structure, census, padding, checksums, and numbers that are not finite.
After an error the check goes on, so that one run names all damage; only a file whose metadata is
broken gives just that one error. Data is read by `pread`, in bounded pieces, by several threads.
"""

from __future__ import annotations

import os
from pathlib import Path

from colibri_tools.errors import UsageError
from colibri_tools.sources import sniff
from colibri_tools.verify.container import verify_container
from colibri_tools.verify.report import MAX_LISTED_ERRORS, ErrorKind, VerifyError, VerifyReport
from colibri_tools.verify.scan import Progress
from colibri_tools.verify.source import verify_source

__all__ = [
    "MAX_LISTED_ERRORS",
    "ErrorKind",
    "VerifyError",
    "VerifyReport",
    "verify",
    "verify_container",
    "verify_source",
]

PathLike = str | os.PathLike[str]


def verify(
    path: PathLike,
    *,
    quick: bool = False,
    against: PathLike | None = None,
    importance: PathLike | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a container or a source, whichever `path` is; see `verify_container`.

    Raises SourceError if `path` cannot be read, UsageError for `against` with a source.
    """
    kind = sniff(path)
    # A container whose first bytes are damaged still has its name.
    if kind == "colibri" or (kind != "directory" and Path(path).suffix == ".colibri"):
        return verify_container(
            path,
            quick=quick,
            against=against,
            importance=importance,
            threads=threads,
            progress=progress,
        )
    if against is not None or importance is not None:
        raise UsageError(f"{os.fspath(path)}: only a container can be verified against a source")
    return verify_source(path, quick=quick, threads=threads, progress=progress)
