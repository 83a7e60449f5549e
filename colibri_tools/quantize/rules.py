"""Which type a matrix gets: a base type or a named mix, then rules, the last that matches wins.

A rule is `SELECTOR=TYPE` or `SELECTOR: TYPE`. A selector is one or more of these, all of which
must hold:

- a role: `gate`, `up`, `down` (of experts, shared and dense networks), `q`, `k`, `v`, `kv`, `o`,
  `attention`, `experts`, `shared`, `dense`, `resident` (all but experts), `embedding`, `output`,
  `router`
- `layer N` or `layers A-B`, ends included
- `hottest P%` or `coldest P%` of all experts, by a routing profile

Norms, biases and other vectors keep their type always; routers keep theirs unless a rule names
`router`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.dtypes import DType, dtype_by_name
from colibri_tools.errors import UsageError, quote

__all__ = [
    "FALLBACKS",
    "MIXES",
    "TYPES",
    "Choice",
    "Policy",
    "Rule",
    "Target",
    "fallback",
    "make_policy",
    "parse_rule",
]

TYPES = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4", "f16", "bf16", "f32",
)  # fmt: skip
"""What matrices can be encoded as."""

FALLBACKS = {
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "iq4_xs": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_nl": "f16",
    "q4_0": "f16",
    "q4_1": "f16",
    "q5_0": "f16",
    "q5_1": "f16",
    "q8_0": "f16",
    "mxfp4": "f16",
}
"""What a type becomes where its block does not divide the row: never fewer bits."""


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix that may get another type.

    `role` is the label of a resident role (`attn_q`, `shared_down`, ...), or of an expert part
    (`gate`, `up`, `down`) with `expert` set. `heat` is the expert's place among all, by falling
    hotness, from 0 (the hottest) to just below 1; None without a profile.
    """

    role: str
    layer: int
    cols: int
    expert: int | None = None
    heat: float | None = None
    n_layers: int = 1

    @property
    def is_expert(self) -> bool:
        """Whether this is a part of an expert block."""
        return self.expert is not None


Test = Callable[[Target], bool]


def _part(*names: str) -> Test:
    ends = tuple(f"_{name}" for name in names)
    return lambda t: (
        t.role in names
        if t.is_expert
        else t.role.startswith(("shared_", "dense_")) and t.role.endswith(ends)
    )


def _resident(*names: str) -> Test:
    return lambda t: not t.is_expert and t.role in names


def _starts(prefix: str) -> Test:
    return lambda t: not t.is_expert and t.role.startswith(prefix) and t.role != "shared_router"


