"""Families beyond names: where every weight goes, and the cases of their switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from gguf.quants import dequantize, quantize
from oracle import cases
from oracle.cases import CASES
from repack_util import check_codes, code, map_gguf, map_hf, mapped, refused
from tiny_containers import Containers, logits

import colibri_tools
from colibri_tools.container.format import Group, PartRole
from colibri_tools.engine import Engine, estimate
from colibri_tools.repack import repack
from colibri_tools.verify import verify

FAMILIES = tuple(tm.more.FAMILIES)
PROMPT = tm.prompt(7)
LONG = tm.prompt(40)


# ---------------------------------------------------------------- fill values


def coded(family: str, spec: tm.TinySpec) -> Any:
    """A change of the unfused form: every expert matrix gets values that encode their place."""
    module = tm.more.FAMILIES[family].experts

    def change(weights: tm.Tensors) -> None:
        for layer in range(spec.layers):
            for expert in range(spec.experts):
                for part, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                    key = f"model.layers.{layer}.{module}.{expert}.{name}.weight"
                    if key in weights:
                        weights[key] = code(layer, expert, part, *weights[key].shape)

    return change


@pytest.mark.parametrize("form", ["per-expert", "fused", "unfused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_value_of_a_hf_checkpoint_is_at_its_place(
    containers: Containers, family: str, form: str
) -> None:
    spec = tm.default_spec(family)
    check_codes(containers.hf(family, spec, form=form, mutate=coded(family, spec)), spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_value_of_a_gguf_checkpoint_is_at_its_place(
    containers: Containers, family: str
) -> None:
    spec = tm.default_spec(family)

    def mutate(_: dict[str, tm.GgufTensor]) -> dict[str, tm.GgufTensor]:
        weights = tm.tensors(family, spec)
        coded(family, spec)(weights)
        return tm.encode_gguf(tm.gguf_values(family, spec, weights), tm._T.F32)

    check_codes(containers.gguf(family, spec, mutate=mutate), spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_byte_is_the_same_in_every_written_form(
    containers: Containers, family: str
) -> None:
    """Tensors outside the experts and biases of experts: the unfused form names each of them, and
    disturbing any of these moves the logits (test_mutation)."""
    spec = tm.default_spec(family, attention_bias=True)
    with colibri_tools.open(containers.hf(family, spec, form="unfused")) as plain:
        for form in ("per-expert", "fused"):
            with colibri_tools.open(containers.hf(family, spec, form=form)) as other:
                assert other.tensors.keys() == plain.tensors.keys()
                for name, tensor in plain.tensors.items():
                    assert other.tensors[name].sha256 == tensor.sha256, name
                for row in range(len(plain.rows)):
                    for expert in range(plain.rows[row].n_experts):
                        ours, theirs = plain.cell(row, expert), other.cell(row, expert)
                        assert np.array_equal(ours["sha256"], theirs["sha256"])


@pytest.mark.parametrize("family", FAMILIES)
def test_containers_verify_against_their_sources(tmp_path: Path, family: str) -> None:
    spec = tm.default_spec(family, attention_bias=True)
    sources = [tm.write_hf(tmp_path / "hf", family, spec)]
    sources += tm.write_gguf(tmp_path / "model.gguf", family, spec)
    for number, source in enumerate(sources):
        path = tmp_path / f"{number}.colibri"
        repack(source, path)
        report = verify(path, against=source)
        assert [error.message for error in report.errors] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_gives_the_same_bits(containers: Containers, family: str) -> None:
    """More positions than attention sums up at once, with one token at a time among the batches."""
    path = containers.hf(family, tm.default_spec(family, max_position=512, layers=4))
    tokens = tm.prompt(290)
    smallest = estimate(path).min_cache_bytes
    expected = logits(path, tokens, batch_size=290)
    for threads, batch, cache in ((2, 64, None), (3, 7, smallest), (1, 1, smallest)):
        with Engine(path, threads=threads, batch_size=batch, expert_cache=cache) as engine:
            assert np.array_equal(engine.forward(tokens), expected), (threads, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_precision_is_near_and_the_same_for_every_setting(
    containers: Containers, family: str
) -> None:
    """All experts are chosen, so that no choice hangs on what 8 bits of activations lose: a few
    percent in models of random weights, Mixtral too. SparseMixer's weights jump at a threshold."""
    n = 2 if family == "phimoe" else 4
    spec = tm.default_spec(family, experts=n, top_k=n, width=64, max_position=512)
    path = containers.gguf(family, spec, types=tm.GGMLQuantizationType.Q8_0)
    exact = logits(path, LONG)
    fast = logits(path, LONG, precision="fast")
    assert 0 < cases.error(fast, exact) < (1 if family == "phimoe" else 0.1)
    for threads, batch in ((3, 7), (1, 1)):
        with Engine(path, threads=threads, batch_size=batch, precision="fast") as engine:
            assert np.array_equal(engine.forward(LONG), fast), (threads, batch)


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("form", ["per-expert", "fused"])
def test_case_2_3_gate_is_the_first_half_of_granite(containers: Containers, form: str) -> None:
    spec = tm.default_spec("granitemoe", layers=1)

    def mutate(weights: tm.Tensors) -> None:
        for name in weights:
            for part, value in (("gate_proj", 1.0), ("up_proj", -2.0)):
                if f".{part}.weight" in name:
                    weights[name] = np.full_like(weights[name], value)

    with colibri_tools.open(containers.hf("granitemoe", spec, form=form, mutate=mutate)) as found:
        for expert in range(spec.experts):
            assert (found.dequantize_part(0, expert, PartRole.GATE) == 1.0).all()
            assert (found.dequantize_part(0, expert, PartRole.UP) == -2.0).all()


