"""Source precisions: fp8, int8 and MXFP4 weights land where they should, with the value they mean.

Expected numbers are made here from the specifications (OCP 8-bit floating point, OCP MX), by
formulas that share nothing with the package; gguf's dequantize is the oracle of GGML's MXFP4.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from repack_util import PARTS, Weights, check_codes, code, mapped, refused, small_hf, small_spec
from rich.console import Console
from sources_util import peak_memory

import colibri_tools
from colibri_tools.carried import carried_source
from colibri_tools.container.format import PartRole
from colibri_tools.errors import ColibriError
from colibri_tools.families import detect
from colibri_tools.families.common import DOWN, GATE, GATE_UP, UP
from colibri_tools.families.precision import SCHEMES
from colibri_tools.families.schema import ExpertRule, Family
from colibri_tools.families.table import MIXTRAL
from colibri_tools.inspect import inspect
from colibri_tools.mapping import map_source
from colibri_tools.repack import repack
from colibri_tools.respec import respec
from colibri_tools.sources.views import values_of_codes
from colibri_tools.verify import verify_container, verify_source

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCK = {**FP8, "weight_block_size": [16, 24]}
UE8M0 = {**BLOCK, "scale_fmt": "ue8m0"}
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def compressed(form: str, strategy: str, kind: str = "float", **extra: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **extra}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


# ---------------------------------------------------------------- values of codes


def float_of(code_: int, exponent_bits: int, mantissa_bits: int, top: str) -> float:
    """One code by the text of the OCP specification, with Python's own numbers."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code_ & 0x80 else 1.0
    exponent = code_ >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = code_ & (2**mantissa_bits - 1)
    full = exponent == 2**exponent_bits - 1
    if full and top == "ieee":
        return sign * float("inf") if mantissa == 0 else float("nan")
    if full and mantissa == 2**mantissa_bits - 1:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def e4m3(codes: np.ndarray) -> np.ndarray:
    table = np.array([float_of(i, 4, 3, "fn") for i in range(256)])
    return table[codes]


def test_every_code_has_the_value_of_the_specification() -> None:
    codes = np.arange(256)
    found = values_of_codes("f8_e4m3")
    np.testing.assert_array_equal(found, e4m3(codes).astype(np.float32))
    assert found[0x7E] == 448 and found[1] == 2**-9 and found[0x38] == 1 and found[0xB8] == -1
    assert np.isnan(found[[0x7F, 0xFF]]).all() and np.signbit(found[0x80])
    expected = np.array([float_of(i, 5, 2, "ieee") for i in range(256)], np.float32)
    np.testing.assert_array_equal(values_of_codes("f8_e5m2"), expected)
    assert values_of_codes("f8_e5m2")[0x7B] == 57344
    np.testing.assert_array_equal(values_of_codes("i8"), np.where(codes < 128, codes, codes - 256))
    powers = values_of_codes("f8_e8m0")
    assert powers[127] == 1 and powers[0] == 2.0**-127 and powers[254] == 2.0**127
    assert np.isnan(powers[255])


# ---------------------------------------------------------------- codes times scales


