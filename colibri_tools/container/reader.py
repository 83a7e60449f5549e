"""Reading a container: everything but payload bytes is checked when it is opened.

Reading goes through `pread`; a mapping is made only when a zero-copy view is asked for.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import format as fmt
from colibri_tools.container.fileops import backup_path
from colibri_tools.container.format import Group, PartRole, Role, Stream, align
from colibri_tools.container.layout import (
    Accounting,
    PlannedLayout,
    PlannedPart,
    account,
)
from colibri_tools.container.parse import BlobPlace, ByteSource, Metadata, parse_metadata
from colibri_tools.dtypes import DType, dtype_by_id
from colibri_tools.errors import FormatError, SourceError, UsageError, quote

__all__ = ["Container", "ResidentTensor", "Row", "open", "open_bytes"]


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """A tensor outside the experts.

    `shape` is row-major. `role` is a plain int if this version does not know the code (only in
    the optional group). An alias has the place and the checksums of its target.
    """

    name: str
    role: Role | int
    group: Group
    layer: int
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    alias_of: str | None
    crc32c: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One MoE layer of a stream."""

    layer: int
    stream: Stream
    n_experts: int


class Container:
    """An open container.

    `index` is the expert index as a read-only structured array [n_rows, n_columns] (CELL_DTYPE:
    offset, n_bytes, layout, rank, part, flags, crc32c, sha256). `blobs` reads a carried file when
    it is looked up. Views stay valid after `close`. Everything may be used by several threads.
    """

    def __init__(self, source: _FileBytes | _MemoryBytes, metadata: Metadata) -> None:
        self._source = source
        self._metadata = metadata
        page = metadata.page
        self.path: str = source.path
        self.id: str = page["id"].tobytes().hex()
        self.alignment: int = int(page["alignment"])
        self.file_size: int = int(page["file_size"])
        self.data_offset: int = int(page["data_offset"])
        self.expert_offset: int = int(page["expert_offset"])
        self.metadata_bytes: int = int(page["metadata_bytes"])
        self.sections: tuple[tuple[int, int, int], ...] = metadata.sections
        self.spec: dict[str, Any] = metadata.spec
        self.provenance: dict[str, Any] = metadata.provenance
        self.blobs: Mapping[str, bytes] = _Blobs(source, metadata.blobs, page.tobytes())
        self.tensors: dict[str, ResidentTensor] = _resident_tensors(metadata)
        self.rows: tuple[Row, ...] = tuple(
            Row(layer, Stream(stream), n_experts)
            for layer, stream, n_experts in metadata.rows[["layer", "stream", "n_experts"]].tolist()
        )
        self.layouts: tuple[PlannedLayout, ...] = tuple(map(_layout, metadata.layouts))
        self.index: npt.NDArray[np.void] = metadata.cells

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Container {self.path!r}: {len(self.rows)} rows, {self.n_blocks} blocks, "
            f"{len(self.tensors)} tensors>"
        )

    def close(self) -> None:
        """Close the file. May be called twice; views that exist stay valid."""
        self._source.close()

    @property
    def identity(self) -> tuple[int, int] | None:
        """(device, inode) of the file, None for a container in memory."""
        return self._source.identity

    @property
    def n_blocks(self) -> int:
        """The number of experts of all rows."""
        return sum(row.n_experts for row in self.rows)

    @property
    def index_bytes(self) -> int:
        """The size of the expert index."""
        return int(self.index.nbytes)

    def accounting(self) -> Accounting:
        """Return where the bytes of the file are."""
        return account(
            data_offset=self.data_offset,
            resident_bytes=sum(t.n_bytes for t in self.tensors.values() if t.alias_of is None),
            expert_bytes=int(self.index["n_bytes"].sum()),
            file_size=self.file_size,
            index_bytes=self.index_bytes,
        )

    def row_of(self, layer: int, stream: int = Stream.MAIN) -> int:
        """Return the row of a layer. Raises UsageError if it has none (a dense layer)."""
        for i, row in enumerate(self.rows):
            if row.layer == layer and row.stream == stream:
                return i
        raise UsageError(f"{self.path}: layer {layer} has no experts in stream {int(stream)}")

    def cell(self, row: int, expert: int) -> np.void:
        """Return a block's index cell. Raises UsageError if there is no such block."""
        if not 0 <= row < len(self.rows):
            raise UsageError(f"{self.path}: row {row}: expected 0 ... {len(self.rows) - 1}")
        n_experts = self.rows[row].n_experts
        if not 0 <= expert < n_experts:
            raise UsageError(
                f"{self.path}: row {row} has experts 0 ... {n_experts - 1}, not {expert}"
            )
        cell: np.void = self.index[row, expert]
        return cell

    def layout_of(self, row: int, expert: int) -> PlannedLayout:
        """Return the inside of a block. Raises as `cell`."""
        return self.layouts[int(self.cell(row, expert)["layout"])]

    def padded_bytes(self, n_bytes: int) -> int:
        """Return what a block of `n_bytes` occupies in the file."""
        return align(n_bytes, self.alignment)

    def block(self, row: int, expert: int) -> memoryview:
        """Return a block's payload, a read-only view without a copy. Raises as `cell`."""
        cell = self.cell(row, expert)
        return self._source.view(int(cell["offset"]), int(cell["n_bytes"]))

    def part(self, row: int, expert: int, role: PartRole) -> npt.NDArray[Any]:
        """Return a part of a block without a copy, as `tensor` does, [rows, columns].

        Raises UsageError if there is no such block or part.
        """
        part = self._part(row, expert, role)
        raw = self.block(row, expert)[part.offset : part.offset + part.n_bytes]
        return _as_array(raw, part.dtype, (part.rows, part.cols))

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a resident tensor without a copy, read-only.

        Plain types have their numpy type and shape; bf16 is uint16. Quantized tensors are uint8
        with the last dimension in bytes: [..., rows, row_bytes]. Raises UsageError if there is no
        such tensor.
        """
        tensor = self._tensor(name)
        raw = self._source.view(tensor.offset, tensor.n_bytes)
        return _as_array(raw, tensor.dtype, tensor.shape)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """Return a resident tensor of any decodable type as float32 in its shape (a copy)."""
        tensor = self._tensor(name)
        raw = self._source.view(tensor.offset, tensor.n_bytes)
        return _to_float32(raw, tensor.dtype, tensor.shape)

    def dequantize_part(self, row: int, expert: int, role: PartRole) -> npt.NDArray[np.float32]:
        """Return a part of a block as float32 [rows, columns] (a copy). Raises as `part`."""
        part = self._part(row, expert, role)
        raw = self.block(row, expert)[part.offset : part.offset + part.n_bytes]
        return _to_float32(raw, part.dtype, (part.rows, part.cols))

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Return bytes of the file by pread.

        Raises UsageError for a range outside the file, SourceError if reading fails.
        """
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.file_size:
            raise UsageError(
                f"{self.path}: bytes {offset} ... {offset + n_bytes} are outside the file of "
                f"{self.file_size} bytes"
            )
        return self._source.read(offset, n_bytes)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of the file by pread. Raises SourceError on failure."""
        self._source.read_into(offset, out)

    def _tensor(self, name: str) -> ResidentTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UsageError(f"{self.path}: there is no resident tensor {quote(name)}")
        return tensor

    def _part(self, row: int, expert: int, role: PartRole) -> PlannedPart:
        part = self.layout_of(row, expert).part(role)
        if part is None:
            label = PartRole(role).label
            raise UsageError(f"{self.path}: row {row}, expert {expert} has no part {label}")
        return part


def open(path: str | os.PathLike[str]) -> Container:
    """Open a container and check everything but payload bytes and padding between them.

    Raises SourceError if the file cannot be read, FormatError (mostly RuleError, with the number
    of the broken rule) if it is no sound container.
    """
    source = _FileBytes(os.fspath(path))
    try:
        return _open_source(source)
    except BaseException as error:
        source.close()
        if isinstance(error, FormatError) and backup_path(path).is_file():
            error.message += f"; a respec was interrupted: 'colibri respec {source.path}' mends it"
            error.args = (error.message,)
        raise


def open_bytes(
    data: bytes | bytearray | memoryview, file_size: int | None = None, path: str = "<memory>"
) -> Container:
    """Open a container that is in memory.

    With `file_size`, `data` may be only the first bytes of a file of that size, up to its
    `data_offset` at least; then views of the rest fail. Raises as `open`.
    """
    return _open_source(_MemoryBytes(data, file_size, path))


def _open_source(source: _FileBytes | _MemoryBytes) -> Container:
    from colibri_tools import native  # late: importing the package must not need the C extension

    try:
        return Container(source, parse_metadata(source, native.crc32c))
    except FormatError as error:
        error.message = f"{source.path}: {error.message}"
        error.args = (error.message,)
        raise


class _FileBytes(ByteSource):
    """A regular file, read by pread; mapped when the first view is asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            self._fd = -1
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "something that is no file"
            raise SourceError(
                f"{path}: expected a container, found {kind}; "
                "'colibri repack' makes one from a checkpoint"
            )
        self._size = status.st_size
        self.identity: tuple[int, int] | None = (status.st_dev, status.st_ino)
        self._map: memoryview | None = None

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, n_bytes: int) -> bytes:
        out = bytearray(n_bytes)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                n = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                raise SourceError(
                    f"{self.path}: reading {len(out)} bytes at {offset} failed: {error.strerror}"
                ) from error
            if n == 0:
                raise SourceError(
                    f"{self.path}: expected {len(out)} bytes at {offset}, found the end of the "
                    f"file after {done}; it was cut while it was open"
                )
            done += n

    def view(self, offset: int, n_bytes: int) -> memoryview:
        if self._map is None:
            if self._fd < 0:
                raise UsageError(f"{self.path}: the container is closed")
            self._map = memoryview(mmap.mmap(self._fd, self._size, access=mmap.ACCESS_READ))
        return self._map[offset : offset + n_bytes]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        # The mapping goes when its last view does.
        self._map = None


