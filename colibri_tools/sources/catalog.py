"""What every source offers: a list of files, a list of tensors, and byte ranges of them."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from colibri_tools.dtypes import DType
from colibri_tools.errors import SourceError, UsageError, quote
from colibri_tools.sources.files import RangeFile

if TYPE_CHECKING:
    import numpy as np

    from colibri_tools.sources.views import TensorView

__all__ = ["Source", "SourceFile", "SourceKind", "SourceParts", "SourceTensor"]

SourceKind = Literal["safetensors", "gguf", "container"]

_HASH_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source.

    `shape` is row-major, numpy order (a GGUF `ne` reversed). `offset` is absolute in
    `source.files[file]`. A tensor whose `dtype.kind` is "unknown" can be listed and its bytes
    read, but its `n_bytes` is only the distance to the next tensor. With a `view` the bytes are
    computed as they are read, and file and offset are those of the view's first base.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: int
    offset: int
    n_bytes: int
    view: TensorView | None = None

    @property
    def n_weights(self) -> int:
        """The product of the dimensions (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def bases(self) -> tuple[SourceTensor, ...]:
        """The stored tensors that are read for it: itself, or those of its view."""
        return (self,) if self.view is None else self.view.bases

    def place(self, start: int) -> tuple[int, int]:
        """Return file and offset near which byte `start` comes from, to order reads by."""
        base = self.bases[0]
        return base.file, base.offset + start * base.n_bytes // max(1, self.n_bytes)

    def locate(self, index: int) -> tuple[int, ...]:
        """Return the indices of weight `index` (row-major) in the tensor as it is stored."""
        if self.view is not None:
            return self.view.locate(index)
        position = []
        for dim in reversed(self.shape):
            index, rest = divmod(index, dim)
            position.append(rest)
        return tuple(reversed(position))

    def seen_as(self, view: TensorView, dtype: DType, shape: tuple[int, ...]) -> SourceTensor:
        """Return the tensor of the same name whose bytes are those of `view`."""
        n_bytes = math.prod(shape[:-1]) * dtype.row_bytes(shape[-1])
        return replace(self, view=view, dtype=dtype, shape=shape, n_bytes=n_bytes)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source.

    `name` is the base name, or a relative posix path; only it may enter a container. `path` is for
    messages. `header_sha256` covers the header bytes: for safetensors the 8-byte length and
    the JSON, for GGUF everything before the tensor data. `blob_sha256` is the SHA-256 that a
    Hub cache claims for the whole file (its blob's name), if it does.
    """

    name: str
    path: str
    size: int
    header_sha256: str
    data_offset: int
    blob_sha256: str | None = None


@dataclass(slots=True)
class SourceParts:
    """What a reader of one format found; `Source` is made from it."""

    kind: SourceKind
    path: str
    handles: list[RangeFile] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    tensors: dict[str, SourceTensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    blob_identities: set[tuple[int, int]] = field(default_factory=set)
    missing_blobs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Source:
    """An opened checkpoint: catalog in memory, bytes on demand.

    `tensors` is in file order (file by file, ascending offset), whatever order the header keys
    had. `config` is the parsed config.json of a Hugging Face checkpoint ({} if there is none or
    for GGUF); `metadata` is the GGUF key-value metadata, or for safetensors the merged
    `__metadata__` strings. `blobs` are the verbatim small files to carry into a container
    (`gguf-metadata.bin` for GGUF). `notes` are harmless facts (files that were ignored),
    `warnings` are facts a user must see. Reading is thread-safe; nothing is mapped.
    """

    def __init__(self, parts: SourceParts) -> None:
        self.kind: SourceKind = parts.kind
        self.path: str = parts.path
        self.files: Sequence[SourceFile] = tuple(parts.files)
        self.tensors: Mapping[str, SourceTensor] = parts.tensors
        self.config: dict[str, Any] = parts.config
        self.metadata: dict[str, Any] = parts.metadata
        self.blobs: dict[str, bytes] = parts.blobs
        self.missing_blobs: list[str] = parts.missing_blobs
        self.notes: list[str] = parts.notes
        self.warnings: list[str] = parts.warnings
        self._handles = parts.handles
        self._blob_identities = parts.blob_identities

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Source {self.kind} {self.path!r}: {len(self.tensors)} tensors>"

    def close(self) -> None:
        """Close all files. May be called twice; reading afterwards raises SourceError."""
        for handle in self._handles:
            handle.close()

    def with_tensors(self, tensors: Mapping[str, SourceTensor]) -> Source:
        """Return the same source, files shared, with another catalog."""
        other = copy.copy(self)
        other.tensors = tensors
        return other

    def tensor(self, name: str) -> SourceTensor:
        """Return the tensor with this name. Raises SourceError if there is none."""
        found = self.tensors.get(name)
        if found is None:
            raise SourceError(f"{self.path}: there is no tensor {quote(name)}")
        return found

    @property
    def n_bytes(self) -> int:
        """The sum of the tensors' sizes."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    def read(self, tensor: SourceTensor | str, start: int = 0, n_bytes: int | None = None) -> bytes:
        """Return `n_bytes` bytes of a tensor from byte `start` on (by default to its end).

        Raises UsageError for a range outside the tensor, SourceError if the file is shorter than
        its header says or cannot be read.
        """
        tensor = self.tensor(tensor) if isinstance(tensor, str) else tensor
        if n_bytes is None:
            n_bytes = tensor.n_bytes - start
        _check_range(tensor, start, n_bytes)
        out = bytearray(n_bytes)
        self.read_into(tensor, start, memoryview(out))
        return bytes(out)

    def read_into(
        self, tensor: SourceTensor | str, start: int, out: memoryview | bytearray
    ) -> None:
        """Fill `out` (any contiguous writable buffer) with a tensor's bytes from `start` on.

        Raises as `read`. Safe to call from several threads.
        """
        tensor = self.tensor(tensor) if isinstance(tensor, str) else tensor
        view = memoryview(out).cast("B")
        _check_range(tensor, start, view.nbytes)
        if tensor.view is not None:
            tensor.view.read_into(self, start, view)
            return
        self._handles[tensor.file].read_into(
            tensor.offset + start, view, f"tensor {quote(tensor.name)}"
        )

    def read_f32(
        self, tensor: SourceTensor, first: int = 0, n_weights: int | None = None
    ) -> np.ndarray[Any, Any]:
        """Return weights from number `first` on (row-major) as float32 [n_weights].

        This is how anything computes with a source's numbers, whatever they are stored as. `first`
        and `n_weights` are whole quant blocks. Raises as `read`, and SourceError for a type that
        has no decoder.
        """
        from colibri_tools import native  # late: a source can be listed without the C code

        dtype = tensor.dtype
        dtype.require_known(tensor.name)
        n = tensor.n_weights - first if n_weights is None else n_weights
        raw = self.read(tensor, dtype.n_bytes(first), dtype.n_bytes(n))
        values: np.ndarray[Any, Any] = native.dequantize(dtype.id, raw, n)
        return values

    def read_file_range(self, file: int, offset: int, n_bytes: int) -> bytes:
        """Return raw bytes of `files[file]`, e.g. to check padding. Raises as `read`."""
        source_file = self.files[file]
        if offset < 0 or n_bytes < 0 or offset + n_bytes > source_file.size:
            raise UsageError(
                f"{source_file.path}: bytes {offset}..{offset + n_bytes} are outside the file "
                f"of {source_file.size} bytes"
            )
        out = bytearray(n_bytes)
        self._handles[file].read_into(offset, memoryview(out), "file")
        return bytes(out)

    def hash_files(
        self, progress: Callable[[int], None] | None = None
    ) -> Iterator[tuple[SourceFile, str]]:
        """Yield every file with the SHA-256 (hex) of all its bytes.

        `progress` is called with the number of bytes since its last call.
        """
        for source_file, handle in zip(self.files, self._handles, strict=True):
            yield source_file, _hash_file(handle, progress)

    def identities(self) -> set[tuple[int, int]]:
        """Return (device, inode) of every local file read, small carried files included."""
        found = {handle.identity for handle in self._handles}
        return {pair for pair in found if pair is not None} | self._blob_identities

    def stamps(self) -> list[str]:
        """Return, for each of `files`, a text that changes with its contents."""
        return [handle.stamp for handle in self._handles]

    def check_unchanged(self) -> None:
        """Raise SourceError if a file was replaced, resized or written since it was opened."""
        for handle in self._handles:
            handle.check_unchanged()

    def advise_sequential(self) -> None:
        """Tell the system that the files are read from front to back. A hint: never fails."""
        for handle in self._handles:
            handle.advise_sequential()

    def will_need(self, tensor: SourceTensor) -> None:
        """Start reading a tensor into the page cache. A hint: never fails."""
        for base in tensor.bases:
            self._handles[base.file].will_need(base.offset, base.n_bytes)

    def will_need_range(self, tensor: SourceTensor, start: int, n_bytes: int) -> None:
        """Start reading what bytes of a tensor come from. A hint: never fails."""
        for base in tensor.bases:
            first = start * base.n_bytes // max(1, tensor.n_bytes)
            last = -(-(start + n_bytes) * base.n_bytes // max(1, tensor.n_bytes))
            self._handles[base.file].will_need(base.offset + first, last - first)

    def drop(self, tensor: SourceTensor) -> None:
        """Release a tensor's pages from the page cache. A hint: never fails."""
        for base in tensor.bases:
            self._handles[base.file].drop(base.offset, base.n_bytes)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-ready summary: kind, files, counts and bytes by dtype, notes, warnings."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype.name] += 1
            sizes[tensor.dtype.name] += tensor.n_bytes
        return {
            "kind": self.kind,
            "files": [
                {"name": f.name, "size": f.size, "header_sha256": f.header_sha256}
                for f in self.files
            ],
            "n_tensors": len(self.tensors),
            "n_bytes": self.n_bytes,
            "dtypes": {
                name: {"n_tensors": counts[name], "n_bytes": sizes[name]} for name in sorted(counts)
            },
            "blobs": {name: len(data) for name, data in self.blobs.items()},
            "missing_blobs": list(self.missing_blobs),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def _check_range(tensor: SourceTensor, start: int, n_bytes: int) -> None:
    if start < 0 or n_bytes < 0 or start + n_bytes > tensor.n_bytes:
        raise UsageError(
            f"tensor {quote(tensor.name)}: bytes {start}..{start + n_bytes} are outside its "
            f"{tensor.n_bytes} bytes"
        )


def _hash_file(handle: RangeFile, progress: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_HASH_CHUNK, max(handle.size, 1))))
    for offset in range(0, handle.size, len(buffer)):
        view = buffer[: min(len(buffer), handle.size - offset)]
        handle.read_into(offset, view, "file")
        digest.update(view)
        handle.drop(offset, len(view))
        if progress is not None:
            progress(len(view))
    return digest.hexdigest()
