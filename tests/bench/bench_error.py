"""Squared errors of the encoders beside llama.cpp's, on all matrices of a checkpoint.

usage: bench_error.py CHECKPOINT LIBGGML_BASE.so [--importance P] [--types q4_k ...]
                      [--effort normal] [--every N]

Every matrix that `quantize` encodes, its rows cut to whole blocks where a type's do not divide
them, is encoded by both; gguf decodes both. Prints a line for each type: the squared errors of all
matrices as shares of their squared weights, ours and the peer's, how many times the peer's error
ours is on the matrix where that is most, and how many matrices are worse than the peer's by more
than a millionth. With --importance (a routing profile or an importance matrix) both get its
weights, errors are weighed by them, and matrices of which it says nothing are left out. --every N
takes each Nth matrix. The library is a peer to measure. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from colibri_tools.dtypes import dtype_by_name
from colibri_tools.mapping import map_source
from colibri_tools.native import EFFORTS, quantize
from colibri_tools.profile.fingerprint import mapping_fingerprint
from colibri_tools.quantize.importance import load_importance
from colibri_tools.quantize.matrices import list_matrices
from colibri_tools.sources import open_source

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "oracle")]
from peer_quantize import TYPES  # noqa: E402
from peer_quantize import quantize as peer_quantize  # noqa: E402


class Sums:
    """Of one type: squared errors of both and squared weights, and the worst matrix."""

    def __init__(self) -> None:
        self.ours = self.peers = self.weights = 0.0
        self.worst, self.n_worse = 0.0, 0

    def add(self, ours: float, peers: float, weights: float) -> None:
        """Add a matrix."""
        self.ours += ours
        self.peers += peers
        self.weights += weights
        self.worst = max(self.worst, ours / peers if peers else float(ours > 0))
        self.n_worse += ours > peers * (1 + 1e-6)


def squared_error(t: gguf.GGMLQuantizationType, packed: Any, x: Any, columns: Any) -> float:
    difference = (gguf.quants.dequantize(packed, t).astype(np.float64) - x) ** 2
    return float(difference.sum() if columns is None else (difference @ columns.astype("f8")).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("library", type=Path)
    parser.add_argument("--importance", type=Path)
    names = [t.name.lower() for t in TYPES]
    parser.add_argument("--types", nargs="+", default=names, choices=names)
    parser.add_argument("--effort", default="normal", choices=EFFORTS)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    lib = ctypes.CDLL(str(args.library))
    found = {t: Sums() for t in TYPES if t.name.lower() in args.types}
    with open_source(args.checkpoint) as source:
        mapping = map_source(source)
        importance = None
        if args.importance is not None:
            importance = load_importance(
                args.importance, mapping, lambda: mapping_fingerprint(source, mapping)
            )
        n_matrices = 0
        for matrix in list(list_matrices(mapping))[:: args.every]:
            if matrix.target.role in ("router", "shared_router"):
                continue
            columns = matrix.weights_by(importance)
            if importance is not None and columns is None:
                continue
            first = matrix.start // matrix.before.row_bytes(matrix.cols) * matrix.cols
            whole = source.read_f32(matrix.tensor, first, matrix.n_weights)
            whole = whole.reshape(matrix.rows, matrix.cols)
            n_matrices += 1
            for t, sums in found.items():
                weights, _ = gguf.GGML_QUANT_SIZES[t]
                cols = matrix.cols // weights * weights
                if not cols:
                    continue
                x = np.ascontiguousarray(whole[:, :cols])
                w = None if columns is None else np.ascontiguousarray(columns()[:cols])
                ours = quantize(
                    dtype_by_name(t.name.lower()).id, x, effort=args.effort, importance=w
                )
                if isinstance(ours, int):
                    raise SystemExit(f"{matrix.key}: weight {ours} is not finite")
                packed = ours.reshape(matrix.rows, -1)
                squares = (x.astype("f8") ** 2 @ (np.ones(cols) if w is None else w)).sum()
                peers = squared_error(t, peer_quantize(lib, t, x, w), x, w)
                sums.add(squared_error(t, packed, x, w), peers, float(squares))
    kind = "none" if args.importance is None else args.importance.name
    print(
        f"{args.checkpoint.name}: {n_matrices} matrices, effort {args.effort}, importance {kind}\n"
    )
    print("| type | colibri | llama.cpp | ratio | most of a matrix | matrices worse |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for t, s in found.items():
        print(
            f"| {t.name.lower()} | {s.ours / s.weights:.4g} | {s.peers / s.weights:.4g} | "
            f"{s.ours / s.peers:.4f} | {s.worst:.4f} | {s.n_worse} |"
        )


if __name__ == "__main__":
    main()
