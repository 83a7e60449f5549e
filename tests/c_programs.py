"""C test programs: built with sanitizers, or run under valgrind when COLIBRI_VALGRIND is set."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CSRC, RUNTIME, TEST_C = ROOT / "csrc", ROOT / "runtime" / "src", ROOT / "tests" / "c"
CC = os.environ.get("CC", "cc").split()
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
# Older valgrinds cannot read version 5 of clang.
DEBUG = ["-gdwarf-4", "-O1", *WARNINGS]
ASAN = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TSAN = ["-fsanitize=thread"]
BLOCKS = sorted(CSRC.glob("blocks*.c"))
READER = [*sorted(CSRC.glob("container*.c")), CSRC / "crc32c.c", CSRC / "sha256.c"]
STORE = [
    *READER,
    CSRC / "aligned_io.c",
    *sorted(RUNTIME.glob("store*.c")),
    *sorted(RUNTIME.glob("io_*.c")),
]
RUN_TOOLS = sorted((ROOT / "runtime" / "tools").glob("*.c"))
LIBRARY = [*sorted(CSRC.glob("*.c")), *sorted(RUNTIME.glob("*.c"))]
VALGRIND = ["valgrind", "-q", "--error-exitcode=99", "--leak-check=full"]
VALGRIND += ["--show-leak-kinds=all", "--errors-for-leak-kinds=all"]


def under_valgrind() -> bool:
    """Whether programs are run under valgrind; sanitizers are left out then."""
    return bool(os.environ.get("COLIBRI_VALGRIND"))


def command(path: Path) -> list[str]:
    """How a test program is called."""
    return [*(VALGRIND if under_valgrind() else []), str(path)]


def compile_c(sources: list[Path], flags: list[str], out: Path) -> Path:
    """Compile and link (or, with -c, only compile) `sources`."""
    includes = [f"-I{CSRC}", f"-I{RUNTIME}", f"-I{ROOT / 'runtime' / 'include'}"]
    call = [*CC, "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", *includes, *flags]
    call += [*map(str, sources), "-o", str(out)]
    done = subprocess.run([*call, "-lm", "-lpthread"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def compile_objects(sources: list[Path], flags: list[str], folder: Path) -> list[Path]:
    """Compile each of `sources`, two at a time; return the objects."""

    def compile_one(source: Path) -> Path:
        return compile_c([source], ["-c", *DEBUG, *flags], folder / f"{source.stem}.o")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


@dataclass(frozen=True)
class Library:
    """All of libcolibri as objects, and the flags that programs with it need."""

    objects: list[Path]
    flags: list[str]


def compile_library(flags: list[str], folder: Path) -> Library:
    """Build libcolibri with sanitizers, or without where they do not run.

    What the engine never runs is left out (encoders) or built fast (a set of kernels that is off):
    a third of the time.
    """
    flags = sanitizer(flags, folder)
    off = CSRC / "fast_avx512.c"
    used = [path for path in LIBRARY if path != off and not path.name.startswith("quantize")]
    without = compile_c([off], ["-c", "-O0"], folder / "fast_avx512.o")
    return Library([*compile_objects(used, flags, folder), without], flags)


class Program:
    """A test program with the flags it was built with."""

    def __init__(self, path: Path, sources: list[Path], flags: list[str]) -> None:
        self.path = compile_c(sources, [*DEBUG, *flags], path)

    def run(self, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run it, whatever comes out; sanitizers and valgrind end with codes of their own."""
        return subprocess.run(
            [*command(self.path), *map(str, arguments)],
            capture_output=True, text=True, input=stdin,
            timeout=2000 if under_valgrind() else 200,
        )  # fmt: skip

    def __call__(self, *arguments: object, stdin: str = "") -> str:
        """Run it and return what it printed."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
        return done.stdout


def sanitizer(flags: list[str], folder: Path) -> list[str]:
    """Return the flags if programs built with them run here, else none."""
    if under_valgrind():
        return []
    source = folder / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    for call in ([*CC, *flags, str(source), "-o", str(folder / "probe")], [folder / "probe"]):
        if subprocess.run(call, capture_output=True).returncode != 0:
            return []
    return flags
