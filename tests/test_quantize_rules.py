"""Rules and mixes of types: what a matrix gets, and what is refused."""

from __future__ import annotations

import pytest

from colibri_tools import native
from colibri_tools.dtypes import dtype_by_name
from colibri_tools.errors import UsageError
from colibri_tools.quantize.rules import (
    FALLBACKS,
    MIXES,
    TYPES,
    Target,
    fallback,
    make_policy,
    parse_rule,
)


def target(role: str, layer: int = 0, *, expert: int | None = None, **more: object) -> Target:
    return Target(role, layer, **{"cols": 256, "expert": expert, "n_layers": 16} | more)  # type: ignore[arg-type]


def name_of(policy: object, t: Target) -> str | None:
    choice = policy.choose(t)  # type: ignore[attr-defined]
    return None if choice is None else choice.dtype.name


def test_every_named_type_has_an_encoder() -> None:
    assert all(native.can_quantize(dtype_by_name(name).id) for name in TYPES)


def test_the_base_type_is_for_all_but_routers() -> None:
    policy = make_policy("q4_k")
    assert name_of(policy, target("attn_q")) == "q4_k"
    assert name_of(policy, target("down", expert=3)) == "q4_k"
    assert name_of(policy, target("router")) is None
    assert name_of(policy, target("shared_router")) is None
    assert name_of(make_policy("q4_k", ["router=q8_0"]), target("router")) == "q8_0"
    assert name_of(make_policy("q4_k", ["resident=q8_0"]), target("router")) is None


def test_the_last_rule_that_matches_wins() -> None:
    policy = make_policy("q4_k", ["down=q6_k", "layers 0-3: q5_k", "experts down layer 2 = q8_0"])
    assert name_of(policy, target("down", 9, expert=0)) == "q6_k"
    assert name_of(policy, target("down", 3, expert=0)) == "q5_k"
    assert name_of(policy, target("down", 2, expert=0)) == "q8_0"
    assert name_of(policy, target("shared_down", 2)) == "q5_k"
    assert name_of(policy, target("shared_down", 4)) == "q6_k"
    assert name_of(policy, target("gate", 4, expert=0)) == "q4_k"


@pytest.mark.parametrize(
    ("selector", "yes", "no"),
    [
        ("gate", [("gate", 0), ("shared_gate", None), ("dense_gate", None)], [("attn_gate", None)]),
        ("experts", [("up", 1)], [("shared_up", None)]),
        ("shared", [("shared_up", None)], [("up", 1), ("shared_router", None)]),
        ("resident", [("attn_o", None), ("output", None)], [("up", 1)]),
        ("attention", [("attn_q", None), ("attn_kv_b", None)], [("output", None)]),
        ("embedding", [("token_embd", None)], [("output", None)]),
        ("v", [("attn_v", None), ("attn_v_b", None)], [("attn_q", None)]),
    ],
)
def test_selectors(
    selector: str, yes: list[tuple[str, int | None]], no: list[tuple[str, int | None]]
) -> None:
    rule = parse_rule(f"{selector}=q8_0")
    assert all(rule.matches(target(role, expert=e)) for role, e in yes)
    assert not any(rule.matches(target(role, expert=e)) for role, e in no)


def test_hot_and_cold_experts() -> None:
    policy = make_policy("q3_k", ["hottest 10%: q6_k", "coldest 25 % = q2_k"])
    assert policy.needs_heat
    assert name_of(policy, target("up", expert=0, heat=0.05)) == "q6_k"
    assert name_of(policy, target("up", expert=0, heat=0.1)) == "q3_k"
    assert name_of(policy, target("up", expert=0, heat=0.75)) == "q2_k"
    assert name_of(policy, target("attn_q")) == "q3_k"


def test_mixes_give_down_projections_more_bits_in_some_layers() -> None:
    policy = make_policy("q4_k_m")
    down = [name_of(policy, target("down", layer, expert=1)) for layer in range(16)]
    assert down[:2] == ["q6_k"] * 2 == down[-2:]
    assert down.count("q6_k") == 8
    assert name_of(policy, target("attn_v", 5)) == "q6_k"
    assert name_of(policy, target("attn_q", 5)) == "q6_k"
    assert name_of(policy, target("output", -1)) == "q6_k"
    assert name_of(policy, target("gate", 5, expert=1)) == "q4_k"
    assert set(MIXES) == {"q2_k_m", "q3_k_m", "q4_k_m", "q5_k_m"}


def test_fallbacks_never_have_fewer_bits_and_always_end() -> None:
    for name in TYPES:
        dtype = dtype_by_name(name)
        for cols in (40, 48, 96, 288, 256):
            found = fallback(dtype, cols)
            assert cols % found.block_weights == 0
            assert found.bits_per_weight >= dtype.bits_per_weight
    assert fallback(dtype_by_name("q4_k"), 96).name == "q5_0"
    assert fallback(dtype_by_name("q4_k"), 40).name == "f16"
    assert set(FALLBACKS) <= set(TYPES)


def test_a_choice_says_what_was_wanted_and_why() -> None:
    choice = make_policy("q4_k", ["down=q6_k"]).choose(target("down", expert=0, cols=96))
    assert choice is not None and choice.fell_back
    assert (choice.dtype.name, choice.wanted.name, choice.rule) == ("q8_0", "q6_k", "down=q6_k")


def test_rules_that_decide_nothing_are_told() -> None:
    policy = make_policy("q4_k", ["shared=q8_0", "down=q6_k"])
    policy.choose(target("down", expert=0))
    assert policy.unused() == ["shared=q8_0"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("down", "SELECTOR=TYPE"),
        ("=q4_k", "SELECTOR=TYPE"),
        ("dwon=q4_k", "no selector"),
        ("down=q9_k", "expected one of"),
        ("down=iq2_xs", "expected one of"),
        ("layers 5-3: q4_k", "are none"),
        ("hottest 0%: q4_k", "above 0 %"),
        ("hottest 120%: q4_k", "above 0 %"),
        ("hottest: q4_k", "no selector"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_rule(text)
