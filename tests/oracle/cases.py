"""The models whose logits are compared with transformers. No torch here.

`CASES` is the table; `load(case)` reads the committed values and checks that the model builder
still makes the weights they were computed from.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import row_models as rm
import tiny_models as tm
from tiny_models import TinySpec

VALUES = Path(__file__).parent / "values"
TINY_MOE = Path(__file__).parents[2] / "fixtures" / "tiny-moe"

LOGIT_TOLERANCE = 2e-5
"""Largest allowed |difference|, as a share of (max - min) of the oracle's logits of a position.

2e-4 is promised; the tests hold a tenth of it. Both sides compute in float32 with sums in another
order, which costs up to 4e-6 of the range in these models.
"""

GAP_TOLERANCE = 1e-4
"""A router's choice must be the oracle's where k-th and next logit are further apart than this, as
a share of (max - min) of the router's logits. Twice 2e-4 is promised; the prompts are
chosen so that every gap is above this smaller bound, and every choice is compared."""


_SEEDS = {
    "qwen2_moe-f32": 9,
    "qwen2_moe-bf16": 9,
    "qwen2_moe-top1": 8,
    "qwen2_moe-tied": 9,
    "olmoe-square": 9,
    "olmoe-top1": 8,
    "mixtral-f16": 8,
    "mixtral-window": 9,
    "mixtral-head-dim-null": 12,
    "qwen2_moe-norm": 10,
    "qwen2_moe-window": 8,
    "qwen2_moe-dense": 9,
    "qwen3_moe-no-norm": 9,
    "qwen3_moe-window": 10,
    "olmoe-bias": 12,
    "qwen3_moe-linear": 13,
    "qwen3_moe-llama3": 10,
    "qwen3_moe-yarn": 12,
    "mixtral-llama3": 13,
    "olmoe-yarn": 8,
    "qwen2_moe-yarn-keys": 8,
    "flex_olmo-f32": 8,
    "flex_olmo-top1": 8,
    "deepseek-f32": 9,
    "dots1-f32": 9,
    "deepseek_v2-yarn": 22,
    "deepseek_v3-yarn": 8,
    "deepseek_v3-bias": 8,
    "deepseek_v3-old-gguf": 8,
    "hunyuan_v1_moe-top1": 8,
    "granitemoe-llama3": 8,
    "hunyuan_v1_moe-alpha": 9,
    "deepseek_v3-f32": 8,
    "phimoe-f32": 8,
    "llama4-f32": 8,
    "llama4-chunk": 8,
    "llama4-sparse": 8,
    "llama4-llama3": 8,
    "llama4-far": 10,
    "phimoe-mscales-short": 8,
    "phimoe-longrope-long": 8,
    "phimoe-mscales-long": 13,
    "qwen3_moe-longrope-long": 11,
    "olmoe-longrope-long": 8,
    "mellum-yarn": 9,
    "mellum-scaled": 9,
}
"""Seeds of prompts that leave no router choice to the last bits; 7 elsewhere."""


@dataclass(frozen=True)
class Case:
    """One model and its prompts; `positions` are those whose logits are stored, None = all."""

    name: str
    family: str
    spec: TinySpec
    dtype: str = "f32"
    overrides: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (48, 5, 1)
    """Lengths of the prompts."""
    positions: tuple[int, ...] | None = None
    gguf: bool = True
    """False where the GGUF architecture has no key for the switch."""
    ctx: int | None = None
    """The context that the engine is opened for; None: the default."""

    def tokens(self, i: int) -> list[int]:
        """The ids of prompt i."""
        return tm.prompt(self.prompts[i], self.spec.vocab, seed=11 * i + _SEEDS.get(self.name, 7))

    def stored_positions(self, i: int) -> list[int]:
        """The positions of prompt i whose logits are stored."""
        n = self.prompts[i]
        return list(range(n)) if self.positions is None else [p for p in self.positions if p < n]

    def fingerprint(self) -> str:
        """Changes when the weights, the configuration, or the prompts of the case change."""
        sha = hashlib.sha256(tm.digest(tm.tensors(self.family, self.spec)).encode())
        settings = tm.config(self.family, self.spec, dtype=self.dtype, overrides=self.overrides)
        sha.update(json.dumps(settings, sort_keys=True).encode())
        sha.update(json.dumps([self.tokens(i) for i in range(len(self.prompts))]).encode())
        return sha.hexdigest()


_LONG = tuple(range(0, 200, 20)) + tuple(range(200, 232, 2))
"""Most of rope scaling shows only far from the start."""


def _case(name: str, family: str, gguf: bool = True, **spec: Any) -> Case:
    return Case(name, family, tm.default_spec(family, **spec), gguf=gguf)


def _long(name: str, family: str, gguf: bool = True, **spec: Any) -> Case:
    return Case(
        name,
        family,
        tm.default_spec(family, **{"max_position": 256} | spec),
        prompts=(232,),
        positions=_LONG,
        gguf=gguf,
    )


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, **more}


_LINEAR = _rope("linear", factor=4.0)
_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_YARN_ALL = {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}


_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0, 1.02, 1.05, 1.1, 1.1, 1.2, 1.3, 1.5],
    long_factor=[1.0, 1.1, 1.4, 2.0, 3.5, 4.5, 6.0, 8.0],
    original_max_position_embeddings=64,
)
_ATTENTION = (1 + math.log(256 / 64) / math.log(64)) ** 0.5
"""What llama.cpp's converter makes of these contexts; the published model states other numbers."""


