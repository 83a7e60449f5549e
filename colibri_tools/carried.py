"""A container seen as the source it was made from.

Its carried files give the metadata, its tensors and blocks the catalog, under the names that the
family's form has for their roles. So the census that made the container can be taken again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from colibri_tools.container import Container
from colibri_tools.container.format import PartRole, Role
from colibri_tools.container.reader import ResidentTensor
from colibri_tools.dtypes import DType
from colibri_tools.errors import JobError, SourceError, quote
from colibri_tools.families.detect import Detected, detect_family
from colibri_tools.families.schema import BIASES, HEAD_ROLES, Form
from colibri_tools.sources import Source, SourceFile, SourceTensor, parse_gguf_metadata
from colibri_tools.sources.catalog import SourceParts
from colibri_tools.sources.gguf import METADATA_BLOB
from colibri_tools.sources.strict_json import parse_json_object

__all__ = ["carried_source"]

_FILE_NAME = "model.colibri"
_PROJECTIONS = {
    PartRole.GATE: ("gate_proj", "gate"),
    PartRole.UP: ("up_proj", "up"),
    PartRole.DOWN: ("down_proj", "down"),
}

TensorName = Callable[[ResidentTensor], str]
PartName = Callable[[int, int, PartRole], str]


def carried_source(container: Container) -> Source:
    """Return the source that `container` carries; it reads from it and needs no closing.

    Raises SourceError or FormatError if the carried files are not what they should be, JobError if
    the tensors cannot be named.
    """
    parts = SourceParts("safetensors", container.path, blobs=dict(container.blobs))
    if METADATA_BLOB in parts.blobs:
        parts.kind = "gguf"
        where = f"{container.path}/{METADATA_BLOB}"
        parts.metadata = parse_gguf_metadata(parts.blobs[METADATA_BLOB], where)
    elif "config.json" in parts.blobs:
        where = f"{container.path}/config.json"
        parts.config = parse_json_object(parts.blobs["config.json"], where, allow_constants=True)
    parts.handles.append(_ContainerFile(container))
    parts.files.append(SourceFile(_FILE_NAME, container.path, container.file_size, "", 0))
    for tensor in _catalog(container, *_names(container, detect_family(Source(parts)))):
        if tensor.name in parts.tensors:
            raise JobError(f"{container.path}: two tensors are named {quote(tensor.name)}")
        parts.tensors[tensor.name] = tensor
    return Source(parts)


def _catalog(
    container: Container, tensor_name: TensorName, part_name: PartName
) -> Iterator[SourceTensor]:
    for number, row in enumerate(container.rows):
        for expert in range(row.n_experts):
            start = int(container.cell(number, expert)["offset"])
            for part in container.layout_of(number, expert).parts:
                name = part_name(row.layer, expert, part.role)
                shape = (part.cols,) if part.role in BIASES else (part.rows, part.cols)
                yield _tensor(name, part.dtype, shape, start + part.offset, part.n_bytes)
    for tensor in container.tensors.values():
        if tensor.alias_of is None:
            yield _tensor(
                tensor_name(tensor), tensor.dtype, tensor.shape, tensor.offset, tensor.n_bytes
            )


def _tensor(
    name: str, dtype: DType, shape: tuple[int, ...], offset: int, n_bytes: int
) -> SourceTensor:
    return SourceTensor(name, dtype, shape, 0, offset, n_bytes)


# ---------------------------------------------------------------- names


def _names(container: Container, detected: Detected) -> tuple[TensorName, PartName]:
    has_roles = any(tensor.role is not Role.OTHER for tensor in container.tensors.values())
    if detected.family is None and not has_roles:
        return _own_names(container)
    if detected.family is None:
        raise JobError(
            f"{container.path}: {detected.why} in its carried files, which is no family of this "
            "version; use the version that made it"
        )
    if not has_roles:
        raise JobError(
            f"{container.path}: made by a version that did not know the family "
            f"{detected.family.name}, so its tensors have no roles; repack the checkpoint"
        )
    kind = "gguf" if METADATA_BLOB in container.blobs else "safetensors"
    return _form_names(container, detected.family.form(kind))


def _form_names(container: Container, form: Form) -> tuple[TensorName, PartName]:
    """The names of a known family: the first rule for a role, the first prefix."""
    prefix = form.prefixes[0]
    residents = {rule.role: rule for rule in reversed(form.tensors)}
    experts = {
        rule.parts: rule.pattern for rule in reversed(form.experts) if "{expert}" in rule.pattern
    }

    def tensor_name(tensor: ResidentTensor) -> str:
        rule = residents.get(Role(tensor.role)) if tensor.role in set(Role) else None
        if rule is None:
            raise _nameless(container, f"tensor {quote(tensor.name)}")
        first = prefix.heads[0] if rule.role in HEAD_ROLES else prefix.body
        return first + rule.pattern.format(layer=tensor.layer)

    def part_name(layer: int, expert: int, part: PartRole) -> str:
        pattern = experts.get((part,))
        if pattern is None:
            raise _nameless(container, f"part {part.label} of an expert")
        return prefix.body + pattern.format(layer=layer, expert=expert)

    return tensor_name, part_name


def _own_names(container: Container) -> tuple[TensorName, PartName]:
    """The names of an unknown family: tensors keep theirs, experts get one of the known forms."""
    gguf = METADATA_BLOB in container.blobs

    def part_name(layer: int, expert: int, part: PartRole) -> str:
        if part not in _PROJECTIONS:
            raise _nameless(container, f"part {part.label} of an expert")
        hf_name, gguf_name = _PROJECTIONS[part]
        if gguf:
            return f"blk.{layer}.ffn_{gguf_name}.{expert}.weight"
        # A stem of its own, so that no other stack of layers is taken for the same one.
        return f"container.layers.{layer}.mlp.experts.{expert}.{hf_name}.weight"

    return lambda tensor: tensor.name, part_name


def _nameless(container: Container, what: str) -> SourceError:
    return SourceError(f"{container.path}: {what} has no name in this family; repack it")


class _ContainerFile:
    """The file of an open container; whoever opened it closes it."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.name = os.path.basename(container.path)  # noqa: PTH119
        self.path = container.path
        self.size = container.file_size
        self.identity = container.identity
        self.stamp = ""
        self.blob_sha256: str | None = None

    def read_into(self, offset: int, out: memoryview, what: str) -> None:
        self._container.read_into(offset, out)

    def check_unchanged(self) -> None:
        """The container checks what it reads."""

    def advise_sequential(self) -> None:
        """Small reads only."""

    def will_need(self, offset: int, n_bytes: int) -> None:
        """Small reads only."""

    def drop(self, offset: int, n_bytes: int) -> None:
        """Small reads only."""

    def close(self) -> None:
        """Not ours."""
