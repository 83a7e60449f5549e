"""Tiny models of families that are made from their row in the family table.

The names and shapes come from the rows themselves: transformers loads what this writes and refuses
a missing or surplus tensor (`oracle/make_oracle.py`), so the rows are checked and not believed.
`RECIPES` adds what the rows cannot know: sizes, and hyper-parameters by their canonical names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tiny_models as tm
from tiny_models import DELETE, Tensors, TinySpec

from colibri_tools.container.format import Role
from colibri_tools.families import FAMILIES, Family, Form, TensorRule


@dataclass(frozen=True)
class Recipe:
    """What a tiny model of a family adds to its row.

    `spec` are changes of `BASE`, `hyper` values by canonical name (a key of the form), `config`
    keys of config.json as they are, `features` the switches that are on.
    """

    features: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    hyper: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    leading_one: tuple[Role, ...] = ()
    """Vectors that are stored as [1, n]."""


BASE = TinySpec(
    layers=3,
    experts=8,
    hidden=48,
    width=20,
    heads=4,
    kv_heads=2,
    head_dim=12,
    vocab=67,
    top_k=3,
    dense_width=56,
    dense_layers=(0,),
    shared_width=40,
    max_position=256,
)

_LATENT = {"nope_dim": 10, "rope_dim": 6, "value_dim": 14, "kv_lora": 18, "q_lora": 22}

RECIPES: dict[str, Recipe] = {
    "deepseek_v2": Recipe(
        ("shared", "q_lora", "split_kv_b"),
        {"kv_heads": 4, "norm_topk": False},
        {**_LATENT, "router_scale": 1.5, "router_groups": 4, "router_top_groups": 2,
         "group_method": "group_limited_greedy"},
    ),
    "deepseek_v3": Recipe(
        ("shared", "q_lora", "router_select_bias", "split_kv_b"),
        {"kv_heads": 4},
        {**_LATENT, "router_scale": 2.5, "router_groups": 4, "router_top_groups": 2},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "deepseek": Recipe(("shared",), {"norm_topk": False}),
    "mellum": Recipe(
        (),
        {"dense_layers": (), "window": 9, "layers": 4,
         "local_rope": {"rope_type": "default", "rope_theta": 300.0}},
        {"window_pattern": 2},
    ),
    "dots1": Recipe(
        ("shared", "router_select_bias"),
        {},
        {"router_scale": 2.5, "router_groups": 4, "router_top_groups": 2, "window_layers": 1},
        {"scoring_func": "sigmoid"},
    ),
    "glm4_moe": Recipe(
        ("shared", "router_select_bias", "qk_norm", "qkv_bias"),
        {"kv_heads": 4},
        {"router_scale": 1.7, "router_groups": 1, "router_top_groups": 1, "qk_norm": True,
         "qkv_bias": True, "rope_partial": 0.5},
    ),
    "ernie4_5_moe": Recipe(
        ("shared", "router_select_bias"),
        {"layers": 4, "dense_layers": (0, 2)},
        {"moe_step": 2, "last_moe": -1},
        leading_one=(Role.ROUTER_SELECT_BIAS,),
    ),
    "minimax_m2": Recipe(
        ("router_select_bias",), {"dense_layers": ()}, {"rope_dim": 8}, {"scoring_func": "sigmoid"}
    ),
    "flex_olmo": Recipe((), {"dense_layers": (), "norm_topk": False}),
    "exaone_moe": Recipe(
        ("shared", "router_select_bias"),
        {"window": 9},
        {"router_scale": 2.5, "window_pattern": 2, "router_groups": 1, "router_top_groups": 1},
        {"scoring_func": "sigmoid"},
    ),
    "afmoe": Recipe(
        ("shared", "router_select_bias"),
        {"window": 9, "layers": 4},
        {"router_scale": 1.8, "window_pattern": 4, "scaled_embedding": True},
        {"route_norm": True, "score_func": "sigmoid"},
    ),
}  # fmt: skip


def family_row(family: str) -> Family:
    """The family's row of the table."""
    return next(row for row in FAMILIES if row.name == family)


