"""docs/families.md, generated from the family table: `python -m colibri_tools.families.page`."""

from __future__ import annotations

from collections.abc import Iterator

from colibri_tools.container.format import Role
from colibri_tools.families.common import DROPS, MTP_DROP, REFUSALS, ROUTER_SCORES
from colibri_tools.families.schema import REQUIRED, ExpertRule, Family, Form
from colibri_tools.families.table import FAMILIES

__all__ = ["families_page"]

_INTRO = """\
# Families

Generated from the family table (`colibri_tools/families/rows/`) by `python -m
colibri_tools.families.page`; a test keeps this page and the table equal. A family is a
description, not a program: names of tensors, how experts are written, names and defaults of
hyper-parameters, and the switches of the graph. The engine knows only the switches
(docs/format.md, section 7).

Any other model whose experts follow a known naming pattern (per expert, fused, or stacked GGUF
tensors) can be repacked, inspected and verified; `run` refuses it and says what it lacks.

| family | Hugging Face `model_type` | GGUF architecture | router | q/k norm |
| --- | --- | --- | --- | --- |
"""

_EXECUTED = """
## What each family executes, and what proves it

By what the row can turn on; a model's own switches are in its container (`colibri inspect`). The
last column names the cases of `tests/oracle/cases.py` that `tests/test_logits.py` compares with
transformers, from Hugging Face and, where the row has a GGUF architecture, from GGUF;
`tests/oracle/test_live_llama_cpp.py` compares files of llama.cpp's converter with the same values.

| family | attention | windows | norms | feed-forward | router | cases |
| --- | --- | --- | --- | --- | --- | --- |
"""

_WINDOWS = {
    "all": "every layer",
    "layer_types": "by layer",
    "pattern": "by a pattern of layers",
    "tail": "the last layers",
    "none": "none",
}
_ORACLE = """
Each family is proven against transformers in float32, from both kinds of source, at every
position of prompts longer than any window (`tests/test_logits.py`; values by
`tests/oracle/make_oracle.py`), at one expert per token, some and all,
and every stored tensor is shown to matter (`tests/test_mutation.py`). GGUF files made by
llama.cpp's own converter give the same logits (`tests/oracle/test_live_llama_cpp.py`).

## What is executed

Grouped-query attention with a sliding window or chunks per layer, latent attention (MLA) with a
compressed KV, gated attention, attention sinks, layers without rope and their temperature, RMS and
layer norms of inputs and outputs, rope (default, linear, llama3 and yarn scaling, dynamic with a
fixed alpha, which become angular frequencies at conversion; on all or a part of a head), norms of
q and k before or after rope, experts gated by SiLU or by gpt-oss's clamped form, with biases,
scaled at their input or output, softmax and sigmoid routing with and without normalised weights (a
softmax over the chosen scores is one over all, normalised), within the best groups of experts and
with a bias on the choice, SparseMixer, shared experts with and without a sigmoid gate, dense
layers between MoE layers, tied output matrices, biases of attention, router and output, Granite's
multipliers, soft-capping of attention scores and logits (c * tanh(x / c); sinks are not capped).
Weights of every type that gguf decodes. Longrope has two sets of frequencies: the engine takes the
long one if the context it is opened for (`--ctx`, per sequence) is larger than the original one,
however short the text, as llama.cpp does; transformers goes by the text's length. Dynamic rope
scaling, whose frequencies change with every token, is refused by `run`.

Layers may have different ropes, by `rope_parameters` that are keyed by layer type or by a base of
their own (`rope.freq_base_swa` in GGUF, for architectures that have one), if they rotate as many
dimensions. `attn_logit_softcapping`, `final_logit_softcapping` and `rope_local_base_freq` of
config.json are read by transformers' code of none of these families: they are ignored with a
warning, and applied where the checkpoint names modeling code of its own (`auto_map`), whose logits
are then the reference. GGUF's keys of the two caps are applied. A cap on the router's logits is
refused by `run`.

How to add a family: [adding-a-family.md](adding-a-family.md).
"""
_FORMS = "\n## Written forms of experts\n"


def families_page() -> str:
    """Return the page as Markdown."""
    tables = [_INTRO, *map(_row, FAMILIES), _EXECUTED, *map(_executed, FAMILIES), _ORACLE]
    return "".join([*tables, *_limits(), *_forms(), *_defaults(), *_rules()])


def _row(family: Family) -> str:
    norms = {form.defaults["router_norm"] for _, form in family.forms}
    norm = "weights normalised" if norms == {True} else "weights normalised if the source says so"
    hf, gguf = (
        ", ".join(f"`{i}`" for i in form.ids) if form else "" for form in (family.hf, family.gguf)
    )
    router = f"{_score(family)}, top-k, {norm}"
    return f"| {family.name} | {hf} | {gguf} | {router} | {family.graph['qk_norm']} |\n"


