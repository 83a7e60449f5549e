"""Every stored tensor matters: changing any of them changes the logits.

A bias, gate, norm or expert that the engine ignored would pass every comparison in which it
happened to be small. Here each source tensor is disturbed in turn, the checkpoint is repacked, and
the last position's logits must move. All experts are chosen (top-k = all), and the prompt holds
the disturbed row of the embedding.

A bias on the choice has an influence only if not all experts are chosen, so it is disturbed in a
model that chooses fewer. The one exemption has a proof: without rope, a key bias b adds q.b to the
scores of a query at all positions alike, and the softmax does not see it.
"""

from __future__ import annotations

import numpy as np
import pytest
import row_models as rm
import tiny_models as tm
from tiny_containers import Containers, logits
from tiny_models import TinySpec

PROMPT = [5, 3, 17, 9, 11, 2]

ROUNDING = 1e-5
LEAST_CHANGE = 1e-4
"""Share of the logits' range. A disturbed tensor moves them by 1e-2 and more, rounding by 1e-6."""


def small(family: str) -> TinySpec:
    """Few tensors of each kind; one dense layer where the family can have one."""
    if family in rm.RECIPES:
        return rm.small_spec(family)
    spec = tm.default_spec(family, layers=2, experts=3, top_k=3, vocab=19)
    if family == "llama4":  # layers of both kinds, with and without rope
        return spec.replace(layers=4, attention_bias=True)
    if family == "phimoe":  # its router chooses two
        spec = spec.replace(experts=2, top_k=2)
    if family in tm.more.FAMILIES:
        return spec.replace(attention_bias=True)
    if family == "qwen3_moe":
        return spec.replace(layers=3, dense_layers=(1,), attention_bias=True)
    if family == "qwen2_moe":
        return spec.replace(layers=3, dense_layers=(1,))
    return spec.replace(attention_bias=True) if family == "olmoe" else spec


MORE = {"phimoe": {"router_jitter_noise": 1.0}}
"""Config keys. SparseMixer's weights are 1 where no other expert comes near, and then its router
decides by its order only."""

EXEMPT = {("llama4", "model.layers.3.self_attn.k_proj.bias")}


def disturb(name: str, values: np.ndarray) -> np.ndarray:
    """The tensor with noise of half its own size: in one row of the embedding, else everywhere."""
    noise = tm.unit_noise("disturb " + name, values.shape).astype(np.float32)
    noise *= np.float32(0.5) * np.abs(values).mean()
    if is_choice(name):
        return -3 * values  # the order of experts must change
    if name.endswith("embed_tokens.weight"):
        only = np.zeros_like(noise)
        only[PROMPT[1]] = noise[PROMPT[1]]
        noise = only
    return values + noise


def is_choice(name: str) -> bool:
    """True for a bias that only shifts which experts are chosen."""
    return name.endswith(("e_score_correction_bias", "expert_bias"))


FAMILIES = (*tm.ALL_FAMILIES, *rm.RECIPES)
CASES = [(family, name) for family in FAMILIES for name in tm.tensors(family, small(family))]


@pytest.fixture(scope="module")
def undisturbed(containers: Containers) -> dict[str, np.ndarray]:
    found = {}
    for family in FAMILIES:
        path = containers.hf(family, small(family), overrides=MORE.get(family))
        found[family] = logits(path, PROMPT)[-1]
    return found


@pytest.mark.parametrize(("family", "name"), CASES)
def test_changing_a_tensor_changes_the_logits(
    containers: Containers, undisturbed: dict[str, np.ndarray], family: str, name: str
) -> None:
    def mutate(weights: tm.Tensors) -> None:
        weights[name] = disturb(name, weights[name])

    spec, base, overrides = small(family), undisturbed[family], MORE.get(family)
    if is_choice(name):
        spec = spec.replace(top_k=1)
        base = logits(containers.hf(family, spec), PROMPT)[-1]
    path = containers.hf(family, spec, mutate=mutate, overrides=overrides)
    change = np.abs(logits(path, PROMPT)[-1] - base).max() / (base.max() - base.min())
    assert change < ROUNDING if (family, name) in EXEMPT else change > LEAST_CHANGE


@pytest.mark.parametrize("part", ["attn_k_b", "attn_v_b"])
def test_changing_a_half_of_split_latents_changes_the_logits(
    containers: Containers, part: str
) -> None:
    """The tensors that only GGUF has."""
    spec, name = small("deepseek_v3"), f"blk.1.{part}.weight"

    def mutate(stored: dict[str, tm.GgufTensor]) -> None:
        stored[name] = tm.GgufTensor(disturb(name, stored[name].data), stored[name].type)

    base = logits(containers.gguf("deepseek_v3", spec), PROMPT)[-1]
    found = logits(containers.gguf("deepseek_v3", spec, mutate=mutate), PROMPT)[-1]
    assert np.abs(found - base).max() > LEAST_CHANGE * (base.max() - base.min())


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_disturbed_changes_nothing(
    containers: Containers, undisturbed: dict[str, np.ndarray], family: str
) -> None:
    overrides = MORE.get(family)
    path = containers.hf(family, small(family), mutate=lambda _: None, overrides=overrides)
    again = logits(path, PROMPT)[-1]
    assert np.array_equal(again, undisturbed[family])
