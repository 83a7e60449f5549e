"""Rules that several families share: names, keys, and what is never a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from colibri_tools.container.format import Group, PartRole, Role
from colibri_tools.families.schema import (
    DropRule,
    ExpertRule,
    Key,
    Prefix,
    RefuseRule,
    TensorRule,
)

__all__ = [
    "DROPS",
    "GGUF_ATTENTION",
    "GGUF_DENSE",
    "GGUF_EXPERTS",
    "GGUF_KEYS",
    "GGUF_LOCAL_ROPE_KEYS",
    "GGUF_MODEL",
    "GGUF_PROJECTIONS",
    "GGUF_QK_NORM_FULL",
    "GGUF_QK_NORM_HEAD",
    "GGUF_QK_NORM_HEAD_OPTIONAL",
    "GGUF_QWEN_KEYS",
    "GGUF_ROUTED_KEYS",
    "GGUF_ROUTER",
    "GGUF_SELECT_BIAS",
    "GGUF_SHARED",
    "GGUF_SHARED_EXPERTS",
    "GGUF_SHARED_KEYS",
    "GGUF_WIDTH_KEYS",
    "GROUP_SCORES",
    "HF_ATTENTION",
    "HF_BIAS_KEYS",
    "HF_DENSE",
    "HF_EXPERTS",
    "HF_EXPERTS_MIXTRAL",
    "HF_GROUP_KEYS",
    "HF_KEYS",
    "HF_LAYER_TYPE_KEYS",
    "HF_MODEL",
    "HF_NORMS",
    "HF_NORM_KEYS",
    "HF_PREFIXES",
    "HF_PROJECTIONS",
    "HF_QK_NORM_FULL",
    "HF_QK_NORM_HEAD",
    "HF_QK_NORM_HEAD_OPTIONAL",
    "HF_QWEN_KEYS",
    "HF_ROUTED_KEYS",
    "HF_ROUTER",
    "HF_ROUTER_MIXTRAL",
    "HF_SELECT_BIAS",
    "HF_SHARED",
    "HF_SHARED_EXPERTS",
    "HF_SHARED_KEYS",
    "HF_WIDTH_KEYS",
    "HF_WINDOW_KEYS",
    "MTP_DROP",
    "REFUSALS",
    "ROUTER_SCORES",
    "layer_rule",
    "select_bias",
    "without",
]


def without(keys: Mapping[str, Key], *names: str) -> dict[str, Key]:
    """Return the keys of a form that does not read some of them."""
    return {name: key for name, key in keys.items() if name not in names}


GATE, UP, DOWN = (PartRole.GATE,), (PartRole.UP,), (PartRole.DOWN,)
GATE_UP = (PartRole.GATE, PartRole.UP)


def layer_rule(
    pattern: str,
    role: Role,
    *shape: str,
    feature: str | None = None,
    unless: str | None = None,
    needs: str | None = None,
) -> TensorRule:
    """The rule of a tensor that every layer has."""
    return TensorRule(pattern, role, "layer", shape, feature, unless, needs)


# ---------------------------------------------------------------- Hugging Face names

HF_PREFIXES = (
    Prefix("model.", ("",)),
    Prefix("model.language_model.", ("", "model.language_model.")),
    Prefix("language_model.model.", ("language_model.",)),
    Prefix("model.language_model.model.", ("model.language_model.",)),
    Prefix("", ("",)),  # the base model's own names
)

HF_MODEL = (
    TensorRule(
        "embed_tokens.weight", Role.TOKEN_EMBD, "model", ("vocab", "hidden"), group=Group.PER_ROW
    ),
    TensorRule("norm.weight", Role.OUTPUT_NORM, "model", ("hidden",)),
    TensorRule("lm_head.weight", Role.OUTPUT, "model", ("vocab", "hidden"), optional=True),
)


def _hf(name: str, role: Role, shape: tuple[str, ...], feature: str | None = None) -> TensorRule:
    return TensorRule("layers.{layer}." + name, role, "layer", shape, feature)


HF_ATTENTION = (
    _hf("input_layernorm.weight", Role.ATTN_NORM, ("hidden",)),
    _hf("self_attn.q_proj.weight", Role.ATTN_Q, ("q", "hidden")),
    _hf("self_attn.k_proj.weight", Role.ATTN_K, ("kv", "hidden")),
    _hf("self_attn.v_proj.weight", Role.ATTN_V, ("v", "hidden")),
    _hf("self_attn.o_proj.weight", Role.ATTN_O, ("hidden", "attended")),
    _hf("self_attn.q_proj.bias", Role.ATTN_Q_BIAS, ("q",), "qkv_bias"),
    _hf("self_attn.k_proj.bias", Role.ATTN_K_BIAS, ("kv",), "qkv_bias"),
    _hf("self_attn.v_proj.bias", Role.ATTN_V_BIAS, ("v",), "qkv_bias"),
    _hf("self_attn.o_proj.bias", Role.ATTN_O_BIAS, ("hidden",), "o_bias"),
    _hf("post_attention_layernorm.weight", Role.FFN_NORM, ("hidden",)),
)
HF_PROJECTIONS = HF_ATTENTION[1:-1]
HF_NORMS = (HF_ATTENTION[0], HF_ATTENTION[-1])
HF_QK_NORM_HEAD = (
    _hf("self_attn.q_norm.weight", Role.ATTN_Q_NORM, ("head",)),
    _hf("self_attn.k_norm.weight", Role.ATTN_K_NORM, ("head",)),
)
HF_QK_NORM_HEAD_OPTIONAL = tuple(replace(rule, feature="qk_norm") for rule in HF_QK_NORM_HEAD)
HF_QK_NORM_FULL = (
    _hf("self_attn.q_norm.weight", Role.ATTN_Q_NORM, ("q",)),
    _hf("self_attn.k_norm.weight", Role.ATTN_K_NORM, ("kv",)),
)
HF_DENSE = (
    TensorRule(
        "layers.{layer}.mlp.gate_proj.weight", Role.DENSE_GATE, "dense", ("dense", "hidden")
    ),
    TensorRule("layers.{layer}.mlp.up_proj.weight", Role.DENSE_UP, "dense", ("dense", "hidden")),
    TensorRule(
        "layers.{layer}.mlp.down_proj.weight", Role.DENSE_DOWN, "dense", ("hidden", "dense")
    ),
)
HF_ROUTER = (
    TensorRule("layers.{layer}.mlp.gate.weight", Role.ROUTER, "moe", ("experts", "hidden")),
)
HF_ROUTER_MIXTRAL = (
    TensorRule(
        "layers.{layer}.block_sparse_moe.gate.weight", Role.ROUTER, "moe", ("experts", "hidden")
    ),
    *HF_ROUTER,
)


def _hf_moe(name: str, role: Role, shape: tuple[str, ...]) -> TensorRule:
    return TensorRule("layers.{layer}.mlp." + name, role, "moe", shape, "shared")


HF_SHARED = (
    _hf_moe("shared_expert.gate_proj.weight", Role.SHARED_GATE, ("shared", "hidden")),
    _hf_moe("shared_expert.up_proj.weight", Role.SHARED_UP, ("shared", "hidden")),
    _hf_moe("shared_expert.down_proj.weight", Role.SHARED_DOWN, ("hidden", "shared")),
    _hf_moe("shared_expert_gate.weight", Role.SHARED_ROUTER, ("1", "hidden")),
)


HF_SHARED_EXPERTS = (
    _hf_moe("shared_experts.gate_proj.weight", Role.SHARED_GATE, ("shared", "hidden")),
    _hf_moe("shared_experts.up_proj.weight", Role.SHARED_UP, ("shared", "hidden")),
    _hf_moe("shared_experts.down_proj.weight", Role.SHARED_DOWN, ("hidden", "shared")),
)


def select_bias(pattern: str) -> TensorRule:
    """The rule of a bias that shifts which experts are chosen, and not their weights."""
    return TensorRule(
        pattern, Role.ROUTER_SELECT_BIAS, "moe", ("experts",), feature="router_select_bias"
    )


HF_SELECT_BIAS = (select_bias("layers.{layer}.mlp.gate.e_score_correction_bias"),)


def _hf_fused(module: str) -> tuple[ExpertRule, ...]:
    # transformers 5 holds these as bare parameters; some exporters append ".weight".
    at = "layers.{layer}." + module + ".experts."
    return tuple(
        ExpertRule(at + name + suffix, parts)
        for name, parts in (("gate_up_proj", GATE_UP), ("down_proj", DOWN))
        for suffix in ("", ".weight")
    )


HF_EXPERTS = (
    ExpertRule("layers.{layer}.mlp.experts.{expert}.gate_proj.weight", GATE),
    ExpertRule("layers.{layer}.mlp.experts.{expert}.up_proj.weight", UP),
    ExpertRule("layers.{layer}.mlp.experts.{expert}.down_proj.weight", DOWN),
    *_hf_fused("mlp"),
)
HF_EXPERTS_MIXTRAL = (
    ExpertRule("layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight", GATE),
    ExpertRule("layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight", UP),
    ExpertRule("layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight", DOWN),
    *_hf_fused("block_sparse_moe"),
    *_hf_fused("mlp"),
)

# ---------------------------------------------------------------- GGUF names

GGUF_MODEL = (
    TensorRule(
        "token_embd.weight", Role.TOKEN_EMBD, "model", ("vocab", "hidden"), group=Group.PER_ROW
    ),
    TensorRule("output_norm.weight", Role.OUTPUT_NORM, "model", ("hidden",)),
    TensorRule("output.weight", Role.OUTPUT, "model", ("vocab", "hidden"), optional=True),
    TensorRule(
        "rope_freqs.weight",
        Role.ROPE_FACTORS,
        "model",
        ("rope",),
        group=Group.OPTIONAL,
        optional=True,
    ),
)


def _gguf(name: str, role: Role, shape: tuple[str, ...], feature: str | None = None) -> TensorRule:
    return TensorRule("blk.{layer}." + name, role, "layer", shape, feature)


GGUF_ATTENTION = (
    _gguf("attn_norm.weight", Role.ATTN_NORM, ("hidden",)),
    _gguf("attn_q.weight", Role.ATTN_Q, ("q", "hidden")),
    _gguf("attn_k.weight", Role.ATTN_K, ("kv", "hidden")),
    _gguf("attn_v.weight", Role.ATTN_V, ("v", "hidden")),
    _gguf("attn_output.weight", Role.ATTN_O, ("hidden", "attended")),
    _gguf("attn_q.bias", Role.ATTN_Q_BIAS, ("q",), "qkv_bias"),
    _gguf("attn_k.bias", Role.ATTN_K_BIAS, ("kv",), "qkv_bias"),
    _gguf("attn_v.bias", Role.ATTN_V_BIAS, ("v",), "qkv_bias"),
    _gguf("attn_output.bias", Role.ATTN_O_BIAS, ("hidden",), "o_bias"),
    _gguf("ffn_norm.weight", Role.FFN_NORM, ("hidden",)),
)
GGUF_QK_NORM_HEAD = (
    _gguf("attn_q_norm.weight", Role.ATTN_Q_NORM, ("head",)),
    _gguf("attn_k_norm.weight", Role.ATTN_K_NORM, ("head",)),
)
GGUF_QK_NORM_HEAD_OPTIONAL = tuple(replace(rule, feature="qk_norm") for rule in GGUF_QK_NORM_HEAD)
GGUF_QK_NORM_FULL = (
    _gguf("attn_q_norm.weight", Role.ATTN_Q_NORM, ("q",)),
    _gguf("attn_k_norm.weight", Role.ATTN_K_NORM, ("kv",)),
)
GGUF_PROJECTIONS = GGUF_ATTENTION[1:-1]
GGUF_DENSE = (
    TensorRule("blk.{layer}.ffn_gate.weight", Role.DENSE_GATE, "dense", ("dense", "hidden")),
    TensorRule("blk.{layer}.ffn_up.weight", Role.DENSE_UP, "dense", ("dense", "hidden")),
    TensorRule("blk.{layer}.ffn_down.weight", Role.DENSE_DOWN, "dense", ("hidden", "dense")),
)
GGUF_ROUTER = (
    TensorRule("blk.{layer}.ffn_gate_inp.weight", Role.ROUTER, "moe", ("experts", "hidden")),
)


def _gguf_moe(name: str, role: Role, shape: tuple[str, ...]) -> TensorRule:
    return TensorRule("blk.{layer}." + name, role, "moe", shape, "shared")


GGUF_SHARED = (
    _gguf_moe("ffn_gate_shexp.weight", Role.SHARED_GATE, ("shared", "hidden")),
    _gguf_moe("ffn_up_shexp.weight", Role.SHARED_UP, ("shared", "hidden")),
    _gguf_moe("ffn_down_shexp.weight", Role.SHARED_DOWN, ("hidden", "shared")),
    _gguf_moe("ffn_gate_inp_shexp.weight", Role.SHARED_ROUTER, ("1", "hidden")),
)
GGUF_SHARED_EXPERTS = GGUF_SHARED[:3]
GGUF_SELECT_BIAS = (select_bias("blk.{layer}.exp_probs_b.bias"),)
GGUF_EXPERTS = (
    ExpertRule("blk.{layer}.ffn_gate_exps.weight", GATE),
    ExpertRule("blk.{layer}.ffn_up_exps.weight", UP),
    ExpertRule("blk.{layer}.ffn_down_exps.weight", DOWN),
    ExpertRule("blk.{layer}.ffn_gate_up_exps.weight", GATE_UP),
    ExpertRule("blk.{layer}.ffn_gate.{expert}.weight", GATE),
    ExpertRule("blk.{layer}.ffn_up.{expert}.weight", UP),
    ExpertRule("blk.{layer}.ffn_down.{expert}.weight", DOWN),
)

# ---------------------------------------------------------------- hyper-parameters

HF_KEYS = {
    "n_layers": Key("int", ("num_hidden_layers",)),
    "hidden_size": Key("int", ("hidden_size",)),
    "vocab_size": Key("int", ("vocab_size",)),
    "context_length": Key("int", ("max_position_embeddings",)),
    "n_heads": Key("int", ("num_attention_heads",)),
    "n_kv_heads": Key("int", ("num_key_value_heads",)),
    "head_dim": Key("int", ("head_dim",)),
    "norm_eps": Key("float", ("rms_norm_eps",)),
    "activation": Key("str", ("hidden_act",)),
    "n_experts": Key("int", ("num_experts", "num_local_experts")),
    "top_k": Key("int", ("num_experts_per_tok",)),
    "rope_theta": Key("float", ("rope_theta",)),
    "tied": Key("bool", ("tie_word_embeddings",)),
    "attention_softcap": Key("float", ("attn_logit_softcapping",)),
    "logit_softcap": Key("float", ("final_logit_softcapping",)),
    "router_softcap": Key("float", ("router_logit_softcapping", "moe_router_logit_softcapping")),
}
HF_WIDTH_KEYS = {"expert_width": Key("int", ("intermediate_size",))}
HF_WINDOW_KEYS = {"window": Key("int", ("sliding_window",))}
HF_NORM_KEYS = {"router_norm": Key("bool", ("norm_topk_prob",))}
HF_BIAS_KEYS = {
    "qkv_bias": Key("bool", ("attention_bias",)),
    "o_bias": Key("bool", ("attention_bias",)),
}
HF_QWEN_KEYS = {
    **HF_WINDOW_KEYS,
    **HF_NORM_KEYS,
    "use_window": Key("bool", ("use_sliding_window",)),
    "expert_width": Key("int", ("moe_intermediate_size",)),
    "dense_width": Key("int", ("intermediate_size",)),
    "moe_step": Key("int", ("decoder_sparse_step",)),
    "dense_layers": Key("ints", ("mlp_only_layers",)),
}
HF_SHARED_KEYS = {"shared_width": Key("int", ("shared_expert_intermediate_size",))}
HF_GROUP_KEYS = {
    "router_scale": Key("float", ("routed_scaling_factor",)),
    "router_groups": Key("int", ("n_group",)),
    "router_top_groups": Key("int", ("topk_group",)),
}
HF_ROUTED_KEYS = {
    "n_experts": Key("int", ("n_routed_experts",)),
    "n_shared": Key("int", ("n_shared_experts",)),
    "expert_width": Key("int", ("moe_intermediate_size",)),
    "dense_width": Key("int", ("intermediate_size",)),
    "first_dense": Key("int", ("first_k_dense_replace",)),
}
HF_LAYER_TYPE_KEYS = {
    "window_layers": Key("int", ("max_window_layers",)),
    "layer_types": Key("strs", ("layer_types",)),
}

GGUF_KEYS = {
    "n_layers": Key("int", ("{arch}.block_count",)),
    "hidden_size": Key("int", ("{arch}.embedding_length",)),
    "context_length": Key("int", ("{arch}.context_length",)),
    "n_heads": Key("int", ("{arch}.attention.head_count",)),
    "n_kv_heads": Key("int", ("{arch}.attention.head_count_kv",)),
    "head_dim": Key("int", ("{arch}.attention.key_length",)),
    "value_dim": Key("int", ("{arch}.attention.value_length",)),
    "norm_eps": Key("float", ("{arch}.attention.layer_norm_rms_epsilon",)),
    "n_experts": Key("int", ("{arch}.expert_count",)),
    "top_k": Key("int", ("{arch}.expert_used_count",)),
    "router_norm": Key("bool", ("{arch}.expert_weights_norm",)),
    "router_scale": Key("float", ("{arch}.expert_weights_scale",)),
    "gating": Key("int", ("{arch}.expert_gating_func",)),
    "window": Key("int", ("{arch}.attention.sliding_window",)),
    "clip_qkv": Key("float", ("{arch}.attention.clamp_kqv",)),
    "attention_scale": Key("float", ("{arch}.attention.scale",)),
    "router_groups": Key("int", ("{arch}.expert_group_count",)),
    "router_top_groups": Key("int", ("{arch}.expert_group_used_count",)),
    "first_dense": Key("int", ("{arch}.leading_dense_block_count",)),
    "rope_dim": Key("int", ("{arch}.rope.dimension_count",)),
    "rope_theta": Key("float", ("{arch}.rope.freq_base",)),
    "rope_kind": Key("str", ("{arch}.rope.scaling.type",)),
    "rope_scale": Key("float", ("{arch}.rope.scaling.factor", "{arch}.rope.scale_linear")),
    "rope_attention_factor": Key("float", ("{arch}.rope.scaling.attn_factor",)),
    "rope_original_context": Key("int", ("{arch}.rope.scaling.original_context_length",)),
    "rope_log_multiplier": Key("float", ("{arch}.rope.scaling.yarn_log_multiplier",)),
    "rope_beta_fast": Key("float", ("{arch}.rope.scaling.yarn_beta_fast",)),
    "rope_beta_slow": Key("float", ("{arch}.rope.scaling.yarn_beta_slow",)),
    "attention_softcap": Key("float", ("{arch}.attn_logit_softcapping",)),
    "logit_softcap": Key("float", ("{arch}.final_logit_softcapping",)),
    "router_softcap": Key("float", ("{arch}.router_logit_softcapping",)),
}
GGUF_LOCAL_ROPE_KEYS = {"rope_theta_local": Key("float", ("{arch}.rope.freq_base_swa",))}
GGUF_WIDTH_KEYS = {"expert_width": Key("int", ("{arch}.feed_forward_length",))}
GGUF_QWEN_KEYS = {
    "expert_width": Key("int", ("{arch}.expert_feed_forward_length",)),
    "dense_width": Key("int", ("{arch}.feed_forward_length",)),
}
GGUF_ROUTED_KEYS = {**GGUF_QWEN_KEYS, "n_shared": Key("int", ("{arch}.expert_shared_count",))}
GGUF_SHARED_KEYS = {"shared_width": Key("int", ("{arch}.expert_shared_feed_forward_length",))}

ROUTER_SCORES: Mapping[int | str, str] = {
    1: "softmax",
    2: "sigmoid",
    "topk_sigmoid": "topk_sigmoid",
    "sparsemixer": "sparsemixer",
}
"""What a router makes of its logits (`gating`): by GGUF's number, or a family's own."""

GROUP_SCORES = {"softmax": "max", "sigmoid": "top2"}
"""How a group of experts is rated, by the router's score: as DeepSeek-V2 and as DeepSeek-V3 do."""

