"""dots.llm1."""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SIGMOID,
)
from colibri_tools.families.schema import Family, Form

__all__ = ["DOTS1"]

DOTS1 = Family(
    name="dots1",
    hf=Form(
        ids=("dots1",),
        architectures=("Dots1ForCausalLM", "Dots1Model"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *common.HF_QK_NORM_HEAD,
            *common.HF_DENSE,
            *common.HF_ROUTER,
            *common.HF_SELECT_BIAS,
            *common.HF_SHARED_EXPERTS,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_BIAS_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_GROUP_KEYS,
            **common.HF_ROUTED_KEYS,
            **common.HF_WINDOW_KEYS,
            **common.HF_LAYER_TYPE_KEYS,
        },
        defaults={
            **HF_DEFAULTS,
            "n_kv_heads": 32,
            "context_length": 2048,
            "gating": 2,
            "window": 4096,
            "window_layers": 62,
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="tail",
    ),
    gguf=Form(
        ids=("dots1",),
        tensors=(
            *GGUF_TENSORS,
            *common.GGUF_QK_NORM_HEAD,
            *common.GGUF_DENSE,
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
    limits=("GGUF does not tell sliding windows: such a file runs without them",),
)
