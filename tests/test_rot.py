"""Damage under a running model: bits that flip, files that are cut or replaced.

`c/test_rot.c` does it in process, with the whole library under AddressSanitizer and
UndefinedBehaviorSanitizer (or valgrind); the commands are tried from outside.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tm
from c_programs import LIBRARY, ROOT, RUN_TOOLS, TEST_C, Library, Program, under_valgrind
from engine_models import EXPERTS, make_model
from gguf import GGMLQuantizationType
from tiny_containers import Containers

from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine
from colibri_tools.errors import FormatError, JobError

N_FLIPS = int(os.environ.get("COLIBRI_TEST_FLIPS", "30" if under_valgrind() else "400"))
CHECKS = {"first": 0, "always": 1, "never": 2}
TOKENS = [1, 2, 3, 5, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rot")


@pytest.fixture(scope="module")
def rot(folder: Path, asan_library: Library) -> Program:
    """tests/c/test_rot.c with all of libcolibri, built with sanitizers."""
    sources = [TEST_C / "test_rot.c", *asan_library.objects]
    return Program(folder / "test_rot", sources, asan_library.flags)


@pytest.fixture(scope="module")
def program(folder: Path, asan_library: Library) -> Program:
    """colibri-run, likewise."""
    return Program(folder / "colibri-run", [*RUN_TOOLS, *asan_library.objects], asan_library.flags)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Every role the graph can have; every token reads every block."""
    return make_model(
        tmp_path / "model.colibri",
        top_k=EXPERTS,
        moe_layers=[1, 1, 0],
        dense_width=24,
        shared_width=24,
        shared_gated=True,
        qkv_bias=True,
        o_bias=True,
        qk_norm="head",
    )


@pytest.fixture
def quantized(containers: Containers, tmp_path: Path) -> Path:
    """Every tensor type that gguf can dequantize, in experts and outside them."""
    kinds: list[GGMLQuantizationType] = []

    def choose(name: str) -> GGMLQuantizationType:
        if any(word in name for word in ("norm", "gate_inp", "bias")):
            return GGMLQuantizationType.F32  # as in real files
        kinds.append(tm.QUANT_TYPES[len(kinds) % len(tm.QUANT_TYPES)])
        return kinds[-1]

    spec = tm.wide_spec("qwen2_moe", layers=4, experts=2, top_k=2, vocab=61)
    path = containers.gguf("qwen2_moe", spec, types=choose)
    with open_container(path) as container:
        used = {part.dtype.id for layout in container.layouts for part in layout.parts}
        assert len(used) >= 8
        used |= {tensor.dtype.id for tensor in container.tensors.values()}
    assert used >= {int(kind) for kind in tm.QUANT_TYPES}
    return Path(path.rename(tmp_path / "model.colibri"))


def counts(said: str) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"(\w+) (\d+)", said)}


# -- bits that flip ------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["first", "always"])
def test_every_flipped_bit_that_is_read_is_found_and_placed(
    rot: Program, model: Path, check: str
) -> None:
    found = counts(rot("flips", model, 1 + CHECKS[check], N_FLIPS, CHECKS[check]))
    assert found["refused"] == found["tensors"] + found["blocks"]
    assert min(found["tensors"], found["blocks"]) > 0
    assert found["unread"] == found["changed"] == found["numeric"] == 0


def test_unchecked_damage_is_another_result_and_no_bad_access(rot: Program, model: Path) -> None:
    found = counts(rot("flips", model, 3, N_FLIPS, CHECKS["never"]))
    assert found["refused"] == 0
    assert found["changed"] > N_FLIPS // 4


