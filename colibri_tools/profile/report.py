"""What a profile says, as a report: tables and a heat map for a terminal, and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from colibri_tools.output import counted, format_count
from colibri_tools.profile.file import DECODE, PREFILL, RoutingProfile
from colibri_tools.profile.stats import (
    COVERAGE_POINTS,
    Coverage,
    HeldOut,
    RowStats,
    coverage,
    domain_distances,
    held_out,
    row_stats,
    stability,
)

__all__ = ["ProfileReport", "ordering_benefit"]

_SHADES = " ·░▒▓█"
"""From no selections to four times the average and more."""

_FEW_SELECTIONS = 100
"""Per expert, below which counts are mostly chance; said in the report."""

_WORTH_IT = 1.25
"""A hot 20 % of experts with less than this times its fair share of work is no hot set."""


def ordering_benefit(cover: Coverage, held: list[HeldOut]) -> tuple[bool, str]:
    """Return whether an order by hotness can pay, and a line that says why.

    Judged on held-out text where there is any: the share of selections that the hottest fifth of
    experts has, against the fifth it would have without any preference.
    """
    at = COVERAGE_POINTS.index(0.2)
    share = min(item.held_out[at] for item in held) if held else cover.at[at]
    what = "on text it was not chosen on" if held else "in sample"
    line = f"the hottest 20 % of experts get {share:.1%} of selections {what} (20 % by chance)"
    if share < 0.2 * _WORTH_IT:
        return False, f"no benefit expected from ordering: {line}"
    return True, line


@dataclass(frozen=True)
class ProfileReport:
    """Everything `colibri inspect P` and `profile-routing` show of a profile."""

    profile: RoutingProfile

    def rows(self) -> list[RowStats]:
        """Return the statistics of each MoE layer."""
        return row_stats(self.profile)

    def coverage(self) -> Coverage:
        """Return in-sample coverage over all layers and domains."""
        return coverage(self.profile.counts(), self.profile.mask())

    def findings(self) -> Iterator[str]:
        """Say what a reader should know before believing the numbers."""
        p = self.profile
        cells = int(p.mask().sum())
        per_expert = p.n_tokens * p.top_k * p.n_rows / cells
        if per_expert < _FEW_SELECTIONS:
            yield (
                f"{per_expert:.0f} selections per expert on average: single experts are mostly "
                f"chance below {_FEW_SELECTIONS}; more text makes this reliable"
            )
        never = sum(len(row.never) for row in self.rows())
        if never:
            yield f"{never} of {cells} experts were never selected on these texts"
        yield ordering_benefit(self.coverage(), held_out(p))[1]

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        p, cover = self.profile, self.coverage()
        held = held_out(p)
        pays, why = ordering_benefit(cover, held)
        return {
            "kind": "profile",
            "family": p.family,
            "fingerprint": p.fingerprint,
            "n_moe_layers": p.n_rows,
            "n_experts": p.max_experts,
            "top_k": p.top_k,
            "tokens": p.n_tokens,
            "phases": {
                "prefill": int(p.tokens[:, PREFILL].sum()),
                "decode": int(p.tokens[:, DECODE].sum()),
            },
            "domains": [
                {"name": name, "tokens": int(p.tokens[d].sum())} for d, name in enumerate(p.domains)
            ],
            "texts": [
                {"domain": t.domain, "name": t.name, "sha256": t.sha256, "tokens": t.n_tokens}
                for t in p.texts
            ],
            "layers": list(p.layers),
            "selections": [
                [int(c) for c in row[:n]] for row, n in zip(p.counts(), p.n_experts, strict=True)
            ],
            "rows": [_row_json(row) for row in self.rows()],
            "coverage": {
                "experts": list(COVERAGE_POINTS),
                "selections": list(cover.at),
                "knee": cover.knee,
            },
            "held_out": [
                {
                    "name": item.name,
                    "tokens": item.n_tokens,
                    "in_sample": list(item.in_sample),
                    "held_out": list(item.held_out),
                }
                for item in held
            ],
            "domain_distances": domain_distances(p).tolist(),
            "stability": stability(p),
            "early_recall": _early_recall(p),
            "ordering": {"benefit_expected": pays, "why": why},
            "has_trace": p.trace is not None,
            "has_importance": bool(p.inputs),
            "notes": list(self.findings()),
        }

    def render(self, console: Console) -> None:
        """Print for a person."""
        p = self.profile
        console.print(
            f"[bold]{p.family}[/bold]  {p.n_rows} MoE layers x {p.max_experts} experts, "
            f"top {p.top_k}; {counted(p.n_tokens, 'token', shown=format_count(p.n_tokens))} in "
            f"{counted(len(p.domains), 'domain')}"
        )
        console.print(f"fingerprint {p.fingerprint[:16]}", style="dim")
        _render_heat(console, p, self.rows())
        _render_coverage(console, self.coverage(), held_out(p))
        if len(p.domains) > 1:
            _render_distances(console, p)
        agreement = stability(p)
        if agreement is not None:
            console.print(
                f"Halves of the text agree on {agreement:.0%} of the hottest quarter of experts "
                "(25 % by chance)."
            )
        recall = _early_recall(p)
        if recall is not None:
            console.print(f"Routers applied a layer early foresaw {recall:.0%} of experts.")
        for line in self.findings():
            console.print(f"- {line}")


def _row_json(row: RowStats) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "n_experts": row.n_experts,
        "selections": row.selections,
        "gini": row.gini,
        "effective_experts": row.effective_experts,
        "never": list(row.never),
        "least": row.least,
        "most": row.most,
        "hottest": row.hottest,
        "coverage": list(row.coverage),
    }


def _early_recall(p: RoutingProfile) -> float | None:
    predicted, chosen = (int(n) for n in p.early.sum(axis=0))
    return chosen / predicted if predicted else None


def _binned(shares: npt.NDArray[Any], n_bins: int) -> npt.NDArray[Any]:
    """Return means of neighbouring columns, [n_bins], weighing every column once."""
    edges = np.linspace(0, len(shares), n_bins + 1).round().astype(int)
    return np.array([shares[a:b].mean() for a, b in pairwise(edges)])


def _render_heat(console: Console, p: RoutingProfile, rows: list[RowStats]) -> None:
    width = max(8, min(console.width, 160) - 8 - len(_NUMBERS))
    n_bins = min(p.max_experts, width)
    counts = p.counts()
    console.print()
    per = "" if n_bins == p.max_experts else f"; {p.max_experts / n_bins:.1f} experts a column"
    console.print(f"Selections by expert, against the layer's average{per}:", style="dim")
    console.print(f"{_legend()}; 20%: selections of the hottest fifth", style="dim")
    fifth = COVERAGE_POINTS.index(0.2)
    head = f"{'layer':>5}  {'expert 0 ...':<{n_bins}}{_NUMBERS}"
    console.print(Text(head, style="bold"), no_wrap=True, overflow="crop")
    for row, n in zip(rows, p.n_experts, strict=True):
        own = counts[rows.index(row), :n].astype(np.float64)
        bins = _binned(own / max(own.mean(), 1e-9), min(n, n_bins))
        line = "".join(_shade(value) for value in bins)
        numbers = f"{row.effective_experts:>7.1f}{row.gini:>6.2f}{row.coverage[fifth]:>6.0%}"
        numbers += f"{len(row.never) or '-':>7}"
        text = f"{row.layer:>5}  {line:<{n_bins}}{numbers}"
        console.print(Text(text), no_wrap=True, overflow="crop")
    console.print()


_NUMBERS = "    eff.  Gini   20%  never"


def _shade(relative: float) -> str:
    for shade, limit in zip(_SHADES, (0.0, 0.25, 0.75, 1.5, 4.0), strict=False):
        if relative <= limit:
            return shade
    return _SHADES[-1]


def _legend() -> str:
    parts = ("none", "< 1/4", "< 3/4", "< 1.5", "< 4", "4 x or more")
    return ", ".join(f"'{s}' {t}" for s, t in zip(_SHADES, parts, strict=True))


def _render_coverage(console: Console, cover: Coverage, held: list[HeldOut]) -> None:
    shown = [i for i, share in enumerate(COVERAGE_POINTS) if share in (0.1, 0.2, 0.4, 0.6, 0.8)]
    table = Table(box=None, pad_edge=False)
    table.add_column("selections covered by the hottest", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for i in shown:
        table.add_column(f"{COVERAGE_POINTS[i]:.0%}", justify="right", no_wrap=True)
    table.add_row("all text, in sample", "", *(f"{cover.at[i]:.1%}" for i in shown))
    for item in held:
        cells = (f"{item.held_out[i]:.1%}" for i in shown)
        table.add_row(f"{item.name}, by the rest", format_count(item.n_tokens), *cells)
        cells = (f"{item.in_sample[i]:.1%}" for i in shown)
        table.add_row(f"{item.name}, by itself", "", *cells, style="dim")
    console.print(table)
    console.print(f"The curve bends at {cover.knee:.0%} of experts.", style="dim")
    console.print()


def _render_distances(console: Console, p: RoutingProfile) -> None:
    distances = domain_distances(p)
    table = Table(box=None, pad_edge=False)
    table.add_column("distance of routing", no_wrap=True)
    for name in p.domains:
        table.add_column(name, justify="right", no_wrap=True)
    for a, name in enumerate(p.domains):
        table.add_row(name, *("-" if a == b else f"{d:.2f}" for b, d in enumerate(distances[a])))
    console.print(table)
    console.print("Jensen-Shannon, 0 = alike, 1 = disjoint; mean over layers.", style="dim")
    console.print()
