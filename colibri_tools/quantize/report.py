"""What an encoding did: bits and errors by role and layer, what came out otherwise than asked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from colibri_tools.quantize.encoding import Encoded, Encoding
from colibri_tools.sources.encoded import LossSums

__all__ = ["EncodingReport", "Estimate", "RoleError", "RoleSize", "WorstMatrix", "report_on"]

_N_WORST = 10


@dataclass(frozen=True, slots=True)
class RoleSize:
    """All matrices of one role; `types` are bytes by type."""

    role: str
    n_matrices: int
    n_weights: int
    n_bytes: int
    bits_per_weight: float
    types: dict[str, int]


@dataclass(frozen=True, slots=True)
class RoleError:
    """Squared errors as shares of squared weights, plain and by importance.

    `layer` is None for all layers of a role, and -1 for a matrix that belongs to none.
    """

    role: str
    layer: int | None
    relative: float
    important: float


@dataclass(frozen=True, slots=True)
class WorstMatrix:
    """One of the matrices that lost most."""

    role: str
    layer: int
    expert: int | None
    type: str
    relative: float
    important: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job will take, from encoding a small sample on this machine."""

    encode_seconds: float
    threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class EncodingReport:
    """What was chosen, and with `errors` what it cost; those are empty unless measured.

    `untouched` counts matrices that keep their type, by role: no rule names them, or they have the
    wanted type already. `neutral_experts` are [layer, expert, tokens]. `rules` counts the matrices
    that each rule decided.
    """

    type: str
    effort: str
    bits_per_weight: float
    sizes: tuple[RoleSize, ...]
    rules: dict[str, int]
    untouched: dict[str, int]
    fallbacks: dict[str, int]
    requantized: dict[str, int]
    importance: dict[str, Any] | None
    neutral_experts: tuple[tuple[int, int, int | None], ...]
    errors: tuple[RoleError, ...]
    worst: tuple[WorstMatrix, ...]
    allocation: dict[str, Any] | None
    estimate: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold."""
        return asdict(self)


def report_on(encoding: Encoding, estimate: Estimate | None = None) -> EncodingReport:
    """Return the report of an encoding that was planned, and written if its errors are asked."""
    items = encoding.encoded
    importance = encoding.importance
    n_weights = sum(item.matrix.n_weights for item in items)
    return EncodingReport(
        type=encoding.policy.name,
        effort=encoding.effort,
        bits_per_weight=8 * sum(item.n_bytes for item in items) / max(1, n_weights),
        sizes=tuple(_sizes(items)),
        rules=dict(Counter(item.choice.rule for item in items if item.choice is not None)),
        untouched=dict(sorted(Counter(_role(i) for i in items if not i.changes).items())),
        fallbacks=encoding.fallbacks(),
        requantized=encoding.requantized(),
        importance=None if importance is None else importance.provenance(),
        neutral_experts=()
        if importance is None
        else tuple((n.layer, n.expert, n.tokens) for n in importance.neutral),
        errors=tuple(_errors(items)),
        worst=tuple(_worst(items)),
        allocation=encoding.policy.explain(),
        estimate=estimate,
    )


def _role(item: Encoded) -> str:
    target = item.matrix.target
    return f"experts.{target.role}" if target.is_expert else target.role


def _grouped(items: Iterable[Encoded], key: Callable[[Encoded], Any]) -> dict[Any, list[Encoded]]:
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(sorted(groups.items()))


def _sizes(items: list[Encoded]) -> Iterable[RoleSize]:
    for role, own in _grouped(items, _role).items():
        types: Counter[str] = Counter()
        for item in own:
            types[item.dtype.name] += item.n_bytes
        n_weights = sum(item.matrix.n_weights for item in own)
        n_bytes = types.total()
        bits = 8 * n_bytes / max(1, n_weights)
        yield RoleSize(role, len(own), n_weights, n_bytes, bits, dict(sorted(types.items())))


def _measured(items: Iterable[Encoded]) -> list[Encoded]:
    return [item for item in items if item.loss is not None and item.loss.is_measured]


def _sum(items: Iterable[Encoded]) -> LossSums:
    return sum((item.loss.total() for item in items if item.loss is not None), LossSums())


def _errors(items: list[Encoded]) -> Iterable[RoleError]:
    for role, own in _grouped(_measured(items), _role).items():
        total = _sum(own)
        yield RoleError(role, None, total.relative, total.important)
        layers = _grouped(own, lambda item: item.matrix.target.layer)
        for layer, its in layers.items():
            total = _sum(its)
            yield RoleError(role, layer, total.relative, total.important)


def _worst(items: list[Encoded]) -> Iterable[WorstMatrix]:
    lost = [(item.loss.total(), item) for item in _measured(items) if item.loss is not None]
    lost.sort(key=lambda pair: (-pair[0].relative, str(pair[1].matrix.key)))
    for total, item in lost[:_N_WORST]:
        target = item.matrix.target
        yield WorstMatrix(
            _role(item), target.layer, target.expert, item.dtype.name, total.relative,
            total.important,
        )  # fmt: skip
