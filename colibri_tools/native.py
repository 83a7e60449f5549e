"""The C code, seen from Python: checksums, decoding, and `ffi`/`lib` for the engine.

Every call releases the GIL, so threads of a conversion checksum and decode side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibri_tools.dtypes import dtype_by_id
from colibri_tools.errors import SourceError

if TYPE_CHECKING:
    import numpy as np

    Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]

try:
    from colibri_tools import _native  # type: ignore[attr-defined]
except ImportError as error:  # running from a source tree that was never built
    raise ImportError(
        f"the C extension of colibri-tools is not built here ({error}); "
        "run 'make dev' in the repository, or leave the repository's folder to use an "
        "installed colibri-tools"
    ) from error

ffi: Any = _native.ffi
lib: Any = _native.lib

__all__ = [
    "EFFORTS",
    "can_quantize",
    "convert_rows",
    "crc32c",
    "dequantize",
    "ffi",
    "find_nonfinite",
    "lib",
    "quantize",
    "quantize_loss",
]

_NO_INDEX = (1 << 64) - 1


def crc32c(buffer: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of `buffer` (any contiguous bytes-like), continued from `crc`."""
    data = ffi.from_buffer("uint8_t[]", buffer)
    return int(lib.clb_crc32c(crc, data, len(data)))


