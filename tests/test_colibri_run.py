"""The program colibri-run: the same tokens as Python, strict parsing, exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_models import make_model

from colibri_tools.engine import Engine
from colibri_tools.run import run


def program() -> str:
    """The installed program: beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("colibri-run")
    found = str(beside) if beside.exists() else shutil.which("colibri-run")
    assert found, "colibri-run is not installed; run 'make dev'"
    return found


def colibri_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [program(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("program") / "model.colibri", eos_ids=[130])


def test_same_tokens_as_python(model: Path) -> None:
    for options in ({}, {"temperature": 1.2, "seed": 5, "top_k": 40, "top_p": 0.9}):
        expected = run(model, tokens=[1, 2, 3], max_tokens=25, ignore_eos=True, **options)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        shown = colibri_run(model, "--tokens", "1,2,3", "--max-tokens", 25, "--ignore-eos", *flags)
        assert shown.returncode == 0
        assert [int(word) for word in shown.stdout.split()] == expected.tokens
        assert "generated: 25 tokens" in shown.stderr


def test_same_document_as_python_but_for_text(model: Path) -> None:
    expected = run(model, tokens=[1, 2, 3], max_tokens=6, profile=True).to_json()
    shown = colibri_run(model, "--tokens=1,2,3", "--max-tokens=6", "--json", "--profile")
    document = json.loads(shown.stdout)
    assert set(document) == set(expected) - {"text"}
    assert document["tokens"] == expected["tokens"]
    assert document["seed"] is None
    assert set(document["io"]) == set(expected["io"])
    assert set(document["profile"]) == set(expected["profile"])
    assert document["io"]["reads"] == expected["io"]["reads"]


def test_same_logits_as_python(model: Path, tmp_path: Path) -> None:
    tokens = list(range(50))
    out = tmp_path / "logits.npy"
    done = colibri_run(
        model, "--tokens", ",".join(map(str, tokens)), "--max-tokens", 0, "--logits", out,
        "--batch-size", 8, "--threads", 1, "--expert-cache", "128K",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    with Engine(model) as engine:
        assert np.array_equal(np.load(out), engine.forward(tokens))
    assert list(tmp_path.iterdir()) == [out]


def test_eos_ends_the_output(tmp_path: Path) -> None:
    free = run(
        make_model(tmp_path / "free.colibri"), tokens=[1, 2, 3], max_tokens=12, ignore_eos=True
    ).tokens
    model = make_model(tmp_path / "model.colibri", eos_ids=[free[6]])
    shown = colibri_run(model, "--tokens", "1,2,3", "--max-tokens", 12)
    assert [int(word) for word in shown.stdout.split()] == free[: free.index(free[6]) + 1]
    assert "stopped: eos" in shown.stderr


def test_help_and_version(model: Path) -> None:
    for flag in ("-h", "--help"):
        shown = colibri_run(flag)
        assert shown.returncode == 0
        assert shown.stdout.startswith("Usage: colibri-run MODEL --prompt TEXT")
        assert "Examples:" in shown.stdout
    assert colibri_run("--version").stdout.startswith("colibri-run 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a MODEL is missing"),
        (["MODEL"], "--tokens is missing"),
        (["MODEL", "other", "--tokens", "1"], "one MODEL expected, found 'other' too"),
        (["MODEL", "--tokens", "1", "--fast"], "no such option: --fast"),
        (["MODEL", "--token", "1"], "no such option: --token"),
        (["MODEL", "--tokens"], "--tokens needs a value"),
        (["MODEL", "--tokens", "1", "--profile=yes"], "--profile takes no value"),
        (["MODEL", "--tokens", "1,,2"], "--tokens: expected ids separated by commas, found ''"),
        (["MODEL", "--tokens", "1,2x"], "found '2x'"),
        (["MODEL", "--tokens", "1,"], "found ''"),
        (["MODEL", "--tokens", "4294967296"], "found '4294967296'"),
        (["MODEL", "--tokens", "99999999999999999999"], "found '99999999999999999999'"),
        (["MODEL", "--tokens", "131"], "token 0 of the input is 131; this model's ids end at 130"),
        (["MODEL", "--tokens", "1", "--max-tokens", "5x"], "--max-tokens: expected a whole number"),
        (["MODEL", "--tokens", "1", "--max-tokens", "-5"], "--max-tokens: expected a whole number"),
        (["MODEL", "--tokens", "1", "--max-tokens", ""], "--max-tokens: expected a whole number"),
        (["MODEL", "--tokens", "1", "--expert-cache", "4Q"], "--expert-cache: expected a size"),
        (["MODEL", "--tokens", "1", "--expert-cache", "0"], "--expert-cache: expected a size"),
        (["MODEL", "--tokens", "1", "--expert-cache", "17179869184T"], "expected a size"),
        (["MODEL", "--tokens", "1", "--temperature", "nan"], "--temperature: expected a number"),
        (["MODEL", "--tokens", "1", "--temperature", "1e999"], "--temperature: expected a number"),
        (["MODEL", "--tokens", "1", "--temperature", "-1"], "temperature: expected a number >= 0"),
        (["MODEL", "--tokens", "1", "--top-k", "3"], "it needs --temperature above 0"),
        (["MODEL", "--tokens", "1", "--seed", "3"], "it needs --temperature above 0"),
        (["MODEL", "--tokens", "1,2,3", "--ctx", "2"], "3 tokens do not fit"),
        (["MODEL", "--tokens", "1", "--ctx", "4097"], "this model allows up to 4096"),
        (["MODEL", "--tokens", "1", "--logits", "MODEL"], "is the model itself"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    model: Path, arguments: list[str], words: str
) -> None:
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    shown = colibri_run(*given)
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: ")
    assert shown.stderr.count("\n") == 1
    assert words in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nonexistent/model", "--tokens", "1"], "/nonexistent/model: cannot open"),
        (["MODEL", "--tokens", "1", "--expert-cache", "4K"], "needs at least"),
        (["MODEL", "--tokens", "1", "--logits", "/nonexistent/x"], "/nonexistent/x: No such file"),
    ],
)
def test_failures_are_one_line_and_exit_code_1(
    model: Path, arguments: list[str], words: str
) -> None:
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    shown = colibri_run(*given)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.count("\n") == 1
    assert words in shown.stderr
    document = json.loads(colibri_run(*given, "--json").stdout)
    assert document["ok"] is False
    assert words in document["error"]["message"]
    assert document["exit_code"] == 1


def test_sizes_have_suffixes(model: Path) -> None:
    for size, shown in (("128K", "0.1 of"), ("128KiB", "0.1 of"), ("131072", "0.1 of"), ("1g", "")):
        done = colibri_run(model, "--tokens", "1", "--max-tokens", 1, "--expert-cache", size)
        assert done.returncode == 0
        assert f"cache {shown}" in done.stderr


def test_ctrl_c_shows_what_was_made(model: Path) -> None:
    command = [program(), str(model), "--tokens", "1", "--max-tokens", "4000", "--threads", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, bufsize=0) as process:
        first = process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        rest, report = process.communicate(timeout=60)
    made = [int(word) for word in (first + rest).split()]
    assert process.returncode == 130
    assert 1 <= len(made) < 4000
    assert f"generated: {len(made)} tokens" in report.decode()
    assert "stopped: interrupted" in report.decode()
