"""What the tests of mapping and repacking share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_models as rm
import tiny_models as tm
from tiny_models import TinySpec

import colibri_tools
from colibri_tools.container.format import PartRole
from colibri_tools.errors import ColibriError
from colibri_tools.mapping import SourceMapping, map_source
from colibri_tools.repack import repack
from colibri_tools.sources import open_source

Weights = dict[str, Any]
Change = Callable[[Weights], Weights | None]

PARTS = (PartRole.GATE, PartRole.UP, PartRole.DOWN)


def mapped(path: Path) -> SourceMapping:
    """The census of a checkpoint."""
    with open_source(path) as source:
        return map_source(source)


def small_spec(family: str, **changes: Any) -> TinySpec:
    """A quick model for tests of names and metadata, still with no two dimensions equal."""
    n = 8 if family in rm.RECIPES else 5  # groups of experts are of equal size
    changes = {"experts": n, "width": 24, "shared_width": 48} | changes
    return tm.default_spec(family, **changes)


def small_hf(path: Path, family: str, **options: Any) -> Path:
    """`tm.write_hf` of the small model."""
    return tm.write_hf(path, family, small_spec(family), **options)


def small_gguf(path: Path, family: str, **options: Any) -> Path:
    """`tm.write_gguf` of the small model; the first file."""
    return tm.write_gguf(path, family, small_spec(family), **options)[0]


def map_hf(
    folder: Path, family: str, spec: TinySpec | None = None, **options: Any
) -> SourceMapping:
    """The census of `tm.write_hf(.., **options)`."""
    return mapped(tm.write_hf(folder / "hf", family, spec or small_spec(family), **options))


def map_gguf(
    folder: Path, family: str, spec: TinySpec | None = None, **options: Any
) -> SourceMapping:
    """The census of `tm.write_gguf(.., **options)`."""
    spec = spec or small_spec(family)
    return mapped(tm.write_gguf(folder / "model.gguf", family, spec, **options)[0])


def refused(source: Path, out: Path | None = None) -> str:
    """Repack, which must fail without leaving a file; returns the message."""
    out = out or source.parent / "refused.colibri"
    before = sorted(source.parent.iterdir())
    with pytest.raises(ColibriError) as caught:
        repack(source, out)
    assert sorted(source.parent.iterdir()) == before
    assert "\n" not in caught.value.message
    return caught.value.message


def code(layer: int, expert: int, part: int, rows: int, cols: int) -> np.ndarray:
    """Values [rows, cols] that encode layer, expert, projection, row and column, exact in f32."""
    at = ((layer * 16 + expert) * 4 + part) * 16384
    return (at + np.arange(rows)[:, None] * 128 + np.arange(cols)).astype(np.float32)


def moe_layers(spec: TinySpec) -> list[int]:
    """The layers that have experts."""
    return [layer for layer in range(spec.layers) if layer not in spec.dense_layers]


def coded(family: str, spec: TinySpec) -> Change:
    """A change of per-expert weights: every expert matrix gets its code."""
    found = tm._names(family)
    moe, names = found["moe"], (found["gate"], found["up"], found["down"])

    def change(weights: Weights) -> None:
        for layer in moe_layers(spec):
            for expert in range(spec.n_experts(layer)):
                for part, name in enumerate(names):
                    key = f"model.layers.{layer}.{moe}.experts.{expert}.{name}.weight"
                    weights[key] = code(layer, expert, part, *weights[key].shape)

    return change


def check_codes(container: Path, spec: TinySpec) -> None:
    """Every value of every expert is where it belongs."""
    shapes = ((spec.width, spec.hidden), (spec.width, spec.hidden), (spec.hidden, spec.width))
    with colibri_tools.open(container) as found:
        layers = moe_layers(spec)
        assert [row.layer for row in found.rows] == list(layers)
        for row, layer in enumerate(layers):
            for expert in range(spec.n_experts(layer)):
                for part, role in enumerate(PARTS):
                    expected = code(layer, expert, part, *shapes[part])
                    values = found.dequantize_part(row, expert, role)
                    np.testing.assert_array_equal(values, expected, f"{layer} {expert} {role}")


def replace_key(old: str, new: str) -> Change:
    """A change that renames tensors by replacing a part of their names."""
    return lambda weights: {name.replace(old, new): value for name, value in weights.items()}


def without(*names: str) -> Change:
    """A change that removes tensors."""
    return lambda weights: {n: v for n, v in weights.items() if n not in names}


def spec_of(path: Path) -> Mapping[str, Any]:
    """The spec of a container."""
    with colibri_tools.open(path) as container:
        return dict(container.spec)
