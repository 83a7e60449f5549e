"""A short run of the fuzz targets, with whatever C compiler is there, and the inputs that once
broke something. `make fuzz` runs the same code for as long as wanted, guided by coverage."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from c_programs import ASAN, CSRC, READER, ROOT, RUNTIME, TEST_C, WARNINGS, compile_c, sanitizer
from fuzz import python_readers as fuzz
from fuzz.make_seeds import seeds
from fuzz.make_tokenizer_seeds import seeds as tokenizer_seeds

FUZZ = ROOT / "tests" / "fuzz"
CRASHERS = sorted((FUZZ / "crashers").iterdir())
RUNS = int(os.environ.get("COLIBRI_FUZZ_RUNS", "1000"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the seeds and `replay`, as `make fuzz` has it."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name, raw in seeds().items():
        (folder / "seeds").mkdir(exist_ok=True)
        (folder / "seeds" / name).write_bytes(raw)
    types = [
        compile_c([source], ["-c", "-O0"], folder / f"{source.stem}.o")
        for source in sorted(CSRC.glob("blocks*.c"))
    ]
    flags = ["-g", "-O1", *WARNINGS, f"-I{FUZZ}", f"-I{TEST_C}", *sanitizer(ASAN, folder)]
    sources = [FUZZ / "replay.c", FUZZ / "mutate.c", *READER, *types]
    compile_c(sources, flags, folder / "replay")
    return folder


def verdicts(folder: Path, paths: list[Path]) -> list[str]:
    done = subprocess.run([folder / "replay", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_seeds_are_small_and_accepted(folder: Path) -> None:
    paths = sorted((folder / "seeds").iterdir())
    assert verdicts(folder, paths) == ["ok"] * len(paths)
    assert sum(path.stat().st_size for path in paths) < 100_000


def test_what_once_broke_the_reader_is_refused_by_both(folder: Path) -> None:
    assert all(line.startswith("rule ") for line in verdicts(folder, CRASHERS))
    inputs = fuzz.judged(folder / "replay", CRASHERS)
    assert fuzz.compare_readers(inputs, lambda _: True).accepted == 0


def test_both_readers_agree_on_changes_that_follow_the_structure(folder: Path) -> None:
    paths = sorted((folder / "seeds").iterdir())
    inputs = fuzz.mutants(folder / "replay", paths, 5, RUNS)
    tally = fuzz.compare_readers(inputs, lambda _: True)
    assert tally.executions == RUNS
    assert RUNS / 20 < tally.accepted < RUNS / 2  # both sides of the checks are reached


def test_changed_tokenizer_tables_are_refused_or_used_in_bounds(tmp_path: Path) -> None:
    flags = ["-g", "-O1", *WARNINGS, f"-I{FUZZ}", *sanitizer(ASAN, tmp_path)]
    parts = ("tokenizer.c", "pattern.c", "unicode.c", "errors.c")
    sources = [FUZZ / "fuzz_tokenizer.c", FUZZ / "replay_tokenizer.c", *READER]
    sources += [*(RUNTIME / name for name in parts), *sorted(CSRC.glob("blocks*.c"))]
    program = compile_c(sources, flags, tmp_path / "replay")
    paths = []
    for name, raw in tokenizer_seeds().items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(raw)
    runs = 20 * RUNS
    done = subprocess.run([program, "7", str(runs), *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert runs / 20 < int(done.stdout) < runs  # both sides of the checks are reached


@pytest.mark.parametrize("target", fuzz.TARGETS, ids=lambda target: target.name)
def test_only_colibri_errors_escape_from_source_readers(target: fuzz.Target) -> None:
    tally = fuzz.fuzz(target, random.Random(3), lambda n: n < RUNS)
    assert tally.executions >= RUNS
    assert 0 < tally.accepted < RUNS


def test_a_reader_that_fails_otherwise_is_a_finding() -> None:
    def broken(data: bytes) -> None:
        if b"zwei" not in data:
            raise KeyError(data[:1])

    target = fuzz.Target("broken", fuzz.gguf_seeds, fuzz.change_bytes, broken)
    with pytest.raises(fuzz.Finding, match="KeyError"):
        fuzz.fuzz(target, random.Random(1), lambda n: n < 5000)
