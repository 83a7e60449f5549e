"""What the routers' weights are when a model runs: section 3 of the case table.

The weights themselves are looked at, through the engine's trace; test_logits.py compares their
effect, and test_cases_router.py the switches in the container's spec.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models as tm
from oracle.cases import CASES, load
from tiny_containers import Containers, logits

import colibri_tools
from colibri_tools.container.format import Role
from colibri_tools.engine import Engine

PROMPT = tm.prompt(9)
ONE = 1e-6  # a sum of a few float32 weights


def trace(path: Path, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights, [n_moe_layers, n, k]."""
    with Engine(path, threads=1) as engine:
        engine.forward(tokens, trace=True)
        return np.array(engine.choices), np.array(engine.choice_weights)


def sums(path: Path) -> np.ndarray:
    return trace(path, PROMPT)[1].sum(axis=-1)


# What the reference implementation of each source does when the key is absent: transformers'
# config classes, and the constants in llama.cpp's graphs.
_ABSENT = [
    ("hf", "mixtral", True),
    ("hf", "qwen2_moe", False),
    ("hf", "qwen3_moe", False),
    ("hf", "olmoe", False),
    ("gguf", "mixtral", True),
    ("gguf", "qwen2_moe", False),
    ("gguf", "qwen3_moe", True),
    ("gguf", "olmoe", False),
]


@pytest.mark.parametrize(("kind", "family", "normalised"), _ABSENT)
def test_case_3_1_absent_norm_key_means_the_family_default(
    containers: Containers, kind: str, family: str, normalised: bool
) -> None:
    key = f"{tm.GGUF_ARCH[family]}.expert_weights_norm"
    if kind == "hf":
        path = containers.hf(family, overrides={"norm_topk_prob": tm.DELETE})
    else:
        path = containers.gguf(family, metadata={key: tm.DELETE})
    total = sums(path)
    assert (np.abs(total - 1) < ONE).all() if normalised else (total < 1 - 1e-3).all()


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("value", [False, True])
def test_case_3_1_explicit_norm_key_wins(
    containers: Containers, kind: str, family: str, value: bool
) -> None:
    key = f"{tm.GGUF_ARCH[family]}.expert_weights_norm"
    if kind == "hf":
        path = containers.hf(family, overrides={"norm_topk_prob": value})
    else:
        path = containers.gguf(family, metadata={key: value})
    total = sums(path)
    assert (np.abs(total - 1) < ONE).all() if value else (total < 1 - 1e-3).all()


def test_case_3_2_top_1_of_mixtral_has_weight_one_for_each_token(containers: Containers) -> None:
    case = CASES["mixtral-top1"]
    _, weights = trace(containers.hf("mixtral", case.spec), PROMPT[:3])
    assert weights.shape == (3, 3, 1)
    assert (weights == 1.0).all()


def test_case_3_2_top_1_without_normalising_keeps_the_probability(containers: Containers) -> None:
    case = CASES["olmoe-top1"]
    oracle = load(case)[0]
    _, weights = trace(containers.hf("olmoe", case.spec), oracle.tokens)
    assert np.abs(weights - oracle.weights).max() < 1e-5
    assert (weights < 1).all()


def test_case_3_6_router_scale_multiplies_the_chosen_weights_once(containers: Containers) -> None:
    scale = {"qwen3moe.expert_weights_scale": 2.5}
    normed = sums(containers.gguf("qwen3_moe", metadata=scale))
    assert np.abs(normed - 2.5).max() < 2.5 * ONE
    plain = {"qwen3moe.expert_weights_norm": False}
    once = sums(containers.gguf("qwen3_moe", metadata=plain))
    scaled = sums(containers.gguf("qwen3_moe", metadata=plain | scale))
    assert np.abs(scaled[0] - 2.5 * once[0]).max() < 2.5 * ONE  # later layers see other inputs


