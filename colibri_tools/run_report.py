"""What `run` says about memory before it starts, and about time when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

from colibri_tools.engine import Advice, Drive, LayerStats, Memory, Stats
from colibri_tools.output import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Counters", "Phase", "Plan", "Profile", "percentile"]

_Counters = TypeVar("_Counters", Stats, LayerStats)

_PARTS = ("attention", "router", "experts", "io_wait", "head")


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a run, the drive if it was probed, and what there is to say about both."""

    memory: Memory
    drive: Drive | None
    advice: tuple[Advice, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What will hurt."""
        return tuple(advice.text for advice in self.advice if advice.warning)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is good to know."""
        return tuple(advice.text for advice in self.advice if not advice.warning)

    def to_json(self) -> dict[str, Any]:
        """The `memory` object of `colibri run --json`."""
        return asdict(self.memory)

    def render(self, console: Console) -> None:
        """Print how the budget is split."""
        m = self.memory
        console.print(
            f"memory: {format_bytes(m.total_bytes)} planned, budget {format_bytes(m.budget_bytes)}"
        )
        if m.available_limit:
            available = format_bytes(m.available_bytes)
            console.print(f"  of {available} available ({m.available_limit})")
        console.print(
            f"  experts {format_bytes(m.cache_bytes)} of {format_bytes(m.all_experts_bytes)}, "
            f"KV {format_bytes(m.kv_bytes)},"
        )
        console.print(
            f"  resident {format_bytes(m.resident_bytes)}, "
            f"scratch {format_bytes(m.scratch_bytes)}, "
            f"other {format_bytes(m.metadata_bytes + m.other_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's counters at one moment."""

    stats: Stats
    layers: tuple[LayerStats, ...]


def _minus(after: _Counters, before: _Counters) -> _Counters:
    """Counters between two moments; what is no number stays."""
    changed = {}
    for item in fields(after):
        value = getattr(after, item.name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        changed[item.name] = value - getattr(before, item.name) if number else value
    return type(after)(**changed)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least of `values` that `percent` % of them do not exceed (nearest rank)."""
    return sorted(values)[ceil(len(values) * percent / 100) - 1]


@dataclass(frozen=True, slots=True)
class Phase:
    """Prefill or decode: its counters, whole and by layer."""

    stats: Stats
    layers: tuple[LayerStats, ...]

    @classmethod
    def between(cls, before: Counters | None, after: Counters) -> Phase:
        """What was counted from `before` (None: from nothing) to `after`."""
        if before is None:
            return cls(after.stats, after.layers)
        pairs = zip(after.layers, before.layers, strict=True)
        return cls(_minus(after.stats, before.stats), tuple(_minus(a, b) for a, b in pairs))

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes of experts read per second of evaluation; None when nothing was evaluated."""
        return self.stats.bytes_read / self.stats.seconds if self.stats.seconds else None

    def drive_share(self, drive: Drive | None) -> float | None:
        """The part of what the drive gives that was used; None when that is not known."""
        if drive is None or not drive.bytes_per_second or self.bytes_per_second is None:
            return None
        return self.bytes_per_second / drive.bytes_per_second

    def to_json(self, drive: Drive | None) -> dict[str, Any]:
        """One of the `phases` of `profile`."""
        s = self.stats
        return {
            "tokens": s.tokens,
            **parts(s),
            "io_wait_share": s.io_wait_seconds / s.seconds if s.seconds else None,
            "hit_rate": s.hit_rate,
            "reads": s.reads,
            "bytes_read": s.bytes_read,
            "bytes_per_second": self.bytes_per_second,
            "drive_share": self.drive_share(drive),
            "layers": [{"layer": i, **asdict(layer)} for i, layer in enumerate(self.layers)],
        }


def parts(stats: Stats) -> dict[str, float]:
    """Seconds of evaluation, and of its parts; these add up to about `seconds`."""
    return {
        "seconds": stats.seconds,
        **{f"{part}_seconds": getattr(stats, f"{part}_seconds") for part in _PARTS},
    }


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a run's time went. `token_seconds` are of the generated tokens, in their order."""

    prefill: Phase
    decode: Phase
    total: Stats
    token_seconds: tuple[float, ...]
    drive: Drive | None

    @classmethod
    def of(
        cls,
        prefill: Counters,
        total: Counters,
        token_seconds: Sequence[float],
        drive: Drive | None,
    ) -> Profile:
        """Make it from the counters at the end of the prompt and at the end."""
        return cls(
            Phase.between(None, prefill),
            Phase.between(prefill, total),
            total.stats,
            tuple(token_seconds),
            drive,
        )

    def to_json(self) -> dict[str, Any]:
        """The `profile` object of `colibri run --json`."""
        return {
            **parts(self.total),
            "token_seconds": self._percentiles(),
            "prefetch": self.total.prefetch(),
            "drive": asdict(self.drive) if self.drive else None,
            "phases": {
                "prefill": self.prefill.to_json(self.drive),
                "decode": self.decode.to_json(self.drive),
            },
        }

    def _percentiles(self) -> dict[str, Any] | None:
        values = self.token_seconds
        if not values:
            return None
        ranks = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
        mean = sum(values) / len(values)
        return {"n": len(values), "mean": mean, **ranks, "max": max(values)}

    def render(self, console: Console) -> None:
        """Print tables that fit into 60 columns."""
        self._render_parts(console)
        self._render_layers(console)
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            self._render_reading(console, name, phase)
        self._render_prefetch(console)
        if self.drive:
            d = self.drive
            console.print(
                f"drive: {d.bytes_per_second / 1e6:.0f} MB/s, random blocks up to "
                f"{format_bytes(d.block_bytes)}, {d.depth} at once,\n"
                f"  {'O_DIRECT' if d.direct else 'through the page cache'}, "
                f"{d.reads} reads in {d.seconds:.2f} s"
            )
        if times := self._percentiles():
            p50, p95, p99, most = (
                f"{1e3 * times[key]:.4g}" for key in ("p50", "p95", "p99", "max")
            )
            console.print(f"ms per token: P50 {p50}, P95 {p95}, P99 {p99}, max {most}")

    def _render_parts(self, console: Console) -> None:
        phases = [self.prefill.stats, self.decode.stats]
        console.print(
            f"  {'':<10}  prefill, {phases[0].tokens:5} tokens   "
            f"decode, {phases[1].tokens:6} tokens"
        )
        for part in (*_PARTS, ""):
            cells = []
            for stats in phases:
                seconds = getattr(stats, f"{part}_seconds" if part else "seconds")
                share = seconds / stats.seconds if stats.seconds else 0.0
                cells.append(f"{seconds:9.3f} s {100 * share:5.1f} %")
            console.print(f"  {part.replace('_', ' ') or 'all':<10} {'   '.join(cells)}")

    def _render_layers(self, console: Console) -> None:
        name, phase = (
            ("decode", self.decode) if self.decode.stats.tokens else ("prefill", self.prefill)
        )
        per_token = 1e3 / max(phase.stats.tokens, 1)
        console.print(f"{name} by layer, ms per token")
        console.print("  layer attention   router  experts  io wait    hits")
        for i, layer in enumerate(phase.layers):
            asked = layer.expert_requests
            hits = f"{100 * layer.expert_hits / asked:5.1f} %" if asked else "      -"
            console.print(
                f"  {i:5} {per_token * layer.attention_seconds:9.3f} "
                f"{per_token * layer.router_seconds:8.3f} "
                f"{per_token * layer.experts_seconds:8.3f} "
                f"{per_token * layer.io_wait_seconds:8.3f} {hits}"
            )

    def _render_prefetch(self, console: Console) -> None:
        s = self.total
        if not s.prefetch_guessed:
            return
        used, wasted = map(format_bytes, (s.prefetch_useful_bytes, s.prefetch_wasted_bytes))
        console.print(
            f"prefetch: {s.prefetch_recall or 0:.1%} of chosen experts were guessed,\n"
            f"  {used} read ahead were used, {wasted} were not"
        )
        if s.prefetch_paused:
            console.print(f"  {s.prefetch_paused} guesses not followed, as that lost time")

    def _render_reading(self, console: Console, name: str, phase: Phase) -> None:
        s, speed, share = phase.stats, phase.bytes_per_second, phase.drive_share(self.drive)
        if not s.tokens:
            return
        console.print(
            f"{name}: {format_bytes(s.bytes_read)} in {s.reads} reads, "
            f"{s.hit_rate or 0:.1%} of experts in cache,\n  {(speed or 0) / 1e6:.0f} MB/s"
            + ("" if share is None else f", {share:.0%} of what the drive gives")
        )
