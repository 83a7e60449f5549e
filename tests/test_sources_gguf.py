"""GGUF headers and split sets: equal to gguf-py on sound files, every broken field named."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sources_util import (
    GgufSpec,
    GgufTensorSpec,
    gguf_bytes,
    gguf_f32,
    gguf_kv,
    gguf_string,
    peak_memory,
)

from colibri_tools.errors import ColibriError, SourceError
from colibri_tools.sources import GgufArray, Source, open_source, parse_gguf_metadata

ARCH = ("general.architecture", "string", "qwen3moe")


def write(folder: Path, spec: GgufSpec | bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(spec if isinstance(spec, bytes) else gguf_bytes(spec))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ColibriError) as caught:
        open_source(path)
    assert caught.value.message.isprintable()
    return caught.value.message


def two_tensors(**changes: Any) -> GgufSpec:
    return replace(
        GgufSpec(kv=[ARCH], tensors=[gguf_f32("a", [2, 4]), gguf_f32("b", [3, 8], start=100)]),
        **changes,
    )


def same_as_library(source: Source, *paths: Path) -> None:
    """Compare catalog and bytes with gguf-py's readers of the same files."""
    listed: dict[str, Any] = {}
    for file, path in enumerate(paths):
        for tensor in gguf.GGUFReader(path).tensors:
            listed[tensor.name] = tensor
            ours = source.tensors[tensor.name]
            assert ours.dtype.id == int(tensor.tensor_type)
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert (ours.file, ours.offset) == (file, tensor.data_offset)
            assert ours.n_bytes == tensor.n_bytes
            assert source.read(ours) == tensor.data.tobytes()
    assert list(source.tensors) == list(listed)


# ---------------------------------------------------------------- sound files


def write_with_library(path: Path, alignment: int | None = None, **split: int) -> None:
    """A file of every value type and several tensor types, made by gguf-py."""
    writer = gguf.GGUFWriter(path, "qwen3moe", **split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("k.u8", 200)
    writer.add_int8("k.i8", -5)
    writer.add_uint16("k.u16", 60000)
    writer.add_int16("k.i16", -300)
    writer.add_uint32("k.u32", 1 << 31)
    writer.add_int32("k.i32", -7)
    writer.add_uint64("k.u64", 1 << 63)
    writer.add_int64("k.i64", -(1 << 62))
    writer.add_float32("k.f32", 0.5)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.bool", True)
    writer.add_string("k.text", "é\n")
    writer.add_array("k.words", ["a", "", "é", "x" * 300])
    writer.add_array("k.numbers", list(range(-3, 50)))
    writer.add_array("k.flags", [True, False])
    rng = np.random.default_rng(2)
    for i in range(7):
        writer.add_tensor(f"blk.{i}.w", rng.standard_normal((i + 1, 8)).astype("f4"))
    for kind in ("Q8_0", "Q4_0", "BF16"):
        quantized = gguf.quants.quantize(
            rng.standard_normal((4, 64)).astype("f4"), gguf.GGMLQuantizationType[kind]
        )
        writer.add_tensor(f"q.{kind}", quantized, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("stack", rng.standard_normal((3, 2, 5)).astype("f2"))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_catalog_metadata_and_bytes_equal_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_with_library(path)
    with open_source(path) as source:
        same_as_library(source, path)
        reader = gguf.GGUFReader(path)
        theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert source.metadata.keys() == theirs.keys()
        for key, value in theirs.items():
            assert source.metadata[key] == value, key
        assert isinstance(source.metadata["k.bool"], bool)
        data = path.read_bytes()
        (file,) = source.files
        assert file.data_offset == reader.data_offset
        assert file.header_sha256 == hashlib.sha256(data[: reader.data_offset]).hexdigest()
        assert source.warnings == [] and source.kind == "gguf"


def test_carried_metadata_is_a_prefix_that_parses_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_with_library(path)
    with open_source(path) as source:
        blob = source.blobs["gguf-metadata.bin"]
        assert path.read_bytes().startswith(blob)
        assert parse_gguf_metadata(blob) == source.metadata
    for broken in (blob[:-1], blob + b"\0", b"", blob[4:]):
        with pytest.raises(ColibriError):
            parse_gguf_metadata(broken)


def test_arrays_are_sequences(tmp_path: Path) -> None:
    kv = [
        ("words", "array", ("string", ["a", b"\xff\xfe", ""])),
        ("numbers", "array", ("uint16", [1, 2, 3])),
        ("none", "array", ("string", [])),
        ("nested", "array", ("array", [("uint8", [1]), ("string", ["x", "y"])])),
    ]
    with open_source(write(tmp_path, two_tensors(kv=kv))) as source:
        words, numbers = source.metadata["words"], source.metadata["numbers"]
        assert isinstance(words, GgufArray) and (words.type_name, len(words)) == ("string", 3)
        assert words[1].encode("utf-8", "surrogateescape") == b"\xff\xfe"
        assert (words[-1], words[0:2][0], list(reversed(numbers))) == ("", "a", [3, 2, 1])
        assert numbers == [1, 2, 3] and numbers != [1, 2] and numbers != "123"
        assert numbers.tolist() == [1, 2, 3] and 2 in numbers and len(source.metadata["none"]) == 0
        assert [list(inner) for inner in source.metadata["nested"]] == [[1], ["x", "y"]]
        with pytest.raises(IndexError):
            numbers[3]


def test_tensors_are_in_file_order(tmp_path: Path) -> None:
    spec = two_tensors()
    a, b = spec.tensors
    size_a = len(a.data)
    swapped = replace(spec, tensors=[replace(b, offset=size_a), replace(a, offset=0)])
    data = gguf_bytes(swapped)
    head = len(data) - len(a.data) - len(b.data)
    with open_source(write(tmp_path, data[:head] + a.data + b.data)) as source:
        assert list(source.tensors) == ["a", "b"]
        assert source.read("a") == a.data and source.read("b") == b.data


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(tmp_path: Path, version: int) -> None:
    path = write(tmp_path, two_tensors(version=version))
    with open_source(path) as source:
        same_as_library(source, path)


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096, 1 << 20])
def test_power_of_two_alignments_are_honoured(tmp_path: Path, alignment: int) -> None:  # 6.4
    kv = [ARCH, ("general.alignment", "uint32", alignment)]
    path = write(tmp_path, two_tensors(kv=kv, alignment=alignment))
    with open_source(path) as source:
        same_as_library(source, path)
        assert all(t.offset % alignment == 0 for t in source.tensors.values())


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("uint32", 0),
        ("uint32", 3),
        ("uint32", 48),
        ("uint32", 1 << 21),
        ("uint32", 1 << 31),
        ("int32", 32),
        ("uint64", 32),
        ("string", "32"),
        ("array", ("uint32", [32])),
    ],
)
def test_other_alignments_are_refused(tmp_path: Path, type_name: str, value: Any) -> None:  # 6.4
    message = refusal(write(tmp_path, two_tensors(kv=[("general.alignment", type_name, value)])))
    assert "general.alignment: expected a" in message


