"""Decode and prefill of a container against llama.cpp with the same blocks: interleaved, in memory.

usage: bench_run.py MODEL.colibri MODEL.gguf --llama-bench PATH [--threads 2] [--rounds 5]
                    [--prompt 128,512] [--generate 64] [--precision fast] [--kv-type T]

MODEL.colibri is what `colibri repack MODEL.gguf` makes. The engine stays open with a cache that
holds every expert, filled before the first round. Each round runs a read-bandwidth probe,
llama-bench, and the engine, one after the other on the same number of threads. Prints machine and
settings, every round, medians, ratios, and decode as a share of the bandwidth read in the same run.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from colibri_tools.engine import KV_TYPES, PRECISIONS, Engine

BATCH = 512


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def build_probe(folder: Path) -> Path:
    source = Path(__file__).resolve().parent / "bench_read.c"
    program = folder / "bench_read"
    call = ["cc", "-O3", "-march=native", str(source), "-o", str(program), "-lpthread"]
    subprocess.run(call, check=True)
    return program


def read_bandwidth(probe: Path, threads: int) -> float:
    """GB/s of plain reads by `threads` threads."""
    call = [str(probe), str(threads), "256", "0.5"]
    return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def run_llama(args: argparse.Namespace, prompts: list[int]) -> dict[str, float]:
    """tokens/s by test: "pp128", "tg64"."""
    call = [str(args.llama_bench), "-m", str(args.gguf), "-t", str(args.threads), "-r", "1"]
    call += ["-p", ",".join(map(str, prompts)), "-n", str(args.generate), "-o", "json"]
    call += args.llama_args.split()
    folder = str(args.llama_bench.resolve().parent)
    paths = [folder, os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(p for p in paths if p)}
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"llama-bench: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    rates = {}
    for test in json.loads(done.stdout):
        name = f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}"
        rates[name] = float(test["avg_ts"])
    return rates


def run_engine(engine: Engine, tokens: list[int], prompts: list[int], n: int) -> dict[str, float]:
    rates = {}
    for length in prompts:
        engine.rewind(0)
        start = time.perf_counter()
        engine.eval(tokens[:length])
        rates[f"pp{length}"] = length / (time.perf_counter() - start)
    engine.rewind(0)
    engine.eval(tokens[:1])
    start = time.perf_counter()
    for token in tokens[1 : n + 1]:
        engine.eval([token])
    rates[f"tg{n}"] = n / (time.perf_counter() - start)
    return rates


def token_bytes(engine: Engine) -> int:
    """Bytes of weights that one token reads: what is resident, and its experts."""
    memory, info = engine.memory, engine.info
    block = memory.all_experts_bytes / (info.n_moe_layers * info.max_experts)
    return memory.resident_bytes + int(info.n_moe_layers * info.top_k * block)


def fill_cache(engine: Engine, tokens: list[int]) -> None:
    """Evaluate text until nothing is read any more."""
    before = -1
    for start in range(0, len(tokens), BATCH):
        engine.rewind(0)
        engine.eval(tokens[start : start + BATCH])
        if engine.stats().reads == before:
            break
        before = engine.stats().reads
    engine.reset_stats()


def show(label: str, rates: dict[str, float]) -> None:
    numbers = "   ".join(f"{name} {rate:8.2f}" for name, rate in rates.items())
    print(f"  {label:<10} {numbers}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--llama-args", default="", help="more arguments of llama-bench")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", default="128,512")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--precision", choices=PRECISIONS, default="fast")
    parser.add_argument("--kv-type", choices=KV_TYPES)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    prompts = [int(n) for n in args.prompt.split(",")]
    engine = Engine(
        args.container,
        threads=args.threads,
        ctx=max(*prompts, BATCH, args.generate + 1),
        batch_size=BATCH,
        expert_cache=1 << 60,
        check="never",
        precision=args.precision,
        kv_type=args.kv_type,
    )
    info = engine.info
    random = np.random.default_rng(0)
    tokens = [int(t) for t in random.integers(0, info.n_tokens, 16 * BATCH)]
    fill_cache(engine, tokens)
    stats, n_bytes = engine.stats(), token_bytes(engine)
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}")
    print(f"{args.container.name}: {n_bytes / 1e6:.1f} MB of weights for a token")
    print(f"{info.n_threads} threads, kernels {info.kernels}", end=", ")
    print(f"precision {info.precision}, KV {info.kv_type}")
    print(f"I/O: {stats.io_backend}, {'direct' if stats.io_direct else stats.io_reason}")
    print(f"load average {os.getloadavg()[0]:.2f}; tokens/s", flush=True)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    bandwidths: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        probe = build_probe(Path(folder))
        for number in range(args.rounds):
            bandwidths.append(read_bandwidth(probe, args.threads))
            print(f"round {number + 1}: reads {bandwidths[-1]:.2f} GB/s")
            theirs.append(run_llama(args, prompts))
            show("llama.cpp", theirs[-1])
            ours.append(run_engine(engine, tokens, prompts, args.generate))
            show("colibri", ours[-1])
    print(f"experts read from the drive meanwhile: {engine.stats().reads}")
    print("\n| test | llama.cpp | colibri | ratio of medians | ratios by round |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name in ours[0]:
        a, b = [t[name] for t in theirs], [t[name] for t in ours]
        ratios = ", ".join(f"{y / x:.2f}" for x, y in zip(a, b, strict=True))
        x, y = statistics.median(a), statistics.median(b)
        print(f"| {name} | {x:.2f} | {y:.2f} | **{y / x:.2f}** | {ratios} |")
    rate = statistics.median(t[f"tg{args.generate}"] for t in ours) * n_bytes / 1e9
    bandwidth = statistics.median(bandwidths)
    share = f"{100 * rate / bandwidth:.0f} % of the {bandwidth:.2f} GB/s that plain reads reach"
    print(f"\ndecode reads {rate:.2f} GB/s of weights: {share}")


if __name__ == "__main__":
    main()
