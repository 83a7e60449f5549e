"""MiniMax-M2."""

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

__all__ = ["MINIMAX_M2"]

MINIMAX_M2 = Family(
    name="minimax_m2",
    hf=Form(
        ids=("minimax_m2",),
        architectures=("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *common.HF_QK_NORM_FULL,
            *common.HF_ROUTER_MIXTRAL,
            common.select_bias("layers.{layer}.block_sparse_moe.e_score_correction_bias"),
            common.select_bias("layers.{layer}.mlp.e_score_correction_bias"),
        ),
        experts=common.HF_EXPERTS_MIXTRAL,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            "rope_dim": Key("int", ("rotary_dim",)),
        },
        defaults={
            **HF_DEFAULTS,
            "n_kv_heads": 8,
            "head_dim": 128,
            "context_length": 196608,
            "top_k": 8,
            "gating": 2,
            "router_norm": True,
            "rope_partial": 1.0,
            "rope_theta": 5e6,
            "bos_id": 200034,
            "eos_ids": (200020,),
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("minimax-m2",),
        tensors=(*GGUF_TENSORS, *common.GGUF_QK_NORM_FULL, *common.GGUF_SELECT_BIAS),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_ROUTED_KEYS},
        defaults={**GGUF_DEFAULTS, "gating": 2, "router_norm": True},
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**PLAIN, "qk_norm": "full"},
)
