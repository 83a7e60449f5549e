"""Families that are in no table: repack, inspect and verify work, run says what it lacks.

The names and shapes are those of tiny models that transformers saved (`oracle/unknown.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from oracle.unknown import ALL, SHAPES, write_from_shapes
from repack_util import (
    PARTS,
    Weights,
    check_codes,
    coded,
    refused,
    small_hf,
    small_spec,
)

import colibri_tools
from colibri_tools.container.format import Group, PartRole, Role
from colibri_tools.engine import Engine
from colibri_tools.errors import ColibriError
from colibri_tools.inspect import inspect
from colibri_tools.repack import repack
from colibri_tools.respec import respec
from colibri_tools.verify import verify_container, verify_source

_SAME_NAMES = "; its tensors have the names of known families"
LACKS = {
    "qwen3_next": ", its layers have 'linear_attn'",
    "qwen3_5_moe": ", its layers have 'linear_attn'",
    "jetmoe": ", its layers have 'self_attention'",
    "lfm2_moe": ", its layers have 'conv'",
    "granitemoehybrid": ", its layers have 'mamba'",
    "aria": _SAME_NAMES,
    "bailing_hybrid": ", its layers have 'attention'",
    "cohere2_moe": _SAME_NAMES,
    "deepseek_v32": ", its layers have 'self_attn.indexer.",
    "deepseek_v4": ", its layers have 'attn'",
    "ernie4_5_vl_moe": ", its layers have 'mlp.gate.weight_1'",
    "gemma4": ", its layers have 'per_layer_input_gate'",
    "glm4_moe_lite": _SAME_NAMES,
    "glm4v_moe": _SAME_NAMES,
    "jamba": ", its layers have 'mamba'",
    "kimi_linear": ", its layers have 'self_attn.A_log'",
    "laguna": ", its layers have ",
    "longcat_flash": ", its layers have 'mlps'",
    "mimo_v2_flash": ", its layers have 'self_attn.attention_sink_bias'",
    "minimax": ", its layers have 'self_attn.",
    "mistral_large4": ", its layers have 'attention'",
    "qwen3_vl_moe": _SAME_NAMES,
    "step3p7": ", its layers have 'moe'",
    "zaya": ", its layers have 'post_attention_residual_scale'",
}
"""What `run` says that it lacks, behind "family NAME is not known to this version"."""


def expert_values(weights: Weights, layer: int, expert: int) -> dict[PartRole, np.ndarray] | None:
    """The matrices of one expert, found by the ends of transformers' names."""
    own = {
        "%" + name.partition(f"layers.{layer}.")[2]: value
        for name, value in weights.items()
        if f"layers.{layer}." in name and not re.search("vi(sual|sion)|shared|self_att", name)
    }

    def ending(*ends: str) -> list[np.ndarray]:
        found = [v for end in ends for name, v in own.items() if name.endswith(end)]
        assert len(found) in (0, len(ends)), (ends, list(own))
        return found

    for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if found := ending(*(f"experts.{expert}.{name}.weight" for name in names)):
            return dict(zip(PARTS, found, strict=True))
    if found := ending(*(f"%moe.{name}_proj.weight" for name in ("gate", "up", "down"))):
        return dict(zip(PARTS, (stack[expert] for stack in found), strict=True))
    for names in (
        ("experts.gate_up_proj", "experts.down_proj"),
        ("input_linear.weight", "output_linear.weight"),
        ("experts.fc1.weight", "experts.fc2.weight"),
    ):
        if found := [stack[expert] for stack in ending(*names)]:
            both, down = [m.T for m in found] if "fc1" in names[0] else found
            return dict(zip(PARTS, (*np.split(both, 2), down), strict=True))
    return None


def check_container(path: Path, weights: Weights, dropped: list[str]) -> None:
    """All experts, and everything outside them but what was dropped, are there bit for bit."""
    at_least = [layer for layer in range(8) if expert_values(weights, layer, 3) is not None]
    with colibri_tools.open(path) as found:
        assert [(row.layer, row.stream) for row in found.rows] == [(n, 0) for n in at_least]
        n_values = 0
        for row, spec in enumerate(found.rows):
            assert spec.n_experts in (4, 8)
            for expert in range(spec.n_experts):
                expected = expert_values(weights, spec.layer, expert)
                assert expected is not None
                for role, values in expected.items():
                    got = found.dequantize_part(row, expert, role)
                    np.testing.assert_array_equal(got, values, f"{row} {expert} {role}")
                    n_values += values.size
        for name, tensor in found.tensors.items():
            assert (tensor.role, tensor.group) == (Role.OTHER, Group.OPTIONAL)
            stored = found.tensor(name).reshape(weights[name].shape)
            np.testing.assert_array_equal(stored.view(weights[name].dtype), weights[name], name)
            n_values += weights[name].size
        n_values += sum(weights[name].size for name in dropped)
        assert n_values == sum(v.size for v in weights.values())


