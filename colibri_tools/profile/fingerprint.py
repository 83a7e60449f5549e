"""Which model a profile belongs to: a digest of its routing, not of its file.

The same for the Hugging Face form, the GGUF form, quantized and re-ordered containers of a model,
as long as router tensors keep their values: they are hashed as little-endian float32.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.container import Container
from colibri_tools.container.format import Role, Stream
from colibri_tools.errors import FormatError, SourceError
from colibri_tools.families.result import SourceMapping
from colibri_tools.sources import Source

__all__ = ["container_fingerprint", "mapping_fingerprint", "routing_fingerprint"]

_DOMAIN = b"colibri routing fingerprint 1\n"


def routing_fingerprint(
    rows: Iterable[tuple[int, int]],
    top_k: int,
    hidden_size: int,
    routers: Iterable[npt.NDArray[Any]],
) -> str:
    """Return SHA-256, in hex, of (layer, experts) of each row, top-k, hidden size, routers.

    `routers` are float32 [experts, hidden], in the order of `rows`.
    """
    digest = hashlib.sha256(_DOMAIN)
    pairs = list(rows)
    digest.update(struct.pack("<QQQ", len(pairs), top_k, hidden_size))
    for layer, n_experts in pairs:
        digest.update(struct.pack("<QQ", layer, n_experts))
    for router in routers:
        digest.update(np.ascontiguousarray(router, "<f4").tobytes())
    return digest.hexdigest()


def container_fingerprint(container: Container) -> str:
    """Return the fingerprint of a container's main stream. Raises FormatError without routers."""
    rows = [(row.layer, row.n_experts) for row in container.rows if row.stream == Stream.MAIN]
    by_layer = {t.layer: t.name for t in container.tensors.values() if t.role == Role.ROUTER}
    missing = [layer for layer, _ in rows if layer not in by_layer]
    if missing:
        raise FormatError(f"{container.path}: layer {missing[0]} has no router tensor")
    return routing_fingerprint(
        rows,
        int(container.spec["top_k"]),
        int(container.spec["hidden_size"]),
        (container.dequantize(by_layer[layer]) for layer, _ in rows),
    )


def mapping_fingerprint(source: Source, mapping: SourceMapping) -> str:
    """Return the fingerprint of a source's main stream. Raises SourceError without routers."""
    rows = [(row.layer, len(row.experts)) for row in mapping.rows if row.stream == Stream.MAIN]
    by_layer = {r.layer: r.tensor for r in mapping.residents if r.role == Role.ROUTER}
    missing = [layer for layer, _ in rows if layer not in by_layer]
    if missing:
        raise SourceError(f"{source.path}: layer {missing[0]} has no router tensor")
    return routing_fingerprint(
        rows,
        int(mapping.spec["top_k"]),
        int(mapping.spec["hidden_size"]),
        (source.read_f32(by_layer[layer]) for layer, _ in rows),
    )
