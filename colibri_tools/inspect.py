"""`colibri inspect`: what a container or a checkpoint holds, for people and as data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from colibri_tools.container import Container, Group, Role, SectionKind
from colibri_tools.container import open as open_container
from colibri_tools.errors import UsageError, quote, quote_some
from colibri_tools.output import format_bytes
from colibri_tools.sources import sniff

__all__ = ["Inspection", "Region", "inspect"]

PADDING_WARNING_SHARE = 0.05
INDEX_WARNING_BYTES = 100 << 20

_GROUP_LABELS = {
    Group.EVERY_TOKEN: "every token",
    Group.PER_ROW: "per row (embedding)",
    Group.OPTIONAL: "optional",
}


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous range of a container's file. `kind` groups regions for colours."""

    name: str
    kind: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found.

    `summary` has the keys that every kind of input shares (docs/cli.md lists them); what a kind
    does not have is None. `blocks`, `tensors`, `regions` and `details` are there when asked for.
    """

    path: str
    summary: dict[str, Any]
    blocks: list[dict[str, Any]] | None = None
    tensors: list[dict[str, Any]] | None = None
    regions: list[Region] | None = None
    details: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the summary, and `blocks`, `tensors`, `map`, `details` where asked for."""
        data = dict(self.summary)
        if self.blocks is not None:
            data["blocks"] = self.blocks
        if self.tensors is not None:
            data["tensors"] = self.tensors
        if self.regions is not None:
            data["map"] = [asdict(region) for region in self.regions]
        if self.details is not None:
            data["details"] = self.details
        return data

    def render(self, console: Console) -> None:
        """Print the tables."""
        from colibri_tools.inspect_view import render

        render(self, console)


def inspect(
    path: str | os.PathLike[str],
    *,
    blocks: bool = False,
    tensors: bool = False,
    show_map: bool = False,
    layer: int | None = None,
    expert: int | None = None,
    tensor: str | None = None,
) -> Inspection:
    """Look at a container, or at a Hugging Face directory, safetensors or GGUF source.

    `layer` and `expert` narrow `blocks` and `tensors`; giving both, or `tensor`, adds `details`.
    Raises UsageError for an option that does not apply, FormatError or SourceError for a file
    that is not sound.
    """
    if expert is not None and layer is None:
        raise UsageError("--expert needs --layer: expert numbers count within a layer")
    if sniff(path) != "colibri":
        if blocks or show_map or expert is not None:
            option = "--blocks" if blocks else "--map" if show_map else "--expert"
            raise UsageError(
                f"{option} describes a container's blocks, and {quote(os.fspath(path))} is a "
                "source; use --tensors, or repack it first"
            )
        from colibri_tools.inspect_source import inspect_source

        return inspect_source(path, tensors=tensors, layer=layer, tensor=tensor)
    with open_container(path) as container:
        return _inspect_container(
            container,
            os.fspath(path),
            blocks=blocks or layer is not None,
            tensors=tensors,
            show_map=show_map,
            layer=layer,
            expert=expert,
            tensor=tensor,
        )


def _inspect_container(
    container: Container,
    path: str,
    *,
    blocks: bool,
    tensors: bool,
    show_map: bool,
    layer: int | None,
    expert: int | None,
    tensor: str | None,
) -> Inspection:
    warnings = container_warnings(container)
    details = None
    if layer is not None and expert is not None:
        details = _block_details(container, layer, expert)
    elif tensor is not None:
        details = _tensor_details(container, tensor)
    return Inspection(
        path=path,
        summary=_summary(container, warnings),
        blocks=_blocks(container, layer, expert) if blocks else None,
        tensors=_tensors(container, layer) if tensors else None,
        regions=file_map(container) if show_map else None,
        details=details,
        warnings=warnings,
    )


