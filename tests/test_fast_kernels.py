"""The products of fast precision: against float64, gguf-py, and themselves on other CPUs."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from dataclasses import dataclass
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
    *sorted((ROOT / "csrc").glob("fast*.c")),
    ROOT / "csrc/crc32c.c",
]
CFLAGS = ["-std=c11", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
# Unoptimized: compilers take minutes for sanitized SIMD otherwise.
SANITIZERS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
CROSS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")

# Binary16 scales of a block: that of the codes, then that of the minimums.
SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.IQ4_NL: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_XS: [0], T.MXFP4: [],
}  # fmt: skip
FAST = list(SCALES)
EXACT = [
    T.F32, T.F16, T.BF16, T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S,
    T.TQ1_0, T.TQ2_0, T.NVFP4,
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A clb_fast_x_kind: its value, 256 activations of it, and the largest code."""

    value: int
    group: np.dtype
    most: int


Q8 = Kind(
    1,
    np.dtype(
        [("q", "i1", 256), ("d", "f4", 8), ("s", "f4", 8), ("sum", "i4", 8), ("half", "i2", 16)]
    ),
    127,
)
Q16 = Kind(
    2, np.dtype([("q", "i2", 256), ("d", "f4", 8), ("s", "f4", 8), ("half", "i4", 16)]), 16383
)


def kind_of(t: T) -> Kind:
    return Q16 if t in (T.Q8_0, T.Q6_K) else Q8


by_kind = pytest.mark.parametrize("kind", [Q8, Q16], ids=["q8", "q16"])
by_type = pytest.mark.parametrize("t", FAST, ids=lambda t: t.name.lower())

P, SIZE, U32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
SIGNATURES = {
    "clb_kernels_scalar": (P, []),
    "clb_kernels_best": (P, []),
    "clb_fast_by_name": (P, [ctypes.c_char_p]),
    "clb_fast_best": (P, []),
    "clb_fast_kind": (ctypes.c_int, [U32]),
    "clb_fast_x_bytes": (SIZE, [ctypes.c_int, SIZE]),
    "clb_fast_quantize_x": (None, [P, ctypes.c_int, P, P, SIZE]),
    "clb_fast_quantize_with": (None, [P, ctypes.c_int, P, P, SIZE]),
    "clb_fast_matmul_rows": (
        ctypes.c_int,
        [P, U32, P, SIZE, SIZE, SIZE, SIZE, P, SIZE, P, SIZE, SIZE, P, SIZE],
    ),
    "clb_fast_product_with": (
        ctypes.c_int,
        [P, U32, P, SIZE, SIZE, SIZE, SIZE, P, SIZE, SIZE, P, SIZE],
    ),
    "clb_matmul_rows": (
        ctypes.c_int,
        [P, U32, P, SIZE, SIZE, SIZE, SIZE, P, SIZE, SIZE, P, SIZE],
    ),
    "clb_quantize_row": (ctypes.c_int, [P, U32, P, P, SIZE]),
}


# --- the library ----------------------------------------------------------------------------------


def compile_c(compiler: str, flags: list[str], sources: list[Path], output: Path) -> None:
    call = [compiler, *CFLAGS, *flags, *map(str, sources), "-lm", "-lpthread", "-o", str(output)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(call)}\n{done.stderr}"


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("fast") / "libfast.so"
    compile_c("cc", [*WARNINGS, "-O2", "-shared", "-fPIC"], SOURCES, path)
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        getattr(loaded, name).restype = result
        getattr(loaded, name).argtypes = arguments
    return loaded


def ptr(a: np.ndarray) -> int:
    return a.ctypes.data


