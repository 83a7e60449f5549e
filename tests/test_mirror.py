"""export and run --mirror: some blocks once more on another drive, or not there after all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import EXPERTS, make_model
from test_profiling import profile, prompts_of, run

import colibri_tools
from colibri_tools.cli import main
from colibri_tools.engine import Engine, estimate
from colibri_tools.errors import ColibriError, JobError, UsageError
from colibri_tools.export import export
from colibri_tools.profile.file import load_profile
from colibri_tools.profile.stats import hottest_first
from colibri_tools.respec import respec
from colibri_tools.rewrite import reorder
from colibri_tools.verify import verify

N_BLOCKS = 3 * EXPERTS
PROMPT = prompts_of([40], seed=8)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its profile, and its hottest 40 %."""
    folder = tmp_path_factory.mktemp("mirror")
    model = make_model(folder / "model.colibri")
    profile(model, folder, prompts_of([60, 80]))
    export(model, folder / "hot.part", share=0.4, routing=folder / "p.profile")
    return folder


def decode(model: Path, **options: Any) -> tuple[np.ndarray, Any]:
    """Logits of the prompt, token after token with a cache of a few blocks, and the counters."""
    memory = estimate(model)
    cache = max(memory.min_cache_bytes, memory.all_experts_bytes // 6)
    with Engine(model, threads=1, expert_cache=cache, ctx=64, **options) as engine:
        rows = [engine.eval([token])[-1] for token in PROMPT]
        return np.array(rows), engine.stats()


def test_the_part_has_the_hottest_blocks_and_is_a_sound_container(folder: Path) -> None:
    p = load_profile(folder / "p.profile")
    expected = hottest_first(p.counts(), p.mask())[: round(0.4 * N_BLOCKS)].tolist()
    assert verify(folder / "hot.part").ok
    whole, part = (colibri_tools.open(folder / n) for n in ("model.colibri", "hot.part"))
    with whole, part:
        named = iter(part.spec["part.experts"])
        found = {}
        for row, its in enumerate(part.rows):
            for column in range(its.n_experts):
                expert = next(named)
                assert bytes(part.block(row, column)) == bytes(whole.block(its.layer, expert))
                found[int(part.cell(row, column)["rank"])] = [its.layer, expert]
        assert [found[rank] for rank in range(len(found))] == expected
        assert not part.tensors and not part.spec["executable"]
        assert part.spec["part.of"] == whole.id


def test_sizes_choose_as_many_blocks_as_they_hold(folder: Path, tmp_path: Path) -> None:
    block = 3 * 40 * 64 * 4  # a multiple of 4096 less than this is not one
    padded = -(-block // 4096) * 4096
    options = {"routing": folder / "p.profile"}
    export(folder / "model.colibri", tmp_path / "a", n_bytes=5 * padded + 1, **options)
    with colibri_tools.open(tmp_path / "a") as part:
        assert part.n_blocks == 5
    with pytest.raises(UsageError, match="hold no block"):
        export(folder / "model.colibri", tmp_path / "b", n_bytes=padded - 1, **options)


@pytest.mark.parametrize("io", ["pread", "io_uring", "buffered"])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_blocks_of_the_mirror_are_read_from_it(
    folder: Path, tmp_path: Path, io: str, share: float
) -> None:
    model, part = folder / "model.colibri", tmp_path / "part"
    export(model, part, share=share, routing=folder / "p.profile")
    expected, alone = decode(model, io=io)
    for options in ({}, {"preload": 1 << 20}, {"prefetch_depth": 2}):
        found, stats = decode(model, io=io, mirror=part, **options)
        assert np.array_equal(found, expected)
        assert stats.mirror_failures == 0
        if options == {}:
            assert stats.bytes_read == alone.bytes_read
        if share == 1:
            assert stats.mirror_bytes == stats.bytes_read > 0
        else:
            assert 0 < stats.mirror_bytes < stats.bytes_read
    assert alone.mirror_bytes == 0


def test_any_container_of_the_same_blocks_serves(folder: Path, tmp_path: Path) -> None:
    """In another order and with other metadata: the blocks decide."""
    model, other = folder / "model.colibri", tmp_path / "other.colibri"
    reorder(model, other, routing=folder / "p.profile")
    expected, _ = decode(model)
    for main_file, mirror in ((model, other), (other, folder / "hot.part")):
        found, stats = decode(main_file, mirror=mirror)
        assert np.array_equal(found, expected)
        assert stats.mirror_bytes > 0 and stats.mirror_failures == 0


def damaged(part: Path, out: Path, n_blocks: int) -> Path:
    """A copy of the part with a wrong byte in each of the first blocks of the file."""
    data = bytearray(part.read_bytes())
    with colibri_tools.open(part) as container:
        for offset in sorted(container.index["offset"][container.index["flags"] == 1])[:n_blocks]:
            data[int(offset) + 100] ^= 1
    out.write_bytes(data)
    return out


@pytest.mark.parametrize("options", [{}, {"preload": 1 << 20}, {"io": "io_uring"}])
def test_damaged_blocks_are_read_from_the_container(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    part = damaged(folder / "hot.part", tmp_path / "part", 3)
    expected, _ = decode(folder / "model.colibri")
    found, stats = decode(folder / "model.colibri", mirror=part, **options)
    assert np.array_equal(found, expected)
    assert stats.mirror_failures == 3 and stats.mirror_bytes > 0
    assert stats.io_reason.count("CRC-32C") == 1
    assert "blocks of the mirror are read from the container instead" in stats.io_reason


def test_a_mirror_that_is_cut_under_a_running_model_is_done_without(
    folder: Path, tmp_path: Path
) -> None:
    model, part = folder / "model.colibri", tmp_path / "part"
    part.write_bytes((folder / "hot.part").read_bytes())
    expected, _ = decode(model)
    cache = estimate(model).min_cache_bytes
    with Engine(model, threads=1, expert_cache=cache, ctx=64, mirror=part) as engine:
        rows = []
        for i, token in enumerate(PROMPT):
            if i == 5:
                os.truncate(part, 4096)
            rows.append(engine.eval([token])[-1])
        stats = engine.stats()
    assert np.array_equal(np.array(rows), expected)
    assert stats.mirror_failures > 0 and "No data available" in stats.io_reason


def test_what_is_damaged_in_both_ends_the_run(folder: Path, tmp_path: Path) -> None:
    model, part = tmp_path / "model.colibri", damaged(folder / "hot.part", tmp_path / "part", 9)
    model.write_bytes(damaged(folder / "model.colibri", tmp_path / "m", N_BLOCKS).read_bytes())
    with pytest.raises(JobError, match="the container is damaged"):
        decode(model, mirror=part)


def test_run_says_once_what_the_mirror_lacked(folder: Path, tmp_path: Path, capsys: Any) -> None:
    part = damaged(folder / "hot.part", tmp_path / "part", 3)
    ids = ",".join(map(str, PROMPT))
    command = ["run", folder / "model.colibri", "--tokens", ids, "--max-tokens", "5"]
    plain = run(capsys, *command, "--json")
    document = run(capsys, *command, "--mirror", part, "--json")
    assert document["tokens"] == plain["tokens"] and plain["warnings"] == []
    assert len(document["warnings"]) == 1 and "mirror" in document["warnings"][0]
    with pytest.raises(SystemExit):
        main([str(a) for a in (*command, "--mirror", part)])
    assert capsys.readouterr().err.count("warning:") == 1


def test_mirrors_that_cannot_serve_are_refused(folder: Path, tmp_path: Path) -> None:
    model = folder / "model.colibri"
    other = make_model(tmp_path / "other.colibri", seed=3)
    for mirror, message in (
        (other, r"mirror .*layer 0, expert 0: it is not the block of this container"),
        (tmp_path / "none", "mirror .*does not exist"),
        (folder / "p.profile", "this is not a container"),
    ):
        with pytest.raises(ColibriError, match=message):
            Engine(model, mirror=mirror)
    with pytest.raises(ColibriError, match="mapped; choose another way"):
        Engine(model, mirror=folder / "hot.part", io="mmap")


def test_the_plan_counts_the_metadata_of_a_mirror(folder: Path) -> None:
    model, part = folder / "model.colibri", folder / "hot.part"
    with colibri_tools.open(part) as container:
        extra = container.data_offset
    assert estimate(model, mirror=part).metadata_bytes == estimate(model).metadata_bytes + extra


def test_parts_refuse_what_needs_a_whole_container(folder: Path, tmp_path: Path) -> None:
    part = folder / "hot.part"
    with pytest.raises(ColibriError, match="it is a part of a container"):
        Engine(part)
    with pytest.raises(UsageError, match="is a part itself"):
        export(part, tmp_path / "x", share=0.5)
    with pytest.raises(UsageError, match="in the order id, which does not say"):
        export(folder / "model.colibri", tmp_path / "x", share=0.5)
    with pytest.raises(ColibriError):
        respec(part)
    assert list(tmp_path.iterdir()) == []


def test_a_container_in_the_order_of_hotness_needs_no_profile(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    hot, part = tmp_path / "hot.colibri", tmp_path / "part"
    reorder(folder / "model.colibri", hot, routing=folder / "p.profile")
    run(capsys, "export", hot, "--hottest", "40%", "-o", part, "--json")
    with colibri_tools.open(part) as a, colibri_tools.open(folder / "hot.part") as b:
        assert a.spec["part.experts"] == b.spec["part.experts"]
    for wrong in ("0%", "101%", "x%", "many"):
        with pytest.raises(SystemExit) as done:
            main(["export", str(hot), "--hottest", wrong, "-o", str(tmp_path / "y"), "--json"])
        assert done.value.code == 2
        assert json.loads(capsys.readouterr().out)["ok"] is False
