"""Drawing tokens: what may be drawn, how often, and that a seed decides everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from colibri_tools.engine import EngineInfo, Sampler, Sampling
from colibri_tools.errors import JobError, UsageError

# probabilities 0.5, 0.25, 0.15, 0.1 of ids 3, 0, 4, 1; ids 2 and 5 are next to impossible
PROBABILITIES = np.array([0.25, 0.1, 1e-9, 0.5, 0.15, 1e-9])
LOGITS = np.log(PROBABILITIES).astype(np.float32)


def info(vocab_size: int = 6, n_tokens: int | None = None) -> EngineInfo:
    values = dict.fromkeys(EngineInfo.__dataclass_fields__, 0)
    values.update(vocab_size=vocab_size, n_tokens=n_tokens or vocab_size)
    return EngineInfo(**values)


def draws(sampling: Sampling, n: int = 2000, logits: np.ndarray = LOGITS) -> list[int]:
    sampler = Sampler(info(len(logits)), sampling)
    return [sampler.draw(logits) for _ in range(n)]


def shares(sampling: Sampling, n: int = 20000) -> np.ndarray:
    counts = Counter(draws(sampling, n))
    return np.array([counts[i] / n for i in range(len(LOGITS))])


def test_greedy_takes_the_most_likely() -> None:
    assert set(draws(Sampling(), 5)) == {3}
    assert set(draws(Sampling(temperature=2.0, top_k=1), 5)) == {3}


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draws(Sampling(), 1, np.array([1, 7, 3, 7, 7, 0], np.float32)) == [1]


def test_shares_are_the_probabilities() -> None:
    # four standard deviations of a share of 0.5 in 20,000 draws are 0.015
    assert np.abs(shares(Sampling(temperature=1.0, seed=1)) - PROBABILITIES).max() < 0.015


def test_temperature_sharpens() -> None:
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert np.abs(shares(Sampling(temperature=0.5, seed=1)) - sharp).max() < 0.015


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2), {3, 0}),
        (Sampling(temperature=1.0, top_k=3), {3, 0, 4}),
        (Sampling(temperature=1.0, top_p=0.5), {3}),
        (Sampling(temperature=1.0, top_p=0.51), {3, 0}),
        (Sampling(temperature=1.0, top_p=0.76), {3, 0, 4}),
        (Sampling(temperature=1.0, min_p=0.29), {3, 0, 4}),
        (Sampling(temperature=1.0, min_p=0.31), {3, 0}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.8), {3, 0}),  # of what top-k left
        (Sampling(temperature=1.0, min_p=1.0), {3}),
    ],
)
def test_filters_keep_what_they_say(sampling: Sampling, kept: set[int]) -> None:
    assert set(draws(sampling)) == kept


def test_a_seed_decides_everything() -> None:
    def sampling(seed: int) -> Sampling:
        return Sampling(temperature=1.0, seed=seed)

    assert draws(sampling(7), 200) == draws(sampling(7), 200)
    assert draws(sampling(7), 200) != draws(sampling(8), 200)


def test_draws_are_those_of_xoshiro() -> None:
    """The generator once more, from its description, and the plain way to draw by it."""
    by_share = sorted(range(len(LOGITS)), key=lambda i: (-LOGITS[i], i))
    sums = np.cumsum([np.exp(np.float64(LOGITS[i])) for i in by_share])
    numbers = xoshiro(42)
    expected = [
        by_share[np.searchsorted(sums, next(numbers) * sums[-1], "right")] for _ in range(50)
    ]
    assert draws(Sampling(temperature=1.0, seed=42), 50) == expected


def xoshiro(seed: int) -> Iterator[float]:
    """xoshiro256++ seeded by splitmix64: numbers in [0, 1) of 53 bits."""
    mask = (1 << 64) - 1
    s = []
    for i in range(1, 5):
        z = (seed + i * 0x9E3779B97F4A7C15) & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        s.append(z ^ (z >> 31))
    while True:
        total = (s[0] + s[3]) & mask
        yield ((((total << 23) | (total >> 41)) + s[0] & mask) >> 11) * 2.0**-53
        t = s[1] << 17 & mask
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = (s[3] << 45 | s[3] >> 19) & mask


def test_ids_without_a_token_are_never_drawn() -> None:
    logits = np.zeros(8, np.float32)
    logits[6:] = 50.0
    for sampling in (Sampling(), Sampling(temperature=5.0, seed=1)):
        sampler = Sampler(info(8, n_tokens=6), sampling)
        assert max(sampler.draw(logits) for _ in range(500)) < 6


def test_repetition_penalty_weakens_what_was_accepted() -> None:
    logits = np.array([2.0, -1.0, 1.5, -1.2], np.float32)
    sampler = Sampler(info(4), Sampling(repetition_penalty=1.5))
    assert sampler.draw(logits) == 0
    sampler.accept([0])  # 2.0 / 1.5 < 1.5
    assert sampler.draw(logits) == 2
    sampler.accept([1])  # -1.0 * 1.5 < -1.2
    assert sampler.draw(np.array([-9, -1.0, -9, -1.2], np.float32)) == 3


def test_nothing_is_drawn_from_what_is_not_finite() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        logits = LOGITS.copy()
        logits[4] = bad
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            with pytest.raises(JobError, match="NaN or infinite"):
                Sampler(info(), sampling).draw(logits)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-0.1), "temperature: expected a number >= 0"),
        (Sampling(temperature=float("nan")), "temperature: expected a number >= 0"),
        (Sampling(top_k=-1), "top-k: expected 0 or more"),
        (Sampling(top_p=0.0), "top-p: expected a number above 0 and up to 1"),
        (Sampling(top_p=1.1), "top-p: expected a number above 0 and up to 1"),
        (Sampling(min_p=-0.1), "min-p: expected a number from 0 to 1"),
        (Sampling(repetition_penalty=0.0), "repetition penalty: expected a number above 0"),
    ],
)
def test_senseless_numbers_are_refused(sampling: Sampling, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampler(info(), sampling)
