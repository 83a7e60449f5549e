"""What SECURITY.md promises: a model file is untrusted, and is read or refused, nothing else."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repack_util import small_hf
from test_respec import edited, wrong_eps
from test_run import byte_tokenizer

import colibri_tools
from colibri_tools.errors import ColibriError, JobError
from colibri_tools.output import Output
from colibri_tools.repack import repack
from colibri_tools.respec import respec
from colibri_tools.run import run
from colibri_tools.sources import open_source
from colibri_tools.sources.hf import CARRIED_NAMES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "colibri_tools"
MAIN = [sys.executable, "-W", "error", "-c", "from colibri_tools.cli import main; main()"]


def colibri(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    call = [*MAIN, *map(str, args)]
    return subprocess.run(call, capture_output=True, text=True, timeout=120, **options)


class Bomb:
    """Leaves `marker` in the current folder if it is ever unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("marker", "w")


def pickled(protocol: int) -> bytes:
    return pickle.dumps(Bomb(), protocol)


def torch_zip() -> bytes:
    """What torch.save writes: a zip with a pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(2))
    return out.getvalue()


# ---------------------------------------------------------------- SECURITY.md itself


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/test_\w+\.py)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.M), f"{file}::{test}"


# ---------------------------------------------------------------- nothing is executed (13.5)


def test_a_bomb_goes_off_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests below would see it."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickled(4)).close()
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("content", ["zip", "protocol-0", "protocol-4"])
@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.safetensors", "model.gguf"],
)
def test_case_13_5_a_pickle_under_any_name_is_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = torch_zip() if content == "zip" else pickled(int(content[-1]))
    (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ColibriError) as caught:
            repack(path, tmp_path / "out.colibri")
        if name.endswith((".bin", ".pt", ".pth")):
            assert re.search("convert|never opened|safetensors", caught.value.message)
    for command in ("verify", "inspect", "respec"):
        with pytest.raises(ColibriError):
            _call(command, tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["config.json", name])


def _call(command: str, path: Path) -> None:
    """The function of a command; a report of errors counts as a refusal."""
    from colibri_tools.inspect import inspect
    from colibri_tools.verify import verify

    if command == "verify" and not verify(path).ok:
        raise JobError("not ok")
    if command == "inspect":
        inspect(path)
    if command == "respec":
        respec(path)


def test_case_13_5_a_sound_checkpoint_beside_pickles_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = small_hf(tmp_path / "hf", "olmoe")
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pkl", "rng_state.pth"):
        (source / name).write_bytes(torch_zip())
    (source / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "evil.bin"}}')
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert set(container.blobs) == {"config.json", "generation_config.json"}
    assert not (tmp_path / "marker").exists()


def evil_source(folder: Path) -> Path:
    """A sound checkpoint that asks for its own code to be run in every way there is."""
    source = small_hf(
        folder / "hf",
        "mixtral",
        overrides={
            "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
            "trust_remote_code": True,
            "custom_pipelines": {"text-generation": {"impl": "evil.Evil"}},
            "vocab_size": 270,
        },
        mutate=lambda weights: {
            name: with_270_rows(value) if value.shape[0] == 131 else value
            for name, value in weights.items()
        },
    )
    code = 'import pathlib\npathlib.Path("marker").touch()\nclass Evil: pass\n'
    for name in ("evil", "configuration_evil", "modeling_evil", "tokenization_evil", "__init__"):
        (source / f"{name}.py").write_text(code)
    (source / "tokenizer.json").write_text(byte_tokenizer().to_str())
    tokenizer = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "trust_remote_code": True,
    }
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return source


def with_270_rows(value: Any) -> Any:
    return np.resize(value, (270, *value.shape[1:]))


def test_case_13_5_code_of_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    source, out = evil_source(tmp_path), tmp_path / "m.colibri"
    for args in (
        ("repack", source, "-o", out),
        ("inspect", source, "--tensors"),
        ("verify", source),
        ("verify", out, "--against", source),
        ("respec", out),
        ("run", out, "--prompt", "hello", "--max-tokens", "2"),
    ):
        done = colibri(*args, cwd=tmp_path)
        assert done.returncode == 0, (args, done.stderr)
    assert not list(tmp_path.rglob("marker")) and not list(tmp_path.rglob("__pycache__"))


_FORBIDDEN_MODULES = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "torch",
    "transformers",
    "jinja2",
    "yaml",
    "subprocess",
    "socket",
    "ssl",
    "http",
    "urllib",
    "requests",
    "httpx",
    "huggingface_hub",
    "runpy",
    "code",
}
_FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
_FORBIDDEN_METHODS = {("os", "system"), ("os", "popen"), ("importlib", "import_module")}


def test_the_package_has_nothing_that_executes_data() -> None:
    template = (PACKAGE / "text" / "template.py").read_text()
    assert re.findall(r"\w*Environment\(", template) == ["ImmutableSandboxedEnvironment("]
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found = _FORBIDDEN_MODULES & {name.split(".")[0] for name in names}
            if path.name == "template.py":  # the one place where templates are rendered
                found -= {"jinja2"}
            assert not found, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in _FORBIDDEN_CALLS, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in _FORBIDDEN_METHODS, path
            if isinstance(node, ast.keyword):
                assert node.arg not in ("allow_pickle", "trust_remote_code", "shell"), path


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch marker') }}",
        "{% for a in range(10**12) %}x{% endfor %}",
        "{% raise_exception %}{{",
    ],
)
def test_templates_are_carried_and_not_rendered(tmp_path: Path, template: str) -> None:
    source, out = evil_source(tmp_path), tmp_path / "m.colibri"
    (source / "chat_template.jinja").write_text(template)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert colibri("repack", source, "-o", out, cwd=tmp_path).returncode == 0
    done = colibri("run", out, "--prompt", "hello", "--max-tokens", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with colibri_tools.open(out) as container:
        assert container.blobs["chat_template.jinja"].decode() == template
    assert not list(tmp_path.rglob("marker"))


# ---------------------------------------------------------------- paths (13.1)


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "_name_or_path", "base_model"])
@pytest.mark.parametrize("target", ["{abs}/secret", "../secret", "fifo"])
def test_case_13_1_names_in_configs_are_never_opened(tmp_path: Path, key: str, target: str) -> None:
    """Only fixed names are carried, whatever fields of the configs point to."""
    source = small_hf(tmp_path / "hf", "mixtral", overrides={key: target})
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(source / "fifo")  # opening it would wait for ever
    named = {key: target.format(abs=tmp_path)}
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    with open_source(source) as opened:
        assert set(opened.blobs) <= set(CARRIED_NAMES)
        assert not any(data == b"secret" for data in opened.blobs.values())
    repack(source, tmp_path / "m.colibri")
    assert not respec(tmp_path / "m.colibri").changed


@pytest.mark.parametrize("name", sorted(CARRIED_NAMES))
def test_case_13_1_a_carried_file_may_not_link_outside(tmp_path: Path, name: str) -> None:
    source = small_hf(tmp_path / "hf", "mixtral")
    (tmp_path / "secret").write_text("{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with pytest.raises(ColibriError, match="outside the checkpoint's folder"):
        open_source(source)


@pytest.mark.parametrize(
    "name",
    ["file:///etc/passwd", "~/secret.safetensors", "%2e%2e/secret.safetensors", "．．/secret"],
)
def test_case_13_1_names_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    """No scheme, home, percent or Unicode form is ever made into another path."""
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"t": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ColibriError, match=r"missing|unsafe|no such file"):
        open_source(folder)


# ---------------------------------------------------------------- outputs


def test_commands_write_only_their_outputs(tmp_path: Path) -> None:
    """Carried files are not unpacked, and nothing is cached beside the model or in the home."""
    source, work, home = evil_source(tmp_path), tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    before = sorted(source.rglob("*"))
    environment = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    out = work / "m.colibri"
    for args in (
        ("repack", source, "-o", out),
        ("inspect", out),
        ("verify", out),
        ("respec", out),
        ("run", out, "--prompt", "a", "--max-tokens", "1", "--logits", work / "l.npy"),
    ):
        assert colibri(*args, cwd=work, env=environment).returncode == 0
    assert sorted(path.name for path in work.iterdir()) == ["l.npy", "m.colibri"]
    assert sorted(source.rglob("*")) == before and not list(home.iterdir())


@pytest.mark.parametrize("suffix", [".partial", ".journal", ".respec"])
@pytest.mark.parametrize("target", ["victim", "absent"])
def test_a_waiting_link_is_not_written_through(tmp_path: Path, suffix: str, target: str) -> None:
    source = small_hf(tmp_path / "hf", "mixtral")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    ready = tmp_path / "ready.colibri"
    repack(source, ready)
    names = [tmp_path / f"{name}{suffix}" for name in ("new.colibri", "ready.colibri", "l.npy")]
    for name in names:
        name.symlink_to(target)
    with contextlib.suppress(ColibriError):  # to refuse is right too
        repack(source, tmp_path / "new.colibri")
    with contextlib.suppress(ColibriError):
        respec(edited(ready, wrong_eps))
    run(ready, tokens=[1], max_tokens=0, logits=tmp_path / "l.npy")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_of_every_output_follow_the_umask(
    tmp_path: Path, umask: int, mode: int
) -> None:
    source, out = small_hf(tmp_path / "hf", "mixtral"), tmp_path / "m.colibri"
    for args in (
        ("repack", source, "-o", out),
        ("run", out, "--tokens", "1,2", "--max-tokens", "0", "--logits", tmp_path / "l.npy"),
    ):
        done = colibri(*args, umask=umask)
        assert done.returncode == 0, done.stderr
    for path in (out, tmp_path / "l.npy"):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    done = colibri("repack", source, "-o", out, "--force", umask=umask)
    assert stat.S_IMODE(out.stat().st_mode) == mode


@pytest.mark.parametrize(("container", "copy"), [(0o600, 0o600), (0o644, 0o640), (0o755, 0o640)])
def test_a_copy_of_metadata_is_no_more_open_than_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: int, copy: int
) -> None:
    from colibri_tools.container import rewrite

    out = tmp_path / "m.colibri"
    repack(small_hf(tmp_path / "hf", "mixtral"), out)
    edited(out, wrong_eps).chmod(container)
    modes: list[int] = []
    real: Callable[[int, bytes], None] = rewrite._overwrite

    def look(fd: int, head: bytes) -> None:
        modes.append(stat.S_IMODE((tmp_path / "m.colibri.respec").stat().st_mode))
        real(fd, head)

    monkeypatch.setattr(rewrite, "_overwrite", look)
    old = os.umask(0o027)
    try:
        assert respec(out).changed
    finally:
        os.umask(old)
    assert modes == [copy]
    assert stat.S_IMODE(out.stat().st_mode) == container


# ---------------------------------------------------------------- terminal


def test_names_of_a_file_cannot_drive_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "no\x1b]0;owned\x07\x1b[2J\x9bvel\r\u202e\u2028x"
    overrides = {"model_type": hostile}

    def rename(weights: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("norm", "n\x1b[31mrm"): value for name, value in weights.items()}

    source = small_hf(tmp_path / "hf", "mixtral", overrides=overrides, mutate=rename)
    repack(source, tmp_path / "m.colibri")
    from colibri_tools.inspect import inspect

    for path in (source, tmp_path / "m.colibri"):
        result = inspect(path, tensors=True)
        output = Output()
        output.remarks(result)
        output.result(result)
        output.result(respec(tmp_path / "m.colibri"))
        output.failure("X", hostile, 1)
        shown = "".join(capsys.readouterr())
        assert r"\x1b[31m" in shown and "owned" in shown
        bad = {char for char in shown if not char.isprintable()} - {"\n"}
        assert not bad, bad
        output = Output(json_mode=True)
        output.result(result)
        document = capsys.readouterr().out
        assert json.loads(document)["family"] == hostile
        assert not re.search(r"[^\n -~\xa0-\uffff]", document)
