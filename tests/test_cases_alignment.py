"""Alignment, padding and odd dimensions, from a source to the container."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import tiny_models as tm
from repack_util import check_codes, coded, refused, small_gguf, small_spec

import colibri_tools
from colibri_tools.container.format import PartRole
from colibri_tools.repack import repack

_T = tm.GGMLQuantizationType


@pytest.mark.parametrize("align", [4096, 16384, 2 << 20])
def test_case_6_1_every_block_is_one_aligned_range(tmp_path: Path, align: int) -> None:
    spec = tm.default_spec("olmoe")
    source = tm.write_hf(tmp_path / "hf", "olmoe", spec, mutate=coded("olmoe", spec))
    result = repack(source, tmp_path / "m.colibri", align=align)
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        cells = container.index.ravel()
        assert container.alignment == align
        assert not (cells["offset"] % align).any()
        assert container.file_size % align == 0
        ends = sorted(cells["offset"] + (-(-cells["n_bytes"] // align) * align))
        assert ends[:-1] == sorted(cells["offset"])[1:]  # no gap, no overlap
        assert ends[-1] == container.file_size
    parts = result.accounting
    total = parts.page0_bytes + parts.metadata_bytes + parts.resident_bytes
    assert total + parts.expert_bytes + parts.padding_bytes == parts.file_bytes
    check_codes(tmp_path / "m.colibri", spec)


@pytest.mark.parametrize(("width", "pages"), [(32, 3), (33, 4)])
def test_case_6_1_a_block_of_whole_pages_has_no_padding(
    tmp_path: Path, width: int, pages: int
) -> None:
    spec = small_spec("mixtral", width=width)  # 3 matrices of 64 columns, 2 bytes a weight
    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, dtype="bf16")
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        layout = container.layout_of(0, 0)
        assert layout.n_bytes == 3 * width * 64 * 2
        assert container.padded_bytes(layout.n_bytes) == pages * 4096
        assert all(part.offset % 64 == 0 for part in layout.parts)


@pytest.mark.parametrize("width", [40, 48, 96])
@pytest.mark.parametrize("kind", [_T.Q8_0, _T.MXFP4, _T.Q4_K], ids=lambda kind: kind.name)
def test_case_6_7_rows_that_are_no_multiple_of_the_block_keep_their_own_type(
    tmp_path: Path, width: int, kind: tm.GGMLQuantizationType
) -> None:
    """gate and up have rows of 256, down has rows of the expert width: types differ by part."""
    spec = tm.wide_spec("qwen3_moe", width=width)
    stored: dict[str, tm.GgufTensor] = {}
    path = tm.write_gguf(tmp_path / "m.gguf", "qwen3_moe", spec, types=kind, mutate=stored.update)[
        0
    ]
    result = repack(path, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        layout = container.layout_of(1, 3)
        down = stored["blk.1.ffn_down_exps.weight"]
        assert [p.dtype.name for p in layout.parts[:2]] == [kind.name.lower()] * 2
        assert layout.parts[2].dtype.name == down.type.name.lower()
        assert container.part(1, 3, PartRole.DOWN).tobytes() == down.data[3].tobytes()
        sizes = sum(tensor.data.nbytes for tensor in stored.values())
        assert sum(result.types.values()) == sizes


def test_case_6_6_trailing_pad_of_gguf_is_accepted(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf", "olmoe")
    first = repack(path, tmp_path / "a.colibri")
    path.write_bytes(path.read_bytes() + bytes(20))
    second = repack(path, tmp_path / "b.colibri")
    with (
        colibri_tools.open(tmp_path / "a.colibri") as a,
        colibri_tools.open(tmp_path / "b.colibri") as b,
    ):
        assert (a.index == b.index).all()
    assert first.accounting == second.accounting


def test_case_6_9_a_tensor_past_the_end_aborts_without_output(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf", "olmoe")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up_exps.weight"
    at = data.index(name) + len(name) + 4 + 3 * 8 + 4
    struct.pack_into("<Q", data, at, len(data) + 32 - len(data) % 32)
    path.write_bytes(data)
    assert name.decode() in refused(path)


def test_case_6_9_a_file_cut_in_its_last_tensor_aborts_without_output(tmp_path: Path) -> None:
    for name, write in (("hf", tm.write_hf), ("g.gguf", tm.write_gguf)):
        source = tmp_path / name
        write(source, "olmoe", small_spec("olmoe"))
        file = source / "model.safetensors" if source.is_dir() else source
        file.write_bytes(file.read_bytes()[:-1])
        refused(source)
