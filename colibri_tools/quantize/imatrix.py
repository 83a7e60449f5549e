"""Reading importance matrices of llama.cpp, both forms of the file.

- GGUF: for a tensor `NAME` two tensors in F32, `NAME.in_sum2` [matrices, columns], sums of squares
  of what its columns were multiplied by, and `NAME.counts` [matrices, 1], tokens of each matrix.
- The older binary form, little-endian: i32 entries; for each i32 length and bytes of the name, i32
  calls, i32 values and as many f32, means of squares times calls. Then i32 chunks, i32 length and
  bytes of the text's name, which may be missing. Matrices that saw no token have ones, or zeros in
  files of before 2024.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colibri_tools.errors import FormatError, quote
from colibri_tools.sources.detect import GGUF_MAGIC
from colibri_tools.sources.gguf_header import GgufTensor, read_gguf_header
from colibri_tools.sources.local import LocalFile, LocalFolder, user_file

__all__ = ["Imatrix", "Squares", "read_imatrix"]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES = 1 << 20
_MAX_NAME_BYTES = 4096


@dataclass(frozen=True, eq=False, slots=True)
class Squares:
    """Squares of inputs of one tensor: float32 [matrices * columns] in the file.

    `counts` are tokens of each matrix, float64 [matrices]; None where the file does not say.
    """

    name: str
    file: LocalFile
    offset: int
    n_values: int
    counts: npt.NDArray[np.float64] | None

    def read(self, matrix: int, n_cols: int) -> npt.NDArray[np.float32]:
        """Return the squares of one matrix, float32 [n_cols]."""
        out = np.empty(n_cols, "<f4")
        self.file.read_into(self.offset + 4 * n_cols * matrix, out.view(np.uint8).data, self.name)
        return out


@dataclass(frozen=True, eq=False, slots=True)
class Imatrix:
    """An open file: its entries by tensor name, and the SHA-256 of all its bytes."""

    path: str
    entries: dict[str, Squares]
    sha256: str


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """Open an importance matrix of either form. Values are read when they are asked for.

    Raises FormatError for a file that is none, or has no entries; SourceError if it cannot be read.
    """
    folder, name = user_file(os.fspath(path))
    file = LocalFolder(folder, follow_links=True).open(name)
    try:
        head = bytearray(min(4, file.size))
        file.read_into(0, memoryview(head), "first bytes")
        read = _gguf_entries if bytes(head) == GGUF_MAGIC else _binary_entries
        entries = read(file)
        if not entries:
            raise FormatError(f"{file.path}: the importance matrix has no entries")
        return Imatrix(file.path, entries, _sha256(file))
    except BaseException:
        file.close()
        raise


def _sha256(file: LocalFile) -> str:
    digest, step = hashlib.sha256(), 4 << 20
    buffer = memoryview(bytearray(min(step, file.size)))
    for offset in range(0, file.size, step):
        part = buffer[: min(step, file.size - offset)]
        file.read_into(offset, part, "file")
        digest.update(part)
    return digest.hexdigest()


# ---------------------------------------------------------------- GGUF


def _gguf_entries(file: LocalFile) -> dict[str, Squares]:
    tensors = {tensor.name: tensor for tensor in read_gguf_header(file).tensors}
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        stem = name.removesuffix(_SUMS)
        counts = tensors.get(stem + _COUNTS)
        if counts is None:
            raise FormatError(f"{file.path}: {quote(name)} has no {quote(stem + _COUNTS)}")
        _check_floats(file, tensor)
        _check_floats(file, counts)
        n_values, n_counts = tensor.n_bytes // 4, counts.n_bytes // 4
        if n_counts == 0 or n_values % n_counts:
            raise FormatError(
                f"{file.path}: {quote(name)}: {n_values} values for {n_counts} matrices"
            )
        raw = np.empty(n_counts, "<f4")
        file.read_into(counts.offset, raw.view(np.uint8).data, counts.name)
        if not (np.isfinite(raw).all() and (raw >= 0).all()):
            raise FormatError(f"{file.path}: {quote(counts.name)}: expected counts of tokens")
        found[stem] = Squares(stem, file, tensor.offset, n_values, raw.astype(np.float64))
    if not found:
        raise FormatError(
            f"{file.path}: a GGUF file without tensors named *{_SUMS}: this is no importance matrix"
        )
    return found


def _check_floats(file: LocalFile, tensor: GgufTensor) -> None:
    if tensor.dtype.name != "f32":
        raise FormatError(
            f"{file.path}: {quote(tensor.name)}: expected f32, found {tensor.dtype.name}"
        )


# ---------------------------------------------------------------- the binary form


class _Cursor:
    def __init__(self, file: LocalFile) -> None:
        self._file = file
        self.position = 0

    def take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes < 0 or self.position + n_bytes > self._file.size:
            raise FormatError(
                f"{self._file.path}: neither a routing profile nor an importance matrix (GGUF or "
                f"the older .dat form): {what} at byte {self.position} leads out of its "
                f"{self._file.size} bytes"
            )
        out = bytearray(n_bytes)
        self._file.read_into(self.position, memoryview(out), what)
        self.position += n_bytes
        return bytes(out)

    def number(self, what: str) -> int:
        (value,) = struct.unpack("<i", self.take(4, what))
        return int(value)


def _binary_entries(file: LocalFile) -> dict[str, Squares]:
    cursor, found = _Cursor(file), {}
    n_entries = cursor.number("the number of entries")
    if not 0 < n_entries <= _MAX_ENTRIES:
        raise FormatError(
            f"{file.path}: neither a routing profile nor an importance matrix (GGUF or the older "
            f".dat form, of which it would have {n_entries} entries)"
        )
    for i in range(n_entries):
        length = cursor.number(f"the name's length of entry {i}")
        if not 0 < length <= _MAX_NAME_BYTES:
            raise FormatError(f"{file.path}: entry {i} has a name of {length} bytes")
        name = cursor.take(length, f"the name of entry {i}").decode("utf-8", "replace")
        n_calls = cursor.number(f"the calls of {quote(name)}")
        n_values = cursor.number(f"the number of values of {quote(name)}")
        if n_values < 1 or n_calls < 1 or name in found:
            raise FormatError(
                f"{file.path}: entry {quote(name)} has {n_values} values from {n_calls} calls, or "
                "occurs twice"
            )
        offset = cursor.position
        if offset + 4 * n_values > file.size:
            raise FormatError(f"{file.path}: entry {quote(name)} leads out of the file: it is cut")
        found[name] = Squares(name, file, offset, n_values, None)
        cursor.position += 4 * n_values
    return found
