"""The spec of a container (docs/format.md, section 7): every default resolved and written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.container.format import Group, Role
from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.common import GROUP_SCORES, ROUTER_SCORES
from colibri_tools.families.detect import Detected
from colibri_tools.families.hyper import Hyper
from colibri_tools.families.layer_rope import read_ropes, rope_graph
from colibri_tools.families.result import MappedResident, MappedRow
from colibri_tools.families.schema import Family, Form
from colibri_tools.families.vocabulary import Vocabulary, read_vocabulary
from colibri_tools.sources import Source

__all__ = ["Facts", "build_spec", "decodable"]

_NOT_DECODABLE = frozenset(("q8_1", "q8_k"))
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "swiglu_oai": "swiglu_oai"}
_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"


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

    def note(self, text: str) -> None:
        """Add a note that is not there yet."""
        if text not in self.notes:
            self.notes.append(text)

    def ignored(self, key: str, value: Any) -> bool:
        """Warn of a key of config.json that transformers' code of the families does not read.

        False where the checkpoint brings code of its own, which is then what defines it.
        """
        for level in self.detected.levels:
            classes = level.get("auto_map")
            if isinstance(classes, Mapping) and any(
                str(n).startswith("AutoModel") for n in classes
            ):
                self.note(f"{key} {value} is applied: the checkpoint has modeling code of its own")
                return False
        text = (
            f"{self.detected.where}: {key} {value} is ignored, as transformers' code of "
            f"{self.family.name} ignores it"
        )
        if text not in self.warnings:
            self.warnings.append(text)
        return True


def build_spec(facts: Facts) -> dict[str, Any]:
    """Return the spec without `order` and the parameter counts. Raises SourceError.

    A switch that the engine does not have makes the model not executable; the reason is written.
    """
    ropes = read_ropes(facts, _layer_types(facts), _rotating(facts))
    if ropes.latent_scale != 1.0 and facts.family.graph["attention"] == "mla":
        facts.hyper.values["attention_scale"] = ropes.latent_scale / math.sqrt(facts.dims["head"])
    vocabulary = read_vocabulary(facts.source, facts.detected, facts.form, facts.dims["vocab"])
    facts.warnings += vocabulary.warnings
    graph = _graph(facts) | rope_graph(facts, ropes)
    graph |= _added(facts)
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
    score = ROUTER_SCORES.get(hyper["gating"])
    if score is None:
        facts.lacks.append(f"router score of GGUF kind {hyper['gating']}")
    if facts.family.top_k not in (None, hyper["top_k"]):
        facts.lacks.append(f"{hyper['top_k']} experts per token with router {score}")
    scale = hyper["attention_scale"]
    constants = {k: v for k, v in facts.family.graph.items() if k not in _ADDED}
    if not features.get("qk_norm", True) or hyper.get("use_qk_norm") is False:
        constants["qk_norm"] = "none"
    return {
        **constants,
        "activation": activation or hyper["activation"],
        "router_score": score or f"gguf {hyper['gating']}",
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


_ABSENT = {
    "value_dim": None,
    "attention_gate": False,
    "rope_layers": None,
    "pre_norm": True,
    "post_norm": False,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_divisor": 1.0,
    "activation_alpha": None,
    "activation_limit": None,
    "router_jitter": None,
    "chunks": None,
    "temperature_scale": 0.0,
    "temperature_floor": None,
    "sinks": False,
    "router_bias": False,
    "output_bias": False,
    "qk_norm_after_rope": False,
    "experts_scale_input": False,
    "router_select_bias": False,
    "router_groups": 1,
    "router_norm_add": 0.0,
    "router_norm_min": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
}
"""Switches that are written only where they say something: other models run in older readers."""

_NUMBERS = (
    "residual_scale",
    "logit_divisor",
    "activation_alpha",
    "activation_limit",
    "router_jitter",
)
_FEATURES = ("attention_gate", "router_select_bias", "output_bias")

_ADDED = frozenset(_ABSENT) | {"latent_norm_eps"}


def _added(facts: Facts) -> dict[str, Any]:
    hyper, dims, features = facts.hyper, facts.dims, facts.features
    constants = facts.family.graph
    norm = bool(hyper["router_norm"])
    stated = {name: hyper.get(name) for name in _NUMBERS}
    values = {
        **_ABSENT,
        **{name: value for name, value in stated.items() if value is not None},
        **{name: features.get(name, False) for name in _FEATURES},
        **_temperature(facts),
        **_softcaps(facts),
        "chunks": _per_layer(facts, _CHUNKED, hyper.get("chunk")),
        "value_dim": dims["value"] if dims["value"] != dims["head"] else None,
        "rope_layers": _rope_layers(facts),
        "embedding_scale": _embedding_scale(facts),
        "router_groups": _groups(facts),
        "router_norm_min": hyper["router_norm_min"] or 0.0,
        **{key: value for key, value in constants.items() if key in _ABSENT},
    }
    if not norm:
        values["router_norm_add"] = values["router_norm_min"] = 0.0
    out = {key: value for key, value in values.items() if value != _ABSENT[key]}
    if "router_groups" in out:
        out["router_top_groups"] = hyper["router_top_groups"]
        out["router_group_score"] = GROUP_SCORES[ROUTER_SCORES[hyper["gating"]]]
    if constants["attention"] == "mla":
        out["value_dim"] = dims["value"]
        out["q_lora"] = dims["q_lora"]
        out["kv_lora"] = dims["kv_lora"]
        out["latent_norm_eps"] = constants.get("latent_norm_eps", hyper["norm_eps"])
    return out


def _temperature(facts: Facts) -> dict[str, Any]:
    if not facts.hyper.get("temperature"):
        return {}
    return {name: facts.hyper[name] for name in ("temperature_scale", "temperature_floor")}


_SOFTCAPS = ("attention_softcap", "logit_softcap", "router_softcap")


def _softcaps(facts: Facts) -> dict[str, float]:
    """The bounds of scores and logits. Converters to GGUF write them only if they count."""
    out: dict[str, float] = {}
    for name in _SOFTCAPS:
        value = facts.hyper.get(name)
        if not value:
            continue
        key = facts.form.keys[name].names[0].format(arch=facts.detected.arch)
        if value < 0:
            raise SourceError(
                f"{facts.detected.where}: {key}: expected a number above 0, found {value}"
            )
        if facts.source.kind == "gguf" or not facts.ignored(key, value):
            out[name] = float(value)
    if out.pop("router_softcap", None) is not None:
        facts.lacks.append("soft-capping of the router's logits")
    return out


def _per_layer(facts: Facts, kind: str, size: int | None) -> list[int] | None:
    """The size in layers of that kind, 0 in others; None if there are no such layers."""
    types = _layer_types(facts)
    return [size or 0 if found == kind else 0 for found in types] if kind in types else None


def _embedding_scale(facts: Facts) -> float:
    if facts.hyper["scaled_embedding"]:
        return math.sqrt(facts.dims["hidden"])
    stated = facts.hyper.get("embedding_scale")
    return 1.0 if stated is None else float(stated)


_GROUP_METHODS = {None: True, "group_limited_greedy": True, "noaux_tc": True, "greedy": False}


def _groups(facts: Facts) -> int:
    """How many groups of experts the router chooses among first; 1 for none."""
    hyper = facts.hyper
    groups, used, method = (
        hyper["router_groups"],
        hyper["router_top_groups"],
        hyper["group_method"],
    )
    if method not in _GROUP_METHODS:
        facts.lacks.append(f"topk_method {quote(method)}")
    if not groups or not used or groups == 1 or not _GROUP_METHODS.get(method):
        return 1
    if used > groups:
        raise SourceError(f"routing: {used} of {groups} groups of experts")
    _check_groups(facts, groups, used)
    return int(groups)


def _check_groups(facts: Facts, groups: int, used: int) -> None:
    """Groups of experts are equal, have two of them if two are rated, and hold enough."""
    rated = GROUP_SCORES.get(ROUTER_SCORES.get(facts.hyper["gating"], ""))
    for row in facts.rows:
        n, size = len(row.experts), len(row.experts) // groups
        least = 2 if rated == "top2" else 1
        if n % groups or size < least or facts.hyper["top_k"] > size * used:
            raise SourceError(
                f"layer {row.layer}: {n} experts in {groups} groups, of which {used} are used, "
                f"cannot give {facts.hyper['top_k']} per token; groups are of equal size, of at "
                f"least {least}"
            )


def _rotating(facts: Facts) -> list[bool]:
    """Which layers rotate."""
    stated, types = facts.hyper.get("rope_layers"), _layer_types(facts)
    if stated is not None:
        if len(stated) < len(types):
            raise SourceError(
                f"{facts.detected.where}: layers with rope: expected {len(types)} entries, "
                f"found {len(stated)}"
            )
        return [bool(flag) for flag in stated[: len(types)]]
    if facts.family.rope_layers == "all" or not facts.hyper["window"]:
        return [True] * len(types)
    return [kind == _SLIDING for kind in types]


def _rope_layers(facts: Facts) -> list[int] | None:
    """Which layers rotate, None for all."""
    flags = _rotating(facts)
    return None if all(flags) else [int(flag) for flag in flags]


def _has_role(facts: Facts, role: Role) -> bool:
    return any(resident.role is role for resident in facts.residents)


# ---------------------------------------------------------------- sliding windows


def _windows(facts: Facts) -> list[int]:
    hyper, types = facts.hyper, _layer_types(facts)
    window = hyper["window"] if hyper["use_window"] else 0
    if facts.source.kind == "gguf" and window and facts.form.windows != "none":
        _check_gguf_window(facts, window)
    known = {_SLIDING, _FULL} | ({_CHUNKED} if hyper.get("chunk") else set())
    unknown = sorted(set(types) - known)
    if unknown:
        facts.lacks.append(f"layers of type {quote_some(unknown)}")
    if _SLIDING in types and not window:
        facts.lacks.append("sliding_attention layers without a window")
    return _per_layer(facts, _SLIDING, window) or [0] * len(types)


def _layer_types(facts: Facts) -> list[str]:
    hyper, n_layers = facts.hyper, facts.hyper["n_layers"]
    window = hyper["window"] if hyper["use_window"] else 0
    if facts.form.windows == "none":
        window = 0
    if facts.form.windows in ("all", "none"):
        types = [_SLIDING if window else _FULL] * n_layers
    else:
        types = hyper["layer_types"] or _DERIVED_TYPES[facts.form.windows](hyper)
    if len(types) != n_layers:
        raise SourceError(
            f"{facts.detected.where}: layer_types: expected {n_layers} entries, found {len(types)}"
        )
    return list(types)


def _derived_types(hyper: Hyper) -> list[str]:
    """What transformers 5 derives when the config does not list the layer types."""
    sliding = bool(hyper["use_window"] and hyper["window"])
    return [
        _SLIDING if sliding and layer % 2 == 0 and layer < hyper["window_layers"] else _FULL
        for layer in range(hyper["n_layers"])
    ]


def _tail_types(hyper: Hyper) -> list[str]:
    """Full attention below `window_layers`, windows from there on."""
    first = hyper["window_layers"] if hyper["window"] else hyper["n_layers"]
    return [_SLIDING if layer >= first else _FULL for layer in range(hyper["n_layers"])]


def _pattern_types(hyper: Hyper) -> list[str]:
    """Every n-th layer sees all, or L and G in turn, or as listed; no pattern means no windows."""
    pattern, n_layers = hyper["window_pattern"], hyper["n_layers"]
    if not pattern or not hyper["window"]:
        return [_FULL] * n_layers
    if isinstance(pattern, tuple):
        kinds = list(pattern)
    elif isinstance(pattern, str):
        kinds = [pattern[layer % len(pattern)] == "L" for layer in range(n_layers)]
    else:
        kinds = [(layer + 1) % pattern != 0 for layer in range(n_layers)]
    return [_SLIDING if sliding else _FULL for sliding in kinds]


_DERIVED_TYPES: Mapping[str, Callable[[Hyper], list[str]]] = {
    "layer_types": _derived_types,
    "tail": _tail_types,
    "pattern": _pattern_types,
}


def _check_gguf_window(facts: Facts, window: int) -> None:
    if facts.form.windows == "pattern":
        return
    pattern = facts.source.metadata.get(f"{facts.detected.arch}.attention.sliding_window_pattern")
    if facts.form.windows == "layer_types" or pattern is not None:
        facts.lacks.append(
            f"a sliding window of {window} of which GGUF metadata do not say the layers"
        )


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
