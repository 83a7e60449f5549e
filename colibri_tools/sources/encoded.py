"""Tensors whose weights are encoded into another type while they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, quote
from colibri_tools.sources.catalog import Source, SourceTensor

__all__ = ["EncodedView"]

_STEP_WEIGHTS = 1 << 18
"""Weights in memory as float32 at a time: they and their encoding stay in a core's cache."""


@dataclass(frozen=True, eq=False, slots=True)
class EncodedView:
    """The weights of `base`, of any type that decodes, as `dtype`.

    `importance`, float32 [cols], weighs the squared errors of a row's columns. The encoding of a
    quant block depends on nothing beyond it, so any range of whole blocks can be read by itself.
    """

    base: SourceTensor
    dtype: DType
    effort: str
    importance: npt.NDArray[np.float32] | None = None

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        return self.base.bases

    def locate(self, index: int) -> tuple[int, ...]:
        return self.base.locate(index)

    def read_into(self, source: Source, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the encoded tensor on, whole quant blocks.

        Raises SourceError, naming the place, for a weight that is not finite or too large.
        """
        first, left = self._weights(start), self._weights(len(out))
        to = np.frombuffer(out, np.uint8)
        while left > 0:
            n = min(left, _STEP_WEIGHTS)
            n_bytes = self.dtype.n_bytes(n)
            self._encode(source, first, n, to[:n_bytes])
            first, left, to = first + n, left - n, to[n_bytes:]

    def _weights(self, n_bytes: int) -> int:
        return n_bytes // self.dtype.block_bytes * self.dtype.block_weights

    def _encode(self, source: Source, first: int, n: int, out: npt.NDArray[Any]) -> None:
        from colibri_tools import native  # late: a source can be listed without the C code

        # The base's blocks may be longer than this type's: whole ones are decoded around the range.
        block = self.base.dtype.block_weights
        begin, end = first // block * block, -(-(first + n) // block) * block
        weights = source.read_f32(self.base, begin, end - begin)[first - begin :][:n]
        bad = native.quantize(
            self.dtype.id,
            weights.reshape(1, n),
            effort=self.effort,
            importance=self._importance_of(first, n),
            out=out,
        )
        if isinstance(bad, int):
            raise self._does_not_fit(first + bad, float(weights[bad]))

    def _importance_of(self, first: int, n: int) -> npt.NDArray[np.float32] | None:
        if self.importance is None:
            return None
        columns = np.arange(first, first + n) % len(self.importance)
        return np.ascontiguousarray(self.importance[columns])

    def _does_not_fit(self, index: int, value: float) -> SourceError:
        where = ", ".join(str(number) for number in self.locate(index))
        why = (
            f"too large for {self.dtype.name}; give it a type with more range by --rule"
            if np.isfinite(value)
            else "the checkpoint is damaged, fetch or save it again"
        )
        return SourceError(f"tensor {quote(self.base.name)}: {value} at [{where}]: {why}")
