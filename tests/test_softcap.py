"""Soft-capping and ropes by layer: every setting of the engine, and how sources state them.

That they are computed rightly is held by the cases of test_logits.py, against transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from container_util import Draft
from engine_models import VOCAB, make_model
from repack_util import map_gguf, map_hf, refused, small_gguf, small_hf, spec_of
from tiny_containers import logits

from colibri_tools.container.format import SectionKind
from colibri_tools.container.kv import encode_kv
from colibri_tools.container.spec import SPEC_KEYS
from colibri_tools.engine import KV_TYPES, Engine, estimate
from colibri_tools.errors import JobError
from colibri_tools.families.layer_rope import MAX_ROPES, unlike
from colibri_tools.families.rope import Rope
from colibri_tools.repack import repack

TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, VOCAB, 600)]
ROPES = {
    "rope_of_layer": [0, 1],
    "rope_inv_freq_more": [0.8 ** (i + 1) for i in range(16)],
    "rope_factor_more": [1.1],
}
CAPS = {"attention_softcap": 0.5, "logit_softcap": 2.0}
TOLERANCE = {"f16": 6e-4, "q8_0": 1.5e-2, "q4_0": 0.25}
"""As in test_kv_types.py: the mean over positions of what rounded keys and values cost."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Capped scores and logits, a window and two ropes; all experts, as choices may flip."""
    return make(tmp_path_factory.mktemp("softcap") / "model.colibri", **CAPS, **ROPES)


def make(path: Path, **changes: Any) -> Path:
    size = {"n_layers": 2, "n_heads": 4, "head_dim": 32, "rope_dim": 32, "top_k": 12}
    return make_model(path, **{**size, "windows": [0, 300], "attention_scale": 0.03, **changes})


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("kind", KV_TYPES)
def test_every_setting_gives_the_same_bits(model: Path, kind: str, precision: str) -> None:
    options = {"ctx": 640, "kv_type": kind, "precision": precision}
    with Engine(model, threads=1, batch_size=600, **options) as engine:
        expected = engine.eval(TOKENS, 5)
    with Engine(model, threads=3, batch_size=37, **options) as engine:
        assert np.array_equal(engine.eval(TOKENS, 5), expected)
        engine.rewind(len(TOKENS) - 5)
        found = [engine.eval([token]) for token in TOKENS[-5:]]
    assert np.array_equal(np.concatenate(found), expected)
    with Engine(model, threads=2, sequences=2, **options) as engine:
        many = engine.forward_many([TOKENS[:70], TOKENS])
    assert np.array_equal(many[1][-5:], expected)
    assert np.abs(expected).max() < CAPS["logit_softcap"]


@pytest.mark.parametrize("kind", TOLERANCE)
def test_kv_types_are_near_f32(model: Path, kind: str) -> None:
    with Engine(model, ctx=640) as engine:
        expected = engine.forward(TOKENS)
    with Engine(model, ctx=640, kv_type=kind) as engine:
        found = engine.forward(TOKENS)
    spread = expected.max(axis=-1) - expected.min(axis=-1)
    error = np.abs(found - expected).max(axis=-1) / spread
    assert 0 < error.mean() < TOLERANCE[kind]


def test_fast_precision_is_near_exact(tmp_path: Path) -> None:
    """Quantized weights, whose inputs are quantized too; 0.01 is seen."""
    path = make(tmp_path / "m.colibri", expert_dtypes=("q8_0",), hidden_size=64, **CAPS, **ROPES)
    with Engine(path, ctx=640) as exact, Engine(path, ctx=640, precision="fast") as fast:
        expected, found = exact.forward(TOKENS), fast.forward(TOKENS)
    spread = expected.max(axis=-1) - expected.min(axis=-1)
    assert 0 < (np.abs(found - expected).max(axis=-1) / spread).mean() < 0.05


