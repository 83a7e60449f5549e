"""Importance: what a profile or an imatrix file says reaches the encoder; odd ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from quantize_util import (
    encoding,
    profile_of,
    save,
    types_of,
    write_imatrix,
    write_old_imatrix,
)
from tiny_containers import Containers

import colibri_tools
from colibri_tools import native
from colibri_tools.container import PartRole
from colibri_tools.errors import ColibriError, FormatError, UsageError
from colibri_tools.quantize.importance import FLOOR, MIN_TOKENS, column_weights
from colibri_tools.repack import repack
from colibri_tools.rewrite import quantize
from colibri_tools.verify import verify

EXPERTS, HIDDEN, WIDTH, LAYERS = 12, 256, 512, 2
Q4_K = 12


@pytest.fixture
def source(containers: Containers) -> Path:
    spec = tm.wide_spec("qwen3_moe", experts=EXPERTS, vocab=61)
    return containers.hf("qwen3_moe", spec, dtype="bf16")


def squares(columns: int, seed: int = 0, matrices: int = EXPERTS) -> Any:
    """Sums of squares that differ much by column, as real ones do."""
    random = np.random.default_rng(seed)
    return np.exp(2 * random.standard_normal((matrices, columns)))


def counts_of(*unused: int, n: int = 128) -> Any:
    counts = np.full(EXPERTS, float(n))
    counts[list(unused)] = 0
    return counts


def imatrix_entries(*unused: int) -> dict[str, tuple[Any, Any]]:
    """All expert matrices, and attention's q and output of layer 0."""
    counts = counts_of(*unused)
    entries = {}
    for layer in range(LAYERS):
        for name, columns in (("gate", HIDDEN), ("up", HIDDEN), ("down", WIDTH)):
            sums = squares(columns, layer) * counts[:, None]
            entries[f"blk.{layer}.ffn_{name}_exps.weight"] = (sums, counts)
    entries["blk.0.attn_q.weight"] = (squares(HIDDEN, 9, 1), [512])
    entries["blk.0.attn_output.weight"] = (squares(256, 8, 1), [512])
    return entries


def expected_block(source: Path, layer: int, expert: int, role: PartRole, sums: Any) -> bytes:
    """A part of an expert encoded right here, by `sums` of its columns, or None for equal ones."""
    with colibri_tools.open(source) as container:
        weights = container.dequantize_part(layer, expert, role)
    importance = None
    if sums is not None:
        importance = np.maximum(sums / sums.mean(), FLOOR).astype(np.float32)
    encoded = native.quantize(Q4_K, weights, importance=importance)
    assert not isinstance(encoded, int)
    return encoded.tobytes()


def part_of(path: Path, layer: int, expert: int, role: PartRole) -> bytes:
    with colibri_tools.open(path) as container:
        return container.part(layer, expert, role).tobytes()


# -- imatrix ---------------------------------------------------------------------------------------


def test_an_imatrix_weighs_the_columns_of_each_expert(source: Path, tmp_path: Path) -> None:
    entries = imatrix_entries()
    path = write_imatrix(tmp_path / "i.gguf", entries)
    out = tmp_path / "q.colibri"
    result = quantize(source, out, encoding("q4_k"), importance=path, report=tmp_path / "r.json")
    for layer, expert, role in ((0, 0, PartRole.GATE), (1, 7, PartRole.UP), (1, 11, PartRole.DOWN)):
        name = f"blk.{layer}.ffn_{role.label}_exps.weight"
        sums = np.float32(entries[name][0][expert]).astype(np.float64)
        expected = expected_block(source, layer, expert, role, sums)
        assert part_of(out, layer, expert, role) == expected
        assert expected != expected_block(source, layer, expert, role, None)
    with colibri_tools.open(out) as container, colibri_tools.open(source) as before:
        query = before.dequantize("layers.0.attn_q")
        sums = entries["blk.0.attn_q.weight"][0][0]
        weights = column_weights(np.float32(sums))
        assert (
            container.tensor("layers.0.attn_q").tobytes()
            == native.quantize(Q4_K, query, importance=weights).tobytes()
        )
        provenance = container.provenance
        assert provenance["recipe.importance.kind"] == "imatrix"
        assert len(provenance["recipe.importance.sha256"]) == 64
    errors = json.loads((tmp_path / "r.json").read_text())["errors"]
    gate = next(e for e in errors if e["role"] == "experts.gate")
    assert gate["important"] < gate["relative"]  # the encoder minimised the former
    assert result.warnings == ()


