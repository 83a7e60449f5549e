"""The public faults of naming, stacking, routing and shapes, for every family to which they apply.

Names and stacks come from the tiny models, which transformers loads; nothing here asks the family
table where a weight should be, except where a test changes one tensor of a role.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_models as rm
import tiny_models as tm
from repack_util import PARTS, mapped, moe_layers, refused
from repack_util import small_spec as smaller
from test_precisions import float_of

import colibri_tools
from colibri_tools.container.format import PartRole, Role
from colibri_tools.errors import ColibriError
from colibri_tools.families import FAMILIES as TABLE
from colibri_tools.mapping import SourceMapping
from colibri_tools.repack import repack
from colibri_tools.verify import verify

FAMILIES = (*tm.ALL_FAMILIES, *rm.RECIPES)
IN_GGUF = tuple(family for family in FAMILIES if family != "flex_olmo")
WITH_HEAD_DIM = tuple(
    family
    for family in FAMILIES
    if family not in ("granitemoe", "granitemoeshared", "llama4")
    and not (family in rm.RECIPES and "nope_dim" in rm.RECIPES[family].hyper)
)

Change = Callable[[tm.Tensors], tm.Tensors | None]


def small(family: str, **changes: Any) -> tm.TinySpec:
    """A quick model with no two dimensions equal."""
    make = tm.default_spec if family in rm.RECIPES else smaller
    return make(family, **changes)


def row_of(family: str) -> Any:
    """The family's row of the table."""
    name = {"granitemoeshared": "granitemoe"}.get(family, family)
    return next(row for row in TABLE if row.name == name)


def written(
    folder: Path,
    family: str,
    change: Change = lambda weights: None,
    spec: tm.TinySpec | None = None,
    **options: Any,
) -> Path:
    """A checkpoint in which `change` saw the tensors as they are stored."""
    path = tm.write_hf(folder, family, spec or small(family), **options)
    weights = dict(tm.read_hf(path))
    tm.write_safetensors(path / "model.safetensors", change(weights) or weights)
    return path


def sources_of(mapping: SourceMapping, part: PartRole, layer: int) -> list[str]:
    """The source tensors that hold a part of a layer's experts, by expert."""
    (row,) = (row for row in mapping.rows if row.layer == layer)
    return [slots[part].tensor.name for slots in row.experts]


def source_of(mapping: SourceMapping, role: Role, layer: int) -> str | None:
    """The source tensor of a role."""
    found = [r for r in mapping.residents if (r.role, r.layer) == (role, layer)]
    return found[0].tensor.name if found else None


# ---------------------------------------------------------------- 1.1, 5.3: nothing is missing


