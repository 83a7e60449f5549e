"""`P.partial`: what a profiling job has counted so far, so that the same command goes on.

It is a profile with one more entry in its JSON document, which profiles are refused for.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_tools.errors import FormatError, JobError, UsageError, quote
from colibri_tools.profile.file import RoutingProfile, load_partial, write_partial

__all__ = ["Checkpoint", "Kept"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A profile of the first `n_batches` batches of a job, and how the job was cut into them."""

    profile: RoutingProfile
    n_batches: int
    plan: dict[str, int]


class Checkpoint:
    """The file of one job, under a lock. `job` is what the job is: other jobs do not go on with it.

    Raises JobError if another process has it, UsageError if it is of another job.
    """

    def __init__(self, out: Path, job: dict[str, Any], *, restart: bool) -> None:
        self.path = out.with_name(f"{out.name}.partial")
        self._job = json.loads(json.dumps(job))
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            _lock(self._fd, self.path)
        except JobError:
            os.close(self._fd)
            raise
        try:
            if restart:
                os.ftruncate(self._fd, 0)
            self.kept = self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> Kept | None:
        if os.fstat(self._fd).st_size == 0:
            return None
        try:
            profile, state = load_partial(self.path)
            kept = Kept(profile, int(state["n_batches"]), dict(state["plan"]))
            job = dict(state["job"])
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path}: cannot be gone on with ({error}); --restart discards it"
            ) from error
        other = [key for key in self._job if job.get(key) != self._job[key]]
        if other:
            raise UsageError(
                f"{self.path}: was left by a job with another {', '.join(map(quote, other))}; "
                "give the same options and texts, or discard it with --restart"
            )
        return kept

    def save(self, kept: Kept) -> None:
        """Replace what is kept: whole, or not at all."""
        state = {"job": self._job, "n_batches": kept.n_batches, "plan": kept.plan}
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            fd = write_partial(kept.profile, state, fresh)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise JobError(f"{self.path}: cannot be written: {error.strerror}") from error
        _lock(fd, fresh)
        fresh.replace(self.path)
        os.close(self._fd)
        self._fd = fd
        self.kept = kept

    def remove(self) -> None:
        """Remove it: the job is done, or has nothing to keep."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of it and leave it where it is, unless there is nothing in it."""
        if self._fd < 0:
            return
        if os.fstat(self._fd).st_size == 0 and os.fstat(self._fd).st_nlink:
            self.remove()
        os.close(self._fd)
        self._fd = -1


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JobError(f"{path}: another job is writing it; wait for it") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be locked: {error.strerror}") from error
