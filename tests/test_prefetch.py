"""Backends, prefetch and preload when a model runs: the same logits, and true counts."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import EXPERTS, make_model
from test_colibri_run import program

import colibri_tools
from colibri_tools.native import ffi, lib

IOS = ["COLIBRI_IO_PREAD", "COLIBRI_IO_URING", "COLIBRI_IO_MMAP", "COLIBRI_IO_BUFFERED"]
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("prefetch") / "m.colibri", n_layers=4)


def run(path: Path, batch: int = 1, **settings: int) -> tuple[np.ndarray, Any]:
    """The logits of every position, evaluated `batch` tokens at a time, and the metrics."""
    options = ffi.new("colibri_options *")
    lib.colibri_options_init(options)
    options.n_threads = 1
    for name, value in settings.items():
        setattr(options, name, value)
    handle, text = ffi.new("colibri_model **"), ffi.new("char[]", 1024)
    status = lib.colibri_open(os.fsencode(path), options, handle, text, len(text))
    assert status == lib.COLIBRI_OK, ffi.string(text)
    try:
        info, metrics = ffi.new("colibri_info *"), ffi.new("colibri_metrics *")
        lib.colibri_get_info(handle[0], info)
        logits = np.empty((len(TOKENS), info.vocab_size), np.float32)
        for i in range(0, len(TOKENS), batch):
            target = ffi.from_buffer("float[]", logits[i : i + batch])
            assert lib.colibri_eval(handle[0], TOKENS[i : i + batch], batch, target, batch) == 0
        lib.colibri_get_metrics(handle[0], metrics)
        return logits, metrics
    finally:
        lib.colibri_close(handle[0])


def forbid_io_uring() -> None:
    """A seccomp filter as containers have it: io_uring_setup is EPERM."""
    LOAD, EQUAL, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    program = struct.pack("=HBBI", LOAD, 0, 0, 0)  # the number of the call
    program += struct.pack("=HBBI", EQUAL, 0, 1, 425)  # the same on every architecture
    program += struct.pack("=HBBI", RETURN, 0, 0, ERRNO | errno.EPERM)
    program += struct.pack("=HBBI", RETURN, 0, 0, ALLOW)
    code = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    address = ctypes.c_void_p(ctypes.addressof(filter_))
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, by_filter, address):
        raise OSError(ctypes.get_errno(), "seccomp")


def test_blocked_io_uring_is_pread_and_one_line(model: Path) -> None:
    options = ["--tokens=1,2", "--max-tokens=6", "--io=io_uring"]
    python = "from colibri_tools.cli import main; main()"
    words = (
        r"warning: io_uring: io_uring_setup failed: Operation not permitted .*, so pread is used\n"
    )
    for call in ([program()], [sys.executable, "-c", python, "run"]):
        whole = [*call, str(model), *options]
        free = subprocess.run(whole, capture_output=True, text=True)
        blocked = subprocess.run(whole, capture_output=True, text=True, preexec_fn=forbid_io_uring)
        assert blocked.returncode == free.returncode == 0, blocked.stderr
        assert blocked.stdout == free.stdout
        assert len(re.findall(words, blocked.stderr)) == 1, blocked.stderr
        assert "io_uring direct" in free.stderr or "io_uring buffered" in free.stderr
        assert "pread direct" in blocked.stderr or "pread buffered" in blocked.stderr


def cache_bytes(path: Path, n_blocks: int) -> int:
    memory, text = ffi.new("colibri_memory *"), ffi.new("char[]", 1024)
    assert lib.colibri_estimate(os.fsencode(path), ffi.NULL, memory, text, len(text)) == 0
    return int(memory.min_cache_bytes) // 2 * n_blocks


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("n_blocks", [2, 7, 1000])
def test_logits_do_not_depend_on_backend_prefetch_cache_or_preload(
    io: str, n_blocks: int, model: Path
) -> None:
    expected, _ = run(model)
    cache = cache_bytes(model, n_blocks)
    for depth in (0, 1, 2):
        for batch in (1, 4):
            found, metrics = run(
                model, batch, io=getattr(lib, io), prefetch_depth=depth, io_threads=1 + depth,
                expert_cache_bytes=cache, preload_bytes=2**64 - 1 if depth else 0,
            )  # fmt: skip
            assert np.array_equal(found, expected)
            assert metrics.preloaded_bytes <= cache
            assert metrics.io_direct or ffi.string(metrics.io_reason)


def test_recall_is_that_of_the_guesses(model: Path) -> None:
    """Each MoE layer but the first is guessed once a token, from the state before the experts of
    the layer before it: some guesses are right."""
    _, metrics = run(model, prefetch_depth=1, expert_cache_bytes=cache_bytes(model, 7))
    n_layers, top_k = 4, metrics.expert_requests // (4 * len(TOKENS))
    assert metrics.prefetch_chosen == (n_layers - 1) * len(TOKENS) * top_k
    assert metrics.prefetch_guessed == metrics.prefetch_chosen
    assert 0 < metrics.prefetch_right <= metrics.prefetch_guessed
    useful, wasted = metrics.prefetch_useful_bytes, metrics.prefetch_wasted_bytes
    assert useful + wasted <= metrics.bytes_read + cache_bytes(model, 7)


def test_nothing_is_guessed_without_prefetch_or_for_large_batches(model: Path) -> None:
    cache = cache_bytes(model, 7)
    assert run(model, expert_cache_bytes=cache)[1].prefetch_guessed == 0
    assert run(model, 8, prefetch_depth=2, expert_cache_bytes=cache)[1].prefetch_guessed == 0
    assert run(model, 4, prefetch_depth=2, expert_cache_bytes=cache)[1].prefetch_guessed > 0


def test_preload_leaves_nothing_to_read(model: Path) -> None:
    _, metrics = run(model, preload_bytes=2**64 - 1, expert_cache_bytes=cache_bytes(model, 1000))
    assert metrics.expert_hits == metrics.expert_requests
    assert metrics.bytes_read == metrics.preloaded_bytes


_LOG_READS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/uio.h>
static void note(off_t offset, ssize_t n) {
  fprintf(stderr, "read %lld %zd\\n", (long long)offset, n);
}
ssize_t pread(int fd, void *to, size_t n, off_t offset) {
  ssize_t (*next)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
  ssize_t found = next(fd, to, n, offset);
  note(offset, found);
  return found;
}
ssize_t pread64(int fd, void *to, size_t n, off_t offset) { return pread(fd, to, n, offset); }
ssize_t preadv(int fd, const struct iovec *to, int n, off_t offset) {
  ssize_t (*next)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
  ssize_t found = next(fd, to, n, offset);
  note(offset, found);
  return found;
}
ssize_t preadv64(int fd, const struct iovec *to, int n, off_t offset) {
  return preadv(fd, to, n, offset);
}
"""

