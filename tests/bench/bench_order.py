"""Orders of blocks, with and without preloading, on text like the profile and unlike it.

usage: bench_order.py [--folder DIR] [--sizes 100K,400K,1500K,5M] [--scale 1.0] [--tokens 96]
                      [--rounds 3] [--cache 0.25] [--limit BYTES] [--threads 2] [--keep]

For each block size a random model is written whose routers follow the token, so that a stream of
Zipf-distributed tokens has hot experts and another stream over other tokens has other ones. It is
profiled on text of the first kind and reordered; then every order x preload x text decodes the
same tokens, one round after the other, each in a process of its own, with the page cache dropped
before and in a control group (version 1) of `--limit` bytes where this is root's to do. `--cache`
is the share of all experts that the cache holds.

Prints machine, settings, the way of reading that was in use, every median, and a Markdown table.
tokens/s counts decoding only; preloading is in the time of opening. Reads are system calls
that read, and bytes are those the drive was asked for, both per decoded token. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from colibri_tools.container import (
    ContainerWriter,
    Group,
    PartRole,
    PartSpec,
    ResidentItem,
    Role,
    RowSpec,
    Stream,
    plan_container,
)
from colibri_tools.dtypes import dtype_by_name
from colibri_tools.engine import Engine
from colibri_tools.output import format_bytes, parse_size
from colibri_tools.profile.profiling import profile_routing
from colibri_tools.profile.report import ordering_benefit
from colibri_tools.profile.stats import coverage, held_out
from colibri_tools.rewrite import reorder

HIDDEN, HEADS, HEAD_DIM, VOCAB, TOP_K = 512, 8, 64, 2048, 8
ORDERS = ("id", "hotness", "layer-hotness", "coactivation")
TEXTS = ("like", "unlike")
ZIPF = 1.1


@dataclass(frozen=True)
class Shape:
    """A model by its block size. `n_experts` and `n_layers` are those of scale 1."""

    width: int
    n_layers: int
    n_experts: int


SHAPES = {
    100 << 10: Shape(64, 32, 256),
    400 << 10: Shape(256, 32, 128),
    1500 << 10: Shape(960, 16, 128),
    5 << 20: Shape(3200, 8, 96),
}


# --- the model ------------------------------------------------------------------------------------


def spec_of(n_layers: int, width: int) -> dict[str, Any]:
    graph = {
        "attention": "gqa",
        "n_heads": HEADS,
        "n_kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "attention_scale": HEAD_DIM**-0.5,
        "qkv_bias": False,
        "o_bias": False,
        "qk_norm": "none",
        "clip_qkv": 0.0,
        "windows": [0] * n_layers,
        "norm": "rms",
        "norm_eps": 1e-6,
        "rope_dim": HEAD_DIM,
        "rope_pairing": "half",
        "rope_inv_freq": [1e4 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)],
        "rope_factor": 1.0,
        "activation": "silu",
        "router_score": "softmax",
        "router_norm": True,
        "router_scale": 1.0,
        "shared_width": 0,
        "shared_gated": False,
        "dense_width": 0,
    }
    return {f"graph.{key}": value for key, value in graph.items()} | {
        "family": "bench",
        "source_kind": "safetensors",
        "executable": True,
        "order": "id",
        "n_layers": n_layers,
        "n_mtp_layers": 0,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "context_length": 4096,
        "top_k": TOP_K,
        "expert_width": width,
        "total_params": 1,
        "active_params": 1,
        "moe_layers": [1] * n_layers,
        "tokenizer": "none",
        "bos_id": -1,
        "eos_ids": [],
        "n_tokens": VOCAB,
    }


def residents_of(n_layers: int, n_experts: int) -> list[ResidentItem]:
    f32 = dtype_by_name("f32")
    shapes: list[tuple[Role, int, tuple[int, ...]]] = [
        (Role.TOKEN_EMBD, -1, (VOCAB, HIDDEN)),
        (Role.OUTPUT, -1, (VOCAB, HIDDEN)),
        (Role.OUTPUT_NORM, -1, (HIDDEN,)),
    ]
    for layer in range(n_layers):
        shapes += [(Role.ATTN_NORM, layer, (HIDDEN,)), (Role.FFN_NORM, layer, (HIDDEN,))]
        for role in (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V, Role.ATTN_O):
            shapes.append((role, layer, (HIDDEN, HIDDEN)))
        shapes.append((Role.ROUTER, layer, (n_experts, HIDDEN)))
    return [
        ResidentItem(
            f"{layer}.{role.name.lower()}",
            role,
            Group.PER_ROW if role == Role.TOKEN_EMBD else Group.EVERY_TOKEN,
            layer,
            f32,
            shape,
        )
        for role, layer, shape in shapes
    ]


def write_model(path: Path, shape: Shape) -> None:
    """Attention and experts are small beside the embedding, so that routers see the token."""
    random = np.random.default_rng(0)
    q8 = dtype_by_name("q8_0")
    parts = tuple(
        PartSpec(role, q8, *size)
        for role, size in (
            (PartRole.GATE, (shape.width, HIDDEN)),
            (PartRole.UP, (shape.width, HIDDEN)),
            (PartRole.DOWN, (HIDDEN, shape.width)),
        )
    )
    rows = [
        RowSpec(layer, Stream.MAIN, shape.n_experts, (0,) * shape.n_experts)
        for layer in range(shape.n_layers)
    ]
    plan = plan_container(
        spec=spec_of(shape.n_layers, shape.width),
        blobs={},
        provenance={"tool": "bench"},
        residents=residents_of(shape.n_layers, shape.n_experts),
        layouts=[parts],
        rows=rows,
    )
    scale = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    with ContainerWriter(plan, path) as writer:
        for tensor in plan.tensors:
            item = tensor.item
            values = random.standard_normal(item.shape, np.float32)
            if len(item.shape) == 1:
                values = np.ones(item.shape, np.float32)
            elif item.role not in (Role.TOKEN_EMBD, Role.ROUTER):
                values *= 0.01 * HIDDEN**-0.5
            writer.write_tensor(item.name, values.tobytes())
        for row in range(shape.n_layers):
            for expert in range(shape.n_experts):
                layout = plan.layout_of(row, expert)
                block = random.integers(0, 256, layout.n_bytes, np.uint8)
                for part in layout.parts:  # quant blocks of a float16 scale and 32 int8
                    own = block[part.offset : part.offset + part.n_bytes].reshape(-1, 34)
                    own[:, :2] = scale
                writer.write_block(row, expert, block.tobytes())
        writer.seal()


def text(kind: str, n: int, seed: int) -> list[int]:
    """Tokens of a Zipf distribution over one half of the vocabulary or the other."""
    random = np.random.default_rng(seed)
    half = VOCAB // 2
    chance = 1 / np.arange(1, half + 1) ** ZIPF
    drawn = random.choice(half, n, p=chance / chance.sum())
    ids = np.random.default_rng(99).permutation(VOCAB)
    own = ids[:half] if kind == "like" else ids[half:]
    return [int(i) for i in own[drawn]]


# --- one measurement, in a process of its own -----------------------------------------------------


def read_calls() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("syscr:"):
            return int(line.split()[1])
    raise SystemExit("/proc/self/io has no syscr")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Decode and return what it took. `job` is what `run_job` was asked for."""
    tokens = job["tokens"]
    opening = time.perf_counter()
    with Engine(
        job["path"],
        threads=job["threads"],
        expert_cache=job["cache"],
        ctx=len(tokens),
        precision="fast",
        preload=job["cache"] if job["preload"] else 0,
    ) as engine:
        opening = time.perf_counter() - opening
        engine.reset_stats()
        calls, start = read_calls(), time.perf_counter()
        for token in tokens:
            engine.eval([token], 0)
        seconds = time.perf_counter() - start
        calls = read_calls() - calls
        stats = engine.stats()
    n = len(tokens)
    return {
        "tokens_per_second": n / seconds,
        "reads": calls / n,
        "bytes": stats.bytes_read / n,
        "hit_rate": stats.hit_rate,
        "wait_share": stats.io_wait_seconds / seconds,
        "open_seconds": opening,
        "backend": f"{stats.io_backend}, {'direct' if stats.io_direct else stats.io_reason}",
    }


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


