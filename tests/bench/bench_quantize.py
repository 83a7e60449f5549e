"""quantize beside llama-quantize: the same source, threads and types, cold, both through fsync.

usage: bench_quantize.py MODEL.gguf OUT_DIR --peer LLAMA_QUANTIZE [--container MODEL.colibri]
                         [--types q4_k ...] [--threads 2] [--rounds 1] [--effort normal]
                         (as root: it drops the page cache)

Each round runs, for each type, the peer on MODEL.gguf and `colibri repack --type` on it, or
`colibri quantize` on the container where one is given; before each, the page cache is dropped, and
each is timed until `sync -f` returns. Both encode every matrix as one type (--pure for the peer;
its output and embedding too, where it has an option for it). MB/s are of the source. With --copy
the drive is timed as well: `cp` of the source, the bound of all that reads and writes. Prints
every run and a table of medians; nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

TYPES = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip
PEER_NAMES = {
    "q2_k": "Q2_K", "q3_k": "Q3_K_S", "q4_k": "Q4_K_S", "q5_k": "Q5_K_S", "mxfp4": "MXFP4_MOE"
}  # fmt: skip
COLIBRI = [sys.executable, "-c", "from colibri_tools.cli import main; main()"]


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def timed(call: list[str], out: Path, cold: bool, folder: Path | None = None) -> tuple[float, int]:
    """Return wall seconds until `out`'s file system holds everything, and the peak RSS in bytes."""
    out.unlink(missing_ok=True)
    if cold:
        drop_caches()
    environment = os.environ | ({} if folder is None else {"LD_LIBRARY_PATH": str(folder)})
    start = time.monotonic()
    process = subprocess.Popen(
        call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(call)} failed with status {status}")
    subprocess.run(["sync", "-f", str(out.parent)], check=True)
    return time.monotonic() - start, usage.ru_maxrss * 1024


def peer_call(args: argparse.Namespace, name: str, out: Path) -> list[str]:
    peer_name = PEER_NAMES.get(name, name.upper())
    return [str(args.peer), "--pure", str(args.model), str(out), peer_name, str(args.threads)]


def our_call(args: argparse.Namespace, name: str, out: Path) -> list[str]:
    source = args.container or args.model
    verb = "quantize" if args.container else "repack"
    options = ["--type", name, "--threads", str(args.threads), "--effort", args.effort, "-q"]
    return [*COLIBRI, verb, str(source), "-o", str(out), *options]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--container", type=Path)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--warm", action="store_true", help="keep the page cache")
    parser.add_argument("--copy", action="store_true", help="time cp of the source too")
    args = parser.parse_args()
    n_bytes = args.model.stat().st_size
    theirs, ours = args.out_dir / "bench-peer.gguf", args.out_dir / "bench-ours.colibri"
    print(
        f"{platform.machine()}, {args.threads} threads, {n_bytes / 1e9:.2f} GB source, "
        f"{'warm' if args.warm else 'cold'}, effort {args.effort}, "
        f"{'quantize of a container' if args.container else 'repack of the GGUF'}"
    )
    if args.copy:
        seconds, _ = timed(["cp", str(args.model), str(theirs)], theirs, not args.warm)
        print(f"cp: {seconds:.2f} s, {n_bytes / seconds / 1e6:.0f} MB/s", flush=True)
    seconds_of: dict[tuple[str, str], list[float]] = {}
    peak = 0
    for turn in range(args.rounds):
        for name in args.types:
            for who, call, out, folder in (
                ("peer", peer_call(args, name, theirs), theirs, args.peer.parent),
                ("colibri", our_call(args, name, ours), ours, None),
            ):
                seconds, rss = timed(call, out, not args.warm, folder)
                peak = max(peak, rss) if who == "colibri" else peak
                seconds_of.setdefault((name, who), []).append(seconds)
                rate = n_bytes / seconds / 1e6
                size = out.stat().st_size / 1e6
                print(
                    f"round {turn + 1} {name:<7} {who:<8} {seconds:8.2f} s {rate:7.1f} MB/s, "
                    f"{size:.0f} MB made",
                    flush=True,
                )
    print("\n| type | llama-quantize MB/s | colibri MB/s | times |\n| --- | ---: | ---: | ---: |")
    for name in args.types:
        peer, own = (statistics.median(seconds_of[name, who]) for who in ("peer", "colibri"))
        rates = [n_bytes / seconds / 1e6 for seconds in (peer, own)]
        print(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {peer / own:.1f} |")
    print(f"peak RSS of colibri: {peak / 1e6:.0f} MB")
    for path in (theirs, ours):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
