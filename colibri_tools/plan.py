"""`colibri plan`: how memory would be split, and what speed to expect, for several budgets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_tools.container import Container
from colibri_tools.container import open as open_container
from colibri_tools.engine import Memory, advise, estimate
from colibri_tools.errors import ColibriError, UsageError
from colibri_tools.output import format_bytes, format_speed, print_numbers
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.profile.measuring import measure_speeds
from colibri_tools.profile.routing import load_routing
from colibri_tools.profile.simulate import (
    NO_BUDGET,
    check_speeds,
    engine_replay,
    main_rows,
    mean_block,
)
from colibri_tools.profile.speed import ComputeTime, Rate, tokens_per_second
from colibri_tools.profile.stats import coverage_at, coverage_curve

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["BudgetPlan", "MemoryPlan", "plan_memory"]

PathLike = str | os.PathLike[str]

_MAX_TOKENS = 2000
"""Of a longer trace the first tokens are replayed."""


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """One budget: its split, the share of experts found in the cache, and the drive's bound.

    `memory` is None, and `refused` says why, where the budget is too small.
    """

    ram_bytes: int
    memory: Memory | None
    refused: str | None = None
    hit_rate: float | None = None
    bytes_per_token: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Budgets and what they give. `basis` says what hit rates come from.

    `compute` is None where speed is only what the drive allows at most.
    """

    model: str
    bytes_per_second: float
    disk_source: str
    basis: str
    budgets: tuple[BudgetPlan, ...]
    compute: ComputeTime | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything as data."""
        return {
            "model": self.model,
            "bytes_per_second": self.bytes_per_second,
            "disk_source": self.disk_source,
            "basis": self.basis,
            "compute": None if self.compute is None else asdict(self.compute),
            "budgets": [asdict(budget) for budget in self.budgets],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def render(self, console: Console) -> None:
        """Print a table with a row for each budget."""
        at_most = "" if self.compute else ", at most"
        headers = (*_COLUMNS, "read per token", "tokens/s" + at_most)
        print_numbers(console, headers, map(_cells, self.budgets))
        text = f"drive: {self.bytes_per_second / 1e9:.2f} GB/s, {self.disk_source}; found in the "
        text += f"cache: {self.basis}. "
        if self.compute is None:
            text += "Tokens/s is what the drive allows; computing comes on top."
        else:
            text += f"Time of {self.compute}."
        console.print(text, style="dim", soft_wrap=True)


_COLUMNS = ("memory", "resident", "KV", "scratch, other", "experts", "of all", "found")


def _cells(b: BudgetPlan) -> list[str]:
    if b.memory is None:
        return [format_bytes(b.ram_bytes), *[""] * len(_COLUMNS), "too small"]
    m = b.memory
    speed = "not bound" if b.tokens_per_second is None else format_speed(b.tokens_per_second)
    return [
        format_bytes(b.ram_bytes),
        format_bytes(m.resident_bytes),
        format_bytes(m.kv_bytes),
        format_bytes(m.scratch_bytes + m.metadata_bytes + m.other_bytes),
        format_bytes(m.cache_bytes),
        f"{m.cache_bytes / m.all_experts_bytes:.0%}" if m.all_experts_bytes else "-",
        f"{b.hit_rate:.1%}",
        format_bytes(int(b.bytes_per_token or 0)),
        speed,
    ]


def plan_memory(
    path: PathLike,
    ram: Sequence[int],
    *,
    disk: float | None = None,
    compute: float | None = None,
    routing: PathLike | None = None,
    ctx: int | None = None,
) -> MemoryPlan:
    """Plan the container `path` for memory budgets `ram`, in bytes.

    `disk` is in bytes per second; None measures this machine: its drive and, unless `compute` says
    it, the seconds of computing a token. With `disk` alone speed is what the drive allows at most.
    `routing` is a profile of the model: its trace is replayed, or else its counts tell what the
    hottest experts cover; without one all experts count as equally likely. Raises UsageError,
    FormatError and JobError.
    """
    if not ram:
        raise UsageError("give --ram: how much memory there is")
    check_speeds(disk, compute)
    with open_container(path) as container:
        profile = None
        if routing is not None:
            profile = load_routing(Path(routing), container_fingerprint(container)).profile
        model = _Model(os.fspath(path), container, profile)
    memories = [_memory(model.path, budget, ctx) for budget in ram]
    if all(isinstance(memory, str) for memory in memories):
        raise UsageError(str(memories[-1]))
    notes = model.measure(disk, compute)
    budgets = tuple(_budget(model, *pair) for pair in zip(ram, memories, strict=True))
    warnings = [
        f"{format_bytes(b.ram_bytes)}: {advice.text}"
        for b in budgets
        if b.memory is not None
        for advice in advise(b.memory)
        if advice.warning
    ]
    warnings += [f"{format_bytes(b.ram_bytes)}: {b.refused}" for b in budgets if b.refused]
    return MemoryPlan(
        model=os.fspath(path),
        bytes_per_second=model.rate.bytes_per_second if model.rate else 0.0,
        disk_source=model.rate.source if model.rate else "measured",
        basis=model.basis,
        budgets=budgets,
        compute=model.compute,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _memory(path: str, ram: int, ctx: int | None) -> Memory | str:
    """The split of a budget, or why it is too small."""
    try:
        return estimate(path, ram_budget=ram, ctx=ctx, precision="fast")
    except UsageError:
        raise
    except ColibriError as error:
        return error.message


def _budget(model: _Model, ram: int, memory: Memory | str) -> BudgetPlan:
    if isinstance(memory, str):
        return BudgetPlan(ram, None, memory)
    by_misses = model.by_misses(memory)
    missed = sum(m * n for m, n in enumerate(by_misses))
    hit_rate = 1 - missed / max(model.top_k * sum(by_misses), 1)
    n_bytes = missed * model.block_bytes
    speed = None
    if model.rate is not None and (n_bytes or model.compute):
        speed = tokens_per_second(model.rate, model.compute, by_misses, model.block_bytes)
    return BudgetPlan(ram, memory, None, hit_rate, n_bytes, speed)


class _Model:
    """A container, what is known of which experts it uses, and how fast it is read and computed."""

    def __init__(self, path: str, container: Container, profile: RoutingProfile | None) -> None:
        self.path, self.profile, self.rows = path, profile, main_rows(container)
        self.top_k, self.block_bytes = int(container.spec["top_k"]), mean_block(container)
        self.rate: Rate | None = None
        self.compute: ComputeTime | None = None
        if profile is None:
            self.basis = "as if all experts were equally likely"
        elif profile.trace is None:
            self.basis = "what the hottest experts of the profile cover"
        else:
            n = min(_MAX_TOKENS, len(profile.trace.experts))
            self.basis = f"the profile's trace ({n} tokens), replayed"

    def measure(self, disk: float | None, compute: float | None) -> list[str]:
        """Take what is given and measure the rest; return notes on what could not be."""
        if disk is not None and compute is None:  # nothing is run
            self.rate = Rate(disk, "given")
            return []
        limits = estimate(self.path, ram_budget=NO_BUDGET, precision="fast")
        self.rate, self.compute, notes = measure_speeds(
            self.path, limits, self.top_k, disk=disk, compute=compute
        )
        return notes

    def by_misses(self, memory: Memory) -> list[float]:
        """Return how many requests of a token are expected to miss 0, 1, ... top_k experts.

        Once the cache is full, where the trace fills it.
        """
        n_rows = len(self.rows)
        share = memory.cache_bytes / max(memory.all_experts_bytes, 1)
        if self.profile is not None and self.profile.trace is not None:
            if share >= 1:  # what is read once only does not count
                return [n_rows, *[0.0] * self.top_k]
            experts = self.profile.trace.experts[:_MAX_TOKENS]
            found = engine_replay(self.path, experts, self.rows, memory.cache_bytes)
            return found.in_the_long_run(n_rows)
        if self.profile is not None and share < 1:
            share = coverage_at(coverage_curve(self.profile.counts(), self.profile.mask()), share)
        return [n_rows * chance for chance in _binomial(self.top_k, 1 - min(share, 1.0))]


def _binomial(n: int, chance: float) -> list[float]:
    """Chances of 0, 1, ... n misses, each expert being missed independently of the others."""
    return [comb(n, m) * chance**m * (1 - chance) ** (n - m) for m in range(n + 1)]