@pytest.mark.parametrize("tail", [0, 1, 20, 31])
def test_last_tensor_may_lack_or_have_padding(tmp_path: Path, tail: int) -> None:  # 6.6
    spec = two_tensors(
        tensors=[gguf_f32("a", [2, 4]), gguf_f32("b", [3])], pad_last=False, tail=b"\0" * tail
    )
    with open_source(write(tmp_path, spec)) as source:
        assert source.read("b") == spec.tensors[1].data
        assert bool(source.warnings) == (tail > 20)


def test_unused_bytes_are_warned_of(tmp_path: Path) -> None:
    a, b = two_tensors().tensors
    gap = two_tensors(tensors=[a, replace(b, offset=len(a.data) + 64)], tail=b"\0" * 64)
    with open_source(write(tmp_path, gap)) as source:
        assert "64 unused bytes" in source.warnings[0]
    with open_source(write(tmp_path, two_tensors(tail=b"\0" * 100))) as source:
        assert "100 bytes after the last tensor" in source.warnings[0]


def test_unknown_type_is_listed_with_its_reach(tmp_path: Path) -> None:  # case 4.12
    tensors = [
        GgufTensorSpec("q40", [32], 2, b"\1" * 18),
        GgufTensorSpec("q41", [32], 3, b"\2" * 20),
        GgufTensorSpec("odd", [8], 99, b"\3" * 64),
        GgufTensorSpec("end", [8], 4, b"\4" * 32),
    ]
    kv = [ARCH, ("general.file_type", "uint32", 2)]
    with open_source(write(tmp_path, GgufSpec(kv=kv, tensors=tensors))) as source:
        assert [t.dtype.name for t in source.tensors.values()][:2] == ["q4_0", "q4_1"]
        odd = source.tensors["odd"]
        assert (odd.dtype.id, odd.n_bytes, odd.dtype.is_known) == (99, 64, False)
        assert source.read(odd) == b"\3" * 64
        assert source.tensors["end"].n_bytes == 32
        assert any("'odd'" in w and "99" in w for w in source.warnings)
        with pytest.raises(SourceError, match=r"'odd'.*99"):
            odd.dtype.require_known(odd.name)
        assert source.describe()["dtypes"]["unknown_99"]["n_tensors"] == 1


