"""K-EXAONE."""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SIGMOID,
)
from colibri_tools.families.schema import Family, Form, Key

__all__ = ["EXAONE_MOE"]

EXAONE_MOE = Family(
    name="exaone_moe",
    hf=Form(
        ids=("exaone_moe",),
        architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *common.HF_QK_NORM_HEAD,
            *common.HF_DENSE,
            *common.HF_ROUTER,
            common.select_bias("layers.{layer}.mlp.e_score_correction_bias"),
            *common.HF_SELECT_BIAS,
            *common.HF_SHARED_EXPERTS,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_GROUP_KEYS,
            **common.HF_ROUTED_KEYS,
            **common.HF_WINDOW_KEYS,
            "n_experts": Key("int", ("num_experts",)),
            "n_shared": Key("int", ("num_shared_experts",)),
            "first_dense": Key("int", ("first_k_dense_replace", "first_last_k_dense_replace")),
            "ffn_types": Key("strs", ("mlp_layer_types",)),
            "layer_types": Key("strs", ("layer_types",)),
            "window_pattern": Key("pattern", ("sliding_window_pattern",)),
        },
        defaults={
            **HF_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 32,
            "context_length": 2048,
            "top_k": 8,
            "gating": 2,
            "router_norm": True,
            "router_scale": 2.5,
            "first_dense": 1,
            "window": 4096,
            "window_pattern": 4,
            "bos_id": 1,
            "eos_ids": (53,),
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="pattern",
    ),
    gguf=Form(
        ids=("exaone-moe",),
        tensors=(
            *GGUF_TENSORS,
            *common.GGUF_QK_NORM_HEAD,
            *common.GGUF_DENSE,
            *common.GGUF_SELECT_BIAS,
            *common.GGUF_SHARED_EXPERTS,
        ),
        experts=common.GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_ROUTED_KEYS,
            "window_pattern": Key("pattern", ("{arch}.attention.sliding_window_pattern",)),
        },
        defaults={**GGUF_DEFAULTS, "gating": 2, "window_pattern": 4},
        rope_pairing="half",
        drops=common.DROPS,
        windows="pattern",
        layer_kinds=False,
    ),
    graph={**SIGMOID, "qk_norm": "head"},
    rope_layers="sliding",
    limits=("the multi-token-prediction block is left out",),
)
