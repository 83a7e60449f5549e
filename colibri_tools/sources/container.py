"""A container as a source: its tensors and the parts of its blocks, by names of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

from colibri_tools.container import Container
from colibri_tools.container import reader as container_reader
from colibri_tools.container.format import PartRole, Stream
from colibri_tools.sources.catalog import Source, SourceFile, SourceParts, SourceTensor
from colibri_tools.sources.local import LocalFolder, user_file

__all__ = ["open_container_source", "part_name"]


def open_container_source(path: str | os.PathLike[str]) -> tuple[Source, Container]:
    """Open a container to be read as a source; close both.

    Raises SourceError if it cannot be read, FormatError if it is no sound container.
    """
    container = container_reader.open(path)
    try:
        folder_path, name = user_file(os.fspath(path))
        handle = LocalFolder(folder_path, follow_links=True).open(name)
    except BaseException:
        container.close()
        raise
    parts = SourceParts("container", container.path, blobs=dict(container.blobs))
    parts.handles.append(handle)
    file = SourceFile(handle.name, handle.path, handle.size, container.id, container.data_offset)
    parts.files.append(file)
    parts.tensors = {tensor.name: tensor for tensor in _catalog(container)}
    return Source(parts), container


def part_name(layer: int, stream: int, expert: int, role: PartRole) -> str:
    """Return the name that a part of a block has as a tensor of its own."""
    prefix = "" if stream == Stream.MAIN else "mtp."
    return f"{prefix}layers.{layer}.experts.{expert}.{role.label}"


def _catalog(container: Container) -> Iterator[SourceTensor]:
    for t in container.tensors.values():
        if t.alias_of is None:
            yield SourceTensor(t.name, t.dtype, t.shape, 0, t.offset, t.n_bytes)
    for number, row in enumerate(container.rows):
        for expert in range(row.n_experts):
            start = int(container.cell(number, expert)["offset"])
            for part in container.layout_of(number, expert).parts:
                name = part_name(row.layer, row.stream, expert, part.role)
                shape = (part.rows, part.cols)
                yield SourceTensor(name, part.dtype, shape, 0, start + part.offset, part.n_bytes)
