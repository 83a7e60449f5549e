"""The constants and the fixed-size records of the container format (docs/format.md), nothing else.

Field names are those of the page, except that every size in bytes is called `n_bytes`. All records
are little-endian and have exactly the size the page gives; the asserts below hold them to it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = [
    "BLOB_ENTRY_DTYPE",
    "CELL_DTYPE",
    "CELL_PRESENT",
    "DATUM_ALIGN",
    "DIRECTORY_HEAD_DTYPE",
    "LAYOUT_DTYPE",
    "LAYOUT_HEAD_DTYPE",
    "MAGIC",
    "MAX_ALIGNMENT",
    "MAX_BLOBS",
    "MAX_CELLS",
    "MAX_COLUMNS",
    "MAX_DIM",
    "MAX_DIMS",
    "MAX_KV_BYTES",
    "MAX_KV_ELEMENTS",
    "MAX_KV_ENTRIES",
    "MAX_LAYOUTS",
    "MAX_METADATA_BYTES",
    "MAX_NAME_BYTES",
    "MAX_PARTS",
    "MAX_ROWS",
    "MAX_SECTIONS",
    "MAX_SIZE",
    "MAX_TENSORS",
    "MIN_ALIGNMENT",
    "MIN_RESERVE_BYTES",
    "PAGE0_BYTES",
    "PAGE0_DTYPE",
    "PART_DTYPE",
    "REQUIRED_SECTIONS",
    "ROW_DTYPE",
    "ROW_HEAD_DTYPE",
    "SECTION_DTYPE",
    "SECTION_REQUIRED",
    "TENSOR_ALIAS",
    "TENSOR_DTYPE",
    "VERSION",
    "Group",
    "PartRole",
    "Role",
    "SectionKind",
    "Stream",
    "align",
]

MAGIC = b"COLIBRI\0"
VERSION = 1
PAGE0_BYTES = 4096
MIN_ALIGNMENT = 4096
MAX_ALIGNMENT = 2 << 20
DATUM_ALIGN = 64
"""Alignment of sections, blobs, tensors within a group, and parts within a block."""

MAX_SECTIONS = 61
MAX_METADATA_BYTES = 128 << 20
MIN_RESERVE_BYTES = 1 << 20
MAX_KV_ENTRIES = 4096
MAX_KV_BYTES = 8 << 20
MAX_KV_ELEMENTS = 1 << 18
"""Of all arrays of a section: as Python lists they cost five times their bytes."""
MAX_BLOBS = 1024
MAX_TENSORS = 1 << 14
MAX_NAME_BYTES = 255
MAX_DIMS = 4
MAX_DIM = 1 << 48
MAX_SIZE = (1 << 63) - 1
MAX_ROWS = 65536
MAX_COLUMNS = 65536
MAX_CELLS = 1 << 18
MAX_LAYOUTS = 1024
MAX_PARTS = 8

SECTION_REQUIRED = 1
TENSOR_ALIAS = 1
CELL_PRESENT = 1


class SectionKind(IntEnum):
    """What a section of the metadata holds."""

    SPEC = 1
    BLOBS = 2
    PROVENANCE = 3
    DIRECTORY = 4
    ROWS = 5
    INDEX = 6
    LAYOUTS = 7
    TOKENIZER = 16
    PARTS = 17
    SIGNATURE = 18
    IMPORTANCE = 19

    @property
    def label(self) -> str:
        """The section's name in messages."""
        return _SECTION_LABELS[self]


_SECTION_LABELS = {
    SectionKind.SPEC: "spec",
    SectionKind.BLOBS: "blobs",
    SectionKind.PROVENANCE: "provenance",
    SectionKind.DIRECTORY: "resident directory",
    SectionKind.ROWS: "row table",
    SectionKind.INDEX: "expert index",
    SectionKind.LAYOUTS: "layout table",
    SectionKind.TOKENIZER: "tokenizer tables",
    SectionKind.PARTS: "part table",
    SectionKind.SIGNATURE: "signature",
    SectionKind.IMPORTANCE: "importance",
}

REQUIRED_SECTIONS = tuple(SectionKind(kind) for kind in range(1, 8))


class Role(IntEnum):
    """What the engine uses a resident tensor for."""

    OTHER = 0
    TOKEN_EMBD = 1
    OUTPUT = 2
    OUTPUT_NORM = 3
    ROPE_FACTORS = 4
    ROPE_FACTORS_SHORT = 5
    ROPE_FACTORS_LONG = 6
    OUTPUT_BIAS = 7
    OUTPUT_NORM_BIAS = 8
    ATTN_NORM = 16
    ATTN_Q = 17
    ATTN_K = 18
    ATTN_V = 19
    ATTN_O = 20
    ATTN_Q_BIAS = 21
    ATTN_K_BIAS = 22
    ATTN_V_BIAS = 23
    ATTN_O_BIAS = 24
    ATTN_Q_NORM = 25
    ATTN_K_NORM = 26
    ATTN_GATE = 27
    ATTN_POST_NORM = 28
    ATTN_NORM_BIAS = 30
    ATTN_SINKS = 31
    FFN_NORM = 32
    ROUTER = 33
    ROUTER_SELECT_BIAS = 34
    FFN_POST_NORM = 35
    FFN_NORM_BIAS = 38
    ROUTER_BIAS = 39
    DENSE_GATE = 40
    DENSE_UP = 41
    DENSE_DOWN = 42
    SHARED_GATE = 48
    SHARED_UP = 49
    SHARED_DOWN = 50
    SHARED_ROUTER = 51
    ATTN_Q_A = 64
    ATTN_Q_A_NORM = 65
    ATTN_Q_B = 66
    ATTN_KV_A = 67
    ATTN_KV_A_NORM = 68
    ATTN_KV_B = 69
    ATTN_K_B = 70
    ATTN_V_B = 71
    ATTN_Q_A_BIAS = 72
    ATTN_KV_A_BIAS = 73

    @property
    def label(self) -> str:
        """The role's name on the page and in messages, e.g. `attn_q`."""
        return self.name.lower()


