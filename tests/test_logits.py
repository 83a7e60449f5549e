"""Logits and router choices of every case against the committed values of transformers.

Promised: at every position, max |difference| <= 2e-4 of (max - min) of the oracle's logits there.
Held here: a tenth of that. Both sides compute in float32; up to 4e-6 is seen, the order of sums.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models as tm
from oracle import cases
from oracle.cases import CASES, Case, Oracle
from tiny_containers import Containers, logits

from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine

ALL = [pytest.param(case, id=name) for name, case in CASES.items()]
IN_GGUF = [pytest.param(case, id=name) for name, case in CASES.items() if case.gguf]
PLAIN = [
    pytest.param(case, id=case.name)
    for case in CASES.values()
    if case.name.endswith(("-f32", "-bf16", "-f16"))
]
PLAIN_IN_GGUF = [param for param in PLAIN if param.values[0].gguf]

REARRANGED = ("mixtral", "granitemoe", "granitemoeshared", "deepseek", "deepseek_v2", "deepseek_v3")
"""Families whose GGUF form is summed in another order: rotated pairs as neighbours (arch llama,
granitemoe and deepseek), or the keys of latents transposed (deepseek2)."""

# Not llama3: GGUF stores its factors as float32, so the frequencies differ by rounding.
SAME_NUMBERS = [
    pytest.param(case, id=name)
    for name, case in CASES.items()
    if case.gguf
    and (case.family not in REARRANGED or name.endswith("-old-gguf"))
    and not name.endswith("-llama3")
]


def check(path: Path, oracles: list[Oracle], ctx: int | None = None) -> float:
    """Compare all prompts of a container; return the largest error."""
    worst = 0.0
    with Engine(path, threads=1, ctx=ctx) as engine:
        for oracle in oracles:
            found = np.array(engine.forward(oracle.tokens, trace=True))
            assert np.isfinite(found).all()
            worst = max(worst, cases.error(found[oracle.positions], oracle.logits))
            assert worst <= cases.LOGIT_TOLERANCE
            check_choices(engine.choices, engine.choice_weights, oracle)
    return worst


def check_choices(experts: np.ndarray, weights: np.ndarray, oracle: Oracle) -> None:
    """Same experts wherever the oracle's gap decides, and their weights to 1e-4."""
    clear = oracle.gaps > cases.GAP_TOLERANCE  # [layers, n]
    order, oracle_order = np.argsort(experts), np.argsort(oracle.choices)
    experts = np.take_along_axis(experts, order, axis=-1)
    expected = np.take_along_axis(oracle.choices, oracle_order, axis=-1)
    assert np.array_equal(experts[clear], expected[clear])
    found = np.take_along_axis(weights, order, axis=-1)
    expected = np.take_along_axis(oracle.weights, oracle_order, axis=-1)
    assert np.abs(found - expected)[clear].max() < 1e-4


def hf_options(case: Case) -> dict[str, object]:
    return {"dtype": case.dtype, "overrides": case.overrides or None}


def hf_container(containers: Containers, case: Case, form: str = "per-expert") -> Path:
    return containers.hf(case.family, case.spec, form=form, **hf_options(case))


def gguf_container(containers: Containers, case: Case, **options: object) -> Path:
    return containers.gguf(case.family, case.spec, dtype=case.dtype, **options)


@pytest.mark.parametrize("case", ALL)
def test_hf_logits_equal_transformers(containers: Containers, case: Case) -> None:
    check(hf_container(containers, case), cases.load(case), case.ctx)


@pytest.mark.parametrize("case", IN_GGUF)
def test_gguf_logits_equal_transformers(containers: Containers, case: Case) -> None:
    check(gguf_container(containers, case), cases.load(case), case.ctx)


def test_every_choice_of_every_case_is_decided() -> None:
    # otherwise check_choices would skip what it cannot compare, without saying so
    for case in CASES.values():
        for oracle in cases.load(case):
            assert (oracle.gaps > cases.GAP_TOLERANCE).all(), case.name


@pytest.mark.parametrize("case", ALL)
def test_fused_form_gives_identical_logits(containers: Containers, case: Case) -> None:
    tokens = case.tokens(0)
    plain = logits(hf_container(containers, case), tokens)
    fused = logits(hf_container(containers, case, "fused"), tokens)
    assert np.array_equal(plain, fused)


