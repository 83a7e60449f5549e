"""Rotary frequencies, resolved once at conversion.

The arithmetic is that of transformers' `modeling_rope_utils` in float32. Powers are taken in double
precision and rounded, because float32 powers differ between CPUs by a unit in the last place; all
other steps are single float32 operations, which do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.errors import SourceError, quote
from colibri_tools.families.hyper import Hyper

__all__ = [
    "LongRope",
    "Rope",
    "RopeSettings",
    "fold_factors",
    "gguf_rope",
    "hf_rope",
    "resolve_rope",
    "rope_by_layer_type",
]

F32 = npt.NDArray[np.float32]

MAX_ROPE_DIM = 65536


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """What the frequencies depend on. `dim` rotates, `kind` is transformers' rope_type."""

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: float = 0.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None
    lacks: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LongRope:
    """What replaces frequencies and factor for contexts of more than `original_context`."""

    inv_freq: list[float]
    factor: float
    original_context: int


@dataclass(slots=True)
class Rope:
    """Angular frequencies [dim/2] and the factor on cos and sin; `lacks` says why not, if so."""

    inv_freq: list[float]
    factor: float = 1.0
    lacks: str | None = None
    warnings: list[str] = field(default_factory=list)
    latent_scale: float = 1.0
    """What latent attention multiplies its scores with on top, for stretched rope."""
    long: LongRope | None = None


_NUMBERS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "short_mscale": "short_mscale",
    "long_mscale": "long_mscale",
}
_LISTS = ("short_factor", "long_factor")
_KNOWN_KEYS = {
    "default": frozenset[str](),
    "ntk-alpha": frozenset(
        ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    ),
    "linear": frozenset(("factor",)),
    "llama3": frozenset(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": frozenset(
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        )
    ),
    "longrope": frozenset(
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "short_mscale",
            "long_mscale",
            *_LISTS,
        )
    ),
}
_NEEDED_KEYS = {
    "default": (),
    "ntk-alpha": ("alpha",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": _LISTS,
}
_MSCALES = ("short_mscale", "long_mscale")
_ALWAYS_KNOWN = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))


