"""Source precisions and unknown families against torch and transformers as they are now."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_generic
import test_precisions as forms
import tiny_models as tm
from repack_util import small_hf

import colibri_tools
from colibri_tools.families.precision import SCHEMES
from colibri_tools.repack import repack
from colibri_tools.sources.views import values_of_codes
from colibri_tools.verify import verify_container
from oracle import unknown

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [("f8_e4m3", "float8_e4m3fn"), ("f8_e5m2", "float8_e5m2"), ("f8_e8m0", "float8_e8m0fnu")],
)
def test_values_of_codes_are_those_of_torch(name: str, torch_name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(getattr(torch, torch_name)).to(torch.float32).numpy()
    np.testing.assert_array_equal(values_of_codes(name), expected)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 4, 4, 16)
    scales = np.arange(110, 126, dtype=np.uint8).reshape(1, 4, 4)
    found = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    # transformers wants [experts, inputs, outputs]
    expected = forms.mxfp4_values(blocks, scales)
    np.testing.assert_array_equal(found.numpy().swapaxes(1, 2), expected)


@pytest.mark.parametrize("form", ["even", "powers", "row", "tensor"])
def test_an_fp8_checkpoint_has_the_experts_that_transformers_dequantizes(
    tmp_path: Path, form: str
) -> None:
    """Byte for byte the blocks of the checkpoint that holds what its Fp8Dequantize returns."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    even = {**forms.FP8, "weight_block_size": [8, 8]}  # it takes the tile from the grid
    config, quantizer = {
        "even": (even, forms.Quantizer((8, 8))),
        "powers": ({**even, "scale_fmt": "ue8m0"}, forms.Quantizer((8, 8), powers=True)),
        "row": forms.FORMS["row"][:2],
        "tensor": forms.FORMS["tensor"][:2],
    }[form]
    source = small_hf(
        tmp_path / "hf", "mixtral", mutate=quantizer, overrides={"quantization_config": config}
    )
    stored = _stored(source)
    dequantized = {
        name: Fp8Dequantize(None)
        ._dequantize_one(tensor, stored[name + "_scale_inv"], torch.float32)
        .numpy()
        for name, tensor in stored.items()
        if name + "_scale_inv" in stored
    }
    dtype = "bf16" if form == "powers" else "f32"
    plain = small_hf(tmp_path / "plain", "mixtral", mutate=lambda w: w | dequantized, dtype=dtype)
    repack(source, tmp_path / "m.colibri")
    repack(plain, tmp_path / "plain.colibri")
    with (
        colibri_tools.open(tmp_path / "m.colibri") as first,
        colibri_tools.open(tmp_path / "plain.colibri") as second,
    ):
        np.testing.assert_array_equal(first.index["sha256"], second.index["sha256"])
        for letter in "qkvo":
            name = f"layers.1.attn_{letter}"
            assert first.tensors[name].sha256 == second.tensors[name].sha256