# ---------------------------------------------------------------- broken fields

MAX63 = (1 << 63) - 1


def one(**changes: Any) -> GgufSpec:
    """A file of one float32 tensor `t` of 8 weights with some fields changed."""
    tensor = GgufTensorSpec("t", [8], 0, b"\0" * 32)
    return GgufSpec(kv=[ARCH], tensors=[replace(tensor, **changes)])


BROKEN: dict[str, tuple[GgufSpec | bytes, str]] = {
    "ne_int64_max_2": (one(ne=[MAX63, 2]), "'t'.*63 bits"),
    "ne_2_32_2_32": (one(ne=[1 << 32, 1 << 32]), "'t'.*63 bits"),
    "ne_wraps_to_8": (one(ne=[(1 << 61) + 1, 8]), "'t'.*63 bits"),
    "ne_large": (one(ne=[1 << 40]), "'t'.*truncated.*expected 4398046511104 bytes"),
    "ne_zero": (one(ne=[0]), "dimension of 0"),
    "ne_zero_second": (one(ne=[8, 0]), "dimension of 0"),
    "n_dims_0": (one(ne=[]), "0 dimensions"),
    "n_dims_5": (one(ne=[8, 1, 1, 1, 1]), "5 dimensions"),
    "n_dims_10_6": (one(n_dims=10**6), "1000000 dimensions"),
    "n_tensors_2_60": (replace(one(), n_tensors=1 << 60), f"{1 << 60} tensors"),
    "n_tensors_2": (replace(one(), n_tensors=2), "name of tensor 1 is empty"),
    "n_tensors_fits_limit": (replace(one(), n_tensors=1 << 16), "truncated: 65536 tensors"),
    "n_kv_2_60": (replace(one(), n_kv=1 << 60), f"{1 << 60} metadata"),
    "n_kv_fits_limit": (replace(one(), n_kv=1 << 15), "truncated: 32768 metadata"),
    "offset_2_63": (one(offset=1 << 63), "'t'.*truncated"),
    "offset_2_64": (one(offset=(1 << 64) - 32), "'t'.*truncated"),
    "offset_past_end": (one(offset=1 << 20), "'t'.*truncated"),  # case 6.9
    "offset_unaligned": (one(offset=4), "'t'.*multiple of the alignment"),
    "row_not_blocks": (one(ne=[40], type=8), "row of 40 weights.*q8_0's block of 32"),
    "row_not_blocks_flat": (one(ne=[16, 2], type=8), "row of 16 weights"),
    "name_65": (one(name="n" * 65), "65 bytes, expected at most 64"),
    "name_empty": (one(name=""), "name of tensor 0 is empty"),
    "name_not_utf8": (one(name=b"\xff\xfe"), "not UTF-8"),
    "name_nul": (one(name="a\0b"), "NUL"),
    "name_hostile": (one(name="\x1b[2J\n", ne=[0]), "x1b.*dimension"),
    "key_empty": (replace(one(), kv=[("", "uint8", 1)]), "key 0 is empty"),
    "key_long": (replace(one(), kv=[("k" * 70000, "uint8", 1)]), "70000 bytes"),
    "key_not_utf8": (replace(one(), kv=[(b"\xff", "uint8", 1)]), "not UTF-8"),
    "key_twice": (replace(one(), kv=[ARCH, ARCH]), "appears twice"),
    "type_13": (
        replace(one(), kv=[], n_kv=1, kv_bytes=gguf_string("k") + struct.pack("<II", 13, 0)),
        "'k'.*unknown value type 13",
    ),
    "item_type_13": (
        replace(one(), kv=[], n_kv=1, kv_bytes=gguf_string("k") + struct.pack("<IIQ", 9, 13, 0)),
        "'k'.*unknown item type 13",
    ),
    "bool_2": (
        replace(one(), kv=[], n_kv=1, kv_bytes=gguf_string("k") + struct.pack("<IB", 7, 2)),
        "bool of 0 or 1",
    ),
    "string_2_60": (
        replace(one(), kv=[], n_kv=1, kv_bytes=gguf_string("k") + struct.pack("<IQ", 8, 1 << 60)),
        "expected at most",
    ),
    "string_past_end": (
        replace(one(), kv=[], n_kv=1, kv_bytes=gguf_string("k") + struct.pack("<IQ", 8, 5000)),
        "truncated",
    ),
    **{
        f"array_{item}_{name}": (
            replace(
                one(),
                kv=[],
                n_kv=1,
                kv_bytes=gguf_string("k") + struct.pack("<IIQ", 9, item, count),
            ),
            expected,
        )
        for item in (0, 8, 9, 12)
        for name, count, expected in (
            ("2_64", (1 << 64) - 1, "expected at most"),
            ("2_20", 1 << 20, "truncated"),
        )
    },
    "string_array_item_2_60": (
        replace(
            one(),
            kv=[],
            n_kv=1,
            kv_bytes=gguf_string("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 60),
        ),
        "string of .*expected at most",
    ),
    "arrays_too_deep": (
        replace(
            one(),
            kv=[],
            n_kv=1,
            kv_bytes=gguf_string("k") + struct.pack("<I", 9) + b"\x09\0\0\0\1\0\0\0\0\0\0\0" * 2000,
        ),
        "nest deeper",
    ),
    "overlap": (
        two_tensors(tensors=[gguf_f32("a", [3, 8]), replace(gguf_f32("b", [3, 8]), offset=64)]),
        "'b'.*overlaps 'a'",
    ),
    "same_place": (
        two_tensors(tensors=[gguf_f32("a", [8]), replace(gguf_f32("b", [8]), offset=0)]),
        "overlaps",
    ),
    "same_name": (two_tensors(tensors=[gguf_f32("a", [8]), gguf_f32("a", [8])]), "appears twice"),
    "version_1": (two_tensors(version=1), "version 1 is not supported"),
    "version_4": (two_tensors(version=4), "version 4 is not supported"),
    "version_0": (two_tensors(version=0), "version 0"),
    "big_endian": (two_tensors(version=3 << 24), "big-endian"),
    "big_endian_magic": (two_tensors(magic=b"FUGG"), "big-endian"),
    "old_ggml": (b"lmgg" + b"\0" * 100, "before GGUF"),
    "only_magic": (b"GGUF", "truncated"),
    "cut_counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "truncated"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_field_is_named(tmp_path: Path, case: str) -> None:
    spec, expected = BROKEN[case]
    path = write(tmp_path, spec)
    with peak_memory() as peak:
        message = refusal(path)
    assert re.search(expected, message), message
    assert str(path) in message
    assert peak[0] < 2 << 20


def test_limits_themselves_are_accepted(tmp_path: Path) -> None:
    kv = [("k" * 65535, "uint8", 1), ("v", "string", "x" * 3_000_000)]
    tensors = [gguf_f32("n" * 64, [1, 1, 1, 2]), gguf_f32("é" * 32, [1])]
    with open_source(write(tmp_path, two_tensors(kv=kv, tensors=tensors))) as source:
        assert list(source.tensors) == ["n" * 64, "é" * 32]
        assert source.tensors["n" * 64].shape == (1, 1, 1, 2)
        assert len(source.metadata["v"]) == 3_000_000


def test_large_vocabulary_over_many_windows(tmp_path: Path) -> None:
    words = [f"token {i} " + "é" * (i % 40) for i in range(60_000)]
    kv = [("tokens", "array", ("string", words)), ("after", "uint8", 7)]
    with open_source(write(tmp_path, two_tensors(kv=kv))) as source:
        assert source.metadata["tokens"] == words
        assert source.metadata["after"] == 7


@pytest.mark.parametrize("n_cut", [1, 32, 60, 96, 200])
def test_truncated_file_is_refused(tmp_path: Path, n_cut: int) -> None:
    data = gguf_bytes(two_tensors(pad_last=False))
    assert "truncated" in refusal(write(tmp_path, data[:-n_cut]))


def test_file_without_tensors_may_end_before_the_data(tmp_path: Path) -> None:
    data = gguf_bytes(GgufSpec(kv=[ARCH])).rstrip(b"\0")
    with open_source(write(tmp_path, data)) as source:
        assert len(source.tensors) == 0
        assert source.files[0].header_sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", ["model", "model.bin", "model.safetensors", "ab" * 32])
def test_content_decides_whatever_the_name(tmp_path: Path, name: str) -> None:  # case 5.9
    path = write(tmp_path, two_tensors(), name)
    with open_source(path) as source:
        assert source.kind == "gguf" and len(source.tensors) == 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<html>", "web page"),
        (b"", "empty"),
        (b"COLIBRI\0", "already a colibri container"),
        (b"PK\x03\x04", "zip archive"),
    ],
)
def test_stand_ins_in_a_gguf_folder_are_named(tmp_path: Path, data: bytes, expected: str) -> None:
    write(tmp_path, data)
    assert expected in refusal(tmp_path)
    assert expected in refusal(tmp_path / "model.gguf")


