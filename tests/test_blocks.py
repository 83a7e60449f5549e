"""The block formats and check sums of csrc/: against gguf-py, hashlib and themselves."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from c_programs import command, under_valgrind
from gguf import GGMLQuantizationType as T
from gguf import quants

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    *sorted((ROOT / "csrc").glob("blocks*.c")),
    ROOT / "csrc/crc32c.c",
    ROOT / "csrc/sha256.c",
]
CFLAGS = ["-std=c11", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
SANITIZERS = ["-O2", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]

FLOATS = [T.F32, T.F16, T.BF16]
TYPES = [*FLOATS, *(t for t in quants._type_traits if t != T.BF16)]
NONE = 2**64 - 1

# Offsets of the binary16 scales of a block. The others: iq1_m, mxfp4, nvfp4.
F16_SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0], T.IQ3_XXS: [0], T.IQ3_S: [0], T.IQ1_S: [0],
    T.IQ4_NL: [0], T.IQ4_XS: [0], T.TQ1_0: [52], T.TQ2_0: [64],
}  # fmt: skip

by_type = pytest.mark.parametrize("t", TYPES, ids=lambda t: t.name.lower())


# --- the library ----------------------------------------------------------------------------------


class TypeInfo(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("block_weights", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("scale_kind", ctypes.c_int),
        ("n_scales", ctypes.c_uint32),
        ("scale_offset", ctypes.c_uint32 * 2),
    )


P, SIZE, U32, F = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_float
SIGNATURES = {
    "clb_type_by_id": (ctypes.POINTER(TypeInfo), [U32]),
    "clb_type_by_name": (ctypes.POINTER(TypeInfo), [ctypes.c_char_p]),
    "clb_type_count": (SIZE, []),
    "clb_type_at": (ctypes.POINTER(TypeInfo), [SIZE]),
    "clb_row_bytes": (ctypes.c_bool, [P, ctypes.c_uint64, P]),
    "clb_kernels_scalar": (P, []),
    "clb_kernels_best": (P, []),
    "clb_kernels_name": (ctypes.c_char_p, [P]),
    "clb_dequantize": (ctypes.c_int, [U32, P, P, SIZE]),
    "clb_dequantize_with": (ctypes.c_int, [P, U32, P, P, SIZE]),
    "clb_dequantize_best": (ctypes.c_int, [U32, P, P, SIZE]),
    "clb_find_nonfinite": (ctypes.c_uint64, [U32, P, ctypes.c_uint64]),
    "clb_matmul_rows": (
        ctypes.c_int,
        [P, U32, P, SIZE, SIZE, SIZE, SIZE, P, SIZE, SIZE, P, SIZE],
    ),
    "clb_dot_f32": (F, [P, P, P, SIZE]),
    "clb_sum_f32": (F, [P, P, SIZE]),
    "clb_axpy_f32": (None, [P, P, P, F, SIZE]),
    "clb_exp_f32": (None, [P, P, P, F, SIZE]),
    "clb_silu_mul": (None, [P, P, P, P, SIZE]),
    "clb_softcap_f32": (None, [P, P, P, F, SIZE]),
    "clb_f32_to_f16": (None, [P, P, P, SIZE]),
    "clb_f32_to_bf16": (None, [P, P, P, SIZE]),
    "clb_crc32c": (U32, [U32, P, SIZE]),
    "clb_crc32c_portable": (U32, [U32, P, SIZE]),
    "clb_sha256_init": (None, [P]),
    "clb_sha256_init_portable": (None, [P]),
    "clb_sha256_update": (None, [P, P, SIZE]),
    "clb_sha256_final": (None, [P, P]),
    "clb_sha256": (None, [P, SIZE, P]),
}


def compile_c(compiler: str, flags: list[str], sources: list[Path], output: Path) -> None:
    command = [compiler, *CFLAGS, *flags, *map(str, sources), "-lm", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("blocks") / "libblocks.so"
    compile_c("cc", [*WARNINGS, "-O3", "-shared", "-fPIC"], SOURCES, path)
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        getattr(loaded, name).restype = result
        getattr(loaded, name).argtypes = arguments
    return loaded


@dataclass
class Kernels:
    lib: ctypes.CDLL
    handle: int

    def dequantize(self, t: T, data: np.ndarray, n: int) -> np.ndarray:
        out = np.empty(n, np.float32)
        assert self.lib.clb_dequantize_with(self.handle, t, ptr(data), ptr(out), n) == 0
        return out

    def matmul(self, t: T, w: np.ndarray, x: np.ndarray, n_rows: int) -> np.ndarray:
        """w [n_rows, row_bytes] u8, x [n_tokens, n_cols] f32 -> [n_tokens, n_rows] f32"""
        y = np.full((len(x), n_rows), np.nan, np.float32)
        n_cols = x.shape[1]
        done = self.lib.clb_matmul_rows(
            self.handle, t, ptr(w), w.shape[1], n_cols, 0, n_rows, ptr(x), n_cols, len(x),
            ptr(y), n_rows,
        )  # fmt: skip
        assert done == 0
        return y


@pytest.fixture(scope="session", params=["scalar", "best"])
def kernels(request: pytest.FixtureRequest, lib: ctypes.CDLL) -> Kernels:
    return Kernels(lib, getattr(lib, f"clb_kernels_{request.param}")())


@pytest.fixture(scope="session")
def both(lib: ctypes.CDLL) -> tuple[Kernels, Kernels]:
    return Kernels(lib, lib.clb_kernels_scalar()), Kernels(lib, lib.clb_kernels_best())


def ptr(a: np.ndarray) -> int:
    return a.ctypes.data


def at_odd_address(data: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts `offset` bytes after an aligned address."""
    space = np.zeros(data.nbytes + offset, np.uint8)
    space[offset:] = data.reshape(-1).view(np.uint8)
    return space[offset:].reshape(*data.shape[:-1], -1)


