"""simulate and plan: what a trace would have met in other caches, against runs that met it."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import VOCAB, make_model
from rich.console import Console

from colibri_tools.cli import main
from colibri_tools.engine import Engine, estimate
from colibri_tools.errors import FormatError, UsageError
from colibri_tools.output import counted, format_speed, parse_rate
from colibri_tools.plan import plan_memory
from colibri_tools.profile.file import RoutingProfile, load_profile, save_profile
from colibri_tools.profile.measuring import (
    Decoded,
    decoding_cache,
    largest_change,
    line_through,
    measure_rate,
    measure_speeds,
    rate_of,
    speeds_of,
)
from colibri_tools.profile.profiling import profile_routing
from colibri_tools.profile.replay import replay, requests_of
from colibri_tools.profile.simulate import Replayed, engine_replay, simulate
from colibri_tools.profile.speed import ComputeTime, Rate, tokens_per_second
from colibri_tools.repack import repack
from colibri_tools.rewrite import reorder

TINY_MOE = Path(__file__).parent.parent / "fixtures" / "tiny-moe"
BLOCK = 3 * 256 * 256 * 2  # of tiny-moe: gate, up and down in bf16
N_ROWS, N_BLOCKS, TOP_K = 4, 64, 2
TOKEN = N_ROWS * TOP_K  # blocks


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """tiny-moe, a profile with a trace, and the ids that were profiled."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("simulate")
    container, path = folder / "tiny.colibri", folder / "tiny.profile"
    repack(TINY_MOE, container)
    tokenizer = Tokenizer.from_file(str(TINY_MOE / "tokenizer.json"))
    ids = []
    for name in ("c", "man-fr"):  # a change of subject
        text = (TINY_MOE / "heldout" / f"{name}.txt").read_text(encoding="utf-8")
        ids += tokenizer.encode(text[:3000], add_special_tokens=False).ids[:200]
    (folder / "ids").write_text(",".join(map(str, ids)))
    profile_routing(container, path, token_files=[("mixed", folder / "ids")], trace=True)
    return container, path, ids


def profile_of(path: Path) -> RoutingProfile:
    return load_profile(path)


def experts_of(path: Path) -> Any:
    trace = load_profile(path).trace
    assert trace is not None
    return trace.experts


def decode(container: Path, ids: list[int], cache: int, **options: Any) -> tuple[float, int]:
    """Evaluate ids one by one; return the measured hit rate, and bytes read."""
    with Engine(container, ctx=len(ids), expert_cache=cache, threads=1, **options) as engine:
        for token in ids:
            engine.eval([token], 0)
        stats = engine.stats()
    assert stats.expert_requests == len(ids) * TOKEN
    return stats.expert_hits / stats.expert_requests, stats.bytes_read


@pytest.mark.parametrize("blocks", [2, 6, TOKEN, 12, 24, 48, N_BLOCKS])
def test_the_engine_meets_what_its_store_met_in_the_replay(
    tiny: tuple[Path, Path, list[int]], blocks: int
) -> None:
    """Promised: within 0.1 point. What reads finish first may decide between equal blocks."""
    container, path, ids = tiny
    found = engine_replay(container, experts_of(path), range(N_ROWS), blocks * BLOCK)
    measured, measured_bytes = decode(container, ids, blocks * BLOCK)
    assert abs(found.hit_rate - measured) <= 0.001
    assert found.bytes_read == found.misses * BLOCK
    assert abs(found.bytes_read - measured_bytes) <= 0.001 * len(ids) * TOKEN * BLOCK
    assert sum(found.by_misses) == len(ids) * N_ROWS
    assert sum(m * n for m, n in enumerate(found.by_misses)) == found.misses


