"""Routing profiles: the file, merging, statistics, orders, and replay."""

from __future__ import annotations

import io
import json
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_tools.errors import FormatError, UsageError
from colibri_tools.profile.exchange import (
    Shape,
    profile_from_counts,
    read_trace_csv,
    read_usage,
    write_trace_csv,
    write_usage,
)
from colibri_tools.profile.file import (
    HALVES,
    N_REUSE_BINS,
    RoutingProfile,
    TextRecord,
    Trace,
    is_profile,
    load_profile,
    merge_profiles,
    save_profile,
    to_bytes,
)
from colibri_tools.profile.orders import ORDERS, order_blocks
from colibri_tools.profile.replay import lru_curve, replay, requests_of
from colibri_tools.profile.stats import (
    COVERAGE_POINTS,
    coverage_curve,
    domain_distances,
    effective_experts,
    gini,
    held_out,
    knee,
    row_stats,
    stability,
)

TOP_K, LAYERS, N_EXPERTS = 2, (0, 2, 3), (6, 4, 6)


def make_profile(
    seed: int = 0, domains: tuple[str, ...] = ("code", "prose"), n: int = 40
) -> RoutingProfile:
    """Return a profile of random choices, skewed towards low ids, with its trace."""
    rng = np.random.default_rng(seed)
    r, e = len(LAYERS), max(N_EXPERTS)
    selections = np.zeros((len(domains), 2, HALVES, r, e), np.uint64)
    tokens = np.zeros((len(domains), 2, HALVES), np.uint64)
    together = np.zeros((r, e, e), np.uint64)
    transitions = np.zeros((r - 1, e, e), np.uint64)
    experts = np.zeros((n, r, TOP_K), np.uint16)
    domain = rng.integers(0, len(domains), n).astype(np.uint16)
    phase = rng.integers(0, 2, n).astype(np.uint8)
    for t in range(n):
        half = t // 8 % 2
        tokens[domain[t], phase[t], half] += 1
        for row, n_row in enumerate(N_EXPERTS):
            weight = 1 / np.arange(1, n_row + 1)
            chosen = rng.choice(n_row, TOP_K, replace=False, p=weight / weight.sum())
            experts[t, row] = chosen
            selections[domain[t], phase[t], half, row, chosen] += 1
            together[row, chosen[0], chosen[1]] += 1
            together[row, chosen[1], chosen[0]] += 1
        for row in range(r - 1):
            for a in experts[t, row]:
                transitions[row, a, experts[t, row + 1]] += 1
    start = np.zeros(n, np.bool_)
    start[0] = True
    return RoutingProfile(
        fingerprint="ab" * 32,
        family="qwen3_moe",
        top_k=TOP_K,
        layers=LAYERS,
        n_experts=N_EXPERTS,
        domains=domains,
        texts=(TextRecord(domains[0], "a.txt", "00" * 32, 100, n),),
        selections=selections,
        gate_mass=selections / 2.0,
        tokens=tokens,
        coselection=together,
        transitions=transitions,
        reuse=np.ones((r, N_REUSE_BINS), np.uint64),
        early=np.array([[0, 0], [10, 7], [10, 8]], np.uint64),
        inputs={"gate": rng.random((r, e, 8)), "down": rng.random((r, e, 4))},
        trace=Trace(experts, rng.random((n, r, TOP_K), np.float32), domain, phase, start),
        made_by="colibri-tools test",
        precision="fast",
    )


def assert_same(a: RoutingProfile, b: RoutingProfile) -> None:
    assert replace(a, **none(a)) == replace(b, **none(b))
    assert a.arrays().keys() == b.arrays().keys()
    for name, array in a.arrays().items():
        assert np.array_equal(array, b.arrays()[name]), name


def none(p: RoutingProfile) -> dict[str, Any]:
    names = ("selections", "gate_mass", "tokens", "coselection", "transitions", "reuse", "early")
    return dict.fromkeys(names) | {"inputs": {}, "trace": None}


# --- the file -------------------------------------------------------------------------------------


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile, path = make_profile(), tmp_path / "p.colibri-profile"
    save_profile(profile, path)
    assert is_profile(path)
    assert_same(load_profile(path), profile)
    assert to_bytes(profile) == path.read_bytes() == to_bytes(load_profile(path))
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        save_profile(make_profile(), path)
    assert path.read_text() == "mine"
    save_profile(make_profile(), path, force=True)
    assert is_profile(path)


def rewrite(path: Path, changes: dict[str, bytes | None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, data in changes.items():
        if data is None:
            del members[name]
        else:
            members[name] = data
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array))
    return out.getvalue()


def meta_of(path: Path, **changes: Any) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return json.dumps(json.loads(archive.read("meta.json")) | changes).encode()


