"""Importance: how much the squared error of each column counts, from what the columns multiply.

An output is a sum of weights times inputs, so an error in a column costs as the mean square of its
input (the diagonal of the Hessian, as in Optimal Brain Damage, LeCun et al. 1990). Means come from
a routing profile (inputs of experts) or an importance matrix of llama.cpp (inputs of all matrices).

- The weights of a matrix are its means of squares over their own mean, and never below `FLOOR`: a
  column that one text does not use may matter to another.
- An expert that saw fewer than `MIN_TOKENS` tokens has means that are mostly noise, or none: its
  columns count equally ("neutral"). So do those of a matrix whose inputs were all zero, or that the
  file says nothing about. It gets the same type as its peers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from colibri_tools.container.format import PartRole, Role, Stream
from colibri_tools.errors import FormatError, UsageError, quote
from colibri_tools.families.naming import NameTable
from colibri_tools.families.result import SourceMapping
from colibri_tools.families.schema import BIASES, ExpertRule
from colibri_tools.families.table import FAMILIES
from colibri_tools.profile.file import is_profile
from colibri_tools.profile.routing import Routing, load_routing
from colibri_tools.quantize.imatrix import Imatrix, Squares, read_imatrix

__all__ = ["FLOOR", "MIN_TOKENS", "ColumnWeights", "Importance", "NeutralExpert", "load_importance"]

MIN_TOKENS = 16
"""A mean square of n numbers is off by about sqrt(2 / n): 35 % here."""

FLOOR = 1e-4
"""The least weight of a column, as a share of the mean."""

ColumnWeights = Callable[[], npt.NDArray[np.float32]]
"""Returns float32 [cols], all above zero; called when they are needed, not before."""

_PARTS = {PartRole.GATE: "gate", PartRole.UP: "gate", PartRole.DOWN: "down"}


class _Means(Protocol):
    """Squares of inputs of a stack of matrices."""

    @property
    def counts(self) -> npt.NDArray[np.float64] | None:
        """Tokens of each matrix, None where they are not known."""

    def read(self, matrix: int, n_cols: int) -> npt.NDArray[Any]:
        """Return squares, up to a factor, [n_cols]."""


@dataclass(frozen=True, eq=False, slots=True)
class _Sums:
    """`_Means` of a profile: [experts, columns]."""

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]

    def read(self, matrix: int, n_cols: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self.sums[matrix, :n_cols]
        return found


@dataclass(frozen=True, slots=True)
class NeutralExpert:
    """An expert whose columns count equally; `tokens` is None where the file does not say."""

    row: int
    layer: int
    expert: int
    tokens: int | None


@dataclass(frozen=True, eq=False, slots=True)
class _Matrix:
    means: _Means
    matrix: int
    cols: int

    def weights(self) -> npt.NDArray[np.float32]:
        return column_weights(self.means.read(self.matrix, self.cols))


def column_weights(squares: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return weights float32 [cols] of squares of inputs that are not all zero."""
    squares = squares.astype(np.float64)
    squares /= squares.max()  # first, so that the mean of huge or tiny ones is a number
    weights: npt.NDArray[np.float32] = np.maximum(squares / squares.mean(), FLOOR).astype("f4")
    return weights