@pytest.mark.parametrize("check", CHECKS)
def test_damage_to_every_block_format(rot: Program, quantized: Path, check: str) -> None:
    found = counts(rot("flips", quantized, 7, N_FLIPS // 4 + 5, CHECKS[check]))
    assert found["refused"] == (0 if check == "never" else found["tensors"] + found["blocks"])
    assert found["unread"] == 0


@pytest.mark.parametrize("check", CHECKS)
def test_damage_between_two_reads_is_found_by_always(rot: Program, model: Path, check: str) -> None:
    rot("later", model, CHECKS[check])


# -- files that are cut or replaced --------------------------------------------------------------


def test_a_file_cut_while_it_is_open_is_an_error_and_no_crash(rot: Program, model: Path) -> None:
    rot("cut", model)


def test_the_library_maps_no_file_unless_asked_to() -> None:
    """A cut file then raises SIGBUS nowhere: every mapping is anonymous, or a ring of io_uring, or
    the one that `CLB_IO_MMAP` asks for."""
    calls = [
        (source.name, call)
        for source in LIBRARY
        for call in re.findall(r"\bmmap\(.*?\);", source.read_text(), re.S)
        if "MAP_ANONYMOUS" not in call
    ]
    rings = [name for name, call in calls if name == "io_uring.c" and "u->fd, IORING_OFF_" in call]
    files = [name for name, call in calls if name == "store.c" and "MAP_SHARED, fd, 0" in call]
    assert (len(rings), len(files)) == (2, 1)
    assert len(calls) == 3, calls
    store = (ROOT / "runtime" / "src" / "store.c").read_text()
    assert len(re.findall(r"\bmap_file\(", store)) == 2  # its definition, and:
    assert "io == CLB_IO_MMAP && map_file(s)" in store


def test_a_replaced_container_goes_on_as_the_one_that_was_opened(
    model: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other.colibri", seed=9, top_k=EXPERTS)
    with Engine(model) as engine:
        expected = engine.forward(TOKENS)
    with Engine(other) as engine:
        of_other = engine.forward(TOKENS)
    with Engine(model, expert_cache=engine.memory.min_cache_bytes) as engine:
        other.replace(model)
        for _ in range(3):
            assert np.array_equal(engine.forward(TOKENS), expected)
        assert engine.stats().reads > EXPERTS
    with Engine(model) as engine:
        assert np.array_equal(engine.forward(TOKENS), of_other)


def test_a_removed_container_goes_on(model: Path) -> None:
    with Engine(model) as engine:
        model.unlink()
        assert np.isfinite(engine.forward(TOKENS)).all()
    with pytest.raises(FormatError, match="does not exist"):
        Engine(model)


def test_a_writer_elsewhere_is_no_matter(model: Path, tmp_path: Path) -> None:
    """Another process writes containers beside it."""
    code = (
        "from pathlib import Path; from engine_models import make_model\n"
        f"for i in range(3): make_model(Path({str(tmp_path)!r}) / f'{{i}}.colibri', seed=i)"
    )
    with Engine(model) as engine:
        expected = engine.forward(TOKENS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as writer:
        rounds = 0
        while writer.poll() is None:
            with Engine(model, expert_cache=1 << 17, check="always") as engine:
                assert np.array_equal(engine.forward(TOKENS), expected)
            rounds += 1
    assert writer.returncode == 0
    assert rounds > 1


# -- an embedding whose rows stay in the file ----------------------------------------------------


def test_an_embedding_on_demand_is_checked_at_open(model: Path) -> None:
    with open_container(model) as container:
        tensor = container.tensors["-1.token_embd"]
    for byte in (0, 4097, tensor.n_bytes - 1):  # in the first and the last piece, and between
        flip(model, tensor.offset + byte)
        for check in ("first", "always"):
            with pytest.raises(JobError, match=r"tensor -1\.token_embd: .* CRC-32C") as failure:
                Engine(model, check=check)
            assert f"at offset {tensor.offset} " in failure.value.message
        with Engine(model, check="never") as engine:
            engine.check_tokens(TOKENS)
        flip(model, tensor.offset + byte)
    Engine(model, check="always").close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x20]))


# -- the commands --------------------------------------------------------------------------------


def python_run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from colibri_tools.cli import main; main()"
    command = [sys.executable, "-W", "error", "-c", code, "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_damage_ends_a_run_with_its_place_and_exit_code_1(
    program: Program, model: Path, tmp_path: Path, kind: str
) -> None:
    with open_container(model) as container:
        cell, tensor = container.cell(1, 7), container.tensors["1.attn_q"]
    offset = int(cell["offset"]) if kind == "block" else tensor.offset
    place = "layer 1 (row 1), expert 7" if kind == "block" else "tensor 1.attn_q"
    flip(model, offset + 11)
    logits = tmp_path / "logits.npy"
    call = (model, "--tokens", "1,2,3", "--max-tokens", 4, "--logits", logits)
    before = sorted(tmp_path.iterdir())
    for run in (python_run, program.run):
        for check in (), ("--check", "first"), ("--check", "always"):
            done = run(*call, *check)
            assert (done.returncode, done.stdout) == (1, ""), done.stderr
            errors = "".join(re.findall(r"^error: .*\n", done.stderr, re.M))
            assert done.stderr.endswith(errors)  # the memory plan came before
            assert re.fullmatch(
                rf"error: {re.escape(place)}: the \d+ bytes at offset {offset} have CRC-32C "
                r"[0-9a-f]{8}, expected [0-9a-f]{8}: the container is damaged; "
                rf"'colibri verify {model}' tells where\n",
                errors,
            ), done.stderr
        document = json.loads(run(*call, "--json").stdout)
        assert document["ok"] is False and document["exit_code"] == 1
        assert place in document["error"]["message"]
        assert sorted(tmp_path.iterdir()) == before
        done = run(*call[:-2], "--check", "never", "--ignore-eos")
        assert done.returncode == 0 or "not finite" in done.stderr, done.stderr


def test_check_takes_three_words(program: Program, model: Path) -> None:
    for run in (python_run, program.run):
        for check in CHECKS:
            assert run(model, "--tokens", "1", "--max-tokens", 0, "--check", check).returncode == 0
        done = run(model, "--tokens", "1", "--check", "sometimes")
        assert done.returncode == 2
        assert "sometimes" in done.stderr and "always" in done.stderr
