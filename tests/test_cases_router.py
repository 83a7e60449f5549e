"""Router switches: what config.json and GGUF metadata say, and what their absence means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from repack_util import map_gguf, map_hf, refused, small_hf, small_spec

from colibri_tools.container.format import Group, Role

# What transformers 5.24 and llama.cpp do when the key is absent.
_ABSENT = [
    ("mixtral", "hf", True),
    ("qwen2_moe", "hf", False),
    ("qwen3_moe", "hf", False),
    ("olmoe", "hf", False),
    ("mixtral", "gguf", True),
    ("qwen2_moe", "gguf", False),
    ("qwen3_moe", "gguf", True),
    ("olmoe", "gguf", False),
]


def _map(tmp_path: Path, family: str, kind: str, value: Any) -> Any:
    if kind == "hf":
        return map_hf(tmp_path, family, overrides={"norm_topk_prob": value})
    key = f"{tm.GGUF_ARCH[family]}.expert_weights_norm"
    return map_gguf(tmp_path, family, metadata={key: value})


@pytest.mark.parametrize(("family", "kind", "norm"), _ABSENT)
def test_case_3_1_an_absent_key_means_the_family_default(
    tmp_path: Path, family: str, kind: str, norm: bool
) -> None:
    mapping = _map(tmp_path, family, kind, tm.DELETE)
    assert mapping.spec["graph.router_norm"] is norm


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(("family", "kind", "norm"), _ABSENT)
def test_case_3_1_an_explicit_value_wins(
    tmp_path: Path, family: str, kind: str, norm: bool, value: bool
) -> None:
    mapping = _map(tmp_path, family, kind, value)
    always = family == "mixtral" and kind == "hf"  # transformers has no such key for it
    assert mapping.spec["graph.router_norm"] is (True if always else value)


def test_case_3_2_one_expert_per_token_is_kept(tmp_path: Path) -> None:
    assert map_hf(tmp_path, "mixtral", small_spec("mixtral", top_k=1)).spec["top_k"] == 1


def test_case_3_6_an_explicit_scale_is_kept_and_its_absence_is_one(tmp_path: Path) -> None:
    for family in tm.FAMILIES:
        assert map_gguf(tmp_path, family).spec["graph.router_scale"] == 1.0
    scale = {"qwen3moe.expert_weights_scale": 2.5}
    assert map_gguf(tmp_path, "qwen3_moe", metadata=scale).spec["graph.router_scale"] == 2.5
    zero = {"qwen3moe.expert_weights_scale": 0.0}  # llama.cpp's way to say none
    assert map_gguf(tmp_path, "qwen3_moe", metadata=zero).spec["graph.router_scale"] == 1.0


def test_case_3_9_a_shared_gate_of_one_or_two_dimensions_is_one_row(tmp_path: Path) -> None:
    def widen(stored: dict[str, tm.GgufTensor]) -> None:
        for name, tensor in stored.items():
            if "ffn_gate_inp_shexp" in name:
                stored[name] = tm.GgufTensor(tensor.data.reshape(1, -1), tensor.type)

    for mapping in (
        map_gguf(tmp_path / "one", "qwen2_moe"),
        map_gguf(tmp_path / "two", "qwen2_moe", mutate=widen),
        map_hf(tmp_path, "qwen2_moe"),
    ):
        assert mapping.problems == []
        gates = [r for r in mapping.residents if r.role == Role.SHARED_ROUTER]
        assert [gate.shape for gate in gates] == [(1, 64)] * 3
        assert mapping.spec["graph.shared_width"] == 48
        assert mapping.spec["graph.shared_gated"] is True


def test_case_3_9_presence_of_the_shared_expert_decides(tmp_path: Path) -> None:
    absent = {"shared_expert_intermediate_size": tm.DELETE}
    assert map_hf(tmp_path, "qwen2_moe", overrides=absent).spec["graph.shared_width"] == 48
    denied = map_hf(tmp_path, "qwen2_moe", overrides={"shared_expert_intermediate_size": 0})
    assert any("turn shared off" in problem for problem in denied.problems)


def test_case_3_9_a_shared_expert_in_part_is_refused(tmp_path: Path) -> None:
    def cut(weights: dict[str, Any]) -> None:
        del weights["model.layers.1.mlp.shared_expert_gate.weight"]

    source = small_hf(tmp_path / "hf", "qwen2_moe", mutate=cut)
    assert "layers.1.shared_router" in refused(source)


def test_case_3_10_router_and_norms_keep_their_type(tmp_path: Path) -> None:
    spec = tm.wide_spec("qwen3_moe")
    mapping = map_gguf(tmp_path, "qwen3_moe", spec, types=tm.GGMLQuantizationType.Q4_0)
    types = {r.role: r.tensor.dtype.name for r in mapping.residents}
    assert types[Role.ROUTER] == types[Role.ATTN_NORM] == "f32"
    assert types[Role.ATTN_Q] == "q4_0"
    groups = {r.group for r in mapping.residents if r.role != Role.TOKEN_EMBD}
    assert groups == {Group.EVERY_TOKEN}


def test_a_router_with_rows_and_columns_exchanged_is_refused(tmp_path: Path) -> None:
    def turn(weights: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.gate.weight"
        weights[name] = np.ascontiguousarray(weights[name].T)

    source = small_hf(tmp_path / "hf", "olmoe", mutate=turn)
    assert "model.layers.0.mlp.gate.weight" in refused(source)
