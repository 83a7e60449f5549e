"""`colibri profile`: profiles added together, and from and into the forms of other tools."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools import __version__
from colibri_tools.container import open as open_container
from colibri_tools.container.format import Stream
from colibri_tools.errors import FormatError, UsageError, quote
from colibri_tools.mapping import map_source
from colibri_tools.output import counted
from colibri_tools.profile.collect import Choices, Totals, empty_profile
from colibri_tools.profile.exchange import (
    Shape,
    profile_from_counts,
    read_trace_csv,
    read_usage,
    write_trace_csv,
    write_usage,
)
from colibri_tools.profile.file import RoutingProfile, load_profile, merge_profiles, save_profile
from colibri_tools.profile.fingerprint import container_fingerprint, mapping_fingerprint
from colibri_tools.profile.report import ProfileReport
from colibri_tools.sources import Source, open_source, sniff

__all__ = [
    "ProfileFile",
    "export_profile",
    "import_profile",
    "merge_files",
    "model_shape",
    "read_imatrix",
]

PathLike = str | os.PathLike[str]

_CSV_HEADER = b"token,layer,rank,expert,weight"


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A file that was written: what it is made of, and of a profile the report."""

    out: str
    report: ProfileReport
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report's data, `out`, and what there was to say about the making."""
        data = self.report.to_json()
        return {**data, "out": self.out, "notes": [*self.notes, *data["notes"]]}

    def render(self, console: Any) -> None:
        """Print one line: the report itself is `colibri inspect`'s."""
        p = self.report.profile
        console.print(
            f"{self.out}: {p.family}, {p.n_rows} MoE layers x {p.max_experts} experts, "
            f"{counted(p.n_tokens, 'token')} in {counted(len(p.domains), 'domain')}",
            soft_wrap=True,
            markup=False,
        )


def merge_files(paths: Sequence[PathLike], out: PathLike, *, force: bool = False) -> ProfileFile:
    """Add profiles of one model together. Raises UsageError for profiles of different models."""
    merged, notes = merge_profiles([load_profile(Path(path)) for path in paths])
    save_profile(merged, Path(out), force=force)
    return ProfileFile(os.fspath(out), ProfileReport(merged), tuple(notes))


def export_profile(
    path: PathLike,
    *,
    usage: PathLike | None = None,
    trace_csv: PathLike | None = None,
    force: bool = False,
) -> ProfileFile:
    """Write selections as usage text, or the trace as CSV; exactly one of both.

    Raises UsageError for a profile without a trace and for an existing file.
    """
    if (usage is None) == (trace_csv is None):
        raise UsageError("give exactly one of --usage and --trace-csv")
    profile = load_profile(Path(path))
    out = Path(usage if usage is not None else trace_csv)  # type: ignore[arg-type]
    if trace_csv is not None and profile.trace is None:
        raise UsageError(f"{path}: has no trace; profile-routing --trace keeps one")
    if out.exists() and (not force or out.samefile(path)):
        raise UsageError(f"{out}: exists already; --force replaces it")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8", newline="") as file:
            (write_usage if trace_csv is None else write_trace_csv)(profile, file)
        partial.replace(out)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return ProfileFile(os.fspath(out), ProfileReport(profile))


def import_profile(
    path: PathLike, model: PathLike, out: PathLike, *, domain: str = "imported", force: bool = False
) -> ProfileFile:
    """Make a profile of `model` from usage text, a CSV trace or a GGUF imatrix file, by content.

    `model` is a container or a checkpoint. What the file does not say stays zero. Raises
    FormatError or UsageError for a file that does not fit the model.
    """
    path, shape = Path(path), model_shape(model)
    notes: tuple[str, ...] = ()
    head = _head(path)
    if head.startswith(b"GGUF"):
        profile, notes = read_imatrix(path, shape, domain)
    elif head.startswith(_CSV_HEADER):
        profile = _from_trace(path, shape, domain)
    else:
        profile = read_usage(path, shape, domain)
    made_by = f"colibri-tools {__version__}, imported"
    save_profile(replace(profile, made_by=made_by), Path(out), force=force)
    return ProfileFile(os.fspath(out), ProfileReport(profile), notes)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def model_shape(path: PathLike) -> Shape:
    """Return what a profile must know of a container or a checkpoint."""
    if sniff(path) == "colibri":
        with open_container(path) as container:
            rows = [row for row in container.rows if row.stream == Stream.MAIN]
            return Shape(
                container_fingerprint(container),
                str(container.spec["family"]),
                int(container.spec["top_k"]),
                tuple(row.layer for row in rows),
                tuple(row.n_experts for row in rows),
            )
    with open_source(path) as source:
        mapping = map_source(source)
        mapping.require_complete(source.path)
        main = [row for row in mapping.rows if row.stream == Stream.MAIN]
        return Shape(
            mapping_fingerprint(source, mapping),
            mapping.family,
            int(mapping.spec["top_k"]),
            tuple(row.layer for row in main),
            tuple(len(row.experts) for row in main),
        )


