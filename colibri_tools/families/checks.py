"""Decisions that tensors take, and the checks of a census: slots, dimensions, types."""

from __future__ import annotations

from collections import defaultdict

from colibri_tools.container.format import PartRole, Role
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.result import Assignment, resident_name
from colibri_tools.families.schema import TensorRule
from colibri_tools.families.state import MAX_EXPERTS, Census
from colibri_tools.families.tying import decide_output

__all__ = ["DIM_TEXT", "check_sizes", "decide_and_check", "shape_of"]

MAX_LAYERS = 4096

_CARRIED_TYPES = ("f32", "f16", "bf16", "mxfp4")


def decide_and_check(census: Census) -> None:
    """Decide layer kinds, features, tying and dimensions; add what does not fit to the problems."""
    _decide_layers(census)
    _decide_features(census)
    _decide_output(census)
    _check_filled(census)
    _decide_dims(census)
    _check_shapes(census)
    _check_types(census)


def check_sizes(census: Census) -> None:
    """Check the hyper-parameters that bound all others. Raises SourceError."""
    hyper, path = census.hyper, census.source.path
    for name, low, high in (
        ("n_layers", 1, MAX_LAYERS),
        ("hidden_size", 1, 1 << 24),
        ("n_heads", 1, 65536),
        ("top_k", 1, MAX_EXPERTS),
        ("context_length", 1, 1 << 31),
    ):
        if not low <= hyper[name] <= high:
            raise SourceError(f"{path}: {name}: expected {low} ... {high}, found {hyper[name]}")
    n_kv_heads = hyper["n_kv_heads"]
    if n_kv_heads is None or census.family.graph["attention"] == "mla":
        hyper.values["n_kv_heads"] = n_kv_heads = hyper["n_heads"]
    if not n_kv_heads or hyper["n_heads"] % n_kv_heads:
        raise SourceError(
            f"{path}: {hyper['n_heads']} attention heads cannot share {n_kv_heads} key/value heads"
        )


# ---------------------------------------------------------------- decisions from tensors


def _decide_layers(census: Census) -> None:
    """Which layers are MoE and how many experts each has: tensors decide, config is compared."""
    dense_roles = {rule.role for rule in census.form.tensors if rule.where == "dense"}
    for layer in range(census.n_layers):
        has_experts = layer in census.experts or (Role.ROUTER, layer) in census.residents
        has_dense = any((role, layer) in census.residents for role in dense_roles)
        expected = _expected_moe(census, layer)
        is_moe = has_experts or (not has_dense and expected)
        if census.form.layer_kinds and (has_experts or has_dense) and is_moe != expected:
            kinds = ("an MoE", "a dense") if expected else ("a dense", "an MoE")
            census.problem(
                f"layer {layer}: {kinds[0]} layer by the config, {kinds[1]} layer by its tensors"
            )
        if is_moe:
            census.moe_layers.append(layer)
            census.n_experts[layer] = _count_experts(census, layer)
    _compare_counts(census)


def _expected_moe(census: Census, layer: int) -> bool:
    hyper = census.hyper
    kinds = hyper["ffn_types"]
    if kinds is not None and layer < len(kinds):
        return bool(kinds[layer] != "dense")
    step, last = hyper["moe_step"], hyper["last_moe"]
    if layer in hyper["dense_layers"] or layer < hyper["first_dense"] or 0 <= last < layer:
        return False
    return bool(step <= 1 or (layer + 1) % step == 0)


def _count_experts(census: Census, layer: int) -> int:
    router = census.residents.get((Role.ROUTER, layer))
    if router is not None and len(router[0].shape) == 2:
        return int(router[0].shape[0])
    if census.hyper["n_experts"] is not None:
        return int(census.hyper["n_experts"])
    return 1 + max((expert for expert, _ in census.experts[layer]), default=0)


