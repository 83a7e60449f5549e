"""Adding up what routers chose: exact totals, by numpy over whole batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.profile.file import HALVES, N_REUSE_BINS, PHASES, RoutingProfile, Trace

__all__ = ["HALF_TOKENS", "Choices", "Totals", "empty_profile"]

HALF_TOKENS = 256
"""Tokens of a domain are counted in two halves by turns, so many in a row."""

_NONE = 0xFFFFFFFF
"""An early choice that there is not: of the first row, or of scores that were not finite."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the routers of R rows chose for T tokens, sequence after sequence.

    `experts` and `early` uint32, `weights` float32 [R, T, top_k]; `domain` and `phase` integers,
    `start` bool [T]: where another sequence begins.
    """

    experts: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.float32]
    early: npt.NDArray[np.uint32]
    domain: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    start: npt.NDArray[np.bool_]


def empty_profile(
    fingerprint: str,
    family: str,
    top_k: int,
    layers: tuple[int, ...],
    n_experts: tuple[int, ...],
    domains: tuple[str, ...],
) -> RoutingProfile:
    """Return a profile of nothing: all tables zero."""
    d, r, e = len(domains), len(layers), max(n_experts)
    counts = (d, len(PHASES), HALVES)
    return RoutingProfile(
        fingerprint=fingerprint,
        family=family,
        top_k=top_k,
        layers=layers,
        n_experts=n_experts,
        domains=domains,
        texts=(),
        selections=np.zeros((*counts, r, e), np.uint64),
        gate_mass=np.zeros((*counts, r, e)),
        tokens=np.zeros(counts, np.uint64),
        coselection=np.zeros((r, e, e), np.uint64),
        transitions=np.zeros((r - 1, e, e), np.uint64),
        reuse=np.zeros((r, N_REUSE_BINS), np.uint64),
        early=np.zeros((r, 2), np.uint64),
    )


@dataclass(slots=True)
class Totals:
    """A profile whose tables grow. With `keep_trace` every choice is kept too."""

    profile: RoutingProfile
    keep_trace: bool
    _pieces: list[Trace] = field(default_factory=list)

    def __post_init__(self) -> None:
        p = self.profile
        tables = ("selections", "gate_mass", "tokens", "coselection", "transitions")
        own = {name: getattr(p, name).copy() for name in (*tables, "reuse", "early")}
        if p.trace is not None:
            self._pieces.append(p.trace)
        self.profile = replace(p, trace=None, **own)

    def add(self, c: Choices) -> None:
        """Count a batch. Reuse is looked at within its sequences."""
        p = self.profile
        halves = self._halves(c.domain)
        group = (c.domain * len(PHASES) + c.phase) * HALVES + halves
        p.tokens.reshape(-1)[:] += np.bincount(group, minlength=p.tokens.size).astype(np.uint64)
        segment = np.cumsum(c.start, dtype=np.int64)
        for row in range(p.n_rows):
            self._add_row(row, c, group)
            p.reuse[row] += _reuse(c.experts[row], segment, p.max_experts)
        if self.keep_trace:
            self._pieces.append(_as_trace(c))

    def result(self, **changes: Any) -> RoutingProfile:
        """Return the profile as it is now, with its trace, and with `changes`."""
        if self.keep_trace:
            if len(self._pieces) > 1:
                self._pieces[:] = [_join(self._pieces)]
            changes["trace"] = self._pieces[0] if self._pieces else None
        return replace(self.profile, **changes)

    def _halves(self, domain: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        half = np.zeros(len(domain), np.int64)
        counted = self.profile.tokens.sum(axis=(1, 2)).astype(np.int64)
        for d in np.unique(domain):
            own = np.nonzero(domain == d)[0]
            half[own] = (counted[d] + np.arange(len(own))) // HALF_TOKENS % HALVES
        return half

    def _add_row(self, row: int, c: Choices, group: npt.NDArray[np.int64]) -> None:
        p, e = self.profile, self.profile.max_experts
        experts, k = c.experts[row].astype(np.int64), self.profile.top_k
        cells = (group[:, None] * e + experts).reshape(-1)
        shape, size = (*p.tokens.shape, e), p.tokens.size * e
        p.selections[:, :, :, row] += _count(cells, size).reshape(shape)
        mass = np.bincount(cells, c.weights[row].reshape(-1).astype(np.float64), minlength=size)
        p.gate_mass[:, :, :, row] += mass.reshape(shape)
        pairs = _pairs(experts, experts, e)
        off_diagonal = ~np.eye(k, dtype=bool).reshape(-1)
        p.coselection[row] += _count(pairs[:, off_diagonal], e * e).reshape(e, e)
        if row == 0:
            return
        before = c.experts[row - 1].astype(np.int64)
        p.transitions[row - 1] += _count(_pairs(before, experts, e), e * e).reshape(e, e)
        early = c.early[row]
        right = (early[:, :, None] == c.experts[row][:, None, :]).any(axis=2)
        p.early[row] += np.array([np.count_nonzero(early != _NONE), right.sum()], np.uint64)


def _count(cells: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint64]:
    return np.bincount(cells.reshape(-1), minlength=size).astype(np.uint64)


def _pairs(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], e: int) -> npt.NDArray[np.int64]:
    """[T, k * k]: cells (one of a, one of b) of an [e, e] table."""
    return (a[:, :, None] * e + b[:, None, :]).reshape(len(a), -1)


def _reuse(
    experts: npt.NDArray[np.uint32], segment: npt.NDArray[np.int64], e: int
) -> npt.NDArray[np.uint64]:
    """[N_REUSE_BINS]: distances in tokens between selections of an expert in a segment."""
    n, k = experts.shape
    key = (segment[:, None] * e + experts).reshape(-1)
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    distance = np.diff(np.repeat(np.arange(n), k)[order])[same]
    bins = np.minimum(np.frexp(distance.astype(np.float64))[1] - 1, N_REUSE_BINS - 1)
    return _count(bins.astype(np.int64), N_REUSE_BINS)


def _as_trace(c: Choices) -> Trace:
    return Trace(
        experts=np.ascontiguousarray(c.experts.transpose(1, 0, 2), np.uint16),
        weights=np.ascontiguousarray(c.weights.transpose(1, 0, 2)),
        domain=c.domain.astype(np.uint16),
        phase=c.phase.astype(np.uint8),
        start=c.start,
    )


def _join(pieces: list[Trace]) -> Trace:
    return Trace(
        experts=np.concatenate([t.experts for t in pieces]),
        weights=np.concatenate([t.weights for t in pieces]),
        domain=np.concatenate([t.domain for t in pieces]),
        phase=np.concatenate([t.phase for t in pieces]),
        start=np.concatenate([t.start for t in pieces]),
    )
