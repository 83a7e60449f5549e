"""Speed and memory against context, batch size and cache size: a Markdown table and one plot.

usage: bench_sweep.py MODEL.colibri -o PLOT.svg [--seconds 10] [--threads 2] [--precision fast]
                      [--kv-type T] [--context 128,1024,4096,8192] [--batch 1,8,32,128,512]
                      [--cache 2,0.1,0.25,0.5,0.75,1] [--io auto]

One option is swept at a time. Each point is a process of its own, so that its peak RSS is that of
this point, measured for --seconds after opening and filling. PLOT is SVG or PNG by its name, and
needs matplotlib.

  context: decode up to so many positions (the last eighth of them at most), every expert in the
           cache
  batch:   prefill in batches of this size, every expert in the cache
  cache:   decode with a cache of so many blocks (whole numbers above 1) or this share of all
           experts (up to 1), read past the page cache where the drive allows

Peak RSS is that of the process, Python and its imports included; `planned` is the engine's own
plan. Tokens are random. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_run import cpu_name

from colibri_tools.engine import IO_MODES, KV_TYPES, PRECISIONS, Engine, estimate

FILL_BATCH = 512
ALL = 1 << 60
MIB = 1 << 20


@dataclass(frozen=True)
class Point:
    """One measurement; memory in bytes."""

    sweep: str
    value: float
    cache_bytes: int
    tokens_per_second: float
    tokens: int
    hit_rate: float | None
    peak_bytes: int
    planned_bytes: int
    path: str


# ---------------------------------------------------------------- one point, in a process


def peak_rss() -> int:
    """High-water mark of this process: getrusage would count what its parent had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/self/status has no VmHWM")


def smallest_cache(path: Path) -> int:
    return estimate(path, ctx=1).min_cache_bytes


def options_of(args: argparse.Namespace, sweep: str, value: float) -> dict[str, Any]:
    options: dict[str, Any] = {"threads": args.threads, "io": args.io, "check": "never"}
    options |= {"precision": args.precision, "kv_type": args.kv_type, "expert_cache": ALL}
    if sweep == "context":
        return options | {"ctx": int(value), "batch_size": FILL_BATCH}
    if sweep == "batch":
        return options | {"ctx": FILL_BATCH, "batch_size": int(value)}
    minimum = smallest_cache(args.container)
    whole = estimate(args.container, ctx=1).all_experts_bytes
    n_bytes = int(value * (minimum / 2 if value > 1 else whole))
    return options | {"ctx": 256, "batch_size": 32, "expert_cache": max(n_bytes, minimum)}


def decode(engine: Engine, tokens: list[int], filled: int, seconds: float) -> tuple[int, float]:
    """Decode for a time with `filled` positions before the first token; tokens and seconds."""
    done, used = 0, 0.0
    while used < seconds and done < len(tokens):
        if engine.position == engine.info.ctx:
            engine.rewind(filled)
        start = time.perf_counter()
        engine.eval([tokens[done]])
        used += time.perf_counter() - start
        done += 1
    return done, used


def prefill(engine: Engine, tokens: list[int], seconds: float) -> tuple[int, float]:
    """Evaluate prompts of FILL_BATCH tokens for a time."""
    done, used, batch = 0, 0.0, engine.info.batch_size
    while used < seconds:
        if engine.position + batch > engine.info.ctx:
            engine.rewind(0)
        at = done % FILL_BATCH
        start = time.perf_counter()
        engine.eval(tokens[at : at + batch])
        used += time.perf_counter() - start
        done += batch
    return done, used


def fill(engine: Engine, tokens: list[int], sweep: str, value: float) -> None:
    """What comes before the clock: every expert in the cache, positions filled."""
    filled = int(value) * 7 // 8 if sweep == "context" else 32 if sweep == "cache" else 0
    if sweep != "cache":
        step = min(FILL_BATCH, engine.info.batch_size)
        before = -1
        for start in range(0, len(tokens) - step, step):
            if engine.stats().reads == before and start >= 4 * FILL_BATCH:
                break
            before = engine.stats().reads if start % FILL_BATCH == 0 else -1
            engine.rewind(0)
            engine.eval(tokens[start : start + step])
    engine.rewind(0)
    for start in range(0, filled, FILL_BATCH):
        engine.eval(tokens[start : min(start + FILL_BATCH, filled)])


def measure(args: argparse.Namespace, sweep: str, value: float) -> Point:
    with Engine(args.container, **options_of(args, sweep, value)) as engine:
        n = max(16 * FILL_BATCH, int(value))
        tokens = np.random.default_rng(0).integers(0, engine.info.n_tokens, n).tolist()
        fill(engine, tokens, sweep, value)
        engine.reset_stats()
        if sweep == "batch":
            done, used = prefill(engine, tokens, args.seconds)
        else:
            done, used = decode(engine, tokens[::-1], engine.position, args.seconds)
        stats, memory = engine.stats(), engine.memory
        path = f"{stats.io_backend}, {'direct' if stats.io_direct else stats.io_reason}"
        return Point(
            sweep=sweep,
            value=value,
            cache_bytes=memory.cache_bytes,
            tokens_per_second=done / used,
            tokens=done,
            hit_rate=stats.hit_rate,
            peak_bytes=peak_rss(),
            planned_bytes=memory.total_bytes,
            path=path,
        )


