"""GGUF files made by llama.cpp's own converter give the logits of transformers.

Needs a source tree of llama.cpp (the one in PyPI's llama-cpp-python archive will do):

    LLAMA_CPP=... pytest tests/oracle/test_live_llama_cpp.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tm
from tiny_containers import Containers

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
]


def convert(folder: Path, case: Case) -> Path:
    """The file that the converter makes of a case's checkpoint."""
    tm.write_hf(folder / "hf", case.family, case.spec, dtype=case.dtype, overrides=case.overrides)
    script, out = Path(__file__).with_name("convert_with_llama_cpp.py"), folder / "model.gguf"
    command = [sys.executable, str(script), LLAMA_CPP, str(folder / "hf"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_file_gives_the_logits_of_transformers(
    containers: Containers, name: str
) -> None:
    case = CASES[name]
    path = containers.from_source(convert(containers.folder(), case))
    with Engine(path, threads=1) as engine:
        for oracle in cases.load(case):
            found = np.array(engine.forward(oracle.tokens))
            assert cases.error(found[oracle.positions], oracle.logits) <= cases.LOGIT_TOLERANCE
