"""A routing profile: what is in it, and the file it lives in (docs/profile.md).

The file is a zip of numpy arrays (`.npy`, deflated) and one JSON document. It is a pure function
of its contents, and untrusted when it is read: sizes are compared with what the arrays say before
anything is allocated, and totals that must agree are checked.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri_tools.errors import FormatError, UsageError, quote

__all__ = [
    "DECODE",
    "HALVES",
    "N_REUSE_BINS",
    "PHASES",
    "PREFILL",
    "RoutingProfile",
    "TextRecord",
    "Trace",
    "is_profile",
    "load_profile",
    "merge_profiles",
    "save_profile",
]

FORMAT = "colibri routing profile"
VERSION = 1

PHASES = ("prefill", "decode")
PREFILL, DECODE = range(2)

HALVES = 2
"""Tokens are counted in two halves, by alternating stretches, so that stability can be told."""

N_REUSE_BINS = 24
"""Reuse distances d (tokens since the expert's last selection) in [2^i, 2^(i+1)); the last: more,
and first selections are not counted."""

_META = "meta.json"
_UNFINISHED = "unfinished"
_MAX_FILE_BYTES = 64 << 30
_MAX_META_BYTES = 64 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TextRecord:
    """One text that was counted: base name, SHA-256 of its bytes, sizes."""

    domain: str
    name: str
    sha256: str
    n_bytes: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Every choice: `experts` uint16 and `weights` float32 [tokens, rows, top_k], best first.

    `domain` and `phase` (uint16, uint8 [tokens]) say where a token belongs, `start` (bool) where
    a new sequence begins.
    """

    experts: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]
    domain: npt.NDArray[np.uint16]
    phase: npt.NDArray[np.uint8]
    start: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RoutingProfile:
    """Which experts worked, on which texts.

    D domains, R rows (MoE layers), E the most experts of a row; rows with fewer have zeros
    beyond. `fingerprint` says which model it belongs to.

    - `selections` uint64, `gate_mass` float64 [D, phase, half, R, E]; `tokens` uint64
      [D, phase, half]. In every row, selections add up to tokens x top_k.
    - `coselection` uint64 [R, E, E]: tokens that chose both, symmetric, zero diagonal.
    - `transitions` uint64 [R - 1, E, E]: tokens that chose the first in a row, the second in the
      next row.
    - `reuse` uint64 [R, N_REUSE_BINS]: distances between selections of the same expert.
    - `early` uint64 [R, 2]: experts predicted by applying the row's router early, and of these
      the ones then chosen. Zeros where nothing was predicted.
    - `inputs` (importance), where collected: sums of squares float64 of what the experts
      multiply: "gate" [R, E, hidden] and "down" [R, E, width].
    - `precision` is what experts were chosen in, "exact" or "fast"; empty: not known, or both.
    """

    fingerprint: str
    family: str
    top_k: int
    layers: tuple[int, ...]
    n_experts: tuple[int, ...]
    domains: tuple[str, ...]
    texts: tuple[TextRecord, ...]
    selections: npt.NDArray[np.uint64]
    gate_mass: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.uint64]
    coselection: npt.NDArray[np.uint64]
    transitions: npt.NDArray[np.uint64]
    reuse: npt.NDArray[np.uint64]
    early: npt.NDArray[np.uint64]
    inputs: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    trace: Trace | None = None
    made_by: str = ""
    precision: str = ""

    @property
    def n_rows(self) -> int:
        """MoE layers."""
        return len(self.layers)

    @property
    def max_experts(self) -> int:
        """The most experts of a row: the columns of every table."""
        return max(self.n_experts)

    @property
    def n_tokens(self) -> int:
        """Tokens counted, all domains and phases."""
        return int(self.tokens.sum())

    def counts(self, *, domain: int | None = None, phase: int | None = None) -> Any:
        """Return selections uint64 [R, E], summed over halves and what is not given."""
        picked = self.selections if domain is None else self.selections[domain : domain + 1]
        picked = picked if phase is None else picked[:, phase : phase + 1]
        return picked.sum(axis=(0, 1, 2), dtype=np.uint64)

    def half(self, half: int) -> Any:
        """Return selections uint64 [R, E] of one half."""
        return self.selections[:, :, half].sum(axis=(0, 1), dtype=np.uint64)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return bool [R, E]: which cells are experts."""
        return np.arange(self.max_experts)[None] < np.array(self.n_experts)[:, None]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return everything that is an array, by its name in the file."""
        named: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in _TABLES}
        named |= {f"inputs.{name}": array for name, array in self.inputs.items()}
        if self.trace is not None:
            named |= {f"trace.{name}": getattr(self.trace, name) for name in _TRACE}
        return named


