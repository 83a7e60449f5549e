"""A profile as a picture, by matplotlib (extra `plot`): heat map, coverage, cache curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from colibri_tools.errors import JobError, UsageError
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.stats import coverage_curve

__all__ = ["plot_profile"]

_FORMATS = (".png", ".svg", ".pdf")
_N_COLORS = 10  # of matplotlib's cycle


def plot_profile(profile: RoutingProfile, path: Path) -> None:
    """Write the picture as PNG, SVG or PDF, by the suffix of `path`.

    Raises UsageError for another suffix, JobError without matplotlib.
    """
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: plots are written as {', '.join(_FORMATS)}; choose one of these")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise JobError(
            f"plots need matplotlib ({error}); install it by 'pip install colibri-tools[plot]'"
        ) from error
    height = min(24.0, max(4.2, 0.16 * profile.n_rows + 1.6))
    width = min(30.0, 11 + profile.max_experts / 24)
    figure = Figure(figsize=(width, height), layout="constrained")
    heat, cover = figure.subplots(1, 2, width_ratios=(2.2, 1))
    _heat(figure, heat, profile)
    _coverage(cover, profile)
    figure.suptitle(
        f"{profile.family}: {profile.n_rows} MoE layers x {profile.max_experts} experts, "
        f"top {profile.top_k}, {profile.n_tokens:,} tokens"
    )
    # Neither dates nor random ids: the same profile gives the same file.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": profile.fingerprint}):
        figure.savefig(path, dpi=150, metadata=metadata)


def _heat(figure: Any, axes: Any, profile: RoutingProfile) -> None:
    counts = profile.counts().astype(np.float64)
    mean = np.array([counts[r, :n].mean() for r, n in enumerate(profile.n_experts)])
    relative = np.where(profile.mask(), counts / np.maximum(mean, 1e-9)[:, None], np.nan)
    image = axes.imshow(
        np.log2(np.clip(relative, 1 / 16, 16)),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=-4,
        vmax=4,
    )
    step = max(1, profile.n_rows // 24)
    axes.set_yticks(range(0, profile.n_rows, step), profile.layers[::step])
    axes.set(xlabel="expert", ylabel="layer", title="selections against the layer's average")
    bar = figure.colorbar(image, ax=axes, ticks=range(-4, 5, 2), pad=0.01)
    bar.ax.set_yticklabels(["1/16 or less", "1/4", "1", "4", "16 or more"])


def _coverage(axes: Any, profile: RoutingProfile) -> None:
    mask, whole = profile.mask(), profile.counts()
    curve = coverage_curve(whole, mask)
    share = np.linspace(0, 100, len(curve))
    axes.plot(share, 100 * curve, color="black", linewidth=2, label="all text")
    if len(profile.domains) > 1:
        for d, name in enumerate(profile.domains):
            own = profile.counts(domain=d)
            if own.any() and (whole - own).any():
                axes.plot(
                    share,
                    100 * coverage_curve(own, mask, whole - own),
                    linewidth=1,
                    linestyle="-" if d < _N_COLORS else "--",
                    label=f"{name}, by the rest",
                )
    axes.plot([0, 100], [0, 100], color="gray", linestyle=":", label="no preference")
    axes.set(
        xlabel="hottest experts, % of all",
        ylabel="selections covered, %",
        title="coverage",
        xlim=(0, 100),
        ylim=(0, 100),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small")  # beside the curves
