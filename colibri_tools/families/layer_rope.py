"""The ropes of a model, and which layer has which: most have one for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container.format import Role
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.rope import (
    Rope,
    RopeSettings,
    fold_factors,
    gguf_rope,
    hf_rope,
    resolve_rope,
    rope_by_layer_type,
)
from colibri_tools.sources import SourceTensor

if TYPE_CHECKING:
    from colibri_tools.families.spec import Facts

__all__ = ["LOCAL_TYPES", "MAX_ROPES", "Ropes", "read_ropes", "rope_graph", "unlike"]

LOCAL_TYPES = ("sliding_attention", "chunked_attention")
MAX_ROPES = 16
_LONGROPE = (Role.ROPE_FACTORS_SHORT, Role.ROPE_FACTORS_LONG)
_LOCAL_BASES = ("rope_local_base_freq", "swa_rope_theta", "local_rope_theta")
"""What configs call the base of layers with a window, where it is not in `rope_parameters`."""


@dataclass(frozen=True, slots=True)
class Ropes:
    """The distinct ropes, for each layer its number among them, and what they warn of or lack."""

    distinct: list[Rope]
    of_layer: list[int]
    warnings: list[str]
    lacks: list[str]

    @property
    def latent_scale(self) -> float:
        """What latent attention multiplies its scores with on top, in every layer."""
        return self.distinct[0].latent_scale


def read_ropes(facts: Facts, types: Sequence[str], rotating: Sequence[bool]) -> Ropes:
    """Resolve the ropes of all layers, of which those that do not rotate have none of their own.

    Raises SourceError.
    """
    needed = dict.fromkeys(kind for kind, on in zip(types, rotating, strict=True) if on)
    ropes = {kind: _resolve(facts, _settings(facts, kind)) for kind in needed or types[:1]}
    distinct: list[Rope] = []
    # The engine has two sets of frequencies, for short and long contexts, of the first one only.
    for rope in sorted(ropes.values(), key=lambda rope: rope.long is None):
        if all(_differ(rope, other) for other in distinct):
            distinct.append(rope)
    found = [rope.lacks for rope in ropes.values() if rope.lacks is not None]
    lacks = dict.fromkeys([*found, *unlike(distinct, facts.family.graph["attention"] == "mla")])
    warnings = dict.fromkeys(text for rope in ropes.values() for text in rope.warnings)
    number = {
        kind: next(i for i, other in enumerate(distinct) if not _differ(rope, other))
        for kind, rope in ropes.items()
    }
    layers = zip(types, rotating, strict=True)
    of_layer = [number[kind] if on else 0 for kind, on in layers]
    return Ropes(distinct, of_layer, list(warnings), list(lacks))


def _differ(a: Rope, b: Rope) -> bool:
    return (a.inv_freq, a.factor, a.long) != (b.inv_freq, b.factor, b.long)


def unlike(ropes: Sequence[Rope], latent: bool) -> Iterator[str]:
    """Yield how ropes of one model differ though the engine has it once only."""
    widths = sorted({2 * len(rope.inv_freq) for rope in ropes})
    if len(widths) > 1:
        yield f"rope of {' and '.join(map(str, widths))} dimensions in different layers"
    if any(rope.long is not None for rope in ropes[1:]):
        yield "longrope that differs by layer"
    if latent and len({rope.latent_scale for rope in ropes}) > 1:
        yield "attention scales that differ by layer"
    if len(ropes) > MAX_ROPES:
        yield f"{len(ropes)} different ropes"


# ---------------------------------------------------------------- of one type of layer


def _settings(facts: Facts, kind: str) -> RopeSettings:
    if facts.source.kind == "gguf":
        return _gguf_settings(facts, kind)
    merged: dict[str, Any] = {}
    for level in reversed(facts.detected.levels):
        merged |= level
    if not merged.get("rope_scaling") and not merged.get("rope_parameters"):
        merged["rope_parameters"] = facts.form.rope_default
    by_type = rope_by_layer_type(merged) or _by_local_base(facts, merged)
    theta = facts.form.defaults["rope_theta"]
    width, partial = _hf_rotated(facts)
    if by_type is not None and kind not in by_type:
        why = f"rope parameters of {quote_some(sorted(by_type))} layers, but none of {quote(kind)}"
        return RopeSettings(width, theta, lacks=why)
    return hf_rope(
        by_type[kind] if by_type else merged,
        theta,
        width,
        facts.hyper["context_length"],
        partial,
        facts.form.rope_alpha,
        facts.form.rope_mscales,
    )


def _by_local_base(facts: Facts, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration by layer type, if it states another base for layers with a window."""
    name = next((name for name in _LOCAL_BASES if config.get(name) is not None), None)
    if name is None or facts.ignored(name, config[name]):
        return None
    local = {"rope_type": "default", "rope_theta": config[name]}
    plain = {key: value for key, value in config.items() if key != "rope_scaling"}
    by_type = {kind: {**plain, "rope_parameters": local} for kind in LOCAL_TYPES}
    return {"full_attention": config, **by_type}


