"""A simulation as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from colibri_tools.output import format_bytes
from colibri_tools.profile.simulate import POLICIES, CacheResult, Simulation

__all__ = ["render"]

_BAR = 40


def render(s: Simulation, console: Console) -> None:
    """Print hit rates by policy, what a token costs, and the curve."""
    console.print(
        f"{s.n_tokens} tokens replayed; a token uses {format_bytes(s.token_bytes)} of "
        f"{format_bytes(s.all_bytes)} of experts",
        soft_wrap=True,
    )
    if s.rate is not None:
        speed = f"drive: {s.rate.bytes_per_second / 1e9:.2f} GB/s, {s.rate.source}"
        if s.rate.request_seconds is not None:
            times = s.rate.request_seconds
            speed += f"; one missing expert takes {1e3 * times[1]:.3g} ms"
            speed += f", {len(times) - 1} take {1e3 * times[-1]:.3g} ms" if len(times) > 2 else ""
        if s.compute is not None:
            total = 1e3 * (s.compute.experts + s.compute.other)
            speed += f"; computing a token: {total:.3g} ms"
        console.print(speed, style="dim")
    console.print()
    _render_caches(s, console)
    console.print()
    _render_curve(s, console)


def _render_caches(s: Simulation, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("memory", "cache"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in POLICIES:
        table.add_column(policy, justify="right", no_wrap=True)
    table.add_column("read per token", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    for result in s.results:
        table.add_row(*_row(s, result), style="yellow" if result.below_token else None)
    console.print(table)
    console.print("hit rates; belady is the most that any policy can reach", style="dim")


def _row(s: Simulation, r: CacheResult) -> list[str]:
    speed = "?" if r.tokens_per_second is None else f"{r.tokens_per_second:.3g}"
    if s.compute is None and r.tokens_per_second is not None:
        speed = f"< {speed}"
    return [
        "-" if r.ram_bytes is None else format_bytes(r.ram_bytes),
        format_bytes(r.cache_bytes),
        *(f"{r.hit_rates[policy]:.1%}" for policy in POLICIES),
        format_bytes(int(r.bytes_per_token)),
        speed,
    ]


def _render_curve(s: Simulation, console: Console) -> None:
    console.print(f"{'cache':>10}  {'engine':<{_BAR}}  engine     lru", style="bold")
    cliff = False
    for n_bytes, engine, lru in s.curve:
        if not cliff and n_bytes >= min(s.token_bytes, s.all_bytes):
            cliff = True
            console.print(f"{'':>10}  {'- one token uses this much ':-<{_BAR}}", style="dim")
        bar = "█" * round(engine * _BAR)
        console.print(f"{format_bytes(n_bytes):>10}  {bar:<{_BAR}}  {engine:>6.1%}  {lru:>6.1%}")
