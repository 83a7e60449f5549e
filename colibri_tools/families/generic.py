"""The census of a source whose family is not in the table, but whose experts are recognised.

Such a model is repacked, inspected and verified; it is not executable. All tensors outside the
experts are kept as optional ones under their own names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.container.format import MAX_DIMS, Group, PartRole, Role
from colibri_tools.dtypes import FIRST_OTHER_ID
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.common import DROPS
from colibri_tools.families.detect import Detected
from colibri_tools.families.result import (
    Assignment,
    MappedResident,
    MappedRow,
    Slice,
    SourceMapping,
    params_of,
    sorted_residents,
)
from colibri_tools.families.schema import ExpertRule
from colibri_tools.families.state import (
    EXPERT_HINT,
    PARTS,
    drop_rule_of,
    not_a_moe,
    slices_of,
)
from colibri_tools.families.table import FAMILIES
from colibri_tools.sources import Source, SourceTensor

__all__ = ["map_unknown"]

_GATE_UP = (PartRole.GATE, PartRole.UP)
_PROJECTIONS: Mapping[str, tuple[PartRole, ...]] = {
    "gate_proj": (PartRole.GATE,),
    "w1": (PartRole.GATE,),
    "gate": (PartRole.GATE,),
    "up_proj": (PartRole.UP,),
    "w3": (PartRole.UP,),
    "up": (PartRole.UP,),
    "down_proj": (PartRole.DOWN,),
    "w2": (PartRole.DOWN,),
    "down": (PartRole.DOWN,),
    "gate_up_proj": _GATE_UP,
    "gate_up": _GATE_UP,
    "input_linear": _GATE_UP,
    "output_linear": (PartRole.DOWN,),
    "fc1": _GATE_UP,
    "fc2": (PartRole.DOWN,),
}
_TRANSPOSED = frozenset(("fc1", "fc2"))
"""Names of stacks that are [experts, inputs, outputs]."""
_FORMS = tuple(
    re.compile(regex)
    for regex in (
        r"(?P<stem>(?:.*\.)?layers)\.(?P<layer>\d{1,4})\.(?:[^.]+\.){0,3}experts\."
        r"(?P<expert>\d{1,5})\.(?P<what>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight",
        r"(?P<stem>(?:.*\.)?layers)\.(?P<layer>\d{1,4})\.(?:[^.]+\.){0,3}experts\."
        r"(?P<what>gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?",
        r"(?P<stem>(?:.*\.)?layers)\.(?P<layer>\d{1,4})\.moe\."
        r"(?P<what>gate_proj|up_proj|down_proj)\.weight",
        r"(?P<stem>(?:.*\.)?layers)\.(?P<layer>\d{1,4})\.mlp\.experts\.(?P<what>fc1|fc2)\.weight",
        r"(?P<stem>(?:.*\.)?layers)\.(?P<layer>\d{1,4})\.(?:mlp|block_sparse_moe)\."
        r"(?P<what>input_linear|output_linear)\.weight",
        r"(?P<stem>blk)\.(?P<layer>\d{1,4})\.ffn_(?P<what>gate_up|gate|up|down)_exps\.weight",
        r"(?P<stem>blk)\.(?P<layer>\d{1,4})\.ffn_(?P<what>gate|up|down)\."
        r"(?P<expert>\d{1,5})\.weight",
    )
)
_IN_LAYER = re.compile(r"(?:.*\.layers|layers|blk)\.\d{1,4}\.(.+)")
_EMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embd|word_embeddings|wte)\.weight"
)

_CONFIG_NAMES = {
    "n_layers": ("num_hidden_layers", "n_layer", "{arch}.block_count"),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
        "{arch}.expert_used_count",
    ),
    "n_experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "{arch}.expert_count",
    ),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
    "context_length": (
        "max_position_embeddings",
        "model_max_length",
        "{arch}.context_length",
    ),
    "hidden_size": ("hidden_size", "{arch}.embedding_length"),
    "n_heads": ("num_attention_heads", "{arch}.attention.head_count"),
    "n_kv_heads": ("num_key_value_heads", "{arch}.attention.head_count_kv"),
    "head_dim": ("head_dim", "{arch}.attention.key_length"),
}


@dataclass(slots=True)
class _Found:
    experts: dict[int, dict[tuple[int, PartRole], Slice]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    others: list[SourceTensor] = field(default_factory=list)


def map_unknown(source: Source, detected: Detected) -> SourceMapping:
    """Place the experts of a source of an unknown family. Raises SourceError as `map_source`."""
    mapping = SourceMapping(detected.claimed or "unknown", False, detected.why, source.kind)
    matches = {name: match for name in source.tensors if (match := _match(name)) is not None}
    if not matches:
        raise _no_experts(source, detected)
    # A second stack of layers (multi-token prediction, a draft model) is kept, not streamed.
    stem = Counter(match["stem"] for match in matches.values()).most_common(1)[0][0]
    hyper = _stated(detected)
    found = _place(source, mapping, {n: m for n, m in matches.items() if m["stem"] == stem}, hyper)
    _set_aside(mapping, found, hyper["n_experts"])
    hyper["n_layers"] = hyper["n_layers"] or max(found.experts, default=0) + 1
    _check(source, mapping, found, hyper)
    if mapping.problems:
        return mapping
    mapping.residents = sorted_residents([_resident(tensor) for tensor in found.others])
    mapping.rows = _rows(found, hyper)
    _finish(source, detected, mapping, hyper)
    return mapping


def _match(name: str) -> re.Match[str] | None:
    return next((m for form in _FORMS if (m := form.fullmatch(name)) is not None), None)


def _no_experts(source: Source, detected: Detected) -> SourceError:
    named = [name for name in source.tensors if EXPERT_HINT.search(name)]
    if not named:
        return not_a_moe(source, detected)
    known = ", ".join(family.name for family in FAMILIES)
    return SourceError(
        f"{source.path}: {detected.why}, which is not a known family ({known}), and its experts "
        f"follow no known naming: {quote_some(named, 6)}"
    )


def _place(
    source: Source,
    mapping: SourceMapping,
    matches: Mapping[str, re.Match[str]],
    hyper: Mapping[str, int],
) -> _Found:
    found = _Found()
    for name, tensor in source.tensors.items():
        drop = "empty" if tensor.n_weights == 0 else drop_rule_of(DROPS, name)
        if name in matches:
            rule = _rule_of(source, tensor, matches[name]["what"], hyper)
            _place_expert(mapping, found, tensor, matches[name], rule)
        elif drop is not None:
            mapping.dropped.setdefault(drop, []).append(name)
            mapping.assignments[name] = Assignment("dropped", drop)
        elif tensor.dtype.id >= FIRST_OTHER_ID or not tensor.dtype.is_known:
            mapping.assignments[name] = Assignment("unmatched", "")
            mapping.problems.append(
                f"tensor {quote(name)} has type {tensor.dtype.name}, which a container cannot hold"
            )
        else:
            _keep(mapping, found, tensor)
    return found


def _keep(mapping: SourceMapping, found: _Found, tensor: SourceTensor) -> None:
    found.others.append(tensor)
    mapping.assignments[tensor.name] = Assignment("resident", "kept", Role.OTHER.label)


def _rule_of(
    source: Source, tensor: SourceTensor, what: str, hyper: Mapping[str, int]
) -> ExpertRule:
    """How a stack lies: its name says it, or the sizes of the config do (a square one is refused).

    With biases beside it nobody knows: outputs of transposed stacks are interleaved in gpt-oss.
    """
    parts = _PROJECTIONS[what]
    outputs = (len(parts) * hyper["expert_width"], hyper["hidden_size"])
    if PartRole.DOWN in parts:
        outputs = outputs[::-1]
    fits = source.kind == "safetensors" and tensor.shape[1:] == outputs[::-1]
    biased = tensor.name.removesuffix(".weight") + "_bias" in source.tensors
    return ExpertRule("", parts, transposed=what in _TRANSPOSED or (fits and not biased))


def _place_expert(
    mapping: SourceMapping,
    found: _Found,
    tensor: SourceTensor,
    match: re.Match[str],
    rule: ExpertRule,
) -> None:
    layer, number = int(match["layer"]), match.groupdict().get("expert")
    expert = -1 if number is None else int(number)
    label = "+".join(part.label for part in rule.parts)
    mapping.assignments[tensor.name] = Assignment("expert", "experts", label, layer, expert)
    n_dims = 3 if expert < 0 else 2
    outputs = tensor.shape[-1 if rule.transposed else -2] if len(tensor.shape) == n_dims else 1
    if outputs % len(rule.parts) or len(tensor.shape) != n_dims or 0 in tensor.shape:
        mapping.problems.append(
            f"tensor {quote(tensor.name)}: expected {n_dims} dimensions, found {list(tensor.shape)}"
        )
        return
    if tensor.dtype.id >= FIRST_OTHER_ID or not tensor.dtype.is_known:
        mapping.problems.append(
            f"tensor {quote(tensor.name)} has type {tensor.dtype.name}, which a container "
            "cannot hold"
        )
        return
    slots = found.experts[layer]
    for number_of, part, piece in slices_of(tensor, rule, expert):
        other = slots.setdefault((number_of, part), piece)
        if other is not piece:
            mapping.problems.append(
                f"layer {layer} expert {number_of} {part.label} is there twice: "
                f"{quote(other.tensor.name)} and {quote(tensor.name)}"
            )
            return


def _set_aside(mapping: SourceMapping, found: _Found, n_experts: int) -> None:
    """Keep, but do not stream, incomplete experts beyond the number that the config states: those
    that do nothing (LongCat's zero experts) are saved with the projections nobody reads."""
    for layer, slots in found.experts.items():
        beyond = {slot: piece for slot, piece in slots.items() if 0 < n_experts <= slot[0]}
        if not beyond or any({(e, part) for part in PARTS} <= beyond.keys() for e, _ in beyond):
            continue
        for slot, piece in beyond.items():
            del slots[slot]
            _keep(mapping, found, piece.tensor)
        mapping.notes.append(
            f"layer {layer}: {len(beyond)} tensors of experts beyond the {n_experts} of the config "
            "are kept as optional ones"
        )


def _stated(detected: Detected) -> dict[str, int]:
    """Return what the config says under usual names; 0 for what it does not say."""
    values = {}
    for name, keys in _CONFIG_NAMES.items():
        names = [key.format(arch=detected.arch) for key in keys]
        stated = (level[key] for level in detected.levels for key in names if key in level)
        plain = (v for v in stated if isinstance(v, int) and not isinstance(v, bool) and v > 0)
        values[name] = next(plain, 0)
    return values


def _check(source: Source, mapping: SourceMapping, found: _Found, hyper: dict[str, int]) -> None:
    unfilled: list[str] = []
    for layer, slots in sorted(found.experts.items()):
        n_experts = 1 + max(expert for expert, _ in slots)
        unfilled += [
            f"layer {layer} expert {expert} {part.label}"
            for expert in range(n_experts)
            for part in PARTS
            if (expert, part) not in slots
        ]
        if hyper["top_k"] > n_experts:
            mapping.problems.append(
                f"layer {layer}: {hyper['top_k']} experts per token, but only {n_experts} experts"
            )
        _check_count(mapping, layer, n_experts, hyper["n_experts"], source.kind)
    if unfilled:
        gates = [part for slots in found.experts.values() for _, part in slots]
        hint = "" if PartRole.GATE in gates else "; a container holds gated experts only"
        mapping.problems.append(
            f"{len(unfilled)} expert slots are not filled: {quote_some(unfilled, 4)}{hint}"
        )
    _check_orientation(mapping, found, hyper)


def _check_count(
    mapping: SourceMapping, layer: int, found: int, stated: int, source_kind: str
) -> None:
    """GGUF states how long its stacks are; of pruned checkpoints the config is often left alone."""
    if stated in (0, found):
        return
    text = f"layer {layer} has {found} experts, the metadata say {stated}"
    (mapping.problems if source_kind == "gguf" else mapping.warnings).append(text)


def _check_orientation(mapping: SourceMapping, found: _Found, hyper: dict[str, int]) -> None:
    """Weights must be [outputs, inputs]; a square stack of an unknown family cannot be told."""
    hidden = stated = hyper["hidden_size"]
    for slots in found.experts.values():
        for (_, part), piece in slots.items():
            inner = piece.rows if part is PartRole.DOWN else piece.cols
            hidden = hidden or inner
            stacked_hf = mapping.source_kind == "safetensors" and len(piece.tensor.shape) == 3
            told = piece.tensor.name.split(".")[-2] in _TRANSPOSED
            square = stacked_hf and piece.tensor.shape[1] == piece.tensor.shape[2]
            if inner != hidden or (stacked_hf and not told and (square or not stated)):
                mapping.problems.append(
                    f"tensor {quote(piece.tensor.name)}: cannot tell outputs from inputs: expected "
                    f"hidden size {hidden} {'rows' if part is PartRole.DOWN else 'columns'}, "
                    f"found {list(piece.tensor.shape)}"
                )
                return
    hyper["hidden_size"] = hidden


def _resident(tensor: SourceTensor) -> MappedResident:
    shape = tensor.shape or (1,)
    while len(shape) > MAX_DIMS:
        shape = (shape[0] * shape[1], *shape[2:])
    return MappedResident(tensor.name, tensor, Role.OTHER, Group.OPTIONAL, -1, shape)


def _rows(found: _Found, hyper: Mapping[str, int]) -> list[MappedRow]:
    rows = []
    for layer, slots in sorted(found.experts.items()):
        n_experts = 1 + max(expert for expert, _ in slots)
        experts = tuple({part: slots[e, part] for part in PARTS} for e in range(n_experts))
        rows.append(MappedRow(layer, int(layer >= hyper["n_layers"]), experts))
    return rows


def _finish(
    source: Source, detected: Detected, mapping: SourceMapping, hyper: Mapping[str, int]
) -> None:
    n_layers, moe = hyper["n_layers"], {row.layer for row in mapping.rows if row.stream == 0}
    widths = {slots[PartRole.GATE].rows for row in mapping.rows for slots in row.experts}
    # The first by name: a container keeps names, not the order of the source's files.
    embeddings = [name for name in source.tensors if _EMBEDDINGS.fullmatch(name)]
    embedding = source.tensors[min(embeddings)] if embeddings else None
    vocab = embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else 0
    lacks = f"family {quote(mapping.family)} is not known to this version{_strange(mapping)}"
    mapping.warnings.append(f"the container will not run: {lacks}")
    mapping.spec = {
        "family": mapping.family,
        "source_kind": source.kind,
        "executable": False,
        "executable_lacks": lacks,
        "n_layers": n_layers,
        "n_mtp_layers": max(0, max(row.layer for row in mapping.rows) + 1 - n_layers),
        "hidden_size": hyper["hidden_size"],
        "vocab_size": vocab,
        "context_length": hyper["context_length"],
        "top_k": hyper["top_k"],
        "expert_width": widths.pop() if len(widths) == 1 else 0,
        "moe_layers": [int(layer in moe) for layer in range(n_layers)],
        "tokenizer": "hf-json" if "tokenizer.json" in source.blobs else "none",
        "bos_id": -1,
        "eos_ids": [],
        "n_tokens": vocab,
        **{f"graph.{key}": value for key, value in _graph(hyper).items()},
        **params_of(mapping.residents, mapping.rows, hyper["top_k"]),
    }


def _strange(mapping: SourceMapping) -> str:
    """Name the modules of layers, or else their tensors, that no family of the table has either."""
    known = {
        rule.pattern.split(".", 2)[2]
        for family in FAMILIES
        for _, form in family.forms
        for rule in form.tensors
        if rule.pattern.startswith(("layers.{layer}.", "blk.{layer}."))
    }
    found = {m[1] for r in mapping.residents if (m := _IN_LAYER.match(r.name)) is not None}
    modules = {name.split(".")[0] for name in found if "." in name}
    strange = modules - {name.split(".")[0] for name in known}
    if not strange:  # below a module of another name the same tensors mean the same
        tails = {name.partition(".")[2] for name in known}
        strange = {name for name in found - known if name.partition(".")[2] not in tails}
    if not strange:
        return "; its tensors have the names of known families, but what it computes is not known"
    return f", its layers have {quote_some(sorted(strange), 4)}"


def _graph(hyper: Mapping[str, int]) -> dict[str, Any]:
    """The switches of a graph that nobody knows: what the config says plainly, else nothing."""
    return {
        "attention": "unknown",
        "n_heads": hyper["n_heads"],
        "n_kv_heads": hyper["n_kv_heads"],
        "head_dim": hyper["head_dim"],
        "attention_scale": 0.0,
        "qkv_bias": False,
        "o_bias": False,
        "qk_norm": "unknown",
        "clip_qkv": 0.0,
        "windows": [0] * hyper["n_layers"],
        "norm": "unknown",
        "norm_eps": 0.0,
        "rope_dim": 0,
        "rope_pairing": "unknown",
        "rope_inv_freq": [],
        "rope_factor": 1.0,
        "activation": "unknown",
        "router_score": "unknown",
        "router_norm": False,
        "router_scale": 1.0,
        "shared_width": 0,
        "shared_gated": False,
        "dense_width": 0,
    }