def _gguf_settings(facts: Facts, kind: str) -> RopeSettings:
    settings = gguf_rope(facts.hyper, facts.dims["head"], _long_factors(facts))
    if kind not in LOCAL_TYPES or facts.form.local_rope is None:
        return settings
    theta = facts.hyper.get("rope_theta_local") or settings.theta
    if facts.form.local_rope == "unscaled":
        return RopeSettings(settings.dim, theta)
    return replace(settings, theta=theta)


def _hf_rotated(facts: Facts) -> tuple[int, float | None]:
    """The width that rope refers to, and the share of it that rotates (None: always all)."""
    hyper, head_dim = facts.hyper, facts.dims["head"]
    if hyper["nope_dim"] is not None:
        return hyper["rope_dim"], None
    if hyper["rope_dim"] is not None:
        return head_dim, hyper["rope_dim"] / head_dim
    return head_dim, hyper["rope_partial"]


def _resolve(facts: Facts, settings: RopeSettings) -> Rope:
    head_dim = facts.dims["head"]
    if settings.dim > head_dim:
        raise SourceError(f"rope: {settings.dim} rotated dimensions in heads of {head_dim}")
    rope = resolve_rope(settings)
    factors = next((r for r in facts.residents if r.role is Role.ROPE_FACTORS), None)
    if factors is not None:
        fold_factors(rope, _read_factors(facts, factors.tensor))
        facts.note(
            f"{quote(factors.tensor.name)} is folded into graph.rope_inv_freq and kept as an "
            "optional tensor"
        )
    return rope


def _read_factors(facts: Facts, tensor: SourceTensor) -> npt.NDArray[np.float32]:
    if tensor.dtype.name != "f32":
        raise SourceError(
            f"tensor {quote(tensor.name)}: expected type f32, found {tensor.dtype.name}"
        )
    return np.frombuffer(facts.source.read(tensor), "<f4")


def _long_factors(facts: Facts) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The factors of longrope in a GGUF file, short and long."""
    found = {r.role: r.tensor for r in facts.residents if r.role in _LONGROPE}
    if not found:
        return None
    if len(found) == 1:
        (tensor,) = found.values()
        raise SourceError(
            f"tensor {quote(tensor.name)}: longrope needs short and long factors, found one of them"
        )
    names = quote_some([tensor.name for tensor in found.values()])
    facts.note(f"{names} are folded into the graph's rope and kept as optional tensors")
    short, long = (tuple(_read_factors(facts, found[role]).tolist()) for role in _LONGROPE)
    return short, long


# ---------------------------------------------------------------- the spec


def rope_graph(facts: Facts, ropes: Ropes) -> dict[str, Any]:
    """Return the keys of the spec, and pass on what the ropes warn of or lack."""
    facts.warnings += ropes.warnings
    facts.lacks += ropes.lacks
    first, *others = ropes.distinct
    graph: dict[str, Any] = {
        "rope_dim": 2 * len(first.inv_freq),
        "rope_pairing": facts.form.rope_pairing,
        "rope_inv_freq": first.inv_freq,
        "rope_factor": first.factor,
    }
    if first.long is not None:
        graph["rope_inv_freq_long"] = first.long.inv_freq
        graph["rope_factor_long"] = first.long.factor
        graph["rope_original_context"] = first.long.original_context
    if others:
        graph["rope_of_layer"] = ropes.of_layer
        graph["rope_inv_freq_more"] = [x for rope in others for x in rope.inv_freq]
        graph["rope_factor_more"] = [rope.factor for rope in others]
    return graph
