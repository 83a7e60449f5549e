"""Cases of section 12: JSON that stays JSON, options that are never dropped, errors that help."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from repack_util import map_gguf, map_hf, small_hf, small_spec
from test_cli import LEAVES, TREE, one_document
from test_security import MAIN, colibri

from colibri_tools import cli
from colibri_tools.errors import FormatError, JobError, SourceError, UsageError
from colibri_tools.inspect import inspect
from colibri_tools.repack import repack
from colibri_tools.verify import verify


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_hf(tmp_path_factory.mktemp("cases") / "hf", "qwen3_moe")


@pytest.fixture(scope="module")
def container(source: Path) -> Path:
    repack(source, source.parent / "m.colibri")
    return source.parent / "m.colibri"


FUNCTIONS = {
    "compare": "compare.compare",
    "export": "export.export",
    "plan": "plan.plan_memory",
    "profile export": "profile.files.export_profile",
    "profile import": "profile.files.import_profile",
    "profile merge": "profile.files.merge_files",
    "profile-routing": "profile.profiling.profile_routing",
    "quantize": "rewrite.quantize",
    "reorder": "rewrite.reorder",
    "simulate": "profile.simulate.simulate",
}
"""Where a command's work is done; elsewhere it is COMMAND.COMMAND."""

NEEDS = {
    "compare": "OUT --text OUT",
    "detokenize": "--tokens 1",
    "export": "--hottest 40% -o OUT",
    "plan": "--ram 1G",
    "profile import": "--model OUT -o OUT",
    "profile merge": "-o OUT",
    "profile-routing": "-o OUT",
    "quantize": "--type q8_0 -o OUT",
    "reorder": "-o OUT",
    "repack": "-o OUT",
    "simulate": "OUT",
}
"""What a command needs besides a path."""


def needs(command: str, out: Path) -> list[str]:
    """Return the arguments without which a command is refused, writing to `out`."""
    return [str(out) if word == "OUT" else word for word in NEEDS.get(command, "").split()]


# ---------------------------------------------------------------- 12.2: JSON


@pytest.mark.parametrize("command", LEAVES)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FormatError("broken\n\x1b[2J"), 1),
        (SourceError("incomplete"), 1),
        (JobError("no space"), 1),
        (UsageError("senseless"), 2),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 1),
        (OSError(5, "Input/output error", "x"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_case_12_2_every_kind_of_failure_is_one_document(
    command: str,
    error: BaseException,
    code: int,
    container: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    function = FUNCTIONS.get(command, f"{command}.{command}")
    monkeypatch.setattr(f"colibri_tools.{function}", fail)
    monkeypatch.setattr("signal.signal", lambda *args: None)  # pytest keeps its own handlers
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), str(container), *needs(command, tmp_path / "x"), "--json"])
    out, err = capsys.readouterr()
    assert caught.value.code == code
    document = one_document(out)
    assert document["ok"] is False and document["exit_code"] == code
    assert document["error"]["message"] and "\n" not in document["error"]["message"]
    assert err.lstrip("\n").startswith("error: ") and len(err.strip().splitlines()) == 1


def test_case_12_2_notes_and_warnings_are_in_the_document_only(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "mixtral", overrides={"model_type": "novel"})
    done = colibri("repack", source, "-o", tmp_path / "m.colibri", "--json")
    document = one_document(done.stdout)
    assert document["warnings"] and document["notes"]
    assert done.stderr == ""
    for command in ("inspect", "respec"):
        done = colibri(command, tmp_path / "m.colibri", "--json", "-q")
        assert one_document(done.stdout)["warnings"] and done.stderr == ""


@pytest.mark.parametrize("command", ["repack", "verify"])
def test_case_12_2_progress_on_a_terminal_stays_out_of_the_document(
    command: str, source: Path, container: Path, tmp_path: Path
) -> None:
    args = [source, "-o", tmp_path / "m.colibri"] if command == "repack" else [container]
    terminal, theirs = pty.openpty()
    try:
        call = [*MAIN, command, *map(str, args), "--json"]
        done = subprocess.run(call, stdout=subprocess.PIPE, stderr=theirs, timeout=120)
        assert done.returncode == 0
        assert isinstance(one_document(done.stdout.decode()), dict)
    finally:
        os.close(theirs)
        os.close(terminal)