def test_both_forms_of_the_file_say_the_same(source: Path, tmp_path: Path) -> None:
    entries = imatrix_entries(5)
    calls = 8  # counts and calls are powers of two, so that no mean is rounded
    old = {}
    for name, (sums, counts) in entries.items():
        counts = np.asarray(counts, np.float64).reshape(-1, 1)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0)
        old[name] = (means * calls, calls)
    made = []
    for path in (
        write_imatrix(tmp_path / "i.gguf", entries),
        write_old_imatrix(tmp_path / "i.dat", old),
    ):
        out = tmp_path / f"{path.name}.colibri"
        result = quantize(source, out, encoding("q4_k"), importance=path)
        assert result.quantization is not None
        assert {(n[0], n[1]) for n in result.quantization.neutral_experts} == {(0, 5), (1, 5)}
        made.append(out)
    with colibri_tools.open(made[0]) as a, colibri_tools.open(made[1]) as b:
        assert (a.index["sha256"] == b.index["sha256"]).all()


def test_case_11_1_an_expert_without_tokens_counts_equally(source: Path, tmp_path: Path) -> None:
    path = write_imatrix(tmp_path / "i.gguf", imatrix_entries(5))
    out = tmp_path / "q.colibri"
    result = quantize(source, out, encoding("q4_k"), importance=path)
    (warning,) = result.warnings
    assert f"2 of {2 * EXPERTS} experts saw fewer than {MIN_TOKENS} tokens" in warning
    assert "layer 0 expert 5 (0)" in warning
    for role in (PartRole.GATE, PartRole.UP, PartRole.DOWN):
        assert part_of(out, 1, 5, role) == expected_block(source, 1, 5, role, None)
        assert part_of(out, 1, 6, role) != expected_block(source, 1, 6, role, None)
    assert verify(out).ok  # no NaN
    with colibri_tools.open(out) as container:
        assert container.provenance["recipe.importance.neutral_experts"] == 2


def test_a_few_tokens_are_as_good_as_none(source: Path, tmp_path: Path) -> None:
    entries = imatrix_entries()
    for _, counts in entries.values():
        if len(counts) == EXPERTS:
            counts[3], counts[4] = MIN_TOKENS - 1, MIN_TOKENS
    path = write_imatrix(tmp_path / "i.gguf", entries)
    out = tmp_path / "q.colibri"
    result = quantize(source, out, encoding("q4_k"), importance=path)
    assert result.quantization is not None
    assert result.quantization.neutral_experts == ((0, 3, 15), (1, 3, 15))
    assert part_of(out, 0, 3, PartRole.UP) == expected_block(source, 0, 3, PartRole.UP, None)
    assert part_of(out, 0, 4, PartRole.UP) != expected_block(source, 0, 4, PartRole.UP, None)


def test_case_4_1_subnormals_and_odd_importance_give_finite_numbers(tmp_path: Path) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights["model.layers.0.mlp.experts.0.gate_proj.weight"][:] = 1e-40

    spec = tm.wide_spec("qwen3_moe", experts=EXPERTS, vocab=61)
    hf = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, dtype="bf16", mutate=change)
    for value in (0.0, 1.0, 1e-38, 3e38):
        sums = np.full((EXPERTS, HIDDEN), value)
        sums[:, 0] *= 0.5  # so that columns can be told apart
        path = write_imatrix(
            tmp_path / "i.gguf", {"blk.0.ffn_gate_exps.weight": (sums, counts_of())}
        )
        repack(hf, tmp_path / "q.colibri", encoding=encoding("q4_0"), importance=path, force=True)
        assert verify(tmp_path / "q.colibri").ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_odd_numbers_in_an_imatrix_are_named(source: Path, tmp_path: Path, value: float) -> None:
    entries = imatrix_entries()
    entries["blk.1.ffn_up_exps.weight"][0][3, 17] = value
    path = write_imatrix(tmp_path / "i.gguf", entries)
    with pytest.raises(FormatError, match=r"'blk\.1\.ffn_up_exps\.weight' matrix 3, column 17"):
        quantize(source, tmp_path / "q.colibri", encoding("q4_k"), importance=path)
    assert not (tmp_path / "q.colibri").exists()


def test_the_imatrix_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    def refused(name: str, sums: Any, counts: Any) -> str:
        path = write_imatrix(tmp_path / "i.gguf", {name: (sums, counts)})
        with pytest.raises(UsageError, match="another model") as caught:
            quantize(source, tmp_path / "q.colibri", encoding("q4_k"), importance=path)
        return caught.value.message

    stack = "blk.0.ffn_down_exps.weight"
    found = refused(stack, squares(WIDTH, matrices=8), np.ones(8))
    assert "expected 12 experts of 512 columns" in found
    assert "expected 12 experts" in refused(stack, squares(128), counts_of())
    assert "expected 256 columns" in refused("blk.0.attn_q.weight", squares(512, 0, 1), [4])
    assert "none of its 1 entries" in refused("blk.9.attn_q.weight", squares(256, 0, 1), [4])
    assert "none of its 1 entries" in refused("encoder.weight", squares(256, 0, 1), [4])


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "neither a routing profile nor an importance matrix"),
        (b"once upon a time", "neither a routing profile nor an importance matrix"),
        (b"\1\0\0\0\xff\xff\xff\x7f", "name of 2147483647 bytes"),
        (b"\1\0\0\0\1\0\0\0a\1\0\0\0\xff\xff\xff\x7f", "leads out of the file"),
        (b"\1\0\0\0\1\0\0\0a\0\0\0\0\1\0\0\0abcd", "from 0 calls"),
        (b"GGUF", "byte|short|end"),
    ],
)
def test_files_that_are_no_importance_are_refused(
    source: Path, tmp_path: Path, data: bytes, what: str
) -> None:
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(ColibriError, match=what) as caught:
        quantize(source, tmp_path / "q", encoding("q4_k"), importance=tmp_path / "i.dat")
    assert "i.dat" in caught.value.message and "\n" not in caught.value.message


