"""Faults for the tests of reliability: the preloaded shim, and repack under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CC = os.environ.get("CC", "cc").split()
FLUSH_BYTES = 20_000
"""Tiny models journal every few blocks, as large ones do every 256 MiB."""

_MAIN = (
    "import colibri_tools.container.flusher as f; f.FLUSH_BYTES = {flush_bytes}\n"
    "{setup}\n"
    "from colibri_tools.cli import main; main()"
)


def build_shim(folder: Path) -> Path:
    """Compile the shim of tests/c/fault_shim.c."""
    shim = folder / "fault_shim.so"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-shared", "-fPIC"]
    source = HERE / "c" / "fault_shim.c"
    subprocess.run([*CC, *flags, str(source), "-o", str(shim), "-ldl", "-lpthread"], check=True)
    return shim


def environment(shim: Path | None, fault: str = "") -> dict[str, str]:
    """The environment of a process with a fault (see fault_shim.c)."""
    preload = {} if shim is None else {"LD_PRELOAD": str(shim), "FAULT": fault}
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", **preload}


def command(*args: Any, flush_bytes: int = FLUSH_BYTES, setup: str = "") -> list[str]:
    """The command line of `colibri` with small steps between syncs."""
    code = _MAIN.format(flush_bytes=flush_bytes, setup=setup)
    return [sys.executable, "-W", "error", "-c", code, *map(str, args)]


def colibri(
    *args: Any, shim: Path | None = None, fault: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `colibri`, with a fault if a shim is given."""
    own = {name: options.pop(name) for name in ("flush_bytes", "setup") if name in options}
    return subprocess.run(
        command(*args, **own),
        env=environment(shim, fault),
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def kill_sweep(
    shim: Path, source: Path, folder: Path, points: int, seed: int, *, lose: bool
) -> dict[str, Any]:
    """Kill repack at random calls and finish each time; see fault_driver.py for the result."""
    call = [sys.executable, str(HERE / "fault_driver.py"), source, folder, points, seed, int(lose)]
    done = subprocess.run(
        [str(part) for part in call],
        env=environment(shim),
        capture_output=True,
        text=True,
        timeout=60 + 10 * points,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
