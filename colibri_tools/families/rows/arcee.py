"""AFMoE (Trinity)."""

from __future__ import annotations

from colibri_tools.container.format import Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import HF_DEFAULTS, SIGMOID
from colibri_tools.families.schema import Family, Form, Key, TensorRule

__all__ = ["AFMOE"]


def _hf(name: str, role: Role, shape: tuple[str, ...], where: str = "layer") -> TensorRule:
    pattern = "layers.{layer}." + name
    return TensorRule(pattern, role, "moe" if where == "moe" else "layer", shape)


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
            _hf("input_layernorm.weight", Role.ATTN_NORM, ("hidden",)),
            _hf("self_attn.gate_proj.weight", Role.ATTN_GATE, ("attended", "hidden")),
            _hf("post_attention_layernorm.weight", Role.ATTN_POST_NORM, ("hidden",)),
            _hf("pre_mlp_layernorm.weight", Role.FFN_NORM, ("hidden",)),
            _hf("post_mlp_layernorm.weight", Role.FFN_POST_NORM, ("hidden",)),
            *common.HF_DENSE,
            _hf("mlp.router.gate.weight", Role.ROUTER, ("experts", "hidden"), "moe"),
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
    gguf=None,
    graph={**SIGMOID, "qk_norm": "head", "attention_gate": True, "post_norm": True},
    rope_layers="sliding",
)
