"""Raw writers of safetensors and GGUF bytes, sound or broken on purpose.

They check nothing: a test sets any field to any value. Sound files of the real libraries are the
oracle elsewhere; these exist to make what those libraries refuse to write.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_GGUF_TYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool"),
    *("string", "array", "uint64", "int64", "float64"),
)
GGUF_TYPES = {name: i for i, name in enumerate(_GGUF_TYPE_NAMES)}
_FORMATS = dict(
    zip(
        _GGUF_TYPE_NAMES[:8],
        "BbHhIif?",
        strict=True,
    )
) | {"uint64": "Q", "int64": "q", "float64": "d"}


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Append the peak of Python's own allocations within the block, in bytes, to the list."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


# ---------------------------------------------------------------- safetensors


@dataclass(slots=True)
class StTensor:
    """A tensor for `safetensors_bytes`: header fields and raw data."""

    dtype: str
    shape: Sequence[int]
    data: bytes


def f32(shape: Sequence[int], start: float = 0.0) -> StTensor:
    """A float32 tensor of this shape counting up from `start`."""
    n = int(np.prod(shape, dtype=np.int64))
    return StTensor("F32", list(shape), (np.arange(n, dtype="<f4") + np.float32(start)).tobytes())


def safetensors_header(tensors: Mapping[str, StTensor]) -> dict[str, Any]:
    """The header object of tensors laid out in the given order."""
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    return header


def raw_safetensors(header: bytes | Mapping[str, Any], data: bytes = b"") -> bytes:
    """Length, header (JSON text, or an object to dump) and data, put together unchecked."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_bytes(
    tensors: Mapping[str, StTensor], metadata: Mapping[str, str] | None = None, pad: int = 0
) -> bytes:
    """A sound file; keys and data in the given order, `pad` spaces after the header."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    header |= safetensors_header(tensors)
    text = json.dumps(header).encode() + b" " * pad
    return raw_safetensors(text, b"".join(tensor.data for tensor in tensors.values()))


def write_sharded(
    folder: Path,
    shards: Mapping[str, Mapping[str, StTensor]],
    weight_map: Mapping[str, str] | None = None,
    index: str = "model.safetensors.index.json",
) -> Path:
    """Write shards and an index (by default the true one) into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    true_map: dict[str, str] = {}
    for name, tensors in shards.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(safetensors_bytes(tensors))
        true_map |= dict.fromkeys(tensors, name)
    chosen = true_map if weight_map is None else dict(weight_map)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": chosen}))
    return folder


def write_hub_repo(
    cache: Path, files: Mapping[str, bytes], revision: str = "a" * 40, repo: str = "models--x--y"
) -> Path:
    """Lay `files` out as the Hub cache does (blobs, snapshot links, refs/main); return the repo."""
    root = cache / repo
    snapshot = root / "snapshots" / revision
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(revision)
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        (root / "blobs" / digest).write_bytes(data)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("/".join([".."] * (2 + name.count("/")) + ["blobs", digest]))
    return root


# ---------------------------------------------------------------- GGUF


@dataclass(slots=True)
class GgufTensorSpec:
    """A tensor for `gguf_bytes`: `ne` innermost first; `offset` None means right after the last."""

    name: str | bytes
    ne: Sequence[int]
    type: int = 0
    data: bytes = b""
    offset: int | None = None
    n_dims: int | None = None


@dataclass(slots=True)
class GgufSpec:
    """A GGUF file; every count and field can be forced to another value."""

    kv: Sequence[tuple[str | bytes, str, Any]] = ()
    tensors: Sequence[GgufTensorSpec] = ()
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    n_tensors: int | None = None
    n_kv: int | None = None
    tail: bytes = b""
    pad_last: bool = True
    kv_bytes: bytes = field(default=b"")


def gguf_string(text: str | bytes) -> bytes:
    """A length-prefixed string."""
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(type_name: str, value: Any) -> bytes:
    """A value without its type number; arrays are `("array", (item type, items))`."""
    if type_name == "string":
        return gguf_string(value)
    if type_name == "array":
        item_type, items = value
        body = b"".join(gguf_value(item_type, item) for item in items)
        return struct.pack("<IQ", GGUF_TYPES[item_type], len(items)) + body
    return struct.pack("<" + _FORMATS[type_name], value)


def gguf_kv(key: str | bytes, type_name: str, value: Any) -> bytes:
    """One metadata entry."""
    return (
        gguf_string(key) + struct.pack("<I", GGUF_TYPES[type_name]) + gguf_value(type_name, value)
    )


def gguf_bytes(spec: GgufSpec) -> bytes:
    """The file that `spec` describes."""
    kv = b"".join(gguf_kv(*entry) for entry in spec.kv) + spec.kv_bytes
    n_kv = len(spec.kv) if spec.n_kv is None else spec.n_kv
    n_tensors = len(spec.tensors) if spec.n_tensors is None else spec.n_tensors
    table, data = b"", b""
    for i, tensor in enumerate(spec.tensors):
        offset = len(data) if tensor.offset is None else tensor.offset
        n_dims = len(tensor.ne) if tensor.n_dims is None else tensor.n_dims
        table += gguf_string(tensor.name) + struct.pack("<I", n_dims)
        table += struct.pack(f"<{len(tensor.ne)}Q", *tensor.ne)
        table += struct.pack("<IQ", tensor.type, offset)
        data += tensor.data
        if spec.pad_last or i + 1 < len(spec.tensors):
            data += b"\0" * (-len(data) % spec.alignment)
    head = spec.magic + struct.pack("<IQQ", spec.version, n_tensors, n_kv) + kv + table
    return head + b"\0" * (-len(head) % spec.alignment) + data + spec.tail


def gguf_f32(name: str, shape: Sequence[int], start: float = 0.0) -> GgufTensorSpec:
    """A float32 tensor of this numpy shape counting up from `start`."""
    return GgufTensorSpec(name, list(shape)[::-1], 0, f32(shape, start).data)