def test_preloading_is_replayed_too(tiny: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    container, path, _ = tiny
    hot = tmp_path / "hot.colibri"
    reorder(container, hot, routing=path)
    experts, cache = experts_of(path)[:20], 24 * BLOCK
    cold = engine_replay(hot, experts, range(N_ROWS), cache)
    warm = engine_replay(hot, experts, range(N_ROWS), cache, preload=True)
    assert warm.hits > cold.hits


def test_no_policy_beats_the_optimum_and_a_larger_cache_never_hurts_it(
    tiny: tuple[Path, Path, list[int]],
) -> None:
    container, path, _ = tiny
    result = simulate(
        path, container, expert_cache=[n * BLOCK for n in (4, 8, 16, 32)], disk=1e9, compute=0.0
    )
    for cache in result.results:
        best = cache.hit_rates["belady"]
        assert all(
            rate <= best + 1e-12 for name, rate in cache.hit_rates.items() if name != "static"
        )
    optimum = [cache.hit_rates["belady"] for cache in result.results]
    assert optimum == sorted(optimum)


def test_the_cliff_of_lru_is_where_a_token_no_longer_fits(
    tiny: tuple[Path, Path, list[int]],
) -> None:
    container, path, _ = tiny
    result = simulate(path, container, expert_cache=[6 * BLOCK, 12 * BLOCK], disk=1e9, compute=0.0)
    below, above = result.results
    assert below.below_token and below.hit_rates["lru"] < 0.01 < below.hit_rates["engine"]
    assert not above.below_token and above.hit_rates["lru"] > 0.2
    assert len(result.warnings) == 1 and "2.25 MiB is smaller than what one token" in str(
        result.warnings
    )
    requests = requests_of(experts_of(path), (16,) * N_ROWS)
    counts = load_profile(path).counts().reshape(-1)
    assert replay("lru", requests, 6, counts) == below.hit_rates["lru"]


def test_speed_is_what_the_drive_and_computing_allow(tiny: tuple[Path, Path, list[int]]) -> None:
    container, path, _ = tiny
    slow = simulate(path, container, expert_cache=[8 * BLOCK], disk=1e6, compute=0.0).results[0]
    assert slow.tokens_per_second == pytest.approx(1e6 / slow.bytes_per_token)
    both = simulate(path, container, expert_cache=[8 * BLOCK], disk=1e6, compute=0.5).results[0]
    assert both.tokens_per_second == pytest.approx(1 / (0.5 + slow.bytes_per_token / 1e6))


def test_a_replay_tells_filling_from_a_full_cache(tiny: tuple[Path, Path, list[int]]) -> None:
    """Up to the first eviction each miss takes memory of its own."""
    container, path, ids = tiny
    blocks = 24
    found = engine_replay(container, experts_of(path), range(N_ROWS), blocks * BLOCK)
    filled = sum(m * n for m, n in enumerate(found.filling))
    assert blocks - TOP_K < filled <= blocks
    n_full = sum(found.full)
    assert sum(found.filling) + n_full == len(ids) * N_ROWS
    result = simulate(path, container, expert_cache=[blocks * BLOCK], disk=1e6, compute=0.0)
    read_when_full = (found.misses - filled) * BLOCK
    assert result.results[0].tokens_per_second_when_full == pytest.approx(
        n_full / N_ROWS / (read_when_full / 1e6)
    )
    whole = engine_replay(container, experts_of(path), range(N_ROWS), N_BLOCKS * BLOCK)
    assert sum(whole.full) == 0 and whole.misses <= N_BLOCKS


def test_the_long_run_is_what_comes_once_the_cache_is_full() -> None:
    filled = Replayed(5, 7, 700, filling=(0, 1, 2), full=(4, 2, 0))
    assert filled.in_the_long_run(3) == pytest.approx([2, 1, 0])
    never = Replayed(1, 5, 500, filling=(0, 1, 2), full=(0, 0, 0))
    assert never.in_the_long_run(3) == pytest.approx([0, 1, 2])


def test_a_cache_that_holds_all_experts_is_as_fast_as_computing(
    tiny: tuple[Path, Path, list[int]],
) -> None:
    container, path, _ = tiny
    for compute, expected in ((0.25, 4.0), (0.0, None)):
        result = simulate(
            path, container, expert_cache=[N_BLOCKS * BLOCK], disk=1e6, compute=compute
        ).results[0]
        assert result.tokens_per_second_when_full == expected
        n_read = result.bytes_per_token / 1e6
        assert result.tokens_per_second == pytest.approx(1 / (compute + n_read))
    short = simulate(
        path, container, expert_cache=[32 * BLOCK], disk=1e6, compute=0.0, max_choices=TOKEN
    ).results[0]
    assert short.tokens_per_second_when_full is None  # one token does not fill it


def test_the_first_use_of_memory_is_what_filling_takes_longer() -> None:
    """Requests of 1 and 2 misses of 100 bytes: 1 and 1.5 s full, 2 and 3.5 s filling."""
    n = np.array([[1, 4, 2], [5, 10, 10]])
    seconds = np.array([[0.1, 8.0, 7.0], [0.5, 10.0, 15.0]])
    n_bytes = np.array([[0, 400, 400], [0, 1000, 2000]])
    rate = rate_of(n, seconds, n_bytes)
    assert rate is not None and rate.request_seconds == pytest.approx((0, 1, 1.5))
    assert rate.bytes_per_second == pytest.approx(200 / 1.5)
    assert rate.filling_seconds_per_byte == pytest.approx((15 - 4 * 1 - 2 * 1.5) / 800)
    assert rate.seconds(2, 100) == pytest.approx(1.5)
    assert rate.seconds(2, 100, filling=True) == pytest.approx(1.5 + 200 * 0.01)
    compute = ComputeTime(experts=0.2, other=0.1)
    found = tokens_per_second(rate, compute, [1, 0, 0], 100, [0, 0, 1])
    assert 1 / (found or 0) == pytest.approx(0.1 + 0.1 + 3.5 + 0.05)


def test_filling_is_never_faster_and_a_cache_that_is_never_full_is_timed_as_it_is() -> None:
    n_bytes = np.array([[0, 100, 0], [0, 100, 0]])
    noise = rate_of(np.array([[0, 1, 0], [0, 1, 0]]), np.array([[0, 0.9, 0], [0, 1.0, 0]]), n_bytes)
    assert noise is not None and noise.filling_seconds_per_byte == 0
    assert noise.request_seconds == pytest.approx((0, 1, 1))  # nothing is known of two
    never = rate_of(
        np.array([[0, 2, 0], [0, 0, 0]]), np.array([[0, 3.0, 0], [0, 0, 0]]), 2 * n_bytes
    )
    assert never is not None and never.filling_seconds_per_byte == 0
    assert never.request_seconds == pytest.approx((0, 1.5, 1.5))
    assert rate_of(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 3))) is None