def test_case_3_7_granite_and_mixtral_weights_are_equal(containers: Containers) -> None:
    """Softmax over the chosen, or over all and divided by the sum of the chosen: the same numbers
    up to rounding. The first layer's router sees the same input when attention adds nothing."""
    spec = tm.default_spec("granitemoe", norm_topk=None)
    gate = tm.tensors("mixtral", spec)["model.layers.0.block_sparse_moe.gate.weight"]
    embedding = tm.tensors("mixtral", spec)["model.embed_tokens.weight"]
    norm = tm.tensors("mixtral", spec)["model.layers.0.post_attention_layernorm.weight"]

    def mutate(weights: tm.Tensors) -> None:
        for name in weights:
            if name.endswith("o_proj.weight"):
                weights[name] = np.zeros_like(weights[name])
            elif name in ("model.layers.0.block_sparse_moe.router.layer.weight",):
                weights[name] = gate
            elif name == "model.embed_tokens.weight":
                weights[name] = embedding
            elif name == "model.layers.0.post_attention_layernorm.weight":
                weights[name] = norm

    found = []
    plain = {"embedding_multiplier": 1.0}
    for family, more in (("granitemoe", {"overrides": plain}), ("mixtral", {})):
        with Engine(containers.hf(family, spec, mutate=mutate, **more), threads=1) as engine:
            engine.forward(PROMPT, trace=True)
            found.append((engine.choices[0], engine.choice_weights[0]))
    assert np.array_equal(found[0][0], found[1][0])
    # 12 * eps: sums of three weights and the quotient
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6)
    np.testing.assert_allclose(found[0][1].sum(axis=-1), 1, atol=1e-6)


_MULTIPLIERS = {
    "embedding_multiplier": ("graph.embedding_scale", 12.0),
    "residual_multiplier": ("graph.residual_scale", 0.22),
    "attention_multiplier": ("graph.attention_scale", 0.015625),
    "logits_scaling": ("graph.logit_divisor", 8.0),
}


