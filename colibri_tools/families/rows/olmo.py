"""OLMoE and its relatives."""

from __future__ import annotations

from colibri_tools.container.format import Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    PLAIN,
    SOFTMAX,
)
from colibri_tools.families.schema import Family, Form, Key

__all__ = ["FLEX_OLMO", "OLMOE"]

OLMOE = Family(
    name="olmoe",
    hf=Form(
        ids=("olmoe",),
        architectures=("OlmoeForCausalLM", "OlmoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(*HF_TENSORS, *common.HF_ROUTER, *common.HF_QK_NORM_FULL),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_BIAS_KEYS,
            "clip_qkv": Key("float", ("clip_qkv",)),
        },
        defaults={
            **HF_DEFAULTS,
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
        tensors=(*GGUF_TENSORS, *common.GGUF_QK_NORM_FULL),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_WIDTH_KEYS},
        defaults=GGUF_DEFAULTS,
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "full"},
)


FLEX_OLMO = Family(
    name="flex_olmo",
    hf=Form(
        ids=("flex_olmo",),
        architectures=("FlexOlmoForCausalLM", "FlexOlmoModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *common.HF_MODEL,
            *common.HF_PROJECTIONS,
            *common.HF_QK_NORM_FULL,
            common.layer_rule(
                "layers.{layer}.post_attention_layernorm.weight", Role.ATTN_POST_NORM, "hidden"
            ),
            common.layer_rule(
                "layers.{layer}.post_feedforward_layernorm.weight", Role.FFN_POST_NORM, "hidden"
            ),
            *common.HF_ROUTER,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_BIAS_KEYS,
        },
        defaults={
            **HF_DEFAULTS,
            "context_length": 4096,
            "top_k": 5,
            "rope_theta": 500000.0,
            "eos_ids": (100257,),
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=None,
    graph={**PLAIN, "qk_norm": "full", "pre_norm": False, "post_norm": True},
    limits=("llama.cpp has no such architecture",),
)