def _compare_counts(census: Census) -> None:
    expected = census.hyper["n_experts"]
    if expected is None:
        return
    odd = {layer: n for layer, n in census.n_experts.items() if n != expected}
    if not odd:
        return
    shown = ", ".join(f"layer {layer} has {n}" for layer, n in list(odd.items())[:4])
    text = f"the metadata say {expected} experts, but {shown}"
    if census.form.layer_kinds:
        census.mapping.warnings.append(f"{text}; the counts of the tensors are used")
    else:  # GGUF has no way to say so: the file is damaged or its axes are not what they seem
        census.problem(text)


def _decide_features(census: Census) -> None:
    named = {rule.feature for rule in census.form.tensors if rule.feature is not None}
    for feature in sorted(named | {"qkv_bias", "o_bias", "shared"}):
        rules = [rule for rule in census.form.tensors if rule.feature == feature]
        roles = {role for rule in rules for role in rule.roles}
        present = [t.name for (role, _), (t, _) in census.residents.items() if role in roles]
        says = _stated(census, feature)
        census.features[feature] = bool(rules) and (bool(present) or says is True)
        if present and says is False:
            census.problem(
                f"the metadata turn {feature} off, but {len(present)} tensors belong to it: "
                f"{quote_some(present)}"
            )


def _stated(census: Census, feature: str) -> bool | None:
    """What the source itself says about a feature, None for nothing."""
    names = ("shared_width", "n_shared") if feature == "shared" else (feature,)
    said = [bool(census.hyper[name]) for name in names if name in census.hyper.given]
    return said[0] if said else None


def _decide_output(census: Census) -> None:
    """Decide whether the output matrix is the embedding (see `tying`)."""
    embedding = census.residents.get((Role.TOKEN_EMBD, -1))
    output = census.residents.get((Role.OUTPUT, -1))
    if embedding is None:
        return
    decision = decide_output(
        census.source,
        census.hyper["tied"],
        embedding[0],
        output[0] if output else None,
        headless=census.prefix.body == "" and census.source.kind == "safetensors",
    )
    if decision.problem is not None:
        census.problem(decision.problem)
    if decision.warning is not None:
        census.mapping.warnings.append(decision.warning)
    census.features["tied"] = decision.tied
    if decision.tied and output is not None:
        del census.residents[Role.OUTPUT, -1]
        census.mapping.dropped["tied-output-copy"] = [output[0].name]
        census.mapping.assignments[output[0].name] = Assignment("dropped", "tied-output-copy")


# ---------------------------------------------------------------- checks


def _layers_of(census: Census, rule: TensorRule) -> list[int]:
    if rule.where == "model":
        return [-1]
    if rule.where == "layer":
        return list(range(census.n_layers))
    if rule.where == "moe":
        return census.moe_layers
    return [layer for layer in range(census.n_layers) if layer not in set(census.moe_layers)]


def _check_filled(census: Census) -> None:
    allowed: dict[Role, set[int]] = {}
    checked: set[Role] = set()
    missing: list[str] = []
    for rule in census.form.tensors:
        layers = _layers_of(census, rule)
        for role in rule.roles:
            allowed.setdefault(role, set())
        if not _applies(census, rule):
            continue
        for role in rule.roles:
            allowed[role].update(layers)
        wanted = rule.feature is None or census.features[rule.feature]
        if wanted and not rule.optional and rule.role not in checked:
            checked.add(rule.role)
            missing += [
                resident_name(rule.role, layer)
                for layer in layers
                if (rule.role, layer) not in census.residents
            ]
    if missing:
        census.problem(f"{len(missing)} tensors are missing: {quote_some(missing, 6)}")
    misplaced = [
        tensor.name
        for (role, layer), (tensor, _) in census.residents.items()
        if layer not in allowed[role]
    ]
    if misplaced:
        census.problem(
            f"{len(misplaced)} tensors have no use in a layer of that kind: {quote_some(misplaced)}"
        )
    _check_experts_filled(census)


def _applies(census: Census, rule: TensorRule) -> bool:
    if rule.unless is not None and census.features[rule.unless]:
        return False
    return rule.needs is None or census.features[rule.needs]


