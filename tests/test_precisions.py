"""Source precisions: fp8, int8 and MXFP4 weights land where they should, with the value they mean.

Expected numbers are made here from the specifications (OCP 8-bit floating point, OCP MX), by
formulas that share nothing with the package; gguf's dequantize is the oracle of GGML's MXFP4.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from repack_util import PARTS, Weights, code, refused, small_hf, small_spec

import colibri_tools
from colibri_tools.carried import carried_source
from colibri_tools.container.format import PartRole
from colibri_tools.families import detect
from colibri_tools.families.common import DOWN, GATE, GATE_UP, UP
from colibri_tools.families.schema import ExpertRule, Family
from colibri_tools.families.table import MIXTRAL
from colibri_tools.mapping import map_source
from colibri_tools.repack import repack
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