@pytest.mark.parametrize("model_type", ALL)
def test_a_family_in_no_table_is_repacked_inspected_and_verified(
    tmp_path: Path, model_type: str
) -> None:
    source = write_from_shapes(tmp_path / "hf", model_type)
    result = repack(source, tmp_path / "m.colibri")
    assert not result.executable and set(result.dropped) <= {"vision-tower"}
    visual = result.dropped.get("vision-tower", [])
    check_container(tmp_path / "m.colibri", tm.read_hf(source), visual)
    assert verify_source(source).ok
    assert verify_container(tmp_path / "m.colibri", against=source).ok
    summary = inspect(tmp_path / "m.colibri", blocks=True, tensors=True).summary
    assert summary["top_k"] == (1 if model_type == "zaya" else 2) and summary["hidden_size"] == 64
    rows = inspect(source, tensors=True).tensors or []
    assert {row["action"] for row in rows} <= {"resident", "expert", "dropped"}
    assert respec(tmp_path / "m.colibri").changed is False
    with pytest.raises(ColibriError) as caught, Engine(tmp_path / "m.colibri"):
        pass
    says = f"family '{result.family}' is not known to this version{LACKS[model_type]}"
    assert says in caught.value.message and "\n" not in caught.value.message


# ---------------------------------------------------------------- how stacks lie


def stacked(folder: Path, width: int, **overrides: Any) -> tuple[Path, tm.TinySpec]:
    """A checkpoint of an unknown family with stacks [experts, inputs, outputs], as Qwen3-VL-MoE is
    published; its experts hold codes of their places."""
    spec = small_spec("qwen3_moe", width=width)

    def change(weights: Weights) -> Weights:
        coded("qwen3_moe", spec)(weights)
        fused = tm.fuse("qwen3_moe", weights)
        return {n: v.swapaxes(1, 2) if v.ndim == 3 else v for n, v in fused.items()}

    keys = {"model_type": "novel_moe", **overrides}
    return tm.write_hf(folder, "qwen3_moe", spec, mutate=change, overrides=keys), spec


def test_a_transposed_stack_is_put_right_where_the_config_tells(tmp_path: Path) -> None:
    source, spec = stacked(tmp_path / "hf", 24)
    repack(source, tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)
    assert verify_container(tmp_path / "m.colibri", against=source).ok


@pytest.mark.parametrize("width", [24, 32, 64])
def test_the_stacks_of_aria_are_transposed_by_name(tmp_path: Path, width: int) -> None:
    """Also where one of them is square, and without a config that has the sizes."""
    source, spec = stacked(tmp_path / "hf", width, hidden_size=tm.DELETE)
    weights = {
        n.replace("gate_up_proj", "fc1.weight").replace(
            "experts.down_proj", "experts.fc2.weight"
        ): v
        for n, v in tm.read_hf(source).items()
    }
    tm.write_safetensors(source / "model.safetensors", weights)
    repack(source, tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)


@pytest.mark.parametrize(
    ("width", "overrides"),
    [(64, {}), (32, {}), (24, {"moe_intermediate_size": 20}), (24, {"hidden_size": tm.DELETE})],
    ids=["square-down", "square-gate-up", "another-width", "no-hidden-size"],
)
def test_a_stack_that_could_lie_either_way_is_refused(
    tmp_path: Path, width: int, overrides: dict[str, Any]
) -> None:
    source, _ = stacked(tmp_path / "hf", width, **overrides)
    assert "cannot tell outputs from inputs" in refused(source)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_of_gate_and_up_apart_need_the_hidden_size(tmp_path: Path, transposed: bool) -> None:
    """Turned round they are a model of another hidden size."""
    spec = small_spec("qwen3_moe")

    def change(weights: Weights) -> Weights:
        coded("qwen3_moe", spec)(weights)
        out = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            for name in ("gate_proj", "up_proj", "down_proj"):
                at = f"model.layers.{layer}.mlp.experts.{{}}.{name}.weight"
                stack = np.stack([weights[at.format(e)] for e in range(spec.experts)])
                stack = stack.swapaxes(1, 2) if transposed else stack
                out[f"model.layers.{layer}.moe.{name}.weight"] = stack
        return out

    keys = {"model_type": "novel_moe"}
    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, mutate=change, overrides=keys)
    repack(source, tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)
    config = json.loads((source / "config.json").read_text())
    del config["hidden_size"]
    (source / "config.json").write_text(json.dumps(config))
    assert "cannot tell outputs from inputs" in refused(source)


