"""Families that are in no table: repack, inspect and verify work, run says what it lacks.

The names and shapes are those of tiny models that transformers saved (`oracle/unknown.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from oracle.unknown import MODELS, SHAPES, write_from_shapes
from repack_util import PARTS, Weights, refused, replace_key, small_hf, small_spec

import colibri_tools
from colibri_tools.container.format import Group, PartRole, Role
from colibri_tools.engine import Engine
from colibri_tools.errors import ColibriError
from colibri_tools.inspect import inspect
from colibri_tools.repack import repack
from colibri_tools.respec import respec
from colibri_tools.verify import verify_container, verify_source

STRANGE = {
    "qwen3_next": "linear_attn",
    "qwen3_5_moe": "linear_attn",
    "jetmoe": "self_attention",
    "lfm2_moe": "conv",
    "granitemoehybrid": "mamba",
}


def expert_values(weights: Weights, layer: int, expert: int) -> dict[PartRole, np.ndarray]:
    """The matrices of one expert, found by the suffixes of transformers' names."""
    for module in ("mlp", "block_sparse_moe", "feed_forward"):
        for prefix in ("model.", "model.language_model."):
            at = f"{prefix}layers.{layer}.{module}."
            for names in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
                keys = [f"{at}experts.{expert}.{name}.weight" for name in names]
                if keys[0] in weights:
                    return dict(zip(PARTS, (weights[key] for key in keys), strict=True))
            if at + "input_linear.weight" in weights:
                both = weights[at + "input_linear.weight"][expert]
                gate, up = np.split(both, 2)  # granite and jetmoe: the first half is activated
                down = weights[at + "output_linear.weight"][expert]
                return dict(zip(PARTS, (gate, up, down), strict=True))
    raise AssertionError(f"no expert {expert} in layer {layer}")


def check_container(path: Path, weights: Weights) -> None:
    """All experts, and everything outside them but the image encoder, are there bit for bit."""
    with colibri_tools.open(path) as found:
        assert [(row.layer, row.stream, row.n_experts) for row in found.rows] == [
            (0, 0, 4),
            (1, 0, 4),
        ]
        n_values = 0
        for row in range(2):
            for expert in range(4):
                for role, values in expert_values(weights, row, expert).items():
                    np.testing.assert_array_equal(
                        found.dequantize_part(row, expert, role), values, f"{row} {expert} {role}"
                    )
                    n_values += values.size
        for name, tensor in found.tensors.items():
            assert (tensor.role, tensor.group) == (Role.OTHER, Group.OPTIONAL)
            np.testing.assert_array_equal(found.dequantize(name), weights[name], name)
            n_values += weights[name].size
        visual = sum(v.size for n, v in weights.items() if n.startswith("model.visual."))
        assert n_values + visual == sum(v.size for v in weights.values())


@pytest.mark.parametrize("model_type", MODELS)
def test_a_family_in_no_table_is_repacked_inspected_and_verified(
    tmp_path: Path, model_type: str
) -> None:
    source = write_from_shapes(tmp_path / "hf", model_type)
    result = repack(source, tmp_path / "m.colibri")
    assert not result.executable
    assert result.experts_per_layer == (4, 4)
    visual = result.dropped.pop("vision-tower", [])
    assert result.dropped == {} and bool(visual) == (model_type == "qwen3_5_moe")
    check_container(tmp_path / "m.colibri", tm.read_hf(source))
    assert verify_source(source).ok
    assert verify_container(tmp_path / "m.colibri", against=source).ok
    summary = inspect(tmp_path / "m.colibri", blocks=True, tensors=True).summary
    assert summary["top_k"] == 2 and summary["hidden_size"] == 64 and summary["expert_width"] == 40
    rows = inspect(source, tensors=True).tensors or []
    assert {row["action"] for row in rows} <= {"resident", "expert", "dropped"}
    assert respec(tmp_path / "m.colibri").changed is False


@pytest.mark.parametrize("model_type", MODELS)
def test_run_of_a_family_in_no_table_says_what_it_lacks(tmp_path: Path, model_type: str) -> None:
    repack(write_from_shapes(tmp_path / "hf", model_type), tmp_path / "m.colibri")
    with pytest.raises(ColibriError) as caught, Engine(tmp_path / "m.colibri"):
        pass
    message = caught.value.message
    assert model_type in message and f"'{STRANGE[model_type]}'" in message


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


# ---------------------------------------------------------------- other parts


@pytest.mark.parametrize("family", tm.FAMILIES)
def test_case_1_2_every_family_is_found_inside_a_model_of_several_parts(
    tmp_path: Path, family: str
) -> None:
    def nest(weights: Weights) -> Weights:
        nested = replace_key("model.", "model.language_model.")(weights) or {}
        for number in range(3):
            nested[f"model.visual.blocks.{number}.weight"] = np.ones(3, np.float32)
        nested["model.audio_tower.conv.weight"] = np.ones(3, np.float32)
        return nested

    plain = small_hf(tmp_path / "plain", family)
    nested = small_hf(tmp_path / "nested", family, mutate=nest)
    text = json.loads((nested / "config.json").read_text())
    config = {"model_type": "novel_vl", "text_config": text, "vision_config": {"depth": 1}}
    (nested / "config.json").write_text(json.dumps(config))
    repack(plain, tmp_path / "plain.colibri")
    result = repack(nested, tmp_path / "nested.colibri")
    assert {rule: len(names) for rule, names in result.dropped.items()} == {
        "vision-tower": 3,
        "audio-tower": 1,
    }
    with (
        colibri_tools.open(tmp_path / "plain.colibri") as first,
        colibri_tools.open(tmp_path / "nested.colibri") as second,
    ):
        assert dict(first.spec) == dict(second.spec)
        np.testing.assert_array_equal(first.index["sha256"], second.index["sha256"])
        assert {t.name: t.sha256 for t in first.tensors.values()} == {
            t.name: t.sha256 for t in second.tensors.values()
        }


def test_the_shapes_are_of_all_models() -> None:
    assert list(json.loads(SHAPES.read_text())) == list(MODELS)