class _MemoryBytes(ByteSource):
    """A file, or its first bytes, in memory."""

    identity: tuple[int, int] | None = None

    def __init__(
        self, data: bytes | bytearray | memoryview, file_size: int | None, path: str
    ) -> None:
        self.path = path
        self._data = memoryview(data).toreadonly()
        self._size = len(self._data) if file_size is None else file_size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, n_bytes: int) -> bytes:
        return bytes(self.view(offset, n_bytes))

    def read_into(self, offset: int, out: memoryview) -> None:
        out[:] = self.view(offset, len(out))

    def view(self, offset: int, n_bytes: int) -> memoryview:
        if offset + n_bytes > len(self._data):
            raise SourceError(f"{self.path}: only the first {len(self._data)} bytes are here")
        return self._data[offset : offset + n_bytes]

    def close(self) -> None:
        """Nothing is held open."""


class _Blobs(Mapping[str, bytes]):
    def __init__(self, source: ByteSource, places: Mapping[str, BlobPlace], page0: bytes) -> None:
        self._source = source
        self._places = places
        self._page0 = page0

    def __getitem__(self, name: str) -> bytes:
        place = self._places[name]
        data = self._source.read(place.offset, place.n_bytes)
        # A respec moves blobs, and changes page 0 before and after: the same page, the same place.
        if self._source.read(0, len(self._page0)) != self._page0:
            raise SourceError(
                f"{quote(name)}: the container's metadata were rewritten while it was open; "
                "open it again"
            )
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def sizes(self) -> dict[str, int]:
        """Return the sizes without reading anything."""
        return {name: place.n_bytes for name, place in self._places.items()}


