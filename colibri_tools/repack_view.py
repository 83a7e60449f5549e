"""How the result of a repack looks on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from colibri_tools.output import counted, facts_table, format_bytes, format_count
from colibri_tools.quantize.report_view import render_encoding
from colibri_tools.repack import RepackResult

__all__ = ["render_repack"]


def render_repack(result: RepackResult, console: Console) -> None:
    """Print a summary: what was made, of what, and where its bytes are."""
    console.print(facts_table(_rows(result)))
    if result.quantization is not None:
        render_encoding(result.quantization, console)


def _rows(result: RepackResult) -> list[tuple[str, str]]:
    parts = result.accounting
    head = "would write" if result.dry_run else "written"
    rows = [
        (head, f"{escape(str(result.out))} ({format_bytes(result.file_bytes)})"),
        ("family", escape(f"{result.family}: {result.why}")),
        ("layers", f"{result.n_layers}, {result.n_moe_layers} with experts"),
        ("experts", f"{counted(result.n_blocks, 'block')}, {format_bytes(parts.expert_bytes)}"),
        ("resident", _tensors(result)),
        ("padding", f"{format_bytes(parts.padding_bytes)} ({parts.padding_share:.2%})"),
        ("parameters", f"{format_count(result.total_params)}, {_active(result)} per token"),
        ("types", ", ".join(f"{name} {format_bytes(n)}" for name, n in result.types.items())),
    ]
    if result.dropped:
        rows.append(("left out", escape(_dropped(result))))
    if result.id:
        rows.append(("id", result.id))
    if not result.dry_run:
        speed = f"{format_bytes(round(result.bytes_per_second))}/s"
        rows.append(("time", f"{result.seconds:.1f} s, {speed}, {result.threads} threads"))
    return rows


def _tensors(result: RepackResult) -> str:
    if not result.n_tensors:
        return "none"
    size = format_bytes(result.accounting.resident_bytes)
    aliases = f", {result.n_aliases} of them an alias" if result.n_aliases else ""
    return f"{counted(result.n_tensors, 'tensor')}{aliases}, {size}"


def _active(result: RepackResult) -> str:
    return format_count(result.active_params)


def _dropped(result: RepackResult) -> str:
    return ", ".join(f"{len(names)} by {rule}" for rule, names in result.dropped.items())
