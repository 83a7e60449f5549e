"""The whole engine under sanitizers, at work: AddressSanitizer with UndefinedBehaviorSanitizer, and
ThreadSanitizer.

`c/test_engine.c` evaluates under one setting after another; logits must be those of the plainest
setting besides. A few settings in every test run; `make sanitize` takes many.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import row_models as rm
import tiny_models as tm
from c_programs import RUN_TOOLS, TEST_C, Library, Program, under_valgrind
from combinations import SETTINGS, Combination, make_files, sample
from engine_models import WIDTH, make_model
from tiny_containers import Containers

from colibri_tools.engine import IO_MODES, KV_TYPES, PRECISIONS, estimate
from colibri_tools.repack import repack

ROOT = Path(__file__).parent.parent
N_COMBINATIONS = int(os.environ.get("COLIBRI_TEST_COMBINATIONS", "4"))
THOROUGH = N_COMBINATIONS > 30
WRAP = ["-Wl,--wrap=pread,--wrap=preadv,--wrap=madvise"]
KINDS = ["asan", "tsan"]
IOS = SETTINGS["io"]
FAMILIES = ["deepseek_v3", "gpt_oss", "llama4", "phimoe"]
if THOROUGH:
    FAMILIES = sorted({*rm.RECIPES, *tm.ALL_FAMILIES})


@dataclass(frozen=True)
class Programs:
    engine: Program
    run: Program


@pytest.fixture(scope="module", params=KINDS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """tests/c/test_engine.c and colibri-run with all of libcolibri, built with a sanitizer."""
    if under_valgrind():
        pytest.skip("sanitizers do not run under valgrind")
    library: Library = request.getfixturevalue(f"{request.param}_library")
    if not library.flags:
        pytest.skip(f"{request.param} does not run here")
    folder = tmp_path_factory.mktemp(request.param)
    sources = [TEST_C / "test_engine.c", *library.objects]
    engine = Program(folder / "test_engine", sources, [*library.flags, *WRAP])
    run = Program(folder / "colibri-run", [*RUN_TOOLS, *library.objects], library.flags)
    return Programs(engine, run)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files(tmp_path_factory.mktemp("files"))


# ---------------------------------------------------------------- jobs of test_engine


def line(model: Path, **values: Any) -> str:
    """One job; names of settings become the numbers of the header."""
    for name, words in (("precision", PRECISIONS), ("io", IO_MODES)):
        if name in values:
            values[name] = words.index(values[name])
    if "kv" in values:
        values["kv"] = 1 + KV_TYPES.index(values["kv"])
    return " ".join([f"model={model}", *(f"{name}={value}" for name, value in values.items())])


@dataclass(frozen=True)
class Outcome:
    hashes: list[str]
    failed: int
    cancelled: int
    backend: str


def outcomes(program: Program, lines: list[str]) -> list[Outcome]:
    """What each of these jobs printed."""
    found = []
    for start in range(0, len(lines), 8):  # no process is so long that it needs patience
        some = lines[start : start + 8]
        for job, text in zip(some, program(stdin="\n".join(some)).splitlines(), strict=True):
            said = re.fullmatch(r"ok ([0-9a-f ]+) failed (\d+) cancelled (\d+) by (\w+)", text)
            assert said, (job, text)
            failed, cancelled = int(said[2]), int(said[3])
            found.append(Outcome(said[1].split(), failed, cancelled, said[4]))
    return found


def alone(program: Program, model: Path, n_sequences: int, **values: Any) -> list[str]:
    """Hashes of the sequences, each evaluated by itself in the plainest way."""
    lines = [line(model, first=s, **values) for s in range(n_sequences)]
    return [outcome.hashes[0] for outcome in outcomes(program, lines)]


def check_jobs(program: Program, model: Path, jobs: list[dict[str, Any]]) -> list[Outcome]:
    """Evaluate; every job must give the bits of its sequences alone."""
    found = outcomes(program, [line(job.pop("file", model), **job) for job in jobs])
    same = ("precision", "kv", "tokens")
    expected: dict[tuple[Any, ...], list[str]] = {}
    for job, outcome in zip(jobs, found, strict=True):
        plain = {name: job[name] for name in same if name in job}
        key = tuple(plain.items())
        n = job.get("sequences", 1)
        if len(expected.get(key, [])) < n:
            expected[key] = alone(program, model, n, **plain)
        assert outcome.hashes == expected[key][:n], job
        if "io" in job:
            assert outcome.backend == {"buffered": "pread"}.get(job["io"], job["io"])
    return found


def job_of(c: Combination, files: dict[str, Path], number: int) -> dict[str, Any]:
    """A job of the combination, recorded in each second one, cancelled in each third."""
    block = estimate(files["id"]).min_cache_bytes // 2
    values = {
        "file": files[c.order],
        "precision": c.precision,
        "kv": c.kv_type,
        "io": c.io,
        "io_threads": c.io_threads,
        "threads": c.threads,
        "cache": c.cache_blocks * block,
        "prefetch": c.prefetch_depth,
        "preload": c.preload,
        "batch": c.batch_size,
        "sequences": c.sequences,
        "split": ("whole", "pieces", "tokens").index(c.split),
        "check": ("first", "always").index(c.check),
        "seed": number,
        "tokens": 40,
        "observe": WIDTH * (number % 2),
        "cancel": int(number % 3 == 0),
    }
    return values | ({"mirror": files[c.mirror]} if c.mirror else {})


def test_combinations_of_settings(programs: Programs, files: dict[str, Path]) -> None:
    chosen = sample(4, max(N_COMBINATIONS - 30, 0))[:N_COMBINATIONS]
    jobs = [job_of(c, files, number) for number, c in enumerate(chosen)]
    found = check_jobs(programs.engine, files["id"], jobs)
    assert sum(outcome.cancelled for outcome in found) > 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 1.9 MiB, read in two pieces, and others of half of that."""
    path = tmp_path_factory.mktemp("large") / "model.colibri"
    return make_model(path, n_layers=2, hidden_size=4096, expert_dtypes=("f32", "bf16"))


