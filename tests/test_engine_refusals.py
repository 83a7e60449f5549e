"""What the engine does not execute is refused by name; what is broken is found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import HIDDEN, VOCAB, engine_spec, make_model, residents

from colibri_tools.container import Group, ResidentItem, Role
from colibri_tools.container import open as open_container
from colibri_tools.dtypes import dtype_by_name
from colibri_tools.engine import Engine, estimate
from colibri_tools.errors import ColibriError, FormatError, JobError, UsageError

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]

# Everything the graph can have, so that every role is there to be left out. Containers without a
# router, or with one of the wrong size, cannot be opened at all (rule 24).
FULL: dict[str, Any] = {
    "moe_layers": [1, 1, 0],
    "dense_width": 24,
    "shared_width": 24,
    "shared_gated": True,
    "qkv_bias": True,
    "o_bias": True,
    "qk_norm": "head",
}
ROLES = sorted({t.role for t in residents(engine_spec(**FULL), {}, tied=False)} - {Role.ROUTER})


def refused(path: Path, kind: type[ColibriError], *words: str) -> None:
    """Opening and estimating raise the same one line with all `words`."""
    with pytest.raises(kind) as opening:
        Engine(path).close()
    with pytest.raises(kind) as estimating:
        estimate(path)
    message = opening.value.message
    assert message == estimating.value.message
    assert "\n" not in message
    for word in (*words, str(path)):
        assert word in message


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name.lower())
def test_a_missing_tensor_is_named(tmp_path: Path, role: Role) -> None:
    path = make_model(tmp_path / "model.colibri", drop=role, **FULL)
    layer = {-1: "", 2: "layer 2: "}.get(_only_layer(role), "layer 1: ")
    refused(path, FormatError, f"{layer}the tensor {role.name.lower()} is missing")


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name.lower())
def test_a_wrong_shape_is_named(tmp_path: Path, role: Role) -> None:
    path = make_model(tmp_path / "model.colibri", resize=role, **FULL)
    refused(path, FormatError, f"({role.name.lower()}, layer", "expected shape [", "found [")


def _only_layer(role: Role) -> int:
    if role in (Role.TOKEN_EMBD, Role.OUTPUT, Role.OUTPUT_NORM):
        return -1
    return 2 if role in (Role.DENSE_GATE, Role.DENSE_UP, Role.DENSE_DOWN) else 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("graph.attention", "linear"),
        ("graph.norm", "batch"),
        ("graph.activation", "gelu"),
        ("graph.router_score", "tanh"),
        ("graph.qk_norm", "cosine"),
        ("graph.rope_pairing", "odd"),
    ],
)
def test_an_unknown_switch_value_is_named(tmp_path: Path, key: str, value: str) -> None:
    path = make_model(tmp_path / "model.colibri", **{key: value})
    refused(path, JobError, f"{key} = '{value}' is not known")


def test_an_unknown_switch_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri", **{"graph.attention_sinks": True})
    refused(path, JobError, "the switch graph.attention_sinks is not known")


def test_an_unknown_description_is_no_switch(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri", **{"x.comment": "hello", "graphics.x": 1})
    Engine(path).close()


def test_not_executable_says_why(tmp_path: Path) -> None:
    lacks = {"executable": False, "executable_lacks": "router kind sigmoid"}
    path = make_model(tmp_path / "model.colibri", **lacks)
    refused(path, JobError, "cannot be executed: router kind sigmoid")


_LONG: dict[str, Any] = {"graph.rope_inv_freq_long": [0.5] * 8}
_ROPES = {
    "graph.rope_of_layer": [0, 1, 0],
    "graph.rope_inv_freq_more": [0.5] * 8,
    "graph.rope_factor_more": [1.0],
}
_GROUPS = {
    "graph.router_groups": 4,
    "graph.router_top_groups": 1,
    "graph.router_group_score": "top2",
}


def test_an_unknown_group_score_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.colibri", **(_GROUPS | {"graph.router_group_score": "sum"}))
    refused(path, JobError, "graph.router_group_score = 'sum' is not known")


@pytest.mark.parametrize("more", [{"qk_norm": "head"}, {"clip_qkv": 1.0}, {"attention_gate": True}])
def test_latent_attention_with_what_it_does_not_do_is_refused(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    latent = {"attention": "mla", "q_lora": 0, "kv_lora": 8, "latent_norm_eps": 1e-6} | more
    changes = {f"graph.{key}": value for key, value in latent.items()}
    path = make_model(tmp_path / "model.colibri", **changes)
    refused(path, JobError, "latent attention with graph.qk_norm, clip_qkv or attention_gate")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": 8, "n_kv_heads": 3}, "no multiple of n_kv_heads = 3"),
        ({"n_kv_heads": 16}, "graph.n_kv_heads: expected 1 to 8, found 16"),
        ({"rope_dim": 7}, "graph.rope_dim: expected an even number, found 7"),
        ({"rope_dim": 18}, "graph.rope_dim: expected 0 to 16, found 18"),
        ({"graph.rope_inv_freq": [1.0]}, "graph.rope_inv_freq: expected 8 entries, found 1"),
        (_LONG | {"graph.rope_factor_long": 1.0}, "'graph.rope_original_context' of type u64"),
        (
            _LONG | {"graph.rope_factor_long": 1.0, "graph.rope_original_context": 0},
            "graph.rope_original_context: expected 1 to",
        ),
        (_LONG, "expected key 'graph.rope_factor_long' of type f64, found no such key"),
        ({"graph.rope_original_context": 9}, "'graph.rope_inv_freq_long' of type array of f64"),
        (
            {"graph.rope_inv_freq_long": [1.0]},
            "graph.rope_inv_freq_long: expected 8 entries, found 1",
        ),
        ({"windows": [0]}, "graph.windows: expected 3 entries, found 1"),
        ({"graph.attention_softcap": 0.0}, "graph.attention_softcap: expected a finite number"),
        ({"graph.logit_softcap": -1.0}, "graph.logit_softcap: expected a finite number from"),
        ({"graph.logit_softcap": 1e300}, "graph.logit_softcap: expected a finite number from"),
        ({"graph.rope_of_layer": [0, 1, 0]}, "'graph.rope_factor_more' of type array of f64"),
        ({"graph.rope_factor_more": [1.0]}, "'graph.rope_of_layer' of type array of u64"),
        (_ROPES | {"graph.rope_of_layer": [0]}, "graph.rope_of_layer: expected 3 entries, found 1"),
        (
            _ROPES | {"graph.rope_of_layer": [0, 2, 0]},
            "graph.rope_of_layer[1]: expected less than 2, found 2",
        ),
        (
            _ROPES | {"graph.rope_inv_freq_more": [0.5] * 16},
            "graph.rope_inv_freq_more: expected 8 entries, found 16",
        ),
        (_ROPES | {"graph.rope_factor_more": []}, "expected 1 to 15 entries, found 0"),
        (_ROPES | {"graph.rope_factor_more": [1.0] * 16}, "expected 1 to 15 entries, found 16"),
        (_ROPES | {"graph.rope_factor_more": [1e300]}, "expected a number that fits f32"),
        ({"n_tokens": VOCAB + 1}, f"n_tokens: expected 1 to {VOCAB}, found {VOCAB + 1}"),
        ({"norm_eps": -1.0}, "graph.norm_eps: expected a finite number from 0, found -1"),
        ({"attention_scale": 1e300}, "graph.attention_scale: expected a finite number"),
        ({"context_length": 0}, "context_length: expected 1 to"),
        ({"graph.rope_layers": [1]}, "graph.rope_layers: expected 3 entries, found 1"),
        ({"graph.value_dim": 0}, "graph.value_dim: expected 1 to"),
        ({"graph.router_norm_add": -1.0}, "graph.router_norm_add: expected a finite number from 0"),
        ({"graph.attention": "mla"}, "expected key 'graph.q_lora' of type u64, found no such key"),
        ({"graph.router_groups": 2}, "expected key 'graph.router_top_groups'"),
        (_GROUPS | {"graph.router_top_groups": 5}, "graph.router_top_groups: expected 1 to 4"),
        (_GROUPS | {"top_k": 4}, "12 experts in 4 groups, of which 1 are used, cannot give top_k"),
        (_GROUPS | {"graph.router_groups": 5}, "12 experts in 5 groups"),
        (_GROUPS | {"graph.router_groups": 12, "top_k": 1}, "12 experts in 12 groups"),
    ],
)
def test_numbers_out_of_bounds_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    refused(make_model(tmp_path / "model.colibri", **changes), FormatError, words)


def test_a_tensor_without_use_is_refused(tmp_path: Path) -> None:
    """A bias that the spec's switches leave out would otherwise be ignored silently."""
    bias = ResidentItem(
        "stray.bias", Role.ATTN_O_BIAS, Group.EVERY_TOKEN, 1, dtype_by_name("f32"), (HIDDEN,)
    )
    path = make_model(tmp_path / "model.colibri", extra=[bias])
    refused(path, JobError, "tensor stray.bias (attn_o_bias, layer 1)", "has no use for it")


