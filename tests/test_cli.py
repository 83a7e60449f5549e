"""The command line as scripts and people meet it: exit codes, JSON, messages, help."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import tiny_models as tiny
from click.testing import CliRunner

from colibri_tools.cli import main_group
from colibri_tools.output import format_bytes, format_count, parse_size
from colibri_tools.repack import repack


def tree(group: click.Group, prefix: str = "") -> dict[str, click.Command]:
    """Return every command by its words: "repack", "profile", "profile merge"."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[prefix + name] = command
        if isinstance(command, click.Group):
            found |= tree(command, f"{prefix}{name} ")
    return found


TREE = tree(main_group)
COMMANDS = sorted(TREE)
LEAVES = [name for name in COMMANDS if not isinstance(TREE[name], click.Group)]
DOCS = Path(__file__).parent.parent / "docs" / "cli.md"


def colibri(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, as a script would."""
    call = [sys.executable, "-W", "error", "-c", "from colibri_tools.cli import main; main()"]
    return subprocess.run(
        [*call, *map(str, args)], capture_output=True, text=True, timeout=120, **options
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model"
    tiny.write_hf(path, "mixtral")
    return path


@pytest.fixture(scope="module")
def container(source: Path) -> Path:
    out = source.parent / "model.colibri"
    repack(source, out)
    return out


def one_document(text: str) -> Any:
    """Parse strict JSON: one document, no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def test_repack_inspect_verify_run(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "m.colibri"
    done = colibri("repack", source, "-o", out)
    assert done.returncode == 0
    assert [line[:5] for line in done.stderr.splitlines()] == ["note:"]  # it has no tokenizer
    assert "mixtral" in done.stdout
    assert colibri("inspect", out, "--map").returncode == 0
    assert colibri("verify", out, "--against", source).returncode == 0
    done = colibri("run", out, "--tokens", "1,2,3", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_and_ends_with_an_example(command: str) -> None:
    for flag in ("-h", "--help"):
        done = colibri(*command.split(), flag)
        assert done.returncode == 0
        assert f"colibri {command}" in done.stdout.split("Example")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_documented(command: str) -> None:
    text = DOCS.read_text()
    section = re.search(rf"^## {command.split()[0]}$(.*?)(^## |\Z)", text, re.M | re.S)
    assert section, f"docs/cli.md has no section for {command}"
    common = {"--json", "--quiet", "-q", "--debug", "--help", "-h"}
    for param in TREE[command].params:
        if isinstance(param, click.Option):
            for name in {*param.opts} - common:
                assert f"`{name}" in section[1], f"docs/cli.md does not explain {command} {name}"
            assert param.help, f"{command} {param.opts}: no help text"


@pytest.mark.parametrize("command", LEAVES)
def test_every_command_has_the_common_options(command: str) -> None:
    options = {name for param in TREE[command].params for name in param.opts}
    assert options >= {"--json", "--quiet", "-q", "--debug"}


def help_of(command: str) -> str:
    """Return a command's help in this process, as wide as COLUMNS says."""
    done = CliRunner().invoke(main_group, [*command.split(), "-h"], prog_name="colibri")
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = help_of(command)
    wide = [line for line in text.splitlines() if len(line) > width]
    unbroken = r"\[.{30,}\]|'.{25,}'|\".{25,}\"|\S{30,}"  # values, and words of an example
    assert [line for line in wide if not re.search(unbroken, line)] == []


@pytest.mark.parametrize("command", ["", "profile"])
def test_no_summary_of_a_command_is_cut_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    summaries = help_of(command).partition("Commands:")[2].splitlines()
    assert [line for line in summaries if line.endswith("...")] == []


def test_a_folded_example_is_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def example() -> str:
        return help_of("run").partition("Example:\n")[2].replace("\\\n", "")

    monkeypatch.setenv("COLUMNS", "50")
    narrow = shlex.split(example())
    monkeypatch.setenv("COLUMNS", "200")
    assert narrow == shlex.split(example())
    assert "The file system is" in narrow


def test_a_commands_own_options_come_first() -> None:
    for command in LEAVES:
        names = [param.name for param in TREE[command].params]
        assert names[-3:] == ["json_mode", "quiet", "debug"]


def test_version() -> None:
    assert re.fullmatch(r"colibri, version \d+\.\d+\.\d+\n", colibri("--version").stdout)


def test_case_12_2_json_is_one_document_on_success_and_failure(
    tmp_path: Path, source: Path, container: Path
) -> None:
    for args in (
        ("repack", source, "-o", tmp_path / "j.colibri"),
        ("repack", source, "-o", tmp_path / "k.colibri", "--dry-run"),
        ("inspect", container, "--blocks", "--tensors", "--map"),
        ("verify", container),
        ("verify", source),
        ("run", container, "--tokens", "1,2", "--max-tokens", "2"),
    ):
        done = colibri(*args, "--json")
        assert (done.returncode, done.stderr) == (0, ""), args
        assert isinstance(one_document(done.stdout), dict)
    for args, code in (
        (("inspect", tmp_path / "absent"), 1),
        (("repack", source, "-o", container), 2),
        (("repack", source), 2),
        (("verify", container, "--no-such-option"), 2),
        (("run", container, "--tokens", "1,x"), 2),
    ):
        done = colibri(*args, "--json")
        assert done.returncode == code, args
        document = one_document(done.stdout)
        assert document["ok"] is False and document["exit_code"] == code
        assert document["error"]["message"]


def test_errors_are_one_line_and_name_the_culprit(tmp_path: Path, source: Path) -> None:
    for args, code, words in (
        (("inspect", tmp_path / "absent"), 1, "absent"),
        (("repack", source, "-o", tmp_path / "x", "--align", "5000"), 2, "5000"),
        (("repack", source, "-o", tmp_path / "x", "--align", "4Q"), 2, "4Q"),
        (("repack", source, "-o", tmp_path / "no" / "x"), 2, "does not exist"),
        (("inspct", source), 2, "inspct"),
        (("run", source, "--prompt", "hello"), 1, "repack"),
        (("verify", source, "--against", source), 2, "container"),
    ):
        done = colibri(*args)
        assert done.returncode == code, (args, done.stderr)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_typo_is_answered_with_the_right_word(container: Path) -> None:
    assert "inspect" in colibri("inspct", container).stderr
    assert "--blocks" in colibri("inspect", container, "--block").stderr


def test_a_question_does_not_end_in_a_semicolon(container: Path) -> None:
    for typo in (("verfy", container), ("verify", "--qui", container)):
        text = colibri(*typo).stderr
        assert re.search(
            r"\?\)? See 'colibri( verify)? -h'$|[^?)]; see 'colibri( verify)? -h'$", text
        )
    assert "; see 'colibri repack -h'" in colibri("repack").stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in colibri("inspect", tmp_path / "absent", "--debug").stderr


def test_existing_output_is_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.colibri"
    out.write_text("precious")
    done = colibri("repack", source, "-o", out)
    assert done.returncode == 2 and "--force" in done.stderr
    assert out.read_text() == "precious"
    assert colibri("repack", source, "-o", out, "--force", "-q").stdout == ""
    assert out.stat().st_size > 4096
    assert list(tmp_path.iterdir()) == [out]


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    done = colibri("repack", source, "-o", tmp_path / "m.colibri", "--dry-run", "--json")
    plan = one_document(done.stdout)
    assert not list(tmp_path.iterdir())
    repack(source, tmp_path / "m.colibri")
    assert plan["file_bytes"] == (tmp_path / "m.colibri").stat().st_size


def test_a_damaged_container_fails_with_its_place(container: Path, tmp_path: Path) -> None:
    data = bytearray(container.read_bytes())
    data[-5000] ^= 1
    damaged = tmp_path / "damaged.colibri"
    damaged.write_bytes(data)
    done = colibri("verify", damaged, "--json")
    assert done.returncode == 1
    report = one_document(done.stdout)
    assert report["ok"] is False
    assert (report["errors"][0]["layer"], report["errors"][0]["expert"]) == (2, 11)


def test_quiet_verify_still_says_what_is_wrong(container: Path, tmp_path: Path) -> None:
    data = bytearray(container.read_bytes())
    data[-5000] ^= 1
    damaged = tmp_path / "damaged.colibri"
    damaged.write_bytes(data)
    done = colibri("verify", damaged, "-q")
    assert (done.returncode, done.stdout) == (1, "")
    assert "layer 2 expert 11" in done.stderr
    done = colibri("verify", container, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_dry_run_excludes_restart(source: Path, tmp_path: Path) -> None:
    done = colibri("repack", source, "-o", tmp_path / "m.colibri", "--dry-run", "--restart")
    assert done.returncode == 2 and "--restart" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_is_no_traceback(container: Path) -> None:
    call = f"{sys.executable} -c 'from colibri_tools.cli import main; main()' inspect"
    done = subprocess.run(
        f"set -o pipefail; {call} {container} --blocks --json | head -c 10 > /dev/null",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0: all of it fitted into the pipe


def test_a_closed_pipe_ends_a_report_as_it_ends_json(container: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    call = [sys.executable, "-c", "from colibri_tools.cli import main; main()"]
    for options in ([], ["--map"], ["--json"]):
        done = subprocess.run(
            [*call, "inspect", container, *options], stdout=write, stderr=subprocess.PIPE
        )
        assert (done.returncode, done.stderr) == (141, b"")
    os.close(write)


@pytest.mark.parametrize("options", [[], ["--map"], ["--tensors"], ["--blocks"]])
def test_no_line_ends_in_spaces(container: Path, source: Path, options: list[str]) -> None:
    text = colibri("inspect", container, *options).stdout
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_an_id_fits_a_line_of_80_columns(container: Path) -> None:
    text = colibri("inspect", container, env={**os.environ, "COLUMNS": "80"}).stdout
    assert json.loads(colibri("inspect", container, "--json").stdout)["id"] in text


def test_a_checkpoint_has_no_blocks_to_count(source: Path, container: Path) -> None:
    assert "ok: 132 tensors read whole" in colibri("verify", source).stdout
    assert "blocks and " in colibri("verify", container).stdout


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_repack_says_what_is_left(
    tmp_path: Path, signum: signal.Signals, when: str
) -> None:
    tiny.write_hf(tmp_path / "src", "mixtral")
    code = (
        "import time, colibri_tools.repack as r\n"
        "from colibri_tools.cli import main\n"
        "inner = r._Copier.run\n"
        "def slow(self, n):\n"
        f"    if '{when}' == 'late': inner(self, n)\n"
        "    print('writing', flush=True); time.sleep(60)\n"
        "r._Copier.run = slow\n"
        "main()"
    )
    out = tmp_path / "o"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "repack", str(tmp_path / "src"), "-o", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.1)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert len(stderr.splitlines()) == 1
    left = sorted(p.name for p in tmp_path.iterdir())
    if when == "early":
        assert left == ["src"]
        return
    assert left == ["o.journal", "o.partial", "src"]
    assert "36 of 36 blocks" in stderr and "o.partial" in stderr and "--restart" in stderr
    done = colibri("repack", tmp_path / "src", "-o", out, "--json")
    result = one_document(done.stdout)
    assert result["n_kept"] == 36 + result["n_tensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o", "src"]
    assert colibri("verify", out, "--against", tmp_path / "src").returncode == 0


def test_starting_is_quick_because_heavy_imports_wait() -> None:
    code = "import sys, colibri_tools.cli; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"numpy", "tokenizers", "gguf", "torch", "safetensors", "_cffi_backend"}


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_plan_keeps_its_numbers_whole(container: Path, width: int) -> None:
    environment = {**os.environ, "COLUMNS": str(width)}
    text = colibri("plan", container, "--ram", "1M,1G", "--disk", "3GB/s", env=environment).stdout
    assert "…" not in text and "too small" in text and "not bound" in text


def test_narrow_terminals_are_respected(container: Path) -> None:
    done = colibri("inspect", container, "--map", env={**os.environ, "COLUMNS": "40"})
    assert max(map(len, done.stdout.splitlines())) <= 40


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("1.5m", 3 << 19),
        ("0", 0),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "4Q", "-1", "1e9", "4 G G", "0x10", "1.2.3", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="4G"):
        parse_size(text)


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 4096, 1 << 30, 1449551462)] == [
        "0 B", "1023 B", "4.00 KiB", "1.00 GiB", "1.35 GiB",
    ]  # fmt: skip
    assert [format_count(n) for n in (999, 14_600_000, 2_700_000_000)] == [
        "999",
        "14.6 M",
        "2.70 B",
    ]
