"""Mellum 2."""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SOFTMAX,
)
from colibri_tools.families.schema import Family, Form, Key

__all__ = ["MELLUM"]

MELLUM = Family(
    name="mellum",
    hf=Form(
        ids=("mellum",),
        architectures=("MellumForCausalLM", "MellumModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*HF_TENSORS, *common.HF_DENSE, *common.HF_ROUTER, *common.HF_QK_NORM_HEAD),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WINDOW_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_BIAS_KEYS,
            "expert_width": Key("int", ("moe_intermediate_size",)),
            "dense_width": Key("int", ("intermediate_size",)),
            "ffn_types": Key("strs", ("mlp_layer_types",)),
            "layer_types": Key("strs", ("layer_types",)),
        },
        defaults={
            **HF_DEFAULTS,
            "n_kv_heads": 4,
            "head_dim": 128,
            "top_k": 8,
            "context_length": 131072,
            "router_norm": True,
            "window": 1024,
        },
        rope_pairing="half",
        rope_default={
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        drops=common.DROPS,
        windows="layer_types",
    ),
    gguf=Form(
        ids=("mellum",),
        tensors=(*GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_QK_NORM_HEAD),
        experts=common.GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_QWEN_KEYS,
            **common.GGUF_LOCAL_ROPE_KEYS,
            "window_pattern": Key("pattern", ("{arch}.attention.sliding_window_pattern",)),
        },
        defaults={**GGUF_DEFAULTS, "router_norm": True, "window_pattern": 4},
        rope_pairing="half",
        local_rope="unscaled",
        drops=common.DROPS,
        windows="pattern",
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "head"},
    limits=(
        "GGUF does not tell the rope scaling of layers with a window: there is none, as in "
        "llama.cpp; their base is rope.freq_base_swa, as in transformers",
    ),
)