def test_a_transposed_stack_with_biases_is_refused(tmp_path: Path) -> None:
    """gpt-oss interleaves the outputs of such a stack, others do not."""
    source, _ = stacked(tmp_path / "hf", 24)
    weights = tm.read_hf(source)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights[name + "_bias"] = np.ones(weights[name].shape[::2], np.float32)
    tm.write_safetensors(source / "model.safetensors", weights)
    assert "cannot tell outputs from inputs" in refused(source)


@pytest.mark.parametrize("complete", [True, False])
def test_incomplete_experts_beyond_the_config_are_kept_and_not_streamed(
    tmp_path: Path, complete: bool
) -> None:
    """LongCat's zero experts as transformers saves them: gate and up that nobody reads."""
    n = small_spec("qwen3_moe").experts

    def change(weights: Weights) -> None:
        for name in [name for name in weights if f".experts.{n - 1}." in name]:
            extra = name.replace(f".{n - 1}.", f".{n}.")
            if complete or ".down_proj." not in name:
                weights[extra] = weights[name] + 1

    overrides = {"model_type": "novel_moe", "num_experts": n}
    source = small_hf(tmp_path / "hf", "qwen3_moe", mutate=change, overrides=overrides)
    result = repack(source, tmp_path / "m.colibri")
    assert set(result.experts_per_layer) == {n + complete}
    assert (
        any(f"has {n + 1} experts, the metadata say {n}" in t for t in result.warnings) is complete
    )
    assert any("beyond the 5 of the config" in text for text in result.notes) is not complete
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert (
            f"model.layers.0.mlp.experts.{n}.up_proj.weight" in container.tensors
        ) is not complete
    assert verify_container(tmp_path / "m.colibri", against=source).ok


def test_case_2_8_expert_count_of_an_unknown_architecture_must_equal_the_axis(
    tmp_path: Path,
) -> None:
    spec = small_spec("qwen3_moe")
    for n in (spec.experts, spec.experts + 1):
        values = tm.gguf_values("qwen3_moe", spec, tm.tensors("qwen3_moe", spec))
        metadata = {
            name.replace("qwen3moe.", "novelmoe."): value
            for name, value in tm.gguf_metadata("qwen3_moe", spec).items()
        } | {"novelmoe.expert_count": n}
        path = tmp_path / f"{n}.gguf"
        encoded = tm.encode_gguf(values, tm.GGMLQuantizationType.F32)
        tm.write_gguf_tensors(path, "novelmoe", metadata, encoded)
        if n == spec.experts:
            repack(path, tmp_path / "m.colibri")
        else:
            assert "layer 0 has 5 experts, the metadata say 6" in refused(path)


def test_experts_without_a_gate_are_refused_by_that_name(tmp_path: Path) -> None:
    """nemotron_h: up and down only, which no block of format version 1 is."""

    def change(weights: Weights) -> Weights:
        return {n: v for n, v in weights.items() if ".gate_proj." not in n}

    source = small_hf(
        tmp_path / "hf", "qwen3_moe", mutate=change, overrides={"model_type": "novel_moe"}
    )
    message = refused(source)
    assert "layer 0 expert 0 gate" in message and "gated experts only" in message


# ---------------------------------------------------------------- multi-token prediction


