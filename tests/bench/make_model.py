"""A large Qwen3-MoE with random weights for benchmarks, as safetensors and, on request, as GGUF.

    python tests/bench/make_model.py -o bench-moe                    # 2.7 B parameters, 5.4 GB
    python tests/bench/make_model.py -o bench-moe --gguf bench.gguf  # and the same weights as GGUF
    python tests/bench/make_model.py -o even --attention 0.03125     # experts are chosen evenly
    python tests/bench/make_model.py -o small --layers 2 --experts 8 --hidden 128 --width 64

One pool of normal random values is made once, and every matrix is a window of it that starts at
another place: no two experts are equal, writing runs at the speed of the drive, and memory stays
at a few hundred MB for any size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))
from sharded_safetensors import ITEM_BYTES, Entry, to_bf16, write_checkpoint, write_json

POOL_SPARE = 1 << 22  # values beyond the largest expert matrix: the number of distinct windows
WINDOW_STRIDE = 1_000_003  # prime, so that consecutive windows start at distinct places
STD = 0.02
ROPE_THETA = 1_000_000.0
RMS_EPS = 1e-6


@dataclass(frozen=True)
class Matrix:
    """One two-dimensional weight; `window` is its place in the pool."""

    hf_name: str
    gguf_name: str
    shape: tuple[int, int]
    window: int


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values in a stored type, bf16 as uint16."""
    if dtype == "BF16":
        return to_bf16(values.astype(np.float32))
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype])


class Pool:
    """Random values in the stored type; `values` returns the window of a matrix."""

    def __init__(self, largest: int, dtype: str, seed: int) -> None:
        normal = np.random.default_rng(seed).standard_normal(
            largest + POOL_SPARE, dtype=np.float32
        ) * np.float32(STD)
        self.data = stored(normal, dtype)

    def values(self, matrix: Matrix) -> np.ndarray:
        start = matrix.window * WINDOW_STRIDE % POOL_SPARE
        size = matrix.shape[0] * matrix.shape[1]
        if start + size <= len(self.data):
            return self.data[start : start + size].reshape(matrix.shape)
        return np.resize(
            self.data[start:], matrix.shape
        )  # an embedding larger than the pool repeats it


def plan(args: argparse.Namespace) -> Iterator[Matrix]:
    """Every matrix, the experts of a projection in sequence. Norms are ones and not listed."""
    window = iter(range(POOL_SPARE))
    q, kv, hidden = args.heads * args.head_dim, args.kv_heads * args.head_dim, args.hidden
    yield Matrix(
        "model.embed_tokens.weight", "token_embd.weight", (args.vocab, hidden), next(window)
    )
    for layer in range(args.layers):
        hf, blk = f"model.layers.{layer}", f"blk.{layer}"
        yield Matrix(
            f"{hf}.self_attn.q_proj.weight", f"{blk}.attn_q.weight", (q, hidden), next(window)
        )
        yield Matrix(
            f"{hf}.self_attn.k_proj.weight", f"{blk}.attn_k.weight", (kv, hidden), next(window)
        )
        yield Matrix(
            f"{hf}.self_attn.v_proj.weight", f"{blk}.attn_v.weight", (kv, hidden), next(window)
        )
        yield Matrix(
            f"{hf}.self_attn.o_proj.weight", f"{blk}.attn_output.weight", (hidden, q), next(window)
        )
        yield Matrix(
            f"{hf}.mlp.gate.weight",
            f"{blk}.ffn_gate_inp.weight",
            (args.experts, hidden),
            next(window),
        )
        wide, narrow = (args.width, hidden), (hidden, args.width)
        for name, shape in (("gate", wide), ("up", wide), ("down", narrow)):
            for expert in range(args.experts):
                hf_name = f"{hf}.mlp.experts.{expert}.{name}_proj.weight"
                yield Matrix(hf_name, f"{blk}.ffn_{name}_exps.weight", shape, next(window))
    if not args.tie:
        yield Matrix("lm_head.weight", "output.weight", (args.vocab, hidden), next(window))


def norms(args: argparse.Namespace) -> Iterator[tuple[str, str, int, float]]:
    """Hugging Face name, GGUF name, length and value of every norm.

    Queries and keys are normed again, so that a gain before attention scales the values alone.
    """
    for layer in range(args.layers):
        hf, blk = f"model.layers.{layer}", f"blk.{layer}"
        yield f"{hf}.input_layernorm.weight", f"{blk}.attn_norm.weight", args.hidden, args.attention
        yield f"{hf}.post_attention_layernorm.weight", f"{blk}.ffn_norm.weight", args.hidden, 1.0
        yield f"{hf}.self_attn.q_norm.weight", f"{blk}.attn_q_norm.weight", args.head_dim, 1.0
        yield f"{hf}.self_attn.k_norm.weight", f"{blk}.attn_k_norm.weight", args.head_dim, 1.0
    yield "model.norm.weight", "output_norm.weight", args.hidden, 1.0


