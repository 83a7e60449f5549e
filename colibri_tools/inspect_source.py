"""`colibri inspect` of a checkpoint: what it is, and what repack would do with each tensor."""

from __future__ import annotations

import os
from typing import Any

from colibri_tools.errors import ColibriError, UsageError, quote
from colibri_tools.inspect import Inspection
from colibri_tools.mapping import SourceMapping, map_source
from colibri_tools.sources import Source, SourceTensor, open_source

__all__ = ["inspect_source"]


def inspect_source(
    path: str | os.PathLike[str],
    *,
    tensors: bool = False,
    layer: int | None = None,
    tensor: str | None = None,
) -> Inspection:
    """Look at a source. A source that repack would refuse is still listed, with the reason.

    Raises SourceError or FormatError if its headers are not sound.
    """
    with open_source(path) as source:
        mapping, refusal = _try_mapping(source)
        warnings = [*source.warnings] if mapping is None else [*mapping.warnings]
        warnings += [f"repack would refuse this source: {refusal}"] if refusal else []
        return Inspection(
            path=os.fspath(path),
            summary=_summary(source, mapping, refusal, warnings),
            tensors=_tensors(source, mapping, layer) if tensors or layer is not None else None,
            details=_details(source, mapping, tensor) if tensor is not None else None,
            warnings=tuple(warnings),
            notes=tuple(source.notes if mapping is None else mapping.notes),
        )


def _try_mapping(source: Source) -> tuple[SourceMapping | None, str | None]:
    """Return the mapping, if there is one, and why repack would refuse the source, if it would."""
    try:
        mapping = map_source(source)
    except ColibriError as error:
        return None, error.message
    return mapping, "; ".join(mapping.problems) or None


def _summary(
    source: Source, mapping: SourceMapping | None, refusal: str | None, warnings: list[str]
) -> dict[str, Any]:
    spec = mapping.spec if mapping is not None else {}
    rows = mapping.rows if mapping is not None else []
    experts = _expert_bytes(source, mapping)
    file_bytes = sum(file.size for file in source.files)
    header_bytes = sum(file.data_offset for file in source.files)
    padding = file_bytes - header_bytes - source.n_bytes
    total = spec.get("total_params") or _stored_weights(source)
    return {
        "kind": source.kind,
        "family": mapping.family if mapping is not None else None,
        "why": mapping.why if mapping is not None else None,
        "n_layers": spec.get("n_layers"),
        "n_moe_layers": sum(row.stream == 0 for row in rows) if mapping is not None else None,
        "experts_per_layer": [len(row.experts) for row in rows if row.stream == 0],
        "top_k": spec.get("top_k"),
        "total_params": total,
        "active_params": spec.get("active_params"),
        "executable": spec.get("executable"),
        "repackable": refusal is None,
        "alignment": source.metadata.get("general.alignment", 32)
        if source.kind == "gguf"
        else None,
        "file_bytes": file_bytes,
        "n_files": len(source.files),
        "header_bytes": header_bytes,
        "resident_bytes": source.n_bytes - experts,
        "expert_bytes": experts,
        "padding_bytes": padding,
        "padding_share": padding / file_bytes,
        "index_bytes": None,
        "bits_per_weight": 8 * source.n_bytes / total if total else None,
        "n_tensors": len(source.tensors),
        "types": _types(source, mapping),
        "order": None,
        "conversions": dict(mapping.conversions) if mapping is not None else None,
        "dropped": {rule: len(names) for rule, names in mapping.dropped.items()}
        if mapping is not None
        else None,
        "missing_blobs": list(source.missing_blobs),
        "provenance": source.describe(),
        "warnings": warnings,
    }


def _is_expert(mapping: SourceMapping | None, name: str) -> bool:
    assignment = mapping.assignments.get(name) if mapping is not None else None
    return assignment is not None and assignment.action == "expert"


def _expert_bytes(source: Source, mapping: SourceMapping | None) -> int:
    return sum(t.n_bytes for name, t in source.tensors.items() if _is_expert(mapping, name))


def _stored_weights(source: Source) -> int:
    return sum(t.n_weights for t in source.tensors.values() if t.dtype.is_known)


def _types(source: Source, mapping: SourceMapping | None) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = {}
    for name, tensor in source.tensors.items():
        entry = types.setdefault(tensor.dtype.name, {"resident": 0, "experts": 0})
        entry["experts" if _is_expert(mapping, name) else "resident"] += tensor.n_bytes
    return dict(sorted(types.items()))


def _tensors(
    source: Source, mapping: SourceMapping | None, layer: int | None
) -> list[dict[str, Any]]:
    rows = [_tensor_row(source, mapping, name) for name in source.tensors]
    return [row for row in rows if layer is None or row["layer"] == layer]


def _tensor_row(source: Source, mapping: SourceMapping | None, name: str) -> dict[str, Any]:
    tensor = source.tensors[name]
    assignment = mapping.assignments.get(name) if mapping is not None else None
    kept = assignment is not None and assignment.action in ("resident", "expert")
    kept = kept and mapping is not None and name in mapping.tensors
    return {
        "name": name,
        "type": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": tensor.n_bytes,
        "file": source.files[tensor.file].name,
        "offset": tensor.offset,
        "action": assignment.action if assignment is not None else "unmatched",
        "rule": assignment.rule if assignment is not None else None,
        "role": (assignment.role or None) if assignment is not None else None,
        "becomes": _as_weights(source, mapping, name).dtype.name if kept else None,
        "layer": assignment.layer if assignment is not None and assignment.layer >= 0 else None,
        "expert": assignment.expert if assignment is not None and assignment.expert >= 0 else None,
    }


def _details(source: Source, mapping: SourceMapping | None, name: str) -> dict[str, Any]:
    if name not in source.tensors:
        raise UsageError(f"there is no tensor {quote(name)} in the source; --tensors lists them")
    from colibri_tools.inspect import statistics

    values = source.read_f32(_as_weights(source, mapping, name))
    return {**_tensor_row(source, mapping, name), **statistics(values)}


def _as_weights(source: Source, mapping: SourceMapping | None, name: str) -> SourceTensor:
    """Codes with their scales, where the census saw them so."""
    seen = mapping.tensors.get(name) if mapping is not None else None
    return source.tensors[name] if seen is None else seen
