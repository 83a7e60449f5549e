"""Tiny models of the families that are more than a few names: a row here, functions in tiny_models.

The weights that `TinyFamily.layer` makes have one tensor per expert matrix. That is a written form
of its own ("unfused"); `saved` makes of it what transformers' save_pretrained writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tiny_models as tm
from tiny_models import Tensors, TinySpec


class Maker:
    """Adds random tensors under a prefix."""

    def __init__(self, out: Tensors, spec: TinySpec, at: str) -> None:
        self.out, self.spec, self.at = out, spec, at

    def matrix(self, name: str, rows: int, cols: int, gain: float = 1.5) -> None:
        """Rows of length about `gain`."""
        full = f"{self.at}{name}.weight"
        self.out[full] = tm.matrix(full, (rows, cols), self.spec.seed, gain)

    def norm(self, name: str, n: int, bias: bool = False) -> None:
        """A weight around 1, and a bias around 0.1."""
        full = f"{self.at}{name}.weight"
        self.out[full] = (1.0 + 0.25 * tm.unit_noise(full, (n,), self.spec.seed)).astype(np.float32)
        if bias:
            self.bias(name + ".bias", n)

    def bias(self, name: str, n: int, gain: float = 0.3) -> None:
        """Numbers of either sign, their mean above 0."""
        noise = tm.unit_noise(self.at + name, (n,), self.spec.seed)
        self.out[self.at + name] = (gain * noise + 0.1).astype(np.float32)

    def attention(self, bias: bool = False) -> None:
        """The four projections."""
        spec, q, kv = self.spec, *_widths(self.spec)
        for part, width in (("q", q), ("k", kv), ("v", kv)):
            self.matrix(f"self_attn.{part}_proj", width, spec.hidden)
            if bias:
                self.bias(f"self_attn.{part}_proj.bias", width)
        self.matrix("self_attn.o_proj", spec.hidden, q)
        if bias:
            self.bias("self_attn.o_proj.bias", spec.hidden)

    def network(self, name: str, width: int, bias: bool = False) -> None:
        """gate, up and down of a feed-forward network."""
        self.matrix(name + ".gate_proj", width, self.spec.hidden)
        self.matrix(name + ".up_proj", width, self.spec.hidden)
        self.matrix(name + ".down_proj", self.spec.hidden, width, 2.0)
        if bias:
            self.bias(name + ".gate_proj.bias", width)
            self.bias(name + ".up_proj.bias", width)
            self.bias(name + ".down_proj.bias", self.spec.hidden)

    def experts(self, name: str, layer: int, bias: bool = False) -> None:
        """The networks of all experts."""
        for expert in range(self.spec.n_experts(layer)):
            self.network(f"{name}.{expert}", self.spec.width, bias)


def _widths(spec: TinySpec) -> tuple[int, int]:
    return spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim


@dataclass(frozen=True)
class TinyFamily:
    """How a tiny model of one family is made and written."""

    model_type: str
    architecture: str
    arch: str
    """The GGUF architecture."""
    layer: Callable[[Maker, int], None]
    config: Callable[[TinySpec], dict[str, Any]]
    experts: str
    """The module of a layer that holds the experts, in the unfused form."""
    gguf_names: Mapping[str, str]
    gguf_metadata: Callable[[TinySpec], dict[str, Any]]
    saved: Callable[[Tensors], Tensors]
    unfused: Callable[[Tensors], Tensors] = lambda weights: weights
    fused: Callable[[Tensors], Tensors] | None = None
    """What transformers holds in memory, if that is another form."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    gguf_permuted: bool = False
    """llama.cpp's converter stores rotated pairs of q and k as neighbours."""
    top: Callable[[Maker], None] = lambda make: None


def tensors(family: TinyFamily, spec: TinySpec) -> Tensors:
    """All weights, one tensor per expert matrix."""
    out: Tensors = {}
    top = Maker(out, spec, "")
    top.matrix("model.embed_tokens", spec.vocab, spec.hidden, spec.hidden**0.5)
    for layer in range(spec.layers):
        family.layer(Maker(out, spec, f"model.layers.{layer}."), layer)
    top.norm("model.norm", spec.hidden)
    if not spec.tied:
        top.matrix("lm_head", spec.vocab, spec.hidden, 2.0)
    family.top(top)
    return out