def aligned(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Uninitialised, 64-byte aligned."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    space = np.empty(n_bytes + 64, np.uint8)
    start = -ptr(space) % 64
    return space[start : start + n_bytes].view(dtype).reshape(shape)


@dataclass
class Kernels:
    lib: ctypes.CDLL
    handle: int

    def quantize(self, kind: Kind, x: np.ndarray) -> np.ndarray:
        """x [n_tokens, n_cols] f32 -> [n_tokens, n_groups] kind.group"""
        n_tokens, n_cols = x.shape
        stride = self.lib.clb_fast_x_bytes(kind.value, n_cols)
        assert stride == -(-n_cols // 256) * kind.group.itemsize
        qx = aligned((n_tokens, stride // kind.group.itemsize), kind.group)
        for i in range(n_tokens):
            self.lib.clb_fast_quantize_with(self.handle, kind.value, ptr(qx[i]), ptr(x[i]), n_cols)
        return qx

    def multiply(self, t: T, w: np.ndarray, qx: np.ndarray, n_cols: int) -> np.ndarray:
        """w [n_rows, row_bytes] u8, qx [n_tokens, n_groups] of its kind -> [n_tokens, n_rows]"""
        y = np.full((len(qx), len(w)), -1, np.float32)
        done = self.lib.clb_fast_product_with(
            self.handle, t, ptr(w), w.shape[1], n_cols, 0, len(w),
            ptr(qx), qx.strides[0], len(qx), ptr(y), len(w),
        )  # fmt: skip
        assert done == 0
        return y


SETS = ["scalar", "avx2", "avx_vnni", "avx512", "neon", "neon_dot"]


@pytest.fixture(scope="session", params=SETS)
def kernels(request: pytest.FixtureRequest, lib: ctypes.CDLL) -> Kernels:
    handle = lib.clb_fast_by_name(request.param.encode())
    if not handle:
        pytest.skip("not on this CPU")
    return Kernels(lib, handle)


@pytest.fixture(scope="session")
def best(lib: ctypes.CDLL) -> Kernels:
    return Kernels(lib, lib.clb_fast_best())


# --- data -----------------------------------------------------------------------------------------


def set_f16(blocks: np.ndarray, offset: int, values: np.ndarray) -> None:
    blocks[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def random_rows(t: T, n_rows: int, n_cols: int) -> np.ndarray:
    """[n_rows, row_bytes] u8: random codes, scales of ordinary size."""
    rng = np.random.default_rng([n_rows, n_cols, int(t)])
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    blocks = rng.integers(0, 256, (n_rows * n_cols // n_weights, n_bytes), dtype=np.uint8)
    for offset in SCALES.get(t, []):
        set_f16(blocks, offset, rng.uniform(-0.1, 0.1, len(blocks)))
    if t == T.MXFP4:
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
    return blocks.reshape(n_rows, -1)


def random_x(n_tokens: int, n_cols: int) -> np.ndarray:
    rng = np.random.default_rng([n_tokens, n_cols])
    return rng.standard_normal((n_tokens, n_cols)).astype(np.float32)


def weights_of(t: T, w: np.ndarray) -> np.ndarray:
    """[n_rows, n_cols] f64"""
    return quants.dequantize(np.ascontiguousarray(w), t).astype(np.float64).reshape(len(w), -1)


def codes_of(qx: np.ndarray) -> np.ndarray:
    """[n_tokens, n_groups, 8, 32] i4, in order; of 16 bits, even columns are stored first"""
    q = qx["q"].astype(np.int32).reshape(*qx.shape, 8, 32)
    if qx["q"].dtype == np.int8:
        return q
    return q.reshape(*qx.shape, 8, 2, 16).swapaxes(-1, -2).reshape(q.shape)


def activations_of(qx: np.ndarray, n_cols: int) -> np.ndarray:
    """[n_tokens, n_cols] f64"""
    x = codes_of(qx) * qx["d"].astype(np.float64)[..., None]
    return x.reshape(len(qx), -1)[:, :n_cols]


def without_minimums(t: T, w: np.ndarray) -> np.ndarray:
    if len(SCALES[t]) < 2:
        return w
    blocks = w.reshape(-1, gguf.GGML_QUANT_SIZES[t][1]).copy()
    set_f16(blocks, SCALES[t][1], np.zeros(len(blocks)))
    return blocks.reshape(w.shape)


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_cols", [32, 96, 256, 288, 2048])
@by_kind
def test_activations_are_within_half_a_step(kernels: Kernels, kind: Kind, n_cols: int) -> None:
    x = random_x(3, n_cols) * np.float32(10) ** np.arange(-2, 1)[:, None].astype(np.float32)
    qx = kernels.quantize(kind, x)
    blocks = x.reshape(3, -1, 32)
    largest = abs(blocks).max(axis=2)
    d = qx["d"].reshape(3, -1)
    np.testing.assert_array_equal(d[:, : n_cols // 32], largest / np.float32(kind.most))
    assert abs(codes_of(qx)).max() == kind.most
    # Half a step, and the rounding of two quotients of at most the largest code.
    error = abs(activations_of(qx, n_cols) - x).reshape(blocks.shape)
    assert (error <= d[:, : n_cols // 32, None] * (0.5 + kind.most * 2**-22)).all()


@by_kind
def test_sums_go_with_the_codes_and_the_rest_is_zero(kernels: Kernels, kind: Kind) -> None:
    qx = kernels.quantize(kind, random_x(2, 288))
    codes = codes_of(qx)
    halves = codes.reshape(2, 2, 8, 2, 16).sum(axis=4)
    if kind is Q8:
        np.testing.assert_array_equal(qx["sum"], codes.sum(axis=3))
    else:  # the first halves of 4 blocks, then the second ones
        halves = halves.reshape(2, 2, 2, 4, 2).swapaxes(3, 4)
    np.testing.assert_array_equal(qx["half"], halves.reshape(2, 2, 16))
    np.testing.assert_array_equal(qx["s"], qx["d"] * codes.sum(axis=3).astype(np.float32))
    assert not qx[:, 1]["q"][:, 32:].any()
    assert not qx[:, 1]["d"][:, 1:].any()
    assert not codes[:, 1, 1:].any()
    assert not qx[:, 1]["s"][:, 1:].any()


@by_kind
def test_ties_go_to_even(kernels: Kernels, kind: Kind) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [kind.most, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    codes = codes_of(kernels.quantize(kind, x))[0, 0, 0]
    assert codes[:7].tolist() == [kind.most, 0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@by_type
def test_a_nan_or_infinity_spoils_its_token_and_no_other(
    kernels: Kernels, t: T, bad: float
) -> None:
    x = random_x(6, 256)
    x[2, 77] = bad
    y = kernels.multiply(t, random_rows(t, 9, 256), kernels.quantize(kind_of(t), x), 256)
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()


@by_kind
def test_extreme_activations(kernels: Kernels, kind: Kind) -> None:
    """Nothing, subnormals, numbers near the largest: finite, with a step that fits them."""
    x = np.zeros((5, 32), np.float32)
    x[1, 3] = 2**-140
    x[2, 3] = -(2.0**-100)
    x[3, 3] = 3e38
    x[4] = np.float32(2**-126)
    qx = kernels.quantize(kind, x)
    most = np.float32(kind.most)
    assert qx["d"][:, 0, 0].tolist() == [
        0.0, 0.0, float(np.float32(2**-100) / most), float(np.float32(3e38) / most), 0.0,
    ]  # fmt: skip
    assert codes_of(qx)[:, 0, 0, 3].tolist() == [0, 0, -kind.most, kind.most, 0]


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_cols", [32, 64, 96, 256, 288, 768, 2048])
@by_type
def test_products_equal_float64(kernels: Kernels, t: T, n_cols: int) -> None:
    """Of the decoded weights and activations.

    An element is the sum of two terms a block, n / 256 + 3 roundings deep, each with a product or
    two of its own and, with activations of 16 bits, a conversion: below (n / 256 + 8) * 2^-23 of
    the sum of magnitudes.
    """
    if n_cols % gguf.GGML_QUANT_SIZES[t][0]:
        pytest.skip("blocks of 256")
    n_rows, n_tokens = 17, 6
    w = random_rows(t, n_rows, n_cols)
    qx = kernels.quantize(kind_of(t), random_x(n_tokens, n_cols))
    weights, x = weights_of(t, w), activations_of(qx, n_cols)
    scaled = weights_of(t, without_minimums(t, w))
    magnitude = abs(x) @ (abs(scaled) + abs(weights - scaled)).T
    tolerance = (n_cols / 256 + 8) * 2**-23 * magnitude
    for first, last in ((0, 1), (0, 6), (1, 4)):  # one token, a tile, a few
        y = kernels.multiply(t, w, qx[first:last], n_cols)
        assert (abs(y - x[first:last] @ weights.T) <= tolerance[first:last]).all()


@by_type
def test_largest_codes_do_not_saturate(kernels: Kernels, t: T) -> None:
    """All codes the same, at both ends, with the largest activations of either sign."""
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    x = np.ones((5, 256), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, 128:] = -1
    qx = kernels.quantize(kind_of(t), x)
    for value in (0x00, 0x7F, 0x80, 0x81, 0xFF, 0x0F, 0xF0):
        blocks = np.full((256 // n_weights, n_bytes), value, np.uint8)
        for offset in SCALES[t]:
            set_f16(blocks, offset, np.ones(len(blocks)))
        if t == T.MXFP4:
            blocks[:, 0] = 127
        w = blocks.reshape(1, -1)
        y = kernels.multiply(t, w, qx, 256)
        weights = weights_of(t, w)
        # Of the magnitudes: roundings of d, of its products, and of one sum.
        tolerance = 2**-20 * (abs(weights).sum() + 64 * 256)
        np.testing.assert_allclose(y, activations_of(qx, 256) @ weights.T, rtol=0, atol=tolerance)


def test_q8_0_of_minus_128_is_exact(kernels: Kernels) -> None:
    blocks = np.full((1, 34), 0x80, np.uint8)
    set_f16(blocks, 0, np.ones(1))
    x = np.full((4, 32), Q16.most, np.float32)
    for n_tokens in (1, 4):
        y = kernels.multiply(T.Q8_0, blocks, kernels.quantize(Q16, x[:n_tokens]), 32)
        assert (y == -128 * Q16.most * 32).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_q6_k_fit_32_bits(kernels: Kernels, sign: int) -> None:
    """Codes of -32, sub-scales of -128: 8 blocks of 2^31 - 2^17, which are floats."""
    blocks = np.zeros((1, 210), np.uint8)
    blocks[:, 192:208] = 0x80
    set_f16(blocks, 208, np.ones(1))
    x = np.full((4, 256), sign * Q16.most, np.float32)
    for n_tokens in (1, 4):
        y = kernels.multiply(T.Q6_K, blocks, kernels.quantize(Q16, x[:n_tokens]), 256)
        assert (y == sign * 8 * (2**31 - 2**17)).all()


@by_type
def test_scales_of_zero(kernels: Kernels, t: T) -> None:
    w = np.zeros_like(random_rows(t, 3, 256))
    w[:, 20:60] = 0x5A  # some codes
    for offset in SCALES[t]:
        w[:, offset : offset + 2] = 0
    if t in (T.Q4_1, T.Q5_1, T.Q4_0, T.Q5_0, T.Q8_0, T.IQ4_NL, T.MXFP4):
        w[:] = 0
    y = kernels.multiply(t, w, kernels.quantize(kind_of(t), random_x(5, 256)), 256)
    assert (abs(y) < 1e-30).all()  # mxfp4 has no scale of zero, but one of 2^-128


@by_type
def test_a_bad_scale_is_not_hidden(kernels: Kernels, t: T) -> None:
    w = random_rows(t, 2, 256)
    for bad in (np.nan, np.inf):
        for offset in SCALES[t]:
            spoilt = w.copy()
            set_f16(spoilt[1:], offset, np.full(1, bad))
            y = kernels.multiply(t, spoilt, kernels.quantize(kind_of(t), random_x(5, 256)), 256)
            assert np.isfinite(y[:, 0]).all()
            assert not np.isfinite(y[:, 1]).any()


@by_type
def test_fast_is_near_exact(best: Kernels, t: T) -> None:
    """Steps of 1 / 127 of about 2.2 standard deviations, rounded evenly: 0.5 % of the norm.

    With 16 bits the steps are 129 times smaller.
    """
    n_cols = 2048
    w, x = random_rows(t, 64, n_cols), random_x(8, n_cols)
    kind = kind_of(t)
    y = best.multiply(t, w, best.quantize(kind, x), n_cols)
    weights = weights_of(t, w)
    error = np.linalg.norm(y - x @ weights.T)
    expected = np.linalg.norm(weights) * np.sqrt(len(x))  # of products with unit variance
    assert 0.002 < error / expected * kind.most / 127 < 0.008


# --- the interface --------------------------------------------------------------------------------


def public_product(
    lib: ctypes.CDLL, k: int, t: T, w: np.ndarray, qx: np.ndarray | None, x: np.ndarray | None
) -> np.ndarray:
    given = qx if qx is not None else x
    assert given is not None
    n_cols = 256
    y = np.full((len(given), len(w)), -1, np.float32)
    done = lib.clb_fast_matmul_rows(
        k, t, ptr(w), w.shape[1], n_cols, 0, len(w), None if qx is None else ptr(qx),
        0 if qx is None else qx.strides[0], None if x is None else ptr(x), n_cols, len(given),
        ptr(y), len(w),
    )  # fmt: skip
    assert done == 0
    return y


@by_type
def test_public_functions_agree_for_both_kernels(lib: ctypes.CDLL, t: T) -> None:
    x, w = random_x(5, 256), random_rows(t, 9, 256)
    kind = lib.clb_fast_kind(t)
    assert kind == kind_of(t).value
    results = []
    for k in (lib.clb_kernels_scalar(), lib.clb_kernels_best()):
        qx = aligned((5, lib.clb_fast_x_bytes(kind, 256)), np.uint8)
        for i in range(5):
            lib.clb_fast_quantize_x(k, kind, ptr(qx[i]), ptr(x[i]), 256)
        results.append(public_product(lib, k, t, w, qx, None))
    np.testing.assert_array_equal(results[0], results[1])
    groups = Kernels(lib, lib.clb_fast_by_name(b"scalar"))
    expected = groups.multiply(t, w, groups.quantize(kind_of(t), x), 256)
    np.testing.assert_array_equal(results[0], expected)


@pytest.mark.parametrize("t", EXACT, ids=lambda t: t.name.lower())
def test_other_types_are_multiplied_exactly(lib: ctypes.CDLL, t: T) -> None:
    x = random_x(3, 256)
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    values = np.random.default_rng(1).integers(0, 60, (5, 256 // n_weights * n_bytes))
    w = values.astype(np.uint8)
    assert lib.clb_fast_kind(t) == 0
    assert lib.clb_fast_x_bytes(0, 256) == 0
    k = lib.clb_kernels_best()
    expected = np.empty((3, 5), np.float32)
    shape = (ptr(w), w.shape[1], 256, 0, 5)
    assert lib.clb_matmul_rows(k, t, *shape, ptr(x), 256, 3, ptr(expected), 5) == 0
    np.testing.assert_array_equal(public_product(lib, k, t, w, None, x), expected)


def test_unknown_types_and_ragged_rows_are_refused(lib: ctypes.CDLL) -> None:
    space = aligned((4096,), np.uint8)
    k = lib.clb_kernels_best()
    p = ptr(space)
    for t, n_cols in ((4, 256), (41, 256), (T.Q4_K, 288), (T.Q8_0, 40), (T.IQ2_XS, 32)):
        done = lib.clb_fast_matmul_rows(k, t, p, 64, n_cols, 0, 1, p, 384, p, 256, 1, p, 1)
        assert done == -1
    assert lib.clb_fast_kind(4) == 0


# --- rows of a quantized cache --------------------------------------------------------------------


@pytest.mark.parametrize("t", [T.F16, T.Q8_0, T.Q4_0], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("which", ["scalar", "best"])
def test_rows_are_quantized_as_gguf_does(lib: ctypes.CDLL, which: str, t: T) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 256)).astype(np.float32)
    x *= np.float32(2) ** rng.integers(-30, 12, (400, 1)).astype(np.float32)
    x[0] = 0
    x[1] = np.tile([-2, 2, 1, 0.5], 64)  # the first of two largest
    x[2] = np.tile([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], 32)  # halves
    k = getattr(lib, f"clb_kernels_{which}")()
    with np.errstate(all="ignore"):
        expected = quants.quantize(x, t).view(np.uint8).reshape(400, -1)
    for n in (32, 64, 128, 256):
        n_bytes = n // gguf.GGML_QUANT_SIZES[t][0] * gguf.GGML_QUANT_SIZES[t][1]
        row = np.empty(n_bytes, np.uint8)
        for i in range(400):
            assert lib.clb_quantize_row(k, t, ptr(row), ptr(x[i]), n) == 0
            np.testing.assert_array_equal(row, expected[i, :n_bytes])


@pytest.mark.parametrize("t", [T.Q8_0, T.Q4_0], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("which", ["scalar", "best"])
def test_a_nan_in_a_row_is_kept(lib: ctypes.CDLL, which: str, t: T) -> None:
    k = getattr(lib, f"clb_kernels_{which}")()
    for bad in (np.nan, np.inf):
        x = np.ones(64, np.float32)
        x[40] = bad
        row = np.empty(2 * gguf.GGML_QUANT_SIZES[t][1], np.uint8)
        assert lib.clb_quantize_row(k, t, ptr(row), ptr(x), 64) == 0
        decoded = quants.dequantize(row, t)
        assert np.isfinite(decoded[:32]).all()
        assert np.isnan(decoded[32:]).all()


def test_only_types_of_a_cache_are_encoded(lib: ctypes.CDLL) -> None:
    x, row = np.ones(64, np.float32), np.empty(256, np.uint8)
    k = lib.clb_kernels_best()
    assert lib.clb_quantize_row(k, T.Q4_1, ptr(row), ptr(x), 64) == -1
    assert lib.clb_quantize_row(k, T.Q8_0, ptr(row), ptr(x), 48) == -1


# --- builds ---------------------------------------------------------------------------------------


def need(*programs: str) -> None:
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"no {program}")


def run_program(call: list[str | Path]) -> list[str]:
    done = subprocess.run(list(map(str, call)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_sets_agree_bit_for_bit_and_read_nothing_else(tmp_path: Path, compiler: str) -> None:
    need(compiler)
    program = tmp_path / "test_fast"
    flags = ["-O2", "-gdwarf-4"] if under_valgrind() else SANITIZERS
    compile_c(compiler, flags, [ROOT / "tests/c/test_fast.c", *SOURCES], program)
    run_program([*command(program)])


def test_benchmark_builds(tmp_path: Path) -> None:
    bench = [ROOT / "tests/bench/bench_fast.c", *SOURCES]
    compile_c("cc", [*WARNINGS, "-O1"], bench, tmp_path / "bench")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it is of AVX2 kernels")
def test_benchmark_of_interleaved_rows_compiles(tmp_path: Path) -> None:
    bench = ROOT / "tests/bench/bench_interleave.c"
    compile_c("cc", [*WARNINGS, "-O1", "-c"], [bench], tmp_path / "bench.o")


@pytest.fixture(scope="module")
def here_and_there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The C test for this CPU and for AArch64."""
    need(*CROSS)
    folder = tmp_path_factory.mktemp("cross")
    sources = [ROOT / "tests/c/test_fast.c", *SOURCES]
    compile_c("cc", ["-O1"], sources, folder / "here")
    compile_c(CROSS[0], [*WARNINGS, "-O2", "-static"], sources, folder / "there")
    return folder / "here", folder / "there"


@pytest.mark.parametrize("cpu", ["cortex-a53", "max"])
def test_another_cpu_gives_the_same_bits(here_and_there: tuple[Path, Path], cpu: str) -> None:
    """Without the dot product instructions, and with them."""
    here = run_program([here_and_there[0]])
    there = run_program([CROSS[1], "-cpu", cpu, here_and_there[1]])
    assert here[-1] == there[-1], (here, there)
    assert there[:-1] == ["neon", "neon_dot"][: 1 if cpu == "cortex-a53" else 2]
