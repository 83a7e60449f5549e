"""Does a container hold what its spec promises? Roles, their shapes, and graph tables per layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from colibri_tools.container.format import Group, Role
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
    by_role = {
        (t.role, t.layer): t for t in container.tensors.values() if t.group != Group.OPTIONAL
    }
    for role, shape in _model_needs(spec).items():
        problems += _check_role(by_role.get((role, -1)), role, shape, None)
    for layer in range(spec["n_layers"]):
        roles = frozenset(role for role, at in by_role if at == layer)
        for role, shape in _layer_needs(spec, layer, roles).items():
            problems += _check_role(by_role.get((role, layer)), role, shape, layer)
    return problems


def _check_tables(spec: dict[str, Any]) -> Iterator[CensusProblem]:
    lengths = {
        "graph.windows": spec["n_layers"],
        "graph.rope_inv_freq": spec["graph.rope_dim"] // 2,
        "graph.rope_inv_freq_long": spec["graph.rope_dim"] // 2,
        "graph.rope_layers": spec["n_layers"],
        "graph.chunks": spec["n_layers"],
        "graph.rope_of_layer": spec["n_layers"],
        "graph.rope_inv_freq_more": len(spec.get("graph.rope_factor_more", ()))
        * (spec["graph.rope_dim"] // 2),
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


def _layer_needs(spec: dict[str, Any], layer: int, roles: frozenset[int]) -> Needs:
    hidden = spec["hidden_size"]
    needs = _norm_needs(spec)
    needs |= _latent_needs(spec, roles) if spec["graph.attention"] == "mla" else _gqa_needs(spec)
    out = spec["graph.n_heads"] * _value_dim(spec)
    needs[Role.ATTN_O] = (hidden, out)
    if spec["graph.o_bias"]:
        needs[Role.ATTN_O_BIAS] = (hidden,)
    if spec.get("graph.attention_gate"):
        needs[Role.ATTN_GATE] = (out, hidden)
    if spec.get("graph.sinks"):
        needs[Role.ATTN_SINKS] = (spec["graph.n_heads"],)
    if spec["moe_layers"][layer]:
        return needs | _moe_needs(spec)
    return needs | _gated_needs(spec, Role.DENSE_GATE, spec["graph.dense_width"])


def _norm_needs(spec: dict[str, Any]) -> Needs:
    roles: tuple[Role, ...] = ()
    if spec.get("graph.pre_norm", True):
        roles += (Role.ATTN_NORM, Role.FFN_NORM)
        if spec["graph.norm"] == "layer":
            roles += (Role.ATTN_NORM_BIAS, Role.FFN_NORM_BIAS)
    if spec.get("graph.post_norm"):
        roles += (Role.ATTN_POST_NORM, Role.FFN_POST_NORM)
    return dict.fromkeys(roles, (spec["hidden_size"],))


def _gated_needs(spec: dict[str, Any], gate: Role, width: int) -> Needs:
    """The three matrices of a feed-forward network; up and down follow gate in the role numbers."""
    hidden = spec["hidden_size"]
    return {gate: (width, hidden), Role(gate + 1): (width, hidden), Role(gate + 2): (hidden, width)}


def _moe_needs(spec: dict[str, Any]) -> Needs:
    needs: Needs = {Role.ROUTER: (-1, spec["hidden_size"])}
    if spec.get("graph.router_bias"):
        needs[Role.ROUTER_BIAS] = (-1,)
    if spec.get("graph.router_select_bias"):
        needs[Role.ROUTER_SELECT_BIAS] = (-1,)
    if spec["graph.shared_width"]:
        needs |= _gated_needs(spec, Role.SHARED_GATE, spec["graph.shared_width"])
        if spec["graph.shared_gated"]:
            needs[Role.SHARED_ROUTER] = (1, spec["hidden_size"])
    return needs


def _value_dim(spec: dict[str, Any]) -> int:
    return int(spec.get("graph.value_dim", spec["graph.head_dim"]))


def _gqa_needs(spec: dict[str, Any]) -> Needs:
    hidden, head = spec["hidden_size"], spec["graph.head_dim"]
    q, k = spec["graph.n_heads"] * head, spec["graph.n_kv_heads"] * head
    v = spec["graph.n_kv_heads"] * _value_dim(spec)
    needs: Needs = {Role.ATTN_Q: (q, hidden), Role.ATTN_K: (k, hidden), Role.ATTN_V: (v, hidden)}
    if spec["graph.qkv_bias"]:
        needs |= {Role.ATTN_Q_BIAS: (q,), Role.ATTN_K_BIAS: (k,), Role.ATTN_V_BIAS: (v,)}
    norms = {"head": (head, head), "full": (q, k)}.get(spec["graph.qk_norm"])
    if norms is not None:
        needs |= {Role.ATTN_Q_NORM: (norms[0],), Role.ATTN_K_NORM: (norms[1],)}
    return needs


_SPLIT = frozenset((Role.ATTN_K_B, Role.ATTN_V_B))


def _latent_needs(spec: dict[str, Any], roles: frozenset[int]) -> Needs:
    """Latent attention. Keys and values are in one tensor, or, with any of the two, in both."""
    hidden, heads, q_lora = spec["hidden_size"], spec["graph.n_heads"], spec["graph.q_lora"]
    latent, value, rope = spec["graph.kv_lora"], _value_dim(spec), spec["graph.rope_dim"]
    head = spec["graph.head_dim"]
    nope, q, kv = head - rope, heads * head, latent + rope
    needs: Needs = {Role.ATTN_Q: (q, hidden)}
    if q_lora:
        needs = {
            Role.ATTN_Q_A: (q_lora, hidden),
            Role.ATTN_Q_A_NORM: (q_lora,),
            Role.ATTN_Q_B: (q, q_lora),
        }
    needs |= {Role.ATTN_KV_A: (kv, hidden), Role.ATTN_KV_A_NORM: (latent,)}
    if spec["graph.qkv_bias"]:
        needs |= {Role.ATTN_Q_A_BIAS: (q_lora,)} if q_lora else {}
        needs[Role.ATTN_KV_A_BIAS] = (kv,)
    if roles & _SPLIT:
        split = {Role.ATTN_K_B: (heads, latent, nope), Role.ATTN_V_B: (heads, value, latent)}
        return needs | split
    return needs | {Role.ATTN_KV_B: (heads * (nope + value), latent)}


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