def measure_apart(sweep: str, value: float) -> Point:
    """The same in a new process."""
    call = [sys.executable, __file__, *sys.argv[1:], "--point", f"{sweep}:{value}"]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
    return Point(**json.loads(done.stdout))


# ---------------------------------------------------------------- table and plot


def label(point: Point) -> str:
    if point.sweep != "cache":
        return f"{point.value:.0f}"
    what = f"{point.value:.0f} blocks" if point.value > 1 else f"{100 * point.value:.0f} %"
    return f"{what} ({point.cache_bytes / MIB:.3g} MiB)"


NAMES = {"context": "context filled", "batch": "prefill batch", "cache": "expert cache"}


def row(point: Point) -> str:
    hits = "" if point.hit_rate is None else f"{100 * point.hit_rate:.0f} %"
    return (
        f"| {NAMES[point.sweep]} | {label(point)} | {point.tokens_per_second:.1f} | {point.tokens} "
        f"| {hits} | {point.peak_bytes / MIB:.0f} | {point.planned_bytes / MIB:.0f} |"
    )


AXES = {
    "context": ("context filled (positions)", "decode (tokens/s)", 2),
    "batch": ("prefill batch (tokens)", "prefill (tokens/s)", 2),
    "cache": ("expert cache (MiB)", "decode (tokens/s)", None),
}


def plot(points: list[Point], title: str, path: Path) -> None:
    """Speed above, peak RSS below, a column for each sweep."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "bench_sweep"  # the same numbers give the same file
    from matplotlib import pyplot

    sweeps = [name for name in AXES if any(p.sweep == name for p in points)]
    size = (4 * len(sweeps), 5.6)
    figure, axes = pyplot.subplots(2, len(sweeps), figsize=size, sharex="col", squeeze=False)
    for column, name in enumerate(sweeps):
        shown = [p for p in points if p.sweep == name]
        x = [p.cache_bytes / MIB if name == "cache" else p.value for p in shown]
        x_label, y_label, base = AXES[name]
        top, bottom = axes[0][column], axes[1][column]
        top.plot(x, [p.tokens_per_second for p in shown], "o-", color="#1f5fa8")
        bottom.plot(x, [p.peak_bytes / MIB for p in shown], "o-", color="#a8501f", label="peak RSS")
        planned = [p.planned_bytes / MIB for p in shown]
        bottom.plot(x, planned, "--", color="#555555", label="planned")
        top.set_ylabel(y_label)
        bottom.set_ylabel("memory (MiB)")
        bottom.set_xlabel(x_label)
        for axis in (top, bottom):
            if base:
                axis.set_xscale("log", base=base)
                axis.set_xticks(x, [f"{v:.0f}" for v in x])
                axis.minorticks_off()
            axis.set_ylim(bottom=0, top=1.15 * axis.get_ylim()[1])
            axis.grid(alpha=0.3)
    axes[1][0].legend(loc="lower right")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="fast")
    parser.add_argument("--kv-type", choices=KV_TYPES)
    parser.add_argument("--io", choices=IO_MODES, default="auto")
    parser.add_argument("--context", type=numbers, default=numbers("128,1024,4096,8192"))
    parser.add_argument("--batch", type=numbers, default=numbers("1,8,32,128,512"))
    parser.add_argument("--cache", type=numbers, default=numbers("2,0.1,0.25,0.5,0.75,1"))
    parser.add_argument("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.point:
        sweep, value = args.point.split(":")
        print(json.dumps(asdict(measure(args, sweep, float(value)))))
        return
    limit = estimate(args.container, ctx=1).context_length
    fits = [n for n in args.context if n <= limit]
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}")
    print(f"{args.container.name}: {args.precision} precision, {args.threads} threads,", end=" ")
    print(f"{args.seconds:g} s a point, load average {os.getloadavg()[0]:.2f}")
    for n in sorted(set(args.context) - set(fits)):
        print(f"context {n:.0f} is left out: the model's context length is {limit}")
    print("\n| sweep | at | tokens/s | tokens | in cache | peak RSS, MiB | planned, MiB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    points = []
    for sweep, values in (("context", fits), ("batch", args.batch), ("cache", args.cache)):
        for value in values:
            points.append(measure_apart(sweep, value))
            print(row(points[-1]), flush=True)
    print(f"\nI/O: {'; '.join(sorted({p.path for p in points}))}")
    title = (
        f"{args.container.stem}, {args.precision} precision, {args.threads} threads; {cpu_name()}"
    )
    plot(points, title, args.out)


if __name__ == "__main__":
    main()