def _longrope(name: str, family: str, long: bool, gguf: bool = False, **more: Any) -> Case:
    """On either side of the original context: the engine goes by the context it is opened for."""
    size = {"head_dim": 16, "max_position": 256}
    spec = tm.default_spec(family, **size, rope={**_LONGROPE, **more})
    if long:
        return Case(name, family, spec, prompts=(232,), positions=_LONG, gguf=gguf)
    return Case(name, family, spec, prompts=(48, 5, 1), gguf=gguf, ctx=64)


def _longrope_cases() -> list[Case]:
    same = {"short_mscale": _ATTENTION, "long_mscale": _ATTENTION}
    two = {"short_mscale": 0.9, "long_mscale": 1.3}
    out = []
    for side, long in (("short", False), ("long", True)):
        out += [
            _longrope(f"phimoe-longrope-{side}", "phimoe", long, gguf=True, **same),
            _longrope(f"phimoe-mscales-{side}", "phimoe", long, **two),
            _longrope(f"qwen3_moe-longrope-{side}", "qwen3_moe", long),
        ]
    out.append(_longrope("olmoe-longrope-long", "olmoe", True, attention_factor=1.25))
    return out


ROW_FAMILIES = tuple(rm.RECIPES)

_UNGROUPED = {"router_groups": 1, "router_top_groups": 1}


def _row(
    name: str,
    family: str,
    prompts: tuple[int, ...] = (20,),
    gguf: bool = True,
    overrides: dict[str, Any] | None = None,
    **spec: Any,
) -> Case:
    gguf = gguf and family != "flex_olmo"  # which has no architecture
    spec = tm.default_spec(family, **spec)
    positions = _LONG if prompts[0] > 100 else None
    return Case(name, family, spec, "f32", overrides or {}, prompts, positions, gguf)