class Group(IntEnum):
    """How often a resident tensor is read, which is where it lies."""

    EVERY_TOKEN = 1
    PER_ROW = 2
    OPTIONAL = 3


class PartRole(IntEnum):
    """What a part of an expert block is."""

    GATE = 1
    UP = 2
    DOWN = 3
    GATE_BIAS = 4
    UP_BIAS = 5
    DOWN_BIAS = 6

    @property
    def label(self) -> str:
        """The part's name in messages, e.g. `gate_bias`."""
        return self.name.lower()


class Stream(IntEnum):
    """Which sequence of layers a row belongs to."""

    MAIN = 0
    MTP = 1


SECTION_DTYPE = np.dtype(
    [
        ("kind", "<u4"),
        ("flags", "<u4"),
        ("offset", "<u8"),
        ("n_bytes", "<u8"),
        ("crc32c", "<u4"),
        ("zero", "<u4"),
        ("sha256", "u1", (32,)),
    ]
)

PAGE0_DTYPE = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("page0_bytes", "<u4"),
        ("required_features", "<u8"),
        ("optional_features", "<u8"),
        ("alignment", "<u8"),
        ("file_size", "<u8"),
        ("n_sections", "<u4"),
        ("zero0", "<u4"),
        ("metadata_bytes", "<u8"),
        ("data_offset", "<u8"),
        ("expert_offset", "<u8"),
        ("zero1", "<u8"),
        ("id", "u1", (32,)),
        ("zero2", "<u8"),
        ("sections", SECTION_DTYPE, (MAX_SECTIONS,)),
        ("zero3", "u1", (60,)),
        ("crc32c", "<u4"),
    ]
)

BLOB_ENTRY_DTYPE = np.dtype(
    [
        ("name_offset", "<u4"),
        ("name_bytes", "<u4"),
        ("data_offset", "<u8"),
        ("data_bytes", "<u8"),
        ("zero", "<u8"),
    ]
)

DIRECTORY_HEAD_DTYPE = np.dtype(
    [("n_tensors", "<u4"), ("entry_bytes", "<u4"), ("names_bytes", "<u8")]
)

TENSOR_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("n_bytes", "<u8"),
        ("type", "<u4"),
        ("role", "<u2"),
        ("group", "<u2"),
        ("layer", "<i4"),
        ("flags", "<u4"),
        ("alias_of", "<u4"),
        ("n_dims", "<u4"),
        ("shape", "<u8", (MAX_DIMS,)),
        ("name_offset", "<u4"),
        ("name_bytes", "<u4"),
        ("crc32c", "<u4"),
        ("zero", "u1", (12,)),
        ("sha256", "u1", (32,)),
    ]
)

ROW_HEAD_DTYPE = np.dtype(
    [("n_rows", "<u4"), ("n_columns", "<u4"), ("entry_bytes", "<u4"), ("zero", "<u4")]
)

ROW_DTYPE = np.dtype(
    [
        ("layer", "<i4"),
        ("stream", "<u4"),
        ("n_experts", "<u4"),
        ("flags", "<u4"),
        ("zero", "u1", (16,)),
    ]
)

CELL_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("n_bytes", "<u8"),
        ("layout", "<u4"),
        ("rank", "<u4"),
        ("part", "<u2"),
        ("flags", "<u2"),
        ("crc32c", "<u4"),
        ("sha256", "u1", (32,)),
    ]
)

LAYOUT_HEAD_DTYPE = np.dtype([("n_layouts", "<u4"), ("entry_bytes", "<u4")])

PART_DTYPE = np.dtype(
    [
        ("role", "<u2"),
        ("permutation", "<u2"),
        ("type", "<u4"),
        ("offset", "<u8"),
        ("n_bytes", "<u8"),
        ("shape", "<u8", (2,)),
        ("zero", "u1", (24,)),
    ]
)

LAYOUT_DTYPE = np.dtype(
    [
        ("n_bytes", "<u8"),
        ("n_parts", "<u4"),
        ("flags", "<u4"),
        ("zero", "u1", (48,)),
        ("parts", PART_DTYPE, (MAX_PARTS,)),
    ]
)

assert SECTION_DTYPE.itemsize == 64
assert PAGE0_DTYPE.itemsize == PAGE0_BYTES
assert BLOB_ENTRY_DTYPE.itemsize == 32
assert DIRECTORY_HEAD_DTYPE.itemsize == 16
assert TENSOR_DTYPE.itemsize == 128
assert ROW_HEAD_DTYPE.itemsize == 16
assert ROW_DTYPE.itemsize == 32
assert CELL_DTYPE.itemsize == 64
assert PART_DTYPE.itemsize == 64
assert LAYOUT_DTYPE.itemsize == 576


def align(x: int, a: int) -> int:
    """Return the smallest multiple of `a` that is >= `x`."""
    return -(-x // a) * a
