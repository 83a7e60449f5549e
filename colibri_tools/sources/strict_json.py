"""JSON from untrusted files: bounded depth, no duplicate keys, no lone surrogates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from colibri_tools.errors import FormatError, quote

__all__ = [
    "MAX_JSON_DEPTH",
    "MAX_JSON_ESCAPES",
    "MAX_JSON_VALUES",
    "MAX_WIDE_JSON_BYTES",
    "parse_json",
    "parse_json_object",
]

MAX_JSON_DEPTH = 64
"""Real configs nest less than ten deep."""

MAX_JSON_VALUES = (1 << 19) + (1 << 15)
"""Commas and opening brackets in one text: objects cost twenty times the memory of their text.
A safetensors header has eight for each tensor of two dimensions."""

MAX_WIDE_JSON_BYTES = 16 << 20
"""Of a text that is not ASCII: one character beyond U+FFFF makes Python hold all as four bytes."""

MAX_JSON_ESCAPES = 1 << 20
"""`\\u` sequences: each is looked at by a regular expression."""

_SCAN_CHUNK = 1 << 18
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_NOT_BACKSLASH = re.compile(rb"[^\\]", re.DOTALL)
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def parse_json(
    data: bytes | bytearray,
    where: str,
    max_depth: int = MAX_JSON_DEPTH,
    allow_constants: bool = False,
) -> Any:
    """Parse UTF-8 JSON. Raises FormatError, starting with `where`, for anything doubtful.

    `allow_constants` admits NaN and Infinity, which Python tools write into config files.
    """
    check_size(data, where, max_depth)
    _check_characters(data, where)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=float if allow_constants else _refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 text at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FormatError(
            f"{where}: broken JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:  # also Python's limit on digits of an integer
        raise FormatError(f"{where}: broken JSON: {error}") from error


def parse_json_object(
    data: bytes | bytearray,
    where: str,
    max_depth: int = MAX_JSON_DEPTH,
    allow_constants: bool = False,
) -> dict[str, Any]:
    """Parse JSON whose top level must be an object. Raises FormatError."""
    found = parse_json(data, where, max_depth, allow_constants)
    if not isinstance(found, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(found).__name__}")
    return found


def check_size(data: bytes | bytearray, where: str, max_depth: int) -> None:
    """Raise FormatError if brackets nest deeper than about `max_depth` (at most twice that).

    Also if there are more than `MAX_JSON_VALUES` values.

    Runs at C speed and before the JSON parser, whose own answer to depth is RecursionError at
    best. Each round of replacements removes the innermost brackets, so it takes as many rounds
    as the nesting is deep. What stays open is carried into the next chunk.
    """
    still_open = b""
    n_values = 0
    for structure in _structure(data):
        n_values += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        if n_values > MAX_JSON_VALUES:
            raise FormatError(f"{where}: more than {MAX_JSON_VALUES} JSON values")
        still_open = _reduce(still_open + structure.replace(b",", b""), max_depth)
        if len(still_open) > max_depth or b"[]" in still_open or b"{}" in still_open:
            raise FormatError(
                f"{where}: broken JSON: brackets are unbalanced or nest deeper than {max_depth}"
            )


def _reduce(brackets: bytes, max_rounds: int) -> bytes:
    for _ in range(max_rounds):
        shorter = brackets.replace(b"{}", b"").replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    return brackets


def _structure(data: bytes | bytearray) -> Iterator[bytes]:
    """Yield the brackets and commas outside strings, in order."""
    in_string = 0
    for chunk in _chunks(data):
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = chunk.split(b'"')
        yield b"".join(parts[in_string::2]).translate(None, _NOT_STRUCTURE)
        in_string ^= (len(parts) - 1) & 1


def _chunks(data: bytes | bytearray) -> Iterator[bytes]:
    """Yield pieces of about `_SCAN_CHUNK` bytes; no piece ends inside an escape sequence."""
    start = 0
    while start < len(data):
        end = min(start + _SCAN_CHUNK, len(data))
        if data[end - 1] == 0x5C:
            after = _NOT_BACKSLASH.search(data, end)
            end = after.end() if after else len(data)
        yield bytes(data[start:end])
        start = end


def _check_characters(data: bytes | bytearray, where: str) -> None:
    if len(data) > MAX_WIDE_JSON_BYTES and not data.isascii():
        raise FormatError(
            f"{where}: {len(data)} bytes of JSON that are not all ASCII, expected at most "
            f"{MAX_WIDE_JSON_BYTES}"
        )
    n_escapes = data.count(b"\\u")
    if n_escapes > MAX_JSON_ESCAPES:
        raise FormatError(f"{where}: {n_escapes} escapes, expected at most {MAX_JSON_ESCAPES}")
    if n_escapes and _LONE_SURROGATE.search(data.replace(b"\\\\", b"")):
        raise FormatError(f"{where}: broken JSON: a \\u escape is half of a surrogate pair")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {quote(key)} appears twice")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
