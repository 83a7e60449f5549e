"""simulate and plan: what a trace would have met in other caches, against runs that met it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import VOCAB, make_model

from colibri_tools.cli import main
from colibri_tools.engine import Engine
from colibri_tools.errors import FormatError, UsageError
from colibri_tools.output import parse_rate
from colibri_tools.plan import plan_memory
from colibri_tools.profile.file import RoutingProfile, load_profile
from colibri_tools.profile.profiling import profile_routing
from colibri_tools.profile.replay import replay, requests_of
from colibri_tools.profile.simulate import ComputeTime, engine_hits, simulate
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
    hits, misses, n_bytes = engine_hits(container, experts_of(path), range(N_ROWS), blocks * BLOCK)
    measured, measured_bytes = decode(container, ids, blocks * BLOCK)
    assert abs(hits / (hits + misses) - measured) <= 0.001
    assert n_bytes == misses * BLOCK
    assert abs(n_bytes - measured_bytes) <= 0.001 * len(ids) * TOKEN * BLOCK


def test_preloading_is_replayed_too(tiny: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    container, path, _ = tiny
    hot = tmp_path / "hot.colibri"
    reorder(container, hot, routing=path)
    experts, cache = experts_of(path)[:20], 24 * BLOCK
    cold, _, _ = engine_hits(hot, experts, range(N_ROWS), cache)
    warm, _, _ = engine_hits(hot, experts, range(N_ROWS), cache, preload=True)
    assert warm > cold


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
    # Experts are computed while others are read; the rest is not.
    time = ComputeTime(experts=0.2, other=0.1)
    assert time.token_seconds(0.05) == pytest.approx(0.3)
    assert time.token_seconds(0.5) == pytest.approx(0.6)


def test_long_traces_are_cut_and_said_to_be(tiny: tuple[Path, Path, list[int]]) -> None:
    container, path, _ = tiny
    result = simulate(
        path, container, expert_cache=[8 * BLOCK], disk=1e9, compute=0.0, max_choices=50 * TOKEN
    )
    assert (result.n_tokens, result.trace_tokens) == (50, 400)
    assert result.notes == ("the first 50 of 400 tokens of the trace are replayed",)


def test_what_cannot_be_simulated_is_refused(
    tiny: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    container, path, _ = tiny
    with pytest.raises(UsageError, match="give --ram or --expert-cache"):
        simulate(path, container)
    with pytest.raises(UsageError, match=r"expected at least 786432 bytes \(two blocks\)"):
        simulate(path, container, expert_cache=[1000])
    with pytest.raises(FormatError, match="expert is 16, expected less than 16"):
        engine_hits(container, np.full((1, 4, 2), 16, np.uint16), range(4), 8 * BLOCK)
    other = make_model(tmp_path / "other.colibri")
    with pytest.raises(UsageError, match="profile of another model"):
        simulate(path, other, expert_cache=[8 * BLOCK])
    ids = tmp_path / "ids"
    ids.write_text(",".join(str(i % VOCAB) for i in range(20)))
    profile_routing(other, tmp_path / "p", token_files=[("a", ids)])
    with pytest.raises(UsageError, match=r"no trace to replay; profile-routing --trace"):
        simulate(tmp_path / "p", other, expert_cache=[1 << 20])


def test_plans_split_budgets_and_use_what_is_known_of_routing(
    tiny: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    container, path, _ = tiny
    plain = plan_memory(container, [40 << 20, 80 << 20], disk=1e9)
    small, large = plain.budgets
    assert small.memory is not None and large.memory is not None
    assert small.memory.total_bytes <= 40 << 20
    assert small.hit_rate == small.memory.cache_bytes / small.memory.all_experts_bytes
    assert small.tokens_per_second == pytest.approx(
        1e9 / ((1 - small.hit_rate) * small.memory.token_bytes)
    )
    assert large.hit_rate == 1 and large.tokens_per_second is None
    replayed = plan_memory(container, [40 << 20], disk=1e9, routing=path).budgets[0]
    hits, misses, _ = engine_hits(
        container, experts_of(path), range(N_ROWS), small.memory.cache_bytes
    )
    assert replayed.hit_rate == hits / (hits + misses) > small.hit_rate
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
