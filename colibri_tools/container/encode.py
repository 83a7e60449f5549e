"""From a plan and the checksums to the bytes of the metadata sections and of page 0."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from colibri_tools.container import format as fmt
from colibri_tools.container.format import SectionKind
from colibri_tools.container.kv import encode_kv
from colibri_tools.container.layout import ContainerPlan, blob_layout
from colibri_tools.container.spec import SPEC_KEYS

__all__ = ["SUM_DTYPE", "encode_metadata", "encode_page0", "fill_section_table"]

SUM_DTYPE = np.dtype([("crc32c", "<u4"), ("sha256", "u1", (32,))])
"""The two checksums of a tensor or a block."""

Array = npt.NDArray[np.void]


def encode_metadata(
    plan: ContainerPlan, tensor_sums: Array, block_sums: Array
) -> list[tuple[SectionKind, int, bytes]]:
    """Return (kind, offset, bytes) of every section.

    `tensor_sums` [n_tensors] and `block_sums` [n_rows, n_columns] are SUM_DTYPE; those of aliases
    are not looked at.
    """
    encoders: dict[SectionKind, Callable[[], bytes]] = {
        SectionKind.SPEC: lambda: encode_kv(plan.spec, SPEC_KEYS),
        SectionKind.BLOBS: lambda: _encode_blobs(plan),
        SectionKind.PROVENANCE: lambda: encode_kv(plan.provenance),
        SectionKind.DIRECTORY: lambda: _encode_directory(plan, tensor_sums),
        SectionKind.ROWS: lambda: _encode_rows(plan),
        SectionKind.INDEX: lambda: _encode_index(plan, block_sums),
        SectionKind.LAYOUTS: lambda: _encode_layouts(plan),
        SectionKind.TOKENIZER: lambda: plan.tokenizer or b"",
    }
    sections = []
    for planned in plan.sections:
        kind = SectionKind(planned.kind)
        data = encoders[kind]()
        assert len(data) == planned.n_bytes, kind.label
        sections.append((kind, planned.offset, data))
    return sections


def encode_page0(
    plan: ContainerPlan,
    sections: list[tuple[SectionKind, int, bytes]],
    crc32c: Callable[[bytes], int],
) -> bytes:
    """Return page 0 for these sections."""
    page = np.zeros((), fmt.PAGE0_DTYPE)
    page["magic"] = np.void(fmt.MAGIC)
    page["version"] = fmt.VERSION
    page["page0_bytes"] = fmt.PAGE0_BYTES
    page["alignment"] = plan.alignment
    page["file_size"] = plan.file_size
    page["data_offset"] = plan.data_offset
    page["expert_offset"] = plan.expert_offset
    fill_section_table(page, sections, crc32c)
    return page.tobytes()


def fill_section_table(
    page: npt.NDArray[np.void],
    sections: Sequence[tuple[int, int, bytes]],
    crc32c: Callable[[bytes], int],
) -> None:
    """Set everything of page 0, a PAGE0_DTYPE, that depends on the sections, `id` and CRC too."""
    page["sections"] = np.zeros((), page["sections"].dtype)
    page["n_sections"] = len(sections)
    page["metadata_bytes"] = max(offset + len(data) for _, offset, data in sections) - (
        fmt.PAGE0_BYTES
    )
    table = page["sections"][: len(sections)]
    for entry, (kind, offset, data) in zip(table, sections, strict=True):
        entry["kind"] = kind
        entry["flags"] = fmt.SECTION_REQUIRED if kind in fmt.REQUIRED_SECTIONS else 0
        entry["offset"] = offset
        entry["n_bytes"] = len(data)
        entry["crc32c"] = crc32c(data)
        entry["sha256"] = _bytes32(hashlib.sha256(data).digest())
    page["id"] = _bytes32(hashlib.sha256(table.tobytes()).digest())
    page["crc32c"] = crc32c(page.tobytes()[:-4])


def _bytes32(digest: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(digest, np.uint8)


def _encode_blobs(plan: ContainerPlan) -> bytes:
    places, n_bytes = blob_layout(plan.blobs)
    section = bytearray(n_bytes)
    entries = np.zeros(len(places), fmt.BLOB_ENTRY_DTYPE)
    name_end = 8 + entries.nbytes
    for entry, (name, start, size) in zip(entries, places, strict=True):
        raw = name.encode()
        entry["name_offset"], entry["name_bytes"] = name_end, len(raw)
        entry["data_offset"], entry["data_bytes"] = start, size
        section[name_end : name_end + len(raw)] = raw
        section[start : start + size] = plan.blobs[name]
        name_end += len(raw)
    section[0:4] = len(places).to_bytes(4, "little")
    section[8 : 8 + entries.nbytes] = entries.tobytes()
    return bytes(section)


def _encode_directory(plan: ContainerPlan, sums: Array) -> bytes:
    names = [tensor.item.name.encode() for tensor in plan.tensors]
    head = np.zeros((), fmt.DIRECTORY_HEAD_DTYPE)
    head["n_tensors"] = len(names)
    head["entry_bytes"] = fmt.TENSOR_DTYPE.itemsize
    head["names_bytes"] = sum(map(len, names))
    entries = np.zeros(len(names), fmt.TENSOR_DTYPE)
    name_offset = 0
    for i, (entry, tensor, raw) in enumerate(zip(entries, plan.tensors, names, strict=True)):
        item = tensor.item
        alias = tensor.alias_index
        entry["offset"], entry["n_bytes"] = tensor.offset, tensor.n_bytes
        entry["type"], entry["role"], entry["group"] = item.dtype.id, item.role, item.group
        entry["layer"] = item.layer
        entry["flags"] = 0 if alias is None else fmt.TENSOR_ALIAS
        entry["alias_of"] = alias or 0
        entry["n_dims"] = len(item.shape)
        entry["shape"][: len(item.shape)] = item.shape
        entry["name_offset"], entry["name_bytes"] = name_offset, len(raw)
        source = sums[i if alias is None else alias]
        entry["crc32c"], entry["sha256"] = source["crc32c"], source["sha256"]
        name_offset += len(raw)
    return head.tobytes() + entries.tobytes() + b"".join(names)


def _encode_rows(plan: ContainerPlan) -> bytes:
    head = np.zeros((), fmt.ROW_HEAD_DTYPE)
    head["n_rows"], head["n_columns"] = plan.cells.shape
    head["entry_bytes"] = fmt.ROW_DTYPE.itemsize
    entries = np.zeros(len(plan.rows), fmt.ROW_DTYPE)
    for entry, row in zip(entries, plan.rows, strict=True):
        entry["layer"], entry["stream"], entry["n_experts"] = row.layer, row.stream, row.n_experts
    return head.tobytes() + entries.tobytes()


def _encode_index(plan: ContainerPlan, sums: Array) -> bytes:
    cells = plan.cells.copy()
    present = cells["flags"] == fmt.CELL_PRESENT
    cells["crc32c"][present] = sums["crc32c"][present]
    cells["sha256"][present] = sums["sha256"][present]
    raw: bytes = cells.tobytes()
    return raw


def _encode_layouts(plan: ContainerPlan) -> bytes:
    head = np.zeros((), fmt.LAYOUT_HEAD_DTYPE)
    head["n_layouts"] = len(plan.layouts)
    head["entry_bytes"] = fmt.LAYOUT_DTYPE.itemsize
    entries = np.zeros(len(plan.layouts), fmt.LAYOUT_DTYPE)
    for entry, layout in zip(entries, plan.layouts, strict=True):
        entry["n_bytes"], entry["n_parts"] = layout.n_bytes, len(layout.parts)
        for slot, part in zip(entry["parts"], layout.parts, strict=False):
            slot["role"], slot["type"] = part.role, part.dtype.id
            slot["offset"], slot["n_bytes"] = part.offset, part.n_bytes
            slot["shape"] = part.rows, part.cols
    return head.tobytes() + entries.tobytes()
