"""Source precisions of Hugging Face checkpoints: codes and scales seen as the weights they mean.

Each scheme is a row of a table. Where config.json names one that is known, the tensors of a weight
become one (`sources.views`), and everything behind this module sees plain weights. What the rules
are, and which type a weight gets, is in docs/sources.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.dtypes import DType, dtype_by_name
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.detect import Detected
from colibri_tools.families.result import Assignment, SourceMapping
from colibri_tools.sources import Source, SourceTensor
from colibri_tools.sources.views import MAX_ROW_BYTES, Mxfp4View, ScaledView

__all__ = ["SCHEMES", "Interpreted", "Scheme", "interpret"]

_FLOAT_SCALES = ("f32", "bf16", "f16", "f8_e8m0")
_DEFAULT_BLOCK = (128, 128)
_BF16, _F32, _MXFP4 = dtype_by_name("bf16"), dtype_by_name("f32"), dtype_by_name("mxfp4")

Tile = tuple[int, int]
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the config says beyond the scheme: the `tile` of a scale (None: not said), and whether
    scales are powers of two."""

    tile: Tile | None = None
    powers_of_two: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store weights.

    `method` and `format` are what config.json says (quant_method; format or quant_algo, "" for
    none). A weight has one of the types `stored` and a tensor of scales beside it: `scale` is
    appended to its name, or replaces `instead_of` at its end. `settings` reads the rest of the
    config and raises SourceError for what is not supported.
    """

    name: str
    method: str
    format: str
    stored: tuple[str, ...]
    scale: str
    settings: Callable[[Config], Settings]
    instead_of: str = ""
    scales: tuple[str, ...] = _FLOAT_SCALES
    int8_steps: bool = False

    def scale_name(self, weight: str) -> str | None:
        """Return the name of a weight's scales; None for a name that can have none."""
        if not weight.endswith(self.instead_of):
            return None
        return weight[: len(weight) - len(self.instead_of)] + self.scale


@dataclass(slots=True)
class Interpreted:
    """`source` lists weights. `sides` maps a tensor that went into one to its weight's name."""

    source: Source
    scheme: Scheme | None = None
    sides: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def finish(self, mapping: SourceMapping) -> None:
        """Add to a census what it did not see: sides, and what was converted."""
        mapping.tensors = self.source.tensors
        mapping.warnings += self.warnings
        for side, weight in self.sides.items():
            own = mapping.assignments[weight]
            rule = own.rule if own.action == "dropped" else f"scales of {weight}"
            mapping.assignments[side] = Assignment(
                own.action, rule, own.role, own.layer, own.expert
            )
            if own.action == "dropped":
                mapping.dropped[own.rule].append(side)
        if self.unused:
            mapping.dropped[_UNUSED_RULE] = self.unused
            for name in self.unused:
                mapping.assignments[name] = Assignment("dropped", _UNUSED_RULE)
        if self.scheme is not None:
            self._count(mapping, self.scheme)

    def _count(self, mapping: SourceMapping, scheme: Scheme) -> None:
        used = [
            tensor.dtype.name
            for name, tensor in self.source.tensors.items()
            if tensor.view is not None
            and mapping.assignments[name].action in ("resident", "expert")
        ]
        for carrier, count in sorted(Counter(used).items()):
            mapping.conversions[f"{scheme.name} -> {carrier}"] = count
            mapping.notes.append(f"{count} tensors stored as {scheme.name} become {carrier}")


def interpret(source: Source, detected: Detected) -> Interpreted:
    """Return `source` with every quantized weight as one tensor of a type that a container holds.

    Reads at most a few bytes. Raises SourceError for a scheme that is not supported, naming it, and
    for scales that do not fit their weight.
    """
    config = _stated(detected) if source.kind == "safetensors" else None
    if config is None:
        return Interpreted(source)
    where = f"{source.path}: config.json: quantization_config"
    scheme = _scheme_of(config, where)
    try:
        settings = scheme.settings(config)
    except SourceError as error:
        raise SourceError(f"{where}: {error.message}; {_HINT}") from None
    found = Interpreted(source, scheme)
    tensors = dict(source.tensors)
    views = _mxfp4_views if scheme.name == "mxfp4" else _scaled_views
    for weight, sides in views(source, scheme, settings):
        tensors[weight.name] = weight
        for side in sides:
            found.sides[side] = weight.name
            del tensors[side]
    found.unused = [name for name in tensors if _UNUSED.fullmatch(name)]
    for name in found.unused:
        del tensors[name]
    if not found.sides:
        found.warnings.append(
            f"config.json says that weights are stored as {scheme.name}, but no tensor is; the "
            "stored numbers are used as they are"
        )
    found.source = source.with_tensors(tensors)
    return found


