"""quantize and repack --type: every type runs as gguf decodes it, and nothing else changes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from fault_util import command, environment, names
from quantize_util import DecodedByGguf, encoding, types_of
from repack_util import small_spec
from test_faults import SYNC_IN_STEP
from test_router_weights import trace
from tiny_containers import Containers, logits

import colibri_tools
from colibri_tools.container import PartRole, Role
from colibri_tools.errors import ColibriError, SourceError, UsageError
from colibri_tools.quantize.rules import MIXES, TYPES
from colibri_tools.repack import repack
from colibri_tools.respec import respec
from colibri_tools.rewrite import quantize
from colibri_tools.verify import verify

VOCAB = 61
PROMPT = tm.prompt(6, VOCAB)
TOLERANCE = 1e-4
"""Float32 sums against float64 ones, relative to the spread of logits, as in test_engine.py."""


def spec_of(family: str, **changes: Any) -> tm.TinySpec:
    return tm.wide_spec(family, **({"experts": 3, "vocab": VOCAB} | changes))


def quantized(source: Path, out: Path, type_name: str, *rules: str, **more: Any) -> Path:
    quantize(source, out, encoding(type_name, *rules), **more)
    return out


# -- what comes out runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "type_name"),
    [
        *(("qwen2_moe", name) for name in (*TYPES, *MIXES)),
        *((family, name) for family in tm.FAMILIES for name in ("q4_k_m", "q8_0")),
    ],
)
def test_every_type_runs_as_gguf_decodes_it(
    containers: Containers, tmp_path: Path, family: str, type_name: str
) -> None:
    source = containers.hf(family, spec_of(family), dtype="bf16")
    out = quantized(source, tmp_path / "q.colibri", type_name)
    with colibri_tools.open(out) as container:
        expected = DecodedByGguf(container).forward(PROMPT)
        kinds = set(types_of(container).values()) - {"f32", "bf16"}
    assert kinds or type_name in ("f32", "bf16")
    found = logits(out, PROMPT)
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()
    assert verify(out).ok


@pytest.mark.parametrize("type_name", ["q4_k", "q8_0", "mxfp4"])
def test_repack_and_quantize_make_the_same_numbers(
    containers: Containers, tmp_path: Path, type_name: str
) -> None:
    path = tm.write_hf(tmp_path / "hf", "qwen2_moe", spec_of("qwen2_moe"), dtype="bf16")
    one, two = tmp_path / "one.colibri", tmp_path / "two.colibri"
    repack(path, one, encoding=encoding(type_name))
    repack(path, tmp_path / "plain.colibri")
    quantize(tmp_path / "plain.colibri", two, encoding(type_name))
    with colibri_tools.open(one) as a, colibri_tools.open(two) as b:
        assert (a.index["sha256"] == b.index["sha256"]).all()
        assert [t.sha256 for t in a.tensors.values()] == [t.sha256 for t in b.tensors.values()]


def test_the_gguf_form_of_a_model_gives_the_same_blocks(tmp_path: Path) -> None:
    """Names, stacks and transposed forms end as the same matrices."""
    spec = spec_of("qwen3_moe")
    hf = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec, dtype="bf16")
    stacked = tm.write_gguf(tmp_path / "m.gguf", "qwen3_moe", spec, dtype="bf16")[0]
    outs = [tmp_path / "a.colibri", tmp_path / "b.colibri"]
    for source, out in zip((hf, stacked), outs, strict=True):
        repack(source, out, encoding=encoding("q5_k"))
    with colibri_tools.open(outs[0]) as a, colibri_tools.open(outs[1]) as b:
        assert (a.index["sha256"] == b.index["sha256"]).all()


# -- what changes, what does not -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "type_name", "expected"),
    [
        (40, "q4_k", "f16"), (48, "q4_k", "f16"), (96, "q4_k", "q5_0"),
        (40, "q8_0", "f16"), (48, "q8_0", "f16"), (96, "q8_0", "q8_0"),
        (40, "mxfp4", "f16"), (48, "mxfp4", "f16"), (96, "mxfp4", "mxfp4"),
        (96, "q6_k", "q8_0"), (96, "iq4_xs", "iq4_nl"), (96, "q2_k", "iq4_nl"),
    ],
)  # fmt: skip
def test_case_6_7_rows_that_the_block_does_not_divide_fall_back(
    containers: Containers, tmp_path: Path, width: int, type_name: str, expected: str
) -> None:
    source = containers.hf("mixtral", spec_of("mixtral", width=width), dtype="bf16")
    result = quantize(source, tmp_path / "q.colibri", encoding(type_name))
    with colibri_tools.open(tmp_path / "q.colibri") as container:
        layout = container.layout_of(0, 0)
        assert {p.role.label: p.dtype.name for p in layout.parts} == {
            "gate": type_name, "up": type_name, "down": expected
        }  # fmt: skip
        fell = expected != type_name
        assert ("recipe.fallbacks" in container.provenance) == fell
        assert sum(result.types.values()) == sum(
            t.n_bytes for t in container.tensors.values() if t.alias_of is None
        ) + int(container.index["n_bytes"].sum())
        expected_logits = DecodedByGguf(container).forward(PROMPT)
    assert result.quantization is not None
    n_down = 2 * 3
    name = f"{type_name} to {expected}"
    assert result.quantization.fallbacks == ({name: n_down} if fell else {})
    found = logits(tmp_path / "q.colibri", PROMPT)
    assert np.abs(found - expected_logits).max() < TOLERANCE * expected_logits.std()


def test_case_3_10_quantize_leaves_routers_and_choices_alone(
    containers: Containers, tmp_path: Path
) -> None:
    """Experts 0 and 1 score 1e-4 apart: q4_0 would make their rows equal."""
    spec = tm.wide_spec("qwen3_moe", experts=4, top_k=1, layers=1)

    def near_tie(weights: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.gate.weight"
        router = weights[name].copy()
        router[1] = router[0] * np.float32(1 + 1e-4)
        router[2:] = -router[0]
        weights[name] = router

    source = containers.hf("qwen3_moe", spec, mutate=near_tie)
    out = quantized(source, tmp_path / "q.colibri", "q4_0", "attention=f32", "embedding=f32")
    with colibri_tools.open(source) as a, colibri_tools.open(out) as b:
        for name, tensor in a.tensors.items():
            if tensor.role in (Role.ROUTER, Role.ATTN_NORM, Role.FFN_NORM, Role.OUTPUT_NORM):
                assert (b.tensors[name].dtype, b.tensors[name].sha256) == (
                    tensor.dtype, tensor.sha256
                )  # fmt: skip
    tokens = tm.prompt(24)
    before, after = trace(source, tokens)[0], trace(out, tokens)[0]
    assert {int(e) for e in before.ravel()} == {1, 2}
    assert (before == after).all()
    named = quantized(source, tmp_path / "r.colibri", "q4_0", "router=q4_0")
    with colibri_tools.open(named) as container:
        assert "q4_0" in {t.dtype.name for t in container.tensors.values() if t.role == Role.ROUTER}


def test_case_4_11_the_same_type_is_a_copy_of_the_bytes(
    containers: Containers, tmp_path: Path
) -> None:
    source = containers.hf("olmoe", spec_of("olmoe"), dtype="bf16")
    one = quantized(source, tmp_path / "one.colibri", "q8_0")
    two = quantized(one, tmp_path / "two.colibri", "q8_0")
    with colibri_tools.open(one) as a, colibri_tools.open(two) as b:
        for row in range(len(a.rows)):
            for expert in range(a.rows[row].n_experts):
                assert a.block(row, expert).tobytes() == b.block(row, expert).tobytes()
        assert "recipe.requantized" not in b.provenance


def test_case_4_11_encoding_again_must_be_asked_for(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("olmoe", spec_of("olmoe"), dtype="bf16")
    one = quantized(source, tmp_path / "one.colibri", "q4_k")
    with pytest.raises(SourceError, match="--allow-requantize"):
        quantize(one, tmp_path / "two.colibri", encoding("q4_0"))
    assert names(tmp_path) == ["one.colibri"]
    result = quantize(one, tmp_path / "two.colibri", encoding("q4_0", allow_requantize=True))
    assert result.quantization is not None
    assert list(result.quantization.requantized) == ["q4_k to q4_0"]
    with colibri_tools.open(tmp_path / "two.colibri") as container:
        assert container.provenance["recipe.requantized"] == ["q4_k to q4_0"]
        assert container.provenance["from.recipe.type"] == "q4_k"


def test_a_tied_embedding_is_the_output_too(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("qwen3_moe", spec_of("qwen3_moe", tied=True), dtype="bf16")
    out = quantized(source, tmp_path / "q.colibri", "q4_k_m")
    with colibri_tools.open(out) as container:
        assert {container.tensors[n].dtype.name for n in ("token_embd", "output")} == {"q6_k"}
    out = quantized(source, tmp_path / "r.colibri", "q4_k", "embedding=q8_0")
    with colibri_tools.open(out) as container:
        assert container.tensors["output"].dtype.name == "q8_0"


# -- numbers that do not fit -----------------------------------------------------------------------


def with_value(tmp_path: Path, value: float, dtype: str = "f32") -> Path:
    """A model whose layer 1, expert 2 has a weight of its own at down[3, 5]."""

    def change(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.experts.2.down_proj.weight"][3, 5] = value

    return tm.write_hf(tmp_path / "hf", "qwen3_moe", spec_of("qwen3_moe"), dtype=dtype,
                       mutate=change)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (np.nan, "q4_k"),
        (np.inf, "q8_0"),
        (70000.0, "f16"),
        (1e9, "q8_0"),
        (-1e9, "q6_k"),
        (3.4028235e38, "bf16"),  # rounds to infinity
    ],
)
def test_case_4_3_a_number_that_does_not_fit_stops_with_its_place(
    tmp_path: Path, value: float, type_name: str
) -> None:
    path = with_value(tmp_path, value)
    before = names(tmp_path)
    with pytest.raises(ColibriError) as caught:
        repack(path, tmp_path / "q.colibri", encoding=encoding(type_name))
    for part in ("layers.1.mlp.experts.2.down_proj.weight", "(layer 1 expert 2 down [3, 5])"):
        assert part in caught.value.message
    assert names(tmp_path) == before


def test_case_4_2_bf16_rounds_to_nearest_even(tmp_path: Path) -> None:
    bits = [0x7F7EFFFF, 0x80000000, 0x3F808000, 0x3F818000, 0x00000001, 0x807FFFFF]
    rounded = [0x7F7F, 0x8000, 0x3F80, 0x3F82, 0x0000, 0x8080]

    def change(weights: dict[str, Any]) -> None:
        row = weights["model.layers.1.mlp.experts.2.down_proj.weight"][0]
        row[: len(bits)] = np.array(bits, np.uint32).view(np.float32)

    path = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec_of("qwen3_moe"), mutate=change)
    repack(path, tmp_path / "q.colibri", encoding=encoding("bf16"))
    with colibri_tools.open(tmp_path / "q.colibri") as container:
        down = container.dequantize_part(1, 2, PartRole.DOWN)
    found = down[0, : len(bits)].view(np.uint32) >> 16
    assert [hex(n) for n in found] == [hex(n) for n in rounded]


def test_case_4_3_more_range_by_a_rule_takes_the_number(tmp_path: Path) -> None:
    path = with_value(tmp_path, 1e9)
    repack(path, tmp_path / "q.colibri", encoding=encoding("q8_0", "layer 1 down = bf16"))
    with colibri_tools.open(tmp_path / "q.colibri") as container:
        assert container.dequantize_part(1, 2, PartRole.DOWN)[3, 5] == tm.from_bf16(
            tm.to_bf16(np.float32([1e9]))
        )


@pytest.mark.parametrize("type_name", TYPES)
def test_case_4_1_subnormals_give_finite_numbers(tmp_path: Path, type_name: str) -> None:
    def change(weights: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.experts.0.gate_proj.weight"
        weights[name][0] = 1e-40
        weights[name][1, ::2] = 1e-40
        weights[name][1, 1::2] = 1e-3

    path = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec_of("qwen3_moe"), dtype="bf16",
                       mutate=change)  # fmt: skip
    repack(path, tmp_path / "q.colibri", encoding=encoding(type_name))
    with colibri_tools.open(tmp_path / "q.colibri") as container:
        gate = container.dequantize_part(0, 0, PartRole.GATE)
    assert np.isfinite(gate).all()
    assert np.abs(gate[0]).max() <= 1e-39 or type_name == "mxfp4"
    # half a step of the coarsest type for one sign: 2 bits, 1e-3 / 3
    assert np.abs(gate[1, 1::2] - 1e-3).max() < 5e-4
    if type_name == "bf16":
        assert (gate[0] == tm.from_bf16(tm.to_bf16(np.float32([1e-40])))).all()


# -- the job ---------------------------------------------------------------------------------------


def test_threads_and_order_of_work_do_not_matter(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("qwen2_moe", spec_of("qwen2_moe", experts=7), dtype="bf16")
    made = {
        quantized(source, tmp_path / f"{n}.colibri", "q4_k_m", threads=n).read_bytes()
        for n in (1, 2, 5)
    }
    assert len(made) == 1


def test_effort_is_recorded_and_best_loses_least(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("mixtral", spec_of("mixtral"), dtype="bf16")
    lost = []
    for effort in ("fast", "normal", "best"):
        report = tmp_path / f"{effort}.json"
        out = tmp_path / f"{effort}.colibri"
        quantize(source, out, encoding("q4_k", effort=effort), report=report)
        found = json.loads(report.read_text())
        lost.append(next(e["relative"] for e in found["errors"] if e["role"] == "experts.up"))
        with colibri_tools.open(out) as container:
            assert container.provenance["recipe.effort"] == effort
    assert lost[0] > lost[1] > lost[2]


_KILL_AFTER_SIX = (
    f"{SYNC_IN_STEP}\n"
    "import colibri_tools.repack as r, os\n"
    "do, done = r._Copier._do_block, []\n"
    "def work(*a):\n"
    "    do(*a); done.append(1)\n"
    "    if len(done) == 6: os.kill(os.getpid(), 9)\n"
    "r._Copier._do_block = work"
)


def test_a_killed_job_goes_on_to_the_same_bytes(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("olmoe", spec_of("olmoe", experts=8), dtype="bf16")
    expected = quantized(source, tmp_path / "whole.colibri", "q5_k_m").read_bytes()
    place = tmp_path / "place"
    place.mkdir()
    out = place / "q.colibri"
    call = ("quantize", source, "-o", out, "--type", "q5_k_m", "--threads", "1", "-q")
    killed = subprocess.run(command(*call, setup=_KILL_AFTER_SIX), env=environment(None))
    assert killed.returncode == -signal.SIGKILL
    assert names(place) == ["q.colibri.journal", "q.colibri.partial"]
    with pytest.raises(UsageError, match="type was 'q5_k_m', now 'q6_k'"):
        quantize(source, out, encoding("q6_k"))
    result = quantize(source, out, encoding("q5_k_m"), report=place / "r.json")
    assert result.n_kept >= 4
    assert out.read_bytes() == expected
    quantize(source, tmp_path / "n.colibri", encoding("q5_k_m"), report=tmp_path / "n.json")
    both = [json.loads(path.read_text()) for path in (place / "r.json", tmp_path / "n.json")]
    assert both[0]["errors"] == both[1]["errors"]  # what was kept is measured too


# -- what it says ----------------------------------------------------------------------------------


def test_the_report_has_bits_and_true_errors(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("qwen2_moe", spec_of("qwen2_moe"), dtype="bf16")
    report, out = tmp_path / "r.json", tmp_path / "q.colibri"
    quantize(source, out, encoding("q4_k", "down=q6_k"), report=report)
    found = json.loads(report.read_text())
    with colibri_tools.open(source) as a, colibri_tools.open(out) as b:
        error = weight = 0.0
        for expert in range(3):
            x = a.dequantize_part(1, expert, PartRole.DOWN).astype(np.float64)
            y = b.dequantize_part(1, expert, PartRole.DOWN).astype(np.float64)
            error, weight = error + ((x - y) ** 2).sum(), weight + (x**2).sum()
        n_bytes = sum(p.n_bytes for p in b.layout_of(0, 0).parts if p.role == PartRole.DOWN)
    one = next(e for e in found["errors"] if (e["role"], e["layer"]) == ("experts.down", 1))
    assert one["relative"] == pytest.approx(error / weight, rel=1e-9)  # order of sums
    size = next(s for s in found["sizes"] if s["role"] == "experts.down")
    assert (size["n_matrices"], size["n_bytes"]) == (6, 6 * n_bytes)
    assert size["bits_per_weight"] == pytest.approx(6.5625)
    assert found["rules"]["down=q6_k"] == 6 + 2  # the shared experts too
    assert found["untouched"] == {"router": 2}
    assert len(found["worst"]) == 10
    assert found["worst"][0]["relative"] >= found["worst"][-1]["relative"]


def test_a_dry_run_says_size_bits_time_and_memory(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("qwen2_moe", spec_of("qwen2_moe"), dtype="bf16")
    result = quantize(source, tmp_path / "q.colibri", encoding("q4_k_m"), dry_run=True)
    assert names(tmp_path) == []
    assert result.quantization is not None and result.quantization.estimate is not None
    assert result.quantization.estimate.encode_seconds > 0
    assert result.quantization.estimate.memory_bytes > 0
    written = quantize(source, tmp_path / "q.colibri", encoding("q4_k_m"))
    assert written.quantization is not None
    assert written.file_bytes == result.file_bytes
    assert written.quantization.sizes == result.quantization.sizes
    assert written.quantization.errors == ()  # nobody asked


def test_options_that_do_not_go_together(containers: Containers, tmp_path: Path) -> None:
    source = containers.hf("olmoe", spec_of("olmoe"), dtype="bf16")
    out = tmp_path / "q.colibri"
    with pytest.raises(UsageError, match="--report"):
        quantize(source, out, encoding("q8_0"), dry_run=True, report=tmp_path / "r.json")
    with pytest.raises(UsageError, match=r"no matrix .* 'shared=q8_0'"):
        quantize(source, out, encoding("q8_0", "shared=q8_0"))
    with pytest.raises(UsageError, match="--routing"):
        quantize(source, out, encoding("q8_0", "hottest 10%: f16"))
    (tmp_path / "r.json").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        quantize(source, out, encoding("q8_0"), report=tmp_path / "r.json")
    hf = tm.write_hf(tmp_path / "hf", "olmoe", small_spec("olmoe"))
    with pytest.raises(UsageError, match="--report is about encoding"):
        repack(hf, out, report=tmp_path / "s.json")
    assert not out.exists() and (tmp_path / "r.json").read_text() == "mine"


# -- verify and respec -----------------------------------------------------------------------------


def test_verify_encodes_the_source_again(tmp_path: Path) -> None:
    path = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec_of("qwen3_moe"), dtype="bf16")
    out = tmp_path / "q.colibri"
    repack(path, out, encoding=encoding("q4_k_m", effort="fast"))
    assert verify(out, against=path).ok

    def change(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.experts.2.down_proj.weight"][3, 5] += 0.5

    other = tm.write_hf(tmp_path / "other", "qwen3_moe", spec_of("qwen3_moe"), dtype="bf16",
                        mutate=change)  # fmt: skip
    errors = verify(out, against=other).errors
    assert [(e.layer, e.expert, e.tensor) for e in errors] == [(1, 2, "down")]


def test_verify_refuses_what_it_cannot_encode_again(containers: Containers, tmp_path: Path) -> None:
    path = tm.write_hf(tmp_path / "hf", "qwen3_moe", spec_of("qwen3_moe"), dtype="bf16")
    once, twice = tmp_path / "once.colibri", tmp_path / "twice.colibri"
    repack(path, once, encoding=encoding("q8_0"))
    quantize(once, twice, encoding("q4_k", allow_requantize=True))
    with pytest.raises(UsageError, match="encoded 2 times"):
        verify(twice, against=path)
    with pytest.raises(UsageError, match="without importance"):
        verify(once, against=path, importance=path)


@pytest.mark.parametrize("family", tm.FAMILIES)
def test_quantized_containers_can_be_respecced(tmp_path: Path, family: str) -> None:
    path = tm.write_hf(tmp_path / "hf", family, spec_of(family), dtype="bf16")
    repack(path, tmp_path / "q.colibri", encoding=encoding("q4_k_m"))
    assert not respec(tmp_path / "q.colibri").changed
