"""How far two distributions of next tokens are apart, position by position.

- loss: the negative log-probability of the token that follows, in nats; perplexity is exp of its
  mean.
- KL(A || B) in nats (Kullback and Leibler 1951), over the whole vocabulary.
- top-1 agreement: whether both find the same token most likely; the lowest id among equals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Divergence", "Tally"]

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """What is known of a set of positions. Perplexities are of what follows them."""

    n_scored: int
    perplexity_a: float
    perplexity_b: float
    loss_a: float
    loss_b: float
    loss_difference: float
    loss_difference_error: float
    kl_mean: float
    kl_median: float
    kl_99: float
    kl_max: float
    top1_agreement: float


@dataclass(eq=False)
class Tally:
    """Numbers of scored positions, float64; 25 bytes for each."""

    _loss_a: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _loss_b: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _kl: list[npt.NDArray[np.float64]] = field(default_factory=list)
    _same: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def add(self, a: Logits, b: Logits, following: npt.NDArray[np.int64]) -> None:
        """Score logits [n, vocab] of both models by the tokens [n] that follow."""
        p, q = _log_softmax(a), _log_softmax(b)
        at = np.arange(len(following))
        self._loss_a.append(-p[at, following])
        self._loss_b.append(-q[at, following])
        # Rounding may leave -1e-17 between equal distributions.
        self._kl.append(np.maximum(np.sum(np.exp(p) * (p - q), axis=1), 0.0))
        self._same.append(a.argmax(axis=1) == b.argmax(axis=1))

    def merge(self, other: Tally) -> None:
        """Take over what another one counted."""
        for name in ("_loss_a", "_loss_b", "_kl", "_same"):
            getattr(self, name).extend(getattr(other, name))

    def result(self) -> Divergence:
        """Return the figures; there must be at least one position."""
        loss_a, loss_b = np.concatenate(self._loss_a), np.concatenate(self._loss_b)
        kl, n = np.concatenate(self._kl), len(loss_a)
        difference = loss_b - loss_a
        spread = float(difference.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
        return Divergence(
            n_scored=n,
            perplexity_a=_exp(loss_a.mean()),
            perplexity_b=_exp(loss_b.mean()),
            loss_a=float(loss_a.mean()),
            loss_b=float(loss_b.mean()),
            loss_difference=float(difference.mean()),
            loss_difference_error=spread,
            kl_mean=float(kl.mean()),
            kl_median=float(np.median(kl)),
            kl_99=float(np.percentile(kl, 99)),
            kl_max=float(kl.max()),
            top1_agreement=float(np.concatenate(self._same).mean()),
        )


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _exp(loss: float) -> float:
    return math.exp(min(float(loss), 700.0))  # beyond, it is no number that JSON holds
