"""A GGUF checkpoint: one file, or a split set found from any of its members."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from colibri_tools.errors import FormatError, SourceError, quote, quote_some
from colibri_tools.sources.catalog import SourceFile, SourceParts, SourceTensor
from colibri_tools.sources.files import Folder, RangeFile
from colibri_tools.sources.gguf_header import GgufHeader, read_gguf_header

__all__ = ["METADATA_BLOB", "choose_gguf", "open_gguf"]

METADATA_BLOB = "gguf-metadata.bin"
"""Name of the carried blob: the first file's bytes up to the end of its key-value section."""

MAX_MEMBERS = 10_000

_MEMBER_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)?", re.IGNORECASE | re.DOTALL)
_INTEGERS = frozenset(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"))


@dataclass(frozen=True, slots=True)
class _Member:
    """Where a file's name puts it: `number` is 1-based."""

    prefix: str
    number: int
    count: int
    suffix: str

    def name_of(self, number: int) -> str:
        return f"{self.prefix}-{number:05d}-of-{self.count:05d}{self.suffix}"


def choose_gguf(names: Sequence[str], where: str) -> str:
    """Return the one GGUF file, or a member of the one split set, among a folder's names.

    Raises SourceError if there is none or more than one.
    """
    found = [name for name in names if name.lower().endswith(".gguf")]
    groups: dict[tuple[object, ...], str] = {}
    for name in found:
        member = _member(name)
        key = (member.prefix, member.count) if member else (name,)
        groups.setdefault(key, name)
    if len(groups) != 1:
        raise SourceError(
            f"{where}: expected one GGUF file or one split set, found {len(groups)}: "
            f"{quote_some(groups.values())}; name the file to use"
        )
    return next(iter(groups.values()))


def open_gguf(folder: Folder, name: str) -> SourceParts:
    """Read the catalog of a GGUF file, or of the split set that it belongs to.

    Raises SourceError for an incomplete or inconsistent set, FormatError for a broken file.
    The caller closes `handles` of the result.
    """
    parts = SourceParts("gguf", f"{folder.path}/{name}")
    try:
        handle, header = _open(parts, folder, name)
        count = _split_value(header, "split.count", handle.path) or 1
        if count > 1:
            _read_set(parts, folder, name, count)
        else:
            _refuse_lone_member(folder, name)
            _add(parts, handle, header)
        _warn_unfinished(parts, folder)
    except BaseException:
        for handle in parts.handles:
            handle.close()
        raise
    return parts


def _member(name: str) -> _Member | None:
    match = _MEMBER_NAME.fullmatch(name)
    if match is None:
        return None
    return _Member(match[1], int(match[2]), int(match[3]), match[4] or "")


def _open(
    parts: SourceParts, folder: Folder, name: str, split_alignment: int | None = None
) -> tuple[RangeFile, GgufHeader]:
    handle = folder.open(name)
    parts.handles.append(handle)
    return handle, read_gguf_header(handle, split_alignment)


def _add(parts: SourceParts, handle: RangeFile, header: GgufHeader) -> None:
    """Append a file and its tensors to the catalog; the first one gives the metadata."""
    file = len(parts.files)
    if file == 0:
        parts.metadata = header.metadata
        parts.blobs[METADATA_BLOB] = header.prefix
    parts.files.append(
        SourceFile(
            handle.name,
            handle.path,
            handle.size,
            header.sha256,
            min(header.data_offset, handle.size),
            handle.blob_sha256,
        )
    )
    parts.warnings.extend(header.warnings)
    for tensor in header.tensors:
        earlier = parts.tensors.get(tensor.name)
        if earlier is not None:
            raise SourceError(
                f"{handle.path}: tensor {quote(tensor.name)} is also in "
                f"{quote(parts.files[earlier.file].name)}; the split set is damaged"
            )
        parts.tensors[tensor.name] = SourceTensor(
            tensor.name, tensor.dtype, tensor.shape, file, tensor.offset, tensor.n_bytes
        )


def _warn_unfinished(parts: SourceParts, folder: Folder) -> None:
    unfinished = set(folder.unfinished())
    for file in parts.files:
        if f"{file.name}.aria2" in unfinished:
            raise SourceError(
                f"{file.path}: still being downloaded ({quote(file.name + '.aria2')} is present); "
                "finish the download, or delete that file if it is stale"
            )
    if unfinished:
        parts.warnings.append(f"unfinished downloads are present: {quote_some(sorted(unfinished))}")


# ---------------------------------------------------------------- split sets


def _refuse_lone_member(folder: Folder, name: str) -> None:
    # A merged file may keep a member's name, so only brothers make a lone file suspicious.
    member = _member(name)
    if member is None or member.count < 2:
        return
    brothers = [
        other
        for number in range(1, min(member.count, MAX_MEMBERS) + 1)
        if number != member.number and folder.holds(other := member.name_of(number))
    ]
    if brothers:
        raise SourceError(
            f"{folder.path}/{name}: named as part {member.number} of {member.count}, but it has no "
            f"split.count, while {quote_some(brothers)} is present; fetch the split set again"
        )


def _read_set(parts: SourceParts, folder: Folder, name: str, count: int) -> None:
    """Read all members in order. The one that was opened to look at is opened again."""
    parts.handles.pop().close()
    names = _set_names(folder, name, count)
    split_alignment: int | None = None
    for number, member_name in enumerate(names):
        handle, header = _open(parts, folder, member_name, split_alignment)
        _check_member(header, handle.path, number, count)
        if number == 0:
            split_alignment = header.alignment
            n_tensors = _split_value(header, "split.tensors.count", handle.path)
        elif _split_value(header, "split.tensors.count", handle.path) != n_tensors:
            raise SourceError(
                f"{handle.path}: split.tensors.count: expected {n_tensors} as in the first file; "
                "the files are not of one split set"
            )
        _add(parts, handle, header)
    if n_tensors is not None and n_tensors != len(parts.tensors):
        raise SourceError(
            f"{folder.path}: split set of {quote(names[0])}: expected {n_tensors} tensors, found "
            f"{len(parts.tensors)}; fetch the split set again"
        )


def _set_names(folder: Folder, name: str, count: int) -> list[str]:
    """Return the names of all members, which are all present."""
    where = f"{folder.path}/{name}"
    if count > MAX_MEMBERS:
        raise FormatError(f"{where}: split.count {count}, expected at most {MAX_MEMBERS}")
    member = _member(name)
    if member is None:
        raise SourceError(
            f"{where}: one of {count} files of a split set, but its name does not tell the others; "
            f"expected a name like 'model-00001-of-{count:05d}.gguf'"
        )
    if member.count != count or not 1 <= member.number <= count:
        raise SourceError(
            f"{where}: named as part {member.number} of {member.count}, but split.count is {count}"
        )
    names = [member.name_of(number) for number in range(1, count + 1)]
    missing = [other for other in names if not folder.holds(other)]
    if missing:
        unfinished = folder.unfinished()
        extra = (
            f"; unfinished downloads are present: {quote_some(unfinished)}" if unfinished else ""
        )
        raise SourceError(
            f"{where}: {len(missing)} of {count} files of the split set missing (expected {count}, "
            f"found {count - len(missing)}): {quote_some(missing, 8)}; fetch them into the same "
            f"folder{extra}"
        )
    return names


def _check_member(header: GgufHeader, where: str, number: int, count: int) -> None:
    found_count = _split_value(header, "split.count", where)
    found_number = _split_value(header, "split.no", where)
    if found_count != count:
        raise SourceError(
            f"{where}: split.count: expected {count}, found {found_count}; the files are not of "
            "one split set"
        )
    if found_number != number:
        raise SourceError(
            f"{where}: split.no: expected {number} (counted from 0) as its name says, found "
            f"{found_number}; rename or fetch the files again"
        )


def _split_value(header: GgufHeader, key: str, where: str) -> int | None:
    if key not in header.metadata:
        return None
    found = header.metadata[key]
    if header.types[key] not in _INTEGERS or not 0 <= found < 1 << 31:
        raise FormatError(f"{where}: {key}: expected a whole number, found {quote(found)}")
    return int(found)