_UNUSED_RULE = "activation-scale"
_UNUSED = re.compile(r".+[._](?:input_scale|activation_scale(?:_ub)?|[kvq]_scale|output_scale)")


def _stated(detected: Detected) -> Config | None:
    for level in detected.levels:
        for key in ("quantization_config", "compression_config"):
            if level.get(key):
                value = level[key]
                return value if isinstance(value, Mapping) else {}
    return None


_HINT = "use the unquantized checkpoint, or a GGUF file of it"


def _scheme_of(config: Config, where: str) -> Scheme:
    method = config.get("quant_method")
    if method == "bitsandbytes":
        form = "8bit" if config.get("load_in_8bit") or config.get("_load_in_8bit") else "4bit"
    else:
        stated = [config.get(key) for key in ("quant_algo", "format")]
        form = next((text for text in stated if isinstance(text, str)), "")
    for scheme in SCHEMES:
        if (scheme.method, scheme.format) == (method, form):
            return scheme
    parts = [part for part in (method, form) if isinstance(part, str) and part]
    name = quote(" ".join(parts) or "?")
    if config and "quant_method" not in config:
        name += f" (no quant_method: {quote_some(sorted(config))})"
    raise SourceError(f"{where}: the scheme {name} is not supported; {_HINT}")


# ---------------------------------------------------------------- what a config says


def _fp8(config: Config) -> Settings:
    expert_type = config.get("expert_dtype", "fp8")
    if expert_type != "fp8":
        raise SourceError(f"experts of type {quote(expert_type)} are not supported")
    powers = config.get("scale_fmt") == "ue8m0"
    tile = config.get("weight_block_size")
    return Settings(None if tile is None else _tile(tile), powers)


def _tile(value: object) -> Tile:
    whole = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    if whole and all(type(n) is int and 0 < n < 1 << 24 for n in value):  # type: ignore[attr-defined]
        return value[0], value[1]  # type: ignore[index]
    raise SourceError(f"expected a block of two positive whole numbers, found {quote(value)}")


def _plain(_: Config) -> Settings:
    return Settings()


def _compressed_float(config: Config) -> Settings:
    return _compressed(config, "float")


def _compressed_int(config: Config) -> Settings:
    return _compressed(config, "int")


def _compressed(config: Config, kind: str) -> Settings:
    """compressed-tensors: all groups of weights must have 8 bits, be symmetric, and of one tile."""
    for key, plain in (("sparsity_config", "dense"), ("transform_config", None)):
        extra = config.get(key)
        if extra and not (isinstance(extra, Mapping) and extra.get("format") == plain is not None):
            raise SourceError(f"{key} is not supported")
    groups = config.get("config_groups")
    tiles = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise SourceError("a group without weights")
        expected = {"num_bits": 8, "type": kind, "symmetric": True}
        for key, value in expected.items():
            if weights.get(key, value) != value:
                raise SourceError(f"weights: {key}: expected {value}, found {quote(weights[key])}")
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise SourceError(f"weights: strategy {quote(strategy)} is not supported")
        tiles.add(_tile(weights.get("block_structure")) if strategy == "block" else None)
    if len(tiles - {None}) > 1:
        raise SourceError("groups with different block_structure are not supported")
    return Settings(next((tile for tile in tiles if tile is not None), None))


_FP8_TYPES = ("f8_e4m3", "f8_e5m2")
SCHEMES: tuple[Scheme, ...] = (
    Scheme("fp8", "fp8", "", _FP8_TYPES, "_scale_inv", _fp8),
    Scheme("fbgemm fp8", "fbgemm_fp8", "", _FP8_TYPES, "_scale", _plain),
    Scheme(
        "compressed-tensors fp8",
        "compressed-tensors",
        "float-quantized",
        _FP8_TYPES,
        "_scale",
        _compressed_float,
    ),
    Scheme(
        "compressed-tensors int8",
        "compressed-tensors",
        "int-quantized",
        ("i8",),
        "_scale",
        _compressed_int,
    ),
    Scheme("modelopt fp8", "modelopt", "FP8", _FP8_TYPES, "_scale", _plain),
    Scheme(
        "bitsandbytes int8",
        "bitsandbytes",
        "8bit",
        ("i8",),
        ".SCB",
        _plain,
        instead_of=".weight",
        scales=("f32",),
        int8_steps=True,
    ),
    Scheme("mxfp4", "mxfp4", "", ("u8",), "_scales", _plain, instead_of="_blocks", scales=("u8",)),
)
"""All schemes, one row each."""


# ---------------------------------------------------------------- weights and their scales

Found = Iterator[tuple[SourceTensor, tuple[str, ...]]]


