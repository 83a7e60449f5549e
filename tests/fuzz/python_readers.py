"""Fuzz the Python readers, guided by the lines they execute.

`python_readers.py --seconds 60 --folder build/fuzz` shares the time between safetensors headers,
index files, GGUF headers and containers. Only ColibriError may escape, within the bounds of time
and memory below; a container must be accepted exactly if the C reader accepts it. Whatever breaks
this is written to the folder, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import resource
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import sources_util as su

from colibri_tools.container.reader import open_bytes
from colibri_tools.errors import ColibriError
from colibri_tools.sources.files import RangeFile
from colibri_tools.sources.gguf_header import parse_gguf_metadata, read_gguf_header
from colibri_tools.sources.hf import MAIN_INDEX, open_hf_folder
from colibri_tools.sources.safetensors_header import read_header

MAX_SECONDS = 1.0
MAX_GROWTH = 200 << 20
MAX_INPUT = 1 << 14
CORPUS_FILES = 2000

# -- memory in place of a disk ---------------------------------------------------------------------


@dataclass
class MemoryFile:
    """A RangeFile over bytes."""

    name: str
    data: bytes
    identity: tuple[int, int] | None = None
    blob_sha256: str | None = None

    @property
    def path(self) -> str:
        """The name, which is the path."""
        return self.name

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.data)

    def read_into(self, offset: int, out: memoryview, what: str) -> None:
        """Fill `out`; a reader that asks for more than there is has not looked at the size."""
        assert offset >= 0 and offset + len(out) <= len(self.data), (what, offset, len(out))
        out[:] = self.data[offset : offset + len(out)]

    def check_unchanged(self) -> None:
        """It never changes."""

    def advise_sequential(self) -> None:
        """Nothing to do."""

    def will_need(self, offset: int, n_bytes: int) -> None:
        """Nothing to do."""

    def drop(self, offset: int, n_bytes: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


@dataclass
class MemoryFolder:
    """A Folder over bytes by name."""

    files: dict[str, bytes]
    path: str = "memory"

    def names(self) -> Sequence[str]:
        """Sorted names."""
        return sorted(self.files)

    def unfinished(self) -> Sequence[str]:
        """None."""
        return ()

    def holds(self, name: str) -> bool:
        """True if there is such a file."""
        return name in self.files

    def open(self, name: str) -> RangeFile:
        """A file by name."""
        return MemoryFile(name, self.files[name])


# -- changes ---------------------------------------------------------------------------------------

INTEGERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 1024, 4095, 4096),
    *(65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 48, 1 << 60),
    *(1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
TEXTS = (
    *(b"null", b"true", b"-1", b"1e3", b"1.5", b"{}", b"[]", b'""', b'"\\ud800"', b'"\\u0000"'),
    *(b'"a\\\\"', b"NaN", b"[[[[]]]]", b'"../x"', b'"F32"', b'"U8"', b'"__metadata__"', b"-0"),
    *(b'"shape"', b'"dtype"', b'"data_offsets"', b"1" * 5000, b'"\xff"', '"é😀"'.encode(), b","),
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[0-9.eE+-]+|[A-Za-z]+|.', re.DOTALL)


def change_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change bytes anywhere: an integer, a bit, a piece cut, doubled or taken from `other`."""
    out = bytearray(data)
    at = rng.randrange(len(out) + 1)
    n = 1 << rng.randrange(6)
    way = rng.randrange(7)
    if way <= 1:
        width = 1 << rng.randrange(4)
        value = rng.choice(INTEGERS) + rng.choice((0, 0, 0, -1, 1))
        out[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    elif way == 2:
        out[at : at + 1] = bytes([rng.randrange(256)])
    elif way == 3:
        del out[at : at + n]
    elif way == 4:
        out[at:at] = out[at : at + n]
    elif way == 5 and other:
        start = rng.randrange(len(other))
        out[at : at + n] = other[start : start + n]
    elif at < len(out):
        out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def change_tokens(rng: random.Random, text: bytes, other: bytes) -> bytes:
    """Change JSON by tokens: another number or text, one gone, doubled, or from elsewhere."""
    tokens = _TOKEN.findall(text)
    if not tokens:
        return rng.choice(TEXTS)
    at = rng.randrange(len(tokens))
    way = rng.randrange(7)
    if way <= 1:
        tokens[at] = str(rng.choice(INTEGERS)).encode()
    elif way == 2:
        tokens[at] = rng.choice(TEXTS)
    elif way == 3:
        tokens[at] = rng.choice(tokens)
    elif way == 4:
        del tokens[at : at + 1 + rng.randrange(4)]
    elif way == 5:
        tokens[at:at] = tokens[at : at + 1 + rng.randrange(12)]
    else:
        found = _TOKEN.findall(other) or [b","]
        tokens[at] = rng.choice(found)
    return b"".join(tokens)


def change_safetensors(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change the header's JSON; the length in front, and mostly the size of the data, fit it."""
    if rng.randrange(8) == 0 or len(data) < 8:
        return change_bytes(rng, data, other)
    length = min(struct.unpack_from("<Q", data)[0], len(data) - 8)
    text = change_tokens(rng, data[8 : 8 + length], other[8:])
    return su.raw_safetensors(text, bytes(_data_bytes(text) if rng.randrange(4) else 12))


def _data_bytes(text: bytes) -> int:
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for entry in header.values() if "dtype" in entry]
        return int(max(0, min(max(ends, default=0), 4096)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return 0


# -- targets ---------------------------------------------------------------------------------------

Change = Callable[[random.Random, bytes, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """`run` raises ColibriError for what it refuses."""

    name: str
    seeds: Callable[[], list[bytes]]
    change: Change
    run: Callable[[bytes], object]


def safetensors_seeds() -> list[bytes]:
    """Small files: some types, metadata, an empty tensor, escapes in a name."""
    tensors = {
        "b": su.f32((2, 3)),
        "a\u00e9\\": su.StTensor("BF16", [2], bytes(4)),
        "c": su.StTensor("U8", [0, 4], b""),
    }
    return [
        su.safetensors_bytes(tensors, {"format": "pt"}, pad=3),
        su.safetensors_bytes({"x": su.StTensor("I64", [], bytes(8))}),
        su.safetensors_bytes({}),
    ]


def gguf_seeds() -> list[bytes]:
    """Small files with every kind of value, two types of tensors, another alignment."""
    kv = [
        ("general.architecture", "string", "llama"),
        ("general.alignment", "uint32", 64),
        ("a.flag", "bool", True),
        ("a.f", "float64", 0.5),
        ("a.words", "array", ("string", ["", "zwei", "drei"])),
        ("a.ids", "array", ("int32", [1, 2, 3])),
        ("a.flags", "array", ("bool", [True, False])),
    ]
    tensors = [
        su.gguf_f32("t.weight", (2, 8)),
        su.GgufTensorSpec("q.weight", [32, 2], 8, bytes(68)),
    ]
    plain = su.GgufSpec(kv[:1], tensors)
    return [
        su.gguf_bytes(su.GgufSpec(kv, tensors, alignment=64)),
        su.gguf_bytes(plain),
        su.gguf_bytes(su.GgufSpec(version=2)),
    ]


def read_gguf(data: bytes) -> None:
    """Read a header; its metadata has to parse a second time from the carried prefix."""
    header = read_gguf_header(MemoryFile("x.gguf", data))
    again = parse_gguf_metadata(header.prefix)
    assert list(again) == list(header.metadata)
    for value in header.metadata.values():
        if not isinstance(value, (str, int, float)):
            assert len(list(value)) == len(value)
    for tensor in header.tensors:
        assert header.data_offset <= tensor.offset
        assert tensor.offset + tensor.n_bytes <= len(data)


def read_safetensors(data: bytes) -> None:
    """Read a header; tensors have to cover the data area."""
    header = read_header(MemoryFile("x.safetensors", data))
    end = header.data_offset
    for tensor in header.tensors:
        assert tensor.offset == end and tensor.n_bytes >= 0
        end += tensor.n_bytes
    assert end == len(data)


SHARDS = {
    "a.safetensors": su.safetensors_bytes({"x": su.f32((2,)), "y": su.f32((1, 3))}),
    "b.safetensors": su.safetensors_bytes({"z": su.f32((2,))}),
    "config.json": b'{"model_type": "x"}',
}


def index_seeds() -> list[bytes]:
    """Indexes of the shards above, the second one with a tensor in the wrong place."""
    places = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    wrong = places | {"x": "b.safetensors"}
    metadata = {"total_size": 28}
    return [json.dumps({"metadata": metadata, "weight_map": m}).encode() for m in (places, wrong)]


def read_index(data: bytes) -> None:
    """Open the folder; every tensor lies within its file."""
    parts = open_hf_folder(MemoryFolder(SHARDS | {MAIN_INDEX: data}))
    for tensor in parts.tensors.values():
        assert tensor.offset + tensor.n_bytes <= len(SHARDS[parts.files[tensor.file].name])


def extend(data: bytes) -> tuple[bytes, int]:
    """The memory and the file size that an input of the C target stands for (mutate.h)."""
    if len(data) < 4096:
        return data, len(data)
    data_offset, file_size = (int.from_bytes(data[at : at + 8], "little") for at in (64, 40))
    if len(data) < data_offset <= 32768:
        data += bytes(data_offset - len(data))
    return data, file_size


def read_container(data: bytes) -> None:
    """Open a container's metadata and look at all of it."""
    container = open_bytes(*extend(data))
    container.accounting()
    for name in container.blobs:
        assert isinstance(container.blobs[name], bytes)
    for row, where in enumerate(container.rows):
        assert container.row_of(where.layer, where.stream) == row
        for expert in range(where.n_experts):
            cell = container.cell(row, expert)
            assert int(cell["offset"]) + int(cell["n_bytes"]) <= container.file_size
            assert container.layout_of(row, expert).n_bytes == int(cell["n_bytes"])


TARGETS = (
    Target("safetensors", safetensors_seeds, change_safetensors, read_safetensors),
    Target("index", index_seeds, change_tokens, read_index),
    Target("gguf", gguf_seeds, change_bytes, read_gguf),
)

# -- the loop --------------------------------------------------------------------------------------


class Lines:
    """The lines of the package that ran: `with lines: ...` adds to `seen`."""

    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if "colibri_tools" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.seen.add((frame.f_code, frame.f_lineno))
        return self._line


@dataclass
class Tally:
    """What became of a target's inputs."""

    name: str
    executions: int = 0
    accepted: int = 0
    slowest: float = 0.0
    lines: Lines = field(default_factory=Lines)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.executions} executions, {self.accepted} accepted, "
            f"{len(self.lines.seen)} lines, slowest {self.slowest:.3f} s"
        )


class Finding(AssertionError):
    """An input that does what none may do."""

    def __init__(self, target: str, data: bytes, what: str) -> None:
        super().__init__(f"{target}: {what}")
        self.target = target
        self.data = data


def execute(tally: Tally, run: Callable[[bytes], object], data: bytes) -> bool:
    """Return whether `run` accepts the input. Raises Finding."""
    tally.executions += 1
    started = time.process_time()
    try:
        with tally.lines:
            run(data)
        accepted = True
    except ColibriError:
        accepted = False
    except Exception:
        raise Finding(tally.name, data, traceback.format_exc()) from None
    seconds = time.process_time() - started
    tally.slowest = max(tally.slowest, seconds)
    if seconds > MAX_SECONDS:
        raise Finding(tally.name, data, f"took {seconds:.2f} s")
    tally.accepted += accepted
    return accepted


def fuzz(target: Target, rng: random.Random, more: Callable[[int], bool]) -> Tally:
    """Change inputs as long as `more` says; those that reach new lines are changed further."""
    tally = Tally(target.name)
    pool = target.seeds()
    for data in pool:
        execute(tally, target.run, data)
    while more(tally.executions):
        data = rng.choice(pool)
        for _ in range(1 + rng.randrange(3)):
            data = target.change(rng, data, rng.choice(pool))
        seen = len(tally.lines.seen)
        data = data[:MAX_INPUT]
        execute(tally, target.run, data)
        if len(tally.lines.seen) > seen:
            pool.append(data)
    return tally


def compare_readers(inputs: Iterator[tuple[bytes, bool]], more: Callable[[int], bool]) -> Tally:
    """Open containers of which the C reader's verdict is known. Raises Finding if they differ."""
    tally = Tally("container")
    for data, accepted_by_c in inputs:
        if not more(tally.executions):
            break
        if execute(tally, read_container, data) != accepted_by_c:
            verdict = "accepted" if accepted_by_c else "refused"
            raise Finding("container", data, f"{verdict} by the C reader only")
    return tally


def run_replay(command: list[str]) -> bytes:
    """What `replay` prints; the limit of `main` does not hold for it and its sanitizer."""

    def unlimited() -> None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    done = subprocess.run(command, capture_output=True, preexec_fn=unlimited)
    if done.returncode != 0:
        raise SystemExit(done.stderr.decode(errors="replace"))
    return done.stdout


def mutants(replay: Path, seeds: Sequence[Path], seed: int, n: int) -> Iterator[tuple[bytes, bool]]:
    """Changed containers with the C reader's verdict, made by `replay -mutate`."""
    command = [str(replay), "-mutate", str(seed), str(n), *map(str, seeds)]
    raw = run_replay(command)
    at = 0
    while at < len(raw):
        size, accepted = struct.unpack_from("<IB", raw, at)
        yield raw[at + 5 : at + 5 + size], bool(accepted)
        at += 5 + size


def judged(replay: Path, paths: Sequence[Path]) -> Iterator[tuple[bytes, bool]]:
    """Files with the C reader's verdict."""
    if not paths:
        return
    command = [str(replay), *map(str, paths)]
    said = run_replay(command).splitlines()
    for path, line in zip(paths, said, strict=True):
        yield path.read_bytes(), line == b"ok"


def container_inputs(folder: Path, rng: random.Random) -> Iterator[tuple[bytes, bool]]:
    """What libFuzzer found, then changes of the seeds without end."""
    replay = folder / "replay"
    corpus = sorted((folder / "corpus").iterdir())
    rng.shuffle(corpus)
    yield from judged(replay, corpus[:CORPUS_FILES])
    seeds = sorted((folder / "seeds").iterdir())
    while True:
        yield from mutants(replay, seeds, rng.randrange(1 << 31), 500)


def until(seconds: float) -> Callable[[int], bool]:
    """True for so long."""
    end = time.monotonic() + seconds
    return lambda _: time.monotonic() < end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    rng = random.Random(options.seed)
    share = options.seconds / (len(TARGETS) + 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, hard))
    try:
        for target in TARGETS:
            print(fuzz(target, rng, until(share)), flush=True)
        inputs = container_inputs(options.folder, rng)
        print(compare_readers(inputs, until(share)), flush=True)
    except Finding as finding:
        name = f"crash-{finding.target}-{hashlib.sha256(finding.data).hexdigest()[:16]}"
        (options.folder / name).write_bytes(finding.data)
        print(f"{finding}\nwritten to {options.folder / name}")
        return 1
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    print(f"memory grew by {growth >> 20} MiB")
    return int(growth > MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
