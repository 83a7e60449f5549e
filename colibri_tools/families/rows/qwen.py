"""The Qwen families."""

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

__all__ = ["QWEN2_MOE", "QWEN3_MOE"]

QWEN2_MOE = Family(
    name="qwen2_moe",
    hf=Form(
        ids=("qwen2_moe",),
        architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*HF_TENSORS, *common.HF_DENSE, *common.HF_ROUTER, *common.HF_SHARED),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_QWEN_KEYS,
            **common.HF_SHARED_KEYS,
            **common.HF_LAYER_TYPE_KEYS,
            "qkv_bias": Key("bool", ("qkv_bias",)),
        },
        defaults={
            **HF_DEFAULTS,
            "n_kv_heads": 16,
            "top_k": 4,
            "context_length": 32768,
            "use_window": False,
            "window": 4096,
            "window_layers": 28,
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="layer_types",
    ),
    gguf=Form(
        ids=("qwen2moe",),
        tensors=(*GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_SHARED),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_QWEN_KEYS, **common.GGUF_SHARED_KEYS},
        defaults=GGUF_DEFAULTS,
        rope_pairing="half",
        drops=common.DROPS,
        windows="layer_types",
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "none"},
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    hf=Form(
        ids=("qwen3_moe",),
        architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*HF_TENSORS, *common.HF_DENSE, *common.HF_ROUTER, *common.HF_QK_NORM_HEAD),
        experts=common.HF_EXPERTS,
        keys={**common.HF_KEYS, **common.HF_QWEN_KEYS, **common.HF_BIAS_KEYS},
        defaults={
            **HF_DEFAULTS,
            "n_kv_heads": 4,
            "top_k": 8,
            "context_length": 32768,
            "use_window": False,
            "window": 4096,
        },
        rope_pairing="half",
        drops=common.DROPS,
    ),
    gguf=Form(
        ids=("qwen3moe",),
        tensors=(*GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_QK_NORM_HEAD),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_QWEN_KEYS},
        defaults={**GGUF_DEFAULTS, "router_norm": True},
        rope_pairing="half",
        drops=common.DROPS,
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "head"},
)
