"""Tiny random models of families that are in no table, as transformers builds and saves them.

`python -m oracle.unknown` (from tests/) writes the names and shapes of their tensors, with
config.json, to values/unknown_families.json, so that `make test` needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_models as tm

SHAPES = Path(__file__).parent / "values" / "unknown_families.json"

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_COMMON, **_LINEAR, **_EXPERTS, "intermediate_size": 96},
    "qwen3_5_moe": {
        "text_config": {**_COMMON, **_LINEAR, **_EXPERTS},
        "vision_config": _VISION,
    },
    "jetmoe": {
        **_COMMON,
        "kv_channels": 16,
        "num_local_experts": 4,
        "intermediate_size": 40,
    },
    "lfm2_moe": {
        **_COMMON,
        "num_experts": 4,
        "moe_intermediate_size": 40,
        "intermediate_size": 96,
        "num_dense_layers": 0,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
    },
    "granitemoehybrid": {
        **_COMMON,
        "num_local_experts": 4,
        "intermediate_size": 40,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "layer_types": ["mamba", "attention"],
    },
}
"""Keyword arguments of the config class, by model type."""

_SMALL: dict[str, Any] = {
    **_COMMON,
    **_LINEAR,
    **_EXPERTS,
    **{k: v for k, v in _VISION.items() if k not in ("hidden_size", "intermediate_size")},
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 40,
    "ffn_hidden_size": 96,
    "num_layers": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "sliding_window": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
    "hc_mult": 2,
    "o_groups": 2,
    "o_lora_rank": 16,
    "num_nextn_predict_layers": 0,
    "image_size": 16,
    "share_expert_dim": 48,
    "router_hidden_size": 16,
    "mlp_only_layers": [0],
}
"""Tiny values of the keys of many config classes."""

_DERIVED = frozenset(
    (
        "architectures",
        "compress_rates",
        "dtype",
        "hybrid_layer_pattern",
        "indexer_types",
        "kv_source_layers",
        "layer_types",
        "mlp_layer_types",
        "model_type",
        "moe_layer_freq",
        "no_rope_layers",
        "num_attention_heads_per_layer",
        "qk_head_dim",
        "swiglu_limits",
        "transformers_version",
    )
)
"""Keys that config classes derive from others."""

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
SHRUNK: dict[str, dict[str, Any]] = {
    "aria": {},
    "bailing_hybrid": {},
    "cohere2_moe": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [40, 24],
            "rope_parameters": _MROPE,
        },
        "vision_config": {},
    },
    "gemma4": {
        "per_layer_config": {},
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "glm4_moe_lite": {},
    "glm4v_moe": {},
    "jamba": {"num_hidden_layers": 2},
    "kimi_linear": {},
    "laguna": {},
    "longcat_flash": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "mistral_large4": {"num_key_value_heads": 4},
    "qwen3_vl_moe": {},
    "step3p7": {"num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""What differs from `_SMALL`, by model type, for classes whose defaults make the rest."""

ALL = (*MODELS, *SHRUNK)


def _shrink(config: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A config class's defaults with the sizes of `_SMALL`, also below."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name in ("text_config", "vision_config"):
            out[name] = _shrink(value, own.get(name, own))
        elif name in own:
            out[name] = own[name]
        elif name not in _DERIVED:
            out[name] = value if value in (None, 0) else _SMALL.get(name, value)
    return out


def arguments(model_type: str) -> dict[str, Any]:
    """The keyword arguments of a model type's config class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in MODELS:
        return MODELS[model_type]
    return _shrink(CONFIG_MAPPING[model_type]().to_dict(), SHRUNK[model_type])


def build(model_type: str) -> Any:
    """Return a random model. Needs torch and transformers."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**arguments(model_type))
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if getattr(config, "vision_config", None):
        auto = transformers.AutoModelForImageTextToText
    return auto.from_config(config)


def shapes_of(folder: Path) -> dict[str, list[Any]]:
    """Return {name: [dtype, shape]} of a saved model of one file."""
    data = (folder / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    return {name: [entry["dtype"], entry["shape"]] for name, entry in sorted(header.items())}


def write_from_shapes(folder: Path, model_type: str) -> Path:
    """Write a checkpoint of these names and shapes with random numbers; returns its folder."""
    found = json.loads(SHAPES.read_text())[model_type]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(found["config"]))
    weights = {
        name: tm.unit_noise(name, tuple(shape)).astype("i8" if dtype == "I64" else "f4")
        for name, (dtype, shape) in found["tensors"].items()
    }
    tm.write_safetensors(folder / "model.safetensors", weights)
    return folder


def main() -> None:
    """Write the shapes of all models."""
    import tempfile

    found = {}
    for model_type in ALL:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            build(model_type).save_pretrained(folder)
            config = json.loads((folder / "config.json").read_text())
            found[model_type] = {"config": config, "tensors": shapes_of(folder)}
    SHAPES.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