def _executed(family: Family) -> str:
    """One line on what the graph of a family can have, by its switches, keys and tensors."""
    roles = {rule.role for _, form in family.forms for rule in form.tensors}
    keys = set(family.hf.keys)
    has = {name for name, value in family.graph.items() if value is True}
    biased = any(rule.is_bias for _, form in family.forms for rule in form.experts)
    attention = {"gqa": "grouped queries", "mla": "latent (MLA)"}[family.graph["attention"]]
    windows = _WINDOWS[family.hf.windows] if keys & {"window", "chunk"} else "none"
    norms = {"rms": "RMS", "layer": "LayerNorm"}[family.graph["norm"]]
    columns = (
        _listed(attention, gated="attention_gate" in has, sinks="sinks" in has),
        _listed(windows, chunks="chunk" in keys),
        norms + _places("pre_norm" not in family.graph, "post_norm" in has),
        _listed(
            "routed experts",
            biases=biased,
            shared_expert=Role.SHARED_GATE in roles,
            gate_of_the_shared_expert=Role.SHARED_ROUTER in roles,
            scaled_inputs="experts_scale_input" in has,
            dense_layers=Role.DENSE_GATE in roles,
        ),
        _listed(
            _score(family),
            bias=Role.ROUTER_BIAS in roles,
            bias_on_the_choice=Role.ROUTER_SELECT_BIAS in roles,
            groups="router_groups" in keys,
        ),
    )
    return f"| {family.name} | {' | '.join(columns)} | `{family.name}-*` |\n"


def _listed(first: str, **others: bool) -> str:
    return ", ".join([first, *(name.replace("_", " ") for name, there in others.items() if there)])


def _places(before: bool, behind: bool) -> str:
    return f" of {' and '.join(['inputs'] * before + ['outputs'] * behind)}"


def _score(family: Family) -> str:
    scores = {form.defaults["gating"]: None for _, form in family.forms}
    return " or ".join(ROUTER_SCORES[number] for number in scores)


def _limits() -> Iterator[str]:
    yield "\n## Known limits\n\n| family | limit |\n| --- | --- |\n"
    for family in FAMILIES:
        for limit in family.limits:
            yield f"| {family.name} | {limit} |\n"
    yield _FORMS


def _forms() -> Iterator[str]:
    """The written forms, each with the families that share it."""
    users: dict[tuple[ExpertRule, ...], list[str]] = {}
    for family in FAMILIES:
        for kind, form in family.forms:
            users.setdefault(form.experts, []).append(f"{family.name} ({kind})")
    for rules, names in users.items():
        yield f"\n**{', '.join(names)}**\n\n"
        for rule in rules:
            parts = " above ".join(part.label for part in rule.parts)
            yield f"- `{rule.pattern}`: {parts}, {_shape(rule)}\n"


def _shape(rule: ExpertRule) -> str:
    dims = ["inputs", "outputs"] if rule.transposed else ["outputs", "inputs"]
    if rule.is_bias:
        dims = ["outputs"]
    written = ", ".join(["experts", *dims] if rule.stacked else dims)
    return f"[{written}]" + (", outputs interleaved" if rule.interleaved else "")


def _defaults() -> Iterator[str]:
    yield (
        "\n## Defaults\n\nWhat a hyper-parameter is when the source does not state it, as"
        " transformers and llama.cpp resolve it.\nThe value used is written into the container.\n\n"
        "| family | source | defaults |\n| --- | --- | --- |\n"
    )
    for family in FAMILIES:
        for kind, form in family.forms:
            yield f"| {family.name} | {kind} | {_stated(form)} |\n"


def _stated(form: Form) -> str:
    shown = {
        name: value
        for name, value in form.defaults.items()
        if name in form.keys
        and value is not REQUIRED
        and not callable(value)
        and value not in (None, ())
    }
    return ", ".join(f"{name} {_text(value)}" for name, value in shown.items())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _rules() -> Iterator[str]:
    yield "\n## Left out by a named rule\n\n| rule | names | why |\n| --- | --- | --- |\n"
    for drop in (*DROPS, MTP_DROP):
        yield f"| {drop.name} | `{_cell(drop.regex)}` | {drop.why} |\n"
    yield (
        "\n## Refused by name\n\nStorage schemes that tensor names give away, unless config.json"
        " names one that is understood\n([sources.md](sources.md)).\n\n"
        "| scheme | names |\n| --- | --- |\n"
    )
    for refusal in REFUSALS:
        yield f"| {refusal.scheme} | `{_cell(refusal.regex)}` |\n"


def _cell(regex: str) -> str:
    return regex.replace("|", "\\|")


if __name__ == "__main__":
    print(families_page(), end="")
