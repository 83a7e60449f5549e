"""HunYuan MoE, version 1."""

from __future__ import annotations

from colibri_tools.container.format import Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SOFTMAX,
)
from colibri_tools.families.schema import Family, Form, Key, TensorRule

__all__ = ["HUNYUAN_MOE"]


def _shared(name: str, role: Role, shape: tuple[str, str]) -> TensorRule:
    pattern = f"layers.{{layer}}.mlp.shared_mlp.{name}.weight"
    return TensorRule(pattern, role, "moe", shape, "shared")


_ATTENTION = "layers.{layer}.self_attn."
_TENSORS = (
    *HF_TENSORS,
    TensorRule(_ATTENTION + "query_layernorm.weight", Role.ATTN_Q_NORM, "layer", ("head",)),
    TensorRule(_ATTENTION + "key_layernorm.weight", Role.ATTN_K_NORM, "layer", ("head",)),
    TensorRule("layers.{layer}.mlp.gate.wg.weight", Role.ROUTER, "moe", ("experts", "hidden")),
    _shared("gate_proj", Role.SHARED_GATE, ("shared", "hidden")),
    _shared("up_proj", Role.SHARED_UP, ("shared", "hidden")),
    _shared("down_proj", Role.SHARED_DOWN, ("hidden", "shared")),
)

HUNYUAN_MOE = Family(
    name="hunyuan_v1_moe",
    hf=Form(
        ids=("hunyuan_v1_moe",),
        architectures=("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Model"),
        prefixes=common.HF_PREFIXES,
        tensors=_TENSORS,
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_BIAS_KEYS,
            "shared_width": Key("int", ("intermediate_size",)),
            "top_k": Key("int", ("moe_topk", "num_experts_per_tok")),
        },
        defaults={
            **HF_DEFAULTS,
            "norm_eps": 1e-5,
            "top_k": 1,
            "context_length": 2048,
            "router_norm": True,
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="half",
        rope_alpha=True,
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("hunyuan-moe",),
        tensors=(*GGUF_TENSORS, *common.GGUF_QK_NORM_HEAD, *common.GGUF_SHARED[:3]),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_WIDTH_KEYS, **common.GGUF_SHARED_KEYS},
        defaults={**GGUF_DEFAULTS, "router_norm": True},
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "head", "qk_norm_after_rope": True},
)
