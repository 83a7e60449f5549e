"""Repack: every value at its place, bit for bit, the same file every time, or no file at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_models as rm
import tiny_models as tm
from repack_util import (
    check_codes,
    code,
    coded,
    moe_layers,
    refused,
    replace_key,
    small_gguf,
    small_hf,
    small_spec,
)
from rich.console import Console
from sources_util import peak_memory

import colibri_tools
import colibri_tools.repack as repack_module
from colibri_tools.container.format import PartRole, Role
from colibri_tools.errors import JobError, SourceError, UsageError
from colibri_tools.mapping import map_source
from colibri_tools.repack import repack
from colibri_tools.sources import open_source

_T = tm.GGMLQuantizationType


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------- fill values


ALL_FAMILIES = (*tm.FAMILIES, *rm.RECIPES)
IN_GGUF = [family for family in ALL_FAMILIES if family != "flex_olmo"]


@pytest.mark.parametrize("form", ["per-expert", "fused", "mixed", "sharded"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_expert_value_of_a_hf_checkpoint_is_at_its_place(
    tmp_path: Path, family: str, form: str
) -> None:
    spec = tm.default_spec(family)
    change = coded(family, spec)

    def mutate(weights: dict[str, Any]) -> dict[str, Any]:
        change(weights)
        if form == "fused":
            return tm.fuse(family, weights)
        if form == "mixed":  # the first layer per expert, the others fused
            first = {n: v for n, v in weights.items() if ".layers.0." in n}
            rest = {n: v for n, v in weights.items() if ".layers.0." not in n}
            return first | tm.fuse(family, rest)
        return weights

    shards = 3 if form == "sharded" else 1
    source = tm.write_hf(tmp_path / "hf", family, spec, mutate=mutate, shards=shards)
    repack(source, tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)


@pytest.mark.parametrize("form", ["stacked", "old per-expert", "fused", "split"])
@pytest.mark.parametrize("family", IN_GGUF)
def test_every_expert_value_of_a_gguf_checkpoint_is_at_its_place(
    tmp_path: Path, family: str, form: str
) -> None:
    spec = tm.default_spec(family)

    def mutate(stored: dict[str, tm.GgufTensor]) -> dict[str, tm.GgufTensor]:
        weights = tm.tensors(family, spec)
        coded(family, spec)(weights)
        values = tm.gguf_values(family, spec, weights, old_experts=form == "old per-expert")
        if form == "fused":
            for layer in moe_layers(spec):
                gate, up = (values.pop(f"blk.{layer}.ffn_{p}_exps.weight") for p in ("gate", "up"))
                fused = np.concatenate([gate, up], axis=1)
                values[f"blk.{layer}.ffn_gate_up_exps.weight"] = fused
        return tm.encode_gguf(values, _T.F32)

    split = 7 if form == "split" else 0
    files = tm.write_gguf(tmp_path / "m.gguf", family, spec, mutate=mutate, split=split)
    repack(files[-1], tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_resident_tensor_is_carried_bit_for_bit(
    tmp_path: Path, family: str, dtype: str
) -> None:
    source_path = small_hf(tmp_path / "hf", family, dtype=dtype)
    repack(source_path, tmp_path / "m.colibri")
    with (
        open_source(source_path) as source,
        colibri_tools.open(tmp_path / "m.colibri") as container,
    ):
        mapping = map_source(source)
        assert len(container.tensors) == len(mapping.residents)
        for resident in mapping.residents:
            tensor = container.tensors[resident.name]
            assert tensor.dtype == resident.tensor.dtype
            assert container.read(tensor.offset, tensor.n_bytes) == source.read(resident.tensor)
            assert np.prod(tensor.shape) == resident.tensor.n_weights
        names = {r.tensor.name for r in mapping.residents}
        names |= {p.tensor.name for row in mapping.rows for s in row.experts for p in s.values()}
        assert names == set(source.tensors)


def test_quantized_blocks_are_carried_and_types_may_differ_by_expert(tmp_path: Path) -> None:
    spec = tm.wide_spec("mixtral")
    types = {"ffn_gate": _T.Q4_K, "ffn_up": _T.Q5_K, "ffn_down": _T.Q6_K}

    def choose(name: str) -> Any:
        if name == "blk.1.ffn_down.2.weight":
            return _T.Q8_0
        return next((t for part, t in types.items() if part in name), _T.Q8_0)

    stored: dict[str, tm.GgufTensor] = {}
    path = tm.write_gguf(
        tmp_path / "m.gguf",
        "mixtral",
        spec,
        types=choose,
        old_experts=True,
        mutate=stored.update,
    )[0]
    result = repack(path, tmp_path / "m.colibri")
    assert set(result.types) == {"q4_k", "q5_k", "q6_k", "q8_0", "f32"}
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert len(container.layouts) == 2
        odd = [(r, e) for r in range(2) for e in range(4) if container.cell(r, e)["layout"] == 1]
        assert odd == [(1, 2)]
        for row in range(2):
            for expert in range(4):
                for part, name in ((1, "gate"), (2, "up"), (3, "down")):
                    expected = stored[f"blk.{row}.ffn_{name}.{expert}.weight"].data
                    found = container.part(row, expert, PartRole(part))
                    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", tm.QUANT_TYPES, ids=lambda kind: kind.name)
def test_every_gguf_type_is_carried(tmp_path: Path, kind: Any) -> None:
    spec = tm.wide_spec("qwen3_moe", layers=1, experts=2)
    stored: dict[str, tm.GgufTensor] = {}
    path = tm.write_gguf(tmp_path / "m.gguf", "qwen3_moe", spec, types=kind, mutate=stored.update)[
        0
    ]
    repack(path, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        for expert in range(2):
            data = stored["blk.0.ffn_down_exps.weight"].data[expert]
            assert container.part(0, expert, PartRole.DOWN).tobytes() == data.tobytes()
        assert container.spec["executable"] is True


def test_gaps_between_parts_are_zero_whatever_the_block_before_held(tmp_path: Path) -> None:
    """Parts of 180 and 360 bytes: a gap of one layout lies where the other has weights."""
    spec = small_spec("mixtral", hidden=10, width=9)

    def mix(weights: dict[str, Any]) -> None:
        for name, value in weights.items():
            if ".experts.0." in name or ".experts.3." in name:
                weights[name] = tm.Raw("F32", value.shape, value.astype("<f4").tobytes())

    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, dtype="bf16", mutate=mix)
    repack(source, tmp_path / "m.colibri", threads=1)
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert len(container.layouts) == 2
        for row in range(spec.layers):
            for expert in range(spec.experts):
                parts = container.layout_of(row, expert).parts
                block = bytes(container.block(row, expert))
                for part, after in pairwise(parts):
                    gap = block[part.offset + part.n_bytes : after.offset]
                    assert gap and not any(gap)


def test_residents_and_experts_in_small_pieces_are_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tm.write_gguf(tmp_path / "m.gguf", "olmoe", tm.wide_spec("olmoe"), types=_T.Q8_0)[0]
    repack(source, tmp_path / "whole.colibri")
    monkeypatch.setattr(repack_module, "CHUNK_BYTES", 1000)
    repack(source, tmp_path / "pieces.colibri")
    assert _sha256(tmp_path / "whole.colibri") == _sha256(tmp_path / "pieces.colibri")


# ---------------------------------------------------------------- same bytes every time


def test_the_file_does_not_depend_on_threads_or_repetition(tmp_path: Path) -> None:
    source = tm.write_hf(tmp_path / "hf", "qwen2_moe", shards=3)
    ids = [
        repack(source, tmp_path / f"{i}.colibri", threads=threads).id
        for i, threads in enumerate((1, 2, 7, 0))
    ]
    sums = [_sha256(tmp_path / f"{i}.colibri") for i in range(4)]
    assert len(set(ids)) == 1 and len(set(sums)) == 1


def test_the_file_is_a_function_of_contents_not_of_places(tmp_path: Path) -> None:
    spec = small_spec("olmoe")
    first = tm.write_hf(tmp_path / "a", "olmoe", spec)
    second = tm.write_hf(tmp_path / "elsewhere" / "b", "olmoe", spec)
    os.utime(second / "model.safetensors", (1, 1))
    repack(first, tmp_path / "1.colibri")
    repack(second, tmp_path / "2.colibri")
    assert _sha256(tmp_path / "1.colibri") == _sha256(tmp_path / "2.colibri")
    assert str(tmp_path).encode() not in (tmp_path / "1.colibri").read_bytes()


def test_provenance_says_from_what_and_how(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe", shards=2)
    repack(source, tmp_path / "m.colibri", align=8192)
    files = sorted(source.glob("*.safetensors"))
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        found = dict(container.provenance)
        blobs = set(container.blobs)
    headers = []
    for file in files:
        data = file.read_bytes()
        headers.append(hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest())
    assert found == {
        "tool": "colibri-tools",
        "tool_version": colibri_tools.__version__,
        "recipe.align": 8192,
        "recipe.order": "id",
        "source.kind": "safetensors",
        "source.files": [file.name for file in files],
        "source.bytes": [file.stat().st_size for file in files],
        "source.header_sha256": headers,
    }
    assert blobs == {"config.json", "generation_config.json"}


def test_hash_sources_records_whole_files(tmp_path: Path) -> None:
    files = tm.write_gguf(tmp_path / "m.gguf", "olmoe", split=9)
    calls: list[tuple[int, int]] = []
    repack(
        files[0],
        tmp_path / "m.colibri",
        hash_sources=True,
        progress=lambda done, total: calls.append((done, total)),
    )
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert container.provenance["source.sha256"] == [_sha256(file) for file in files]
        assert (
            container.blobs["gguf-metadata.bin"]
            == files[0].read_bytes()[: len(container.blobs["gguf-metadata.bin"])]
        )
    assert calls[-1][0] == calls[-1][1]


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "qwen3_moe")
    calls: list[tuple[int, int]] = []
    result = repack(source, tmp_path / "m", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    parts = result.accounting
    payload = parts.resident_bytes + parts.expert_bytes
    assert done == sorted(done) and {call[1] for call in calls} == {done[-1]}
    gaps = result.n_blocks * 128  # between the parts of a block
    assert abs(done[-1] - payload) <= gaps


# ---------------------------------------------------------------- tied, dropped, dry run


def test_a_tied_output_is_an_alias_without_bytes(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe", tied=True)
    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec)
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        output, embedding = container.tensors["output"], container.tensors["token_embd"]
        assert output.alias_of == "token_embd"
        assert output.offset == embedding.offset
        assert (output.role, embedding.role) == (Role.OUTPUT, Role.TOKEN_EMBD)


def test_a_dry_run_plans_the_same_file_and_writes_nothing(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "mixtral")
    before = sorted(tmp_path.rglob("*"))
    planned = repack(source, tmp_path / "m.colibri", dry_run=True, hash_sources=True)
    assert sorted(tmp_path.rglob("*")) == before
    done = repack(source, tmp_path / "m.colibri", hash_sources=True)
    assert (planned.dry_run, done.dry_run) == (True, False)
    assert planned.accounting == done.accounting
    assert done.file_bytes == (tmp_path / "m.colibri").stat().st_size


def test_the_result_is_strict_json_and_a_readable_summary(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "mixtral")
    result = repack(source, tmp_path / "m.colibri")
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["experts_per_layer"] == [5, 5, 5] and data["n_blocks"] == 15
    assert data["accounting"]["file_bytes"] == data["file_bytes"]
    text = io.StringIO()
    result.render(Console(file=text, width=200))
    for word in ("mixtral", "15 blocks", "m.colibri", result.id):
        assert word in text.getvalue()


def test_case_7_2_side_files_are_carried_and_missing_ones_named(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    result = repack(source, tmp_path / "a.colibri")
    assert any("tokenizer.json" in n and "chat_template" in n for n in result.notes)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer_config.json").write_text("{}")
    vocab = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (source / "tokenizer.json").write_text(json.dumps(vocab))
    complete = repack(source, tmp_path / "b.colibri")
    assert complete.missing_blobs == () and not any("carried" in n for n in complete.notes)
    with colibri_tools.open(tmp_path / "b.colibri") as container:
        assert set(container.blobs) == {
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert container.blobs["chat_template.jinja"] == b"{{ messages }}"


# ---------------------------------------------------------------- refusals


def test_an_output_that_exists_needs_force(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    out = tmp_path / "m.colibri"
    out.write_text("precious")
    for dry_run in (False, True):
        with pytest.raises(UsageError, match="--force"):
            repack(source, out, dry_run=dry_run)
    assert out.read_text() == "precious"
    repack(source, out, force=True)
    with colibri_tools.open(out) as container:
        assert container.n_blocks == 15


def test_an_output_that_is_an_input_is_refused_even_with_force(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf", "olmoe")
    link = tmp_path / "link.colibri"
    os.link(path, link)
    before = _sha256(path)
    for out in (path, link):
        with pytest.raises(UsageError, match="input"):
            repack(path, out, force=True)
    assert _sha256(path) == before


@pytest.mark.parametrize("align", [0, 512, 5000, 4 << 20])
def test_a_bad_alignment_is_wrong_usage(tmp_path: Path, align: int) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    with pytest.raises(UsageError, match="alignment"):
        repack(source, tmp_path / "m.colibri", align=align)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_source_that_changes_meanwhile_leaves_no_output(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    shard = source / "model.safetensors"

    def touch(done: int, total: int) -> None:
        os.utime(shard, (1, 1))

    with pytest.raises(SourceError, match=r"model\.safetensors"):
        repack(source, tmp_path / "m.colibri", progress=touch)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_an_interrupted_job_stops_its_threads_and_keeps_what_it_did(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"interrupted; .* kept in .*m\.colibri\.partial"):
        repack(source, tmp_path / "m.colibri", threads=1, progress=interrupt)
    assert calls == 3
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["hf", "m.colibri.journal", "m.colibri.partial"]


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 10, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    for dry_run in (True, False):
        with pytest.raises(JobError, match="not enough disk space"):
            repack(source, tmp_path / "m.colibri", dry_run=dry_run)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_block_above_the_memory_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    monkeypatch.setattr(repack_module, "_available_memory", lambda: 1000)
    assert "available memory" in refused(source)


def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """Buffers are a block per thread; what grows is the catalog, a few hundred bytes a tensor."""
    peaks = []
    for layers in (1, 3):
        spec = tm.wide_spec("mixtral", layers=layers)
        source = tm.write_hf(tmp_path / f"hf{layers}", "mixtral", spec)
        with peak_memory() as peak:
            result = repack(source, tmp_path / f"{layers}.colibri", threads=1)
        peaks += peak
        block = 3 * spec.width * spec.hidden * 4
        assert result.accounting.expert_bytes == layers * spec.experts * block
    assert peaks[1] - peaks[0] < 2 * 65536 < block


# ---------------------------------------------------------------- numbers that are none


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["per-expert", "fused"])
def test_case_4_3_nan_and_inf_stop_the_job_with_their_place(
    tmp_path: Path, form: str, bad: float
) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        if form == "fused":
            weights["model.layers.1.mlp.experts.down_proj"][7, 3, 5] = bad
        else:
            weights["model.layers.1.mlp.experts.7.down_proj.weight"][3, 5] = bad

    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", form=form, mutate=spoil, dtype="f32")
    message = refused(source)
    assert "layer 1 expert 7 down" in message and "[3, 5]" in message
    assert str(float(bad)) in message
    assert ("[7, 3, 5]" in message) == (form == "fused")


def test_case_4_3_nan_in_a_resident_tensor_is_found_in_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack_module, "CHUNK_BYTES", 1000)

    def spoil(weights: dict[str, Any]) -> None:
        weights["model.layers.2.self_attn.o_proj.weight"][60, 11] = np.nan

    source = small_hf(tmp_path / "hf", "olmoe", mutate=spoil)
    message = refused(source)
    assert "'model.layers.2.self_attn.o_proj.weight'" in message and "[60, 11]" in message


def test_case_4_3_a_quantized_scale_that_is_nan_is_found(tmp_path: Path) -> None:
    spec = tm.wide_spec("olmoe")

    def spoil(stored: dict[str, tm.GgufTensor]) -> None:
        tensor = stored["blk.1.ffn_up_exps.weight"]
        data = tensor.data.copy()
        data[2, 5, :2] = (0x00, 0x7E)  # an fp16 NaN in the first block of row 5 of expert 2
        stored["blk.1.ffn_up_exps.weight"] = tm.GgufTensor(data, tensor.type)

    path = tm.write_gguf(tmp_path / "m.gguf", "olmoe", spec, types=_T.Q8_0, mutate=spoil)[0]
    message = refused(path)
    assert "layer 1 expert 2 up" in message and "[2, 5, 0]" in message


def test_case_4_1_bf16_subnormals_and_negative_zero_are_carried(tmp_path: Path) -> None:
    spec = small_spec("mixtral")
    odd = np.array([0x0001, 0x8001, 0x8000, 0x0000, 0x007F, 0x7F7F, 0xFF7F], np.uint16)
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    raw = np.resize(odd, (spec.hidden, spec.width)).astype("<u2").tobytes()

    def plant(weights: dict[str, Any]) -> None:
        weights[name] = tm.Raw("BF16", (spec.hidden, spec.width), raw)

    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=plant, dtype="bf16")
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert container.part(0, 3, PartRole.DOWN).tobytes() == raw


# ---------------------------------------------------------------- families nobody knows


def _unknown(weights: dict[str, Any]) -> dict[str, Any]:
    return {n.replace(".self_attn.", ".mixer."): v for n, v in weights.items()}


@pytest.mark.parametrize("form", ["per-expert", "fused"])
def test_an_unknown_family_with_known_expert_names_is_repacked(tmp_path: Path, form: str) -> None:
    spec = tm.default_spec("qwen3_moe")
    change = coded("qwen3_moe", spec)

    def mutate(weights: dict[str, Any]) -> dict[str, Any]:
        change(weights)
        return _unknown(tm.fuse("qwen3_moe", weights) if form == "fused" else weights)

    source = tm.write_hf(
        tmp_path / "hf", "qwen3_moe", spec, mutate=mutate, overrides={"model_type": "novel_moe"}
    )
    result = repack(source, tmp_path / "m.colibri")
    assert (result.family, result.executable) == ("novel_moe", False)
    check_codes(tmp_path / "m.colibri", spec)
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert "novel_moe" in container.spec["executable_lacks"]
        tensor = container.tensors["model.layers.0.mixer.q_proj.weight"]
        assert (tensor.role, tensor.group) == (Role.OTHER, 3)
        assert container.spec["top_k"] == spec.top_k


def test_an_unknown_gguf_architecture_is_repacked(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe")
    values = tm.gguf_values("qwen3_moe", spec, tm.tensors("qwen3_moe", spec))
    metadata = {
        key.replace("qwen3moe.", "novel."): value
        for key, value in tm.gguf_metadata("qwen3_moe", spec).items()
    }
    path = tmp_path / "m.gguf"
    tm.write_gguf_tensors(path, "novel", metadata, tm.encode_gguf(values, _T.F32))
    result = repack(path, tmp_path / "m.colibri")
    assert (result.family, result.executable, result.n_blocks) == ("novel", False, 15)


def test_extra_layers_of_an_unknown_family_are_a_stream_of_their_own(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe")
    overrides = {"model_type": "novel_moe", "num_hidden_layers": 2}
    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, overrides=overrides)
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert [(row.layer, row.stream) for row in container.rows] == [(0, 0), (1, 0), (2, 1)]
        assert container.spec["n_mtp_layers"] == 1


def test_stacks_of_an_unknown_family_that_could_be_transposed_are_refused(tmp_path: Path) -> None:
    """Square ones; where the sizes tell, tests/test_generic.py compares every value."""
    source = tm.write_hf(
        tmp_path / "square",
        "qwen3_moe",
        tm.square_spec("qwen3_moe"),
        form="fused",
        overrides={"model_type": "novel_moe"},
    )
    assert "cannot tell outputs from inputs" in refused(source)


def test_a_checkpoint_without_config_is_repacked_by_its_expert_names(tmp_path: Path) -> None:
    spec = small_spec("mixtral")
    source = tm.write_hf(tmp_path / "hf", "mixtral", spec)
    (source / "config.json").unlink()
    result = repack(source, tmp_path / "m.colibri")
    assert not result.executable and result.n_blocks == 15


def test_a_square_model_of_a_known_family_is_told_by_its_family(tmp_path: Path) -> None:
    """hidden = width = experts: only names and the family's orientation can tell the axes."""
    spec = tm.square_spec("qwen3_moe", experts=16)

    def mutate(weights: dict[str, Any]) -> dict[str, Any]:
        coded("qwen3_moe", spec)(weights)
        return tm.fuse("qwen3_moe", weights)

    repack(tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, mutate=mutate), tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)


def test_fused_names_may_end_in_weight(tmp_path: Path) -> None:
    spec = tm.default_spec("mixtral")
    change = coded("mixtral", spec)

    def mutate(weights: dict[str, Any]) -> dict[str, Any]:
        change(weights)
        fused = tm.fuse("mixtral", weights)
        fused = replace_key(".experts.gate_up_proj", ".experts.gate_up_proj.weight")(fused) or {}
        return replace_key(".experts.down_proj", ".experts.down_proj.weight")(fused) or {}

    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=mutate)
    repack(source, tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)


def test_codes_are_distinct() -> None:
    """The check of fill values would see any mix-up: no two matrices share a value."""
    blocks = [code(la, e, p, 64, 64) for la in range(3) for e in range(12) for p in range(3)]
    values = np.concatenate([block.ravel() for block in blocks])
    assert len(np.unique(values)) == values.size and values.max() < 2**24
