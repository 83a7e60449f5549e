"""The census of a source whose family is in the table."""

from __future__ import annotations

from collections.abc import Iterator

from colibri_tools.container.format import Group, Role
from colibri_tools.errors import SourceError, quote, quote_some
from colibri_tools.families.checks import check_sizes, decide_and_check, shape_of
from colibri_tools.families.common import MTP_DROP
from colibri_tools.families.detect import Detected
from colibri_tools.families.hyper import read_hyper
from colibri_tools.families.mtp import MtpLayers, announced_layers, without_gguf_mtp
from colibri_tools.families.naming import NameTable, choose_prefix
from colibri_tools.families.result import (
    Assignment,
    ExpertSlots,
    MappedResident,
    MappedRow,
    SourceMapping,
    params_of,
    resident_name,
    sorted_residents,
)
from colibri_tools.families.schema import ExpertRule, Form, Prefix, TensorRule
from colibri_tools.families.spec import Facts, build_spec
from colibri_tools.families.state import (
    EXPERT_HINT,
    Census,
    drop_rule_of,
    not_a_moe,
    slices_of,
)
from colibri_tools.sources import Source, SourceTensor
from colibri_tools.sources.views import split_rows

__all__ = ["map_known"]


def map_known(source: Source, detected: Detected) -> SourceMapping:
    """Place every tensor of a source of a known family. Raises SourceError as `map_source`."""
    assert detected.family is not None
    family = detected.family
    form = family.form(source.kind)
    prefix = choose_prefix(form, source.tensors)
    mapping = SourceMapping(family.name, True, detected.why, source.kind)
    if not _has_experts(source, form, prefix):
        raise not_a_moe(source, detected)
    hyper = read_hyper(form, detected.levels, f"{source.path}: {detected.where}", detected.arch)
    census = Census(source, family, form, prefix, hyper, mapping)
    mapping.warnings.extend(hyper.warnings)
    n_announced = announced_layers(detected.levels, detected.arch)
    if source.kind == "gguf":
        without_gguf_mtp(hyper, n_announced)
    check_sizes(census)
    _place_all(census, MtpLayers(prefix.body, census.n_layers, n_announced, source.tensors))
    if n_announced and MTP_DROP.name not in mapping.dropped:
        mapping.warnings.append(
            f"the metadata announce {n_announced} multi-token-prediction layers, but no tensor of "
            "them is there; the container has none"
        )
    decide_and_check(census)
    if not mapping.problems:
        _finish(census, detected)
    return mapping


def _has_experts(source: Source, form: Form, prefix: Prefix) -> bool:
    table = NameTable(form, prefix)
    matches = (table.match(name) for name in source.tensors)
    if any(match is not None and isinstance(match.rule, ExpertRule) for match in matches):
        return True
    return any(EXPERT_HINT.search(name) for name in source.tensors)


# ---------------------------------------------------------------- names to slots


def _place_all(census: Census, mtp: MtpLayers) -> None:
    table = NameTable(census.form, census.prefix)
    unmatched, beyond = [], []
    for name, tensor in census.source.tensors.items():
        match = table.match(name)
        rule_name = drop_rule_of(census.form.drops, name)
        if mtp.owns(name):
            match, rule_name = None, MTP_DROP.name
        if match is not None and match.layer >= census.n_layers:
            beyond.append(name)
        elif match is not None and isinstance(match.rule, TensorRule):
            _place_resident(census, tensor, match.rule, match.layer)
        elif match is not None:
            assert isinstance(match.rule, ExpertRule)
            _place_expert(census, tensor, match.rule, match.layer, match.expert)
        elif rule_name is not None:
            census.mapping.dropped.setdefault(rule_name, []).append(name)
            census.mapping.assignments[name] = Assignment("dropped", rule_name)
        else:
            unmatched.append(name)
    _report_strangers(census, unmatched, beyond)


def _report_strangers(census: Census, unmatched: list[str], beyond: list[str]) -> None:
    for name in (*unmatched, *beyond):
        census.mapping.assignments[name] = Assignment("unmatched", "")
    if unmatched:
        census.problem(
            f"{len(unmatched)} source tensors match no rule of family {census.family.name}: "
            f"{quote_some(unmatched)}"
        )
    if beyond:
        census.problem(
            f"{len(beyond)} source tensors belong to layers beyond the {census.n_layers} of the "
            f"model: {quote_some(beyond)}"
        )