def huge_header() -> bytes:
    data = npy(np.zeros(3, np.uint64))
    return data.replace(b"(3,)", b"(9" + b"9" * 12 + b",)")[: len(data)]


BROKEN = {
    "not a zip": lambda p: b"hello",
    "no meta": {"meta.json": None},
    "no table": {"tokens.npy": None},
    "other table": {"surprise.npy": npy(np.zeros(2))},
    "pickle": {"tokens.npy": npy(np.array([[[1]]], np.uint64)).replace(b"<u8", b"|O ")},
    "wrong type": {"tokens.npy": npy(np.zeros((2, 2, 2), np.int32))},
    "wrong shape": {"reuse.npy": npy(np.zeros((3, 2), np.uint64))},
    "bomb": {"reuse.npy": huge_header()},
    "cut": {"reuse.npy": npy(np.zeros((3, N_REUSE_BINS), np.uint64))[:-9]},
    "totals": {"tokens.npy": npy(np.zeros((2, 2, 2), np.uint64))},
    "nan": {"gate_mass.npy": npy(np.full((2, 2, 2, 3, 6), np.nan))},
    "trace": {"trace.experts.npy": npy(np.full((40, 3, 2), 7, np.uint16))},
    "half a trace": {"trace.start.npy": None},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "p"
    save_profile(make_profile(), path)
    change = BROKEN[name]
    if callable(change):
        path.write_bytes(change(path))
    else:
        rewrite(path, change)
    with pytest.raises(FormatError) as caught:
        load_profile(path)
    assert str(path) in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"format": "x"},
        {"top_k": 7},
        {"layers": [0]},
        {"n_experts": "6"},
        {"top_k": 0},
        {"precision": "bf16"},
        {"precision": 1},
        {"precision": ["fast"]},
    ],
)
def test_broken_documents_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "p"
    save_profile(make_profile(), path)
    rewrite(path, {"meta.json": meta_of(path, **changes)})
    with pytest.raises(FormatError):
        load_profile(path)


# --- merging --------------------------------------------------------------------------------------


def test_merging_is_addition() -> None:
    a, b = make_profile(0), make_profile(1, ("prose", "maths"))
    merged, notes = merge_profiles([a, b])
    assert merged.domains == ("code", "prose", "maths") and not notes
    assert np.array_equal(merged.counts(), a.counts() + b.counts())
    prose = a.counts(domain=1) + b.counts(domain=0)
    assert np.array_equal(merged.counts(domain=1), prose)
    assert merged.trace is not None and len(merged.trace.experts) == 80
    assert {merged.domains[d] for d in merged.trace.domain[40:]} == {"prose", "maths"}
    assert len(merged.texts) == 2
    assert np.allclose(merged.inputs["gate"], a.inputs["gate"] + b.inputs["gate"])
    assert merged.precision == "fast"
    assert not merge_profiles([a, replace(b, precision="exact")])[0].precision


def test_merging_says_what_it_cannot_keep() -> None:
    a, b = make_profile(0), replace(make_profile(1), trace=None, inputs={})
    merged, notes = merge_profiles([a, b])
    assert merged.trace is None and not merged.inputs
    assert ["trace" in notes[0], "importance" in notes[1]] == [True, True]


def test_profiles_of_different_models_do_not_merge() -> None:
    with pytest.raises(UsageError, match="different models"):
        merge_profiles([make_profile(), replace(make_profile(), fingerprint="cd" * 32)])


# --- statistics -----------------------------------------------------------------------------------

MASK = np.ones((1, 4), bool)


def test_concentration_of_known_distributions() -> None:
    equal, single = np.full((1, 4), 5), np.array([[0, 0, 9, 0]])
    assert effective_experts(equal, MASK)[0] == pytest.approx(4)
    assert effective_experts(single, MASK)[0] == pytest.approx(1)
    assert gini(equal, MASK)[0] == pytest.approx(0)
    assert gini(single, MASK)[0] == pytest.approx(3 / 4)


def test_gini_is_the_mean_difference_over_twice_the_mean() -> None:
    counts = np.random.default_rng(0).integers(0, 50, (3, 9))
    for row, found in zip(counts, gini(counts, np.ones((3, 9), bool)), strict=True):
        differences = np.abs(row[:, None] - row[None]).mean()
        assert found == pytest.approx(differences / (2 * row.mean()))


