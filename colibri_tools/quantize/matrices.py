"""The matrices of a census that can be encoded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from colibri_tools.container.format import Group, PartRole, Role
from colibri_tools.dtypes import DType
from colibri_tools.families.result import MappedResident, SourceMapping
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.stats import hottest_first
from colibri_tools.quantize.importance import ColumnWeights, Importance
from colibri_tools.quantize.rules import Target
from colibri_tools.sources import SourceTensor
from colibri_tools.sources.encoded import EncodedView, Loss

__all__ = ["Key", "Matrix", "list_matrices"]

Key = str | tuple[int, int, PartRole]
"""The name of a resident tensor, or row, expert and part."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """`rows` by `cols` weights from byte `start` of a source tensor on.

    `uses` are what it is for: one target, or two where an output matrix is the embedding.
    """

    key: Key
    uses: tuple[Target, ...]
    tensor: SourceTensor
    start: int
    rows: int
    cols: int
    role: Role | None = None

    @property
    def target(self) -> Target:
        """What it is first of all."""
        return self.uses[0]

    @property
    def before(self) -> DType:
        """The type it has in the source."""
        return self.tensor.dtype

    @property
    def n_weights(self) -> int:
        """Rows times columns."""
        return self.rows * self.cols

    def weights_by(self, importance: Importance | None) -> ColumnWeights | None:
        """Return its importance, None where its columns count equally."""
        if importance is None:
            return None
        if self.role is not None:
            return importance.of_resident(self.role, self.target.layer)
        assert isinstance(self.key, tuple)
        return importance.of_expert(*self.key)

    def encoded(
        self, dtype: DType, effort: str, weights: ColumnWeights | None, loss: Loss | None = None
    ) -> SourceTensor:
        """Return the whole source tensor, of which this is a part, seen as another type."""
        view = EncodedView(self.tensor, dtype, effort, self.cols, weights, loss)
        shape = self.tensor.shape
        if shape[-1] != self.cols:
            shape = (self.tensor.n_weights // self.cols, self.cols)
        return self.tensor.seen_as(view, dtype, shape)

    def start_as(self, dtype: DType) -> int:
        """Return the byte where it begins in that tensor."""
        return self.start // self.before.row_bytes(self.cols) * dtype.row_bytes(self.cols)


def list_matrices(
    mapping: SourceMapping, profile: RoutingProfile | None = None
) -> Iterator[Matrix]:
    """Yield what may get another type: no vectors, nothing that a container only keeps."""
    n_layers = int(mapping.spec.get("n_layers", 1))
    heat = _heat(profile)
    for number, row in enumerate(mapping.rows):
        for expert, slots in enumerate(row.experts):
            for part, piece in slots.items():
                if part.label.endswith("_bias"):
                    continue
                where = (number, expert)
                target = Target(
                    part.label, row.layer, piece.cols, expert, heat.get(where), n_layers
                )
                yield Matrix(
                    (*where, part), (target,), piece.tensor, piece.start, piece.rows, piece.cols
                )
    aliases = defaultdict(list)
    for resident in mapping.residents:
        if resident.alias_of is not None:
            aliases[resident.alias_of].append(resident)
    for resident in mapping.residents:
        if resident.alias_of is None and _is_matrix(resident):
            yield _resident(resident, aliases[resident.name], n_layers)


def _is_matrix(r: MappedResident) -> bool:
    shape = r.tensor.shape
    vector = len(shape) < 2 or shape[-2] == 1 or r.role.label.endswith(("_bias", "_norm"))
    return not vector and r.group != Group.OPTIONAL and r.role != Role.OTHER


def _resident(r: MappedResident, aliases: list[MappedResident], n_layers: int) -> Matrix:
    cols = r.tensor.shape[-1]
    uses = tuple(Target(x.role.label, x.layer, cols, n_layers=n_layers) for x in (r, *aliases))
    return Matrix(r.name, uses, r.tensor, 0, r.tensor.n_weights // cols, cols, r.role)


def _heat(profile: RoutingProfile | None) -> dict[tuple[int, int], float]:
    if profile is None:
        return {}
    order = hottest_first(profile.counts(), profile.mask())
    return {(int(row), int(expert)): i / len(order) for i, (row, expert) in enumerate(order)}
