"""The limits of docs/format.md: what is at or beyond them costs less than 1 s and 200 MB.

Each hostile file is opened in a process of its own, which tells its CPU time and its peak memory
above what it had before. A busy machine makes CPU time grow, too: a loop that takes 0.05 s
on a quiet one tells how much more to allow, and the best of three runs counts.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sources_util as su
from c_programs import ASAN, CSRC, READER, ROOT, TEST_C, Program, compile_c, sanitizer
from container_util import small_spec

from colibri_tools import native
from colibri_tools.container import SPEC_KEYS, SectionKind
from colibri_tools.container import format as fmt
from colibri_tools.container.kv import encode_kv
from colibri_tools.sources import gguf, gguf_header, hf, local, safetensors_header, strict_json

MAX_SECONDS = 1.0
SLACK = 5
"""A shared machine measures badly. The costs that the limits prevent were 10 s and more."""
MAX_MEMORY = 200 << 20

MEASURE = """
import sys, time
import numpy
from colibri_tools import native
from colibri_tools import container, sources
from colibri_tools.errors import ColibriError

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

path = sys.argv[1]
started = time.process_time()
sum(range(4_000_000))
slowness = max(1.0, (time.process_time() - started) / 0.06)
before, started = peak(), time.process_time()
try:
    if path.endswith(".colibri"):
        container.open(path).close()
    else:
        sources.open_source(path).close()
    said = "opened"
except ColibriError as error:
    said = error.message
print((time.process_time() - started) / slowness, peak() - before, said)
"""


# The peak of a child is at least that of the process that starts it, so that one has to be small.
MEASURE_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss << 10)
"""


def cost(path: Path) -> str:
    """What opening says. Asserts that it is cheap."""
    seconds, memory, said = 9.9, 0, ""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        a, b, said = done.stdout.rstrip("\n").split(" ", 2)
        seconds, memory = min(seconds, float(a)), int(b)
        if seconds < MAX_SECONDS:
            break
    print(f"{path.name}: {seconds:.2f} s, {memory >> 20} MiB: {said[:100]}")
    assert seconds < SLACK * MAX_SECONDS
    assert memory < MAX_MEMORY
    return said


# -- containers ------------------------------------------------------------------------------------


def write_metadata(
    path: Path, sections: dict[int, bytes], data_offset: int, expert_offset: int, file_size: int
) -> Path:
    """Write a container of these sections whose data is a hole of the file."""
    page = np.zeros(1, fmt.PAGE0_DTYPE)
    page["magic"], page["version"], page["page0_bytes"] = fmt.MAGIC, 1, fmt.PAGE0_BYTES
    page["alignment"], page["file_size"] = fmt.MIN_ALIGNMENT, file_size
    page["n_sections"] = len(sections)
    page["data_offset"], page["expert_offset"] = data_offset, expert_offset
    end = fmt.PAGE0_BYTES
    with path.open("wb") as out:
        for entry, (kind, content) in zip(page["sections"][0], sections.items(), strict=False):
            start = fmt.align(end, fmt.DATUM_ALIGN)
            out.seek(start)
            out.write(content)
            end = start + len(content)
            entry["kind"], entry["flags"] = kind, 1
            entry["offset"], entry["n_bytes"] = start, len(content)
            entry["crc32c"] = native.crc32c(content)
            entry["sha256"] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
        page["metadata_bytes"] = end - fmt.PAGE0_BYTES
        table = page["sections"][0][: len(sections)].tobytes()
        page["id"][0] = np.frombuffer(hashlib.sha256(table).digest(), np.uint8)
        page["crc32c"] = native.crc32c(page.tobytes()[:-4])
        out.seek(0)
        out.write(page.tobytes())
    os.truncate(path, file_size)
    return path


def key_values(values: dict[str, object], n_bytes: int) -> bytes:
    """A section of `n_bytes`, filled with a string of the most expensive kind and with arrays."""
    values = values | {"x.ints": [1 << 60] * (fmt.MAX_KV_ELEMENTS - 1000)}
    room = n_bytes - len(encode_kv(values | {"z.text": ""}, SPEC_KEYS))
    return encode_kv(values | {"z.text": "😀" + "a" * (room - 4)}, SPEC_KEYS)


