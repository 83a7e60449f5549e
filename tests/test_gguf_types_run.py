"""Every tensor type that gguf 0.19 can dequantize runs, and gives the logits of its own values.

For each type a GGUF is written whose matrices (experts, attention, embedding, head) have it,
quantized by gguf or made of random valid blocks, and a second one in F32 that holds what
gguf.quants.dequantize makes of the first. The engine decodes exactly gguf's values and sums in one
order, so the logits are the same bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models as tm
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits
from tiny_containers import Containers, logits
from tiny_models import GgufTensor, TinySpec

TYPES = [*tm.QUANT_TYPES, GGMLQuantizationType.F16]
VOCAB = 61
PROMPT = tm.prompt(6, VOCAB)
F32 = GGMLQuantizationType.F32


def write_pair(
    folder: Path, family: str, spec: TinySpec, types: tm.TypeChoice
) -> tuple[dict[str, GgufTensor], Path, Path]:
    """The stored tensors, their GGUF, and the GGUF of their decoded values."""
    values = tm.gguf_values(family, spec, tm.tensors(family, spec))
    stored = tm.encode_gguf(values, types)
    decoded = {n: GgufTensor(t.values(), F32) for n, t in stored.items()}
    keys, arch = tm.gguf_metadata(family, spec), tm.GGUF_ARCH[family]
    tm.write_gguf_tensors(folder / "stored.gguf", arch, keys, stored)
    tm.write_gguf_tensors(folder / "decoded.gguf", arch, keys, decoded)
    return stored, folder / "stored.gguf", folder / "decoded.gguf"


def check_pair(containers: Containers, stored: Path, decoded: Path) -> None:
    a = logits(containers.from_source(stored), PROMPT)
    b = logits(containers.from_source(decoded), PROMPT)
    assert np.isfinite(a).all()
    assert a.std() > 1e-3
    assert np.array_equal(a, b)


def test_all_types_of_gguf_are_covered() -> None:
    assert set(tm.QUANT_TYPES) == set(_type_traits)
    assert len(tm.QUANT_TYPES) == 24


@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.name)
def test_type_runs_as_its_dequantized_values(
    containers: Containers, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    spec = tm.wide_spec("qwen2_moe", layers=1, experts=2, vocab=VOCAB)
    stored, one, two = write_pair(tmp_path, "qwen2_moe", spec, kind)
    matrices = [t for n, t in stored.items() if not tm.keeps_float(n, t.values().shape)]
    assert matrices
    assert {t.type for t in matrices} == {kind}
    check_pair(containers, one, two)


@pytest.mark.parametrize("family", tm.FAMILIES)
def test_mixed_types_run(containers: Containers, tmp_path: Path, family: str) -> None:
    """As in real files: down_proj in more bits, attention and head in others, layers unequal."""
    spec = tm.wide_spec(family, experts=2, vocab=VOCAB)

    def choose(name: str) -> GGMLQuantizationType:
        if "ffn_down" in name:
            return GGMLQuantizationType.Q6_K if "blk.0" in name else GGMLQuantizationType.Q4_K
        if "exps" in name:
            return GGMLQuantizationType.Q4_K
        if name.startswith("token_embd"):
            return GGMLQuantizationType.Q8_0
        if name.startswith("output"):
            return GGMLQuantizationType.Q6_K
        return GGMLQuantizationType.Q4_0 if "attn_k" in name else GGMLQuantizationType.F16

    stored, one, two = write_pair(tmp_path, family, spec, choose)
    assert len({t.type for t in stored.values()}) == 6
    check_pair(containers, one, two)


@pytest.mark.parametrize("family", tm.FAMILIES)
def test_rows_that_do_not_fit_the_block_run(
    containers: Containers, tmp_path: Path, family: str
) -> None:
    """Width 40: down_proj's rows are no multiple of 32 and stay F16, gate and up become Q8_0."""
    spec = tm.default_spec(family)
    stored, one, two = write_pair(tmp_path, family, spec, GGMLQuantizationType.Q8_0)
    types = {n: t.type for n, t in stored.items() if "exps" in n}
    assert types["blk.0.ffn_gate_exps.weight"] == GGMLQuantizationType.Q8_0
    assert types["blk.0.ffn_down_exps.weight"] == GGMLQuantizationType.F16
    check_pair(containers, one, two)


def test_random_blocks_have_ordinary_weights() -> None:
    """Neither zero nor huge, so that the comparisons above mean something."""
    for kind in tm.RANDOM_TYPES:
        block, _ = GGML_QUANT_SIZES[kind]
        blocks = tm.random_blocks("probe", (8, 4 * block), kind, 0.1)
        values = GgufTensor(blocks, kind).values()
        assert np.isfinite(values).all()
        assert 0.05 < values.std() < 0.2
        assert np.unique(values).size > 8
