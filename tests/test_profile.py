"""run --profile: parts, phases and layers add up, the drive, percentiles, narrow terminals;
and with it pinning, and Ctrl-C while a model is opened."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_models import make_model
from fault_util import CC
from rich.console import Console
from test_colibri_run import colibri_run, program

from colibri_tools.engine import Drive, Engine, probe_drive
from colibri_tools.errors import FormatError, UsageError
from colibri_tools.run import RunResult, run
from colibri_tools.run_report import percentile

PARTS = ("attention", "router", "experts", "io_wait", "head")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that the parts are more than the clock's steps; layer 1 is dense."""
    return make_model(
        tmp_path_factory.mktemp("profile") / "model.colibri",
        n_layers=4,
        hidden_size=512,
        moe_layers=[1, 0, 1, 1],
        dense_width=64,
    )


@pytest.fixture(scope="module")
def documents(model: Path) -> dict[str, dict[str, Any]]:
    """The same run by the program and by Python."""
    call = [model, "--tokens", "1,2,3,4,5", "--max-tokens", 40, "--expert-cache", "2M"]
    shown = colibri_run(*call, "--profile", "--json", "--ignore-eos")
    options = {"expert_cache": 2 << 20, "profile": True, "ignore_eos": True}
    result = run(model, tokens=[1, 2, 3, 4, 5], max_tokens=40, **options)
    python = json.loads(json.dumps(result.to_json(), allow_nan=False))
    return {"program": json.loads(shown.stdout), "python": python}


