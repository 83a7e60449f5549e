"""Orders of blocks, with and without preloading, on text like the profile and unlike it; and what
`simulate` predicts beside what is measured.

usage: bench_order.py [--out bench_order.md] [--folder .] [--minutes 14] [--rounds 3] [--pairs 4]
                      [--idle 15] [--sizes 100K,400K,1500K,5M] [--scale 1.0] [--cache 0.33]
                      [--threads 2] [--model FILE]... [--tokens 96]

For each block size a random model of 0.9 to 1.5 GB is written whose routers answer to the token: an
embedding is a direction of its own, plus one that all tokens of its half of the vocabulary share,
plus one that all tokens share, and attention and experts are small beside it. So a token chooses
much the same experts wherever it stands, tokens of one half resemble each other (domains), and some
experts are liked by all. A text draws tokens of one half by Zipf's law, so that it has hot experts
which a profile can learn: "like" texts are of the half that was profiled, other tokens drawn;
"unlike" ones of the other half. `--cache` is the share of all experts that the cache holds: enough
is missed that the drive decides.

The model is profiled and reordered. First come --pairs of a prediction and a measurement: the first
tokens of the profile's trace are simulated, for which the drive, the first use of memory and
computing are measured, and then decoded, in the order `id` without preloading. Both are processes
of their own behind --idle seconds in which nothing runs, as a user would start them: by then a
virtual machine may have given free memory back to its host. Another prediction follows the last
measurement, so that each one lies between two. Where these differ by more than a tenth, the machine
was not the same before and after, and the pair is in brackets. Nothing is left out.

With --model, which may be given several times, there are pairs of these containers instead, on
--tokens tokens of Zipf's law over the vocabulary, and no rounds.

Then, unless --rounds is 0, every order x preload x text decodes the same tokens one by one, in
turns, round after round, each in a process of its own whose memory is the cache and 512 MiB (a
control group, where this is root's to make), the container's pages dropped from the page cache
before it, and as much memory as the cache has used once, so that runs meet the same memory.

--out is written anew after the pairs and every round, so that what is there when it is interrupted
is sound. Rounds end when a size has had its share of --minutes. Containers are removed; the disk
needs four times the largest model, 6 GB. tokens/s counts decoding only; preloading is in the time
of opening. Reads are system calls that read, and bytes are those the drive was asked for, both per
decoded token. No prefetching but in the line that says so. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_run import cpu_name

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
from colibri_tools.engine import Engine, estimate
from colibri_tools.errors import ColibriError
from colibri_tools.output import format_bytes, parse_size
from colibri_tools.profile.file import load_profile
from colibri_tools.profile.profiling import profile_routing
from colibri_tools.profile.report import ordering_benefit
from colibri_tools.profile.simulate import simulate
from colibri_tools.profile.stats import coverage, held_out
from colibri_tools.rewrite import reorder

HIDDEN, HEADS, HEAD_DIM, VOCAB = 512, 2, 64, 2048
ORDERS = ("id", "hotness", "layer-hotness", "coactivation")
TEXTS = ("like", "unlike")
ZIPF = 1.0
DOMAIN, COMMON = 0.6, 0.4  # beside a token's own direction, of 1
BESIDE_CACHE = 512 << 20
STEADY = 1.1  # one prediction over another, of a machine that did not change


@dataclass(frozen=True)
class Shape:
    """A model by its block size, at scale 1; `n_tokens` are decoded."""

    width: int
    n_layers: int
    n_experts: int
    top_k: int
    n_tokens: int

    def scaled(self, scale: float) -> Shape:
        """Fewer layers and experts."""
        layers, experts = (round(n * scale) for n in (self.n_layers, self.n_experts))
        return replace(self, n_layers=max(2, layers), n_experts=max(2 * self.top_k, experts))


SHAPES = {
    100 << 10: Shape(64, 32, 256, 8, 96),
    400 << 10: Shape(256, 16, 128, 8, 96),
    1500 << 10: Shape(960, 10, 80, 8, 48),
    5 << 20: Shape(3200, 5, 56, 4, 48),
}


# --- the model ------------------------------------------------------------------------------------


def spec_of(shape: Shape) -> dict[str, Any]:
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
        "windows": [0] * shape.n_layers,
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
        "n_layers": shape.n_layers,
        "n_mtp_layers": 0,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "context_length": 4096,
        "top_k": shape.top_k,
        "expert_width": shape.width,
        "total_params": 1,
        "active_params": 1,
        "moe_layers": [1] * shape.n_layers,
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
        for role in (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V):
            shapes.append((role, layer, (HEADS * HEAD_DIM, HIDDEN)))
        shapes.append((Role.ATTN_O, layer, (HIDDEN, HEADS * HEAD_DIM)))
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


def embedding(random: np.random.Generator) -> Any:
    """float32 [vocabulary, hidden]: tokens, their domain and what they have in common."""
    own = random.standard_normal((VOCAB, HIDDEN), np.float32)
    domains = random.standard_normal((2, HIDDEN), np.float32)
    common = random.standard_normal(HIDDEN, np.float32)
    values = own + COMMON * common
    for domain, kind in zip(domains, TEXTS, strict=True):
        values[half_of(kind)] += DOMAIN * domain
    return values


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
        spec=spec_of(shape),
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
            elif item.role == Role.TOKEN_EMBD:
                values = embedding(random)
            elif item.role != Role.ROUTER:
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


def half_of(kind: str) -> Any:
    """The ids that texts of a kind are made of."""
    ids = np.random.default_rng(99).permutation(VOCAB)
    return ids[: VOCAB // 2] if kind == "like" else ids[VOCAB // 2 :]


def text(kind: str, n: int, seed: int) -> list[int]:
    """Tokens of a Zipf distribution over one half of the vocabulary or the other."""
    own = half_of(kind)
    chance = 1 / np.arange(1, len(own) + 1) ** ZIPF
    drawn = np.random.default_rng(seed).choice(len(own), n, p=chance / chance.sum())
    return [int(i) for i in own[drawn]]


# --- one measurement, in a process of its own -----------------------------------------------------


def read_calls() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("syscr:"):
            return int(line.split()[1])
    raise SystemExit("/proc/self/io has no syscr")


def touch(n_bytes: int) -> None:
    """Have the kernel find so much memory, and give it back."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, n_bytes, mmap.PAGESIZE):
            pages[at] = 1


