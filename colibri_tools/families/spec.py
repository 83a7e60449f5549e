"""The spec of a container (docs/format.md, section 7): every default resolved and written down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from colibri_tools.container.format import Group, Role
from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.detect import Detected
from colibri_tools.families.hyper import Hyper
from colibri_tools.families.result import MappedResident, MappedRow
from colibri_tools.families.rope import (
    Rope,
    fold_factors,
    gguf_rope,
    hf_rope,
    resolve_rope,
)
from colibri_tools.families.schema import Family, Form
from colibri_tools.families.vocabulary import Vocabulary, read_vocabulary
from colibri_tools.sources import Source

__all__ = ["Facts", "build_spec", "decodable"]

_NOT_DECODABLE = frozenset(("q8_1", "q8_k"))
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_SOFTMAX_GATING = 1
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(slots=True)
class Facts:
    """What the census found; `dims` are the dimensions by name, `features` the switches."""

    source: Source
    family: Family
    form: Form
    detected: Detected
    hyper: Hyper
    dims: Mapping[str, int]
    features: Mapping[str, bool]
    moe_layers: Sequence[int]
    residents: Sequence[MappedResident]
    rows: Sequence[MappedRow]
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)


def build_spec(facts: Facts) -> dict[str, Any]:
    """Return the spec without `order` and the parameter counts. Raises SourceError.

    A switch that the engine does not have makes the model not executable; the reason is written.
    """
    rope = _rope(facts)
    vocabulary = read_vocabulary(facts.source, facts.detected, facts.form, facts.dims["vocab"])
    facts.warnings += vocabulary.warnings
    graph = _graph(facts) | _rope_graph(facts, rope)
    _check_types(facts)
    _note_defaults(facts)
    spec = _description(facts, vocabulary)
    spec |= {f"graph.{key}": value for key, value in graph.items()}
    spec["executable"] = not facts.lacks
    if facts.lacks:
        spec["executable_lacks"] = "; ".join(facts.lacks)
        facts.warnings.append(f"the container will not run: {spec['executable_lacks']}")
    return spec


def decodable(dtype: DType) -> bool:
    """True if the engine can compute with tensors of this type."""
    if dtype.is_quantized:
        return dtype.name not in _NOT_DECODABLE
    return dtype.name in ("f32", "f16", "bf16")


def _description(facts: Facts, vocabulary: Vocabulary) -> dict[str, Any]:
    hyper, moe = facts.hyper, set(facts.moe_layers)
    return {
        "family": facts.family.name,
        "source_kind": facts.source.kind,
        "n_layers": hyper["n_layers"],
        "n_mtp_layers": 0,
        "hidden_size": hyper["hidden_size"],
        "vocab_size": facts.dims["vocab"],
        "context_length": hyper["context_length"],
        "top_k": hyper["top_k"],
        "expert_width": facts.dims["width"],
        "moe_layers": [int(layer in moe) for layer in range(hyper["n_layers"])],
        "tokenizer": vocabulary.tokenizer,
        "bos_id": vocabulary.bos_id,
        "eos_ids": vocabulary.eos_ids,
        "n_tokens": vocabulary.n_tokens,
    }


def _graph(facts: Facts) -> dict[str, Any]:
    hyper, dims, features = facts.hyper, facts.dims, facts.features
    activation = _ACTIVATIONS.get(hyper["activation"])
    if activation is None:
        facts.lacks.append(f"activation {quote(hyper['activation'])}")
    if hyper["gating"] != _SOFTMAX_GATING:
        facts.lacks.append(f"router score of GGUF kind {hyper['gating']}")
    if hyper["value_dim"] not in (None, dims["head"]):
        facts.lacks.append(f"value heads of {hyper['value_dim']} and key heads of {dims['head']}")
    scale = hyper["attention_scale"]
    return {
        **facts.family.graph,
        "activation": activation or hyper["activation"],
        "n_heads": hyper["n_heads"],
        "n_kv_heads": hyper["n_kv_heads"],
        "head_dim": dims["head"],
        "attention_scale": scale or 1.0 / math.sqrt(dims["head"]),
        "qkv_bias": features["qkv_bias"],
        "o_bias": features["o_bias"],
        "clip_qkv": hyper["clip_qkv"] or 0.0,
        "windows": _windows(facts),
        "norm_eps": hyper["norm_eps"],
        "router_norm": hyper["router_norm"],
        "router_scale": hyper["router_scale"] or 1.0,
        "shared_width": dims["shared"] if features["shared"] else 0,
        "shared_gated": features["shared"] and _has_role(facts, Role.SHARED_ROUTER),
        "dense_width": dims["dense"] if len(facts.moe_layers) < hyper["n_layers"] else 0,
    }


def _has_role(facts: Facts, role: Role) -> bool:
    return any(resident.role is role for resident in facts.residents)


# ---------------------------------------------------------------- sliding windows


def _windows(facts: Facts) -> list[int]:
    hyper, n_layers = facts.hyper, facts.hyper["n_layers"]
    window = hyper["window"] if hyper["use_window"] else 0
    if facts.form.windows == "none":
        window = 0
    if facts.source.kind == "gguf" and window:
        _check_gguf_window(facts, window)
    if facts.form.windows != "layer_types":
        return [window or 0] * n_layers
    types = hyper["layer_types"] or _derived_types(hyper)
    if len(types) != n_layers:
        raise SourceError(
            f"config.json: layer_types: expected {n_layers} entries, found {len(types)}"
        )
    unknown = sorted(set(types) - {_SLIDING, _FULL})
    if unknown:
        facts.lacks.append(f"layers of type {quote_some(unknown)}")
    if _SLIDING in types and not window:
        facts.lacks.append("sliding_attention layers without a window")
    return [window or 0 if kind == _SLIDING else 0 for kind in types]


def _derived_types(hyper: Hyper) -> list[str]:
    """What transformers 5 derives when the config does not list the layer types."""
    sliding = bool(hyper["use_window"] and hyper["window"])
    return [
        _SLIDING if sliding and layer % 2 == 0 and layer < hyper["window_layers"] else _FULL
        for layer in range(hyper["n_layers"])
    ]


def _check_gguf_window(facts: Facts, window: int) -> None:
    pattern = facts.source.metadata.get(f"{facts.detected.arch}.attention.sliding_window_pattern")
    if facts.form.windows == "layer_types" or pattern is not None:
        facts.lacks.append(
            f"a sliding window of {window} of which GGUF metadata do not say the layers"
        )


# ---------------------------------------------------------------- rope


def _rope(facts: Facts) -> Rope:
    hyper, head_dim = facts.hyper, facts.dims["head"]
    if facts.source.kind == "gguf":
        settings = gguf_rope(hyper, head_dim)
    else:
        merged: dict[str, Any] = {}
        for level in reversed(facts.detected.levels):
            merged |= level
        theta = facts.form.defaults["rope_theta"]
        settings = hf_rope(merged, theta, head_dim, hyper["context_length"])
    if settings.dim > head_dim:
        raise SourceError(f"rope: {settings.dim} rotated dimensions in heads of {head_dim}")
    rope = resolve_rope(settings)
    factors = next((r for r in facts.residents if r.role is Role.ROPE_FACTORS), None)
    if factors is not None:
        if factors.tensor.dtype.name != "f32":
            raise SourceError(
                f"tensor {quote(factors.tensor.name)}: expected type f32, "
                f"found {factors.tensor.dtype.name}"
            )
        fold_factors(rope, np.frombuffer(facts.source.read(factors.tensor), "<f4"))
        facts.notes.append(
            f"{quote(factors.tensor.name)} is folded into graph.rope_inv_freq and kept as an "
            "optional tensor"
        )
    return rope


def _rope_graph(facts: Facts, rope: Rope) -> dict[str, Any]:
    facts.warnings += rope.warnings
    if rope.lacks is not None:
        facts.lacks.append(rope.lacks)
    return {
        "rope_dim": 2 * len(rope.inv_freq),
        "rope_pairing": facts.form.rope_pairing,
        "rope_inv_freq": rope.inv_freq,
        "rope_factor": rope.factor,
    }


# ---------------------------------------------------------------- types, notes


def _check_types(facts: Facts) -> None:
    needed = {r.tensor.dtype for r in facts.residents if r.group != Group.OPTIONAL}
    needed |= {
        piece.dtype for row in facts.rows for slots in row.experts for piece in slots.values()
    }
    bad = sorted(dtype.name for dtype in needed if not decodable(dtype))
    if bad:
        facts.lacks.append(f"tensors of type {', '.join(bad)}")


def _note_defaults(facts: Facts) -> None:
    """Say which values are not the source's own but the family's."""
    used = [name for name in _semantic(facts.form) if name not in facts.hyper.given]
    if used:
        shown = ", ".join(f"{name} = {_text(facts.hyper[name])}" for name in used)
        facts.notes.append(f"not stated by the source, so the family's default is used: {shown}")


def _semantic(form: Form) -> Iterable[str]:
    # Absence of the others is the usual way to write their default.
    names = ("top_k", "norm_eps", "context_length", "router_norm")
    return (name for name in names if name in form.keys)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
