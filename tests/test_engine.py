"""The engine against an independent float64 model, and against itself under every setting."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import HIDDEN, VOCAB, make_model
from reference_model import ReferenceModel

import colibri_tools
from colibri_tools.container import Role
from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine, Sampler, Sampling, estimate
from colibri_tools.errors import UsageError

TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 48)]

# f32 against f64. The weights are larger than a trained model's, so differences grow from layer to
# layer: about 1e-5 of the range of logits is seen. Any wrong switch gives more than 1e-2.
TOLERANCE = 1e-4

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases-head-norm": {"qk_norm": "head", "qkv_bias": True, "o_bias": True},
    "full-norm-clip-adjacent": {"qk_norm": "full", "clip_qkv": 0.7, "rope_pairing": "adjacent"},
    "windows-partial-rope": {"rope_dim": 8, "windows": [0, 5, 17], "rope_factor": 1.25},
    "partial-adjacent": {"rope_dim": 8, "rope_pairing": "adjacent"},
    "no-rope": {"rope_dim": 0},
    "raw-weights": {"router_norm": False, "router_scale": 2.5},
    "shared-gated-tied": {"shared_width": 48, "shared_gated": True, "tied": True},
    "shared-dense": {"shared_width": 24, "moe_layers": [0, 1, 1], "dense_width": 56},
    "softcaps": {"attention_softcap": 1.5, "logit_softcap": 3.0, "windows": [0, 5, 17]},
    "three-ropes": {
        "rope_of_layer": [2, 0, 1],
        "rope_inv_freq_more": [0.9 ** (i + 1) for i in range(8)] + [0.3**i for i in range(8)],
        "rope_factor_more": [1.1, 0.8],
    },
    "one-expert": {"top_k": 1},
    "all-experts": {"top_k": 12, "attention_scale": 0.1},
    "one-head": {"n_heads": 1, "n_kv_heads": 1},
    "many-heads": {"n_kv_heads": 8},
    "odd-head": {"head_dim": 10, "rope_dim": 6},
    "square": {"hidden_size": 40, "n_heads": 4, "head_dim": 10, "rope_dim": 10},
    "mixed-types": {
        "expert_dtypes": ("q8_0", "bf16", "f16", "q4_0"),
        "dtypes": {
            Role.TOKEN_EMBD: "q8_0",
            Role.OUTPUT: "bf16",
            Role.ATTN_NORM: "bf16",
            Role.ATTN_Q: "f16",
            Role.ROUTER: "bf16",
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of layer and switch at once."""
    return make_model(
        tmp_path_factory.mktemp("engine") / "model.colibri",
        n_layers=4,
        moe_layers=[1, 0, 1, 1],
        dense_width=56,
        windows=[0, 300, 7, 0],
        qk_norm="head",
        shared_width=24,
        shared_gated=True,
        expert_dtypes=("bf16", "q8_0"),
    )


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    spread = expected.max(axis=-1) - expected.min(axis=-1)
    return float((np.abs(found - expected).max(axis=-1) / spread).max())


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_logits_and_choices_equal_the_reference(tmp_path: Path, switches: dict[str, Any]) -> None:
    path = make_model(tmp_path / "model.colibri", **switches)
    with open_container(path) as container, Engine(path) as engine:
        reference = ReferenceModel(container)
        expected = reference.forward(TOKENS)
        found = engine.forward(TOKENS, trace=True)
        assert relative_error(found, expected) < TOLERANCE
        assert np.array_equal(engine.choices, np.array(reference.choices))
        assert np.abs(engine.choice_weights - np.array(reference.weights)).max() < TOLERANCE


def test_long_contexts_equal_the_reference(tmp_path: Path) -> None:
    """Three chunks of attention; windows that start inside, before and after a chunk's edge."""
    path = make_model(tmp_path / "model.colibri", windows=[0, 300, 100], top_k=1)
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 530)]
    with open_container(path) as container, Engine(path) as engine:
        expected = ReferenceModel(container).forward(tokens)
        assert relative_error(engine.forward(tokens), expected) < TOLERANCE


