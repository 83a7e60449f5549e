"""Types of the KV at long context: distance from f32, memory, the same bits under every setting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_models import VOCAB, make_model

from colibri_tools.engine import KV_TYPES, Engine, estimate

N = 4600
TOKENS = [int(t) for t in np.random.default_rng(9).integers(0, VOCAB, N)]
ROW_BYTES = {"f32": 128, "f16": 64, "q8_0": 34, "q4_0": 18}  # of a head of 32

# Largest difference from f32 by position, as a share of the range of logits: its mean over
# positions. Keys and values are rounded by 2^-12, 1/254 and 1/16 of a block's largest magnitude;
# behind two layers of random weights, about 2e-4, 5e-3 and 0.09 are seen.
TOLERANCE = {"f16": 6e-4, "q8_0": 1.5e-2, "q4_0": 0.2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of heads of 32, one with a sliding window; attention spread over many positions.

    All experts are chosen, as a choice that flips would hide what the KV does.
    """
    return make_model(
        tmp_path_factory.mktemp("kv") / "model.colibri",
        n_layers=2,
        n_heads=4,
        head_dim=32,
        rope_dim=32,
        windows=[0, 700],
        attention_scale=0.03,
        top_k=12,
        context_length=8192,
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    with Engine(model, ctx=N) as engine:
        return engine.forward(TOKENS)


@pytest.mark.parametrize("kind", TOLERANCE)
def test_long_context_is_near_f32(model: Path, expected: np.ndarray, kind: str) -> None:
    with Engine(model, ctx=N, kv_type=kind) as engine:
        assert engine.info.kv_type == kind
        found = engine.forward(TOKENS)
    spread = expected.max(axis=-1) - expected.min(axis=-1)
    error = np.abs(found - expected).max(axis=-1) / spread
    assert 0 < error.mean() < TOLERANCE[kind]
    assert error[-500:].mean() < TOLERANCE[kind]


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("kind", KV_TYPES)
def test_every_setting_gives_the_same_bits(model: Path, kind: str, precision: str) -> None:
    tokens = TOKENS[:1100]
    options = {"ctx": 1200, "kv_type": kind, "precision": precision}
    with Engine(model, threads=1, batch_size=1100, **options) as engine:
        expected = engine.eval(tokens, 5)
    with Engine(model, threads=3, batch_size=37, **options) as engine:
        assert np.array_equal(engine.eval(tokens, 5), expected)
        engine.rewind(len(tokens) - 5)
        found = [engine.eval([token]) for token in tokens[-5:]]
    assert np.array_equal(np.concatenate(found), expected)


def test_memory_shrinks_with_the_type(model: Path) -> None:
    for kind, row_bytes in ROW_BYTES.items():
        wanted = 2 * 2 * 2 * 4096 * row_bytes  # keys and values, layers, key heads, positions
        assert estimate(model, ctx=4096, kv_type=kind).kv_bytes == wanted
        assert estimate(model, ctx=2048, kv_type=kind, sequences=2).kv_bytes == wanted
    with Engine(model, ctx=4096, kv_type="q4_0") as engine:
        assert engine.memory.kv_bytes == 2 * 2 * 2 * 4096 * 18