def test_experts_are_computed_while_others_are_read() -> None:
    """Two layers of two experts: 0.2 s of experts a token, 0.05 for each; 0.1 for the rest."""
    compute = ComputeTime(experts=0.2, other=0.1)

    def seconds(rate: Rate, by_misses: list[float], time: ComputeTime | None = compute) -> float:
        return 1 / (tokens_per_second(rate, time, by_misses, 1e6) or 0)

    fast, slow = Rate(1e9, "given"), Rate(1e6, "given")
    assert seconds(fast, [2, 0, 0]) == pytest.approx(0.3)  # nothing to read
    assert seconds(fast, [0, 2, 0]) == pytest.approx(0.3)  # reads are behind the other expert
    assert seconds(slow, [0, 2, 0]) == pytest.approx(0.1 + 2 * (1 + 0.05))
    assert seconds(slow, [1, 0, 1]) == pytest.approx(0.1 + 0.1 + 2 + 0.05)
    assert seconds(slow, [1, 0, 1], None) == pytest.approx(2)
    assert tokens_per_second(slow, None, [2, 0, 0], 1e6) is None
    # What a request was seen to take goes before bandwidth, and grows with what delays it.
    measured = Rate(1e9, "measured", (0.0, 0.4, 0.5))
    assert measured.seconds(1.5, 1e6) == pytest.approx(0.45)
    assert seconds(measured, [0, 0, 2]) == pytest.approx(0.1 + 2 * (0.5 + 0.05))
    seen = ComputeTime(experts=0.2, other=0.1, late=0.03, late_each=0.01)
    assert seconds(measured, [0, 0, 2], seen) == pytest.approx(0.1 + 2 * (0.5 + 0.03 + 2 * 0.01))
    assert seconds(measured, [2, 0, 0], seen) == pytest.approx(0.3)
    never_less = ComputeTime(experts=0.2, other=0.1, late=-1.0)
    assert seconds(measured, [0, 2, 0], never_less) == pytest.approx(0.1)