def test_every_setting_gives_the_same_bits(model: Path) -> None:
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, 270)]
    sizes = estimate(model)
    block = sizes.min_cache_bytes // 2
    with Engine(model, threads=1, batch_size=len(tokens)) as engine:
        expected = engine.forward(tokens)
    caches = [2 * block, 3 * block, 7 * block, sizes.all_experts_bytes, None]
    settings = [(1, cache, 64) for cache in caches]
    settings += [(threads, 3 * block, batch) for threads in (2, 3) for batch in (1, 9, 256)]
    for threads, cache, batch in settings:
        with Engine(model, threads=threads, expert_cache=cache, batch_size=batch) as engine:
            first = engine.forward(tokens)
            again = engine.forward(tokens)  # with a warm cache
        assert np.array_equal(first, expected), (threads, cache, batch)
        assert np.array_equal(again, expected), (threads, cache, batch)


def test_any_split_of_a_prompt_gives_the_same_bits(model: Path) -> None:
    with Engine(model) as engine:
        expected = engine.forward(TOKENS)
        engine.rewind(0)
        rows = [engine.eval(TOKENS[start:end], end - start) for start, end in ((0, 1), (1, 31))]
        rows += [engine.eval([token]) for token in TOKENS[31:]]
        assert np.array_equal(np.concatenate(rows), expected)


def test_decoding_far_on_gives_the_bits_of_a_prompt(model: Path) -> None:
    """Token by token the chunks of attention are shared out; in a prompt, positions are."""
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, VOCAB, 1300)]
    with Engine(model) as engine:
        expected = engine.eval(tokens, 5)
        engine.rewind(len(tokens) - 5)
        found = [engine.eval([token]) for token in tokens[-5:]]
    assert np.array_equal(np.concatenate(found), expected)


def test_logits_of_the_last_positions_only(model: Path) -> None:
    with Engine(model, batch_size=10) as engine:
        expected = engine.forward(TOKENS)
        for n in (0, 1, 8, 9, 47):
            engine.rewind(0)
            assert np.array_equal(engine.eval(TOKENS, n), expected[len(TOKENS) - n :])


def test_rewind_forgets_what_came_after(model: Path) -> None:
    with Engine(model) as engine:
        expected = engine.forward(TOKENS)
        engine.rewind(20)
        engine.eval([5, 6, 7])
        engine.rewind(20)
        assert np.array_equal(engine.eval(TOKENS[20:], 28), expected[20:])
        with pytest.raises(UsageError, match="rewinding to 49: the sequence has 48 tokens"):
            engine.rewind(49)


