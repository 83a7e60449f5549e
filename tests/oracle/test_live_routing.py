"""Profiles against routers of transformers, watched as they run now: random models and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from tiny_containers import Containers

from colibri_tools.profile.profiling import profile_routing
from oracle.cases import CASES, GAP_TOLERANCE

torch = pytest.importorskip("torch")
make_oracle = pytest.importorskip("oracle.make_oracle")

from oracle.test_live_transformers import random_case  # noqa: E402

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("family", tm.FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_counts_are_those_of_watched_routers(
    containers: Containers, tmp_path: Path, family: str, seed: int
) -> None:
    """Windows of 32 ids of texts of 70, 32 and 9, in batches of up to 64."""
    case = random_case(family, 50 + seed)
    model = make_oracle.build(case, tmp_path / "model")
    texts = [tm.prompt(n, case.spec.vocab, seed=seed + n) for n in (70, 32, 9)]
    ids = tmp_path / "ids"
    ids.write_text("\n".join(" ".join(map(str, text)) for text in texts))
    result = profile_routing(
        containers.from_source(tmp_path / "model"),
        tmp_path / "p",
        token_files=[("text", ids)],
        trace=True,
        ctx=32,
        batch_size=64,
    )
    windows = [text[i : i + 32] for text in texts for i in range(0, len(text), 32)]
    seen = [make_oracle.run(model, window, [0]) for window in windows]
    chosen = np.concatenate([s.choices for s in seen], axis=1)
    clear = np.concatenate([s.gaps for s in seen], axis=1) > GAP_TOLERANCE
    p = result.report.profile
    assert p.trace is not None
    found = np.sort(p.trace.experts.transpose(1, 0, 2), axis=-1)
    assert np.array_equal(found[clear], np.sort(chosen, axis=-1)[clear])
    counts = np.stack([np.bincount(row.reshape(-1), minlength=p.max_experts) for row in chosen])
    undecided = int((~clear).sum()) * p.top_k
    assert np.abs(p.counts().astype(np.int64) - counts).sum() <= 2 * undecided


def test_importance_is_what_scaled_experts_multiply(containers: Containers, tmp_path: Path) -> None:
    """Of Llama 4, whose experts module takes [experts, tokens, hidden], 0 where not chosen."""
    case = CASES["llama4-f32"]
    model = make_oracle.build(case, tmp_path / "model")
    text = tm.prompt(40, case.spec.vocab, seed=1)
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, text)))
    path = containers.from_source(tmp_path / "model")
    result = profile_routing(path, tmp_path / "p", token_files=[("text", ids)], importance=True)
    p, seen = result.report.profile, []

    def watch(module: Any, args: Any) -> None:
        inputs = args[0].detach().double().reshape(module.num_experts, -1, args[0].shape[-1])
        seen.append((inputs**2).sum(dim=1).numpy())

    for module in model.modules():
        if type(module).__name__ == "Llama4TextExperts":
            module.register_forward_pre_hook(watch)
    with torch.no_grad():
        model(torch.tensor([text]), use_cache=False)
    assert len(seen) == p.n_rows
    found = p.inputs["gate"]
    # float32 activations of two implementations, layer after layer
    assert np.abs(found - np.stack(seen)).max() <= 1e-4 * found.max()
