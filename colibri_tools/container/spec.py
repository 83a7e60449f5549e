"""The keys of the spec (docs/format.md, section 7) and the rules about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_tools.container.checks import RuleError
from colibri_tools.container.kv import KvType
from colibri_tools.errors import quote

__all__ = ["OPTIONAL_SPEC_KEYS", "SPEC_KEYS", "check_spec"]

SPEC_KEYS: Mapping[str, KvType] = {
    "family": KvType.STRING,
    "source_kind": KvType.STRING,
    "executable": KvType.BOOL,
    "executable_lacks": KvType.STRING,
    "order": KvType.STRING,
    "n_layers": KvType.U64,
    "n_mtp_layers": KvType.U64,
    "hidden_size": KvType.U64,
    "vocab_size": KvType.U64,
    "context_length": KvType.U64,
    "top_k": KvType.U64,
    "expert_width": KvType.U64,
    "total_params": KvType.U64,
    "active_params": KvType.U64,
    "moe_layers": KvType.U64_ARRAY,
    "tokenizer": KvType.STRING,
    "tokenizer_lacks": KvType.STRING,
    "bos_id": KvType.I64,
    "eos_ids": KvType.U64_ARRAY,
    "n_tokens": KvType.U64,
    "graph.attention": KvType.STRING,
    "graph.n_heads": KvType.U64,
    "graph.n_kv_heads": KvType.U64,
    "graph.head_dim": KvType.U64,
    "graph.attention_scale": KvType.F64,
    "graph.qkv_bias": KvType.BOOL,
    "graph.o_bias": KvType.BOOL,
    "graph.qk_norm": KvType.STRING,
    "graph.clip_qkv": KvType.F64,
    "graph.windows": KvType.U64_ARRAY,
    "graph.norm": KvType.STRING,
    "graph.norm_eps": KvType.F64,
    "graph.rope_dim": KvType.U64,
    "graph.rope_pairing": KvType.STRING,
    "graph.rope_inv_freq": KvType.F64_ARRAY,
    "graph.rope_factor": KvType.F64,
    "graph.rope_inv_freq_long": KvType.F64_ARRAY,
    "graph.rope_factor_long": KvType.F64,
    "graph.rope_original_context": KvType.U64,
    "graph.activation": KvType.STRING,
    "graph.router_score": KvType.STRING,
    "graph.router_norm": KvType.BOOL,
    "graph.router_scale": KvType.F64,
    "graph.shared_width": KvType.U64,
    "graph.shared_gated": KvType.BOOL,
    "graph.dense_width": KvType.U64,
    "graph.residual_scale": KvType.F64,
    "graph.logit_divisor": KvType.F64,
    "graph.activation_alpha": KvType.F64,
    "graph.activation_limit": KvType.F64,
    "graph.sinks": KvType.BOOL,
    "graph.router_bias": KvType.BOOL,
    "graph.output_bias": KvType.BOOL,
    "graph.qk_norm_after_rope": KvType.BOOL,
    "graph.experts_scale_input": KvType.BOOL,
    "graph.chunks": KvType.U64_ARRAY,
    "graph.router_jitter": KvType.F64,
    "graph.temperature_floor": KvType.F64,
    "graph.temperature_scale": KvType.F64,
    "graph.value_dim": KvType.U64,
    "graph.q_lora": KvType.U64,
    "graph.kv_lora": KvType.U64,
    "graph.latent_norm_eps": KvType.F64,
    "graph.attention_gate": KvType.BOOL,
    "graph.rope_layers": KvType.U64_ARRAY,
    "graph.pre_norm": KvType.BOOL,
    "graph.post_norm": KvType.BOOL,
    "graph.embedding_scale": KvType.F64,
    "graph.router_select_bias": KvType.BOOL,
    "graph.router_groups": KvType.U64,
    "graph.router_top_groups": KvType.U64,
    "graph.router_group_score": KvType.STRING,
    "graph.router_norm_add": KvType.F64,
    "graph.router_norm_min": KvType.F64,
    "graph.attention_softcap": KvType.F64,
    "graph.logit_softcap": KvType.F64,
    "graph.rope_of_layer": KvType.U64_ARRAY,
    "graph.rope_inv_freq_more": KvType.F64_ARRAY,
    "graph.rope_factor_more": KvType.F64_ARRAY,
}
"""Every key of the page with its type. Pass it to `encode_kv`, so that 1 is stored as f64 where
the page says so."""

OPTIONAL_SPEC_KEYS = frozenset(
    {
        "executable_lacks",
        "tokenizer_lacks",
        "graph.rope_inv_freq_long",
        "graph.rope_factor_long",
        "graph.rope_original_context",
        "graph.residual_scale",
        "graph.logit_divisor",
        "graph.activation_alpha",
        "graph.activation_limit",
        "graph.sinks",
        "graph.router_bias",
        "graph.output_bias",
        "graph.qk_norm_after_rope",
        "graph.experts_scale_input",
        "graph.chunks",
        "graph.router_jitter",
        "graph.temperature_floor",
        "graph.temperature_scale",
        "graph.value_dim",
        "graph.q_lora",
        "graph.kv_lora",
        "graph.latent_norm_eps",
        "graph.attention_gate",
        "graph.rope_layers",
        "graph.pre_norm",
        "graph.post_norm",
        "graph.embedding_scale",
        "graph.router_select_bias",
        "graph.router_groups",
        "graph.router_top_groups",
        "graph.router_group_score",
        "graph.router_norm_add",
        "graph.router_norm_min",
        "graph.attention_softcap",
        "graph.logit_softcap",
        "graph.rope_of_layer",
        "graph.rope_inv_freq_more",
        "graph.rope_factor_more",
    }
)
"""Keys that may be absent; those of the graph then mean what they did before they were added."""

_RULE = 12


def check_spec(values: Mapping[str, Any], types: Mapping[str, KvType]) -> None:
    """Check that every key of the page is there with its type (rule 12). Raises RuleError."""
    for key, kind in SPEC_KEYS.items():
        found = types.get(key)
        if found is kind or (found is None and key in OPTIONAL_SPEC_KEYS):
            continue
        shown = "no such key" if found is None else found.name.lower()
        raise RuleError(_RULE, "spec", f"key {quote(key)}", kind.name.lower(), shown)
    moe_layers = values["moe_layers"]
    if len(moe_layers) != values["n_layers"]:
        raise RuleError(
            _RULE, "spec", "key 'moe_layers': elements", values["n_layers"], len(moe_layers)
        )
    if any(flag > 1 for flag in moe_layers):
        raise RuleError(_RULE, "spec", "key 'moe_layers'", "0 or 1 per layer", max(moe_layers))