def _cases() -> list[Case]:
    out = []
    for family in tm.FAMILIES:
        spec = tm.default_spec(family)
        out += [Case(f"{family}-{dtype}", family, spec, dtype) for dtype in ("f32", "bf16")]
        out.append(Case(f"{family}-square", family, tm.square_spec(family), prompts=(48,)))
        out.append(_case(f"{family}-top1", family, top_k=1))
        out.append(_case(f"{family}-topall", family, top_k=12))
        out.append(_case(f"{family}-tied", family, tied=True))
    out += [
        Case("mixtral-f16", "mixtral", tm.default_spec("mixtral"), "f16", prompts=(48,)),
        _case("mixtral-window", "mixtral", window=16),
        _case("mixtral-head-dim-null", "mixtral", explicit_head_dim=False, head_dim=8),
        _case("qwen2_moe-norm", "qwen2_moe", norm_topk=True),
        _case("qwen2_moe-shared-strong", "qwen2_moe", shared_gate_gain=12.0),
        _case("qwen2_moe-window", "qwen2_moe", gguf=False, window=10),
        _case("qwen2_moe-head-dim", "qwen2_moe", heads=8, explicit_head_dim=True),
        _case("qwen2_moe-dense", "qwen2_moe", dense_layers=(1,)),
        Case(
            "qwen2_moe-sparse-step",
            "qwen2_moe",
            tm.default_spec("qwen2_moe", dense_layers=(0, 2)),
            overrides={"decoder_sparse_step": 2, "mlp_only_layers": []},
        ),
        _case("qwen3_moe-no-norm", "qwen3_moe", norm_topk=False),
        _case("qwen3_moe-dense", "qwen3_moe", dense_layers=(0,)),
        _case("qwen3_moe-bias", "qwen3_moe", attention_bias=True),
        _case("qwen3_moe-window", "qwen3_moe", window=16),
        _case("qwen3_moe-pruned", "qwen3_moe", gguf=False, experts_of_layer=(12, 8, 5)),
        _case("qwen3_moe-eps", "qwen3_moe", norm_eps=0.25),
        _case("olmoe-norm", "olmoe", norm_topk=True),
        _case("olmoe-clip", "olmoe", clip_qkv=0.8),
        _case("olmoe-bias", "olmoe", attention_bias=True),
        _long("qwen3_moe-long", "qwen3_moe"),
        _long("qwen3_moe-linear", "qwen3_moe", rope=_LINEAR),
        _long("qwen3_moe-llama3", "qwen3_moe", rope=_LLAMA3),
        _long("qwen3_moe-yarn", "qwen3_moe", rope=_YARN),
        _long("mixtral-llama3", "mixtral", rope=_LLAMA3),
        _long("olmoe-yarn", "olmoe", rope=_YARN),
        _long("qwen2_moe-yarn-keys", "qwen2_moe", gguf=False, rope=_YARN_ALL),
    ]
    return out


