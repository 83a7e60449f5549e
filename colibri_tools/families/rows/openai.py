"""gpt-oss."""

from __future__ import annotations

from colibri_tools.container.format import PartRole, Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SOFTMAX,
)
from colibri_tools.families.schema import BIASES, ExpertRule, Family, Form, Key, TensorRule

__all__ = ["GPT_OSS"]

_GATE_UP, _DOWN = (PartRole.GATE, PartRole.UP), (PartRole.DOWN,)
_GATE_UP_BIAS, _DOWN_BIAS = BIASES[:2], BIASES[2:]
_MLP = "layers.{layer}.mlp."


def _moe(name: str, role: Role, shape: tuple[str, ...]) -> TensorRule:
    return TensorRule(name, role, "moe", shape)


def _biases(pattern: str) -> tuple[ExpertRule, ...]:
    names = ("gate", "up", "down")
    return tuple(
        ExpertRule(pattern.format(name), (part,)) for name, part in zip(names, BIASES, strict=True)
    )


_SINKS = "layers.{layer}.self_attn.sinks"
_HF_TENSORS = (
    *HF_TENSORS,
    TensorRule(_SINKS, Role.ATTN_SINKS, "layer", ("heads",)),
    _moe(_MLP + "router.weight", Role.ROUTER, ("experts", "hidden")),
    _moe(_MLP + "router.bias", Role.ROUTER_BIAS, ("experts",)),
)
_HF_EXPERTS = (
    ExpertRule(_MLP + "experts.gate_up_proj", _GATE_UP, transposed=True, interleaved=True),
    ExpertRule(_MLP + "experts.gate_up_proj_blocks", _GATE_UP, interleaved=True),
    ExpertRule(_MLP + "experts.gate_up_proj_bias", _GATE_UP_BIAS, interleaved=True),
    ExpertRule(_MLP + "experts.down_proj", _DOWN, transposed=True),
    ExpertRule(_MLP + "experts.down_proj_blocks", _DOWN),
    ExpertRule(_MLP + "experts.down_proj_bias", _DOWN_BIAS),
    *common.HF_EXPERTS[:3],
    *_biases("layers.{{layer}}.mlp.experts.{{expert}}.{}_proj.bias"),
)
_GGUF_TENSORS = (
    *(rule for rule in GGUF_TENSORS if rule.role is not Role.FFN_NORM),
    TensorRule("blk.{layer}.post_attention_norm.weight", Role.FFN_NORM, "layer", ("hidden",)),
    TensorRule("blk.{layer}.attn_sinks.weight", Role.ATTN_SINKS, "layer", ("heads",)),
    _moe("blk.{layer}.ffn_gate_inp.bias", Role.ROUTER_BIAS, ("experts",)),
)
_GGUF_EXPERTS = (
    *common.GGUF_EXPERTS,
    *_biases("blk.{{layer}}.ffn_{}_exps.bias"),
    *_biases("blk.{{layer}}.ffn_{}.{{expert}}.bias"),
)
_DEFAULTS = {
    "activation": "swiglu_oai",
    "activation_alpha": 1.702,
    "activation_limit": 7.0,
    "router_norm": True,
    "window_pattern": 2,
}

GPT_OSS = Family(
    name="gpt_oss",
    hf=Form(
        ids=("gpt_oss",),
        architectures=("GptOssForCausalLM", "GptOssModel"),
        prefixes=common.HF_PREFIXES,
        tensors=_HF_TENSORS,
        experts=_HF_EXPERTS,
        keys={
            **common.without(common.HF_KEYS, "activation"),
            **common.HF_WIDTH_KEYS,
            **common.HF_BIAS_KEYS,
            **common.HF_WINDOW_KEYS,
            "layer_types": Key("strs", ("layer_types",)),
            "activation_alpha": Key("float", ("swiglu_alpha",)),
            "activation_limit": Key("float", ("swiglu_limit",)),
        },
        defaults={
            **HF_DEFAULTS,
            **_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 8,
            "head_dim": 64,
            "top_k": 4,
            "context_length": 131072,
            "window": 128,
            "rope_theta": 150000.0,
        },
        rope_pairing="half",
        rope_default={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        drops=common.DROPS,
        windows="pattern",
    ),
    gguf=Form(
        ids=("gpt-oss",),
        tensors=_GGUF_TENSORS,
        experts=_GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_LOCAL_ROPE_KEYS,
            "expert_width": Key("int", ("{arch}.expert_feed_forward_length",)),
            "window_pattern": Key("pattern", ("{arch}.attention.sliding_window_pattern",)),
        },
        defaults={**GGUF_DEFAULTS, **_DEFAULTS, "rope_truncate": False},
        rope_pairing="half",
        local_rope="scaled",
        drops=common.DROPS,
        windows="pattern",
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "none", "sinks": True, "router_bias": True},
    limits=("GGUF does not tell the constants of the activation: those of gpt-oss are used",),
)
