"""Granite MoE, with and without a shared expert."""

from __future__ import annotations

from colibri_tools.container.format import PartRole, Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    SOFTMAX,
)
from colibri_tools.families.schema import REQUIRED, ExpertRule, Family, Form, Key, TensorRule

__all__ = ["GRANITE_MOE"]

_MOE = "layers.{layer}.block_sparse_moe."
_SHARED = "layers.{layer}.shared_mlp."


def _shared(name: str, role: Role, shape: tuple[str, str], *below: Role) -> TensorRule:
    return TensorRule(_SHARED + name + ".weight", role, "moe", shape, "shared", below=below)


_TENSORS = (
    *HF_TENSORS,
    TensorRule(_MOE + "router.layer.weight", Role.ROUTER, "moe", ("experts", "hidden")),
    TensorRule(_MOE + "router.weight", Role.ROUTER, "moe", ("experts", "hidden")),
    _shared("gate_proj", Role.SHARED_GATE, ("shared", "hidden")),
    _shared("up_proj", Role.SHARED_UP, ("shared", "hidden")),
    _shared("output_linear", Role.SHARED_DOWN, ("hidden", "shared")),
    _shared("input_linear", Role.SHARED_GATE, ("shared", "hidden"), Role.SHARED_UP),
)
_EXPERTS = (
    ExpertRule(_MOE + "input_linear.weight", (PartRole.GATE, PartRole.UP)),
    ExpertRule(_MOE + "output_linear.weight", (PartRole.DOWN,)),
    ExpertRule(_MOE + "experts.gate_up_proj", (PartRole.GATE, PartRole.UP)),
    ExpertRule(_MOE + "experts.down_proj", (PartRole.DOWN,)),
    ExpertRule(_MOE + "experts.{expert}.gate_proj.weight", (PartRole.GATE,)),
    ExpertRule(_MOE + "experts.{expert}.up_proj.weight", (PartRole.UP,)),
    ExpertRule(_MOE + "experts.{expert}.down_proj.weight", (PartRole.DOWN,)),
)
_SCALES = {"embedding_scale": 1.0, "residual_scale": 1.0}

GRANITE_MOE = Family(
    name="granitemoe",
    hf=Form(
        ids=("granitemoe", "granitemoeshared"),
        architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        prefixes=common.HF_PREFIXES,
        tensors=_TENSORS,
        experts=_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_BIAS_KEYS,
            "shared_width": Key("int", ("shared_intermediate_size",)),
            "embedding_scale": Key("float", ("embedding_multiplier",)),
            "residual_scale": Key("float", ("residual_multiplier",)),
            "attention_scale": Key("float", ("attention_multiplier",)),
            "logit_divisor": Key("float", ("logits_scaling",)),
        },
        defaults={
            **HF_DEFAULTS,
            **_SCALES,
            "attention_scale": 1.0,
            "logit_divisor": 1.0,
            "top_k": 2,
            "context_length": 2048,
            "router_norm": True,
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("granitemoe",),
        tensors=(*GGUF_TENSORS, *common.GGUF_SHARED[:3]),
        experts=common.GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_WIDTH_KEYS,
            **common.GGUF_SHARED_KEYS,
            "embedding_scale": Key("float", ("{arch}.embedding_scale",)),
            "residual_scale": Key("float", ("{arch}.residual_scale",)),
            "logit_divisor": Key("float", ("{arch}.logit_scale",)),
        },
        defaults={**GGUF_DEFAULTS, **_SCALES, "logit_divisor": REQUIRED, "router_norm": True},
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**SOFTMAX, "qk_norm": "none"},
)
