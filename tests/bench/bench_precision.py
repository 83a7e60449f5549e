"""Fast precision and small KV types against exact with float32 KV: KL, top-1, perplexity.

usage: bench_precision.py MODEL.colibri [MODEL.colibri ...] --tokenizer TOKENIZER.json
                          --text FILE... [--window 512] [--tokens 4096] [--threads 2]
                          [--kv-of MODEL.colibri]

The models are one set of weights in several types; docs/performance.md says how they are made. The
texts are cut into windows, each a sequence of its own. Both sides compute with the same weights, so
that what is measured is the arithmetic alone. Every model gets a row for fast precision as it is by
default (KV f16) and one for fast with KV f32; --kv-of names the model whose KV types are measured
in exact precision too. Prints machine, settings, what types each file has, and a table.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_run import cpu_name
from tokenizers import Tokenizer

from colibri_tools.engine import Engine, Logits
from colibri_tools.inspect import inspect

HEAD = (
    "| weights | arithmetic, KV | KL mean | median | 99 % | top-1 | other experts "
    "| perplexity, exact | here |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)

FAST = ({"precision": "fast", "kv_type": "f16"}, {"precision": "fast", "kv_type": "f32"})
KV = tuple({"precision": "exact", "kv_type": name} for name in ("f16", "q8_0", "q4_0"))


@dataclass
class Tally:
    """Per position: KL(exact || here), whether the likeliest token is the same, losses in nats.

    `others` is the share of chosen experts that the other side did not choose, per window.
    """

    kl: list[npt.NDArray[np.float64]] = field(default_factory=list)
    same: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    exact_loss: list[npt.NDArray[np.float64]] = field(default_factory=list)
    loss: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def add(self, exact: Logits, here: Logits, window: Sequence[int]) -> None:
        """Take in one window: logits float32 [positions, vocab] of both sides."""
        p, q = log_softmax(exact), log_softmax(here)
        self.kl.append((np.exp(p) * (p - q)).sum(-1))
        self.same.append(p.argmax(-1) == q.argmax(-1))
        at = np.arange(len(window) - 1), np.array(window[1:])
        self.exact_loss.append(-p[at])
        self.loss.append(-q[at])

    def row(self, name: str, options: dict[str, str]) -> str:
        kl, same = np.concatenate(self.kl), np.concatenate(self.same)
        perplexity = [np.exp(np.concatenate(x).mean()) for x in (self.exact_loss, self.loss)]
        return (
            f"| {name} | {options['precision']}, {options['kv_type']} | {kl.mean():.1e} "
            f"| {np.median(kl):.1e} | {np.quantile(kl, 0.99):.1e} | {100 * same.mean():.2f} % "
            f"| {100 * np.mean(self.others):.2f} % | {perplexity[0]:.3f} | {perplexity[1]:.3f} |"
        )


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def windows(args: argparse.Namespace) -> list[list[int]]:
    """Windows of each text in turn, whole ones only, as many as --tokens allows."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    tokenizer.no_truncation()
    by_text = [cut(tokenizer.encode(p.read_text()).ids, args.window) for p in args.text]
    most = max(map(len, by_text))
    found = [w[i] for i in range(most) for w in by_text if i < len(w)]
    if not found:
        raise SystemExit(f"no text has {args.window} tokens")
    return found[: max(1, args.tokens // args.window)]


def cut(ids: list[int], n: int) -> list[list[int]]:
    return [ids[i : i + n] for i in range(0, len(ids) - n + 1, n)]


def other_choices(a: Engine, b: Engine) -> float:
    """Share of b's choices, of experts [layers, positions, top_k], that a did not make."""
    assert a.choices is not None and b.choices is not None
    found = (b.choices[..., :, None] == a.choices[..., None, :]).any(-1)
    return float(1 - found.mean())


def matrix_types(path: Path) -> str:
    """What a container consists of, by bytes: "q8_0 99.1 %, f32 0.9 %"."""
    by_type = inspect(path).summary["types"]
    n_bytes = {name: sum(uses.values()) for name, uses in by_type.items()}
    whole = sum(n_bytes.values())
    shown = sorted(n_bytes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * n / whole:.1f} %" for name, n in shown)


def measure(path: Path, sides: Sequence[dict[str, str]], args: argparse.Namespace) -> list[str]:
    """Rows of the table for one model."""
    common: dict[str, Any] = {"ctx": args.window, "threads": args.threads, "check": "never"}
    common["io"] = "buffered"  # several engines read the same file
    tallies = [Tally() for _ in sides]
    engines = [Engine(path, **options, **common) for options in sides]
    with Engine(path, precision="exact", kv_type="f32", **common) as exact:
        for window in args.windows:
            expected = exact.forward(window, trace=True)
            for tally, engine in zip(tallies, engines, strict=True):
                tally.add(expected, engine.forward(window, trace=True), window)
                tally.others.append(other_choices(exact, engine))
    for engine in engines:
        engine.close()
    pairs = zip(tallies, sides, strict=True)
    return [tally.row(path.stem, options) for tally, options in pairs]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-of", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.windows = windows(args)
    with Engine(args.models[0], ctx=1, check="never") as engine:
        kernels = engine.info.kernels
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, {platform.system()}; kernels {kernels}")
    print(f"{len(args.windows)} windows of {args.window} tokens")
    for path in args.models:
        print(f"{path.name}: {matrix_types(path)}")
    print(f"\n{HEAD}", flush=True)
    for path in args.models:
        sides = [*FAST, *(KV if path == args.kv_of else ())]
        for row in measure(path, sides, args):
            print(row, flush=True)


if __name__ == "__main__":
    main()