def stack(weights: Tensors, module: str, rename: Mapping[tuple[str, ...], str]) -> Tensors:
    """Stack experts below `module`: parts laid below each other become one tensor.

    `rename` maps parts, such as ("gate_proj.weight", "up_proj.weight"), to a name in the layer.
    """
    out: Tensors = {}
    found: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, value in weights.items():
        before, here, rest = name.partition(f".{module}.")
        expert, _, part = rest.partition(".")
        if here and expert.isdigit():
            found.setdefault((before, part), {})[int(expert)] = value
        else:
            out[name] = value
    for before in {before for before, _ in found}:
        for parts, name in rename.items():
            stacks = [[v for _, v in sorted(found[before, part].items())] for part in parts]
            out[f"{before}.{name}"] = np.concatenate([np.stack(s) for s in stacks], axis=1)
    return out


def joined(weights: Tensors, first: str, second: str, name: str) -> Tensors:
    """Lay two matrices of a layer below each other as one tensor of another name."""
    out = dict(weights)
    for key in weights:
        if key.endswith(first):
            base = key.removesuffix(first)
            out[base + name] = np.concatenate([out.pop(key), out.pop(base + second)])
    return out


def gguf_values(family: TinyFamily, spec: TinySpec, weights: Tensors) -> dict[str, np.ndarray]:
    """The weights as llama.cpp's converter names and stacks them."""
    parts = {
        (f"{part}_proj.{kind}",): f"ffn_{part}_exps.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
        if any(f".0.{part}_proj.{kind}" in name for name in weights)
    }
    out = {}
    top = {
        **tm._GGUF_TOP,
        "model.norm.bias": "output_norm.bias",
        "lm_head.bias": "output.bias",
    }
    for name, value in stack(weights, family.experts, parts).items():
        if name in top:
            out[top[name]] = value
            continue
        before, _, rest = name.removeprefix("model.").removeprefix("layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        if family.gguf_permuted and module in ("self_attn.q_proj", "self_attn.k_proj"):
            value = tm.permute(value, spec.heads if module[10] == "q" else spec.kv_heads)
        names = {**tm._GGUF_NAMES, **family.gguf_names}
        at = f"blk.{before}." if before.isdigit() else ""
        if module.startswith("ffn_"):
            out[f"{at}{rest}"] = value
        elif rest in names:  # a tensor without .weight or .bias
            out[f"{at}{names[rest]}"] = value
        else:
            out[f"{at}{names[module]}.{kind}"] = value
    return out | tm.rope_tensors(family.model_type, spec)


# ---------------------------------------------------------------------------------------------
# Granite

GRANITE_SCALES = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_GRANITE_STACKS = {
    ("gate_proj.weight", "up_proj.weight"): "block_sparse_moe.input_linear.weight",
    ("down_proj.weight",): "block_sparse_moe.output_linear.weight",
}


def _granite_layer(make: Maker, layer: int) -> None:
    spec = make.spec
    make.norm("input_layernorm", spec.hidden)
    make.attention(spec.attention_bias)
    make.norm("post_attention_layernorm", spec.hidden)
    make.matrix("block_sparse_moe.router.layer", spec.experts, spec.hidden)
    make.experts("block_sparse_moe.experts", layer)


def _granite_shared_layer(make: Maker, layer: int) -> None:
    _granite_layer(make, layer)
    make.matrix("shared_mlp.gate_proj", make.spec.shared_width, make.spec.hidden)
    make.matrix("shared_mlp.up_proj", make.spec.shared_width, make.spec.hidden)
    make.matrix("shared_mlp.output_linear", make.spec.hidden, make.spec.shared_width, 2.0)


def _granite_config(spec: TinySpec) -> dict[str, Any]:
    return {
        **GRANITE_SCALES,
        "attention_bias": spec.attention_bias,
        "intermediate_size": spec.width,
        "num_local_experts": spec.experts,
    }


def _granite_shared_config(spec: TinySpec) -> dict[str, Any]:
    return {**_granite_config(spec), "shared_intermediate_size": spec.shared_width}


def _granite_saved(weights: Tensors) -> Tensors:
    out = stack(weights, "block_sparse_moe.experts", _GRANITE_STACKS)
    shared = [f"shared_mlp.{n}.weight" for n in ("gate_proj", "up_proj", "input_linear")]
    return joined(out, *shared)


def _granite_fused(weights: Tensors) -> Tensors:
    names = {"input_linear.weight": "experts.gate_up_proj", "router.layer.": "router."}
    names["output_linear.weight"] = "experts.down_proj"
    out = {}
    for name, value in _granite_saved(weights).items():
        for old, new in names.items() if "block_sparse_moe" in name else ():
            name = name.replace(old, new)
        out[name] = value
    return out


def _granite_metadata(spec: TinySpec) -> dict[str, Any]:
    return {
        "feed_forward_length": spec.width,
        "attention.scale": GRANITE_SCALES["attention_multiplier"],
        "embedding_scale": GRANITE_SCALES["embedding_multiplier"],
        "residual_scale": GRANITE_SCALES["residual_multiplier"],
        "logit_scale": GRANITE_SCALES["logits_scaling"],
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab,
    }


_GRANITE = {
    "arch": "granitemoe",
    "experts": "block_sparse_moe.experts",
    "gguf_names": {
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "shared_mlp.gate_proj": "ffn_gate_shexp",
        "shared_mlp.up_proj": "ffn_up_shexp",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    "saved": _granite_saved,
    "fused": _granite_fused,
    "spec": {"heads": 4, "explicit_head_dim": False},
    "gguf_permuted": True,
}

# ---------------------------------------------------------------------------------------------
# HunYuan

_PER_EXPERT = {
    ("gate_proj.weight", "up_proj.weight"): "mlp.experts.gate_up_proj",
    ("down_proj.weight",): "mlp.experts.down_proj",
}


def _fused_mlp(weights: Tensors) -> Tensors:
    return stack(weights, "mlp.experts", _PER_EXPERT)


def _hunyuan_layer(make: Maker, layer: int) -> None:
    spec = make.spec
    make.norm("input_layernorm", spec.hidden)
    make.attention(spec.attention_bias)
    make.norm("self_attn.query_layernorm", spec.head_dim)
    make.norm("self_attn.key_layernorm", spec.head_dim)
    make.norm("post_attention_layernorm", spec.hidden)
    make.matrix("mlp.gate.wg", spec.experts, spec.hidden)
    make.experts("mlp.experts", layer)
    make.network("mlp.shared_mlp", spec.width)


def _hunyuan_config(spec: TinySpec) -> dict[str, Any]:
    return {
        "attention_bias": spec.attention_bias,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.width,
        "moe_topk": spec.top_k,
        "num_experts": spec.experts,
        "pad_token_id": 0,
    }


def _hunyuan_metadata(spec: TinySpec) -> dict[str, Any]:
    return {
        "feed_forward_length": spec.width,
        "expert_feed_forward_length": spec.width,
        "expert_shared_feed_forward_length": spec.width,
        "expert_shared_count": 1,
    }


# ---------------------------------------------------------------------------------------------
# gpt-oss

_SINGLE = {
    (f"{part}_proj.{kind}",): f"{part}.{kind}"
    for part in ("gate", "up", "down")
    for kind in ("weight", "bias")
}


def _gpt_oss_layer(make: Maker, layer: int) -> None:
    spec = make.spec
    make.norm("input_layernorm", spec.hidden)
    make.attention(bias=True)
    make.bias("self_attn.sinks", spec.heads, 1.0)
    make.norm("post_attention_layernorm", spec.hidden)
    make.matrix("mlp.router", spec.experts, spec.hidden)
    make.bias("mlp.router.bias", spec.experts)
    make.experts("mlp.experts", layer, bias=True)


def _gpt_oss_config(spec: TinySpec) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return {
        "attention_bias": True,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.width,
        "layer_types": [kinds[layer % 2] for layer in range(spec.layers)],
        "num_local_experts": spec.experts,
        "sliding_window": spec.window,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def interleaved(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate and up [.., n] as columns of one: even ones from gate, odd ones from up."""
    return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)


def _gpt_oss_saved(weights: Tensors) -> Tensors:
    """[experts, inputs, outputs], gate and up in turn."""
    out = stack(weights, "mlp.experts", _SINGLE)
    for name in [name for name in out if name.endswith("gate.weight")]:
        layer, at = name.removesuffix("gate.weight"), name.replace("gate.weight", "mlp.experts.")
        gate, up, down = (out.pop(f"{layer}{p}.weight").swapaxes(1, 2) for p in _PARTS)
        out[at + "gate_up_proj"], out[at + "down_proj"] = interleaved(gate, up), down
        gate, up, down = (out.pop(f"{layer}{p}.bias") for p in _PARTS)
        out[at + "gate_up_proj_bias"], out[at + "down_proj_bias"] = interleaved(gate, up), down
    return out


_PARTS = ("gate", "up", "down")

# ---------------------------------------------------------------------------------------------
# Phi-3.5-MoE

_W_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _phimoe_layer(make: Maker, layer: int) -> None:
    spec = make.spec
    make.norm("input_layernorm", spec.hidden, bias=True)
    make.attention(spec.attention_bias)
    make.norm("post_attention_layernorm", spec.hidden, bias=True)
    make.matrix("block_sparse_moe.gate", spec.experts, spec.hidden)
    make.experts("block_sparse_moe.experts", layer)


def _phimoe_top(make: Maker) -> None:
    make.bias("model.norm.bias", make.spec.hidden)
    if make.spec.attention_bias:
        make.bias("lm_head.bias", make.spec.vocab)


def _phimoe_config(spec: TinySpec) -> dict[str, Any]:
    return {
        "attention_bias": spec.attention_bias,
        "intermediate_size": spec.width,
        "lm_head_bias": spec.attention_bias,
        "num_local_experts": spec.experts,
        "router_jitter_noise": 0.01,
        "sliding_window": spec.window,
    }


def _phimoe_saved(weights: Tensors) -> Tensors:
    """Mixtral's names."""
    out = {}
    for name, value in weights.items():
        for old, new in _W_NAMES.items() if ".experts." in name else ():
            name = name.replace(old, new)
        out[name] = value
    return out


def _phimoe_fused(weights: Tensors) -> Tensors:
    names = {".block_sparse_moe.": ".mlp.", ".mlp.gate.weight": ".mlp.router.weight"}
    out = {}
    for name, value in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        out[name] = value
    return _fused_mlp(out)


# ---------------------------------------------------------------------------------------------
# Llama 4

FAR = 8192
"""llama.cpp's chunk and floor for Llama 4, which GGUF metadata do not say."""


def _llama4_layer(make: Maker, layer: int) -> None:
    spec = make.spec
    make.norm("input_layernorm", spec.hidden)
    make.attention(spec.attention_bias)
    make.norm("post_attention_layernorm", spec.hidden)
    if layer in spec.dense_layers:
        make.network("feed_forward", spec.dense_width)
        return
    make.matrix("feed_forward.router", spec.experts, spec.hidden)
    make.experts("feed_forward.experts", layer)
    make.network("feed_forward.shared_expert", spec.width)


def _llama4_config(spec: TinySpec) -> dict[str, Any]:
    return {
        "attention_bias": spec.attention_bias,
        "attention_chunk_size": spec.window,
        "attn_scale": 0.1 if spec.window == FAR else 0.7,
        "attn_temperature_tuning": True,
        "floor_scale": FAR if spec.window == FAR else 8,
        "head_dim": spec.head_dim,
        "interleave_moe_layer_step": 2,
        "intermediate_size": spec.width,
        "intermediate_size_mlp": spec.dense_width,
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(spec.layers)],
        "num_local_experts": spec.experts,
        "use_qk_norm": True,
    }


def _llama4_saved(weights: Tensors) -> Tensors:
    """[experts, inputs, outputs], gate before up."""
    out = stack(weights, "feed_forward.experts", _SINGLE_WEIGHTS)
    for name in [name for name in out if name.endswith(".gate.weight") and "ffn" not in name]:
        layer, at = name.removesuffix("gate.weight"), name.replace("gate.weight", _LLAMA4_EXPERTS)
        gate, up, down = (out.pop(f"{layer}{p}.weight").swapaxes(1, 2) for p in _PARTS)
        out[at + "gate_up_proj"] = np.concatenate([gate, up], axis=-1)
        out[at + "down_proj"] = down
    return out


_LLAMA4_EXPERTS = "feed_forward.experts."
_SINGLE_WEIGHTS = {parts: name for parts, name in _SINGLE.items() if name.endswith("weight")}


def _llama4_metadata(spec: TinySpec) -> dict[str, Any]:
    return {
        "feed_forward_length": spec.dense_width,
        "expert_feed_forward_length": spec.width,
        "interleave_moe_layer_step": 2,
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab,
    }


# ---------------------------------------------------------------------------------------------

FAMILIES: dict[str, TinyFamily] = {
    "granitemoe": TinyFamily(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        layer=_granite_layer,
        config=_granite_config,
        gguf_metadata=_granite_metadata,
        **_GRANITE,
    ),
    "granitemoeshared": TinyFamily(
        model_type="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        layer=_granite_shared_layer,
        config=_granite_shared_config,
        gguf_metadata=lambda spec: {
            **_granite_metadata(spec),
            "expert_shared_feed_forward_length": spec.shared_width,
        },
        **_GRANITE,
    ),
    "hunyuan_v1_moe": TinyFamily(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        arch="hunyuan-moe",
        layer=_hunyuan_layer,
        config=_hunyuan_config,
        experts="mlp.experts",
        gguf_names={
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
            "mlp.gate.wg": "ffn_gate_inp",
            "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
            "mlp.shared_mlp.up_proj": "ffn_up_shexp",
            "mlp.shared_mlp.down_proj": "ffn_down_shexp",
        },
        gguf_metadata=_hunyuan_metadata,
        saved=lambda weights: weights,
        fused=_fused_mlp,
        spec={"head_dim": 32},
    ),
    "gpt_oss": TinyFamily(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        arch="gpt-oss",
        layer=_gpt_oss_layer,
        config=_gpt_oss_config,
        experts="mlp.experts",
        gguf_names={
            "self_attn.sinks": "attn_sinks.weight",
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
        },
        gguf_metadata=lambda spec: {
            "feed_forward_length": spec.width,
            "expert_feed_forward_length": spec.width,
        },
        saved=_gpt_oss_saved,
        spec={
            "window": 10,
            "max_position": 256,
            "rope": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "phimoe": TinyFamily(
        model_type="phimoe",
        architecture="PhimoeForCausalLM",
        arch="phimoe",
        layer=_phimoe_layer,
        config=_phimoe_config,
        experts="block_sparse_moe.experts",
        gguf_names={"block_sparse_moe.gate": "ffn_gate_inp"},
        gguf_metadata=lambda spec: {
            "feed_forward_length": spec.width,
            "rope.dimension_count": spec.head_dim,
        },
        saved=_phimoe_saved,
        unfused=_phimoe_saved,
        fused=_phimoe_fused,
        spec={
            "heads": 4,
            "explicit_head_dim": False,
            "attention_bias": True,
            "norm_topk": False,
            "rope_theta": 1e6,
            "top_k": 2,
        },
        top=_phimoe_top,
    ),
    "llama4": TinyFamily(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        arch="llama4",
        layer=_llama4_layer,
        config=_llama4_config,
        experts="feed_forward.experts",
        gguf_names={
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.up_proj": "ffn_up",
            "feed_forward.down_proj": "ffn_down",
            "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
            "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
            "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
        },
        gguf_metadata=_llama4_metadata,
        saved=_llama4_saved,
        spec={
            "layers": 4,
            "dense_layers": (0, 2),
            "norm_topk": False,
            "rope_theta": 5e5,
            "window": FAR,
        },
    ),
}
