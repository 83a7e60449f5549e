"""Several sequences in one engine: each gets the bits it gets alone, experts are read once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_models import VOCAB, make_model

from colibri_tools.engine import Engine, estimate
from colibri_tools.errors import UsageError
from colibri_tools.native import ffi, lib

random = np.random.default_rng(11)
TEXTS = [[int(t) for t in random.integers(0, VOCAB, n)] for n in (37, 1, 290, 64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("sequences") / "model.colibri",
        windows=[0, 20, 0],
        shared_width=32,
        expert_dtypes=("q8_0", "bf16"),
    )


def alone(model: Path, precision: str) -> list[np.ndarray]:
    with Engine(model, precision=precision) as engine:
        return [engine.forward(text) for text in TEXTS]


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_prompts_together_give_the_bits_of_each_alone(model: Path, precision: str) -> None:
    expected = alone(model, precision)
    least = estimate(model).min_cache_bytes
    for threads, batch, cache in ((1, 1024, None), (2, 50, None), (3, 7, least)):
        options = {"threads": threads, "batch_size": batch, "expert_cache": cache}
        with Engine(model, precision=precision, sequences=4, **options) as engine:
            found = engine.forward_many(TEXTS)
            assert [engine.position_of(i) for i in range(4)] == [37, 1, 290, 64]
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other), options


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_decoding_together_gives_the_bits_of_each_alone(model: Path, precision: str) -> None:
    """Sequences of different lengths, one token each at a time; one of them is rewound."""
    expected = alone(model, precision)
    starts = [len(text) - 1 for text in TEXTS]
    starts[2] = 280
    with Engine(model, precision=precision, sequences=4, threads=2) as engine:
        engine.eval_many({i: TEXTS[i][:start] for i, start in enumerate(starts) if start}, 0)
        found = engine.eval_many({i: [TEXTS[i][starts[i]]] for i in (3, 0, 2, 1)})
        for i, row in zip((3, 0, 2, 1), found, strict=True):
            assert np.array_equal(row[0], expected[i][starts[i]])
        engine.rewind(270, 2)
        assert engine.position_of(2) == 270
        again = engine.eval_many({2: TEXTS[2][270:]}, 20)
        assert np.array_equal(again[0], expected[2][270:])


def test_a_batch_asks_for_each_expert_once(model: Path) -> None:
    texts = [TEXTS[2][:60], TEXTS[3][:60]]
    with Engine(model, sequences=2) as engine:
        engine.forward_many(texts)
        together = engine.stats()
        engine.reset_stats()
        for text in texts:
            engine.forward(text)
        apart = engine.stats()
    assert together.evals == 1
    assert apart.evals == 2
    assert together.expert_requests <= 3 * 12
    assert together.expert_requests < apart.expert_requests


def test_a_trace_is_of_the_first_sequence(model: Path) -> None:
    with Engine(model, sequences=2) as engine:
        engine.forward(TEXTS[0], trace=True)
        choices = np.array(engine.choices)
        found = np.zeros_like(choices)
        weights = np.zeros(choices.shape, np.float32)
        pointers = ffi.from_buffer("uint32_t[]", found), ffi.from_buffer("float[]", weights)
        lib.colibri_trace(engine._handle(), *pointers, len(TEXTS[0]))
        engine.forward_many([TEXTS[0], TEXTS[2]])
        assert np.array_equal(found, choices)
        lib.colibri_trace(engine._handle(), ffi.NULL, ffi.NULL, 0)


def test_logits_anywhere_in_memory_are_the_same(model: Path) -> None:
    """Logits of consecutive appends are one product when they adjoin, and several when not."""
    expected = alone(model, "exact")
    vocab = VOCAB
    with Engine(model, sequences=4) as engine:
        room = np.full((2 + 3 + 1 + 2, vocab), np.nan, np.float32)
        base = ffi.from_buffer("float[]", room)
        appends, keep = ffi.new("colibri_append[3]"), []
        for append, i, n, at in (
            (appends[0], 0, 3, 5),
            (appends[1], 1, 0, 0),
            (appends[2], 3, 2, 0),
        ):
            keep.append(ffi.new("uint32_t[]", TEXTS[i]))
            append.sequence, append.tokens, append.n_tokens = i, keep[-1], len(TEXTS[i])
            append.n_logits = n
            append.logits = base + at * vocab if n else ffi.NULL
        assert lib.colibri_eval_sequences(engine._handle(), appends, 3) == lib.COLIBRI_OK
    assert np.array_equal(room[:2], expected[3][-2:])
    assert np.isnan(room[2:5]).all()
    assert np.array_equal(room[5:], expected[0][-3:])


def test_what_cannot_be_evaluated_is_refused_and_changes_nothing(model: Path) -> None:
    with Engine(model, sequences=2, ctx=40) as engine:
        engine.eval_many({0: [1, 2], 1: [3]})
        for tokens, counts, message in (
            ({2: [1]}, 1, "sequence 2: this engine was opened for 2"),
            ({0: [1], 1: [1] * 40}, 1, "40 tokens do not fit: the context has 40 positions and 1"),
            ({0: [1], 1: []}, 0, "evaluation of no tokens"),
            ({0: [1], 1: [VOCAB]}, 1, f"token 0 of the input is {VOCAB}"),
            ({0: [1], 1: [2]}, [1], "n_logits: expected 2 numbers, found 1"),
            ({0: [1], 1: [2]}, [1, 2], "logits of 2 positions asked of 1 tokens"),
            ({}, 1, "evaluation of no sequences"),
        ):
            with pytest.raises(UsageError) as found:
                engine.eval_many(tokens, counts)
            assert message in str(found.value)
        assert [engine.position_of(i) for i in range(2)] == [2, 1]
        with pytest.raises(UsageError, match="sequence 2: this engine was opened for 2"):
            engine.rewind(0, 2)
        appends = ffi.new("colibri_append[2]")
        ids = ffi.new("uint32_t[1]")
        for append in appends:
            append.sequence, append.tokens, append.n_tokens = 1, ids, 1
        assert (
            lib.colibri_eval_sequences(engine._handle(), appends, 2) == lib.COLIBRI_ERROR_ARGUMENT
        )
        assert b"sequence 1 is named twice" in ffi.string(lib.colibri_error(engine._handle()))
        appends[0].sequence = 7
        assert (
            lib.colibri_eval_sequences(engine._handle(), appends, 1) == lib.COLIBRI_ERROR_ARGUMENT
        )
        assert b"sequence 7: this model was opened for 2" in ffi.string(
            lib.colibri_error(engine._handle())
        )
