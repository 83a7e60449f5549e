"""Does a container hold what its spec promises? Roles, their shapes, and graph tables per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from colibri_tools.container.format import Role
from colibri_tools.container.reader import Container, ResidentTensor
from colibri_tools.errors import quote

__all__ = ["CensusProblem", "census"]

Shape = tuple[int, ...]
Needs = dict[Role, Shape]


@dataclass(frozen=True, slots=True)
class CensusProblem:
    """Something that the spec promises and the file lacks."""

    message: str
    layer: int | None = None
    tensor: str | None = None


def census(container: Container) -> list[CensusProblem]:
    """Compare the spec of a container with its contents.

    Rows, routers and layouts are checked when a container is opened; what is added here is that
    every tensor that the graph needs is there with the right shape. Models that this version
    does not execute promise no roles.
    """
    spec = container.spec
    if not spec["executable"]:
        return []
    problems = list(_check_tables(spec))
    by_role = {(t.role, t.layer): t for t in container.tensors.values()}
    for role, shape in _model_needs(spec).items():
        problems += _check_role(by_role.get((role, -1)), role, shape, None)
    for layer in range(spec["n_layers"]):
        for role, shape in _layer_needs(spec, layer).items():
            problems += _check_role(by_role.get((role, layer)), role, shape, layer)
    return problems


def _check_tables(spec: dict[str, Any]) -> Iterator[CensusProblem]:
    lengths = {
        "graph.windows": spec["n_layers"],
        "graph.rope_inv_freq": spec["graph.rope_dim"] // 2,
        "graph.rope_layers": spec["n_layers"],
        "graph.chunks": spec["n_layers"],
    }
    for key, expected in lengths.items():
        if key in spec and len(spec[key]) != expected:
            yield CensusProblem(
                f"spec: key {quote(key)}: expected {expected} elements, found {len(spec[key])}"
            )


def _model_needs(spec: dict[str, Any]) -> Needs:
    hidden, vocab = spec["hidden_size"], spec["vocab_size"]
    needs: Needs = {
        Role.TOKEN_EMBD: (vocab, hidden),
        Role.OUTPUT: (vocab, hidden),
        Role.OUTPUT_NORM: (hidden,),
    }
    if spec["graph.norm"] == "layer":
        needs[Role.OUTPUT_NORM_BIAS] = (hidden,)
    if spec.get("graph.output_bias"):
        needs[Role.OUTPUT_BIAS] = (vocab,)
    return needs


def _layer_needs(spec: dict[str, Any], layer: int) -> Needs:
    hidden = spec["hidden_size"]
    needs = _attention_needs(spec) | {Role.FFN_NORM: (hidden,)}
    if spec["graph.norm"] == "layer":
        needs |= {Role.ATTN_NORM_BIAS: (hidden,), Role.FFN_NORM_BIAS: (hidden,)}
    if not spec["moe_layers"][layer]:
        width = spec["graph.dense_width"]
        return needs | {
            Role.DENSE_GATE: (width, hidden),
            Role.DENSE_UP: (width, hidden),
            Role.DENSE_DOWN: (hidden, width),
        }
    needs[Role.ROUTER] = (-1, hidden)
    if spec.get("graph.router_bias"):
        needs[Role.ROUTER_BIAS] = (-1,)
    width = spec["graph.shared_width"]
    if width:
        needs |= {
            Role.SHARED_GATE: (width, hidden),
            Role.SHARED_UP: (width, hidden),
            Role.SHARED_DOWN: (hidden, width),
        }
        if spec["graph.shared_gated"]:
            needs[Role.SHARED_ROUTER] = (1, hidden)
    return needs


def _attention_needs(spec: dict[str, Any]) -> Needs:
    hidden, head = spec["hidden_size"], spec["graph.head_dim"]
    q, kv = spec["graph.n_heads"] * head, spec["graph.n_kv_heads"] * head
    needs: Needs = {
        Role.ATTN_NORM: (hidden,),
        Role.ATTN_Q: (q, hidden),
        Role.ATTN_K: (kv, hidden),
        Role.ATTN_V: (kv, hidden),
        Role.ATTN_O: (hidden, q),
    }
    if spec["graph.qkv_bias"]:
        needs |= {Role.ATTN_Q_BIAS: (q,), Role.ATTN_K_BIAS: (kv,), Role.ATTN_V_BIAS: (kv,)}
    if spec["graph.o_bias"]:
        needs[Role.ATTN_O_BIAS] = (hidden,)
    if spec.get("graph.sinks"):
        needs[Role.ATTN_SINKS] = (spec["graph.n_heads"],)
    norms = {"head": (head, head), "full": (q, kv)}.get(spec["graph.qk_norm"])
    if norms is not None:
        needs |= {Role.ATTN_Q_NORM: (norms[0],), Role.ATTN_K_NORM: (norms[1],)}
    return needs


def _check_role(
    tensor: ResidentTensor | None, role: Role, shape: Shape, layer: int | None
) -> Iterator[CensusProblem]:
    where = "" if layer is None else f"layer {layer}: "
    if tensor is None:
        yield CensusProblem(f"{where}expected a tensor of role {role.label}, found none", layer)
        return
    # Leading ones do not matter: a shared router is [hidden] or [1, hidden].
    found = tensor.shape
    while len(found) > len(shape) and found[0] == 1:
        found = found[1:]
    wanted = shape
    while len(wanted) > len(found) and wanted[0] == 1:
        wanted = wanted[1:]
    if len(found) != len(wanted) or any(
        w not in (f, -1) for f, w in zip(found, wanted, strict=True)
    ):
        text = " by ".join("experts" if dim == -1 else str(dim) for dim in shape)
        yield CensusProblem(
            f"{where}tensor {quote(tensor.name)} of role {role.label}: expected shape {text}, "
            f"found {' by '.join(map(str, tensor.shape))}",
            layer,
            tensor.name,
        )
