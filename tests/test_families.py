"""The family table and what is resolved from it: names, hyper-parameters, rope, windows, tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_models as rm
import tiny_models as tm
from repack_util import map_gguf, map_hf, mapped, refused, small_gguf, small_hf, small_spec

from colibri_tools.container.format import PartRole, Role
from colibri_tools.container.spec import OPTIONAL_SPEC_KEYS, SPEC_KEYS
from colibri_tools.errors import ColibriError, SourceError
from colibri_tools.families import FAMILIES, Family, Form, TensorRule
from colibri_tools.families.checks import DIM_TEXT
from colibri_tools.families.common import GGUF_KEYS
from colibri_tools.families.naming import NameTable, choose_prefix
from colibri_tools.families.rope import RopeSettings, hf_rope, resolve_rope
from colibri_tools.families.schema import REQUIRED
from colibri_tools.planner import RepackOptions, plan_repack
from colibri_tools.sources import Source, open_source

FAMILY_NAMES = [family.name for family in FAMILIES]


# ---------------------------------------------------------------- the table


def test_every_id_belongs_to_one_family() -> None:
    for kind in ("Hugging Face", "GGUF"):
        forms = [dict(family.forms).get(kind) for family in FAMILIES]
        ids = [name for form in forms if form is not None for name in form.ids]
        assert len(ids) == len(set(ids))
    assert len(FAMILY_NAMES) == len(set(FAMILY_NAMES))
    assert set(FAMILY_NAMES) <= {*tm.ALL_FAMILIES, *rm.RECIPES}


_ONE_FORM_ONLY = {
    Role.ROPE_FACTORS,
    Role.ROPE_FACTORS_SHORT,
    Role.ROPE_FACTORS_LONG,
    Role.ATTN_K_B,
    Role.ATTN_V_B,
}
"""GGUF's own: frequencies as a tensor, and the second generation of latent attention."""


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
def test_both_forms_of_a_family_fill_the_same_slots(family: Family) -> None:
    roles = [
        {role for r in form.tensors for role in r.roles} - _ONE_FORM_ONLY for form in _forms(family)
    ]
    assert roles[0] == roles[-1]
    parts = [{p for rule in form.experts for p in rule.parts} for form in _forms(family)]
    assert parts[0] == parts[-1] >= {PartRole.GATE, PartRole.UP, PartRole.DOWN}


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_NAMES)
def test_a_form_has_no_name_twice_and_a_default_for_every_key(family: Family) -> None:
    for form in _forms(family):
        patterns = [rule.pattern for rule in form.tensors]
        patterns += [rule.pattern for rule in form.experts]
        assert len(patterns) == len(set(patterns))
        assert set(form.keys) <= set(form.defaults)
        required = {name for name, value in form.defaults.items() if value is REQUIRED}
        assert required <= set(form.keys)


def _forms(family: Family) -> list[Form]:
    return [form for _, form in family.forms]


def test_numbers_in_names_have_one_spelling() -> None:
    form = FAMILIES[0].hf
    table = NameTable(form, form.prefixes[0])
    at = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
    match = table.match(at.format(3, 10))
    assert match is not None and (match.layer, match.expert) == (3, 10)
    for layer, expert in ((3, "010"), ("03", 1), (3, "-1"), (3, "x"), (3, "\u0663"), (3, "9" * 9)):
        assert table.match(at.format(layer, expert)) is None
    assert table.match("model.layers.3.block_sparse_moe.gate.weight.1") is None


def test_the_prefix_that_most_names_fit_is_chosen() -> None:
    form = FAMILIES[2].hf
    names = [f"layers.{i}.input_layernorm.weight" for i in range(3)]
    for prefix in ("model.", "model.language_model.", "language_model.model.", ""):
        assert choose_prefix(form, [prefix + name for name in names]).body == prefix


def test_every_rule_shape_has_a_meaning() -> None:
    known = {*DIM_TEXT}
    for family in FAMILIES:
        for form in _forms(family):
            for rule in form.tensors:
                assert isinstance(rule, TensorRule) and set(rule.shape) <= known


