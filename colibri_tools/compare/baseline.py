"""A comparison that was saved, and what a later one says beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_tools.errors import FormatError, SourceError, UsageError, quote
from colibri_tools.sources.strict_json import parse_json_object

__all__ = ["FORMAT", "Baseline", "Change", "compare_with_baseline", "load_baseline"]

FORMAT = "colibri comparison"
VERSION = 1

_FIGURES = ("perplexity_b", "kl_mean", "kl_99", "top1_agreement")


@dataclass(frozen=True, slots=True)
class Baseline:
    """A saved comparison: the document, and the ids of its prompt."""

    path: str
    document: dict[str, Any]

    @property
    def prompt(self) -> list[int]:
        """The token ids that both models went on from."""
        return list(self.document["prompt"])


@dataclass(frozen=True, slots=True)
class Change:
    """Figures of the saved model B and of the one compared now, `same_characters` of its text."""

    path: str
    id: str
    figures: dict[str, tuple[float, float]]
    same_characters: int
    of_characters: int


def load_baseline(path: Path) -> Baseline:
    """Read a file of `--save`. Raises SourceError or FormatError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
    document = parse_json_object(data, str(path))
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise FormatError(f"{path}: is no saved comparison (compare --save) of version {VERSION}")
    prompt, whole, b = (document.get(name) for name in ("prompt", "whole", "b"))
    sound = (
        isinstance(prompt, list)
        and prompt
        and all(type(token) is int for token in prompt)
        and isinstance(whole, dict)
        and all(isinstance(whole.get(name), (int, float)) for name in _FIGURES)
        and isinstance(b, dict)
        and isinstance(b.get("text"), str)
        and isinstance(document.get("a"), dict)
    )
    if not sound:
        raise FormatError(f"{path}: the saved comparison lacks figures, prompt or text")
    return Baseline(str(path), document)


def compare_with_baseline(baseline: Baseline, now: dict[str, Any]) -> Change:
    """Return what changed. Raises UsageError unless model A, texts and windows are the same."""
    then = baseline.document
    for what, old, new in (
        ("model A", then["a"].get("id"), now["a"]["id"]),
        ("ctx", then.get("ctx"), now["ctx"]),
        ("texts", _digests(then), _digests(now)),
    ):
        if old != new:
            raise UsageError(
                f"{baseline.path}: made with another {what}: expected {quote(old)} again, found "
                f"{quote(new)}"
            )
    old_text, new_text = then["b"]["text"], now["b"]["text"]
    same = next(
        (i for i, (x, y) in enumerate(zip(old_text, new_text, strict=False)) if x != y),
        min(len(old_text), len(new_text)),
    )
    figures = {name: (float(then["whole"][name]), now["whole"][name]) for name in _FIGURES}
    return Change(baseline.path, str(then["b"].get("id")), figures, same, len(old_text))


def _digests(document: dict[str, Any]) -> list[Any]:
    texts = document.get("texts")
    if not isinstance(texts, (list, tuple)):
        return []
    return [text.get("sha256") if isinstance(text, dict) else None for text in texts]
