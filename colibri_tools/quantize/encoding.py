"""What encoding does to a census: other types for its matrices, read through encoded views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from colibri_tools.container.format import Group, PartRole, Role
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
from colibri_tools.profile.stats import hottest_first
from colibri_tools.quantize.rules import Choice, Policy, Target
from colibri_tools.sources import SourceTensor
from colibri_tools.sources.encoded import EncodedView

__all__ = ["Encoded", "Encoding", "Importance", "encode_mapping"]


class Importance(Protocol):
    """How much the squared error of each column counts, by matrix."""

    def of_expert(self, row: int, expert: int, role: PartRole) -> npt.NDArray[np.float32] | None:
        """Return float32 [cols] for a part of an expert, None for equal weights."""

    def of_resident(self, role: Role, layer: int) -> npt.NDArray[np.float32] | None:
        """Return float32 [cols] for a resident matrix, None for equal weights."""

    def provenance(self) -> dict[str, Any]:
        """Return what a container says about it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One matrix and the type it got."""

    target: Target
    rows: int
    before: DType
    choice: Choice


@dataclass(eq=False)
class Encoding:
    """How types are chosen, and after planning (`encoded`) what was chosen."""

    policy: Policy
    effort: str = "normal"
    importance: Importance | None = None
    allow_requantize: bool = False
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
        lossy = Counter(
            f"{item.before.name} to {item.choice.dtype.name}"
            for item in self.encoded
            if item.before.is_quantized and item.before != item.choice.dtype
        )
        if lossy:
            found["recipe.requantized"] = sorted(lossy)
            found["recipe.requantized_counts"] = [lossy[name] for name in sorted(lossy)]
        fell = Counter(
            f"{item.choice.wanted.name} to {item.choice.dtype.name}"
            for item in self.encoded
            if item.choice.fell_back
        )
        if fell:
            found["recipe.fallbacks"] = sorted(fell)
            found["recipe.fallback_counts"] = [fell[name] for name in sorted(fell)]
        return found


def encode_mapping(
    mapping: SourceMapping, encoding: Encoding, profile: RoutingProfile | None
) -> SourceMapping:
    """Return a census whose matrices have the types that the policy chooses.

    Raises UsageError for rules that need a profile or decide nothing, SourceError for a lossy
    matrix that would be encoded again without `allow_requantize`.
    """
    if encoding.policy.needs_heat and profile is None:
        raise UsageError(
            "a rule asks for the hottest or coldest experts; give a profile (--routing)"
        )
    n_layers = int(mapping.spec.get("n_layers", 1))
    heat = _heat(profile)
    work = _Work(encoding, n_layers, heat)
    rows = [work.row(number, row) for number, row in enumerate(mapping.rows)]
    residents = [work.resident(resident) for resident in mapping.residents]
    unused = encoding.policy.unused()
    if unused:
        raise UsageError(f"no matrix of this model matches the rule {quote_some(unused)}")
    if work.lossy and not encoding.allow_requantize:
        raise SourceError(
            f"{len(work.lossy)} matrices are quantized already, among them "
            f"{quote(work.lossy[0])}: encoding them again loses more than the type tells; "
            "--allow-requantize does it"
        )
    return replace(mapping, rows=rows, residents=_alias_types(residents))


def _heat(profile: RoutingProfile | None) -> dict[tuple[int, int], float]:
    if profile is None:
        return {}
    order = hottest_first(profile.counts(), profile.mask())
    return {(int(row), int(expert)): i / len(order) for i, (row, expert) in enumerate(order)}


@dataclass
class _Work:
    encoding: Encoding
    n_layers: int
    heat: dict[tuple[int, int], float]
    lossy: list[str] = field(default_factory=list)

    def row(self, number: int, row: MappedRow) -> MappedRow:
        experts = []
        for expert, slots in enumerate(row.experts):
            new: ExpertSlots = dict(self._slots(number, row, expert, slots))
            experts.append(new)
        return replace(row, experts=tuple(experts))

    def _slots(
        self, number: int, row: MappedRow, expert: int, slots: ExpertSlots
    ) -> Iterator[tuple[PartRole, Slice]]:
        for role, piece in slots.items():
            target = Target(
                role=role.label,
                layer=row.layer,
                cols=piece.cols,
                expert=expert,
                heat=self.heat.get((number, expert)),
                n_layers=self.n_layers,
            )
            choice = self._choose(target, piece.dtype, piece.rows, piece.tensor)
            if choice is None:
                yield role, piece
                continue
            importance = self.encoding.importance
            weights = None if importance is None else importance.of_expert(number, expert, role)
            yield role, _encoded_slice(piece, choice.dtype, self.encoding.effort, weights)

    def resident(self, r: MappedResident) -> MappedResident:
        shape = r.tensor.shape
        if r.group == Group.OPTIONAL or len(shape) < 2 or shape[-2] == 1 or r.role == Role.OTHER:
            return r
        target = Target(r.role.label, r.layer, shape[-1], n_layers=self.n_layers)
        n_rows = r.tensor.n_weights // shape[-1]
        choice = self._choose(target, r.tensor.dtype, n_rows, r.tensor)
        if choice is None:
            return r
        importance = self.encoding.importance
        weights = None if importance is None else importance.of_resident(r.role, r.layer)
        view = EncodedView(r.tensor, choice.dtype, self.encoding.effort, weights)
        return replace(r, tensor=r.tensor.seen_as(view, choice.dtype, shape))

    def _choose(
        self, target: Target, before: DType, n_rows: int, tensor: SourceTensor
    ) -> Choice | None:
        """Return the choice for a matrix that changes its type, and note every choice."""
        choice = None
        if not target.role.endswith(("_bias", "_norm")):
            choice = self.encoding.policy.choose(target)
        if choice is None:
            return None
        self.encoding.encoded.append(Encoded(target, n_rows, before, choice))
        if choice.dtype == before:
            return None  # a byte copy
        if before.is_quantized:
            self.lossy.append(tensor.name)
        return choice


def _encoded_slice(
    piece: Slice, dtype: DType, effort: str, importance: npt.NDArray[np.float32] | None
) -> Slice:
    tensor = piece.tensor
    view = EncodedView(tensor, dtype, effort, importance)
    shape = (*tensor.shape[:-1], piece.cols) if tensor.shape[-1] == piece.cols else None
    if shape is None:
        shape = (tensor.n_weights // piece.cols, piece.cols)
    start = piece.start // tensor.dtype.row_bytes(piece.cols) * dtype.row_bytes(piece.cols)
    return Slice(
        tensor.seen_as(view, dtype, shape),
        start,
        piece.rows * dtype.row_bytes(piece.cols),
        piece.rows,
        piece.cols,
    )


def _alias_types(residents: list[MappedResident]) -> list[MappedResident]:
    """An alias has no bytes of its own: it is of its target's type, whatever its role's rule."""
    by_name = {r.name: r for r in residents}
    return [
        r if r.alias_of is None else replace(r, tensor=by_name[r.alias_of].tensor)
        for r in residents
    ]
