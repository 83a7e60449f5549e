"""How an inspection looks on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from colibri_tools.inspect import Inspection, Region
from colibri_tools.output import facts_table, format_bytes, format_count

_STYLES = {
    "metadata": ("▒", "yellow"),
    "reserve": ("░", "bright_black"),
    "resident": ("▓", "blue"),
    "experts": ("█", "red"),
    "padding": ("·", "bright_black"),
}
"""Glyph and colour of a kind of region: the map reads without colours too."""

_MAX_BAR = 100
_MAX_ROWS = 200
_MIN_SHOWN_BYTES = 64
"""Gaps between sections are smaller: --json lists them."""


def render(inspection: Inspection, console: Console) -> None:
    """Print an inspection: the summary, then whatever else was asked for."""
    console.print(facts_table(_summary_rows(inspection.path, inspection.summary)))
    for text in inspection.summary.get("warnings", ()):
        console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)
    if inspection.regions is not None:
        console.print(_map(inspection.regions, console.width))
    if inspection.tensors is not None:
        _print_rows(console, "tensors", [_short_tensor(row) for row in inspection.tensors])
    if inspection.blocks is not None:
        _print_rows(console, "blocks", inspection.blocks)
    if inspection.details is not None:
        _print_details(console, inspection.details)


def _summary_rows(path: str, s: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(s["kind"], escape(path))]
    if s.get("id"):
        rows.append(("id", s["id"]))
    if s["family"]:
        rows.append(("family", escape(f"{s['family']}{_why(s)}")))
    if s["n_layers"]:
        rows.append(("layers", f"{s['n_layers']}, {s['n_moe_layers']} with experts"))
    if s["experts_per_layer"]:
        rows.append(("experts", f"{_counts(s['experts_per_layer'])}, {s['top_k']} per token"))
    if s["total_params"]:
        active = format_count(s["active_params"]) if s["active_params"] else "?"
        rows.append(("parameters", f"{format_count(s['total_params'])}, {active} per token"))
    if s.get("types"):
        rows.append(("types", _types(s["types"])))
    if s["bits_per_weight"]:
        rows.append(("bits/weight", f"{s['bits_per_weight']:.3f}"))
    rows.append(("file" if s["kind"] == "container" else "files", _size(s)))
    if s["resident_bytes"] is not None:
        rows.append(("resident", format_bytes(s["resident_bytes"])))
    if s["expert_bytes"]:
        rows.append(("experts", format_bytes(s["expert_bytes"])))
    if s["padding_bytes"] is not None:
        rows.append(
            (
                "padding",
                f"{format_bytes(s['padding_bytes'])} ({s['padding_share']:.2%} of the file)",
            )
        )
    if s["kind"] == "container":
        rows.append(("metadata", _metadata(s)))
        rows.append(("alignment", format_bytes(s["alignment"])))
        rows.append(("order", s["order"]))
        rows.append(("carried files", escape(", ".join(s["blobs"]) or "none")))
    rows += _changes(s)
    return rows


def _changes(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What was converted or left out on the way into a container, or would be."""
    made = s["provenance"]
    converted = s.get("conversions") or _counted(
        made, "recipe.conversions", "recipe.conversion_counts"
    )
    left_out = s.get("dropped") or _counted(made, "dropped.rules", "dropped.counts")
    rows = [("converted", ", ".join(f"{n} tensors {what}" for what, n in converted.items()))]
    rows.append(("left out", ", ".join(f"{n} tensors by {rule}" for rule, n in left_out.items())))
    return [(label, escape(text)) for label, text in rows if text]


def _counted(provenance: dict[str, Any], names: str, counts: str) -> dict[str, int]:
    """Two arrays of a provenance, which may hold anything, as one dictionary."""
    found = provenance.get(names), provenance.get(counts)
    both = all(isinstance(values, list) for values in found)
    return dict(zip(*found, strict=False)) if both else {}  # type: ignore[arg-type]


def _why(s: dict[str, Any]) -> str:
    return f" ({s['why']})" if s.get("why") else ""


def _size(s: dict[str, Any]) -> str:
    files = f" in {s['n_files']} files" if s.get("n_files", 1) > 1 else ""
    return f"{format_bytes(s['file_bytes'])} ({s['file_bytes']:,} bytes){files}"


