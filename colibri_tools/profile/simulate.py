"""`colibri simulate`: a trace against caches of other sizes and policies, and what it would cost.

The engine's own policy is not imitated: its expert store replays the trace, with reads that bring
nothing. Every token is replayed as decoding does it, one after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import Container
from colibri_tools.container import open as open_container
from colibri_tools.container.format import Stream
from colibri_tools.engine import Memory, estimate
from colibri_tools.errors import FormatError, UsageError
from colibri_tools.native import ffi, lib
from colibri_tools.output import format_bytes
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.profile.measuring import measure_speeds
from colibri_tools.profile.replay import Requests, replay, requests_of
from colibri_tools.profile.routing import load_routing
from colibri_tools.profile.speed import ComputeTime, Rate, tokens_per_second

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "NO_BUDGET",
    "CacheResult",
    "Replayed",
    "Simulation",
    "check_speeds",
    "engine_replay",
    "main_rows",
    "mean_block",
    "simulate",
]

PathLike = str | os.PathLike[str]

POLICIES = ("engine", "lru", "lfu", "static", "belady")

_MAX_CHOICES = 1_000_000
"""Of a longer trace the first tokens are replayed."""

_CURVE_POINTS = 16

NO_BUDGET = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class CacheResult:
    """One cache size: hit rates by policy, and by the engine's what a token reads and takes.

    `tokens_per_second` is that of the whole trace, from an empty cache on, `..._when_full` that of
    what comes once the cache is full, None where it never is. Without a time for computing both are
    what the drive allows at most; they are None where nothing says how fast it is. `below_token`:
    smaller than one token's experts.
    """

    cache_bytes: int
    ram_bytes: int | None
    blocks: int
    hit_rates: dict[str, float]
    bytes_per_token: float
    tokens_per_second: float | None
    tokens_per_second_when_full: float | None
    below_token: bool


@dataclass(frozen=True, slots=True)
class Simulation:
    """The replay of a trace: results by cache size, and hit rates of LRU and engine by size."""

    model: str
    n_tokens: int
    trace_tokens: int
    token_bytes: int
    all_bytes: int
    rate: Rate | None
    compute: ComputeTime | None
    results: tuple[CacheResult, ...]
    curve: tuple[tuple[int, float, float], ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything as data; `curve` is [{cache_bytes, engine, lru}]."""
        return {
            "model": self.model,
            "tokens": self.n_tokens,
            "trace_tokens": self.trace_tokens,
            "token_bytes": self.token_bytes,
            "all_experts_bytes": self.all_bytes,
            "drive": None if self.rate is None else asdict(self.rate),
            "compute": None if self.compute is None else asdict(self.compute),
            "caches": [asdict(result) for result in self.results],
            "curve": [
                {"cache_bytes": n, "engine": engine, "lru": lru} for n, engine, lru in self.curve
            ],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def render(self, console: Console) -> None:
        """Print the tables."""
        from colibri_tools.profile.simulate_view import render

        render(self, console)


def simulate(
    profile: PathLike,
    model: PathLike,
    *,
    ram: Sequence[int] = (),
    expert_cache: Sequence[int] = (),
    disk: float | None = None,
    compute: float | None = None,
    max_choices: int = _MAX_CHOICES,
) -> Simulation:
    """Replay the trace of `profile` with the container `model` for several cache sizes.

    `ram` are memory budgets, shared out as `run` does it; `expert_cache` sizes of the cache
    alone, both in bytes. `disk` is in bytes per second, None measures; `compute` are seconds of a
    token that misses nothing, None measures one. Raises UsageError for a profile of another model
    or without a trace, FormatError and JobError.
    """
    if not ram and not expert_cache:
        raise UsageError("give --ram or --expert-cache: how much memory there is")
    check_speeds(disk, compute)
    with open_container(model) as container:
        routing = load_routing(Path(profile), container_fingerprint(container)).profile
        rows, block_bytes = main_rows(container), mean_block(container)
    if routing.trace is None or not len(routing.trace.experts):
        raise UsageError(f"{profile}: has no trace to replay; profile-routing --trace keeps one")
    experts = routing.trace.experts
    kept = experts[: max(1, max_choices // (experts.shape[1] * experts.shape[2]))]
    memories = [estimate(model, ram_budget=budget, precision="fast") for budget in ram]
    sizes: list[tuple[int, int | None]] = [
        (m.cache_bytes, budget) for m, budget in zip(memories, ram, strict=True)
    ]
    limits = estimate(model, ram_budget=NO_BUDGET, precision="fast")
    sizes += [(_checked_cache(size, limits), None) for size in expert_cache]
    top_k = experts.shape[2]
    rate, time, notes = measure_speeds(model, limits, top_k, disk=disk, compute=compute)
    job = _Replay(os.fspath(model), rows, block_bytes, kept, routing, limits, rate, time)
    results = tuple(job.result(size, budget) for size, budget in sizes)
    if routing.precision == "exact":
        notes.append(
            "the profile's experts are those of exact precision; run decodes in fast precision "
            "unless told otherwise and chooses a few others: profile-routing --precision fast"
        )
    if len(kept) < len(experts):
        notes.append(f"the first {len(kept)} of {len(experts)} tokens of the trace are replayed")
    return Simulation(
        model=os.fspath(model),
        n_tokens=len(kept),
        trace_tokens=len(experts),
        token_bytes=limits.token_bytes,
        all_bytes=limits.all_experts_bytes,
        rate=rate,
        compute=time,
        results=results,
        curve=job.curve(),
        notes=tuple(notes),
        warnings=tuple(job.warnings(results)),
    )


def _checked_cache(size: int, limits: Memory) -> int:
    if size < limits.min_cache_bytes:
        raise UsageError(
            f"--expert-cache: expected at least {limits.min_cache_bytes} bytes (two blocks), "
            f"found {size}"
        )
    return min(size, limits.all_experts_bytes)


def check_speeds(disk: float | None, compute: float | None) -> None:
    """Raise UsageError where a given speed is none: bytes per second, seconds of a token."""
    if disk is not None and not 0 < disk < math.inf:
        raise UsageError(f"--disk: expected bytes per second above 0, found {disk:g}")
    if compute is not None and not 0 <= compute < math.inf:
        raise UsageError(f"--compute: expected seconds, 0 or more, found {compute:g}")


# --- replaying ------------------------------------------------------------------------------------


def main_rows(container: Container) -> tuple[int, ...]:
    """Return the row numbers of the layers that every token goes through."""
    return tuple(i for i, row in enumerate(container.rows) if row.stream == Stream.MAIN)


def mean_block(container: Container) -> float:
    """Bytes of memory that a block takes on average."""
    sizes = [
        -(-container.layout_of(row, expert).n_bytes // 4096) * 4096
        for row in main_rows(container)
        for expert in range(container.rows[row].n_experts)
    ]
    return sum(sizes) / len(sizes)


class _Replay:
    """A trace against caches. Policies but the engine's count blocks of the average size."""

    def __init__(
        self,
        model: str,
        rows: tuple[int, ...],
        block_bytes: float,
        experts: npt.NDArray[np.uint16],
        routing: RoutingProfile,
        limits: Memory,
        rate: Rate | None,
        compute: ComputeTime | None,
    ) -> None:
        self.model, self.rows, self.experts = model, rows, experts
        self.limits, self.rate, self.compute = limits, rate, compute
        self.requests: Requests = requests_of(experts, routing.n_experts)
        self.counts = routing.counts()[routing.mask()]
        self.block_bytes = block_bytes

    def result(self, cache_bytes: int, ram_bytes: int | None) -> CacheResult:
        """Replay with every policy."""
        found = engine_replay(self.model, self.experts, self.rows, cache_bytes)
        capacity = int(cache_bytes / self.block_bytes)
        rates = {"engine": found.hit_rate}
        n, full, n_full = len(self.experts), found.full, sum(found.full) / len(self.rows)
        if cache_bytes >= self.limits.all_experts_bytes:  # then nothing is read any more
            full, n_full = (len(self.rows),), 1.0
        for policy in POLICIES[1:]:
            rates[policy] = replay(policy, self.requests, capacity, self.counts)
        return CacheResult(
            cache_bytes=cache_bytes,
            ram_bytes=ram_bytes,
            blocks=capacity,
            hit_rates=rates,
            bytes_per_token=found.bytes_read / n,
            tokens_per_second=self._speed(found, found.full, found.filling, n),
            tokens_per_second_when_full=self._speed(found, full, (), n_full),
            below_token=cache_bytes < min(self.limits.token_bytes, self.limits.all_experts_bytes),
        )

    def _speed(
        self, found: Replayed, full: Sequence[int], filling: Sequence[int], n_tokens: float
    ) -> float | None:
        """The speed of so many tokens, which made these requests."""
        if self.rate is None or not n_tokens:
            return None
        block = found.bytes_read / found.misses if found.misses else self.block_bytes
        return tokens_per_second(
            self.rate,
            self.compute,
            [n / n_tokens for n in full],
            block,
            [n / n_tokens for n in filling],
        )

    def curve(self) -> tuple[tuple[int, float, float], ...]:
        """Hit rates of the engine and of LRU, from two blocks to all of them."""
        least, most = self.limits.min_cache_bytes, self.limits.all_experts_bytes
        sizes = {int(least + (most - least) * i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)}
        points = []
        for size in sorted(sizes):
            found = engine_replay(self.model, self.experts, self.rows, size)
            lru = replay("lru", self.requests, int(size / self.block_bytes), self.counts)
            points.append((size, found.hit_rate, lru))
        return tuple(points)

    def warnings(self, results: Sequence[CacheResult]) -> list[str]:
        """Name the cliff of LRU where a cache is below it."""
        below = [r.cache_bytes for r in results if r.below_token]
        if not below:
            return []
        return [
            f"a cache of {format_bytes(max(below))} is smaller than what one token uses "
            f"({format_bytes(self.limits.token_bytes)}): below that size least-recently-used "
            "evicts every expert before its layer comes round again"
        ]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the engine's store met: experts found and missed, bytes it would have read.

    `filling[m]` is how many requests missed m experts, 0 to top_k, until something was evicted,
    `full[m]` how many from then on.
    """

    hits: int
    misses: int
    bytes_read: int
    filling: tuple[int, ...]
    full: tuple[int, ...]

    @property
    def by_misses(self) -> tuple[int, ...]:
        """All requests, by how many experts they missed."""
        return tuple(map(sum, zip(self.filling, self.full, strict=True)))

    def in_the_long_run(self, n_requests: int) -> list[float]:
        """How many of a token's requests miss 0, 1, ... top_k experts once the cache is full.

        Of a replay that did not fill it, all requests are all there is to go by.
        """
        counts = self.full if any(self.full) else self.by_misses
        return [n_requests * n / sum(counts) for n in counts]

    @property
    def hit_rate(self) -> float:
        """Share of chosen experts that were in memory."""
        return self.hits / max(self.hits + self.misses, 1)


def engine_replay(
    model: PathLike,
    experts: npt.NDArray[np.uint16],
    rows: Sequence[int],
    cache_bytes: int,
    *,
    preload: bool = False,
) -> Replayed:
    """Return what the engine's store meets when it replays a trace.

    `experts` are [tokens, rows, top_k], `rows` their row numbers in the container. With `preload`
    the cache is filled with the first blocks of the file before. Raises FormatError.
    """
    n, n_rows, k = experts.shape
    flat = np.ascontiguousarray(experts, np.uint32)
    row_numbers = np.array(rows, np.uint32)
    found, text = ffi.new("clb_simulation *"), ffi.new("char[]", lib.COLIBRI_ERROR_BYTES)
    by_misses = np.zeros((2, k + 1), np.uint64)
    ok = lib.clb_simulate(
        os.fsencode(model),
        cache_bytes,
        preload,
        ffi.from_buffer("uint32_t[]", row_numbers),
        n_rows,
        ffi.from_buffer("uint32_t[]", flat),
        n,
        k,
        found,
        ffi.from_buffer("uint64_t[]", by_misses),
        text,
        len(text),
    )
    if not ok:
        raise FormatError(f"{os.fspath(model)}: {ffi.string(text).decode('utf-8', 'replace')}")
    return Replayed(
        hits=int(found.hits),
        misses=int(found.misses),
        bytes_read=int(found.bytes_read),
        filling=tuple(by_misses[0].tolist()),
        full=tuple(by_misses[1].tolist()),
    )