def _more_cases() -> list[Case]:
    """The families of `tiny_families`: what differs from a plain one, at top-k 1, some and all."""
    out = []
    for family in tm.more.FAMILIES:
        spec = tm.default_spec(family)
        out += [Case(f"{family}-{dtype}", family, spec, dtype) for dtype in ("f32", "bf16")]
        if family != "phimoe":  # its router is defined for two experts only
            out.append(_case(f"{family}-top1", family, top_k=1))
            out.append(_case(f"{family}-topall", family, top_k=12))
    alpha = _rope("dynamic", alpha=100.0, factor=1.0)
    out += [
        Case(  # every second layer, and of those not the first
            "qwen3_moe-sparse-step",
            "qwen3_moe",
            tm.default_spec("qwen3_moe", layers=4, dense_layers=(0, 1, 2)),
            overrides={"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        ),
        _case("granitemoe-bias", "granitemoe", attention_bias=True, tied=True),
        _long("granitemoe-llama3", "granitemoe", rope=_LLAMA3),
        _case("hunyuan_v1_moe-bias", "hunyuan_v1_moe", attention_bias=True, tied=True),
        _long("hunyuan_v1_moe-alpha", "hunyuan_v1_moe", gguf=False, rope=alpha),
    ]
    limits = {"swiglu_limit": 0.8, "swiglu_alpha": 1.3}
    spec = tm.default_spec("gpt_oss")
    out.append(Case("gpt_oss-limit", "gpt_oss", spec, overrides=limits, gguf=False))
    plain = {"use_qk_norm": False, "attn_temperature_tuning": False}
    out += [
        _case("phimoe-topall", "phimoe", experts=2),
        _case("phimoe-plain", "phimoe", attention_bias=False, tied=True, window=11),
        Case(
            "phimoe-jitter",
            "phimoe",
            tm.default_spec("phimoe"),
            overrides={"router_jitter_noise": 0.3},
            gguf=False,
        ),
        _case("llama4-chunk", "llama4", gguf=False, window=10),
        Case(
            "llama4-sparse",
            "llama4",
            tm.default_spec("llama4", window=7, dense_layers=(), tied=True),
            overrides={"interleave_moe_layer_step": 1},
            gguf=False,
        ),
        Case(
            "llama4-plain",
            "llama4",
            tm.default_spec("llama4", window=10, attention_bias=True),
            overrides=plain,
            gguf=False,
        ),
        _long("llama4-llama3", "llama4", rope=_LLAMA3),
    ]
    far = {"prompts": (300,), "positions": (0, 99, 100, 199, 200, 254, 255, 256, 257, 299)}
    sinks = tm.default_spec("gpt_oss", max_position=512)
    chunks = tm.default_spec("llama4", window=100)
    out += [  # the engine sums attention up in pieces of 256 positions
        Case("gpt_oss-far", "gpt_oss", sinks, **far),
        Case("llama4-far", "llama4", chunks, gguf=False, **far),
    ]
    out.append(_long("gpt_oss-long", "gpt_oss", rope={**_YARN, "truncate": False}, tied=True))
    return out


def _row_cases() -> list[Case]:
    """Cases of the families that are made from their row of the table."""
    out = []
    for family in ROW_FAMILIES:
        out += [
            _row(f"{family}-f32", family, prompts=(40, 1)),
            _row(f"{family}-top1", family, top_k=1),
            _row(f"{family}-topall", family, top_k=8, more=_UNGROUPED),
        ]
        if "nope_dim" not in rm.RECIPES[family].hyper:  # heads x head size is not hidden
            out.append(_row(f"{family}-head-dim", family, head_dim=16))
    return [*out, *_switch_cases()]


NOT_CONVERTED = frozenset(
    ("minimax_m2-all-rotary", "mellum-dense", "mellum-softcap", "deepseek_v3-softcap")
)
"""Cases whose checkpoint llama.cpp's converter cannot express or takes for another one."""

_LATENT_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
_LITE_YARN = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_LOCAL_YARN = {**_YARN, "rope_theta": 300.0}


def _switch_cases() -> list[Case]:
    """What the usual spec of a family does not reach."""
    return [
        _row("deepseek_v2-yarn", "deepseek_v2", (232,), rope=_LITE_YARN),
        _row("deepseek_v2-greedy", "deepseek_v2", gguf=False, more={"group_method": "greedy"}),
        _row("deepseek_v3-yarn", "deepseek_v3", (232,), rope=_LATENT_YARN),
        _row(
            "deepseek_v3-no-q-lora",
            "deepseek_v3",
            features=("-q_lora",),
            more={"q_lora": None},
            attention_bias=True,
        ),
        _row("deepseek_v3-bias", "deepseek_v3", attention_bias=True),
        _row("deepseek_v3-eps", "deepseek_v3", norm_eps=0.25),
        _row("deepseek_v3-no-norm", "deepseek_v3", norm_topk=False),
        _row("deepseek_v3-old-gguf", "deepseek_v3", features=("-split_kv_b",)),
        _row(
            "deepseek_v3-kimi",
            "deepseek_v3",
            more=_UNGROUPED,
            overrides={"model_type": "kimi_k2"},
        ),
        _row("dots1-window", "dots1", (40,), gguf=False, window=9, attention_bias=True),
        _row(
            "glm4_moe-plain",
            "glm4_moe",
            features=("-qk_norm", "-qkv_bias"),
            more={"qk_norm": False, "qkv_bias": False, "router_groups": 4, "router_top_groups": 2},
        ),
        _row("ernie4_5_moe-min", "ernie4_5_moe", gguf=False, more={"router_norm_min": 0.6}),
        _row(
            "ernie4_5_moe-end",
            "ernie4_5_moe",
            layers=3,
            dense_layers=(0, 2),
            more={"moe_step": 1, "last_moe": 1},
            tied=True,
        ),
        _row("minimax_m2-all-rotary", "minimax_m2", more={"rope_dim": None}),
        _row("mellum-yarn", "mellum", (232,), rope=_YARN),
        _row("mellum-scaled", "mellum", (232,), gguf=False, rope=_LLAMA3, local_rope=_LOCAL_YARN),
        _row("mellum-dense", "mellum", dense_layers=(0, 2), tied=True, attention_bias=True),
        _row("flex_olmo-norm", "flex_olmo", norm_topk=True, attention_bias=True),
        _row(
            "afmoe-unscaled",
            "afmoe",
            gguf=False,
            more={"scaled_embedding": False, "window_pattern": 2},
            attention_bias=True,
        ),
    ]


_BOTH = {"attention_softcap": 2.0, "logit_softcap": 5.0}


def _softcap_cases() -> list[Case]:
    """Capped scores and logits beside windows, sinks, latents, a divisor, and several ropes."""
    far = {"prompts": (300,), "positions": (0, 99, 199, 254, 255, 256, 257, 299)}
    sinks = tm.default_spec("gpt_oss", max_position=512, **_BOTH)
    return [
        _case("mixtral-softcap", "mixtral", window=16, **_BOTH),
        _case("qwen3_moe-softcap-scores", "qwen3_moe", attention_softcap=1.5),
        _case("olmoe-softcap-logits", "olmoe", logit_softcap=4.0),
        _case("granitemoe-softcap", "granitemoe", logit_softcap=0.7, attention_softcap=1.0),
        _case("gpt_oss-softcap", "gpt_oss", **_BOTH),
        Case("gpt_oss-softcap-far", "gpt_oss", sinks, **far),
        _row("deepseek_v3-softcap", "deepseek_v3", (40, 1), **_BOTH),
        _row("mellum-softcap", "mellum", (40, 1), **_BOTH),
    ]


def _by_name(*groups: list[Case]) -> dict[str, Case]:
    return {case.name: case for group in groups for case in group}


CASES = _by_name(_cases(), _more_cases(), _row_cases(), _longrope_cases(), _softcap_cases())


@dataclass(frozen=True)
class Oracle:
    """What transformers computed for one prompt."""

    tokens: list[int]
    positions: np.ndarray
    """[m] positions whose logits are stored."""
    logits: np.ndarray
    """[m, vocab] float32."""
    choices: np.ndarray
    """[n_moe_layers, n, k] expert ids, best first."""
    weights: np.ndarray
    """[n_moe_layers, n, k] router weights as multiplied into the experts' outputs."""
    gaps: np.ndarray
    """[n_moe_layers, n] k-th minus next router logit as a share of their range; 2 if k = all."""


def pack(oracles: list[Oracle], fingerprint: str) -> dict[str, Any]:
    """The arrays of a values file."""
    out: dict[str, Any] = {"fingerprint": np.array(fingerprint), "n": np.array(len(oracles))}
    for i, oracle in enumerate(oracles):
        out |= {
            f"tokens{i}": np.array(oracle.tokens, dtype=np.int32),
            f"positions{i}": np.array(oracle.positions, dtype=np.int32),
            f"logits{i}": oracle.logits.astype(np.float32),
            f"choices{i}": oracle.choices.astype(np.uint8),
            f"weights{i}": oracle.weights.astype(np.float32),
            f"gaps{i}": oracle.gaps.astype(np.float32),
        }
    return out


def read(name: str) -> tuple[str, list[Oracle]]:
    """The fingerprint and the values of a file in `values/`."""
    with np.load(VALUES / f"{name}.npz", allow_pickle=False) as data:
        oracles = [
            Oracle(
                data[f"tokens{i}"].tolist(),
                data[f"positions{i}"],
                data[f"logits{i}"],
                data[f"choices{i}"].astype(np.int64),
                data[f"weights{i}"],
                data[f"gaps{i}"],
            )
            for i in range(int(data["n"]))
        ]
        return str(data["fingerprint"]), oracles


_loaded: dict[str, list[Oracle]] = {}


def load(case: Case) -> list[Oracle]:
    """The committed values of a case, one entry per prompt."""
    if case.name in _loaded:
        return _loaded[case.name]
    fingerprint, oracles = read(case.name)
    assert fingerprint == case.fingerprint(), (
        f"{case.name}: the tiny model differs from the one the oracle values were made from; "
        "run tests/oracle/make_oracle.py"
    )
    _loaded[case.name] = oracles
    return oracles


def tiny_moe_fingerprint(path: Path = TINY_MOE) -> str:
    """SHA-256 over the weights and config.json of the shipped checkpoint."""
    sha = hashlib.sha256()
    for file in sorted([*path.glob("*.safetensors"), path / "config.json"]):
        sha.update(file.read_bytes())
    return sha.hexdigest()


def error(logits: np.ndarray, oracle: np.ndarray) -> float:
    """The largest |difference| over all positions, each as a share of the oracle's range there."""
    span = oracle.max(axis=-1) - oracle.min(axis=-1)
    return float((np.abs(logits - oracle).max(axis=-1) / span).max())
