"""The compare command: two containers on the same texts, through the engine in exact precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_tools.compare.baseline import (
    FORMAT,
    VERSION,
    Change,
    compare_with_baseline,
    load_baseline,
)
from colibri_tools.compare.metrics import Divergence, Tally
from colibri_tools.compare.texts import Text, Window, read_texts, read_tokens, windows
from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine, estimate
from colibri_tools.errors import UsageError
from colibri_tools.report_file import check_report, write_report
from colibri_tools.run import container_tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

__all__ = ["DEFAULT_CTX", "CompareResult", "Side", "TextFigures", "compare"]

PathLike = str | os.PathLike[str]
Progress = Callable[[int, int], None]

DEFAULT_CTX = 512
TEXT_CHARACTERS = 200
_PROMPT_TOKENS = 16
_LOGIT_BYTES = 32 << 20
"""Logits in memory at a time, for one model, as float64."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the models. `text` is how it goes on from the prompt, greedily: 200 characters.

    `bits_per_weight` are of all tensors and blocks of the file.
    """

    path: str
    id: str
    file_bytes: int
    bits_per_weight: float
    text: str


@dataclass(frozen=True, slots=True)
class TextFigures:
    """One text: name, SHA-256, tokens, and its figures."""

    name: str
    sha256: str
    n_tokens: int
    figures: Divergence


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Figures of all texts together (`whole`) and of each; `prompt` is token ids."""

    a: Side
    b: Side
    ctx: int
    prompt: tuple[int, ...]
    whole: Divergence
    texts: tuple[TextFigures, ...]
    baseline: Change | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold; the same as a saved file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def render(self, console: Console) -> None:
        """Print the figures for a person."""
        from colibri_tools.compare.view import render_compare  # late: only people need rich

        render_compare(self, console)