# ---------------------------------------------------------------- spec


@pytest.mark.parametrize("family", tm.ALL_FAMILIES)
def test_the_spec_has_every_key_of_the_page(tmp_path: Path, family: str) -> None:
    for mapping in (map_hf(tmp_path, family), map_gguf(tmp_path, family)):
        assert mapping.problems == []
        missing = set(SPEC_KEYS) - set(mapping.spec) - {"order"} - OPTIONAL_SPEC_KEYS
        assert not missing
        assert set(mapping.spec) <= set(SPEC_KEYS)


@pytest.mark.parametrize("family", tm.ALL_FAMILIES)
def test_old_and_new_configs_and_gguf_give_one_spec(tmp_path: Path, family: str) -> None:
    new = map_hf(tmp_path / "new", family).spec
    old = map_hf(tmp_path / "old", family, old_config=True).spec
    assert new == old
    gguf = map_gguf(tmp_path, family).spec
    gguf["source_kind"] = "safetensors"
    if tm.gguf_permuted(family):
        assert gguf.pop("graph.rope_pairing") == "adjacent"
        assert new.pop("graph.rope_pairing") == "half"
    for key, value in new.items():  # GGUF stores single precision
        if isinstance(value, float):
            new[key], gguf[key] = np.float32(value), np.float32(gguf[key])
    assert gguf == new


@pytest.mark.parametrize("family", [name for name in rm.RECIPES if name != "flex_olmo"])
def test_gguf_of_a_row_family_gives_the_spec_of_its_checkpoint(tmp_path: Path, family: str) -> None:
    hf, gguf = map_hf(tmp_path, family).spec, map_gguf(tmp_path, family).spec
    for key in ("graph.norm_eps", "graph.router_scale"):
        assert np.float32(gguf.pop(key)) == np.float32(hf.pop(key))
    pairing = (hf.pop("graph.rope_pairing"), gguf.pop("graph.rope_pairing"))
    assert pairing[0] == pairing[1] or (family, *pairing) == ("deepseek", "half", "adjacent")
    for spec in (hf, gguf):  # a row for two, and what GGUF has no key for
        spec |= {"source_kind": "", "family": "", "graph.router_norm_min": 0.0}
    assert gguf == hf


_MTP = {
    "deepseek_v3": ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight"],
    "glm4_moe": ["model.layers.3.shared_head.norm.weight", "model.layers.3.enorm.weight"],
    "ernie4_5_moe": ["model.mtp_block.0.norm1.weight", "model.mtp_linear_proj.0.weight"],
    "exaone_moe": ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"],
}


@pytest.mark.parametrize("family", _MTP)
def test_case_1_5_multi_token_prediction_of_these_families_is_left_out(
    tmp_path: Path, family: str
) -> None:
    def add(weights: dict[str, Any]) -> None:
        weights |= {name: np.ones((4, 4), np.float32) for name in _MTP[family]}

    plain = map_hf(tmp_path / "plain", family)
    more = map_hf(tmp_path / "more", family, mutate=add, overrides={"num_nextn_predict_layers": 1})
    assert more.dropped["mtp"] == sorted(_MTP[family])
    assert more.spec == plain.spec


def test_null_is_none_where_that_is_a_value(tmp_path: Path) -> None:
    off = map_hf(tmp_path / "off", "dots1", overrides={"sliding_window": None}).spec
    assert off["graph.windows"] == [0, 0, 0]
    absent = map_hf(tmp_path / "absent", "dots1", overrides={"sliding_window": tm.DELETE}).spec
    assert absent["graph.windows"] == [0, 4096, 4096]
    heads = {"num_key_value_heads": None, "num_attention_heads": 2}
    spec = small_spec("mixtral", heads=2)
    assert map_hf(tmp_path, "mixtral", spec, overrides=heads).spec["graph.n_kv_heads"] == 2


