"""Tensors whose numbers are computed from stored ones while they are read.

A view hangs on a `SourceTensor` (`tensor.view`). Whoever reads that tensor by `Source.read_into`
gets the view's bytes, in any range, with memory for a few rows; nothing else has to know. Views
read other tensors through the same source, so one can lie on another.

- `ScaledView`: one-byte codes times scales, as bf16 or f32.
- `Mxfp4View`: the two tensors of Hugging Face's MXFP4 as GGML blocks, bit for bit the same weights.
- `RearrangedView`: the rows of a stack of matrices in another order, or columns as rows.
- `RowsView`: some of the rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, quote

if TYPE_CHECKING:
    from colibri_tools.sources.catalog import Source, SourceTensor

__all__ = [
    "MAX_ROW_BYTES",
    "Mxfp4View",
    "RearrangedView",
    "RowsView",
    "ScaledView",
    "TensorView",
    "rearranged",
    "split_rows",
    "values_of_codes",
]

MAX_ROW_BYTES = 64 << 20
"""Rows are read whole, so a longer one is refused."""

_STEP_WEIGHTS = 1 << 17  # what is made of them stays in a core's cache
_STEP_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]


class TensorView(Protocol):
    """How the bytes of a tensor come to be."""

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        """The stored tensors it reads; the first has the numbers."""

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the tensor on; both are whole elements or blocks."""

    def locate(self, index: int) -> tuple[int, ...]:
        """Return where weight `index` of the tensor is in the first base."""


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, shape)) if shape else ()


# ---------------------------------------------------------------- codes times scales


@cache
def values_of_codes(dtype_name: str) -> npt.NDArray[np.float32]:
    """Return the 256 float32 values of a one-byte type: i8, f8_e4m3, f8_e5m2 or f8_e8m0.

    OCP 8-bit floating point specification: E4M3 has no infinity and one NaN per sign, E5M2 is like
    IEEE; E8M0 is a power of two (OCP MX).
    """
    codes = np.arange(256, dtype=np.int64)
    if dtype_name == "i8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)
    if dtype_name == "f8_e8m0":
        powers = np.ldexp(1.0, codes - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    bits, bias = {"f8_e4m3": (3, 7), "f8_e5m2": (2, 15)}[dtype_name]
    exponent, mantissa = (codes & 0x7F) >> bits, codes & ((1 << bits) - 1)
    normal = exponent > 0
    significand = mantissa + np.where(normal, 1 << bits, 0)
    values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - bits)
    if dtype_name == "f8_e4m3":
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    signed: npt.NDArray[np.float32] = np.where(codes < 128, values, -values).astype(np.float32)
    return signed


_INT8_STEP = np.float32(7.874015718698502e-3)
"""1/127 as bitsandbytes writes it: its int8_vectorwise_dequant multiplies by this float32."""