def some_codes(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random codes of numbers that are finite, all 254 of them possible."""
    codes = (abs(tm.unit_noise(name, shape)) * 997).astype(np.int64) % 254
    return (codes + (codes >= 127)).astype(np.uint8)


def some_scales(name: str, shape: tuple[int, ...], powers: bool = False) -> np.ndarray:
    noise = abs(tm.unit_noise("s" + name, shape))
    return (2.0 ** np.floor(8 * noise - 12) if powers else noise / 77 + 1e-4).astype(np.float32)


def spread(scales: np.ndarray, shape: tuple[int, ...], tile: tuple[int, int]) -> np.ndarray:
    """Each scale over its tile: weight (i, j) has scale (i // tile rows, j // tile cols)."""
    rows, cols = np.arange(shape[-2]) // tile[0], np.arange(shape[-1]) // tile[1]
    return scales[..., rows[:, None], cols]


def fp8_raw(codes: np.ndarray, dtype: str = "F8_E4M3") -> tm.Raw:
    return tm.Raw(dtype, codes.shape, codes.tobytes())


def bf16_raw(values: np.ndarray) -> tm.Raw:
    return tm.Raw("BF16", values.shape, tm.to_bf16(values).tobytes())


def matrices(weights: Weights) -> list[str]:
    """Names of the weights that such checkpoints quantize."""
    kept = ("embed_tokens", "lm_head", ".gate.weight", "norm")
    return [n for n in weights if not any(part in n for part in kept)]


class Quantizer:
    """A change of weights to codes and scales, which keeps the values they mean."""

    def __init__(
        self,
        tile: tuple[int, int] | None,
        suffix: str = "_scale_inv",
        powers: bool = False,
        scale_type: str = "F32",
        flat: bool = False,
    ) -> None:
        self.tile, self.suffix, self.powers = tile, suffix, powers
        self.scale_type, self.flat = scale_type, flat
        self.values: dict[str, np.ndarray] = {}

    def __call__(self, weights: Weights) -> None:
        for name in matrices(weights):
            shape = weights[name].shape
            tile = self.tile or shape[-2:]
            tile = (min(tile[0], shape[-2]), min(tile[1], shape[-1]))
            grid = (*shape[:-2], -(-shape[-2] // tile[0]), -(-shape[-1] // tile[1]))
            codes = some_codes(name, shape)
            scales = some_scales(name, grid, self.powers)
            if self.scale_type == "BF16":
                scales = tm.from_bf16(tm.to_bf16(scales))
            weights[name] = fp8_raw(codes)
            weights[name + self.suffix] = self._store(scales)
            product = e4m3(codes).astype(np.float32) * spread(scales, shape, tile)
            self.values[name] = product.astype(np.float32)

    def _store(self, scales: np.ndarray) -> Any:
        if self.scale_type == "F8_E8M0":
            exponents = np.log2(scales).astype(np.int64) + 127
            return fp8_raw(exponents.astype(np.uint8), "F8_E8M0")
        if self.flat:
            scales = scales.reshape(scales.shape[:-1] if scales.size > 1 else ())
        return bf16_raw(scales) if self.scale_type == "BF16" else scales


def check_values(container: Path, values: dict[str, np.ndarray], carrier: str) -> None:
    """Every weight of every expert, and of attention, is the value that was meant."""
    names = dict(zip(PARTS, ("w1", "w3", "w2"), strict=True))
    n_checked = 0
    with colibri_tools.open(container) as found:
        for row, spec in enumerate(found.rows):
            for expert in range(spec.n_experts):
                for part, name in names.items():
                    key = f"model.layers.{spec.layer}.block_sparse_moe.experts.{expert}.{name}"
                    got = found.dequantize_part(row, expert, part)
                    np.testing.assert_array_equal(got, values[key + ".weight"], key)
                    n_checked += 1
            assert {p.dtype.name for p in found.layout_of(row, 0).parts} == {carrier}
            for letter in "qkvo":
                key = f"model.layers.{spec.layer}.self_attn.{letter}_proj.weight"
                tensor = f"layers.{spec.layer}.attn_{letter}"
                np.testing.assert_array_equal(found.dequantize(tensor), values[key], key)
                assert found.tensors[tensor].dtype.name == carrier
        assert found.tensors["token_embd"].dtype.name == "f32"
    assert n_checked == 3 * 3 * 5


FORMS = {
    "block": (BLOCK, Quantizer((16, 24)), "f32"),
    "block-bf16-scales": (BLOCK, Quantizer((16, 24), scale_type="BF16"), "f32"),
    "block-default": (FP8, Quantizer((128, 128)), "f32"),
    "powers": (UE8M0, Quantizer((16, 24), powers=True), "bf16"),
    "e8m0": (BLOCK, Quantizer((16, 24), powers=True, scale_type="F8_E8M0"), "bf16"),
    "tensor": ({**FP8, "weight_block_size": None}, Quantizer(None, flat=True), "f32"),
    "row": ({**FP8, "weight_block_size": None}, Quantizer((1, 1 << 20)), "f32"),
    "fbgemm": (FBGEMM, Quantizer((1, 1 << 20), "_scale"), "f32"),
    "channel": (
        compressed("float-quantized", "channel"),
        Quantizer((1, 1 << 20), "_scale", scale_type="BF16"),
        "f32",
    ),
    "channel-flat": (
        compressed("float-quantized", "channel"),
        Quantizer((1, 1 << 20), "_scale", flat=True),
        "f32",
    ),
    "ct-tensor": (compressed("float-quantized", "tensor"), Quantizer(None, "_scale"), "f32"),
    "ct-block": (
        compressed("float-quantized", "block", block_structure=[16, 24]),
        Quantizer((16, 24), "_scale"),
        "f32",
    ),
    "modelopt": (MODELOPT, Quantizer(None, "_scale", flat=True), "f32"),
}


@pytest.mark.parametrize("form", FORMS)
def test_case_1_4_every_fp8_weight_is_its_code_times_its_scale(tmp_path: Path, form: str) -> None:
    """Three shards, so that scales and weights are in different files; 24 x 64 and 16 x 24 tiles,
    so that the last tile of a row and of a column is a part of one."""
    config, quantizer, carrier = FORMS[form]
    overrides = {"quantization_config": config}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=quantizer, overrides=overrides, shards=3)
    result = repack(source, tmp_path / "m.colibri")
    check_values(tmp_path / "m.colibri", quantizer.values, carrier)
    assert result.executable and any(f"become {carrier}" in note for note in result.notes)
    report = verify_container(tmp_path / "m.colibri", against=source)
    assert report.ok and report.errors == []
    assert verify_source(source).ok


def test_stacked_fp8_experts_have_a_grid_of_scales_each(tmp_path: Path) -> None:
    """The fused form of transformers 5: gate_up_proj with gate_up_proj_scale_inv."""
    quantizer = Quantizer((16, 24))
    spec = small_spec("mixtral")
    source = tm.write_hf(
        tmp_path / "hf",
        "mixtral",
        spec,
        form="fused",
        mutate=quantizer,
        overrides={"quantization_config": BLOCK},
    )
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as found:
        for layer in range(spec.layers):
            at = f"model.layers.{layer}.mlp.experts."
            gate_up, down = (
                quantizer.values[at + "gate_up_proj"],
                quantizer.values[at + "down_proj"],
            )
            for role, values in zip(PARTS, (gate_up[:, :24], gate_up[:, 24:], down), strict=True):
                for expert in range(spec.experts):
                    got = found.dequantize_part(layer, expert, role)
                    np.testing.assert_array_equal(got, values[expert])
    assert verify_container(tmp_path / "m.colibri", against=source).ok


def test_small_pieces_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that begin and end within a row: pieces of verify, of resident tensors, of a view."""
    quantizer = Quantizer((16, 24))
    overrides = {"quantization_config": BLOCK}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=quantizer, overrides=overrides)
    repack(source, tmp_path / "whole.colibri")
    monkeypatch.setattr("colibri_tools.sources.views._STEP_WEIGHTS", 100)
    monkeypatch.setattr("colibri_tools.repack.CHUNK_BYTES", 60)
    monkeypatch.setattr("colibri_tools.verify.scan._PIECE_BYTES", 52)
    repack(source, tmp_path / "pieces.colibri")
    assert (tmp_path / "pieces.colibri").read_bytes() == (tmp_path / "whole.colibri").read_bytes()
    assert verify_container(tmp_path / "pieces.colibri", against=source).ok


# ---------------------------------------------------------------- 8-bit integers


def int8_change(suffix: str, values: dict[str, np.ndarray], replaced: str = "") -> Any:
    def change(weights: Weights) -> None:
        for name in matrices(weights):
            shape = weights[name].shape
            codes = (tm.unit_noise(name, shape) * 997).astype(np.int64) % 256 - 128
            scales = some_scales(name, (shape[0],))
            weights[name] = codes.astype(np.int8)
            if replaced:
                weights[name.removesuffix(replaced) + suffix] = scales
                weights[name.removesuffix("weight") + "weight_format"] = np.zeros((), np.uint8)
                # bitsandbytes: A * stats.view(-1, 1) * 7.874015718698502e-3, in float32
                product = codes.astype(np.float32) * scales[:, None]
                values[name] = product * np.float32(7.874015718698502e-3)
            else:
                weights[name + suffix] = scales[:, None]
                values[name] = codes.astype(np.float32) * scales[:, None]

    return change


@pytest.mark.parametrize("form", ["bitsandbytes", "compressed-tensors"])
def test_case_1_4_int8_weights_are_what_their_library_computes(tmp_path: Path, form: str) -> None:
    values: dict[str, np.ndarray] = {}
    if form == "bitsandbytes":
        config, change = BNB, int8_change(".SCB", values, ".weight")
    else:
        config = compressed("int-quantized", "channel", "int")
        change = int8_change("_scale", values)
    overrides = {"quantization_config": config}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    repack(source, tmp_path / "m.colibri")
    check_values(tmp_path / "m.colibri", values, "f32")
    assert verify_container(tmp_path / "m.colibri", against=source).ok
    assert set(mapped(source).dropped) == set()


def test_the_page_has_a_row_for_every_scheme() -> None:
    page = (Path(__file__).parents[1] / "docs" / "sources.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in page.splitlines()]
    for scheme in SCHEMES:
        form = {"8bit": "load_in_8bit"}.get(scheme.format, scheme.format)
        found = [row for row in rows if row[:1] == [scheme.method]]
        assert [row for row in found if row[1].split(",")[0] == form], scheme


def test_int8_weights_in_another_order_than_rows_are_refused(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        int8_change(".SCB", {}, ".weight")(weights)
        weights[_W1.removesuffix("weight") + "weight_format"] = np.ones((), np.uint8)

    overrides = {"quantization_config": BNB}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    assert "weight_format': expected 0 (rows)" in refused(source)


# ---------------------------------------------------------------- what is refused, and how


_W1 = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def _change(**tensors: Any) -> Any:
    """Quantize in 16 x 24 tiles, then lay tensors over it; "weight" and "scale" mean _W1's."""

    def change(weights: Weights) -> None:
        Quantizer((16, 24))(weights)
        names = {"weight": _W1, "scale": _W1 + "_scale_inv"}
        for name, value in tensors.items():
            key = names.get(name, _W1 + name)
            if value is None:
                del weights[key]
            else:
                weights[key] = value

    return change


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (tm.DELETE, {}, "FP8 weights (weight_scale_inv) are not supported without a"),
        (BLOCK, {"scale": None}, "1 tensors of type F8_E4M3, expected F32, F16 or BF16"),
        (BLOCK, {"weight": None}, "not supported in this place by fp8, the scheme that"),
        (BLOCK, {"scale": np.ones((2, 4), np.float32)}, "expected one scale for each 16 x 24 tile"),
        (BLOCK, {"scale": np.ones((2, 3), np.float64)}, "scales of type f64 are not supported"),
        (BLOCK, {"weight": fp8_raw(np.zeros((24, 64), np.uint8), "F8_E4M3FNUZ")}, "F8_E4M3FNUZ"),
        (BLOCK, {"_packed": np.ones((2, 3), np.int32)}, "compressed-tensors packed weights"),
        ({**BLOCK, "weight_block_size": [16]}, {}, "block of two positive whole numbers"),
        ({**BLOCK, "weight_block_size": [0, 16]}, {}, "block of two positive whole numbers"),
        ({**BLOCK, "expert_dtype": "fp4"}, {}, "experts of type 'fp4' are not supported"),
        ({"quant_method": "quark"}, {}, "the scheme 'quark' is not supported"),
        ({"quant_method": ["fp8"]}, {}, "the scheme '?' is not supported"),
        ("fp8", {}, "the scheme '?' is not supported"),
        ({"bits": 4, "group_size": 64}, {}, "'?' (no quant_method: 'bits', 'group_size') is not"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, "'bitsandbytes 4bit'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, "'modelopt NVFP4'"),
        (compressed("pack-quantized", "group", "int"), {}, "'compressed-tensors pack-quantized'"),
        (compressed("nvfp4-pack-quantized", "group"), {}, "'compressed-tensors nvfp4-pack-"),
        (compressed("float-quantized", "group"), {}, "strategy 'group' is not supported"),
        (compressed("float-quantized", "channel", num_bits=4), {}, "num_bits: expected 8"),
        (compressed("int-quantized", "channel", "int", symmetric=False), {}, "symmetric"),
        (
            {**compressed("float-quantized", "channel"), "transform_config": {"a": 1}},
            {},
            "transform_config is not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_case_1_4_what_is_not_understood_is_named(
    tmp_path: Path, config: Any, change: dict[str, Any], says: str
) -> None:
    overrides = {"quantization_config": config}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=_change(**change), overrides=overrides)
    assert says in refused(source)


@pytest.mark.parametrize(
    ("ends", "says"),
    [(("scales", "biases"), "MLX packed weights (biases)"), (("W_q", "scale"), "HQQ packed")],
)
@pytest.mark.parametrize("model_type", ["mixtral", "novel_moe"])
def test_case_1_4_names_that_give_a_scheme_away(
    tmp_path: Path, model_type: str, ends: tuple[str, ...], says: str
) -> None:
    def change(weights: Weights) -> None:
        for end in ends:
            weights[_W1.removesuffix("weight") + end] = np.ones((2, 3), np.float32)

    overrides = {"model_type": model_type}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    assert says in refused(source)


# transformers.utils.quantization_config.QuantizationMethod of 5.24, without what is understood
OTHER_METHODS = (
    *("gptq", "awq", "aqlm", "vptq", "quanto", "eetq", "higgs", "hqq", "torchao", "gguf"),
    *("bitnet", "spqr", "quark", "fp_quant", "auto-round", "nvfp4", "mxfp8", "metal"),
    *("fouroversix", "sinq", "gemma"),
)


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_case_1_4_every_other_method_is_named_and_refused(tmp_path: Path, method: str) -> None:
    config = {"quant_method": method, "bits": 4, "group_size": 128}
    source = small_hf(tmp_path / "hf", "mixtral", overrides={"quantization_config": config})
    message = refused(source)
    assert f"quantization_config: the scheme '{method}' is not supported; use the" in message
    assert [error.kind for error in verify_source(source).errors] == ["census"]


def test_case_1_4_mxfp4_that_is_not_blocks_and_scales_is_refused(
    tmp_path: Path, gpt_oss_like: None
) -> None:
    for blocks, scales in (((5, 48, 2, 16), (5, 48, 3)), ((5, 48, 32), (5, 48))):

        def change(weights: Weights, blocks: Any = blocks, scales: Any = scales) -> None:
            at = "model.layers.0.block_sparse_moe.experts.gate_up_proj"
            weights[at + "_blocks"] = np.zeros(blocks, np.uint8)
            weights[at + "_scales"] = np.zeros(scales, np.uint8)

        overrides = {"quantization_config": MXFP4}
        source = small_hf(
            tmp_path / str(len(blocks)), "mixtral", mutate=change, overrides=overrides
        )
        assert "expected [experts, outputs, blocks, 16]" in refused(source)


def test_a_stale_quantization_config_is_a_warning(tmp_path: Path) -> None:
    """People dequantize a checkpoint and leave its config; a container of one carries it too."""
    source = small_hf(tmp_path / "hf", "mixtral", overrides={"quantization_config": BLOCK})
    result = repack(source, tmp_path / "m.colibri")
    assert any("stored as fp8, but no tensor is" in text for text in result.warnings)


def test_case_4_3_a_code_that_is_no_number_is_named_with_its_place(tmp_path: Path) -> None:
    codes = some_codes("nan", (24, 64))
    codes[3, 5] = 0xFF
    overrides = {"quantization_config": BLOCK}
    change = _change(weight=fp8_raw(codes))
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    message = refused(source)
    assert f"'{_W1}': nan at [3, 5] (layer 0 expert 1 gate [3, 5])" in message
    report = verify_source(source)
    assert not report.ok and "[3, 5] is NaN" in report.errors[0].message


@pytest.mark.parametrize("scale", [np.inf, np.nan, 3e38])
def test_case_4_3_a_scale_that_leaves_the_numbers_is_found(tmp_path: Path, scale: float) -> None:
    scales = some_scales("x", (2, 3))
    scales[1, 2] = scale
    overrides = {"quantization_config": BLOCK}
    codes = np.full((24, 64), 0x7E, np.uint8)
    change = _change(weight=fp8_raw(codes), scale=scales)
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    assert "at [16, 48] (layer 0 expert 1 gate" in refused(source)
    assert not verify_source(source).ok


def test_scales_that_are_not_the_powers_of_two_they_claim_to_be_stop_the_job(
    tmp_path: Path,
) -> None:
    def change(weights: Weights) -> None:
        Quantizer((16, 24), powers=True)(weights)
        codes = np.zeros((24, 64), np.uint8)
        codes[17, 50] = 0x39
        weights[_W1] = fp8_raw(codes)
        weights[_W1 + "_scale_inv"] = np.full((2, 3), 0.3, np.float32)

    overrides = {"quantization_config": UE8M0}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    message = refused(source)
    assert "weight [17, 50] times its scale" in message and "powers of two" in message


def test_scales_of_activations_are_left_out_by_a_rule(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        Quantizer(None, "_scale", flat=True)(weights)
        weights["model.layers.0.self_attn.q_proj.input_scale"] = np.ones((), np.float32)
        weights["model.layers.0.self_attn.k_proj.k_scale"] = np.ones((), np.float32)

    overrides = {"quantization_config": MODELOPT}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    result = repack(source, tmp_path / "m.colibri")
    assert [*result.dropped] == ["activation-scale"]
    assert len(result.dropped["activation-scale"]) == 2


def test_quantized_parts_outside_the_language_model_go_with_their_scales(tmp_path: Path) -> None:
    extra = {
        "model.visual.blocks.0.attn.weight": fp8_raw(some_codes("v", (32, 48))),
        "model.visual.blocks.0.attn.weight_scale_inv": some_scales("v", (2, 2)),
    }

    def change(weights: Weights) -> Weights:
        Quantizer((16, 24))(weights)
        return weights | extra

    overrides = {"quantization_config": BLOCK}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    result = repack(source, tmp_path / "m.colibri")
    assert {rule: set(names) for rule, names in result.dropped.items()} == {
        "vision-tower": set(extra)
    }
    assert f"{3 * (3 * 5 + 4)} tensors stored as fp8 become f32" in result.notes


def test_an_unknown_family_is_dequantized_too(tmp_path: Path) -> None:
    quantizer = Quantizer((16, 24))
    overrides = {"quantization_config": BLOCK, "model_type": "novel_moe"}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=quantizer, overrides=overrides)
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as found:
        name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
        got = found.dequantize_part(1, 4, PartRole.UP)
        np.testing.assert_array_equal(got, quantizer.values[name])
    assert verify_container(tmp_path / "m.colibri", against=source).ok
    assert respec(tmp_path / "m.colibri").changed is False


@pytest.mark.parametrize("base", [BLOCK, BNB, MXFP4, compressed("float-quantized", "block")])
def test_no_value_of_a_quantization_config_breaks_the_census(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    source = small_hf(tmp_path / "hf", "mixtral", mutate=Quantizer((16, 24)))
    config = json.loads((source / "config.json").read_text())
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1e300,
        "",
        "x",
        [],
        [[]],
        {},
        {"a": []},
        [1, 2],
        [-1, 1],
    ]
    for key in base:
        for value in values:
            nested = [{**base, key: value}]
            if isinstance(base[key], dict):
                nested += [{**base, key: {"g": value}}, {**base, key: {"g": {"weights": value}}}]
                parts = ("strategy", "block_structure", "num_bits", "type", "symmetric")
                weights = base[key]["group_0"]["weights"]
                nested += [{**base, key: {"g": {"weights": {**weights, p: value}}}} for p in parts]
            for found in nested:
                config["quantization_config"] = found
                (source / "config.json").write_text(json.dumps(config))
                with contextlib.suppress(ColibriError):
                    mapped(source)


def test_conversions_are_recorded_and_shown(tmp_path: Path) -> None:
    overrides = {"quantization_config": BLOCK}
    source = small_hf(
        tmp_path / "hf",
        "mixtral",
        mutate=_change(weight=np.ones((24, 64), np.float32), scale=None),
        overrides=overrides,
    )
    n_converted = 3 * (3 * 5 + 4) - 1
    repack(source, tmp_path / "m.colibri")
    shown = inspect(tmp_path / "m.colibri").summary["provenance"]
    assert shown["recipe.conversions"] == ["fp8 -> f32"]
    assert shown["recipe.conversion_counts"] == [n_converted]
    found = inspect(source, tensors=True, tensor=_W1.replace(".1.", ".2."))
    assert f"{n_converted} tensors stored as fp8 become f32" in found.notes
    assert found.summary["conversions"] == {"fp8 -> f32": n_converted}
    for inspection in (found, inspect(tmp_path / "m.colibri")):
        console = Console(width=120, record=True, file=io.StringIO())
        inspection.render(console)
        assert f"{n_converted} tensors fp8 -> f32" in console.export_text()
    rows = {row["name"]: row for row in found.tensors or []}
    assert rows[_W1]["becomes"] == "f32" and rows[_W1]["type"] == "f32"
    other = _W1.replace(".1.", ".2.")
    assert (rows[other]["type"], rows[other]["becomes"]) == ("f8_e4m3", "f32")
    side = rows[other + "_scale_inv"]
    assert (side["action"], side["rule"]) == ("expert", f"scales of {other}")
    assert found.details is not None and found.details["max"] < 448
    assert all(row["action"] != "unmatched" for row in rows.values())


def test_a_container_of_dequantized_weights_can_be_respecified(tmp_path: Path) -> None:
    overrides = {"quantization_config": BLOCK}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=Quantizer((16, 24)), overrides=overrides)
    repack(source, tmp_path / "m.colibri")
    assert respec(tmp_path / "m.colibri").changed is False


def test_memory_of_a_dequantizing_repack_does_not_grow_with_layers(tmp_path: Path) -> None:
    peaks = []
    for layers in (1, 3):
        spec = tm.wide_spec("mixtral", layers=layers)
        source = tm.write_hf(
            tmp_path / f"hf{layers}",
            "mixtral",
            spec,
            mutate=Quantizer((128, 128)),
            overrides={"quantization_config": FP8},
        )
        with peak_memory() as peak:
            repack(source, tmp_path / f"{layers}.colibri", threads=1)
        peaks += peak
    assert peaks[1] - peaks[0] < 2 * 65536 * 2 < 3 * spec.width * spec.hidden * 4


# ---------------------------------------------------------------- MXFP4, transposed, interleaved

_AT = "layers.{layer}.block_sparse_moe.experts."
_BIASES = (PartRole.GATE_BIAS, PartRole.UP_BIAS)
GPT_OSS_LIKE = (
    ExpertRule(_AT + "gate_up_proj", GATE_UP, transposed=True, interleaved=True),
    ExpertRule(_AT + "gate_up_proj_blocks", GATE_UP, interleaved=True),
    ExpertRule(_AT + "gate_up_proj_bias", _BIASES, interleaved=True),
    ExpertRule(_AT + "down_proj", DOWN, transposed=True),
    ExpertRule(_AT + "down_proj_blocks", DOWN),
    ExpertRule(_AT + "down_proj_bias", (PartRole.DOWN_BIAS,)),
    ExpertRule(_AT + "{expert}.gate_proj.weight", GATE),
    ExpertRule(_AT + "{expert}.up_proj.weight", UP),
    ExpertRule(_AT + "{expert}.down_proj.weight", DOWN),
    ExpertRule(_AT + "{expert}.gate_proj.bias", _BIASES[:1]),
    ExpertRule(_AT + "{expert}.up_proj.bias", _BIASES[1:]),
    ExpertRule(_AT + "{expert}.down_proj.bias", (PartRole.DOWN_BIAS,)),
)


@pytest.fixture
def gpt_oss_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral, its experts written as gpt-oss writes them."""
    family: Family = replace(MIXTRAL, hf=replace(MIXTRAL.hf, experts=GPT_OSS_LIKE))
    monkeypatch.setattr(detect, "FAMILIES", (family,))


def stacks(spec: tm.TinySpec, layer: int) -> dict[PartRole, np.ndarray]:
    """Coded parts [experts, outputs, inputs], and biases [experts, outputs]."""
    shapes = ((spec.width, spec.hidden), (spec.width, spec.hidden), (spec.hidden, spec.width))
    found = {
        role: np.stack([code(layer, e, part, *shapes[part]) for e in range(spec.experts)])
        for part, role in enumerate(PARTS)
    }
    for number, (role, n) in enumerate(
        ((_BIASES[0], spec.width), (_BIASES[1], spec.width), (PartRole.DOWN_BIAS, spec.hidden))
    ):
        at = 1000 * layer + 300 * number + 10000 * np.arange(spec.experts)
        found[role] = (at[:, None] + np.arange(n)).astype(np.float32)
    return found


def interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    out = np.empty((len(first), 2 * first.shape[1], *first.shape[2:]), first.dtype)
    out[:, 0::2], out[:, 1::2] = first, second
    return out


def test_a_stack_of_inputs_by_outputs_in_halves_is_transposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4: gate_up_proj [experts, hidden, 2 width], gate columns first."""
    rules = (
        ExpertRule(_AT + "gate_up_proj", GATE_UP, transposed=True),
        ExpertRule(_AT + "down_proj", DOWN, transposed=True),
    )
    family: Family = replace(MIXTRAL, hf=replace(MIXTRAL.hf, experts=rules))
    monkeypatch.setattr(detect, "FAMILIES", (family,))
    spec = small_spec("mixtral", width=64, experts=4)  # square: no shape tells

    def fuse(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            parts, at = stacks(spec, layer), f"model.layers.{layer}.block_sparse_moe.experts."
            gate_up = np.concatenate([parts[PartRole.GATE], parts[PartRole.UP]], axis=1)
            kept[at + "gate_up_proj"] = np.ascontiguousarray(gate_up.swapaxes(1, 2))
            kept[at + "down_proj"] = np.ascontiguousarray(parts[PartRole.DOWN].swapaxes(1, 2))
        return kept

    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=fuse)
    repack(source, tmp_path / "m.colibri")
    check_codes(tmp_path / "m.colibri", spec)
    assert verify_container(tmp_path / "m.colibri", against=source).ok

    def spoil(weights: Weights) -> Weights:
        weights = fuse(weights)
        weights["model.layers.1.block_sparse_moe.experts.gate_up_proj"][2, 5, 64 + 7] = np.inf
        return weights

    bad = tm.write_hf(tmp_path / "bad", "mixtral", spec, mutate=spoil)
    message = refused(bad)
    assert "inf at [2, 5, 71] (layer 1 expert 2 up [7, 5])" in message


@pytest.mark.parametrize("dims", [{}, {"hidden": 32, "width": 32, "experts": 4}], ids=str)
@pytest.mark.parametrize("step", [None, 500], ids=["whole", "small-steps"])
def test_case_2_4_interleaved_columns_and_their_biases_are_split(
    tmp_path: Path,
    gpt_oss_like: None,
    monkeypatch: pytest.MonkeyPatch,
    dims: dict[str, int],
    step: int | None,
) -> None:
    """The square case too: names decide, not shapes."""
    spec = small_spec("mixtral", **dims)
    if step:
        monkeypatch.setattr("colibri_tools.sources.views._STEP_BYTES", step)
        monkeypatch.setattr("colibri_tools.verify.scan._PIECE_BYTES", 300)

    def fuse(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            parts, at = stacks(spec, layer), f"model.layers.{layer}.block_sparse_moe.experts."
            gate_up = interleave(parts[PartRole.GATE], parts[PartRole.UP])
            kept[at + "gate_up_proj"] = np.ascontiguousarray(gate_up.swapaxes(1, 2))
            kept[at + "down_proj"] = np.ascontiguousarray(parts[PartRole.DOWN].swapaxes(1, 2))
            kept[at + "gate_up_proj_bias"] = interleave(parts[_BIASES[0]], parts[_BIASES[1]])
            kept[at + "down_proj_bias"] = parts[PartRole.DOWN_BIAS]
        return kept

    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=fuse)
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as found:
        for layer in range(spec.layers):
            for role, expected in stacks(spec, layer).items():
                for expert in range(spec.experts):
                    got = found.dequantize_part(layer, expert, role)
                    np.testing.assert_array_equal(
                        got.reshape(expected[expert].shape), expected[expert]
                    )
        assert map_source(carried_source(found)).problems == []
    assert verify_container(tmp_path / "m.colibri", against=source).ok


def test_a_transposed_stack_has_its_scales_by_column(tmp_path: Path, gpt_oss_like: None) -> None:
    """fbgemm: the scale of an output of a stack [experts, inputs, outputs] is [experts, 1, o]."""
    spec = small_spec("mixtral")
    values: dict[str, np.ndarray] = {}

    def fuse(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            at = f"model.layers.{layer}.block_sparse_moe.experts."
            for name, shape in (("gate_up_proj", (5, 64, 48)), ("down_proj", (5, 24, 64))):
                codes = some_codes(at + name, shape)
                scales = some_scales(at + name, (5, 1, shape[2]))
                kept[at + name], kept[at + name + "_scale"] = fp8_raw(codes), scales
                values[at + name] = (e4m3(codes).astype(np.float32) * scales).swapaxes(1, 2)
        return kept

    overrides = {"quantization_config": FBGEMM}
    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=fuse, overrides=overrides)
    repack(source, tmp_path / "m.colibri")
    with colibri_tools.open(tmp_path / "m.colibri") as found:
        for layer in range(spec.layers):
            at = f"model.layers.{layer}.block_sparse_moe.experts."
            gate_up, down = values[at + "gate_up_proj"], values[at + "down_proj"]
            for role, part in zip(PARTS, (gate_up[:, ::2], gate_up[:, 1::2], down), strict=True):
                for expert in range(5):
                    got = found.dequantize_part(layer, expert, role)
                    np.testing.assert_array_equal(got, part[expert])
    assert verify_container(tmp_path / "m.colibri", against=source).ok


def test_a_missing_bias_of_an_expert_is_an_unfilled_slot(
    tmp_path: Path, gpt_oss_like: None
) -> None:
    spec = small_spec("mixtral")

    def fuse(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            parts, at = stacks(spec, layer), f"model.layers.{layer}.block_sparse_moe.experts."
            gate_up = interleave(parts[PartRole.GATE], parts[PartRole.UP])
            kept[at + "gate_up_proj"] = np.ascontiguousarray(gate_up.swapaxes(1, 2))
            kept[at + "down_proj"] = np.ascontiguousarray(parts[PartRole.DOWN].swapaxes(1, 2))
        kept[at + "down_proj_bias"] = parts[PartRole.DOWN_BIAS]
        return kept

    message = refused(tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=fuse))
    assert "layer 0 expert 0 down_bias" in message


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """OCP MX: element 2i is the low half of byte i; sign, then a magnitude; times 2^(e - 127)."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    values = values * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


@pytest.mark.parametrize("step", [None, 64], ids=["whole", "small-steps"])
def test_case_4_5_mxfp4_of_hugging_face_is_reshuffled_bit_exactly(
    tmp_path: Path, gpt_oss_like: None, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    spec = small_spec("mixtral", width=96)
    shapes = {"gate_up_proj": (5, 192, 2), "down_proj": (5, 64, 3)}
    truth: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if step:
        monkeypatch.setattr("colibri_tools.sources.views._STEP_WEIGHTS", step)
        monkeypatch.setattr("colibri_tools.sources.views._STEP_BYTES", 5 * 34)

    def pack(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            for name, shape in shapes.items():
                at = f"model.layers.{layer}.block_sparse_moe.experts.{name}"
                noise = abs(tm.unit_noise(at, (*shape, 17))) * 997
                blocks = (noise[..., :16].astype(np.int64) % 256).astype(np.uint8)
                # codes 0 ... 15 in order, twice
                blocks[0, 0, 0] = [2 * i % 16 | (2 * i + 1) % 16 << 4 for i in range(16)]
                scales = (noise[..., 16].astype(np.int64) % 40 + 100).astype(np.uint8)
                truth[at] = blocks, scales
                kept[at + "_blocks"], kept[at + "_scales"] = blocks, scales
        return kept

    overrides = {"quantization_config": MXFP4}
    source = tm.write_hf(
        tmp_path / "hf", "mixtral", spec, mutate=pack, overrides=overrides, shards=2
    )
    result = repack(source, tmp_path / "m.colibri")
    assert "6 tensors stored as mxfp4 become mxfp4" in result.notes
    with colibri_tools.open(tmp_path / "m.colibri") as found:
        for layer in range(spec.layers):
            at = f"model.layers.{layer}.block_sparse_moe.experts."
            gate_up = mxfp4_values(*truth[at + "gate_up_proj"])
            wanted = {
                PartRole.GATE: gate_up[:, 0::2],
                PartRole.UP: gate_up[:, 1::2],
                PartRole.DOWN: mxfp4_values(*truth[at + "down_proj"]),
            }
            for role, values in wanted.items():
                for expert in range(spec.experts):
                    raw = found.part(layer, expert, role)
                    np.testing.assert_array_equal(
                        found.dequantize_part(layer, expert, role), values[expert]
                    )
                    rows = np.frombuffer(raw.tobytes(), np.uint8).reshape(len(values[expert]), -1)
                    oracle = dequantize(rows, GGMLQuantizationType.MXFP4)
                    np.testing.assert_array_equal(oracle, values[expert])
        assert {p.dtype.name for p in found.layouts[0].parts} == {"mxfp4"}
        assert map_source(carried_source(found)).problems == []
        assert found.provenance["recipe.conversions"] == ["mxfp4 -> mxfp4"]
    assert verify_container(tmp_path / "m.colibri", against=source).ok
    assert verify_source(source).ok


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (255, "experts.gate_up_proj_scales': nan (code 255) at [3, 11, 1];"),
        (
            254,
            "experts.gate_up_proj_blocks': inf at [3, 11, 1, 0] (layer 2 expert 3 up [5, 32])",
        ),
    ],
)
def test_case_4_5_a_scale_that_is_no_number_is_named_with_its_place(
    tmp_path: Path, gpt_oss_like: None, scale: int, says: str
) -> None:
    spec = small_spec("mixtral")

    def pack(weights: Weights) -> Weights:
        kept = {n: v for n, v in weights.items() if ".experts." not in n}
        for layer in range(spec.layers):
            at = f"model.layers.{layer}.block_sparse_moe.experts."
            kept[at + "gate_up_proj_blocks"] = np.full((5, 48, 2, 16), 0x77, np.uint8)
            kept[at + "gate_up_proj_scales"] = np.full((5, 48, 2), 127, np.uint8)
            kept[at + "down_proj"] = np.zeros((5, 24, 64), np.float32)
        kept[at + "gate_up_proj_scales"][3, 2 * 5 + 1, 1] = scale
        return kept

    overrides = {"quantization_config": MXFP4}
    source = tm.write_hf(tmp_path / "hf", "mixtral", spec, mutate=pack, overrides=overrides)
    assert says in refused(source)
    assert not verify_source(source).ok