def test_computing_takes_longer_where_experts_are_missing() -> None:
    """Two layers of two experts; found: 0.2 s of experts and 0.1; missing: 0.1 and 0.06 more."""
    compute = ComputeTime(0.2, 0.1, experts_missing=0.1, other_missing=0.06)
    rate = Rate(1e6, "given")

    def seconds(by_misses: list[float], filling: list[float]) -> float:
        return 1 / (tokens_per_second(rate, compute, by_misses, 1e6, filling) or 0)

    assert seconds([2, 0, 0], []) == pytest.approx(0.3)
    assert seconds([0, 0, 2], []) == pytest.approx(0.16 + 2 * (2 + 0.3 / 2 / 2))
    assert seconds([1, 0, 0], [0, 1, 0]) == pytest.approx(0.1 + 0.03 / 2 + 0.1 + 1 + 0.25 / 2 / 2)
    assert str(compute) == "computing a token: 300 ms, 460 ms where all is missing"
    assert str(ComputeTime(0.2, 0.1)) == "computing a token: 300 ms"


def test_a_line_through_tokens_says_what_missing_costs() -> None:
    def line(shares: list[float], seconds: list[float]) -> tuple[float, float]:
        return line_through(np.array(shares), np.array(seconds))

    shares = [0.1, 0.3, 0.9, 0.9]
    assert line(shares, [2 + 3 * share for share in shares]) == pytest.approx((2, 3))
    assert line([0.2, 0.8], [5.0, 3.0]) == pytest.approx((4, 0))  # never less
    assert line([0.5, 0.6], [1.0, 3.0]) == (2, 0)  # too near to tell
    base, more = line([0.4, 0.8], [0.0, 4.0])  # nothing is computed in less than no time
    assert base == pytest.approx(0) and more == pytest.approx(2 / 0.6)


def decoded(misses: list[list[int]], n_filling: int) -> Decoded:
    """Two layers, two experts of 100 bytes: what `ALONE`, `SEEN` and 0.01 s a byte filled give."""
    numbers = np.array(misses)
    shares = numbers.mean(axis=1, keepdims=True) / 2
    experts = (0.2 + 0.1 * shares) / 2 + 0.02 * (numbers > 0)
    alone = np.array(ALONE.request_seconds)[numbers]
    filling = np.arange(len(misses)) < n_filling
    first_use = 0.01 * 100 * numbers * filling[:, None]
    waits = np.where(numbers > 0, alone + 0.03 + 0.02 * numbers - experts + first_use, 0.0)
    seconds = (waits + experts).sum(axis=1) + 0.1 + 0.06 * shares[:, 0]
    return Decoded(seconds, 100.0 * numbers.sum(axis=1), filling, numbers, waits, experts)


ALONE = Rate(400.0, "measured", (0.0, 0.4, 0.5), 7.0)
SEEN = ComputeTime(0.2, 0.1, experts_missing=0.1, other_missing=0.06, late=0.03, late_each=0.02)
MISSES = [[0, 0], [1, 0], [2, 2], [0, 2], [1, 1], [0, 1]] * 12


