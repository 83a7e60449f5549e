"""GLM-4.5 and its relatives."""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    HF_DEFAULTS,
    HF_TENSORS,
    SIGMOID,
)
from colibri_tools.families.schema import Family, Form, Key

__all__ = ["GLM4_MOE"]

GLM4_MOE = Family(
    name="glm4_moe",
    hf=Form(
        ids=("glm4_moe",),
        architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *common.HF_QK_NORM_HEAD_OPTIONAL,
            *common.HF_DENSE,
            *common.HF_ROUTER,
            *common.HF_SELECT_BIAS,
            *common.HF_SHARED_EXPERTS,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_GROUP_KEYS,
            **common.HF_ROUTED_KEYS,
            "qkv_bias": Key("bool", ("attention_bias",)),
            "qk_norm": Key("bool", ("use_qk_norm",)),
        },
        defaults={
            **HF_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 8,
            "context_length": 131072,
            "top_k": 8,
            "gating": 2,
            "router_norm": True,
            "first_dense": 1,
            "rope_partial": 0.5,
            "qk_norm": False,
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=None,
    graph={**SIGMOID, "qk_norm": "head"},
)