def bits(a: np.ndarray) -> np.ndarray:
    """u32 of f32, all NaN alike: which NaN comes out is not promised."""
    return np.where(np.isnan(a), np.uint32(0x7FC00000), np.ascontiguousarray(a).view(np.uint32))


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(a), bits(b))


# --- blocks ---------------------------------------------------------------------------------------


def set_scales(t: T, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Sets every binary16 scale field; scales [n_blocks] f16."""
    raw = scales.astype("<f2").view(np.uint16)
    for offset in F16_SCALES.get(t, []):
        blocks[:, offset] = raw & 255
        blocks[:, offset + 1] = raw >> 8
    if t == T.IQ1_M:
        for word in range(4):
            high = blocks[:, 49 + 2 * word]
            blocks[:, 49 + 2 * word] = (high & 0x0F) | ((raw >> (4 * word) & 15) << 4)


def random_scales(rng: np.random.Generator, n: int) -> np.ndarray:
    """Finite binary16 of every kind: both signs, subnormal, zero, the largest."""
    scales = rng.integers(0, 2**16, n).astype(np.uint16).view(np.float16)
    scales[~np.isfinite(scales)] = 1.5
    edges = np.array([0.0, -0.0, 2**-24, -(2**-24), 2**-14 - 2**-24, 65504, -65504], np.float16)
    return np.concatenate([edges, scales])[:n]


def random_blocks(t: T, n_blocks: int, seed: int = 0, moderate: bool = False) -> np.ndarray:
    """[n_blocks, block_bytes] u8 of finite weights; with `moderate`, of ordinary size."""
    rng = np.random.default_rng([seed, int(t)])
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    if t in FLOATS:
        values = rng.standard_normal((n_blocks, n_weights)).astype(np.float32)
        return quants.quantize(values, t).view(np.uint8).reshape(n_blocks, n_bytes)
    blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    if moderate:
        scales = rng.uniform(0.001, 0.1, n_blocks).astype(np.float16)
        set_scales(t, blocks, scales)
        if len(F16_SCALES.get(t, [])) == 2:  # the min apart from the scale
            offset = F16_SCALES[t][1]
            mins = rng.uniform(-0.1, 0.1, n_blocks).astype("<f2").view(np.uint8)
            blocks[:, offset : offset + 2] = mins.reshape(n_blocks, 2)
    else:
        set_scales(t, blocks, random_scales(rng, n_blocks))
    if t == T.MXFP4:
        blocks[:, 0] = rng.integers(110, 130, n_blocks) if moderate else np.arange(n_blocks) % 253
    return blocks


def reference(t: T, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(np.ascontiguousarray(data), t).astype(np.float32).reshape(-1)


def n_cols_of(t: T) -> list[int]:
    unit = gguf.GGML_QUANT_SIZES[t][0]
    if unit == 1:
        return [1, 8, 31, 40, 48, 256, 1024, 1064]
    return [unit, 3 * unit, 1024 + unit]


# --- the table ------------------------------------------------------------------------------------


def test_table_has_every_type_gguf_can_decode(lib: ctypes.CDLL) -> None:
    table = [lib.clb_type_at(i).contents for i in range(lib.clb_type_count())]
    assert [t.id for t in table] == sorted(int(t) for t in TYPES)
    assert not lib.clb_type_at(len(table))
    for t in table:
        kind = T(t.id)
        assert t.name.decode() == kind.name.lower()
        assert (t.block_weights, t.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert list(t.scale_offset)[: t.n_scales] == F16_SCALES.get(kind, [])
        assert lib.clb_type_by_id(t.id).contents.id == t.id
        assert lib.clb_type_by_name(t.name).contents.id == t.id


def test_unknown_types_are_refused(lib: ctypes.CDLL) -> None:
    space = np.zeros(64, np.float32)
    for unknown in (4, 5, 9, 15, 24, 38, 41, 42, 10**6, 2**32 - 1):
        assert not lib.clb_type_by_id(unknown)
        assert lib.clb_dequantize(unknown, ptr(space), ptr(space), 1) == -1
        assert lib.clb_find_nonfinite(unknown, ptr(space), 16) == NONE
    assert not lib.clb_type_by_name(b"Q4_K")
    assert not lib.clb_type_by_name(b"")
    k = lib.clb_kernels_best()
    args = (0, 1, ptr(space), 64, 1, ptr(space), 64)
    assert lib.clb_matmul_rows(k, 4, ptr(space), 64, 64, *args) == -1
    assert lib.clb_matmul_rows(k, T.Q4_K, ptr(space), 64, 64, *args) == -1
    assert lib.clb_dequantize_best(T.Q4_0, ptr(space), ptr(space), 33) == -1


@by_type
def test_row_bytes(lib: ctypes.CDLL, t: T) -> None:
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    row = lib.clb_type_by_id(t)
    result = ctypes.c_uint64()

    def row_bytes(n_cols: int) -> int | None:
        return result.value if lib.clb_row_bytes(row, n_cols, ctypes.byref(result)) else None

    assert row_bytes(0) == 0
    assert row_bytes(7 * n_weights) == 7 * n_bytes
    if n_weights > 1:
        assert row_bytes(n_weights + 1) is None
        assert row_bytes(n_weights // 2) is None
    last = (2**64 - 1) // n_bytes
    if last * n_weights < 2**64:
        assert row_bytes(last * n_weights) == last * n_bytes
    if (last + 1) * n_weights < 2**64:
        assert row_bytes((last + 1) * n_weights) is None


# --- decoding -------------------------------------------------------------------------------------


@by_type
def test_decoding_equals_gguf_bit_for_bit(kernels: Kernels, t: T) -> None:
    blocks = random_blocks(t, 1500)
    expected = reference(t, blocks)
    for offset in range(4):
        found = kernels.dequantize(t, at_odd_address(blocks, offset), expected.size)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("t", TYPES[len(FLOATS) :], ids=lambda t: t.name.lower())
def test_every_code_is_decoded(kernels: Kernels, t: T) -> None:
    """All 256 values in every code byte at once, then random blocks: all codebook entries."""
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    blocks = np.repeat(np.arange(256, dtype=np.uint8)[:, None], n_bytes, axis=1)
    set_scales(t, blocks, np.full(256, -1.25, np.float16))
    expected = reference(t, blocks)
    assert_same_bits(kernels.dequantize(t, blocks, 256 * n_weights), expected)


def test_random_blocks_reach_all_codebook_entries() -> None:
    """What test_decoding_equals_gguf_bit_for_bit relies on, for the largest codebook."""
    blocks = random_blocks(T.IQ1_S, 1500).astype(np.uint16)
    high = blocks[:, 34::2] | blocks[:, 35::2] << 8
    index = blocks[:, 2:34].reshape(-1, 8, 4) | (high[:, :, None] >> [0, 3, 6, 9] & 7) << 8
    assert len(np.unique(index)) == 2048


def test_dequantize_and_best_are_the_same_function(lib: ctypes.CDLL) -> None:
    blocks = random_blocks(T.Q6_K, 3)
    a, b = np.empty(768, np.float32), np.empty(768, np.float32)
    assert lib.clb_dequantize(T.Q6_K, ptr(blocks), ptr(a), 768) == 0
    assert lib.clb_dequantize_best(T.Q6_K, ptr(blocks), ptr(b), 768) == 0
    assert_same_bits(a, b)


def test_best_kernels_are_simd_where_the_cpu_has_it(lib: ctypes.CDLL) -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert lib.clb_kernels_name(lib.clb_kernels_scalar()) == b"scalar"
    best = lib.clb_kernels_name(lib.clb_kernels_best()).decode()
    assert best in {"scalar", "avx2", "neon"}
    if all(f" {flag} " in flags.replace("\n", " ") for flag in ("avx2", "fma", "f16c")):
        assert best == "avx2"


# --- NaN and infinity -----------------------------------------------------------------------------


def first_nonfinite(weights: np.ndarray) -> int:
    bad = np.flatnonzero(~np.isfinite(weights))
    return int(bad[0]) if len(bad) else NONE


@by_type
def test_finite_weights_are_found_finite(lib: ctypes.CDLL, t: T) -> None:
    blocks = random_blocks(t, 1500)
    n = 1500 * gguf.GGML_QUANT_SIZES[t][0]
    assert lib.clb_find_nonfinite(t, ptr(blocks), n) == NONE


@pytest.mark.parametrize("bad", [0x7C00, 0xFC00, 0x7E01, 0x7C01, 0xFFFF], ids=hex)
@pytest.mark.parametrize(
    ("t", "field"),
    [(t, i) for t, fields in F16_SCALES.items() for i in range(len(fields))],
    ids=lambda v: v.name.lower() if isinstance(v, T) else f"field{v}",
)
def test_bad_scale_field_is_found(lib: ctypes.CDLL, t: T, field: int, bad: int) -> None:
    n_weights = gguf.GGML_QUANT_SIZES[t][0]
    for where in (0, 5, 19):
        blocks = at_odd_address(random_blocks(t, 20), where % 4)
        offset = F16_SCALES[t][field]
        blocks[where, offset : offset + 2] = bad & 255, bad >> 8
        n = 20 * n_weights
        assert lib.clb_find_nonfinite(t, ptr(blocks), n) == first_nonfinite(reference(t, blocks))
        assert lib.clb_find_nonfinite(t, ptr(blocks), n) == where * n_weights
        assert lib.clb_find_nonfinite(t, ptr(blocks), where * n_weights) == NONE


def test_bad_scattered_scale_of_iq1_m_is_found(lib: ctypes.CDLL) -> None:
    for bad in (0x7C00, 0xFE00, 0x7C01):
        blocks = random_blocks(T.IQ1_M, 6)
        scales = np.ones(6, np.float16)
        scales[4] = np.array(bad, np.uint16).view(np.float16)
        set_scales(T.IQ1_M, blocks, scales)
        assert first_nonfinite(reference(T.IQ1_M, blocks)) == 4 * 256
        assert lib.clb_find_nonfinite(T.IQ1_M, ptr(blocks), 6 * 256) == 4 * 256


def test_overflow_of_mxfp4_is_found_weight_by_weight(lib: ctypes.CDLL) -> None:
    for exponent in range(250, 256):
        for seed in range(50):
            blocks = random_blocks(T.MXFP4, 4, seed)
            blocks[2, 0] = exponent
            if seed % 2:
                blocks[2, 1:] &= 0x44 if exponent < 255 else 0x11  # small codes
            expected = first_nonfinite(reference(T.MXFP4, blocks))
            assert lib.clb_find_nonfinite(T.MXFP4, ptr(blocks), 128) == expected


@pytest.mark.parametrize("t", FLOATS, ids=lambda t: t.name.lower())
def test_one_bad_float_is_found_anywhere(lib: ctypes.CDLL, t: T) -> None:
    n_bytes = gguf.GGML_QUANT_SIZES[t][1]
    n = 9001
    tops = {T.F32: b"\x00\x00\x80\x7f", T.F16: b"\x00\xfc", T.BF16: b"\x81\xff"}
    clean = random_blocks(t, n)
    for where in (0, 1, 7, 15, 4095, 4096, 8191, 8999, 9000):
        data = clean.copy()
        data[where:] = np.frombuffer(tops[t], np.uint8)
        data = at_odd_address(data, 1)
        assert lib.clb_find_nonfinite(t, ptr(data), n) == where
        assert lib.clb_find_nonfinite(t, ptr(data), where) == NONE
    largest = np.full((n, n_bytes), 0xFF, np.uint8)
    largest[:, -2 if t == T.F32 else -1] = 0x7F
    largest[:, -1] = {T.F32: 0x7F, T.F16: 0x7B, T.BF16: 0x7F}[t]
    if t == T.BF16:
        largest[:, 0] = 0x7F
    assert lib.clb_find_nonfinite(t, ptr(largest), n) == NONE


# --- dot products ---------------------------------------------------------------------------------


def to_f32(exact: Fraction) -> np.float32:
    """Rounded once, to nearest even."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(s)) for s in (-np.inf, np.inf)]
    return min(
        [near, *around],
        key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1),
    )