def dequantize(
    dtype_id: int, buffer: Buffer, n_weights: int, out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Decode `n_weights` weights of a GGML type to float32 [n_weights], as gguf-py does.

    `out` (float32 [n_weights], contiguous) is used instead of a new array. Raises
    SourceError for a type that has no decoder here, ValueError when `buffer` is too short.
    """
    import numpy as np

    dtype = dtype_by_id(dtype_id)
    data = ffi.from_buffer("uint8_t[]", buffer)
    if len(data) < dtype.n_bytes(n_weights):
        raise ValueError(f"{n_weights} weights of {dtype.name} need more than {len(data)} bytes")
    if out is None:
        out = np.empty(n_weights, np.float32)
    if out.dtype != np.float32 or out.shape != (n_weights,):
        raise ValueError(f"out must be float32 [{n_weights}]")
    out_ptr = ffi.from_buffer("float[]", out, require_writable=True)
    if lib.clb_dequantize_best(dtype_id, data, out_ptr, n_weights) != 0:
        raise SourceError(f"tensors of type {dtype.name} cannot be decoded to float32")
    return out


def find_nonfinite(dtype_id: int, buffer: Buffer, n_weights: int) -> int | None:
    """Return the index of the first weight that decodes to NaN or infinity, or None."""
    dtype = dtype_by_id(dtype_id)
    data = ffi.from_buffer("uint8_t[]", buffer)
    if len(data) < dtype.n_bytes(n_weights):
        raise ValueError(f"{n_weights} weights of {dtype.name} need more than {len(data)} bytes")
    index = int(lib.clb_find_nonfinite(dtype_id, data, n_weights))
    return None if index == _NO_INDEX else index


EFFORTS = ("fast", "normal", "best")
"""How hard `quantize` searches, from least to most."""


def can_quantize(dtype_id: int) -> bool:
    """Return whether weights can be encoded into this GGML type."""
    return bool(lib.clb_can_quantize(dtype_id))


def quantize(
    dtype_id: int,
    weights: np.ndarray[Any, Any],
    *,
    effort: str = "normal",
    importance: np.ndarray[Any, Any] | None = None,
    out: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any] | int:
    """Encode float32 `weights` [rows, cols] into a GGML type: uint8 [rows, bytes of a row].

    `importance` (float32 [cols], finite, >= 0) weighs the squared error of each column. `out`
    (uint8, contiguous) is used instead of a new array. Returns an int instead, the flat index of
    the first weight, when that is not finite or too large for the type. Raises SourceError for a
    type that cannot be encoded or rows that its blocks do not divide.
    """
    import numpy as np

    dtype = dtype_by_id(dtype_id)
    n_rows, n_cols = weights.shape
    if not can_quantize(dtype_id) or n_cols % dtype.block_weights != 0:
        raise SourceError(f"rows of {n_cols} weights cannot be encoded as {dtype.name}")
    if out is None:
        out = np.empty((n_rows, dtype.n_bytes(n_cols)), np.uint8)
    if weights.dtype != np.float32 or out.nbytes != n_rows * dtype.n_bytes(n_cols):
        raise ValueError("weights must be float32, and out as large as the encoded rows")
    if importance is not None and (importance.shape != (n_cols,) or importance.dtype != np.float32):
        raise ValueError(f"importance must be float32 [{n_cols}]")
    bad = ffi.new("uint64_t *")
    status = lib.clb_quantize_rows_best(
        dtype_id,
        EFFORTS.index(effort),
        ffi.from_buffer("float[]", weights),
        n_rows,
        n_cols,
        ffi.NULL if importance is None else ffi.from_buffer("float[]", importance),
        ffi.from_buffer("uint8_t[]", out, require_writable=True),
        bad,
    )
    return out if status == 0 else int(bad[0])


def quantize_loss(
    dtype_id: int,
    encoded: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any],
    importance: np.ndarray[Any, Any] | None = None,
) -> tuple[float, float, float, float]:
    """Compare what `quantize` made (uint8) of float32 `weights` [rows, cols] with them.

    Returns sums of squares: of the differences, of the weights, and both with each column's
    squares times its importance (float32 [cols]). One order of sums, whatever the machine.
    """
    n_rows, n_cols = weights.shape
    if encoded.nbytes != n_rows * dtype_by_id(dtype_id).n_bytes(n_cols):
        raise ValueError("encoded must be the encoding of weights")
    loss = ffi.new("clb_loss *")
    status = lib.clb_add_loss(
        dtype_id,
        ffi.from_buffer("uint8_t[]", encoded),
        ffi.from_buffer("float[]", weights),
        n_rows,
        n_cols,
        ffi.NULL if importance is None else ffi.from_buffer("float[]", importance),
        loss,
    )
    if status != 0:
        raise SourceError(f"rows of {n_cols} weights cannot be {dtype_by_id(dtype_id).name}")
    return loss.error, loss.weight, loss.important_error, loss.important_weight


def convert_rows(
    from_id: int,
    raw: Buffer,
    skip: int,
    to_id: int,
    shape: tuple[int, int],
    out: Buffer,
    *,
    effort: str = "normal",
    importance: np.ndarray[Any, Any] | None = None,
    measure: bool = False,
) -> int | tuple[float, float, float, float] | None:
    """Encode weights of one GGML type as another, into `out`.

    `raw` has whole blocks; after `skip` weights of it come those of `shape` (rows, columns).
    Returns None, or with `measure` what `quantize_loss` does; but an int, the flat index of the
    first weight, when that is not finite or too large for the type. Raises SourceError for types
    that cannot be decoded or encoded, ValueError for buffers of other sizes.
    """
    n_rows, n_cols = shape
    before, after = dtype_by_id(from_id), dtype_by_id(to_id)
    src, dst = ffi.from_buffer("uint8_t[]", raw), ffi.from_buffer("uint8_t[]", out, True)
    n_weights = skip + n_rows * n_cols
    fits = len(dst) == n_rows * n_cols // after.block_weights * after.block_bytes
    if not fits or len(src) < -(-n_weights // before.block_weights) * before.block_bytes:
        raise ValueError("raw must hold the weights, and out be as large as they become")
    if importance is not None and (importance.shape != (n_cols,) or importance.dtype.char != "f"):
        raise ValueError(f"importance must be float32 [{n_cols}]")
    columns = ffi.NULL if importance is None else ffi.from_buffer("float[]", importance)
    job = ffi.new("clb_conversion *")
    job.src, job.dst, job.importance = src, dst, columns
    setattr(job, "from", from_id)
    job.type, job.effort, job.skip = to_id, EFFORTS.index(effort), skip
    job.n_rows, job.n_cols = n_rows, n_cols
    bad, loss = ffi.new("uint64_t *"), ffi.new("clb_loss *") if measure else ffi.NULL
    status = lib.clb_convert_rows(job, bad, loss)
    if status == 1:
        return int(bad[0])
    if status != 0:
        raise SourceError(f"{before.name} cannot be encoded as {after.name} in rows of {n_cols}")
    if not measure:
        return None
    return loss.error, loss.weight, loss.important_error, loss.important_weight
