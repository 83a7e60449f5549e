"""DeepSeek: latent attention (V2, V3, Kimi K2), and the first DeepSeek-MoE."""

from __future__ import annotations

from colibri_tools.container.format import Role
from colibri_tools.families import common
from colibri_tools.families.rows.base import (
    GGUF_DEFAULTS,
    GGUF_TENSORS,
    HF_DEFAULTS,
    HF_TENSORS,
    PLAIN,
    SIGMOID,
)
from colibri_tools.families.schema import REQUIRED, Family, Form, Key, TensorRule

__all__ = ["DEEPSEEK", "DEEPSEEK_V2", "DEEPSEEK_V3"]


def _hf(name: str, role: Role, *shape: str, **switch: str) -> TensorRule:
    return common.layer_rule("layers.{layer}." + name, role, *shape, **switch)


def _gguf(name: str, role: Role, *shape: str, **switch: str) -> TensorRule:
    return common.layer_rule("blk.{layer}." + name, role, *shape, **switch)


_HF_LATENT = (
    *common.HF_MODEL,
    _hf("input_layernorm.weight", Role.ATTN_NORM, "hidden"),
    _hf("self_attn.q_proj.weight", Role.ATTN_Q, "q", "hidden", unless="q_lora"),
    _hf("self_attn.q_a_proj.weight", Role.ATTN_Q_A, "q_lora", "hidden", feature="q_lora"),
    _hf(
        "self_attn.q_a_proj.bias",
        Role.ATTN_Q_A_BIAS,
        "q_lora",
        feature="qkv_bias",
        needs="q_lora",
    ),
    _hf("self_attn.q_a_layernorm.weight", Role.ATTN_Q_A_NORM, "q_lora", feature="q_lora"),
    _hf("self_attn.q_b_proj.weight", Role.ATTN_Q_B, "q", "q_lora", feature="q_lora"),
    _hf("self_attn.kv_a_proj_with_mqa.weight", Role.ATTN_KV_A, "latent", "hidden"),
    _hf("self_attn.kv_a_proj_with_mqa.bias", Role.ATTN_KV_A_BIAS, "latent", feature="qkv_bias"),
    _hf("self_attn.kv_a_layernorm.weight", Role.ATTN_KV_A_NORM, "kv_lora"),
    _hf("self_attn.kv_b_proj.weight", Role.ATTN_KV_B, "kv_b", "kv_lora"),
    _hf("self_attn.o_proj.weight", Role.ATTN_O, "hidden", "attended"),
    _hf("self_attn.o_proj.bias", Role.ATTN_O_BIAS, "hidden", feature="o_bias"),
    _hf("post_attention_layernorm.weight", Role.FFN_NORM, "hidden"),
    *common.HF_DENSE,
    *common.HF_ROUTER,
    *common.HF_SHARED_EXPERTS,
)
_GGUF_LATENT = (
    *common.GGUF_MODEL,
    _gguf("attn_norm.weight", Role.ATTN_NORM, "hidden"),
    _gguf("attn_q.weight", Role.ATTN_Q, "q", "hidden", unless="q_lora"),
    _gguf("attn_q_a.weight", Role.ATTN_Q_A, "q_lora", "hidden", feature="q_lora"),
    _gguf("attn_q_a.bias", Role.ATTN_Q_A_BIAS, "q_lora", feature="qkv_bias", needs="q_lora"),
    _gguf("attn_q_a_norm.weight", Role.ATTN_Q_A_NORM, "q_lora", feature="q_lora"),
    _gguf("attn_q_b.weight", Role.ATTN_Q_B, "q", "q_lora", feature="q_lora"),
    _gguf("attn_kv_a_mqa.weight", Role.ATTN_KV_A, "latent", "hidden"),
    _gguf("attn_kv_a_mqa.bias", Role.ATTN_KV_A_BIAS, "latent", feature="qkv_bias"),
    _gguf("attn_kv_a_norm.weight", Role.ATTN_KV_A_NORM, "kv_lora"),
    _gguf("attn_kv_b.weight", Role.ATTN_KV_B, "kv_b", "kv_lora", unless="split_kv_b"),
    _gguf("attn_k_b.weight", Role.ATTN_K_B, "heads", "kv_lora", "nope", feature="split_kv_b"),
    _gguf("attn_v_b.weight", Role.ATTN_V_B, "heads", "value", "kv_lora", feature="split_kv_b"),
    _gguf("attn_output.weight", Role.ATTN_O, "hidden", "attended"),
    _gguf("attn_output.bias", Role.ATTN_O_BIAS, "hidden", feature="o_bias"),
    _gguf("ffn_norm.weight", Role.FFN_NORM, "hidden"),
    *common.GGUF_DENSE,
    *common.GGUF_ROUTER,
    *common.GGUF_SELECT_BIAS,
    *common.GGUF_SHARED_EXPERTS,
)
"""Keys and values of the latents in one tensor, or (since 2025) in two, the first transposed."""

