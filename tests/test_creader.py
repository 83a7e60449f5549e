"""The C reader and the expert store, built with sanitizers and run on containers that
`c/make_container.py` writes straight from docs/format.md."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from c import make_container as mc
from c_programs import ASAN, CSRC, READER, ROOT, STORE, TEST_C, TSAN, Program, compile_c, sanitizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("creader")


@pytest.fixture(scope="module")
def types(folder: Path) -> list[Path]:
    """The type table, as objects: fast to build, and not what is tested here."""
    sources = sorted(CSRC.glob("blocks*.c"))
    return [compile_c([s], ["-c", "-O0"], folder / f"{s.stem}.o") for s in sources]


@pytest.fixture(scope="module")
def reader(folder: Path, types: list[Path]) -> Program:
    """tests/c/test_container.c with AddressSanitizer and UndefinedBehaviorSanitizer."""
    sources = [TEST_C / "test_container.c", *READER, *types]
    return Program(folder / "test_container", sources, sanitizer(ASAN, folder))


WRAP = ["-Wl,--wrap=pread,--wrap=preadv,--wrap=open,--wrap=mmap,--wrap=madvise,--wrap=syscall"]


@pytest.fixture(scope="module")
def store(folder: Path, types: list[Path]) -> Program:
    """tests/c/test_store.c, likewise."""
    sources = [TEST_C / "test_store.c", *STORE, *types]
    return Program(folder / "test_store", sources, WRAP + sanitizer(ASAN, folder))


@pytest.fixture(scope="module")
def threaded_store(folder: Path, types: list[Path]) -> Program:
    """tests/c/test_store.c with ThreadSanitizer."""
    flags = sanitizer(TSAN, folder)
    if not flags:
        pytest.skip("ThreadSanitizer does not run here")
    return Program(folder / "threaded", [TEST_C / "test_store.c", *STORE, *types], WRAP + flags)


# -- the reader: sound containers ----------------------------------------------------------------


def expected_dump(model: mc.Model, image: mc.Image) -> Iterator[str]:
    """What `test_container dump` prints for this model, from the description alone."""
    for key, kind, value in model.spec:
        n, raw = mc.kv_value(kind, value)
        yield f"spec {key} {kind} {n} " + ("" if kind == 8 else raw.hex())
    for name, raw in model.blobs:
        yield f"blob {name} {raw.hex()}"
    file, names = image.to_bytes(), [tensor.name for tensor in model.tensors]
    for tensor in model.tensors:
        alias = -1 if tensor.alias_of is None else names.index(tensor.alias_of)
        place = tensor if alias < 0 else model.tensors[alias]
        raw = file[place.offset : place.offset + place.n_bytes]
        shape = " ".join(map(str, tensor.shape))
        yield (
            f"tensor {tensor.name} role {tensor.role} group {tensor.group} layer {tensor.layer} "
            f"type {mc.TYPES[tensor.type_name][0]} shape {shape} at {place.offset} + {len(raw)} "
            f"alias {alias} crc {mc.crc32c(raw):08x} sha {mc.hashlib.sha256(raw).hexdigest()}"
        )
    for layout in model.layouts:
        parts = [
            f"{role} {mc.TYPES[name][0]} {rows}x{cols} at {start} + {n}"
            for (role, name, rows, cols), (start, n) in zip(
                layout.parts, layout.places(), strict=True
            )
        ]
        yield " | ".join([f"layout {layout.n_bytes}", *parts])
    offsets, at = {}, image.expert_offset
    for row, expert in model.order:
        offsets[row, expert] = at
        at += mc.align(model.layouts[model.rows[row].layouts[expert]].n_bytes, model.alignment)
    assert at == len(file)
    for i, row in enumerate(model.rows):
        yield f"row layer {row.layer} stream {row.stream}"
        for expert, layout_index in enumerate(row.layouts):
            start = offsets[i, expert]
            raw = file[start : start + model.layouts[layout_index].n_bytes]
            yield (
                f"block {start} + {len(raw)} layout {layout_index} "
                f"rank {model.order.index((i, expert))} crc {mc.crc32c(raw):08x} "
                f"sha {mc.hashlib.sha256(raw).hexdigest()}"
            )


MODELS: dict[str, Callable[[], mc.Model]] = {
    "small": mc.small,
    "one size": lambda: mc.streaming(3, 4, mixed=False),
    "alignment 64 KiB": lambda: mc.streaming(2, 3, mixed=True, alignment=65536),
}


@pytest.mark.parametrize("name", MODELS)
def test_reader_finds_what_was_written(name: str, reader: Program, tmp_path: Path) -> None:
    model = MODELS[name]()
    image = mc.build(model)
    path = tmp_path / "model.colibri"
    path.write_bytes(image.to_bytes())
    lines = reader("dump", path, *(blob for blob, _ in model.blobs)).splitlines()
    assert lines[0].startswith(
        f"alignment {model.alignment} data {image.data_offset} experts {image.expert_offset} "
        f"size {path.stat().st_size} id "
    )
    assert lines[1:] == list(expected_dump(model, image))


# -- the reader: broken rules --------------------------------------------------------------------

KV_HEAD = struct.Struct("<II")
S = mc.kv_entry
U64 = struct.Struct("<Q").pack
ENTRY = 16  # of the resident directory; 128 bytes each


def set_page0(at: int, raw: bytes) -> Callable[[mc.Image], None]:
    return lambda image: image.page0.update({at: raw})


def set_table(section: int, at: int, raw: bytes) -> Callable[[mc.Image], None]:
    return lambda image: image.table.update({64 * section + at: raw})


def set_bytes(kind: int, at: int, raw: bytes) -> Callable[[mc.Image], None]:
    def change(image: mc.Image) -> None:
        image.section(kind)[at : at + len(raw)] = raw

    return change


def set_provenance(
    *entries: bytes, tail: bytes = b"", count: int | None = None
) -> Callable[[mc.Image], None]:
    head = KV_HEAD.pack(len(entries) if count is None else count, 0)
    return lambda image: image.replace(mc.PROVENANCE, head + b"".join(entries) + tail)


def set_spec(**changes: object) -> Callable[[mc.Image], None]:
    return lambda image: image.replace(mc.SPEC, mc.kv_section(mc.spec(**changes)))


def set_blobs(
    *blobs: tuple[str, bytes], at: int = 0, raw: bytes = b""
) -> Callable[[mc.Image], None]:
    data = bytearray(mc.blob_section(blobs))
    data[at : at + len(raw)] = raw
    return lambda image: image.replace(mc.BLOBS, bytes(data))


def tensor(i: int, at: int, code: str, *values: int) -> Callable[[mc.Image], None]:
    return set_bytes(mc.RESIDENT, ENTRY + 128 * i + at, struct.pack("<" + code, *values))


def cell(row: int, expert: int, at: int, code: str, *values: int) -> Callable[[mc.Image], None]:
    """The sample model has 5 columns."""
    return set_bytes(mc.INDEX, 64 * (5 * row + expert) + at, struct.pack("<" + code, *values))


def layout(i: int, at: int, code: str, *values: int) -> Callable[[mc.Image], None]:
    return set_bytes(mc.LAYOUTS, 8 + 576 * i + at, struct.pack("<" + code, *values))


def part(i: int, p: int, at: int, code: str, *values: int) -> Callable[[mc.Image], None]:
    return layout(i, 64 + 64 * p + at, code, *values)


def row(i: int, at: int, code: str, *values: int) -> Callable[[mc.Image], None]:
    return set_bytes(mc.ROWS, 16 + 32 * i + at, struct.pack("<" + code, *values))


def both(*changes: Callable[[mc.Image], None]) -> Callable[[mc.Image], None]:
    def change(image: mc.Image) -> None:
        for one in changes:
            one(image)

    return change


def swap_sections(image: mc.Image) -> None:
    image.sections[1], image.sections[2] = image.sections[2], image.sections[1]


def drop_layouts(image: mc.Image) -> None:
    """Leaves 7 sections, but not the 7 that are needed."""
    image.sections = [entry for entry in image.sections if entry[0] != mc.LAYOUTS]


def drop_two(image: mc.Image) -> None:
    image.sections = image.sections[:6]


def second_layout_unused(image: mc.Image) -> None:
    """Adds a layout that no cell names."""
    data = image.section(mc.LAYOUTS)
    extra = bytearray(data[8 : 8 + 576])
    extra[64 + 4 : 64 + 8] = struct.pack("<I", 2)  # gate as q4_0
    extra[64 + 16 : 64 + 24] = U64(1152)
    for p, start in ((1, 1152), (2, 1152 + 2176)):
        extra[64 + 64 * p + 8 : 64 + 64 * p + 16] = U64(start)
    extra[0:8] = U64(1152 + 2176 + 1152)
    image.replace(mc.LAYOUTS, struct.pack("<II", 3, 576) + data[8:] + extra)


def two_equal_layouts(image: mc.Image) -> None:
    data = image.section(mc.LAYOUTS)
    image.replace(mc.LAYOUTS, struct.pack("<II", 3, 576) + data[8:] + data[8 : 8 + 576])


def gap_not_zero(image: mc.Image) -> None:
    """A byte between the blobs and the provenance."""
    end = mc.align(4096 + len(image.section(mc.SPEC)), 64) + len(image.section(mc.BLOBS))
    assert end % 64
    image.raw[end] = b"\1"


def section_offset(i: int) -> Callable[[mc.Image], None]:
    def change(image: mc.Image) -> None:
        at = 4096
        for _, _, data in image.sections[:i]:
            at = mc.align(at + len(data), 64)
        image.table[64 * i + 8] = U64(at + 64)

    return change


def one_name_twice(image: mc.Image) -> None:
    """l1.router and l2.router have names of one length."""
    data = image.section(mc.RESIDENT)
    at = data.index(b"l2.router")
    data[at : at + 9] = b"l1.router"


def rank_twice(image: mc.Image) -> None:
    data = image.section(mc.INDEX)
    data[20:24] = data[64 + 20 : 64 + 24]


def rebuilt(**changes: object) -> Callable[[mc.Image], mc.Image]:
    """Another container, of the sample model with other fields."""

    def change(_: mc.Image) -> mc.Image:
        model = mc.small()
        for name, value in changes.items():
            setattr(model, name, value)
        return mc.build(model)

    return change


def shapes(**changes: tuple[int, int]) -> Callable[[mc.Image], mc.Image]:
    """A container whose first layout has parts of other shapes."""
    sizes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)} | changes
    parts = [(role + 1, "q8_0", *size) for role, size in enumerate(sizes.values())]
    return rebuilt(layouts=[mc.Layout(parts), mc.small().layouts[1]])


def cut_data(image: mc.Image) -> None:
    del image.data[-8192:]


BIG = 1 << 62

# name: (change, rule, words of the refusal)
BROKEN: dict[str, tuple[Callable[[mc.Image], object], int, str]] = {
    "magic": (set_page0(0, b"COLIBRA\0"), 1, "COLIBRA"),
    "version": (set_page0(8, struct.pack("<I", 2)), 1, "version is 2"),
    "page0_bytes": (set_page0(12, struct.pack("<I", 8192)), 1, "page0_bytes is 8192"),
    "required feature": (set_page0(16, U64(1 << 41)), 2, "bit 41"),
    "alignment 0": (set_page0(32, U64(0)), 3, "alignment is 0"),
    "alignment 2048": (set_page0(32, U64(2048)), 3, "2048"),
    "alignment 12288": (set_page0(32, U64(12288)), 3, "12288"),
    "alignment 4 MiB": (set_page0(32, U64(4 << 20)), 3, "4194304"),
    "page 0 damaged": (lambda i: i.raw.update({1000: b"\1"}), 4, "damaged"),
    "page 0 empty": (lambda i: i.raw.update({0: bytes(4096)}), 4, "never finished"),
    "file_size": (set_page0(40, U64(1 << 40)), 5, "expected 1099511627776"),
    "6 sections": (drop_two, 6, "n_sections is 6"),
    "62 sections": (set_page0(48, struct.pack("<I", 62)), 6, "n_sections is 62"),
    "2^32-1 sections": (set_page0(48, struct.pack("<I", 0xFFFFFFFF)), 6, "n_sections"),
    "order of kinds": (swap_sections, 6, "kind is 2"),
    "missing kind": (drop_layouts, 6, "no layout table"),
    "unknown and required": (set_table(7, 4, b"\1"), 6, "kind 17 is required"),
    "known, not required": (set_table(2, 4, b"\0"), 6, "provenance"),
    "section offset": (section_offset(3), 7, "section 3"),
    "section offset 2^62": (set_table(3, 8, U64(BIG)), 7, "section 3"),
    "section bytes 2^64-1": (set_table(3, 16, U64(2**64 - 1)), 7, "section 3"),
    "section too long": (set_table(7, 16, U64(4000)), 7, "section 7"),
    "metadata_bytes": (set_page0(56, U64(6000)), 7, "metadata"),
    "metadata_bytes 2^63": (set_page0(56, U64(1 << 63)), 7, "metadata_bytes"),
    "metadata_bytes beyond the file": (set_page0(56, U64(1 << 20)), 7, "metadata_bytes"),
    "gap": (gap_not_zero, 7, "gap before section 2"),
    "reserve": (lambda i: i.raw.update({i.data_offset - 1: b"\1"}), 8, "reserve"),
    "data_offset unaligned": (set_page0(64, U64(12289)), 8, "data_offset is 12289"),
    "data_offset 2^62": (set_page0(64, U64(BIG)), 8, "data_offset"),
    "data_offset beyond the file": (set_page0(64, U64(1 << 20)), 8, "data_offset"),
    "data_offset in the metadata": (set_page0(64, U64(8192)), 8, "data_offset"),
    "section CRC": (set_table(4, 24, b"\0\0\0\0"), 9, "CRC"),
    "section SHA": (set_table(4, 32, bytes(32)), 9, "SHA-256"),
    "id": (set_page0(88, bytes(32)), 9, "id"),
    "section damaged": (lambda i: i.raw.update({4100: b"\xff"}), 9, "damaged"),
    "page 0, byte 52": (set_page0(52, b"\1"), 10, "byte 52"),
    "page 0, byte 87": (set_page0(87, b"\1"), 10, "byte 87"),
    "page 0, byte 120": (set_page0(120, b"\1"), 10, "byte 120"),
    "page 0, byte 4091": (set_page0(4091, b"\1"), 10, "byte 4091"),
    "section flags": (set_table(1, 4, b"\3"), 10, "section 1"),
    "section zero": (set_table(1, 28, b"\1"), 10, "section 1"),
    "kv: too short": (lambda i: i.replace(mc.PROVENANCE, b"\0" * 7), 11, "7 bytes"),
    "kv: count": (set_provenance(S(b"a", 1, 1, U64(1)), count=2), 11, "entry 1"),
    "kv: count 4097": (set_provenance(count=4097), 11, "count is 4097"),
    "kv: word behind count": (lambda i: i.replace(mc.PROVENANCE, KV_HEAD.pack(0, 1)), 11, "word"),
    "kv: padding beyond": (
        lambda i: i.replace(mc.PROVENANCE, KV_HEAD.pack(1, 0) + S(b"a", 5, 3, b"abc")[:-5]),
        11,
        "padding reaches past",
    ),
    "kv: trailing": (set_provenance(tail=bytes(8)), 11, "end of the section"),
    "kv: order": (set_provenance(S(b"b", 1, 1, U64(1)), S(b"a", 1, 1, U64(1))), 11, '"a"'),
    "kv: twice": (set_provenance(*[S(b"a", 1, 1, U64(1))] * 2), 11, '"a"'),
    "kv: no key": (set_provenance(S(b"", 1, 1, U64(1))), 11, "key_bytes is 0"),
    "kv: long key": (set_provenance(S(b"a" * 129, 1, 1, U64(1))), 11, "key_bytes is 129"),
    "kv: key beyond": (set_provenance(tail=struct.pack("<HBBI", 128, 1, 0, 1), count=1), 11,
                       "past the section"),
    "kv: capital": (set_provenance(S(b"aB", 1, 1, U64(1))), 11, "character"),
    "kv: newline": (set_provenance(S(b"a\n", 1, 1, U64(1))), 11, '"a?"'),
    "kv: type 0": (set_provenance(S(b"a", 0, 1, U64(1))), 11, "type is 0"),
    "kv: type 9": (set_provenance(S(b"a", 9, 1, U64(1))), 11, "type is 9"),
    "kv: n 2": (set_provenance(S(b"a", 1, 2, U64(1) * 2)), 11, "n is 2"),
    "kv: value beyond": (set_provenance(S(b"a", 6, 3, U64(1) * 2)), 11, "needs 24 bytes"),
    "kv: 2^32-1 elements": (set_provenance(S(b"a", 6, 0xFFFFFFFF, b"")), 11, "34359738360"),
    "kv: bool 2": (set_provenance(S(b"a", 4, 1, U64(2))), 11, "bool is 2"),
    "kv: inf": (set_provenance(S(b"a", 3, 1, struct.pack("<d", float("inf")))), 11, "finite"),
    "kv: nan in array": (set_provenance(S(b"a", 7, 2, struct.pack("<dd", 1, float("nan")))), 11,
                         "number 1 is not finite"),
    "kv: NUL": (set_provenance(S(b"a", 5, 3, b"a\0b")), 11, "UTF-8"),
    "kv: surrogate": (set_provenance(S(b"a", 5, 3, b"\xed\xa0\x80")), 11, "UTF-8"),
    "kv: overlong": (set_provenance(S(b"a", 5, 2, b"\xc0\xaf")), 11, "UTF-8"),
    "kv: above U+10FFFF": (set_provenance(S(b"a", 5, 4, b"\xf4\x90\x80\x80")), 11, "UTF-8"),
    "kv: cut sequence": (set_provenance(S(b"a", 5, 2, b"a\xe2")), 11, "UTF-8"),
    "kv: string too long": (set_provenance(S(b"a", 5, 9, b"abc")), 11, "needs 9 bytes"),
    "kv: strings beyond": (set_provenance(S(b"a", 8, 2, struct.pack("<I", 4) + b"abcd")), 11,
                           "string 1"),
    "kv: string 2^32-1": (set_provenance(S(b"a", 8, 1, b"\xff" * 4)), 11, "string 0"),
    "kv: strings not UTF-8": (set_provenance(S(b"a", 8, 1, b"\1\0\0\0\xff")), 11, "string 0"),
    "kv: byte 3": (set_provenance(b"\1\0\1\1" + S(b"a", 1, 1, U64(1))[4:]), 11, "byte 3"),
    "kv: key padding": (set_provenance(S(b"a", 1, 1, U64(1))[:9] + b"\1" + bytes(6) + U64(1)), 11,
                        "padding"),
    "kv: value padding": (set_provenance(S(b"a", 5, 1, b"xy")), 11, "padding"),
    "spec: type": (set_spec(top_k=(2, 2)), 12, '"top_k" has type 2'),
    "spec: f64 as u64": (set_spec(**{"graph.norm_eps": (1, 1)}), 12, "graph.norm_eps"),
    "spec: optional key's type": (set_spec(executable_lacks=(1, 1)), 12, "executable_lacks"),
    "spec: moe_layers": (set_spec(moe_layers=(6, [0, 1])), 12, "moe_layers has 2"),
    "spec: moe_layers 2": (set_spec(moe_layers=(6, [0, 1, 2])), 12, "moe_layers[2] is 2"),
    "blobs: too short": (lambda i: i.replace(mc.BLOBS, b"\0" * 4), 13, "4 bytes"),
    "blobs: count": (set_blobs(at=0, raw=b"\1"), 13, "count is 1"),
    "blobs: count 2^32-1": (set_blobs(at=0, raw=b"\xff" * 4), 13, "count"),
    "blobs: 1025": (
        rebuilt(blobs=[(f"{i:04}", b"") for i in range(1025)]),
        13,
        "count is 1025",
    ),
    "blobs: names beyond": (set_blobs(("abc", b"1"), at=12, raw=b"\xff"), 13, "names reach past"),
    "blobs: cut before the datum": (
        lambda i: i.replace(mc.BLOBS, mc.blob_section([("abc", b"")])[:43]),
        13,
        "expected at 64",
    ),
    "blobs: zero": (set_blobs(at=4, raw=b"\1"), 13, "zero word"),
    "blobs: order": (set_blobs(("b", b"1"), ("a", b"2")), 13, '"a"'),
    "blobs: twice": (set_blobs(("a", b"1"), ("a", b"2")), 13, '"a"'),
    "blobs: slash": (set_blobs(("a/b", b"1")), 13, '"a/b"'),
    "blobs: backslash": (set_blobs(("a\\b", b"1")), 13, "a\\b"),
    "blobs: NUL": (set_blobs(("a\0b", b"1")), 13, "NUL"),
    "blobs: no name": (set_blobs(("", b"1")), 13, "name_bytes is 0"),
    "blobs: long name": (set_blobs(("a" * 256, b"1")), 13, "name_bytes is 256"),
    "blobs: not UTF-8": (set_blobs(("abc", b"1"), at=40, raw=b"\xff"), 13, "UTF-8"),
    "blobs: name offset": (set_blobs(("abc", b"1"), at=8, raw=b"\0"), 13, "expected at 40"),
    "blobs: data offset": (set_blobs(("abc", b"1"), at=16, raw=U64(128)), 13, "expected at 64"),
    "blobs: data 2^64-1": (set_blobs(("abc", b"1"), at=24, raw=U64(2**64 - 1)), 13, "within"),
    "blobs: last field": (set_blobs(("abc", b"1"), at=32, raw=b"\1"), 13, "last field"),
    "blobs: gap": (set_blobs(("abc", b"1"), at=50, raw=b"\1"), 13, "gap"),
    "blobs: short datum": (set_blobs(("abc", b"12"), at=24, raw=U64(1)), 13, "ends at 65"),
    "resident: offset": (tensor(1, 0, "Q", 12352), 14, "output_norm"),
    "resident: group order": (tensor(2, 22, "H", 2), 14, "group"),
    "resident: group 4": (tensor(8, 22, "H", 4), 14, "group is 4"),
    "resident: group 0": (tensor(1, 22, "H", 0), 14, "group is 0"),
    "resident: first group 0": (tensor(0, 22, "H", 0), 14, "group is 0"),
    "resident: alias type": (tensor(0, 16, "I", 1), 14, '"output"'),
    "resident: alias SHA": (tensor(0, 96, "B", 1), 14, '"output"'),
    "resident: beyond the blocks": (
        both(tensor(2, 8, "Q", 6528000), tensor(2, 40, "Q", 96000)),
        14,
        '"l0.gate"',
    ),
    "resident: alias to alias": (tensor(9, 32, "I", 9), 14, "alias_of is 9"),
    "resident: alias beyond": (tensor(0, 32, "I", 10), 14, "alias_of is 10"),
    "resident: alias shape": (tensor(0, 40, "QQ", 20, 32), 14, '"output"'),
    "resident: alias CRC": (tensor(0, 80, "I", 1), 14, '"output"'),
    "resident: alias offset": (tensor(0, 0, "Q", 24640), 14, '"output"'),
    "resident: alias_of alone": (tensor(1, 32, "I", 5), 14, "alias_of"),
    "resident: flags": (tensor(1, 28, "I", 2), 14, "flag"),
    "resident: zero bytes": (tensor(1, 95, "B", 1), 14, "byte"),
    "resident: expert_offset": (set_page0(72, U64(36864)), 14, "expert_offset is 36864"),
    "resident: expert_offset 2^62": (set_page0(72, U64(BIG)), 14, "expert_offset"),
    "resident: bytes": (tensor(1, 8, "Q", 255), 15, "bytes is 255, expected 256"),
    "resident: type": (tensor(1, 16, "I", 4), 15, "type is 4"),
    "resident: type 2^32-1": (tensor(1, 16, "I", 0xFFFFFFFF), 15, "type"),
    "resident: n_dims 0": (tensor(1, 36, "I", 0), 15, "n_dims is 0"),
    "resident: n_dims 5": (tensor(1, 36, "I", 5), 15, "n_dims is 5"),
    "resident: n_dims 2^32-1": (tensor(1, 36, "I", 0xFFFFFFFF), 15, "n_dims"),
    "resident: dimension 0": (tensor(1, 40, "Q", 0), 15, "shape[0] is 0"),
    "resident: dimension 2^48+1": (tensor(1, 40, "Q", (1 << 48) + 1), 15, "2^48"),
    "resident: product": (tensor(2, 40, "QQ", 1 << 32, 1 << 32), 15, "2^63"),
    "resident: product 2^63": (tensor(2, 40, "QQ", 1 << 40, 1 << 23), 15, "product"),
    "resident: size": (tensor(1, 36, "IQQ", 2, 1 << 31, 1 << 30), 15, "2^63"),
    "resident: unused dimension": (tensor(1, 64, "Q", 1), 15, "shape[3]"),
    "resident: row of 63": (tensor(2, 48, "Q", 63), 15, "63"),
    "resident: entry_bytes": (set_bytes(mc.RESIDENT, 4, b"\x40"), 16, "of 64 bytes"),
    "resident: n_tensors": (set_bytes(mc.RESIDENT, 0, b"\x0b"), 16, "11 entries"),
    "resident: 2^32-1 tensors": (set_bytes(mc.RESIDENT, 0, b"\xff" * 4), 16, "4294967295"),
    "resident: names_bytes": (set_bytes(mc.RESIDENT, 8, b"\1"), 16, "bytes of names"),
    "resident: names_bytes 2^64-1": (set_bytes(mc.RESIDENT, 8, U64(2**64 - 1)), 16, "of names"),
    "resident: too short": (lambda i: i.replace(mc.RESIDENT, bytes(15)), 16, "15 bytes"),
    "resident: name of 256 bytes": (
        rebuilt(tensors=[mc.Tensor("x" * 256, 2, 1, -1, "f32", (1,)), *mc.small().tensors[1:]]),
        16,
        "256 bytes",
    ),
    "resident: name gap": (tensor(1, 72, "I", 7), 16, "expected 1 ... 255 at 6"),
    "resident: empty name": (tensor(1, 76, "I", 0), 16, "0 bytes"),
    "resident: name beyond": (tensor(9, 76, "I", 255), 16, "tensor 9"),
    "resident: names not used up": (tensor(9, 76, "I", 4), 16, "names end"),
    "resident: not UTF-8": (tensor(8, 76, "I", 3), 16, "UTF-8"),
    "resident: name twice": (one_name_twice, 16, '"l1.router"'),
    "resident: role twice": (tensor(4, 24, "i", 1), 17, "role 33 in layer 1"),
    "resident: unknown role": (tensor(1, 20, "H", 9), 17, "role is 9"),
    "resident: role other": (tensor(1, 20, "H", 0), 17, "role is 0"),
    "resident: layer 4": (tensor(3, 24, "i", 4), 17, "layer is 4"),
    "resident: layer -2": (tensor(3, 24, "i", -2), 17, "layer is -2"),
    "rows: order": (both(row(0, 0, "i", 2), row(1, 0, "i", 1)), 18, "row 1"),
    "rows: too short": (lambda i: i.replace(mc.ROWS, bytes(15)), 18, "15 bytes"),
    "rows: twice": (row(1, 0, "i", 1), 18, "row 1"),
    "rows: stream 2": (row(2, 4, "I", 2), 18, "stream is 2"),
    "rows: layer -1": (row(0, 0, "i", -1), 18, "layer -1"),
    "rows: no experts": (row(1, 8, "I", 0), 18, "n_experts is 0"),
    "rows: too many experts": (row(1, 8, "I", 6), 18, "n_experts is 6"),
    "rows: flags": (row(1, 12, "I", 1), 18, "row 1"),
    "rows: zero bytes": (row(1, 31, "B", 1), 18, "row 1"),
    "rows: n_columns": (set_bytes(mc.ROWS, 4, b"\6"), 18, "n_columns is 6"),
    "rows: n_columns 65537": (set_bytes(mc.ROWS, 4, b"\1\0\1\0"), 18, "65537 columns"),
    "rows: n_rows": (set_bytes(mc.ROWS, 0, b"\4"), 18, "4 rows"),
    "rows: n_rows 2^32-1": (set_bytes(mc.ROWS, 0, b"\xff" * 4), 18, "4294967295 rows"),
    "rows: entry_bytes": (set_bytes(mc.ROWS, 8, b"\x10"), 18, "of 16 bytes"),
    "rows: zero": (set_bytes(mc.ROWS, 12, b"\1"), 18, "zero word"),
    "cells: bytes of the section": (lambda i: i.section(mc.INDEX).extend(bytes(64)), 19, "1024"),
    "cells: beyond the row": (cell(1, 3, 63, "B", 1), 19, "expert 3"),
    "cells: absent": (cell(0, 2, 26, "H", 0), 19, "row 0 (layer 1), expert 2: flags are 0"),
    "cells: flags": (cell(0, 2, 26, "H", 3), 19, "flags are 3"),
    "cells: part": (cell(0, 2, 24, "H", 1), 19, "part is 1"),
    "cells: layout": (cell(0, 2, 16, "I", 2), 19, "layout is 2"),
    "cells: bytes": (cell(0, 2, 8, "Q", 5505), 19, "bytes is 5505"),
    "cells: rank": (cell(0, 2, 20, "I", 10), 20, "rank is 10"),
    "cells: rank twice": (rank_twice, 20, "no other block"),
    "cells: offset": (cell(0, 2, 0, "Q", 4096), 20, "row 0 (layer 1), expert 2"),
    "cells: offset 2^62": (cell(0, 2, 0, "Q", BIG), 20, "offset 4611686018427387904"),
    "cells: trailing": (lambda i: i.data.extend(bytes(4096)), 20, "end of the file"),
    "cells: file ends early": (cut_data, 20, "within the file"),
    "layouts: n_layouts": (set_bytes(mc.LAYOUTS, 0, b"\3"), 23, "expected 1 ... 1024 of"),
    "layouts: too short": (lambda i: i.replace(mc.LAYOUTS, bytes(7)), 23, "7 bytes"),
    "layouts: none": (lambda i: i.replace(mc.LAYOUTS, struct.pack("<II", 0, 576)), 23, "0 entries"),
    "layouts: entry_bytes": (set_bytes(mc.LAYOUTS, 4, b"\0"), 23, "of 512 bytes"),
    "layouts: n_parts": (layout(0, 8, "I", 9), 23, "n_parts is 9"),
    "layouts: one part less": (layout(0, 8, "I", 2), 23, "unused"),
    "layouts: flags": (layout(0, 12, "I", 1), 23, "flags"),
    "layouts: zero bytes": (layout(0, 63, "B", 1), 23, "layout 0"),
    "layouts: bytes": (layout(0, 0, "Q", 5503), 23, "bytes is 5503"),
    "layouts: unused slot": (part(0, 7, 0, "H", 6), 23, "unused"),
    "layouts: unused": (second_layout_unused, 23, "layout 2 is used by no block"),
    "layouts: equal": (two_equal_layouts, 23, "are equal"),
    "parts: role order": (part(0, 1, 0, "H", 1), 23, "part 1: role is 1"),
    "parts: role 7": (part(0, 2, 0, "H", 7), 23, "role is 7"),
    "parts: role 0": (part(0, 0, 0, "H", 0), 23, "role is 0"),
    "parts: gate missing": (
        both(part(0, 0, 0, "H", 2), part(0, 1, 0, "H", 3), part(0, 2, 0, "H", 4)),
        23,
        "gate, up or down is missing",
    ),
    "parts: up missing": (both(part(0, 1, 0, "H", 3), part(0, 2, 0, "H", 4)), 23, "is missing"),
    "parts: end of 2^63": (
        both(
            part(0, 0, 4, "IQQQQ", 0, 0, BIG, 1 << 48, 1 << 12),
            part(0, 1, 4, "IQQQQ", 0, BIG, BIG, 1 << 48, 1 << 12),
        ),
        23,
        "part 1",
    ),
    "parts: gate columns": (shapes(gate=(32, 96)), 23, "gate is [32, 96]"),
    "parts: up rows": (shapes(up=(40, 64)), 23, "up [40, 64]"),
    "parts: up columns": (shapes(up=(32, 96)), 23, "up [32, 96]"),
    "parts: down rows": (shapes(down=(96, 32)), 23, "down [96, 32]"),
    "parts: down columns": (shapes(down=(64, 64)), 23, "down [64, 64]"),
    "parts: down missing": (part(0, 2, 0, "H", 4), 23, "is missing"),
    "parts: permutation": (part(0, 1, 2, "H", 1), 23, "permutation"),
    "parts: type": (part(0, 1, 4, "I", 5), 23, "type is 5"),
    "parts: offset": (part(0, 1, 8, "Q", 2240), 23, "at 2240"),
    "parts: bytes": (part(0, 1, 16, "Q", 2175), 23, "2175 bytes"),
    "parts: shape": (part(0, 0, 24, "Q", 1 << 49), 23, "2^48"),
    "parts: shape product": (part(0, 0, 24, "QQ", 1 << 40, 1 << 40), 23, "2^63"),
    "parts: gate turned": (part(0, 0, 24, "QQ", 64, 32), 23, "gate is [64, 32]"),
    "parts: down turned": (part(0, 2, 24, "QQ", 32, 64), 23, "down [32, 64]"),
    "parts: bias rows": (part(1, 3, 24, "QQ", 40, 1), 23, "[40, 1]"),
    "parts: zero bytes": (part(0, 1, 63, "B", 1), 23, "part 1"),
    "hidden_size": (set_spec(hidden_size=(1, 96)), 23, "[width, 96]"),
    "layer without row": (set_spec(moe_layers=(6, [1, 1, 1])), 24, "layer 0 has no row"),
    "dense layer with row": (set_spec(moe_layers=(6, [0, 1, 0])), 24, "layer 2 has a row"),
    "row beyond the main layers": (row(2, 4, "I", 0), 24, "row 2: stream 0, layer 3"),
    "row beyond the MTP layers": (row(2, 0, "i", 4), 24, "row 2: stream 1, layer 4"),
    "MTP layer beyond": (set_spec(n_mtp_layers=(1, 0)), 17, "layer is 3"),
    "router missing": (tensor(4, 20, "H", 32), 24, "layer 2 has experts and no router"),
    "router rows": (both(tensor(4, 40, "QQ", 12, 16), set_spec(top_k=(1, 1))), 24, "12 rows"),
    "top_k": (set_spec(top_k=(1, 3)), 24, "top_k is 3"),
    "top_k 2^64-1": (set_spec(top_k=(1, 2**64 - 1)), 24, "top_k"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_refused_by_both_readers(name: str, reader: Program, tmp_path: Path) -> None:
    change, rule, words = BROKEN[name]
    image = mc.build(mc.small())
    replaced = change(image)
    image = replaced if isinstance(replaced, mc.Image) else image
    path = tmp_path / "broken.colibri"
    path.write_bytes(image.to_bytes())
    said = reader("open", path).strip()
    assert said.startswith(f"{path}: rule {rule}: "), said
    assert words in said

    from colibri_tools.container import reader as python_reader
    from colibri_tools.errors import FormatError

    with pytest.raises(FormatError):
        python_reader.open(path).close()


@pytest.mark.parametrize("key", [key for key, _, _ in mc.spec() if key != "x.words"])
def test_missing_spec_key_is_refused(key: str, reader: Program, tmp_path: Path) -> None:
    image = mc.build(mc.small())
    set_spec(**{key: None})(image)
    path = tmp_path / "broken.colibri"
    path.write_bytes(image.to_bytes())
    assert f'rule 12: spec: there is no key "{key}"' in reader("open", path)


def accepted_changes() -> dict[str, Callable[[mc.Image], object]]:
    return {
        "optional feature": set_page0(24, U64(1 << 63)),
        "unknown spec key": set_spec(**{"graph.unheard_of": (1, 1)}),
        "executable_lacks": set_spec(executable=(4, 0), executable_lacks=(5, "a reason")),
        "not executable, no router": both(set_spec(executable=(4, 0)), tensor(4, 20, "H", 32)),
        "no provenance": set_provenance(),
        "no blobs": set_blobs(),
        "empty string and arrays": set_provenance(S(b"a", 5, 0, b""), S(b"b", 6, 0, b""),
                                                  S(b"c", 8, 0, b"")),
        "key of 128 bytes": set_provenance(S(b"a" * 128, 1, 1, U64(1))),
        "two more unknown sections": lambda i: i.sections.append((2**32 - 1, 0, bytearray(9))),
    }  # fmt: skip


@pytest.mark.parametrize("name", accepted_changes())
def test_what_no_rule_forbids_is_accepted(name: str, reader: Program, tmp_path: Path) -> None:
    image = mc.build(mc.small())
    accepted_changes()[name](image)
    path = tmp_path / "sound.colibri"
    path.write_bytes(image.to_bytes())
    assert reader("open", path).strip() == "ok"


def test_file_that_is_no_container_is_refused(reader: Program, tmp_path: Path) -> None:
    whole = mc.build(mc.small()).to_bytes()
    contents = {
        "empty": b"", "short": whole[:4095], "page": whole[:4096], "cut": whole[:-1],
        "grown": whole + b"\0", "text": b"hello\n" * 1000, "half": whole[: len(whole) // 2],
    }  # fmt: skip
    paths = [tmp_path / name for name in contents]
    for path, raw in zip(paths, contents.values(), strict=True):
        path.write_bytes(raw)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    paths += [tmp_path / "fifo", tmp_path / "folder", tmp_path / "missing", Path("/dev/null")]
    said = reader("open", *paths).splitlines()
    for path, line in zip(paths, said, strict=True):
        assert line.startswith(f"{path}: ")
    rules = [re.search(r": rule (\d+):", line) for line in said]
    assert [m and int(m[1]) for m in rules[:7]] == [5, 5, 5, 5, 5, 1, 5]
    assert ["regular" in line for line in said[7:]] == [True, True, False, True]


def test_sizes_that_need_a_huge_file_are_refused(reader: Program, tmp_path: Path) -> None:
    """Bounds that only a file beyond them can break; the files here are mostly holes."""
    cases = [(56, (1 << 30) + 1, 2 << 30, 7), (64, 48 << 20, 64 << 20, 8)]
    for at, value, n_bytes, rule in cases:
        image = mc.build(mc.small())
        image.page0.update({40: U64(n_bytes), at: U64(value)})
        path = tmp_path / "huge.colibri"
        path.write_bytes(image.to_bytes())
        os.truncate(path, n_bytes)
        assert f": rule {rule}: " in reader("open", path)


# -- the reader: damage --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    path = folder / "small.colibri"
    path.write_bytes(mc.build(mc.small()).to_bytes())
    return path


def test_every_flipped_bit_before_the_data_is_refused(reader: Program, small: Path) -> None:
    n_bits = 8 * mc.build(mc.small()).data_offset
    assert reader("flips", small).strip() == f"accepted 0 of {n_bits}"


def test_every_cut_before_the_data_is_refused(reader: Program, small: Path) -> None:
    assert reader("cuts", small).startswith("accepted 0 of")


def test_random_changes_behind_valid_checksums_do_no_harm(reader: Program, small: Path) -> None:
    """The program itself checks that what is accepted is safe to use."""
    said = reader("mutate", small, 20, 30_000)
    accepted, refused = map(int, re.findall(r"\d+", said))
    assert accepted > 3_000 and refused > 10_000  # both sides of every check are reached


def test_both_readers_agree_on_random_changes(reader: Program, small: Path, tmp_path: Path) -> None:
    from colibri_tools.container.reader import open_bytes
    from colibri_tools.errors import FormatError

    out, n = tmp_path / "changes", 1_000
    reader("mutate", small, 33, n, out)
    whole, size = small.read_bytes(), mc.build(mc.small()).data_offset
    changes = out.read_bytes()
    assert len(changes) == n * (size + 1)
    for i in range(n):
        raw = changes[i * (size + 1) : (i + 1) * (size + 1)]
        problem = ""
        try:
            open_bytes(raw[:size] + whole[size:]).close()
        except FormatError as error:
            problem = str(error)
        assert (problem == "") == (raw[size] == 1), f"change {i}: {problem or 'accepted'}"


# -- the store -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streams(folder: Path) -> dict[str, Path]:
    """Containers of many blocks: of one size, of two, and with an alignment far above the page."""
    models = {
        "one": mc.streaming(4, 8, mixed=False),
        "two": mc.streaming(4, 8, mixed=True),
        "wide": mc.streaming(3, 4, mixed=True, alignment=65536),
    }
    paths = {name: folder / f"{name}.colibri" for name in models}
    for name, model in models.items():
        paths[name].write_bytes(mc.build(model).to_bytes())
    return paths


def info(program: Program, path: Path) -> dict[str, str]:
    line = program("info", path)
    return dict(re.findall(r'(\w+) ("[^"]*"|\S+)', line))


def test_store_measures_whole_pages(store: Program, streams: dict[str, Path]) -> None:
    model = mc.streaming(4, 8, mixed=True)
    sizes = [[mc.align(model.layouts[i].n_bytes, 4096) for i in row.layouts] for row in model.rows]
    flat = sorted(size for row in sizes for size in row)
    said = info(store, streams["two"])
    assert int(said["minimum"]) == flat[-1] + flat[-2]
    assert int(said["token"]) == sum(2 * max(row) for row in sizes)
    assert int(said["all"]) == sum(flat)
    assert int(said["blocks"]) == len(flat)
    assert said["backend"] == "pread"


@pytest.mark.parametrize("name", ["one", "two", "wide"])
@pytest.mark.parametrize("cache", ["min", "50000", "100000", "150000", "300000", "all"])
def test_store_hands_out_the_bytes_of_the_file(
    name: str, cache: str, store: Program, streams: dict[str, Path]
) -> None:
    """Random requests with several experts held, and some given up; the budget is kept."""
    for threads in (1, 2, 4):
        store("random", streams[name], threads, 60, cache, threads, threads % 3)


BACKENDS = ["pread", "io_uring", "mmap", "buffered"]
# Read in pieces of a page, in whole blocks, and with neighbours joined to reads of 64 KiB.
PIECES = [4096, 20480, 65536]


def backend_in_use(program: Program, path: Path, io: str) -> str:
    return dict(re.findall(r'(\w+) ("[^"]*"|\S+)', program("--io", io, "info", path)))["backend"]


def usable(program: Program, path: Path, io: str) -> None:
    """Skip a backend that this system refuses; what happens then is tested below."""
    if io in ("io_uring", "mmap") and backend_in_use(program, path, io) != io:
        pytest.skip(f"{io} is refused here")


@pytest.mark.parametrize("io", BACKENDS)
@pytest.mark.parametrize("guesses", [[], ["--hints"], ["--hints", "--preload"]])
def test_bytes_do_not_depend_on_backend_pieces_hints_or_preload(
    io: str, guesses: list[str], store: Program, streams: dict[str, Path]
) -> None:
    """Everything handed out is compared with the file, in caches from two blocks to all."""
    usable(store, streams["one"], io)
    for i, (name, cache) in enumerate(
        [("one", "min"), ("two", "min"), ("two", "100000"), ("wide", "300000"), ("one", "all")]
    ):
        piece, threads = PIECES[i % len(PIECES)], 1 + i % 4
        switches = ["--io", io, "--piece", piece, *guesses]
        store(*switches, "random", streams[name], i, 50, cache, threads, i % 3)


@pytest.mark.parametrize("io", BACKENDS)
def test_store_is_free_of_races(
    io: str, threaded_store: Program, streams: dict[str, Path], tmp_path: Path
) -> None:
    usable(threaded_store, streams["one"], io)
    for threads, cache in ((1, "min"), (4, "min"), (4, "150000"), (2, "all")):
        switches = ["--io", io, "--piece", 4096 * threads, "--hints"]
        threaded_store(*switches, "random", streams["two"], threads, 40, cache, threads, 0)
    threaded_store("--io", io, "faults", copy_of(streams["one"], tmp_path))
    threaded_store("--io", io, "pair", streams["one"], streams["two"])


def copy_of(path: Path, folder: Path) -> Path:
    """A copy that a test may damage."""
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("io", BACKENDS)
@pytest.mark.parametrize("piece", PIECES)
def test_read_error_names_the_expert_and_the_store_goes_on(
    io: str, piece: int, store: Program, streams: dict[str, Path], tmp_path: Path
) -> None:
    """EIO, the end of the file, a flipped bit; interrupted and short reads are no errors."""
    usable(store, streams["one"], io)
    said = store("--io", io, "--piece", piece, "faults", copy_of(streams["one"], tmp_path))
    assert said.count("Input/output error") == said.count("CRC-32C") == 8
    assert said.count("the file ends") == (0 if io == "mmap" else 8)


@pytest.mark.parametrize("io", BACKENDS)
def test_file_cut_while_open_is_an_error_of_the_experts_behind_the_cut(
    io: str, store: Program, streams: dict[str, Path], tmp_path: Path
) -> None:
    usable(store, streams["one"], io)
    store("--io", io, "cut", copy_of(streams["one"], tmp_path))


@pytest.mark.parametrize("io", BACKENDS)
def test_check_modes_see_what_they_promise(
    io: str, store: Program, streams: dict[str, Path], tmp_path: Path
) -> None:
    usable(store, streams["one"], io)
    store("--io", io, "checks", copy_of(streams["one"], tmp_path))


def test_refused_io_uring_is_pread_with_one_line_of_reason(
    store: Program, streams: dict[str, Path]
) -> None:
    """Unknown to the kernel, then forbidden by a seccomp filter as in containers."""
    assert len(store("blocked", streams["one"]).splitlines()) == 2


def test_io_uring_works_without_the_right_to_lock_memory(
    store: Program, streams: dict[str, Path]
) -> None:
    usable(store, streams["one"], "io_uring")
    little, none = store("unpinned", streams["one"]).split()
    assert little == "io_uring"
    assert none in ("io_uring", "pread")


@pytest.mark.parametrize("io", BACKENDS)
def test_hints_are_read_ahead_and_scored(io: str, store: Program, streams: dict[str, Path]) -> None:
    usable(store, streams["one"], io)
    store("--io", io, "hints", streams["one"])


def test_hints_that_help_are_followed_and_wrong_ones_cost_nothing(
    store: Program, streams: dict[str, Path]
) -> None:
    """Slow reads, and time to compute before each request. The share is of 1600 hints: now
    and then the store does not follow them, to compare."""
    said = dict(re.findall(r"(\w+ \w+) (\S+)", store("controller", streams["one"])))
    assert float(said["right followed"]) > 0.6
    assert int(said["wrong reads"]) < 160


@pytest.mark.parametrize("io", BACKENDS)
def test_preload_fills_the_cache_with_the_first_blocks_of_the_file(
    io: str, store: Program, streams: dict[str, Path]
) -> None:
    usable(store, streams["one"], io)
    store("--io", io, "preload", streams["one"])


def test_wrong_calls_are_refused_and_harmless(store: Program, streams: dict[str, Path]) -> None:
    store("misuse", streams["two"])


def test_reads_overlap_each_other_and_the_use_of_what_is_there(
    store: Program, streams: dict[str, Path]
) -> None:
    store("overlap", streams["one"])


def test_two_stores_share_nothing(store: Program, streams: dict[str, Path]) -> None:
    assert store("pair", streams["one"], streams["two"]).count("hits") == 2
    assert store("pair", streams["one"], streams["one"]).count("hits") == 2


def test_store_falls_back_to_buffered_reads_and_says_why(
    store: Program, streams: dict[str, Path]
) -> None:
    by_open, by_read = store("buffered", streams["one"]).splitlines()
    assert 'direct 0 reason "direct open failed: Invalid argument' in by_open
    assert 'direct 0 reason "direct read failed: Invalid argument' in by_read


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`."""
    done = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True)
    return done.stdout.strip()