def default_spec(family: str, **changes: Any) -> TinySpec:
    """The asymmetric spec of a family; `more` is laid over the recipe's hyper-parameters."""
    return BASE.replace(**{**RECIPES[family].spec, **changes})


def small_spec(family: str) -> TinySpec:
    """Few tensors of each kind, all experts chosen, a window shorter than six tokens."""
    recipe = RECIPES[family]
    more = {"router_groups": 1, "router_top_groups": 1} if "router_groups" in recipe.hyper else {}
    spec = default_spec(family, experts=3, top_k=3, vocab=19, width=10, shared_width=20, more=more)
    if spec.window is not None:
        spec = spec.replace(window=4)
    if family != "ernie4_5_moe":  # whose second MoE layer is the fourth
        spec = spec.replace(layers=2)
    if family == "flex_olmo":  # with the usual seed, two experts hardly count
        spec = spec.replace(seed=2)
    return spec.replace(attention_bias=family in ("deepseek_v3", "flex_olmo", "afmoe", "dots1"))


def features(family: str, spec: TinySpec) -> set[str]:
    """The switches that are on."""
    on = set(RECIPES[family].features) | set(spec.features)
    if spec.attention_bias:
        on |= {"qkv_bias", "o_bias"}
    return {name for name in on if f"-{name}" not in on}


def hyper(family: str, spec: TinySpec) -> dict[str, Any]:
    """Hyper-parameters by canonical name, None for what is left out."""
    first_dense = next((i for i in range(spec.layers) if i not in spec.dense_layers), spec.layers)
    values = {
        "n_layers": spec.layers,
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocab,
        "context_length": spec.max_position,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "norm_eps": spec.norm_eps or 1e-5,
        "activation": "silu",
        "n_experts": spec.experts,
        "top_k": spec.top_k,
        "tied": spec.tied,
        "expert_width": spec.width,
        "dense_width": spec.dense_width,
        "first_dense": first_dense,
        "n_shared": spec.shared_width // spec.width,
        "router_norm": spec.norm_topk is not False,
        "qkv_bias": spec.attention_bias,
        "o_bias": spec.attention_bias,
        "window": spec.window,
    }
    return values | dict(RECIPES[family].hyper) | dict(spec.more or {})


