"""How the report of an encoding looks on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from colibri_tools.output import format_bytes, format_count
from colibri_tools.quantize.report import EncodingReport

__all__ = ["render_encoding"]

_N_WORST = 3


def render_encoding(report: EncodingReport, console: Console) -> None:
    """Print a table by role, then what came out otherwise than asked."""
    errors = {error.role: error for error in report.errors if error.layer is None}
    by_importance = bool(errors) and report.importance is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("role", style="bold", no_wrap=True)
    for name in ("matrices", "weights", "bytes", "bits"):
        table.add_column(name, justify="right")
    table.add_column("types", overflow="fold")
    for name in ("error",) * bool(errors) + ("by importance",) * by_importance:
        table.add_column(name, justify="right")
    for size in report.sizes:
        cells = [
            size.role,
            str(size.n_matrices),
            format_count(size.n_weights),
            format_bytes(size.n_bytes),
            f"{size.bits_per_weight:.2f}",
            ", ".join(f"{name} {format_bytes(n)}" for name, n in size.types.items()),
        ]
        error = errors.get(size.role)
        if errors:
            cells.append("" if error is None else f"{error.relative:.2e}")
        if by_importance:
            cells.append("" if error is None else f"{error.important:.2e}")
        table.add_row(*cells)
    console.print(table)
    for line in _lines(report):
        console.print(escape(line), soft_wrap=True)


def _lines(report: EncodingReport) -> Iterator[str]:
    yield f"{report.bits_per_weight:.3f} bits per weight of these matrices"
    for what, counts in (("fallback", report.fallbacks), ("encoded again", report.requantized)):
        if counts:
            yield f"{what}: {', '.join(f'{n} matrices {name}' for name, n in counts.items())}"
    for worst in report.worst[:_N_WORST]:
        expert = "" if worst.expert is None else f" expert {worst.expert}"
        yield (
            f"worst: layer {worst.layer}{expert} {worst.role} as {worst.type}: {worst.relative:.2e}"
        )
    if report.allocation is not None:
        yield from report.allocation["text"]
    if report.estimate is not None:
        takes = report.estimate
        yield (
            f"estimate: encoding takes {takes.encode_seconds:.0f} s with {takes.threads} threads, "
            f"{format_bytes(takes.memory_bytes)} of memory; reading and writing come on top where "
            "the drive is slower"
        )
