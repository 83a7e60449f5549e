"""Phi-3.5-MoE."""

from __future__ import annotations

from colibri_tools.container.format import Group, Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    PLAIN,
)
from colibri_tools.families.schema import Family, Form, Key, TensorRule

__all__ = ["PHIMOE"]

_LONGROPE = tuple(
    TensorRule(f"{name}.weight", role, "model", ("rope",), group=Group.OPTIONAL, optional=True)
    for name, role in (
        ("rope_factors_short", Role.ROPE_FACTORS_SHORT),
        ("rope_factors_long", Role.ROPE_FACTORS_LONG),
    )
)


def _biases(layer: str, attn: str, ffn: str, norm: str, output: str) -> tuple[TensorRule, ...]:
    return (
        TensorRule(f"{layer}.{attn}.bias", Role.ATTN_NORM_BIAS, "layer", ("hidden",)),
        TensorRule(f"{layer}.{ffn}.bias", Role.FFN_NORM_BIAS, "layer", ("hidden",)),
        TensorRule(f"{norm}.bias", Role.OUTPUT_NORM_BIAS, "model", ("hidden",)),
        TensorRule(f"{output}.bias", Role.OUTPUT_BIAS, "model", ("vocab",), "output_bias"),
    )


_HF_NORMS = ("layers.{layer}", "input_layernorm", "post_attention_layernorm", "norm", "lm_head")
_GGUF_NORMS = ("blk.{layer}", "attn_norm", "ffn_norm", "output_norm", "output")
_ROUTER = "layers.{layer}.mlp.router.weight"
_DEFAULTS = {"gating": "sparsemixer", "router_jitter": 0.01}

PHIMOE = Family(
    name="phimoe",
    hf=Form(
        ids=("phimoe",),
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *_biases(*_HF_NORMS),
            *common.HF_ROUTER_MIXTRAL[:1],
            TensorRule(
                "layers.{layer}.mlp.router.weight", Role.ROUTER, "moe", ("experts", "hidden")
            ),
        ),
        experts=common.HF_EXPERTS_MIXTRAL,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_BIAS_KEYS,
            **common.HF_WINDOW_KEYS,
            "output_bias": Key("bool", ("lm_head_bias",)),
            "router_jitter": Key("float", ("router_jitter_noise",)),
        },
        defaults={
            **HF_DEFAULTS,
            **_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 8,
            "top_k": 2,
            "context_length": 131072,
            "rope_theta": 1e6,
            "output_bias": None,
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="half",
        rope_mscales=True,
        drops=common.DROPS,
    ),
    gguf=Form(
        ids=("phimoe",),
        tensors=(*GGUF_TENSORS, *_biases(*_GGUF_NORMS), *_LONGROPE),
        experts=common.GGUF_EXPERTS,
        keys={**common.without(common.GGUF_KEYS, "gating"), **common.GGUF_WIDTH_KEYS},
        defaults={**GGUF_DEFAULTS, **_DEFAULTS},
        rope_pairing="half",
        drops=common.DROPS,
        layer_kinds=False,
    ),
    graph={**PLAIN, "norm": "layer", "qk_norm": "none"},
    top_k=2,
    limits=(
        "longrope: beyond the original context transformers 5.24 keeps the short frequencies; the "
        "long ones are used, as in the published code and in llama.cpp",
        "GGUF does not tell short_mscale and long_mscale: its attention factor is used for both",
        "the router is defined for two experts per token",
        "GGUF does not tell router_jitter_noise: 0.01 is used",
    ),
)
