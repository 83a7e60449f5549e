"""A JSON file beside a result: whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from colibri_tools.errors import JobError, UsageError

__all__ = ["check_report", "write_report"]


def check_report(path: Path, *, force: bool) -> None:
    """Raise UsageError for a name that cannot be written."""
    if path.exists() and not (force and path.is_file()):
        raise UsageError(f"{path}: exists already; --force replaces it")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")


def write_report(path: Path, document: dict[str, Any]) -> None:
    """Write strict JSON. Raises JobError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
