"""Finding numbers that are NaN or infinite in bytes of any type."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools import native
from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError

__all__ = ["Finder", "finder", "needs_scan"]

Finder = Callable[[memoryview], "int | None"]
"""Returns the index of the first weight that is not finite, or None."""

_CODES_E5M2 = (*range(0x7C, 0x80), *range(0xFC, 0x100))
_CODES: dict[str, tuple[int, ...]] = {
    "f8_e4m3": (0x7F, 0xFF),
    "f8_e5m2": _CODES_E5M2,
    "f8_e8m0": (0xFF,),
    "f8_e4m3fnuz": (0x80,),
    "f8_e5m2fnuz": (0x80,),
    "f4": (),
    "f6_e2m3": (),
    "f6_e3m2": (),
}
"""Codes of one-byte types that are no finite number."""


def needs_scan(dtype: DType) -> bool:
    """True for types that can hold NaN or infinity."""
    return dtype.kind in ("float", "quant", "complex")


@cache
def finder(dtype: DType) -> Finder | None:
    """Return the function that scans whole quant blocks of a type, or None if there is none."""
    if dtype.name in _CODES:
        return _code_finder(_CODES[dtype.name])
    if _is_decodable(dtype):
        per_byte = dtype.block_weights, dtype.block_bytes
        return lambda raw: native.find_nonfinite(
            dtype.id, raw, len(raw) // per_byte[1] * per_byte[0]
        )
    if needs_scan(dtype) and dtype.np_dtype is not None:
        numpy_type = dtype.np_dtype
        return lambda raw: _first(~np.isfinite(np.frombuffer(raw, numpy_type)))
    return None


def _code_finder(codes: tuple[int, ...]) -> Finder:
    bad = np.zeros(256, np.bool_)
    bad[list(codes)] = True
    return lambda raw: _first(bad[np.frombuffer(raw, np.uint8)]) if codes else None


def _is_decodable(dtype: DType) -> bool:
    if not dtype.is_known:
        return False
    try:
        native.dequantize(dtype.id, bytes(dtype.block_bytes), dtype.block_weights)
    except SourceError:
        return False
    return True


def _first(bad: npt.NDArray[Any]) -> int | None:
    found = np.flatnonzero(bad)
    return int(found[0]) if len(found) else None