def compare(
    a: PathLike,
    b: PathLike,
    *,
    text: Sequence[PathLike] = (),
    tokens: Sequence[PathLike] = (),
    ctx: int | None = None,
    threads: int = 0,
    expert_cache: int | None = None,
    save: PathLike | None = None,
    baseline: PathLike | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CompareResult:
    """Compare container `b` with container `a` on texts, or on files of token ids.

    Perplexity of both, KL(A || B) and top-1 agreement, over windows of `ctx` tokens (512 by
    default, at most what both models have; see `windows`). Logits of a few positions are in memory
    at a time. `expert_cache` is for each model, in bytes. `save` keeps the result in a file,
    `baseline` is such a file to compare `b` with.

    Raises UsageError for models of different vocabularies, SourceError for unreadable texts,
    FormatError and JobError as the engine does.
    """
    if bool(text) == bool(tokens):
        raise UsageError("give texts with --text, or files of token ids with --tokens")
    if save is not None:
        check_report(Path(save), force=force)
    saved = None if baseline is None else load_baseline(Path(baseline))
    pair = _Pair(os.fspath(a), os.fspath(b))
    ctx = pair.choose_ctx(ctx)
    texts = pair.read(text, tokens)
    cut = [list(windows(each, ctx, pair.bos)) for each in texts]
    prompt = list(texts[0].ids[:_PROMPT_TOKENS]) if saved is None else saved.prompt
    room = min(pair.limit, max(ctx, len(prompt) + TEXT_CHARACTERS))
    options: dict[str, Any] = {
        "ctx": room, "threads": threads, "expert_cache": expert_cache, "precision": "exact"
    }  # fmt: skip
    with Engine(pair.a, **options) as one, Engine(pair.b, **options) as two:
        comparison = _Comparison(one, two, sum(len(w.ids) for ws in cut for w in ws), progress)
        tallies = [comparison.score(ws) for ws in cut]
        sides = [pair.side(engine, prompt) for engine in (one, two)]
    result = _result(pair, sides, ctx, prompt, texts, tallies)
    if saved is not None:
        result = replace(result, baseline=compare_with_baseline(saved, result.to_json()))
    if save is not None:
        write_report(Path(save), result.to_json())
    return result


def _result(
    pair: _Pair,
    sides: list[Side],
    ctx: int,
    prompt: list[int],
    texts: list[Text],
    tallies: list[Tally],
) -> CompareResult:
    whole = Tally()
    for tally in tallies:
        whole.merge(tally)
    return CompareResult(
        a=sides[0],
        b=sides[1],
        ctx=ctx,
        prompt=tuple(prompt),
        whole=whole.result(),
        texts=tuple(
            TextFigures(text.name, text.sha256, len(text.ids), tally.result())
            for text, tally in zip(texts, tallies, strict=True)
        ),
        baseline=None,
        notes=tuple(pair.notes),
    )


class _Pair:
    """Two containers that must speak the same tokens."""

    def __init__(self, a: str, b: str) -> None:
        self.a, self.b = a, b
        self.notes: list[str] = []
        self._facts = [_facts(path) for path in (a, b)]
        for key, what in (("vocab_size", "logits"), ("n_tokens", "tokens")):
            one, two = (facts[key] for facts in self._facts)
            if one != two:
                raise UsageError(
                    f"{b}: expected {one} {what} as {a} has, found {two}: these are not the same "
                    "vocabulary"
                )
        self.limit = min(estimate(path, ctx=1).context_length for path in (a, b))
        self.tokenizer = self._one_tokenizer()
        self.bos = _leading_token(self.tokenizer)

    def _one_tokenizer(self) -> Tokenizer | None:
        both = [container_tokenizer(path, needed=False) for path in (self.a, self.b)]
        present = [tokenizer for tokenizer in both if tokenizer is not None]
        if len(present) == 2 and present[0].get_vocab() != present[1].get_vocab():
            raise UsageError(f"{self.b}: its tokenizer has other tokens than that of {self.a}")
        if len(present) == 1:
            has = self.a if both[0] is not None else self.b
            self.notes.append(f"only {has} has a tokenizer; it is used for both")
        return present[0] if present else None

    def choose_ctx(self, ctx: int | None) -> int:
        """Return the window, which both models must have room for."""
        if ctx is not None and not 4 <= ctx <= self.limit:
            raise UsageError(f"--ctx: expected 4 to {self.limit}, found {ctx}")
        return min(DEFAULT_CTX, self.limit) if ctx is None else ctx

    def read(self, text: Sequence[PathLike], tokens: Sequence[PathLike]) -> list[Text]:
        """Return the texts as tokens."""
        if tokens:
            return read_tokens(tokens, self._facts[0]["n_tokens"])
        if self.tokenizer is None:
            raise UsageError(
                f"{self.a}: neither model has a tokenizer that can encode text; give files of "
                "token ids with --tokens"
            )
        return read_texts(text, self.tokenizer)

    def side(self, engine: Engine, prompt: list[int]) -> Side:
        """Describe a model, and let it go on from the prompt."""
        facts = self._facts[0 if engine.path == self.a else 1]
        text = _continue(engine, prompt, self.tokenizer)
        return Side(os.fspath(engine.path), facts["id"], facts["file_bytes"], facts["bits"], text)


def _facts(path: str) -> dict[str, Any]:
    with open_container(path) as container:
        account, spec = container.accounting(), container.spec
        data = account.resident_bytes + account.expert_bytes
        return {
            "vocab_size": int(spec["vocab_size"]),
            "n_tokens": int(spec["n_tokens"]),
            "id": container.id,
            "file_bytes": account.file_bytes,
            "bits": 8 * data / max(1, int(spec["total_params"])),
        }


def _leading_token(tokenizer: Tokenizer | None) -> int | None:
    """The token that the tokenizer puts in front of every text."""
    if tokenizer is None:
        return None
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    return full[0] if len(full) > len(plain) and full[: len(plain)] != plain else None


def _continue(engine: Engine, prompt: list[int], tokenizer: Tokenizer | None) -> str:
    """Return 200 characters of greedy text; of ids where there is no tokenizer."""
    engine.rewind(0)
    engine.check_tokens(prompt)
    row, made = engine.eval(prompt)[-1], list[int]()
    text = ""
    while len(text) < TEXT_CHARACTERS:
        token = int(row.argmax())
        made.append(token)
        if tokenizer is None:
            text = " ".join(map(str, made))
        else:
            text = tokenizer.decode(made, skip_special_tokens=True)
        if engine.is_eos(token) or engine.position == engine.info.ctx:
            break
        if len(made) > TEXT_CHARACTERS:  # tokens without any text
            break
        row = engine.eval([token])[-1]
    return text[:TEXT_CHARACTERS]


class _Comparison:
    """Both engines over the same windows, a few positions at a time."""

    def __init__(self, a: Engine, b: Engine, n_tokens: int, progress: Progress | None) -> None:
        self._engines = (a, b)
        self._total, self._done = n_tokens, 0
        self._progress = progress
        self._step = max(1, min(256, _LOGIT_BYTES // (8 * a.info.vocab_size)))

    def score(self, ws: list[Window]) -> Tally:
        tally = Tally()
        for window in ws:
            self._window(window, tally)
        return tally

    def _window(self, window: Window, tally: Tally) -> None:
        ids, first = window.ids, window.first
        for engine in self._engines:
            engine.rewind(0)
            if first:
                engine.eval(ids[:first])
        self._advance(first)
        for start in range(first, len(ids) - 1, self._step):
            part = ids[start : min(start + self._step, len(ids) - 1)]
            following = np.array(ids[start + 1 : start + 1 + len(part)], np.int64)
            a, b = (engine.eval(part, len(part)) for engine in self._engines)
            tally.add(a, b, following)
            self._advance(len(part))
        self._advance(1)

    def _advance(self, n_tokens: int) -> None:
        self._done += n_tokens
        if self._progress is not None:
            self._progress(self._done, self._total)