def test_decoded_tokens_say_what_computing_takes_and_what_delays_requests() -> None:
    rate, compute = speeds_of(decoded([[2, 2], [2, 1], *MISSES], 2), ALONE, 2)
    assert rate is not None and rate.request_seconds == ALONE.request_seconds
    assert rate.filling_seconds_per_byte == pytest.approx(0.01)
    assert asdict(compute) == pytest.approx(asdict(SEEN))
    # A drive that was only said to be so fast has no requests to compare with.
    given, compute = speeds_of(decoded(MISSES, 0), Rate(400.0, "given"), 2)
    assert given == Rate(400.0, "given") and compute.late is None
    assert compute.experts == pytest.approx(0.2) and compute.other == pytest.approx(0.1)
    nothing, compute = speeds_of(decoded(MISSES, 0), None, 2)
    assert nothing is None and compute.late is None
    dense = np.zeros((3, 0))
    tokens = Decoded(np.ones(3), np.zeros(3), np.zeros(3, bool), dense.astype(int), dense, dense)
    assert speeds_of(tokens, None, 0) == (None, ComputeTime(0.0, 1.0))


def test_few_requests_say_nothing_about_what_delays_them() -> None:
    rate, compute = speeds_of(decoded([[2, 2], [1, 2], [0, 0], [2, 1]], 1), ALONE, 2)
    assert compute.late is None and rate is not None
    assert compute.experts == pytest.approx(0.2)  # of tokens, as few requests found all
    # A cache that never was full: all there is to see is what filled it.
    rate, compute = speeds_of(decoded([[2, 2], [1, 2]], 2), ALONE, 2)
    assert compute.late is None and rate is not None
    # Three requests that miss two take 0.5 s and an expert of four of 0.34 s, one that misses one
    # 0.4 and 0.29 / 4; all else is 0.305 s of the two tokens. They took 9.465 s and read 700 bytes.
    expected = (9.465 - 3 * (0.5 + 0.34 / 4) - (0.4 + 0.29 / 4) - 0.305) / 700
    assert rate.filling_seconds_per_byte == pytest.approx(expected)


def test_a_drive_that_changes_while_it_is_timed_is_noticed() -> None:
    even = decoded(MISSES, 0)
    assert largest_change(even, ALONE, SEEN, 2) == pytest.approx(1)
    half = np.arange(len(MISSES))[:, None] < len(MISSES) // 2
    uneven = replace(even, waits=np.where(half, even.waits, 2 * even.waits + even.experts))
    assert largest_change(uneven, ALONE, SEEN, 2) == pytest.approx(2)
    short = decoded(MISSES[:1], 0)
    assert largest_change(short, ALONE, SEEN, 2) == 1


def test_tokens_are_timed_with_what_memory_allows(tiny: tuple[Path, Path, list[int]]) -> None:
    container, _, _ = tiny
    limits = replace(estimate(container, precision="fast"), all_experts_bytes=4 << 30)
    least = limits.token_bytes + limits.min_cache_bytes
    for wanted in (256 << 20, least):
        room = limits.min_total_bytes + wanted
        assert decoding_cache(replace(limits, available_bytes=room)) == wanted
    assert decoding_cache(replace(limits, available_bytes=room - 1)) == limits.min_cache_bytes
    assert decoding_cache(replace(limits, all_experts_bytes=4 * least + 4)) == least + 1
    assert decoding_cache(replace(limits, all_experts_bytes=least - 1)) == least - 1
    little = replace(estimate(container, precision="fast"), available_bytes=0)
    rate, compute, notes = measure_speeds(container, little, TOP_K, disk=None, compute=None)
    assert rate is not None and compute is not None and compute.experts > 0
    assert "memory has no room for those of one token (3.00 MiB)" in notes[0]
    few = replace(limits, all_experts_bytes=least, token_bytes=least + 1)  # blocks of several sizes
    _, _, notes = measure_speeds(container, few, TOP_K, disk=1e9, compute=None)
    assert notes == []