# ---------------------------------------------------------------- left out, and refused

DROPS = (
    DropRule(
        "rotary-buffer",
        r"(?:.*\.)?rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|blk\.\d+\.attn_rot_embd\.weight",
        "a buffer that is computed from the config",
    ),
    DropRule(
        "vision-tower",
        r"(?:model\.)?(?:visual|vision_(?:tower|model|encoder|projection|adapter)|resampler(?:_model)?"
        r"|multi_modal_projector|mm_projector|pre_mm_projector_norm|patch_merger|vpm)\..+"
        r"|(?:model\.)?image_newline",
        "belongs to the image encoder; only the language model is repacked",
    ),
    DropRule(
        "audio-tower",
        r"(?:model\.)?(?:audio_(?:tower|model|encoder|projection)|multi_modal_audio_projector)\..+",
        "belongs to the audio encoder; only the language model is repacked",
    ),
)

MTP_DROP = DropRule(
    "mtp",
    r"(?:model\.)?mtp(?:_layers|_block|_emb_norm|_hidden_norm|_linear_proj)?\..+",
    "a multi-token-prediction layer, which the engine does not run; also every tensor of a layer at"
    " or beyond the layers of the model, if the metadata announce it or it has an eh_proj",
)
"""For families of the table; of an unknown one nothing is known to be needless, so it is kept."""

