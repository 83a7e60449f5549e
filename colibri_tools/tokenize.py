"""The `tokenize` command as a function: text to ids, for checking."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from colibri_tools.container import open as open_container
from colibri_tools.sources import open_source, sniff
from colibri_tools.text.loading import decode_text, load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

__all__ = ["Tokens", "open_tokenizer", "tokenize"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text and its ids. `shows_text`: what was asked for is the text."""

    tokens: list[int]
    text: str
    shows_text: bool
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold."""
        return {"tokens": self.tokens, "text": self.text, "warnings": list(self.warnings)}

    def render(self, console: Console) -> None:
        """Print what was asked for."""
        shown = self.text if self.shows_text else ",".join(map(str, self.tokens))
        console.print(shown, soft_wrap=True, markup=False, highlight=False)


def tokenize(path: PathLike, text: str | bytes | None, *, special: bool = True) -> Tokens:
    """Return the ids of `text` with the tokenizer of a container, a folder or a GGUF file.

    None is the text of standard input.
    `special`: with what the tokenizer puts around a text. A byte that is no UTF-8 is taken as
    U+FFFD, with a warning. Raises UsageError where there is no tokenizer.
    """
    tokenizer = open_tokenizer(path)
    if text is None:
        text = sys.stdin.buffer.read()
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    clean, bad = decode_text(raw)
    warnings = () if bad is None else (f"not UTF-8 at byte {bad}: U+FFFD stands for it",)
    ids: list[int] = tokenizer.encode(clean, add_special_tokens=special).ids
    return Tokens(ids, clean, False, warnings)


def open_tokenizer(path: PathLike) -> Tokenizer:
    """Return the tokenizer of a container, a folder or a GGUF file. Raises UsageError."""
    return load_tokenizer(_blobs(path), path)


def _blobs(path: PathLike) -> Mapping[str, bytes]:
    if sniff(path) == "colibri":
        with open_container(path) as container:
            return dict(container.blobs)
    with open_source(path) as source:
        return dict(source.blobs)