@pytest.mark.parametrize("case", [p for p in PLAIN if p.values[0].family in tm.more.FAMILIES])
def test_unfused_form_gives_identical_logits(containers: Containers, case: Case) -> None:
    """One tensor per expert matrix, as a container has them too: respec names them so."""
    tokens = case.tokens(0)
    plain = logits(hf_container(containers, case), tokens)
    assert np.array_equal(plain, logits(hf_container(containers, case, "unfused"), tokens))


@pytest.mark.parametrize("case", SAME_NUMBERS)
def test_gguf_and_hf_give_identical_logits(containers: Containers, case: Case) -> None:
    """Same numbers, same graph: the same bits, whatever the source."""
    tokens = case.tokens(0)
    hf = logits(hf_container(containers, case), tokens)
    gguf = logits(gguf_container(containers, case), tokens)
    assert np.array_equal(hf, gguf)


@pytest.mark.parametrize("case", [p for p in PLAIN if p.values[0].family in REARRANGED])
def test_another_order_of_sums_changes_rounding_only(containers: Containers, case: Case) -> None:
    """Equal up to float32 rounding, not bit for bit."""
    tokens = case.tokens(0)
    hf = logits(hf_container(containers, case), tokens)
    gguf = logits(gguf_container(containers, case), tokens)
    assert cases.error(gguf, hf) < 1e-5


@pytest.mark.parametrize("case", PLAIN_IN_GGUF)
def test_split_gguf_gives_identical_logits(containers: Containers, case: Case) -> None:
    tokens = case.tokens(0)
    whole = logits(gguf_container(containers, case), tokens)
    split = logits(gguf_container(containers, case, split=12), tokens)
    assert np.array_equal(whole, split)


@pytest.mark.parametrize("case", PLAIN)
def test_sharded_checkpoint_gives_identical_logits(containers: Containers, case: Case) -> None:
    tokens = case.tokens(0)
    whole = logits(hf_container(containers, case), tokens)
    sharded = containers.hf(case.family, case.spec, shards=4, **hf_options(case))
    assert np.array_equal(whole, logits(sharded, tokens))


@pytest.mark.parametrize("name", ["qwen3_moe-yarn", "mixtral-llama3", "olmoe-f32", "qwen2_moe-f32"])
def test_old_config_gives_identical_logits(containers: Containers, name: str) -> None:
    """rope_theta, rope_scaling and torch_dtype, as before transformers 5."""
    case = CASES[name]
    tokens = case.tokens(0)
    new = logits(hf_container(containers, case), tokens)
    old = containers.hf(case.family, case.spec, old_config=True, **hf_options(case))
    assert np.array_equal(new, logits(old, tokens))


