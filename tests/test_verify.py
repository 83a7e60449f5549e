"""Verify: any flipped bit is found and named, and one run lists all damage."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from container_util import (
    HIDDEN,
    Draft,
    make_container,
    payload_of,
    small_plan,
    small_residents,
    small_spec,
    tensor_data,
)

from colibri_tools import container as containers
from colibri_tools.container import ContainerPlan, ContainerWriter, PartRole, RuleError, SectionKind
from colibri_tools.container import format as fmt
from colibri_tools.dtypes import DTYPES, dtype_by_name
from colibri_tools.errors import SourceError, UsageError
from colibri_tools.repack import repack
from colibri_tools.verify import VerifyError, VerifyReport, report, scan, verify, verify_source
from colibri_tools.verify.finite import finder, needs_scan


@pytest.fixture(scope="module")
def plan() -> ContainerPlan:
    return small_plan()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound container that no test changes."""
    return make_container(tmp_path_factory.mktemp("sound") / "model.colibri")


def damaged(sound: Path, folder: Path, *changes: tuple[int, int]) -> Path:
    """A copy with bits (byte offset, mask) flipped."""
    data = bytearray(sound.read_bytes())
    for offset, mask in changes:
        data[offset] ^= mask
    path = folder / "damaged.colibri"
    path.write_bytes(data)
    return path


def places(found: VerifyReport) -> list[tuple[Any, ...]]:
    return [(e.kind, e.layer, e.expert, e.tensor) for e in found.errors]


# -- sound files -----------------------------------------------------------------------------------


def test_sound_container(sound: Path) -> None:
    found = verify(sound)
    assert found.ok and found.errors == [] and found.n_errors == 0
    assert (found.checked_blocks, found.checked_tensors) == (8, 32)
    assert found.bytes == sound.stat().st_size
    assert found.seconds > 0


def test_report_is_data(sound: Path, tmp_path: Path) -> None:
    data = verify(damaged(sound, tmp_path, (sound.stat().st_size - 1, 1))).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    wanted = {"ok", "checked_blocks", "checked_tensors", "bytes", "seconds", "errors"}
    assert wanted <= set(data)
    assert set(data["errors"][0]) == {"kind", "layer", "expert", "tensor", "offset", "message"}


