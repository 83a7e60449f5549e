"""Measure the errors of llama.cpp's quantizers on the matrices of tests/test_quantize_kernels.py.

    python tests/oracle/peer_quantize.py LIBGGML_BASE.so > tests/oracle/values/peer_quantize.json

The library is a peer to measure; nothing of it is used otherwise. Errors are means of squared
differences, plain and weighted by importance, each at the quantizer's own best: with the
importance given to it for the weighted one.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
from test_quantize_kernels import (  # noqa: E402
    MATRICES,
    TYPES,
    importance_of,
    matrix,
    mean_squared_error,
)


def quantize(lib: Any, t: gguf.GGMLQuantizationType, x: Any, importance: Any = None) -> Any:
    """Return the peer's bytes [rows, row bytes]."""
    weights, n_bytes = gguf.GGML_QUANT_SIZES[t]
    out = np.zeros((x.shape[0], x.shape[1] // weights * n_bytes), np.uint8)
    lib.ggml_quantize_init(t.value)
    lib.ggml_quantize_chunk(
        t.value, x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0), ctypes.c_int64(x.shape[0]), ctypes.c_int64(x.shape[1]),
        None if importance is None else importance.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    return out


def main() -> None:
    """Print the table."""
    lib = ctypes.CDLL(sys.argv[1])
    errors: dict[str, dict[str, list[float]]] = {}
    for name in MATRICES:
        x, importance = matrix(name), importance_of(name)
        errors[name] = {}
        for t in TYPES:
            plain = mean_squared_error(t, quantize(lib, t, x), x)
            packed = quantize(lib, t, x, importance)
            weighted = mean_squared_error(t, packed, x, importance)
            errors[name][t.name.lower()] = [plain, weighted]
    about = "mean squared errors of llama.cpp's quantizers (plain, by importance); peer_quantize.py"
    json.dump({"about": about, "errors": errors}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