def test_reads_are_direct_on_a_disk(store: Program, tmp_path: Path) -> None:
    """On ext4 and xfs O_DIRECT works, so that is what must be reported there."""
    folder = next((f for f in (tmp_path, ROOT) if file_system(f) in ("ext2/ext3", "xfs")), None)
    if folder is None:
        pytest.skip("neither the temporary folder nor this one is on ext4 or xfs")
    path = folder / f"direct-{os.getpid()}.colibri"
    try:
        path.write_bytes(mc.build(mc.streaming(3, 4, mixed=False)).to_bytes())
        said = info(store, path)
    finally:
        path.unlink()
    assert (said["direct"], said["reason"]) == ("1", '""')


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
def test_store_works_on_tmpfs(store: Program) -> None:
    """tmpfs may or may not take O_DIRECT; either way the bytes are right."""
    path = Path(f"/dev/shm/direct-{os.getpid()}.colibri")
    try:
        path.write_bytes(mc.build(mc.streaming(3, 4, mixed=True)).to_bytes())
        store("random", path, 1, 40, "min", 2, 1)
    finally:
        path.unlink()


# -- the store: eviction -------------------------------------------------------------------------


def hit_rate(said: str) -> float:
    return float(said.split()[-1])


def lru_hit_rate(requests: list[list[int]], capacity: int) -> float:
    """The hit rate of least-recently-used eviction; each request is [row, expert, ...]."""
    recent: list[tuple[int, int]] = []
    hits = total = 0
    for row_index, *experts in requests:
        for expert in experts:
            total += 1
            if (row_index, expert) in recent:
                hits += 1
                recent.remove((row_index, expert))
            recent.append((row_index, expert))
            del recent[:-capacity]
    return hits / total