def test_parameters_are_counted_once_and_per_token(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe", tied=True)
    weights = tm.tensors("qwen3_moe", spec)
    mapping = map_hf(tmp_path, "qwen3_moe", spec)
    assert mapping.spec["total_params"] == sum(w.size for w in weights.values())
    expert = 3 * spec.width * spec.hidden
    embedding = spec.vocab * spec.hidden
    others = sum(w.size for n, w in weights.items() if ".experts." not in n) - embedding
    routed = spec.layers * spec.top_k * expert
    assert mapping.spec["active_params"] == others + embedding + spec.hidden + routed


def test_defaults_that_the_source_does_not_state_are_named(tmp_path: Path) -> None:
    mapping = map_hf(tmp_path, "qwen3_moe", overrides={"norm_topk_prob": tm.DELETE})
    assert mapping.spec["graph.router_norm"] is False
    assert any("router_norm = false" in note for note in mapping.notes)
    assert not any("router_norm" in note for note in map_hf(tmp_path, "qwen3_moe").notes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", "8"),
        ("num_attention_heads", True),
        ("num_attention_heads", -8),
        ("num_attention_heads", 2**40),
        ("rms_norm_eps", "1e-6"),
        ("norm_topk_prob", 1),
        ("mlp_only_layers", "0"),
        ("mlp_only_layers", [0.5]),
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_theta": "x"}),
        ("rope_parameters", {"rope_theta": 0.0}),
        ("num_hidden_layers", tm.DELETE),
        ("hidden_size", None),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
    ],
)
def test_an_absurd_hyper_parameter_is_named(tmp_path: Path, key: str, value: Any) -> None:
    source = small_hf(tmp_path / "hf", "qwen3_moe", overrides={key: value})
    message = refused(source)
    named = {"num_key_value_heads": "key/value heads", "num_hidden_layers": "layers"}
    inner = "rope" if "rope" in key else named.get(key, key)
    assert inner in message


def test_per_layer_counts_of_gguf_that_agree_are_one_number(tmp_path: Path) -> None:
    arrays = {"qwen3moe.attention.head_count": [8, 8, 8]}
    assert map_gguf(tmp_path, "qwen3_moe", metadata=arrays).spec["graph.n_heads"] == 8
    odd = {"qwen3moe.attention.head_count": [8, 4, 8]}
    path = tm.write_gguf(tmp_path / "odd.gguf", "qwen3_moe", metadata=odd)[0]
    assert "head_count" in refused(path)


def test_what_the_engine_lacks_is_said_and_does_not_stop_a_repack(tmp_path: Path) -> None:
    mapping = map_hf(tmp_path, "mixtral", overrides={"hidden_act": "gelu"})
    assert mapping.problems == []
    assert mapping.spec["executable"] is False
    assert "gelu" in mapping.spec["executable_lacks"]
    assert any("will not run" in warning for warning in mapping.warnings)
    unknown = map_gguf(tmp_path, "qwen3_moe", metadata={"qwen3moe.expert_gating_func": 9})
    assert "router score" in unknown.spec["executable_lacks"]


# ---------------------------------------------------------------- rope