def container_warnings(container: Container) -> tuple[str, ...]:
    """Return what a person should know before using this file."""
    account = container.accounting()
    spec = container.spec
    warnings = []
    if account.padding_share > PADDING_WARNING_SHARE:
        warnings.append(
            f"padding is {account.padding_share:.1%} of the file: blocks of "
            f"{format_bytes(account.expert_bytes // max(1, container.n_blocks))} on an alignment "
            f"of {format_bytes(container.alignment)}; a smaller --align saves it"
        )
    if account.index_bytes > INDEX_WARNING_BYTES:
        warnings.append(
            f"the expert index takes {format_bytes(account.index_bytes)}, read at every start"
        )
    if not spec["executable"]:
        warnings.append(f"run cannot execute this model: {spec.get('executable_lacks', 'unknown')}")
    return tuple(warnings)


def _summary(container: Container, warnings: Sequence[str]) -> dict[str, Any]:
    account = container.accounting()
    spec = container.spec
    data_bytes = account.resident_bytes + account.expert_bytes
    return {
        "kind": "container",
        "family": spec["family"],
        "n_layers": spec["n_layers"],
        "n_moe_layers": sum(row.stream == 0 for row in container.rows),
        "experts_per_layer": [row.n_experts for row in container.rows if row.stream == 0],
        "top_k": spec["top_k"],
        "total_params": spec["total_params"],
        "active_params": spec["active_params"],
        "hidden_size": spec["hidden_size"],
        "expert_width": spec["expert_width"],
        "vocab_size": spec["vocab_size"],
        "context_length": spec["context_length"],
        "executable": spec["executable"],
        "id": container.id,
        "alignment": container.alignment,
        "file_bytes": account.file_bytes,
        "metadata_bytes": account.metadata_bytes,
        "resident_bytes": account.resident_bytes,
        "expert_bytes": account.expert_bytes,
        "padding_bytes": account.padding_bytes,
        "padding_share": account.padding_share,
        "index_bytes": account.index_bytes,
        "bits_per_weight": 8 * data_bytes / max(1, spec["total_params"]),
        "n_blocks": container.n_blocks,
        "n_tensors": len(container.tensors),
        "types": _bytes_by_type(container),
        "order": spec["order"],
        "tokenizer": spec["tokenizer"],
        "eos_ids": list(spec["eos_ids"]),
        "spec": {key: _plain(value) for key, value in spec.items()},
        "blobs": {name: len(data) for name, data in container.blobs.items()},
        "provenance": {key: _plain(value) for key, value in container.provenance.items()},
        "warnings": list(warnings),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _bytes_by_type(container: Container) -> dict[str, dict[str, int]]:
    """Return {type name: {"resident": bytes, "experts": bytes}}."""
    resident: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for tensor in container.tensors.values():
        if tensor.alias_of is None:
            resident[tensor.dtype.name] += tensor.n_bytes
    present = container.index[container.index["flags"] != 0]
    uses = np.bincount(present["layout"], minlength=len(container.layouts))
    for layout, count in zip(container.layouts, uses.tolist(), strict=True):
        for part in layout.parts:
            experts[part.dtype.name] += part.n_bytes * count
    return {
        name: {"resident": resident[name], "experts": experts[name]}
        for name in sorted(resident | experts)
    }


def _blocks(container: Container, layer: int | None, expert: int | None) -> list[dict[str, Any]]:
    found = []
    types = [{p.role.label: p.dtype.name for p in layout.parts} for layout in container.layouts]
    for row_number, row in enumerate(container.rows):
        if layer is not None and row.layer != layer:
            continue
        for number in range(row.n_experts) if expert is None else (expert,):
            cell = container.cell(row_number, number)
            found.append(
                {
                    "layer": row.layer,
                    "stream": row.stream,
                    "expert": number,
                    "offset": int(cell["offset"]),
                    "bytes": int(cell["n_bytes"]),
                    "padded_bytes": container.padded_bytes(int(cell["n_bytes"])),
                    "rank": int(cell["rank"]),
                    "types": types[int(cell["layout"])],
                    "crc32c": f"{int(cell['crc32c']):08x}",
                    "sha256": cell["sha256"].tobytes().hex(),
                }
            )
    if layer is not None and not found:
        raise UsageError(
            f"layer {layer} has no experts; layers with experts: "
            f"{quote_some(row.layer for row in container.rows)}"
        )
    return found


def _tensors(container: Container, layer: int | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "role": tensor.role.label if isinstance(tensor.role, Role) else f"role {tensor.role}",
            "group": tensor.group.name.lower(),
            "layer": tensor.layer,
            "type": tensor.dtype.name,
            "shape": list(tensor.shape),
            "offset": tensor.offset,
            "bytes": tensor.n_bytes,
            "alias_of": tensor.alias_of,
            "crc32c": f"{tensor.crc32c:08x}",
            "sha256": bytes(tensor.sha256).hex(),
        }
        for name, tensor in container.tensors.items()
        if layer is None or tensor.layer == layer
    ]