@dataclass(eq=False)
class Importance:
    """Importance of a model's matrices; make it with `load_importance`."""

    kind: str
    path: str
    sha256: str
    neutral: list[NeutralExpert] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_experts: int = 0
    _experts: dict[tuple[int, int, PartRole], _Matrix] = field(default_factory=dict)
    _residents: dict[tuple[Role, int], _Matrix] = field(default_factory=dict)
    _tokens: dict[tuple[int, int], float] = field(default_factory=dict)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def of_expert(self, row: int, expert: int, role: PartRole) -> ColumnWeights | None:
        """Return the weights of a part of an expert, None where its columns count equally."""
        found = self._experts.get((row, expert, role))
        return None if found is None else found.weights

    def of_resident(self, role: Role, layer: int) -> ColumnWeights | None:
        """Return the weights of a resident matrix, None where its columns count equally."""
        found = self._residents.get((role, layer))
        return None if found is None else found.weights

    def tokens_of(self, row: int, expert: int) -> float | None:
        """Return the tokens that an expert saw, None where they are not known."""
        return self._tokens.get((row, expert))

    def provenance(self) -> dict[str, Any]:
        """Return what a container says about it."""
        return {
            "recipe.importance.kind": self.kind,
            "recipe.importance.sha256": self.sha256,
            "recipe.importance.min_tokens": MIN_TOKENS,
            "recipe.importance.neutral_experts": len(self.neutral),
        }

    def warnings(self) -> Iterator[str]:
        """Yield what a user must see: the experts that the texts hardly reached."""
        if not self.neutral:
            return
        shown = ", ".join(
            f"layer {n.layer} expert {n.expert}" + ("" if n.tokens is None else f" ({n.tokens})")
            for n in self.neutral[:4]
        )
        more = f" and {len(self.neutral) - 4} more" if len(self.neutral) > 4 else ""
        yield (
            f"importance: {len(self.neutral)} of {self.n_experts} experts saw fewer than "
            f"{MIN_TOKENS} tokens, their columns count equally: {shown}{more}"
        )

    def _add_expert(
        self, layer: int, row: int, expert: int, roles: list[tuple[PartRole, int]], means: _Means,
        matrix: int,
    ) -> None:  # fmt: skip
        tokens = None if means.counts is None else float(means.counts[matrix])
        if tokens is not None:
            self._tokens.setdefault((row, expert), tokens)
        for role, cols in roles:
            if not self._is_usable(means, matrix, cols, tokens):
                self._note_neutral(row, layer, expert, tokens)
                continue
            self._experts[row, expert, role] = _Matrix(means, matrix, cols)

    def _note_neutral(self, row: int, layer: int, expert: int, tokens: float | None) -> None:
        if (row, expert) not in self._seen:
            self._seen.add((row, expert))
            count = None if tokens is None else int(tokens)
            self.neutral.append(NeutralExpert(row, layer, expert, count))

    def _is_usable(self, means: _Means, matrix: int, cols: int, tokens: float | None) -> bool:
        """Whether there is anything to tell columns by. Raises FormatError for odd numbers."""
        squares = means.read(matrix, cols)
        if not np.isfinite(squares).all() or (squares < 0).any():
            at = int(np.flatnonzero(~(np.isfinite(squares) & (squares >= 0)))[0])
            raise FormatError(
                f"{self.path}: {_name_of(means)} matrix {matrix}, column {at}: expected a finite "
                f"number of 0 or more, found {squares[at]}"
            )
        if tokens is not None and tokens < MIN_TOKENS:
            return False
        # All equal is also how the older imatrix form writes experts without a token.
        return bool(squares.max() > squares.min())


def _name_of(means: _Means) -> str:
    return quote(means.name) if isinstance(means, Squares) else "the inputs,"


def load_importance(
    path: str | os.PathLike[str], mapping: SourceMapping, fingerprint: Callable[[], str]
) -> Importance:
    """Load a routing profile with importance, or an importance matrix, for a model.

    `fingerprint` tells the model's, which a profile must have. Raises FormatError for a broken file
    or odd numbers in it, UsageError for that of another model.
    """
    if is_profile(Path(path)):
        return _from_profile(os.fspath(path), load_routing(Path(path), fingerprint()), mapping)
    return _from_imatrix(read_imatrix(path), mapping)


# ---------------------------------------------------------------- routing profiles


def _from_profile(path: str, routing: Routing, mapping: SourceMapping) -> Importance:
    profile = routing.profile
    if not profile.inputs:
        raise UsageError(
            f"{path}: the profile has no importance; make it with profile-routing --importance"
        )
    found = Importance("routing profile", path, routing.sha256)
    counts = profile.counts().astype(np.float64)
    number = -1  # rows of a profile are those of the main stream
    for row, mapped in enumerate(mapping.rows):
        if mapped.stream != Stream.MAIN:
            continue
        number += 1
        for expert, slots in enumerate(mapped.experts):
            found.n_experts += 1
            for role, name in _PARTS.items():
                sums = profile.inputs.get(name)
                if sums is None or role not in slots:
                    continue
                cols = slots[role].cols
                if cols > sums.shape[2]:
                    raise UsageError(
                        f"{path}: inputs.{name}: expected {cols} columns, found {sums.shape[2]}; "
                        "it is of another model"
                    )
                means = _Sums(sums[number], counts[number])
                found._add_expert(mapped.layer, row, expert, [(role, cols)], means, expert)
    found.notes.append("a routing profile says nothing about resident matrices: they count equally")
    return found


