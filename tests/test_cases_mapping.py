"""Public faults of naming, mapping, stacking and fusion, each with the tiny input that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from repack_util import (
    PARTS,
    check_codes,
    coded,
    map_gguf,
    map_hf,
    mapped,
    refused,
    replace_key,
    small_gguf,
    small_hf,
    small_spec,
    without,
)

import colibri_tools
from colibri_tools.container.format import Role
from colibri_tools.repack import repack

_T = tm.GGMLQuantizationType


# ---------------------------------------------------------------- 1.1 experts skipped


def test_case_1_1_fused_state_dict_fills_every_slot(tmp_path: Path) -> None:
    spec = tm.default_spec("qwen3_moe")
    mapping = map_hf(tmp_path, "qwen3_moe", spec, form="fused")
    assert mapping.problems == []
    slots = [
        (row.layer, e, p) for row in mapping.rows for e, s in enumerate(row.experts) for p in s
    ]
    assert len(set(slots)) == len(slots) == 3 * 12 * 3


def test_case_1_1_renamed_experts_list_names_and_unfilled_slots(tmp_path: Path) -> None:
    def rename(weights: dict[str, Any]) -> dict[str, Any]:
        renamed = replace_key(".gate_proj.weight", ".linear_fc1.weight")(weights)
        assert renamed is not None
        return renamed

    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", mutate=rename)
    message = refused(source)
    assert "36 source tensors match no rule" in message
    assert "experts.0.linear_fc1.weight" in message
    assert "36 expert slots are not filled" in message and "layer 0 expert 0 gate" in message


def test_case_1_1_every_expert_renamed_is_still_a_listing(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe", mutate=replace_key("_proj.weight", "_fc"))
    message = refused(source)
    assert "45 expert slots are not filled" in message and "match no rule" in message


def test_case_1_1_one_missing_expert_tensor_is_named(tmp_path: Path) -> None:
    name = "blk.2.ffn_up.4.weight"
    path = small_gguf(
        tmp_path / "m.gguf",
        "mixtral",
        old_experts=True,
        mutate=lambda stored: {n: v for n, v in stored.items() if n != name},
    )
    message = refused(path)
    assert "1 expert slots are not filled: 'layer 2 expert 4 up'" in message


def test_case_1_1_unknown_naming_of_an_unknown_family_lists_the_names(tmp_path: Path) -> None:
    source = small_hf(
        tmp_path / "hf",
        "olmoe",
        mutate=replace_key("mlp.experts", "ffn.expert_bank"),
        overrides={"model_type": "novel"},
    )
    message = refused(source)
    assert "'novel'" in message and "no known naming" in message and "expert_bank" in message


# ---------------------------------------------------------------- 1.2 nested checkpoints


def _nested(weights: dict[str, Any], body: str, head: str) -> dict[str, Any]:
    out = {}
    for name, value in weights.items():
        out[head + name if name == "lm_head.weight" else body + name[len("model.") :]] = value
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "merger.norm.weight"):
        out[f"model.visual.{name}"] = np.ones((4, 4), np.float32)
    return out


def _nest_config(folder: Path, extra: dict[str, Any] | None = None) -> None:
    path = folder / "config.json"
    inner = json.loads(path.read_text())
    outer = {"model_type": "novel_vl", "text_config": inner, **(extra or {})}
    path.write_text(json.dumps(outer))


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.language_model.", ""),
        ("model.language_model.", "model.language_model."),
        ("model.language_model.model.", "model.language_model."),
        ("language_model.model.", "language_model."),
    ],
)
def test_case_1_2_a_nested_checkpoint_is_the_same_model(
    tmp_path: Path, body: str, head: str
) -> None:
    spec = tm.default_spec("qwen3_moe")
    plain = tm.write_hf(tmp_path / "plain", "qwen3_moe", spec)
    nested = tm.write_hf(
        tmp_path / "nested", "qwen3_moe", spec, mutate=lambda w: _nested(w, body, head)
    )
    _nest_config(nested)
    repack(plain, tmp_path / "plain.colibri")
    result = repack(nested, tmp_path / "nested.colibri")
    assert list(result.dropped) == ["vision-tower"] and len(result.dropped["vision-tower"]) == 3
    with (
        colibri_tools.open(tmp_path / "plain.colibri") as first,
        colibri_tools.open(tmp_path / "nested.colibri") as second,
    ):
        assert dict(first.spec) == dict(second.spec)
        assert list(first.tensors) == list(second.tensors)
        for name, tensor in first.tensors.items():
            assert tensor.sha256 == second.tensors[name].sha256
        np.testing.assert_array_equal(first.index["sha256"], second.index["sha256"])
        assert second.provenance["dropped.rules"] == ["vision-tower"]
        assert second.provenance["dropped.counts"] == [3]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.layers.1.self_attn.rotary_emb.inv_freq", "rotary-buffer"),
        ("model.rotary_emb.inv_freq", "rotary-buffer"),
        ("visual.patch_embed.proj.weight", "vision-tower"),
        ("vision_tower.blocks.0.norm.weight", "vision-tower"),
        ("multi_modal_projector.linear.weight", "vision-tower"),
        ("model.audio_tower.layers.0.weight", "audio-tower"),
    ],
)
def test_what_is_left_out_has_a_rule_with_a_name(tmp_path: Path, name: str, rule: str) -> None:
    extra = {name: np.ones(8, np.float32)}
    mapping = map_hf(tmp_path, "mixtral", mutate=lambda weights: weights | extra)
    assert mapping.problems == [] and mapping.dropped == {rule: [name]}
    stranger = map_hf(tmp_path / "b", "mixtral", mutate=lambda w: w | {name + "x.y": extra[name]})
    known = "tower" in rule  # everything below a tower belongs to it
    assert bool(stranger.problems) is not known


def test_case_1_2_an_unknown_prefix_is_refused_with_names(tmp_path: Path) -> None:
    source = small_hf(
        tmp_path / "hf",
        "qwen3_moe",
        mutate=replace_key("model.", "backbone.lm."),
    )
    assert "'backbone.lm.embed_tokens.weight'" in refused(source)


# ---------------------------------------------------------------- 1.4 quantized side tensors


def _raw(dtype: str, shape: tuple[int, ...], itemsize: int = 1) -> tm.Raw:
    n = int(np.prod(shape)) * itemsize
    return tm.Raw(dtype, shape, bytes(n))


_AT = "model.layers.0.block_sparse_moe.experts.1.w1"


@pytest.mark.parametrize(
    ("weight", "side", "says"),
    [
        (("F8_E4M3", 1), (f"{_AT}.weight_scale_inv", "F32", (1, 1), 4), "FP8"),
        (("I8", 1), (f"{_AT}.SCB", "F32", (24,), 4), "INT8"),
        (("F8_E5M2", 1), None, "F8_E5M2"),
        (("I8", 1), None, "I8"),
        (None, (f"{_AT}.qweight", "I32", (8, 24), 4), "GPTQ"),
        (None, (f"{_AT}.weight.absmax", "F32", (24,), 4), "4-bit"),
        (None, (f"{_AT}.weight_scale", "F32", (24, 1), 4), "separate scales"),
    ],
    ids=["fp8", "int8", "bare-fp8", "bare-int8", "gptq", "bnb4", "scale"],
)
def test_case_1_4_quantized_weights_are_refused_by_scheme(
    tmp_path: Path, weight: Any, side: Any, says: str
) -> None:
    def quantize(weights: dict[str, Any]) -> None:
        shape = weights[f"{_AT}.weight"].shape
        if weight:
            weights[f"{_AT}.weight"] = _raw(weight[0], shape, weight[1])
        if side:
            name, dtype, side_shape, itemsize = side
            weights[name] = _raw(dtype, side_shape, itemsize)

    source = small_hf(tmp_path / "hf", "mixtral", mutate=quantize)
    message = refused(source)
    assert says in message and (side is None or side[0] in message)


def test_case_1_4_quantization_config_alone_is_refused(tmp_path: Path) -> None:
    for config in ({"quant_method": "awq"}, {"quant_method": "gptq", "bits": 4}, {"bits": 4}):
        source = tm.write_hf(
            tmp_path / config.get("quant_method", "none"),
            "mixtral",
            small_spec("mixtral"),
            overrides={"quantization_config": config},
        )
        message = refused(source)
        assert "quantization_config" in message
        assert config.get("quant_method", "?") in message
    null = map_hf(tmp_path, "mixtral", overrides={"quantization_config": None})
    assert null.problems == []


def test_case_1_4_gguf_tensors_with_separate_scales_are_refused(tmp_path: Path) -> None:
    scale = tm.GgufTensor(np.ones(5, np.float32), _T.F32)
    path = small_gguf(
        tmp_path / "m.gguf",
        "qwen3_moe",
        mutate=lambda stored: stored.update({"blk.0.ffn_up_exps.scale": scale}),
    )
    assert "separate scales" in refused(path)


def test_case_4_10_packed_int4_is_refused_by_format(tmp_path: Path) -> None:
    def pack(weights: dict[str, Any]) -> None:
        del weights[f"{_AT}.weight"]
        weights[f"{_AT}.weight_packed"] = _raw("I32", (24, 8), 4)
        weights[f"{_AT}.weight_scale"] = _raw("F32", (24, 2), 4)
        weights[f"{_AT}.weight_shape"] = _raw("I64", (2,), 8)

    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    spec = small_spec("mixtral")
    tensors = tm.write_hf(tmp_path / "tensors", "mixtral", spec, mutate=pack)
    assert "weight_packed" in refused(tensors)
    stated = tm.write_hf(
        tmp_path / "stated", "mixtral", spec, overrides={"quantization_config": config}
    )
    assert "compressed-tensors pack-quantized" in refused(stated)


def _small(family: str) -> tuple[tm.TinySpec, dict[str, Any]]:
    spec = small_spec(family)
    return spec, tm.tensors(family, spec)


def test_case_4_12_an_unknown_gguf_type_is_named_with_number_and_tensor(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf", "olmoe")
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_down_exps.weight") + len("blk.1.ffn_down_exps.weight")
    type_at = at + 4 + 3 * 8
    assert data[type_at : type_at + 4] == bytes(4)
    data[type_at] = 99
    path.write_bytes(data)
    message = refused(path)
    assert "99" in message and "blk.1.ffn_down_exps.weight" in message
    assert len(mapped(path).assignments) == len(tm.gguf_values("olmoe", *_small("olmoe")))


def test_case_4_12_each_tensor_has_its_own_type(tmp_path: Path) -> None:
    spec = tm.wide_spec("qwen3_moe")
    path = tm.write_gguf(
        tmp_path / "m.gguf",
        "qwen3_moe",
        spec,
        types=lambda name: _T.Q4_1 if name == "blk.1.ffn_down_exps.weight" else _T.Q4_0,
        metadata={"general.file_type": 2},
    )[0]
    repack(path, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        types = [
            [part.dtype.name for part in container.layout_of(row, 0).parts] for row in range(2)
        ]
    assert types == [["q4_0"] * 3, ["q4_0", "q4_0", "q4_1"]]


# ---------------------------------------------------------------- 1.5 layers beyond the model


def test_case_1_5_a_layer_beyond_the_config_is_named(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe", overrides={"num_hidden_layers": 2})
    message = refused(source)
    assert "layers beyond the 2 of the model" in message and "model.layers.2." in message


def test_case_5_3_a_layer_without_tensors_is_missing_slots(tmp_path: Path) -> None:
    def cut(weights: dict[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in weights.items() if ".layers.1." not in n}

    source = small_hf(tmp_path / "hf", "mixtral", mutate=cut)
    message = refused(source)
    assert "layers.1.attn_norm" in message and "layer 1 expert 0 gate" in message
    path = small_gguf(
        tmp_path / "m.gguf",
        "qwen3_moe",
        mutate=lambda stored: {n: v for n, v in stored.items() if "blk.2." not in n},
    )
    assert "layers.2.attn_norm" in refused(path)


# ---------------------------------------------------------------- 1.7 base-model names


def test_case_1_7_names_without_model_are_the_same_model(tmp_path: Path) -> None:
    spec = tm.default_spec("olmoe")
    plain = tm.write_hf(tmp_path / "plain", "olmoe", spec)
    base = tm.write_hf(tmp_path / "base", "olmoe", spec, mutate=replace_key("model.", ""))
    first, second = mapped(plain), mapped(base)
    assert second.problems == [] and first.spec == second.spec
    assert [r.name for r in first.residents] == [r.name for r in second.residents]


def test_case_1_7_a_headless_export_says_so(tmp_path: Path) -> None:
    def strip(weights: dict[str, Any]) -> dict[str, Any]:
        del weights["lm_head.weight"]
        return {name.removeprefix("model."): value for name, value in weights.items()}

    source = small_hf(tmp_path / "hf", "olmoe", mutate=strip)
    message = refused(source)
    assert "lm_head.weight is missing" in message and "without its head" in message


# ---------------------------------------------------------------- 1.8 the width of an expert


def test_case_1_8_width_from_config_checked_against_tensors(tmp_path: Path) -> None:
    spec = tm.default_spec("qwen2_moe")  # 96 / 3 would be 32; the experts are 40 wide
    assert (spec.dense_width, spec.top_k, spec.width) == (96, 3, 40)
    for mapping in (map_hf(tmp_path, "qwen2_moe", spec), map_gguf(tmp_path, "qwen2_moe", spec)):
        assert mapping.spec["expert_width"] == 40
        assert mapping.spec["graph.shared_width"] == 48
        assert mapping.spec["graph.dense_width"] == 0


def test_case_1_8_a_width_that_is_not_the_tensors_is_refused(tmp_path: Path) -> None:
    source = small_hf(
        tmp_path / "hf",
        "qwen2_moe",
        overrides={"moe_intermediate_size": 32},
    )
    message = refused(source)
    assert "[32, 64] (expert width by hidden size)" in message and "[24, 64]" in message


def test_case_1_8_a_width_that_gguf_does_not_state_is_the_tensors(tmp_path: Path) -> None:
    spec = tm.default_spec("qwen3_moe")
    absent = {"qwen3moe.expert_feed_forward_length": tm.DELETE}
    assert map_gguf(tmp_path, "qwen3_moe", spec, metadata=absent).spec["expert_width"] == 40


@pytest.mark.parametrize("model_type", ["qwen2_moe", "llama"])
def test_case_1_8_a_dense_model_is_not_a_moe(tmp_path: Path, model_type: str) -> None:
    spec = small_spec("qwen2_moe", dense_layers=(0, 1, 2))
    source = tm.write_hf(
        tmp_path / "hf", "qwen2_moe", spec, overrides={"model_type": model_type, "num_experts": 0}
    )
    assert "not a Mixture-of-Experts model" in refused(source)


def test_case_1_8_a_dense_gguf_is_not_a_moe(tmp_path: Path) -> None:
    spec = small_spec("qwen2_moe", dense_layers=(0, 1, 2))
    values = tm.gguf_values("qwen2_moe", spec, tm.tensors("qwen2_moe", spec))
    metadata = {
        key.replace("qwen2moe.", "llama."): value
        for key, value in tm.gguf_metadata("qwen2_moe", spec).items()
        if "expert" not in key
    }
    path = tmp_path / "m.gguf"
    tm.write_gguf_tensors(path, "llama", metadata, tm.encode_gguf(values, _T.F32))
    assert "not a Mixture-of-Experts model" in refused(path)


# ---------------------------------------------------------------- 1.9 tied embeddings


def test_case_1_9_flag_true_and_no_head_is_tied(tmp_path: Path) -> None:
    mapping = map_hf(tmp_path, "qwen3_moe", small_spec("qwen3_moe", tied=True))
    output = next(r for r in mapping.residents if r.role == Role.OUTPUT)
    assert output.alias_of == "token_embd" and mapping.problems == []


def test_case_1_9_flag_true_and_a_different_head_keeps_both_and_says_so(tmp_path: Path) -> None:
    mapping = map_hf(tmp_path, "qwen3_moe", overrides={"tie_word_embeddings": True})
    output = next(r for r in mapping.residents if r.role == Role.OUTPUT)
    assert output.alias_of is None and output.tensor.name == "lm_head.weight"
    assert any("differs from" in warning for warning in mapping.warnings)


def test_case_1_9_flag_true_and_the_same_head_is_tied(tmp_path: Path) -> None:
    def copy(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()

    mapping = map_hf(tmp_path, "qwen3_moe", mutate=copy, overrides={"tie_word_embeddings": True})
    output = next(r for r in mapping.residents if r.role == Role.OUTPUT)
    assert output.alias_of == "token_embd" and mapping.warnings == []
    assert mapping.dropped == {"tied-output-copy": ["lm_head.weight"]}
    untied = map_hf(tmp_path / "b", "qwen3_moe", mutate=copy)
    output = next(r for r in untied.residents if r.role == Role.OUTPUT)
    assert output.alias_of is None


@pytest.mark.parametrize("flag", [False, tm.DELETE])
def test_case_1_9_flag_false_and_no_head_is_an_error(tmp_path: Path, flag: Any) -> None:
    source = small_hf(
        tmp_path / "hf",
        "qwen3_moe",
        mutate=without("lm_head.weight"),
        overrides={"tie_word_embeddings": flag},
    )
    assert "tie_word_embeddings is false" in refused(source)


@pytest.mark.parametrize("outer", [True, False])
def test_case_1_9_top_level_flag_wins_with_a_warning(tmp_path: Path, outer: bool) -> None:
    spec = small_spec("qwen3_moe", tied=not outer)
    source = tm.write_hf(
        tmp_path / "hf",
        "qwen3_moe",
        spec,
        mutate=without("lm_head.weight") if outer else None,
    )
    _nest_config(source, {"tie_word_embeddings": outer})
    mapping = mapped(source)
    assert any("the top level decides" in warning for warning in mapping.warnings)
    output = next((r for r in mapping.residents if r.role == Role.OUTPUT), None)
    if outer:
        assert output is not None and output.alias_of == "token_embd"
    else:
        assert any("lm_head.weight is missing" in problem for problem in mapping.problems)


def test_case_1_9_gguf_without_output_is_tied(tmp_path: Path) -> None:
    mapping = map_gguf(tmp_path, "qwen3_moe", small_spec("qwen3_moe", tied=True))
    output = next(r for r in mapping.residents if r.role == Role.OUTPUT)
    assert output.alias_of == "token_embd" and mapping.problems == []


# ---------------------------------------------------------------- 1.11 expert counts


def test_case_1_11_counts_per_layer_are_honoured(tmp_path: Path) -> None:
    spec = tm.default_spec("qwen3_moe", layers=2, experts_of_layer=(12, 8))
    source = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, mutate=coded("qwen3_moe", spec))
    result = repack(source, tmp_path / "m.colibri")
    assert result.experts_per_layer == (12, 8)
    assert any("layer 1 has 8" in warning for warning in result.warnings)
    check_codes(tmp_path / "m.colibri", spec)
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        assert container.index.shape == (2, 12)
        assert not container.index[1, 8:]["flags"].any()


def test_case_1_11_fused_counts_per_layer_are_honoured(tmp_path: Path) -> None:
    spec = small_spec("mixtral", layers=2, experts_of_layer=(5, 4))
    mapping = map_hf(tmp_path, "mixtral", spec, form="fused")
    assert mapping.problems == []
    assert [len(row.experts) for row in mapping.rows] == [5, 4]


def test_case_1_11_router_rows_must_equal_the_experts(tmp_path: Path) -> None:
    def grow(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.gate.weight"] = np.ones((6, 64), np.float32)

    def shrink(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.gate.weight"] = np.ones((4, 64), np.float32)

    spec = small_spec("qwen3_moe")
    more = tm.write_hf(tmp_path / "more", "qwen3_moe", spec, mutate=grow)
    assert "layer 1 expert 5 gate" in refused(more)
    fewer = tm.write_hf(tmp_path / "fewer", "qwen3_moe", spec, mutate=shrink)
    assert "layer 1: expected 4 experts (rows of its router)" in refused(fewer)


def test_case_1_11_more_experts_per_token_than_experts_is_refused(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe", layers=2, experts_of_layer=(5, 2))
    message = refused(tm.write_hf(tmp_path / "hf", "qwen3_moe", spec))
    assert "layer 1: 3 experts per token, but only 2 experts" in message


@pytest.mark.parametrize("form", ["per-expert", "fused"])
def test_layers_of_both_kinds_are_decided_by_tensors(tmp_path: Path, form: str) -> None:
    spec = small_spec("qwen2_moe", dense_layers=(1,))
    mapping = map_hf(tmp_path, "qwen2_moe", spec, form=form)
    assert mapping.problems == [] and mapping.spec["moe_layers"] == [1, 0, 1]
    assert mapping.spec["graph.dense_width"] == 96
    gguf = map_gguf(tmp_path, "qwen2_moe", spec)
    assert gguf.problems == [] and gguf.spec["moe_layers"] == [1, 0, 1]


def test_a_layer_kind_that_config_and_tensors_see_differently_is_named(tmp_path: Path) -> None:
    dense = small_spec("qwen3_moe", dense_layers=(1,))
    source = tm.write_hf(tmp_path / "a", "qwen3_moe", dense, overrides={"mlp_only_layers": []})
    assert "layer 1: an MoE layer by the config, a dense layer by its tensors" in refused(source)
    step = {"decoder_sparse_step": 2}
    source = small_hf(tmp_path / "b", "qwen3_moe", overrides=step)
    assert "layer 0: a dense layer by the config" in refused(source)
    spec = small_spec("qwen3_moe", dense_layers=(0, 2))
    both = {"decoder_sparse_step": 2, "mlp_only_layers": None}
    assert map_hf(tmp_path, "qwen3_moe", spec, overrides=both).spec["moe_layers"] == [0, 1, 0]


# ---------------------------------------------------------------- 2.3 halves of a fused tensor


def test_case_2_3_w1_is_the_gate_and_w3_is_up(tmp_path: Path) -> None:
    def fill(weights: dict[str, Any]) -> None:
        for name, value in weights.items():
            value[:] = {"w1": 1, "w3": -2, "w2": 3}.get(name.split(".")[-2], 0.5)

    source = small_hf(tmp_path / "hf", "mixtral", mutate=fill)
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        values = [float(container.dequantize_part(0, 0, part)[0, 0]) for part in PARTS]
    assert values == [1, -2, 3]


def test_case_2_3_a_transposed_stack_of_a_known_family_is_refused(tmp_path: Path) -> None:
    def transpose(weights: dict[str, Any]) -> None:
        for name, value in weights.items():
            if ".experts." in name:
                weights[name] = np.ascontiguousarray(value.swapaxes(1, 2))

    source = small_hf(tmp_path / "hf", "mixtral", form="fused", mutate=transpose)
    message = refused(source)
    assert "gate_up_proj" in message and "expert width by hidden size" in message


# ---------------------------------------------------------------- 2.6 slices of a split tensor


def test_case_2_6_tensor_parallel_slices_are_refused(tmp_path: Path) -> None:
    at = "model.layers.0.block_sparse_moe.experts.0"

    def split(weights: dict[str, Any]) -> None:
        for name, axis in ((f"{at}.w1.weight", 0), (f"{at}.w2.weight", 1)):
            for i, half in enumerate(np.split(weights.pop(name), 2, axis)):
                weights[f"{name}-TP-{i}"] = half

    source = small_hf(tmp_path / "hf", "mixtral", mutate=split)
    message = refused(source)
    assert "tensor-parallel" in message and "-TP-0" in message


def test_case_2_6_tensor_parallel_files_are_refused(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "mixtral")
    (source / "model.safetensors").rename(source / "model-00001-TP-000.safetensors")
    assert "tensor-parallel" in refused(source)


def test_case_2_6_half_a_matrix_is_refused_by_its_shape(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"

    def halve(weights: dict[str, Any]) -> None:
        weights[name] = weights[name][:, :12].copy()

    source = small_hf(tmp_path / "hf", "mixtral", mutate=halve)
    message = refused(source)
    assert name in message and "hidden size by expert width" in message and "[64, 12]" in message


# ---------------------------------------------------------------- 2.7 mixed written forms


def test_case_2_7_layers_in_different_forms_are_fine(tmp_path: Path) -> None:
    spec = tm.default_spec("qwen3_moe", layers=2)

    def mix(weights: dict[str, Any]) -> dict[str, Any]:
        coded("qwen3_moe", spec)(weights)
        first = {n: v for n, v in weights.items() if ".layers.1." not in n}
        return first | tm.fuse("qwen3_moe", {n: v for n, v in weights.items() if ".layers.1." in n})

    repack(tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, mutate=mix), tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)


def test_case_2_7_one_slot_in_two_forms_names_both(tmp_path: Path) -> None:
    def both(weights: dict[str, Any]) -> dict[str, Any]:
        return weights | tm.fuse(
            "qwen3_moe", {n: v + 1 for n, v in weights.items() if ".layers.0.mlp.experts" in n}
        )

    source = small_hf(tmp_path / "hf", "qwen3_moe", mutate=both)
    message = refused(source)
    assert "there twice" in message
    assert "'model.layers.0.mlp.experts.0.down_proj.weight'" in message
    assert "'model.layers.0.mlp.experts.down_proj'" in message


def test_case_2_7_one_resident_slot_under_two_names_names_both(tmp_path: Path) -> None:
    def both(weights: dict[str, Any]) -> None:
        gate = weights["model.layers.0.block_sparse_moe.gate.weight"]
        weights["model.layers.0.mlp.gate.weight"] = gate

    source = small_hf(tmp_path / "hf", "mixtral", mutate=both)
    message = refused(source)
    assert "layers.0.router is there twice" in message
    assert "block_sparse_moe.gate.weight" in message and "mlp.gate.weight" in message


# ---------------------------------------------------------------- 2.8 the expert axis of GGUF


@pytest.mark.parametrize("sizes", [(16, 16, 16), (16, 8, 40)])
def test_case_2_8_the_expert_axis_of_gguf_is_fixed(
    tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    hidden, width, experts = sizes
    spec = tm.default_spec(
        "olmoe", hidden=hidden, width=width, experts=experts, heads=2, kv_heads=1, head_dim=8,
        layers=1,
    )  # fmt: skip

    def fill(stored: dict[str, tm.GgufTensor]) -> None:
        for name, tensor in stored.items():
            if name.endswith("_exps.weight"):
                numbers = np.arange(tensor.data.size, dtype=np.float32)
                stored[name] = tm.GgufTensor(numbers.reshape(tensor.data.shape), _T.F32)

    path = tm.write_gguf(tmp_path / "m.gguf", "olmoe", spec, mutate=fill)[0]
    repack(path, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        for expert in range(experts):
            first = expert * hidden * width
            for part in PARTS:
                found = container.dequantize_part(0, expert, part).ravel()
                np.testing.assert_array_equal(found, np.arange(first, first + hidden * width))


def test_case_2_8_expert_count_must_equal_the_axis(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf", "olmoe", metadata={"olmoe.expert_count": 12})
    assert "the metadata say 12 experts, but layer 0 has 5" in refused(path)
    absent = small_gguf(
        tmp_path / "a.gguf",
        "olmoe",
        metadata={"olmoe.expert_count": tm.DELETE},
    )
    assert "olmoe.expert_count" in refused(absent)
