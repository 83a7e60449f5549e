"""Source precisions and unknown families against torch and transformers as they are now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_generic
import test_precisions as forms
import tiny_models as tm
from repack_util import small_hf

import colibri_tools
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


@pytest.mark.parametrize("model_type", unknown.MODELS)
def test_an_unknown_family_as_transformers_saves_it_now(tmp_path: Path, model_type: str) -> None:
    model = unknown.build(model_type)
    model.save_pretrained(tmp_path / "hf")
    recorded = json.loads(unknown.SHAPES.read_text())[model_type]["tensors"]
    assert unknown.shapes_of(tmp_path / "hf") == recorded
    repack(tmp_path / "hf", tmp_path / "m.colibri")
    test_generic.check_container(tmp_path / "m.colibri", tm.read_hf(tmp_path / "hf"))
    assert verify_container(tmp_path / "m.colibri", against=tmp_path / "hf").ok
    stacks = [v for n, v in model.state_dict().items() if n.endswith("experts.gate_up_proj")]
    with colibri_tools.open(tmp_path / "m.colibri") as container:
        for row, stack in enumerate(stacks):  # as the model holds them: the gate's rows first
            for expert in range(4):
                parts = [container.dequantize_part(row, expert, p) for p in test_generic.PARTS[:2]]
                np.testing.assert_array_equal(np.concatenate(parts), stack[expert].numpy())
