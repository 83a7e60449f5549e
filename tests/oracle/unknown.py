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


def build(model_type: str) -> Any:
    """Return a random model. Needs torch and transformers."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**MODELS[model_type])
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if "vision_config" in MODELS[model_type]:
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
        name: tm.unit_noise(name, tuple(shape)).astype("f4")
        for name, (_, shape) in found["tensors"].items()
    }
    tm.write_safetensors(folder / "model.safetensors", weights)
    return folder


def main() -> None:
    """Write the shapes of all models."""
    import tempfile

    found = {}
    for model_type in MODELS:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            build(model_type).save_pretrained(folder)
            config = json.loads((folder / "config.json").read_text())
            found[model_type] = {"config": config, "tensors": shapes_of(folder)}
    SHAPES.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
