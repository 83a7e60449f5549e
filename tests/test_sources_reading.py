"""Reading under bad conditions: short reads, I/O errors, systems without preadv, hostile sizes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sources_util import f32, peak_memory, raw_safetensors, safetensors_bytes

from colibri_tools.errors import ColibriError, FormatError, SourceError, quote
from colibri_tools.sources import open_source
from colibri_tools.sources.strict_json import MAX_JSON_VALUES, parse_json


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": f32([3]), "w": f32([100])}))
    return path


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    calls: list[int] = []

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(fd, [buffers[0][:7]], offset)

    with open_source(path) as source:
        monkeypatch.setattr(os, "preadv", short)
        assert source.read("w") == f32([100]).data
        assert len(calls) == 58  # 400 bytes by 7


def test_systems_without_preadv_read_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "posix_fadvise")
    with open_source(path) as source:
        source.advise_sequential()
        source.drop(source.tensors["w"])
        assert source.read("w") == f32([100]).data


def test_read_error_names_tensor_and_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_source(path) as source:
        offset = source.tensors["w"].offset
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(SourceError, match=f"'w'.*400 bytes at offset {offset}.*Input/output"):
            source.read("w")
        with pytest.raises(SourceError, match="Input/output"):
            next(source.hash_files())


def test_hints_never_fail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "no")

    with open_source(path) as source:
        monkeypatch.setattr(os, "posix_fadvise", refuse)
        source.advise_sequential()
        source.will_need(source.tensors["w"])
        source.drop(source.tensors["w"])


def test_padding_can_be_read_by_file_range(path: Path) -> None:
    with open_source(path) as source:
        assert source.read_file_range(0, 0, 8) == path.read_bytes()[:8]
        with pytest.raises(ColibriError, match="outside the file"):
            source.read_file_range(0, 0, path.stat().st_size + 1)


@pytest.mark.parametrize("unit", [b"[]", b"{}", b"0", b'""', b"[[]]"])
def test_headers_of_many_values_are_refused_before_parsing(path: Path, unit: bytes) -> None:
    text = b'{"t":[' + b",".join([unit] * (MAX_JSON_VALUES + 1)) + b"]}"
    path.write_bytes(raw_safetensors(text))
    del text
    n_bytes = path.stat().st_size
    with peak_memory() as peak, pytest.raises(FormatError) as caught:
        open_source(path)
    assert re.search(f"more than {MAX_JSON_VALUES} JSON values", caught.value.message)
    assert peak[0] < 2 * n_bytes + (24 << 20)


def test_commas_in_strings_are_no_values() -> None:
    text = b'{"a": "' + b"," * (MAX_JSON_VALUES + 5) + b'"}'
    assert len(parse_json(text, "x")["a"]) == MAX_JSON_VALUES + 5


@pytest.mark.parametrize("size", range((1 << 18) - 4, (1 << 18) + 5))
def test_escapes_at_the_scan_boundary_keep_strings_apart(size: int) -> None:
    head = b'{"' + b"x" * (size - 2)
    text = head + b'\\\\\\"[[[[[[[[[[", "b": [1, 2]}'.replace(b'", "b"', b'": 0, "b"')
    assert parse_json(text, "x", max_depth=4)["b"] == [1, 2]


def test_quoting_a_huge_list_is_cheap() -> None:
    assert len(quote([[0] * 10] * 1_000_000)) < 130


def test_a_source_is_read_without_its_page_cache_or_a_map(path: Path) -> None:
    with open_source(path) as source:
        source.read("w")
        maps = Path("/proc/self/maps").read_text()
    assert path.name not in maps


def test_a_file_of_gigabytes_costs_the_memory_of_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    n_bytes = 8 << 30
    header = {"t": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}
    head = raw_safetensors(header)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + n_bytes)
    code = (
        "import resource, sys\n"
        "from colibri_tools.sources import open_source\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "with open_source(sys.argv[1]) as source:\n"
        "    print(source.read('t', (8 << 30) - 3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(b"\0\0\0")
