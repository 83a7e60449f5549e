"""Random containers for the engine's tests, made from graph switches directly.

No family: every switch of the spec can be combined with any other. Dimensions are asymmetric on
purpose (3 layers, hidden 64, 8 heads on 2, head size 16, 12 experts of 40, vocabulary 131).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from colibri_tools.container import (
    ContainerWriter,
    Group,
    PartRole,
    PartSpec,
    ResidentItem,
    Role,
    RowSpec,
    Stream,
    plan_container,
)
from colibri_tools.dtypes import DType, dtype_by_name

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, WIDTH, VOCAB = 64, 8, 2, 16, 12, 40, 131


def engine_spec(n_layers: int = 3, **changes: Any) -> dict[str, Any]:
    """A complete spec; `changes` are keys with or without `graph.`, dots and all."""
    spec: dict[str, Any] = {
        "family": "test",
        "source_kind": "safetensors",
        "executable": True,
        "order": "id",
        "n_layers": n_layers,
        "n_mtp_layers": 0,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "context_length": 4096,
        "top_k": 3,
        "expert_width": WIDTH,
        "total_params": 1,
        "active_params": 1,
        "moe_layers": [1] * n_layers,
        "tokenizer": "none",
        "bos_id": -1,
        "eos_ids": [],
        "n_tokens": VOCAB,
        "graph.attention": "gqa",
        "graph.n_heads": HEADS,
        "graph.n_kv_heads": KV_HEADS,
        "graph.head_dim": HEAD_DIM,
        "graph.attention_scale": HEAD_DIM**-0.5,
        "graph.qkv_bias": False,
        "graph.o_bias": False,
        "graph.qk_norm": "none",
        "graph.clip_qkv": 0.0,
        "graph.windows": [0] * n_layers,
        "graph.norm": "rms",
        "graph.norm_eps": 1e-6,
        "graph.rope_dim": HEAD_DIM,
        "graph.rope_pairing": "half",
        "graph.rope_factor": 1.0,
        "graph.activation": "silu",
        "graph.router_score": "softmax",
        "graph.router_norm": True,
        "graph.router_scale": 1.0,
        "graph.shared_width": 0,
        "graph.shared_gated": False,
        "graph.dense_width": 0,
    }
    for key, value in changes.items():
        described = key in spec or key == "executable_lacks" or "." in key
        spec[key if described else f"graph.{key}"] = value
    dim = spec["graph.rope_dim"]
    frequencies = [10000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    spec.setdefault("graph.rope_inv_freq", frequencies)
    return spec


def residents(spec: dict[str, Any], dtypes: dict[Role, str], tied: bool) -> list[ResidentItem]:
    """The tensors that the spec's graph asks for."""
    items: list[ResidentItem] = []

    def add(role: Role, layer: int, *shape: int, alias_of: str | None = None) -> None:
        group = Group.PER_ROW if role == Role.TOKEN_EMBD else Group.EVERY_TOKEN
        dtype = dtype_by_name(dtypes.get(role, "f32"))
        name = f"{layer}.{role.name.lower()}"
        items.append(ResidentItem(name, role, group, layer, dtype, shape, alias_of))

    g = {key.removeprefix("graph."): value for key, value in spec.items()}
    h, q = g["hidden_size"], g["n_heads"] * g["head_dim"]
    kv = g["n_kv_heads"] * g["head_dim"]
    add(Role.TOKEN_EMBD, -1, g["vocab_size"], h)
    add(Role.OUTPUT, -1, g["vocab_size"], h, alias_of="-1.token_embd" if tied else None)
    add(Role.OUTPUT_NORM, -1, h)
    for layer, moe in enumerate(g["moe_layers"]):
        add(Role.ATTN_NORM, layer, h)
        for role, rows, cols in (
            (Role.ATTN_Q, q, h),
            (Role.ATTN_K, kv, h),
            (Role.ATTN_V, kv, h),
            (Role.ATTN_O, h, q),
        ):
            add(role, layer, rows, cols)
        if g["qkv_bias"]:
            add(Role.ATTN_Q_BIAS, layer, q)
            add(Role.ATTN_K_BIAS, layer, kv)
            add(Role.ATTN_V_BIAS, layer, kv)
        if g["o_bias"]:
            add(Role.ATTN_O_BIAS, layer, h)
        if g["qk_norm"] != "none":
            full = g["qk_norm"] == "full"
            add(Role.ATTN_Q_NORM, layer, q if full else g["head_dim"])
            add(Role.ATTN_K_NORM, layer, kv if full else g["head_dim"])
        add(Role.FFN_NORM, layer, h)
        if moe:
            add(Role.ROUTER, layer, EXPERTS, h)
            width, first = g["shared_width"], Role.SHARED_GATE
            if g["shared_gated"]:
                add(Role.SHARED_ROUTER, layer, *((1, h) if layer % 2 else (h,)))
        else:
            width, first = g["dense_width"], Role.DENSE_GATE
        if width:
            add(first, layer, width, h)
            add(Role(first + 1), layer, width, h)
            add(Role(first + 2), layer, h, width)
    return items