# inv_freq and attention_scaling of transformers 5.24's Qwen3MoeRotaryEmbedding, head_dim 8,
# rope_theta 1000, max_position_embeddings 512.
_ROPE = {
    "default": ({}, [1.0, 0.17782793939113617, 0.03162277862429619, 0.005623413249850273], 1.0),
    "linear": (
        {"factor": 4.0},
        [0.25, 0.04445698484778404, 0.007905694656074047, 0.0014058533124625683],
        1.0,
    ),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        [1.0, 0.06430987268686295, 0.0039528473280370235, 0.0007029266562312841],
        1.0,
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 128},
        [1.0, 0.11114246398210526, 0.007905694656074047, 0.0014058533124625683],
        1.138629436111989,
    ),
    "yarn, every key": (
        {
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        [1.0, 0.08255919814109802, 0.007905694656074047, 0.0014058533124625683],
        1.0648216253695715,
    ),
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", _ROPE)
def test_rope_equals_transformers(name: str, old: bool) -> None:
    keys, inv_freq, factor = _ROPE[name]
    rope = {"rope_type": name.split(",")[0], **keys}
    config: dict[str, Any] = {"rope_parameters": {"rope_theta": 1000.0, **rope}}
    if old:
        rope["type"] = rope.pop("rope_type")
        config = {"rope_theta": 1000.0, "rope_scaling": rope}
    found = resolve_rope(hf_rope(config, 1e4, 8, 512))
    assert found.lacks is None and found.warnings == []
    # A float32 power of torch and a rounded double power may differ in the last place.
    np.testing.assert_allclose(found.inv_freq, inv_freq, rtol=3e-7)
    assert found.factor == pytest.approx(factor, rel=1e-12)


def test_gguf_rope_scaling_means_what_transformers_means(tmp_path: Path) -> None:
    for kind, extra in (
        ("linear", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
    ):
        spec = small_spec("qwen3_moe", rope={"rope_type": kind, **extra})
        hf, gguf = (f(tmp_path / kind, "qwen3_moe", spec).spec for f in (map_hf, map_gguf))
        assert hf["graph.rope_inv_freq"] == gguf["graph.rope_inv_freq"]
        assert hf["graph.rope_factor"] == pytest.approx(gguf["graph.rope_factor"], rel=1e-12)


def test_gguf_rope_scale_without_a_type_is_linear(tmp_path: Path) -> None:
    plain = map_gguf(tmp_path, "olmoe").spec["graph.rope_inv_freq"]
    scale = {"olmoe.rope.scaling.factor": 2.0}
    scaled = map_gguf(tmp_path, "olmoe", metadata=scale).spec["graph.rope_inv_freq"]
    np.testing.assert_array_equal(np.array(scaled) * 2, plain)
    none = {**scale, "olmoe.rope.scaling.type": "none"}
    assert map_gguf(tmp_path, "olmoe", metadata=none).spec["graph.rope_inv_freq"] == plain


def test_case_8_2_rope_freqs_of_gguf_are_folded_and_kept_as_optional(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    spec = small_spec("mixtral", rope=rope)
    hf, gguf = map_hf(tmp_path, "mixtral", spec), map_gguf(tmp_path, "mixtral", spec)
    np.testing.assert_allclose(
        gguf.spec["graph.rope_inv_freq"], hf.spec["graph.rope_inv_freq"], rtol=3e-7
    )
    kept = next(r for r in gguf.residents if r.role == Role.ROPE_FACTORS)
    assert (kept.group, kept.shape) == (3, (spec.head_dim // 2,))
    assert any("folded" in note for note in gguf.notes)


def test_case_8_2_rope_freqs_that_cannot_be_divided_by_are_refused(tmp_path: Path) -> None:
    zeros = tm.GgufTensor(np.zeros(8, np.float32), tm._T.F32)
    path = tm.write_gguf(
        tmp_path / "m.gguf", "mixtral", mutate=lambda t: t.update({"rope_freqs.weight": zeros})
    )[0]
    assert "rope_freqs.weight" in refused(path)


@pytest.mark.parametrize("kind", ["dynamic", "mystery"])
def test_rope_that_depends_on_the_length_is_not_executable(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    mapping = map_hf(tmp_path, "olmoe", overrides={"rope_parameters": rope})
    assert mapping.spec["executable"] is False
    assert kind in mapping.spec["executable_lacks"]


def test_case_8_3_unknown_rope_keys_are_named(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "temperature": 3}
    mapping = map_hf(tmp_path, "olmoe", overrides={"rope_parameters": rope})
    assert any("'temperature'" in warning for warning in mapping.warnings)
    assert mapping.spec["executable"] is True


def test_case_8_3_a_missing_rope_key_is_named(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "high_freq_factor": 4.0}
    source = small_hf(tmp_path / "hf", "olmoe", overrides={"rope_parameters": rope})
    assert "'low_freq_factor'" in refused(source)


def test_case_8_5_partial_rotary_of_a_family_without_it_is_not_executable(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    mapping = map_hf(tmp_path, "qwen3_moe", overrides={"rope_parameters": rope})
    assert "partial_rotary_factor" in mapping.spec["executable_lacks"]
    part = map_gguf(tmp_path, "mixtral", metadata={"llama.rope.dimension_count": 8})
    assert part.spec["graph.rope_dim"] == 8 and part.spec["executable"] is True


@pytest.mark.parametrize("dim", [0, 7, 1 << 20])
def test_an_absurd_rope_width_is_refused(dim: int) -> None:
    with pytest.raises(SourceError, match="rotated dimensions"):
        resolve_rope(RopeSettings(dim, 1e4))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_type": "linear", "factor": 1e-320},
        {"rope_type": "linear", "factor": 1e200},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320},
        {"rope_type": "yarn", "factor": 2.0, "beta_slow": -1},
        {"rope_type": "yarn", "factor": True},
        {"rope_type": "default", "rope_theta": 1.0},
        {"rope_type": "default", "rope_theta": 1e308},
    ],
    ids=str,
)
def test_rope_parameters_without_usable_frequencies_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match="rope"):
        resolve_rope(hf_rope({"rope_parameters": {"rope_theta": 1e4, **keys}}, 1e4, 8, 64))


# ---------------------------------------------------------------- windows, attention


def test_windows_of_mixtral_reach_every_layer_when_set(tmp_path: Path) -> None:
    assert map_hf(tmp_path, "mixtral").spec["graph.windows"] == [0, 0, 0]
    spec = small_spec("mixtral", window=7)
    assert map_hf(tmp_path, "mixtral", spec).spec["graph.windows"] == [7, 7, 7]
    assert map_gguf(tmp_path, "mixtral", spec).spec["graph.windows"] == [7, 7, 7]


def test_windows_of_qwen3_need_the_switch(tmp_path: Path) -> None:
    off = {"sliding_window": 9, "use_sliding_window": False}
    assert map_hf(tmp_path, "qwen3_moe", overrides=off).spec["graph.windows"] == [0, 0, 0]
    on = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
    assert map_hf(tmp_path, "qwen3_moe", overrides=on).spec["graph.windows"] == [9, 9, 9]


def test_windows_of_qwen2_follow_the_layer_types(tmp_path: Path) -> None:
    spec = small_spec("qwen2_moe", window=5)
    assert map_hf(tmp_path, "qwen2_moe", spec).spec["graph.windows"] == [5, 0, 5]
    old = map_hf(tmp_path, "qwen2_moe", spec, old_config=True)
    assert old.spec["graph.windows"] == [5, 0, 5]
    first = map_hf(tmp_path, "qwen2_moe", spec, old_config=True, overrides={"max_window_layers": 1})
    assert first.spec["graph.windows"] == [5, 0, 0]
    types = {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
    given = map_hf(tmp_path, "qwen2_moe", spec, overrides=types)
    assert given.spec["graph.windows"] == [0, 0, 5]


def test_windows_that_cannot_be_known_are_not_executable(tmp_path: Path) -> None:
    spec = small_spec("qwen2_moe", window=5)
    assert "window" in map_gguf(tmp_path, "qwen2_moe", spec).spec["executable_lacks"]
    strange = {"layer_types": ["linear_attention"] * 3}
    found = map_hf(tmp_path, "qwen2_moe", overrides=strange).spec
    assert "linear_attention" in found["executable_lacks"]
    sliding = {"layer_types": ["sliding_attention"] * 3}
    found = map_hf(tmp_path, "qwen2_moe", overrides=sliding).spec
    assert "without a window" in found["executable_lacks"]


def test_case_9_1_width_of_the_norm_must_fit_its_placement(tmp_path: Path) -> None:
    """OLMoE norms the whole width before the head split, Qwen3 each head."""
    olmoe = {"self_attn.q_norm.weight": 16, "self_attn.k_norm.weight": 16}
    for family, widths in (("olmoe", olmoe), ("qwen3_moe", {"self_attn.q_norm.weight": 256})):

        def narrow(weights: dict[str, Any], widths: dict[str, int] = widths) -> None:
            for name, n in widths.items():
                weights[f"model.layers.1.{name}"] = np.ones(n, np.float32)

        source = small_hf(tmp_path / family, family, mutate=narrow)
        assert "layers.1.self_attn.q_norm.weight" in refused(source)


def test_case_9_5_biases_are_decided_by_tensors_and_compared_with_the_config(
    tmp_path: Path,
) -> None:
    spec = small_spec("qwen3_moe", attention_bias=True)
    mapping = map_hf(tmp_path, "qwen3_moe", spec)
    assert mapping.spec["graph.qkv_bias"] and mapping.spec["graph.o_bias"]
    unsaid = map_hf(tmp_path, "qwen3_moe", spec, overrides={"attention_bias": tm.DELETE})
    assert unsaid.spec["graph.qkv_bias"] and unsaid.spec["graph.o_bias"]
    denied = map_hf(tmp_path, "qwen3_moe", spec, overrides={"attention_bias": False})
    assert any("turn qkv_bias off" in problem for problem in denied.problems)
    promised = map_hf(tmp_path, "qwen3_moe", overrides={"attention_bias": True})
    assert any("layers.0.attn_q_bias" in problem for problem in promised.problems)


def test_case_9_5_a_bias_in_some_layers_only_is_refused(tmp_path: Path) -> None:
    def drop(weights: dict[str, Any]) -> None:
        del weights["model.layers.1.self_attn.k_proj.bias"]

    source = small_hf(tmp_path / "hf", "qwen2_moe", mutate=drop)
    assert "layers.1.attn_k_bias" in refused(source)


def test_case_9_6_head_size_is_read_and_not_divided(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe")  # 8 heads of 32 in a hidden size of 64
    assert map_hf(tmp_path, "qwen3_moe", spec).spec["graph.head_dim"] == 32
    unsaid = map_hf(tmp_path, "qwen3_moe", spec, overrides={"head_dim": tm.DELETE})
    assert unsaid.spec["graph.head_dim"] == 32
    wrong = map_hf(tmp_path, "qwen3_moe", spec, overrides={"head_dim": 16})
    assert any("heads x head size" in problem for problem in wrong.problems)


def test_clip_of_olmoe_is_kept(tmp_path: Path) -> None:
    spec = small_spec("olmoe", clip_qkv=0.75)
    for mapping in (map_hf(tmp_path, "olmoe", spec), map_gguf(tmp_path, "olmoe", spec)):
        assert mapping.spec["graph.clip_qkv"] == 0.75


# ---------------------------------------------------------------- tokens


def _tokenizer(folder: Path, n_tokens: int, n_added: int = 0) -> None:
    vocab = {f"t{i}": i for i in range(n_tokens)}
    added = [{"id": n_tokens + i, "content": f"<a{i}>"} for i in range(n_added)]
    data = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(data))


def test_case_7_1_padded_rows_are_not_tokens(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    _tokenizer(source, 120, 3)

    found = mapped(source).spec
    assert (found["vocab_size"], found["n_tokens"], found["tokenizer"]) == (131, 123, "hf-json")


def test_case_7_1_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    _tokenizer(source, 120, 12)
    message = refused(source)
    assert "132" in message and "131" in message
    tokens = [f"t{i}" for i in range(132)]
    gguf = tm.write_gguf(tmp_path / "g.gguf", "olmoe", metadata={"tokenizer.ggml.tokens": tokens})
    assert "132" in refused(gguf[0])


def test_tokens_of_a_unigram_tokenizer_are_counted(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    data = {"model": {"type": "Unigram", "vocab": [[f"t{i}", -1.0] for i in range(50)]}}
    (source / "tokenizer.json").write_text(json.dumps(data))

    assert mapped(source).spec["n_tokens"] == 50


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "1"}}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    source = small_hf(tmp_path / "hf", "olmoe")
    (source / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in refused(source)


def test_case_7_4_ends_of_text_are_the_union(tmp_path: Path) -> None:

    source = small_hf(tmp_path / "hf", "mixtral", overrides={"eos_token_id": 2})
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert mapped(source).spec["eos_ids"] == [2, 5]
    _tokenizer(source, 100, 1)
    (source / "tokenizer_config.json").write_text('{"eos_token": {"content": "<a0>"}}')
    assert mapped(source).spec["eos_ids"] == [2, 5, 100]


def test_case_7_4_ends_of_text_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    mapping = map_hf(tmp_path, "olmoe", overrides={"eos_token_id": 50279})
    assert mapping.spec["eos_ids"] == [2]
    assert any("50279" in warning for warning in mapping.warnings)


def test_case_7_4_a_null_end_of_text_is_none_and_an_absent_one_the_default(tmp_path: Path) -> None:

    source = small_hf(tmp_path / "hf", "mixtral", overrides={"eos_token_id": None})
    (source / "generation_config.json").unlink()
    assert mapped(source).spec["eos_ids"] == []
    absent = small_hf(tmp_path / "b", "mixtral", overrides={"eos_token_id": tm.DELETE})
    (absent / "generation_config.json").unlink()
    assert mapped(absent).spec["eos_ids"] == [2]


def test_ends_of_text_of_gguf_are_every_kind(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 2}
    mapping = map_gguf(tmp_path, "qwen3_moe", metadata=extra)
    assert mapping.spec["eos_ids"] == [2, 4]
    assert mapping.spec["bos_id"] == 1


# ---------------------------------------------------------------- hostile metadata

_ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 3, 2**31, 10**30, 0.5, 1e-320, 1e308, float("inf"), float("nan")),
    *("", "silu", "1" * 300, [], [0], [1, 2, 3], ["a"], [[1]], {}, {"a": 1}),
)


def _outcome(source: Source) -> bool:
    """Map and plan; True if it can be repacked. Anything but a ColibriError fails the test."""
    try:
        plan_repack(source, RepackOptions())
    except ColibriError:
        return False
    return True


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_no_value_of_a_config_key_breaks_the_census(tmp_path: Path, family: str) -> None:
    source_path = small_hf(tmp_path / "hf", family)
    extra = ("rope_scaling", "rope_theta", "text_config", "quantization_config", "head_dim",
             "original_max_position_embeddings", "partial_rotary_factor",
             "no_rope_layer_interval", "moe_layers")  # fmt: skip
    with open_source(source_path) as source:
        config = dict(source.config)
        outcomes = []
        for key in (*config, *extra):
            for value in _ODD:
                source.config = {**config, key: value}
                outcomes.append(_outcome(source))
    assert True in outcomes and False in outcomes


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_no_value_of_a_rope_key_breaks_the_census(tmp_path: Path, kind: str) -> None:
    rope = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with open_source(small_hf(tmp_path / "hf", "olmoe")) as source:
        config = dict(source.config)
        for key in (*rope, "attention_factor", "mscale", "beta_fast", "beta_slow", "type"):
            for value in _ODD:
                source.config = {**config, "rope_parameters": {**rope, key: value}}
                _outcome(source)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_no_value_of_a_metadata_key_breaks_the_census(tmp_path: Path, family: str) -> None:
    with open_source(small_gguf(tmp_path / "m.gguf", family)) as source:
        metadata = dict(source.metadata)
        arch = tm.gguf_arch(family)
        keys = {name.format(arch=arch) for key in GGUF_KEYS.values() for name in key.names}
        keys |= {f"{arch}.attention.sliding_window_pattern"}
        for key in sorted(keys | set(metadata)):
            for value in _ODD:
                source.metadata = {**metadata, key: value}
                _outcome(source)
