"""Physical orders of expert blocks. Logical ids never change; only where blocks lie does.

An order is every (row, expert) once, the first block first. All orders are deterministic: ties go
by row, then by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.errors import UsageError
from colibri_tools.profile.file import RoutingProfile
from colibri_tools.profile.stats import hottest_first

__all__ = ["ORDERS", "Order", "order_blocks"]

Order = list[tuple[int, int]]


def _by_id(n_experts: tuple[int, ...], profile: RoutingProfile | None) -> Order:
    return [(row, expert) for row, n in enumerate(n_experts) for expert in range(n)]


def _by_hotness(n_experts: tuple[int, ...], profile: RoutingProfile | None) -> Order:
    """Hottest of all rows first: hot blocks are a prefix of the expert region."""
    assert profile is not None
    return [(int(r), int(e)) for r, e in hottest_first(profile.counts(), profile.mask())]


def _by_layer_hotness(n_experts: tuple[int, ...], profile: RoutingProfile | None) -> Order:
    """Row after row, the hottest of each first."""
    assert profile is not None
    counts, order = profile.counts(), []
    for row, n in enumerate(n_experts):
        own = np.argsort(-counts[row, :n].astype(np.int64), kind="stable")
        order += [(row, int(expert)) for expert in own]
    return order


def _by_coactivation(n_experts: tuple[int, ...], profile: RoutingProfile | None) -> Order:
    """Row after row; behind each expert the one most often chosen together with it.

    A greedy chain from the row's hottest expert. Ties: the hotter one, then the lower id.
    """
    assert profile is not None
    counts, order = profile.counts(), []
    for row, n in enumerate(n_experts):
        own = counts[row, :n].astype(np.int64)
        order += [(row, e) for e in _chain(profile.coselection[row, :n, :n], own)]
    return order


def _chain(together: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> list[int]:
    chain = [int(np.argmax(counts))]
    left = np.ones(len(counts), bool)
    left[chain[0]] = False
    while left.any():
        rank = np.lexsort((np.arange(len(counts)), -counts, -together[chain[-1]].astype(np.int64)))
        chain.append(int(rank[left[rank]][0]))
        left[chain[-1]] = False
    return chain


ORDERS: dict[str, Callable[[tuple[int, ...], RoutingProfile | None], Order]] = {
    "id": _by_id,
    "hotness": _by_hotness,
    "layer-hotness": _by_layer_hotness,
    "coactivation": _by_coactivation,
}
"""By the name that a container's spec records."""


def order_blocks(name: str, n_experts: tuple[int, ...], profile: RoutingProfile | None) -> Order:
    """Return the order `name` of a model with `n_experts` in each row.

    Raises UsageError for an order that needs a profile without one, and for a profile whose rows
    are others.
    """
    if name != "id" and profile is None:
        raise UsageError(f"--order {name} needs a routing profile; give one by --routing")
    if profile is not None and profile.n_experts != n_experts:
        raise UsageError(
            f"the profile counts {list(profile.n_experts)} experts in its rows, this model has "
            f"{list(n_experts)}"
        )
    return ORDERS[name](n_experts, profile)
