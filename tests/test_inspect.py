"""`colibri inspect`: the numbers add up, and what does not apply is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
from rich.console import Console

from colibri_tools.errors import UsageError
from colibri_tools.inspect import Inspection, inspect
from colibri_tools.repack import repack

SHARED_KEYS = {
    "kind", "family", "n_layers", "n_moe_layers", "experts_per_layer", "top_k", "total_params",
    "active_params", "alignment", "file_bytes", "resident_bytes", "expert_bytes", "padding_bytes",
    "padding_share", "index_bytes", "bits_per_weight", "order", "provenance", "warnings",
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    tiny.write_hf(path, "qwen2_moe", dtype="bf16", shards=2)
    return path


@pytest.fixture(scope="module")
def container(source: Path) -> Path:
    out = source.parent / "model.colibri"
    repack(source, out)
    return out


def shown(inspection: Inspection, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    inspection.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_accounting_adds_up_to_the_file(container: Path) -> None:
    s = inspect(container).summary
    parts = ("metadata_bytes", "resident_bytes", "expert_bytes", "padding_bytes")
    assert 4096 + sum(s[key] for key in parts) == s["file_bytes"] == container.stat().st_size
    assert s["padding_share"] == s["padding_bytes"] / s["file_bytes"]


def test_containers_and_sources_share_the_keys_scripts_rely_on(
    source: Path, container: Path, tmp_path: Path
) -> None:
    gguf = tmp_path / "model.gguf"
    tiny.write_gguf(gguf, "qwen2_moe")
    for path, kind in ((container, "container"), (source, "safetensors"), (gguf, "gguf")):
        data = inspect(path).to_json()
        assert data.keys() >= SHARED_KEYS, path
        assert data["kind"] == kind
        assert data["experts_per_layer"] == [12, 12, 12]
        json.dumps(data, allow_nan=False)


def test_source_and_container_agree_on_the_model(source: Path, container: Path) -> None:
    a, b = inspect(source).summary, inspect(container).summary
    same = (
        "family", "n_layers", "n_moe_layers", "top_k", "total_params", "active_params",
        "resident_bytes", "expert_bytes", "bits_per_weight",
    )  # fmt: skip
    assert {key: a[key] for key in same} == {key: b[key] for key in same}
    spec = tiny.default_spec("qwen2_moe")
    assert a["total_params"] == sum(t.size for t in tiny.tensors("qwen2_moe", spec).values())


def test_blocks_lie_where_the_index_says(container: Path) -> None:
    blocks = inspect(container, blocks=True).blocks
    assert blocks is not None
    assert len(blocks) == 36
    end = blocks[0]["offset"]
    for rank, block in enumerate(blocks):
        assert (block["layer"], block["expert"]) == divmod(rank, 12)
        assert block["rank"] == rank
        assert block["offset"] == end and end % 4096 == 0
        assert block["types"] == {"gate": "bf16", "up": "bf16", "down": "bf16"}
        end += block["padded_bytes"]
    assert end == container.stat().st_size


def test_map_covers_every_byte_once(container: Path) -> None:
    regions = inspect(container, show_map=True).regions
    assert regions is not None
    end = 0
    for region in regions:
        assert region.offset == end and region.n_bytes > 0
        end += region.n_bytes
    assert end == container.stat().st_size


def test_one_block_shows_the_numbers_of_its_source(container: Path) -> None:
    details = inspect(container, layer=1, expert=7).details
    assert details is not None
    spec = tiny.default_spec("qwen2_moe")
    weights = tiny.tensors("qwen2_moe", spec)
    for part in details["parts"]:
        value = tiny.rounded(
            weights[f"model.layers.1.mlp.experts.7.{part['role']}_proj.weight"], "bf16"
        )
        assert part["min"] == float(value.min()) and part["max"] == float(value.max())
        assert part["shape"] == list(value.shape)


def test_tensors_of_a_source_say_what_becomes_of_each(source: Path) -> None:
    tensors = inspect(source, tensors=True).tensors
    assert tensors is not None
    by_name = {row["name"]: row for row in tensors}
    down = by_name["model.layers.2.mlp.experts.11.down_proj.weight"]
    assert (down["action"], down["role"], down["layer"], down["expert"]) == (
        "expert",
        "down",
        2,
        11,
    )
    router = by_name["model.layers.0.mlp.gate.weight"]
    assert (router["action"], router["role"]) == ("resident", "router")


def test_a_source_that_cannot_be_repacked_is_still_listed(tmp_path: Path) -> None:
    def rename(weights: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("down_proj", "linear_fc9"): value for name, value in weights.items()}

    tiny.write_hf(tmp_path / "odd", "qwen3_moe", mutate=rename)
    inspection = inspect(tmp_path / "odd", tensors=True)
    assert inspection.summary["repackable"] is False
    assert any("linear_fc9" in warning for warning in inspection.warnings)
    assert "linear_fc9" in shown(inspection)


def test_much_padding_is_a_warning(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "wide.colibri"
    repack(source, out, align=65536)
    inspection = inspect(out)
    assert inspection.summary["padding_share"] > 0.05
    assert any("padding" in warning for warning in inspection.warnings)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_the_terminal(container: Path, source: Path, width: int) -> None:
    for inspection in (
        inspect(container, blocks=True, tensors=True, show_map=True),
        inspect(container, layer=0, expert=0),
        inspect(source, tensors=True),
    ):
        text = shown(inspection, width)
        assert max(map(len, text.splitlines())) <= width


def test_options_that_do_not_apply_are_refused(source: Path, container: Path) -> None:
    for options in ({"blocks": True}, {"show_map": True}, {"layer": 0, "expert": 0}):
        with pytest.raises(UsageError, match="source"):
            inspect(source, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--layer"):
        inspect(container, expert=1)
    with pytest.raises(UsageError, match="layer 9"):
        inspect(container, layer=9)
    with pytest.raises(UsageError, match="0 \\.\\.\\. 11"):
        inspect(container, layer=0, expert=12)
    with pytest.raises(UsageError, match="no_such"):
        inspect(container, tensor="no_such")


def test_tensor_statistics_are_those_of_the_values(container: Path) -> None:
    details = inspect(container, tensor="output_norm").details
    assert details is not None
    weights = tiny.tensors("qwen2_moe", tiny.default_spec("qwen2_moe"))
    value = tiny.rounded(weights["model.norm.weight"], "bf16")
    assert details["std"] == pytest.approx(float(np.std(value, dtype=np.float64)))
