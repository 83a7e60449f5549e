"""The respec command: the spec of a container is made anew from the source files it carries.

No tensor and no block moves. A newer version that reads a config better, or a fixed fault in a
family's description, so reaches a container of which the checkpoint is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_tools import __version__
from colibri_tools.carried import carried_source
from colibri_tools.container import Container, reader
from colibri_tools.container.fileops import backup_path
from colibri_tools.container.format import SectionKind
from colibri_tools.container.kv import KvType, decode_kv, encode_kv
from colibri_tools.container.rewrite import (
    NoRoomError,
    locked,
    rebuilt_head,
    restore,
    write_head,
)
from colibri_tools.container.spec import SPEC_KEYS
from colibri_tools.errors import JobError, quote, quote_some
from colibri_tools.mapping import SourceMapping, map_source
from colibri_tools.text.derive import TextParts, text_parts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RespecResult", "SpecChange", "respec"]

VERSION_KEY = "respec.tool_version"
"""The provenance key that names the version of the last respec."""


@dataclass(frozen=True, slots=True)
class SpecChange:
    """One key of the spec; a value is None where the spec does not have the key."""

    key: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class RespecResult:
    """What a respec did, or would do (`dry_run`). `id` is the container's id afterwards.

    `new_tables`: the tokenizer tables are new or other ones.
    """

    path: Path
    dry_run: bool
    changed: bool
    changes: tuple[SpecChange, ...]
    new_tables: bool
    family: str
    executable: bool
    id: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold."""
        return {**asdict(self), "path": str(self.path)}

    def render(self, console: Console) -> None:
        """Print the changes for a person."""
        from rich.markup import escape  # late: only people need rich

        if not self.changed:
            console.print(f"unchanged: {escape(str(self.path))}", soft_wrap=True)
            return
        for change in self.changes:
            line = f"{change.key}: {_shown(change.old)} -> {_shown(change.new)}"
            console.print(escape(line), soft_wrap=True)
        if self.new_tables:
            console.print("tokenizer tables for colibri-run --prompt")
        done = "would change" if self.dry_run else "changed"
        keys = f"{len(self.changes)} key{'' if len(self.changes) == 1 else 's'}"
        console.print(f"{done} {keys} of the spec: {escape(str(self.path))}", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What is now and what should be. `head` is None where nothing changes."""

    changes: tuple[SpecChange, ...]
    new_tables: bool
    spec: Mapping[str, Any]
    id: str
    old_head: bytes
    head: bytes | None
    warnings: tuple[str, ...]


def respec(path: str | os.PathLike[str], *, dry_run: bool = False) -> RespecResult:
    """Rebuild the spec of the container at `path` from its carried source files.

    Only bytes in front of the data change, and none if the spec is as it should be. `dry_run`
    never writes. A respec that was interrupted is undone first.

    Raises FormatError or SourceError for a damaged container or carried file, JobError if the spec
    cannot be rebuilt, the metadata do not fit their reserve, another job rewrites the file, or
    writing fails; then the container is as it was, or its copy beside it says how to go on.
    """
    shown = Path(path)
    real = Path(os.path.realpath(path)) if shown.is_symlink() else shown
    notes: list[str] = []
    if dry_run or not os.path.lexists(backup_path(real)):
        proposal = _propose(real)
        if dry_run or proposal.head is None:
            return _result(shown, dry_run, proposal, proposal.id, notes)
    with locked(real) as fd:
        note = restore(fd, real)
        notes += [note] if note else []
        proposal = _propose(real)  # what was seen before the lock may be old
        if proposal.head is not None:
            write_head(fd, real, proposal.old_head, proposal.head)
    with reader.open(real) as container:
        return _result(shown, dry_run, proposal, container.id, notes)


def _result(
    path: Path, dry_run: bool, proposal: _Proposal, container_id: str, notes: list[str]
) -> RespecResult:
    return RespecResult(
        path=path,
        dry_run=dry_run,
        changed=proposal.head is not None,
        changes=proposal.changes,
        new_tables=proposal.new_tables,
        family=proposal.spec["family"],
        executable=proposal.spec["executable"],
        id=container_id,
        warnings=proposal.warnings,
        notes=tuple(notes),
    )


def _propose(path: Path) -> _Proposal:
    """Read the container and take the census of what it carries."""
    with reader.open(path) as container:
        unknown = sorted(set(container.spec) - set(SPEC_KEYS))
        if unknown:
            raise JobError(
                f"{path}: its spec has keys that this version does not know: "
                f"{quote_some(unknown)}; use the version that made it"
            )
        source = carried_source(container)
        mapping = map_source(source)
        mapping.require_complete(str(path))
        _check_same_tensors(container, mapping)
        text = text_parts(source)
        # Order is what the file is, not what its source says.
        spec = {**mapping.spec, **_text_spec(container, text), "order": container.spec["order"]}
        section = encode_kv(spec, SPEC_KEYS)
        new, _ = decode_kv(section, "spec")
        changes = tuple(_compare(container.spec, new))
        old_head = container.read(0, container.data_offset)
        tables = text.tables
        if tables == _section(container, SectionKind.TOKENIZER):
            tables = None
        replaced = {
            int(SectionKind.SPEC): section,
            int(SectionKind.PROVENANCE): _provenance(container),
        }
        warnings = [*mapping.warnings, *text.warnings]
        head = None
        if tables is not None:
            head = _with_tables(old_head, replaced, tables, str(path), warnings)
        if head is None and changes:
            tables, head = None, rebuilt_head(old_head, replaced, str(path))
        new_tables = head is not None and tables is not None
        return _Proposal(changes, new_tables, new, container.id, old_head, head, tuple(warnings))


def _with_tables(
    old_head: bytes, replaced: Mapping[int, bytes], tables: bytes, path: str, warnings: list[str]
) -> bytes | None:
    """Return the head with tables for the C tokenizer, None if there is no room for them."""
    try:
        return rebuilt_head(old_head, {**replaced, int(SectionKind.TOKENIZER): tables}, path)
    except NoRoomError as error:
        warnings.append(f"no tokenizer tables for colibri-run --prompt: {error.message}")
        return None


def _text_spec(container: Container, text: TextParts) -> dict[str, Any]:
    """A tokenizer.json that is not carried cannot be added: the other files do not move."""
    if text.blobs.keys() <= container.blobs.keys():
        return text.spec
    return {**text.spec, "tokenizer": container.spec["tokenizer"]}


def _section(container: Container, kind: SectionKind) -> bytes | None:
    for found, offset, n_bytes in container.sections:
        if found == kind:
            return container.read(offset, n_bytes)
    return None


def _compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[SpecChange]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield SpecChange(key, old.get(key), new.get(key))


def _provenance(container: Container) -> bytes:
    places = {kind: (offset, n_bytes) for kind, offset, n_bytes in container.sections}
    values, types = decode_kv(container.read(*places[SectionKind.PROVENANCE]), "provenance")
    return encode_kv({**values, VERSION_KEY: __version__}, {**types, VERSION_KEY: KvType.STRING})


def _check_same_tensors(container: Container, mapping: SourceMapping) -> None:
    """The census must want exactly the tensors and experts that are there, with these roles."""
    wanted = {r.name: (r.role, r.group, r.layer, r.shape, r.alias_of) for r in mapping.residents}
    found = {
        t.name: (t.role, t.group, t.layer, t.shape, t.alias_of) for t in container.tensors.values()
    }
    wrong = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    rows = [(row.layer, row.stream, len(row.experts)) for row in mapping.rows]
    if rows != [(row.layer, row.stream, row.n_experts) for row in container.rows]:
        wrong.append("the rows of experts")
    if wrong:
        raise JobError(
            f"{container.path}: this version would store {len(wrong)} tensors otherwise: "
            f"{quote_some(wrong)}; repack the checkpoint"
        )


def _shown(value: Any) -> str:
    if value is None:
        return "(absent)"
    if isinstance(value, list):
        return quote(value).strip("'")
    return str(value).lower() if isinstance(value, bool) else str(value)
