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

__all__ = ["STEP_WEIGHTS", "EncodedView", "Loss", "LossSums", "WeightError"]

STEP_WEIGHTS = 1 << 21
"""So many weights are read at a time."""


class WeightError(SourceError):
    """A weight that no type, or not this one, can hold; `index` is its place in the tensor."""

    def __init__(self, index: int, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.index = index
        self._parts = where, why

    def within(self, place: str) -> WeightError:
        """Return the same error with what else is known about where the weight is."""
        where, why = self._parts
        return WeightError(self.index, f"{where} ({place})", why)


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

        Raises WeightError for a weight that is not finite or too large.
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
            n_rows, n_cols = 1, min(left, rest, STEP_WEIGHTS)
            if n_cols == self.cols:
                n_rows = max(1, min(left, STEP_WEIGHTS) // n_cols)
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

        # The base's blocks may be longer than this type's: whole ones around the range are read.
        before, n = self.base.dtype, shape[0] * shape[1]
        begin = first // before.block_weights
        end = -(-(first + n) // before.block_weights)
        raw = _scratch((end - begin) * before.block_bytes)
        source.read_into(self.base, begin * before.block_bytes, raw.data)
        skip = first - begin * before.block_weights
        found = native.convert_rows(
            before.id,
            raw,
            skip,
            self.dtype.id,
            shape,
            out,
            effort=self.effort,
            importance=importance,
            measure=self.loss is not None,
        )
        if isinstance(found, int):
            n_weights = (end - begin) * before.block_weights
            weights = native.dequantize(before.id, raw, n_weights)
            raise self._does_not_fit(first + found, float(weights[skip + found]))
        if self.loss is not None and found is not None:
            self.loss.put(first, LossSums(*found))

    def _does_not_fit(self, index: int, value: float) -> WeightError:
        where = ", ".join(str(number) for number in self.locate(index))
        why = (
            f"too large for {self.dtype.name}; give it a type with more range by --rule"
            if np.isfinite(value)
            else "the checkpoint is damaged, fetch or save it again"
        )
        return WeightError(index, f"tensor {quote(self.base.name)}: {value} at [{where}]", why)


_buffers = threading.local()


def _scratch(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a buffer of this thread's own: new ones would be paged in at every step."""
    found: npt.NDArray[np.uint8] | None = getattr(_buffers, "raw", None)
    if found is None or found.nbytes < n_bytes:
        found = _buffers.raw = np.empty(n_bytes, np.uint8)
    return found[:n_bytes]