def run_trace(store: Program, path: Path, requests: list[list[int]], capacity: int) -> float:
    block = int(info(store, path)["minimum"]) // 2
    text = "".join(" ".join(map(str, request)) + "\n" for request in requests)
    return hit_rate(store("trace", path, capacity * block, stdin=text))


def test_circle_larger_than_the_cache_still_hits(store: Program, streams: dict[str, Path]) -> None:
    """Always the same experts, more than fit: least-recently-used would never hit."""
    requests = [[r, 1, 4, 6] for _ in range(60) for r in range(4)]
    assert lru_hit_rate(requests, 8) == 0
    assert run_trace(store, streams["one"], requests, 8) > 0.4  # 7 of 12 could stay


def test_popular_experts_stay(store: Program, streams: dict[str, Path]) -> None:
    """Skewed choices: frequency must beat recency clearly."""
    rng = mc.random.Random(5)
    weights = [16, 8, 4, 2, 1, 1, 1]
    requests = []
    for _ in range(400):
        for r in range(4):
            chosen: list[int] = []
            while len(chosen) < 2:
                expert = (rng.choices(range(7), weights)[0] + 3 * r) % 7
                chosen += [expert] if expert not in chosen else []
            requests.append([r, *chosen])
    found, lru = run_trace(store, streams["one"], requests, 8), lru_hit_rate(requests, 8)
    assert found > lru + 0.1, (found, lru)


def test_eviction_follows_a_change_of_subject(store: Program, streams: dict[str, Path]) -> None:
    """Experts that were popular long ago make room for those that are now."""

    def subject(first: int) -> list[list[int]]:
        return [[r, first, first + 1] for _ in range(250) for r in range(4)]

    path = streams["one"]
    before = run_trace(store, path, subject(0), 8)
    both_subjects = run_trace(store, path, subject(0) + subject(4), 8)
    assert before > 0.99
    assert 2 * both_subjects - before > 0.7, both_subjects  # the second subject by itself