def test_case_12_2_names_that_are_no_utf8_are_still_one_document(
    source: Path, tmp_path: Path
) -> None:
    out = os.fsencode(tmp_path) + b"/\xff.colibri"
    for args in (["repack", str(source), "-o", out], ["verify", out], ["respec", out]):
        call = [*MAIN, *args, b"--json"]
        done = subprocess.run(call, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert isinstance(one_document(done.stdout.decode()), dict)


# ---------------------------------------------------------------- 12.4: options


@pytest.mark.parametrize("command", LEAVES)
@pytest.mark.parametrize("option", ["--no-such", "--imatrix=x", "-z", "--Json", "surplus"])
def test_case_12_4_unknown_options_and_surplus_words_are_refused(
    command: str, option: str, container: Path, tmp_path: Path
) -> None:
    if option == "surplus" and any(param.nargs == -1 for param in TREE[command].params):
        return  # it takes any number of paths
    done = colibri(*command.split(), container, *needs(command, tmp_path / "x"), option)
    assert (done.returncode, done.stdout) == (2, "")
    assert option.split("=")[0].lstrip("-")[:1] in done.stderr
    assert not (tmp_path / "x").exists()


def test_case_12_4_options_that_do_not_apply_are_refused(source: Path, container: Path) -> None:
    for args in (
        ("inspect", source, "--blocks"),
        ("inspect", source, "--map"),
        ("inspect", container, "--expert", "1"),
        ("verify", source, "--against", source),
        ("run", container, "--tokens", "1", "--top-k", "5"),
        ("run", container, "--tokens", "1", "--seed", "5"),
        ("run", container, "--tokens", "1", "--prompt", "x"),
        ("repack", source),
        ("respec", container, "--force"),
    ):
        done = colibri(*args)
        assert (done.returncode, done.stdout) == (2, ""), args
        assert len(done.stderr.splitlines()) == 1


def test_case_12_4_a_dry_run_shows_the_plan(source: Path, tmp_path: Path) -> None:
    done = colibri("repack", source, "-o", tmp_path / "m.colibri", "--dry-run")
    for word in ("would write", "experts", "resident", "padding", "parameters", "types"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- 12.5: messages

SHAPES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "query": ("model.layers.1.self_attn.q_proj.weight", lambda w: w[:-1], "heads x head size by"),
    "key": ("model.layers.0.self_attn.k_proj.weight", lambda w: w[:, :-1], "key/value heads x"),
    "embedding": ("model.embed_tokens.weight", lambda w: w.T.copy(), "vocabulary by hidden size"),
    "router": ("model.layers.2.mlp.gate.weight", lambda w: w[:, :-2], "experts by hidden size"),
    "norm": ("model.norm.weight", lambda w: w[:-1], "hidden size"),
    "expert": (
        "model.layers.1.mlp.experts.3.down_proj.weight",
        lambda w: w.T.copy(),
        "hidden size by expert width",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_case_12_5_a_wrong_shape_is_named_with_the_meaning_of_its_dimensions(
    case: str, tmp_path: Path
) -> None:
    name, change, meaning = SHAPES[case]
    found: list[int] = []

    def mutate(weights: dict[str, Any]) -> None:
        weights[name] = np.ascontiguousarray(change(weights[name]))
        found.extend(weights[name].shape)

    text = "; ".join(map_hf(tmp_path, "qwen3_moe", mutate=mutate).problems)
    assert re.search(rf"tensor '{re.escape(name)}': expected \[[\d, ]+\] \({meaning}", text), text
    assert f"found {found}" in text
    assert text.endswith("fetch both from one revision")


def test_case_12_5_in_gguf_too(tmp_path: Path) -> None:
    def mutate(tensors: dict[str, Any]) -> None:
        stored = tensors["blk.1.attn_k.weight"]
        tensors["blk.1.attn_k.weight"] = tm.GgufTensor(stored.data[:-1], stored.type)

    text = "; ".join(map_gguf(tmp_path, "qwen3_moe", mutate=mutate).problems)
    assert "tensor 'blk.1.attn_k.weight': expected [64, 64] (key/value heads" in text
    assert "found [63, 64]" in text and "fetch both" in text


def test_case_12_5_many_wrong_shapes_are_counted(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe")
    mapping = map_hf(tmp_path, "qwen3_moe", spec, overrides={"hidden_size": 128})
    assert len(mapping.problems) == 4
    assert re.match(r"\d+ more tensors have an unexpected shape; ", mapping.problems[-1])


# ---------------------------------------------------------------- 5.3: incomplete, all files valid


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (r"model\.layers\.2\..*", "'layers.2.attn_norm'"),
        (r"model\.layers\.1\.mlp\.experts\.4\..*", "layer 1 expert 4"),
        (r".*\.experts\.\d+\.up_proj\.weight", "15 expert slots are not filled"),
        (r"model\.norm\.weight", "'output_norm'"),
        (r"model\.layers\.0\.mlp\.gate\.weight", "'layers.0.router'"),
    ],
)
def test_case_5_3_what_is_missing_from_sound_files_is_named(
    gone: str, words: str, tmp_path: Path
) -> None:
    def mutate(weights: dict[str, Any]) -> dict[str, Any]:
        return {name: w for name, w in weights.items() if not re.fullmatch(gone, name)}

    source = small_hf(tmp_path / "hf", "qwen3_moe", shards=3, mutate=mutate)
    report = verify(source)
    assert not report.ok and words in report.errors[0].message
    with pytest.raises(SourceError):
        repack(source, tmp_path / "m.colibri")
    assert not inspect(source).to_json()["repackable"]