@pytest.mark.parametrize("key", _MULTIPLIERS)
def test_case_9_4_an_absent_multiplier_is_one(tmp_path: Path, key: str) -> None:
    """As GraniteMoeConfig has it; for attention that is not 1/sqrt(head size)."""
    switch, value = _MULTIPLIERS[key]
    stated = map_hf(tmp_path / "a", "granitemoe", overrides={key: value}).spec
    absent = map_hf(tmp_path / "b", "granitemoe", overrides={key: tm.DELETE}).spec
    assert stated[switch] == value
    assert absent.get(switch, 1.0) == 1.0


def test_case_9_4_multipliers_of_gguf(tmp_path: Path) -> None:
    spec = map_gguf(tmp_path, "granitemoe").spec
    assert spec["graph.logit_divisor"] == 8.0 and spec["graph.embedding_scale"] == 12.0
    absent = {"granitemoe.logit_scale": tm.DELETE}
    path = tm.write_gguf(tmp_path / "absent.gguf", "granitemoe", metadata=absent)[0]
    assert "granitemoe.logit_scale" in refused(path)


# ---------------------------------------------------------------- gpt-oss

_MXFP4 = tm.GGMLQuantizationType.MXFP4


def test_case_2_4_gate_is_the_even_columns_of_gpt_oss(containers: Containers) -> None:
    """In the form that transformers writes, from which the oracle's logits are; biases too."""
    spec = tm.default_spec("gpt_oss", layers=1)

    def mutate(weights: tm.Tensors) -> None:
        for name in weights:
            for part, value in (("gate_proj", 1.0), ("up_proj", -2.0)):
                if f".{part}." in name:
                    weights[name] = np.full_like(weights[name], value)

    source = tm.write_hf(containers.folder() / "hf", "gpt_oss", spec, mutate=mutate)
    stored = tm.read_hf(source)["model.layers.0.mlp.experts.gate_up_proj"]
    assert stored.shape == (spec.experts, spec.hidden, 2 * spec.width)
    assert (stored[..., ::2] == 1.0).all() and (stored[..., 1::2] == -2.0).all()
    with colibri_tools.open(containers.from_source(source)) as found:
        for expert in range(spec.experts):
            for part, value in ((PartRole.GATE, 1.0), (PartRole.UP, -2.0)):
                bias = PartRole(part + PartRole.GATE_BIAS - PartRole.GATE)
                assert (found.dequantize_part(0, expert, part) == value).all()
                assert (found.dequantize_part(0, expert, bias) == value).all()


