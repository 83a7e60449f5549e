"""The encoders of csrc/quantize.c: against gguf-py, a peer's errors, and themselves."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from c_programs import ASAN, DEBUG, WARNINGS, command, compile_c, sanitizer
from gguf import GGMLQuantizationType as T
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_tools.sources import open_source

ROOT = Path(__file__).resolve().parent.parent
PEER = json.loads((ROOT / "tests/oracle/values/peer_quantize.json").read_text())

SIMPLE = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4]
SEARCHED = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS]
TYPES = [*SIMPLE, *SEARCHED]
FAST, NORMAL, BEST = range(3)

# Largest error of a weight, as a share of the largest magnitude of its block: half a step of the
# type for the largest possible range of codes, with room for the rounding of 4- and 6-bit scales.
BOUND = {
    T.Q4_0: 1 / 8, T.Q4_1: 2 / 15, T.Q5_0: 1 / 16, T.Q5_1: 2 / 31, T.Q8_0: 1 / 127,
    T.MXFP4: 1 / 3, T.Q2_K: 2 / 3, T.Q3_K: 1 / 2, T.Q4_K: 1 / 4, T.Q5_K: 1 / 6, T.Q6_K: 1 / 12,
    T.IQ4_NL: 1 / 5, T.IQ4_XS: 1 / 4,
}  # fmt: skip

by_type = pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name.lower())
by_effort = pytest.mark.parametrize("effort", [FAST, NORMAL, BEST], ids=["fast", "normal", "best"])


class Encoders:
    """csrc/quantize.c by ctypes, with the portable or the best kernels."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        for name in ("clb_kernels_scalar", "clb_kernels_best"):
            getattr(lib, name).restype = ctypes.c_void_p

    def run(
        self, t: T, x: Any, effort: int = NORMAL, importance: Any = None, portable: bool = False
    ) -> tuple[int, Any, int]:
        """Return status, bytes [rows, row bytes] and the index of a bad weight."""
        x = np.ascontiguousarray(x, np.float32)
        weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
        out = np.zeros((x.shape[0], x.shape[1] // weights * n_bytes), np.uint8)
        if importance is not None:
            importance = np.ascontiguousarray(importance, np.float32)
            assert importance.shape == (x.shape[1],)
        kernels = self.lib.clb_kernels_scalar() if portable else self.lib.clb_kernels_best()
        bad = ctypes.c_uint64(2**64 - 1)
        status = self.lib.clb_quantize_rows(
            ctypes.c_void_p(kernels), t.value, effort,
            x.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(x.shape[0]),
            ctypes.c_size_t(x.shape[1]),
            None if importance is None else importance.ctypes.data_as(ctypes.c_void_p),
            out.ctypes.data_as(ctypes.c_void_p), ctypes.byref(bad),
        )  # fmt: skip
        return status, out, bad.value

    def __call__(self, t: T, x: Any, *args: Any, **more: Any) -> Any:
        status, out, _ = self.run(t, x, *args, **more)
        assert status == 0
        return out


SOURCES = sorted([*(ROOT / "csrc").glob("blocks*.c"), *(ROOT / "csrc").glob("quantize*.c")])


@pytest.fixture(scope="session")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """The encoders, built with optimization."""
    path = tmp_path_factory.mktemp("quantize") / "libquantize.so"
    compile_c(SOURCES, [*WARNINGS, "-O3", "-shared", "-fPIC", "-lm"], path)
    return Encoders(ctypes.CDLL(str(path)))


def trained(name: str) -> Any:
    """Return float32 [64, 768]: the first weights of a matrix of fixtures/tiny-moe."""
    with open_source(ROOT / "fixtures" / "tiny-moe") as source:
        return source.read_f32(source.tensor(name), 0, 64 * 768).reshape(64, 768)


def matrix(name: str) -> Any:
    """Return float32 [64, 768]: the matrices that the peer's errors were measured on."""
    if name in TRAINED:
        return trained(TRAINED[name])
    rng = np.random.default_rng(sum(name.encode()))
    if name == "gauss":
        return (rng.standard_normal((64, 768)) * 0.02).astype(np.float32)
    if name == "heavy tails":
        return (rng.standard_t(3, (64, 768)) * 0.02).astype(np.float32)
    if name == "outlier columns":
        x = rng.standard_normal((64, 768)) * 0.02
        x[:, rng.choice(768, 6, replace=False)] *= 30
        return x.astype(np.float32)
    if name == "one sign":
        return np.abs(rng.standard_normal((64, 768)) * 0.02 + 0.05).astype(np.float32)
    assert name == "rows of many sizes"
    return (rng.standard_normal((64, 768)) * np.exp(rng.standard_normal((64, 1)) * 2)).astype("f4")


TRAINED = {
    "trained embedding": "model.embed_tokens.weight",
    "trained query": "model.layers.1.self_attn.q_proj.weight",
    "trained expert": "model.layers.2.mlp.experts.3.down_proj.weight",
}
MADE = ["gauss", "heavy tails", "outlier columns", "one sign", "rows of many sizes"]
MATRICES = [*MADE, *TRAINED]


def importance_of(name: str) -> Any:
    """Return float32 [768]: mean squares of activations, some columns of far more weight."""
    rng = np.random.default_rng(len(name))
    return (rng.standard_normal(768) ** 2 * np.exp(rng.standard_normal(768))).astype(np.float32)


def mean_squared_error(t: T, packed: Any, x: Any, importance: Any = None) -> float:
    """Return the mean of squared differences, weighted by column."""
    difference = (quants.dequantize(packed, t).astype(np.float64) - x) ** 2
    return float(np.mean(difference if importance is None else difference * importance))


# --- against gguf-py ------------------------------------------------------------------------------


@pytest.mark.parametrize("t", SIMPLE, ids=lambda t: t.name.lower())
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("effort", [FAST, NORMAL])
def test_simple_types_equal_gguf(encode: Encoders, t: T, name: str, effort: int) -> None:
    x = matrix(name)
    assert np.array_equal(encode(t, x, effort), quants.quantize(x, t))


# gguf divides 1 by a scale; for magnitudes below 2^-90 the quotient leaves float32 in some of its
# types, and what numpy then casts to integers is not defined. Those blocks store a zero scale here.
ordinary = st.floats(-8e3, 8e3, width=32).filter(lambda v: v == 0 or abs(v) > 2**-90)


@settings(max_examples=200, deadline=None)
@given(block=st.lists(ordinary, min_size=32, max_size=32), zeros=st.integers(0, 32))
def test_simple_types_equal_gguf_on_any_block(
    encode: Encoders, block: list[float], zeros: int
) -> None:
    block[:zeros] = [0.0] * zeros
    x = np.array([block, [-v for v in block]], np.float32)
    for t in SIMPLE:
        assert np.array_equal(encode(t, x), quants.quantize(x, t)), t.name


def test_mxfp4_ties_and_powers_of_two_equal_gguf(encode: Encoders) -> None:
    values = [0.5, 1.5, 2.5, 3.5, 5, 7, 10, 12, 8, 6, 15.9999990]
    base = np.array(values + [-v for v in values] + [0.25, -0.25, 0.0, -0.0] + [1.0] * 6, "f4")
    for exponent in (-60, -10, -1, 0, 1, 10, 17, 100):
        for top in (1.0, np.float32(1.9999999), np.float32(1 - 2**-24)):
            x = (base * np.float32(2.0**exponent))[None] * top
            assert np.array_equal(encode(T.MXFP4, x), quants.quantize(x, T.MXFP4)), exponent


# --- error ----------------------------------------------------------------------------------------


@by_type
@pytest.mark.parametrize("name", MATRICES)
def test_error_is_no_worse_than_the_peers(encode: Encoders, t: T, name: str) -> None:
    # 1e-6: the mean itself is computed in float64 from float32 values.
    x, importance = matrix(name), importance_of(name)
    plain, weighted = PEER["errors"][name][t.name.lower()]
    assert mean_squared_error(t, encode(t, x), x) <= plain * (1 + 1e-6)
    found = encode(t, x, NORMAL, importance)
    assert mean_squared_error(t, found, x, importance) <= weighted * (1 + 1e-6)


@by_type
@pytest.mark.parametrize("name", MATRICES)
def test_more_effort_gives_less_error(encode: Encoders, t: T, name: str) -> None:
    x = matrix(name)
    fast, normal, best = (mean_squared_error(t, encode(t, x, e), x) for e in (FAST, NORMAL, BEST))
    assert best <= normal <= fast
    assert best < normal  # never merely the same


@by_type
def test_importance_moves_the_error_away_from_what_matters(encode: Encoders, t: T) -> None:
    x, importance = matrix("gauss"), importance_of("gauss")
    with_it = mean_squared_error(t, encode(t, x, BEST, importance), x, importance)
    without = mean_squared_error(t, encode(t, x, BEST), x, importance)
    assert with_it < without


@by_type
@by_effort
def test_zero_importance_of_a_group_counts_its_weights_equally(
    encode: Encoders, t: T, effort: int
) -> None:
    x = matrix("gauss")
    ones, holes = np.ones(768, np.float32), np.ones(768, np.float32)
    holes[:256] = 0
    assert np.array_equal(encode(t, x, effort, ones), encode(t, x, effort, holes))
    assert np.array_equal(encode(t, x, effort, ones), encode(t, x, effort, np.zeros(768)))


# --- one result for every instruction set ---------------------------------------------------------


@by_type
@by_effort
@pytest.mark.parametrize("name", MATRICES)
def test_portable_and_simd_code_give_the_same_bytes(
    encode: Encoders, t: T, effort: int, name: str
) -> None:
    x, importance = matrix(name)[:8], importance_of(name)
    for weights in (None, importance):
        simd = encode(t, x, effort, weights)
        assert np.array_equal(simd, encode(t, x, effort, weights, portable=True))


PROGRAM = [ROOT / "tests/c/test_quantize.c", *SOURCES]
CROSS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


def test_no_access_outside_buffers(tmp_path: Path) -> None:
    compile_c(PROGRAM, [*DEBUG, *sanitizer(ASAN, tmp_path)], tmp_path / "test_quantize")
    subprocess.run(command(tmp_path / "test_quantize"), check=True, capture_output=True)


def test_another_cpu_and_another_compiler_give_the_same_bytes(tmp_path: Path) -> None:
    """x86-64 with AVX2, and where the tools are there clang, and NEON in an emulator."""
    flags = ["-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    results = set()
    for compiler, emulator in (("cc", []), ("clang", []), (CROSS[0], [CROSS[1]])):
        if not all(shutil.which(program) for program in (compiler, *emulator)):
            continue
        out, more = tmp_path / compiler, [*WARNINGS, "-O2", *(["-static"] if emulator else [])]
        call = [compiler, *flags, *more, *map(str, PROGRAM), "-lm", "-o", str(out)]
        subprocess.run(call, check=True, capture_output=True)
        done = subprocess.run([*emulator, str(out)], check=True, capture_output=True)
        results.add(done.stdout)
    assert len(results) == 1


@by_type
def test_rows_do_not_depend_on_their_neighbours(encode: Encoders, t: T) -> None:
    x, importance = matrix("heavy tails"), importance_of("gauss")
    for weights in (None, importance):
        whole = encode(t, x, NORMAL, weights)
        for row in (0, 5, 63):
            assert np.array_equal(encode(t, x[row : row + 1], NORMAL, weights)[0], whole[row])


# --- any input ------------------------------------------------------------------------------------

magnitudes = st.sampled_from([1e-38, 1e-20, 1e-7, 1e-3, 1.0, 300.0, 6e4])


@st.composite
def blocks(draw: st.DrawFn) -> Any:
    """Return float32 [1, 256]: random, constant, a single outlier, subnormal, or mixed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal(256) * draw(magnitudes) / 5
    kind = draw(st.sampled_from(["random", "constant", "outlier", "zeros", "mixed", "subnormal"]))
    if kind == "constant":
        x[:] = x[0]
    if kind == "outlier":
        x[:] = 0
        x[draw(st.integers(0, 255))] = draw(magnitudes)
    if kind == "zeros":
        x[rng.random(256) < 0.9] = 0
    if kind == "mixed":
        x[: draw(st.integers(1, 255))] *= 1e-12
    if kind == "subnormal":
        x[:] = rng.integers(-5, 6, 256) * 1e-45
    return np.clip(x, -6e4, 6e4).astype(np.float32)[None]


@settings(max_examples=150, deadline=None)
@given(x=blocks(), effort=st.sampled_from([FAST, NORMAL, BEST]), hole=st.integers(0, 8))
def test_any_block_stays_finite_and_within_the_bound(
    encode: Encoders, x: Any, effort: int, hole: int
) -> None:
    importance = np.ones(256, np.float32)
    importance[: 32 * hole] = 0
    for t in TYPES:
        for weights in (None, importance):
            packed = encode(t, x, effort, weights)
            assert np.array_equal(packed, encode(t, x, effort, weights, portable=True)), t.name
            decoded = quants.dequantize(packed, t).astype(np.float64)
            assert np.isfinite(decoded).all()
            if weights is None:
                # 2^-24 x the largest integer scale: scales below the smallest binary16 are lost.
                room = BOUND[t] * np.abs(x).max() + 2**-24 * 4096
                assert np.abs(decoded - x).max() <= room, t.name


@by_type
def test_what_a_type_cannot_hold_is_named(encode: Encoders, t: T) -> None:
    for value in (np.nan, np.inf, -np.inf, *([] if t == T.MXFP4 else [1e9])):
        x = matrix("gauss")[:2].copy()
        x[1, 5] = value
        status, _, bad = encode.run(t, x)
        assert (status, bad) == (1, 768 + 5), value


def test_f16_overflow_is_named_and_bf16_rounds_to_even(encode: Encoders) -> None:
    x = np.array([[1.0, 65519.0, 65520.0]], np.float32)
    assert encode.run(T.F16, x)[::2] == (1, 2)
    assert encode(T.F16, x[:, :2]).view(np.float16).tolist() == [[1.0, 65504.0]]
    bits = np.array([[0x3F808000, 0x3F818000, 0x80000000, 0x7F7F7FFF, 1]], np.uint32)
    found = encode(T.BF16, bits.view(np.float32)).view(np.uint16)
    assert found.tolist() == [[0x3F80, 0x3F82, 0x8000, 0x7F7F, 0]]


def test_types_without_an_encoder_and_odd_rows_are_refused(encode: Encoders) -> None:
    assert encode.run(T.IQ2_XS, matrix("gauss"))[0] == -1
    assert encode.run(T.Q4_K, matrix("gauss")[:, :96])[0] == -1
    assert encode.run(T.Q4_0, matrix("gauss")[:, :40])[0] == -1
