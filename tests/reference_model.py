"""The engine's graph once more, in numpy and float64, from the dequantized numbers of a container.

Written from docs/format.md alone and for clarity, not for speed: one token at a time, no KV.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri_tools.container import Container, PartRole, Role

Array = np.ndarray


class ReferenceModel:
    """`forward(tokens)` gives logits [n, vocab]; `choices` and `weights` are [MoE layers, n, k]."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.spec = container.spec
        self.names = {
            (int(tensor.role), tensor.layer): name for name, tensor in container.tensors.items()
        }
        self.parts: dict[tuple[int, int, int], Array] = {}
        self.choices: list[Array] = []
        self.weights: list[Array] = []

    def graph(self, key: str) -> Any:
        return self.spec[f"graph.{key}"]

    def tensor(self, role: Role, layer: int = -1) -> Array:
        return self.container.dequantize(self.names[int(role), layer]).astype(np.float64)

    def part(self, row: int, expert: int, role: PartRole) -> Array:
        key = row, expert, int(role)
        if key not in self.parts:
            part = self.container.dequantize_part(row, expert, role)
            self.parts[key] = part.astype(np.float64)
        return self.parts[key]

    def forward(self, tokens: list[int]) -> Array:
        self.choices, self.weights = [], []
        x = self.tensor(Role.TOKEN_EMBD)[tokens]
        for layer, moe in enumerate(self.spec["moe_layers"]):
            x = x + self.attention(self.norm(x, self.tensor(Role.ATTN_NORM, layer)), layer)
            normed = self.norm(x, self.tensor(Role.FFN_NORM, layer))
            x = x + (self.moe(normed, layer) if moe else self.gated(normed, layer, Role.DENSE_GATE))
        logits = self.norm(x, self.tensor(Role.OUTPUT_NORM)) @ self.tensor(Role.OUTPUT).T
        return self.softcap(logits, "logit_softcap")

    def softcap(self, x: Array, key: str) -> Array:
        cap = self.spec.get(f"graph.{key}")
        return x if cap is None else cap * np.tanh(x / cap)

    def norm(self, x: Array, weight: Array) -> Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return weight * x / np.sqrt(mean + self.graph("norm_eps"))

    def attention(self, x: Array, layer: int) -> Array:
        n, d = len(x), self.graph("head_dim")
        roles = [
            (Role.ATTN_Q, Role.ATTN_Q_BIAS, Role.ATTN_Q_NORM),
            (Role.ATTN_K, Role.ATTN_K_BIAS, Role.ATTN_K_NORM),
            (Role.ATTN_V, Role.ATTN_V_BIAS, None),
        ]
        q, k, v = (self.project(x, layer, *names).reshape(n, -1, d) for names in roles)
        q, k = self.rope(q, layer), self.rope(k, layer)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.graph("attention_scale")
        scores = self.softcap(scores, "attention_softcap")
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        window = self.graph("windows")[layer] or n
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(n, -1)
        out = mixed @ self.tensor(Role.ATTN_O, layer).T
        return out + self.tensor(Role.ATTN_O_BIAS, layer) if self.graph("o_bias") else out

    def project(self, x: Array, layer: int, role: Role, bias: Role, norm: Role | None) -> Array:
        y = x @ self.tensor(role, layer).T
        if self.graph("qkv_bias"):
            y = y + self.tensor(bias, layer)
        if norm is not None and self.graph("qk_norm") == "full":
            y = self.norm(y, self.tensor(norm, layer))
        if norm is not None and self.graph("qk_norm") == "head":
            heads = y.reshape(len(x), -1, self.graph("head_dim"))
            y = self.norm(heads, self.tensor(norm, layer)).reshape(len(x), -1)
        limit = self.graph("clip_qkv")
        return np.clip(y, -limit, limit) if limit else y

    def rope(self, x: Array, layer: int) -> Array:
        half = self.graph("rope_dim") // 2
        frequencies, factor = self.graph("rope_inv_freq"), self.graph("rope_factor")
        number = self.spec.get("graph.rope_of_layer", [0] * (layer + 1))[layer]
        if number > 0:
            frequencies = self.graph("rope_inv_freq_more")[(number - 1) * half : number * half]
            factor = self.graph("rope_factor_more")[number - 1]
        angles = np.arange(len(x))[:, None, None] * np.array(frequencies)
        cos, sin = (f(angles) * factor for f in (np.cos, np.sin))
        adjacent = self.graph("rope_pairing") == "adjacent"
        first = slice(0, 2 * half, 2) if adjacent else slice(0, half)
        second = slice(1, 2 * half, 2) if adjacent else slice(half, 2 * half)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def moe(self, x: Array, layer: int) -> Array:
        k = self.spec["top_k"]
        p = softmax(x @ self.tensor(Role.ROUTER, layer).T)
        chosen = np.argsort(-p, axis=-1, kind="stable")[:, :k]
        weights = np.take_along_axis(p, chosen, axis=-1)
        if self.graph("router_norm"):
            weights = weights / weights.sum(axis=-1, keepdims=True)
        weights = weights * self.graph("router_scale")
        self.choices.append(chosen)
        self.weights.append(weights)
        row = self.container.row_of(layer)
        out = np.zeros_like(x)
        for t in range(len(x)):
            for expert, weight in zip(chosen[t], weights[t], strict=True):
                roles = PartRole.GATE, PartRole.UP, PartRole.DOWN
                parts = [self.part(row, int(expert), role) for role in roles]
                out[t] += weight * gated(x[t], *parts)
        if self.graph("shared_width"):
            shared = self.gated(x, layer, Role.SHARED_GATE)
            if self.graph("shared_gated"):
                score = x @ self.tensor(Role.SHARED_ROUTER, layer).reshape(-1)
                shared = shared / (1 + np.exp(-score))[:, None]
            out = out + shared
        return out

    def gated(self, x: Array, layer: int, first: Role) -> Array:
        return gated(x, *(self.tensor(Role(first + i), layer) for i in range(3)))


def gated(x: Array, gate: Array, up: Array, down: Array) -> Array:
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
