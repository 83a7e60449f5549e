"""How fast a model decodes when a part of its experts is read: drive and computing, put together.

A layer asks for top_k experts at once and goes on when all are there. What that costs depends on
how many are missing: a few small ones do not keep a drive busy. So requests are timed as the
engine makes them, by the number they miss, and a trace says how often each number comes.
Tokens that find nothing are decoded too: what computing takes, and how far it delays reading.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from colibri_tools.engine import Engine, Memory, Stats
from colibri_tools.errors import FormatError
from colibri_tools.native import ffi, lib

__all__ = ["ComputeTime", "Rate", "measure_compute", "measure_rate", "tokens_per_second"]

PathLike = str | os.PathLike[str]

_TIMING_SECONDS = 1.5
_COMPUTE_SECONDS = 2.0
_COMPUTE_TOKENS = 24
_WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Rate:
    """What the drive gives, bytes per second, and how that is known: "given" or "measured".

    `request_seconds[m]` is the time until m missing experts of a request are there, None where only
    bandwidth is known.
    """

    bytes_per_second: float
    source: str
    request_seconds: tuple[float, ...] | None = None

    def seconds(self, misses: float, block_bytes: float) -> float:
        """Return the time of a request with so many misses, which may be a mean of several."""
        if self.request_seconds is None:
            return misses * block_bytes / self.bytes_per_second
        return float(np.interp(misses, range(len(self.request_seconds)), self.request_seconds))


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """Seconds of computing a token: its experts, and all else.

    `stretch`: how much longer requests take beside computing than by themselves, as reading wants
    some of the CPU too; 1 where that is not known.
    """

    experts: float
    other: float
    stretch: float = 1.0


def tokens_per_second(
    rate: Rate, compute: ComputeTime | None, by_misses: Sequence[float], block_bytes: float
) -> float | None:
    """Return the speed of decoding, None where a token takes no time at all.

    `by_misses[m]` is how many requests of a token miss m experts, 0 to top_k.
    """
    compute = compute or ComputeTime(0.0, 0.0)
    n_requests, top_k = sum(by_misses), max(len(by_misses) - 1, 1)
    seconds = compute.other
    for misses, n in enumerate(by_misses):
        waited = compute.stretch * rate.seconds(misses, block_bytes)
        seconds += n * _request_seconds(waited, compute.experts / max(n_requests, 1), top_k, misses)
    return 1 / seconds if seconds > 0 else None


def _request_seconds(waited: float, computed: float, top_k: int, misses: float) -> float:
    """The experts that are found are computed while others are read, the last to come after it."""
    return max(computed, waited + computed / top_k) if misses else computed


def measure_rate(model: PathLike, top_k: int, block_bytes: float) -> Rate | None:
    """Time requests of 1 to `top_k` experts of the container; None where it has none to read.

    `bytes_per_second` is that of the largest requests. Raises FormatError.
    """
    times, direct = ffi.new("clb_request_time[]", top_k + 1), ffi.new("bool *")
    text = ffi.new("char[]", lib.COLIBRI_ERROR_BYTES)
    path = os.fsencode(model)
    if not lib.clb_time_requests(path, top_k, 0, _TIMING_SECONDS, times, direct, text, len(text)):
        raise FormatError(f"{os.fspath(model)}: {ffi.string(text).decode('utf-8', 'replace')}")
    known = [m for m in range(1, top_k + 1) if times[m].n]
    if not known:
        return None
    means = [times[m].seconds / times[m].n for m in known]
    seconds = np.interp(range(top_k + 1), [0, *known], [0.0, *means])
    largest = known[-1] * block_bytes / means[-1]
    return Rate(largest, "measured", tuple(float(s) for s in seconds))


def measure_compute(model: PathLike, limits: Memory, top_k: int, rate: Rate | None) -> ComputeTime:
    """Decode different tokens with memory for two requests, so that nearly all experts are read.

    So weights come from memory and not from a CPU's cache, and computing and reading are in each
    other's way as they will be. Waiting is not counted, but with a measured `rate` compared with
    what requests alone take. Means over tokens. Raises what opening raises.
    """
    cache = max(2 * top_k * (limits.min_cache_bytes // 2), limits.min_cache_bytes)
    tokens: list[Stats] = []
    ctx = min(_COMPUTE_TOKENS, limits.context_length)
    with Engine(model, precision="fast", ctx=ctx, expert_cache=cache, check="never") as engine:
        end = time.monotonic() + _COMPUTE_SECONDS
        for i in range(ctx):
            if len(tokens) > _WARM_UP and time.monotonic() > end:
                break
            engine.reset_stats()
            engine.eval([(1 + 7919 * i) % limits.vocab_size])
            tokens.append(engine.stats())
        n_requests = sum(layer.expert_requests > 0 for layer in engine.layer_stats())
    tokens = tokens[min(_WARM_UP, len(tokens) - 1) :]
    waited = statistics.fmean(t.io_wait_seconds for t in tokens)
    experts = statistics.fmean(t.experts_seconds for t in tokens)
    other = statistics.fmean(t.seconds for t in tokens) - waited - experts
    found = ComputeTime(experts, max(other, 0.0))
    misses = statistics.fmean(t.expert_requests - t.expert_hits for t in tokens)
    if rate is None or rate.request_seconds is None or not misses or not n_requests:
        return found
    # waited + experts = requests x (stretch x alone + the last expert)
    alone = n_requests * rate.seconds(misses / n_requests, 0.0)
    return replace(found, stretch=max((waited + experts - experts / top_k) / alone, 1.0))
