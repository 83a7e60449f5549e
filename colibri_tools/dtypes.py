"""One table of tensor types: what GGML has and what only safetensors has.

Ids are GGML type numbers wherever GGML has the type, so a GGUF type number, a container's type
field and `DType.id` are one number. Types that only safetensors knows start at `FIRST_OTHER_ID`.
The rows are literals, so that this module needs neither gguf nor numpy at import time; a test
compares them with `gguf.constants.GGML_QUANT_SIZES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from colibri_tools.errors import FormatError, SourceError, UsageError, quote

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DTYPES",
    "FIRST_OTHER_ID",
    "DType",
    "Kind",
    "dtype_by_id",
    "dtype_by_name",
    "dtype_by_safetensors",
    "find_dtype",
    "unknown_dtype",
]

Kind = Literal["float", "int", "uint", "bool", "complex", "quant", "unknown"]

FIRST_OTHER_ID = 0x1000
"""Types with this id or a higher one do not exist in GGML."""


@dataclass(frozen=True, slots=True)
class DType:
    """One tensor type: `block_weights` weights are stored in `block_bytes` bytes.

    `kind` is "quant" for GGML block formats and "unknown" for a type number that is not in the
    table. `safetensors` is the name in a safetensors header, `np_code` the numpy type string;
    both are None where that library has no such type.
    """

    id: int
    name: str
    block_weights: int
    block_bytes: int
    kind: Kind
    safetensors: str | None = None
    np_code: str | None = None

    @property
    def is_float(self) -> bool:
        """True for plain floating-point types (f32, bf16, f8_e4m3, ...), not for block formats."""
        return self.kind == "float"

    @property
    def is_quantized(self) -> bool:
        """True for GGML block formats (q4_k, mxfp4, ...)."""
        return self.kind == "quant"

    @property
    def is_known(self) -> bool:
        """False for a type number that is not in the table; every size of it raises."""
        return self.kind != "unknown"

    @property
    def bits_per_weight(self) -> float:
        """Stored bits for one weight, scales included."""
        self.require_known()
        return 8 * self.block_bytes / self.block_weights

    @property
    def np_dtype(self) -> np.dtype[Any] | None:
        """The numpy type of one stored element (little-endian), or None if numpy has none."""
        if self.np_code is None:
            return None
        import numpy as np  # late: keeps `colibri --help` fast

        return np.dtype(self.np_code)

    def row_bytes(self, n_cols: int) -> int:
        """Return the size of one row of `n_cols` weights.

        Raises FormatError if the row is not a whole number of quant blocks, SourceError if the
        type is unknown.
        """
        return self._whole_blocks(n_cols, "a row")

    def n_bytes(self, n_weights: int) -> int:
        """Return the size of `n_weights` weights stored without gaps. Raises as `row_bytes`."""
        return self._whole_blocks(n_weights, "a tensor")

    def require_known(self, tensor: str | None = None) -> None:
        """Raise SourceError, naming the type number and `tensor`, if this type is unknown."""
        if self.is_known:
            return
        place = "" if tensor is None else f"tensor {quote(tensor)}: "
        hint = _REMOVED.get(self.id, "it is newer than this tool or the file is damaged")
        raise SourceError(f"{place}tensor type number {self.id} is not supported ({hint})")

    def _whole_blocks(self, n_weights: int, what: str) -> int:
        self.require_known()
        if n_weights < 0:
            raise FormatError(f"{what} of {self.name} cannot have {n_weights} weights")
        n_blocks, rest = divmod(n_weights, self.block_weights)
        if rest:
            raise FormatError(
                f"{what} of {n_weights} weights is not a multiple of "
                f"{self.name}'s block of {self.block_weights}"
            )
        return n_blocks * self.block_bytes


def _plain(
    id_: int, name: str, n_bytes: int, kind: Kind, safetensors: str | None, np_code: str | None
) -> DType:
    return DType(id_, name, 1, n_bytes, kind, safetensors, np_code)


def _quant(id_: int, name: str, block_weights: int, block_bytes: int) -> DType:
    return DType(id_, name, block_weights, block_bytes, "quant")


DTYPES: tuple[DType, ...] = (
    _plain(0, "f32", 4, "float", "F32", "<f4"),
    _plain(1, "f16", 2, "float", "F16", "<f2"),
    _quant(2, "q4_0", 32, 18),
    _quant(3, "q4_1", 32, 20),
    _quant(6, "q5_0", 32, 22),
    _quant(7, "q5_1", 32, 24),
    _quant(8, "q8_0", 32, 34),
    _quant(9, "q8_1", 32, 40),
    _quant(10, "q2_k", 256, 84),
    _quant(11, "q3_k", 256, 110),
    _quant(12, "q4_k", 256, 144),
    _quant(13, "q5_k", 256, 176),
    _quant(14, "q6_k", 256, 210),
    _quant(15, "q8_k", 256, 292),
    _quant(16, "iq2_xxs", 256, 66),
    _quant(17, "iq2_xs", 256, 74),
    _quant(18, "iq3_xxs", 256, 98),
    _quant(19, "iq1_s", 256, 50),
    _quant(20, "iq4_nl", 32, 18),
    _quant(21, "iq3_s", 256, 110),
    _quant(22, "iq2_s", 256, 82),
    _quant(23, "iq4_xs", 256, 136),
    _plain(24, "i8", 1, "int", "I8", "|i1"),
    _plain(25, "i16", 2, "int", "I16", "<i2"),
    _plain(26, "i32", 4, "int", "I32", "<i4"),
    _plain(27, "i64", 8, "int", "I64", "<i8"),
    _plain(28, "f64", 8, "float", "F64", "<f8"),
    _quant(29, "iq1_m", 256, 56),
    _plain(30, "bf16", 2, "float", "BF16", None),
    _quant(34, "tq1_0", 256, 54),
    _quant(35, "tq2_0", 256, 66),
    _quant(39, "mxfp4", 32, 17),
    _quant(40, "nvfp4", 64, 36),
    _quant(41, "q1_0", 128, 18),
    _plain(0x1000, "bool", 1, "bool", "BOOL", "|b1"),
    _plain(0x1001, "u8", 1, "uint", "U8", "|u1"),
    _plain(0x1002, "u16", 2, "uint", "U16", "<u2"),
    _plain(0x1003, "u32", 4, "uint", "U32", "<u4"),
    _plain(0x1004, "u64", 8, "uint", "U64", "<u8"),
    _plain(0x1010, "f8_e4m3", 1, "float", "F8_E4M3", None),
    _plain(0x1011, "f8_e5m2", 1, "float", "F8_E5M2", None),
    _plain(0x1012, "f8_e8m0", 1, "float", "F8_E8M0", None),
    _plain(0x1013, "f8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ", None),
    _plain(0x1014, "f8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ", None),
    DType(0x1020, "f4", 2, 1, "float", "F4"),
    DType(0x1021, "f6_e2m3", 4, 3, "float", "F6_E2M3"),
    DType(0x1022, "f6_e3m2", 4, 3, "float", "F6_E3M2"),
    _plain(0x1030, "c64", 8, "complex", "C64", "<c8"),
)
"""The table, ascending by id."""

_REMOVED: dict[int, str] = {
    4: "q4_2 was removed from GGML in 2023; convert the original model again",
    5: "q4_3 was removed from GGML in 2023; convert the original model again",
    31: "q4_0_4_4 was removed from GGML; use the q4_0 file",
    32: "q4_0_4_8 was removed from GGML; use the q4_0 file",
    33: "q4_0_8_8 was removed from GGML; use the q4_0 file",
    36: "iq4_nl_4_4 was removed from GGML; use the iq4_nl file",
    37: "iq4_nl_4_8 was removed from GGML; use the iq4_nl file",
    38: "iq4_nl_8_8 was removed from GGML; use the iq4_nl file",
}

_BY_ID: dict[int, DType] = {dtype.id: dtype for dtype in DTYPES}
_BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
_BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES if d.safetensors}


def find_dtype(id_: int) -> DType | None:
    """Return the type with this number, or None."""
    return _BY_ID.get(id_)


def dtype_by_id(id_: int) -> DType:
    """Return the type with this number. Raises SourceError naming the number otherwise."""
    dtype = _BY_ID.get(id_)
    if dtype is None:
        unknown_dtype(id_).require_known()
        raise AssertionError("unreachable")
    return dtype


def dtype_by_name(name: str) -> DType:
    """Return the type with this name, in any letter case. Raises UsageError listing the names."""
    dtype = _BY_NAME.get(name.lower())
    if dtype is None:
        known = ", ".join(_BY_NAME)
        raise UsageError(f"unknown tensor type {quote(name)}; known types: {known}")
    return dtype


def dtype_by_safetensors(name: str) -> DType:
    """Return the type of a safetensors header's dtype. Raises FormatError for an unknown one."""
    dtype = _BY_SAFETENSORS.get(name)
    if dtype is None:
        known = ", ".join(_BY_SAFETENSORS)
        raise FormatError(f"unknown safetensors dtype {quote(name)}; known: {known}")
    return dtype


def unknown_dtype(id_: int) -> DType:
    """Return a placeholder for a type number outside the table, so that it can be listed."""
    return DType(id_, f"unknown_{id_}", 1, 0, "unknown")