class Limit:
    """A control group of version 1 with a memory limit, or nothing where there can be none."""

    def __init__(self, n_bytes: int) -> None:
        self.path: Path | None = Path(f"/sys/fs/cgroup/memory/bench-order-{os.getpid()}")
        try:
            self.path.mkdir()
            (self.path / "memory.limit_in_bytes").write_text(str(n_bytes))
        except OSError:
            self.path = None

    def enter(self) -> None:
        """Called in the child, before it runs."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text("0")

    def close(self) -> None:
        if self.path is not None:
            self.path.rmdir()


def run_job(job: dict[str, Any], limit: Limit) -> dict[str, Any]:
    drop_caches()
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit.enter,
    )
    if done.returncode:
        raise SystemExit(f"a measurement failed: {done.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- all of them ----------------------------------------------------------------------------------


def prepare(folder: Path, name: str, shape: Shape, n_profiled: int) -> tuple[dict[str, Path], int]:
    """Write the model in every order; return the containers, and bytes of all experts."""
    paths = {order: folder / f"{name}-{order}.colibri" for order in ORDERS}
    write_model(paths["id"], shape)
    ids = folder / f"{name}.ids"
    ids.write_text(",".join(map(str, text("like", n_profiled, seed=1))))
    profile = folder / f"{name}.profile"
    result = profile_routing(paths["id"], profile, token_files=[("like", ids)], force=True)
    p = result.report.profile
    print(f"  {ordering_benefit(coverage(p.counts(), p.mask()), held_out(p))[1]}")
    for order in ORDERS[1:]:
        reorder(paths["id"], paths[order], routing=profile, order=order, force=True)
    return paths, result_bytes(paths["id"])


def result_bytes(path: Path) -> int:
    with Engine(path, ctx=8, threads=1) as engine:
        return engine.memory.all_experts_bytes


def bench(args: argparse.Namespace, folder: Path, size: int, shape: Shape) -> list[str]:
    name = format_bytes(size).replace(" ", "")
    print(f"{name} blocks: {shape.n_layers} layers x {shape.n_experts} experts, top {TOP_K}")
    paths, all_bytes = prepare(folder, name, shape, args.profiled)
    cache = max(int(args.cache * all_bytes), 4 * size)
    limit = Limit(args.limit or cache + (512 << 20))
    where = "none" if limit.path is None else format_bytes(args.limit or cache + (512 << 20))
    print(
        f"  experts {format_bytes(all_bytes)}, cache {format_bytes(cache)}, memory limit {where}, "
        f"page cache {'dropped' if drop_caches() else 'NOT dropped'}"
    )
    found: dict[tuple[str, bool, str], list[dict[str, Any]]] = {}
    for round_number in range(args.rounds):
        for kind in TEXTS:
            tokens = text(kind, args.tokens, seed=100 + round_number)
            for preload in (False, True):
                for order in ORDERS:
                    job = {
                        "path": str(paths[order]),
                        "tokens": tokens,
                        "cache": cache,
                        "preload": preload,
                        "threads": args.threads,
                    }
                    found.setdefault((order, preload, kind), []).append(run_job(job, limit))
    limit.close()
    if not args.keep:
        for path in paths.values():
            path.unlink()
    print(f"  read by {next(iter(found.values()))[0]['backend']}")
    return [row(name, *key, results) for key, results in found.items()]


def row(name: str, order: str, preload: bool, kind: str, results: list[dict[str, Any]]) -> str:
    def median(key: str) -> float:
        return statistics.median(float(result[key]) for result in results)

    speeds = sorted(float(result["tokens_per_second"]) for result in results)
    return (
        f"| {name} | {kind} | {order} | {'yes' if preload else 'no'} | "
        f"{median('tokens_per_second'):.1f} ({speeds[0]:.1f}-{speeds[-1]:.1f}) | "
        f"{median('reads'):.0f} | {format_bytes(int(median('bytes')))} | "
        f"{median('hit_rate'):.1%} | {median('wait_share'):.0%} | {median('open_seconds'):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for containers; default: a temporary one")
    parser.add_argument("--sizes", default="100K,400K,1500K,5M")
    parser.add_argument("--scale", type=float, default=1.0, help="of experts and layers")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--profiled", type=int, default=2048, help="tokens of the profile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=float, default=0.25, help="share of all experts")
    parser.add_argument("--limit", type=parse_size, help="memory; default: cache + 512 MiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the containers")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.load(sys.stdin))))
        return
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, {args.threads} threads, Python "
        f"{platform.python_version()}; {args.tokens} tokens, {args.rounds} rounds"
    )
    lines: list[str] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        for size in map(parse_size, args.sizes.split(",")):
            if size not in SHAPES:
                raise SystemExit(
                    f"--sizes: expected some of {', '.join(map(format_bytes, SHAPES))}"
                )
            full = SHAPES[size]
            shape = Shape(
                full.width,
                max(2, round(full.n_layers * args.scale)),
                max(2 * TOP_K, round(full.n_experts * args.scale)),
            )
            lines += bench(args, Path(temporary), size, shape)
    print()
    print(
        "| block | text | order | preload | tokens/s (range) | reads | bytes | hits | waiting "
        "| open, s |"
    )
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