def test_a_model_file_is_no_importance(source: Path, tmp_path: Path) -> None:
    path = tm.write_gguf(tmp_path / "m.gguf", "qwen3_moe")[0]
    with pytest.raises(FormatError, match="no importance matrix"):
        quantize(source, tmp_path / "q", encoding("q4_k"), importance=path)


# -- routing profiles ------------------------------------------------------------------------------


def test_a_profile_weighs_the_experts(source: Path, tmp_path: Path) -> None:
    counts = np.tile(counts_of(n=2 * 100), (LAYERS, 1))
    inputs = {
        "gate": np.stack([squares(HIDDEN, 3) * 100, squares(HIDDEN, 4) * 100]),
        "down": np.stack([squares(WIDTH, 5) * 100, squares(WIDTH, 6) * 100]),
    }
    with colibri_tools.open(source) as container:
        path = save(profile_of(container, counts, inputs), tmp_path / "p.profile")
    out = tmp_path / "q.colibri"
    result = quantize(source, out, encoding("q4_k"), importance=path)
    for role, name in ((PartRole.GATE, "gate"), (PartRole.UP, "gate"), (PartRole.DOWN, "down")):
        sums = inputs[name][1, 4]
        assert part_of(out, 1, 4, role) == expected_block(source, 1, 4, role, sums)
    assert any("nothing about resident" in note for note in result.notes)
    with colibri_tools.open(out) as container:
        assert container.provenance["recipe.importance.kind"] == "routing profile"


def test_case_11_2_experts_without_tokens_get_the_types_of_their_peers(
    source: Path, tmp_path: Path
) -> None:
    """A router that picks experts 0 and 1 always."""
    counts = np.zeros((LAYERS, EXPERTS))
    counts[:, :2] = 50
    inputs = {
        "gate": np.zeros((LAYERS, EXPERTS, HIDDEN)),
        "down": np.zeros((LAYERS, EXPERTS, WIDTH)),
    }
    for array in inputs.values():
        array[:, :2] = squares(array.shape[2])[:2]
    with colibri_tools.open(source) as container:
        path = save(profile_of(container, counts, inputs), tmp_path / "p.profile")
    out = tmp_path / "q.colibri"
    result = quantize(source, out, encoding("q4_k_m"), importance=path)
    assert any("20 of 24 experts" in warning for warning in result.warnings)
    with colibri_tools.open(out) as container:
        types = types_of(container)
        for layer in range(LAYERS):
            for part in ("gate", "up", "down"):
                assert len({types[f"{layer}.{e}.{part}"] for e in range(EXPERTS)}) == 1
    assert verify(out).ok


def test_a_profile_of_another_model_or_without_inputs_is_refused(
    containers: Containers, source: Path, tmp_path: Path
) -> None:
    counts = np.tile(counts_of(n=200), (LAYERS, 1))
    other = containers.hf("qwen3_moe", tm.wide_spec("qwen3_moe", experts=EXPERTS, seed=3))
    with colibri_tools.open(other) as container:
        foreign = save(profile_of(container, counts), tmp_path / "foreign.profile")
    with colibri_tools.open(source) as container:
        bare = save(profile_of(container, counts), tmp_path / "bare.profile")
    for path, what in ((foreign, "another model"), (bare, "no importance")):
        with pytest.raises(UsageError, match=what):
            quantize(source, tmp_path / "q.colibri", encoding("q4_k"), importance=path)


def test_verify_needs_the_importance_that_was_used(tmp_path: Path) -> None:
    spec = tm.wide_spec("qwen3_moe", experts=EXPERTS, vocab=61)
    hf = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, dtype="bf16")
    path = write_imatrix(tmp_path / "i.gguf", imatrix_entries())
    other = write_imatrix(tmp_path / "j.gguf", imatrix_entries(5))
    out = tmp_path / "q.colibri"
    repack(hf, out, encoding=encoding("q4_k"), importance=path)
    assert verify(out, against=hf, importance=path).ok
    with pytest.raises(UsageError, match="give that file with --importance"):
        verify(out, against=hf)
    with pytest.raises(UsageError, match="expected the importance with SHA-256"):
        verify(out, against=hf, importance=other)
    with pytest.raises(UsageError, match="for --against"):
        verify(out, importance=path)
