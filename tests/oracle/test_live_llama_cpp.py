"""GGUF files made by llama.cpp's own converter give the logits of transformers.

Needs a source tree of llama.cpp (the one in PyPI's llama-cpp-python archive will do):

    LLAMA_CPP=... pytest tests/oracle/test_live_llama_cpp.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from test_tiny_families import mxfp4_form
from tiny_containers import Containers, logits

from colibri_tools.engine import Engine
from oracle import cases
from oracle.cases import CASES, Case

pytest.importorskip("torch")

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not LLAMA_CPP, reason="LLAMA_CPP names no source tree of llama.cpp"),
]

CONVERTED = [
    name
    for name, case in CASES.items()
    if case.family in cases.ROW_FAMILIES and case.gguf and name not in cases.NOT_CONVERTED
] + [f"{family}-f32" for family in tm.ALL_FAMILIES]
CONVERTED += [f"phimoe-longrope-{side}" for side in ("short", "long")]

_LISTS = {"moe_intermediate_size": 40, "moe_topk": 3, "num_shared_expert": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {
        "num_experts_per_tok": tm.DELETE,
        **{name: [value] * 3 for name, value in _LISTS.items()},
    },
    "phimoe": {
        "architectures": ["PhiMoEForCausalLM"],
        "original_max_position_embeddings": 512,
    },
}
"""Config keys as in the published models, which the converter was written for."""


def convert(folder: Path, case: Case) -> Path:
    """The file that the converter makes of a case's checkpoint."""
    overrides = {**case.overrides, **PUBLISHED.get(case.family, {})}
    if case.spec.rope and "original_max_position_embeddings" in case.spec.rope:
        overrides.pop("original_max_position_embeddings", None)  # rope_parameters have it
    source = tm.write_hf(
        folder / "hf", case.family, case.spec, dtype=case.dtype, overrides=overrides
    )
    return run_converter(source, folder / "model.gguf")


def run_converter(source: Path, out: Path) -> Path:
    """Convert one directory."""
    script = Path(__file__).with_name("convert_with_llama_cpp.py")
    command = [sys.executable, str(script), LLAMA_CPP, str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_gives_the_logits_of_transformers(
    containers: Containers, name: str
) -> None:
    case = CASES[name]
    path = containers.from_source(convert(containers.folder(), case))
    with Engine(path, threads=1, ctx=case.ctx) as engine:
        for oracle in cases.load(case):
            found = np.array(engine.forward(oracle.tokens))
            assert cases.error(found[oracle.positions], oracle.logits) <= cases.LOGIT_TOLERANCE


@pytest.mark.parametrize("family", tm.more.FAMILIES)
def test_our_own_gguf_files_are_those_of_the_converter(containers: Containers, family: str) -> None:
    case = CASES[f"{family}-f32"]
    converted = containers.from_source(convert(containers.folder(), case))
    ours = containers.gguf(family, case.spec)
    assert np.array_equal(logits(converted, case.tokens(0)), logits(ours, case.tokens(0)))


def test_converted_mxfp4_experts_equal_the_published_form(containers: Containers) -> None:
    """gpt-oss: blocks and scales, reshuffled by the converter and by us."""
    spec = tm.default_spec("gpt_oss", width=32, layers=2)
    folder = containers.folder()
    overrides = {"quantization_config": {"quant_method": "mxfp4"}}
    source = tm.write_hf(folder / "hf", "gpt_oss", spec, overrides=overrides)
    weights = mxfp4_form(tm.tensors("gpt_oss", spec))
    tm.write_safetensors(source / "model.safetensors", weights)
    converted = containers.from_source(run_converter(source, folder / "model.gguf"))
    ours = containers.from_source(source)
    assert np.array_equal(logits(converted, tm.prompt(40)), logits(ours, tm.prompt(40)))