def hf_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[args.dtype],
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.hidden,
        "intermediate_size": args.width * args.top_k,
        "max_position_embeddings": args.context,
        "mlp_only_layers": [],
        "moe_intermediate_size": args.width,
        "norm_topk_prob": True,
        "num_attention_heads": args.heads,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "rms_norm_eps": RMS_EPS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": args.tie,
        "vocab_size": args.vocab,
    }


def write_hf(args: argparse.Namespace, pool: Pool) -> int:
    entries = [
        Entry(m.hf_name, args.dtype, m.shape, lambda m=m: pool.values(m)) for m in plan(args)
    ]
    entries += [
        Entry(
            name, args.dtype, (n,), lambda n=n, value=value: stored(np.full(n, value), args.dtype)
        )
        for name, _, n, value in norms(args)
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    for stale in args.output.glob("model-*.safetensors"):
        stale.unlink()
    write_json(args.output / "config.json", hf_config(args))
    write_json(args.output / "generation_config.json", {"do_sample": False})
    return write_checkpoint(args.output, entries, int(args.shard_gb * 1e9))


def add_gguf_metadata(writer: Any, args: argparse.Namespace) -> None:
    from gguf import LlamaFileType

    file_type = {
        "BF16": LlamaFileType.MOSTLY_BF16,
        "F16": LlamaFileType.MOSTLY_F16,
        "F32": LlamaFileType.ALL_F32,
    }
    writer.add_type("model")
    writer.add_name(f"random qwen3moe {args.layers}x{args.experts}")
    writer.add_file_type(file_type[args.dtype])
    writer.add_quantization_version(2)
    writer.add_block_count(args.layers)
    writer.add_context_length(args.context)
    writer.add_embedding_length(args.hidden)
    writer.add_feed_forward_length(args.width * args.top_k)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_expert_count(args.experts)
    writer.add_expert_used_count(args.top_k)
    writer.add_expert_feed_forward_length(args.width)
    writer.add_vocab_size(args.vocab)
    writer.add_tokenizer_model("no_vocab")


def write_gguf(args: argparse.Namespace, pool: Pool) -> None:
    """The same weights; norms and routers are F32, as llama.cpp's converter writes them."""
    from gguf import GGMLQuantizationType, GGUFWriter

    def as_f32(values: np.ndarray) -> np.ndarray:
        return (
            (values.astype(np.uint32) << 16).view(np.float32)
            if args.dtype == "BF16"
            else values.astype(np.float32)
        )

    stacks: dict[str, list[Matrix]] = {}
    for matrix in plan(args):
        stacks.setdefault(matrix.gguf_name, []).append(matrix)
    writer = GGUFWriter(args.gguf, "qwen3moe")
    add_gguf_metadata(writer, args)
    norm_rows = [(name, n, value) for _, name, n, value in norms(args)]
    for name, n, _ in norm_rows:
        writer.add_tensor_info(name, (n,), np.dtype(np.float32), n * 4)
    sizes: dict[str, int] = {}
    for name, stack in stacks.items():
        type_name = "F32" if "ffn_gate_inp" in name else args.dtype
        shape = (len(stack), *stack[0].shape) if "_exps" in name else stack[0].shape
        sizes[name] = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[type_name]
        writer.add_tensor_info(
            name, shape, pool.data.dtype, sizes[name], raw_dtype=GGMLQuantizationType[type_name]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[
        0
    ]  # GGUFWriter wants whole tensors; a stack of experts is written one by one
    writer.write_padding(file, file.tell())
    for _, n, value in norm_rows:
        np.full(n, value, np.float32).tofile(file)
        writer.write_padding(file, n * 4)
    for name, stack in stacks.items():
        for matrix in stack:
            values = pool.values(matrix)
            (as_f32(values) if "ffn_gate_inp" in name else values).tofile(file)
        writer.write_padding(file, sizes[name])
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder of the safetensors checkpoint"
    )
    parser.add_argument("--gguf", type=Path, help="also write this GGUF file")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768, help="intermediate size of an expert")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument(
        "--attention",
        type=float,
        default=1.0,
        help="gain of attention; at 1 it drowns what tells tokens apart: routing hardly changes "
        "from token to token; at 0.03125 experts are drawn nearly evenly",
    )
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tie", action="store_true", help="tie the output matrix to the embedding")
    parser.add_argument("--dtype", type=str.upper, choices=sorted(ITEM_BYTES), default="BF16")
    parser.add_argument("--shard-gb", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.top_k > args.experts or args.heads % args.kv_heads:
        parser.error(
            "--top-k must not exceed --experts, and --heads must be a multiple of --kv-heads"
        )
    pool = Pool(
        max(args.width * args.hidden, args.heads * args.head_dim * args.hidden),
        args.dtype,
        args.seed,
    )
    n_bytes = write_hf(args, pool)
    n_parameters = n_bytes / ITEM_BYTES[args.dtype]
    print(f"{args.output}: {n_parameters / 1e6:.1f} M parameters, {n_bytes / 1e9:.2f} GB")
    if args.gguf:
        write_gguf(args, pool)
        print(f"{args.gguf}: {args.gguf.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
