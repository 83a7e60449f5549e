"""ERNIE 4.5."""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    PLAIN,
)
from colibri_tools.families.schema import Family, Form, Key

__all__ = ["ERNIE4_5_MOE"]

ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    hf=Form(
        ids=("ernie4_5_moe",),
        architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *common.HF_DENSE,
            *common.HF_ROUTER,
            common.select_bias("layers.{layer}.mlp.moe_statics.e_score_correction_bias"),
            common.select_bias("layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias"),
            *common.HF_SHARED_EXPERTS,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_ROUTED_KEYS,
            "n_experts": Key("int", ("moe_num_experts",)),
            "top_k": Key("int", ("moe_k",)),
            "n_shared": Key("int", ("moe_num_shared_experts",)),
            "first_dense": Key("int", ("moe_layer_start_index",)),
            "last_moe": Key("last", ("moe_layer_end_index",)),
            "moe_step": Key("int", ("moe_layer_interval",)),
            "router_norm_min": Key("float", ("moe_norm_min",)),
            "qkv_bias": Key("bool", ("use_bias",)),
            "o_bias": Key("bool", ("use_bias",)),
        },
        defaults={
            **HF_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 4,
            "context_length": 131072,
            "top_k": 6,
            "router_norm": True,
            "router_norm_min": 1e-12,
            "first_dense": 1,
            "tied": True,
            "rope_theta": 500000.0,
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("ernie4_5-moe",),
        tensors=(
            *GGUF_TENSORS,
            *common.GGUF_DENSE,
            *common.GGUF_SELECT_BIAS,
            *common.GGUF_SHARED_EXPERTS,
        ),
        experts=common.GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_ROUTED_KEYS,
            "moe_step": Key("int", ("{arch}.interleave_moe_layer_step",)),
        },
        defaults={**GGUF_DEFAULTS, "router_norm": True, "router_norm_min": 6.103515625e-05},
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**PLAIN, "qk_norm": "none"},
    limits=(
        "biases of feed-forward networks (use_bias) are refused as unknown tensors",
        "GGUF does not tell moe_norm_min: llama.cpp's 2^-14 is used",
    ),
)
