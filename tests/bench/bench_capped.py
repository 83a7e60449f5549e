"""Decoding with less memory than the model: colibri-run against llama.cpp's mmap, and the drive.

usage: bench_capped.py MODEL.colibri MODEL.gguf --llama-bench PATH [--share 0.37,0.2] [--rounds 3]
                       [--tokens 32] [--llama-tokens 8] [--threads 2] [--io-threads 4]
                       [--llama-args='--repack 0 -lm mmap'] [--io pread,io_uring] [--prefetch 0,1]

As root: every run is in a memory cgroup (v2, or v1 where that has the memory controller) of
SHARE times the size of MODEL.gguf, made and removed here, and the page cache is dropped before it.
--ram-budget is the cap less 50 MB, over 1.05: what the budget promises to keep. Before and after
each run the plain loop of bench_store.c reads blocks of the same file with O_DIRECT, --io-threads
at once; their mean is the ceiling of that run. Tokens are random on both sides (llama-bench draws
them so, colibri-run at a high temperature), so that routing is too.
colibri-run is the one in PATH. llama.cpp copies some types into a layout of its own, which no small
cap holds; --repack 0 keeps it at mmap. What the kernel kills for memory is shown as 0 tokens/s.
Prints machine, settings, every run, medians. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_run import cpu_name

REPOSITORY = Path(__file__).resolve().parents[2]
MB = 1e6


@dataclass(frozen=True)
class Cap:
    """A memory cgroup: where processes join it, and its limit in bytes."""

    folder: Path
    limit: int
    version: str


@dataclass
class Run:
    """One run of either side; what llama-bench does not tell is None."""

    tokens_per_second: float
    wall_seconds: float
    cpu_seconds: float
    bytes_per_second: float | None = None
    wait_share: float | None = None
    hit_rate: float | None = None
    peak_bytes: int | None = None
    path: str = ""
    ceiling: float = 0.0


class Killed(Exception):
    """The kernel ended a program that needs more than the cap: wall and CPU seconds so far."""


# ---------------------------------------------------------------- the surroundings


def cgroup_root() -> tuple[Path, str]:
    """The memory controller's mount, and the name of the file with the limit."""
    v1 = Path("/sys/fs/cgroup/memory")
    if (v1 / "memory.limit_in_bytes").exists():
        return v1, "memory.limit_in_bytes"
    v2 = Path("/sys/fs/cgroup")
    if "memory" in (v2 / "cgroup.subtree_control").read_text().split():
        return v2, "memory.max"
    raise SystemExit("no memory controller: neither cgroup v1 nor v2 has one mounted and enabled")


@contextlib.contextmanager
def capped(limit: int) -> Iterator[Cap]:
    """A cgroup that exists inside this block."""
    root, limit_file = cgroup_root()
    folder = root / f"colibri-bench-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / limit_file).write_text(str(limit))
        yield Cap(folder, limit, "v2" if limit_file == "memory.max" else "v1")
    finally:
        folder.rmdir()


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def run_capped(
    call: list[str], cap: Cap, environment: dict[str, str] | None = None
) -> tuple[str, float, float]:
    """Run a program inside the cgroup; return its output, wall and CPU seconds (user and system).

    The shell joins the cgroup and becomes the program.
    """
    join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cap.folder / "cgroup.procs")]
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            join + call, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode == -9:
            raise Killed(wall, usage.ru_utime + usage.ru_stime)
        if process.returncode:
            errors.seek(0)
            why = errors.read()[-400:].strip()
            raise SystemExit(f"{call[0]}: exit {process.returncode}: {why}")
    return output, wall, usage.ru_utime + usage.ru_stime


def build_store_bench(folder: Path) -> Path:
    program = folder / "bench_store"
    sources = ["tests/bench/bench_store.c"]
    for pattern in ("runtime/src/store*.c", "runtime/src/io_*.c", "csrc/*.c"):
        sources += sorted(str(path) for path in REPOSITORY.glob(pattern))
    call = ["cc", "-O2", "-std=c11", "-D_GNU_SOURCE", "-Icsrc", "-Iruntime/src", *sources]
    subprocess.run([*call, "-lpthread", "-lm", "-o", str(program)], check=True, cwd=REPOSITORY)
    return program