def _place_resident(census: Census, tensor: SourceTensor, rule: TensorRule, layer: int) -> None:
    label = "+".join(role.label for role in rule.roles)
    census.mapping.assignments[tensor.name] = Assignment("resident", rule.pattern, label, layer)
    if tensor.shape and tensor.shape[0] % len(rule.roles):
        census.problem(
            f"tensor {quote(tensor.name)}: expected {len(rule.roles)} matrices of equal height "
            f"below each other, found {list(tensor.shape)}"
        )
        return
    for role, piece in zip(rule.roles, split_rows(tensor, len(rule.roles)), strict=True):
        slot = (role, layer)
        other = census.residents.get(slot)
        if other is not None:
            census.problem(
                f"{resident_name(*slot)} is there twice: {quote(other[0].name)} and "
                f"{quote(tensor.name)}"
            )
        census.residents[slot] = (piece, rule)


def _place_expert(
    census: Census, tensor: SourceTensor, rule: ExpertRule, layer: int, expert: int
) -> None:
    parts = "+".join(part.label for part in rule.parts)
    census.mapping.assignments[tensor.name] = Assignment(
        "expert", rule.pattern, parts, layer, expert
    )
    slots = census.experts[layer]
    n_dims = 2 + rule.stacked - rule.is_bias
    outputs = -1 if rule.transposed or rule.is_bias else -2
    if len(tensor.shape) != n_dims or tensor.shape[outputs] % len(rule.parts):
        census.problem(
            f"tensor {quote(tensor.name)}: expected {n_dims} dimensions"
            f"{' and an even number of outputs' if len(rule.parts) > 1 else ''}, "
            f"found {list(tensor.shape)}"
        )
        return
    for found_expert, part, piece in slices_of(tensor, rule, expert):
        other = slots.get((found_expert, part))
        if other is not None:
            if other.tensor.name != tensor.name:
                census.problem(
                    f"layer {layer} expert {found_expert} {part.label} is there twice: "
                    f"{quote(other.tensor.name)} and {quote(tensor.name)}"
                )
            return
        slots[found_expert, part] = piece


# ---------------------------------------------------------------- result


def _finish(census: Census, detected: Detected) -> None:
    mapping = census.mapping
    mapping.residents = sorted_residents(_mapped_residents(census))
    mapping.rows = [
        MappedRow(layer, 0, tuple(_experts_of(census, layer))) for layer in census.moe_layers
    ]
    facts = Facts(
        source=census.source,
        family=census.family,
        form=census.form,
        detected=detected,
        hyper=census.hyper,
        dims=census.dims,
        features=census.features,
        moe_layers=census.moe_layers,
        residents=mapping.residents,
        rows=mapping.rows,
    )
    try:
        mapping.spec = build_spec(facts)
    except SourceError as error:
        mapping.problems.append(error.message)
        return
    mapping.spec |= params_of(mapping.residents, mapping.rows, census.hyper["top_k"])
    mapping.warnings.extend(facts.warnings)
    mapping.notes.extend(facts.notes)


def _mapped_residents(census: Census) -> Iterator[MappedResident]:
    for (role, layer), (tensor, rule) in census.residents.items():
        yield MappedResident(
            resident_name(role, layer),
            tensor,
            role,
            rule.group,
            layer,
            shape_of(census, rule, layer),
        )
    if census.features.get("tied"):
        embedding, rule = census.residents[Role.TOKEN_EMBD, -1]
        yield MappedResident(
            resident_name(Role.OUTPUT, -1),
            embedding,
            Role.OUTPUT,
            Group.EVERY_TOKEN,
            -1,
            shape_of(census, rule, -1),
            alias_of=resident_name(Role.TOKEN_EMBD, -1),
        )


def _experts_of(census: Census, layer: int) -> Iterator[ExpertSlots]:
    slots = census.experts[layer]
    for expert in range(census.n_experts[layer]):
        yield {part: slots[expert, part] for part in census.parts}
