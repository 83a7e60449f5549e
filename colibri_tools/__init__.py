"""colibri-tools: one aligned, indexed, checksummed file per Mixture-of-Experts model.

`open(path)` reads a container: its spec, the `[row][expert]` index as a numpy structured array, and
zero-copy views of blocks and tensors. The commands of the command line are functions of the modules
of the same name: `colibri_tools.repack.repack`, `inspect.inspect`, `verify.verify`, `run.run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri_tools.errors import ColibriError, FormatError, JobError, SourceError, UsageError

if TYPE_CHECKING:
    from os import PathLike

    from colibri_tools.container import Container

__version__ = "0.1.0"

__all__ = [
    "ColibriError",
    "FormatError",
    "JobError",
    "SourceError",
    "UsageError",
    "__version__",
    "open",
]


def open(path: str | PathLike[str]) -> Container:
    """Open the container at `path` for reading; use it as a context manager.

    Raises FormatError when a rule of docs/format.md is broken (payloads are not read here;
    `colibri verify` reads everything), SourceError when the file cannot be read.
    """
    from colibri_tools.container import open as open_container

    return open_container(path)
