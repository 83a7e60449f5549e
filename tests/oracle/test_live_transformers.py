"""The engine against transformers as it runs now: random models, prompts and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from tiny_containers import Containers
from tiny_models import TinySpec

from colibri_tools.engine import Engine
from oracle import cases
from oracle.cases import Case, Oracle

torch = pytest.importorskip("torch")
make_oracle = pytest.importorskip("oracle.make_oracle")

pytestmark = pytest.mark.oracle

N_GENERATED = 32


def random_case(family: str, seed: int) -> Case:
    """A model with random dimensions and switches."""
    draw = np.random.RandomState(1000 + seed)

    def pick(*choices: Any) -> Any:
        return choices[draw.randint(len(choices))]

    kv_heads, group, head_dim = pick(1, 2, 3), pick(1, 2, 4), pick(4, 6, 8, 16)
    heads = kv_heads * group
    derived = family == "olmoe" or (family != "qwen3_moe" and draw.rand() < 0.5)
    hidden = heads * head_dim if derived else pick(24, 40, 56)
    experts, layers = int(draw.randint(2, 18)), int(draw.randint(1, 4))
    dense: tuple[int, ...] = ()
    if family in ("qwen2_moe", "qwen3_moe") and layers > 1:
        dense = pick((), (0,), (layers - 1,))
    original = pick(16, 64)
    rope = pick(
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
    )
    # transformers 5.24 fails on scaled rope where Mixtral's head_dim is null
    derived = derived and not (family == "mixtral" and rope)
    spec = TinySpec(
        layers=layers,
        experts=experts,
        hidden=hidden,
        width=int(draw.randint(3, 50)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(draw.randint(20, 200)),
        top_k=int(draw.randint(1, experts + 1)),
        shared_width=int(draw.randint(3, 50)),
        dense_width=int(draw.randint(3, 50)),
        explicit_head_dim=not derived,
        tied=bool(pick(False, True)),
        norm_topk=pick(None, False, True) if family != "mixtral" else None,
        attention_bias=bool(family in ("qwen3_moe", "olmoe") and pick(False, True)),
        dense_layers=dense,
        clip_qkv=pick(None, 0.7) if family == "olmoe" else None,
        window=pick(None, 7) if family != "olmoe" else None,
        norm_eps=pick(None, 1e-6, 1e-3, 0.1),
        rope_theta=pick(1e4, 1e6, 500.0),
        rope=rope,
        max_position=4 * original,
        seed=seed,
    )
    lengths = (int(draw.randint(2, 60)), 1)
    return Case(f"random-{family}-{seed}", family, spec, pick("f32", "bf16", "f16"), {}, lengths)


def decided(oracle: Oracle) -> int:
    """How many positions come before the first router choice that hangs on the last bits."""
    close = (oracle.gaps <= cases.GAP_TOLERANCE).any(axis=0)
    return int(np.argmax(close)) if close.any() else len(close)


def check(path: Path, model: Any, case: Case) -> None:
    with Engine(path, threads=2) as engine:
        for i in range(len(case.prompts)):
            oracle = make_oracle.run(model, case.tokens(i), case.stored_positions(i))
            n = decided(oracle)
            assert n > 0
            found = np.array(engine.forward(oracle.tokens))
            assert cases.error(found[:n], oracle.logits[:n]) <= cases.LOGIT_TOLERANCE


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", tm.FAMILIES)
def test_random_models_equal_transformers(containers: Containers, family: str, seed: int) -> None:
    case = random_case(family, seed)
    folder = containers.folder()
    model = make_oracle.build(case, folder / "hf")
    check(containers.from_source(folder / "hf"), model, case)
    if family == "qwen2_moe" and case.spec.window:
        return  # GGUF cannot say that every second layer has a window
    files = tm.write_gguf(folder / "model.gguf", family, case.spec, dtype=case.dtype)
    check(containers.from_source(files[0]), model, case)


def generate(model: Any, tokens: list[int]) -> list[tuple[int, float]]:
    """Greedy ids of transformers with the top-2 gap of each as a share of the logits' range."""
    out, text = [], list(tokens)
    with torch.no_grad():
        for _ in range(N_GENERATED):
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
            top = torch.topk(logits, 2)
            gap = float((top.values[0] - top.values[1]) / (logits.max() - logits.min()))
            text.append(int(top.indices[0]))
            out.append((text[-1], gap))
    return out


GENERATED = [f"{f}-{d}" for f in tm.ALL_FAMILIES for d in ("f32", "bf16")]
GENERATED += [f"{family}-f32" for family in cases.ROW_FAMILIES]


@pytest.mark.parametrize("name", GENERATED)
def test_greedy_generation_equals_transformers(containers: Containers, name: str) -> None:
    case = cases.CASES[name]
    folder = containers.folder() / "source"
    start = case.tokens(1) if case.prompts[1] > 1 else case.tokens(0)[:5]
    expected = generate(make_oracle.build(case, folder), start)
    with Engine(containers.from_source(folder), threads=1) as engine:
        logits = engine.forward(start)[-1]
        for step, (token, gap) in enumerate(expected):
            if gap <= 2 * cases.LOGIT_TOLERANCE:
                break  # a tie: from here the texts may part
            assert int(np.argmax(logits)) == token, f"step {step}"
            logits = engine.eval([token])[-1]
        else:
            return
    assert step > 3, "the comparison ended at once; choose another prompt"
