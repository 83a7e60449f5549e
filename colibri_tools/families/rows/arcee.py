"""AFMoE (Trinity)."""

from __future__ import annotations

from dataclasses import replace

from colibri_tools.container.format import Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import GGUF_DEFAULTS, HF_DEFAULTS, SIGMOID
from colibri_tools.families.schema import Family, Form, Key, TensorRule

__all__ = ["AFMOE"]


def _hf(name: str, role: Role, *shape: str) -> TensorRule:
    return common.layer_rule("layers.{layer}." + name + ".weight", role, *shape)


def _gguf(name: str, role: Role, *shape: str) -> TensorRule:
    return common.layer_rule("blk.{layer}." + name + ".weight", role, *shape)


AFMOE = Family(
    name="afmoe",
    hf=Form(
        ids=("afmoe",),
        architectures=("AfmoeForCausalLM", "AfmoeModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *common.HF_MODEL,
            *common.HF_PROJECTIONS,
            *common.HF_QK_NORM_HEAD,
            _hf("input_layernorm", Role.ATTN_NORM, "hidden"),
            _hf("self_attn.gate_proj", Role.ATTN_GATE, "attended", "hidden"),
            _hf("post_attention_layernorm", Role.ATTN_POST_NORM, "hidden"),
            _hf("pre_mlp_layernorm", Role.FFN_NORM, "hidden"),
            _hf("post_mlp_layernorm", Role.FFN_POST_NORM, "hidden"),
            *common.HF_DENSE,
            replace(common.HF_ROUTER[0], pattern="layers.{layer}.mlp.router.gate.weight"),
            common.select_bias("layers.{layer}.mlp.expert_bias"),
            *common.HF_SHARED_EXPERTS,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_BIAS_KEYS,
            **common.HF_ROUTED_KEYS,
            **common.HF_WINDOW_KEYS,
            "n_experts": Key("int", ("num_experts",)),
            "n_shared": Key("int", ("num_shared_experts",)),
            "first_dense": Key("int", ("num_dense_layers",)),
            "router_scale": Key("float", ("route_scale",)),
            "layer_types": Key("strs", ("layer_types",)),
            "window_pattern": Key("pattern", ("global_attn_every_n_layers",)),
            "scaled_embedding": Key("bool", ("mup_enabled",)),
        },
        defaults={
            **HF_DEFAULTS,
            "norm_eps": 1e-5,
            "head_dim": 128,
            "context_length": 16384,
            "top_k": 6,
            "gating": 2,
            "router_norm": True,
            "first_dense": 1,
            "window": 1024,
            "window_pattern": 4,
        },
        rope_pairing="half",
        drops=common.DROPS,
        windows="pattern",
    ),
    gguf=Form(
        ids=("afmoe",),
        tensors=(
            *common.GGUF_MODEL,
            *common.GGUF_PROJECTIONS,
            *common.GGUF_QK_NORM_HEAD,
            _gguf("attn_norm", Role.ATTN_NORM, "hidden"),
            _gguf("attn_gate", Role.ATTN_GATE, "attended", "hidden"),
            _gguf("post_attention_norm", Role.ATTN_POST_NORM, "hidden"),
            _gguf("ffn_norm", Role.FFN_NORM, "hidden"),
            _gguf("post_ffw_norm", Role.FFN_POST_NORM, "hidden"),
            *common.GGUF_DENSE,
            *common.GGUF_ROUTER,
            *common.GGUF_SELECT_BIAS,
            *common.GGUF_SHARED_EXPERTS,
        ),
        experts=common.GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_LOCAL_ROPE_KEYS,
            **common.GGUF_ROUTED_KEYS,
            "window_pattern": Key("pattern", ("{arch}.attention.sliding_window_pattern",)),
        },
        defaults={**GGUF_DEFAULTS, "gating": 2, "window_pattern": 4, "scaled_embedding": True},
        rope_pairing="half",
        local_rope="scaled",
        drops=common.DROPS,
        windows="pattern",
        layer_kinds=False,
    ),
    graph={**SIGMOID, "qk_norm": "head", "attention_gate": True, "post_norm": True},
    rope_layers="sliding",
    limits=("GGUF does not tell mup_enabled: embeddings are scaled, as llama.cpp does",),
)