@dataclass(frozen=True, slots=True)
class ScaledView:
    """`codes` [..., rows, cols] times `scales`: one scale for each tile of `tile` = (rows, cols).

    The scales are a grid [n, grid rows, grid cols], n = 1 or the number of matrices. Products are
    made in float32: exact when the scale has few bits, else rounded once. The `carrier` bf16 is
    for scales that are powers of two; a product that it cannot hold exactly is a SourceError.
    With `int8_steps` scales are the greatest absolute value of a row (bitsandbytes' SCB).
    """

    codes: SourceTensor
    scales: SourceTensor
    tile: tuple[int, int]
    grid: tuple[int, int, int]
    carrier: DType
    int8_steps: bool = False

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        return self.codes, self.scales

    def locate(self, index: int) -> tuple[int, ...]:
        return _unravel(index, self.codes.shape)

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        size, cols = self.carrier.block_bytes, self.codes.shape[-1]
        first, last = start // size, (start + out.nbytes) // size
        step = max(1, _STEP_WEIGHTS // cols) * cols
        for a in range(first - first % cols, last, step):
            begin, end = max(a, first), min(a + step, last)
            values = self._values(source, begin, end)
            self._store(begin, values, out[(begin - first) * size : (end - first) * size])

    def _values(self, source: Source, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return weights begin ... end - 1, which need not be whole rows."""
        cols = self.codes.shape[-1]
        row, last_row = begin // cols, -(-end // cols)
        raw = np.zeros((last_row - row) * cols, np.uint8)
        inside = slice(begin - row * cols, end - row * cols)
        source.read_into(self.codes, begin, raw[inside].data)
        # take is several times as fast as indexing
        values = np.take(values_of_codes(self.codes.dtype.name), raw).reshape(-1, cols)
        with np.errstate(all="ignore"):  # what is not finite is found by who uses it
            self._scale(values, self._scale_rows(source, row, last_row))
        return values.reshape(-1)[inside]

    def _scale_rows(self, source: Source, row: int, last_row: int) -> npt.NDArray[np.float32]:
        """Return the scales [last_row - row, grid cols] of rows counted over all matrices."""
        n, grid_rows, grid_cols = self.grid
        numbers = np.arange(row, last_row)
        matrix, inner = np.divmod(numbers, self.codes.shape[-2])
        where = inner // self.tile[0] + (matrix * grid_rows if n > 1 else 0)
        low, high = int(where.min()), int(where.max()) + 1
        size = self.scales.dtype.block_bytes * grid_cols
        raw = source.read(self.scales, low * size, (high - low) * size)
        scales = _decoded(self.scales.dtype, raw).reshape(-1, grid_cols)
        return np.take(scales, where - low, axis=0)

    def _scale(self, values: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]) -> None:
        width, cols = self.tile[1], values.shape[1]
        if cols % width:
            values *= np.repeat(scales, width, axis=1)[:, :cols]  # the last tile is a part of one
        else:
            tiles = values.reshape(len(values), cols // width, width)
            tiles *= scales[:, :, None]
        if self.int8_steps:
            values *= _INT8_STEP

    def _store(self, first: int, values: npt.NDArray[np.float32], out: memoryview) -> None:
        if self.carrier.name == "f32":
            np.frombuffer(out, "<f4")[:] = values
            return
        bits = values.view(np.uint32)
        inexact = np.flatnonzero(bits & 0xFFFF)
        if len(inexact):
            place = list(self.locate(first + int(inexact[0])))
            raise SourceError(
                f"tensor {quote(self.codes.name)}: weight {place} times its scale is "
                f"{values[inexact[0]]!r}, which bf16 cannot hold; expected the scales in "
                f"{quote(self.scales.name)} to be powers of two, as the checkpoint says"
            )
        np.frombuffer(out, "<u2")[:] = bits >> 16


def _decoded(dtype: DType, raw: bytes) -> npt.NDArray[np.float32]:
    from colibri_tools import native  # late: sources can be listed without the C code

    if dtype.name == "f8_e8m0":
        return values_of_codes(dtype.name)[np.frombuffer(raw, np.uint8)]
    values: npt.NDArray[np.float32] = native.dequantize(
        dtype.id, raw, len(raw) // dtype.block_bytes
    )
    return values


# ---------------------------------------------------------------- MXFP4


@dataclass(frozen=True, slots=True)
class Mxfp4View:
    """`blocks` u8 [..., n, 16] and `scales` u8 [..., n] as GGML mxfp4 [..., 32 n].

    Hugging Face has elements 2i and 2i+1 in byte i (low half first), GGML i and i+16, with the
    scale in front; both scales are the E8M0 byte. No weight changes (OCP MX specification, 5.3.3).
    """

    blocks: SourceTensor
    scales: SourceTensor

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        return self.blocks, self.scales

    def locate(self, index: int) -> tuple[int, ...]:
        block, inner = divmod(index, 32)
        return *_unravel(block, self.scales.shape), inner // 2

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        first, n_blocks = start // 17, out.nbytes // 17
        for a in range(0, n_blocks, _STEP_WEIGHTS // 32):
            n = min(_STEP_WEIGHTS // 32, n_blocks - a)
            raw = np.empty((n, 16), np.uint8)
            source.read_into(self.blocks, 16 * (first + a), raw.data)
            scale = np.empty(n, np.uint8)
            source.read_into(self.scales, first + a, scale.data)
            self._check(scale, first + a)
            into = np.frombuffer(out[17 * a : 17 * (a + n)], np.uint8).reshape(n, 17)
            into[:, 0] = scale
            into[:, 1:] = _repacked(raw)

    def _check(self, scales: Bytes, first: int) -> None:
        """E8M0 has one code that is no number; GGML would read it as a power of two."""
        found = np.flatnonzero(scales == 255)
        if len(found):
            place = list(self.scales.locate(first + int(found[0])))
            raise SourceError(
                f"tensor {quote(self.scales.name)}: nan (code 255) at {place}; the checkpoint is "
                "damaged, fetch or save it again"
            )


def _repacked(pairs: Bytes) -> Bytes:
    first, second = pairs[:, :8], pairs[:, 8:]  # elements 0 ... 15 and 16 ... 31
    out = np.empty((len(pairs), 16), np.uint8)
    out[:, 0::2] = first & 0x0F | np.left_shift(second, 4)
    out[:, 1::2] = first >> 4 | second & 0xF0
    return out


# ---------------------------------------------------------------- rows elsewhere


def rearranged(
    tensor: SourceTensor,
    stack: tuple[int, int, int],
    n_parts: int,
    *,
    transposed: bool,
    interleaved: bool,
) -> SourceTensor:
    """Return `tensor`, stored as a `stack` of matrices, as [experts, outputs, inputs], its parts
    below each other.

    `transposed`: the stack is [experts, inputs, outputs]. `interleaved`: output o of the stored
    matrix belongs to part o % `n_parts`, at row o // `n_parts` of it. Raises SourceError for a
    type that cannot be transposed, or rows too long to be read whole.
    """
    n, rows, cols = stack
    if transposed and tensor.dtype.block_weights != 1:
        raise SourceError(
            f"tensor {quote(tensor.name)}: quant blocks of {tensor.dtype.name} cannot be transposed"
        )
    longest = max(rows, cols) if transposed else cols
    if tensor.dtype.row_bytes(longest) > MAX_ROW_BYTES:
        raise SourceError(f"tensor {quote(tensor.name)}: rows above {MAX_ROW_BYTES} bytes")
    shape = (n, cols, rows) if transposed else (n, rows, cols)
    view = RearrangedView(tensor, shape, n_parts if interleaved else 1, transposed)
    return tensor.seen_as(view, tensor.dtype, shape)


@dataclass(frozen=True, slots=True)
class RearrangedView:
    """`shape` = [experts, outputs, inputs]; with `stride` s, row v is output s (v % m) + v // m of
    the stored matrix, m = outputs / s. `transposed`: outputs are columns of the stored matrix.
    """

    base: SourceTensor
    shape: tuple[int, int, int]
    stride: int
    transposed: bool

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        return self.base.bases

    def locate(self, index: int) -> tuple[int, ...]:
        _, outputs, inputs = self.shape
        expert, row, col = _unravel(index, self.shape)
        part, inner = divmod(row, outputs // self.stride)
        output = self.stride * inner + part
        at = col * outputs + output if self.transposed else output * inputs + col
        return self.base.locate(expert * outputs * inputs + at)

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        row_bytes = self.base.dtype.row_bytes(self.shape[2])
        end = start + out.nbytes
        for row, n_rows in self._runs(start // row_bytes, -(-end // row_bytes)):
            begin, stop = max(start, row * row_bytes), min(end, (row + n_rows) * row_bytes)
            into = np.frombuffer(out[begin - start : stop - start], np.uint8)
            whole = stop - begin == n_rows * row_bytes
            rows = into if whole else np.empty(n_rows * row_bytes, np.uint8)
            self._read_rows(source, row, rows.reshape(n_rows, row_bytes))
            if not whole:
                into[:] = rows[begin - row * row_bytes : stop - row * row_bytes]

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Split rows, counted over all matrices, where the next one is not one step further."""
        length = self.shape[1] // self.stride
        while first < last:
            n = min(last, first - first % length + length) - first
            yield first, n
            first += n

    def _read_rows(self, source: Source, row: int, out: Bytes) -> None:
        """Fill `out` [n, row bytes] with rows of one part of one matrix."""
        n_outputs = self.shape[1]
        expert, inner = divmod(row, n_outputs)
        part, inner = divmod(inner, n_outputs // self.stride)
        first = self.stride * inner + part
        read = self._read_columns if self.transposed else self._read_strided
        read(source, expert, first, out)

    def _read_strided(self, source: Source, expert: int, first: int, out: Bytes) -> None:
        row_bytes = out.shape[1]
        step = max(1, _STEP_BYTES // (row_bytes * self.stride))
        for a in range(0, len(out), step):
            n = min(step, len(out) - a)
            span = self.stride * (n - 1) + 1
            raw = np.empty((span, row_bytes), np.uint8)
            at = expert * self.shape[1] + first + self.stride * a
            source.read_into(self.base, at * row_bytes, raw.data)
            out[a : a + n] = raw[:: self.stride]

    def _read_columns(self, source: Source, expert: int, first: int, out: Bytes) -> None:
        size = self.base.dtype.block_bytes
        _, n_outputs, n_inputs = self.shape
        into: npt.NDArray[Any] = out.view(f"V{size}")
        step = max(1, _STEP_BYTES // (n_outputs * size))
        last = first + self.stride * (len(out) - 1) + 1
        for a in range(0, n_inputs, step):
            n = min(step, n_inputs - a)
            raw = np.empty((n, n_outputs * size), np.uint8)
            at = expert * n_inputs + a
            source.read_into(self.base, at * n_outputs * size, raw.data)
            into[:, a : a + n] = raw.view(into.dtype)[:, first : last : self.stride].T


# ---------------------------------------------------------------- some of the rows


def split_rows(tensor: SourceTensor, n: int) -> list[SourceTensor]:
    """Return the `n` parts of equal height that lie below each other in a tensor [rows, ...]."""
    if n == 1:
        return [tensor]
    shape = (tensor.shape[0] // n, *tensor.shape[1:])
    return [
        tensor.seen_as(RowsView(tensor, i * (tensor.n_weights // n)), tensor.dtype, shape)
        for i in range(n)
    ]


@dataclass(frozen=True, slots=True)
class RowsView:
    """What begins at weight `first` of a tensor, which is the start of a row."""

    base: SourceTensor
    first: int

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        return self.base.bases

    def locate(self, index: int) -> tuple[int, ...]:
        return self.base.locate(self.first + index)

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        source.read_into(self.base, self.base.dtype.n_bytes(self.first) + start, out)
