"""Timing a container on this machine: its drive, computing, and what both cost one another.

Tokens are decoded first, as a run starts: while the cache fills, its memory is used for the first
time, which the system has to find, to zero and, in a virtual machine, to get back from the host.
Then requests are made by themselves, all numbers of missing experts as often, so that what was seen
of some numbers can be told for the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from colibri_tools.engine import Engine, Memory
from colibri_tools.errors import ColibriError, FormatError
from colibri_tools.native import ffi, lib
from colibri_tools.output import format_bytes
from colibri_tools.profile.speed import ComputeTime, Rate

__all__ = [
    "Decoded",
    "decoding_cache",
    "largest_change",
    "line_through",
    "measure_rate",
    "measure_speeds",
    "rate_of",
    "speeds_of",
]

PathLike = str | os.PathLike[str]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TIMING_SECONDS = 1.5
_DECODING_SECONDS = 3.0
_MOST_FILLING = 4  # x _DECODING_SECONDS
_POSITIONS = 32
_LEAST_TOKENS = 2

_CACHE_BYTES, _CACHE_SHARE = 256 << 20, 4
"""More than a CPU's cache and than memory that was free a moment ago, small beside a model."""

_LEAST_SPREAD = 0.2
"""Shares of missing experts that differ by less say nothing about what missing costs."""

_LEAST_REQUESTS = 20
"""Fewer requests say nothing about what delays them."""

_STRETCH_SECONDS = 0.5
_STEADY = 1.35
"""As much faster is the fastest stretch of requests than the slowest on a drive that is steady."""


def measure_speeds(
    model: PathLike, limits: Memory, top_k: int, *, disk: float | None, compute: float | None
) -> tuple[Rate | None, ComputeTime | None, list[str]]:
    """Return drive and computing, as given or measured, and notes on what could not be.

    `disk` is in bytes per second, `compute` in seconds of a token that finds all; None measures.
    The rate is None for a container with nothing to read, the time for one that cannot run here.
    Raises FormatError.
    """
    decoded, notes = None, []
    if compute is None:
        if decoding_cache(limits) < min(limits.token_bytes, limits.all_experts_bytes):
            notes.append(
                "computing was timed with nearly all experts missing, as memory has no room for "
                f"those of one token ({format_bytes(limits.token_bytes)}): it is faster where many "
                "are found"
            )
        try:
            decoded = _decode(model, limits, decoding_cache(limits))
        except ColibriError as error:
            notes = [f"time to compute is left out, as it could not be measured: {error.message}"]
    rate = measure_rate(model, top_k) if disk is None else Rate(disk, "given")
    if decoded is None:
        return rate, None if compute is None else ComputeTime(0.0, compute), notes
    rate, found = speeds_of(decoded, rate, top_k)
    if rate is not None and disk is None:
        change = largest_change(decoded, rate, found, top_k)
        if change > _STEADY:
            notes.append(
                f"the same requests took up to {change:.2g} times as long as at other moments: "
                "speeds will vary as much"
            )
    return rate, found, notes


# --- the drive by itself --------------------------------------------------------------------------


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


