"""repack against `cp` of the same bytes: interleaved, cold, both through `sync -f`.

usage: bench_repack.py MODEL OUT_DIR [--pairs 3]     (as root: it drops the page cache)

MODEL is a directory or file that repack takes, e.g. of tests/bench/make_model.py. Each pair runs
cp, then repack; before each, the page cache is dropped. Prints every run, the medians, their ratio
and repack's peak RSS. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def timed(call: list[str], out: Path) -> tuple[float, int]:
    """Return wall seconds until `out`'s file system holds everything, and the peak RSS in bytes."""
    drop_caches()
    start = time.monotonic()
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{call[0]} failed with status {status}")
    subprocess.run(["sync", "-f", str(out)], check=True)
    return time.monotonic() - start, usage.ru_maxrss * 1024


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    model: Path = args.model
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    n_bytes = sum(file.stat().st_size for file in files)
    copy, out = args.out_dir / "copy", args.out_dir / "bench.colibri"
    code = "from colibri_tools.cli import main; main()"
    commands = {
        "cp": (["cp", "-r", str(model), str(copy)], copy),
        "repack": (
            [sys.executable, "-c", code, "repack", str(model), "-o", str(out), "-q"],
            out,
        ),
    }
    print(f"{platform.machine()}, {os.cpu_count()} cores, {n_bytes / 1e9:.2f} GB source")
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peak = 0
    for pair in range(args.pairs):
        for name, (call, target) in commands.items():
            remove(target)
            elapsed, rss = timed(call, target)
            seconds[name].append(elapsed)
            peak = max(peak, rss) if name == "repack" else peak
            rate = n_bytes / elapsed / 1e6
            print(f"pair {pair + 1}: {name:<7} {elapsed:7.2f} s  {rate:7.0f} MB/s", flush=True)
        remove(copy)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = sorted(r / c for c, r in zip(seconds["cp"], seconds["repack"], strict=True))
    print(f"median: cp {medians['cp']:.2f} s, repack {medians['repack']:.2f} s")
    print(f"repack / cp by pair: {', '.join(f'{r:.2f}' for r in ratios)}")
    print(f"ratio of medians: {medians['repack'] / medians['cp']:.2f}")
    print(f"peak RSS of repack: {peak / 1e6:.0f} MB")
    remove(out)


if __name__ == "__main__":
    main()
