"""The family table. Adding a family of a known shape is adding a row.

Defaults are those of the transformers config classes (Hugging Face) and of llama.cpp (GGUF): what
the reference implementation of that source does when the key is not there.
"""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.schema import REQUIRED, Family, Form, Key

__all__ = ["FAMILIES"]

_SOFTMAX = {
    "attention": "gqa",
    "norm": "rms",
    "activation": "silu",
    "router_score": "softmax",
}

_DEFAULTS = {
    "n_layers": REQUIRED,
    "hidden_size": REQUIRED,
    "vocab_size": None,
    "context_length": REQUIRED,
    "n_heads": REQUIRED,
    "n_kv_heads": None,
    "head_dim": None,
    "value_dim": None,
    "activation": "silu",
    "n_experts": None,
    "top_k": REQUIRED,
    "expert_width": None,
    "shared_width": None,
    "dense_width": None,
    "router_norm": False,
    "router_scale": 1.0,
    "gating": 1,
    "moe_step": 1,
    "dense_layers": (),
    "window": None,
    "use_window": True,
    "window_layers": 0,
    "layer_types": None,
    "clip_qkv": None,
    "attention_scale": None,
    "qkv_bias": None,
    "o_bias": None,
    "rope_theta": 10000.0,
    "bos_id": None,
    "eos_ids": (),
}
_HF_DEFAULTS = {**_DEFAULTS, "norm_eps": 1e-6, "tied": False}
_GGUF_DEFAULTS = {
    **_DEFAULTS,
    "n_experts": REQUIRED,
    "norm_eps": REQUIRED,
    "tied": None,
    "rope_dim": None,
    "rope_kind": None,
    "rope_scale": None,
    "rope_attention_factor": 1.0,
    "rope_original_context": None,
    "rope_log_multiplier": 0.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
}

_HF_TENSORS = (*common.HF_MODEL, *common.HF_ATTENTION)
_GGUF_TENSORS = (*common.GGUF_MODEL, *common.GGUF_ATTENTION, *common.GGUF_ROUTER)

MIXTRAL = Family(
    name="mixtral",
    hf=Form(
        ids=("mixtral",),
        architectures=("MixtralForCausalLM", "MixtralModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*_HF_TENSORS, *common.HF_ROUTER_MIXTRAL),
        experts=common.HF_EXPERTS_MIXTRAL,
        keys={**common.HF_KEYS, **common.HF_WIDTH_KEYS, **common.HF_WINDOW_KEYS},
        defaults={
            **_HF_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 8,
            "top_k": 2,
            "context_length": 131072,
            "router_norm": True,
            "rope_theta": 1e6,
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="half",
        drops=common.DROPS,
    ),
    gguf=Form(
        ids=("llama",),
        tensors=_GGUF_TENSORS,
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_WIDTH_KEYS},
        defaults={**_GGUF_DEFAULTS, "router_norm": True},
        rope_pairing="adjacent",
        drops=common.DROPS,
        layer_kinds=False,
    ),
    graph={**_SOFTMAX, "qk_norm": "none"},
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    hf=Form(
        ids=("qwen2_moe",),
        architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*_HF_TENSORS, *common.HF_DENSE, *common.HF_ROUTER, *common.HF_SHARED),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_QWEN_KEYS,
            **common.HF_SHARED_KEYS,
            **common.HF_LAYER_TYPE_KEYS,
            "qkv_bias": Key("bool", ("qkv_bias",)),
        },
        defaults={
            **_HF_DEFAULTS,
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
        tensors=(*_GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_SHARED),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_QWEN_KEYS, **common.GGUF_SHARED_KEYS},
        defaults=_GGUF_DEFAULTS,
        rope_pairing="half",
        drops=common.DROPS,
        windows="layer_types",
        layer_kinds=False,
    ),
    graph={**_SOFTMAX, "qk_norm": "none"},
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    hf=Form(
        ids=("qwen3_moe",),
        architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*_HF_TENSORS, *common.HF_DENSE, *common.HF_ROUTER, *common.HF_QK_NORM_HEAD),
        experts=common.HF_EXPERTS,
        keys={**common.HF_KEYS, **common.HF_QWEN_KEYS, **common.HF_BIAS_KEYS},
        defaults={
            **_HF_DEFAULTS,
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
        tensors=(*_GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_QK_NORM_HEAD),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_QWEN_KEYS},
        defaults={**_GGUF_DEFAULTS, "router_norm": True},
        rope_pairing="half",
        drops=common.DROPS,
        layer_kinds=False,
    ),
    graph={**_SOFTMAX, "qk_norm": "head"},
)

OLMOE = Family(
    name="olmoe",
    hf=Form(
        ids=("olmoe",),
        architectures=("OlmoeForCausalLM", "OlmoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*_HF_TENSORS, *common.HF_ROUTER, *common.HF_QK_NORM_FULL),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_BIAS_KEYS,
            "clip_qkv": Key("float", ("clip_qkv",)),
        },
        defaults={
            **_HF_DEFAULTS,
            "norm_eps": 1e-5,
            "top_k": 8,
            "context_length": 4096,
            "eos_ids": (50279,),
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("olmoe",),
        tensors=(*_GGUF_TENSORS, *common.GGUF_QK_NORM_FULL),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_WIDTH_KEYS},
        defaults=_GGUF_DEFAULTS,
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**_SOFTMAX, "qk_norm": "full"},
)

FAMILIES: tuple[Family, ...] = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE)
"""All families, one row each."""
