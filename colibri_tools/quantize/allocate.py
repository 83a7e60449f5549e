"""Types chosen for a size: for each matrix the one whose bits save most error where they are spent.

Every matrix is encoded in part as each candidate, and what that loses is measured: the squared
error as a share of the squared weights, each column by its importance. That is about the noise in
the matrix's output as a share of its power. What is minimised is the sum of these shares, each
times how much of the tokens the matrix sees: 1 for resident matrices, an expert's share of its
layer's tokens for the parts of an expert (equal shares without a profile). The output matrix counts
as often as there are halves of layers: alone it makes what all of them together make.

From the smallest type of each matrix on, the upgrade that removes most error for its bytes is made
next, along the lower convex hull of each matrix's (bytes, error), until the size is reached: the
Lagrangian solution (Shoham and Gersho 1988), filled up with upgrades that still fit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from colibri_tools.dtypes import DType, dtype_by_name
from colibri_tools.errors import SourceError, UsageError, quote
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.quantize.importance import Importance
from colibri_tools.quantize.matrices import Matrix
from colibri_tools.quantize.rules import (
    MIXES,
    Choice,
    Policy,
    Target,
    fallback,
    make_policy,
    parse_rule,
)
from colibri_tools.sources import Source
from colibri_tools.sources.encoded import LossSums

__all__ = ["CANDIDATES", "TargetPolicy", "allocate", "target_policy"]

CANDIDATES = ("q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
"""Each is the least lossy of its size; rows they do not divide get their fallbacks."""

_SAMPLE_WEIGHTS = 1 << 16
_SAMPLE_RUNS = 4
_WORTH_IT = 0.05
"""A gain below this share of the error does not pay: mixed types cost time and layouts."""


@dataclass(frozen=True, slots=True)
class Option:
    """A type that a matrix may get: bytes of the whole matrix, and its share of the error."""

    dtype: DType
    wanted: DType
    n_bytes: int
    error: float


@dataclass(frozen=True, slots=True)
class Unit:
    """A matrix with its options by rising size; `weight` is the share of tokens that it sees."""

    matrix: Matrix
    weight: float
    options: tuple[Option, ...]


@dataclass
class TargetPolicy(Policy):
    """Types by measured errors. User's rules come first; what they name is not measured."""

    bits: float = 0.0
    threads: int = 0
    _types: dict[Target, Option] = field(default_factory=dict)
    _explained: dict[str, Any] | None = None

    def choose(self, target: Target, *more: Target) -> Choice | None:
        """Return the choice for a matrix, or None where it keeps its type."""
        found = self._types.get(target)
        if found is not None:
            return Choice(found.dtype, found.wanted, self.name)
        return super().choose(target, *more)

    def prepare(
        self,
        matrices: Sequence[Matrix],
        source: Source,
        effort: str,
        importance: Importance | None,
        profile: RoutingProfile | None,
    ) -> None:
        """Measure and allocate. Raises UsageError for a size that cannot be reached."""
        free = [m for m in matrices if super(TargetPolicy, self).choose(*m.uses) is None]
        free = [m for m in free if m.target.role not in ("router", "shared_router")]
        chosen = {m.key for m in free}
        fixed = sum(self._fixed_bytes(m) for m in matrices if m.key not in chosen)
        n_weights = sum(m.n_weights for m in matrices)
        budget = int(self.bits * n_weights / 8) - fixed
        shares = _shares(free, importance, profile)
        units = _measure(free, shares, source, effort, importance, self.threads)
        picked = allocate(units, budget, self._too_small(n_weights, fixed))
        self._types = {u.matrix.target: u.options[i] for u, i in zip(units, picked, strict=True)}
        self._explained = _explain(self.bits, units, picked, fixed, n_weights)

    def _fixed_bytes(self, matrix: Matrix) -> int:
        choice = super().choose(*matrix.uses)
        dtype = matrix.before if choice is None else choice.dtype
        return matrix.rows * dtype.row_bytes(matrix.cols)

    def _too_small(self, n_weights: int, fixed: int) -> Any:
        def error(least: int) -> UsageError:
            bits = 8 * (least + fixed) / max(1, n_weights)
            return UsageError(
                f"--target-bpw {self.bits:g}: the smallest types give {bits:.3f} bits per weight"
            )

        return error

    def explain(self) -> dict[str, Any] | None:
        """Return what was chosen and what it is expected to lose."""
        return self._explained


def target_policy(bits: float, rules: Sequence[str] = (), threads: int = 0) -> TargetPolicy:
    """Return the policy of `--target-bpw`. Raises UsageError for senseless bits or rules."""
    if not 1 <= bits <= 32:
        raise UsageError(f"--target-bpw: expected 1 to 32 bits per weight, found {bits:g}")
    parsed = tuple(parse_rule(text) for text in rules)
    return TargetPolicy(f"{bits:g} bits per weight", parsed, bits=bits, threads=threads)


# ---------------------------------------------------------------- measuring


