"""Models opened, run and closed a thousand times leave no memory, descriptor or thread behind."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_models import make_model

from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine, Sampler, Sampling, estimate
from colibri_tools.errors import ColibriError, FormatError, JobError, UsageError

N_CYCLES = 1000
GROWTH_BYTES = 64 << 10
"""Memory after warm-up may grow by this much: a leak of 70 bytes in each cycle exceeds it."""
N_ROUNDS = 4
MAPPED_GROWTH_BYTES = 160 << 20
"""Address space may grow by two heaps of the C library; a thousand caches are more."""


def rss_bytes() -> int:
    """Resident memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple((f"field_{i}", ctypes.c_size_t) for i in range(10))


def allocated_bytes() -> int:
    """What malloc gave out and did not get back: a leak shows before the heap has to grow.

    0 where the C library does not tell.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return int(info.field_4 + info.field_7)  # hblkhd + uordblks


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def n_threads(expected: int = 0) -> int:
    """Threads of this process. One that was joined may be listed for a moment: it is waited for."""
    deadline = time.monotonic() + 2
    while True:
        n = len(list(Path("/proc/self/task").iterdir()))
        if n <= expected or not expected or time.monotonic() > deadline:
            return n
        time.sleep(0.01)


def mapped_bytes() -> int:
    """Address space: what is reserved counts even where it was never touched."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def nothing_is_left_behind(cycle: Callable[[int], None], n: int) -> None:
    """A leak grows in every round; what threads happen to touch of their stacks does not."""
    for i in range(n // 5):
        cycle(i)
    growth: tuple[int, ...] = ()
    for _ in range(N_ROUNDS):
        gc.collect()
        before = n_descriptors(), n_threads(), rss_bytes(), allocated_bytes(), mapped_bytes()
        for i in range(n):
            cycle(i)
        gc.collect()
        after = (
            n_descriptors(),
            n_threads(before[1]),
            rss_bytes(),
            allocated_bytes(),
            mapped_bytes(),
        )
        assert after[:2] == before[:2]
        growth = tuple(b - a for a, b in zip(before[2:], after[2:], strict=True))
        assert growth[1] < GROWTH_BYTES  # of malloc: the same in every round
        if growth[0] < GROWTH_BYTES and growth[2] < MAPPED_GROWTH_BYTES:
            return
    pytest.fail(f"memory, malloc and address space grew by {growth} bytes in each of the rounds")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cycles") / "model.colibri", n_layers=2)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A damaged page 0, a damaged resident tensor, a damaged block, and a cut file."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = {name: folder / f"{name}.colibri" for name in ("metadata", "tensor", "block", "cut")}
    for path in paths.values():
        make_model(path, n_layers=2, top_k=12)
    with open_container(paths["tensor"]) as container:
        tensor = container.tensors["1.attn_q"].offset
        block = int(container.cell(0, 3)["offset"])
    for name, offset in (("metadata", 40), ("tensor", tensor), ("block", block)):
        data = bytearray(paths[name].read_bytes())
        data[offset] ^= 4
        paths[name].write_bytes(data)
    os.truncate(paths["cut"], paths["cut"].stat().st_size - 4096)
    return paths


def test_a_thousand_models_leave_nothing_behind(model: Path) -> None:
    def cycle(i: int) -> None:
        check = ("first", "always", "never")[i % 3]
        with Engine(model, threads=1 + i % 2, ctx=16, check=check) as engine:
            logits = engine.eval([1, 2, 3])
            sampler = Sampler(engine.info, Sampling(temperature=1.0, top_k=5, seed=i))
            engine.eval([sampler.draw(logits[-1])])

    nothing_is_left_behind(cycle, N_CYCLES)


def test_failures_leave_nothing_behind(
    model: Path, damaged: dict[str, Path], tmp_path: Path
) -> None:
    def refused(kind: type[ColibriError], call: Callable[[], object]) -> None:
        with pytest.raises(kind):
            call()

    def block() -> None:
        with Engine(damaged["block"], threads=1, ctx=8) as engine:
            engine.eval([1, 2, 3])

    calls: list[tuple[type[ColibriError], Callable[[], object]]] = [
        (FormatError, lambda: Engine(tmp_path / "absent")),
        (FormatError, lambda: Engine(tmp_path)),
        (FormatError, lambda: Engine(damaged["metadata"])),
        (FormatError, lambda: Engine(damaged["cut"])),
        (FormatError, lambda: estimate(damaged["cut"])),
        (JobError, lambda: Engine(damaged["tensor"], threads=2)),
        (JobError, lambda: Engine(model, expert_cache=4096)),
        (UsageError, lambda: Engine(model, ctx=1 << 20)),
        (JobError, block),
    ]
    nothing_is_left_behind(lambda i: refused(*calls[i % len(calls)]), N_CYCLES)


def test_cancelled_evaluations_leave_nothing_behind(model: Path) -> None:
    cancelled = 0

    def cycle(i: int) -> None:
        nonlocal cancelled
        with Engine(model, threads=2, ctx=512, batch_size=2) as engine:
            timer = threading.Timer(0.0005 * (i % 4), engine.cancel)
            timer.start()
            try:
                engine.eval(list(range(100)))
            except KeyboardInterrupt:
                cancelled += 1
                assert engine.position == 0
            timer.join()

    nothing_is_left_behind(cycle, N_CYCLES // 5)
    assert cancelled > 10


def test_a_model_closed_in_the_middle_of_an_evaluation_leaves_nothing_behind(model: Path) -> None:
    """colibri_close cancels what runs and waits for it."""
    from colibri_tools.native import ffi, lib

    def cycle(i: int) -> None:
        engine = Engine(model, threads=2, ctx=512, batch_size=2)
        logits = ffi.new("float[]", engine.info.vocab_size)
        tokens = ffi.new("uint32_t[]", list(range(100)))
        assert lib.colibri_eval_start(engine._model, tokens, 100, logits, 1) == lib.COLIBRI_OK
        engine.close()

    nothing_is_left_behind(cycle, N_CYCLES // 5)