@pytest.mark.parametrize("form", ["per-expert", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_1_every_slot_is_filled_once(tmp_path: Path, family: str, form: str) -> None:
    spec = small(family)
    mapping = mapped(tm.write_hf(tmp_path / "hf", family, spec, form=form))
    assert mapping.problems == [] and mapping.spec["executable"]
    assert [row.layer for row in mapping.rows] == moe_layers(spec)
    for row in mapping.rows:
        assert len(row.experts) == spec.experts
        assert all(set(PARTS) <= set(slots) for slots in row.experts)
        assert len({frozenset(slots) for slots in row.experts}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_1_renamed_experts_are_listed(tmp_path: Path, family: str) -> None:
    path = tm.write_hf(tmp_path / "hf", family, small(family))
    plain = mapped(path)
    layer = plain.rows[-1].layer
    old = sources_of(plain, PartRole.DOWN, layer)[-1]
    weights = dict(tm.read_hf(path))
    weights["model.linear_fc1"] = weights.pop(old)
    tm.write_safetensors(path / "model.safetensors", weights)
    message = refused(path)
    assert "match no rule" in message and "model.linear_fc1" in message
    assert "not filled" in message and f"layer {layer} expert" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_case_5_3_a_layer_without_tensors_is_named(tmp_path: Path, family: str) -> None:
    layer = moe_layers(small(family))[-1] - 1

    def cut(weights: tm.Tensors) -> tm.Tensors:
        return {n: v for n, v in weights.items() if f".layers.{layer}." not in n}

    path = written(tmp_path / "hf", family, cut)
    message = refused(path)
    assert f"layers.{layer}." in message or f"layer {layer}" in message
    assert {error.kind for error in verify(path).errors} == {"census"}


@pytest.mark.parametrize("family", IN_GGUF)
def test_case_5_3_a_layer_of_gguf_without_tensors_is_named(tmp_path: Path, family: str) -> None:
    layer = moe_layers(small(family))[-1]

    def cut(stored: dict[str, tm.GgufTensor]) -> dict[str, tm.GgufTensor]:
        return {n: v for n, v in stored.items() if not n.startswith(f"blk.{layer}.")}

    (path,) = tm.write_gguf(tmp_path / "m.gguf", family, small(family), mutate=cut)
    message = refused(path)
    assert f"layers.{layer}." in message or f"layer {layer}" in message


# ---------------------------------------------------------------- 1.2 a part of a larger model


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_2_a_model_of_several_parts_is_the_same_language_model(
    tmp_path: Path, family: str, prefix: str
) -> None:
    """Named below a prefix, its config below `text_config`, beside an image encoder."""
    head = prefix.removesuffix("model.") if prefix.startswith("language") else ""
    visual = [f"model.visual.blocks.{i}.weight" for i in range(3)]
    audio = "model.audio_tower.conv.weight"

    def nest(weights: tm.Tensors) -> tm.Tensors:
        named = {
            prefix + n.removeprefix("model.") if n.startswith("model.") else head + n: v
            for n, v in weights.items()
        }
        others = dict.fromkeys([*visual, audio], np.ones((3, 4), np.float32))
        return named | others

    plain = tm.write_hf(tmp_path / "plain", family, small(family))
    nested = written(tmp_path / "nested", family, nest)
    text = json.loads((nested / "config.json").read_text())
    whole = {"model_type": "novel_vl", "text_config": text, "vision_config": {"depth": 1}}
    (nested / "config.json").write_text(json.dumps(whole))
    repack(plain, tmp_path / "plain.colibri")
    result = repack(nested, tmp_path / "nested.colibri")
    assert {rule: sorted(names) for rule, names in result.dropped.items()} == {
        "vision-tower": visual,
        "audio-tower": [audio],
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


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_2_an_unknown_prefix_is_refused_with_names(tmp_path: Path, family: str) -> None:
    def nest(weights: tm.Tensors) -> tm.Tensors:
        return {f"novel.{name}": value for name, value in weights.items()}

    message = refused(written(tmp_path / "hf", family, nest))
    assert "match no rule" in message and "'novel." in message


# ---------------------------------------------------------------- 1.4 codes and their scales


def with_codes(
    folder: Path, family: str, form: str, scheme: str, config: object
) -> tuple[Path, int, dict[int, np.ndarray]]:
    """A checkpoint in which one tensor of experts' down projections is codes and scales. Returns it
    with its layer, and what the experts in that tensor must be."""
    path = tm.write_hf(folder, family, small(family), form=form)
    plain = mapped(path)
    layer = plain.rows[-1].layer
    names = sources_of(plain, PartRole.DOWN, layer)
    weights = dict(tm.read_hf(path))
    shape = weights[names[-1]].shape
    codes = (tm.unit_noise("codes", shape) * 997).astype(np.int64) % 126 + 1
    rows = shape[:-1] if scheme == "int8" else (*shape[:-1], 1)
    scales = (abs(tm.unit_noise("scales", rows)) / 77 + 1e-3).astype(np.float32)
    if scheme == "int8":
        weights[names[-1]] = codes.astype(np.int8)
        weights[names[-1].removesuffix("weight") + "SCB"] = scales
        numbers = codes.astype(np.float32) * scales[..., None]
        numbers *= np.float32(7.874015718698502e-3)  # as bitsandbytes' int8_vectorwise_dequant
    else:
        raw = codes.astype(np.uint8)
        weights[names[-1]] = tm.Raw("F8_E4M3", shape, raw.tobytes())
        weights[names[-1] + "_scale_inv"] = scales
        numbers = np.array([float_of(i, 4, 3, "fn") for i in range(128)], np.float32)[codes]
        numbers *= scales
    tm.write_safetensors(path / "model.safetensors", weights)
    settings = json.loads((path / "config.json").read_text())
    settings |= {} if config is None else {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(settings))
    users = [expert for expert, name in enumerate(names) if name == names[-1]]
    stack = numbers if numbers.ndim == 3 else numbers[None]
    if family in ("gpt_oss", "llama4") and numbers.ndim == 3:
        stack = stack.swapaxes(1, 2)  # which store [inputs, outputs]
    return path, layer, dict(zip(users, stack, strict=True))


_ONE_SCALE_PER_ROW = {"quant_method": "fp8", "weight_block_size": None}
_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("form", "scheme", "config"),
    [
        ("per-expert", "fp8", _ONE_SCALE_PER_ROW),
        ("unfused", "fp8", _ONE_SCALE_PER_ROW),
        ("unfused", "int8", _BITSANDBYTES),
    ],
    ids=["fp8-as-saved", "fp8", "int8"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_4_codes_of_experts_are_weights_only_with_their_scales(
    tmp_path: Path, family: str, form: str, scheme: str, config: object
) -> None:
    path, layer, expected = with_codes(tmp_path / "hf", family, form, scheme, config)
    repack(path, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        (row,) = (i for i, row in enumerate(container.rows) if row.layer == layer)
        for expert, values in expected.items():
            found = container.dequantize_part(row, expert, PartRole.DOWN)
            np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_4_codes_without_a_config_are_refused_by_scheme(
    tmp_path: Path, family: str, scheme: str
) -> None:
    path, _, _ = with_codes(tmp_path / "hf", family, "unfused", scheme, None)
    named = {"fp8": "FP8 weights (weight_scale_inv)", "int8": "INT8 weights (SCB)"}[scheme]
    message = refused(path)
    assert named in message and "without a quantization_config" in message


# ---------------------------------------------------------------- 1.5 multi-token prediction


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_5_a_layer_in_a_file_of_its_own_is_left_out_by_a_rule(
    tmp_path: Path, family: str
) -> None:
    n = small(family).layers
    keys = {"num_nextn_predict_layers": 1}
    path = tm.write_hf(tmp_path / "hf", family, small(family), overrides=keys)
    plain = mapped(path)
    assert any("announce 1 multi-token-prediction" in text for text in plain.warnings)
    weights = dict(tm.read_hf(path))
    at = f".layers.{n - 1}."
    extra = {name.replace(at, f".layers.{n}."): v for name, v in weights.items() if at in name}
    extra[f"model.layers.{n}.eh_proj.weight"] = np.ones((4, 8), np.float32)
    tm.write_safetensors(path / "mtp.safetensors", extra)
    files = dict.fromkeys(weights, "model.safetensors") | dict.fromkeys(extra, "mtp.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = mapped(path)
    assert found.problems == [] and found.dropped == {"mtp": sorted(extra)}
    assert found.spec == plain.spec and found.spec["n_mtp_layers"] == 0


# ---------------------------------------------------------------- 1.7 names without `model.`


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_7_names_without_model_are_the_same_model(tmp_path: Path, family: str) -> None:
    def strip(weights: tm.Tensors) -> tm.Tensors:
        return {name.removeprefix("model."): value for name, value in weights.items()}

    plain = mapped(tm.write_hf(tmp_path / "plain", family, small(family)))
    base = mapped(written(tmp_path / "base", family, strip))
    assert base.problems == [] and base.spec == plain.spec
    assert [r.name for r in base.residents] == [r.name for r in plain.residents]


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_7_a_headless_export_says_so(tmp_path: Path, family: str) -> None:
    def strip(weights: tm.Tensors) -> tm.Tensors:
        del weights["lm_head.weight"]
        return {name.removeprefix("model."): value for name, value in weights.items()}

    message = refused(written(tmp_path / "hf", family, strip))
    assert "lm_head.weight is missing" in message and "without its head" in message


# ---------------------------------------------------------------- 1.8, 2.8: sizes are read


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_8_the_width_of_experts_is_the_configs_and_the_tensors(
    tmp_path: Path, family: str
) -> None:
    """Neither is derived from a dense width, and they must agree."""
    spec = small(family, dense_width=136)
    plain = mapped(tm.write_hf(tmp_path / "plain", family, spec))
    assert plain.spec["expert_width"] == spec.width and spec.width * spec.top_k != 136
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (name,) = (n for n in row_of(family).hf.keys["expert_width"].names if n in config)
    path = tm.write_hf(tmp_path / "hf", family, spec, overrides={name: spec.width + 8})
    message = refused(path)
    n_shared = 2 if "shared_experts" in message else 1  # which may be named first
    assert (
        f"[{n_shared * (spec.width + 8)}, " in message
        or f", {n_shared * (spec.width + 8)}]" in message
    )
    assert "expert" in message and "found [" in message


@pytest.mark.parametrize("family", IN_GGUF)
def test_case_2_8_the_expert_count_of_gguf_must_equal_the_axis(tmp_path: Path, family: str) -> None:
    spec = small(family)
    arch = tm.gguf_arch(family)
    for n in (spec.experts - 1, spec.experts + 1):
        values = tm.gguf_values(family, spec, tm.tensors(family, spec))
        metadata = tm.gguf_metadata(family, spec) | {f"{arch}.expert_count": n}
        path = tmp_path / f"{n}.gguf"
        encoded = tm.encode_gguf(values, tm.GGMLQuantizationType.F32)
        tm.write_gguf_tensors(path, arch, metadata, encoded)
        message = refused(path)
        assert str(n) in message and str(spec.experts) in message


# ---------------------------------------------------------------- 1.9 tied embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_9_tied_embeddings_are_decided_by_flag_and_tensors(
    tmp_path: Path, family: str
) -> None:
    def output_of(mapping: SourceMapping) -> str | None:
        assert mapping.problems == []
        return next(r for r in mapping.residents if r.role is Role.OUTPUT).alias_of

    tied = {"tie_word_embeddings": True}
    spec = small(family, tied=True)
    both = mapped(tm.write_hf(tmp_path / "both", family, small(family), overrides=tied))
    assert output_of(mapped(tm.write_hf(tmp_path / "tied", family, spec))) == "token_embd"
    assert output_of(both) is None and any("differs from" in text for text in both.warnings)
    no_flag = {"tie_word_embeddings": False}
    refusal = refused(tm.write_hf(tmp_path / "none", family, spec, overrides=no_flag))
    assert "lm_head.weight is missing" in refusal


@pytest.mark.parametrize("family", IN_GGUF)
def test_case_1_9_gguf_without_output_is_tied(tmp_path: Path, family: str) -> None:
    spec = small(family, tied=True)
    mapping = mapped(tm.write_gguf(tmp_path / "m.gguf", family, spec)[0])
    output = next(r for r in mapping.residents if r.role is Role.OUTPUT)
    assert mapping.problems == [] and output.alias_of == "token_embd"


# ---------------------------------------------------------------- 1.11 expert counts


def cut_last_expert(weights: tm.Tensors, plain: SourceMapping, layer: int) -> None:
    """Prune a layer's last expert, with its row of the router and its biases."""
    (row,) = (row for row in plain.rows if row.layer == layer)
    n = len(row.experts)
    by_name: dict[str, set[int]] = {}
    for expert, slots in enumerate(row.experts):
        for part in slots.values():
            by_name.setdefault(part.tensor.name, set()).add(expert)
    for name, users in by_name.items():
        if users == {n - 1}:
            del weights[name]
        elif n - 1 in users:
            weights[name] = weights[name][:-1]
    for role in (Role.ROUTER, Role.ROUTER_BIAS, Role.ROUTER_SELECT_BIAS):
        stored = source_of(plain, role, layer)
        if stored is not None:
            axis = int(weights[stored].shape[0] != n)  # a leading 1
            weights[stored] = np.delete(weights[stored], n - 1, axis)


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_11_a_layer_with_fewer_experts_is_honoured(tmp_path: Path, family: str) -> None:
    spec = small(family)
    plain = mapped(tm.write_hf(tmp_path / "plain", family, spec))
    layer = plain.rows[-1].layer
    path = written(tmp_path / "hf", family, lambda w: cut_last_expert(w, plain, layer), spec)
    found = mapped(path)
    if plain.spec.get("graph.router_groups", 1) > 1:  # experts no longer fill their groups
        assert f"layer {layer}" in refused(path)
        return
    assert found.problems == []
    expected = [spec.experts] * (len(plain.rows) - 1) + [spec.experts - 1]
    assert [len(row.experts) for row in found.rows] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_case_1_11_router_rows_must_equal_the_experts(tmp_path: Path, family: str) -> None:
    plain = mapped(tm.write_hf(tmp_path / "plain", family, small(family)))
    layer = plain.rows[-1].layer
    router = source_of(plain, Role.ROUTER, layer)
    assert router is not None

    def shrink(weights: tm.Tensors) -> None:
        weights[router] = weights[router][:-1]

    message = refused(written(tmp_path / "hf", family, shrink))
    assert f"layer {layer}" in message or f".{layer}." in message


# ---------------------------------------------------------------- 2.1, 2.3: order and halves


def place(layer: int, expert: int, part: int) -> int:
    """What every weight of a matrix is."""
    return (100 * layer + expert + 1) * (1, -2, 3)[part]


_PART_NAMES = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def placed(family: str, spec: tm.TinySpec) -> tm.Tensors:
    """The tensors with one matrix per expert, each filled by its place."""
    weights = tm.tensors(family, spec)
    for name, value in weights.items():
        if ".experts." not in name or value.ndim != 2:
            continue
        before, _, after = name.partition(".experts.")
        expert, kind = after.split(".")[:2]
        (part,) = (i for i, names in enumerate(_PART_NAMES) if kind in names)
        value[:] = place(int(before.split(".")[2]), int(expert), part)
    return weights


def check_places(path: Path, spec: tm.TinySpec) -> None:
    """Every expert has the values of its place."""
    with colibri_tools.open(path) as container:
        for row, layer in enumerate(moe_layers(spec)):
            for expert in range(spec.experts):
                for part, role in enumerate(PARTS):
                    values = container.dequantize_part(row, expert, role)
                    assert (values == place(layer, expert, part)).all(), (layer, expert, role)


@pytest.mark.parametrize("form", ["per-expert", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_2_1_and_2_3_experts_and_halves_of_hf_are_in_their_place(
    tmp_path: Path, family: str, form: str
) -> None:
    """12 experts: names sort as text, ids are numbers. Gate and up differ in sign."""
    spec = small(family, experts=12)
    weights = placed(family, spec)
    if form == "fused" and family not in tm.more.FAMILIES:
        weights = tm.fuse(family, weights)
    path = tm.write_hf(tmp_path / "hf", family, spec, form=form, mutate=lambda _: weights)
    repack(path, tmp_path / "m.colibri")
    check_places(tmp_path / "m.colibri", spec)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("family", IN_GGUF)
def test_case_2_1_and_2_3_experts_and_halves_of_gguf_are_in_their_place(
    tmp_path: Path, family: str, fused: bool
) -> None:
    spec = small(family, experts=12)
    values = tm.gguf_values(family, spec, placed(family, spec))
    for name in [name for name in values if name.endswith("ffn_gate_exps.weight") and fused]:
        up = values.pop(name.replace("gate", "up"))
        stacked = np.concatenate([values.pop(name), up], axis=1)
        values[name.replace("gate", "gate_up")] = stacked
    encoded = tm.encode_gguf(values, tm.GGMLQuantizationType.F32)
    (path,) = tm.write_gguf(tmp_path / "m.gguf", family, spec, mutate=lambda _: encoded)
    repack(path, tmp_path / "m.colibri")
    check_places(tmp_path / "m.colibri", spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_case_2_1_layers_are_in_their_order(tmp_path: Path, family: str) -> None:
    """12 layers: `layers.10` comes before `layers.2` in the file."""
    base = small(family)
    dense = tuple(i for i in range(12) if i % base.layers in base.dense_layers)
    if base.dense_layers == (0,):
        dense = (0,)
    spec = base.replace(layers=12, experts=8, dense_layers=dense, hidden=16, width=8, vocab=32)
    weights = placed(family, spec)
    path = tm.write_hf(tmp_path / "hf", family, spec, mutate=lambda _: weights)
    repack(path, tmp_path / "m.colibri")
    check_places(tmp_path / "m.colibri", spec)


# ---------------------------------------------------------------- 2.7 mixed written forms


def forms(family: str, spec: tm.TinySpec, weights: tm.Tensors) -> tuple[tm.Tensors, tm.Tensors]:
    """The same weights with one matrix per expert, and stacked."""
    row = tm.more.FAMILIES.get(family)
    if row is None:
        return weights, tm.fuse(family, weights)
    return row.unfused(dict(weights)), (row.fused or row.saved)(dict(weights))


@pytest.mark.parametrize("family", FAMILIES)
def test_case_2_7_layers_in_different_forms_are_fine_and_one_slot_twice_is_not(
    tmp_path: Path, family: str
) -> None:
    spec = small(family, experts=8)
    last = f".layers.{moe_layers(spec)[-1]}."
    apart, stacked = forms(family, spec, placed(family, spec))
    mixed = {n: v for n, v in apart.items() if last not in n}
    mixed |= {n: v for n, v in stacked.items() if last in n}
    path = tm.write_hf(tmp_path / "hf", family, spec)
    tm.write_safetensors(path / "model.safetensors", mixed)
    repack(path, tmp_path / "m.colibri")
    check_places(tmp_path / "m.colibri", spec)
    twice = mixed | {n: v for n, v in apart.items() if last in n}
    tm.write_safetensors(path / "model.safetensors", twice)
    message = refused(path)
    assert "there twice" in message
    names = [n for n in twice if last in n and n in message]
    assert len(names) >= 2


# ---------------------------------------------------------------- 3.1, 3.6: router constants

# transformers 5.24: what its config classes and models do without the keys.
_NORM_KEY = {
    "qwen2_moe": False,
    "qwen3_moe": False,
    "olmoe": False,
    "flex_olmo": False,
    "deepseek_v3": True,
    "dots1": False,
    "glm4_moe": True,
    "exaone_moe": True,
}
_ALWAYS_NORMED = {
    "mixtral": True,
    "deepseek_v2": False,
    "ernie4_5_moe": True,
    "minimax_m2": True,
    "granitemoe": True,
    "granitemoeshared": True,
    "hunyuan_v1_moe": True,
    "gpt_oss": True,
    "phimoe": False,
    "llama4": False,
}
_SCALE = {
    "deepseek_v2": ("routed_scaling_factor", 1.0),
    "deepseek_v3": ("routed_scaling_factor", 2.5),
    "dots1": ("routed_scaling_factor", 1.0),
    "glm4_moe": ("routed_scaling_factor", 1.0),
    "exaone_moe": ("routed_scaling_factor", 2.5),
    "afmoe": ("route_scale", 1.0),
}


@pytest.mark.parametrize("family", {**_NORM_KEY, **_ALWAYS_NORMED})
def test_case_3_1_normalising_is_the_sources_word_or_the_familys(
    tmp_path: Path, family: str
) -> None:
    for value, name in ((tm.DELETE, "absent"), (True, "on"), (False, "off")):
        path = tm.write_hf(
            tmp_path / name, family, small(family), overrides={"norm_topk_prob": value}
        )
        stated = value if value in (True, False) else _NORM_KEY.get(family)
        expected = _ALWAYS_NORMED.get(family, stated)
        assert mapped(path).spec["graph.router_norm"] is expected, name


@pytest.mark.parametrize("family", FAMILIES)
def test_case_3_6_the_scale_is_the_sources_or_the_familys(tmp_path: Path, family: str) -> None:
    key, absent = _SCALE.get(family, ("routed_scaling_factor", 1.0))
    for value, expected in ((tm.DELETE, absent), (1.75, 1.75 if family in _SCALE else 1.0)):
        path = tm.write_hf(tmp_path / str(expected), family, small(family), overrides={key: value})
        assert mapped(path).spec["graph.router_scale"] == expected or family == "deepseek"


# ---------------------------------------------------------------- 4.1, 4.3: numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_case_4_1_bf16_is_carried_bit_by_bit(tmp_path: Path, family: str) -> None:
    """With subnormals and negative zeros in every matrix."""

    def subnormal(weights: tm.Tensors) -> None:
        for value in weights.values():
            if value.ndim >= 2:
                value[..., :1], value[..., 1:2] = 1e-40, -0.0

    path = tm.write_hf(tmp_path / "hf", family, small(family), dtype="bf16", mutate=subnormal)
    repack(path, tmp_path / "m.colibri")
    found = verify(tmp_path / "m.colibri", against=path)
    assert found.ok, found.errors


@pytest.mark.parametrize("family", FAMILIES)
def test_case_4_3_a_nan_stops_the_job_with_its_place(tmp_path: Path, family: str) -> None:
    path = tm.write_hf(tmp_path / "hf", family, small(family))
    plain = mapped(path)
    layer = plain.rows[-1].layer
    down = sources_of(plain, PartRole.DOWN, layer)[-1]
    weights = {name: value.copy() for name, value in tm.read_hf(path).items()}
    weights[down].reshape(-1)[-1] = np.nan
    tm.write_safetensors(path / "model.safetensors", weights)
    message = refused(path)
    assert "nan" in message.lower() and down in message


# ---------------------------------------------------------------- 8.2, 8.3: rope of every family


def stretched(kind: str, inv_freq: np.ndarray) -> np.ndarray:
    """Linear scaling by 4, or llama3's by 8 of a context of 64, of plain angular frequencies."""
    if kind == "linear":
        return inv_freq / 4
    turns = 64 * inv_freq / (2 * np.pi)  # within the original context
    smooth = np.clip((turns - 1) / (4 - 1), 0, 1)
    return inv_freq * (smooth + (1 - smooth) / 8)


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_8_2_rope_scaling_in_every_spelling_stretches_the_frequencies(
    tmp_path: Path, family: str, kind: str, spelling: str
) -> None:
    scaling: dict[str, Any] = {"factor": 4.0} if kind == "linear" else dict(_LLAMA3)
    scaling["type" if spelling == "type" else "rope_type"] = kind
    keys: dict[str, Any] = {"rope_parameters": {**scaling, "rope_theta": 5e4}}
    if spelling != "rope_parameters":
        keys = {"rope_parameters": tm.DELETE, "rope_theta": 5e4, "rope_scaling": scaling}
    spec = mapped(tm.write_hf(tmp_path / "hf", family, small(family), overrides=keys)).spec
    n = spec["graph.rope_dim"]
    plain = 5e4 ** -(np.arange(0, n, 2) / n)
    assert spec["executable"], spec.get("executable_lacks")
    np.testing.assert_allclose(spec["graph.rope_inv_freq"], stretched(kind, plain), rtol=1e-6)


# ---------------------------------------------------------------- 8.5, 9.1, 9.6: heads


@pytest.mark.parametrize("family", FAMILIES)
def test_case_8_5_a_part_of_a_head_rotates_or_the_model_does_not_run(
    tmp_path: Path, family: str
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    path = tm.write_hf(tmp_path / "hf", family, small(family), overrides={"rope_parameters": rope})
    plain, spec = (
        mapped(tm.write_hf(tmp_path / "plain", family, small(family))).spec,
        mapped(path).spec,
    )
    partial = row_of(family).hf.defaults.get("rope_partial") is not None
    if spec["executable"]:
        stated = spec["graph.rope_dim"] == spec["graph.head_dim"] // 2
        by_size = plain.get("graph.rope_dim") == spec["graph.rope_dim"]
        assert stated if partial else by_size and family == "minimax_m2"
    else:
        assert "partial_rotary_factor" in spec["executable_lacks"] and not partial


@pytest.mark.parametrize("family", [f for f in FAMILIES if row_of(f).graph["qk_norm"] != "none"])
def test_case_9_1_the_width_of_a_norm_must_fit_its_placement(tmp_path: Path, family: str) -> None:
    plain = mapped(tm.write_hf(tmp_path / "plain", family, small(family)))
    layer = plain.spec["n_layers"] - 1
    for role in (Role.ATTN_Q_NORM, Role.ATTN_K_NORM):
        name = source_of(plain, role, layer)
        if name is None:
            assert plain.spec["graph.qk_norm"] == "l2"
            return
        heads = plain.spec["graph.n_heads" if role is Role.ATTN_Q_NORM else "graph.n_kv_heads"]
        full = heads * plain.spec["graph.head_dim"]
        other = plain.spec["graph.head_dim"] if plain.spec["graph.qk_norm"] == "full" else full

        def resize(weights: tm.Tensors, name: str = name, other: int = other) -> None:
            weights[name] = np.ones(other, np.float32)

        assert name in refused(written(tmp_path / role.label, family, resize))


@pytest.mark.parametrize("family", WITH_HEAD_DIM)
def test_case_9_6_the_size_of_a_head_is_read_and_not_divided(tmp_path: Path, family: str) -> None:
    spec = small(family, head_dim=20, explicit_head_dim=True)
    assert spec.hidden != spec.heads * 20
    found = [mapped(tm.write_hf(tmp_path / "hf", family, spec))]
    if family in IN_GGUF and "head_dim" in row_of(family).gguf.keys:
        found.append(mapped(tm.write_gguf(tmp_path / "m.gguf", family, spec)[0]))
    for mapping in found:
        assert mapping.problems == [] and mapping.spec["graph.head_dim"] == 20
    wrong = tm.write_hf(tmp_path / "wrong", family, spec, overrides={"head_dim": 12})
    with pytest.raises(ColibriError):
        repack(wrong, tmp_path / "m.colibri")


def test_every_family_of_the_table_is_here() -> None:
    known: Mapping[str, Any] = {row.name: row for row in TABLE}
    assert set(known) <= set(FAMILIES)
