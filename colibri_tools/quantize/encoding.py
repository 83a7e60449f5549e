"""What encoding does to a census: other types for its matrices, read through encoded views."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, UsageError, quote, quote_some
from colibri_tools.families.result import (
    ExpertSlots,
    MappedResident,
    MappedRow,
    Slice,
    SourceMapping,
)
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.quantize.allocate import TargetPolicy
from colibri_tools.quantize.importance import Importance
from colibri_tools.quantize.matrices import Key, Matrix, list_matrices
from colibri_tools.quantize.rules import Choice, Policy
from colibri_tools.sources import Source
from colibri_tools.sources.encoded import Loss

__all__ = ["Encoded", "Encoding", "encode_mapping"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One matrix and the type it got; None for a choice where no rule named it.

    `loss` is filled while a container is written, if it is measured.
    """

    matrix: Matrix
    choice: Choice | None
    loss: Loss | None

    @property
    def dtype(self) -> DType:
        """The type it has in the container."""
        return self.matrix.before if self.choice is None else self.choice.dtype

    @property
    def changes(self) -> bool:
        """Whether it is encoded; else its bytes are copied."""
        return self.dtype != self.matrix.before

    @property
    def n_bytes(self) -> int:
        """Its size in the container."""
        return self.matrix.rows * self.dtype.row_bytes(self.matrix.cols)


@dataclass(eq=False)
class Encoding:
    """How types are chosen, and after planning (`encoded`) what was chosen.

    With `measure`, what encoding loses is measured while a container is written.
    """

    policy: Policy
    effort: str = "normal"
    importance: Importance | None = None
    allow_requantize: bool = False
    measure: bool = False
    encoded: list[Encoded] = field(default_factory=list)

    def provenance(self) -> dict[str, Any]:
        """Return the recipe that a container records."""
        found: dict[str, Any] = {
            "recipe.type": self.policy.name,
            "recipe.effort": self.effort,
        }
        rules = [rule.text for rule in self.policy.rules if not rule.is_built_in]
        if rules:
            found["recipe.rules"] = rules
        if self.importance is not None:
            found |= self.importance.provenance()
        for what, counts in (("requantized", self.requantized()), ("fallback", self.fallbacks())):
            if counts:
                plural = "fallbacks" if what == "fallback" else what
                found[f"recipe.{plural}"] = list(counts)
                found[f"recipe.{what}_counts"] = list(counts.values())
        return found

    def requantized(self) -> dict[str, int]:
        """Return how many matrices that were lossy already are encoded, by types."""
        lossy = Counter(
            f"{item.matrix.before.name} to {item.dtype.name}"
            for item in self.encoded
            if item.matrix.before.is_quantized and item.changes
        )
        return dict(sorted(lossy.items()))

    def fallbacks(self) -> dict[str, int]:
        """Return how many matrices have rows that their type does not divide, by types."""
        fell = Counter(
            f"{item.choice.wanted.name} to {item.choice.dtype.name}"
            for item in self.encoded
            if item.choice is not None and item.choice.fell_back
        )
        return dict(sorted(fell.items()))


def encode_mapping(
    mapping: SourceMapping, encoding: Encoding, profile: RoutingProfile | None, source: Source
) -> SourceMapping:
    """Return a census whose matrices have the types that the policy chooses.

    Only a policy by measured errors reads from `source`. Raises UsageError for rules that need a
    profile or decide nothing, SourceError for a lossy matrix that would be encoded again without
    `allow_requantize`.
    """
    policy = encoding.policy
    if policy.needs_heat and profile is None:
        raise UsageError(
            "a rule asks for the hottest or coldest experts; give a profile (--routing)"
        )
    matrices = list(list_matrices(mapping, profile))
    if isinstance(policy, TargetPolicy):
        policy.prepare(matrices, source, encoding.effort, encoding.importance, profile)
    for matrix in matrices:
        choice = policy.choose(*matrix.uses)
        loss = Loss() if encoding.measure and choice is not None else None
        encoding.encoded.append(Encoded(matrix, choice, loss))
    unused = policy.unused()
    if unused:
        raise UsageError(f"no matrix of this model matches the rule {quote_some(unused)}")
    changes = [item for item in encoding.encoded if item.changes]
    _check_lossy(changes, encoding.allow_requantize)
    work = _Work(encoding, {item.matrix.key: item for item in changes})
    rows = [work.row(number, row) for number, row in enumerate(mapping.rows)]
    residents = [work.resident(resident) for resident in mapping.residents]
    return replace(mapping, rows=rows, residents=_alias_types(residents))


def _check_lossy(changes: list[Encoded], allowed: bool) -> None:
    lossy = [item.matrix.tensor.name for item in changes if item.matrix.before.is_quantized]
    if lossy and not allowed:
        raise SourceError(
            f"{len(lossy)} matrices are quantized already, among them {quote(lossy[0])}: encoding "
            "them again loses more than the type tells; --allow-requantize does it"
        )


@dataclass
class _Work:
    encoding: Encoding
    changes: dict[Key, Encoded]

    def row(self, number: int, row: MappedRow) -> MappedRow:
        experts = []
        for expert, slots in enumerate(row.experts):
            new: ExpertSlots = {}
            for part, piece in slots.items():
                item = self.changes.get((number, expert, part))
                new[part] = piece if item is None else self._slice(item)
            experts.append(new)
        return replace(row, experts=tuple(experts))

    def _slice(self, item: Encoded) -> Slice:
        m, dtype = item.matrix, item.dtype
        weights = m.weights_by(self.encoding.importance)
        tensor = m.encoded(dtype, self.encoding.effort, weights, item.loss)
        return Slice(tensor, m.start_as(dtype), item.n_bytes, m.rows, m.cols)

    def resident(self, r: MappedResident) -> MappedResident:
        item = self.changes.get(r.name)
        if item is None:
            return r
        weights = item.matrix.weights_by(self.encoding.importance)
        tensor = item.matrix.encoded(item.dtype, self.encoding.effort, weights, item.loss)
        return replace(r, tensor=tensor)


def _alias_types(residents: list[MappedResident]) -> list[MappedResident]:
    """An alias has no bytes of its own: it is of its target's type."""
    by_name = {r.name: r for r in residents}
    return [
        r if r.alias_of is None else replace(r, tensor=by_name[r.alias_of].tensor)
        for r in residents
    ]