def test_this_machine_is_measured(tiny: tuple[Path, Path, list[int]]) -> None:
    container, path, _ = tiny
    rate = measure_rate(container, TOP_K)
    assert rate is not None and rate.request_seconds is not None
    assert len(rate.request_seconds) == TOP_K + 1 and rate.request_seconds[0] == 0
    assert all(0 < s < 10 for s in rate.request_seconds[1:])
    assert 0 <= rate.filling_seconds_per_byte < 1
    assert rate.bytes_per_second == pytest.approx(TOP_K * BLOCK / rate.request_seconds[TOP_K])
    result = simulate(path, container, expert_cache=[8 * BLOCK])
    assert result.compute is not None and result.compute.late is not None
    assert result.compute.experts > 0 and result.compute.other > 0
    assert result.rate is not None and result.rate.source == "measured"
    speed = result.results[0].tokens_per_second
    assert speed is not None and speed < 1 / (result.compute.experts + result.compute.other)
    planned = plan_memory(container, [40 << 20, 80 << 20], routing=path)
    assert planned.compute is not None and planned.notes == ()
    small, large = (budget.tokens_per_second for budget in planned.budgets)
    assert small is not None and large is not None and small < large


def test_long_traces_are_cut_and_said_to_be(tiny: tuple[Path, Path, list[int]]) -> None:
    container, path, _ = tiny
    result = simulate(
        path, container, expert_cache=[8 * BLOCK], disk=1e9, compute=0.0, max_choices=50 * TOKEN
    )
    assert (result.n_tokens, result.trace_tokens) == (50, 400)
    assert len(result.notes) == 2 and "exact precision" in result.notes[0]
    assert result.notes[1] == "the first 50 of 400 tokens of the trace are replayed"