def _check_experts_filled(census: Census) -> None:
    unfilled: list[str] = []
    parts = census.parts
    for layer in census.moe_layers:
        slots, n_experts = census.experts[layer], census.n_experts[layer]
        unfilled += [
            f"layer {layer} expert {expert} {part.label}"
            for expert in range(n_experts)
            for part in parts
            if (expert, part) not in slots
        ]
        surplus = sorted({expert for expert, _ in slots if expert >= n_experts})
        if surplus:
            name = next(s.tensor.name for (e, _), s in slots.items() if e == surplus[0])
            census.problem(
                f"layer {layer}: expected {n_experts} experts (rows of its router), found expert "
                f"{surplus[-1]} (tensor {quote(name)})"
            )
        if census.hyper["top_k"] > n_experts:
            census.problem(
                f"layer {layer}: {census.hyper['top_k']} experts per token, but only {n_experts} "
                "experts"
            )
    if unfilled:
        census.problem(f"{len(unfilled)} expert slots are not filled: {quote_some(unfilled, 4)}")
    dense = [layer for layer in census.experts if layer not in set(census.moe_layers)]
    assert not dense


def _decide_dims(census: Census) -> None:
    hyper, dims = census.hyper, census.dims
    dims["1"] = 1
    dims["hidden"] = hyper["hidden_size"]
    dims["head"] = _head_dim(census)
    dims["rope"] = (hyper.get("rope_dim") or dims["head"]) // 2
    dims["value"] = hyper["value_dim"] or dims["head"]
    dims["heads"] = hyper["n_heads"]
    dims["q"] = hyper["n_heads"] * dims["head"]
    dims["kv"] = hyper["n_kv_heads"] * dims["head"]
    dims["v"] = hyper["n_kv_heads"] * dims["value"]
    dims["attended"] = hyper["n_heads"] * dims["value"]
    _decide_latent_dims(census)
    embedding = census.residents.get((Role.TOKEN_EMBD, -1))
    dims["vocab"] = embedding[0].shape[0] if embedding else 0
    if hyper["vocab_size"] is not None:
        dims["vocab"] = hyper["vocab_size"]
    dims["width"] = hyper["expert_width"] or _first_width(census)
    for name, role in (("shared", Role.SHARED_GATE), ("dense", Role.DENSE_GATE)):
        tensor = next((t for (r, _), (t, _) in census.residents.items() if r is role), None)
        stated = hyper[f"{name}_width"]
        if name == "shared" and stated is None and hyper["n_shared"] is not None:
            stated = hyper["n_shared"] * dims["width"]
        dims[name] = stated or (tensor.shape[0] if tensor is not None else 0)


def _head_dim(census: Census) -> int:
    stated, n_heads = census.hyper["head_dim"], census.hyper["n_heads"]
    if census.hyper["nope_dim"] is not None:
        return int(census.hyper["nope_dim"]) + int(census.hyper["rope_dim"])
    if stated:
        return int(stated)
    query = census.residents.get((Role.ATTN_Q, 0))
    if query is not None and len(query[0].shape) == 2 and query[0].shape[0] % n_heads == 0:
        return query[0].shape[0] // int(n_heads)
    return int(census.hyper["hidden_size"]) // int(n_heads)


def _decide_latent_dims(census: Census) -> None:
    """Dimensions of latent attention; zero elsewhere."""
    hyper, dims = census.hyper, census.dims
    query = census.residents.get((Role.ATTN_Q_A, 0))
    dims["q_lora"] = hyper["q_lora"] or (query[0].shape[0] if query is not None else 0)
    dims["kv_lora"] = hyper["kv_lora"] or 0
    rotated = 2 * dims["rope"] if dims["kv_lora"] else 0
    dims["nope"] = dims["head"] - rotated
    dims["latent"] = dims["kv_lora"] + rotated
    dims["kv_b"] = dims["heads"] * (dims["nope"] + dims["value"])


def _first_width(census: Census) -> int:
    for layer in census.moe_layers:
        piece = census.experts[layer].get((0, PartRole.GATE))
        if piece is not None:
            return piece.rows
    return 0


