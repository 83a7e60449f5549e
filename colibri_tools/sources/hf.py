"""A Hugging Face checkpoint: safetensors shards, their index, config and tokenizer files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.errors import ColibriError, FormatError, SourceError, quote, quote_some
from colibri_tools.sources.catalog import SourceFile, SourceParts, SourceTensor
from colibri_tools.sources.detect import kind_of, wrong_kind
from colibri_tools.sources.files import Folder, RangeFile, check_name
from colibri_tools.sources.safetensors_header import SafetensorsHeader, read_header
from colibri_tools.sources.strict_json import parse_json_object

__all__ = [
    "CARRIED_NAMES",
    "INDEX_SUFFIX",
    "MAX_BLOB_BYTES",
    "MAX_CONFIG_BYTES",
    "MAX_INDEX_BYTES",
    "open_hf_folder",
    "open_single_file",
]

INDEX_SUFFIX = ".safetensors.index.json"
MAIN_INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_BLOB_BYTES = 80 << 20  # of all carried files together: they are held, and go into the metadata
MAX_SHARDS = 10_000

CARRIED_NAMES: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "hy.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
)
"""Small files carried verbatim: what a runner or a dequantizer needs besides the tensors."""

_MAX_SEARCHED = 100
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "hy.tiktoken"),
    *("tekken.json", "vocab.json"),
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE_KEY = b'"chat_template"'
_PICKLED = re.compile(r".+\.(bin|pt|pth|ckpt|pkl)")
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def open_hf_folder(folder: Folder, index: str | None = None) -> SourceParts:
    """Read the catalog of a checkpoint folder; `index` names the index file to use.

    The index decides the set of files; without one there must be exactly one .safetensors file.
    Raises SourceError for an incomplete or ambiguous checkpoint, FormatError for a broken file.
    The caller closes `handles` of the result.
    """
    names = folder.names()
    index = index or _choose_index(names, folder.path)
    parts = SourceParts("safetensors", folder.path)
    try:
        if index is None:
            _read_single(parts, folder, _only_file(names, folder))
        else:
            _read_indexed(parts, folder, index, names)
        _read_side_files(parts, folder)
        _warn_unfinished(parts, folder)
    except BaseException:
        _close(parts)
        raise
    return parts


def open_single_file(folder: Folder, name: str) -> SourceParts:
    """Read one .safetensors file and the config beside it. Raises as `open_hf_folder`.

    If the file is one shard of an indexed checkpoint, only that shard is listed, with a warning.
    """
    parts = SourceParts("safetensors", f"{folder.path}/{name}")
    try:
        _read_single(parts, folder, name)
        _warn_if_shard(parts, folder, name)
        _read_side_files(parts, folder)
        _warn_unfinished(parts, folder)
    except BaseException:
        _close(parts)
        raise
    return parts


def _close(parts: SourceParts) -> None:
    for handle in parts.handles:
        handle.close()


# ---------------------------------------------------------------- which files


def _choose_index(names: Sequence[str], where: str) -> str | None:
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if MAIN_INDEX in indexes:
        return MAIN_INDEX
    if len(indexes) > 1:
        raise SourceError(
            f"{where}: {len(indexes)} index files and no {MAIN_INDEX}: {quote_some(indexes)}; "
            "name the index file to use"
        )
    return indexes[0] if indexes else None


def _only_file(names: Sequence[str], folder: Folder) -> str:
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return str(found[0])
    if found:
        raise SourceError(
            f"{folder.path}: {len(found)} .safetensors files and no index: {quote_some(found)}; "
            f"fetch {MAIN_INDEX}, or name one file{_unfinished(folder)}"
        )
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    if pickled:
        raise SourceError(
            f"{folder.path}: only PyTorch files ({quote_some(pickled)}), which are never opened "
            "because they can run code; convert to safetensors first"
        )
    raise SourceError(
        f"{folder.path}: no .safetensors or .gguf file (found {quote_some(names) or 'nothing'})"
        f"{_unfinished(folder)}"
    )


def _unfinished(folder: Folder) -> str:
    found = folder.unfinished()
    return f"; unfinished downloads are present: {quote_some(found)}" if found else ""


# ---------------------------------------------------------------- one file


def _read_single(parts: SourceParts, folder: Folder, name: str) -> None:
    header = _open_shard(parts, folder, name)
    _refuse_unfinished_twin(folder, [name])
    for entry in header.tensors:
        parts.tensors[entry.name] = SourceTensor(
            entry.name, entry.dtype, entry.shape, 0, entry.offset, entry.n_bytes
        )


def _open_shard(parts: SourceParts, folder: Folder, name: str) -> SafetensorsHeader:
    handle = folder.open(name)
    parts.handles.append(handle)
    header = read_header(handle)
    parts.files.append(
        SourceFile(
            name, handle.path, handle.size, header.sha256, header.data_offset, handle.blob_sha256
        )
    )
    parts.metadata.update(header.metadata)
    return header


def _warn_if_shard(parts: SourceParts, folder: Folder, name: str) -> None:
    match = _SHARD_NAME.fullmatch(name)
    if match and int(match[3]) > 1:
        parts.warnings.append(
            f"{quote(name)} is one shard of {int(match[3])}; name the directory to get all of them"
        )


# ---------------------------------------------------------------- an index and its shards


@dataclass(slots=True)
class _Index:
    """`shards` maps each file name to the tensors it must hold, files in sorted order."""

    name: str
    where: str
    shards: dict[str, list[str]] = field(default_factory=dict)


def _read_indexed(parts: SourceParts, folder: Folder, name: str, names: Sequence[str]) -> None:
    index = _read_index(parts, folder, name)
    missing = [shard for shard in index.shards if not folder.holds(shard)]
    if missing:
        raise SourceError(_missing_shards(index, missing, folder))
    _refuse_unfinished_twin(folder, list(index.shards))
    headers = {shard: _open_shard(parts, folder, shard) for shard in index.shards}
    _check_index(index, headers, parts, folder)
    _catalog(index, headers, parts)
    _note_others(parts, folder, index, names)


def _read_index(parts: SourceParts, folder: Folder, name: str) -> _Index:
    handle = folder.open(name)
    try:
        where = handle.path
        _refuse_stand_in(handle)
        data = _read_small(handle, MAX_INDEX_BYTES)
        _remember(parts, handle)
    finally:
        handle.close()
    weight_map = parse_json_object(data, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{where}: expected a non-empty object 'weight_map'; fetch it again")
    shards: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise FormatError(f"{where}: tensor {quote(tensor)}: expected a file name")
        shards.setdefault(shard, []).append(tensor)
        if len(shards) > MAX_SHARDS:
            raise FormatError(f"{where}: more than {MAX_SHARDS} shards")
    for shard in shards:
        check_name(shard, where)
    return _Index(name, where, {shard: shards[shard] for shard in sorted(shards)})


def _missing_shards(index: _Index, missing: list[str], folder: Folder) -> str:
    n_all = len(index.shards)
    held = "; ".join(
        f"{quote(shard)} (holds {len(index.shards[shard])} tensors: "
        f"{quote_some(index.shards[shard], 2)})"
        for shard in missing[:4]
    )
    more = f" and {len(missing) - 4} more files" if len(missing) > 4 else ""
    return (
        f"{folder.path}: {len(missing)} of {n_all} shards missing (expected {n_all}, found "
        f"{n_all - len(missing)}): {held}{more}; download again into the same place, finished "
        f"files are kept{_unfinished(folder)}"
    )


def _refuse_unfinished_twin(folder: Folder, shards: list[str]) -> None:
    # aria2 reserves the whole file first: size and even the header look right while it loads.
    unfinished = set(folder.unfinished())
    for shard in shards:
        if f"{shard}.aria2" in unfinished:
            raise SourceError(
                f"{folder.path}: {quote(shard)} is still being downloaded ('{shard}.aria2' is "
                "present); finish the download, or delete that file if it is stale"
            )


def _check_index(
    index: _Index, headers: dict[str, SafetensorsHeader], parts: SourceParts, folder: Folder
) -> None:
    holders: dict[str, list[str]] = {}
    for shard, header in headers.items():
        for entry in header.tensors:
            holders.setdefault(entry.name, []).append(shard)
    indexed: dict[str, str] = {}
    for shard, tensors in index.shards.items():
        for tensor in tensors:
            indexed[tensor] = shard
            if shard not in holders.get(tensor, []):
                found_in = holders.get(tensor) or _search_others(tensor, index, folder)
                raise SourceError(_misplaced(index, tensor, shard, found_in))
    _warn_unindexed(index, holders, indexed, parts)


def _search_others(tensor: str, index: _Index, folder: Folder) -> list[str]:
    """Return the files outside the index that hold `tensor`; for the error message only."""
    others = [n for n in folder.names() if n.endswith(".safetensors") and n not in index.shards]
    found: list[str] = []
    for name in others[:_MAX_SEARCHED]:
        with contextlib.suppress(ColibriError):
            handle = folder.open(name)
            try:
                if any(entry.name == tensor for entry in read_header(handle).tensors):
                    found.append(name)
            finally:
                handle.close()
    return found


def _misplaced(index: _Index, tensor: str, shard: str, holders: list[str]) -> str:
    found = f"it is in {quote_some(holders)}" if holders else "no shard has it"
    return (
        f"{index.where}: tensor {quote(tensor)} should be in {quote(shard)}, but {found}; index "
        "and shards are not of one save, download all of them again"
    )


def _warn_unindexed(
    index: _Index, holders: dict[str, list[str]], indexed: dict[str, str], parts: SourceParts
) -> None:
    strangers = [tensor for tensor in holders if tensor not in indexed]
    if strangers:
        parts.warnings.append(
            f"{len(strangers)} tensors are in the shards but not in {quote(index.name)} and are "
            f"ignored: {quote_some(strangers)}"
        )
    doubles = [tensor for tensor, files in holders.items() if len(files) > 1 and tensor in indexed]
    if doubles:
        parts.warnings.append(
            f"{len(doubles)} tensors are in several shards; the one that {quote(index.name)} names "
            f"is used: {quote_some(doubles)}"
        )


def _catalog(index: _Index, headers: dict[str, SafetensorsHeader], parts: SourceParts) -> None:
    for file, (shard, header) in enumerate(headers.items()):
        wanted = set(index.shards[shard])
        for entry in header.tensors:
            if entry.name in wanted:
                parts.tensors[entry.name] = SourceTensor(
                    entry.name, entry.dtype, entry.shape, file, entry.offset, entry.n_bytes
                )


def _note_others(parts: SourceParts, folder: Folder, index: _Index, names: Sequence[str]) -> None:
    others = [n for n in names if n.endswith(".safetensors") and n not in index.shards]
    if others:
        parts.notes.append(
            f"files not named by {quote(index.name)} are ignored: {quote_some(others, 8)}"
        )
    if "model.safetensors" in others:
        parts.warnings.append(
            f"both 'model.safetensors' and {quote(index.name)} are present; the index decides"
        )
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX) and n != index.name]
    if indexes:
        parts.notes.append(f"other index files are ignored: {quote_some(indexes, 8)}")


def _warn_unfinished(parts: SourceParts, folder: Folder) -> None:
    unfinished = folder.unfinished()
    if unfinished:
        parts.warnings.append(f"unfinished downloads are present: {quote_some(unfinished)}")


# ---------------------------------------------------------------- config, tokenizer, template


def _read_side_files(parts: SourceParts, folder: Folder) -> None:
    room = MAX_BLOB_BYTES
    for name in CARRIED_NAMES:
        if folder.holds(name):
            handle = folder.open(name)
            try:
                _refuse_stand_in(handle)
                parts.blobs[name] = _read_small(handle, room)
                room -= handle.size
                _remember(parts, handle)
            finally:
                handle.close()
    config = parts.blobs.get("config.json")
    if config is not None:
        parts.config = _parse_config(config, f"{folder.path}/config.json")
    parts.missing_blobs.extend(_missing_blobs(parts.blobs))


def _refuse_stand_in(handle: RangeFile) -> None:
    # `git clone` without LFS leaves pointers for large tokenizers too: carried, they are noise.
    kind = kind_of(handle)
    if kind in ("lfs-pointer", "html", "zeros"):
        raise SourceError(f"{handle.path}: {wrong_kind(kind)}")


def _read_small(handle: RangeFile, limit: int) -> bytes:
    if handle.size > limit:
        raise FormatError(f"{handle.path}: {handle.size} bytes, expected at most {limit}")
    out = bytearray(handle.size)
    handle.read_into(0, memoryview(out), "file")
    return bytes(out)


def _remember(parts: SourceParts, handle: RangeFile) -> None:
    if handle.identity is not None:
        parts.blob_identities.add(handle.identity)


def _parse_config(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise FormatError(f"{where}: {len(data)} bytes, expected at most {MAX_CONFIG_BYTES}")
    return parse_json_object(data, where, allow_constants=True)


def _missing_blobs(blobs: dict[str, bytes]) -> list[str]:
    """Return the names that a complete checkpoint would have."""
    missing = [n for n in ("config.json", "generation_config.json") if n not in blobs]
    if not any(name in blobs for name in _TOKENIZERS):
        missing.append("tokenizer.json")
    if "tokenizer_config.json" not in blobs:
        missing.append("tokenizer_config.json")
    in_config = _TEMPLATE_KEY in blobs.get("tokenizer_config.json", b"")
    if not in_config and not any(name in blobs for name in _TEMPLATES):
        missing.append("chat_template.jinja")
    return missing