_EVAL = """
import sys
from colibri_tools.engine import Engine
path, preload, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Engine(path, threads=1, io_threads=1, preload=preload) as engine:
    engine.reset_stats()
    print("eval", file=sys.stderr, flush=True)
    engine.forward(list(range(n)))
    print("end", file=sys.stderr, flush=True)
"""


def reads_of(model: Path, folder: Path, preload: int, n_tokens: int) -> list[list[list[int]]]:
    """[offset, bytes] of reads of expert blocks: before the evaluation, and during it."""
    (folder / "log.c").write_text(_LOG_READS)
    shim = folder / "log.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, folder / "log.c", "-ldl"], check=True)
    command = [sys.executable, "-c", _EVAL, model, str(preload), str(n_tokens)]
    done = subprocess.run(
        command,
        check=True,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
    )
    with colibri_tools.open(model) as container:
        first = int(container.index["offset"].min())
    parts = done.stderr.partition("end\n")[0].split("eval\n")
    lines = [[line.split() for line in part.splitlines()] for part in parts]
    return [
        [[int(at), int(n)] for word, at, n in part if word == "read" and int(at) >= first]
        for part in lines
    ]


def test_the_prefix_is_preloaded_front_to_back_in_large_reads(model: Path, tmp_path: Path) -> None:
    before, during = reads_of(model, tmp_path, 1 << 40, 8)
    assert during == []
    ends = [at + n for at, n in before]
    assert [at for at, _ in before[1:]] == ends[:-1]  # without a gap
    n_blocks = 4 * EXPERTS
    assert len(before) == -(-n_blocks // 16)  # 16 small blocks in a read


def test_neighbours_that_one_request_misses_are_one_read(model: Path, tmp_path: Path) -> None:
    before, during = reads_of(model, tmp_path, 0, 64)  # a batch that wants every expert
    assert before == []
    block = during[0][1] // EXPERTS
    assert [n for _, n in during] == [EXPERTS * block] * 4  # a read for each layer


@pytest.mark.parametrize(
    ("settings", "words"), [({"io": 9}, "io: expected"), ({"prefetch_depth": 3}, "up to 2")]
)
def test_senseless_options_are_refused(settings: dict[str, int], words: str, model: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        run(model, **settings)