def rope_by_layer_type(config: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Return the configuration as it is for each layer type, if rope parameters differ by it."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return None
    by_type = {str(kind): value for kind, value in given.items() if isinstance(value, Mapping)}
    if not by_type:
        return None
    rest = {key: value for key, value in config.items() if key != "rope_scaling"}
    return {kind: {**rest, "rope_parameters": value} for kind, value in by_type.items()}


def hf_rope(
    config: Mapping[str, Any],
    default_theta: float,
    head_dim: int,
    context_length: int,
    default_partial: float | None = None,
    fixed_alpha: bool = False,
    mscales: bool = False,
) -> RopeSettings:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `default_partial` is the share of a head that rotates, None in a family that rotates all.
    With `fixed_alpha`, dynamic rope that has an `alpha` is a stretched base and nothing else.
    With `mscales`, longrope states the factors on cos and sin, and has to.
    Raises SourceError for a value of a wrong type or a missing one.
    """
    where = "config.json: rope_parameters"
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise SourceError(f"{where}: expected an object, found {quote(given)}")
    if any(isinstance(value, Mapping) for value in given.values()):
        return RopeSettings(head_dim, default_theta, lacks="rope parameters in rope parameters")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", config.get("rope_theta"))
    base = _number(where, "rope_theta", default_theta if theta is None else theta)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if partial is None else _number(where, "partial_rotary_factor", partial)
    if default_partial is not None:
        head_dim = int(head_dim * (default_partial if partial is None else share))
    elif share != 1.0:
        return RopeSettings(head_dim, base, lacks=f"partial_rotary_factor {partial} in this family")
    if any(name in given for name in _MSCALES) and not (mscales and kind == "longrope"):
        return RopeSettings(head_dim, base, lacks=f"rope of kind {quote(kind)} with two mscales")
    if fixed_alpha and kind == "dynamic" and given.get("alpha"):
        alpha = _number(where, "alpha", given["alpha"])
        base, kind = base * alpha ** (head_dim / (head_dim - 2)), "ntk-alpha"
    if not isinstance(kind, str) or kind not in _KNOWN_KEYS:
        return RopeSettings(head_dim, base, lacks=f"rope of kind {quote(kind)}")
    return RopeSettings(
        dim=head_dim,
        theta=base,
        kind=kind,
        warnings=_unknown_keys(given, kind),
        **_scaling(config, given, kind, context_length, where, mscales),
    )


def _scaling(
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    kind: str,
    context: int,
    where: str,
    mscales: bool,
) -> dict[str, Any]:
    needed = (*_NEEDED_KEYS[kind], *(_MSCALES if mscales and kind == "longrope" else ()))
    missing = [name for name in needed if given.get(name) is None]
    if missing and not (kind == "yarn" and "original_max_position_embeddings" in given):
        raise SourceError(f"{where}: rope type {quote(kind)} needs {quote(missing[0])}")
    fields: dict[str, Any] = {
        field: _number(where, name, given[name])
        for name, field in _NUMBERS.items()
        if name in _KNOWN_KEYS[kind] and given.get(name) is not None
    }
    for name in ("beta_fast", "beta_slow"):
        if fields.get(name) == 0:  # transformers takes `or 32`, `or 1`
            del fields[name]
    for name in _LISTS if kind == "longrope" else ():
        fields[name] = _numbers(where, name, given[name])
    outer = config.get("original_max_position_embeddings")
    if outer is not None and kind in ("llama3", "yarn", "longrope"):
        fields["original_context"] = _number(where, "original_max_position_embeddings", outer)
    fields.setdefault("original_context", float(context))
    for name in ("factor", "original_context", "low_freq_factor", "high_freq_factor"):
        if name in fields and fields[name] <= 0:
            raise SourceError(f"{where}: {name}: expected a number above 0, found {fields[name]}")
    if kind in ("yarn", "longrope"):
        fields.setdefault("factor", context / fields["original_context"])
    if kind == "yarn":
        fields["truncate"] = bool(given.get("truncate", True))
    return fields


def _unknown_keys(given: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    unknown = sorted(set(given) - _KNOWN_KEYS[kind] - _ALWAYS_KNOWN)
    return tuple(
        f"config.json: rope_parameters: key {quote(key)} is not one of rope type {quote(kind)} "
        "and is ignored"
        for key in unknown
    )


def gguf_rope(
    hyper: Hyper, head_dim: int, factors: tuple[tuple[float, ...], tuple[float, ...]] | None = None
) -> RopeSettings:
    """Read the rope keys of GGUF metadata, with llama.cpp's meaning of what is absent.

    `factors` are those of longrope, short and long, if the file has such tensors.
    """
    dim = head_dim if hyper["rope_dim"] is None else hyper["rope_dim"]
    if factors is not None:
        return RopeSettings(
            dim,
            hyper["rope_theta"],
            "longrope",
            original_context=float(hyper["rope_original_context"] or hyper["context_length"]),
            attention_factor=hyper["rope_attention_factor"],
            short_factor=factors[0],
            long_factor=factors[1],
        )
    scale = hyper["rope_scale"] or 1.0
    kind = hyper["rope_kind"] or "linear"  # a scale without a type is a linear one
    if kind == "none" or (kind == "linear" and scale == 1.0):
        return RopeSettings(dim, hyper["rope_theta"])
    if kind == "linear":
        return RopeSettings(dim, hyper["rope_theta"], "linear", factor=scale)
    if kind != "yarn":
        return RopeSettings(dim, hyper["rope_theta"], lacks=f"rope of kind {quote(kind)}")
    log_multiplier = hyper["rope_log_multiplier"] / hyper["rope_log_unit"]
    attention = _mscale(scale, 1.0)
    if log_multiplier:
        # Where the unit is not 1, mscale is taken to be mscale_all_dim, as llama.cpp does.
        mscale = log_multiplier if hyper["rope_log_unit"] != 1.0 else 1.0
        attention = _mscale(scale, mscale) / _mscale(scale, log_multiplier)
    return RopeSettings(
        dim,
        hyper["rope_theta"],
        "yarn",
        factor=scale,
        original_context=float(hyper["rope_original_context"] or hyper["context_length"]),
        attention_factor=attention * hyper["rope_attention_factor"],
        mscale_all_dim=log_multiplier or None,
        beta_fast=hyper["rope_beta_fast"],
        beta_slow=hyper["rope_beta_slow"],
        truncate=hyper["rope_truncate"],
    )


def resolve_rope(settings: RopeSettings) -> Rope:
    """Compute the frequencies. Raises SourceError for an odd or absurd width."""
    if settings.dim % 2 or not 0 < settings.dim <= MAX_ROPE_DIM:
        raise SourceError(
            f"rope: expected an even number of rotated dimensions, found {settings.dim}"
        )
    for name in ("theta", "factor", "beta_fast", "beta_slow"):
        if not getattr(settings, name) > (1.0 if name == "theta" else 0.0):
            raise SourceError(f"rope: {name} {getattr(settings, name)} is out of range")
    try:
        with np.errstate(all="ignore"):
            inv_freq, factor = _frequencies(settings)
    except ArithmeticError as error:
        raise _unusable(settings) from error
    if not ((inv_freq > 0) & np.isfinite(inv_freq)).all() or not math.isfinite(factor):
        raise _unusable(settings)
    all_dim = settings.mscale_all_dim or 0.0
    latent_scale = _mscale(settings.factor, all_dim) ** 2 if settings.kind != "default" else 1.0
    long = _long(settings) if settings.kind == "longrope" and settings.lacks is None else None
    return Rope(
        inv_freq.tolist(), factor, settings.lacks, list(settings.warnings), latent_scale, long
    )


def _frequencies(settings: RopeSettings) -> tuple[F32, float]:
    powers = _powers(settings)
    inv_freq = np.float32(1.0) / powers
    if settings.lacks is not None or settings.kind in ("default", "ntk-alpha"):
        return inv_freq, 1.0
    if settings.kind == "linear":
        return inv_freq / np.float32(settings.factor), 1.0
    if settings.kind == "llama3":
        return _llama3(inv_freq, settings), 1.0
    if settings.kind == "longrope":
        return _divided(powers, settings.short_factor), _long_factor(settings, "short_mscale")
    return _yarn(powers, settings), _yarn_attention_factor(settings)


def _long(settings: RopeSettings) -> LongRope:
    if settings.original_context != int(settings.original_context):
        raise SourceError(
            f"rope: original context of {settings.original_context}: expected a whole number"
        )
    inv_freq = _divided(_powers(settings), settings.long_factor)
    factor = _long_factor(settings, "long_mscale")
    if not ((inv_freq > 0) & np.isfinite(inv_freq)).all() or not math.isfinite(factor):
        raise _unusable(settings)
    return LongRope(inv_freq.tolist(), factor, int(settings.original_context))


def _divided(powers: F32, factors: tuple[float, ...]) -> F32:
    divisors = np.array(factors, np.float32)
    if divisors.shape != powers.shape or not (np.isfinite(divisors) & (divisors > 0)).all():
        raise SourceError(
            f"rope: longrope: expected {len(powers)} positive finite factors of each kind, one per "
            f"two rotated dimensions, found {len(divisors)}"
        )
    result: F32 = np.float32(1.0) / (divisors * powers)
    return result


def _long_factor(settings: RopeSettings, mscale: str) -> float:
    stated: float | None = getattr(settings, mscale)
    if stated is None:
        stated = settings.attention_factor
    if stated is not None:
        return stated
    if settings.factor <= 1 or settings.original_context <= 1:
        return 1.0
    return math.sqrt(1 + math.log(settings.factor) / math.log(settings.original_context))


def _unusable(settings: RopeSettings) -> SourceError:
    return SourceError(
        f"rope: type {quote(settings.kind)} with theta {settings.theta} and factor "
        f"{settings.factor} gives no usable frequencies"
    )


def fold_factors(rope: Rope, factors: F32) -> None:
    """Divide the frequencies by a GGUF file's `rope_freqs` [dim/2]. Raises SourceError."""
    if factors.shape != (len(rope.inv_freq),) or not (np.isfinite(factors) & (factors > 0)).all():
        raise SourceError(
            f"rope_freqs.weight: expected {len(rope.inv_freq)} positive finite factors, "
            f"found shape {factors.shape}"
        )
    rope.inv_freq = (np.array(rope.inv_freq, np.float32) / factors).tolist()


def _powers(settings: RopeSettings) -> F32:
    exponents = np.arange(0, settings.dim, 2, dtype=np.float32) / np.float32(settings.dim)
    base = float(np.float32(settings.theta))
    return np.array([math.pow(base, float(x)) for x in exponents], dtype=np.float32)


def _llama3(inv_freq: F32, settings: RopeSettings) -> F32:
    low, high = settings.low_freq_factor, settings.high_freq_factor
    original = settings.original_context
    # torch turns scalar / tensor into reciprocal * scalar
    length = np.float32(1.0) / inv_freq * np.float32(2 * math.pi)
    scaled = np.where(
        length > np.float32(original / low), inv_freq / np.float32(settings.factor), inv_freq
    )
    smooth = (np.float32(1.0) / length * np.float32(original) - np.float32(low)) / np.float32(
        high - low
    )
    blended = (np.float32(1.0) - smooth) * scaled / np.float32(settings.factor) + smooth * scaled
    middle = (length >= np.float32(original / high)) & (length <= np.float32(original / low))
    result: F32 = np.where(middle, blended, scaled).astype(np.float32)
    return result


def _yarn(powers: F32, settings: RopeSettings) -> F32:
    dim, log_base = settings.dim, math.log(settings.theta)

    def correction(rotations: float) -> float:
        ratio = settings.original_context / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * log_base)

    low, high = correction(settings.beta_fast), correction(settings.beta_slow)
    if settings.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    keep = np.float32(1.0) - ramp
    stretched = np.float32(1.0) / (np.float32(settings.factor) * powers)
    result: F32 = stretched * (np.float32(1.0) - keep) + np.float32(1.0) / powers * keep
    return result


def _yarn_attention_factor(settings: RopeSettings) -> float:
    if settings.attention_factor is not None:
        return settings.attention_factor
    if settings.mscale and settings.mscale_all_dim:
        return _mscale(settings.factor, settings.mscale) / _mscale(
            settings.factor, settings.mscale_all_dim
        )
    return _mscale(settings.factor, 1.0)


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _numbers(where: str, name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > MAX_ROPE_DIM:
        raise SourceError(f"{where}: {name}: expected a list of numbers, found {quote(values)}")
    return tuple(_number(where, name, value) for value in values)


def _number(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SourceError(f"{where}: {name}: expected a number, found {quote(value)}")
    if not abs(value) < 1e300:
        raise SourceError(f"{where}: {name}: expected a finite number, found {quote(value)}")
    return float(value)