_ROLES: dict[str, Test] = {
    "gate": _part("gate"),
    "up": _part("up"),
    "down": _part("down"),
    "experts": lambda t: t.is_expert,
    "resident": lambda t: not t.is_expert,
    "attention": _starts("attn_"),
    "shared": _starts("shared_"),
    "dense": _starts("dense_"),
    "q": _resident("attn_q", "attn_q_a", "attn_q_b"),
    "k": _resident("attn_k", "attn_k_b"),
    "v": _resident("attn_v", "attn_v_b"),
    "kv": _resident("attn_kv_a", "attn_kv_b"),
    "o": _resident("attn_o"),
    "embedding": _resident("token_embd"),
    "output": _resident("output"),
    "router": _resident("router", "shared_router"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as it was written, what it selects, and the type it gives."""

    text: str
    tests: tuple[Test, ...]
    dtype: DType
    names_router: bool = False
    needs_heat: bool = False
    is_built_in: bool = False

    def matches(self, target: Target) -> bool:
        """Return whether the rule holds for a matrix."""
        return all(test(target) for test in self.tests)


_RULE = re.compile(r"\s*(?P<selector>[^=:]+?)\s*[=:]\s*(?P<type>[\w]+)\s*")
_LAYERS = re.compile(r"layers?\s+(\d+)(?:\s*-\s*(\d+))?")
_HEAT = re.compile(r"(hottest|coldest)\s+(\d+(?:\.\d+)?)\s*%")


def parse_rule(text: str) -> Rule:
    """Return the rule that `text` writes. Raises UsageError for anything else."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise UsageError(f"rule {quote(text)}: expected SELECTOR=TYPE, for example 'down=q6_k'")
    rest, tests = found["selector"].lower(), []
    needs_heat = False
    for match in list(_LAYERS.finditer(rest)):
        tests.append(_layer_test(text, int(match[1]), int(match[2] or match[1])))
    rest = _LAYERS.sub(" ", rest)
    for match in list(_HEAT.finditer(rest)):
        tests.append(_heat_test(text, match[1], float(match[2])))
        needs_heat = True
    words = _HEAT.sub(" ", rest).replace(",", " ").split()
    for word in words:
        if word not in _ROLES:
            raise UsageError(
                f"rule {quote(text)}: {quote(word)} is no selector; there are "
                f"{', '.join(_ROLES)}, 'layers A-B', 'hottest P%' and 'coldest P%'"
            )
        tests.append(_ROLES[word])
    return Rule(text, tuple(tests), type_named(found["type"]), "router" in words, needs_heat)


def type_named(name: str) -> DType:
    """Return a type that can be encoded. Raises UsageError for another name."""
    if name.lower() not in TYPES:
        raise UsageError(f"type {quote(name)}: expected one of {', '.join((*TYPES, *MIXES))}")
    return dtype_by_name(name.lower())


def _layer_test(text: str, first: int, last: int) -> Test:
    if last < first:
        raise UsageError(f"rule {quote(text)}: layers {first}-{last} are none")
    return lambda t: first <= t.layer <= last


def _heat_test(text: str, which: str, percent: float) -> Test:
    if not 0 < percent <= 100:
        raise UsageError(f"rule {quote(text)}: expected a share above 0 % and up to 100 %")
    share = percent / 100
    if which == "hottest":
        return lambda t: t.heat is not None and t.heat < share
    return lambda t: t.heat is not None and t.heat >= 1 - share


def _more_bits(t: Target) -> bool:
    """The first and last eighth of layers and every third between: errors there cost most."""
    eighth = t.n_layers // 8
    return t.layer < eighth or t.layer >= t.n_layers - eighth or (t.layer - eighth) % 3 == 2


def _mix(base: str, more: str, best: str) -> tuple[tuple[str, tuple[Test, ...], str], ...]:
    """Attention and the output matrix are used by every token, and small beside the experts."""
    down = (_ROLES["down"], _more_bits)
    return (
        ("all", (), base),
        ("down in the outer layers and every third", down, more),
        ("attention", (_ROLES["attention"],), more),
        ("output", (_ROLES["output"],), best),
    )


MIXES: dict[str, tuple[tuple[str, tuple[Test, ...], str], ...]] = {
    "q2_k_m": _mix("q2_k", "q3_k", "q6_k"),
    "q3_k_m": _mix("q3_k", "q4_k", "q6_k"),
    "q4_k_m": _mix("q4_k", "q6_k", "q6_k"),
    "q5_k_m": _mix("q5_k", "q6_k", "q6_k"),
}
"""Named mixes: rows of (what, tests, type), the last that matches wins."""


def fallback(dtype: DType, cols: int) -> DType:
    """Return `dtype`, or what replaces it in rows of `cols` weights that it does not divide."""
    while cols % dtype.block_weights != 0:
        dtype = dtype_by_name(FALLBACKS[dtype.name])
    return dtype


@dataclass(frozen=True, slots=True)
class Choice:
    """The type a matrix gets, what the rules wanted, and the rule that decided."""

    dtype: DType
    wanted: DType
    rule: str

    @property
    def fell_back(self) -> bool:
        """Whether the rows are no multiple of the wanted type's block."""
        return self.dtype != self.wanted


@dataclass
class Policy:
    """A base type or mix with rules. `used` collects the rules that decided something."""

    name: str
    rules: tuple[Rule, ...]
    used: set[str] = field(default_factory=set)

    def choose(self, target: Target, *more: Target) -> Choice | None:
        """Return the choice for a matrix, or None where it keeps its type.

        `more` are other uses of the same matrix: a tied embedding is the output matrix too, and a
        rule for either decides.
        """
        for rule in reversed(self.rules):
            if not any(rule.matches(use) for use in (target, *more)):
                continue
            if target.role in ("router", "shared_router") and not rule.names_router:
                continue
            self.used.add(rule.text)
            return Choice(fallback(rule.dtype, target.cols), rule.dtype, rule.text)
        return None

    def unused(self) -> list[str]:
        """Return the rules of the user that decided nothing: most likely mistakes."""
        rules = (rule for rule in self.rules if not rule.is_built_in)
        return [rule.text for rule in rules if rule.text not in self.used]

    def explain(self) -> dict[str, Any] | None:
        """Return how types were chosen beyond rules, None for by rules alone."""
        return None

    @property
    def needs_heat(self) -> bool:
        """Whether a rule asks for hotness, so that a routing profile is needed."""
        return any(rule.needs_heat for rule in self.rules)


def make_policy(type_name: str, rules: Sequence[str] = ()) -> Policy:
    """Return the policy of `--type` and `--rule`. Raises UsageError for unknown names."""
    name = type_name.lower()
    rows: Iterable[tuple[str, tuple[Test, ...], str]] = MIXES.get(name, (("all", (), name),))
    base = [
        Rule(f"{name}, {what}", tests, type_named(dtype), is_built_in=True)
        for what, tests, dtype in rows
    ]
    return Policy(name, (*base, *(parse_rule(text) for text in rules)))