def mtp_tensors(spec: tm.TinySpec, layer: int) -> Weights:
    """What DeepSeek-V3 has in a layer behind the last one, besides a layer's own tensors."""
    own = tm.tensors("qwen3_moe", spec.replace(layers=layer + 1))
    at = f"model.layers.{layer}."
    weights = {n: v for n, v in own.items() if n.startswith(at)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{at}{name}.weight"] = np.ones(spec.hidden, np.float32)
    weights[at + "eh_proj.weight"] = np.ones((spec.hidden, 2 * spec.hidden), np.float32)
    weights[at + "embed_tokens.weight"] = own["model.embed_tokens.weight"]
    weights[at + "shared_head.head.weight"] = own["lm_head.weight"]
    return weights


def with_mtp_file(folder: Path, **overrides: Any) -> tuple[Path, Weights]:
    """A checkpoint whose index names mtp.safetensors, and the tensors of that file."""
    spec = small_spec("qwen3_moe")
    source = tm.write_hf(folder, "qwen3_moe", spec, overrides=overrides)
    extra = mtp_tensors(spec, spec.layers)
    tm.write_safetensors(source / "mtp.safetensors", extra)
    weight_map = dict.fromkeys(tm.tensors("qwen3_moe", spec), "model.safetensors")
    weight_map |= dict.fromkeys(extra, "mtp.safetensors")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return source, extra


@pytest.mark.parametrize("announced", [True, False])
def test_case_1_5_mtp_layers_are_left_out_by_a_rule(tmp_path: Path, announced: bool) -> None:
    keys = {"num_nextn_predict_layers": 1} if announced else {}
    source, extra = with_mtp_file(tmp_path / "hf", **keys)
    result = repack(source, tmp_path / "m.colibri")
    assert set(result.dropped) == {"mtp"} and set(result.dropped["mtp"]) == set(extra)
    assert result.executable and result.n_layers == 3
    spec = inspect(tmp_path / "m.colibri").summary
    assert spec["spec"]["n_mtp_layers"] == 0
    assert spec["provenance"]["dropped.rules"] == ["mtp"]
    assert spec["provenance"]["dropped.counts"] == [len(extra)]
    rows = {row["name"]: row for row in inspect(source, tensors=True).tensors or []}
    assert all((rows[n]["action"], rows[n]["rule"]) == ("dropped", "mtp") for n in extra)
    assert verify_container(tmp_path / "m.colibri", against=source).ok
    plain = tm.write_hf(tmp_path / "plain", "qwen3_moe", small_spec("qwen3_moe"), overrides=keys)
    repack(plain, tmp_path / "plain.colibri")
    with (
        colibri_tools.open(tmp_path / "plain.colibri") as first,
        colibri_tools.open(tmp_path / "m.colibri") as second,
    ):
        assert dict(first.spec) == dict(second.spec)
        np.testing.assert_array_equal(first.index["sha256"], second.index["sha256"])


def test_case_1_5_announced_mtp_layers_that_are_not_there_are_a_warning(tmp_path: Path) -> None:
    overrides = {"num_nextn_predict_layers": 1}
    source = small_hf(tmp_path / "hf", "qwen3_moe", overrides=overrides)
    result = repack(source, tmp_path / "m.colibri")
    assert any("announce 1 multi-token-prediction" in text for text in result.warnings)
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert container.spec["n_mtp_layers"] == 0
        assert container.spec["n_layers"] == 3


def test_case_1_5_mtp_under_a_name_of_its_own_is_left_out_too(tmp_path: Path) -> None:
    extra = {"mtp.layers.0.mlp.experts.0.up_proj.weight": np.ones((8, 8), np.float32)}
    source = small_hf(tmp_path / "hf", "qwen3_moe", mutate=lambda weights: weights | extra)
    assert repack(source, tmp_path / "m.colibri").dropped == {"mtp": [*extra]}


def test_case_1_5_gguf_counts_mtp_among_its_layers(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe")
    values = tm.gguf_values("qwen3_moe", spec, tm.tensors("qwen3_moe", spec))
    values["blk.2.nextn.eh_proj.weight"] = np.ones((spec.hidden, 2 * spec.hidden), np.float32)
    metadata = tm.gguf_metadata("qwen3_moe", spec) | {"qwen3moe.nextn_predict_layers": 1}
    path = tmp_path / "m.gguf"
    encoded = tm.encode_gguf(values, tm.GGMLQuantizationType.F32)
    tm.write_gguf_tensors(path, "qwen3moe", metadata, encoded)
    result = repack(path, tmp_path / "m.colibri")
    assert result.n_layers == 2 and set(result.dropped) == {"mtp"}
    assert all(name.startswith("blk.2.") for name in result.dropped["mtp"])


def test_the_shapes_are_of_all_models() -> None:
    assert list(json.loads(SHAPES.read_text())) == list(ALL)