def test_progress_is_in_bytes_and_reaches_the_end(sound: Path) -> None:
    calls: list[tuple[int, int]] = []
    verify(sound, progress=lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert done[-1] == totals[-1] > 0


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("piece", [1000, 4096, 4 << 20])
def test_same_report_for_any_number_of_threads_and_size_of_pieces(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, piece: int
) -> None:
    monkeypatch.setattr(scan, "_PIECE_BYTES", piece)
    size = sound.stat().st_size
    with containers.open(sound) as container:
        first, last = container.tensors["embed"].offset, int(container.index["offset"][0, 2])
    path = damaged(sound, tmp_path, (first + 9000, 1), (last + 5001, 2), (size - 1, 1))
    found = verify(path, threads=threads)
    assert found.bytes == size
    assert (found.checked_blocks, found.checked_tensors) == (8, 32)
    assert [(error.kind, error.offset) for error in found.errors] == [
        ("checksum", first),
        ("padding", size - 1),
        ("checksum", last),
    ]


# -- flipped bits ----------------------------------------------------------------------------------


def test_every_flipped_bit_of_page_0_is_found(sound: Path) -> None:
    draft = Draft(bytearray(sound.read_bytes()))
    for offset in range(fmt.PAGE0_BYTES):
        for bit in range(8):
            draft.data[offset] ^= 1 << bit
            with pytest.raises(RuleError, match="page 0"):
                draft.open()
            draft.data[offset] ^= 1 << bit
    draft.open()


def test_flipped_bits_of_the_metadata_are_found_and_named(sound: Path) -> None:
    draft = Draft(bytearray(sound.read_bytes()))
    rng = random.Random(7)
    sections = [(int(s["offset"]), int(s["n_bytes"]), int(s["kind"])) for s in _sections(draft)]
    end = sections[-1][0] + sections[-1][1]
    data_offset = int(draft.page["data_offset"][0])
    samples = [*range(fmt.PAGE0_BYTES, end, 3), *rng.sample(range(end, data_offset), 50), end]
    for offset in samples:
        mask = 1 << rng.randrange(8)
        draft.data[offset] ^= mask
        with pytest.raises(RuleError) as caught:
            draft.open()
        assert _name_of(offset, sections, end) in caught.value.message, offset
        draft.data[offset] ^= mask
    draft.open()


def _sections(draft: Draft) -> np.ndarray:
    return draft.page["sections"][0][: int(draft.page["n_sections"][0])]


def _name_of(offset: int, sections: list[tuple[int, int, int]], end: int) -> str:
    if offset >= end:
        return "reserve"
    for start, n_bytes, kind in sections:
        if start <= offset < start + n_bytes:
            return f"'{SectionKind(kind).label}'"
    return "gap"


def test_flipped_bits_of_the_data_are_found_and_named(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    with containers.open(sound) as container:
        data_offset, size = container.data_offset, container.file_size
        owners = _owners(container)
    for offset in [data_offset, size - 1, *rng.sample(range(data_offset, size), 60)]:
        found = verify(damaged(sound, tmp_path, (offset, 1 << rng.randrange(8))))
        owner = next(o for o in owners if o[0] <= offset < o[1])
        assert not found.ok
        for error in found.errors:
            assert (error.layer, error.expert) == owner[3:5]
            if owner[2] == "padding":
                assert (error.kind, error.offset) == ("padding", offset)
            else:
                assert error.kind in ("checksum", "nonfinite", "padding")
        if owner[2] == "payload":
            assert "checksum" in {error.kind for error in found.errors}
            tensor = owner[5]
            assert any(error.tensor == tensor for error in found.errors)


def _owners(container: containers.Container) -> list[tuple[Any, ...]]:
    """(start, end, kind, layer, expert, tensor) of every byte of the data."""
    owners: list[tuple[Any, ...]] = []
    tensors = [t for t in container.tensors.values() if t.alias_of is None]
    starts = [*(t.offset for t in tensors), container.expert_offset]
    for tensor, end in zip(tensors, starts[1:], strict=True):
        layer = tensor.layer if tensor.layer >= 0 else None
        data_end = tensor.offset + tensor.n_bytes
        owners.append((tensor.offset, data_end, "payload", layer, None, tensor.name))
        owners.append((data_end, end, "padding", layer, None, tensor.name))
    for row, spec in enumerate(container.rows):
        for expert in range(spec.n_experts):
            cell = container.cell(row, expert)
            start, n_bytes = int(cell["offset"]), int(cell["n_bytes"])
            end = start + container.padded_bytes(n_bytes)
            owners.append((start, start + n_bytes, "payload", spec.layer, expert, None))
            owners.append((start + n_bytes, end, "padding", spec.layer, expert, None))
    return owners


def test_all_damage_is_listed(sound: Path, tmp_path: Path) -> None:
    with containers.open(sound) as container:
        changes = [(container.tensors[n].offset, 1) for n in ("norm", "layers.2.q", "embed")]
        changes += [(int(container.cell(0, e)["offset"]), 1) for e in range(5)]
    found = verify(damaged(sound, tmp_path, *changes))
    assert found.n_errors == 8
    assert places(found)[:3] == [
        ("checksum", None, None, "norm"),
        ("checksum", 2, None, "layers.2.q"),
        ("checksum", None, None, "embed"),
    ]
    assert {(e.layer, e.expert) for e in found.errors[3:]} == {(1, e) for e in range(5)}


def test_the_list_of_errors_is_bounded_and_the_count_is_not(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_LISTED_ERRORS", 3)
    monkeypatch.setattr(scan, "MAX_LISTED_ERRORS", 3)
    with containers.open(sound) as container:
        changes = [(int(container.cell(0, e)["offset"]), 1) for e in range(5)]
    found = verify(damaged(sound, tmp_path, *changes))
    assert (len(found.errors), found.n_errors) == (3, 5)


def test_broken_metadata_is_one_error(sound: Path, tmp_path: Path) -> None:
    found = verify(damaged(sound, tmp_path, (4200, 1)))
    assert [(e.kind, e.offset) for e in found.errors] == [("structure", 4096)]
    assert str(tmp_path) in found.errors[0].message
    assert not found.ok


@pytest.mark.parametrize("offset", [0, 7])
def test_a_container_with_a_broken_magic_is_known_by_its_name(
    sound: Path, tmp_path: Path, offset: int
) -> None:
    found = verify(damaged(sound, tmp_path, (offset, 1)))
    assert found.kind == "container"
    assert [e.kind for e in found.errors] == ["structure"]


def test_unfinished_and_cut_containers(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    (tmp_path / "unfinished.colibri").write_bytes(bytes(4096) + data[4096:])
    assert "unfinished" in verify(tmp_path / "unfinished.colibri").errors[0].message
    (tmp_path / "cut.colibri").write_bytes(data[:-1])
    assert "file_size" in verify(tmp_path / "cut.colibri").errors[0].message
    (tmp_path / "empty.colibri").write_bytes(b"")
    assert verify(tmp_path / "empty.colibri").errors[0].kind == "structure"


# -- quick -----------------------------------------------------------------------------------------


def test_quick_finds_padding_but_reads_no_payload(sound: Path, tmp_path: Path) -> None:
    with containers.open(sound) as container:
        start = int(container.cell(0, 3)["offset"])
        end = start + int(container.cell(0, 3)["n_bytes"])
        data_offset = container.data_offset
    found = verify(damaged(sound, tmp_path, (start, 1), (end, 4)), quick=True)
    assert places(found) == [("padding", 1, 3, None)]
    assert found.errors[0].offset == end
    assert (found.checked_blocks, found.checked_tensors) == (0, 0)
    with containers.open(sound) as container:
        assert found.bytes == data_offset + container.accounting().padding_bytes


# -- what the bytes say ----------------------------------------------------------------------------


def write_with(path: Path, plan: ContainerPlan, change: Callable[[Any, bytearray], None]) -> Path:
    """Write a container with valid checksums whose payloads `change` has seen."""
    with ContainerWriter(plan, path) as out:
        for planned in plan.tensors:
            if planned.alias_index is None:
                data = bytearray(tensor_data(plan, planned.item.name))
                change(planned.item.name, data)
                out.write_tensor(planned.item.name, data)
        for row, expert in plan.order:
            data = bytearray(payload_of(plan, row, expert))
            change((row, expert), data)
            out.write_block(row, expert, data)
        out.seal()
    return path


def test_nan_and_inf_are_found_with_their_index(tmp_path: Path, plan: ContainerPlan) -> None:
    down = plan.layout_of(1, 2).part(PartRole.DOWN)
    assert down is not None

    def change(key: Any, data: bytearray) -> None:
        if key == "layers.1.router":
            np.frombuffer(data, "<f4").reshape(5, HIDDEN)[3, 7] = np.inf
        if key == "layers.0.v":  # the scale of the second quant block of row 4
            data[(4 * 2 + 1) * 34 : (4 * 2 + 1) * 34 + 2] = np.float16(np.nan).tobytes()
        if key == "layers.0.o":
            np.frombuffer(data, "<u2").reshape(64, 128)[60, 1] = 0xFF80
        if key == (1, 2):
            np.frombuffer(data, "<u2", offset=down.offset).reshape(64, 96)[3, 5] = 0x7FC0
        if key == "vision.patch":  # optional: nothing computes with it
            data[:4] = np.float32(np.nan).tobytes()

    found = verify(write_with(tmp_path / "m.colibri", plan, change))
    assert [e.kind for e in found.errors] == ["nonfinite"] * 4
    messages = "\n".join(e.message for e in found.errors)
    assert "tensor 'layers.1.router': weight [3, 7] is NaN or infinite" in messages
    assert "tensor 'layers.0.v': weight [4, 32] is NaN or infinite" in messages
    assert "tensor 'layers.0.o': weight [60, 1] is NaN or infinite" in messages
    assert "layer 2 expert 2, down: weight [3, 5] is NaN or infinite" in messages
    block_error = found.errors[-1]
    assert (block_error.layer, block_error.expert, block_error.tensor) == (2, 2, "down")
    offset = int(plan.cells["offset"][1, 2]) + down.offset + (3 * 96 + 5) * 2
    assert block_error.offset == offset


def test_bytes_between_parts_have_to_be_zero(tmp_path: Path, plan: ContainerPlan) -> None:
    up = plan.layout_of(0, 0).part(PartRole.UP)
    assert up is not None and up.offset % 64 == 0

    def change(key: Any, data: bytearray) -> None:
        if key == (0, 0):
            data[up.offset - 1] = 9

    found = verify(write_with(tmp_path / "m.colibri", plan, change))
    assert places(found) == [("padding", 1, 0, None)]
    assert "gap in front of up" in found.errors[0].message


def census_of(tmp_path: Path, **changes: Any) -> list[VerifyError]:
    found = verify(make_container(tmp_path / "m.colibri", **changes))
    assert {error.kind for error in found.errors} <= {"census"}
    return found.errors


@pytest.mark.parametrize(
    "name", [i.name for i in small_residents() if i.role and "router" not in i.name]
)
def test_missing_tensors_are_named(tmp_path: Path, name: str) -> None:
    gone = next(item for item in small_residents() if item.name == name)
    items = [
        dataclasses.replace(item, alias_of=None) if item.alias_of == name else item
        for item in small_residents()
        if item.name != name
    ]
    (error,) = census_of(tmp_path, residents=items)
    assert f"expected a tensor of role {gone.role.label}, found none" in error.message
    assert error.layer == (gone.layer if gone.layer >= 0 else None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graph.qkv_bias": True}, ["attn_q_bias", "attn_k_bias", "attn_v_bias"]),
        ({"graph.o_bias": True}, ["attn_o_bias"]),
        ({"graph.shared_width": 48}, ["shared_gate", "shared_up", "shared_down"]),
        ({"graph.shared_width": 48, "graph.shared_gated": True}, ["shared_router"]),
        ({"graph.qk_norm": "full"}, ["role attn_q_norm: expected shape 128, found 16"]),
        ({"graph.windows": [0]}, ["'graph.windows': expected 3 elements, found 1"]),
        ({"graph.rope_dim": 8}, ["'graph.rope_inv_freq': expected 4 elements, found 8"]),
        (
            {
                "graph.rope_of_layer": [0],
                "graph.rope_factor_more": [1.0, 1.0],
                "graph.rope_inv_freq_more": [0.5] * 8,
            },
            [
                "'graph.rope_of_layer': expected 3 elements, found 1",
                "'graph.rope_inv_freq_more': expected 16 elements, found 8",
            ],
        ),
        ({"graph.head_dim": 32}, ["role attn_k: expected shape 64 by 64, found 32 by 64"]),
        ({"graph.dense_width": 25}, ["role dense_down: expected shape 64 by 25, found 64 by 24"]),
        ({"vocab_size": 132}, ["role token_embd: expected shape 132 by 64, found 131 by 64"]),
    ],
)
def test_tensors_are_what_the_graph_needs(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    messages = "\n".join(e.message for e in census_of(tmp_path, spec=small_spec(**changes)))
    for word in words:
        assert word in messages


def test_models_that_are_not_executed_promise_nothing(tmp_path: Path) -> None:
    spec = small_spec(executable=False, **{"graph.qkv_bias": True})
    assert census_of(tmp_path, spec=spec, residents=[]) == []


# -- reading ---------------------------------------------------------------------------------------


def test_unreadable_places_are_named_and_the_rest_is_checked(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with containers.open(sound) as container:
        bad, other = int(container.cell(0, 1)["offset"]), int(container.cell(1, 1)["offset"])
    path = damaged(sound, tmp_path, (other, 1))
    real = os.preadv

    def fail(fd: int, buffers: list[Any], offset: int) -> int:
        if offset == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    found = verify(path)
    assert sorted(places(found)) == [("checksum", 2, 1, None), ("read", 1, 1, None)]
    message = next(e.message for e in found.errors if e.kind == "read")
    assert "layer 1 expert 1" in message and str(bad) in message and "Input/output" in message


def test_interrupt_ends_at_once(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_PIECE_BYTES", 512)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(sound, progress=stop)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if needs_scan(d)], ids=lambda d: d.name)
def test_types_are_searched_for_nan(dtype: Any) -> None:
    find = finder(dtype)
    if dtype.name in ("q8_1", "q8_k", "q1_0"):
        assert find is None  # nothing decodes them, so nothing can use them
        return
    assert find is not None
    blocks = 5
    raw = bytearray(blocks * dtype.block_bytes)
    assert find(memoryview(raw)) is None
    if dtype.name in ("nvfp4", "f4", "f6_e2m3", "f6_e3m2"):
        return  # no code of these is NaN
    raw[3 * dtype.block_bytes : 4 * dtype.block_bytes] = b"\xff" * dtype.block_bytes
    if dtype.name.endswith("fnuz"):
        raw[3] = 0x80
    assert find(memoryview(raw)) == 3 * dtype.block_weights


# -- sources ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE in two files."""
    return tm.write_hf(tmp_path_factory.mktemp("hf") / "tiny", "qwen3_moe", shards=2)


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Path:
    """Its container."""
    repack(checkpoint, checkpoint.parent / "tiny.colibri")
    return checkpoint.parent / "tiny.colibri"


def test_sound_source(checkpoint: Path) -> None:
    found = verify(checkpoint)
    assert found.ok and found.kind == "source" and found.checked_tensors > 100
    quick = verify(checkpoint, quick=True)
    assert quick.ok and quick.checked_tensors == 0 and quick.bytes == 0


def test_nan_in_a_source_is_found_with_name_and_index(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.7.down_proj.weight"

    def spoil(weights: dict[str, np.ndarray]) -> None:
        weights[name] = weights[name].copy()
        weights[name][3, 5] = np.nan

    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", mutate=spoil)
    found = verify(source)
    assert [e.kind for e in found.errors] == ["nonfinite"]
    assert found.errors[0].tensor == name
    assert f"tensor '{name}': weight [3, 5] is NaN or infinite" == found.errors[0].message
    assert verify(source, quick=True).ok


def test_incomplete_sources_are_reported(tmp_path: Path) -> None:
    def drop(weights: dict[str, np.ndarray]) -> None:
        del weights["model.layers.1.mlp.experts.7.down_proj.weight"]

    found = verify(tm.write_hf(tmp_path / "a", "qwen3_moe", mutate=drop))
    assert [e.kind for e in found.errors] == ["census"]
    assert "expert 7" in found.errors[0].message
    missing = tm.write_hf(tmp_path / "b", "qwen3_moe", shards=2)
    (missing / "model-00002-of-00002.safetensors").unlink()
    found = verify(missing)
    assert [e.kind for e in found.errors] == ["structure"]
    pointer = tmp_path / "pointer.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "LFS" in verify(pointer).errors[0].message


def test_source_in_gguf(tmp_path: Path) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    (path,) = tm.write_gguf(tmp_path / "m.gguf", "qwen3_moe", types=kind)
    assert verify(path).ok
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    assert not verify(path).ok


def test_missing_path_is_raised(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        verify(tmp_path / "missing")
    assert not verify_source(tmp_path / "missing").ok


# -- against ---------------------------------------------------------------------------------------


def test_container_agrees_with_its_source(packed: Path, checkpoint: Path) -> None:
    found = verify(packed, against=checkpoint)
    assert found.ok, found.errors
    assert found.checked_blocks == 36


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        (
            "model.layers.1.mlp.experts.7.down_proj.weight",
            (1, 7, "down"),
            "weight [3, 5]: expected",
        ),
        ("model.layers.2.self_attn.k_proj.weight", (2, None, "layers.2.attn_k"), "weight [3, 5]"),
        ("model.embed_tokens.weight", (None, None, "token_embd"), "weight [3, 5]: expected"),
    ],
)
def test_first_different_number_is_named(
    packed: Path, tmp_path: Path, name: str, place: tuple[Any, ...], words: str
) -> None:
    def change(weights: dict[str, np.ndarray]) -> None:
        weights[name] = weights[name].copy()
        weights[name][3, 5] += 1
        weights[name][4, 5] += 1

    other = tm.write_hf(tmp_path / "other", "qwen3_moe", shards=2, mutate=change)
    found = verify(packed, against=other)
    (error,) = found.errors
    assert (error.kind, error.layer, error.expert, error.tensor) == ("difference", *place)
    assert words in error.message and f"'{name}'" in error.message


def test_wrong_sources_are_refused(packed: Path, checkpoint: Path, tmp_path: Path) -> None:
    seed = tm.default_spec("qwen3_moe").replace(seed=99)
    other = tm.write_hf(tmp_path / "seed", "qwen3_moe", seed)
    found = verify(packed, against=other)
    assert not found.ok and {e.kind for e in found.errors} == {"difference"}
    bf16 = tm.write_hf(tmp_path / "bf16", "qwen3_moe", dtype="bf16")
    messages = "\n".join(e.message for e in verify(packed, against=bf16).errors)
    assert "bf16 as in" in messages and "of f32" in messages
    fewer = tm.default_spec("qwen3_moe").replace(layers=2)
    messages = "\n".join(
        e.message
        for e in verify(packed, against=tm.write_hf(tmp_path / "few", "qwen3_moe", fewer)).errors
    )
    assert "layer 2 (stream 0): the source has no experts" in messages
    assert "'n_layers'" in messages
    changed = tm.write_hf(tmp_path / "eps", "qwen3_moe", overrides={"rms_norm_eps": 0.5})
    messages = "\n".join(e.message for e in verify(packed, against=changed).errors)
    assert "'graph.norm_eps'" in messages and "'config.json'" in messages
    with pytest.raises(UsageError, match="only a container"):
        verify(checkpoint, against=checkpoint)
    with pytest.raises(UsageError, match="quick"):
        verify(packed, against=checkpoint, quick=True)
    with pytest.raises(SourceError):
        verify(packed, against=tmp_path / "missing")


def test_quantized_numbers_are_compared_as_bytes(tmp_path: Path) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    (path,) = tm.write_gguf(tmp_path / "m.gguf", "qwen3_moe", types=kind)
    repack(path, tmp_path / "m.colibri")
    assert verify(tmp_path / "m.colibri", against=path).ok
    with containers.open(tmp_path / "m.colibri") as container:
        assert dtype_by_name("q8_0") in {p.dtype for p in container.layouts[0].parts}
        needle = bytes(container.part(1, 3, PartRole.UP)[5, :34])
    data = path.read_bytes()
    assert data.count(needle) == 1
    at = data.index(needle) + 10
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (error,) = verify(tmp_path / "m.colibri", against=path).errors
    assert error.kind == "difference"
    assert "layer 1 expert 3, up: the quant block of weight [5, 0]" in error.message