def test_coverage_takes_the_hottest_first() -> None:
    counts = np.array([[1, 6], [3, 0]])
    mask = np.array([[True, True], [True, False]])
    assert coverage_curve(counts, mask).tolist() == pytest.approx([0, 0.6, 0.9, 1])
    other = np.array([[5, 1], [9, 0]])
    assert coverage_curve(counts, mask, other).tolist() == pytest.approx([0, 0.3, 0.4, 1])
    assert knee(coverage_curve(counts, mask)) == pytest.approx(1 / 3)
    assert knee(np.linspace(0, 1, 9)) == 0


def test_distances_of_domains() -> None:
    profile = make_profile()
    distances = domain_distances(profile)
    assert distances.shape == (2, 2) and distances[0, 0] == 0 and 0 < distances[0, 1] < 1
    apart = profile.selections.copy()
    apart[0, :, :, :, 3:] = 0
    apart[1, :, :, :, :3] = 0
    assert domain_distances(replace(profile, selections=apart))[0, 1] == pytest.approx(1)
    same = profile.selections.copy()
    same[1] = same[0]
    assert domain_distances(replace(profile, selections=same))[0, 1] == pytest.approx(0)


def test_held_out_coverage_is_never_above_in_sample() -> None:
    results = held_out(make_profile())
    assert [r.name for r in results] == ["half 1", "half 2", "code", "prose"]
    for result in results:
        assert all(a >= b - 1e-12 for a, b in zip(result.in_sample, result.held_out, strict=True))
    assert any(r.in_sample != r.held_out for r in results)


def test_rows_and_stability() -> None:
    profile = make_profile()
    rows = row_stats(profile)
    assert [row.layer for row in rows] == list(LAYERS)
    assert all(row.selections == 40 * TOP_K for row in rows)
    quiet = profile.selections.copy()
    quiet[..., 1, 3] = 0
    assert row_stats(replace(profile, selections=quiet))[1].never == (3,)
    found = stability(profile)
    assert found is not None and 0 <= found <= 1
    quiet[:, :, 1] = 0
    assert stability(replace(profile, selections=quiet)) is None


def test_case_11_6_each_layer_has_its_own_coverage() -> None:
    """One layer of a hot expert, one without a hot set."""
    p = make_profile()
    counts = np.zeros_like(p.counts())
    counts[0, :6], counts[1, :4], counts[2, :6] = [90, 2, 2, 2, 2, 2], 25, 1
    rows = row_stats(p, counts)
    half = COVERAGE_POINTS.index(0.5)
    assert [row.coverage[half] for row in rows] == pytest.approx([0.94, 0.5, 0.5])
    assert rows[0].coverage[0] == pytest.approx(0.05 * 6 * 0.9)


# --- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_orders_name_every_block_once(name: str) -> None:
    order = order_blocks(name, N_EXPERTS, make_profile())
    assert sorted(order) == [(r, e) for r, n in enumerate(N_EXPERTS) for e in range(n)]


def test_hot_orders_break_ties_by_row_and_id() -> None:
    shape = Shape("", "x", 2, (0, 1), (4, 4))
    counts = np.array([[3, 5, 5, 3], [5, 3, 3, 5]], np.uint64)
    profile = profile_from_counts(counts, shape, "all", "test")
    hot = order_blocks("hotness", (4, 4), profile)
    assert hot == [(0, 1), (0, 2), (1, 0), (1, 3), (0, 0), (0, 3), (1, 1), (1, 2)]
    by_layer = order_blocks("layer-hotness", (4, 4), profile)
    assert by_layer == [(0, 1), (0, 2), (0, 0), (0, 3), (1, 0), (1, 3), (1, 1), (1, 2)]


def test_coactivation_follows_the_strongest_pair() -> None:
    profile = make_profile()
    together = np.zeros_like(profile.coselection)
    for a, b, n in ((0, 3, 9), (3, 2, 8), (2, 5, 7), (5, 1, 6), (1, 4, 5)):
        together[0, a, b] = together[0, b, a] = n
    counts = profile.selections.copy()
    order = order_blocks(
        "coactivation", N_EXPERTS, replace(profile, coselection=together, selections=counts)
    )
    chain = [e for row, e in order if row == 0]
    hottest = int(profile.counts()[0].argmax())
    assert chain[0] == hottest
    if hottest == 0:
        assert chain == [0, 3, 2, 5, 1, 4]


def test_orders_want_a_profile_of_this_model() -> None:
    with pytest.raises(UsageError, match="--routing"):
        order_blocks("hotness", N_EXPERTS, None)
    with pytest.raises(UsageError, match="experts in its rows"):
        order_blocks("hotness", (6, 6, 6), make_profile())
    assert order_blocks("id", (2, 1), None) == [(0, 0), (0, 1), (1, 0)]


# --- other tools' forms ---------------------------------------------------------------------------

SHAPE = Shape("ab" * 32, "qwen3_moe", TOP_K, LAYERS, N_EXPERTS)