_HF_LATENT_KEYS = {
    **common.HF_KEYS,
    **common.HF_BIAS_KEYS,
    **common.HF_GROUP_KEYS,
    **common.HF_ROUTED_KEYS,
    "q_lora": Key("int", ("q_lora_rank",)),
    "kv_lora": Key("int", ("kv_lora_rank",)),
    "nope_dim": Key("int", ("qk_nope_head_dim",)),
    "rope_dim": Key("int", ("qk_rope_head_dim",)),
    "value_dim": Key("int", ("v_head_dim",)),
}
_HF_LATENT_DEFAULTS = {
    **HF_DEFAULTS,
    "kv_lora": 512,
    "nope_dim": 128,
    "rope_dim": 64,
    "value_dim": 128,
}
_LATENT = {"attention": "mla", "qk_norm": "none", "latent_norm_eps": 1e-6}
"""transformers gives the norms of latents their own epsilon, whatever the config says."""

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    hf=Form(
        ids=("deepseek_v2",),
        architectures=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
        prefixes=common.HF_PREFIXES,
        tensors=_HF_LATENT,
        experts=common.HF_EXPERTS,
        keys={**_HF_LATENT_KEYS, "group_method": Key("str", ("topk_method",))},
        defaults={
            **_HF_LATENT_DEFAULTS,
            "context_length": 2048,
            "group_method": "greedy",
            "bos_id": 1,
            "eos_ids": (2,),
        },
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=None,
    graph={**PLAIN, **_LATENT},
    limits=(
        "its GGUF architecture, `deepseek2`, is mapped by the row of deepseek_v3",
        "norm_topk_prob is not read, as transformers does not read it",
    ),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    hf=Form(
        ids=("deepseek_v3", "kimi_k2"),
        architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
        prefixes=common.HF_PREFIXES,
        tensors=(*_HF_LATENT, *common.HF_SELECT_BIAS),
        experts=common.HF_EXPERTS,
        keys={**_HF_LATENT_KEYS, **common.HF_NORM_KEYS},
        defaults={
            **_HF_LATENT_DEFAULTS,
            "context_length": 4096,
            "top_k": 8,
            "gating": 2,
            "router_norm": True,
            "router_scale": 2.5,
            "router_groups": 8,
            "router_top_groups": 4,
            "first_dense": 3,
            "bos_id": 0,
            "eos_ids": (1,),
        },
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("deepseek2",),
        tensors=_GGUF_LATENT,
        experts=common.GGUF_EXPERTS,
        keys={
            **common.GGUF_KEYS,
            **common.GGUF_ROUTED_KEYS,
            "head_dim": Key(
                "int", ("{arch}.attention.key_length_mla", "{arch}.attention.key_length")
            ),
            "value_dim": Key(
                "int", ("{arch}.attention.value_length_mla", "{arch}.attention.value_length")
            ),
            "q_lora": Key("int", ("{arch}.attention.q_lora_rank",)),
            "kv_lora": Key("int", ("{arch}.attention.kv_lora_rank",)),
        },
        defaults={**GGUF_DEFAULTS, "kv_lora": REQUIRED, "rope_log_unit": 0.1},
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**SIGMOID, **_LATENT},
    limits=(
        "GGUF holds no `topk_method`: groups of a softmax router are rated by their best expert",
    ),
)

DEEPSEEK = Family(
    name="deepseek",
    hf=Form(
        ids=("deepseek",),
        architectures=("DeepseekForCausalLM", "DeepseekModel"),
        prefixes=common.HF_PREFIXES,
        tensors=(
            *HF_TENSORS,
            *common.HF_DENSE,
            *common.HF_ROUTER,
            *common.HF_SHARED_EXPERTS,
        ),
        experts=common.HF_EXPERTS,
        keys={
            **common.HF_KEYS,
            **common.HF_BIAS_KEYS,
            **common.HF_NORM_KEYS,
            **common.HF_ROUTED_KEYS,
        },
        defaults={**HF_DEFAULTS, "context_length": 2048, "bos_id": 100000, "eos_ids": (100001,)},
        rope_pairing="half",
        drops=common.DROPS,
        windows="none",
    ),
    gguf=Form(
        ids=("deepseek",),
        tensors=(*GGUF_TENSORS, *common.GGUF_DENSE, *common.GGUF_SHARED_EXPERTS),
        experts=common.GGUF_EXPERTS,
        keys={**common.GGUF_KEYS, **common.GGUF_ROUTED_KEYS},
        defaults=GGUF_DEFAULTS,
        rope_pairing="adjacent",
        drops=common.DROPS,
        windows="none",
        layer_kinds=False,
    ),
    graph={**PLAIN, "qk_norm": "none", "router_norm_add": 1e-20},
    limits=(
        "transformers has no such class: checked against Llama with the experts of DeepSeek-V2",
        "weights that are normalised (norm_topk_prob) are not checked against a reference",
    ),
)