def encode(values: np.ndarray, dtype: DType) -> bytes:
    """Bytes of float32 values in one of the types the tests use."""
    if dtype.name == "f32":
        return values.astype("<f4").tobytes()
    if dtype.name == "i32":
        return values.astype("<i4").tobytes()
    if dtype.name == "f16":
        return values.astype("<f2").tobytes()
    from gguf import GGMLQuantizationType, quants

    return quants.quantize(values, GGMLQuantizationType(dtype.id)).tobytes()


def make_model(
    path: Path,
    *,
    n_layers: int = 3,
    dtypes: dict[Role, str] | None = None,
    expert_dtypes: tuple[str, ...] = ("f32",),
    width: int = WIDTH,
    tied: bool = False,
    seed: int = 0,
    drop: Role | None = None,
    resize: Role | None = None,
    poison: Role | None = None,
    zero: Role | None = None,
    blobs: dict[str, bytes] | None = None,
    extra: list[ResidentItem] | None = None,
    **changes: Any,
) -> Path:
    """Write a container of random weights and return its path.

    `expert_dtypes` are the types of gate, up and down of expert 0, 1, ... in turn; where `width` is
    no multiple of the type's block, down is f32. `drop` leaves a role out of all layers but 0,
    `resize` gives it one row more, `poison` puts a NaN into it, `zero` fills it with zeros.
    """
    random = np.random.default_rng(seed)
    spec = engine_spec(n_layers, expert_width=width, **changes)
    items = residents(spec, dtypes or {}, tied) + (extra or [])
    if drop is not None:
        last = max(item.layer for item in items if item.role == drop)
        keep = 0 if last > 0 else -2
        items = [item for item in items if item.role != drop or item.layer == keep]
    if resize is not None:
        items = [_resized(item) if item.role == resize else item for item in items]
    hidden = spec["hidden_size"]
    layouts = []
    for name in expert_dtypes:
        dtype = dtype_by_name(name)
        gate, up = (PartSpec(role, dtype, width, hidden) for role in (PartRole.GATE, PartRole.UP))
        down_type = dtype if width % dtype.block_weights == 0 else dtype_by_name("f32")
        parts = [gate, up, PartSpec(PartRole.DOWN, down_type, hidden, width)]
        layouts.append(tuple(parts))
    assigned = tuple(e % len(layouts) for e in range(EXPERTS))
    rows = [
        RowSpec(layer, Stream.MAIN, EXPERTS, assigned)
        for layer, moe in enumerate(spec["moe_layers"])
        if moe
    ]
    plan = plan_container(
        spec=spec,
        blobs=blobs or {},
        provenance={"tool": "test"},
        residents=items,
        layouts=layouts,
        rows=rows,
    )
    with ContainerWriter(plan, path) as writer:
        for tensor in plan.tensors:
            if tensor.alias_index is None:
                values = _values(random, tensor.item, poison)
                values *= tensor.item.role != zero
                writer.write_tensor(tensor.item.name, encode(values, tensor.item.dtype))
        for row in range(len(rows)):
            for expert in range(EXPERTS):
                writer.write_block(row, expert, _block(random, plan.layout_of(row, expert)))
        writer.seal()
    return path


def _resized(item: ResidentItem) -> ResidentItem:
    shape = (item.shape[0] + 1, *item.shape[1:])
    return ResidentItem(item.name, item.role, item.group, item.layer, item.dtype, shape)


def _values(random: np.random.Generator, item: ResidentItem, poison: Role | None) -> np.ndarray:
    values = random.standard_normal(item.shape, np.float32)
    if len(item.shape) == 1:
        values = 0.3 * values + ("norm" in item.name)
    elif item.role not in (Role.TOKEN_EMBD, Role.ROUTER):
        values *= 2 * item.shape[-1] ** -0.5
    if item.role == poison:
        values.flat[7] = np.nan
    return values.astype(np.float32)


def _block(random: np.random.Generator, layout: Any) -> bytes:
    payload = bytearray(layout.n_bytes)
    for part in layout.parts:
        values = random.standard_normal((part.rows, part.cols), np.float32) * part.cols**-0.5
        data = encode(2 * values, part.dtype)
        payload[part.offset : part.offset + len(data)] = data
    return bytes(payload)