def test_each_switch_shows(model: Path, tmp_path: Path) -> None:
    def last(path: Path) -> np.ndarray:
        with Engine(path, ctx=640) as engine:
            return engine.eval(TOKENS)[0]

    expected = last(model)
    for i, without in enumerate(("attention_softcap", "logit_softcap", "rope_of_layer")):
        changes = {**CAPS, **ROPES}
        for key in ROPES if without in ROPES else (without,):
            del changes[key]
        found = last(make(tmp_path / f"{i}.colibri", **changes))
        assert np.abs(found - expected).max() > 0.01 * (expected.max() - expected.min()), without


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "mellum"])
def test_a_rope_has_the_same_bits_wherever_it_stands(tmp_path: Path, family: str) -> None:
    """All layers by the second rope, or by the only one: for latents too."""
    spec = tm.default_spec(family, local_rope=None)
    paths = {}
    for theta in (1e4, 300.0):
        source = tm.write_hf(tmp_path / f"{theta}", family, spec.replace(rope_theta=theta))
        paths[theta] = tmp_path / f"{theta}.colibri"
        repack(source, paths[theta])
    wanted = spec_of(paths[300.0])
    draft = Draft(bytearray(paths[1e4].read_bytes()))
    changed = dict(spec_of(paths[1e4])) | {
        "graph.rope_of_layer": [1] * spec.layers,
        "graph.rope_inv_freq_more": wanted["graph.rope_inv_freq"],
        "graph.rope_factor_more": [wanted["graph.rope_factor"]],
    }
    draft.replace_section(SectionKind.SPEC, encode_kv(changed, SPEC_KEYS))
    moved = tmp_path / "moved.colibri"
    moved.write_bytes(draft.seal().data)
    tokens = tm.prompt(40, spec.vocab)
    found = [logits(path, tokens) for path in (moved, paths[300.0], paths[1e4])]
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])


def test_tables_of_more_ropes_are_planned(model: Path, tmp_path: Path) -> None:
    """cos and sin, in f32, of half the rotated dimensions and each token of a batch."""
    one = estimate(make(tmp_path / "one.colibri", **CAPS), batch_size=512).scratch_bytes
    assert estimate(model, batch_size=512).scratch_bytes == one + 2 * 512 * 16 * 4


def test_an_infinite_logit_is_reported_though_its_cap_is_finite(tmp_path: Path) -> None:
    path = make(tmp_path / "m.colibri", logit_divisor=1.18e-38, logit_softcap=2.0)
    with Engine(path) as engine, pytest.raises(JobError, match="is not finite"):
        engine.forward(TOKENS[:3])


# ---------------------------------------------------------------- what sources state

OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
STATED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
SPEC = {"graph.attention_softcap": 50.0, "graph.logit_softcap": 30.0}


def caps(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if "softcap" in key}


@pytest.mark.parametrize("family", tm.ALL_FAMILIES)
def test_a_cap_that_the_familys_code_ignores_is_ignored_aloud(tmp_path: Path, family: str) -> None:
    mapping = map_hf(tmp_path, family, overrides=STATED)
    assert caps(mapping.spec) == {}
    for key, value in STATED.items():
        text = f"config.json: {key} {value} is ignored, as transformers' code of"
        assert any(text in warning for warning in mapping.warnings)


def test_a_cap_of_a_checkpoint_with_code_of_its_own_is_applied(tmp_path: Path) -> None:
    mapping = map_hf(tmp_path, "mixtral", overrides={**STATED, **OWN_CODE})
    assert caps(mapping.spec) == SPEC and not mapping.warnings
    assert any("final_logit_softcapping 30.0 is applied" in note for note in mapping.notes)
    tokenizer_only = {"auto_map": {"AutoTokenizer": ["x.X", None]}}
    assert caps(map_hf(tmp_path / "b", "mixtral", overrides=STATED | tokenizer_only).spec) == {}
    off = {"attn_logit_softcapping": None, "final_logit_softcapping": 0.0}
    assert caps(map_hf(tmp_path / "c", "mixtral", overrides=off | OWN_CODE).spec) == {}
    wrong = {"attn_logit_softcapping": -1.0, **OWN_CODE}
    assert "attn_logit_softcapping" in refused(small_hf(tmp_path / "d", "mixtral", overrides=wrong))


def test_a_cap_of_gguf_metadata_is_applied(tmp_path: Path) -> None:
    metadata = {f"qwen3moe.{key}": value for key, value in STATED.items()}
    assert caps(map_gguf(tmp_path, "qwen3_moe", metadata=metadata).spec) == SPEC
    wrong = small_gguf(tmp_path / "x", "mixtral", metadata={"llama.attn_logit_softcapping": -2.0})
    assert "llama.attn_logit_softcapping" in refused(wrong)


def test_capped_router_logits_are_not_executed(tmp_path: Path) -> None:
    metadata = {"qwen3moe.router_logit_softcapping": 30.0}
    mapping = map_gguf(tmp_path, "qwen3_moe", metadata=metadata)
    assert mapping.spec["executable_lacks"] == "soft-capping of the router's logits"
    for key in ("router_logit_softcapping", "moe_router_logit_softcapping"):
        stated = map_hf(tmp_path / key, "mixtral", overrides={key: 30.0, **OWN_CODE})
        assert "router's logits" in stated.spec["executable_lacks"]


