"""The C library as it is installed: what it ships, what it exports, and that both layers are usable
from it with nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_models import EXPERTS, make_model

from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine

ROOT = Path(__file__).parent.parent
CC = os.environ.get("CC", "cc").split()
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]


def run(*command: object, **options: str) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env={**os.environ, **options}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def cmake() -> str:
    """CMake 3.26 or later, beside this interpreter or on the path."""
    beside = Path(sys.executable).with_name("cmake")
    for found in (str(beside) if beside.exists() else None, shutil.which("cmake")):
        if found:
            version = re.search(r"(\d+)\.(\d+)", run(found, "--version"))
            if version and (int(version[1]), int(version[2])) >= (3, 26):
                return found
    pytest.skip("there is no CMake from 3.26 on")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `cmake --install` put the library."""
    tool, build = cmake(), tmp_path_factory.mktemp("build")
    prefix = tmp_path_factory.mktemp("prefix")
    run(tool, "-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_INSTALL_LIBDIR=lib")
    run(tool, "--build", build, "-j2")
    run(tool, "--install", build, "--prefix", prefix)
    return prefix


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("install") / "model.colibri")


def test_what_is_installed(prefix: Path) -> None:
    files = {str(p.relative_to(prefix)) for p in prefix.rglob("*") if p.is_file()}
    assert files >= {
        "bin/colibri-run",
        "include/colibri.h",
        "include/colibri_tokenizer.h",
        "include/colibri/container.h",
        "include/colibri/store.h",
        "lib/libcolibri.a",
        "lib/libcolibri.so",
    }
    assert {f for f in files if f.startswith("include")} == {
        "include/colibri.h",
        "include/colibri_tokenizer.h",
        "include/colibri/container.h",
        "include/colibri/store.h",
    }


def declared(header: Path) -> set[str]:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.S)
    return set(re.findall(r"\b((?:clb|colibri)_\w+)\(", text))


def test_the_library_exports_what_the_headers_declare(prefix: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    lines = run("nm", "-D", "--defined-only", prefix / "lib" / "libcolibri.so").splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    headers = list((prefix / "include").rglob("*.h"))
    assert exported == set().union(*map(declared, headers))
    assert {"colibri_open", "clb_store_next", "clb_container_open"} <= exported


@pytest.mark.parametrize("language", ["c11", "c++11"])
def test_each_header_stands_alone(prefix: Path, tmp_path: Path, language: str) -> None:
    cpp = language == "c++11"
    if cpp and shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    for name in ("colibri.h", "colibri_tokenizer.h", "colibri/store.h", "colibri/container.h"):
        source = tmp_path / ("alone.cc" if cpp else "alone.c")
        source.write_text(
            f"#include <{name}>\nint main() {{ return 0; }}\n".replace(
                "main()", "main()" if cpp else "main(void)"
            )
        )
        compiler = ["c++"] if cpp else CC
        flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-std={language}", "-fsyntax-only"]
        run(*compiler, *flags, f"-I{prefix / 'include'}", source)


@pytest.mark.parametrize("library", ["shared", "static"])
def test_another_engine_reads_experts_through_the_store(
    prefix: Path, model: Path, tmp_path: Path, library: str
) -> None:
    out, lib = tmp_path / "foreign_backend", prefix / "lib"
    source = ROOT / "tests" / "c" / "foreign_backend.c"
    link = [f"-L{lib}", "-lcolibri"]
    if library == "static":
        link = [lib / "libcolibri.a", "-lpthread", "-lm"]
    run(*CC, "-std=c11", *STRICT, f"-I{prefix / 'include'}", source, *link, "-o", out)
    *blocks, last = run(out, model, 3, LD_LIBRARY_PATH=str(lib)).splitlines()
    with Engine(model) as engine:
        assert last == f"next {int(engine.eval([3])[-1].argmax())}"
    with open_container(model) as container:
        assert len(blocks) == len(container.rows) * EXPERTS
        for line in blocks:
            row, expert, total = line.split()
            values = np.frombuffer(container.block(int(row), int(expert)), "<f4")
            assert float(total) == pytest.approx(values.sum(dtype=np.float64), rel=1e-9, abs=1e-6)


def test_the_example_drives_the_store_from_a_loop_of_its_own(
    prefix: Path, model: Path, tmp_path: Path
) -> None:
    out, lib = tmp_path / "foreign_loop", prefix / "lib"
    source = ROOT / "runtime" / "examples" / "foreign_loop.c"
    run(*CC, "-std=c11", *STRICT, f"-I{prefix / 'include'}", source, f"-L{lib}", "-lcolibri",
        "-o", out)  # fmt: skip
    chosen = [2, 0, 3]
    printed = run(out, model, *chosen, LD_LIBRARY_PATH=str(lib)).splitlines()
    with open_container(model) as container:
        expected = {
            f"{row} {expert} {np.frombuffer(container.block(row, expert), np.uint8).sum()}"
            for row in range(len(container.rows))
            for expert in chosen
        }
    assert len(printed) == len(expected)
    assert set(printed) == expected
    assert 20 <= len(source.read_text().splitlines()) <= 60
    refused = subprocess.run([out, model, "0", "9999"], capture_output=True, text=True,
                             env={**os.environ, "LD_LIBRARY_PATH": str(lib)})  # fmt: skip
    assert refused.returncode == 1
    assert "expert is 9999" in refused.stderr


@pytest.mark.parametrize("library", ["shared", "static"])
def test_the_examples_of_the_guide_run(
    prefix: Path, model: Path, tmp_path: Path, library: str
) -> None:
    examples = re.findall(r"```c\n(.*?)```", (ROOT / "docs" / "runtime.md").read_text(), re.S)
    assert len(examples) == 2
    lib = prefix / "lib"
    link = [f"-L{lib}", "-lcolibri"]
    if library == "static":
        link = [lib / "libcolibri.a", "-lpthread", "-lm"]
    shown = []
    for i, text in enumerate(examples):
        source = tmp_path / f"example{i}.c"
        source.write_text(text)
        out = tmp_path / f"example{i}"
        flags = ["-Wall", "-Wextra", "-Werror", f"-I{prefix / 'include'}"]
        run(*CC, *flags, source, *link, "-o", out)
        shown.append(run(out, model, LD_LIBRARY_PATH=str(lib)))
    with Engine(model) as engine:
        logit = float(engine.eval([1, 2, 3])[-1][0])
    assert float(shown[0].removeprefix("logit of token 0: ")) == pytest.approx(logit, rel=1e-5)
    assert sorted(line.split(":")[0] for line in shown[1].splitlines()) == ["expert 0", "expert 1"]
