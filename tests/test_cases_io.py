"""Direct reads when a model runs (cases 6.1 and 6.3): reported truly, and of no influence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tm
from tiny_containers import Containers

from colibri_tools.engine import Engine, Stats

PROMPT = tm.prompt(7)

# open() with O_DIRECT fails, as on file systems that do not know it
_NO_DIRECT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#define WRAP(name)                                                     \
  int name(const char *path, int flags, ...) {                         \
    static int (*real)(const char *, int, ...);                        \
    va_list list;                                                      \
    va_start(list, flags);                                             \
    const int mode = va_arg(list, int);                                \
    va_end(list);                                                      \
    if (flags & O_DIRECT) {                                            \
      errno = EINVAL;                                                  \
      return -1;                                                       \
    }                                                                  \
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
    return real(path, flags, mode);                                    \
  }
WRAP(open)
WRAP(open64)
"""

_RUN = """
import sys, numpy as np
from colibri_tools.engine import Engine
with Engine(sys.argv[1], threads=1) as engine:
    logits = engine.forward([int(t) for t in sys.argv[2].split(",")])
    assert not engine.stats().io_direct
np.save(sys.argv[3], logits)
"""


def run(path: Path) -> tuple[np.ndarray, Stats]:
    with Engine(path, threads=1) as engine:
        return engine.forward(PROMPT), engine.stats()


def takes_direct_reads(folder: Path) -> bool:
    """Whether O_DIRECT works below a folder, by trying it without the engine."""
    probe = folder / "probe"
    probe.write_bytes(bytes(4096))
    try:
        fd = os.open(probe, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    os.close(fd)
    return True


def test_case_6_1_blocks_are_read_direct_and_whole(containers: Containers) -> None:
    path = containers.hf("olmoe")
    if not takes_direct_reads(path.parent):
        pytest.skip("this file system has no O_DIRECT")
    _, stats = run(path)
    assert stats.io_direct is True
    assert stats.reads > 0
    assert stats.bytes_read % 4096 == 0
    assert stats.bytes_read // stats.reads == 32768  # 3 x 40 x 64 floats, one read, whole pages


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
def test_case_6_3_tmpfs_gives_the_same_logits(containers: Containers) -> None:
    path = containers.hf("olmoe")
    copy = Path(f"/dev/shm/colibri-test-{os.getpid()}.colibri")
    try:
        shutil.copyfile(path, copy)
        assert np.array_equal(run(copy)[0], run(path)[0])
    finally:
        copy.unlink(missing_ok=True)


def test_case_6_3_refused_direct_reads_fall_back_to_the_same_logits(
    containers: Containers, tmp_path: Path
) -> None:
    path = containers.hf("olmoe")
    (tmp_path / "shim.c").write_text(_NO_DIRECT)
    shim, out = tmp_path / "shim.so", tmp_path / "logits.npy"
    build = ["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"]
    subprocess.run(build, check=True)
    command = [sys.executable, "-c", _RUN, path, ",".join(map(str, PROMPT)), out]
    subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": str(shim)}, cwd=tmp_path)
    assert np.array_equal(np.load(out), run(path)[0])


def test_case_6_3_buffered_reads_are_one_warning(containers: Containers, tmp_path: Path) -> None:
    (tmp_path / "shim.c").write_text(_NO_DIRECT)
    shim = tmp_path / "shim.so"
    build = ["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"]
    subprocess.run(build, check=True)
    code = "from colibri_tools.cli import main; main()"
    command = [sys.executable, "-c", code, "run", containers.hf("olmoe"), "--tokens", "1,2,3"]
    done = subprocess.run(
        command,
        check=True,
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
    )
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert "page cache" in warnings[0]
