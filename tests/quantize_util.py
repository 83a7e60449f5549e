"""What the tests of encoding share: profiles of containers, imatrix files, decoding by gguf."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from reference_model import Array, ReferenceModel

from colibri_tools.container import Container, PartRole, Role
from colibri_tools.container.format import Stream
from colibri_tools.profile.exchange import Shape, profile_from_counts
from colibri_tools.profile.file import RoutingProfile, save_profile
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.quantize.encoding import Encoding
from colibri_tools.quantize.rules import make_policy


def encoding(type_name: str, *rules: str, **more: Any) -> Encoding:
    """An encoding by `--type` and `--rule`."""
    return Encoding(make_policy(type_name, rules), **more)


def profile_of(
    container: Container, counts: Any, inputs: Mapping[str, Any] | None = None
) -> RoutingProfile:
    """A profile of a container with selections [rows, experts], and sums of squares of inputs."""
    rows = [row for row in container.rows if row.stream == Stream.MAIN]
    shape = Shape(
        container_fingerprint(container),
        str(container.spec["family"]),
        int(container.spec["top_k"]),
        tuple(row.layer for row in rows),
        tuple(row.n_experts for row in rows),
    )
    profile = profile_from_counts(np.asarray(counts, np.uint64), shape, "test", "counts")
    profile.inputs.update(inputs or {})
    return profile


def save(profile: RoutingProfile, path: Path) -> Path:
    """Write a profile and return its path."""
    save_profile(profile, path, force=True)
    return path


def write_imatrix(path: Path, entries: Mapping[str, tuple[Any, Any]]) -> Path:
    """Write llama.cpp's GGUF form: {tensor name: (sums [matrices, columns], counts [matrices])}."""
    writer = gguf.GGUFWriter(path, "none")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", np.asarray(sums, np.float32))
        writer.add_tensor(f"{name}.counts", np.asarray(counts, np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_old_imatrix(path: Path, entries: Mapping[str, tuple[Any, int]]) -> Path:
    """Write the older binary form: {tensor name: (means times calls, calls)}."""
    data = struct.pack("<i", len(entries))
    for name, (values, calls) in entries.items():
        array = np.asarray(values, "<f4").ravel()
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, array.size)
        data += array.tobytes()
    path.write_bytes(data + struct.pack("<ii", 3, 8) + b"text.txt")
    return path


class DecodedByGguf(ReferenceModel):
    """The reference model with weights that gguf decodes, not this project's C code."""

    def tensor(self, role: Role, layer: int = -1) -> Array:
        found = self.container.tensors[self.names[int(role), layer]]
        raw = self.container.read(found.offset, found.n_bytes)
        return _decoded(raw, found.dtype.id).reshape(found.shape)

    def part(self, row: int, expert: int, role: PartRole) -> Array:
        part = self.container.layout_of(row, expert).part(role)
        assert part is not None
        raw = bytes(self.container.block(row, expert)[part.offset :][: part.n_bytes])
        return _decoded(raw, part.dtype.id).reshape(part.rows, part.cols)


def _decoded(raw: bytes, type_id: int) -> Array:
    kind = GGMLQuantizationType(type_id)
    plain = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}.get(kind)
    data = np.frombuffer(raw, plain or np.uint8)
    return np.asarray(dequantize(data, kind)).astype(np.float64).ravel()


def types_of(container: Container) -> dict[str, str]:
    """Types by place: residents by name, parts as `row.expert.part`."""
    found = {name: t.dtype.name for name, t in container.tensors.items()}
    for number, row in enumerate(container.rows):
        for expert in range(row.n_experts):
            for part in container.layout_of(number, expert).parts:
                found[f"{number}.{expert}.{part.role.label}"] = part.dtype.name
    return found