# ---------------------------------------------------------------- split sets (5.5)


def split_set(folder: Path, alignment: int | None = None, n_max: int = 4) -> list[Path]:
    write_with_library(folder / "m.gguf", alignment, split_max_tensors=n_max)
    return sorted(folder.glob("m-*.gguf"))


@pytest.mark.parametrize("member", [0, 1, 2, None])
def test_any_member_or_the_folder_opens_the_whole_set(tmp_path: Path, member: int | None) -> None:
    paths = split_set(tmp_path)
    assert len(paths) == 3
    with open_source(tmp_path if member is None else paths[member]) as source:
        same_as_library(source, *paths)
        assert [f.name for f in source.files] == [p.name for p in paths]
        assert source.metadata["general.architecture"] == "qwen3moe"
        assert source.metadata["split.no"] == 0
        assert parse_gguf_metadata(source.blobs["gguf-metadata.bin"]) == source.metadata
        assert len(source.identities()) == 3


@pytest.mark.parametrize("alignment", [64, 128, 4096])
def test_members_that_inherit_the_alignment_silently(tmp_path: Path, alignment: int) -> None:
    # gguf-py pads every member to the custom alignment but names it only in the first.
    paths = split_set(tmp_path, alignment)
    whole = tmp_path / "whole"
    whole.mkdir()
    write_with_library(whole / "m.gguf", alignment)
    with open_source(paths[1]) as split, open_source(whole) as single:
        assert split.tensors.keys() == single.tensors.keys()
        for name in single.tensors:
            assert split.read(name) == single.read(name), name


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_missing_member_is_named(tmp_path: Path, gone: int) -> None:
    paths = split_set(tmp_path)
    paths[gone].unlink()
    for path in [tmp_path, *(p for p in paths if p.exists())]:
        message = refusal(path)
        assert "1 of 3 files of the split set missing" in message
        assert paths[gone].name in message


