"""SentencePiece BPE in the terms of the tokenizers library.

SentencePiece merges the neighbours whose joint piece has the best score, the leftmost of equals.
The library merges by rank. With the pieces ranked by their scores that is the same, as long as no
two pieces that can come of a merge have one score; where they do, it is tried out, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

from colibri_tools.errors import quote

__all__ = ["SPACE", "Piece", "score_merges", "spm_pipeline"]

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

MAX_PIECE = 256
MAX_RUN = 64
"""Characters; longer ones would take too long, and no model has them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text and score."""

    text: str
    score: float


def score_merges(pieces: Sequence[Piece], ids: Mapping[str, int]) -> list[tuple[str, str]] | str:
    """Return all merges in order of rank, or what makes an equal order impossible."""
    found: list[_Merged] = []
    for piece in pieces:
        text = piece.text
        if len(text) > MAX_PIECE:
            return f"token {quote(text)} has {len(text)} characters"
        pairs = []
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                pairs.append((left, right))
            elif (len(left) == 1 or left in ids) and (len(right) == 1 or right in ids):
                return f"token {quote(text)} holds a character that is no token itself"
        if pairs:
            found.append(_Merged(piece, pairs))
    merges: list[tuple[str, str]] = []
    found.sort(key=lambda merged: -merged.piece.score)
    for score, group in groupby(found, key=lambda merged: merged.piece.score):
        equals = list(group)
        ordered = equals[0].pairs if len(equals) == 1 else _run_pairs(equals, found)
        if ordered is None:
            texts = f"{quote(equals[0].piece.text)} and {quote(equals[1].piece.text)}"
            return f"tokens {texts} have the same score {score}"
        merges += ordered
    return merges


@dataclass(frozen=True, slots=True)
class _Merged:
    """A piece that comes of a merge, with all the pairs that make it."""

    piece: Piece
    pairs: list[tuple[str, str]]


def _run_pairs(equals: Sequence[_Merged], found: Sequence[_Merged]) -> list[tuple[str, str]] | None:
    """Return merges of pieces of one score that end as merging from the left does, None if none do.

    Runs of spaces commonly have one score. As no other piece holds two of their character, what
    they are made of is a run of single characters still.
    """
    char = equals[0].piece.text[0]
    lengths = {len(merged.piece.text) for merged in equals}
    are_runs = all(set(merged.piece.text) == {char} for merged in equals)
    n_holding = sum(2 * char in merged.piece.text for merged in found)
    if not are_runs or n_holding != len(equals) or max(lengths) > MAX_RUN:
        return None
    ranks = {pair: rank for rank, pair in enumerate(_binary_pairs({1} | lengths))}
    same = all(
        _merge_run(n, lambda a, b, place: (0, place) if a + b in lengths else None)
        == _merge_run(n, lambda a, b, place: (ranks[a, b], place) if (a, b) in ranks else None)
        for n in range(2, 4 * max(lengths) + 1)
    )
    return [(char * a, char * b) for a, b in ranks] if same else None


def _binary_pairs(lengths: Collection[int]) -> list[tuple[int, int]]:
    """Return pairs of lengths that make one of `lengths`, in an order to merge by.

    A run is first doubled as far as it goes. What is left are falling powers of two; each is joined
    to all that stand before it, the large ones first.
    """
    powers = sorted((n for n in lengths if n.bit_count() == 1), reverse=True)
    doubles = [(n, n) for n in reversed(powers) if 2 * n in lengths]
    rests = [(a, b) for b in powers for a in lengths if a & -a > b and a + b in lengths]
    return [*doubles, *rests]


def _merge_run(n: int, order: Callable[[int, int, int], tuple[int, int] | None]) -> list[int]:
    """Return the lengths that a run of n characters ends as.

    The least `order` of two neighbouring lengths and where they begin is merged first.
    """
    lengths = [1] * n
    while True:
        starts = [0, *accumulate(lengths)]
        joined = [order(a, b, starts[i]) for i, (a, b) in enumerate(pairwise(lengths))]
        best = min((key for key in joined if key is not None), default=None)
        if best is None:
            return lengths
        i = joined.index(best)
        lengths[i : i + 2] = [lengths[i] + lengths[i + 1]]


def spm_pipeline(add_space_prefix: bool) -> dict[str, Any]:
    """Return normalizer, pre-tokenizer and decoder: spaces become SPACE, one more in front."""

    def replace(old: str, new: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    normalizers = [replace(" ", SPACE)]
    decoders: list[dict[str, Any]] = [
        replace(SPACE, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