def blocks_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hugging Face's MXFP4 blocks and scales of GGML's MXFP4 rows [.., n * 17]."""
    rows = rows.reshape(*rows.shape[:-1], -1, 17)
    low, high = rows[..., 1:] & 15, rows[..., 1:] >> 4
    codes = np.concatenate([low, high], axis=-1)  # GGML: code i and code i + 16 in a byte
    return codes[..., ::2] | (codes[..., 1::2] << 4), np.ascontiguousarray(rows[..., 0])


def mxfp4_form(weights: tm.Tensors) -> tm.Tensors:
    """gpt-oss as it is published: experts as `_blocks` and `_scales`."""
    out = {}
    for name, value in tm.more.FAMILIES["gpt_oss"].saved(weights).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = quantize(np.ascontiguousarray(value.swapaxes(1, 2)), _MXFP4)
            out[name + "_blocks"], out[name + "_scales"] = blocks_of(rows)
        else:
            out[name] = value
    return out


def test_gpt_oss_with_mxfp4_experts(containers: Containers) -> None:
    """The published form against the same numbers in the form of the oracle, and against GGUF."""
    spec = tm.default_spec("gpt_oss", width=32, layers=2)

    def as_mxfp4(weights: tm.Tensors) -> None:
        for name in weights:
            if ".experts." in name and name.endswith(".weight"):
                rows = quantize(weights[name], _MXFP4)
                weights[name] = dequantize(rows, _MXFP4)

    plain = logits(containers.hf("gpt_oss", spec, mutate=as_mxfp4), LONG)
    weights = mxfp4_form(tm.tensors("gpt_oss", spec))
    overrides = {"quantization_config": {"quant_method": "mxfp4"}}
    source = tm.write_hf(containers.folder() / "hf", "gpt_oss", spec, overrides=overrides)
    tm.write_safetensors(source / "model.safetensors", weights)
    path = containers.from_source(source)
    with colibri_tools.open(path) as found:
        types = {part.role: part.dtype.name for part in found.layouts[0].parts}
        assert types[PartRole.GATE] == types[PartRole.DOWN] == "mxfp4"
    blocks = logits(path, LONG)
    assert cases.error(blocks, plain) <= cases.LOGIT_TOLERANCE

    def kind(name: str) -> tm.GGMLQuantizationType:
        return _MXFP4 if "_exps.weight" in name else tm._T.F32

    assert np.array_equal(logits(containers.gguf("gpt_oss", spec, types=kind), LONG), blocks)


def test_gpt_oss_without_rope_parameters_has_those_of_its_config_class(tmp_path: Path) -> None:
    absent = {"rope_parameters": tm.DELETE, "max_position_embeddings": tm.DELETE}
    spec = map_hf(tmp_path / "a", "gpt_oss", overrides=absent).spec
    rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "rope_theta": 150000.0}
    rope["original_max_position_embeddings"] = 4096
    stated = map_hf(tmp_path / "b", "gpt_oss", overrides={"rope_parameters": rope}).spec
    assert spec["graph.rope_inv_freq"] == stated["graph.rope_inv_freq"]
    assert spec["graph.rope_factor"] == stated["graph.rope_factor"] > 1.3
    assert spec["context_length"] == 131072


def test_windows_of_gpt_oss_are_in_every_second_layer(tmp_path: Path) -> None:
    absent = {"layer_types": tm.DELETE}
    stated = map_hf(tmp_path / "a", "gpt_oss").spec
    assert stated["graph.windows"] == [10, 0, 10]
    assert map_hf(tmp_path / "b", "gpt_oss", overrides=absent).spec == stated
    for name, pattern, windows in (
        ("period", 3, [10, 10, 0]),
        ("array", [False, True, True], [0, 10, 10]),
    ):
        keys = {"gpt-oss.attention.sliding_window_pattern": pattern}
        found = map_gguf(tmp_path / name, "gpt_oss", metadata=keys).spec
        assert found["graph.windows"] == windows and found["executable"]


def test_sinks_are_no_option_of_gpt_oss(tmp_path: Path) -> None:
    def cut(weights: tm.Tensors) -> tm.Tensors:
        return {n: v for n, v in weights.items() if "sinks" not in n}

    source = tm.write_hf(tmp_path / "hf", "gpt_oss", mutate=cut)
    assert "layers.0.attn_sinks" in refused(source)


def test_one_bias_of_an_expert_is_missing(tmp_path: Path) -> None:
    def cut(weights: tm.Tensors) -> None:
        del weights["model.layers.1.mlp.experts.3.up_proj.bias"]

    source = tm.write_hf(tmp_path / "hf", "gpt_oss", mutate=cut, form="unfused")
    assert "layer 1 expert 3 up_bias" in refused(source)


# ---------------------------------------------------------------- Phi-3.5-MoE


def lacks(mapping: Any) -> str:
    assert mapping.problems == []
    assert mapping.spec["executable"] is False
    return str(mapping.spec["executable_lacks"])


def longrope(tmp_path: Path, **changes: Any) -> str:
    """What is wrong with a changed config of longrope."""
    rope = {**(CASES["phimoe-longrope-long"].spec.rope or {}), "rope_theta": 1e4, **changes}
    rope = {name: value for name, value in rope.items() if value is not None}
    return refused(tm.write_hf(tmp_path / "hf", "phimoe", overrides={"rope_parameters": rope}))


@pytest.mark.parametrize("name", ["long_factor", "short_factor", "long_mscale", "short_mscale"])
def test_longrope_of_phimoe_needs_all_its_keys(tmp_path: Path, name: str) -> None:
    assert f"needs '{name}'" in longrope(tmp_path, **{name: None})


@pytest.mark.parametrize("values", [[1.0] * 7, [1.0] * 7 + [0.0], "1"])
def test_factors_of_longrope_are_positive_numbers_one_per_pair(tmp_path: Path, values: Any) -> None:
    assert "expected" in longrope(tmp_path, long_factor=values)


def test_mscales_of_other_rope_are_not_executed(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    mscales = linear | {"long_mscale": 1.2, "short_mscale": 1.1}
    found = map_hf(tmp_path / "linear", "phimoe", overrides={"rope_parameters": mscales})
    assert "mscales" in lacks(found)
    rope = dict(CASES["phimoe-longrope-long"].spec.rope or {}, rope_theta=1e4)
    found = map_hf(tmp_path / "other", "mixtral", overrides={"rope_parameters": rope})
    assert "mscales" in lacks(found)


def test_longrope_of_gguf_is_kept_and_needs_both_tensors(tmp_path: Path) -> None:
    spec = CASES["phimoe-longrope-long"].spec
    found = map_gguf(tmp_path / "both", "phimoe", spec)
    assert found.spec["executable"] and found.spec["graph.rope_original_context"] == 64
    kept = {r.role.label: r.group for r in found.residents if r.role.label.startswith("rope")}
    assert kept == dict.fromkeys(("rope_factors_short", "rope_factors_long"), Group.OPTIONAL)

    def cut(stored: dict[str, tm.GgufTensor]) -> None:
        del stored["rope_factors_long.weight"]

    (path,) = tm.write_gguf(tmp_path / "m.gguf", "phimoe", spec, mutate=cut)
    assert "short and long" in refused(path)


def test_the_context_chooses_the_factors_of_longrope(containers: Containers) -> None:
    """Not the length of the text: a short text in a long context takes the long ones."""
    case = CASES["phimoe-longrope-short"]
    path, tokens = containers.hf("phimoe", case.spec), case.tokens(0)
    short, at, beyond, default = (
        logits(path, tokens, **ctx) for ctx in ({"ctx": 50}, {"ctx": 64}, {"ctx": 65}, {})
    )
    assert np.array_equal(short, at) and np.array_equal(beyond, default)
    assert cases.error(beyond, at) > 1e-2


@pytest.mark.parametrize("top_k", [1, 3])
def test_sparsemixer_is_defined_for_two_experts(tmp_path: Path, top_k: int) -> None:
    found = map_hf(tmp_path, "phimoe", tm.default_spec("phimoe", top_k=top_k))
    assert f"{top_k} experts per token" in lacks(found)


def test_a_layer_norm_without_its_bias_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("model.norm", "model.layers.1.input_layernorm")):

        def cut(weights: tm.Tensors, name: str = name) -> None:
            del weights[name + ".bias"]

        source = tm.write_hf(tmp_path / str(number), "phimoe", mutate=cut)
        assert "norm_bias" in refused(source)


def test_an_output_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    source = tm.write_hf(tmp_path / "hf", "phimoe", overrides={"lm_head_bias": False})
    assert "lm_head.bias" in refused(source)


# ---------------------------------------------------------------- Llama 4


def test_llama4_layers_are_derived_where_the_config_lists_none(tmp_path: Path) -> None:
    spec = tm.default_spec("llama4", window=10)
    stated = map_hf(tmp_path / "a", "llama4", spec).spec
    assert stated["graph.rope_layers"] == [1, 1, 1, 0]
    assert stated["graph.chunks"] == [10, 10, 10, 0]
    assert stated["graph.windows"] == [0, 0, 0, 0]
    assert stated["moe_layers"] == [0, 1, 0, 1]
    for number, value in enumerate((tm.DELETE, [], None)):
        overrides = {"no_rope_layers": value, "layer_types": value}
        found = map_hf(tmp_path / str(number), "llama4", spec, overrides=overrides).spec
        assert found == stated
    third = {"no_rope_layers": tm.DELETE, "no_rope_layer_interval": 3}
    found = map_hf(tmp_path / "third", "llama4", spec, overrides=third).spec
    assert found["graph.rope_layers"] == [1, 1, 0, 1]
    assert found["graph.chunks"] == [10, 10, 0, 10]
    null = {"attention_chunk_size": None, "layer_types": tm.DELETE, "no_rope_layers": []}
    found = map_hf(tmp_path / "null", "llama4", spec, overrides=null).spec
    assert "graph.chunks" not in found and found["graph.rope_layers"] == [1, 1, 1, 0]
    full = {"layer_types": ["full_attention"] * 4}
    assert "graph.chunks" not in map_hf(tmp_path / "full", "llama4", spec, overrides=full).spec


def test_llama4_moe_layers_may_be_listed(tmp_path: Path) -> None:
    listed = {"moe_layers": [1, 3], "interleave_moe_layer_step": tm.DELETE}
    assert map_hf(tmp_path / "a", "llama4", overrides=listed).problems == []
    other = map_hf(tmp_path / "b", "llama4", overrides={**listed, "moe_layers": [0, 3]})
    assert any(problem.startswith("layer 0: an MoE layer by the") for problem in other.problems)


def test_llama4_temperature_written_as_a_number_is_on(tmp_path: Path) -> None:
    number = {"attn_temperature_tuning": 4}
    spec = map_hf(tmp_path / "a", "llama4", overrides=number).spec
    assert spec["graph.temperature_scale"] == 0.1
    off = map_hf(tmp_path / "b", "llama4", overrides={"attn_temperature_tuning": False}).spec
    assert "graph.temperature_scale" not in off


def test_llama4_inside_an_image_model_is_the_same_model(tmp_path: Path) -> None:
    source = tm.write_hf(tmp_path / "hf", "llama4")
    config = json.loads((source / "config.json").read_text())
    nested = {"model_type": "llama4", "text_config": config, "vision_config": {}}
    nested["architectures"] = ["Llama4ForConditionalGeneration"]
    (source / "config.json").write_text(json.dumps(nested))
    weights = {f"language_model.{name}": value for name, value in tm.read_hf(source).items()}
    for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        weights[name] = np.ones((3, 5), np.float32)
    tm.write_safetensors(source / "model.safetensors", weights)
    found, plain = mapped(source), map_hf(tmp_path / "plain", "llama4", tm.default_spec("llama4"))
    assert found.problems == []
    assert found.spec == plain.spec
    assert len(found.dropped["vision-tower"]) == 2


def test_llama4_of_gguf_with_a_window_of_zero_has_neither_chunks_nor_gaps(tmp_path: Path) -> None:
    spec = map_gguf(tmp_path, "llama4", tm.default_spec("llama4")).spec
    assert spec["graph.chunks"] == [8192, 8192, 8192, 0]
    zero = {"llama4.attention.sliding_window": 0}
    spec = map_gguf(tmp_path / "z", "llama4", tm.default_spec("llama4"), metadata=zero).spec
    assert "graph.chunks" not in spec and "graph.rope_layers" not in spec


# ---------------------------------------------------------------- more


def test_halves_of_unequal_height_are_refused(tmp_path: Path) -> None:
    spec = tm.default_spec("granitemoeshared")
    source = tm.write_hf(tmp_path / "hf", "granitemoeshared", spec)
    weights = tm.read_hf(source)
    name = "model.layers.1.shared_mlp.input_linear.weight"
    weights[name] = weights[name][:-1]
    tm.write_safetensors(source / "model.safetensors", weights)
    assert name in refused(source)


def test_a_constant_scale_shows(containers: Containers) -> None:
    """Twice the divisor halves every logit, to the bit."""
    whole = logits(containers.hf("granitemoe"), PROMPT)
    half = logits(containers.hf("granitemoe", overrides={"logits_scaling": 16.0}), PROMPT)
    assert np.array_equal(half, whole / 2)