def config(
    family: str,
    spec: TinySpec,
    *,
    dtype: str = "f32",
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """config.json."""
    form = family_row(family).hf
    rope = {"rope_theta": spec.rope_theta or 1e4, "rope_type": "default", **(spec.rope or {})}
    out: dict[str, Any] = {
        "architectures": [form.architectures[0]],
        "bos_token_id": 1,
        "dtype": {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype],
        "eos_token_id": 2,
        "model_type": form.ids[0],
        "pad_token_id": None,
        "rope_parameters": tm.by_layer_type(spec, rope),
        **tm.softcap_config(spec),
        "transformers_version": "5.24.0",
    }
    values = hyper(family, spec)
    if values.get("nope_dim"):
        values["head_dim"] = values["rope_dim"]  # what transformers writes: no head is that wide
    if spec.local_rope is not None:  # windows as the pattern of GGUF has them
        step, kinds = values["window_pattern"], ("sliding_attention", "full_attention")
        values["layer_types"] = [kinds[(i + 1) % step == 0] for i in range(spec.layers)]
    if "ffn_types" in form.keys and "first_dense" not in form.keys:
        kinds = ("sparse", "dense")
        values["ffn_types"] = [kinds[i in spec.dense_layers] for i in range(spec.layers)]
    for name, value in values.items():
        if name in form.keys:
            out[form.keys[name].names[0]] = value
    out |= {**RECIPES[family].config, **(overrides or {})}
    return dict(sorted((k, v) for k, v in out.items() if v is not DELETE))


# ---------------------------------------------------------------- weights


def dims(family: str, spec: TinySpec) -> dict[str, int]:
    """The dimensions that tensor rules name."""
    h = hyper(family, spec)
    latent = h.get("kv_lora") is not None
    head = h["nope_dim"] + h["rope_dim"] if latent else spec.head_dim
    value = h.get("value_dim") or head
    out = {
        "1": 1, "vocab": spec.vocab, "hidden": spec.hidden, "head": head, "heads": spec.heads,
        "q": spec.heads * head, "kv": spec.kv_heads * head, "v": spec.kv_heads * value,
        "value": value, "attended": spec.heads * value, "experts": spec.experts,
        "shared": spec.shared_width, "dense": spec.dense_width, "width": spec.width,
    }  # fmt: skip
    if latent:
        nope, lora = h["nope_dim"], h["kv_lora"]
        out |= {
            "nope": nope, "kv_lora": lora, "latent": lora + h["rope_dim"],
            "q_lora": h["q_lora"] or 0, "kv_b": spec.heads * (nope + value),
        }  # fmt: skip
    return out


def rules(form: Form, spec: TinySpec, on: set[str]) -> Iterator[tuple[str, TensorRule, int]]:
    """(name without prefix, rule, layer) of every tensor outside the experts, a role once."""
    seen: set[tuple[Role, int]] = set()
    for rule in form.tensors:
        if not {rule.feature, rule.needs} <= {None, *on} or rule.unless in on:
            continue
        if rule.role is Role.ROPE_FACTORS or (rule.role is Role.OUTPUT and spec.tied):
            continue
        layers = range(spec.layers) if rule.where != "model" else (-1,)
        for layer in layers:
            dense = layer in spec.dense_layers
            if rule.where in ("moe", "dense") and dense != (rule.where == "dense"):
                continue
            if (rule.role, layer) not in seen:
                seen.add((rule.role, layer))
                yield rule.pattern.replace("{layer}", str(layer)), rule, layer


_GAINS = {
    Role.OUTPUT: 2.0,
    Role.DENSE_DOWN: 2.0,
    Role.SHARED_DOWN: 2.0,
}


def _values(family: str, spec: TinySpec, rule: TensorRule, name: str) -> np.ndarray:
    size = dims(family, spec)
    shape = tuple(size[dim] for dim in rule.shape)
    if len(shape) == 1:
        noise = tm.unit_noise(name, shape, spec.seed)
        shift, gain = (0.1, 0.3) if rule.role.name.endswith("_BIAS") else (1.0, 0.25)
        return (gain * noise + shift).astype(np.float32)
    gain = _GAINS.get(rule.role, 1.5)
    if rule.role is Role.TOKEN_EMBD:
        gain = 1.0 if hyper(family, spec).get("scaled_embedding") else math.sqrt(spec.hidden)
    return tm.matrix(name, shape, spec.seed, gain)


def tensors(family: str, spec: TinySpec) -> Tensors:
    """All weights as float32 under Hugging Face names, one tensor per expert."""
    form, out = family_row(family).hf, {}
    prefix = form.prefixes[0]
    for name, rule, _ in rules(form, spec, features(family, spec)):
        full = (prefix.heads[0] if rule.role is Role.OUTPUT else prefix.body) + name
        out[full] = _values(family, spec, rule, full)
        if rule.role in RECIPES[family].leading_one:
            out[full] = out[full].reshape(1, -1)
    for name, (rows, cols), gain in _experts(form, spec):
        out[prefix.body + name] = tm.matrix(prefix.body + name, (rows, cols), spec.seed, gain)
    return out


def _experts(form: Form, spec: TinySpec) -> Iterator[tuple[str, tuple[int, int], float]]:
    for part, gain in (("GATE", 1.5), ("UP", 1.5), ("DOWN", 2.0)):
        rule = next(
            r for r in form.experts if not r.stacked and [p.name for p in r.parts] == [part]
        )
        shape = (spec.hidden, spec.width) if part == "DOWN" else (spec.width, spec.hidden)
        for layer in range(spec.layers):
            for expert in range(spec.experts if layer not in spec.dense_layers else 0):
                name = rule.pattern.replace("{layer}", str(layer))
                yield name.replace("{expert}", str(expert)), shape, gain


# ---------------------------------------------------------------- GGUF

SHARED_ROW = {"deepseek_v2": "deepseek_v3"}
"""Families whose GGUF architecture belongs to the row of another."""


def gguf_form(family: str) -> Form:
    """The GGUF form of a family's architecture."""
    form = family_row(SHARED_ROW.get(family, family)).gguf
    assert form is not None
    return form


def gguf_values(
    family: str, spec: TinySpec, weights: Tensors, *, old_experts: bool = False
) -> dict[str, np.ndarray]:
    """The weights under GGUF names: stacked experts, and what converters rearrange."""
    hf, form, on = family_row(family).hf, gguf_form(family), features(family, spec)
    prefix, by_slot, out = hf.prefixes[0], {}, {}
    for name, rule, layer in rules(hf, spec, on):
        full = (prefix.heads[0] if rule.role is Role.OUTPUT else prefix.body) + name
        value = weights[full]
        by_slot[rule.role, layer] = value[0] if rule.role in RECIPES[family].leading_one else value
    permuted = (hf.rope_pairing, form.rope_pairing) == ("half", "adjacent")
    for name, rule, layer in rules(form, spec, on):
        value = _gguf_value(family, spec, rule.role, layer, by_slot)
        if permuted and rule.role in (Role.ATTN_Q, Role.ATTN_K):
            value = tm.permute(value, spec.heads if rule.role is Role.ATTN_Q else spec.kv_heads)
        out[name] = value
    for part in ("gate", "up", "down"):
        rule = next(r for r in hf.experts if not r.stacked and r.parts[0].name == part.upper())
        for layer in range(spec.layers):
            if layer in spec.dense_layers:
                continue
            at = prefix.body + rule.pattern.replace("{layer}", str(layer))
            stack = [weights[at.replace("{expert}", str(e))] for e in range(spec.experts)]
            if old_experts:
                for expert, value in enumerate(stack):
                    out[f"blk.{layer}.ffn_{part}.{expert}.weight"] = value
            else:
                out[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack(stack)
    return out


def _gguf_value(
    family: str,
    spec: TinySpec,
    role: Role,
    layer: int,
    by_slot: Mapping[tuple[Role, int], np.ndarray],
) -> np.ndarray:
    if role not in (Role.ATTN_K_B, Role.ATTN_V_B):
        return by_slot[role, layer]
    size = dims(family, spec)
    kv_b = by_slot[Role.ATTN_KV_B, layer]
    heads = kv_b.reshape(spec.heads, size["nope"] + size["value"], size["kv_lora"])
    if role is Role.ATTN_K_B:
        return np.ascontiguousarray(heads[:, : size["nope"]].swapaxes(1, 2))
    return np.ascontiguousarray(heads[:, size["nope"] :])


def gguf_metadata(family: str, spec: TinySpec) -> dict[str, Any]:
    """The keys llama.cpp's converter writes, as far as the engine's graph depends on them."""
    form, values = gguf_form(family), hyper(family, spec)
    arch, rope = form.ids[0], dict(spec.rope or {})
    if values.get("nope_dim"):
        values["head_dim"] = values["nope_dim"] + values["rope_dim"]
        values["n_kv_heads"] = 1 if "split_kv_b" in features(family, spec) else spec.heads
    else:
        values.setdefault("value_dim", spec.head_dim)
    if "rope_partial" in values:
        values["rope_dim"] = int(spec.head_dim * values["rope_partial"])
    values |= {"rope_theta": spec.rope_theta or 1e4, "gating": _gating(family)}
    if spec.local_rope is not None:
        values["rope_theta_local"] = spec.local_rope["rope_theta"]
    values |= {"attention_softcap": spec.attention_softcap, "logit_softcap": spec.logit_softcap}
    if rope:
        values |= {
            "rope_kind": rope["rope_type"],
            "rope_scale": rope["factor"],
            "rope_original_context": rope.get("original_max_position_embeddings"),
            "rope_log_multiplier": form.defaults["rope_log_unit"] * rope.get("mscale_all_dim", 0),
        }
    out: dict[str, Any] = {"general.type": "model", "general.name": f"tiny {family}"}
    for name, key in form.keys.items():
        if values.get(name) is not None:
            kind = {"int": int, "float": float, "bool": bool}.get(key.kind, lambda value: value)
            out[key.names[0].format(arch=arch)] = kind(values[name])
    return out | tm.gguf_tokenizer(spec)


def _gating(family: str) -> int:
    return int(family_row(family).hf.defaults["gating"])
