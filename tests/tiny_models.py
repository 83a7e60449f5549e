"""Tiny checkpoints with random weights, in every written form, made without torch.

`tensors(family, spec)` is the truth: float32 arrays under the canonical Hugging Face names with one
tensor per expert. `write_hf` and `write_gguf` write them the way transformers and llama.cpp's
converter do. Weights depend only on the seed and the tensor's name, and are made with exact
arithmetic, so that they are the same on every machine.

The default dimensions are asymmetric, so that a transposed or mixed-up axis cannot fit by
accident; `square_spec` is the opposite, where only values can tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")

GGUF_ARCH = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
}


def gguf_arch(family: str) -> str:
    """The GGUF architecture of a family."""
    row = more.FAMILIES.get(family)
    if row is not None:
        return row.arch
    return GGUF_ARCH[family] if family in FAMILIES else str(_from_row().gguf_form(family).ids[0])


def gguf_permuted(family: str) -> bool:
    """True if rotated pairs of q and k are neighbours in GGUF and half a head apart elsewhere."""
    row = more.FAMILIES.get(family)
    return family == "mixtral" if row is None else row.gguf_permuted


DELETE = object()
"""As a value of a config or metadata override: leave the key out."""

Tensors = dict[str, Any]
"""Name -> float32 array (or `Raw`, or an array of another type that is written as it is)."""


@dataclass(frozen=True)
class TinySpec:
    """The dimensions and switches of a tiny model. None means what the family usually has."""

    layers: int = 3
    experts: int = 12
    hidden: int = 64
    width: int = 40
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 131
    top_k: int = 3
    shared_width: int = 48
    dense_width: int = 96
    explicit_head_dim: bool = True
    tied: bool = False
    norm_topk: bool | None = None
    attention_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    experts_of_layer: tuple[int, ...] | None = None
    """Expert count per layer when they differ (a pruned model)."""
    shared_gate_gain: float = 2.0
    clip_qkv: float | None = None
    window: int | None = None
    norm_eps: float | None = None
    rope_theta: float | None = None
    rope: Mapping[str, Any] | None = None
    """rope_parameters besides rope_theta, for example {"rope_type": "yarn", "factor": 4.0}."""
    local_rope: Mapping[str, Any] | None = None
    """rope_parameters of layers with a window, where they have others."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    max_position: int = 512
    seed: int = 0
    features: tuple[str, ...] = ()
    """Switches of a family made from its row, besides those it usually has; "-x" turns x off."""
    more: Mapping[str, Any] | None = None
    """Hyper-parameters by canonical name, laid over those of the family's recipe."""

    def replace(self, **changes: Any) -> TinySpec:
        """The same spec with some fields changed."""
        return dataclasses.replace(self, **changes)

    def n_experts(self, layer: int) -> int:
        """The number of experts of one layer."""
        return self.experts_of_layer[layer] if self.experts_of_layer else self.experts


def default_spec(family: str, **changes: Any) -> TinySpec:
    """The asymmetric spec of a family."""
    if family not in ALL_FAMILIES:
        return _from_row().default_spec(family, **changes)
    spec = TinySpec()
    if family in more.FAMILIES:
        spec = spec.replace(**more.FAMILIES[family].spec)
    elif family == "qwen3_moe":
        spec = spec.replace(head_dim=32)  # q is 256 wide where hidden is 64
    elif family in ("olmoe", "qwen2_moe"):  # both derive head_dim: heads * head_dim == hidden
        spec = spec.replace(heads=4, explicit_head_dim=False)
    return spec.replace(**changes)


def square_spec(family: str, **changes: Any) -> TinySpec:
    """hidden = width = experts = q width: no shape can tell an axis from another."""
    spec = TinySpec(
        layers=2,
        experts=32,
        hidden=32,
        width=32,
        heads=4,
        kv_heads=4,
        head_dim=8,
        vocab=64,
        shared_width=32,
        dense_width=32,
        explicit_head_dim=family == "qwen3_moe",
    )
    return spec.replace(**changes)


