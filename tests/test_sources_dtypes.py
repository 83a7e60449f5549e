"""The table of tensor types and the error texts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from colibri_tools import dtypes
from colibri_tools.dtypes import DTYPES, FIRST_OTHER_ID, dtype_by_id, dtype_by_name
from colibri_tools.errors import ColibriError, FormatError, SourceError, UsageError, quote


def test_every_ggml_type_has_its_number_name_and_size() -> None:
    ours = {d.id: (d.name, d.block_weights, d.block_bytes) for d in DTYPES if d.id < FIRST_OTHER_ID}
    theirs = {int(t): (t.name.lower(), *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    assert ours == theirs


def test_ids_names_and_safetensors_names_are_unique_and_sorted() -> None:
    assert [d.id for d in DTYPES] == sorted({d.id for d in DTYPES})
    assert len({d.name for d in DTYPES}) == len(DTYPES)
    names = [d.safetensors for d in DTYPES if d.safetensors]
    assert len(set(names)) == len(names)


def test_numpy_types_have_the_stored_size() -> None:
    for dtype in DTYPES:
        if dtype.np_dtype is not None:
            assert dtype.np_dtype.itemsize == dtype.block_bytes and dtype.block_weights == 1
    assert dtype_by_name("bf16").np_dtype is None
    assert dtype_by_name("F32").np_dtype == np.dtype("<f4")


@pytest.mark.parametrize(
    ("name", "n_cols", "n_bytes"),
    [("q4_k", 512, 288), ("f4", 6, 3), ("f6_e2m3", 8, 6), ("bf16", 3, 6), ("c64", 2, 16)],
)
def test_row_bytes(name: str, n_cols: int, n_bytes: int) -> None:
    assert dtype_by_name(name).row_bytes(n_cols) == n_bytes


@pytest.mark.parametrize(("name", "n_cols"), [("q4_k", 96), ("q8_0", 40), ("f4", 3), ("f32", -1)])
def test_row_bytes_refuses_broken_rows(name: str, n_cols: int) -> None:
    with pytest.raises(FormatError, match=name):
        dtype_by_name(name).row_bytes(n_cols)


def test_lookups_name_what_they_do_not_know() -> None:
    with pytest.raises(SourceError, match="number 99 "):
        dtype_by_id(99)
    with pytest.raises(SourceError, match="q4_0_4_4 was removed"):
        dtype_by_id(31)
    with pytest.raises(UsageError, match=r"'q9_9'.*q4_k"):
        dtype_by_name("q9_9")
    with pytest.raises(FormatError, match="'F7'"):
        dtypes.dtype_by_safetensors("F7")


def test_an_unknown_type_can_be_listed_but_not_measured() -> None:
    unknown = dtypes.unknown_dtype(99)
    assert (unknown.id, unknown.name, unknown.is_known) == (99, "unknown_99", False)
    for use in (lambda: unknown.row_bytes(32), lambda: unknown.bits_per_weight):
        with pytest.raises(SourceError, match="99"):
            use()
    with pytest.raises(SourceError, match=r"'blk\.0\.x'.*99"):
        unknown.require_known("blk.0.x")


def test_messages_are_one_printable_line() -> None:
    error = ColibriError("tensor 'a\nb\x1b[31m\ud800é'")
    assert error.message == "tensor 'a\\nb\\x1b[31m\\ud800é'" == str(error)
    assert (error.exit_code, UsageError("x").exit_code) == (1, 2)
    assert len(quote("x" * 10_000)) < 130


def test_importing_the_sources_needs_neither_numpy_nor_gguf() -> None:
    code = (
        "import sys, colibri_tools.sources; print([m for m in ('numpy', 'gguf', 'torch', "
        "'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