def test_optional_tensors_are_no_matter(tmp_path: Path) -> None:
    kept = ResidentItem(
        "kept", Role.OTHER, Group.OPTIONAL, -1, dtype_by_name("f32"), (HIDDEN, HIDDEN)
    )
    factors = ResidentItem(
        "factors", Role.ROPE_FACTORS, Group.EVERY_TOKEN, -1, dtype_by_name("f32"), (8,)
    )
    plain = make_model(tmp_path / "plain.colibri")
    with Engine(plain) as engine:
        memory = engine.memory
    with Engine(make_model(tmp_path / "model.colibri", extra=[kept, factors])) as engine:
        assert engine.memory.resident_bytes <= memory.resident_bytes + 4096
        assert np.isfinite(engine.forward(TOKENS)).all()


def test_a_type_that_is_no_weight_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri", dtypes={Role.ATTN_Q: "i32"})
    refused(path, JobError, "0.attn_q", "type number 26 is not executed")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_a_flipped_bit_in_a_resident_tensor_is_found(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri")
    with open_container(path) as container:
        tensor = container.tensors["1.attn_v"]
    flip(path, tensor.offset + tensor.n_bytes - 1)
    for check in ("first", "always"):
        with pytest.raises(JobError, match=r"tensor 1\.attn_v: the \d+ bytes at offset"):
            Engine(path, check=check).close()
    Engine(path, check="never").close()


def test_a_flipped_bit_in_a_block_is_found_when_it_is_used(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri", top_k=12)
    with open_container(path) as container:
        cell = container.cell(container.row_of(2), 7)
    flip(path, int(cell["offset"]) + 100)
    with Engine(path) as engine:
        with pytest.raises(JobError, match=r"layer 2.*expert 7") as failure:
            engine.forward(TOKENS)
        assert str(int(cell["offset"])) in failure.value.message
        assert engine.position == 0
        with pytest.raises(JobError, match=r"layer 2.*expert 7"):  # and it can go on
            engine.forward(TOKENS)


@pytest.mark.parametrize(
    ("role", "words"),
    [
        (Role.ROUTER, "layer 0, position 0: the router's scores are not finite"),
        (Role.OUTPUT, "position 0: the logit of token 0 is not finite"),
        (Role.ATTN_NORM, "layer 0, position 0: the router's scores are not finite"),
        (Role.OUTPUT_NORM, "position 0: the logit of token 0 is not finite"),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Role) else "",
)
def test_nan_is_found_and_placed(tmp_path: Path, role: Role, words: str) -> None:
    with Engine(make_model(tmp_path / "model.colibri", poison=role)) as engine:
        with pytest.raises(JobError, match=words):
            engine.forward(TOKENS)
        with pytest.raises(JobError, match="not finite"):
            engine.sanity_check()


def test_equal_logits_fail_the_sanity_check(tmp_path: Path) -> None:
    with Engine(make_model(tmp_path / "model.colibri", zero=Role.OUTPUT)) as engine:
        engine.forward(TOKENS)
        with pytest.raises(JobError, match=f"all {VOCAB} logits of token 0 are equal"):
            engine.sanity_check()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"expert_cache": 4096}, JobError, "expert cache of 4096 bytes: this model needs at least"),
        ({"expert_cache": 0}, UsageError, "expert-cache: expected 1 or more, found 0"),
        ({"ctx": 4097}, UsageError, "context of 4097: this model allows up to 4096"),
        ({"ctx": 0}, UsageError, "ctx: expected 1 or more, found 0"),
        ({"batch_size": 1 << 31}, UsageError, "batch-size: expected at most 2147483647, found"),
        ({"batch_size": 5000}, UsageError, "batch size of 5000: expected up to 4096"),
        ({"check": "sometimes"}, UsageError, "check: expected always, first, never, found"),
        ({"threads": -1}, UsageError, "threads: expected 0 or more, found -1"),
        ({"threads": 5000}, UsageError, "threads: expected up to 1024"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, options: dict[str, int], kind: type[ColibriError], words: str
) -> None:
    path = make_model(tmp_path / "model.colibri")
    for call in (Engine, estimate):
        with pytest.raises(kind, match=words):
            call(path, **options)


def _text(path: Path) -> None:
    path.write_text("not a container, but long enough to hold a page " * 200)


def _cut(path: Path) -> None:
    path.write_bytes(make_model(path.with_name("whole")).read_bytes()[:-4096])


def _folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_text, _cut, _folder, lambda path: None])
def test_what_is_no_container_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "model.colibri"
    make(path)
    refused(path, FormatError)
