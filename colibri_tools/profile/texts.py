"""The texts that a profile is made from: read, made into token ids, cut into windows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_tools.container import Container
from colibri_tools.errors import FormatError, UsageError, quote
from colibri_tools.profile.file import TextRecord

__all__ = ["DEFAULT_DOMAIN", "InputText", "Window", "cut", "named_paths", "read_texts"]

DEFAULT_DOMAIN = "text"
_TOKENIZER_BLOB = "tokenizer.json"
_MAX_TEXT_BYTES = 1 << 30
_DOMAIN_NAME = re.compile(r"[\w.+-]{1,64}")

Encode = Callable[[str], "list[int]"]


@dataclass(frozen=True, slots=True)
class InputText:
    """One text as token ids."""

    record: TextRecord
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a text that is evaluated as a sequence of its own; `ends` it, or goes on."""

    text: int
    tokens: list[int]
    ends: bool


def named_paths(
    option: str, values: Sequence[str], default: str | None = None
) -> list[tuple[str, Path]]:
    """Split "NAME=FILE" of an option, a FILE alone belonging to the last name or to `default`.

    Raises UsageError for another form or a senseless name.
    """
    found: list[tuple[str, Path]] = []
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or Path(value).exists():
            name, path = (found[-1][0] if found else default or ""), value
        if not path or not _DOMAIN_NAME.fullmatch(name):
            raise UsageError(
                f"{option} {quote(value)}: expected NAME=FILE, the name of letters, digits, '_.+-'"
            )
        found.append((name, Path(path)))
    return found


def read_texts(
    container: Container,
    texts: Sequence[tuple[str, Path]],
    token_files: Sequence[tuple[str, Path]],
) -> list[InputText]:
    """Return every text (domain, file) as ids, and of token files every line as a text.

    Raises UsageError for files that cannot be read, are empty or no UTF-8, for ids that the model
    does not have, and where text is given and the container has no tokenizer.
    """
    encode = _encoder(container) if texts else None
    found: list[InputText] = []
    for domain, path in texts:
        assert encode is not None
        data = _read(path)
        found.append(_record(domain, path.name, data, encode(_decode(path, data))))
    for domain, path in token_files:
        found += _token_lines(domain, path, int(container.spec["vocab_size"]))
    for text in found:
        if not text.tokens:
            raise UsageError(f"{text.record.name}: the text is empty, it has no tokens")
    return found


def cut(texts: Sequence[InputText], length: int) -> list[Window]:
    """Cut texts into windows of up to `length` tokens."""
    windows = []
    for number, text in enumerate(texts):
        n = len(text.tokens)
        for start in range(0, n, length):
            end = min(start + length, n)
            windows.append(Window(number, text.tokens[start:end], end == n))
    return windows


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_TEXT_BYTES:
        raise UsageError(f"{path}: more than {_MAX_TEXT_BYTES >> 30} GiB of text; split it")
    if not data.strip():
        raise UsageError(f"{path}: the text is empty, it has no tokens")
    return data


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error


def _record(domain: str, name: str, data: bytes, tokens: list[int]) -> InputText:
    sha256 = hashlib.sha256(data).hexdigest()
    return InputText(TextRecord(domain, name, sha256, len(data), len(tokens)), tokens)


def _token_lines(domain: str, path: Path, vocab_size: int) -> list[InputText]:
    found = []
    for number, line in enumerate(_decode(path, _read(path)).splitlines(), 1):
        fields = line.replace(",", " ").split()
        if not fields:
            continue
        bad = [f for f in fields if not (f.isascii() and f.isdigit() and int(f) < vocab_size)]
        if bad:
            raise UsageError(
                f"{path}, line {number}: expected ids from 0 to {vocab_size - 1}, "
                f"found {quote(bad[0])}"
            )
        name = f"{path.name}:{number}"
        found.append(_record(domain, name, line.encode(), [int(f) for f in fields]))
    return found


def _encoder(container: Container) -> Encode:
    blob = container.blobs.get(_TOKENIZER_BLOB)
    if container.spec["tokenizer"] != "hf-json" or blob is None:
        raise UsageError(
            f"{container.path}: it has no tokenizer that can encode text; "
            "give token ids with --tokens-file"
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(bytes(blob).decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise FormatError(f"{container.path}: {_TOKENIZER_BLOB} cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=True).ids)