def _shares(
    matrices: Sequence[Matrix], importance: Importance | None, profile: RoutingProfile | None
) -> list[float]:
    """The share of tokens that each matrix sees; an expert without any counts as one token."""
    tokens: dict[tuple[int, int], float] = {}
    for m in matrices:
        if not isinstance(m.key, tuple):
            continue
        row, expert, _ = m.key
        seen = None if importance is None else importance.tokens_of(row, expert)
        if seen is None and profile is not None and row < profile.n_rows:
            seen = float(profile.counts()[row, expert])
        tokens[row, expert] = 1.0 if seen is None else max(seen, 1.0)
    totals: Counter[int] = Counter()
    for (row, _), seen in tokens.items():
        totals[row] += seen  # type: ignore[assignment]
    return [
        tokens[m.key[:2]] / totals[m.key[0]] if isinstance(m.key, tuple) else _resident_share(m)
        for m in matrices
    ]


def _resident_share(matrix: Matrix) -> float:
    """The output matrix alone makes the logits; a layer's two halves add to what 2 n make."""
    is_output = any(use.role == "output" for use in matrix.uses)
    return 2.0 * matrix.target.n_layers if is_output else 1.0


def _measure(
    matrices: Sequence[Matrix],
    shares: Sequence[float],
    source: Source,
    effort: str,
    importance: Importance | None,
    threads: int,
) -> list[Unit]:
    def unit(pair: tuple[Matrix, float]) -> Unit:
        matrix, share = pair
        return Unit(matrix, share, tuple(_options(matrix, source, effort, importance)))

    with ThreadPoolExecutor(threads or None, thread_name_prefix="measure") as pool:
        return list(pool.map(unit, zip(matrices, shares, strict=True)))


def _options(
    matrix: Matrix, source: Source, effort: str, importance: Importance | None
) -> Iterator[Option]:
    found: dict[DType, Option] = {}
    if matrix.before.is_quantized:  # a byte copy, if it is the wanted size
        n_bytes = matrix.rows * matrix.before.row_bytes(matrix.cols)
        found[matrix.before] = Option(matrix.before, matrix.before, n_bytes, 0.0)
    runs = list(_sample(matrix, source))
    weights = matrix.weights_by(importance)
    columns = None if weights is None else weights()
    for name in CANDIDATES:
        wanted = dtype_by_name(name)
        dtype = fallback(wanted, matrix.cols)
        if dtype in found:
            continue
        error = _error(matrix, dtype, effort, runs, columns)
        if error is not None:
            n_bytes = matrix.rows * dtype.row_bytes(matrix.cols)
            found[dtype] = Option(dtype, wanted, n_bytes, error)
    if not found:
        raise SourceError(
            f"tensor {quote(matrix.tensor.name)}: its weights are too large for any type of "
            f"--target-bpw; give it one with more range by --rule"
        )
    yield from sorted(found.values(), key=lambda option: (option.n_bytes, option.error))


