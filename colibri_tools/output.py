"""The one place that decides between human, JSON and quiet output.

Results are objects that know how to print themselves (`render`) and what they are as data
(`to_json`); commands hand them to `Output.result` and print nothing on their own. Standard output
carries results only. Progress, notes and errors go to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from colibri_tools.errors import ColibriError

__all__ = [
    "Output",
    "ProgressCallback",
    "Result",
    "counted",
    "facts_table",
    "format_bytes",
    "format_count",
    "format_speed",
    "parse_rate",
    "parse_size",
    "print_numbers",
]

ProgressCallback = Callable[[int, int], None]
"""Called with what is done and what there is in total, mostly bytes."""

_PIPE_WIDTH = 200
_TRAILING = re.compile(r" +(?=\n)")
_UNSAFE = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""What JSON allows in strings but a terminal (controls) or UTF-8 (halves of pairs) does not."""


class Result(Protocol):
    """What a command returns: printable, and data."""

    def render(self, console: Console) -> None:
        """Print for a person."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold (no NaN, no bytes)."""


class Output:
    """Where a command's results, progress, notes and errors go.

    With `json_mode`, standard output gets exactly one JSON document, on success and on failure.
    `quiet` silences progress, notes and warnings, not results and errors.
    """

    def __init__(self, *, json_mode: bool = False, quiet: bool = False) -> None:
        self.json_mode = json_mode
        self.quiet = quiet
        self.console = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def result(self, result: Result) -> None:
        """Print a command's result."""
        if self.json_mode:
            self.document(result.to_json())
        elif not self.quiet:
            result.render(self.console)

    def text(self, piece: str) -> None:
        """Print a piece of generated text at once."""
        sys.stdout.write(piece)
        sys.stdout.flush()

    def measured(self, result: Result) -> None:
        """Print a result whose text went to standard output: measurements go beside it."""
        if self.json_mode:
            self.document(result.to_json())
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.remarks(result)
        if not self.quiet:
            result.render(self.err)

    def before(self, plan: Result) -> None:
        """Say what a job is about to do, beside what it will write to standard output."""
        if not self.quiet and not self.json_mode:
            plan.render(self.err)
        self.remarks(plan)

    def remarks(self, result: Any) -> None:
        """Say a result's notes and warnings."""
        for text in getattr(result, "notes", ()):
            self.note(text)
        for text in getattr(result, "warnings", ()):
            self.warn(text)

    def document(self, data: dict[str, Any]) -> None:
        """Print one strict JSON document."""
        text = json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False)
        sys.stdout.write(_UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Say something that a person may want to know; silent in JSON and quiet mode."""
        if not self.quiet and not self.json_mode:
            self.err.print(f"[dim]note:[/dim] {escape(text)}", soft_wrap=True)

    def warn(self, text: str) -> None:
        """Say something that may be wrong; JSON results carry warnings as data instead."""
        if not self.quiet and not self.json_mode:
            self.err.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)

    def error(self, error: ColibriError) -> None:
        """Report a failure: one line on standard error, and a document in JSON mode."""
        self.failure(type(error).__name__, error.message, error.exit_code)

    def failure(self, kind: str, message: str, exit_code: int) -> None:
        """Report a failure that is not a ColibriError."""
        if self.json_mode:
            self.document(
                {
                    "ok": False,
                    "error": {"kind": kind, "message": message},
                    "exit_code": exit_code,
                }
            )
        self.err.print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)

    def failures(self, messages: Iterable[str]) -> None:
        """Say on standard error what a report would have said; JSON has it as data."""
        if not self.json_mode:
            for message in messages:
                self.err.print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=True)

    @contextmanager
    def progress(self, what: str, unit: str = "bytes") -> Iterator[ProgressCallback]:
        """Yield a callback that moves a progress bar of bytes, or of another unit.

        A no-op off a terminal.
        """
        if self.quiet or not self.err.is_terminal:
            yield lambda done, total: None
            return
        amount: tuple[ProgressColumn, ...] = (
            DownloadColumn(binary_units=True),
            _SpeedColumn(),
        )
        if unit != "bytes":
            amount = (MofNCompleteColumn(), TextColumn(unit))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            *amount,
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


class _SpeedColumn(ProgressColumn):
    """Bytes a second in the units of all other sizes; rich's own column has decimal ones."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        shown = "" if speed is None else f"{format_bytes(round(speed))}/s"
        return Text(shown, style="progress.data.speed")


class _Trimmed:
    """A stream without the spaces that tables put behind their last column."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write(_TRAILING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _SafeConsole(Console):
    """A console on which names of untrusted files cannot drive the terminal."""

    def on_broken_pipe(self) -> None:
        raise  # that of the write that called this: main() knows how to end then

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            if control is None and not text.isprintable():
                text = "".join(map(_plain, text))
            yield Segment(text, style, control)


def _plain(char: str) -> str:
    if char.isprintable() or char == "\n":
        return char
    return char.encode("unicode_escape").decode("ascii")


def _console(stream: Any) -> Console:
    file: Any = _Trimmed(stream)
    console = _SafeConsole(file=file, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return labels and what they stand for (markup) as a table of two columns."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(label, value)
    return table


def print_numbers(
    console: Console,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    styles: Sequence[str] = (),
) -> None:
    """Print rows of numbers as a table; where it is too wide, each row as lines of its own.

    `styles` are those of the rows, none where there are fewer.
    """
    table = Table(box=None, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    rows = list(rows)
    for row, style in zip_longest(rows, styles, fillvalue=""):
        table.add_row(*row, style=style)
    wanted = console.measure(table, options=console.options.update(width=sys.maxsize)).maximum
    if wanted <= console.width:
        console.print(table)
        return
    for row, style in zip_longest(rows, styles, fillvalue=""):
        facts = facts_table(pair for pair in zip(headers, row, strict=True) if pair[1])
        console.print(facts, style=style)
        console.print()


def format_bytes(n: int) -> str:
    """Return `n` bytes as people read them: '37 B', '4.0 KiB', '1.35 GiB'."""
    if n < 1024:
        return f"{n} B"
    size = float(n)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 999.5 or unit == "PiB":
            return f"{size:.3g} {unit}" if size >= 10 else f"{size:.2f} {unit}"
    raise AssertionError("unreachable")


def counted(n: int, noun: str, *, shown: str = "") -> str:
    """Return a number and what it counts: '1 token', '2 tokens'. `shown` stands for the number."""
    return f"{shown or n} {noun}{'s' * (n != 1)}"


def format_count(n: int) -> str:
    """Return a number of parameters as people read it: '997', '14.6 M', '2.70 B'."""
    size = float(n)
    if n < 1000:
        return str(n)
    for unit in ("K", "M", "B", "T"):
        size /= 1000
        if size < 999.5 or unit == "T":
            return f"{size:.3g} {unit}" if size >= 10 else f"{size:.2f} {unit}"
    raise AssertionError("unreachable")


def format_speed(tokens_per_second: float) -> str:
    """Return a speed with three digits, or all before the point: '0.85', '31.4', '3,321'."""
    shown = f"{tokens_per_second:.3g}"
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 999.5 else shown


_SUFFIXES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Return the bytes of '4096', '64K', '4G' (= 4 GiB), '1.5GiB'. Raises ValueError."""
    lower = text.strip().lower()
    number = lower.rstrip("bkmgti")
    suffix = lower[len(number) :].removesuffix("b").removesuffix("i")
    if suffix not in _SUFFIXES or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"'{text}' is not a size; write for example 4096, 64K or 4G (= 4 GiB)")
    return int(float(number) * _SUFFIXES[suffix])


_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b?(?:/s)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_rate(text: str) -> float:
    """Return bytes per second of '3.5GB/s', '800M' (decimal, as drives are sold) or '2GiB/s'.

    Raises ValueError.
    """
    match = _RATE.fullmatch(text.strip())
    rate = 0.0
    if match is not None:
        rate = float(match[1]) * float(1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    if rate <= 0:
        raise ValueError(f"'{text}' is not a rate; write for example 3.5GB/s or 800MB/s")
    return rate
