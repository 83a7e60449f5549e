"""From what the user typed to an opened source."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.sources.catalog import Source, SourceParts
from colibri_tools.sources.detect import FileKind, kind_of, wrong_kind
from colibri_tools.sources.files import check_name
from colibri_tools.sources.gguf import choose_gguf, open_gguf
from colibri_tools.sources.hf import INDEX_SUFFIX, open_hf_folder, open_single_file
from colibri_tools.sources.local import LocalFolder, is_directory, user_file

__all__ = ["open_source", "sniff"]

_REVISION_BYTES = 256
_INDEX_NAME = re.compile(r".+\.index\.json")


def open_source(path: str | os.PathLike[str], follow_links: bool = False) -> Source:
    """Open a checkpoint: every header is read and checked, no tensor data is.

    `path` is a Hugging Face directory, a .safetensors file, an index file, a Hub cache snapshot or
    repository (`models--org--name`), a .gguf file (any member of a split set), or a directory with
    one. `follow_links` admits files that are links to outside the checkpoint's folder.

    Raises SourceError (incomplete, ambiguous, unsafe, unsupported) or FormatError (broken file).
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise SourceError(f"no such file or directory: {quote(text)}")
    if is_directory(text):
        return Source(_open_directory(text, follow_links))
    if not os.path.lexists(text):
        raise SourceError(f"{text}: no such file or directory")
    return Source(_open_file(text, follow_links))


def sniff(path: str | os.PathLike[str]) -> FileKind:
    """Return what `path` is, by content. Raises SourceError if it cannot be read."""
    text = os.fspath(path)
    if is_directory(text):
        return "directory"
    folder, name = user_file(text)
    file = LocalFolder(folder).open(name)
    try:
        return kind_of(file)
    finally:
        file.close()


def _open_file(path: str, follow_links: bool) -> SourceParts:
    folder_path, name = user_file(path)
    folder = LocalFolder(folder_path, follow_links)
    handle = folder.open(name)
    try:
        kind = kind_of(handle)
    finally:
        handle.close()
    if kind == "gguf":
        return open_gguf(folder, name)
    if kind == "json" and _INDEX_NAME.fullmatch(name):
        return open_hf_folder(folder, name)
    if kind == "colibri":
        raise SourceError(f"{path}: {wrong_kind(kind)}")
    return open_single_file(folder, name)  # says what is wrong with anything else


def _open_directory(path: str, follow_links: bool) -> SourceParts:
    path = _snapshot_of(path)
    folder = LocalFolder(path, follow_links)
    names = folder.names()
    _refuse_cache_root(names, path)
    indexed = [name for name in names if name.endswith(INDEX_SUFFIX)]
    tensors = indexed or [name for name in names if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if tensors and ggufs:
        raise SourceError(
            f"{path}: both safetensors ({quote_some(tensors, 1)}) and GGUF "
            f"({quote_some(ggufs, 1)}) are present; name the file to use (for the shards, "
            "their index file)"
        )
    if ggufs:
        return open_gguf(folder, choose_gguf(names, path))
    return open_hf_folder(folder)


# ---------------------------------------------------------------- Hub cache


def _snapshot_of(path: str) -> str:
    """Return the snapshot to use if `path` is a Hub cache repository, else `path` itself."""
    snapshots = f"{path}/snapshots"
    is_repo = is_directory(snapshots) and any(
        is_directory(f"{path}/{part}") for part in ("blobs", "refs")
    )
    if not is_repo:
        return path
    revisions = [n for n in LocalFolder(snapshots).names() if is_directory(f"{snapshots}/{n}")]
    revision = _main_revision(path)
    if revision in revisions:
        return f"{snapshots}/{revision}"
    if len(revisions) == 1 and revision is None:
        return f"{snapshots}/{revisions[0]}"
    raise SourceError(_no_revision(path, revision, revisions))


def _no_revision(path: str, revision: str | None, revisions: Sequence[str]) -> str:
    held = f"snapshots present: {quote_some(revisions, 8) or 'none'}"
    if revision is not None:
        return (
            f"{path}: refs/main names {quote(revision)}, which is not present; {held}; download "
            "the model again, or name the snapshot's directory"
        )
    return f"{path}: no refs/main and {len(revisions)} snapshots; {held}; name one of them"


def _main_revision(path: str) -> str | None:
    refs = LocalFolder(f"{path}/refs")
    if not refs.holds("main"):
        return None
    handle = refs.open("main")
    try:
        data = bytearray(min(handle.size, _REVISION_BYTES))
        handle.read_into(0, memoryview(data), "revision")
    finally:
        handle.close()
    revision = check_name(data.decode("utf-8", "replace").strip(), handle.path)
    if "/" in revision:
        raise SourceError(f"{handle.path}: expected a revision, found {quote(revision)}")
    return revision


def _refuse_cache_root(names: Sequence[str], path: str) -> None:
    models = [name for name in names if name.startswith("models--")]
    if models and not any(name.endswith((".safetensors", ".gguf")) for name in names):
        raise SourceError(
            f"{path}: a Hub cache with {len(models)} models: {quote_some(models, 8)}; name one"
        )
