"""Comparing a container with the source it was made from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from colibri_tools.container import Container, PartRole
from colibri_tools.errors import SourceError, quote
from colibri_tools.mapping import MappedRow, Slice, SourceMapping, map_source
from colibri_tools.quantize.matrices import Key
from colibri_tools.text.derive import text_parts
from colibri_tools.verify.recipe import Recipe, read_recipe
from colibri_tools.verify.report import VerifyError, VerifyReport
from colibri_tools.verify.scan import Origin

if TYPE_CHECKING:
    from colibri_tools.dtypes import DType
    from colibri_tools.sources import Source, SourceTensor

__all__ = ["Origins", "compare_with_source"]

PathLike = str | os.PathLike[str]

_FREE_SPEC_KEYS = frozenset(
    {"order", "executable", "executable_lacks", "tokenizer", "tokenizer_lacks"}
)
"""Spec keys that do not come from the source alone."""


@dataclass(slots=True)
class Origins:
    """Where the numbers of a container came from, as far as the source has them."""

    tensors: dict[str, Origin] = field(default_factory=dict)
    parts: dict[tuple[int, int, PartRole], Origin] = field(default_factory=dict)


def compare_with_source(
    container: Container, source: Source, report: VerifyReport, importance: PathLike | None = None
) -> Origins:
    """Compare everything but the numbers, and return where each number has to come from.

    Matrices that were encoded come from encoding the source again, by `importance` if that was
    used. Raises UsageError where this cannot be done.
    """
    try:
        mapping = map_source(source)
        mapping.require_complete(source.path)
    except SourceError as error:
        report.add(VerifyError("census", f"source: {error.message}"))
        return Origins()
    recipe = read_recipe(container, source, mapping, importance)
    comparison = _Comparison(container, source, mapping, recipe)
    for difference in comparison.run():
        report.add(difference)
    return comparison.origins


class _Comparison:
    def __init__(
        self, container: Container, source: Source, mapping: SourceMapping, recipe: Recipe | None
    ) -> None:
        self._container = container
        self._recipe = recipe
        self._source = source
        self._mapping = mapping
        self.origins = Origins()

    def run(self) -> Iterator[VerifyError]:
        """Yield all differences and fill `origins`."""
        yield from self._compare_spec()
        yield from self._compare_blobs()
        yield from self._compare_tensors()
        yield from self._compare_rows()

    def _compare_spec(self) -> Iterator[VerifyError]:
        for key, expected in self._mapping.spec.items():
            found = self._container.spec.get(key)
            if key not in _FREE_SPEC_KEYS and found != _plain(expected):
                yield _difference(
                    f"spec: key {quote(key)}: expected {quote(expected)} as the source says, "
                    f"found {quote(found)}"
                )

    def _compare_blobs(self) -> Iterator[VerifyError]:
        ours = self._container.blobs
        theirs = {**self._made_blobs(), **self._source.blobs}
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                where = "container" if name not in ours else "source"
                yield _difference(f"carried file {quote(name)}: the {where} has none")
            elif ours[name] != theirs[name]:
                yield _difference(f"carried file {quote(name)}: container and source differ")

    def _made_blobs(self) -> dict[str, bytes]:
        """What repack makes of the source's files, as far as this container has it."""
        strange = self._container.blobs.keys() - self._source.blobs.keys()
        made = text_parts(self._source).blobs if strange else {}
        return {name: data for name, data in made.items() if name in strange}

    def _compare_tensors(self) -> Iterator[VerifyError]:
        ours = self._container.tensors
        theirs = {resident.name: resident for resident in self._mapping.residents}
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in ours or name not in theirs:
                where = "container" if name not in ours else "source"
                yield _difference(f"tensor {quote(name)}: the {where} has none", tensor=name)
                continue
            tensor, resident = ours[name], theirs[name]
            source_tensor = resident.tensor
            alias = tensor.alias_of, resident.alias_of
            if alias[0] != alias[1]:
                text = f"tensor {quote(name)}: expected alias of {alias[1]}, found {alias[0]}"
                yield _difference(text, tensor=name)
                continue
            expected = source_tensor.dtype, tuple(resident.shape)
            encoded = self._encoded(tensor.alias_of or name, tensor.dtype, source_tensor.dtype)
            if encoded is not None and tensor.shape == expected[1]:
                self.origins.tensors[name] = encoded
                continue
            if (tensor.dtype, tensor.shape) != expected:
                found = _shown(tensor.dtype, tensor.shape)
                yield _difference(
                    f"tensor {quote(name)}: expected {_shown(*expected)} as in source tensor "
                    f"{quote(source_tensor.name)}, found {found}",
                    layer=tensor.layer if tensor.layer >= 0 else None,
                    tensor=name,
                )
                continue
            self.origins.tensors[name] = self._origin(source_tensor, 0)

    def _compare_rows(self) -> Iterator[VerifyError]:
        theirs = {(row.layer, row.stream): row for row in self._mapping.rows}
        ours = {
            (row.layer, int(row.stream)): number for number, row in enumerate(self._container.rows)
        }
        for layer, stream in sorted(ours.keys() | theirs.keys()):
            key = layer, stream
            if key not in ours or key not in theirs:
                where = "container" if key not in ours else "source"
                text = f"layer {layer} (stream {stream}): the {where} has no experts"
                yield _difference(text, layer=layer)
                continue
            yield from self._compare_row(ours[key], theirs[key])

    def _compare_row(self, number: int, theirs: MappedRow) -> Iterator[VerifyError]:
        row = self._container.rows[number]
        if row.n_experts != len(theirs.experts):
            yield _difference(
                f"layer {row.layer}: expected {len(theirs.experts)} experts as the source has, "
                f"found {row.n_experts}",
                layer=row.layer,
            )
            return
        for expert, slots in enumerate(theirs.experts):
            yield from self._compare_expert(number, expert, slots)

    def _compare_expert(
        self, number: int, expert: int, slots: dict[PartRole, Slice]
    ) -> Iterator[VerifyError]:
        layer = self._container.rows[number].layer
        layout = self._container.layout_of(number, expert)
        parts = {p.role: p for p in layout.parts}
        found = {p.role: _shown(p.dtype, (p.rows, p.cols)) for p in layout.parts}
        expected = {role: _shown(s.dtype, (s.rows, s.cols)) for role, s in slots.items()}
        for role in sorted(found.keys() | expected.keys()):
            part, piece = parts.get(role), slots.get(PartRole(role))
            if part is not None and piece is not None:
                key = (number, expert, PartRole(role))
                encoded = self._encoded(key, part.dtype, piece.dtype)
                if encoded is not None and (part.rows, part.cols) == (piece.rows, piece.cols):
                    self.origins.parts[key] = encoded
                    continue
            if found.get(role) != expected.get(role):
                yield _difference(
                    f"layer {layer} expert {expert}, {PartRole(role).label}: expected "
                    f"{expected.get(role, 'no such part')} as in the source, found "
                    f"{found.get(role, 'no such part')}",
                    layer=layer,
                    expert=expert,
                    tensor=PartRole(role).label,
                )
            else:
                piece = slots[PartRole(role)]
                origin = self._origin(piece.tensor, piece.start)
                self.origins.parts[number, expert, role] = origin

    def _encoded(self, key: Key, ours: DType, theirs: DType) -> Origin | None:
        """Where a matrix of another type comes from, if it was encoded."""
        if self._recipe is None or ours == theirs:
            return None
        found = self._recipe.encoded(key, ours)
        return None if found is None else self._origin(*found)

    def _origin(self, tensor: SourceTensor, first: int) -> Origin:
        def read(start: int, out: memoryview) -> None:
            self._source.read_into(tensor, first + start, out)

        return Origin(tensor.name, read)


def _difference(
    message: str, layer: int | None = None, expert: int | None = None, tensor: str | None = None
) -> VerifyError:
    return VerifyError("difference", message, layer, expert, tensor)


def _shown(dtype: DType, shape: tuple[int, ...]) -> str:
    return f"{' by '.join(map(str, shape))} of {dtype.name}"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
