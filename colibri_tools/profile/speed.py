"""How fast a model decodes when a part of its experts is read: drive and computing, put together.

A layer asks for top_k experts at once and goes on when all are there. What that costs depends on
how many are missing: a few small ones do not keep a drive busy. So times are by the number that a
request misses, and a trace says how often each number comes. `measuring` finds the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["ComputeTime", "Rate", "tokens_per_second"]


@dataclass(frozen=True, slots=True)
class Rate:
    """What the drive gives, bytes per second, and how that is known: "given" or "measured".

    `request_seconds[m]` is the time until m missing experts of a request are there, None where only
    bandwidth is known. `filling_seconds_per_byte` is what missing takes longer while the cache
    fills, with memory that it uses for the first time.
    """

    bytes_per_second: float
    source: str
    request_seconds: tuple[float, ...] | None = None
    filling_seconds_per_byte: float = 0.0

    def seconds(self, misses: float, block_bytes: float, *, filling: bool = False) -> float:
        """Return the time of a request with so many misses, which may be a mean of several.

        `filling`: while the cache fills.
        """
        more = self.filling_seconds_per_byte * misses * block_bytes if filling else 0.0
        if self.request_seconds is None:
            return misses * block_bytes / self.bytes_per_second + more
        known = range(len(self.request_seconds))
        return float(np.interp(misses, known, self.request_seconds)) + more


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """Seconds of computing a token that finds all its experts: these, and all else.

    `experts_missing` and `other_missing` are what computing takes longer in a token that misses
    all: CPUs that often wait are slower. A request that misses m experts was seen to take `late` +
    m x `late_each` beyond reading them by itself; `late` None: not known.
    """

    experts: float
    other: float
    experts_missing: float = 0.0
    other_missing: float = 0.0
    late: float | None = None
    late_each: float = 0.0

    def __str__(self) -> str:
        found = self.experts + self.other
        text = f"computing a token: {1e3 * found:.3g} ms"
        more = self.experts_missing + self.other_missing
        return f"{text}, {1e3 * (found + more):.3g} ms where all is missing" if more else text

    def request_seconds(
        self, misses: float, read_seconds: float, top_k: int, n_requests: float
    ) -> float:
        """Return the time of a request, of which a token makes so many.

        `read_seconds` is what reading the missing experts takes by itself. Where `late` is not
        known, those found are computed meanwhile, and the last to come after it.
        """
        share = misses / top_k
        computed = (self.experts + share * self.experts_missing) / max(n_requests, 1)
        if not misses:
            return computed
        if self.late is None:
            return max(computed, read_seconds + computed / top_k)
        return max(read_seconds + self.late + misses * self.late_each, 0.0)


def tokens_per_second(
    rate: Rate,
    compute: ComputeTime | None,
    by_misses: Sequence[float],
    block_bytes: float,
    filling: Sequence[float] = (),
) -> float | None:
    """Return the speed of decoding, None where a token takes no time at all.

    `by_misses[m]` is how many requests of a token miss m experts, 0 to top_k, with a full cache,
    `filling[m]` how many while it fills.
    """
    compute = compute or ComputeTime(0.0, 0.0)
    n_requests, top_k = sum(by_misses) + sum(filling), max(len(by_misses) - 1, 1)
    seconds = compute.other
    for fills, counts in enumerate((by_misses, filling)):
        for misses, n in enumerate(counts):
            read = rate.seconds(misses, block_bytes, filling=bool(fills))
            seconds += n * compute.request_seconds(misses, read, top_k, n_requests)
            seconds += n / max(n_requests, 1) * misses / top_k * compute.other_missing
    return 1 / seconds if seconds > 0 else None
