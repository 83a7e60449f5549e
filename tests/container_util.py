"""Small valid containers without any source, and ways to damage them.

Dimensions are asymmetric on purpose: 3 layers (one dense, two MoE with 5 and 3 experts), hidden 64,
expert width 32 and 96, 3 kinds of layouts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from colibri_tools import native
from colibri_tools.container import (
    Container,
    ContainerPlan,
    ContainerWriter,
    Group,
    PartRole,
    PartSpec,
    ResidentItem,
    Role,
    RowSpec,
    SectionKind,
    Stream,
    plan_container,
)
from colibri_tools.container import format as fmt
from colibri_tools.container.reader import open_bytes
from colibri_tools.dtypes import dtype_by_name

HIDDEN, VOCAB, N_HEADS, N_KV_HEADS, HEAD_DIM, DENSE = 64, 131, 8, 2, 16, 24
EXPERTS = {1: 5, 2: 3}
F32, BF16, Q8_0 = (dtype_by_name(name) for name in ("f32", "bf16", "q8_0"))


def small_spec(**changes: Any) -> dict[str, Any]:
    """A complete spec that fits `small_arguments`."""
    spec = {
        "family": "qwen3_moe",
        "source_kind": "safetensors",
        "executable": True,
        "order": "id",
        "n_layers": 3,
        "n_mtp_layers": 0,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "context_length": 4096,
        "top_k": 2,
        "expert_width": 0,
        "total_params": 123,
        "active_params": 45,
        "moe_layers": [0, 1, 1],
        "tokenizer": "none",
        "bos_id": -1,
        "eos_ids": [2, 5],
        "n_tokens": VOCAB,
        "graph.attention": "gqa",
        "graph.n_heads": N_HEADS,
        "graph.n_kv_heads": N_KV_HEADS,
        "graph.head_dim": HEAD_DIM,
        "graph.attention_scale": 0.25,
        "graph.qkv_bias": False,
        "graph.o_bias": False,
        "graph.qk_norm": "head",
        "graph.clip_qkv": 0,
        "graph.windows": [0, 0, 0],
        "graph.norm": "rms",
        "graph.norm_eps": 1e-6,
        "graph.rope_dim": HEAD_DIM,
        "graph.rope_pairing": "half",
        "graph.rope_inv_freq": [10000 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)],
        "graph.rope_factor": 1,
        "graph.activation": "silu",
        "graph.router_score": "softmax",
        "graph.router_norm": True,
        "graph.router_scale": 1,
        "graph.shared_width": 0,
        "graph.shared_gated": False,
        "graph.dense_width": DENSE,
    }
    return spec | changes


def small_residents() -> list[ResidentItem]:
    """Tensors of all three groups, an alias that precedes its target included."""
    every, per_row = Group.EVERY_TOKEN, Group.PER_ROW

    def item(name: str, role: Role, layer: int, *shape: int, dtype: Any = F32) -> ResidentItem:
        return ResidentItem(name, role, every, layer, dtype, shape)

    items = [
        ResidentItem("embed", Role.TOKEN_EMBD, per_row, -1, BF16, (VOCAB, HIDDEN)),
        ResidentItem("head", Role.OUTPUT, every, -1, BF16, (VOCAB, HIDDEN), alias_of="embed"),
        ResidentItem("vision.patch", Role.OTHER, Group.OPTIONAL, -1, F32, (7, 3, 1)),
        item("norm", Role.OUTPUT_NORM, -1, HIDDEN),
    ]
    for layer in range(3):
        prefix = f"layers.{layer}"
        items += [
            item(f"{prefix}.attn_norm", Role.ATTN_NORM, layer, HIDDEN),
            item(f"{prefix}.q", Role.ATTN_Q, layer, N_HEADS * HEAD_DIM, HIDDEN, dtype=BF16),
            item(f"{prefix}.k", Role.ATTN_K, layer, N_KV_HEADS * HEAD_DIM, HIDDEN, dtype=BF16),
            item(f"{prefix}.v", Role.ATTN_V, layer, N_KV_HEADS * HEAD_DIM, HIDDEN, dtype=Q8_0),
            item(f"{prefix}.o", Role.ATTN_O, layer, HIDDEN, N_HEADS * HEAD_DIM, dtype=BF16),
            item(f"{prefix}.q_norm", Role.ATTN_Q_NORM, layer, HEAD_DIM),
            item(f"{prefix}.k_norm", Role.ATTN_K_NORM, layer, HEAD_DIM),
            item(f"{prefix}.ffn_norm", Role.FFN_NORM, layer, HIDDEN),
        ]
        if layer in EXPERTS:
            items.append(item(f"{prefix}.router", Role.ROUTER, layer, EXPERTS[layer], HIDDEN))
    return [
        *items,
        item("layers.0.gate", Role.DENSE_GATE, 0, DENSE, HIDDEN),
        item("layers.0.up", Role.DENSE_UP, 0, DENSE, HIDDEN),
        item("layers.0.down", Role.DENSE_DOWN, 0, HIDDEN, DENSE),
    ]


def small_layouts() -> list[list[PartSpec]]:
    """Layouts with a gap between parts (q8_0), with biases, and with another width."""

    def parts(width: int, dtype: Any, bias: bool = False) -> list[PartSpec]:
        specs = [
            PartSpec(PartRole.GATE, dtype, width, HIDDEN),
            PartSpec(PartRole.UP, dtype, width, HIDDEN),
            PartSpec(PartRole.DOWN, BF16, HIDDEN, width),
        ]
        if bias:
            specs.append(PartSpec(PartRole.GATE_BIAS, F32, 1, width))
            specs.append(PartSpec(PartRole.UP_BIAS, F32, 1, width))
            specs.append(PartSpec(PartRole.DOWN_BIAS, F32, 1, HIDDEN))
        return specs

    return [parts(33, Q8_0), parts(33, F32, bias=True), parts(96, BF16)]


def small_arguments(**changes: Any) -> dict[str, Any]:
    """The arguments of `plan_container` for the small container."""
    arguments: dict[str, Any] = {
        "spec": small_spec(),
        "blobs": {"config.json": b'{"a": 1}', "tokenizer.json": bytes(range(200)), "empty": b""},
        "provenance": {"tool": "colibri-tools test", "source.sizes": [11, 22]},
        "residents": small_residents(),
        "layouts": small_layouts(),
        "rows": [
            RowSpec(1, Stream.MAIN, 5, (0, 1, 0, 0, 1)),
            RowSpec(2, Stream.MAIN, 3, (2, 2, 2)),
        ],
        "order": [(1, 2), (0, 4), (0, 0), (1, 0), (0, 3), (0, 1), (1, 1), (0, 2)],
    }
    return arguments | changes


def small_plan(**changes: Any) -> ContainerPlan:
    """The plan of the small container, with some arguments changed."""
    return plan_container(**small_arguments(**changes))


def payload_of(plan: ContainerPlan, row: int, expert: int) -> bytes:
    """The payload of a block: finite numbers that differ by block, part and position."""
    layout = plan.layout_of(row, expert)
    out = bytearray(layout.n_bytes)
    for part in layout.parts:
        seed = [row, expert, part.role]
        out[part.offset : part.offset + part.n_bytes] = weights(part.dtype.name, part.n_bytes, seed)
    return bytes(out)


def tensor_data(plan: ContainerPlan, name: str) -> bytes:
    """The bytes of a resident tensor."""
    planned = plan.tensor(name)
    return weights(planned.item.dtype.name, planned.n_bytes, list(name.encode()))


def weights(dtype_name: str, n_bytes: int, seed: list[int]) -> bytes:
    """Finite weights of a type, as bytes."""
    random = np.random.default_rng(seed)
    if dtype_name == "f32":
        return random.standard_normal(n_bytes // 4, np.float32).tobytes()
    if dtype_name == "bf16":
        values = random.standard_normal(n_bytes // 2, np.float32)
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    assert dtype_name == "q8_0"
    blocks = np.zeros(n_bytes // 34, np.dtype([("scale", "<f2"), ("q", "i1", (32,))]))
    blocks["scale"] = random.random(len(blocks)) + 0.5
    blocks["q"] = random.integers(-127, 128, (len(blocks), 32))
    return blocks.tobytes()


def write_container(plan: ContainerPlan, path: Path, **options: Any) -> str:
    """Write a container of `payload_of` and `tensor_data`; return its id."""
    with ContainerWriter(plan, path, **options) as writer:
        for planned in plan.tensors:
            if planned.alias_index is None:
                writer.write_tensor(planned.item.name, tensor_data(plan, planned.item.name))
        for row, expert in plan.order:
            writer.write_block(row, expert, payload_of(plan, row, expert))
        return writer.seal()


def make_container(path: Path, **changes: Any) -> Path:
    """Write the small container, with arguments of `plan_container` changed."""
    write_container(small_plan(**changes), path)
    return path


@dataclass
class Draft:
    """A container in memory whose fields can be changed; `seal` makes the checksums hold again.

    `page` is page 0, `tables` are the structured arrays of the sections; writing to them writes
    to `data`.
    """

    data: bytearray = field(repr=False)
    tables: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.page = np.frombuffer(self.data, fmt.PAGE0_DTYPE, 1)
        self._load()

    def _load(self) -> None:
        def head(kind: SectionKind, dtype: np.dtype) -> np.ndarray:
            return np.frombuffer(self.data, dtype, 1, self.section(kind)["offset"][0])

        def table(kind: SectionKind, dtype: np.dtype, count: int, skip: int) -> np.ndarray:
            return np.frombuffer(self.data, dtype, count, self.section(kind)["offset"][0] + skip)

        directory = head(SectionKind.DIRECTORY, fmt.DIRECTORY_HEAD_DTYPE)
        rows = head(SectionKind.ROWS, fmt.ROW_HEAD_DTYPE)
        layouts = head(SectionKind.LAYOUTS, fmt.LAYOUT_HEAD_DTYPE)
        n_rows, n_columns = int(rows["n_rows"][0]), int(rows["n_columns"][0])
        self.tables = {
            "directory": directory,
            "row_table": rows,
            "layout_table": layouts,
            "tensors": table(
                SectionKind.DIRECTORY, fmt.TENSOR_DTYPE, int(directory["n_tensors"][0]), 16
            ),
            "rows": table(SectionKind.ROWS, fmt.ROW_DTYPE, n_rows, 16),
            "cells": table(SectionKind.INDEX, fmt.CELL_DTYPE, n_rows * n_columns, 0).reshape(
                n_rows, n_columns
            ),
            "layouts": table(
                SectionKind.LAYOUTS, fmt.LAYOUT_DTYPE, int(layouts["n_layouts"][0]), 8
            ),
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tables[name]

    def section(self, kind: int) -> np.ndarray:
        """The section table's entry of a kind, as an array of one."""
        entries = self.page["sections"][0]
        at = int(np.flatnonzero(entries["kind"] == kind)[0])
        return entries[at : at + 1]

    def section_bytes(self, kind: int) -> memoryview:
        """The bytes of a section, writable."""
        entry = self.section(kind)
        start = int(entry["offset"][0])
        return memoryview(self.data)[start : start + int(entry["n_bytes"][0])]

    def replace_section(self, kind: int, content: bytes) -> None:
        """Give a section other content; what follows moves within the reserve."""
        n_sections = int(self.page["n_sections"][0])
        entries = self.page["sections"][0][:n_sections]
        contents = {int(e["kind"]): bytes(self.section_bytes(int(e["kind"]))) for e in entries}
        contents[kind] = content
        self.place_sections(contents)

    def place_sections(
        self, contents: dict[int, bytes], flags: dict[int, int] | None = None
    ) -> None:
        """Lay out these sections afresh."""
        data_offset = int(self.page["data_offset"][0])
        self.data[fmt.PAGE0_BYTES : data_offset] = bytes(data_offset - fmt.PAGE0_BYTES)
        table = self.page["sections"][0]
        table[:] = np.zeros_like(table)
        end = fmt.PAGE0_BYTES
        for entry, (kind, content) in zip(table, contents.items(), strict=False):
            start = fmt.align(end, fmt.DATUM_ALIGN)
            end = start + len(content)
            assert end <= data_offset
            self.data[start:end] = content
            entry["kind"], entry["flags"] = kind, (flags or {}).get(kind, 1)
            entry["offset"], entry["n_bytes"] = start, len(content)
        self.page["n_sections"] = len(contents)
        self.page["metadata_bytes"] = end - fmt.PAGE0_BYTES

    def seal(self) -> Draft:
        """Make all checksums of the metadata hold."""
        n_sections = int(self.page["n_sections"][0])
        table = self.page["sections"][0][:n_sections]
        for entry in table:
            start = int(entry["offset"])
            content = bytes(self.data[start : start + int(entry["n_bytes"])])
            entry["crc32c"] = native.crc32c(content)
            entry["sha256"] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
        digest = hashlib.sha256(table.tobytes()).digest()
        self.page["id"][0] = np.frombuffer(digest, np.uint8)
        return self.seal_page()

    def seal_page(self) -> Draft:
        """Make the CRC of page 0 hold."""
        self.page["crc32c"] = native.crc32c(bytes(self.data[: fmt.PAGE0_BYTES - 4]))
        return self

    def open(self) -> Container:
        """Open what is there."""
        return open_bytes(self.data)