DIM_TEXT = {
    "vocab": "vocabulary",
    "hidden": "hidden size",
    "q": "heads x head size",
    "kv": "key/value heads x head size",
    "head": "head size",
    "heads": "heads",
    "value": "value head size",
    "v": "key/value heads x value head size",
    "attended": "heads x value head size",
    "nope": "head size without its rotated part",
    "q_lora": "rank of q",
    "kv_lora": "rank of keys and values",
    "latent": "rank of keys and values + rotated dimensions",
    "kv_b": "heads x (unrotated and value head sizes)",
    "experts": "experts",
    "shared": "shared expert width",
    "dense": "dense width",
    "width": "expert width",
    "rope": "rotated dimensions / 2",
    "1": "1",
}

_PART_SHAPES = {
    PartRole.GATE: ("width", "hidden"),
    PartRole.UP: ("width", "hidden"),
    PartRole.DOWN: ("hidden", "width"),
    PartRole.GATE_BIAS: ("1", "width"),
    PartRole.UP_BIAS: ("1", "width"),
    PartRole.DOWN_BIAS: ("1", "hidden"),
}


def _check_shapes(census: Census) -> None:
    wrong: list[str] = []
    for (_, layer), (tensor, rule) in census.residents.items():
        expected = shape_of(census, rule, layer)
        if _without_ones(tensor.shape) != _without_ones(expected):
            wrong.append(_shape_text(tensor.name, tensor.shape, rule.shape, expected))
    seen: set[str] = set()
    for layer in census.moe_layers:
        for (_, part), piece in census.experts[layer].items():
            names = _PART_SHAPES[part]
            expected = (census.dims[names[0]], census.dims[names[1]])
            if (piece.rows, piece.cols) != expected and piece.tensor.name not in seen:
                seen.add(piece.tensor.name)
                found = (piece.rows, piece.cols)
                wrong.append(
                    f"{_shape_text(piece.tensor.name, found, names, expected)} for the "
                    f"{part.label} part of one expert"
                )
    if not wrong:
        return
    for text in wrong[:3]:
        census.problem(text)
    more = f"{len(wrong) - 3} more tensors have an unexpected shape; " if len(wrong) > 3 else ""
    census.problem(
        f"{more}the metadata and the weights are not of one model: fetch both from one revision"
    )


def shape_of(census: Census, rule: TensorRule, layer: int) -> tuple[int, ...]:
    """Return the shape that a rule gives a tensor of `layer`."""
    return tuple(
        census.n_experts.get(layer, 0) if dim == "experts" else census.dims[dim]
        for dim in rule.shape
    )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    n_ones = next((i for i, dim in enumerate(shape) if dim != 1), len(shape))
    return shape[n_ones:]


def _shape_text(
    name: str, found: tuple[int, ...], names: tuple[str, ...], expected: tuple[int, ...]
) -> str:
    meaning = " by ".join(DIM_TEXT[dim] for dim in names)
    return f"tensor {quote(name)}: expected {list(expected)} ({meaning}), found {list(found)}"


def _check_types(census: Census) -> None:
    wrong: dict[str, list[str]] = defaultdict(list)
    for name, assignment in census.mapping.assignments.items():
        tensor = census.source.tensors[name]
        if assignment.action not in ("resident", "expert"):
            continue
        try:
            tensor.dtype.require_known(tensor.name)
        except SourceError as error:
            census.mapping.problems.insert(0, error.message)  # the cause of others
            continue
        # Block formats have no name in safetensors: they come from a container, or from scales.
        carried = tensor.dtype.is_quantized or tensor.dtype.name in _CARRIED_TYPES
        if census.source.kind == "safetensors" and not carried:
            wrong[tensor.dtype.safetensors or tensor.dtype.name].append(name)
    for dtype, names in wrong.items():
        census.problem(
            f"{len(names)} tensors of type {dtype}, expected F32, F16 or BF16 (quantized, without "
            f"scales that config.json explains?): {quote_some(names)}"
        )