def wide_spec(family: str, **changes: Any) -> TinySpec:
    """Rows of 256 and 512 weights, for the block formats of 256."""
    spec = TinySpec(
        layers=2,
        experts=4,
        hidden=256,
        width=512,
        heads=4,
        kv_heads=2,
        head_dim=64,
        top_k=2,
        shared_width=256,
        explicit_head_dim=family == "qwen3_moe",
    )
    return spec.replace(**changes)


# ---------------------------------------------------------------------------------------------
# Weights


def unit_noise(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bell-shaped numbers of variance 1, a function of name and seed only.

    The sum of four uniform numbers, because sums are exact on every machine and log and cos of a
    usual normal generator are not.
    """
    state = np.random.RandomState(zlib.crc32(f"{seed}:{name}".encode()))
    return (state.random_sample((4, *shape)).sum(axis=0) - 2.0) * math.sqrt(3.0)


def matrix(name: str, shape: tuple[int, ...], seed: int, gain: float) -> np.ndarray:
    """Noise whose products with a unit vector have variance gain², float32."""
    return (unit_noise(name, shape, seed) * (gain / math.sqrt(shape[-1]))).astype(np.float32)


def _from_row() -> Any:
    """The builder of families that are made from their row of the table."""
    import row_models

    return row_models


_MIXTRAL_NAMES = ("mixtral", "minimax_m2")


def _names(family: str) -> dict[str, str]:
    moe = "block_sparse_moe" if family in _MIXTRAL_NAMES else "mlp"
    gate, up, down = (
        ("w1", "w3", "w2")
        if family in _MIXTRAL_NAMES
        else (
            "gate_proj",
            "up_proj",
            "down_proj",
        )
    )
    return {"moe": moe, "gate": gate, "up": up, "down": down}


def tensors(family: str, spec: TinySpec | None = None) -> Tensors:
    """All weights as float32 under canonical Hugging Face names, one tensor per expert."""
    spec = spec or default_spec(family)
    if family in more.FAMILIES:
        return more.tensors(more.FAMILIES[family], spec)
    if family not in ALL_FAMILIES:
        return _from_row().tensors(family, spec)
    out: Tensors = {}

    def weight(name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        out[name] = matrix(name, (rows, cols), spec.seed, gain)

    def norm(name: str, n: int) -> None:
        out[name] = (1.0 + 0.25 * unit_noise(name, (n,), spec.seed)).astype(np.float32)

    def bias(name: str, n: int) -> None:
        out[name] = (0.3 * unit_noise(name, (n,), spec.seed) + 0.1).astype(np.float32)

    name = _names(family)
    q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weight("model.embed_tokens.weight", spec.vocab, spec.hidden, math.sqrt(spec.hidden))
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        norm(at + "input_layernorm.weight", spec.hidden)
        for part, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            weight(f"{at}self_attn.{part}_proj.weight", width, spec.hidden, 1.5)
            if family == "qwen2_moe" or spec.attention_bias:
                bias(f"{at}self_attn.{part}_proj.bias", width)
        weight(at + "self_attn.o_proj.weight", spec.hidden, q_width, 1.5)
        if spec.attention_bias:
            bias(at + "self_attn.o_proj.bias", spec.hidden)
        if family == "qwen3_moe":
            norm(at + "self_attn.q_norm.weight", spec.head_dim)
            norm(at + "self_attn.k_norm.weight", spec.head_dim)
        elif family == "olmoe":
            norm(at + "self_attn.q_norm.weight", q_width)
            norm(at + "self_attn.k_norm.weight", kv_width)
        norm(at + "post_attention_layernorm.weight", spec.hidden)
        if layer in spec.dense_layers:
            weight(at + "mlp.gate_proj.weight", spec.dense_width, spec.hidden, 1.5)
            weight(at + "mlp.up_proj.weight", spec.dense_width, spec.hidden, 1.5)
            weight(at + "mlp.down_proj.weight", spec.hidden, spec.dense_width, 1.5)
            continue
        moe = f"{at}{name['moe']}."
        weight(moe + "gate.weight", spec.n_experts(layer), spec.hidden, 1.5)
        for expert in range(spec.n_experts(layer)):
            weight(f"{moe}experts.{expert}.{name['gate']}.weight", spec.width, spec.hidden, 1.5)
            weight(f"{moe}experts.{expert}.{name['up']}.weight", spec.width, spec.hidden, 1.5)
            weight(f"{moe}experts.{expert}.{name['down']}.weight", spec.hidden, spec.width, 2.0)
        if family == "qwen2_moe":
            weight(moe + "shared_expert.gate_proj.weight", spec.shared_width, spec.hidden, 1.5)
            weight(moe + "shared_expert.up_proj.weight", spec.shared_width, spec.hidden, 1.5)
            weight(moe + "shared_expert.down_proj.weight", spec.hidden, spec.shared_width, 2.0)
            weight(moe + "shared_expert_gate.weight", 1, spec.hidden, spec.shared_gate_gain)
    norm("model.norm.weight", spec.hidden)
    if not spec.tied:
        weight("lm_head.weight", spec.vocab, spec.hidden, 2.0)
    return out


def digest(weights: Tensors) -> str:
    """SHA-256 over names, shapes and float32 bytes, to notice when this builder drifts."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name], dtype="<f4")
        sha.update(f"{name}{array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to nearest even, as uint16. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 numbers that a tensor has after it was stored as dtype."""
    if dtype == "bf16":
        return from_bf16(to_bf16(values))
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float32)
    return values


def prompt(n: int, vocab: int = 131, seed: int = 7) -> list[int]:
    """n token ids, the same everywhere."""
    state = np.random.RandomState(seed)
    return [int(t) for t in (state.random_sample(n) * vocab).astype(np.int64)]


# ---------------------------------------------------------------------------------------------
# Hugging Face


@dataclass(frozen=True)
class Raw:
    """Bytes written as they are, with a safetensors dtype name."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


_TORCH_DTYPE = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_ROPE_THETA = {"mixtral": 1e6, "qwen2_moe": 1e6, "qwen3_moe": 1e6, "olmoe": 1e4}
_NORM_TOPK = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "olmoe": False}
_RMS_EPS = {"mixtral": 1e-5, "qwen2_moe": 1e-6, "qwen3_moe": 1e-6, "olmoe": 1e-5}
_ARCHITECTURE = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}


def _architecture(family: str) -> str:
    if family in more.FAMILIES:
        return more.FAMILIES[family].architecture
    return _ARCHITECTURE[family]


def norm_topk(family: str, spec: TinySpec) -> bool:
    """Whether the chosen router weights are divided by their sum."""
    return _NORM_TOPK.get(family, True) if spec.norm_topk is None else spec.norm_topk


def norm_eps(family: str, spec: TinySpec) -> float:
    """What is added to the mean of squares in every norm."""
    return _RMS_EPS.get(family, 1e-5) if spec.norm_eps is None else spec.norm_eps


def rope_parameters(family: str, spec: TinySpec) -> dict[str, Any]:
    """`rope_parameters` of config.json."""
    theta = _ROPE_THETA.get(family, 1e4) if spec.rope_theta is None else spec.rope_theta
    return {"rope_theta": theta, "rope_type": "default", **(spec.rope or {})}


def by_layer_type(spec: TinySpec, rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of config.json, for each layer type where they differ."""
    if spec.local_rope is None:
        return rope
    return {"full_attention": rope, "sliding_attention": dict(spec.local_rope)}


_OWN_CODE = {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}


def softcap_config(spec: TinySpec) -> dict[str, Any]:
    """Keys of soft-capping, as checkpoints have them that bring modeling code of their own."""
    if spec.attention_softcap is None and spec.logit_softcap is None:
        return {}
    return {
        "attn_logit_softcapping": spec.attention_softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "auto_map": _OWN_CODE,
    }


def softcap_metadata(arch: str, spec: TinySpec) -> dict[str, float]:
    """The same for GGUF."""
    caps = {"attn": spec.attention_softcap, "final": spec.logit_softcap}
    return {f"{arch}.{k}_logit_softcapping": v for k, v in caps.items() if v is not None}


def config(
    family: str,
    spec: TinySpec | None = None,
    *,
    dtype: str = "f32",
    overrides: Mapping[str, Any] | None = None,
    old: bool = False,
) -> dict[str, Any]:
    """config.json as transformers 5.24 saves it; with `old`, as releases before 5 did."""
    spec = spec or default_spec(family)
    if family not in ALL_FAMILIES:
        return _from_row().config(family, spec, dtype=dtype, overrides=overrides)
    out: dict[str, Any] = {
        **softcap_config(spec),
        "architectures": [_architecture(family)],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": _TORCH_DTYPE[dtype],
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": spec.max_position,
        "model_type": more.FAMILIES[family].model_type if family in more.FAMILIES else family,
        "num_attention_heads": spec.heads,
        "num_experts_per_tok": spec.top_k,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": norm_eps(family, spec),
        "rope_parameters": by_layer_type(spec, rope_parameters(family, spec)),
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": spec.tied,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "vocab_size": spec.vocab,
    }
    if family in more.FAMILIES:
        out |= more.FAMILIES[family].config(spec)
    else:
        out |= _FAMILY_CONFIG[family](spec, old)
        if family != "mixtral":
            out["norm_topk_prob"] = norm_topk(family, spec)
    if spec.explicit_head_dim:
        out["head_dim"] = spec.head_dim
    if old:
        rope = out.pop("rope_parameters")
        out["rope_theta"] = rope.pop("rope_theta")
        out["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
        out["torch_dtype"] = out.pop("dtype")
        out["transformers_version"] = "4.46.0"
    out |= overrides or {}
    return dict(sorted((k, v) for k, v in out.items() if v is not DELETE))


def _mixtral_config(spec: TinySpec, old: bool) -> dict[str, Any]:
    return {
        "head_dim": None,
        "intermediate_size": spec.width,
        "num_local_experts": spec.experts,
        "router_jitter_noise": 0.0,
        "sliding_window": spec.window,
    }


def _qwen_dense(spec: TinySpec) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "intermediate_size": spec.dense_width,
        "mlp_only_layers": list(spec.dense_layers),
        "moe_intermediate_size": spec.width,
    }


def _qwen2_config(spec: TinySpec, old: bool) -> dict[str, Any]:
    window = spec.window is not None
    out = {
        **_qwen_dense(spec),
        "max_window_layers": spec.layers if window else 28,
        "num_experts": spec.experts,
        "shared_expert_intermediate_size": spec.shared_width,
        "sliding_window": spec.window or 0,
        "use_sliding_window": window,
    }
    if not old:
        # transformers derives every second layer, starting with the first
        kinds = ["sliding_attention" if window and i % 2 == 0 else "full_attention"
                 for i in range(spec.layers)]  # fmt: skip
        out |= {"layer_types": kinds, "qkv_bias": True}
    return out


def _qwen3_config(spec: TinySpec, old: bool) -> dict[str, Any]:
    return {
        **_qwen_dense(spec),
        "attention_bias": spec.attention_bias,
        "head_dim": spec.head_dim,
        "num_experts" if old else "num_local_experts": spec.experts,
        "sliding_window": spec.window,
        "use_sliding_window": spec.window is not None,
    }


def _olmoe_config(spec: TinySpec, old: bool) -> dict[str, Any]:
    return {
        "attention_bias": spec.attention_bias,
        "clip_qkv": spec.clip_qkv,
        "intermediate_size": spec.width,
        "num_experts": spec.experts,
    }


_FAMILY_CONFIG: dict[str, Callable[[TinySpec, bool], dict[str, Any]]] = {
    "mixtral": _mixtral_config,
    "qwen2_moe": _qwen2_config,
    "qwen3_moe": _qwen3_config,
    "olmoe": _olmoe_config,
}


def fuse(family: str, weights: Tensors) -> Tensors:
    """The form transformers 5 holds in memory: stacked experts, gate rows before up rows."""
    name = _names(family)
    out: Tensors = {}
    stacks: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    for key, value in weights.items():
        block, found, rest = key.partition(f".{name['moe']}.experts.")
        if found:
            expert, part, _ = rest.split(".")
            stacks.setdefault(block, {}).setdefault(part, {})[int(expert)] = value
        else:
            out[key.replace(".block_sparse_moe.", ".mlp.")] = value
    for block, parts in stacks.items():
        stack = {p: np.stack([v[e] for e in sorted(v)]) for p, v in parts.items()}
        gate_up = np.concatenate([stack[name["gate"]], stack[name["up"]]], axis=1)
        out[f"{block}.mlp.experts.gate_up_proj"] = gate_up  # [experts, 2 * width, hidden]
        out[f"{block}.mlp.experts.down_proj"] = stack[name["down"]]  # [experts, hidden, width]
    return out


def _encode(value: Any, dtype: str) -> Raw:
    if isinstance(value, Raw):
        return value
    array = np.ascontiguousarray(value)
    if array.dtype == np.float32:
        if dtype == "bf16":
            return Raw("BF16", array.shape, to_bf16(array).astype("<u2").tobytes())
        if dtype == "f16":
            array = array.astype("<f2")
    kind = {"f": "F", "i": "I", "u": "U", "b": "BOOL"}[array.dtype.kind]
    code = kind if kind == "BOOL" else f"{kind}{8 * array.dtype.itemsize}"
    return Raw(code, array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes())


def write_safetensors(path: Path, weights: Tensors, dtype: str = "f32") -> None:
    """Write one safetensors file, keys in lexicographic order as transformers does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name in sorted(weights):
        raw = _encode(weights[name], dtype)
        end = offset + len(raw.data)
        header[name] = {
            "dtype": raw.dtype,
            "shape": list(raw.shape),
            "data_offsets": [offset, end],
        }
        chunks.append(raw.data)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def write_hf(
    path: Path,
    family: str,
    spec: TinySpec | None = None,
    *,
    form: str = "per-expert",
    dtype: str = "f32",
    shards: int = 1,
    overrides: Mapping[str, Any] | None = None,
    mutate: Callable[[Tensors], Tensors | None] | None = None,
    old_config: bool = False,
) -> Path:
    """Write a Hugging Face directory and return its path.

    `form` is "per-expert" (what save_pretrained writes) or "fused" (a transformers 5 state_dict).
    Families of `tiny_families` also have "unfused": one tensor per expert matrix and no others.
    `mutate` gets the float32 tensors under their final names (of those families: of the unfused
    form), and changes the dict or returns another.
    `overrides` are laid over config.json; the value DELETE removes a key.
    """
    spec = spec or default_spec(family)
    weights = tensors(family, spec)
    row = more.FAMILIES.get(family)
    if form == "fused" and row is None:
        weights = fuse(family, weights)
    if mutate is not None:
        weights = mutate(weights) or weights
    if row is not None:
        forms = {"fused": row.fused or row.saved, "unfused": row.unfused}
        weights = forms.get(form, row.saved)(weights)
    elif form not in ("per-expert", "fused", "unfused"):
        raise ValueError(f"unknown form {form!r}")
    path.mkdir(parents=True, exist_ok=True)
    settings = config(family, spec, dtype=dtype, overrides=overrides, old=old_config)
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights, dtype)
        return path
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(path / file, {n: weights[n] for n in mine}, dtype)
        weight_map |= dict.fromkeys(mine, file)
    total = sum(len(_encode(weights[n], dtype).data) for n in names)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def read_hf(path: Path) -> Tensors:
    """The tensors of a Hugging Face directory as float32 (of F32 and BF16), or int64 (of I64)."""
    out: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        data = file.read_bytes()
        (n,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + n])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = (8 + n + at for at in entry["data_offsets"])
            types = {"BF16": "<u2", "F32": "<f4", "I64": "<i8"}
            bits = np.frombuffer(data[start:end], types[entry["dtype"]])
            values = from_bf16(bits) if entry["dtype"] == "BF16" else bits
            out[name] = values.reshape(entry["shape"])
    return out


def read_spec(path: Path) -> TinySpec:
    """The spec of a Qwen3-MoE directory whose layers are all MoE layers."""
    c = json.loads((path / "config.json").read_text())
    return TinySpec(
        layers=c["num_hidden_layers"],
        experts=c.get("num_local_experts") or c["num_experts"],
        hidden=c["hidden_size"],
        width=c["moe_intermediate_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        vocab=c["vocab_size"],
        top_k=c["num_experts_per_tok"],
        dense_width=c["intermediate_size"],
        tied=c["tie_word_embeddings"],
        norm_topk=c["norm_topk_prob"],
        norm_eps=c["rms_norm_eps"],
        rope_theta=c["rope_parameters"]["rope_theta"],
        max_position=c["max_position_embeddings"],
    )


# ---------------------------------------------------------------------------------------------
# GGUF


@dataclass(frozen=True)
class GgufTensor:
    """Stored bytes of one tensor: float array for F32/F16, else uint8 rows."""

    data: np.ndarray
    type: GGMLQuantizationType

    def values(self) -> np.ndarray:
        """What gguf makes of it, float32."""
        return dequantize(self.data, self.type)


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def permute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k for arch llama: rotated pairs become neighbours."""
    half = rows.shape[0] // n_heads // 2
    return rows.reshape(n_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_values(
    family: str, spec: TinySpec, weights: Tensors, *, old_experts: bool = False
) -> dict[str, np.ndarray]:
    """Canonical weights under GGUF names: stacked experts, llama's q/k order, 1-D shared gate."""
    if family in more.FAMILIES:
        return more.gguf_values(more.FAMILIES[family], spec, weights)
    if family not in FAMILIES:
        return _from_row().gguf_values(family, spec, weights, old_experts=old_experts)
    name = _names(family)
    parts = {name["gate"]: "gate", name["up"]: "up", name["down"]: "down"}
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for key, value in weights.items():
        if key in _GGUF_TOP:
            out[_GGUF_TOP[key]] = value
            continue
        _, _, layer, rest = key.split(".", 3)
        rest = rest.replace("block_sparse_moe.", "mlp.")
        if rest.startswith("mlp.experts."):
            _, _, expert, part, _ = rest.split(".")
            if old_experts:
                out[f"blk.{layer}.ffn_{parts[part]}.{expert}.weight"] = value
            else:
                stacked = f"blk.{layer}.ffn_{parts[part]}_exps.weight"
                stacks.setdefault(stacked, {})[int(expert)] = value
            continue
        module, _, kind = rest.rpartition(".")
        if family == "mixtral" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            value = permute(value, spec.heads if module.endswith("q_proj") else spec.kv_heads)
        if module == "mlp.shared_expert_gate":
            value = value.reshape(-1)
        out[f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"] = value
    for stacked, by_expert in stacks.items():
        out[stacked] = np.stack([by_expert[e] for e in sorted(by_expert)])
    return out | rope_tensors(family, spec)


def rope_tensors(family: str, spec: TinySpec) -> dict[str, np.ndarray]:
    """What GGUF says about scaled rope in tensors."""
    rope = dict(spec.rope or {})
    if rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": _llama3_factors(family, spec)}
    return {
        f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
        for kind in ("short", "long")
        if f"{kind}_factor" in rope
    }


def _llama3_factors(family: str, spec: TinySpec) -> np.ndarray:
    rope = rope_parameters(family, spec)
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    factors = []
    for i in range(0, spec.head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / spec.head_dim)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1.0 / ((1.0 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


TypeChoice = GGMLQuantizationType | Callable[[str], GGMLQuantizationType]


def keeps_float(name: str, shape: tuple[int, ...]) -> bool:
    """Tensors that llama.cpp leaves in F32 whatever the file type: 1-D ones and the routers."""
    return len(shape) == 1 or "ffn_gate_inp" in name


def encode_gguf(
    values: dict[str, np.ndarray], types: TypeChoice, seed: int = 0
) -> dict[str, GgufTensor]:
    """Give every tensor its type: quantized by gguf if it can, else valid blocks at random.

    A type that does not fit the row (a multiple of its block) falls back to F16, as llama.cpp's
    quantizer would to a smaller block.
    """
    out = {}
    for name, value in values.items():
        kind = types(name) if callable(types) else types
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if keeps_float(name, value.shape):
            kind = GGMLQuantizationType.F32
        elif value.shape[-1] % block:
            kind = GGMLQuantizationType.F16
        if kind in RANDOM_TYPES:
            out[name] = GgufTensor(random_blocks(name, value.shape, kind, value.std(), seed), kind)
        else:
            out[name] = GgufTensor(quantize(np.ascontiguousarray(value), kind), kind)
    return out


_T = GGMLQuantizationType

# Types gguf cannot quantize: where the fp16 scale is, where the fp16 minimum is, and the ratio of
# minimum to scale that centres the weights on zero.
_SCALE_FIELDS: dict[GGMLQuantizationType, tuple[int, int | None, float]] = {
    _T.Q2_K: (80, 82, 1.5),
    _T.Q3_K: (108, None, 0.0),
    _T.Q4_K: (0, 2, 7.5),
    _T.Q5_K: (0, 2, 15.5),
    _T.Q6_K: (208, None, 0.0),
    _T.IQ2_XXS: (0, None, 0.0),
    _T.IQ2_XS: (0, None, 0.0),
    _T.IQ2_S: (0, None, 0.0),
    _T.IQ3_XXS: (0, None, 0.0),
    _T.IQ3_S: (0, None, 0.0),
    _T.IQ1_S: (0, None, 0.0),
    _T.IQ4_NL: (0, None, 0.0),
    _T.IQ4_XS: (0, None, 0.0),
}
RANDOM_TYPES = frozenset(_SCALE_FIELDS) | {_T.IQ1_M, _T.NVFP4}
QUANT_TYPES = tuple(
    t for t in _T if t in RANDOM_TYPES or t in {
        _T.BF16, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.TQ1_0, _T.TQ2_0, _T.MXFP4,
    }
)  # fmt: skip
"""Every type that gguf 0.19 can dequantize, F32 and F16 aside."""


def _set_half(blocks: np.ndarray, at: int, values: np.ndarray) -> None:
    blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _set_iq1_m_scale(blocks: np.ndarray, values: np.ndarray) -> None:
    """IQ1_M keeps one nibble of its fp16 scale in the top of each of four uint16."""
    half = values.astype("<f2").view(np.uint16).reshape(-1, 1)
    scales = np.ascontiguousarray(blocks[:, 48:56]).view("<u2")
    nibbles = (half >> np.array([0, 4, 8, 12], dtype=np.uint16)) & 0xF
    blocks[:, 48:56] = ((scales & 0x0FFF) | (nibbles << 12)).astype("<u2").view(np.uint8)


def random_blocks(
    name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, std: float, seed: int = 0
) -> np.ndarray:
    """Random but valid quant blocks whose weights have about the given standard deviation."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_blocks = math.prod(shape) // block
    state = np.random.RandomState(zlib.crc32(f"{seed}:{kind.name}:{name}".encode()))
    blocks = state.randint(0, 256, (n_blocks, n_bytes)).astype(np.uint8)
    spread = np.exp2(state.random_sample(n_blocks) - 0.5)
    rows = (*shape[:-1], shape[-1] // block * n_bytes)

    def scale_by(factor: float) -> None:
        if kind == _T.IQ1_M:
            _set_iq1_m_scale(blocks, factor * spread)
            return
        at, minimum_at, ratio = _SCALE_FIELDS[kind]
        _set_half(blocks, at, factor * spread)
        if minimum_at is not None:
            _set_half(blocks, minimum_at, factor * ratio * spread)

    if kind == _T.NVFP4:  # four unsigned e4m3 scales; codes near the size wanted
        exponent = math.floor(math.log2(std / 2.5)) + 7  # the E2M1 table is about 5 wide, halved
        low = max(exponent - 1, 0) * 8
        blocks[:, :4] = state.randint(low, low + 16, (n_blocks, 4))
        return blocks.reshape(rows)
    scale_by(1.0)
    scale_by(std / float(dequantize(blocks, kind).std()))
    return blocks.reshape(rows)


def gguf_metadata(family: str, spec: TinySpec, types: TypeChoice | None = None) -> dict[str, Any]:
    """The keys llama.cpp's converter writes, without the `general.architecture` of GGUFWriter."""
    if family not in ALL_FAMILIES:
        return _from_row().gguf_metadata(family, spec)
    arch = gguf_arch(family)
    rope = rope_parameters(family, spec)
    out: dict[str, Any] = {
        "general.type": "model",
        "general.name": f"tiny {family}",
        f"{arch}.block_count": spec.layers,
        f"{arch}.context_length": spec.max_position,
        f"{arch}.embedding_length": spec.hidden,
        f"{arch}.feed_forward_length": spec.dense_width if "qwen" in family else spec.width,
        f"{arch}.attention.head_count": spec.heads,
        f"{arch}.attention.head_count_kv": spec.kv_heads,
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": norm_eps(family, spec),
        f"{arch}.expert_count": spec.experts,
        f"{arch}.expert_used_count": spec.top_k,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    if spec.explicit_head_dim:
        out[f"{arch}.attention.key_length"] = spec.head_dim
        out[f"{arch}.attention.value_length"] = spec.head_dim
    if family in more.FAMILIES:
        own = more.FAMILIES[family].gguf_metadata(spec)
        out |= {f"{arch}.{key}": value for key, value in own.items()}
    if family == "mixtral":
        out[f"{arch}.vocab_size"] = spec.vocab
        out[f"{arch}.rope.dimension_count"] = spec.head_dim
    if family in ("qwen2_moe", "qwen3_moe"):
        out[f"{arch}.expert_feed_forward_length"] = spec.width
    if family == "qwen2_moe":
        out[f"{arch}.expert_shared_feed_forward_length"] = spec.shared_width
    if norm_topk(family, spec) != _NORM_TOPK.get(
        family, True
    ):  # converters write it only if they must
        out[f"{arch}.expert_weights_norm"] = norm_topk(family, spec)
    if spec.clip_qkv is not None:
        out[f"{arch}.attention.clamp_kqv"] = spec.clip_qkv
    if spec.window is not None and family != "llama4":
        out[f"{arch}.attention.sliding_window"] = spec.window
    if rope["rope_type"] in ("linear", "yarn"):
        out[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        out[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "longrope":
        out[f"{arch}.rope.scaling.attn_factor"] = float(rope["long_mscale"])
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope["original_max_position_embeddings"]
        out[f"{arch}.rope.scaling.original_context_length"] = original
    if spec.local_rope is not None:
        out[f"{arch}.rope.freq_base_swa"] = spec.local_rope["rope_theta"]
    return out | softcap_metadata(arch, spec) | gguf_tokenizer(spec)


def gguf_tokenizer(spec: TinySpec) -> dict[str, Any]:
    """The keys of a tokenizer that has an entry for every row of the embedding."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"] + [f"t{i}" for i in range(3, spec.vocab)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (spec.vocab - 3),
        "tokenizer.ggml.merges": ["t 3", "t 4"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, tuple):  # (value, GGUFValueType): a type on purpose
        writer.add_key_value(key, *value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_gguf_tensors(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    stored: Mapping[str, GgufTensor],
    *,
    split: int = 0,
) -> list[Path]:
    """Write tensors as they are; `split` > 0 is the number of tensors per file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = set(path.parent.glob("*.gguf"))
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in metadata.items():
        if value is not DELETE:
            _add_metadata(writer, key, value)
    for name, tensor in stored.items():
        data = np.ascontiguousarray(tensor.data)
        writer.add_tensor(name, data, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = [path] if path.exists() else sorted(set(path.parent.glob("*.gguf")) - before)
    return files


def write_gguf(
    path: Path,
    family: str,
    spec: TinySpec | None = None,
    *,
    dtype: str = "f32",
    types: TypeChoice | None = None,
    split: int = 0,
    old_experts: bool = False,
    metadata: Mapping[str, Any] | None = None,
    mutate: Callable[[dict[str, GgufTensor]], dict[str, GgufTensor] | None] | None = None,
) -> list[Path]:
    """Write a GGUF file (or a split set) and return its paths.

    `dtype` rounds all weights first, so that an "f16" or "bf16" file has the numbers of the
    Hugging Face directory of that dtype; 1-D tensors and routers are stored as F32 all the same.
    `types` overrides the storage: one type, or a function from GGUF name to type. `metadata` is
    laid over the usual keys (DELETE removes one). `mutate` changes the stored tensors.
    """
    spec = spec or default_spec(family)
    kind = types or {"f32": _T.F32, "f16": _T.F16, "bf16": _T.BF16}[dtype]
    weights = {n: rounded(v, dtype) for n, v in tensors(family, spec).items()}
    stored = encode_gguf(
        gguf_values(family, spec, weights, old_experts=old_experts), kind, spec.seed
    )
    if mutate is not None:
        stored = mutate(stored) or stored
    keys = gguf_metadata(family, spec) | dict(metadata or {})
    return write_gguf_tensors(path, gguf_arch(family), keys, stored, split=split)


import tiny_families as more  # noqa: E402 - needs what is defined above

ALL_FAMILIES = (*FAMILIES, *more.FAMILIES)
