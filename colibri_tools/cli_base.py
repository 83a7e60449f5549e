"""What every command of the command line is made of: values, help, common options.

A command is declared by `command` and called with an `Output`.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from colibri_tools import __version__
from colibri_tools.output import Output, parse_size

__all__ = [
    "PATH",
    "SIZE",
    "ExampleGroup",
    "Interrupted",
    "PipeClosed",
    "SizeOrAll",
    "command",
    "job_options",
    "main_group",
    "options",
    "report",
]

if TYPE_CHECKING:
    IntParam = click.ParamType[int]
else:
    IntParam = click.ParamType  # subscriptable from click 8.4 on


class SizeType(IntParam):
    """Bytes with an optional suffix: 4096, 64K, 4G (= 4 GiB)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SizeOrAll(SizeType):
    """Bytes, or `all`."""

    name = "size|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return (1 << 64) - 1 if value == "all" else super().convert(value, param, ctx)


class PipeClosed(Exception):
    """The reader of standard output (head, less) went away."""


class Interrupted(Exception):
    """A command was ended by Ctrl-C or SIGTERM; the text says what it left behind, if anything."""


_COMMON = ("json_mode", "quiet", "debug")
SIZE = SizeType()
PATH = click.Path(path_type=Path)


class Formatter(click.HelpFormatter):
    """Help as wide as the terminal, also where that is narrower than click's least width."""

    def __init__(
        self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None
    ) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or min(columns, max_width or 80) - 2, max_width)

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        super().write_dl(rows, min(col_max, self.width * 2 // 5), col_spacing)


class Context(click.Context):
    formatter_class = Formatter


class WithExample(click.Command):
    """Help that ends with an example: shell lines, folded where the terminal is narrower."""

    context_class = Context

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example"):
            for line in self.example.strip().splitlines():
                formatter.write(textwrap.indent(fold_command(line, formatter.width - 2), "  "))


def fold_command(line: str, width: int) -> str:
    """Return a shell line folded at its options to about `width`, the same command to a shell."""
    chunks: list[str] = []
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", line):
        if chunks and re.fullmatch(r"-\S+", chunks[-1]) and not word.startswith("-"):
            chunks[-1] += f" {word}"
        else:
            chunks.append(word)
    lines = chunks[:1]
    for chunk in chunks[1:]:
        if len(f"{lines[-1]} {chunk} \\") <= width:
            lines[-1] += f" {chunk}"
        else:
            lines.append(f"  {chunk}")
    return " \\\n".join(lines) + "\n"


class ExampleCommand(WithExample):
    """A command with an example.

    Options named in `lists` take several values: `--text A B` is `--text A --text B`. As that
    would take arguments too, it is so behind the first argument only.
    """

    def __init__(self, *args: Any, lists: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lists = frozenset(lists)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._spread(args))

    def _spread(self, args: list[str]) -> list[str]:
        takes_value = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag and not param.count
            for name in param.opts
        }
        spread: list[str] = []
        option, n_values, n_arguments = "", 0, 0
        for i, arg in enumerate(args):
            if arg == "--":
                return spread + args[i:]
            if arg.startswith("-") and arg != "-":
                option, n_values = arg, 0
            elif option in takes_value and n_values == 0:
                n_values = 1
            elif option in self.lists and n_arguments > 0:
                spread.append(option)
            else:
                n_arguments += 1
            spread.append(arg)
        return spread


class MainGroup(click.Group):
    """All commands; its help names them."""

    context_class = Context


class ExampleGroup(WithExample, click.Group):
    """A group of commands with an example."""


def command(
    name: str, *, example: str, group: click.Group | None = None, lists: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command with the options every command has; it is called with an `Output`."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        @wraps(function)
        def call(json_mode: bool, quiet: bool, debug: bool, **options: Any) -> Any:
            try:
                return function(Output(json_mode=json_mode, quiet=quiet), **options)
            except KeyboardInterrupt as error:  # click would drop its message
                raise Interrupted(str(error)) from error
            except BrokenPipeError as error:  # click would exit with 1
                raise PipeClosed from error

        for option in (
            click.option("--debug", is_flag=True, help="Show a traceback on failure."),
            click.option("-q", "--quiet", is_flag=True, help="No progress, notes or report."),
            click.option("--json", "json_mode", is_flag=True, help="Print one JSON document."),
        ):
            call = option(call)
        declare = (group or main_group).command(
            name, cls=ExampleCommand, example=example, lists=lists
        )
        decorated: click.Command = declare(call)
        decorated.params.sort(key=lambda param: param.name in _COMMON)  # its own options first
        return decorated

    return decorate


@click.group(
    cls=MainGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'colibri COMMAND -h' explains a command and shows an example.",
)
@click.version_option(__version__, "--version", prog_name="colibri")
def main_group() -> None:
    """One aligned, indexed, checksummed file per Mixture-of-Experts model.

    Turns a Hugging Face or GGUF checkpoint into a container with one block per expert, looks
    inside it, checks every byte of it, quantizes it, shows which experts work and lays it out by
    that, and runs it from disk with a bounded cache.
    """


def options(*them: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Bundle options that several commands share; the first is listed first."""

    def decorate(function: Any) -> Any:
        for option in reversed(them):
            function = option(function)
        return function

    return decorate


job_options = options(
    click.option(
        "--threads", type=click.IntRange(0), default=0, help="Worker threads; 0 = all cores."
    ),
    click.option("--dry-run", is_flag=True, help="Plan and print everything, write nothing."),
    click.option("--force", is_flag=True, help="Replace an existing OUT."),
    click.option("--restart", is_flag=True, help="Discard what an interrupted job left of OUT."),
)


def report(output: Output, result: Any) -> None:
    """Show a result's notes and warnings, then the result."""
    output.remarks(result)
    output.result(result)