def predict(job: dict[str, Any]) -> dict[str, Any]:
    """Simulate and return what matters of it. `job` is what `run_job` was asked for."""
    profile = load_profile(Path(job["profile"]))
    choices = job["n_tokens"] * profile.n_rows * profile.top_k
    found = simulate(job["profile"], job["path"], expert_cache=[job["cache"]], max_choices=choices)
    if found.rate is None or found.compute is None:
        raise SystemExit(f"nothing was measured: {found.notes}")
    return {
        "tokens_per_second": found.results[0].tokens_per_second,
        "hit_rate": found.results[0].hit_rates["engine"],
        "bytes_per_second": found.rate.bytes_per_second,
        "filling": found.rate.filling_seconds_per_byte,
        "notes": [note for note in found.notes if "of the trace" not in note],
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Decode and return what it took. `job` is what `run_job` was asked for."""
    tokens = job["tokens"]
    if job["touch"]:
        touch(job["cache"])
    opening = time.perf_counter()
    with Engine(
        job["path"],
        threads=job["threads"],
        expert_cache=job["cache"],
        ctx=len(tokens),
        precision="fast",
        preload=job["cache"] if job["preload"] else 0,
        prefetch_depth=job["prefetch"],
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


def drop_pages(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # dirty pages could not be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(100):  # a child that was killed leaves it a moment later
            if self.path is None or not self.path.exists():
                return
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)
        print(f"{self.path}: cannot be removed", file=sys.stderr)


def run_job(job: dict[str, Any], limit: Limit | None) -> dict[str, Any]:
    """What `measure` finds, or `predict` where the job has a profile."""
    drop_pages(Path(job["path"]))
    done = subprocess.run(
        [sys.executable, __file__, "--job"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=None if limit is None else limit.enter,
    )
    if done.returncode:
        raise SystemExit(f"a measurement failed: {done.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- one size -------------------------------------------------------------------------------------


@dataclass
class Results:
    """What was measured of one size or model: rows of tables, made anew after each round."""

    name: str
    about: str = ""
    found: dict[tuple[str, bool, str], list[dict[str, Any]]] = field(default_factory=dict)
    n_rounds: int = 0
    predicted: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    prefetched: list[float] = field(default_factory=list)

    def rows(self) -> list[str]:
        """The table of orders: a line for each, on text like the profile and unlike it."""
        if not self.n_rounds:
            return []
        return [
            f"| {self.name} | {'yes' if preload else 'no'} | {order} | "
            + " | ".join(_cells(self.found[order, preload, kind]) for kind in TEXTS)
            + " |"
            for preload in (False, True)
            for order in ORDERS
        ]

    def prediction_rows(self) -> list[str]:
        """Predicted and measured: medians of all pairs, and how far apart each pair is."""
        if not self.measured:
            return []
        predicted = [float(p["tokens_per_second"]) for p in self.predicted]
        measured = [float(m["tokens_per_second"]) for m in self.measured]
        off = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=False)]
        steady = [max(pair) / min(pair) <= STEADY for pair in pairwise(predicted)]
        each = (f"{x:+.0f}" if same else f"({x:+.0f})" for x, same in zip(off, steady, strict=True))
        drive = [p["bytes_per_second"] / 1e9 for p in self.predicted]
        filling = [1e-9 / (1 / p["bytes_per_second"] + p["filling"]) for p in self.predicted]
        simulated, found = self.predicted[0], self.measured[0]
        waiting = statistics.median(float(m["wait_share"]) for m in self.measured)
        return [
            f"| {self.name} | {statistics.median(predicted):.1f} | "
            f"{statistics.median(measured):.1f} | {statistics.median(off):+.0f} % | "
            f"{', '.join(each)} | "
            f"{simulated['hit_rate']:.2%} | {found['hit_rate']:.2%} | {waiting:.0%} | "
            f"{statistics.median(drive):.2f} ({min(drive):.2f}-{max(drive):.2f}) | "
            f"{statistics.median(filling):.2f} ({min(filling):.2f}-{max(filling):.2f}) |"
        ]

    def prefetch_line(self) -> str:
        """What reading ahead gives, beside the row of `id` without preloading on like text."""
        if not self.prefetched:
            return ""
        return f"{self.name} {statistics.median(self.prefetched):.1f}"


def _cells(results: list[dict[str, Any]]) -> str:
    def median(key: str) -> float:
        return statistics.median(float(result[key]) for result in results)

    speeds = sorted(float(result["tokens_per_second"]) for result in results)
    return (
        f"{median('tokens_per_second'):.1f} ({speeds[0]:.1f}-{speeds[-1]:.1f}) | "
        f"{median('reads'):.1f} | {format_bytes(int(median('bytes')))} | "
        f"{median('hit_rate'):.1%} | {median('wait_share'):.0%} | {median('open_seconds'):.2f}"
    )


@dataclass(frozen=True)
class Prepared:
    """A model in every order, its profile and that one's text, of which `n_tokens` are decoded."""

    paths: dict[str, Path]
    profile: Path
    text: list[int]
    n_tokens: int
    all_bytes: int
    about: str


def prepare(
    folder: Path, name: str, path: Path, tokens: list[int], n_tokens: int, orders: Sequence[str]
) -> Prepared:
    """Profile the container `path` on `tokens` and write it in the orders but the first."""
    paths = {ORDERS[0]: path} | {o: folder / f"{name}-{o}.colibri" for o in orders[1:]}
    ids, profile = folder / f"{name}.ids", folder / f"{name}.profile"
    ids.write_text(",".join(map(str, tokens)))
    files = [("like", ids)]
    result = profile_routing(
        path, profile, token_files=files, trace=True, force=True, precision="fast"
    )
    p = result.report.profile
    for order in orders[1:]:
        reorder(path, paths[order], routing=profile, order=order, force=True)
    for each in paths.values():
        drop_pages(each)
    with Engine(path, ctx=8, threads=1) as engine:
        info, all_bytes = engine.info, engine.memory.all_experts_bytes
    benefit = ordering_benefit(coverage(p.counts(), p.mask()), held_out(p))[1]
    about = (
        f"{info.n_moe_layers} layers x {info.max_experts} experts, top {info.top_k}, {n_tokens} "
        f"tokens; experts {format_bytes(all_bytes)}; {benefit}"
    )
    return Prepared(paths, profile, tokens, n_tokens, all_bytes, about)


def zipf_text(path: Path, n: int) -> list[int]:
    """Tokens of Zipf's law over the whole vocabulary of a container."""
    vocab = estimate(path).vocab_size
    random = np.random.default_rng(1)
    ids = random.permutation(vocab)
    chance = 1 / np.arange(1, vocab + 1) ** ZIPF
    return [int(i) for i in ids[random.choice(vocab, n, p=chance / chance.sum())]]


def run_pairs(
    args: argparse.Namespace, results: Results, model: Prepared, cache: int, limit: Limit
) -> None:
    """Simulate the first tokens of the trace and decode them, by turns; simulate once more."""
    path = model.paths[ORDERS[0]]
    for i in range(2 * args.pairs + 1 if args.pairs else 0):
        time.sleep(args.idle if i else 2 * args.idle)  # the page cache had more than a run frees
        job = {"path": str(path), "cache": cache}
        if i % 2:
            job |= {"preload": False, "tokens": model.text[: model.n_tokens], "touch": False}
            job |= {"threads": args.threads, "prefetch": 0}
            results.measured.append(run_job(job, limit))
            what, found = "measured", results.measured[-1]
        else:
            job |= {"profile": str(model.profile), "n_tokens": model.n_tokens}
            results.predicted.append(run_job(job, None))
            what, found = "predicted", results.predicted[-1]
        speed = f"{found['tokens_per_second']:.1f} tokens/s"
        notes = "; ".join(("", *found.get("notes", ())))
        print(f"{results.name}: {what} {speed}{notes}", file=sys.stderr, flush=True)


def run_round(
    args: argparse.Namespace, results: Results, model: Prepared, cache: int, limit: Limit
) -> None:
    job: dict[str, Any] = {"cache": cache, "threads": args.threads, "prefetch": 0, "touch": True}
    for kind in TEXTS:
        job["tokens"] = text(kind, model.n_tokens, seed=100 + results.n_rounds)
        for preload in (False, True):
            for order in ORDERS:
                job |= {"path": str(model.paths[order]), "preload": preload}
                results.found.setdefault((order, preload, kind), []).append(run_job(job, limit))
    job |= {"path": str(model.paths["id"]), "preload": False, "prefetch": 1}
    job["tokens"] = text("like", model.n_tokens, seed=100 + results.n_rounds)
    results.prefetched.append(run_job(job, limit)["tokens_per_second"])
    results.n_rounds += 1


def bench(
    args: argparse.Namespace, results: Results, model: Prepared, end: float
) -> Iterator[None]:
    """Measure pairs, and rounds until `end`, one at least. Yields after pairs and each round."""
    cache = int(args.cache * model.all_bytes)
    with Limit(cache + BESIDE_CACHE) as limit:
        where = "none" if limit.path is None else format_bytes(cache + BESIDE_CACHE)
        results.about = (
            f"- {results.name}: {model.about}; cache {format_bytes(cache)}, memory limit {where}"
        )
        run_pairs(args, results, model, cache, limit)
        yield
        for _ in range(args.rounds):
            start = time.monotonic()
            run_round(args, results, model, cache, limit)
            backend = next(iter(results.found.values()))[0]["backend"]
            print(f"{results.name}: round {results.n_rounds}, read by {backend}", file=sys.stderr)
            yield
            if time.monotonic() + (time.monotonic() - start) > end:
                break


def models(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Prepared]]:
    """The models to measure, one after the other; those that are made are removed again."""
    for path in args.model:
        tokens = zipf_text(path, args.tokens)
        yield path.stem, prepare(folder, path.stem, path, tokens, args.tokens, ORDERS[:1])
    for size in [] if args.model else args.sizes:
        name, shape = format_bytes(size), SHAPES[size].scaled(args.scale)
        path = folder / f"{name}-{ORDERS[0]}.colibri"
        write_model(path, shape)
        orders = ORDERS if args.rounds else ORDERS[:1]
        tokens = text("like", args.profiled, seed=1)
        model = prepare(folder, name, path, tokens, shape.n_tokens, orders)
        yield name, model
        for each in model.paths.values():
            each.unlink()


