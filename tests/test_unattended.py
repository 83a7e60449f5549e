"""Many prompt files, one open model: results, resuming, failures, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_run import text_model

from colibri_tools.run import run

COLIBRI = [sys.executable, "-c", "from colibri_tools.cli import main; main()"]
TIMINGS = ("prefill_seconds", "decode_seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unattended")
    return text_model(folder / "model.colibri", context_length=20_000)


@pytest.fixture
def prompts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{name}.txt" for name in ("one", "two", "three")]
    for number, file in enumerate(files):
        file.write_text("once upon a time" + " and" * number)
    return files


def colibri(
    model: Path, files: list[Path], out: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    each = [part for file in files for part in ("--prompt-file", str(file))]
    call = [*COLIBRI, "run", str(model), *each, "--out", str(out), "--max-tokens", "6", *more]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(out.iterdir())}


def test_every_file_gets_the_result_of_a_run_of_its_own(
    model: Path, prompts: list[Path], tmp_path: Path
) -> None:
    done = colibri(model, prompts, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "out")
    assert sorted(found) == ["one.txt.json", "three.txt.json", "two.txt.json"]
    for file in prompts:
        alone = run(model, prompt_file=file, max_tokens=6)
        result = found[f"{file.name}.json"]
        assert (result["text"], result["tokens"]) == (alone.text, alone.tokens)
        assert result["prompt_tokens"] == alone.prompt_tokens
        assert result["stop_reason"] == alone.stop_reason
        assert all(result[name] >= 0 for name in TIMINGS)


def test_drawing_starts_from_the_seed_for_every_file(
    model: Path, prompts: list[Path], tmp_path: Path
) -> None:
    done = colibri(model, prompts, tmp_path / "out", "--temperature", "1", "--seed", "7")
    assert done.returncode == 0, done.stderr
    alone = run(model, prompt_file=prompts[2], max_tokens=6, temperature=1.0, seed=7)
    assert results(tmp_path / "out")["three.txt.json"]["tokens"] == alone.tokens


def test_a_rerun_keeps_what_is_there(model: Path, prompts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert colibri(model, prompts[:2], out).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    done = colibri(model, prompts, out, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [item["status"] for item in document["files"]] == ["kept", "kept", "done"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_file_that_fails_does_not_stop_the_rest(
    model: Path, prompts: list[Path], tmp_path: Path
) -> None:
    bad, empty = tmp_path / "bad.txt", tmp_path / "gone.txt"
    bad.write_bytes(b"caf\xe9")
    out = tmp_path / "out"
    done = colibri(model, [bad, prompts[0], empty, prompts[1]], out, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    status = {Path(item["file"]).name: item["status"] for item in document["files"]}
    assert status == {
        "bad.txt": "failed",
        "one.txt": "done",
        "gone.txt": "failed",
        "two.txt": "done",
    }
    errors = [item["error"] for item in document["files"] if item["error"]]
    assert any("not UTF-8 at byte 3" in text for text in errors)
    assert any("No such file" in text for text in errors)
    bad.write_text("cafe")
    empty.write_text("there now")
    assert colibri(model, [bad, prompts[0], empty, prompts[1]], out).returncode == 0


def test_a_prompt_beyond_the_context_fails_alone(
    model: Path, prompts: list[Path], tmp_path: Path
) -> None:
    prompts[1].write_text("x" * 300)
    done = colibri(model, prompts, tmp_path / "out", "--ctx", "64")
    assert done.returncode == 1 and "301 tokens, the context 64" in done.stderr
    assert sorted(results(tmp_path / "out")) == ["one.txt.json", "three.txt.json"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (["--max-tokens", "5"], "another model, prompt or options"),
        (["--prompt", "x"], "excludes --prompt"),
        (["--temperature", "1"], "needs --seed"),
        (["--system", "x"], "needs --chat"),
    ],
)
def test_contradictions_are_usage_errors(
    model: Path, prompts: list[Path], tmp_path: Path, change: list[str], what: str
) -> None:
    out = tmp_path / "out"
    assert colibri(model, prompts[:1], out).returncode == 0
    before = results(out)
    done = colibri(model, prompts[:1], out, *change)
    assert done.returncode == 2 and what in done.stderr, done.stderr
    assert results(out) == before


def test_names_must_tell_results_apart(model: Path, prompts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "sub" / prompts[0].name
    other.parent.mkdir()
    other.write_text("x")
    done = colibri(model, [prompts[0], other], tmp_path / "out")
    assert done.returncode == 2 and "one result" in done.stderr
    done = colibri(model, [], tmp_path / "out")
    assert done.returncode == 2 and "at least one" in done.stderr
    call = [*COLIBRI, "run", str(model), "--prompt-file", str(prompts[0]), "--prompt-file", "b"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "need --out" in done.stderr


def test_an_interrupted_job_goes_on(model: Path, prompts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    each = [part for file in prompts for part in ("--prompt-file", str(file))]
    call = [*COLIBRI, "run", str(model), *each, "--out", str(out), "--ignore-eos", "--json"]
    call += ["--max-tokens", "3000"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        while not out.exists() and time.monotonic() < deadline and job.poll() is None:
            time.sleep(0.02)
        time.sleep(0.3)
        job.send_signal(signal.SIGINT)
        stdout, _ = job.communicate(timeout=60)
    assert job.returncode == 130
    document = json.loads(stdout)
    assert document["interrupted"] and len(document["files"]) < 3
    assert all(not name.startswith(".") for name in results(out))
    call[call.index("3000")] = "3"
    for path in out.iterdir():  # made by a job with more tokens
        path.unlink()
    again = subprocess.run(call, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and len(results(out)) == 3
