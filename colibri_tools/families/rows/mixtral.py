"""Mixtral."""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SOFTMAX,
)
from colibri_tools.families.schema import Family, Form

__all__ = ["MIXTRAL"]

MIXTRAL = Family(
    name="mixtral",
    hf=Form(
        ids=("mixtral",),
        architectures=("MixtralForCausalLM", "MixtralModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*HF_TENSORS, *common.HF_ROUTER_MIXTRAL),
        experts=common.HF_EXPERTS_MIXTRAL,
        keys={**common.HF_KEYS, **common.HF_WIDTH_KEYS, **common.HF_WINDOW_KEYS},
        defaults={
            **HF_DEFAULTS,
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
        tensors=GGUF_TENSORS,
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_WIDTH_KEYS},
        defaults={**GGUF_DEFAULTS, "router_norm": True},
        rope_pairing="adjacent",
        drops=common.DROPS,
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "none"},
)
