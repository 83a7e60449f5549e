"""Tensors whose weights are encoded into another type while they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, quote
from colibri_tools.sources.catalog import Source, SourceTensor

__all__ = ["EncodedView", "Loss", "LossSums"]

_STEP_WEIGHTS = 1 << 18
"""Weights in memory as float32 at a time: they and their encoding stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums of squares: of what encoding changed, of the weights, and both by importance."""

    error: float = 0.0
    weight: float = 0.0
    important_error: float = 0.0
    important_weight: float = 0.0

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.error + other.error,
            self.weight + other.weight,
            self.important_error + other.important_error,
            self.important_weight + other.important_weight,
        )

    @property
    def relative(self) -> float:
        """The squared error as a share of the squared weights; 0 where all weights are zero."""
        return self.error / self.weight if self.weight > 0 else 0.0

    @property
    def important(self) -> float:
        """The same, by importance."""
        return self.important_error / self.important_weight if self.important_weight > 0 else 0.0


class Loss:
    """What encoding one matrix lost. Threads may add pieces in any order: the sum is the same."""

    def __init__(self) -> None:
        self._pieces: dict[int, LossSums] = {}

    def put(self, first: int, sums: LossSums) -> None:
        """Note the piece that begins with weight `first`; once more is the same."""
        self._pieces[first] = sums

    @property
    def is_measured(self) -> bool:
        """Whether anything was encoded."""
        return bool(self._pieces)

    def total(self) -> LossSums:
        """Return the sums over all pieces."""
        return sum((self._pieces[first] for first in sorted(self._pieces)), LossSums())


@dataclass(frozen=True, eq=False, slots=True)
class EncodedView:
    """The weights of `base`, of any type that decodes, as `dtype`, in rows of `cols`.

    `importance` returns float32 [cols], which weighs the squared errors of a row's columns. The
    encoding of a quant block depends on nothing beyond it, so any range of whole blocks can be
    read by itself. With a `loss`, what is read is also decoded and compared.
    """

    base: SourceTensor
    dtype: DType
    effort: str
    cols: int
    importance: Callable[[], npt.NDArray[np.float32]] | None = None
    loss: Loss | None = None

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        return self.base.bases

    def locate(self, index: int) -> tuple[int, ...]:
        return self.base.locate(index)

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the encoded tensor on, whole quant blocks.

        Raises SourceError, naming the place, for a weight that is not finite or too large.
        """
        to = np.frombuffer(out, np.uint8)
        importance = None if self.importance is None else self.importance()
        for first, n_rows, n_cols in self._pieces(self._weights(start), self._weights(len(out))):
            n_bytes = self.dtype.n_bytes(n_rows * n_cols)
            columns = slice(first % self.cols, first % self.cols + n_cols)
            part = None if importance is None else importance[columns]
            self._encode(source, first, (n_rows, n_cols), part, to[:n_bytes])
            to = to[n_bytes:]

    def _weights(self, n_bytes: int) -> int:
        return n_bytes // self.dtype.block_bytes * self.dtype.block_weights

    def _pieces(self, first: int, left: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range into (first weight, rows, columns): whole rows, or a part of one."""
        while left > 0:
            rest = self.cols - first % self.cols
            n_rows, n_cols = 1, min(left, rest, _STEP_WEIGHTS)
            if n_cols == self.cols:
                n_rows = max(1, min(left, _STEP_WEIGHTS) // n_cols)
            yield first, n_rows, n_cols
            first, left = first + n_rows * n_cols, left - n_rows * n_cols

    def _encode(
        self,
        source: Source,
        first: int,
        shape: tuple[int, int],
        importance: npt.NDArray[np.float32] | None,
        out: npt.NDArray[Any],
    ) -> None:
        from colibri_tools import native  # late: a source can be listed without the C code

        weights = self._decoded(source, first, shape[0] * shape[1]).reshape(shape)
        bad = native.quantize(
            self.dtype.id, weights, effort=self.effort, importance=importance, out=out
        )
        if isinstance(bad, int):
            raise self._does_not_fit(first + bad, float(weights.flat[bad]))
        if self.loss is not None:
            sums = native.quantize_loss(self.dtype.id, out, weights, importance)
            self.loss.put(first, LossSums(*sums))

    def _decoded(self, source: Source, first: int, n: int) -> npt.NDArray[np.float32]:
        """Return weights as float32 [n], valid until this thread's next call."""
        from colibri_tools import native

        dtype = self.base.dtype
        # The base's blocks may be longer than this type's: whole ones are decoded around the range.
        block = dtype.block_weights
        begin, end = first // block * block, -(-(first + n) // block) * block
        raw = _scratch("raw", dtype.n_bytes(end - begin))
        source.read_into(self.base, dtype.n_bytes(begin), raw.data)
        weights = _scratch("weights", 4 * (end - begin)).view(np.float32)
        native.dequantize(dtype.id, raw, end - begin, out=weights)
        return weights[first - begin :][:n]

    def _does_not_fit(self, index: int, value: float) -> SourceError:
        where = ", ".join(str(number) for number in self.locate(index))
        why = (
            f"too large for {self.dtype.name}; give it a type with more range by --rule"
            if np.isfinite(value)
            else "the checkpoint is damaged, fetch or save it again"
        )
        return SourceError(f"tensor {quote(self.base.name)}: {value} at [{where}]: {why}")


_buffers = threading.local()


def _scratch(name: str, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a buffer of this thread's own: new ones would be paged in at every step."""
    found: npt.NDArray[np.uint8] | None = getattr(_buffers, name, None)
    if found is None or found.nbytes < n_bytes:
        found = np.empty(n_bytes, np.uint8)
        setattr(_buffers, name, found)
    return found[:n_bytes]
