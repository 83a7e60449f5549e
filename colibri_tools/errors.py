"""Every error a user can meet: one line with what, where, expected, found and what to do.

The tree is shallow on purpose: callers catch `ColibriError`, print `.message` and exit with
`.exit_code`; the subclasses only tell whose fault it was.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

__all__ = [
    "ColibriError",
    "FormatError",
    "JobError",
    "ReadError",
    "SourceError",
    "UsageError",
    "add_hint",
    "hints",
    "quote",
    "quote_some",
]


class ColibriError(Exception):
    """Base of all errors that are reported as one line instead of a traceback.

    `message` is printable text without line breaks or control characters, whatever names a
    hostile file put into it. `exit_code` is the exit status of the command that meets it.
    """

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        self.message: str = _printable(message)
        super().__init__(self.message)


class FormatError(ColibriError):
    """A file breaks the rules of its own format (header, offsets, sizes, metadata)."""


class SourceError(ColibriError):
    """A source is incomplete, unreadable, unsafe to open or of an unsupported kind."""


class ReadError(SourceError):
    """A source cannot be read now; nothing is wrong with its contents as far as one knows."""


class JobError(ColibriError):
    """A job cannot go on although its input is sound (no space, a failed write, a refusal)."""


class UsageError(ColibriError):
    """The command line or a call asks for something that makes no sense. Exit code 2."""

    exit_code = 2


def add_hint(error: BaseException, text: str) -> None:
    """Add what to do next to an error that is on its way up."""
    if isinstance(error, ColibriError):
        error.message = f"{error.message}; {_printable(text)}"
        error.args = (error.message,)
    elif isinstance(error, KeyboardInterrupt):
        error.args = (f"interrupted; {_printable(text)}",)
    else:  # as add_note of Python 3.11, which tracebacks show
        error.__dict__.setdefault("__notes__", []).append(_printable(text))


def hints(error: BaseException) -> str:
    """Return what `add_hint` added to an error that has no message of its own to hold it."""
    return "".join(f"; {text}" for text in getattr(error, "__notes__", ()))


def quote(text: object, limit: int = 120) -> str:
    """Return `text` in single quotes, shortened in the middle to about `limit` characters."""
    # A list from a hostile header may have millions of items: never spell it out.
    shown = reprlib.repr(text) if isinstance(text, (list, tuple, dict)) else str(text)
    if len(shown) > limit:
        half = limit // 2 - 2
        shown = f"{shown[:half]}...{shown[-half:]}"
    return f"'{_printable(shown)}'"


def quote_some(names: Iterable[object], limit: int = 3) -> str:
    """Return the first `limit` names in quotes and how many more there are."""
    all_names = list(names)
    shown = ", ".join(quote(name) for name in all_names[:limit])
    more = len(all_names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


def _printable(text: str) -> str:
    # Names come from untrusted files: a newline would forge a line, an escape drives the terminal,
    # a lone surrogate makes print() raise.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
