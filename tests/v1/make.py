"""Makes tests/v1/*.colibri.xz and .json: containers of format version 1, and what is in them.

They were made once, by the first release, and are frozen: they stand for files in the world. Run it
only to add a file: `PYTHONPATH=tests python -m v1.make NAME`; it never replaces one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models as tm
from gguf import GGMLQuantizationType
from test_run import byte_tokenizer
from tiny_containers import logits

import colibri_tools
from colibri_tools.container import Container
from colibri_tools.repack import repack

HERE = Path(__file__).parent
TOKENS = [1, 5, 9, 2, 100, 64, 3, 77]

Expected = dict[str, Any]


def safetensors(folder: Path) -> Path:
    """bf16, a tokenizer, a dense layer, a shared expert, biases, a tied output, unequal layers."""
    spec = tm.TinySpec(
        experts=5,
        hidden=32,
        width=20,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab=270,
        top_k=2,
        shared_width=24,
        dense_width=40,
        explicit_head_dim=False,
        tied=True,
        attention_bias=True,
        dense_layers=(1,),
        experts_of_layer=(5, 0, 4),
        norm_topk=True,
    )
    source = tm.write_hf(folder / "hf", "qwen2_moe", spec, dtype="bf16", shards=2)
    (source / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return source


def gguf(folder: Path) -> Path:
    """Quantized blocks of two types, llama's row order, rope factors."""
    spec = tm.TinySpec(
        layers=2,
        experts=4,
        hidden=64,
        width=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        top_k=2,
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )

    def kind(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType.Q4_0 if "down_exps" in name else GGMLQuantizationType.Q8_0

    return tm.write_gguf(folder / "m.gguf", "mixtral", spec, types=kind)[0]


SOURCES: dict[str, Callable[[Path], Path]] = {"safetensors": safetensors, "gguf": gguf}


def contents(container: Container) -> Expected:
    """What a reader finds in a container, through its public interface, as strict JSON."""
    return {
        "id": container.id,
        "alignment": container.alignment,
        "file_size": container.file_size,
        "data_offset": container.data_offset,
        "expert_offset": container.expert_offset,
        "sections": [list(section) for section in container.sections],
        "spec": container.spec,
        "provenance": container.provenance,
        "blobs": {name: _digest(data) for name, data in container.blobs.items()},
        "tensors": {
            name: {
                "role": int(t.role),
                "group": int(t.group),
                "layer": t.layer,
                "type": t.dtype.name,
                "shape": list(t.shape),
                "offset": t.offset,
                "alias_of": t.alias_of,
                "bytes": _digest(container.tensor(name)),
                "values": _digest(container.dequantize(name)),
            }
            for name, t in container.tensors.items()
        },
        "rows": [[row.layer, int(row.stream), row.n_experts] for row in container.rows],
        "blocks": [
            {
                "row": row,
                "expert": expert,
                "offset": int(container.cell(row, expert)["offset"]),
                "rank": int(container.cell(row, expert)["rank"]),
                "bytes": _digest(container.block(row, expert)),
                "parts": {
                    part.role.label: [
                        part.dtype.name,
                        part.rows,
                        part.cols,
                        part.offset,
                        _digest(container.dequantize_part(row, expert, part.role)),
                    ]
                    for part in container.layout_of(row, expert).parts
                },
            }
            for row, found in enumerate(container.rows)
            for expert in range(found.n_experts)
        ],
    }


def _digest(data: Any) -> str:
    raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    return hashlib.sha256(raw).hexdigest()


def make(name: str) -> None:
    """Make one file and its expectations."""
    out = HERE / f"{name}.colibri.xz"
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "v1.colibri"
        repack(SOURCES[name](Path(temporary)), path)
        with colibri_tools.open(path) as container:
            expected = contents(container)
        found = logits(path, TOKENS)
        expected["tokens"] = TOKENS
        expected["logits"] = base64.b64encode(found.astype("<f4").tobytes()).decode()
        with out.open("xb") as file:
            file.write(lzma.compress(path.read_bytes(), preset=9))
    out.with_name(f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make(sys.argv[1])
