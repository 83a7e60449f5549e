"""The text model of Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_tools.container.format import PartRole, Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    PLAIN,
)
from colibri_tools.families.schema import ExpertRule, Family, Form, Key, TensorRule

__all__ = ["LLAMA4"]

_FFN = "layers.{layer}.feed_forward."
_GATE_UP = (PartRole.GATE, PartRole.UP)
_DOWN = (PartRole.DOWN,)


def _network(at: str, first: Role, where: Any, width: str) -> tuple[TensorRule, ...]:
    feature = "shared" if width == "shared" else None
    shapes = ((width, "hidden"), (width, "hidden"), ("hidden", width))
    return tuple(
        TensorRule(f"{_FFN}{at}{name}_proj.weight", Role(first + i), where, shapes[i], feature)
        for i, name in enumerate(("gate", "up", "down"))
    )


_TENSORS = (
    *HF_TENSORS,
    TensorRule(_FFN + "router.weight", Role.ROUTER, "moe", ("experts", "hidden")),
    *_network("shared_expert.", Role.SHARED_GATE, "moe", "shared"),
    *_network("", Role.DENSE_GATE, "dense", "dense"),
)
_EXPERTS = (
    ExpertRule(_FFN + "experts.gate_up_proj", _GATE_UP, transposed=True),
    ExpertRule(_FFN + "experts.down_proj", _DOWN, transposed=True),
    ExpertRule(_FFN + "experts.{expert}.gate_proj.weight", _GATE_UP[:1]),
    ExpertRule(_FFN + "experts.{expert}.up_proj.weight", _GATE_UP[1:]),
    ExpertRule(_FFN + "experts.{expert}.down_proj.weight", _DOWN),
)


def _rope_layers(hyper: Mapping[str, Any]) -> list[int]:
    every = hyper["rope_interval"] or hyper["n_layers"] + 1
    return [int((layer + 1) % every != 0) for layer in range(hyper["n_layers"])]


def _layer_types(hyper: Mapping[str, Any]) -> list[str]:
    chunked = "chunked_attention" if hyper["chunk"] else "full_attention"
    return [chunked if rope else "full_attention" for rope in hyper["rope_layers"]]


def _ffn_types(hyper: Mapping[str, Any]) -> list[str] | None:
    if hyper["moe_layers"] is None:
        return None
    listed = set(hyper["moe_layers"])
    return ["sparse" if layer in listed else "dense" for layer in range(hyper["n_layers"])]


_DEFAULTS: dict[str, Any] = {
    "gating": "topk_sigmoid",
    "chunk": 8192,
    "rope_interval": 4,
    "temperature": True,
    "temperature_floor": 8192.0,
    "temperature_scale": 0.1,
    "moe_layers": None,
    "rope_layers": _rope_layers,
    "layer_types": _layer_types,
    "ffn_types": _ffn_types,
}

LLAMA4 = Family(
    name="llama4",
    hf=Form(
        ids=("llama4", "llama4_text"),
        architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        prefixes=common.HF_PREFIXES,
        tensors=_TENSORS,
        experts=_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_WIDTH_KEYS,
            **common.HF_BIAS_KEYS,
            "shared_width": Key("int", ("intermediate_size",)),
            "dense_width": Key("int", ("intermediate_size_mlp",)),
            "moe_step": Key("int", ("interleave_moe_layer_step",)),
            "moe_layers": Key("ints", ("moe_layers",)),
            "chunk": Key("int", ("attention_chunk_size",)),
            "rope_interval": Key("int", ("no_rope_layer_interval",)),
            "rope_layers": Key("flags", ("no_rope_layers",)),
            "layer_types": Key("strs", ("layer_types",)),
            "use_qk_norm": Key("bool", ("use_qk_norm",)),
            "temperature": Key("flag", ("attn_temperature_tuning",)),
            "temperature_floor": Key("float", ("floor_scale",)),
            "temperature_scale": Key("float", ("attn_scale",)),
        },
        defaults={
            **HF_DEFAULTS,
            **_DEFAULTS,
            "norm_eps": 1e-5,
            "n_kv_heads": 8,
            "head_dim": 128,
            "top_k": 1,
            "context_length": 131072,
            "rope_theta": 500000.0,
            "use_qk_norm": True,
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="layer_types",
    ),
    gguf=Form(
        ids=("llama4",),
        tensors=(*GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_SHARED[:3]),
        experts=common.GGUF_EXPERTS,
        keys={
            **common.without(common.GGUF_KEYS, "gating", "window"),
            **common.GGUF_QWEN_KEYS,
            **common.GGUF_LOCAL_ROPE_KEYS,
            "chunk": Key("int", ("{arch}.attention.sliding_window",)),
        },
        # As llama.cpp: a window of 0 means rope everywhere, and 128 experts no norms of q and k.
        defaults={
            **GGUF_DEFAULTS,
            **_DEFAULTS,
            "rope_interval": lambda hyper: 4 if hyper["chunk"] else 0,
            "use_qk_norm": lambda hyper: hyper["n_experts"] != 128,
        },
        rope_pairing="adjacent",
        local_rope="scaled",
        drops=common.DROPS,
        windows="layer_types",
        layer_kinds=False,
    ),
    graph={
        **PLAIN,
        "qk_norm": "l2",
        "qk_norm_after_rope": True,
        "experts_scale_input": True,
    },
    limits=("GGUF does not tell chunks, temperature and norms: llama.cpp's constants are used",),
)
