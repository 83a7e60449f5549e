"""Kill repack at random system calls, finish it, and compare, in forks of one warm process.

    LD_PRELOAD=fault_shim.so python tests/fault_driver.py SOURCE FOLDER POINTS SEED LOSE

With LOSE 1 a kill is a power cut: what was not synced is lost or not, page by page, at random.
Prints what happened as JSON; the exit code is 1 with a reason on standard error if any run left a
wrong file, could not be finished or left anything beside the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from colibri_tools import native
from colibri_tools.container import flusher
from colibri_tools.errors import UsageError
from colibri_tools.repack import repack

FLUSH_BYTES = 20_000
DONE, EXISTS, FAILED = 0, 3, 4


class Sweep:
    """One source, one folder for its output, and the result that all runs must have."""

    def __init__(self, source: Path, folder: Path, seed: int, lose: bool) -> None:
        self.source = source
        self.folder = folder
        self.out = folder / "m.colibri"
        self.random = random.Random(seed)
        self.lose = lose
        self.seen: Counter[str] = Counter()
        self.n_kept: list[int] = []
        self._fresh()
        code, report = self._run("lose=1,op=any" if lose else "op=any,nth=1000000")
        assert code == DONE, code
        self.n_calls = report["calls"]
        self.expected = self._digest()

    def point(self) -> None:
        """Kill once, perhaps again while it is finished, then finish it."""
        self._fresh()
        self._killed(self.random.randint(1, self.n_calls))
        while self.random.random() < 0.3:
            self.seen["killed again"] += 1
            self._killed(self.random.randint(1, self.n_calls))
        code, report = self._run("")
        if code == EXISTS:
            self.seen["was complete"] += 1
        else:
            assert code == DONE, (code, self._names())
            self.n_kept.append(report["kept"])
            self.seen["went on" if report["kept"] else "started over"] += 1
        assert self._digest() == self.expected, "other bytes than an undisturbed run"
        assert self._names() == [self.out.name], self._names()

    def _killed(self, nth: int) -> None:
        how = self.random.choice(["kill", "half"])
        lose = f",lose={self.random.randint(1, 1 << 30)}" if self.lose else ""
        code, _ = self._run(f"op=any,nth={nth},do={how}{lose}")
        assert code in (-signal.SIGKILL, DONE, EXISTS), code
        self.seen["kills"] += code == -signal.SIGKILL
        if self.out.exists():
            assert self._digest() == self.expected, "a wrong file under the final name"

    def _fresh(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def _digest(self) -> str:
        return hashlib.sha256(self.out.read_bytes()).hexdigest()

    def _run(self, fault: str) -> tuple[int, dict[str, Any]]:
        """Repack in a fork; return its exit code (negative: the signal) and what it reports."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os._exit(_child(self.source, self.out, fault, writer))
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), json.loads(text or b"{}")


def _child(source: Path, out: Path, fault: str, pipe: int) -> int:
    shim = ctypes.CDLL(None)
    os.environ["FAULT"] = fault
    shim.fault_reload()
    kept, code = 0, DONE
    try:
        kept = repack(source, out, threads=2).n_kept
    except UsageError as error:
        code = EXISTS if "exists" in error.message else FAILED
        print(error.message, file=sys.stderr)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        code = FAILED
    os.write(pipe, json.dumps({"calls": shim.fault_calls(), "kept": kept}).encode())
    shim.fault_tidy()
    return code


def main() -> None:
    source, folder, points, seed, lose = sys.argv[1:]
    flusher.FLUSH_BYTES = FLUSH_BYTES
    native.crc32c(b"")  # loaded before the forks
    sweep = Sweep(Path(source), Path(folder), int(seed), lose == "1")
    for number in range(int(points)):
        try:
            sweep.point()
        except AssertionError as error:
            sys.exit(f"point {number} of seed {seed}: {error}")
    kept = {"blocks_kept": sum(sweep.n_kept)}
    print(json.dumps({"points": int(points), "calls": sweep.n_calls, **sweep.seen, **kept}))


if __name__ == "__main__":
    main()
