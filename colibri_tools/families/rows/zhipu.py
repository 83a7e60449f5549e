"""GLM-4.5 and its relatives."""

from __future__ import annotations

from colibri_tools.container.format import Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
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
    gguf=Form(
        ids=("glm4moe",),
        tensors=(
            *common.GGUF_MODEL,
            *common.GGUF_PROJECTIONS,
            *common.GGUF_QK_NORM_HEAD_OPTIONAL,
            common.layer_rule("blk.{layer}.attn_norm.weight", Role.ATTN_NORM, "hidden"),
            common.layer_rule("blk.{layer}.post_attention_norm.weight", Role.FFN_NORM, "hidden"),
            *common.GGUF_DENSE,
            *common.GGUF_ROUTER,
            *common.GGUF_SELECT_BIAS,
            *common.GGUF_SHARED_EXPERTS,
        ),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_ROUTED_KEYS},
        defaults={**GGUF_DEFAULTS, "gating": 2},
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**SIGMOID, "qk_norm": "head"},
)
