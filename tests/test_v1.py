"""Format version 1 is frozen: files of the first release are read by this version, whole and equal.

The files and what they hold are committed (tests/v1/). If a test here fails, the reader is wrong.
"""

from __future__ import annotations

import base64
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from container_util import Draft
from tiny_containers import logits
from v1.make import HERE, Expected, contents

import colibri_tools
from colibri_tools.errors import FormatError
from colibri_tools.run import run
from colibri_tools.verify import verify

NAMES = sorted(path.name.partition(".")[0] for path in HERE.glob("*.colibri.xz"))


@pytest.fixture(scope="module", params=NAMES)
def frozen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v1") / f"{request.param}.colibri"
    path.write_bytes(lzma.decompress((HERE / f"{path.name}.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def expected(frozen: Path) -> Expected:
    found: Expected = json.loads((HERE / f"{frozen.stem}.json").read_text())
    return found


def test_both_kinds_of_source_are_there() -> None:
    assert NAMES == ["gguf", "safetensors"]


def test_everything_in_the_file_is_read_as_it_was(frozen: Path, expected: Expected) -> None:
    with colibri_tools.open(frozen) as container:
        found = json.loads(json.dumps(contents(container)))
    for key, value in found.items():
        assert value == expected[key], key
    assert expected.keys() - found.keys() == {"tokens", "logits"}


def test_it_is_sound(frozen: Path) -> None:
    assert verify(frozen).ok


def test_the_c_runtime_gives_the_same_logits(frozen: Path, expected: Expected) -> None:
    """To 2e-5 of their range: sums may be taken in another order."""
    values = np.frombuffer(base64.b64decode(expected["logits"]), "<f4")
    values = values.reshape(len(expected["tokens"]), -1)
    found = logits(frozen, expected["tokens"])
    assert found.shape == values.shape == (8, expected["spec"]["vocab_size"])
    assert np.abs(found - values).max() <= 2e-5 * (values.max() - values.min())


def test_its_tokenizer_works(frozen: Path, expected: Expected) -> None:
    if expected["spec"]["tokenizer"] == "none":
        assert "gguf-metadata.bin" in expected["blobs"]
        return
    result = run(frozen, prompt="Grüße", max_tokens=3, ignore_eos=True)
    assert result.prompt_tokens == 8 and result.generated_tokens == 3


@pytest.mark.parametrize("version", [0, 2, 1 << 31])
def test_another_version_is_named(frozen: Path, version: int) -> None:
    draft = Draft(bytearray(frozen.read_bytes()))
    draft.page["version"] = version
    path = frozen.with_name("other.colibri")
    path.write_bytes(draft.seal_page().data)
    with pytest.raises(FormatError, match=rf"version: expected 1, found {version}\b"):
        colibri_tools.open(path)
