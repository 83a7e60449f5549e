"""The `detokenize` command as a function: ids to text, for checking."""

from __future__ import annotations

import os
from collections.abc import Sequence

from colibri_tools.errors import UsageError
from colibri_tools.run import parse_tokens
from colibri_tools.tokenize import Tokens, open_tokenizer

__all__ = ["detokenize"]


def detokenize(
    path: str | os.PathLike[str], tokens: Sequence[int] | str, *, special: bool = False
) -> Tokens:
    """Return the text of ids, with `special` tokens or without. Raises UsageError."""
    tokenizer = open_tokenizer(path)
    ids = parse_tokens(tokens)
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    for i, number in enumerate(ids):
        if number >= known and tokenizer.id_to_token(number) is None:
            raise UsageError(f"token {i} is {number}; this tokenizer's ids are 0 to {known - 1}")
    text = str(tokenizer.decode(ids, skip_special_tokens=not special))
    return Tokens(ids, text, True)
