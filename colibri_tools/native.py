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

__all__ = ["crc32c", "dequantize", "ffi", "find_nonfinite", "lib"]

_NO_INDEX = (1 << 64) - 1


def crc32c(buffer: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of `buffer` (any contiguous bytes-like), continued from `crc`."""
    data = ffi.from_buffer("uint8_t[]", buffer)
    return int(lib.clb_crc32c(crc, data, len(data)))


def dequantize(dtype_id: int, buffer: Buffer, n_weights: int) -> np.ndarray[Any, Any]:
    """Decode `n_weights` weights of a GGML type to float32 [n_weights], as gguf-py does.

    Raises SourceError for a type that has no decoder here, ValueError when `buffer` is too short.
    """
    import numpy as np

    dtype = dtype_by_id(dtype_id)
    data = ffi.from_buffer("uint8_t[]", buffer)
    if len(data) < dtype.n_bytes(n_weights):
        raise ValueError(f"{n_weights} weights of {dtype.name} need more than {len(data)} bytes")
    out = np.empty(n_weights, np.float32)
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