_SWITCHES = [
    ("mixtral-top1", "mixtral-f32"),
    ("mixtral-topall", "mixtral-f32"),
    ("mixtral-tied", "mixtral-f32"),
    ("mixtral-window", "mixtral-f32"),
    ("qwen2_moe-norm", "qwen2_moe-f32"),
    ("qwen2_moe-shared-strong", "qwen2_moe-f32"),
    ("qwen2_moe-window", "qwen2_moe-f32"),
    ("qwen2_moe-dense", "qwen2_moe-f32"),
    ("qwen3_moe-no-norm", "qwen3_moe-f32"),
    ("qwen3_moe-bias", "qwen3_moe-f32"),
    ("qwen3_moe-window", "qwen3_moe-f32"),
    ("qwen3_moe-pruned", "qwen3_moe-f32"),
    ("qwen3_moe-eps", "qwen3_moe-f32"),
    ("olmoe-norm", "olmoe-f32"),
    ("olmoe-clip", "olmoe-f32"),
    ("olmoe-bias", "olmoe-f32"),
    ("granitemoe-bias", "granitemoe-f32"),
    ("granitemoe-llama3", "granitemoe-f32"),
    ("hunyuan_v1_moe-bias", "hunyuan_v1_moe-f32"),
    ("hunyuan_v1_moe-alpha", "hunyuan_v1_moe-f32"),
    ("gpt_oss-limit", "gpt_oss-f32"),
    ("phimoe-plain", "phimoe-f32"),
    ("phimoe-jitter", "phimoe-f32"),
    ("llama4-chunk", "llama4-f32"),
    ("llama4-plain", "llama4-f32"),
    ("qwen3_moe-linear", "qwen3_moe-long"),
    ("qwen3_moe-llama3", "qwen3_moe-long"),
    ("qwen3_moe-yarn", "qwen3_moe-long"),
    ("deepseek_v2-greedy", "deepseek_v2-f32"),
    ("deepseek_v2-yarn", "deepseek_v2-f32"),
    ("deepseek_v3-yarn", "deepseek_v3-f32"),
    ("deepseek_v3-no-norm", "deepseek_v3-f32"),
    ("deepseek_v3-bias", "deepseek_v3-f32"),
    ("deepseek_v3-kimi", "deepseek_v3-f32"),
    ("dots1-window", "dots1-f32"),
    ("glm4_moe-plain", "glm4_moe-f32"),
    ("ernie4_5_moe-min", "ernie4_5_moe-f32"),
    ("minimax_m2-all-rotary", "minimax_m2-f32"),
    ("flex_olmo-norm", "flex_olmo-f32"),
    ("afmoe-unscaled", "afmoe-f32"),
    ("mellum-yarn", "mellum-f32"),
    ("mellum-scaled", "mellum-yarn"),
    ("mellum-softcap", "mellum-f32"),
    ("mixtral-softcap", "mixtral-window"),
    ("qwen3_moe-softcap-scores", "qwen3_moe-f32"),
    ("olmoe-softcap-logits", "olmoe-f32"),
    ("granitemoe-softcap", "granitemoe-f32"),
    ("gpt_oss-softcap", "gpt_oss-f32"),
    ("deepseek_v3-softcap", "deepseek_v3-f32"),
]


@pytest.mark.parametrize(("name", "base"), _SWITCHES)
def test_each_switch_shows_in_the_logits(containers: Containers, name: str, base: str) -> None:
    """An executor that ignored the switch would fail its oracle by far: the oracle's values are
    far from the logits of the same weights without it."""
    oracle = cases.load(CASES[name])[0]
    without = logits(hf_container(containers, CASES[base]), oracle.tokens)
    assert cases.error(without[oracle.positions], oracle.logits) > 500 * cases.LOGIT_TOLERANCE


def test_the_ropes_of_layers_with_and_without_windows_show_in_the_logits(
    containers: Containers,
) -> None:
    case = CASES["mellum-f32"]
    oracle = cases.load(case)[0]
    one = {"rope_type": "default", "rope_theta": 1e4}
    same = containers.hf("mellum", case.spec.replace(local_rope=one))
    assert cases.error(logits(same, oracle.tokens), oracle.logits) > 500 * cases.LOGIT_TOLERANCE
    with open_container(same) as container:
        assert "graph.rope_of_layer" not in container.spec


def test_shipped_checkpoint_equals_transformers(containers: Containers) -> None:
    fingerprint, oracles = cases.read("tiny-moe")
    assert fingerprint == cases.tiny_moe_fingerprint(), "run tests/oracle/make_oracle.py tiny-moe"
    check(containers.from_source(cases.TINY_MOE), oracles)


def test_shipped_checkpoint_as_gguf_gives_identical_logits(containers: Containers) -> None:
    spec = tm.read_spec(cases.TINY_MOE)
    weights = tm.read_hf(cases.TINY_MOE)
    stored = tm.encode_gguf(
        tm.gguf_values("qwen3_moe", spec, weights), tm.GGMLQuantizationType.BF16
    )
    path = containers.folder() / "tiny-moe.gguf"
    tm.write_gguf_tensors(path, "qwen3moe", tm.gguf_metadata("qwen3_moe", spec), stored)
    _, oracles = cases.read("tiny-moe")
    tokens = oracles[0].tokens
    hf = logits(containers.from_source(cases.TINY_MOE), tokens)
    assert np.array_equal(logits(containers.from_source(path), tokens), hf)


