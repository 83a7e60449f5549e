"""A simulation as tables for a terminal."""

from __future__ import annotations

from rich.console import Console

from colibri_tools.output import counted, format_bytes, format_speed, print_numbers
from colibri_tools.profile.simulate import POLICIES, CacheResult, Simulation

__all__ = ["render"]

_BAR, _LEAST_BAR, _BESIDE_BAR = 40, 8, 28


def render(s: Simulation, console: Console) -> None:
    """Print hit rates by policy, what a token costs, and the curve."""
    console.print(
        f"{counted(s.n_tokens, 'token')} replayed; a token uses {format_bytes(s.token_bytes)} of "
        f"{format_bytes(s.all_bytes)} of experts",
        soft_wrap=True,
    )
    if s.rate is not None:
        speed = f"drive: {s.rate.bytes_per_second / 1e9:.2f} GB/s"
        if s.rate.filling_seconds_per_byte:
            while_filling = 1 / (1 / s.rate.bytes_per_second + s.rate.filling_seconds_per_byte)
            speed += f" ({while_filling / 1e9:.2f} while the cache fills)"
        speed += f", {s.rate.source}"
        if s.rate.request_seconds is not None:
            times = s.rate.request_seconds
            speed += f"; one missing expert takes {1e3 * times[1]:.3g} ms"
            speed += f", {len(times) - 1} take {1e3 * times[-1]:.3g} ms" if len(times) > 2 else ""
        if s.compute is not None:
            speed += f"; {s.compute}"
        console.print(speed, style="dim")
    console.print()
    _render_caches(s, console)
    console.print()
    _render_curve(s, console)


def _render_caches(s: Simulation, console: Console) -> None:
    headers = ("memory", "cache", *POLICIES, "read per token", "tokens/s", "once full")
    styles = ["yellow" if result.below_token else "" for result in s.results]
    print_numbers(console, headers, [_row(s, result) for result in s.results], styles)
    console.print(
        "hit rates; belady is the most that any policy can reach. tokens/s: of all that is "
        "replayed, from an empty cache on, and of what comes once it is full",
        style="dim",
    )


def _row(s: Simulation, r: CacheResult) -> list[str]:
    return [
        "-" if r.ram_bytes is None else format_bytes(r.ram_bytes),
        format_bytes(r.cache_bytes),
        *(f"{r.hit_rates[policy]:.1%}" for policy in POLICIES),
        format_bytes(int(r.bytes_per_token)),
        "?" if s.rate is None else _speed(s, r.tokens_per_second),
        _speed(s, r.tokens_per_second_when_full),
    ]


def _speed(s: Simulation, tokens_per_second: float | None) -> str:
    if tokens_per_second is None:
        return "-"
    return ("< " if s.compute is None else "") + format_speed(tokens_per_second)


def _render_curve(s: Simulation, console: Console) -> None:
    width = max(_LEAST_BAR, min(_BAR, console.width - _BESIDE_BAR))
    console.print(f"{'cache':>10}  {'engine':<{width}}  engine     lru", style="bold")
    cliff = False
    for n_bytes, engine, lru in s.curve:
        if not cliff and n_bytes >= min(s.token_bytes, s.all_bytes):
            cliff = True
            line = "- one token uses this much "[:width]
            console.print(f"{'':>10}  {line:-<{width}}", style="dim")
        bar = "█" * round(engine * width)
        console.print(f"{format_bytes(n_bytes):>10}  {bar:<{width}}  {engine:>6.1%}  {lru:>6.1%}")
