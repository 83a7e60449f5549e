"""`colibri inspect` of a routing profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colibri_tools.errors import JobError, UsageError
from colibri_tools.profile.file import is_profile, load_profile
from colibri_tools.profile.report import ProfileReport

__all__ = ["inspect_profile", "wants_profile"]


def wants_profile(path: Path, *, html: Path | None, plot: Path | None) -> bool:
    """Return whether `path` is a profile. Raises UsageError if it is another file."""
    if path.is_file() and is_profile(path):
        return True
    if path.exists() and (html is not None or plot is not None):
        raise UsageError(f"{path}: is no routing profile; --html and --plot are about profiles")
    return False


def inspect_profile(
    path: Path, *, html: Path | None, plot: Path | None, others: Mapping[str, Any]
) -> ProfileReport:
    """Return the report of a profile; write it as a page, as a picture, or both.

    `others` are options about containers and checkpoints, which must not be set. Raises
    UsageError, FormatError and JobError.
    """
    for name, value in others.items():
        if value not in (None, False):
            option = name.removeprefix("show_")
            raise UsageError(f"--{option} does not apply to a routing profile")
    profile = load_profile(path)
    for out in (html, plot):
        if out is not None and out.exists() and out.samefile(path):
            raise UsageError(f"{out}: is the profile itself")
    if html is not None:
        from colibri_tools.profile.html import html_page

        try:
            html.write_text(html_page(profile), encoding="utf-8")
        except OSError as error:
            raise JobError(f"{html}: cannot be written: {error.strerror}") from error
    if plot is not None:
        from colibri_tools.profile.plot import plot_profile

        try:
            plot_profile(profile, plot)
        except OSError as error:
            raise JobError(f"{plot}: cannot be written: {error.strerror}") from error
    return ProfileReport(profile)