def directory(data_offset: int) -> tuple[bytes, int]:
    """As many tensors as there may be, with names as long as they may be; and where they end."""
    n = fmt.MAX_TENSORS
    table = np.zeros(n, fmt.TENSOR_DTYPE)
    table["offset"] = data_offset + 64 * np.arange(n)
    table["n_bytes"] = table["n_dims"] = 1
    table["shape"][:, 0] = 1
    table["type"], table["group"], table["layer"] = 24, 3, -1
    table["name_offset"] = fmt.MAX_NAME_BYTES * np.arange(n)
    table["name_bytes"] = fmt.MAX_NAME_BYTES
    names = b"".join(b"%0255d" % i for i in range(n))
    head = struct.pack("<IIQ", n, 128, len(names))
    end = data_offset + 64 * (n - 1) + 1
    return head + table.tobytes() + names, fmt.align(end, fmt.MIN_ALIGNMENT)


def layouts(n: int) -> tuple[bytes, np.ndarray]:
    """`n` different layouts of six parts, and their sizes."""
    table = np.zeros(n, fmt.LAYOUT_DTYPE)
    for i, layout in enumerate(table):
        end = 0
        width = i + 1
        shapes = [(width, 1), (width, 1), (1, width), (1, width), (1, width), (1, 1)]
        for role, (part, shape) in enumerate(zip(layout["parts"], shapes, strict=False), 1):
            part["role"], part["offset"] = role, fmt.align(end, 64)
            part["n_bytes"], part["shape"] = 4 * shape[0] * shape[1], shape
            end = int(part["offset"] + part["n_bytes"])
        layout["n_bytes"], layout["n_parts"] = end, 6
    return struct.pack("<II", n, 576) + table.tobytes(), table["n_bytes"].astype(np.uint64)


def at_the_limits(path: Path) -> Path:
    """A sound container with as much of everything as there may be."""
    n_columns = 1024
    n_rows = fmt.MAX_CELLS // n_columns
    spec = small_spec(executable=False, n_layers=n_rows, moe_layers=[1] * n_rows, hidden_size=1)
    rows = np.zeros(n_rows, fmt.ROW_DTYPE)
    rows["layer"], rows["n_experts"] = np.arange(n_rows), n_columns
    layout_table, sizes = layouts(fmt.MAX_LAYOUTS)
    sections = {
        SectionKind.SPEC: key_values(spec, fmt.MAX_KV_BYTES),
        SectionKind.BLOBS: b"",
        SectionKind.PROVENANCE: key_values({}, fmt.MAX_KV_BYTES),
        SectionKind.DIRECTORY: directory(0)[0],
        SectionKind.ROWS: struct.pack("<IIII", n_rows, n_columns, 32, 0) + rows.tobytes(),
        SectionKind.INDEX: bytes(64 * fmt.MAX_CELLS),
        SectionKind.LAYOUTS: layout_table,
    }
    room = fmt.MAX_METADATA_BYTES - sum(fmt.align(len(s), 64) for s in sections.values())
    sections[SectionKind.BLOBS] = blob(room)
    metadata_bytes = sum(fmt.align(len(s), 64) for s in sections.values())
    assert metadata_bytes == fmt.MAX_METADATA_BYTES
    end = fmt.PAGE0_BYTES + metadata_bytes
    data_offset = fmt.align(2 * metadata_bytes, fmt.MIN_ALIGNMENT)
    assert data_offset > end
    sections[SectionKind.DIRECTORY], expert_offset = directory(data_offset)
    cells = np.zeros(fmt.MAX_CELLS, fmt.CELL_DTYPE)
    cells["rank"] = np.arange(len(cells))
    cells["layout"] = cells["rank"] % fmt.MAX_LAYOUTS
    cells["n_bytes"], cells["flags"] = sizes[cells["layout"]], 1
    padded = (cells["n_bytes"] + np.uint64(4095)) & ~np.uint64(4095)
    cells["offset"] = expert_offset + np.cumsum(padded) - padded
    sections[SectionKind.INDEX] = cells.tobytes()
    file_size = int(expert_offset + padded.sum())
    return write_metadata(path, sections, data_offset, expert_offset, file_size)