def test_reads_in_pieces(programs: Programs, large: Path) -> None:
    block = estimate(large).min_cache_bytes // 2
    base = {"tokens": 6, "threads": 2, "batch": 4}
    jobs: list[dict[str, Any]] = [
        {**base, "io": io, "cache": n * block, "prefetch": depth, "split": split}
        for i, io in enumerate(IOS)
        for n, depth, split in ((2, 2, 0), (7, 1, 2))[:: 1 if THOROUGH or i == 0 else 2]
    ]
    check_jobs(programs.engine, large, jobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(programs: Programs, containers: Containers, family: str) -> None:
    model = containers.hf(family)
    least = estimate(model).min_cache_bytes
    base = {"tokens": 24, "sequences": 2}
    jobs: list[dict[str, Any]] = [
        {**base, "threads": 2, "io": "io_uring", "cache": least, "prefetch": 2, "batch": 5},
        {**base, "threads": 3, "precision": "fast", "split": 1, "prefetch": 1, "cache": least},
        {**base, "threads": 2, "kv": "f16", "split": 2, "io": "mmap", "cancel": 1},
    ]
    check_jobs(programs.engine, model, jobs)


@pytest.mark.parametrize("io", ["pread", "mmap", "buffered"])
def test_failing_reads(programs: Programs, files: dict[str, Path], io: str) -> None:
    """Errors, short and interrupted reads: evaluated again, with the same bits."""
    least = estimate(files["id"]).min_cache_bytes
    base = {"io": io, "threads": 2, "prefetch": 2, "batch": 7, "sequences": 2}
    jobs = [
        {**base, "cache": size * least, "fault": fault, "cancel": int(fault == 1)}
        for size in (1, 4)
        for fault in (1, 2, 3)
    ]
    found = check_jobs(programs.engine, files["id"], jobs)
    assert [outcome.failed > 0 for outcome in found] == [True, False, False] * 2


# ---------------------------------------------------------------- colibri-run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "tiny-moe.colibri"
    repack(ROOT / "fixtures" / "tiny-moe", path)
    return path


def test_a_run_with_everything(programs: Programs, trained: Path, tmp_path: Path) -> None:
    shown = []
    for io in IOS if THOROUGH else ("pread", "io_uring"):
        how = ["--io", io, "--threads", "2", "--prefetch-depth", "2", "--profile", "--json"]
        how += ["--ram-budget", "24M", "--logits", str(tmp_path / f"{io}.npy")]
        text = programs.run(trained, "--prompt", "The engine", "--max-tokens", 6, *how)
        shown.append(json.loads(text))
        assert shown[-1]["profile"]["drive"]
    assert len({str(document["tokens"]) for document in shown}) == 1
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    sampled = ["--temperature", "0.8", "--top-k", "20", "--seed", "3", "--preload", "8M"]
    programs.run(trained, "--prompt", "The engine", "--max-tokens", 6, *sampled)


def test_a_run_is_interrupted(programs: Programs, trained: Path) -> None:
    how = ["--tokens", "1,2", "--max-tokens", "400", "--ignore-eos", "--prefetch-depth", "1"]
    call = [str(programs.run.path), str(trained), *how, "--ram-budget", "24M"]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, stdout=pipe, stderr=pipe, bufsize=0) as process:
        assert process.stdout is not None
        process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        _, report = process.communicate(timeout=100)
    assert process.returncode == 130, report.decode()[-4000:]
    assert "stopped: interrupted" in report.decode()