def _pairs(source: Source, scheme: Scheme) -> Iterator[tuple[SourceTensor, SourceTensor]]:
    """Yield each weight with its scales. A weight without any is left to the census to refuse."""
    for name, tensor in source.tensors.items():
        other = scheme.scale_name(name)
        scales = source.tensors.get(other) if other is not None else None
        if scales is None or other is None:
            continue
        if tensor.dtype.name not in scheme.stored:
            raise SourceError(
                f"tensor {quote(name)}: type {tensor.dtype.safetensors} with scales is not "
                f"supported by the scheme {scheme.name} of config.json"
            )
        if scales.dtype.name not in scheme.scales:
            raise SourceError(
                f"tensor {quote(other)}: scales of type {scales.dtype.name} are not supported"
            )
        yield tensor, scales


def _scaled_views(source: Source, scheme: Scheme, settings: Settings) -> Found:
    for codes, scales in _pairs(source, scheme):
        if not 2 <= len(codes.shape) <= 3 or 0 in codes.shape:
            raise SourceError(
                f"tensor {quote(codes.name)}: expected a matrix or a stack of them with scales, "
                f"found {list(codes.shape)}"
            )
        if 4 * codes.shape[-1] > MAX_ROW_BYTES:
            raise SourceError(f"tensor {quote(codes.name)}: rows of {codes.shape[-1]} weights")
        tile, grid = _tiles(codes, scales, settings, scheme)
        carrier = _carrier(scales.dtype, settings)
        view = ScaledView(codes, scales, tile, grid, carrier, scheme.int8_steps)
        sides = [scales.name]
        if scheme.int8_steps:
            sides += _row_format(source, codes)
        yield codes.seen_as(view, carrier, codes.shape), tuple(sides)


def _carrier(scales: DType, settings: Settings) -> DType:
    """bf16 where every product is known to fit before any is made, else f32."""
    return _BF16 if scales.name == "f8_e8m0" or settings.powers_of_two else _F32


def _row_format(source: Source, codes: SourceTensor) -> Iterator[str]:
    name = codes.name.removesuffix("weight") + "weight_format"
    tensor = source.tensors.get(name)
    if tensor is None:
        return
    if tensor.n_bytes != 1 or source.read(tensor) != b"\0":
        raise SourceError(f"tensor {quote(name)}: expected 0 (rows); save the model again")
    yield name


def _tiles(
    codes: SourceTensor, scales: SourceTensor, settings: Settings, scheme: Scheme
) -> tuple[Tile, tuple[int, int, int]]:
    """Return the tile of one scale and the grid [n, rows, cols] of scales."""
    rows, cols = codes.shape[-2:]
    n = codes.shape[0] if len(codes.shape) == 3 else 1
    tiles = [(1, cols), (rows, cols), (rows, 1)]  # per row, per matrix, per column
    if settings.tile is not None:
        tiles = [settings.tile]
    elif scheme.method == "fp8":
        tiles.append(_DEFAULT_BLOCK)
    for tile in tiles:
        grid = (-(-rows // tile[0]), -(-cols // tile[1]))
        if scales.shape in _shapes(n, *grid, stacked=len(codes.shape) == 3):
            one = scales.n_weights == 1
            return tile, (1 if one else n, *grid)
    shown = " or ".join(f"{t[0]} x {t[1]}" for t in tiles)
    raise SourceError(
        f"tensor {quote(scales.name)}: expected one scale for each {shown} tile of "
        f"{list(codes.shape)} ({quote(codes.name)}), found {list(scales.shape)}"
    )


def _shapes(n: int, rows: int, cols: int, *, stacked: bool) -> list[tuple[int, ...]]:
    """The ways a grid of scales is written."""
    found: list[tuple[int, ...]] = [(n, rows, cols)] if stacked else [(rows, cols)]
    if cols == 1:
        found.append((n, rows) if stacked else (rows,))
    if rows == cols == 1:
        found += [(n,), (), (1,), (1, 1)] if stacked else [(), (1,)]
    return found


def _mxfp4_views(source: Source, scheme: Scheme, settings: Settings) -> Found:
    for blocks, scales in _pairs(source, scheme):
        if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16) or 0 in blocks.shape:
            raise SourceError(
                f"tensor {quote(blocks.name)}: expected [experts, outputs, blocks, 16] and scales "
                f"[experts, outputs, blocks], found {list(blocks.shape)} and {list(scales.shape)} "
                f"({quote(scales.name)})"
            )
        shape = (*blocks.shape[:2], 32 * blocks.shape[2])
        view = Mxfp4View(blocks, scales)
        yield blocks.seen_as(view, _MXFP4, shape), (scales.name,)