# ---------------------------------------------------------------- importance matrices


def _from_imatrix(imatrix: Imatrix, mapping: SourceMapping) -> Importance:
    found = Importance("imatrix", imatrix.path, imatrix.sha256)
    found.n_experts = sum(len(row.experts) for row in mapping.rows if row.stream == Stream.MAIN)
    tables = _name_tables(mapping.family)
    residents = {(r.role, r.layer): r.tensor.shape for r in mapping.residents}
    rows = {row.layer: n for n, row in enumerate(mapping.rows) if row.stream == Stream.MAIN}
    unknown = []
    for name, squares in imatrix.entries.items():
        match = next((m for m in (table.match(name) for table in tables) if m), None)
        if match is None or (isinstance(match.rule, ExpertRule) and match.layer not in rows):
            unknown.append(name)
        elif isinstance(match.rule, ExpertRule):
            _add_stack(found, mapping, rows[match.layer], match.rule, match.expert, squares)
        else:
            shape = residents.get((match.rule.role, match.layer))
            if shape is None:
                unknown.append(name)
            else:
                _add_resident(found, match.rule.role, match.layer, shape, squares)
    _check_coverage(found, imatrix, unknown)
    return found


def _name_tables(family: str) -> list[NameTable]:
    """The GGUF names of tensors, those of the model's own family first."""
    families = sorted(FAMILIES, key=lambda f: f.name != family)
    return [NameTable(f.gguf, f.gguf.prefixes[0]) for f in families if f.gguf is not None]


def _add_stack(
    found: Importance,
    mapping: SourceMapping,
    row: int,
    rule: ExpertRule,
    expert: int,
    squares: Squares,
) -> None:
    if rule.is_bias or rule.parts[0] in BIASES:
        return
    experts = mapping.rows[row].experts
    chosen = range(len(experts)) if expert < 0 else [expert]
    for matrix, number in enumerate(chosen):
        slots = experts[number] if number < len(experts) else {}
        roles = [(part, slots[part].cols) for part in rule.parts if part in slots]
        cols = roles[0][1] if roles else 0
        expected = len(chosen) * cols
        if squares.n_values != expected or not _fits(squares, len(chosen)):
            raise _another(found, squares, f"{len(chosen)} experts of {cols} columns")
        found._add_expert(mapping.rows[row].layer, row, number, roles, squares, matrix)


def _add_resident(
    found: Importance, role: Role, layer: int, shape: tuple[int, ...], squares: Squares
) -> None:
    if squares.n_values != shape[-1] or not _fits(squares, 1):
        raise _another(found, squares, f"{shape[-1]} columns")
    tokens = None if squares.counts is None else float(squares.counts[0])
    if found._is_usable(squares, 0, shape[-1], tokens):
        found._residents[role, layer] = _Matrix(squares, 0, shape[-1])


def _fits(squares: Squares, n_matrices: int) -> bool:
    return squares.counts is None or len(squares.counts) == n_matrices


def _another(found: Importance, squares: Squares, expected: str) -> UsageError:
    n = 1 if squares.counts is None else len(squares.counts)
    return UsageError(
        f"{found.path}: {quote(squares.name)}: expected {expected}, found {squares.n_values} "
        f"values in {n} matrices; it is of another model"
    )


def _check_coverage(found: Importance, imatrix: Imatrix, unknown: list[str]) -> None:
    if len(unknown) == len(imatrix.entries):
        raise UsageError(
            f"{imatrix.path}: none of its {len(unknown)} entries is a matrix of this model, for "
            f"example {quote(unknown[0])}; it is of another model"
        )
    if unknown:
        found.notes.append(
            f"importance: {len(unknown)} entries name no matrix of this model, for example "
            f"{quote(unknown[0])}"
        )
