"""What an encoding will take, from encoding a small sample of each kind of matrix."""

from __future__ import annotations

import time
from collections import defaultdict

from colibri_tools.dtypes import DType
from colibri_tools.quantize.encoding import Encoded, Encoding
from colibri_tools.quantize.report import Estimate
from colibri_tools.sources import Source
from colibri_tools.sources.encoded import STEP_WEIGHTS

__all__ = ["estimate"]

_SAMPLE_WEIGHTS = 1 << 18
_BASE_BYTES = 64 << 20


def estimate(
    encoding: Encoding, source: Source, n_threads: int, buffer_bytes: int
) -> Estimate | None:
    """Encode samples and extrapolate; None where nothing is encoded.

    `buffer_bytes` is what each thread holds besides. Reading and writing the rest of the file is
    not in the time: a slow drive takes longer.
    """
    kinds: dict[tuple[DType, DType], list[Encoded]] = defaultdict(list)
    for item in encoding.encoded:
        if item.changes:
            kinds[item.matrix.before, item.dtype].append(item)
    if not kinds:
        return None
    seconds = 0.0
    for items in kinds.values():
        n_weights = sum(item.matrix.n_weights for item in items)
        seconds += n_weights * _seconds_per_weight(encoding, source, items[0])
    step = min(STEP_WEIGHTS, max(item.matrix.n_weights for item in encoding.encoded))
    scratch = max(step * before.block_bytes // before.block_weights for before, _ in kinds)
    memory = _BASE_BYTES + n_threads * (buffer_bytes + scratch)
    return Estimate(seconds / n_threads, n_threads, memory)


def _seconds_per_weight(encoding: Encoding, source: Source, item: Encoded) -> float:
    matrix, dtype = item.matrix, item.dtype
    n_rows = max(1, min(matrix.rows, _SAMPLE_WEIGHTS // matrix.cols))
    weights = matrix.weights_by(encoding.importance)
    tensor = matrix.encoded(dtype, encoding.effort, weights)
    n_bytes = n_rows * dtype.row_bytes(matrix.cols)
    source.read(tensor, matrix.start_as(dtype), n_bytes)  # pages and buffers are there then
    start = time.perf_counter()
    source.read(tensor, matrix.start_as(dtype), n_bytes)
    return (time.perf_counter() - start) / (n_rows * matrix.cols)
