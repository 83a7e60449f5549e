"""How a comparison looks on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from colibri_tools.compare.command import CompareResult, Side
from colibri_tools.compare.metrics import Divergence
from colibri_tools.output import format_bytes

__all__ = ["render_compare"]


def render_compare(result: CompareResult, console: Console) -> None:
    """Print both models, the figures by text, how both go on, and the change to a baseline."""
    for name, side in (("A", result.a), ("B", result.b)):
        console.print(f"{name}: {escape(_model(side))}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("text", style="bold", overflow="fold")
    for column in ("scored", "ppl A", "ppl B", "KL mean", "KL 99 %", "top-1"):
        table.add_column(column, justify="right")
    for text in result.texts:
        table.add_row(escape(text.name), *_cells(text.figures))
    if len(result.texts) > 1:
        table.add_row("all", *_cells(result.whole))
    console.print(table)
    whole = result.whole
    console.print(
        f"loss of B - A: {whole.loss_difference:+.5f} nats (standard error "
        f"{whole.loss_difference_error:.5f}), windows of {result.ctx}, second halves scored"
    )
    for name, side in (("A", result.a), ("B", result.b)):
        console.print(f"{name} goes on: {escape(repr(side.text))}", soft_wrap=True)
    _render_baseline(result, console)


def _model(side: Side) -> str:
    return f"{side.path} ({format_bytes(side.file_bytes)}, {side.bits_per_weight:.3f} bits)"


def _cells(figures: Divergence) -> list[str]:
    return [
        str(figures.n_scored),
        f"{figures.perplexity_a:.4f}",
        f"{figures.perplexity_b:.4f}",
        f"{figures.kl_mean:.6f}",
        f"{figures.kl_99:.5f}",
        f"{figures.top1_agreement:.2%}",
    ]


def _render_baseline(result: CompareResult, console: Console) -> None:
    change = result.baseline
    if change is None:
        return
    console.print(f"beside {escape(change.path)} (its B: {change.id[:12]}):", soft_wrap=True)
    for name, (old, new) in change.figures.items():
        console.print(f"  {name}: {old:.6g} -> {new:.6g}")
    console.print(
        f"  the first {change.same_characters} of {change.of_characters} characters of B's text "
        "are the same"
    )