def test_usage_text_carries_the_counts(tmp_path: Path) -> None:
    profile, path = make_profile(), tmp_path / "usage.txt"
    with path.open("w") as out:
        write_usage(profile, out)
    assert np.array_equal(read_usage(path, SHAPE, "all").counts(), profile.counts())
    assert path.read_text().splitlines()[0].split()[:2] == ["0", "0"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("0 9 1", "expert 9"),
        ("1 0 1", "no MoE layer"),
        ("0 0", "expected"),
        ("0 0 1\n0 0 2", "twice"),
        ("0 0 -1", "expected"),
        ("0 0 3", "same number"),
    ],
)
def test_usage_text_that_does_not_fit_is_refused(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "usage.txt"
    path.write_text(f"# a comment\n{line}\n")
    with pytest.raises(FormatError, match=what):
        read_usage(path, SHAPE, "all")


def test_traces_as_csv_come_back(tmp_path: Path) -> None:
    profile, path = make_profile(), tmp_path / "trace.csv"
    assert profile.trace is not None
    with path.open("w") as out:
        write_trace_csv(profile, out)
    trace = read_trace_csv(path, SHAPE)
    assert np.array_equal(trace.experts, profile.trace.experts)
    assert np.array_equal(trace.weights, profile.trace.weights)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]))
    with pytest.raises(FormatError, match="in order"):
        read_trace_csv(path, SHAPE)


# --- replay ---------------------------------------------------------------------------------------


def naive(policy: str, requests: Any, capacity: int) -> int:
    """The same caches, one rule at a time, for small cases."""
    cache: list[int] = []
    uses: Counter[int] = Counter()
    last: dict[int, int] = {}
    hits = time = 0
    flat = requests.reshape(-1).tolist()
    for i, request in enumerate(requests.tolist()):
        before = list(cache)
        hits += sum(block in before for block in request)
        # As the engine does, and as the LRU here: what is there is used before what is read.
        first = sorted(request, key=lambda b: b not in before) if policy == "lru" else request
        for block in first:
            time += 1
            uses[block] += 1
            last[block] = time
            if block not in cache:
                cache.append(block)
        rest = flat[(i + 1) * len(request) :]
        while len(cache) > capacity:
            if policy == "belady":
                key = {b: rest.index(b) if b in rest else len(flat) + b for b in cache}
                cache.remove(max(cache, key=lambda b: key[b]))
            else:
                free = [b for b in cache if b not in request] or cache
                rule = (lambda b: last[b]) if policy == "lru" else (lambda b: (uses[b], last[b]))
                cache.remove(min(free, key=rule))
    return hits


@pytest.mark.parametrize("policy", ["lru", "lfu", "belady"])
@pytest.mark.parametrize("capacity", [2, 3, 5, 8, 16])
def test_replay_equals_a_naive_cache(policy: str, capacity: int) -> None:
    trace = make_profile(3, n=60).trace
    assert trace is not None
    requests = requests_of(trace.experts, N_EXPERTS)
    counts = np.bincount(requests.reshape(-1), minlength=16)
    expected = naive(policy, requests, capacity) / requests.size
    assert replay(policy, requests, capacity, counts) == pytest.approx(expected)


def test_no_policy_beats_belady_and_everything_fits_in_the_end() -> None:
    trace = make_profile(4, n=80).trace
    assert trace is not None
    requests = requests_of(trace.experts, N_EXPERTS)
    counts = np.bincount(requests.reshape(-1), minlength=16)
    for capacity in range(2, 17):
        best = replay("belady", requests, capacity, counts)
        for policy in ("lru", "lfu"):
            assert replay(policy, requests, capacity, counts) <= best + 1e-12
    assert replay("lru", requests, 16, counts) == 1 - len(set(requests.flat)) / requests.size
    assert replay("static", requests, 16, counts) == 1


def test_lru_falls_to_nothing_below_the_working_set() -> None:
    cycle = np.tile(np.arange(12).reshape(6, 2), (20, 1))  # six rows, always the same experts
    curve = lru_curve(cycle, 12)
    assert curve[11] == 0 and curve[12] == pytest.approx(1 - 12 / cycle.size)
    counts = np.full(12, 20)
    assert replay("lru", cycle, 10, counts) == 0
    assert replay("belady", cycle, 10, counts) > 0.7


def test_the_lru_curve_is_replay_for_single_requests() -> None:
    rng = np.random.default_rng(0)
    requests = rng.zipf(1.5, (500, 1)).clip(1, 20) - 1
    curve = lru_curve(requests, 20)
    for capacity in (1, 2, 5, 13, 20):
        assert replay("lru", requests, capacity, None) == pytest.approx(curve[capacity])