_TABLES: dict[str, type[Any]] = {
    "selections": np.uint64,
    "gate_mass": np.float64,
    "tokens": np.uint64,
    "coselection": np.uint64,
    "transitions": np.uint64,
    "reuse": np.uint64,
    "early": np.uint64,
}
_TRACE: dict[str, type[Any]] = {
    "experts": np.uint16,
    "weights": np.float32,
    "domain": np.uint16,
    "phase": np.uint8,
    "start": np.bool_,
}


# --- writing --------------------------------------------------------------------------------------


def save_profile(profile: RoutingProfile, path: Path, *, force: bool = False) -> None:
    """Write a profile: whole, or not at all. Raises UsageError for an existing file."""
    if path.exists() and not force:
        raise UsageError(f"{path}: exists already; --force replaces it")
    check_profile(profile, str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as out:
            _write_zip(profile, out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_partial(profile: RoutingProfile, state: dict[str, Any], path: Path) -> int:
    """Write an unfinished profile and the `state` of its job to a new file; return it, open."""
    check_profile(profile, str(path))
    with path.open("xb") as out:
        _write_zip(profile, out, {_UNFINISHED: state}, zipfile.ZIP_STORED)
        out.flush()
        os.fsync(out.fileno())
        return os.dup(out.fileno())


def _write_zip(
    profile: RoutingProfile,
    out: Any,
    more: dict[str, Any] | None = None,
    method: int = zipfile.ZIP_DEFLATED,
) -> None:
    with zipfile.ZipFile(out, "w", method, allowZip64=True) as archive:
        meta = json.dumps(_meta(profile) | (more or {}), indent=1, ensure_ascii=False).encode()
        archive.writestr(_member(_META, method), meta)
        for name, array in sorted(profile.arrays().items()):
            with archive.open(_member(f"{name}.npy", method), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array))


def _member(name: str, method: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = method
    info.external_attr = 0o644 << 16
    return info


def _meta(profile: RoutingProfile) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": profile.made_by,
        "precision": profile.precision,
        "fingerprint": profile.fingerprint,
        "family": profile.family,
        "top_k": profile.top_k,
        "layers": list(profile.layers),
        "n_experts": list(profile.n_experts),
        "domains": list(profile.domains),
        "texts": [
            {
                "domain": text.domain,
                "name": text.name,
                "sha256": text.sha256,
                "n_bytes": text.n_bytes,
                "n_tokens": text.n_tokens,
            }
            for text in profile.texts
        ],
    }


# --- reading --------------------------------------------------------------------------------------


def is_profile(path: Path) -> bool:
    """Return whether a file looks like a profile: a zip with its JSON document."""
    try:
        with path.open("rb") as file:
            head = file.read(30 + len(_META))
            return head[:4] == b"PK\x03\x04" and head[30:] == _META.encode()
    except OSError:
        return False


def load_profile(path: Path) -> RoutingProfile:
    """Read and check a profile. Raises FormatError for anything that is not a sound one."""
    meta, profile = _load(path)
    if _UNFINISHED in meta:
        raise FormatError(
            f"{path}: an interrupted profile-routing left it, and it is not complete; the same "
            "command goes on with it"
        )
    return profile


def load_partial(path: Path) -> tuple[RoutingProfile, dict[str, Any]]:
    """Read what `write_partial` wrote. Raises FormatError."""
    meta, profile = _load(path)
    state = meta.get(_UNFINISHED)
    if not isinstance(state, dict):
        raise FormatError(f"{path}: is no unfinished profile")
    return profile, state


def _load(path: Path) -> tuple[dict[str, Any], RoutingProfile]:
    try:
        with zipfile.ZipFile(path) as archive:
            meta = _read_meta(archive, path)
            arrays = {
                info.filename.removesuffix(".npy"): _read_array(archive, info, path)
                for info in archive.infolist()
                if info.filename != _META
            }
    except zipfile.BadZipFile as error:
        raise FormatError(f"{path}: is no routing profile ({error})") from error
    except (EOFError, zipfile.LargeZipFile, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"{path}: the profile is damaged ({error})") from error
    profile = _assemble(meta, arrays, path)
    check_profile(profile, str(path))
    return meta, profile


def _read_meta(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    try:
        info = archive.getinfo(_META)
    except KeyError:
        raise FormatError(f"{path}: is no routing profile: it has no {_META}") from None
    if info.file_size > _MAX_META_BYTES:
        raise FormatError(f"{path}: {_META} has {info.file_size} bytes, expected fewer")
    try:
        meta = json.loads(archive.read(info))
    except ValueError as error:
        raise FormatError(f"{path}: {_META} is no JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise FormatError(f"{path}: is no routing profile")
    if meta.get("version") != VERSION:
        raise FormatError(
            f"{path}: is a profile of version {quote(meta.get('version'))}; this program reads "
            f"version {VERSION}"
        )
    return meta


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> npt.NDArray[Any]:
    name = info.filename.removesuffix(".npy")
    where = f"{path}: array {quote(name)}"
    kind = _TABLES.get(name) or _TRACE.get(name.removeprefix("trace."))
    if name in ("inputs.gate", "inputs.down"):
        kind = np.float64
    if kind is None or info.file_size > _MAX_FILE_BYTES:
        raise FormatError(f"{where}: is not part of a profile")
    with archive.open(info) as member:
        try:
            version = np.lib.format.read_magic(member)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(member)
        except ValueError as error:
            raise FormatError(f"{where}: has no sound header: {error}") from error
        n_bytes = dtype.itemsize
        for length in shape:
            n_bytes *= length
        if fortran or dtype != np.dtype(kind) or n_bytes > info.file_size:
            raise FormatError(
                f"{where}: expected C-ordered {np.dtype(kind).name} in {info.file_size} bytes, "
                f"found {dtype} {list(shape)}"
            )
        data = member.read(n_bytes + 1)
    if len(data) != n_bytes:
        raise FormatError(f"{where}: expected {n_bytes} bytes, found {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape)


def _assemble(
    meta: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], path: Path
) -> RoutingProfile:
    missing = [name for name in _TABLES if name not in arrays]
    if missing:
        raise FormatError(f"{path}: the profile lacks the array {quote(missing[0])}")
    trace = None
    if any(name.startswith("trace.") for name in arrays):
        try:
            trace = Trace(**{name: arrays[f"trace.{name}"] for name in _TRACE})
        except KeyError as error:
            raise FormatError(f"{path}: the trace lacks the array {quote(error.args[0])}") from None
    try:
        return RoutingProfile(
            fingerprint=_string(meta["fingerprint"]),
            family=_string(meta["family"]),
            top_k=_number(meta["top_k"]),
            layers=tuple(_number(n) for n in meta["layers"]),
            n_experts=tuple(_number(n) for n in meta["n_experts"]),
            domains=tuple(_string(name) for name in meta["domains"]),
            texts=tuple(_text_record(text) for text in meta["texts"]),
            **{name: arrays[name] for name in _TABLES},
            inputs={
                name.removeprefix("inputs."): array
                for name, array in arrays.items()
                if name.startswith("inputs.")
            },
            trace=trace,
            made_by=_string(meta.get("made_by", "")),
            precision=_precision(meta.get("precision", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: {_META}: {error!r}") from error


def _precision(value: Any) -> str:
    if value not in ("", "exact", "fast"):
        raise ValueError(f"precision is {quote(value)}, expected exact, fast or nothing")
    return _string(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise ValueError(f"expected a whole number, found {quote(value)}")
    return value


def _text_record(value: Any) -> TextRecord:
    return TextRecord(
        domain=_string(value["domain"]),
        name=_string(value["name"]),
        sha256=_string(value["sha256"]),
        n_bytes=_number(value["n_bytes"]),
        n_tokens=_number(value["n_tokens"]),
    )


def check_profile(profile: RoutingProfile, where: str) -> None:
    """Raise FormatError unless shapes fit each other and totals add up."""
    p = profile
    if not p.layers or len(p.n_experts) != len(p.layers) or not p.domains:
        raise FormatError(f"{where}: expected at least one MoE layer and one domain")
    if min(p.n_experts) < p.top_k or p.top_k < 1:
        raise FormatError(f"{where}: top_k is {p.top_k}, experts per layer {min(p.n_experts)}")
    d, r, e = len(p.domains), p.n_rows, p.max_experts
    shapes = {
        "selections": (d, len(PHASES), HALVES, r, e),
        "gate_mass": (d, len(PHASES), HALVES, r, e),
        "tokens": (d, len(PHASES), HALVES),
        "coselection": (r, e, e),
        "transitions": (r - 1, e, e),
        "reuse": (r, N_REUSE_BINS),
        "early": (r, 2),
    }
    for name, shape in shapes.items():
        if getattr(p, name).shape != shape:
            found = list(getattr(p, name).shape)
            raise FormatError(f"{where}: {name}: expected shape {list(shape)}, found {found}")
    for name, array in p.inputs.items():
        if array.ndim != 3 or array.shape[:2] != (r, e):
            raise FormatError(f"{where}: inputs.{name}: expected [{r}, {e}, columns]")
    if not all(np.isfinite(a).all() for a in (p.gate_mass, *p.inputs.values())):
        raise FormatError(f"{where}: the profile has numbers that are not finite")
    _check_totals(p, where)
    if p.trace is not None:
        _check_trace(p, p.trace, where)


def _check_totals(p: RoutingProfile, where: str) -> None:
    expected = p.tokens * np.uint64(p.top_k)
    found = p.selections.sum(axis=-1, dtype=np.uint64)
    if not (found == expected[..., None]).all():
        d, phase, half, row = (int(i[0]) for i in np.nonzero(found != expected[..., None]))
        raise FormatError(
            f"{where}: domain {quote(p.domains[d])}, layer {p.layers[row]}: expected "
            f"{int(expected[d, phase, half])} selections (tokens x top_k), "
            f"found {int(found[d, phase, half, row])}"
        )
    if p.selections[..., ~p.mask()].any():
        raise FormatError(f"{where}: selections of experts that do not exist")


def _check_trace(p: RoutingProfile, trace: Trace, where: str) -> None:
    n = len(trace.experts)
    if trace.experts.shape != (n, p.n_rows, p.top_k) or trace.weights.shape != trace.experts.shape:
        raise FormatError(f"{where}: trace: expected [tokens, {p.n_rows}, {p.top_k}]")
    for name in ("domain", "phase", "start"):
        if getattr(trace, name).shape != (n,):
            raise FormatError(f"{where}: trace.{name}: expected [{n}]")
    if n and (trace.experts >= np.array(p.n_experts)[None, :, None]).any():
        raise FormatError(f"{where}: trace: an expert beyond the layer's count")
    if n and (trace.domain.max() >= len(p.domains) or trace.phase.max() >= len(PHASES)):
        raise FormatError(f"{where}: trace: a domain or phase that does not exist")


# --- merging --------------------------------------------------------------------------------------


def merge_profiles(profiles: Sequence[RoutingProfile]) -> tuple[RoutingProfile, list[str]]:
    """Add profiles of one model. Returns the sum, and notes on what could not be kept.

    Domains of one name are added together. Traces are joined in order. Parts that one of them
    lacks (trace, importance) are left out and named. Raises UsageError for profiles of different
    models.
    """
    if not profiles:
        raise UsageError("nothing to merge")
    first = profiles[0]
    for other in profiles[1:]:
        check_same_model(first, other)
    domains = tuple(dict.fromkeys(name for p in profiles for name in p.domains))
    spread = [_spread(p, domains) for p in profiles]
    merged = replace(
        first,
        domains=domains,
        texts=tuple(text for p in profiles for text in p.texts),
        **{name: _sum(p[name] for p in spread) for name in ("selections", "gate_mass", "tokens")},
        **{
            name: _sum(getattr(p, name) for p in profiles)
            for name in ("coselection", "transitions", "reuse", "early")
        },
        inputs={
            name: _sum(p.inputs[name] for p in profiles)
            for name in first.inputs
            if all(name in p.inputs for p in profiles)
        },
        trace=_join_traces(profiles, domains),
        precision=first.precision if len({p.precision for p in profiles}) == 1 else "",
    )
    notes = []
    if merged.trace is None and any(p.trace is not None for p in profiles):
        notes.append("the trace is left out: not all of the profiles have one")
    if not merged.inputs and any(p.inputs for p in profiles):
        notes.append("importance is left out: not all of the profiles have it")
    return merged, notes


def check_same_model(a: RoutingProfile, b: RoutingProfile) -> None:
    """Raise UsageError unless both profiles are of one model."""
    if (a.fingerprint, a.n_experts, a.top_k) != (b.fingerprint, b.n_experts, b.top_k):
        raise UsageError(
            f"the profiles are of different models: fingerprints {a.fingerprint[:12]} "
            f"({a.family}) and {b.fingerprint[:12]} ({b.family})"
        )


def _spread(p: RoutingProfile, domains: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    at = [domains.index(name) for name in p.domains]
    out: dict[str, npt.NDArray[Any]] = {}
    for name in ("selections", "gate_mass", "tokens"):
        array = getattr(p, name)
        wide = np.zeros((len(domains), *array.shape[1:]), array.dtype)
        np.add.at(wide, at, array)
        out[name] = wide
    return out


def _sum(arrays: Any) -> Any:
    total = None
    for array in arrays:
        total = array.copy() if total is None else total + array
    return total


def _join_traces(profiles: Sequence[RoutingProfile], domains: tuple[str, ...]) -> Trace | None:
    traces = [p.trace for p in profiles]
    if any(trace is None for trace in traces):
        return None
    joined: dict[str, npt.NDArray[Any]] = {}
    for name in _TRACE:
        pieces = []
        for p, trace in zip(profiles, traces, strict=True):
            piece = getattr(trace, name)
            if name == "domain":
                table = np.array([domains.index(d) for d in p.domains], np.uint16)
                piece = table[piece]
            pieces.append(piece)
        joined[name] = np.concatenate(pieces)
    return Trace(**joined)


def to_bytes(profile: RoutingProfile) -> bytes:
    """Return the file's bytes: the digest of a profile is that of these."""
    buffer = io.BytesIO()
    _write_zip(profile, buffer)
    return buffer.getvalue()