def _resident_tensors(metadata: Metadata) -> dict[str, ResidentTensor]:
    table, names = metadata.tensors, metadata.names
    fields = ("role", "group", "layer", "type", "shape", "n_dims", "offset", "n_bytes", "crc32c")
    columns = [table[field].tolist() for field in fields]  # item by item is ten times slower
    targets = np.where(table["flags"] & fmt.TENSOR_ALIAS, table["alias_of"].astype(np.int64), -1)
    sha256 = table["sha256"].tobytes()
    roles: dict[int, Role] = {int(role): role for role in Role}
    tensors = {}
    for i, (name, target, *row) in enumerate(zip(names, targets.tolist(), *columns, strict=True)):
        role, group, layer, type_id, shape, n_dims, offset, n_bytes, crc32c = row
        tensors[name] = ResidentTensor(
            name=name,
            role=roles.get(role, role),
            group=Group(group),
            layer=layer,
            dtype=dtype_by_id(type_id),
            shape=tuple(shape[:n_dims]),
            offset=offset,
            n_bytes=n_bytes,
            alias_of=names[target] if target >= 0 else None,
            crc32c=crc32c,
            sha256=sha256[32 * i : 32 * i + 32],
        )
    return tensors


def _layout(entry: np.void) -> PlannedLayout:
    parts = [
        PlannedPart(
            role=PartRole(int(part["role"])),
            dtype=dtype_by_id(int(part["type"])),
            rows=int(part["shape"][0]),
            cols=int(part["shape"][1]),
            offset=int(part["offset"]),
            n_bytes=int(part["n_bytes"]),
        )
        for part in entry["parts"][: int(entry["n_parts"])]
    ]
    return PlannedLayout(int(entry["n_bytes"]), tuple(parts))


def _as_array(raw: memoryview, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if dtype.np_dtype is not None:
        return np.frombuffer(raw, dtype.np_dtype).reshape(shape)
    if dtype.is_quantized:
        return np.frombuffer(raw, np.uint8).reshape(*shape[:-1], dtype.row_bytes(shape[-1]))
    return np.frombuffer(raw, f"<u{dtype.block_bytes}").reshape(shape)


def _to_float32(raw: memoryview, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    from colibri_tools import native  # late: see _open_source

    n_weights = int(np.prod(shape, dtype=np.int64))
    return native.dequantize(dtype.id, raw, n_weights).reshape(shape)
