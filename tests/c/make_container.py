"""Containers written straight from docs/format.md, to test readers with.

It shares no code with the package: a reader that agrees with it and with the package's writer
agrees with the page. `Image` is a container in pieces, all of them open to change; `build` makes
a sound one from a description, `Image.to_bytes` seals whatever the pieces say.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SPEC, BLOBS, PROVENANCE, RESIDENT, ROWS, INDEX, LAYOUTS = range(1, 8)

TYPES = {  # number: (weights, bytes) of a quant block
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q8_0": (8, 32, 34),
    "i64": (27, 1, 8),
    "bf16": (30, 1, 2),
}
GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS = range(1, 7)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32C of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def align(x: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `x`."""
    return -(-x // unit) * unit


def size(type_name: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor (rule 15)."""
    _, weights, n_bytes = TYPES[type_name]
    n = 1
    for dim in shape:
        n *= dim
    assert shape[-1] % weights == 0
    return n // weights * n_bytes


# ------------------------------------------------------------------------------------------------
# Section 2: key-value

Kv = tuple[str, int, Any]  # key, type, value


def kv_value(kind: int, value: Any) -> tuple[int, bytes]:
    """Return (n, bytes) of a value."""
    if kind in (1, 4):
        return 1, struct.pack("<Q", value)
    if kind == 2:
        return 1, struct.pack("<q", value)
    if kind == 3:
        return 1, struct.pack("<d", value)
    if kind == 5:
        return len(value.encode()), value.encode()
    if kind in (6, 7):
        return len(value), struct.pack(f"<{len(value)}{'Q' if kind == 6 else 'd'}", *value)
    texts = [text.encode() for text in value]
    return len(texts), b"".join(struct.pack("<I", len(raw)) + raw for raw in texts)


def kv_entry(key: bytes, kind: int, n: int, raw: bytes) -> bytes:
    """Return one entry, whatever it says."""
    padded = key + bytes(-len(key) % 8) + raw + bytes(-len(raw) % 8)
    return struct.pack("<HBBI", len(key), kind & 255, 0, n) + padded


def kv_section(items: Iterable[Kv]) -> bytes:
    """Return the section of these entries, in the order given."""
    entries = [kv_entry(key.encode(), kind, *kv_value(kind, value)) for key, kind, value in items]
    return struct.pack("<II", len(entries), 0) + b"".join(entries)


# ------------------------------------------------------------------------------------------------
# Sections 3 to 5


def blob_section(blobs: Sequence[tuple[str, bytes]]) -> bytes:
    """Return the blobs section, in the order given."""
    names = [name.encode() for name, _ in blobs]
    name_at = 8 + 32 * len(blobs)
    data = bytearray(name_at) + b"".join(names)
    struct.pack_into("<II", data, 0, len(blobs), 0)
    for i, (raw_name, (_, raw)) in enumerate(zip(names, blobs, strict=True)):
        data += bytes(-len(data) % 64)
        struct.pack_into("<IIQQQ", data, 8 + 32 * i, name_at, len(raw_name), len(data), len(raw), 0)
        data += raw
        name_at += len(raw_name)
    return bytes(data)


@dataclass
class Tensor:
    """One entry of the resident directory."""

    name: str
    role: int
    group: int
    layer: int
    type_name: str
    shape: tuple[int, ...]
    alias_of: str | None = None
    offset: int = 0

    @property
    def n_bytes(self) -> int:
        """The size of its bytes."""
        return size(self.type_name, self.shape)


@dataclass
class Layout:
    """The parts of a block: (role, type name, rows, columns)."""

    parts: list[tuple[int, str, int, int]]

    def places(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of every part (rule 23)."""
        out, end = [], 0
        for _, type_name, rows, cols in self.parts:
            start = align(end, 64)
            end = start + size(type_name, (rows, cols))
            out.append((start, end - start))
        return out

    @property
    def n_bytes(self) -> int:
        """The size of the payload."""
        start, n = self.places()[-1]
        return start + n


@dataclass
class Row:
    """One MoE layer: `layouts` has the layout of each expert."""

    layer: int
    stream: int
    layouts: list[int]


@dataclass
class Model:
    """What a container holds."""

    spec: list[Kv]
    provenance: list[Kv]
    blobs: list[tuple[str, bytes]]
    tensors: list[Tensor]
    layouts: list[Layout]
    rows: list[Row]
    order: list[tuple[int, int]]
    alignment: int = 4096
    reserve: int = 1 << 20
    extra_sections: list[tuple[int, int, bytes]] = field(default_factory=list)  # kind, flags, data
    seed: int = 1


@dataclass
class Image:
    """A container in pieces. Sections are (kind, flags, data)."""

    sections: list[tuple[int, int, bytearray]]
    data: bytearray  # data_offset ... file_size
    alignment: int
    data_offset: int
    expert_offset: int
    page0: dict[int, bytes] = field(default_factory=dict)  # patches, before the CRC
    table: dict[int, bytes] = field(default_factory=dict)  # patches of the section table
    raw: dict[int, bytes] = field(default_factory=dict)  # patches of the file, after all checksums

    def section(self, kind: int) -> bytearray:
        """Return the bytes of a section."""
        return next(data for k, _, data in self.sections if k == kind)

    def replace(self, kind: int, data: bytes) -> None:
        """Put another section in place; what follows moves."""
        self.sections = [
            (k, flags, bytearray(data) if k == kind else old) for k, flags, old in self.sections
        ]

    def to_bytes(self) -> bytes:
        """Return the file, all checksums of page 0 made to fit."""
        metadata, table = bytearray(), bytearray()
        for kind, flags, data in self.sections:
            metadata += bytes(-len(metadata) % 64)
            table += struct.pack("<IIQQ", kind, flags, 4096 + len(metadata), len(data))
            table += struct.pack("<II", crc32c(data), 0) + hashlib.sha256(data).digest()
            metadata += data
        for at, raw in self.table.items():
            table[at : at + len(raw)] = raw
        reserve = bytes(self.data_offset - 4096 - len(metadata))
        page = bytearray(4096)
        struct.pack_into("<8sIIQQQQ", page, 0, b"COLIBRI\0", 1, 4096, 0, 0, self.alignment,
                         self.data_offset + len(self.data))  # fmt: skip
        struct.pack_into("<IIQQQ", page, 48, len(self.sections), 0, len(metadata),
                         self.data_offset, self.expert_offset)  # fmt: skip
        page[88:120] = hashlib.sha256(table).digest()
        page[128 : 128 + len(table)] = table
        for at, raw in self.page0.items():
            page[at : at + len(raw)] = raw
        struct.pack_into("<I", page, 4092, crc32c(page[:4092]))
        file = page + metadata + reserve + self.data
        for at, raw in self.raw.items():
            file[at : at + len(raw)] = raw
        return bytes(file)


def build(model: Model) -> Image:
    """Return a sound container of this model, with random payload."""
    rng = random.Random(model.seed)
    metadata_bytes = _metadata_bytes(model)
    data_offset = align(4096 + metadata_bytes + model.reserve, model.alignment)
    data = bytearray()
    sums: dict[str, tuple[int, bytes]] = {}
    group = 0
    for tensor in model.tensors:
        if tensor.alias_of is not None:
            continue
        data += bytes(-len(data) % (64 if tensor.group == group else model.alignment))
        group = tensor.group
        tensor.offset = data_offset + len(data)
        raw = rng.randbytes(tensor.n_bytes)
        sums[tensor.name] = crc32c(raw), hashlib.sha256(raw).digest()
        data += raw
    data += bytes(-len(data) % model.alignment)
    expert_offset = data_offset + len(data)
    cells: dict[tuple[int, int], bytes] = {}
    for rank, (row, expert) in enumerate(model.order):
        layout_index = model.rows[row].layouts[expert]
        raw = _payload(model.layouts[layout_index], rng)
        head = struct.pack("<QQII", data_offset + len(data), len(raw), layout_index, rank)
        cells[row, expert] = (
            head + struct.pack("<HHI", 0, 1, crc32c(raw)) + hashlib.sha256(raw).digest()
        )
        data += raw
        data += bytes(-len(data) % model.alignment)
    sections = [
        (SPEC, 1, bytearray(kv_section(model.spec))),
        (BLOBS, 1, bytearray(blob_section(model.blobs))),
        (PROVENANCE, 1, bytearray(kv_section(model.provenance))),
        (RESIDENT, 1, _directory(model, sums)),
        (ROWS, 1, _rows(model)),
        (INDEX, 1, _index(model, cells)),
        (LAYOUTS, 1, _layouts(model)),
        *((kind, flags, bytearray(raw)) for kind, flags, raw in model.extra_sections),
    ]
    return Image(sections, data, model.alignment, data_offset, expert_offset)


def _columns(model: Model) -> int:
    return max(len(row.layouts) for row in model.rows)


def _metadata_bytes(model: Model) -> int:
    names = sum(len(tensor.name.encode()) for tensor in model.tensors)
    sizes = [
        len(kv_section(model.spec)),
        len(blob_section(model.blobs)),
        len(kv_section(model.provenance)),
        16 + 128 * len(model.tensors) + names,
        16 + 32 * len(model.rows),
        64 * len(model.rows) * _columns(model),
        8 + 576 * len(model.layouts),
        *(len(raw) for _, _, raw in model.extra_sections),
    ]
    end = 0
    for n in sizes:
        end = align(end, 64) + n
    return end


def _payload(layout: Layout, rng: random.Random) -> bytes:
    raw = bytearray()
    for start, n in layout.places():
        raw += bytes(start - len(raw)) + rng.randbytes(n)
    return bytes(raw)


def _directory(model: Model, sums: dict[str, tuple[int, bytes]]) -> bytearray:
    index = {tensor.name: i for i, tensor in enumerate(model.tensors)}
    entries, names = bytearray(), bytearray()
    for tensor in model.tensors:
        alias = tensor.alias_of is not None
        target = model.tensors[index[tensor.alias_of]] if tensor.alias_of is not None else tensor
        raw = tensor.name.encode()
        crc, sha = sums[target.name]
        shape = [*target.shape, 0, 0, 0, 0][:4]
        entries += struct.pack("<QQIHHiIII", target.offset, target.n_bytes,
                               TYPES[target.type_name][0], tensor.role, tensor.group, tensor.layer,
                               int(alias), index[target.name] if alias else 0,
                               len(target.shape))  # fmt: skip
        entries += struct.pack("<4QIII12x", *shape, len(names), len(raw), crc) + sha
        names += raw
    return bytearray(struct.pack("<IIQ", len(model.tensors), 128, len(names))) + entries + names


def _rows(model: Model) -> bytearray:
    out = bytearray(struct.pack("<IIII", len(model.rows), _columns(model), 32, 0))
    for row in model.rows:
        out += struct.pack("<iIII16x", row.layer, row.stream, len(row.layouts), 0)
    return out


def _index(model: Model, cells: dict[tuple[int, int], bytes]) -> bytearray:
    out = bytearray()
    for row in range(len(model.rows)):
        for column in range(_columns(model)):
            out += cells.get((row, column), bytes(64))
    return out


def _layouts(model: Model) -> bytearray:
    out = bytearray(struct.pack("<II", len(model.layouts), 576))
    for layout in model.layouts:
        slots = bytearray()
        for (role, type_name, rows, cols), (start, n) in zip(
            layout.parts, layout.places(), strict=True
        ):
            slots += struct.pack("<HHIQQQQ24x", role, 0, TYPES[type_name][0], start, n, rows, cols)
        out += struct.pack("<QII48x", layout.n_bytes, len(layout.parts), 0)
        out += slots + bytes(512 - len(slots))
    return out


# ------------------------------------------------------------------------------------------------
# Sample models


def spec(**changes: Any) -> list[Kv]:
    """Return the spec of a model of 3 layers (dense, MoE, MoE) and one MTP layer."""
    values: dict[str, tuple[int, Any]] = {
        "family": (5, "test"),
        "source_kind": (5, "safetensors"),
        "executable": (4, 1),
        "order": (5, "id"),
        "n_layers": (1, 3),
        "n_mtp_layers": (1, 1),
        "hidden_size": (1, 64),
        "vocab_size": (1, 10),
        "context_length": (1, 128),
        "top_k": (1, 2),
        "expert_width": (1, 32),
        "total_params": (1, 123456),
        "active_params": (1, 4567),
        "moe_layers": (6, [0, 1, 1]),
        "tokenizer": (5, "none"),
        "bos_id": (2, -1),
        "eos_ids": (6, [3, 7]),
        "n_tokens": (1, 10),
        "graph.attention": (5, "gqa"),
        "graph.n_heads": (1, 4),
        "graph.n_kv_heads": (1, 2),
        "graph.head_dim": (1, 16),
        "graph.attention_scale": (3, 0.25),
        "graph.qkv_bias": (4, 0),
        "graph.o_bias": (4, 0),
        "graph.qk_norm": (5, "none"),
        "graph.clip_qkv": (3, 0.0),
        "graph.windows": (6, [0, 16, 0]),
        "graph.norm": (5, "rms"),
        "graph.norm_eps": (3, 1e-6),
        "graph.rope_dim": (1, 16),
        "graph.rope_pairing": (5, "half"),
        "graph.rope_inv_freq": (7, [10000.0 ** (-i / 8) for i in range(8)]),
        "graph.rope_factor": (3, 1.0),
        "graph.activation": (5, "silu"),
        "graph.router_score": (5, "softmax"),
        "graph.router_norm": (4, 1),
        "graph.router_scale": (3, 1.0),
        "graph.shared_width": (1, 0),
        "graph.shared_gated": (4, 0),
        "graph.dense_width": (1, 96),
        "x.words": (8, ["", "zwei", "три"]),
    }
    for key, item in changes.items():
        if item is None:
            del values[key]
        else:
            values[key] = item
    return [(key, *values[key]) for key in sorted(values)]


def small() -> Model:
    """Return a model with a bit of everything the format has, in a few kilobytes of metadata."""
    tensors = [
        Tensor("output", 2, 1, -1, "bf16", (10, 64), alias_of="token_embd"),
        Tensor("output_norm", 3, 1, -1, "f32", (64,)),
        Tensor("l0.gate", 40, 1, 0, "q8_0", (96, 64)),
        Tensor("l1.router", 33, 1, 1, "f32", (5, 64)),
        Tensor("l2.router", 33, 1, 2, "f32", (3, 64)),
        Tensor("token_embd", 1, 2, -1, "bf16", (10, 64)),
        Tensor("mtp.router", 33, 3, 3, "f32", (2, 64)),
        Tensor("mtp.unknown", 999, 3, 3, "i64", (3, 1, 2, 5)),
        Tensor("größe", 0, 3, -1, "f16", (7,)),
        Tensor("größe.alias", 0, 3, -1, "f16", (7,), alias_of="größe"),
    ]
    plain = [(GATE, "q8_0", 32, 64), (UP, "q8_0", 32, 64), (DOWN, "q4_0", 64, 32)]
    biased = [
        (GATE, "f32", 40, 64), (UP, "f16", 40, 64), (DOWN, "bf16", 64, 40),
        (GATE_BIAS, "f32", 1, 40), (UP_BIAS, "f32", 1, 40), (DOWN_BIAS, "f32", 1, 64),
    ]  # fmt: skip
    rows = [Row(1, 0, [0, 1, 0, 0, 1]), Row(2, 0, [1, 0, 0]), Row(3, 1, [0, 1])]
    order = [(row, expert) for row, r in enumerate(rows) for expert in range(len(r.layouts))]
    random.Random(7).shuffle(order)
    blobs = [("config.json", b'{"a": 1}'), ("empty", b""), ("tokenizer.json", bytes(range(200)))]
    provenance: list[Kv] = [("source.0.bytes", 1, 99), ("tool", 5, "colibri-tools 0"),
                            ("weights", 7, [0.5, -1.0])]  # fmt: skip
    return Model(spec(), provenance, blobs, tensors, [Layout(plain), Layout(biased)], rows, order,
                 reserve=64, extra_sections=[(17, 0, b"parts nobody knows")])  # fmt: skip


def streaming(
    n_rows: int, n_experts: int, *, mixed: bool, alignment: int = 4096, hidden: int = 64
) -> Model:
    """Return a model with only expert blocks worth mentioning, of one size or of two."""
    layouts = [Layout([(GATE, "q8_0", 96, hidden), (UP, "q8_0", 96, hidden),
                       (DOWN, "q8_0", hidden, 96)])]  # fmt: skip
    if mixed:
        layouts.append(Layout([(GATE, "q4_0", 96, hidden), (UP, "q4_0", 96, hidden),
                               (DOWN, "q4_0", hidden, 96)]))  # fmt: skip
    rng = random.Random(3)
    rows = [Row(layer, 0, [rng.randrange(len(layouts)) for _ in range(n_experts - layer % 2)])
            for layer in range(n_rows)]  # fmt: skip
    rows[0].layouts[: len(layouts)] = range(len(layouts))
    order = [(row, expert) for row, r in enumerate(rows) for expert in range(len(r.layouts))]
    rng.shuffle(order)
    tensors = [Tensor(f"l{i}.router", 33, 1, i, "f32", (len(row.layouts), hidden))
               for i, row in enumerate(rows)]  # fmt: skip
    items = spec(
        hidden_size=(1, hidden), n_layers=(1, n_rows), n_mtp_layers=(1, 0),
        moe_layers=(6, [1] * n_rows), expert_width=(1, 96),
    )  # fmt: skip
    return Model(items, [], [], tensors, layouts, rows, order, alignment=alignment, reserve=0)
