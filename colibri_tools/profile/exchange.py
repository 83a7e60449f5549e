"""Profiles in the forms of other tools: usage text, traces as CSV, counts of imatrix files.

- Usage text: lines `layer expert count`, separated by blanks; `#` starts a comment. Layers are
  numbers of the model's layers.
- CSV trace: a header `token,layer,rank,expert,weight` and one line per choice; rank 0 is best.
- An imatrix file's per-expert counts: read from the GGUF form (`*.counts` beside `*.in_sum2`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from colibri_tools.errors import FormatError, UsageError, quote
from colibri_tools.profile.file import HALVES, N_REUSE_BINS, PHASES, RoutingProfile, Trace

__all__ = [
    "Shape",
    "profile_from_counts",
    "read_trace_csv",
    "read_usage",
    "write_trace_csv",
    "write_usage",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a profile must know of its model and a text form does not say."""

    fingerprint: str
    family: str
    top_k: int
    layers: tuple[int, ...]
    n_experts: tuple[int, ...]


def write_usage(profile: RoutingProfile, out: IO[str]) -> None:
    """Write selections, summed over domains and phases; experts with none are written too."""
    counts = profile.counts()
    for row, layer in enumerate(profile.layers):
        for expert in range(profile.n_experts[row]):
            out.write(f"{layer} {expert} {int(counts[row, expert])}\n")


def read_usage(path: Path, shape: Shape, domain: str) -> RoutingProfile:
    """Read usage text. Raises FormatError, with the line, for what does not fit the model."""
    counts = np.zeros((len(shape.layers), max(shape.n_experts)), np.uint64)
    seen: set[tuple[int, int]] = set()
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            fields = line.split("#", 1)[0].split()
            if not fields:
                continue
            where = f"{path}, line {number}"
            if len(fields) != 3 or not all(field.isdecimal() for field in fields):
                raise FormatError(f"{where}: expected 'layer expert count', found {quote(line)}")
            layer, expert, count = map(int, fields)
            row = _row(shape, layer, expert, where)
            if (row, expert) in seen:
                raise FormatError(f"{where}: layer {layer}, expert {expert} is there twice")
            seen.add((row, expert))
            counts[row, expert] = count
    return profile_from_counts(counts, shape, domain, str(path))


def _row(shape: Shape, layer: int, expert: int, where: str) -> int:
    if layer not in shape.layers:
        raise FormatError(f"{where}: layer {layer} is no MoE layer of this model")
    row = shape.layers.index(layer)
    if expert >= shape.n_experts[row]:
        raise FormatError(
            f"{where}: expert {expert} of layer {layer}: it has {shape.n_experts[row]}"
        )
    return row


def profile_from_counts(
    counts: npt.NDArray[np.uint64], shape: Shape, domain: str, where: str
) -> RoutingProfile:
    """Return a profile of selections alone, as phase prefill and first half.

    Raises FormatError unless all rows have the same total, a multiple of top_k.
    """
    totals = counts.sum(axis=1)
    if not totals[0] or (totals != totals[0]).any() or totals[0] % np.uint64(shape.top_k):
        raise FormatError(
            f"{where}: expected the same number of selections in every layer, a multiple of "
            f"top_k = {shape.top_k}; found {int(totals.min())} to {int(totals.max())}"
        )
    r, e = counts.shape
    selections = np.zeros((1, len(PHASES), HALVES, r, e), np.uint64)
    selections[0, 0, 0] = counts
    tokens = np.zeros((1, len(PHASES), HALVES), np.uint64)
    tokens[0, 0, 0] = totals[0] // np.uint64(shape.top_k)
    return RoutingProfile(
        fingerprint=shape.fingerprint,
        family=shape.family,
        top_k=shape.top_k,
        layers=shape.layers,
        n_experts=shape.n_experts,
        domains=(domain,),
        texts=(),
        selections=selections,
        gate_mass=np.zeros(selections.shape),
        tokens=tokens,
        coselection=np.zeros((r, e, e), np.uint64),
        transitions=np.zeros((r - 1, e, e), np.uint64),
        reuse=np.zeros((r, N_REUSE_BINS), np.uint64),
        early=np.zeros((r, 2), np.uint64),
    )


def write_trace_csv(profile: RoutingProfile, out: IO[str]) -> None:
    """Write the trace, tokens in order. Raises UsageError for a profile without one."""
    trace = profile.trace
    if trace is None:
        raise UsageError("the profile has no trace; profile-routing --trace keeps one")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("token", "layer", "rank", "expert", "weight"))
    for token in range(len(trace.experts)):
        for row, layer in enumerate(profile.layers):
            for rank in range(profile.top_k):
                weight = float(trace.weights[token, row, rank])
                expert = int(trace.experts[token, row, rank])
                writer.writerow((token, layer, rank, expert, f"{weight:.9g}"))


def read_trace_csv(path: Path, shape: Shape) -> Trace:
    """Read a CSV trace, complete and in order. Raises FormatError with the line."""
    experts: list[int] = []
    weights: list[float] = []
    expected = _choices(shape)
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        if next(reader, None) != ["token", "layer", "rank", "expert", "weight"]:
            raise FormatError(f"{path}: expected the header token,layer,rank,expert,weight")
        for line in reader:
            where = f"{path}, line {reader.line_num}"
            try:
                token, layer, rank, expert = map(int, line[:4])
                weight = float(line[4])
            except (ValueError, IndexError) as error:
                raise FormatError(f"{where}: expected five numbers, found {quote(line)}") from error
            _row(shape, layer, expert, where)
            if (token, layer, rank) != next(expected):
                raise FormatError(
                    f"{where}: choices must be in order of token, layer and rank, none missing"
                )
            experts.append(expert)
            weights.append(weight)
    per_token = len(shape.layers) * shape.top_k
    if not experts or len(experts) % per_token:
        raise FormatError(f"{path}: ends in the middle of a token")
    n = len(experts) // per_token
    dims = (n, len(shape.layers), shape.top_k)
    start = np.zeros(n, np.bool_)
    start[0] = True
    return Trace(
        experts=np.array(experts, np.uint16).reshape(dims),
        weights=np.array(weights, np.float32).reshape(dims),
        domain=np.zeros(n, np.uint16),
        phase=np.zeros(n, np.uint8),
        start=start,
    )


def _choices(shape: Shape) -> Iterator[tuple[Any, int, int]]:
    token = 0
    while True:
        for layer in shape.layers:
            for rank in range(shape.top_k):
                yield token, layer, rank
        token += 1
