"""`colibri plan`: how memory would be split, and what speed to expect, for several budgets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_tools.container import Container
from colibri_tools.container import open as open_container
from colibri_tools.engine import Memory, advise, estimate, probe_drive
from colibri_tools.errors import ColibriError, UsageError
from colibri_tools.output import format_bytes
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.profile.routing import load_routing
from colibri_tools.profile.simulate import engine_hits, main_rows
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
    """Budgets and what they give. `basis` says what hit rates come from."""

    model: str
    bytes_per_second: float
    disk_source: str
    basis: str
    budgets: tuple[BudgetPlan, ...]
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything as data."""
        return {
            "model": self.model,
            "bytes_per_second": self.bytes_per_second,
            "disk_source": self.disk_source,
            "basis": self.basis,
            "budgets": [asdict(budget) for budget in self.budgets],
            "warnings": list(self.warnings),
        }

    def render(self, console: Console) -> None:
        """Print a table with a row for each budget."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for name in ("memory", "resident", "KV", "scratch, other", "experts", "of all", "found"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("read per token", justify="right", no_wrap=True)
        table.add_column("tokens/s, at most", justify="right", no_wrap=True)
        for budget in self.budgets:
            table.add_row(*_cells(budget))
        console.print(table)
        console.print(
            f"drive: {self.bytes_per_second / 1e9:.2f} GB/s, {self.disk_source}; found in the "
            f"cache: {self.basis}. Tokens/s is what the drive allows; computing comes on top.",
            style="dim",
            soft_wrap=True,
        )


def _cells(b: BudgetPlan) -> list[str]:
    if b.memory is None:
        return [format_bytes(b.ram_bytes), "too small"]
    m = b.memory
    speed = "not bound" if b.tokens_per_second is None else f"{b.tokens_per_second:.3g}"
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
    routing: PathLike | None = None,
    ctx: int | None = None,
) -> MemoryPlan:
    """Plan the container `path` for memory budgets `ram`, in bytes.

    `disk` is in bytes per second; None measures it. `routing` is a profile of the model: its trace
    is replayed, or else its counts tell what the hottest experts cover; without one all experts
    count as equally likely. Raises UsageError, FormatError and JobError.
    """
    if not ram:
        raise UsageError("give --ram: how much memory there is")
    with open_container(path) as container:
        profile = None
        if routing is not None:
            profile = load_routing(Path(routing), container_fingerprint(container)).profile
        model = _Model(os.fspath(path), container, profile)
    if disk is None:
        rate, source = probe_drive(path).bytes_per_second, "measured"
    else:
        rate, source = disk, "given"
    budgets = tuple(_budget(model, budget, rate, ctx) for budget in ram)
    if all(budget.memory is None for budget in budgets):
        raise UsageError(budgets[-1].refused or "")
    warnings = [
        f"{format_bytes(b.ram_bytes)}: {advice.text}"
        for b in budgets
        if b.memory is not None
        for advice in advise(b.memory)
        if advice.warning
    ]
    warnings += [f"{format_bytes(b.ram_bytes)}: {b.refused}" for b in budgets if b.refused]
    return MemoryPlan(os.fspath(path), rate, source, model.basis, budgets, tuple(warnings))


def _budget(model: _Model, ram: int, rate: float, ctx: int | None) -> BudgetPlan:
    try:
        memory = estimate(model.path, ram_budget=ram, ctx=ctx, precision="fast")
    except UsageError:
        raise
    except ColibriError as error:
        return BudgetPlan(ram, None, error.message)
    hit_rate = model.hit_rate(memory)
    missed = (1 - hit_rate) * memory.token_bytes
    speed = rate / missed if missed > 0 and rate > 0 else None
    return BudgetPlan(ram, memory, None, hit_rate, missed, speed)


class _Model:
    """A container, and what is known of which experts it uses."""

    def __init__(self, path: str, container: Container, profile: RoutingProfile | None) -> None:
        self.path, self.profile, self.rows = path, profile, main_rows(container)
        if profile is None:
            self.basis = "as if all experts were equally likely"
        elif profile.trace is None:
            self.basis = "what the hottest experts of the profile cover"
        else:
            n = min(_MAX_TOKENS, len(profile.trace.experts))
            self.basis = f"the profile's trace ({n} tokens), replayed"

    def hit_rate(self, memory: Memory) -> float:
        """Return the share of chosen experts that a plan's cache is expected to hold."""
        if memory.cache_bytes >= memory.all_experts_bytes:
            return 1.0
        share = memory.cache_bytes / memory.all_experts_bytes
        if self.profile is None:
            return share
        if self.profile.trace is None:
            return coverage_at(coverage_curve(self.profile.counts(), self.profile.mask()), share)
        experts = self.profile.trace.experts[:_MAX_TOKENS]
        hits, misses, _ = engine_hits(self.path, experts, self.rows, memory.cache_bytes)
        return hits / (hits + misses)