def test_two_models_in_one_process(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other.colibri", seed=5, top_k=2)
    alone = []
    for path in (model, other):
        with Engine(path) as engine:
            alone.append(engine.forward(TOKENS))
    with Engine(model) as first, Engine(other) as second:
        found: dict[int, np.ndarray] = {}
        work = [
            threading.Thread(target=lambda i=i, e=e: found.update({i: e.forward(TOKENS)}))
            for i, e in enumerate((first, second))
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
    assert all(np.array_equal(found[i], alone[i]) for i in (0, 1))


def cancel_until(engine: Engine, done: threading.Event, delay: float) -> None:
    while not done.wait(delay):
        engine.cancel()


def test_cancel_leaves_the_sequence_as_it_was(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri")
    prompt = TOKENS * 8
    with Engine(path, threads=1, batch_size=16) as engine:
        expected = engine.forward(prompt)
        engine.rewind(2)
        for delay in (0.005, 0.02, 0.05):
            # again and again: between two evaluations a cancellation does nothing
            done = threading.Event()
            canceller = threading.Thread(target=cancel_until, args=(engine, done, delay))
            canceller.start()
            with pytest.raises(KeyboardInterrupt):
                while True:
                    engine.eval(prompt[2:])
                    engine.rewind(2)
            done.set()
            canceller.join()
            assert engine.position == 2
        assert np.array_equal(engine.eval(prompt[2:], 5), expected[-5:])


def test_choices_are_traced_in_order_of_layers(model: Path) -> None:
    with Engine(model, batch_size=7) as engine:
        engine.forward(TOKENS, trace=True)
        assert engine.choices.shape == engine.choice_weights.shape == (3, 48, 3)
        assert (np.diff(engine.choice_weights, axis=-1) <= 0).all()
        assert np.allclose(engine.choice_weights.sum(axis=-1), 1, atol=1e-6)
        assert all(len(set(slots)) == 3 for slots in engine.choices.reshape(-1, 3))
        engine.forward(TOKENS)
        assert engine.choices is None


def test_equal_router_scores_choose_the_lowest_ids(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri", zero=Role.ROUTER)
    with Engine(path) as engine:
        engine.forward(TOKENS, trace=True)
        assert (engine.choices == [0, 1, 2]).all()
        assert np.allclose(engine.choice_weights, 1 / 3)


def test_estimate_is_what_opening_takes(model: Path) -> None:
    options = {"ctx": 100, "threads": 2, "batch_size": 5}
    with Engine(model, expert_cache=200_000, **options) as engine:
        planned = estimate(model, expert_cache=200_000, **options)
        taken = engine.memory
    assert planned.kv_bytes == 2 * 4 * 100 * 2 * 16 * 4
    for name in ("resident_bytes", "kv_bytes", "cache_bytes", "scratch_bytes", "total_bytes"):
        assert getattr(planned, name) == getattr(taken, name)
    parts = ("metadata", "resident", "kv", "cache", "scratch", "other")
    assert taken.total_bytes == sum(getattr(taken, f"{part}_bytes") for part in parts)


def test_an_embedding_that_is_no_head_stays_in_the_file(tmp_path: Path) -> None:
    table = VOCAB * HIDDEN * 4
    untied = estimate(make_model(tmp_path / "untied.colibri"))
    tied = estimate(make_model(tmp_path / "tied.colibri", tied=True))
    assert abs(untied.resident_bytes - tied.resident_bytes) <= 4096
    assert untied.resident_bytes < 2 * table + tied.resident_bytes - table


def test_counters_count(model: Path) -> None:
    with Engine(model, threads=1, batch_size=16) as engine:
        engine.forward(TOKENS)
        cold = engine.stats()
        assert cold.tokens == 48
        assert cold.evals == 3
        assert cold.reads == cold.expert_requests - cold.expert_hits > 0
        assert cold.bytes_read >= cold.reads * 4096
        assert cold.io_backend == "pread"
        parts = ("attention", "router", "experts", "io_wait", "head")
        assert all(getattr(cold, f"{part}_seconds") > 0 for part in parts)
        engine.reset_stats()
        assert engine.stats().hit_rate is None
        engine.forward(TOKENS)
        assert engine.stats().hit_rate == 1.0
        assert engine.stats().bytes_read == 0


def test_sanity_check_keeps_the_sequence(model: Path) -> None:
    with Engine(model) as engine:
        expected = engine.forward(TOKENS)
        engine.rewind(30)
        engine.sanity_check()
        assert engine.position == 30
        assert np.array_equal(engine.eval(TOKENS[30:], 18), expected[30:])


@pytest.mark.parametrize("token", [VOCAB, -1, 1 << 32])
def test_ids_out_of_range_are_named(model: Path, token: int) -> None:
    with (
        Engine(model) as engine,
        pytest.raises(UsageError, match=f"token 2 of the input is {token}"),
    ):
        engine.eval([1, 2, token])


def test_a_full_context_is_refused(model: Path) -> None:
    with Engine(model, ctx=10) as engine:
        engine.eval(list(range(10)))
        with pytest.raises(UsageError, match="1 tokens do not fit: the context has 10 positions"):
            engine.eval([1])
        with pytest.raises(UsageError, match="evaluation of no tokens"):
            engine.eval([])


def test_a_closed_engine_says_so(model: Path) -> None:
    engine = Engine(model)
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.forward([1])


def test_generation_is_the_same_after_a_longer_prompt(model: Path) -> None:
    """Greedy decoding step by step equals evaluating the whole text at once."""
    with Engine(model) as engine:
        sampler = Sampler(engine.info, Sampling())
        logits = engine.eval(TOKENS)[-1]
        generated = []
        for _ in range(12):
            generated.append(sampler.draw(logits))
            logits = engine.eval([generated[-1]])[-1]
        whole = engine.forward(TOKENS + generated)
        assert np.array_equal(whole[-1], logits)
        assert [int(row.argmax()) for row in whole[47:-1]] == generated


@pytest.mark.parametrize("name", ["runtime", "tokenizer"])
def test_the_cdef_is_the_public_header(name: str) -> None:
    package = Path(colibri_tools.__file__).resolve().parent
    header = "colibri" if name == "runtime" else f"colibri_{name}"
    path = package.parent / f"runtime/include/{header}.h"
    if not path.is_file():
        pytest.skip("an installed package has no headers beside it")

    def declarations(text: str) -> str:
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        words = "\n".join(lines).replace("COLIBRI_API", "").replace("*", " * ").split()
        return " ".join(words)

    cdef = (package / f"_cdef_{name}.h").read_text()
    assert declarations(cdef) == declarations(path.read_text())