def _from_trace(path: Path, shape: Shape, domain: str) -> RoutingProfile:
    trace = read_trace_csv(path, shape)
    experts = np.ascontiguousarray(trace.experts.transpose(1, 0, 2), np.uint32)
    totals = Totals(
        empty_profile(
            shape.fingerprint,
            shape.family,
            shape.top_k,
            shape.layers,
            shape.n_experts,
            (domain,),
        ),
        keep_trace=True,
    )
    totals.add(
        Choices(
            experts=experts,
            weights=np.ascontiguousarray(trace.weights.transpose(1, 0, 2)),
            early=np.full_like(experts, 0xFFFFFFFF),
            domain=trace.domain.astype(np.int64),
            phase=trace.phase.astype(np.int64),
            start=trace.start,
        )
    )
    return totals.result()


# --- imatrix --------------------------------------------------------------------------------------

_IMATRIX_NAME = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.weight\.(counts|in_sum2)")


def read_imatrix(path: Path, shape: Shape, domain: str) -> tuple[RoutingProfile, tuple[str, ...]]:
    """Read llama.cpp's importance matrix in its GGUF form: counts and sums of squared inputs.

    Its tensors are `<weight>.counts` [experts, 1] and `<weight>.in_sum2` [experts, columns] (see
    tools/imatrix/README.md of llama.cpp). Raises FormatError for what does not fit the model.
    """
    with open_source(path) as source:
        found = _imatrix_tensors(source, str(path))
        counts = np.zeros((len(shape.layers), max(shape.n_experts)), np.uint64)
        for row, (layer, n) in enumerate(zip(shape.layers, shape.n_experts, strict=True)):
            names = [(layer, part, "counts") for part in ("gate", "gate_up", "up", "down")]
            own = [found[name] for name in names if name in found]
            if not own:
                raise FormatError(f"{path}: has no counts of the experts of layer {layer}")
            counts[row, :n] = _whole_counts(own[0], n, f"{path}: counts of layer {layer}")
        squares = {
            "gate": _squares(found, ("gate", "gate_up", "up"), shape),
            "down": _squares(found, ("down",), shape),
        }
    profile = profile_from_counts(counts, shape, domain, str(path))
    kept = {name: array for name, array in squares.items() if array is not None}
    never = int((counts == 0)[profile.mask()].sum())
    notes = [f"{never} of {int(profile.mask().sum())} experts have no counts"] if never else []
    return replace(profile, inputs=kept if len(kept) == len(squares) else {}), tuple(notes)


def _imatrix_tensors(source: Source, where: str) -> dict[tuple[int, str, str], npt.NDArray[Any]]:
    found = {}
    for tensor in source.tensors.values():
        match = _IMATRIX_NAME.fullmatch(tensor.name)
        if match is not None:
            found[int(match[1]), match[2], match[3]] = source.read_f32(tensor)
    if not found:
        raise FormatError(
            f"{where}: has no counts of experts (tensors such as "
            "'blk.0.ffn_gate_exps.weight.counts'); expected an importance matrix of a MoE model"
        )
    return found


def _whole_counts(values: npt.NDArray[Any], n: int, where: str) -> npt.NDArray[np.uint64]:
    flat = values.reshape(-1).astype(np.float64)
    if len(flat) != n:
        raise FormatError(f"{where}: expected {n} numbers, one of each expert, found {len(flat)}")
    if not np.isfinite(flat).all() or (flat < 0).any() or (flat != np.floor(flat)).any():
        raise FormatError(f"{where}: expected whole numbers, found {quote(flat.min())} or other")
    return flat.astype(np.uint64)


def _squares(
    found: dict[tuple[int, str, str], npt.NDArray[Any]], parts: tuple[str, ...], shape: Shape
) -> npt.NDArray[np.float64] | None:
    """[R, E, columns], or None unless every layer has them alike."""
    rows = []
    for layer, n in zip(shape.layers, shape.n_experts, strict=True):
        own = [found[layer, p, "in_sum2"] for p in parts if (layer, p, "in_sum2") in found]
        if not own or own[0].size % n:
            return None
        rows.append(own[0].reshape(n, -1).astype(np.float64))
    if len({row.shape[1] for row in rows}) != 1:
        return None
    table = np.zeros((len(rows), max(shape.n_experts), rows[0].shape[1]))
    for row, values in enumerate(rows):
        table[row, : len(values)] = values
    return table