def canonical_dot(a: np.ndarray, b: np.ndarray) -> np.float32:
    """blocks.h in exact arithmetic: 32 partial sums, fused, then reduced by halves."""
    partial = [np.float32(0)] * 32
    for j, (u, v) in enumerate(zip(a, b, strict=True)):
        exact = Fraction(float(u)) * Fraction(float(v)) + Fraction(float(partial[j % 32]))
        partial[j % 32] = to_f32(exact)
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [np.float32(partial[i] + partial[i + half]) for i in range(half)]
    return partial[0]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 70, 200, 523])
def test_dot_is_the_canonical_sum(kernels: Kernels, n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((2, n)).astype(np.float32)
    expected = canonical_dot(a, b)
    found = kernels.lib.clb_dot_f32(kernels.handle, ptr(a), ptr(b), n)
    assert np.float32(found).view(np.uint32) == expected.view(np.uint32)
    ones = np.ones(n, np.float32)
    total = kernels.lib.clb_sum_f32(kernels.handle, ptr(a), n)
    assert np.float32(total) == canonical_dot(a, ones)
    y = kernels.matmul(T.F32, a.view(np.uint8).reshape(1, -1), b.reshape(1, -1), 1)
    assert_same_bits(y, expected.reshape(1, 1))


@cache
def matrix(t: T, n_cols: int, n_rows: int) -> np.ndarray:
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    blocks = random_blocks(t, n_rows * n_cols // n_weights, seed=n_cols, moderate=True)
    return blocks.reshape(n_rows, n_cols // n_weights * n_bytes)


@by_type
def test_products_do_not_depend_on_kernels_or_batch(both: tuple[Kernels, Kernels], t: T) -> None:
    """Scalar = SIMD = decode first, then dot; each token alone = in any batch."""
    scalar, best = both
    n_rows = 7
    for i, n_cols in enumerate(n_cols_of(t)):
        w = matrix(t, n_cols, n_rows)
        x = np.random.default_rng(n_cols).standard_normal((33, n_cols)).astype(np.float32)
        decoded = scalar.dequantize(t, w, n_rows * n_cols).reshape(n_rows, n_cols)
        dot = best.lib.clb_dot_f32
        expected = np.array(
            [[dot(best.handle, ptr(row), ptr(v), n_cols) for row in decoded] for v in x],
            np.float32,
        )
        assert_same_bits(scalar.matmul(t, w, x, n_rows), expected)
        odd = at_odd_address(w, 1 + i % 3)
        for n_tokens in (1, 2, 3, 5, 8, 24, 25, 33):
            assert_same_bits(best.matmul(t, odd, x[:n_tokens], n_rows), expected[:n_tokens])


@by_type
def test_products_are_close_to_exact(kernels: Kernels, t: T) -> None:
    """|error| <= (n / 32 + 6) * 2^-24 * sum |w x|: so many roundings meet any one product."""
    for n_cols in n_cols_of(t):
        w = matrix(t, n_cols, 7)
        x = np.random.default_rng(1).standard_normal((3, n_cols)).astype(np.float32)
        weights = reference(t, w).reshape(7, n_cols).astype(np.float64)
        bound = (n_cols / 32 + 6) * 2**-24 * (abs(x.astype(np.float64)) @ abs(weights).T)
        error = abs(kernels.matmul(t, w, x, 7) - x.astype(np.float64) @ weights.T)
        assert (error <= bound).all()


@pytest.mark.parametrize("t", [T.BF16, T.Q4_K, T.TQ1_0], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_row_ranges_and_strides(kernels: Kernels, t: T, n_tokens: int) -> None:
    """Rows [3, 8) of 10, rows and tokens and outputs further apart than they are long."""
    n_cols, n_rows = 512, 10
    w = matrix(t, n_cols, n_rows)
    apart = np.full((n_rows, w.shape[1] + 6), 0xFF, np.uint8)
    apart[:, : w.shape[1]] = w
    x = np.random.default_rng(2).standard_normal((n_tokens, n_cols)).astype(np.float32)
    far = np.full((n_tokens, n_cols + 5), np.nan, np.float32)
    far[:, :n_cols] = x
    y = np.full((n_tokens, n_rows + 3), -7.0, np.float32)
    expected = y.copy()
    expected[:, 3:8] = kernels.matmul(t, w, x, n_rows)[:, 3:8]
    done = kernels.lib.clb_matmul_rows(
        kernels.handle, t, ptr(apart), apart.shape[1], n_cols, 3, 8, ptr(far), far.shape[1],
        n_tokens, ptr(y), y.shape[1],
    )  # fmt: skip
    assert done == 0
    assert_same_bits(y, expected)


def test_empty_products(kernels: Kernels) -> None:
    y = np.full(8, 3.0, np.float32)  # two tokens of four rows
    x = np.zeros(64, np.float32)

    def run(n_cols: int, row0: int, row1: int, n_tokens: int) -> list[float]:
        args = (32 * n_cols, n_cols, row0, row1, ptr(x), n_cols, n_tokens, ptr(y), 4)
        assert kernels.lib.clb_matmul_rows(kernels.handle, T.F32, ptr(x), *args) == 0
        return y.tolist()

    assert run(32, 2, 2, 1) == [3] * 8
    assert run(32, 0, 1, 0) == [3] * 8
    assert run(0, 1, 2, 1) == [3, 0, 3, 3, 3, 3, 3, 3]
    assert run(0, 2, 3, 2) == [3, 0, 0, 3, 3, 3, 0, 3]


# --- elementwise ----------------------------------------------------------------------------------


def spread_of_floats(n: int) -> np.ndarray:
    """Random bit patterns, ordinary numbers, and the special ones."""
    rng = np.random.default_rng(n)
    patterns = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    patterns = np.where(np.isfinite(patterns), patterns, np.float32(1))
    ordinary = rng.uniform(-110, 95, n).astype(np.float32)
    special = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 88.7228, 88.73, -87.3, -103.9, -104], "f4"
    )
    return np.concatenate([special, patterns, ordinary])


def test_exp_within_1_1_ulp(kernels: Kernels) -> None:
    """Half an ulp for the last sum, up to a quarter each for its terms; 1.01 is the worst seen."""
    x = spread_of_floats(200_001)
    out = np.empty_like(x)
    kernels.lib.clb_exp_f32(kernels.handle, ptr(out), ptr(x), 0.0, x.size)
    with np.errstate(all="ignore"):
        exact = np.exp(x.astype(np.float64))
        rounded = exact.astype(np.float32)
        ulp = np.spacing(np.where(np.isfinite(rounded), rounded, np.float32(1)))
        normal = np.isfinite(rounded)
        assert (abs(out[normal] - exact[normal]) < 1.1 * ulp[normal]).all()
    assert_same_bits(out[~normal], rounded[~normal])


def test_elementwise_scalar_and_simd_agree(both: tuple[Kernels, Kernels]) -> None:
    x = spread_of_floats(5_003)
    y = np.random.default_rng(3).permutation(x)
    results = []
    for k in both:
        exp, silu, axpy, capped = np.empty_like(x), np.empty_like(x), y.copy(), np.empty_like(x)
        k.lib.clb_exp_f32(k.handle, ptr(exp), ptr(x), 1.25, x.size)
        k.lib.clb_silu_mul(k.handle, ptr(silu), ptr(x), ptr(y), x.size)
        k.lib.clb_axpy_f32(k.handle, ptr(axpy), ptr(x), 0.37, x.size)
        k.lib.clb_softcap_f32(k.handle, ptr(capped), ptr(x), 0.7, x.size)
        results.append((exp, silu, axpy, capped))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_softcap(kernels: Kernels) -> None:
    """Against tanh of the quotient as float32: exp, 1 - e, 1 + e, their quotient and the product
    round once each, and the series near 0 is better."""
    rng = np.random.default_rng(5)
    sizes = np.exp(rng.uniform(np.log(1e-30), np.log(1e4), 100_003))
    x = np.concatenate([sizes * rng.choice([-1, 1], sizes.size), [0, 0.125, np.inf, -np.inf]])
    x = x.astype(np.float32)
    for cap in (np.float32(0.5), np.float32(30), np.float32(50)):
        out = np.empty_like(x)
        kernels.lib.clb_softcap_f32(kernels.handle, ptr(out), ptr(x), cap, x.size)
        exact = np.float64(cap) * np.tanh((x / cap).astype(np.float64))
        assert (abs(out - exact) <= 4 * np.spacing(abs(exact).astype(np.float32))).all()
        assert (abs(out) <= cap).all() and abs(out).max() == cap
        in_place = x.copy()
        kernels.lib.clb_softcap_f32(kernels.handle, ptr(in_place), ptr(in_place), cap, x.size)
        assert_same_bits(in_place, out)


def test_silu_mul(kernels: Kernels) -> None:
    """4 ulp: exp, 1 + e, the quotient and the product round once each."""
    rng = np.random.default_rng(4)
    gate = rng.uniform(-80, 80, 100_003).astype(np.float32)
    up = rng.standard_normal(gate.size).astype(np.float32)
    out = np.empty_like(gate)
    kernels.lib.clb_silu_mul(kernels.handle, ptr(out), ptr(gate), ptr(up), gate.size)
    g = gate.astype(np.float64)
    exact = g / (1 + np.exp(-g)) * up
    assert (abs(out - exact) <= 4 * np.spacing(abs(exact).astype(np.float32))).all()
    in_place = gate.copy()
    kernels.lib.clb_silu_mul(kernels.handle, ptr(in_place), ptr(in_place), ptr(up), gate.size)
    assert_same_bits(in_place, out)


def test_axpy_is_fused(kernels: Kernels) -> None:
    dst = np.array([-1.0] * 11, np.float32)
    src = np.full(11, 1 + 2**-12, np.float32)  # its square needs 25 bits
    kernels.lib.clb_axpy_f32(kernels.handle, ptr(dst), ptr(src), 1 + 2**-12, 11)
    assert (dst == np.float32(2**-11 + 2**-24)).all()


def test_all_halves_widen_exactly(kernels: Kernels) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    f16 = kernels.dequantize(T.F16, every, 2**16).view(np.uint32)
    expected = every.view(np.float16).astype(np.float32).view(np.uint32)
    nan = np.isnan(every.view(np.float16))
    expected = np.where(nan, expected | 0x400000, expected)  # quiet, payload kept
    np.testing.assert_array_equal(f16, expected)
    bf16 = kernels.dequantize(T.BF16, every, 2**16).view(np.uint32)
    np.testing.assert_array_equal(bf16, every.astype(np.uint32) << 16)


def narrow(kernels: Kernels, name: str, x: np.ndarray) -> np.ndarray:
    out = np.empty(x.size, np.uint16)
    getattr(kernels.lib, f"clb_f32_to_{name}")(kernels.handle, ptr(out), ptr(x), x.size)
    return out


def test_all_halves_survive_a_round_trip(kernels: Kernels) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    for name, t, exponent, quiet in (("f16", T.F16, 0x7C00, 0x200), ("bf16", T.BF16, 0x7F80, 0x40)):
        is_nan = (every & 0x7FFF) > exponent
        back = narrow(kernels, name, kernels.dequantize(t, every, 2**16))
        np.testing.assert_array_equal(back, np.where(is_nan, every | quiet, every))


def test_narrowing_rounds_to_nearest_even(kernels: Kernels) -> None:
    """Every half, every midpoint between two, and the floats next to both; random floats."""
    halves = np.arange(2**15, dtype=np.uint16)
    for name in ("f16", "bf16"):
        widened = (
            halves.view(np.float16).astype(np.float32)
            if name == "f16"
            else (halves.astype(np.uint32) << 16).view(np.float32)
        )
        with np.errstate(all="ignore"):
            finite = widened[np.isfinite(widened)].astype(np.float64)
            middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
        middle = np.concatenate([middle, finite.astype(np.float32), spread_of_floats(100_000)])
        near = [middle.view(np.uint32) + np.uint32(d) for d in (0, 1, 2**32 - 1)]
        x = np.concatenate(near).view(np.float32)
        x = np.ascontiguousarray(np.concatenate([x, -x])[~np.isnan(np.concatenate([x, -x]))])
        with np.errstate(all="ignore"):
            expected = (
                x.astype(np.float16).view(np.uint16)
                if name == "f16"
                else quants.quantize(x, T.BF16).view(np.uint16)
            )
        np.testing.assert_array_equal(narrow(kernels, name, x), expected)


def test_narrowed_nan_is_quiet_and_keeps_sign_and_payload(kernels: Kernels) -> None:
    raw = np.random.default_rng(5).integers(1, 2**23, 1001, dtype=np.uint32) | 0x7F800000
    raw = np.concatenate([raw, raw | 0x80000000, [0x7F800001, 0xFF800001]]).astype(np.uint32)
    sign = raw >> 16 & 0x8000
    np.testing.assert_array_equal(
        narrow(kernels, "f16", raw.view(np.float32)), sign | 0x7E00 | (raw >> 13 & 0x3FF)
    )
    np.testing.assert_array_equal(narrow(kernels, "bf16", raw.view(np.float32)), raw >> 16 | 0x40)


# --- CRC-32C and SHA-256 --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clb_crc32c", "clb_crc32c_portable"])
def test_crc32c_known_values(lib: ctypes.CDLL, name: str) -> None:
    """The check value of the polynomial and the examples of RFC 3720, B.4."""
    crc = getattr(lib, name)
    assert crc(0, b"", 0) == 0
    assert crc(0, b"123456789", 9) == 0xE3069283
    assert crc(0, bytes(32), 32) == 0x8A9136AA
    assert crc(0, b"\xff" * 32, 32) == 0x62A8AB43
    assert crc(0, bytes(range(32)), 32) == 0x46DD794E
    assert crc(0, bytes(reversed(range(32))), 32) == 0x113FDB5C


def test_crc32c_by_hardware_equals_tables(lib: ctypes.CDLL) -> None:
    data = np.random.default_rng(6).integers(0, 256, 40_000, dtype=np.uint8)
    lengths = [*range(70), 767, 768, 769, 6143, 6144, 6145, 6920, 12_288, 30_001]
    for n in lengths:
        for offset in (0, 1, 7):
            p = ptr(data) + offset
            assert lib.clb_crc32c(n, p, n) == lib.clb_crc32c_portable(n, p, n)


@pytest.mark.parametrize("name", ["clb_crc32c", "clb_crc32c_portable"])
def test_crc32c_chains(lib: ctypes.CDLL, name: str) -> None:
    crc = getattr(lib, name)
    data = np.random.default_rng(7).bytes(20_000)
    whole = crc(0, data, len(data))
    for cut in (0, 1, 8, 777, 6144, 19_999, 20_000):
        assert crc(crc(0, data[:cut], cut), data[cut:], len(data) - cut) == whole


@pytest.mark.parametrize("init", ["clb_sha256_init", "clb_sha256_init_portable"])
def test_sha256_equals_hashlib(lib: ctypes.CDLL, init: str) -> None:
    rng = np.random.default_rng(8)
    state, digest = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    for n in [*range(200), 1000, 65_536, 100_003]:
        data = rng.bytes(n)
        cuts = sorted({0, n, *rng.integers(0, n + 1, 3).tolist()})
        getattr(lib, init)(state)
        for first, last in pairwise(cuts):
            lib.clb_sha256_update(state, data[first:last], last - first)
        lib.clb_sha256_final(state, digest)
        assert digest.raw == hashlib.sha256(data).digest()
        lib.clb_sha256(data, n, digest)
        assert digest.raw == hashlib.sha256(data).digest()


# --- builds ---------------------------------------------------------------------------------------

COMPILERS = ["gcc", "clang"]
CROSS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


def need(*programs: str) -> None:
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"no {program}")


def run_program(command: list[str | Path]) -> list[str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_read_outside_buffers(tmp_path: Path, compiler: str) -> None:
    need(compiler)
    program = tmp_path / "test_blocks"
    flags = ["-O2", "-gdwarf-4"] if under_valgrind() else SANITIZERS
    compile_c(compiler, [*WARNINGS, *flags], [ROOT / "tests/c/test_blocks.c", *SOURCES], program)
    run_program([*command(program)])


def test_benchmark_builds(tmp_path: Path) -> None:
    bench = [ROOT / "tests/bench/bench_blocks.c", *SOURCES]
    compile_c("cc", [*WARNINGS, "-O0"], bench, tmp_path / "bench")


def test_another_cpu_gives_the_same_bits(tmp_path: Path) -> None:
    compiler, emulator = CROSS
    need(compiler, emulator)
    sources = [ROOT / "tests/c/test_blocks.c", *SOURCES]
    compile_c("cc", ["-O2"], sources, tmp_path / "here")
    compile_c(compiler, [*WARNINGS, "-O2", "-static"], sources, tmp_path / "there")
    here = run_program([tmp_path / "here"])
    there = run_program([emulator, tmp_path / "there"])
    assert here[1] == there[1], (here, there)