def test_one_token_equals_the_start_of_a_long_prompt(containers: Containers) -> None:
    for family in tm.ALL_FAMILIES:
        path = hf_container(containers, CASES[f"{family}-f32"])
        tokens = tm.prompt(48)
        assert np.array_equal(logits(path, tokens[:1])[0], logits(path, tokens)[0])


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("family", ["deepseek_v3", "afmoe"])
def test_batches_threads_and_caches_leave_the_bits_alone(
    containers: Containers, family: str, form: str
) -> None:
    """Over several chunks of attention, and for latent attention in both written forms."""
    spec = tm.default_spec(family, layers=2, max_position=640, heads=20, kv_heads=20)
    path = getattr(containers, form)(family, spec)
    tokens = tm.prompt(530, spec.vocab)
    expected = logits(path, tokens, batch_size=256)
    for threads, batch in ((1, 530), (3, 100), (2, 1)):
        n = 300 if batch == 1 else 530
        with Engine(path, threads=threads, batch_size=batch, ctx=600) as engine:
            found = np.array(engine.forward(tokens[:n]))
        assert np.array_equal(found, expected[:n]), (threads, batch)


def test_value_heads_may_be_narrower_than_key_heads(containers: Containers) -> None:
    """The same model twice: with value heads of 20, and with 12 columns of zeros in each."""
    spec = tm.default_spec("qwen3_moe")
    width, narrow = spec.head_dim, 20

    def rows_of_heads(value: np.ndarray) -> np.ndarray:
        return value.reshape(-1, width, value.shape[-1])

    def pad(stored: dict[str, tm.GgufTensor]) -> None:
        for name, tensor in stored.items():
            if name.endswith("attn_v.weight"):
                rows_of_heads(tensor.data)[:, narrow:] = 0

    def cut(stored: dict[str, tm.GgufTensor]) -> None:
        for name, tensor in stored.items():
            data = tensor.data
            if name.endswith("attn_v.weight"):
                data = rows_of_heads(data)[:, :narrow].reshape(-1, spec.hidden)
            elif name.endswith("attn_output.weight"):
                data = data.reshape(spec.hidden, -1, width)[:, :, :narrow].reshape(spec.hidden, -1)
            stored[name] = tm.GgufTensor(np.ascontiguousarray(data), tensor.type)

    tokens = tm.prompt(20)
    key = {"qwen3moe.attention.value_length": narrow}
    padded = logits(containers.gguf("qwen3_moe", spec, mutate=pad), tokens)
    cut_out = logits(containers.gguf("qwen3_moe", spec, mutate=cut, metadata=key), tokens)
    assert cases.error(cut_out, padded) < 1e-5  # sums of another length


_LATENT_32 = {"nope_dim": 32, "rope_dim": 32, "value_dim": 32, "kv_lora": 64, "q_lora": 64}


@pytest.mark.parametrize("generation", ["split_kv_b", "-split_kv_b"])
def test_latent_attention_in_fast_precision_is_near_exact(
    containers: Containers, generation: str
) -> None:
    """With all experts chosen, as a choice that flips would hide the rest. Random weights spread
    errors widely: 0.06 is seen, and 0.03 without latents. Two sequences have the bits of one."""
    spec = tm.default_spec(
        "deepseek_v3",
        features=(generation,),
        hidden=64,
        width=64,
        shared_width=128,
        dense_width=64,
        top_k=8,
        more={**_LATENT_32, "router_groups": 1, "router_top_groups": 1},
    )
    path = containers.gguf("deepseek_v3", spec, types=tm.GGMLQuantizationType.Q8_0)
    tokens = tm.prompt(40, spec.vocab)
    exact = logits(path, tokens)
    for options, most in (
        ({"kv_type": "f16"}, 2e-3),
        ({"kv_type": "q8_0"}, 0.1),
        ({"precision": "fast"}, 0.1),
        ({"precision": "fast", "kv_type": "q8_0", "batch_size": 7}, 0.15),
    ):
        assert 0 < cases.error(logits(path, tokens, **options), exact) < most, options
    with Engine(path, threads=2, sequences=2) as engine:
        many = engine.forward_many([tokens, tokens[:9]])
    assert np.array_equal(many[0], exact) and np.array_equal(many[1], exact[:9])