def _sample(matrix: Matrix, source: Source) -> Iterator[Any]:
    """Yield runs of whole rows, float32 [rows, cols], spread over the matrix."""
    n = max(1, min(matrix.rows, _SAMPLE_WEIGHTS // matrix.cols))
    n_runs = min(_SAMPLE_RUNS, n)
    first_row = matrix.start // matrix.before.row_bytes(matrix.cols)
    for run in range(n_runs):
        rows = n * (run + 1) // n_runs - n * run // n_runs
        at = first_row + (matrix.rows - rows) * run // max(1, n_runs - 1)
        values = source.read_f32(matrix.tensor, at * matrix.cols, rows * matrix.cols)
        if not np.isfinite(values).all():
            index = at * matrix.cols + int(np.flatnonzero(~np.isfinite(values))[0])
            where = ", ".join(map(str, matrix.tensor.locate(index)))
            raise SourceError(
                f"tensor {quote(matrix.tensor.name)}: a weight that is NaN or infinite at "
                f"[{where}]; the checkpoint is damaged, fetch or save it again"
            )
        yield values.reshape(rows, matrix.cols)


def _error(
    matrix: Matrix, dtype: DType, effort: str, runs: Iterable[Any], columns: Any
) -> float | None:
    """Return the share of the output that a type loses, None where it cannot hold the weights."""
    from colibri_tools import native

    total = LossSums()
    for run in runs:
        encoded = native.quantize(dtype.id, run, effort=effort, importance=columns)
        if isinstance(encoded, int):
            return None
        total += LossSums(*native.quantize_loss(dtype.id, encoded, run, columns))
    return float(f"{total.important:.6g}")


# ---------------------------------------------------------------- allocating


def allocate(units: Sequence[Unit], budget: int, too_small: Any) -> list[int]:
    """Return the number of the option that each unit gets, together at most `budget` bytes.

    `too_small` makes the error of a budget below the smallest options, from their bytes.
    """
    picked = [0] * len(units)
    left = budget - sum(unit.options[0].n_bytes for unit in units)
    if left < 0:
        raise too_small(budget - left)
    steps = []
    for number, unit in enumerate(units):
        hull = _hull(unit)
        for a, b in pairwise(hull):
            one, two = unit.options[a], unit.options[b]
            gain = unit.weight * (one.error - two.error) / (two.n_bytes - one.n_bytes)
            steps.append((-gain, number, a, b))
    for _, number, a, b in sorted(steps):
        n_bytes = units[number].options[b].n_bytes - units[number].options[a].n_bytes
        if picked[number] == a and n_bytes <= left:
            picked[number] = b
            left -= n_bytes
    return picked


def _hull(unit: Unit) -> list[int]:
    """The options on the lower convex hull of (bytes, error), from the smallest on."""
    hull: list[int] = []
    for i, option in enumerate(unit.options):
        if hull and option.error >= unit.options[hull[-1]].error:
            continue
        while len(hull) > 1 and _slope(unit, hull[-2], hull[-1]) <= _slope(unit, hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def _slope(unit: Unit, a: int, b: int) -> float:
    one, two = unit.options[a], unit.options[b]
    return (one.error - two.error) / (two.n_bytes - one.n_bytes)


# ---------------------------------------------------------------- explaining


def _explain(
    bits: float, units: Sequence[Unit], picked: Sequence[int], fixed: int, n_weights: int
) -> dict[str, Any]:
    chosen = [unit.options[i] for unit, i in zip(units, picked, strict=True)]
    error = sum(unit.weight * option.error for unit, option in zip(units, chosen, strict=True))
    size = sum(option.n_bytes for option in chosen)
    uniform = _uniform(units, size)
    by_place: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for unit, option in zip(units, chosen, strict=True):
        target = unit.matrix.target
        role = f"experts.{target.role}" if target.is_expert else target.role
        by_place[role, target.layer][option.dtype.name] += 1
    gain = 1 - error / uniform["error"] if uniform["error"] > 0 else 0.0
    document = {
        "target_bits_per_weight": bits,
        "bits_per_weight": 8 * (size + fixed) / max(1, n_weights),
        "error": error,
        "uniform": uniform,
        "gain": gain,
        "pays": gain >= _WORTH_IT,
        "chosen": [
            {"role": role, "layer": layer, "types": dict(sorted(types.items()))}
            for (role, layer), types in sorted(by_place.items())
        ],
    }
    return {**document, "text": list(_text(document))}


def _uniform(units: Sequence[Unit], size: int) -> dict[str, Any]:
    """The error of `--type` at the same size, a type or mix; between two, of some of each."""
    points = []
    for name in (*CANDIDATES, *MIXES):
        policy = make_policy(name)
        options = [_option_by(unit, policy) for unit in units]
        n_bytes = sum(option.n_bytes for option in options)
        error = sum(u.weight * option.error for u, option in zip(units, options, strict=True))
        points.append((n_bytes, error, name))
    points.sort()
    below = [p for p in points if p[0] <= size] or points[:1]
    above = [p for p in points if p[0] > size] or points[-1:]
    low, high = min(below, key=lambda p: p[1]), above[0]
    share = 0.0 if high[0] <= low[0] else min(1.0, max(0.0, (size - low[0]) / (high[0] - low[0])))
    types = [low[2]] if share == 0 else [low[2], high[2]]
    return {"types": types, "error": low[1] + share * (high[1] - low[1])}


def _option_by(unit: Unit, policy: Policy) -> Option:
    choice = policy.choose(*unit.matrix.uses)
    found = [o for o in unit.options if choice is not None and o.dtype == choice.dtype]
    return found[0] if found else unit.options[-1]


def _text(document: dict[str, Any]) -> Iterator[str]:
    uniform = document["uniform"]
    yield (
        f"allocation: {document['bits_per_weight']:.3f} bits per weight, expected error "
        f"{document['error']:.4g}; {' and '.join(uniform['types'])} at the same size: "
        f"{uniform['error']:.4g}"
    )
    if document["pays"]:
        yield f"allocation: {document['gain']:.0%} less error than --type at that size"
    else:
        yield (
            f"allocation: it does not pay: {document['gain']:+.1%} of the error of --type at that "
            f"size; --type {uniform['types'][0]} is simpler"
        )
    by_role: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place in document["chosen"]:
        for name in place["types"]:
            by_role[place["role"]][name].append(place["layer"])
    for role, types in by_role.items():
        parts = (f"{name} in layers {_ranges(layers)}" for name, layers in sorted(types.items()))
        if min(min(layers) for layers in types.values()) < 0:
            parts = (name for name in sorted(types))
        yield f"  {role}: {'; '.join(parts)}"


def _ranges(numbers: list[int]) -> str:
    parts, start = [], numbers[0]
    for a, b in zip(numbers, [*numbers[1:], None], strict=True):
        if b != a + 1:
            parts.append(str(a) if start == a else f"{start}-{a}")
            start = b if b is not None else start
    return ", ".join(parts)