@pytest.fixture(params=["program", "python"])
def document(request: pytest.FixtureRequest, documents: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = documents[request.param]
    return found


def shape(value: Any) -> Any:
    """Keys all the way down."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else type(value) in (int, float)


def test_the_program_and_python_say_the_same_things(documents: dict[str, Any]) -> None:
    program_, python = documents["program"], documents["python"]
    assert shape(program_["profile"]) == shape(python["profile"])
    assert set(program_["memory"]) == set(python["memory"])
    for phase in ("prefill", "decode"):
        a, b = (d["profile"]["phases"][phase] for d in (program_, python))
        assert a["tokens"] == b["tokens"]
        for key in ("hit_rate", "reads", "bytes_read"):  # which read ends first is chance
            assert a[key] == pytest.approx(b[key], rel=0.2, abs=0.05)


def test_parts_of_the_time_add_up(document: dict[str, Any], model: Path) -> None:
    def is_whole(profile: dict[str, Any]) -> bool:
        shares = []
        for whole in (profile, *profile["phases"].values()):
            found = sum(whole[f"{part}_seconds"] for part in PARTS)
            assert found <= whole["seconds"] + 1e-4
            shares.append(found / whole["seconds"])
        return min(shares) > 0.7

    # Being scheduled away between two clock readings is no part's time. That is chance: a part
    # that nobody counts is missing in every run.
    if not is_whole(document["profile"]):
        options = {"expert_cache": 2 << 20, "profile": True, "ignore_eos": True}
        runs = (run(model, tokens=[1, 2, 3, 4, 5], max_tokens=40, **options) for _ in range(9))
        assert any(is_whole(again.to_json()["profile"]) for again in runs)


def test_phases_and_layers_add_up(document: dict[str, Any]) -> None:
    profile = document["profile"]
    phases = profile["phases"]
    assert (phases["prefill"]["tokens"], phases["decode"]["tokens"]) == (5, 39)
    for part in ("seconds", *(f"{part}_seconds" for part in PARTS)):
        assert sum(p[part] for p in phases.values()) == pytest.approx(profile[part], abs=1e-5)
    for phase in phases.values():
        layers = phase["layers"]
        assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]
        for part in PARTS[:-1]:
            of_layers = sum(layer[f"{part}_seconds"] for layer in layers)
            assert of_layers == pytest.approx(phase[f"{part}_seconds"], abs=1e-5)
        assert sum(layer["bytes_read"] for layer in layers) == phase["bytes_read"]
        assert sum(layer["reads"] for layer in layers) == phase["reads"]
        asked = sum(layer["expert_requests"] for layer in layers)
        assert sum(layer["expert_hits"] for layer in layers) / asked == pytest.approx(
            phase["hit_rate"], abs=1e-6
        )
        assert layers[1]["expert_requests"] == layers[1]["bytes_read"] == 0  # dense
        assert phase["io_wait_share"] == pytest.approx(
            phase["io_wait_seconds"] / phase["seconds"], abs=1e-3
        )
    assert sum(p["bytes_read"] for p in phases.values()) == document["io"]["bytes_read"]
    # decode asks for top_k experts of each MoE layer at every token
    assert phases["decode"]["layers"][0]["expert_requests"] == 3 * 39


def test_token_times_have_percentiles(document: dict[str, Any]) -> None:
    times = document["profile"]["token_seconds"]
    assert times["n"] == 39
    assert 0 < times["p50"] <= times["p95"] <= times["p99"] <= times["max"]
    assert times["p50"] < times["max"] or times["p50"] == times["mean"]
    assert times["n"] * times["mean"] <= document["decode_seconds"]


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, (1, 1, 1)), (2, (1, 2, 2)), (20, (10, 19, 20)), (100, (50, 95, 99)), (101, (51, 96, 100))],
)
def test_percentiles_are_nearest_ranks(n: int, expected: tuple[int, ...]) -> None:
    values = [float(i) for i in range(n, 0, -1)]
    assert tuple(percentile(values, p) for p in (50, 95, 99)) == expected


def test_the_drive_is_told_with_its_method(document: dict[str, Any], model: Path) -> None:
    drive = document["profile"]["drive"]
    assert set(drive) == set(Drive.__dataclass_fields__)
    assert drive["bytes"] == drive["reads"] * -(-drive["block_bytes"] // 4096) * 4096
    assert drive["bytes_per_second"] == pytest.approx(drive["bytes"] / drive["seconds"], rel=1e-3)
    assert drive["depth"] == 4
    assert drive["direct"] == document["io"]["direct"]
    assert drive["seconds"] > 0
    for phase in document["profile"]["phases"].values():
        share = phase["bytes_per_second"] / drive["bytes_per_second"]
        assert phase["drive_share"] == pytest.approx(share, rel=1e-3)


def test_a_probe_reads_as_many_at_once_as_asked(model: Path, tmp_path: Path) -> None:
    drive = probe_drive(model, io_threads=5, seconds=0.02)
    assert drive.depth == 5
    assert drive.reads >= 5
    with pytest.raises(UsageError, match="up to 64 reads at once"):
        probe_drive(model, io_threads=65)
    cut = tmp_path / "cut.colibri"
    cut.write_bytes(model.read_bytes()[: -(1 << 20)])
    with pytest.raises(FormatError, match="it was cut"):
        probe_drive(cut)


def test_prefetch_is_told_with_what_it_guessed_and_what_it_brought(model: Path) -> None:
    call = [model, "--tokens=1,2", "--max-tokens=20", "--expert-cache=4M", "--profile", "--json"]
    options = {"max_tokens": 20, "expert_cache": 4 << 20, "profile": True, "ignore_eos": True}
    for depth in (0, 1, 2):
        flags = [f"--prefetch-depth={depth}", "--ignore-eos"]
        program_ = json.loads(colibri_run(*call, *flags).stdout)
        python = run(model, tokens=[1, 2], prefetch_depth=depth, **options).to_json()
        assert shape(program_["profile"]) == shape(python["profile"])
        for document in (program_, python):
            found = document["profile"]["prefetch"]
            if depth == 0:
                assert found is None
                continue
            # of the two MoE layers that have one before them, at 20 tokens and the prompt's first
            assert 0 < found["right"] <= found["chosen"] <= 3 * 2 * 21
            assert found["recall"] == pytest.approx(found["right"] / found["chosen"], abs=1e-6)
            assert found["useful_bytes"] + found["wasted_bytes"] <= document["io"]["bytes_read"]
            assert found["reads"] <= document["io"]["reads"]


def test_without_profile_there_is_none(model: Path) -> None:
    document = json.loads(colibri_run(model, "--tokens=1", "--max-tokens=1", "--json").stdout)
    assert "profile" not in document
    assert run(model, tokens=[1], max_tokens=1).profile is None


def test_no_tokens_made_is_no_division_by_zero(model: Path) -> None:
    for n in (0, 1):
        call = [model, "--tokens=1,2", f"--max-tokens={n}", "--profile"]
        document = json.loads(colibri_run(*call, "--json").stdout)
        python = run(model, tokens=[1, 2], max_tokens=n, profile=True)
        for profile in (document["profile"], python.to_json()["profile"]):
            assert profile["token_seconds"] is None
            assert profile["phases"]["decode"]["hit_rate"] is None
        shown = colibri_run(*call)
        assert "prefill by layer" in shown.stderr
        assert "nan" not in shown.stderr + rendered(python)


def rendered(result: RunResult, width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width)
    result.plan.render(console)
    assert result.profile
    result.profile.render(console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_tables_fit_a_narrow_terminal(model: Path) -> None:
    call = [model, "--tokens=1,2,3", "--max-tokens=5", "--expert-cache=2M", "--profile"]
    call.append("--prefetch-depth=1")
    lines = colibri_run(*call).stderr.splitlines()
    tables = [line for line in lines if not re.match(r"(note|warning): |generated: ", line)]
    options = {"expert_cache": 2 << 20, "profile": True, "prefetch_depth": 1}
    result = run(model, tokens=[1, 2, 3], max_tokens=5, **options)
    python = rendered(result).splitlines()
    for found in (tables, python):
        assert max(map(len, found)) <= 60
        assert any(re.match(r"prefetch: +\d+\.\d ?% of chosen", line) for line in found)
        assert any(re.match(r" +all +[\d.]+ s 100.0 % +[\d.]+ s 100.0 %$", line) for line in found)
        assert (
            sum(bool(re.match(r" +[0-3]( +\d+\.\d{3}){4} +(-|\d+\.\d %)$", line)) for line in found)
            == 4
        )
        assert any(line.startswith("ms per token: P50 ") for line in found)
        assert any(line.startswith("drive: ") for line in found)


def test_measurements_fit_an_80_column_terminal(model: Path) -> None:
    call = [model, "--tokens=1,2,3", "--max-tokens=5", "--expert-cache=2M"]
    console = Console(file=io.StringIO(), width=80)
    run(model, tokens=[1, 2, 3], max_tokens=5, expert_cache=2 << 20).render(console)
    python: str = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in (colibri_run(*call).stderr, python):
        lines = [line for line in shown.splitlines() if not re.match("note: |warning: ", line)]
        assert max(map(len, lines)) <= 80
        assert [line.split(":")[0] for line in lines if line.startswith(("pro", "gen"))] == [
            "prompt",
            "generated",
        ]


def test_layer_counters_are_reset_with_the_others(model: Path) -> None:
    with Engine(model) as engine:
        engine.eval([1, 2, 3])
        assert engine.layer_stats()[0].expert_requests > 0
        engine.reset_stats()
        assert all(layer.expert_requests == layer.reads == 0 for layer in engine.layer_stats())


# ---------------------------------------------------------------------------------------------
# Pinning


def allowed_cpus() -> dict[int, str]:
    """Thread id -> the CPUs that it may use."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "status").read_text()
        except OSError:  # it ended meanwhile
            continue
        found[int(task.name)] = re.search(r"Cpus_allowed_list:\s*(\S+)", text)[1]  # type: ignore[index]
    return found


def test_pinned_threads_stay_on_their_cpu(model: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU: there is nothing to pin")
    before = allowed_cpus()
    with Engine(model, threads=2) as engine:
        free = allowed_cpus()
        assert len(set(free.values())) == 1
        expected = engine.forward([1, 2, 3, 4])
    with Engine(model, threads=2, pin_threads=True) as engine:
        new = {task: cpu for task, cpu in allowed_cpus().items() if task not in before}
        assert list(new.values()).count(str(cpus[1])) == 1  # the second of two; readers are free
        mine = threading.get_native_id()
        seen: set[str] = set()
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                found = allowed_cpus()
                seen.update(cpu for task, cpu in found.items() if task not in before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(20):
            logits = engine.forward([1, 2, 3, 4] * 8)[:4]
        stop.set()
        watcher.join()
        assert str(cpus[0]) in seen  # the evaluating thread
        engine.eval([1])
        assert allowed_cpus()[mine] == before[mine]  # the caller's is as it was
        assert (logits == expected).all()


def test_more_pinned_threads_than_cpus_are_refused(model: Path) -> None:
    n = len(os.sched_getaffinity(0))
    with pytest.raises(UsageError, match=f"pinning of {n + 1} threads: this process may use {n} C"):
        Engine(model, threads=n + 1, pin_threads=True)
    shown = colibri_run(model, "--tokens=1", "--threads", n + 1, "--pin-threads")
    assert shown.returncode == 2
    assert colibri_run(model, "--tokens=1", "--max-tokens=1", "--pin-threads").returncode == 0


# ---------------------------------------------------------------------------------------------
# Ctrl-C while a model is opened


SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
#include <sys/types.h>
ssize_t pread(int fd, void *to, size_t n, off_t at) {
  static ssize_t (*real)(int, void *, size_t, off_t);
  if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
  if (n > 100000) sleep(20);
  return real(fd, to, n, at);
}
ssize_t pread64(int fd, void *to, size_t n, off_t at) { return pread(fd, to, n, at); }
"""


@pytest.mark.parametrize("which", ["program", "python"])
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_a_slow_opening_at_once(
    model: Path, tmp_path: Path, which: str, as_json: bool
) -> None:
    shim = tmp_path / "slow.so"
    (tmp_path / "slow.c").write_text(SLOW)
    subprocess.run([*CC, "-shared", "-fPIC", tmp_path / "slow.c", "-o", shim, "-ldl"], check=True)
    cli = [sys.executable, "-c", "from colibri_tools.cli import main; main()", "run"]
    call = [*(cli if which == "python" else [program()]), str(model), "--tokens", "1"]
    with subprocess.Popen(
        [*call, *(["--json"] if as_json else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        text=True,
    ) as process:
        if as_json:
            time.sleep(2)
        else:
            assert process.stderr
            process.stderr.readline()  # the plan, right before it is opened
            time.sleep(0.5)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - start < 5  # not the 20 s of a read
    assert process.returncode == 130
    assert "error: interrupted" in stderr
    if as_json:
        assert json.loads(stdout)["error"]["kind"] == "Interrupted"