def ropes(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if "graph.rope" in key}


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_layers_with_a_window_have_a_base_of_their_own(tmp_path: Path, kind: str) -> None:
    """Written by layer type, and as GGUF's key; the scaling stays."""
    scaled = {"factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
    rope = {"rope_type": kind, "rope_theta": 1e4, **(scaled if kind == "yarn" else {})}
    nested = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 300.0}}
    hf = map_hf(tmp_path, "gpt_oss", overrides={"rope_parameters": nested}).spec
    assert hf["executable"] is True and hf["graph.rope_of_layer"] == [0, 1, 0]
    stated = {"freq_base": 1e4, "freq_base_swa": 300.0}
    if kind == "default":
        stated |= {"scaling.type": "none"}
    else:
        stated |= {"scaling.type": "yarn", "scaling.factor": 2.0}
        stated |= {"scaling.original_context_length": 64}
    metadata = {f"gpt-oss.rope.{key}": value for key, value in stated.items()}
    assert ropes(map_gguf(tmp_path, "gpt_oss", metadata=metadata).spec) == ropes(hf)


def test_a_base_of_windows_alone_is_that_of_code_that_reads_it(tmp_path: Path) -> None:
    """Gemma 3's key, which transformers' gpt-oss does not read; layers of AFMoE without a window
    do not rotate at all, so there is one rope."""
    local = {"rope_local_base_freq": 300.0}
    ignored = map_hf(tmp_path / "a", "gpt_oss", overrides=local)
    assert "graph.rope_of_layer" not in ignored.spec
    assert any("rope_local_base_freq 300.0 is ignored" in text for text in ignored.warnings)
    applied = map_hf(tmp_path / "b", "gpt_oss", overrides=local | OWN_CODE).spec
    assert applied["graph.rope_of_layer"] == [0, 1, 0]
    alone = map_gguf(tmp_path, "afmoe", metadata={"afmoe.rope.freq_base_swa": 300.0}).spec
    other = map_gguf(tmp_path / "b", "afmoe", metadata={"afmoe.rope.freq_base": 300.0}).spec
    assert alone == other and "graph.rope_of_layer" not in alone


FULL = {"rope_type": "default", "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6}
LONG |= {"long_factor": [2.0] * 6, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "lacks"),
    [
        ({"full_attention": FULL}, "rope parameters of 'full_attention' layers, but none of"),
        ({"main": FULL, "compress": FULL}, "but none of 'sliding_attention'"),
        (
            {
                "full_attention": LONG,
                "sliding_attention": {**LONG, "long_factor": [3.0] * 6},
            },
            "longrope that differs by layer",
        ),
        (
            {"full_attention": {**FULL, "rope_type": "dynamic"}, "sliding_attention": FULL},
            "rope of kind 'dynamic'",
        ),
        ({"full_attention": {"a": FULL}, "sliding_attention": FULL}, "in rope parameters"),
    ],
)
def test_ropes_that_are_not_executed_are_named(
    tmp_path: Path, rope: dict[str, Any], lacks: str
) -> None:
    mapping = map_hf(tmp_path, "mellum", overrides={"rope_parameters": rope})
    assert lacks in mapping.spec.get("executable_lacks", "nothing")


def test_longrope_of_one_kind_of_layer_is_the_first_rope(tmp_path: Path) -> None:
    """Whichever layer comes first: the engine has its long frequencies of that one only."""
    rope = {"full_attention": LONG, "sliding_attention": FULL}
    spec = map_hf(tmp_path, "mellum", overrides={"rope_parameters": rope}).spec
    assert spec["graph.rope_of_layer"] == [1, 0, 1, 0] and spec["graph.rope_original_context"] == 64


def test_what_the_engine_has_once_is_the_same_in_all_ropes() -> None:
    one, other = Rope([1.0, 0.5]), Rope([1.0, 0.25], latent_scale=1.2)
    assert list(unlike([one, other], False)) == []
    assert list(unlike([one, other], True)) == ["attention scales that differ by layer"]
    wide = ["rope of 4 and 6 dimensions in different layers"]
    assert list(unlike([one, Rope([1.0, 0.5, 0.2])], True)) == wide
    many = [Rope([1.0 / n]) for n in range(1, MAX_ROPES + 2)]
    assert list(unlike(many, False)) == ["17 different ropes"]
    assert list(unlike(many[:MAX_ROPES], False)) == []