def blob(n_bytes: int) -> bytes:
    """A blobs section of `n_bytes` with one blob."""
    start = 64
    assert n_bytes % 64 == 0
    head = struct.pack("<IIIIQQQ", 1, 0, 40, 1, start, n_bytes - start, 0) + b"x"
    return head + bytes(n_bytes - len(head))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The type table, which is not what is tested here."""
    folder = tmp_path_factory.mktemp("objects")
    sources = sorted(CSRC.glob("blocks*.c"))
    return [compile_c([source], ["-c", "-O0"], folder / f"{source.stem}.o") for source in sources]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, objects: list[Path]) -> Program:
    """tests/c/test_container.c with sanitizers."""
    folder = tmp_path_factory.mktemp("reader")
    sources = [TEST_C / "test_container.c", *READER, *objects]
    return Program(folder / "test_container", sources, sanitizer(ASAN, folder))


@pytest.fixture(scope="module")
def limit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return at_the_limits(tmp_path_factory.mktemp("limits") / "limits.colibri")


def test_container_at_the_limits_is_cheap_to_open(limit: Path) -> None:
    assert cost(limit) == "opened"


def test_container_at_the_limits_is_cheap_for_the_c_reader(
    limit: Path, tmp_path: Path, objects: list[Path]
) -> None:
    sources = [TEST_C / "test_container.c", *READER, *objects]
    program = compile_c(sources, ["-O2"], tmp_path / "test_container")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_CHILD, program, "open", limit],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, seconds, memory = done.stdout.split()
    assert said == "ok"
    assert float(seconds) < SLACK * MAX_SECONDS  # typically 0.3 s
    assert int(memory) < MAX_MEMORY


def beyond(path: Path, kind: SectionKind, content: bytes) -> Path:
    """A container with one section that is too large; what follows it is not looked at."""
    sections = {k: bytes(64) for k in range(1, 8)}
    sections[SectionKind.SPEC] = encode_kv(small_spec(), SPEC_KEYS)
    sections[SectionKind.BLOBS] = bytes(8)
    sections[SectionKind.PROVENANCE] = encode_kv({})
    sections[SectionKind.DIRECTORY] = bytes(4) + struct.pack("<IQ", 128, 0)
    sections[kind] = content
    data_offset = fmt.align(fmt.PAGE0_BYTES + 4096 + sum(map(len, sections.values())), 4096)
    return write_metadata(path, sections, data_offset, data_offset, data_offset)


def text(n_bytes: int) -> bytes:
    """A section of one string."""
    section = encode_kv({"a": ""})
    return section[:12] + struct.pack("<I", n_bytes) + section[16:] + bytes([97]) * n_bytes


def numbers(n: int) -> bytes:
    """A section of one array."""
    section = encode_kv({"a": [1]})
    return section[:12] + struct.pack("<I", n) + section[16:24] + struct.pack("<Q", 1) * n


BEYOND: dict[str, tuple[SectionKind, Callable[[], bytes], int]] = {
    "key-values": (SectionKind.SPEC, lambda: text(fmt.MAX_KV_BYTES), 11),
    "elements": (SectionKind.PROVENANCE, lambda: numbers(fmt.MAX_KV_ELEMENTS + 1), 11),
    "entries": (SectionKind.SPEC, lambda: struct.pack("<II", fmt.MAX_KV_ENTRIES + 1, 0), 11),
    "tensors": (
        SectionKind.DIRECTORY,
        lambda: struct.pack("<IIQ", fmt.MAX_TENSORS + 1, 128, 0) + bytes(128 * fmt.MAX_TENSORS),
        16,
    ),
    "metadata": (SectionKind.BLOBS, lambda: bytes(fmt.MAX_METADATA_BYTES), 7),
}


@pytest.mark.parametrize("name", BEYOND)
def test_section_beyond_a_limit_is_refused_by_both_readers(
    name: str, tmp_path: Path, reader: Program
) -> None:
    kind, content, rule = BEYOND[name]
    path = beyond(tmp_path / "beyond.colibri", kind, content())
    assert f"(format rule {rule})" in cost(path)
    assert f": rule {rule}: " in reader("open", path)


def test_aliases_alone_are_cheap(tmp_path: Path) -> None:
    n = fmt.MAX_TENSORS
    content, _ = directory(0)
    table = np.frombuffer(bytearray(content), fmt.TENSOR_DTYPE, n, 16)
    table["flags"][1:] = 1
    for field in ("offset", "n_bytes", "shape"):
        table[field][1:] = table[field][0]
    table["sha256"][n - 1] = 1  # the last of them differs
    content = content[:16] + table.tobytes() + content[16 + 128 * n :]
    said = cost(beyond(tmp_path / "aliases.colibri", SectionKind.DIRECTORY, content))
    assert "(format rule 14)" in said


# -- sources ---------------------------------------------------------------------------------------


def safetensors(text: bytes) -> bytes:
    return su.raw_safetensors(text)


def items(unit: bytes, n: int) -> bytes:
    return b",".join(unit % i for i in range(n))


def metadata_of(value: bytes) -> bytes:
    return safetensors(b'{"__metadata__":{"a":"' + value + b'"}}')


def kv_of(*entries: bytes) -> bytes:
    return su.gguf_bytes(su.GgufSpec(n_kv=len(entries), kv_bytes=b"".join(entries)))


def gguf_array(key: str, item_type: int, n: int, item: bytes) -> bytes:
    return su.gguf_string(key) + struct.pack("<IIQ", 9, item_type, n) + item * n


def gguf_tensors(n: int) -> bytes:
    entry = struct.Struct("<IQQQQIQ")
    table = b"".join(
        su.gguf_string(f"{i:x}") + entry.pack(4, 1, 1, 1, 1, 0, 32 * i) for i in range(n)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, n, 0) + table
    return head + bytes(-len(head) % 32 + 32 * n)


WIDE = "😀".encode()
ST, ST_JSON = safetensors_header, strict_json
GG = gguf_header
EMPTY = b'{"dtype":"U8","shape":[0],"data%soffsets":[0,0]}'

SOURCES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "metadata of a million strings": (
        "x.safetensors",
        lambda: safetensors(b'{"__metadata__":{' + items(b'"%x":""', 550_000) + b"}}"),
        "opened",
    ),
    "tensors, their fields escaped": (
        "x.safetensors",
        lambda: safetensors(b"{" + items(b'"%x":' + EMPTY % b"\\u005f", 68_000) + b"}"),
        f"68000 tensors, expected at most {ST.MAX_TENSORS}",
    ),
    "as many tensors as there may be": (
        "x.safetensors",
        lambda: safetensors(b"{" + items(b'"%x":' + EMPTY % b"_", ST.MAX_TENSORS) + b"}"),
        "opened",
    ),
    "a long string": (
        "x.safetensors",
        lambda: metadata_of(b"a" * (ST.MAX_HEADER_BYTES - 100)),
        "opened",
    ),
    "a long string of wide characters": (
        "x.safetensors",
        lambda: metadata_of(WIDE + b"a" * (ST_JSON.MAX_WIDE_JSON_BYTES - 100)),
        "opened",
    ),
    "a longer one": (
        "x.safetensors",
        lambda: metadata_of(WIDE + b"a" * ST_JSON.MAX_WIDE_JSON_BYTES),
        "not all ASCII",
    ),
    "escapes": (
        "x.safetensors",
        lambda: metadata_of(b"\\u0041" * (ST_JSON.MAX_JSON_ESCAPES + 1)),
        "escapes, expected at most",
    ),
    "nesting": ("x.safetensors", lambda: safetensors(b'{"a":' + b"[" * 20_000), "nest deeper"),
    "index": (
        "model.safetensors.index.json",
        lambda: b'{"weight_map":{' + items(b'"%x":"a"', 550_000) + b"}}",
        "1 of 1 shards missing",
    ),
    "index of too many bytes": (
        "model.safetensors.index.json",
        lambda: b'{"weight_map":' + b" " * hf.MAX_INDEX_BYTES,
        f"expected at most {hf.MAX_INDEX_BYTES}",
    ),
    "index of too many shards": (
        "model.safetensors.index.json",
        lambda: (
            b'{"weight_map":{' + b",".join(b'"%x":"%x"' % (i, i) for i in range(400_000)) + b"}}"
        ),
        f"more than {hf.MAX_SHARDS} shards",
    ),
    "strings": (
        "x.gguf",
        lambda: kv_of(gguf_array("a", 8, GG.MAX_STRING_ITEMS, bytes(8))),
        "opened",
    ),
    "strings in two arrays": (
        "x.gguf",
        lambda: kv_of(
            gguf_array("a", 8, GG.MAX_STRING_ITEMS, bytes(8)), gguf_array("b", 8, 1, bytes(8))
        ),
        "strings in arrays, expected at most",
    ),
    "nested arrays": (
        "x.gguf",
        lambda: kv_of(gguf_array("a", 9, GG.MAX_NESTED_ARRAYS + 1, bytes(12))),
        "nested arrays, expected at most",
    ),
    "keys": (
        "x.gguf",
        lambda: kv_of(*(gguf_array(f"{i:x}", 8, 8, bytes(8)) for i in range(GG.MAX_KV))),
        "opened",
    ),
    "wide strings": (
        "x.gguf",
        lambda: kv_of(*(su.gguf_kv(k, "string", "😀" + "a" * (4 << 20)) for k in "ab")),
        "bytes of strings, expected at most",
    ),
    "strings of many bytes": (
        "x.gguf",
        lambda: kv_of(*(su.gguf_kv(k, "string", "a" * (15 << 20)) for k in "ab")),
        "opened",
    ),
    "header": (
        "x.gguf",
        lambda: kv_of(*(gguf_array(k, 0, 1 << 24, b"a") for k in "abc")),
        "header above",
    ),
    "tensors": ("x.gguf", lambda: gguf_tensors(GG.MAX_TENSORS), "opened"),
    "too many tensors": (
        "x.gguf",
        lambda: b"GGUF" + struct.pack("<IQQ", 3, GG.MAX_TENSORS + 1, 0) + bytes(1 << 22),
        f"tensors, expected at most {GG.MAX_TENSORS}",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_hostile_source_is_cheap(name: str, tmp_path: Path) -> None:
    file, content, expected = SOURCES[name]
    (tmp_path / file).write_bytes(content())
    assert expected in cost(tmp_path / file)


def test_carried_files_are_bounded_together(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(su.safetensors_bytes({}))
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / name).write_bytes(b"{" + b" " * (hf.MAX_BLOB_BYTES // 2))
    said = cost(tmp_path)
    assert "vocab.json" in said and "expected at most" in said


# -- the documents ---------------------------------------------------------------------------------


def stated(page: str) -> dict[str, int]:
    """The limits of a page's tables: constant -> number."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    rows = re.findall(r"^\|[^|\n]+\| ([\d,]+)[^|\n]*\| `(\w+\.)?(\w+)` \|$", text, re.MULTILINE)
    return {module + name: int(number.replace(",", "")) for number, module, name in rows}


def test_limits_of_containers_are_stated() -> None:
    limits = {name for name in fmt.__all__ if name.startswith("MAX_")} - {"MAX_SIZE", "MAX_DIM"}
    found = stated("format.md")
    assert set(found) == limits
    assert found == {name: getattr(fmt, name) for name in limits}


def test_limits_of_sources_are_stated() -> None:
    modules = {
        "safetensors_header": safetensors_header,
        "strict_json": strict_json,
        "hf": hf,
        "local": local,
        "gguf": gguf,
        "gguf_header": gguf_header,
    }
    limits = {}
    for name, module in modules.items():
        source = Path(str(module.__file__)).read_text("utf-8")
        for constant in re.findall(r"^(MAX_\w+) = ", source, re.MULTILINE):
            limits[f"{name}.{constant}"] = getattr(module, constant)
    assert stated("reliability.md") == limits