REFUSALS = (
    RefuseRule(r".+\.weight_scale_inv", "block-scaled FP8 weights (weight_scale_inv)"),
    RefuseRule(r".+\.(?:SCB|weight_format)", "bitsandbytes INT8 weights (SCB)"),
    RefuseRule(
        r".+\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)",
        "bitsandbytes 4-bit weights (absmax)",
    ),
    RefuseRule(
        r".+\.(?:weight_packed|weight_shape|weight_global_scale)",
        "compressed-tensors packed weights (weight_packed)",
    ),
    RefuseRule(r".+\.(?:qweight|qzeros|g_idx)", "GPTQ or AWQ packed weights (qweight)"),
    RefuseRule(r".+\.biases", "MLX packed weights (biases)"),
    RefuseRule(r".+\.W_q", "HQQ packed weights (W_q)"),
    RefuseRule(r".+_proj_(?:blocks|scales)", "packed MXFP4 experts (_blocks, _scales)"),
    RefuseRule(
        r".+\.(?:weight_scale(?:_2)?|input_scale|weight_zero_point)",
        "quantized weights with separate scales (weight_scale)",
    ),
    RefuseRule(r"blk\..+\.scale", "GGUF tensors with separate scales (.scale)"),
    RefuseRule(r".+[-._]TP[-._]?\d+(?:\..+)?", "tensor-parallel slices (TP)"),
)