# --- all of them ----------------------------------------------------------------------------------

ORDERS_HEAD = "\n".join(
    (
        "",
        "|  |  |  | like |  |  |  |  |  | unlike |  |  |  |  |  |",
        "| --- | --- | --- |" + 12 * " ---: |",
        "| block | preload | order |"
        + 2 * " tokens/s (range) | reads | bytes | hits | wait | open, s |",
    )
)

PREDICTED_HEAD = """
| block | predicted tokens/s | measured | off | each, % | simulated hits | found | wait | GB/s | filling |
| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"""  # noqa: E501


def write_tables(out: Path, args: argparse.Namespace, all_results: list[Results]) -> None:
    ahead = ", ".join(filter(None, (r.prefetch_line() for r in all_results)))
    lines = [
        f"{cpu_name()}, {os.cpu_count()} CPUs, {args.threads} threads, Python "
        f"{platform.python_version()}; load average {os.getloadavg()[0]:.1f}; rounds: "
        + ", ".join(f"{r.name} {r.n_rounds}" for r in all_results),
        "",
        *(r.about for r in all_results),
        *([ORDERS_HEAD] if args.rounds else []),
        *(row for r in all_results for row in r.rows()),
        "",
        *([f"With --prefetch-depth 1: {ahead} tokens/s"] if ahead else []),
        *([PREDICTED_HEAD] if args.pairs else []),
        *(row for r in all_results for row in r.prediction_rows()),
    ]
    out.write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench_order.md"))
    parser.add_argument("--folder", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--sizes", default="100K,400K,1500K,5M")
    parser.add_argument("--scale", type=float, default=1.0, help="of experts and layers")
    parser.add_argument("--profiled", type=int, default=2048, help="tokens of the profile")
    parser.add_argument("--rounds", type=int, default=3, help="of all orders")
    parser.add_argument("--pairs", type=int, default=4, help="of a prediction and a measurement")
    parser.add_argument("--idle", type=float, default=15.0, help="seconds before each of these")
    parser.add_argument("--cache", type=float, default=0.33, help="share of all experts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, action="append", default=[], help="pairs of it")
    parser.add_argument("--tokens", type=int, default=96, help="of --model")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.job:
        job = json.load(sys.stdin)
        print(json.dumps(predict(job) if "profile" in job else measure(job)))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up
    deadline = time.monotonic() + 60 * args.minutes
    args.sizes = list(map(parse_size, args.sizes.split(",")))
    if not set(args.sizes) <= SHAPES.keys():
        raise SystemExit(f"--sizes: expected some of {', '.join(map(format_bytes, SHAPES))}")
    for name, least in (("pairs", 0), ("rounds", 0), ("idle", 0), ("tokens", 1)):
        if not getattr(args, name) >= least:
            raise SystemExit(f"--{name}: expected at least {least}, found {getattr(args, name)}")
    if args.model and args.rounds:
        raise SystemExit("--model: give --rounds 0, as there are pairs only")
    left = len(args.model or args.sizes)
    all_results: list[Results] = []
    with tempfile.TemporaryDirectory(prefix="bench-order-", dir=args.folder) as folder:
        for name, model in models(args, Path(folder)):
            all_results.append(Results(name))
            end = time.monotonic() + (deadline - time.monotonic()) / left
            for _ in bench(args, all_results[-1], model, end):
                write_tables(args.out, args, all_results)
            left -= 1
    print(args.out.read_text(), end="")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ColibriError as error:
        sys.exit(f"error: {error.message}")
