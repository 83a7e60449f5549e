"""What a census results in: the place of every source tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from colibri_tools.container.format import Group, PartRole, Role
from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError
from colibri_tools.sources import SourceTensor

__all__ = [
    "Action",
    "Assignment",
    "ExpertSlots",
    "MappedResident",
    "MappedRow",
    "Slice",
    "SourceMapping",
    "params_of",
    "resident_name",
    "sorted_residents",
]

Action = Literal["resident", "expert", "dropped", "unmatched"]

_MAX_SHOWN_PROBLEMS = 6


@dataclass(frozen=True, slots=True)
class Slice:
    """Whole rows of a source tensor: `n_bytes` from `start` are a matrix [rows, cols]."""

    tensor: SourceTensor
    start: int
    n_bytes: int
    rows: int
    cols: int

    @property
    def dtype(self) -> DType:
        """The type of the numbers, carried as it is."""
        return self.tensor.dtype


ExpertSlots = dict[PartRole, Slice]
"""The parts of one expert."""


@dataclass(frozen=True, slots=True)
class MappedResident:
    """A tensor outside the experts; `shape` is the role's own, which may add a leading 1.

    With `alias_of` it has no bytes of its own and `tensor` is the one it shares.
    """

    name: str
    tensor: SourceTensor
    role: Role
    group: Group
    layer: int
    shape: tuple[int, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class MappedRow:
    """The experts of one MoE layer, by id. `stream` is 1 for multi-token-prediction layers."""

    layer: int
    stream: int
    experts: tuple[ExpertSlots, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What becomes of one source tensor. `rule` is the matched pattern or the drop rule's name."""

    action: Action
    rule: str
    role: str = ""
    layer: int = -1
    expert: int = -1


@dataclass(slots=True)
class SourceMapping:
    """The result of the census. It is complete when `problems` is empty.

    `family` is the family's name, `known` tells whether it is in the table, `why` the evidence.
    `spec` has the keys of docs/format.md section 7 without order. `dropped` maps drop rules to
    names of source tensors. `tensors` is the source's catalog as the census saw it: quantized
    weights with their scales are one tensor there. `conversions` counts the tensors whose stored
    numbers are others in a container, by what becomes what.
    """

    family: str
    known: bool
    why: str
    source_kind: str
    spec: dict[str, Any] = field(default_factory=dict)
    residents: list[MappedResident] = field(default_factory=list)
    rows: list[MappedRow] = field(default_factory=list)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    tensors: Mapping[str, SourceTensor] = field(default_factory=dict)
    conversions: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require_complete(self, where: str) -> None:
        """Raise SourceError, listing names and slots, unless everything found its place."""
        if not self.problems:
            return
        shown = "; ".join(self.problems[:_MAX_SHOWN_PROBLEMS])
        more = len(self.problems) - _MAX_SHOWN_PROBLEMS
        tail = f"; and {more} more problems" if more > 0 else ""
        raise SourceError(f"{where}: {shown}{tail}")


def resident_name(role: Role, layer: int) -> str:
    """Return the name of a resident tensor in a container, the same for every kind of source."""
    return role.label if layer < 0 else f"layers.{layer}.{role.label}"


def sorted_residents(residents: Iterable[MappedResident]) -> list[MappedResident]:
    """Return tensors in the order of a container: by group, layer, role and name."""
    return sorted(residents, key=lambda r: (r.group, r.layer, r.role, r.name))


def count_weights(rows: Sequence[MappedRow], top_k: int) -> tuple[int, int]:
    """Return the weights of all experts, and of the `top_k` largest of each main-stream row."""
    total = active = 0
    for row in rows:
        sizes = [sum(s.rows * s.cols for s in slots.values()) for slots in row.experts]
        total += sum(sizes)
        if row.stream == 0:
            active += sum(sorted(sizes, reverse=True)[:top_k])
    return total, active


def params_of(
    residents: Sequence[MappedResident], rows: Sequence[MappedRow], top_k: int
) -> Mapping[str, int]:
    """Return `total_params` and `active_params` of the spec.

    Total counts every stored weight once. Active counts what one token uses: the tensors of
    group 1 (a tied output matrix included), `top_k` experts of each MoE layer, one embedding row.
    """
    total, active = count_weights(rows, top_k)
    for resident in residents:
        n_weights = resident.tensor.n_weights
        total += n_weights if resident.alias_of is None else 0
        if resident.group == Group.EVERY_TOKEN:
            active += n_weights
        elif resident.group == Group.PER_ROW:
            active += n_weights // resident.shape[0]
    return {"total_params": total, "active_params": active}
