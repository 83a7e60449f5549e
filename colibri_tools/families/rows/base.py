"""What most rows of the family table share.

Defaults are those of the transformers config classes (Hugging Face) and of llama.cpp (GGUF): what
the reference implementation of that source does when the key is not there.
"""

from __future__ import annotations

from colibri_tools.families import common
from colibri_tools.families.schema import REQUIRED

__all__ = [
    "DEFAULTS",
    "GGUF_DEFAULTS",
    "GGUF_TENSORS",
    "HF_DEFAULTS",
    "HF_TENSORS",
    "PLAIN",
    "SIGMOID",
    "SOFTMAX",
]

PLAIN = {"attention": "gqa", "norm": "rms", "activation": "silu"}
SOFTMAX = {**PLAIN, "router_score": "softmax"}
SIGMOID = {**PLAIN, "router_norm_add": 1e-20}
"""The router of DeepSeek-V3 and those that follow it; form defaults say `gating` 2."""

DEFAULTS = {
    "n_layers": REQUIRED,
    "hidden_size": REQUIRED,
    "vocab_size": None,
    "context_length": REQUIRED,
    "n_heads": REQUIRED,
    "n_kv_heads": None,
    "head_dim": None,
    "value_dim": None,
    "activation": "silu",
    "n_experts": None,
    "top_k": REQUIRED,
    "expert_width": None,
    "shared_width": None,
    "n_shared": None,
    "dense_width": None,
    "router_norm": False,
    "router_scale": 1.0,
    "gating": 1,
    "moe_step": 1,
    "dense_layers": (),
    "first_dense": 0,
    "last_moe": -1,
    "ffn_types": None,
    "router_groups": None,
    "router_top_groups": None,
    "group_method": None,
    "router_norm_min": None,
    "q_lora": None,
    "kv_lora": None,
    "nope_dim": None,
    "rope_dim": None,
    "scaled_embedding": False,
    "window": None,
    "use_window": True,
    "window_layers": 0,
    "layer_types": None,
    "window_pattern": None,
    "clip_qkv": None,
    "attention_scale": None,
    "qkv_bias": None,
    "o_bias": None,
    "rope_theta": 10000.0,
    "attention_softcap": None,
    "logit_softcap": None,
    "router_softcap": None,
    "bos_id": None,
    "eos_ids": (),
}
HF_DEFAULTS = {**DEFAULTS, "norm_eps": 1e-6, "tied": False, "rope_partial": None}
GGUF_DEFAULTS = {
    **DEFAULTS,
    "n_experts": REQUIRED,
    "norm_eps": REQUIRED,
    "tied": None,
    "rope_kind": None,
    "rope_scale": None,
    "rope_attention_factor": 1.0,
    "rope_original_context": None,
    "rope_log_multiplier": 0.0,
    "rope_log_unit": 1.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": True,
    "rope_theta_local": None,
}

HF_TENSORS = (*common.HF_MODEL, *common.HF_ATTENTION)
GGUF_TENSORS = (*common.GGUF_MODEL, *common.GGUF_ATTENTION, *common.GGUF_ROUTER)