# --- decoding -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that were decoded, [tokens], and what their requests took, [tokens, MoE layers].

    `misses` are experts; `waits` and `experts` seconds of waiting for them and of computing all of
    a request. `filling`: the cache was not full yet.
    """

    seconds: Floats
    n_bytes: Floats
    filling: npt.NDArray[np.bool_]
    misses: Ints
    waits: Floats
    experts: Floats

    @property
    def requests(self) -> Floats:
        """Seconds of each request."""
        return self.waits + self.experts

    @property
    def others(self) -> Floats:
        """Seconds of each token beside its requests."""
        others: Floats = np.maximum(self.seconds - self.requests.sum(axis=1), 0.0)
        return others


def decoding_cache(limits: Memory) -> int:
    """Return the bytes of the cache that tokens are timed with.

    Where memory allows it a token finds in it what the one before it used, else nearly nothing.
    """
    least = min(limits.token_bytes + limits.min_cache_bytes, limits.all_experts_bytes)
    more = max(least, min(_CACHE_BYTES, limits.all_experts_bytes // _CACHE_SHARE))
    for wanted in (more, least):
        if limits.min_total_bytes + wanted <= limits.available_bytes:
            return wanted
    return limits.min_cache_bytes


def _decode(model: PathLike, limits: Memory, cache: int) -> Decoded:
    """Decode tokens until the cache is full, and for some time with a full one.

    Every second token is then one of the last again, so that there are requests that miss much and
    that find much. Weights come from memory and not from a CPU's cache, and computing and reading
    are in each other's way as they will be. Raises what opening raises.
    """
    ctx = min(_POSITIONS, limits.context_length)
    room = cache - limits.min_cache_bytes // 2  # for one more block
    ids: list[int] = []
    tokens: list[tuple[float, int, bool]] = []
    requests: list[list[tuple[int, float, float]]] = []
    n_read = n_full = 0
    with Engine(model, precision="fast", ctx=ctx, expert_cache=cache, check="never") as engine:
        start = full_at = time.monotonic()
        while not _enough(len(tokens), n_full, start, full_at):
            ids.append(_next_token(ids, n_full, limits.vocab_size))
            if engine.position == ctx:
                engine.rewind(0)
            engine.reset_stats()
            began = time.perf_counter()
            engine.eval(ids[-1:])
            seconds, n_bytes = time.perf_counter() - began, engine.stats().bytes_read
            requests.append(
                [
                    (
                        layer.expert_requests - layer.expert_hits,
                        layer.io_wait_seconds,
                        layer.experts_seconds,
                    )
                    for layer in engine.layer_stats()
                    if layer.expert_requests
                ]
            )
            filling = n_bytes > 0 and n_read <= room
            tokens.append((seconds, n_bytes, filling))
            n_read += n_bytes
            n_full += not filling
            if n_full == 0:
                full_at = time.monotonic()
    of_tokens = np.array(tokens, np.float64).T
    of_requests = np.array(requests, np.float64).reshape(len(ids), len(requests[0]), 3)
    misses, waits, experts = np.moveaxis(of_requests, 2, 0)
    return Decoded(
        of_tokens[0], of_tokens[1], of_tokens[2] > 0, misses.astype(np.int64), waits, experts
    )


def _enough(n_tokens: int, n_full: int, start: float, full_at: float) -> bool:
    now = time.monotonic()
    if n_full >= _LEAST_TOKENS and now - full_at > _DECODING_SECONDS:
        return True
    return n_tokens >= _LEAST_TOKENS and now - start > _MOST_FILLING * _DECODING_SECONDS


def _next_token(before: Sequence[int], n_full: int, vocab_size: int) -> int:
    """New ones while the cache fills, then every second time the last or the third last again."""
    if n_full % 2:
        return before[-1 if n_full % 4 == 1 else -3] if len(before) > 2 else before[-1]
    return (1 + 7919 * len(before)) % vocab_size


def speeds_of(decoded: Decoded, rate: Rate | None, top_k: int) -> tuple[Rate | None, ComputeTime]:
    """Return what decoded tokens say of computing and, with a measured rate, of requests.

    What a token finds is computed in times on a line over the share that it misses. `late` and
    `late_each` are a line through what requests took beyond reading by itself, over the number
    that they missed (both least squares), `filling_seconds_per_byte` what tokens took longer than
    all this while the cache filled.
    """
    full = ~decoded.filling if not decoded.filling.all() else decoded.filling
    n_rows = decoded.misses.shape[1]
    shares = decoded.misses.sum(axis=1) / max(n_rows * top_k, 1)
    other, other_missing = line_through(shares[full], decoded.others[full])
    found = (decoded.misses == 0) & full[:, None]
    if found.sum() >= _LEAST_REQUESTS:
        of_requests = np.broadcast_to(shares[:, None], found.shape)[found]
        experts = line_through(of_requests, n_rows * decoded.experts[found])
    else:
        experts = line_through(shares[full], decoded.experts[full].sum(axis=1))
    compute = ComputeTime(experts[0], other, experts[1], other_missing)
    if rate is None or rate.request_seconds is None:
        return rate, compute
    alone = np.array(rate.request_seconds)[decoded.misses]
    missed = (decoded.misses > 0) & full[:, None]
    if missed.sum() >= _LEAST_REQUESTS:
        line = np.stack([np.ones(missed.sum()), decoded.misses[missed]], axis=1)
        beyond = (decoded.requests - alone)[missed]
        late, late_each = np.linalg.lstsq(line, beyond, rcond=None)[0].tolist()
        compute = replace(compute, late=late, late_each=late_each)
    expected = _expected(decoded, rate, compute, top_k).sum(axis=1)
    longer = decoded.seconds - expected - compute.other - shares * compute.other_missing
    n_bytes = decoded.n_bytes[decoded.filling].sum()
    filling = max(float(longer[decoded.filling].sum() / n_bytes), 0.0) if n_bytes else 0.0
    return replace(rate, filling_seconds_per_byte=filling), compute


def _expected(decoded: Decoded, rate: Rate, compute: ComputeTime, top_k: int) -> Floats:
    """Seconds of each request with a full cache."""
    n_rows = decoded.misses.shape[1]
    by_misses = [
        compute.request_seconds(misses, rate.seconds(misses, 0.0), top_k, n_rows)
        for misses in range(top_k + 1)
    ]
    return np.array(by_misses)[decoded.misses]


def largest_change(decoded: Decoded, rate: Rate, compute: ComputeTime, top_k: int) -> float:
    """How much longer requests that read took in the slowest stretch of time than in the fastest.

    1 where they were not timed for long enough to tell.
    """
    read = (decoded.misses > 0) & ~decoded.filling[:, None]
    took, expected = decoded.requests[read], _expected(decoded, rate, compute, top_k)[read]
    stretch = (np.cumsum(took) / _STRETCH_SECONDS).astype(np.int64)
    whole = stretch < stretch.max(initial=0)
    sums = np.array([np.bincount(stretch[whole], of[whole]) for of in (took, expected)])
    ratios = np.divide(*sums[:, sums[1] > 0])
    return float(ratios.max() / ratios.min()) if len(ratios) > 1 else 1.0


def line_through(shares: Floats, seconds: Floats) -> tuple[float, float]:
    """Return what is taken with nothing missing, and how much more with all; never less.

    Least squares; where shares are all alike, the mean.
    """
    mean = float(seconds.mean())
    if np.ptp(shares) < _LEAST_SPREAD:
        return mean, 0.0
    slope = float(np.polyfit(shares, seconds, 1)[0])
    slope = min(max(slope, 0.0), mean / float(shares.mean()))
    return mean - slope * float(shares.mean()), slope