def _metadata(s: dict[str, Any]) -> str:
    return f"{format_bytes(s['metadata_bytes'])}, of it index {format_bytes(s['index_bytes'])}"


def _counts(counts: list[int]) -> str:
    if len(set(counts)) == 1:
        return f"{counts[0]} per layer"
    return f"{min(counts)} to {max(counts)} per layer"


def _types(types: dict[str, dict[str, int]]) -> str:
    parts = []
    for where in ("experts", "resident"):
        of = [(n, t[where]) for n, t in types.items() if t[where]]
        if of:
            of.sort(key=lambda pair: -pair[1])
            parts.append(f"{where} " + ", ".join(f"{n} {format_bytes(b)}" for n, b in of))
    return "; ".join(parts)


def _map(regions: list[Region], width: int) -> Group:
    """A bar in proportion to bytes, and a table of the regions below it."""
    total = sum(region.n_bytes for region in regions)
    width = min(width, _MAX_BAR)
    bar = Text()
    drawn, end = 0, 0
    for region in regions:
        end += region.n_bytes
        cells = round(end * width / total) - drawn
        glyph, colour = _STYLES[region.kind]
        bar.append(glyph * cells, style=colour)
        drawn += cells
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("region", overflow="fold")
    table.add_column("offset", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    shown = [r for r in regions if r.n_bytes >= _MIN_SHOWN_BYTES]
    for region in shown[:_MAX_ROWS]:
        glyph, colour = _STYLES[region.kind]
        name = Text.assemble((f"{glyph * 2} ", colour), region.name)
        share = f"{region.n_bytes / total:.2%}"
        table.add_row(name, f"{region.offset:,}", f"{region.n_bytes:,}", share)
    more = len(shown) - _MAX_ROWS
    parts: list[RenderableType] = [Text(), bar, Text(), table]
    if more > 0:
        parts.append(Text(f"and {more} more regions; --json has all", style="dim"))
    return Group(*parts)


def _short_tensor(row: dict[str, Any]) -> dict[str, Any]:
    """A tensor in few columns: where it is used in one, a rule only where it explains a loss."""
    place = [row["role"] or ""]
    if row["layer"] is not None and row["layer"] >= 0:
        place.append(f"layer {row['layer']}")
    if row.get("expert") is not None:
        place.append(f"expert {row['expert']}")
    short = {
        "name": row["name"],
        "type": row["type"],
        "shape": " x ".join(map(str, row["shape"])) or "scalar",
        "bytes": row["bytes"],
    }
    if "action" in row:
        kept = row["action"] in ("resident", "expert")
        if row["becomes"] not in (None, row["type"]):
            short["type"] += f" as {row['becomes']}"
        short["action"] = row["action"] if kept else f"{row['action']}: {row['rule'] or 'no rule'}"
    short["used as"] = ", ".join(filter(None, place))
    if row.get("alias_of"):
        short["used as"] += f" (same bytes as {row['alias_of']})"
    return short


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """A table with a column for each key that any row has a value for."""
    if not rows:
        console.print(f"no {title}")
        return
    hidden = {"sha256", "crc32c", "stream"}
    keys = [k for k in rows[0] if k not in hidden and any(r[k] is not None for r in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for key in keys:
        number = isinstance(rows[0][key], int)
        fold: OverflowMethod = "fold" if key in ("name", "action", "used as") else "ellipsis"
        table.add_column(key, justify="right" if number else "left", no_wrap=number, overflow=fold)
    for row in rows:
        table.add_row(*(escape(_cell(row[key])) for key in keys))
    console.print()
    console.print(f"[italic]{title}[/italic]")
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        names = set(value.values())
        if len(names) == 1:
            return str(names.pop())
        return ", ".join(f"{key} {name}" for key, name in value.items())
    if isinstance(value, list):
        return f"[{', '.join(_cell(item) for item in value)}]"
    return str(value)


def _print_details(console: Console, details: dict[str, Any]) -> None:
    for part in details.get("parts", [details]):
        console.print()
        facts = ((key, escape(_cell(x))) for key, x in part.items() if x is not None)
        console.print(facts_table(facts))