def member(no: int, count: int, tensors: list[GgufTensorSpec], total: int = 2) -> GgufSpec:
    kv = [
        ("split.no", "uint16", no),
        ("split.count", "uint16", count),
        ("split.tensors.count", "int32", total),
    ]
    return GgufSpec(kv=[*([ARCH] if no == 0 else []), *kv], tensors=tensors)


def write_pair(folder: Path, *specs: GgufSpec) -> Path:
    for i, spec in enumerate(specs):
        write(folder, spec, f"m-{i + 1:05d}-of-{len(specs):05d}.gguf")
    return folder


A, B = gguf_f32("a", [8]), gguf_f32("b", [8], start=9)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (member(1, 3, [B]), "split.count: expected 2, found 3"),
        (member(0, 2, [B]), "split.no: expected 1"),
        (member(1, 2, [A]), "'a' is also in"),
        (member(1, 2, [B], total=5), "split.tensors.count: expected 2"),
        (GgufSpec(tensors=[B]), "split.count: expected 2, found None"),
        (member(1, 2, []), "expected 2 tensors, found 1"),
    ],
)
def test_members_that_do_not_belong_together(
    tmp_path: Path, second: GgufSpec, expected: str
) -> None:
    folder = write_pair(tmp_path, member(0, 2, [A]), second)
    assert expected in refusal(folder)


def test_first_member_may_hold_no_tensors(tmp_path: Path) -> None:
    with open_source(write_pair(tmp_path, member(0, 2, []), member(1, 2, [A, B]))) as source:
        assert source.tensors["b"].file == 1
        assert source.read("b") == B.data


def test_split_names_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, member(0, 2, [A]), "renamed.gguf")
    assert "its name does not tell the others" in refusal(path)
    path = write(tmp_path, member(0, 2, [A]), "m-00001-of-00003.gguf")
    assert "named as part 1 of 3, but split.count is 2" in refusal(path)
    path = write(tmp_path, member(0, 65535, [A]), "m-00001-of-65535.gguf")
    assert "split.count 65535" in refusal(path)


