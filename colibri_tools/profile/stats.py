"""What a profile says about a model: concentration, coverage, stability, distances of domains.

Everything here is a pure function of counts [R, E] (rows: MoE layers; columns: experts, zero
beyond a row's own). Shares are of selections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.profile.file import RoutingProfile

__all__ = [
    "COVERAGE_POINTS",
    "Coverage",
    "HeldOut",
    "RowStats",
    "coverage_curve",
    "domain_distances",
    "effective_experts",
    "gini",
    "held_out",
    "knee",
    "row_stats",
    "stability",
]

Counts = npt.NDArray[Any]

COVERAGE_POINTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of all experts at which coverage is reported."""


def shares(counts: Counts, mask: Counts) -> Any:
    """Return float64 [R, E]: each row's distribution; uniform where a row has no selections."""
    counts = np.where(mask, counts, 0).astype(np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    uniform = mask / mask.sum(axis=1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), uniform)


def effective_experts(counts: Counts, mask: Counts) -> Any:
    """Return float64 [R]: exp of the entropy, the experts a row works like (Hill number, q = 1)."""
    p = shares(counts, mask)
    return np.exp(-np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1))


def gini(counts: Counts, mask: Counts) -> npt.NDArray[np.float64]:
    """Return float64 [R]: the Gini coefficient, 0 for equal use, (n - 1) / n for one expert."""
    out = np.zeros(len(counts))
    for row, (c, m) in enumerate(zip(counts, mask, strict=True)):
        x = np.sort(c[m].astype(np.float64))
        n, total = len(x), x.sum()
        if total > 0:
            out[row] = (2 * np.sum(np.arange(1, n + 1) * x) / (n * total)) - (n + 1) / n
    return out


def hottest_first(counts: Counts, mask: Counts) -> Counts:
    """Return int64 [n, 2], every (row, expert): most selections first, ties by row, then expert."""
    rows, experts = np.nonzero(mask)
    order = np.lexsort((experts, rows, -counts[rows, experts].astype(np.int64)))
    return np.stack([rows[order], experts[order]], axis=1)


def coverage_curve(counts: Counts, mask: Counts, by: Counts | None = None) -> Counts:
    """Return float64 [n + 1]: the share of selections that the first i experts have.

    Experts are taken hottest first by the counts `by` (their own, without it).
    """
    order = hottest_first(counts if by is None else by, mask)
    taken = counts[order[:, 0], order[:, 1]].astype(np.float64)
    total = taken.sum()
    return np.concatenate([[0.0], np.cumsum(taken) / (total if total > 0 else 1)])


def coverage_at(curve: Counts, share: float) -> float:
    """Return a coverage curve's value where `share` of all experts are taken."""
    n = len(curve) - 1
    return float(np.interp(share * n, np.arange(n + 1), curve))


def knee(curve: Counts) -> float:
    """Return the share of experts where a coverage curve is furthest above its chord.

    Beyond it, another expert covers less than an average one (the Kneedle criterion of Satopaa et
    al. 2011, without smoothing). 0 for a straight curve.
    """
    n = len(curve) - 1
    above = curve - np.linspace(0, 1, n + 1)
    return float(np.argmax(above) / n) if above.max() > 1e-9 else 0.0


@dataclass(frozen=True, slots=True)
class RowStats:
    """One MoE layer: how unequally its experts work.

    `coverage`: the share of the layer's selections that its hottest experts have, at
    `COVERAGE_POINTS`.
    """

    layer: int
    n_experts: int
    selections: int
    gini: float
    effective_experts: float
    never: tuple[int, ...]
    least: int
    most: int
    hottest: int
    coverage: tuple[float, ...]


def row_stats(profile: RoutingProfile, counts: Counts | None = None) -> list[RowStats]:
    """Return the statistics of every row."""
    counts = profile.counts() if counts is None else counts
    mask = profile.mask()
    unequal, effective = gini(counts, mask), effective_experts(counts, mask)
    rows = []
    for row, n in enumerate(profile.n_experts):
        own = counts[row, :n]
        rows.append(
            RowStats(
                layer=profile.layers[row],
                n_experts=n,
                selections=int(own.sum()),
                gini=float(unequal[row]),
                effective_experts=float(effective[row]),
                never=tuple(int(i) for i in np.nonzero(own == 0)[0]),
                least=int(own.min()),
                most=int(own.max()),
                hottest=int(own.argmax()),
                coverage=coverage(counts[row : row + 1], mask[row : row + 1]).at,
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage at `COVERAGE_POINTS`, and where the curve bends."""

    at: tuple[float, ...]
    knee: float


def coverage(counts: Counts, mask: Counts, by: Counts | None = None) -> Coverage:
    """Return the coverage of `counts` by experts that are hottest in `by`."""
    curve = coverage_curve(counts, mask, by)
    return Coverage(tuple(coverage_at(curve, share) for share in COVERAGE_POINTS), knee(curve))


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Coverage of texts by experts chosen on themselves, and on other texts."""

    name: str
    n_tokens: int
    in_sample: tuple[float, ...]
    held_out: tuple[float, ...]


def held_out(profile: RoutingProfile) -> list[HeldOut]:
    """Return coverage of each half by the other one, and of each domain by the other domains."""
    mask, results = profile.mask(), []
    for half in (0, 1):
        own, other = profile.half(half), profile.half(1 - half)
        n = int(profile.tokens[:, :, half].sum())
        if n and other.any():
            results.append(_held_out(f"half {half + 1}", n, own, other, mask))
    if len(profile.domains) > 1:
        whole = profile.counts()
        for d, name in enumerate(profile.domains):
            own, n = profile.counts(domain=d), int(profile.tokens[d].sum())
            if n and (whole - own).any():
                results.append(_held_out(name, n, own, whole - own, mask))
    return results


def _held_out(name: str, n: int, own: Counts, other: Counts, mask: Counts) -> HeldOut:
    return HeldOut(name, n, coverage(own, mask).at, coverage(own, mask, other).at)


def domain_distances(profile: RoutingProfile) -> npt.NDArray[np.float64]:
    """Return float64 [D, D]: Jensen-Shannon distances of routing, averaged over rows.

    The square root of the divergence in bits: 0 for the same distribution, 1 for disjoint ones
    (Lin 1991; Endres and Schindelin 2003).
    """
    mask = profile.mask()
    p = np.stack([shares(profile.counts(domain=d), mask) for d in range(len(profile.domains))])
    out = np.zeros((len(p), len(p)))
    for a in range(len(p)):
        for b in range(a):
            middle = (p[a] + p[b]) / 2
            divergence = (_entropy(middle) - (_entropy(p[a]) + _entropy(p[b])) / 2).clip(0, 1)
            out[a, b] = out[b, a] = float(np.sqrt(divergence).mean())
    return out


def _entropy(p: Counts) -> Any:
    return -np.sum(p * np.log2(np.where(p > 0, p, 1)), axis=-1)


def stability(profile: RoutingProfile) -> float | None:
    """Return how well the halves agree on the hottest quarter of experts, from 0 to 1.

    The share of either half's hottest quarter (over all rows) that is in the other's too; None
    without tokens in both halves. By chance it is 0.25.
    """
    mask = profile.mask()
    halves = [profile.half(0), profile.half(1)]
    if not all(half.any() for half in halves):
        return None
    n = max(1, int(mask.sum()) // 4)
    sets = [{(int(r), int(e)) for r, e in hottest_first(half, mask)[:n]} for half in halves]
    return len(sets[0] & sets[1]) / n
