"""What a comparison reads: texts or token ids, cut into windows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_tools.errors import SourceError, UsageError, quote

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Text", "Window", "read_texts", "read_tokens", "windows"]

PathLike = str | os.PathLike[str]

_MIN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Text:
    """One input. `sha256` is of its bytes, or of its ids as little-endian u32."""

    name: str
    sha256: str
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of a sequence of their own; from position `first` on, the next token is scored."""

    ids: Sequence[int]
    first: int


def windows(text: Text, ctx: int, bos: int | None) -> Iterator[Window]:
    """Cut a text into windows of `ctx` tokens that do not overlap.

    As llama-perplexity does it: each begins without memory, its first token is `bos` where the
    tokenizer puts one in front of texts, and only the second half is scored, where there is
    context. What is left at the end is a shorter window if it reaches a second half; a text that is
    shorter than a window is one window with halves of its own.
    """
    first = min(ctx, len(text.ids)) // 2
    for start in range(0, len(text.ids), ctx):
        ids = list(text.ids[start : start + ctx])
        if len(ids) < first + 2:
            return
        if bos is not None:
            ids[0] = bos
        yield Window(ids, first)


def read_texts(paths: Sequence[PathLike], tokenizer: Tokenizer) -> list[Text]:
    """Read and encode UTF-8 texts. Raises SourceError or UsageError naming the file."""
    return [_text(Path(path), tokenizer) for path in paths]


def _text(path: Path, tokenizer: Tokenizer) -> Text:
    data = _read(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error
    ids = tokenizer.encode(text, add_special_tokens=True).ids
    return _checked(path, Text(path.name, hashlib.sha256(data).hexdigest(), ids))


def read_tokens(paths: Sequence[PathLike], vocab_size: int) -> list[Text]:
    """Read files of token ids, separated by blanks, commas or lines.

    Raises SourceError or UsageError naming the file, and the place of what is no id.
    """
    return [_tokens(Path(path), vocab_size) for path in paths]


def _tokens(path: Path, vocab_size: int) -> Text:
    import numpy as np

    ids = []
    for number, word in enumerate(_read(path).replace(b",", b" ").split()):
        if not word.isdigit() or int(word) >= vocab_size:
            shown = quote(word.decode("utf-8", "replace"))
            raise UsageError(
                f"{path}: item {number} is {shown}, expected a token id, 0 to {vocab_size - 1}"
            )
        ids.append(int(word))
    digest = hashlib.sha256(np.array(ids, "<u4").tobytes()).hexdigest()
    return _checked(path, Text(path.name, digest, ids))


def _checked(path: Path, text: Text) -> Text:
    if len(text.ids) < _MIN_TOKENS:
        raise UsageError(f"{path}: {len(text.ids)} tokens, expected {_MIN_TOKENS} or more")
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error