@pytest.mark.parametrize("count", [0, 1])
def test_merged_file_may_keep_a_members_name(tmp_path: Path, count: int) -> None:
    path = write(tmp_path, member(0, count, [A, B]), "m-00001-of-00002.gguf")
    with open_source(path) as source:
        assert len(source.tensors) == 2
    write(tmp_path, member(1, 2, [B]), "m-00002-of-00002.gguf")
    assert "it has no split.count" in refusal(path)


@pytest.mark.parametrize(("type_name", "value"), [("string", "2"), ("float32", 2.0), ("int8", -1)])
def test_split_count_must_be_a_whole_number(tmp_path: Path, type_name: str, value: Any) -> None:
    path = write(tmp_path, GgufSpec(kv=[("split.count", type_name, value)], tensors=[A]))
    assert "split.count: expected a whole number" in refusal(path)


def test_two_models_in_a_folder_are_ambiguous(tmp_path: Path) -> None:
    split_set(tmp_path)
    write(tmp_path, two_tensors(), "other.GGUF")
    message = refusal(tmp_path)
    assert "found 2" in message and "other.GGUF" in message
    with open_source(tmp_path / "other.GGUF") as source:
        assert len(source.tensors) == 2


def test_split_member_that_links_outside_is_refused(tmp_path: Path) -> None:  # case 13.1
    folder = tmp_path / "model"
    folder.mkdir()
    write_pair(folder, member(0, 2, [A]), member(1, 2, [B]))
    second = folder / "m-00002-of-00002.gguf"
    second.rename(tmp_path / "secret")
    second.symlink_to("../secret")
    assert "outside the checkpoint's folder" in refusal(folder)


def test_hub_snapshot_of_a_split_set(tmp_path: Path) -> None:
    from sources_util import write_hub_repo

    files = {
        "m-00001-of-00002.gguf": gguf_bytes(member(0, 2, [A])),
        "m-00002-of-00002.gguf": gguf_bytes(member(1, 2, [B])),
    }
    repo = write_hub_repo(tmp_path, files)
    (snapshot,) = (repo / "snapshots").iterdir()
    for path in (repo, snapshot, snapshot / "m-00002-of-00002.gguf"):
        with open_source(path) as source:
            assert list(source.tensors) == ["a", "b"]


# ---------------------------------------------------------------- anything at all

SOUND = gguf_bytes(
    GgufSpec(
        kv=[ARCH, ("w", "array", ("string", ["a", "bc"])), ("general.alignment", "uint32", 32)],
        tensors=[A, B, GgufTensorSpec("q", [32], 8, b"\0" * 34)],
    )
)
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def fuzz_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def open_and_read(path: Path) -> None:
    try:
        with open_source(path) as source:
            for value in source.metadata.values():
                if isinstance(value, GgufArray):
                    value.tolist()
            for tensor in source.tensors.values():
                assert len(source.read(tensor)) == tensor.n_bytes
    except ColibriError as error:
        assert error.message.isprintable()


@FUZZ
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, len(SOUND) - 9),
            st.integers(0, 255).map(lambda b: bytes([b]))
            | st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 63)]),
        ),
        max_size=4,
    ),
    n_cut=st.integers(0, 40),
)
def test_only_colibri_errors_escape_from_changed_bytes(
    fuzz_path: Path, changes: list[tuple[int, bytes]], n_cut: int
) -> None:
    data = bytearray(SOUND)
    for position, patch in changes:
        data[position : position + len(patch)] = patch
    fuzz_path.write_bytes(bytes(data[: len(data) - n_cut]))
    open_and_read(fuzz_path)


@FUZZ
@given(
    entries=st.lists(st.binary(max_size=40), max_size=4),
    n_tensors=st.integers(0, 3),
    n_kv=st.integers(0, 4),
)
def test_only_colibri_errors_escape_from_any_bytes(
    fuzz_path: Path, entries: list[bytes], n_tensors: int, n_kv: int
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_kv)
    fuzz_path.write_bytes(head + b"".join(gguf_string(e[:3]) + e[3:] for e in entries))
    open_and_read(fuzz_path)


def test_kv_helper_agrees_with_the_library(tmp_path: Path) -> None:
    """The raw writer itself is checked against gguf-py once."""
    path = write(tmp_path, two_tensors(kv=[ARCH], kv_bytes=gguf_kv("x.y", "int32", -9), n_kv=2))
    assert gguf.GGUFReader(path).fields["x.y"].contents() == -9
