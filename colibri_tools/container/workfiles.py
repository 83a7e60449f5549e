"""The pair `OUT.partial` and `OUT.journal`: begun, taken over from an earlier job, or refused."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri_tools.container.destination import partial_path
from colibri_tools.container.encode import SUM_DTYPE, encode_metadata
from colibri_tools.container.fileops import fsync_directory, unlink_if_same
from colibri_tools.container.journal import Entry, EntryKind, Journal, Key, journal_path
from colibri_tools.container.layout import ContainerPlan
from colibri_tools.errors import JobError, UsageError, quote

__all__ = ["SourceState", "WorkFiles"]

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class SourceState:
    """What tells one state of a source file from another, without reading all of it.

    `stamp` changes with the contents: a local file's time of modification.
    """

    name: str
    n_bytes: int
    stamp: str
    header_sha256: str


class WorkFiles:
    """Both files, open and under the journal's lock.

    `fd` is the partial file, `kept` has what an earlier job journaled (nothing of it checked yet),
    `resumed` tells whether there was one.
    """

    def __init__(
        self,
        out_path: Path,
        plan: ContainerPlan,
        sources: Sequence[SourceState] = (),
        *,
        check: Callable[[], None],
        restart: bool = False,
    ) -> None:
        """Open or create both.

        `check` is called under the lock, before anything else is created: another job may have
        finished since the output was looked at.
        Raises JobError if another job has them or they are somebody else's, UsageError if they
        were begun with another plan or other sources, OSError. Then nothing new is left behind.
        """
        self.partial_path = partial_path(out_path)
        self.fd = -1
        self.kept: dict[Key, Entry] = {}
        self.resumed = False
        self._plan = plan
        self.journal = Journal(journal_path(out_path))
        try:
            check()
            self._open_partial(_facts(plan, sources), restart)
        except BaseException:
            if self.journal.n_bytes == 0:
                self.journal.remove()
            self.close()
            raise

    def close(self) -> None:
        """Let go of both and leave them where they are. May be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        self.journal.close()

    def discard(self) -> None:
        """Remove both. May be called twice."""
        # The journal goes last: a partial file without one would be nobody's.
        try:
            if self.fd >= 0:
                unlink_if_same(self.partial_path, self.fd)
            self.journal.remove()
        finally:
            self.close()

    @property
    def is_worth_keeping(self) -> bool:
        """True if a later job would find something journaled."""
        return bool(self.journal.entries)

    def describe(self) -> str:
        """Say what is kept and how to go on."""
        n_blocks = sum(key[0] == EntryKind.BLOCK for key in self.journal.entries)
        n_tensors = len(self.journal.entries) - n_blocks
        all_tensors = sum(tensor.alias_index is None for tensor in self._plan.tensors)
        return (
            f"{n_blocks} of {self._plan.n_blocks} blocks and {n_tensors} of {all_tensors} tensors "
            f"are kept in {self.partial_path} and {self.journal.path}; repeat the command to go "
            "on, or add --restart to discard them and start over"
        )

    def _open_partial(self, facts: dict[str, Any], restart: bool) -> None:
        status = _lstat(self.partial_path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise JobError(f"{self.partial_path}: expected a file, found something else")
        if status is not None and not restart:
            self._require_same_job(facts)
            # A file that has another name too must not be written: it may be a finished output.
            restart = status.st_nlink > 1
        if status is not None and not restart:
            self.fd = os.open(self.partial_path, _OPEN_FLAGS)
            self.kept = dict(self.journal.entries)
            self.resumed = True
            return
        self.partial_path.unlink(missing_ok=True)
        try:
            self.journal.begin(facts, self._plan.n_blocks + len(self._plan.tensors))
            self.fd = os.open(self.partial_path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            fsync_directory(self.partial_path.parent)
        except BaseException:
            self.discard()
            raise

    def _require_same_job(self, facts: dict[str, Any]) -> None:
        if self.journal.facts is None:
            reason = "is damaged" if self.journal.n_bytes else "is missing"
            raise JobError(
                f"{self.partial_path} cannot be resumed, its journal {reason}; delete it, or add "
                "--restart to discard it and start over"
            )
        differences = list(_differences(self.journal.facts, facts))
        if differences:
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UsageError(
                f"{self.partial_path} was begun with something else: "
                f"{', '.join(differences[:3])}{more}; repeat the command as it was to go on, or "
                "add --restart to discard it and start over"
            )


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------- what a job is


def _facts(plan: ContainerPlan, sources: Sequence[SourceState]) -> dict[str, Any]:
    """Return what must be equal for a job to go on where another one stopped.

    `plan` alone decides every byte of the metadata but the checksums; the other keys are there to
    say what differs.
    """
    facts = {
        "plan": _plan_digest(plan),
        "provenance": dict(plan.provenance),
        "blobs": {name: hashlib.sha256(data).hexdigest() for name, data in plan.blobs.items()},
        "sources": {source.name: asdict(source) for source in sources},
    }
    found: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return found


def _plan_digest(plan: ContainerPlan) -> str:
    digest = hashlib.sha256(f"{plan.file_size} {plan.data_offset}".encode())
    tensor_sums = np.zeros(len(plan.tensors), SUM_DTYPE)
    block_sums = np.zeros(plan.cells.shape, SUM_DTYPE)
    for kind, offset, data in encode_metadata(plan, tensor_sums, block_sums):
        digest.update(f" {int(kind)} {offset} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old == new:
        return
    found = [
        *_source_differences(_map(old, "sources"), _map(new, "sources")),
        *_option_differences(_map(old, "provenance"), _map(new, "provenance")),
    ]
    old_blobs, new_blobs = _map(old, "blobs"), _map(new, "blobs")
    found += [
        f"source file {quote(name)} has changed"
        for name in sorted({*old_blobs, *new_blobs})
        if old_blobs.get(name) != new_blobs.get(name)
    ]
    yield from found or ["the plan of the container has changed"]


def _source_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if before is None or now is None:
            yield f"source file {quote(name)} is {'new' if before is None else 'no longer there'}"
        elif before["n_bytes"] != now["n_bytes"]:
            yield f"source file {quote(name)} had {before['n_bytes']} bytes, has {now['n_bytes']}"
        else:
            yield f"source file {quote(name)} was written to or replaced"


def _option_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before == now or name in ("source.files", "source.bytes", "source.header_sha256"):
            continue
        label = name.removeprefix("recipe.").replace("_", " ")
        if name == "source.sha256":
            yield f"whole source files were {'not ' if before is None else ''}hashed"
        else:
            yield f"{label} was {_shown(before)}, now {_shown(now)}"


def _map(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = facts.get(key)
    return found if isinstance(found, dict) else {}


def _shown(value: Any) -> str:
    return "absent" if value is None else quote(value, 40) if isinstance(value, str) else str(value)