def _stored(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("model_type", unknown.ALL)
def test_an_unknown_family_as_transformers_saves_it_now(tmp_path: Path, model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {model_type}")
    model = unknown.build(model_type)
    model.save_pretrained(tmp_path / "hf")
    recorded = json.loads(unknown.SHAPES.read_text())[model_type]["tensors"]
    assert unknown.shapes_of(tmp_path / "hf") == recorded
    result = repack(tmp_path / "hf", tmp_path / "m.colibri")
    dropped = result.dropped.get("vision-tower", [])
    test_generic.check_container(tmp_path / "m.colibri", tm.read_hf(tmp_path / "hf"), dropped)
    assert verify_container(tmp_path / "m.colibri", against=tmp_path / "hf").ok
    _check_stacks(tmp_path / "m.colibri", model.state_dict())


_STACK = re.compile(
    r".*layers\.(\d+)\.(?:.*\.experts\.|experts\.|(?:mlp|block_sparse_moe)\.)"
    r"(?:gate_up_proj|input_linear\.weight)"
)


def _check_stacks(path: Path, state: dict[str, Any]) -> None:
    """Experts are what the model holds in memory: the gate's rows first."""
    stacks: dict[int, list[np.ndarray]] = {}
    for name, stack in state.items():
        match = _STACK.fullmatch(name)
        if match is not None and stack.ndim == 3 and ".self_attention." not in name:
            matrices = stack if stack.shape[2] == 64 else stack.swapaxes(1, 2)  # aria
            stacks.setdefault(int(match[1]), []).extend(matrices.numpy())
    with colibri_tools.open(path) as container:
        assert set(stacks) == {row.layer for row in container.rows}
        for i, row in enumerate(container.rows):
            for expert in range(row.n_experts):
                parts = [container.dequantize_part(i, expert, p) for p in test_generic.PARTS[:2]]
                np.testing.assert_array_equal(np.concatenate(parts), stacks[row.layer][expert])


def test_the_methods_of_transformers_are_understood_or_named() -> None:
    from transformers.utils.quantization_config import QuantizationMethod

    understood = {scheme.method for scheme in SCHEMES}
    assert {method.value for method in QuantizationMethod} <= {*understood, *forms.OTHER_METHODS}


# ---------------------------------------------------------------- bitsandbytes


def test_int8_codes_of_every_scale_are_what_bitsandbytes_makes_of_them(tmp_path: Path) -> None:
    """Byte for byte its int8_vectorwise_dequant: all codes, scales of every size, and its own
    quantization of a layer."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    dequantized: dict[str, np.ndarray] = {}

    def change(weights: dict[str, Any]) -> None:
        for name in forms.matrices(weights):
            codes, scales = _int8(bitsandbytes, weights[name], name)
            weights[name] = codes.numpy()
            weights[name.removesuffix("weight") + "SCB"] = scales.numpy()
            weights[name.removesuffix("weight") + "weight_format"] = np.zeros((), np.uint8)
            values = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
            dequantized[name] = values.numpy()

    overrides = {"quantization_config": forms.BNB}
    source = small_hf(tmp_path / "hf", "mixtral", mutate=change, overrides=overrides)
    plain = small_hf(tmp_path / "plain", "mixtral", mutate=lambda w: w | dequantized)
    _check_same(source, plain, tmp_path)


def test_int8_stacks_are_what_bitsandbytes_makes_of_their_matrices(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    dequantized: dict[str, np.ndarray] = {}

    def change(weights: dict[str, Any]) -> None:
        for name in [n for n, value in weights.items() if value.ndim == 3]:
            made = [_int8(bitsandbytes, m, f"{name}{i}") for i, m in enumerate(weights.pop(name))]
            weights[name + ".weight"] = np.stack([codes.numpy() for codes, _ in made])
            weights[name + ".SCB"] = np.stack([scales.numpy() for _, scales in made])
            values = [bitsandbytes.functional.int8_vectorwise_dequant(*pair) for pair in made]
            dequantized[name] = np.stack([v.numpy() for v in values])

    overrides = {"quantization_config": forms.BNB}
    source = small_hf(tmp_path / "hf", "mixtral", form="fused", mutate=change, overrides=overrides)
    plain = small_hf(tmp_path / "plain", "mixtral", form="fused", mutate=lambda w: w | dequantized)
    assert dequantized
    _check_same(source, plain, tmp_path)


def _int8(bitsandbytes: Any, weight: np.ndarray, name: str) -> tuple[Any, Any]:
    """Codes and scales: of the first expert any at all, else what a layer makes of `weight`."""
    if "experts.0." in name:
        noise = tm.unit_noise(name, weight.shape)
        codes = torch.from_numpy(((noise * 997).astype(np.int64) % 256 - 128).astype(np.int8))
        scales = np.exp2(20 * tm.unit_noise("s" + name, weight.shape[:1])).astype(np.float32)
        return codes, torch.from_numpy(scales)
    rows, cols = weight.shape
    layer = bitsandbytes.nn.Linear8bitLt(cols, rows, bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": torch.from_numpy(weight)})
    state = layer.to("cpu").state_dict()
    assert state["weight"].dtype is torch.int8 and int(state["weight_format"]) == 0
    return state["weight"], state["SCB"]


def _check_same(source: Path, plain: Path, folder: Path) -> None:
    """Both checkpoints give the same experts, and the same matrices of attention."""
    repack(source, folder / "m.colibri")
    repack(plain, folder / "plain.colibri")
    with (
        colibri_tools.open(folder / "m.colibri") as first,
        colibri_tools.open(folder / "plain.colibri") as second,
    ):
        np.testing.assert_array_equal(first.index["sha256"], second.index["sha256"])
        for name, tensor in second.tensors.items():
            assert first.tensors[name].sha256 == tensor.sha256, name


def test_a_checkpoint_that_transformers_saves_in_int8(tmp_path: Path) -> None:
    """The names, config and row format of BitsAndBytesConfig(load_in_8bit=True)."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    source = small_hf(tmp_path / "hf", "qwen3_moe")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "int8")
    result = repack(tmp_path / "int8", tmp_path / "m.colibri")
    assert any("stored as bitsandbytes int8 become f32" in note for note in result.notes)
    stored = _stored(tmp_path / "int8")
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        for layer in range(3):
            for letter in "qkvo":
                at = f"model.layers.{layer}.self_attn.{letter}_proj."
                codes, scales = stored[at + "weight"], stored[at + "SCB"]
                expected = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales).numpy()
                found = container.dequantize(f"layers.{layer}.attn_{letter}")
                np.testing.assert_array_equal(found, expected)
