"""Settings that must not change a bit of the logits, and samples of their combinations.

A sample has every pair of values of any two settings at least once, and more at random: a fault
that needs two settings together is met, one that needs three is likely to be.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from engine_models import EXPERTS, make_model
from test_profiling import profile, prompts_of

from colibri_tools.container import Role
from colibri_tools.engine import IO_MODES, KV_TYPES, PRECISIONS
from colibri_tools.export import export
from colibri_tools.rewrite import reorder

SETTINGS: dict[str, tuple[Any, ...]] = {
    "precision": PRECISIONS,
    "kv_type": KV_TYPES,
    "order": ("id", "hotness"),
    "mirror": ("", "part", "whole"),
    "io": tuple(io for io in IO_MODES if io != "auto"),
    "io_threads": (1, 4),
    "threads": (1, 2, 3),
    "cache_blocks": (2, 3, 9, 3 * EXPERTS),
    "prefetch_depth": (0, 1, 2),
    "preload": (0, 1 << 40),
    "batch_size": (1, 5, 64, 1024),
    "sequences": (1, 2, 4),
    "split": ("whole", "pieces", "tokens"),
    "check": ("first", "always"),
}


@dataclass(frozen=True)
class Combination:
    """One value of each of `SETTINGS`. The first two may change logits, the others may not."""

    precision: str
    kv_type: str
    order: str
    mirror: str
    io: str
    io_threads: int
    threads: int
    cache_blocks: int
    prefetch_depth: int
    preload: int
    batch_size: int
    sequences: int
    split: str
    check: str

    def pairs(self) -> set[tuple[Any, ...]]:
        """Every two settings with their values."""
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return set(combinations(values, 2))


def random_combination(random: Random) -> Combination:
    """Any that is allowed: a mapped file has no mirror."""
    values = {name: random.choice(choices) for name, choices in SETTINGS.items()}
    if values["io"] == "mmap":
        values["mirror"] = ""
    return Combination(**values)


def all_pairs() -> set[tuple[Any, ...]]:
    """Every two settings with every two values that are allowed."""
    return {
        ((a, x), (b, y))
        for a, b in combinations(SETTINGS, 2)
        for x in SETTINGS[a]
        for y in SETTINGS[b]
        if not (a == "mirror" and x and b == "io" and y == "mmap")
    }


def sample(seed: int, n_more: int = 0) -> list[Combination]:
    """Combinations that have all pairs between them, and `n_more` of any kind."""
    random = Random(seed)
    left = all_pairs()
    chosen = []
    while left:
        tried = [random_combination(random) for _ in range(60)]
        best = max(tried, key=lambda c: len(c.pairs() & left))
        if best.pairs() & left:
            chosen.append(best)
            left -= best.pairs()
    return chosen + [random_combination(random) for _ in range(n_more)]


def make_files(folder: Path) -> dict[str, Path]:
    """One model in two orders, and a part and the whole of its blocks as mirrors.

    Quantized and float matrices side by side, windows, shared experts, a dense layer; blocks of
    several sizes, small enough to be read together.
    """
    model = make_model(
        folder / "id.colibri",
        n_layers=4,
        moe_layers=[1, 0, 1, 1],
        dense_width=64,
        windows=[0, 30, 7, 0],
        n_heads=4,
        head_dim=32,
        rope_dim=32,
        qk_norm="head",
        qkv_bias=True,
        shared_width=32,
        shared_gated=True,
        expert_dtypes=("q8_0", "bf16", "q4_0"),
        dtypes={
            Role.ATTN_Q: "q8_0",
            Role.ATTN_K: "f16",
            Role.ATTN_V: "q5_1",
            Role.ATTN_O: "q4_1",
            Role.SHARED_GATE: "q8_0",
            Role.SHARED_UP: "bf16",
            Role.SHARED_DOWN: "q4_0",
            Role.DENSE_GATE: "q5_0",
            Role.OUTPUT: "q8_0",
        },
    )
    profile(model, folder, prompts_of([60, 80]))
    reorder(model, folder / "hotness.colibri", routing=folder / "p.profile")
    for name, share in (("part", 0.4), ("whole", 1.0)):
        export(model, folder / name, share=share, routing=folder / "p.profile")
    names = {"id": "id.colibri", "hotness": "hotness.colibri", "part": "part", "whole": "whole"}
    return {name: folder / file for name, file in names.items()}


def cuts(lengths: list[int], split: str, seed: int) -> list[list[int]]:
    """How many tokens of each sequence come in each evaluation."""
    random = np.random.default_rng(seed)
    left, rounds = list(lengths), []
    while any(left):
        take = {
            "whole": list(left),
            "tokens": [min(n, 1) for n in left],
            "pieces": [int(random.integers(1, n + 1)) if n else 0 for n in left],
        }[split]
        rounds.append(take)
        left = [n - t for n, t in zip(left, take, strict=True)]
    return rounds
