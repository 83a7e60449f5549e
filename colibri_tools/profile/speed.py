"""How fast a model decodes when a part of its experts is read: drive and computing, put together.

A layer asks for top_k experts at once and goes on when all are there. What that costs depends on
how many are missing: a few small ones do not keep a drive busy. So requests are timed as the
engine makes them, by the number they miss, and a trace says how often each number comes.
While a cache fills, its memory is used for the first time: the system has to find it, zero it and,
in a virtual machine, get it back from the host. That is timed too, and counted for what fills it.
Tokens that find nothing are decoded too: what computing takes, and how far it delays reading.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri_tools.engine import Engine, Memory, Stats
from colibri_tools.errors import FormatError
from colibri_tools.native import ffi, lib

__all__ = [
    "ComputeTime",
    "Rate",
    "finding_cache",
    "line_through",
    "measure_compute",
    "measure_rate",
    "rate_of",
    "tokens_per_second",
]

PathLike = str | os.PathLike[str]
Floats = npt.NDArray[np.float64]

_TIMING_SECONDS = 1.5
_COMPUTE_SECONDS = 2.0
_COMPUTE_TOKENS = 24
_WARM_UP = 1
_LEAST_SPREAD = 0.2
"""Shares of missing experts that differ by less say nothing about what missing costs."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What the drive gives, bytes per second, and how that is known: "given" or "measured".

    `request_seconds[m]` is the time until m missing experts of a request are there, None where only
    bandwidth is known. `filling_seconds_per_byte` is what reading takes longer while the cache
    fills, into memory that it uses for the first time.
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

    `stretch`: how much longer requests take beside computing than by themselves, as reading wants
    some of the CPU too; 1 where that is not known. `experts_missing` and `other_missing` are what
    computing takes longer in a token that misses all: CPUs that often wait are slower.
    """

    experts: float
    other: float
    stretch: float = 1.0
    experts_missing: float = 0.0
    other_missing: float = 0.0

    def __str__(self) -> str:
        found = self.experts + self.other
        text = f"computing a token: {1e3 * found:.3g} ms"
        more = self.experts_missing + self.other_missing
        return f"{text}, {1e3 * (found + more):.3g} ms where all is missing" if more else text


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
            share, part = misses / top_k, n / max(n_requests, 1)
            waited = compute.stretch * rate.seconds(misses, block_bytes, filling=bool(fills))
            computed = (compute.experts + share * compute.experts_missing) / max(n_requests, 1)
            seconds += n * _request_seconds(waited, computed, top_k, misses)
            seconds += part * share * compute.other_missing
    return 1 / seconds if seconds > 0 else None


def _request_seconds(waited: float, computed: float, top_k: int, misses: float) -> float:
    """The experts that are found are computed while others are read, the last to come after it."""
    return max(computed, waited + computed / top_k) if misses else computed


def measure_rate(model: PathLike, top_k: int) -> Rate | None:
    """Time requests of 1 to `top_k` experts of the container; None where it has none to read.

    `bytes_per_second` is that of the largest requests. Raises FormatError.
    """
    times, direct = ffi.new("clb_request_time[]", 2 * (top_k + 1)), ffi.new("bool *")
    text = ffi.new("char[]", lib.COLIBRI_ERROR_BYTES)
    path = os.fsencode(model)
    if not lib.clb_time_requests(path, top_k, 0, _TIMING_SECONDS, times, direct, text, len(text)):
        raise FormatError(f"{os.fspath(model)}: {ffi.string(text).decode('utf-8', 'replace')}")
    found = np.array([(t.n, t.seconds, t.bytes_read) for t in times], np.float64)
    return rate_of(*found.T.reshape(3, 2, top_k + 1))


def rate_of(n: Floats, seconds: Floats, n_bytes: Floats) -> Rate | None:
    """Return what timed requests say, None for none that read.

    Arguments are float64 [2, misses]: requests while a cache fills and with a full one, how long
    they took together, and what they read. A cache that never was full is timed as it is.
    """
    top_k = n.shape[1] - 1
    full = int(n[1, 1:].any())
    known = [m for m in range(1, top_k + 1) if n[full, m]]
    if not known:
        return None
    means = seconds[full, known] / n[full, known]
    request_seconds = np.interp(range(top_k + 1), [0, *known], [0.0, *means])
    filling = 0.0
    if full and n_bytes[0].any():
        longer = seconds[0, 1:].sum() - n[0, 1:] @ request_seconds[1:]
        filling = max(float(longer / n_bytes[0].sum()), 0.0)
    largest = float(n_bytes[full, known[-1]] / seconds[full, known[-1]])
    return Rate(largest, "measured", tuple(map(float, request_seconds)), filling)


def measure_compute(model: PathLike, limits: Memory, top_k: int, rate: Rate | None) -> ComputeTime:
    """Decode tokens that miss nearly all of their experts, and tokens that find most of them.

    Different tokens, with memory for two requests: weights come from memory and not from a CPU's
    cache, and computing and reading are in each other's way as they will be. Waiting is not
    counted, but with a measured `rate` compared with what requests alone take. Then, where memory
    allows, with a cache for one token's experts, each token twice. What computing takes is a line
    through all of these. Raises what opening raises.
    """
    missing = max(2 * top_k * (limits.min_cache_bytes // 2), limits.min_cache_bytes)
    tokens, n_requests = _decode(model, limits, missing, twice=False)
    stretch = _stretch(tokens, n_requests, top_k, rate)
    finding = finding_cache(limits)
    if finding > missing:
        tokens += _decode(model, limits, finding, twice=True)[0]
    shares = [1 - t.expert_hits / max(t.expert_requests, 1) for t in tokens]
    experts, experts_missing = line_through(shares, [t.experts_seconds for t in tokens])
    others = [t.seconds - t.io_wait_seconds - t.experts_seconds for t in tokens]
    other, other_missing = line_through(shares, [max(seconds, 0.0) for seconds in others])
    return ComputeTime(experts, other, stretch, experts_missing, other_missing)


def finding_cache(limits: Memory) -> int:
    """Return the bytes of a cache in which a token finds what the one before it used.

    0 where memory does not allow it.
    """
    wanted = min(limits.token_bytes + limits.min_cache_bytes, limits.all_experts_bytes)
    fits = limits.min_total_bytes + wanted <= limits.available_bytes
    return wanted if fits else 0


def _decode(model: PathLike, limits: Memory, cache: int, *, twice: bool) -> tuple[list[Stats], int]:
    """What tokens took, all different or each `twice`, and how many requests one makes."""
    tokens: list[Stats] = []
    ctx = min(_COMPUTE_TOKENS, limits.context_length)
    with Engine(model, precision="fast", ctx=ctx, expert_cache=cache, check="never") as engine:
        end = time.monotonic() + _COMPUTE_SECONDS
        for i in range(ctx):
            if len(tokens) > _WARM_UP and time.monotonic() > end:
                break
            engine.reset_stats()
            engine.eval([(1 + 7919 * (i // 2 if twice else i)) % limits.vocab_size])
            tokens.append(engine.stats())
        n_requests = sum(layer.expert_requests > 0 for layer in engine.layer_stats())
    return tokens[min(_WARM_UP, len(tokens) - 1) :], n_requests


def _stretch(tokens: Sequence[Stats], n_requests: int, top_k: int, rate: Rate | None) -> float:
    waited = statistics.fmean(t.io_wait_seconds for t in tokens)
    experts = statistics.fmean(t.experts_seconds for t in tokens)
    misses = statistics.fmean(t.expert_requests - t.expert_hits for t in tokens)
    if rate is None or rate.request_seconds is None or not misses or not n_requests:
        return 1.0
    # waited + experts = requests x (stretch x alone + the last expert)
    alone = n_requests * rate.seconds(misses / n_requests, 0.0)
    return max((waited + experts - experts / top_k) / alone, 1.0)


def line_through(shares: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return what is taken with nothing missing, and how much more with all; never less.

    Least squares; where shares are all alike, the mean.
    """
    mean = statistics.fmean(seconds)
    if max(shares) - min(shares) < _LEAST_SPREAD:
        return mean, 0.0
    slope = statistics.linear_regression(shares, seconds).slope
    slope = min(max(slope, 0.0), mean / statistics.fmean(shares))
    return mean - slope * statistics.fmean(shares), slope
