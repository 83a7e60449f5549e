"""Bit rot: any changed bit is found and named, and so is a file put together from others.

The fast run tries every 13th bit of page 0 and the metadata and some hundred random bits of the
data; with COLIBRI_BIT_ROT_FLIPS=10000 it is every bit and 10,000. (The C reader is given every bit
of page 0, metadata and reserve in test_creader.py.)
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from container_util import Draft, make_container, small_plan
from test_verify import _name_of, _owners, _sections, places, write_with

from colibri_tools import container as containers
from colibri_tools.container import RuleError
from colibri_tools.container import format as fmt
from colibri_tools.verify import VerifyReport, verify

FLIPS = int(os.environ.get("COLIBRI_BIT_ROT_FLIPS", "250"))
STEP = 1 if FLIPS >= 10_000 else 13


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound container that no test changes."""
    return make_container(tmp_path_factory.mktemp("sound") / "model.colibri")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A container of another model of the same shape: a bit of every 64th byte differs."""

    def change(_: Any, data: bytearray) -> None:
        for at in range(0, len(data), 64):
            data[at] ^= 1

    path = tmp_path_factory.mktemp("other") / "model.colibri"
    return write_with(path, small_plan(), change)


# -- single bits -----------------------------------------------------------------------------------


@pytest.mark.timeout(3600)
def test_every_bit_in_front_of_the_reserve_is_found_and_named(sound: Path) -> None:
    draft = Draft(bytearray(sound.read_bytes()))
    sections = [(int(s["offset"]), int(s["n_bytes"]), int(s["kind"])) for s in _sections(draft)]
    end = sections[-1][0] + sections[-1][1]
    for bit in range(0, 8 * end, STEP):
        offset, mask = bit // 8, 1 << bit % 8
        draft.data[offset] ^= mask
        with pytest.raises(RuleError) as caught:
            draft.open()
        draft.data[offset] ^= mask
        wanted = "page 0" if offset < fmt.PAGE0_BYTES else _name_of(offset, sections, end)
        assert wanted in caught.value.message, bit
    draft.open()


@pytest.mark.timeout(3600)
def test_random_bits_of_the_data_are_found_and_named(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(23)
    with containers.open(sound) as container:
        data_offset, size, owners = container.data_offset, container.file_size, _owners(container)
    data = sound.read_bytes()
    path = tmp_path / "rotten.colibri"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for _ in range(FLIPS):
            offset, mask = rng.randrange(data_offset, size), 1 << rng.randrange(8)
            os.pwrite(file.fileno(), bytes([data[offset] ^ mask]), offset)
            check_named(verify(path, threads=1), offset, owners)
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    assert verify(path).ok


def check_named(found: VerifyReport, offset: int, owners: list[tuple[Any, ...]]) -> None:
    """Expect errors about the owner of the byte at `offset` and about nothing else."""
    _, _, kind, layer, expert, tensor = next(o for o in owners if o[0] <= offset < o[1])
    assert found.errors, offset
    for error in found.errors:
        assert (error.layer, error.expert, error.tensor if expert is None else tensor) == (
            layer,
            expert,
            tensor,
        ), offset
    wanted = "checksum" if kind == "payload" else "padding"
    assert wanted in {error.kind for error in found.errors}, offset


# -- blocks and files in wrong places --------------------------------------------------------------


def blocks(path: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """(offset, payload bytes) of every block."""
    with containers.open(path) as container:
        return {
            (row, expert): (int(cell["offset"]), int(cell["n_bytes"]))
            for row, where in enumerate(container.rows)
            for expert in range(where.n_experts)
            for cell in [container.cell(row, expert)]
        }


def changed(sound: Path, folder: Path, change: Callable[[bytearray], object]) -> VerifyReport:
    """Verify a copy that `change` has seen."""
    data = bytearray(sound.read_bytes())
    change(data)
    path = folder / "changed.colibri"
    path.write_bytes(data)
    return verify(path)


def damaged_blocks(found: VerifyReport) -> set[tuple[int | None, int | None]]:
    return {(error.layer, error.expert) for error in found.errors}


def test_swapped_blocks_are_both_named(sound: Path, tmp_path: Path) -> None:
    (a, n), (b, same) = blocks(sound)[0, 0], blocks(sound)[0, 3]
    assert n == same

    def swap(data: bytearray) -> None:
        data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]

    assert damaged_blocks(changed(sound, tmp_path, swap)) == {(1, 0), (1, 3)}


def test_block_of_another_model_is_named(sound: Path, other: Path, tmp_path: Path) -> None:
    start, n = blocks(sound)[1, 2]
    foreign = other.read_bytes()[start : start + n]

    def put(data: bytearray) -> None:
        data[start : start + n] = foreign

    assert damaged_blocks(changed(sound, tmp_path, put)) == {(2, 2)}


def test_block_written_twice_is_named(sound: Path, tmp_path: Path) -> None:
    (a, n), (b, _) = blocks(sound)[0, 0], blocks(sound)[0, 2]

    def put(data: bytearray) -> None:
        data[b : b + n] = data[a : a + n]

    assert damaged_blocks(changed(sound, tmp_path, put)) == {(1, 2)}


@pytest.mark.parametrize("moved", [-4096, -1, 1, 64, 4096])
def test_data_at_a_wrong_offset_is_found(sound: Path, tmp_path: Path, moved: int) -> None:
    with containers.open(sound) as container:
        start = container.expert_offset

    def shift(data: bytearray) -> None:
        size = len(data)
        if moved > 0:
            data[start:start] = bytes(moved)
        else:
            del data[start : start - moved]
        data[:] = data[:size].ljust(size, b"\0")

    found = changed(sound, tmp_path, shift)
    assert {(1, e) for e in range(5)} | {(2, e) for e in range(3)} == damaged_blocks(found)


def test_lost_page_is_named(sound: Path, tmp_path: Path) -> None:
    start, n = blocks(sound)[0, 1]

    def lose(data: bytearray) -> None:
        data[start + 4096 : start + 8192] = bytes(4096)

    assert n > 8192
    assert damaged_blocks(changed(sound, tmp_path, lose)) == {(1, 1)}


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_two_files_overlaid_are_told_apart(
    sound: Path, other: Path, tmp_path: Path, share: float
) -> None:
    """Same shapes, same offsets: only checksums tell whose bytes they are."""
    data = other.read_bytes()
    with containers.open(sound) as container:
        cut = container.data_offset + int(share * (container.file_size - container.data_offset))
        owners = _owners(container)
        n_wrong = sum(kind == "payload" and end > cut for _, end, kind, *_ in owners)

    def overlay(mine: bytearray) -> None:
        mine[cut:] = data[cut:]

    found = changed(sound, tmp_path, overlay)
    wrong = {place for place in places(found) if place[0] == "checksum"}
    assert n_wrong - 1 <= len(wrong) <= n_wrong  # the cut may lie behind the last changed byte


def test_page_0_or_metadata_of_another_file_is_refused(
    sound: Path, other: Path, tmp_path: Path
) -> None:
    foreign = other.read_bytes()

    def front(data: bytearray) -> None:
        data[: fmt.PAGE0_BYTES] = foreign[: fmt.PAGE0_BYTES]

    found = changed(sound, tmp_path, front)
    assert [error.kind for error in found.errors] == ["structure"]
    assert "resident directory" in found.errors[0].message


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8192, 0.5, 0.99, -4096, -1])
def test_cut_file_is_refused(sound: Path, tmp_path: Path, size: float) -> None:
    whole = sound.stat().st_size
    n = int(size * whole) if isinstance(size, float) else size % whole
    found = changed(sound, tmp_path, lambda data: data.__delitem__(slice(n, None)))
    assert [error.kind for error in found.errors] == ["structure"]


@pytest.mark.parametrize("more", [1, 64, 4096, 1 << 20])
@pytest.mark.parametrize("twice", [False, True])
def test_grown_file_is_refused(sound: Path, tmp_path: Path, more: int, twice: bool) -> None:
    def grow(data: bytearray) -> None:
        data += data[:more] if twice else bytes(more)

    found = changed(sound, tmp_path, grow)
    assert [error.kind for error in found.errors] == ["structure"]
    assert "file_size" in found.errors[0].message