def test_a_profile_in_another_precision_than_runs_have_is_named(
    tiny: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    container, path, ids = tiny
    given: dict[str, Any] = {"expert_cache": [8 * BLOCK], "disk": 1e9, "compute": 0.0}
    assert "experts are those of exact precision" in simulate(path, container, **given).notes[0]
    (tmp_path / "ids").write_text(",".join(map(str, ids[:40])))
    files, fast = [("a", tmp_path / "ids")], tmp_path / "fast"
    profile_routing(container, fast, token_files=files, trace=True, precision="fast")
    assert (load_profile(path).precision, load_profile(fast).precision) == ("exact", "fast")
    assert simulate(fast, container, **given).notes == ()
    save_profile(replace(load_profile(path), precision=""), tmp_path / "unknown")
    assert simulate(tmp_path / "unknown", container, **given).notes == ()


def test_what_cannot_be_simulated_is_refused(
    tiny: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    container, path, _ = tiny
    with pytest.raises(UsageError, match="give --ram or --expert-cache"):
        simulate(path, container)
    with pytest.raises(UsageError, match=r"expected at least 786432 bytes \(two blocks\)"):
        simulate(path, container, expert_cache=[1000])
    with pytest.raises(FormatError, match="expert is 16, expected less than 16"):
        engine_replay(container, np.full((1, 4, 2), 16, np.uint16), range(4), 8 * BLOCK)
    other = make_model(tmp_path / "other.colibri")
    with pytest.raises(UsageError, match="profile of another model"):
        simulate(path, other, expert_cache=[8 * BLOCK])
    ids = tmp_path / "ids"
    ids.write_text(",".join(str(i % VOCAB) for i in range(20)))
    profile_routing(other, tmp_path / "p", token_files=[("a", ids)])
    with pytest.raises(UsageError, match=r"no trace to replay; profile-routing --trace"):
        simulate(tmp_path / "p", other, expert_cache=[1 << 20])


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_speeds_that_are_none_are_refused(tiny: tuple[Path, Path, list[int]], wrong: float) -> None:
    container, path, _ = tiny
    for given in ({"compute": wrong}, {"disk": wrong}, {"disk": 0.0}):
        with pytest.raises(UsageError, match=f"--{next(iter(given))}: expected .* found"):
            simulate(path, container, expert_cache=[8 * BLOCK], **given)
        with pytest.raises(UsageError, match=f"--{next(iter(given))}: expected .* found"):
            plan_memory(container, [1 << 30], **given)


def test_plans_split_budgets_and_use_what_is_known_of_routing(
    tiny: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    container, path, _ = tiny
    plain = plan_memory(container, [40 << 20, 80 << 20], disk=1e9)
    small, large = plain.budgets
    assert small.memory is not None and large.memory is not None
    assert small.memory.total_bytes <= 40 << 20
    assert small.hit_rate is not None
    assert small.hit_rate == pytest.approx(
        small.memory.cache_bytes / small.memory.all_experts_bytes
    )
    assert small.tokens_per_second == pytest.approx(
        1e9 / ((1 - small.hit_rate) * small.memory.token_bytes)
    )
    assert large.hit_rate == 1 and large.tokens_per_second is None
    replayed = plan_memory(container, [40 << 20], disk=1e9, routing=path).budgets[0]
    found = engine_replay(container, experts_of(path), range(N_ROWS), small.memory.cache_bytes)
    missed = sum(m * n for m, n in enumerate(found.full)) / sum(found.full)  # once it is full
    assert replayed.hit_rate == pytest.approx(1 - missed / TOP_K)
    assert replayed.hit_rate is not None and replayed.hit_rate != pytest.approx(found.hit_rate)
    assert found.hit_rate > small.hit_rate
    assert replayed.bytes_per_token == pytest.approx(missed * N_ROWS * BLOCK)
    computed = plan_memory(container, [80 << 20], disk=1e9, compute=0.02).budgets[0]
    assert computed.tokens_per_second == pytest.approx(50)
    too_small = plan_memory(container, [1 << 20, 40 << 20], disk=1e9)
    assert too_small.budgets[0].memory is None and "at least" in str(too_small.budgets[0].refused)
    with pytest.raises(UsageError, match="at least"):
        plan_memory(container, [1 << 20], disk=1e9)


def test_both_commands_print_one_document_and_tables(
    tiny: tuple[Path, Path, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    container, path, _ = tiny
    simulated = ["simulate", str(path), str(container), "--expert-cache", "3M,9M"]
    simulated += ["--disk", "2GB/s", "--compute", "0.001"]
    planned = ["plan", str(container), "--ram", "40M,80M", "--disk", "500MB/s"]
    for command, key in ((simulated, "caches"), (planned, "budgets")):
        with pytest.raises(SystemExit) as done:
            main([*command, "--json"])
        assert done.value.code == 0
        assert len(json.loads(capsys.readouterr().out)[key]) == 2
        with pytest.raises(SystemExit):
            main(command)
        assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 60, 74, 120])
def test_tables_of_caches_fit_a_terminal_without_losing_a_number(
    tiny: tuple[Path, Path, list[int]], width: int
) -> None:
    container, path, _ = tiny
    found = simulate(path, container, ram=[80 << 20], expert_cache=[3 << 20], disk=2e9, compute=0)
    out = io.StringIO()
    found.render(Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith("400 tokens"))
    for result in found.results:
        for rate in result.hit_rates.values():
            assert f"{rate:.1%}" in out.getvalue()
    assert "…" not in out.getvalue()
    assert sum(bool(re.search(r"^ .*iB .*% +[\d.]+%$", line)) for line in lines) == len(found.curve)


def test_speeds_and_counts_are_shown_as_people_write_them() -> None:
    speeds = (0.8537, 31.42, 999.4, 999.6, 3321.4)
    assert [*map(format_speed, speeds)] == ["0.854", "31.4", "999", "1,000", "3,321"]
    assert counted(1, "token") == "1 token"
    assert [counted(n, "token") for n in (0, 2)] == ["0 tokens", "2 tokens"]
    assert counted(14_600, "token", shown="14.6 K") == "14.6 K tokens"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("3.5GB/s", 3.5e9), ("800M", 8e8), ("2GiB/s", 2.0**31), ("1000", 1000), (".5k/s", 500)],
)
def test_rates_are_decimal_as_drives_are_sold(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "0", "-1GB/s", "3,5GB/s", "1GB/m", "1e999"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        parse_rate(text)