def test_case_3_7_same_gate_sums_below_one_in_olmoe_and_to_one_in_mixtral(
    containers: Containers,
) -> None:
    """The first layer's router sees the same input when attention adds nothing: then Mixtral's
    weights are OLMoE's, divided by their sum."""
    spec = tm.default_spec("olmoe", norm_topk=False)

    def mutate(weights: tm.Tensors) -> None:
        shared = tm.tensors("olmoe", spec)
        for name in weights:
            other = name.replace("block_sparse_moe", "mlp")
            if name.endswith("o_proj.weight"):
                weights[name] = np.zeros_like(weights[name])
            elif other in shared and "experts" not in name:
                weights[name] = shared[other]

    _, plain = trace(containers.hf("olmoe", spec, mutate=mutate), PROMPT)
    _, normed = trace(containers.hf("mixtral", spec, mutate=mutate), PROMPT)
    plain, normed = plain[0], normed[0]
    assert (plain.sum(axis=-1) < 1 - 1e-3).all()
    assert np.abs(normed.sum(axis=-1) - 1).max() < ONE
    assert np.abs(normed - plain / plain.sum(axis=-1, keepdims=True)).max() < 1e-6


def test_case_3_9_shared_gate_of_one_dimension_or_two_is_the_same(containers: Containers) -> None:
    def two_dimensions(stored: dict[str, tm.GgufTensor]) -> None:
        for name, tensor in stored.items():
            if name.endswith("ffn_gate_inp_shexp.weight"):
                stored[name] = tm.GgufTensor(tensor.data.reshape(1, -1), tensor.type)

    flat = logits(containers.gguf("qwen2_moe"), PROMPT)
    row = logits(containers.gguf("qwen2_moe", mutate=two_dimensions), PROMPT)
    assert np.array_equal(flat, row)


def test_case_3_9_shared_output_is_multiplied_by_its_gate(containers: Containers) -> None:
    """A gate of zeros is sigmoid 0.5: the shared expert halved. So with down_proj doubled, the
    logits are those of an ungated shared expert; here both are compared through gate weights."""

    def halved(weights: tm.Tensors) -> None:
        for name in weights:
            if name.endswith("shared_expert_gate.weight"):
                weights[name] = np.zeros_like(weights[name])

    def dropped(weights: tm.Tensors) -> None:
        for name in weights:
            if name.endswith("shared_expert.down_proj.weight"):
                weights[name] = np.zeros_like(weights[name])

    plain = logits(containers.hf("qwen2_moe"), PROMPT)
    half = logits(containers.hf("qwen2_moe", mutate=halved), PROMPT)
    none = logits(containers.hf("qwen2_moe", mutate=dropped), PROMPT)
    span = plain.max() - plain.min()
    for a, b in ((plain, half), (plain, none), (half, none)):
        assert np.abs(a - b).max() > 1e-2 * span


def test_case_3_10_router_keeps_its_precision_beside_quantized_experts(
    containers: Containers,
) -> None:
    """Experts 0 and 1 score 1e-4 apart: too little for a quantized router, enough for F32."""
    spec = tm.wide_spec("qwen3_moe", experts=4, top_k=1, layers=1)

    def near_tie(stored: dict[str, tm.GgufTensor]) -> None:
        name = "blk.0.ffn_gate_inp.weight"
        router = stored[name].data.copy()
        router[1] = router[0] * np.float32(1 + 1e-4)
        router[2:] = -router[0]
        stored[name] = tm.GgufTensor(router, stored[name].type)

    path = containers.gguf("qwen3_moe", spec, types=tm.QUANT_TYPES[0], mutate=near_tie)
    chosen, _ = trace(path, tm.prompt(24))
    scores = {int(e) for e in chosen.ravel()}
    # the larger multiple wins where row 0 scores above zero, rows 2 and 3 (equal, lower id) below
    assert scores == {1, 2}
    with colibri_tools.open(path) as container:
        routers = [t for t in container.tensors.values() if t.role == Role.ROUTER]
    assert [t.dtype.name for t in routers] == ["f32"]
