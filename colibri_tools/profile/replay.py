"""Replaying a trace against caches of expert blocks.

A request is what one token asks of one MoE layer: top_k experts at once. Those in the cache are
hits; the others are read and enter it, evicting by the policy. As in the engine, the experts of a
request are pinned while it is served. All blocks count alike; a cache holds a number of blocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["POLICIES", "Requests", "lru_curve", "replay", "requests_of"]

Requests = npt.NDArray[np.int64]
"""[n, top_k]: block numbers (first block of the row + expert), token after token, row after row."""


def requests_of(experts: npt.NDArray[Any], n_experts: Sequence[int]) -> Requests:
    """Return the requests of a trace, experts [tokens, rows, top_k]."""
    first = np.concatenate([[0], np.cumsum(n_experts)[:-1]]).astype(np.int64)
    blocks = experts.astype(np.int64) + first[None, :, None]
    return blocks.reshape(-1, experts.shape[2])


def _lru(requests: Requests, capacity: int, counts: Any) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests.tolist():
        for block in request:
            if block in cache:
                hits += 1
                cache.move_to_end(block)
        for block in request:
            if block not in cache:
                cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def _lfu(requests: Requests, capacity: int, counts: Any) -> int:
    """Least frequently used; counts go on for evicted blocks, and among equals the older goes."""
    uses: dict[int, int] = {}
    cached: set[int] = set()
    heap: list[tuple[int, int, int]] = []  # (uses, time, block), stale entries left in
    hits = time = 0
    for request in requests.tolist():
        pinned = set(request)
        for block in request:
            time += 1
            hits += block in cached
            uses[block] = uses.get(block, 0) + 1
            cached.add(block)
            heapq.heappush(heap, (uses[block], time, block))
        held = []
        while len(cached) > capacity and heap:
            n, when, block = heapq.heappop(heap)
            if block not in cached or n != uses[block]:
                continue
            if block in pinned and capacity >= len(pinned):
                held.append((n, when, block))
                continue
            cached.remove(block)
        for entry in held:
            heapq.heappush(heap, entry)
    return hits


def _static(requests: Requests, capacity: int, counts: Any) -> int:
    """The hottest blocks of the profile, never evicted."""
    hottest = np.lexsort((np.arange(len(counts)), -counts.astype(np.int64)))[:capacity]
    kept = np.zeros(len(counts), bool)
    kept[hottest] = True
    return int(kept[requests].sum())


def _belady(requests: Requests, capacity: int, counts: Any) -> int:
    """What is needed furthest in the future goes (Belady 1966): no policy has more hits."""
    flat = requests.reshape(-1)
    never = len(flat)
    next_use = np.full(len(flat), never, np.int64)
    last: dict[int, int] = {}
    for i in range(len(flat) - 1, -1, -1):
        block = int(flat[i])
        next_use[i] = last.get(block, never)
        last[block] = i
    cached: dict[int, int] = {}  # block: its next use
    heap: list[tuple[int, int]] = []
    hits, at = 0, 0
    for request in requests.tolist():
        for block in request:
            hits += block in cached
            cached[block] = int(next_use[at])
            heapq.heappush(heap, (-cached[block], block))
            at += 1
        while len(cached) > capacity:
            when, block = heapq.heappop(heap)
            if cached.get(block) == -when:
                del cached[block]
    return hits


POLICIES: dict[str, Callable[[Requests, int, Any], int]] = {
    "lru": _lru,
    "lfu": _lfu,
    "static": _static,
    "belady": _belady,
}
"""By name: (requests, capacity in blocks, counts [blocks] of a profile) -> hits."""


def replay(policy: str, requests: Requests, capacity: int, counts: Any) -> float:
    """Return the hit rate of a policy. `counts` are selections of each block, for "static"."""
    if capacity <= 0 or not requests.size:
        return 0.0
    return POLICIES[policy](requests, capacity, counts) / requests.size


def lru_curve(requests: Requests, n_blocks: int) -> npt.NDArray[np.float64]:
    """Return float64 [n_blocks + 1]: the LRU hit rate for every capacity, from one pass.

    By stack distances (Mattson et al. 1970), counted with a Fenwick tree; blocks of one request
    count as used one after the other.
    """
    flat = requests.reshape(-1).tolist()
    n = len(flat)
    tree = [0] * (n + 1)
    last: dict[int, int] = {}
    distances = np.zeros(n_blocks + 2, np.int64)

    def add(i: int, value: int) -> None:
        while i <= n:
            tree[i] += value
            i += i & -i

    def total(i: int) -> int:
        result = 0
        while i:
            result += tree[i]
            i -= i & -i
        return result

    for i, block in enumerate(flat, 1):
        before = last.get(block)
        if before is not None:
            distances[total(i - 1) - total(before) + 1] += 1
            add(before, -1)
        add(i, 1)
        last[block] = i
    return np.cumsum(distances[: n_blocks + 1]) / max(n, 1)
