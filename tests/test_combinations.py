"""Bit-identical logits for combinations of all settings at once, in each precision and KV type."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from combinations import SETTINGS, Combination, all_pairs, cuts, make_files, sample
from engine_models import VOCAB

from colibri_tools.engine import Engine, estimate

random = np.random.default_rng(21)
TEXTS = [[int(t) for t in random.integers(0, VOCAB, n)] for n in (41, 1, 75, 16)]
N_MORE = int(os.environ.get("COLIBRI_TEST_COMBINATIONS", "20"))
"""Beside those that have every pair of values."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_files(tmp_path_factory.mktemp("combinations"))


def evaluate(engine: Engine, c: Combination, seed: int) -> list[np.ndarray]:
    """Logits of every position of the first texts, evaluated together as `c` cuts them."""
    texts = TEXTS[: c.sequences]
    rows: list[list[np.ndarray]] = [[] for _ in texts]
    done = [0] * len(texts)
    for take in cuts([len(text) for text in texts], c.split, seed):
        tokens = {s: texts[s][done[s] : done[s] + n] for s, n in enumerate(take) if n}
        found = engine.eval_many(tokens, [len(ids) for ids in tokens.values()])
        for s, logits in zip(tokens, found, strict=True):
            rows[s].append(np.array(logits))
            done[s] += len(logits)
    return [np.concatenate(parts) for parts in rows]


def test_every_combination_gives_the_bits_of_each_text_alone(files: dict[str, Path]) -> None:
    model = files["id"]
    block = estimate(model).min_cache_bytes // 2

    @cache
    def expected(precision: str, kv_type: str) -> list[np.ndarray]:
        with Engine(model, threads=1, precision=precision, kv_type=kv_type) as engine:
            return [np.array(engine.forward(text)) for text in TEXTS]

    for seed, c in enumerate(sample(4, N_MORE)):
        with Engine(
            files[c.order],
            precision=c.precision,
            kv_type=c.kv_type,
            mirror=files[c.mirror] if c.mirror else None,
            io=c.io,
            io_threads=c.io_threads,
            threads=c.threads,
            expert_cache=c.cache_blocks * block,
            prefetch_depth=c.prefetch_depth,
            preload=c.preload,
            batch_size=c.batch_size,
            sequences=c.sequences,
            check=c.check,
            ctx=80,
        ) as engine:
            for warm in (False, True):
                found = evaluate(engine, c, seed)
                for s, (logits, alone) in enumerate(
                    zip(found, expected(c.precision, c.kv_type), strict=False)
                ):
                    assert np.array_equal(logits, alone), (c, s, warm)
                    engine.rewind(0, s)
            stats = engine.stats()
            assert stats.io_backend == {"buffered": "pread"}.get(c.io, c.io), stats.io_reason
            assert bool(stats.mirror_bytes) == bool(c.mirror), c


def test_the_sample_has_every_pair_of_values() -> None:
    chosen = sample(4)
    assert set().union(*(c.pairs() for c in chosen)) == all_pairs()
    for name, values in SETTINGS.items():
        assert {getattr(c, name) for c in chosen} == set(values)
