"""What quantizing costs in quality, beside llama-quantize's files of the same type.

usage: bench_quality.py MODEL GGUF OUT_DIR --peer LLAMA_QUANTIZE --text F... [--types q4_k_m ...]
                        [--importance P] [--imatrix M.gguf] [--ctx 512]

MODEL is a checkpoint of Hugging Face, GGUF the same weights in bf16 (llama.cpp's converter makes
it). Each type is made by `colibri quantize` and by the peer, both are containers then, and both go
through `colibri compare` with the bf16 container: one engine, exact precision, the same tokens.
Prints a Markdown table. Nothing is asserted. The peer runs with its folder as LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from colibri_tools.compare import CompareResult, compare
from colibri_tools.quantize.encoding import Encoding
from colibri_tools.quantize.rules import make_policy
from colibri_tools.repack import repack
from colibri_tools.rewrite import quantize

# Where the names differ: the peer's type, and what must be said to get one type for all.
PEER_NAMES = {"q6_k": ("Q6_K", ()), "mxfp4": ("MXFP4_MOE", ())}


def peer_file(peer: Path, source: Path, out: Path, name: str, imatrix: Path | None) -> None:
    """Make the peer's GGUF of a type."""
    their_name, options = PEER_NAMES.get(name, (name.upper(), ()))
    more = () if imatrix is None else ("--imatrix", str(imatrix))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(peer.parent)}
    call = [str(peer), *options, *more, str(source), str(out), their_name, "2"]
    subprocess.run(call, env=environment, check=True, capture_output=True)


def row(name: str, who: str, result: CompareResult) -> str:
    """One line of the table."""
    w, b = result.whole, result.b
    return (
        f"| {name} | {who} | {b.file_bytes / 1e6:.1f} | {b.bits_per_weight:.3f} | "
        f"{w.perplexity_b:.4f} | {w.perplexity_a:.4f} | {w.kl_mean:.6f} | {w.kl_99:.5f} | "
        f"{w.top1_agreement:.2%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--types", nargs="+", default=["q4_k_m", "q5_k_m", "q6_k"])
    parser.add_argument("--importance", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--ctx", type=int, default=512)
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    whole, ours, theirs, their_gguf = (
        args.out_dir / name for name in ("a.colibri", "ours.colibri", "peer.colibri", "peer.gguf")
    )
    repack(args.model, whole, force=True)
    print("| type | by | MB | bits | perplexity | of bf16 | KL mean | KL 99 % | top-1 |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in args.types:
        encoding = Encoding(make_policy(name), args.effort)
        quantize(whole, ours, encoding, importance=args.importance, force=True)
        peer_file(args.peer, args.gguf, their_gguf, name, args.imatrix)
        repack(their_gguf, theirs, force=True)
        for who, path in (("colibri", ours), ("llama-quantize", theirs)):
            print(row(name, who, compare(whole, path, text=args.text, ctx=args.ctx)), flush=True)
    for path in (whole, ours, theirs, their_gguf):
        path.unlink()


if __name__ == "__main__":
    main()
