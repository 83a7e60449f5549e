"""What a verification found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from colibri_tools.container import RuleError
from colibri_tools.errors import ColibriError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MAX_LISTED_ERRORS", "ErrorKind", "VerifyError", "VerifyReport", "structure_error"]

MAX_LISTED_ERRORS = 1000
"""Errors beyond these are only counted."""

ErrorKind = Literal["structure", "census", "padding", "checksum", "nonfinite", "read", "difference"]


@dataclass(frozen=True, slots=True)
class VerifyError:
    """One thing that is wrong. `tensor` is a tensor's name, or of a block the part's.

    `offset` is a position in the file (of a source: in the tensor's file). Unknown places are None.
    """

    kind: ErrorKind
    message: str
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    offset: int | None = None


@dataclass(slots=True)
class VerifyReport:
    """What was checked and what is wrong.

    `checked_blocks` and `checked_tensors` count payloads that were read whole; `bytes` all bytes
    that were read. `against` names the source that it was compared with. `n_errors` counts also the
    errors that are not listed.
    """

    path: str
    kind: Literal["container", "source"] = "container"
    quick: bool = False
    against: str | None = None
    ok: bool = True
    checked_blocks: int = 0
    checked_tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    n_errors: int = 0
    errors: list[VerifyError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, error: VerifyError) -> None:
        """Count an error, and list it if there is room."""
        self.ok = False
        self.n_errors += 1
        if len(self.errors) < MAX_LISTED_ERRORS:
            self.errors.append(error)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time that the body takes to `seconds`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def to_json(self) -> dict[str, Any]:
        """Return everything as a dict for JSON."""
        return asdict(self)

    def render(self, console: Console) -> None:
        """Print the outcome for a person."""
        from rich.markup import escape  # late: the report is also made without a console

        from colibri_tools.output import format_bytes

        for error in self.errors:
            console.print(f"[red]{error.kind}[/red] {escape(error.message)}", soft_wrap=True)
        unlisted = self.n_errors - len(self.errors)
        if unlisted:
            console.print(f"and {unlisted} more errors")
        errors = "1 error" if self.n_errors == 1 else f"{self.n_errors} errors"
        verdict = "[green]ok[/green]" if self.ok else f"[red]{errors}[/red]"
        read = format_bytes(self.bytes)
        blocks = f"{self.checked_blocks} blocks and " if self.kind == "container" else ""
        what = f"{blocks}{self.checked_tensors} tensors read whole"
        if self.quick:
            what = "everything but the payload"
        if self.against is not None and self.ok:
            what += f", equal to {escape(self.against)}"
        if not self.ok and self.bytes == 0:
            console.print(f"{verdict}; the payload was not read")
            return
        console.print(f"{verdict}: {what}, {read} in {self.seconds:.1f} s", soft_wrap=True)


def structure_error(error: ColibriError) -> VerifyError:
    """Return the error of a file that cannot be opened."""
    if not isinstance(error, RuleError):
        return VerifyError("structure", error.message)
    return VerifyError(
        "structure", error.message, error.layer, error.expert, error.tensor, error.offset
    )
