"""--target-bpw: the size is kept, errors are measured, and what was chosen is near the best."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from quantize_util import profile_of, save, types_of
from tiny_containers import Containers

import colibri_tools
from colibri_tools.dtypes import dtype_by_name
from colibri_tools.errors import UsageError
from colibri_tools.quantize.allocate import Option, Unit, allocate, target_policy
from colibri_tools.quantize.encoding import Encoding
from colibri_tools.quantize.matrices import Matrix
from colibri_tools.quantize.rules import Target
from colibri_tools.repack import RepackResult
from colibri_tools.rewrite import quantize
from colibri_tools.verify import verify

EXPERTS, LAYERS = 4, 2


@pytest.fixture
def source(containers: Containers) -> Path:
    """A model of which layer 1's experts are all but zero in one column: they compress badly."""

    def change(weights: dict[str, Any]) -> None:
        for name, values in weights.items():
            if "layers.1.mlp.experts" in name:
                values[:] *= 0.01
                values[:, 0] *= 1e5

    spec = tm.wide_spec("qwen3_moe", experts=EXPERTS, vocab=61)
    return containers.hf("qwen3_moe", spec, dtype="bf16", mutate=change)


def target(source: Path, out: Path, bits: float, *rules: str, **more: Any) -> RepackResult:
    return quantize(source, out, Encoding(target_policy(bits, rules)), force=True, **more)


def explained(result: RepackResult) -> dict[str, Any]:
    assert result.quantization is not None and result.quantization.allocation is not None
    return result.quantization.allocation


@pytest.mark.parametrize("bits", [3.0, 4.5, 6.0, 12.0])
def test_the_size_is_kept_and_nearly_used(source: Path, tmp_path: Path, bits: float) -> None:
    result = target(source, tmp_path / "q.colibri", bits)
    assert result.quantization is not None
    found = result.quantization.bits_per_weight
    assert found == pytest.approx(explained(result)["bits_per_weight"], abs=1e-12)
    assert found <= bits
    assert found > bits - 0.1 or bits > 8.6  # the largest candidate has 8.5
    assert verify(tmp_path / "q.colibri").ok


def test_it_is_deterministic(source: Path, tmp_path: Path) -> None:
    made = []
    for threads in (1, 4):
        encoding = Encoding(target_policy(4.25, threads=threads))
        quantize(source, tmp_path / "q.colibri", encoding, threads=threads, force=True)
        made.append((tmp_path / "q.colibri").read_bytes())
    assert made[0] == made[1]


def test_hot_experts_get_more_bits_and_cold_ones_fewer(source: Path, tmp_path: Path) -> None:
    counts = np.tile([996, 2, 1, 1], (LAYERS, 1))
    with colibri_tools.open(source) as container:
        path = save(profile_of(container, counts), tmp_path / "p.profile")
    target(source, tmp_path / "q.colibri", 4.5, routing=path)
    with colibri_tools.open(tmp_path / "q.colibri") as container:
        types = types_of(container)
    for part in ("gate", "up", "down"):
        hot = dtype_by_name(types[f"0.0.{part}"]).bits_per_weight
        cold = [dtype_by_name(types[f"0.{e}.{part}"]).bits_per_weight for e in (1, 2, 3)]
        assert hot > max(cold)


def test_it_beats_one_type_for_all_where_matrices_differ(source: Path, tmp_path: Path) -> None:
    found = explained(target(source, tmp_path / "q.colibri", 4.6))
    assert found["pays"] and found["gain"] > 0.05
    assert found["error"] < found["uniform"]["error"]
    assert any("less error than --type at that size" in line for line in found["text"])


def test_it_says_when_it_does_not_pay(containers: Containers, tmp_path: Path) -> None:
    plain = containers.hf("olmoe", tm.wide_spec("olmoe", experts=EXPERTS, vocab=61), dtype="bf16")
    found = explained(target(plain, tmp_path / "q.colibri", 20))  # q8_0 for all, either way
    assert not found["pays"] and found["gain"] == pytest.approx(0, abs=1e-12)
    assert any("it does not pay" in line for line in found["text"])


def test_rules_pin_types(source: Path, tmp_path: Path) -> None:
    target(source, tmp_path / "q.colibri", 5, "down=q5_0", "router=q8_0")
    with colibri_tools.open(tmp_path / "q.colibri") as container:
        types = types_of(container)
        assert container.provenance["recipe.type"] == "5 bits per weight"
    assert {name for key, name in types.items() if key.endswith("down")} == {"q5_0"}
    assert types["layers.0.router"] == "q8_0"


def test_senseless_sizes_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"smallest types give 2\.\d+ bits"):
        target(source, tmp_path / "q.colibri", 2)
    for bits in (0.5, 33, float("nan")):
        with pytest.raises(UsageError, match="expected 1 to 32"):
            target_policy(bits)
    assert not (tmp_path / "q.colibri").exists()


def units_of(seed: int) -> list[Unit]:
    """Four matrices with convex and with odd options."""
    random = np.random.default_rng(seed)
    units = []
    for i in range(4):
        sizes = np.sort(random.integers(10, 100, 3))
        errors = np.sort(random.random(3))[::-1]
        names = [dtype_by_name(name) for name in ("q2_k", "q4_k", "q6_k")]
        options = tuple(
            Option(d, d, int(n), float(e))
            for d, n, e in zip(names, sizes + np.arange(3), errors, strict=True)
        )
        matrix = Matrix(str(i), (Target("attn_q", i, 256),), None, 0, 1, 256)  # type: ignore[arg-type]
        units.append(Unit(matrix, float(random.random()), options))
    return units


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_near_the_best_of_all(seed: int) -> None:
    """Every combination is tried; the greedy one lies above it by at most one step's gain."""
    units = units_of(seed)
    least = sum(unit.options[0].n_bytes for unit in units)
    most = sum(unit.options[-1].n_bytes for unit in units)
    budget = (least + most) // 2

    def cost(picked: Any) -> tuple[int, float]:
        options = [unit.options[i] for unit, i in zip(units, picked, strict=True)]
        error = sum(u.weight * o.error for u, o in zip(units, options, strict=True))
        return sum(o.n_bytes for o in options), error

    best = min(
        error for n, error in map(cost, itertools.product(range(3), repeat=4)) if n <= budget
    )
    n_bytes, error = cost(allocate(units, budget, UsageError))
    step = max(u.weight * (u.options[0].error - u.options[-1].error) for u in units)
    assert n_bytes <= budget
    assert best <= error + 1e-12
    assert error <= best + step
    assert cost(allocate(units, most, UsageError))[1] == pytest.approx(cost([2] * 4)[1])