def ceiling(program: Path, args: argparse.Namespace) -> float:
    """Bytes per second of a plain loop of O_DIRECT reads: the better of pieces and whole blocks."""
    half = str(args.probe_seconds / 2)
    call = [str(program.resolve()), str(args.container), half, "0", "16", str(args.io_threads)]
    output = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    return max(float(number) for number in output.split())


# ---------------------------------------------------------------- both sides


def run_llama(args: argparse.Namespace, cap: Cap) -> Run:
    call = [str(args.llama_bench), "-m", str(args.gguf), "-t", str(args.threads), "-r", "1"]
    call += ["-p", "0", "-n", str(args.llama_tokens), "-o", "json"]
    call += args.llama_args.split()
    paths = [str(args.llama_bench.resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(p for p in paths if p)}
    try:
        output, wall, cpu = run_capped(call, cap, environment)
    except Killed as killed:  # a result too
        return Run(0.0, *killed.args, path="killed for memory")
    result = json.loads(output)[0]
    mapped = result.get("load_mode", "mmap" if result.get("use_mmap") else "not mmap")
    return Run(float(result["avg_ts"]), wall, cpu, path=mapped)


def budget_of(cap: Cap) -> int:
    """The largest budget that the cap holds, peak memory being within 5 % and 50 MB of it."""
    return int((cap.limit - 50e6) / 1.05)


def run_colibri(args: argparse.Namespace, cap: Cap, io: str, prefetch: int, seed: int) -> Run:
    random = np.random.default_rng(seed)
    prompt = random.integers(0, args.vocabulary, args.prompt_tokens)
    call = [args.colibri_run, str(args.container), "--tokens", ",".join(map(str, prompt))]
    call += ["--max-tokens", str(args.tokens), "--ignore-eos", "--temperature", "1000"]
    call += ["--seed", str(seed), "--threads", str(args.threads), "--check", "never"]
    call += ["--ram-budget", str(budget_of(cap)), "--io", io, "--io-threads", str(args.io_threads)]
    call += ["--prefetch-depth", str(prefetch), "--profile", "--json", *args.run_args.split()]
    output, wall, cpu = run_capped(call, cap)
    document: dict[str, Any] = json.loads(output)
    phase, used = document["profile"]["phases"]["decode"], document["io"]
    return Run(
        tokens_per_second=phase["tokens"] / phase["seconds"],
        wall_seconds=wall,
        cpu_seconds=cpu,
        bytes_per_second=phase["bytes_read"] / phase["seconds"],
        wait_share=phase["io_wait_share"],
        hit_rate=phase["hit_rate"],
        peak_bytes=document["peak_rss_bytes"],
        path=f"{used['backend']}, {'direct' if used['direct'] else 'page cache'}",
    )


def run_round(args: argparse.Namespace, cap: Cap, store_bench: Path, seed: int) -> dict[str, Run]:
    """Every variant once, a reading of the ceiling before and after each."""
    turns: dict[str, Callable[[], Run]] = {"llama.cpp": lambda: run_llama(args, cap)}
    for io in args.io.split(","):
        for depth in map(int, args.prefetch.split(",")):
            turns[f"{io}, prefetch {depth}"] = lambda io=io, depth=depth: run_colibri(  # type: ignore[misc]
                args, cap, io, depth, seed
            )
    runs = {}
    before = ceiling(store_bench, args)
    for name, turn in turns.items():
        drop_caches()
        run = turn()
        after = ceiling(store_bench, args)
        run.ceiling, before = (before + after) / 2, after
        runs[name] = run
        show_run(name, run)
    return runs


# ---------------------------------------------------------------- what is printed


def show_run(name: str, run: Run) -> None:
    text = f"  {name:<22} {run.tokens_per_second:7.3f} tok/s, drive {run.ceiling / MB:5.0f} MB/s"
    if run.bytes_per_second is not None and run.peak_bytes is not None:
        text += (
            f", experts {run.bytes_per_second / MB:5.0f} MB/s, peak {run.peak_bytes / MB:.0f} MB"
        )
    text += f", CPU {run.cpu_seconds:.1f} s of {run.wall_seconds:.1f} s; {run.path}"
    print(text, flush=True)


def median(runs: list[Run], value: Callable[[Run], float | None]) -> float | None:
    found = [v for v in map(value, runs) if v is not None]
    return statistics.median(found) if found else None


def show_table(rounds: list[dict[str, Run]]) -> None:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    print(
        "\n| | tok/s | of llama.cpp | expert MB/s | ceiling MB/s | of the ceiling | by round",
        end="",
    )
    print(
        " | I/O wait | in cache | CPU s / wall s |\n| --- |"
        + " ---: |" * 5
        + " --- | ---: | ---: | ---: |"
    )
    for name in rounds[0]:
        runs = [r[name] for r in rounds]
        pairs = [(r[name].tokens_per_second, r["llama.cpp"].tokens_per_second) for r in rounds]
        times = [ours / theirs for ours, theirs in pairs if theirs > 0]
        shares = [
            None if r.bytes_per_second is None else r.bytes_per_second / r.ceiling for r in runs
        ]
        known = [share for share in shares if share is not None]
        speed = median(runs, lambda r: r.bytes_per_second)
        cells = [
            name,
            f"{median(runs, lambda r: r.tokens_per_second):.2f}",
            f"{statistics.median(times):.1f}x" if times else "",
            "" if speed is None else f"{speed / MB:.0f}",
            f"{statistics.median(r.ceiling for r in runs) / MB:.0f}",
            f"**{percent(statistics.median(known))}**" if known else "",
            ", ".join(f"{100 * share:.0f}" for share in known),
            percent(median(runs, lambda r: r.wait_share)),
            percent(median(runs, lambda r: r.hit_rate)),
            f"{median(runs, lambda r: r.cpu_seconds / r.wall_seconds):.2f}",
        ]
        print(f"| {' | '.join(cells)} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--llama-args", default="", help="more arguments of llama-bench")
    parser.add_argument("--store-bench", type=Path, help="bench_store, built (else it is built)")
    parser.add_argument("--run-args", default="", help="more arguments of colibri-run")
    parser.add_argument("--share", default="0.37,0.2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--llama-tokens", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--io", default="pread,io_uring")
    parser.add_argument("--prefetch", default="0,1")
    parser.add_argument("--probe-seconds", type=float, default=1.0)
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise SystemExit("cgroups and dropping the page cache need root")
    args.colibri_run = shutil.which("colibri-run")
    if args.colibri_run is None:
        raise SystemExit("colibri-run is not in PATH")


def main() -> None:
    args = arguments()
    check(args)
    from colibri_tools.engine import estimate

    args.vocabulary = estimate(args.container, ctx=1).n_tokens
    size = args.gguf.stat().st_size
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}")
    print(f"{args.container.name} against {args.gguf.name}, {size / MB:.0f} MB;", end=" ")
    print(f"{args.threads} threads, {args.io_threads} reads at once")
    print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
    for path in (args.container, args.gguf):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # dirty pages could not be dropped
    with tempfile.TemporaryDirectory() as folder:
        store_bench = args.store_bench or build_store_bench(Path(folder))
        for share in map(float, args.share.split(",")):
            with capped(int(size * share) // 4096 * 4096) as cap:
                print(
                    f"\n{100 * share:.0f} % of the file: cap {cap.limit / MB:.0f} MB (cgroup",
                    end=" ",
                )
                print(f"{cap.version}), --ram-budget {budget_of(cap) / MB:.0f} MB")
                rounds = []
                for number in range(args.rounds):
                    print(f"round {number + 1}", flush=True)
                    rounds.append(run_round(args, cap, store_bench, number))
                show_table(rounds)


if __name__ == "__main__":
    main()