def _block_details(container: Container, layer: int, expert: int) -> dict[str, Any]:
    row = container.row_of(layer)
    layout = container.layouts[int(container.cell(row, expert)["layout"])]
    return {
        "layer": layer,
        "expert": expert,
        "parts": [
            {
                "role": part.role.label,
                "type": part.dtype.name,
                "shape": [part.rows, part.cols],
                "offset_in_block": part.offset,
                "bytes": part.n_bytes,
                **statistics(container.dequantize_part(row, expert, part.role)),
            }
            for part in layout.parts
        ],
    }


def _tensor_details(container: Container, name: str) -> dict[str, Any]:
    if name not in container.tensors:
        raise UsageError(
            f"there is no tensor {quote(name)} outside the experts; --tensors lists them"
        )
    found = next(entry for entry in _tensors(container, None) if entry["name"] == name)
    return {**found, **statistics(container.dequantize(name))}


def statistics(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return figures of decoded weights; non-finite ones are counted and left out."""
    finite = values[np.isfinite(values)]
    figures: dict[str, Any] = {"non_finite": int(values.size - finite.size)}
    if finite.size:
        figures |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean(dtype=np.float64)),
            "std": float(finite.std(dtype=np.float64)),
            "first": [float(v) for v in values.ravel()[:8] if np.isfinite(v)],
        }
    return figures


def file_map(container: Container) -> list[Region]:
    """Return the regions of the file in order; they add up to the whole file."""
    regions = [Region("page 0", "metadata", 0, 4096)]
    for kind, offset, n_bytes in container.sections:
        label = _section_label(kind)
        regions.append(Region(label, "metadata", offset, n_bytes))
    end = regions[-1].offset + regions[-1].n_bytes
    regions.append(Region("reserve", "reserve", end, container.data_offset - end))
    for group in Group:
        members = [t for t in container.tensors.values() if t.group == group and t.alias_of is None]
        if members:
            first = min(t.offset for t in members)
            last = max(t.offset + t.n_bytes for t in members)
            regions.append(
                Region(f"resident: {_GROUP_LABELS[group]}", "resident", first, last - first)
            )
    regions += _expert_regions(container)
    return _fill_gaps(regions, container.file_size)


def _expert_regions(container: Container) -> list[Region]:
    """One region for each run of blocks of one layer: few, whatever the number of experts."""
    layers = np.array([row.layer for row in container.rows])
    rows, experts = np.nonzero(container.index["flags"])
    cells = container.index[rows, experts]
    order = np.argsort(cells["rank"])
    rows, cells = rows[order], cells[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    regions = []
    for start, stop in zip(starts, [*starts[1:].tolist(), len(rows)], strict=True):
        first, last = cells[start], cells[stop - 1]
        end = int(last["offset"]) + container.padded_bytes(int(last["n_bytes"]))
        name = f"experts: layer {layers[rows[start]]}, {stop - start} blocks"
        regions.append(Region(name, "experts", int(first["offset"]), end - int(first["offset"])))
    return regions


def _fill_gaps(regions: list[Region], file_size: int) -> list[Region]:
    filled: list[Region] = []
    end = 0
    for region in [*regions, Region("end", "end", file_size, 0)]:
        if region.offset > end:
            filled.append(Region("padding", "padding", end, region.offset - end))
        if region.n_bytes:
            filled.append(region)
        end = region.offset + region.n_bytes
    return filled


def _section_label(kind: int) -> str:
    try:
        return SectionKind(kind).label
    except ValueError:
        return f"section kind {kind}"
