"""The memory budget: what is available, how it is split, what is refused, and that it is kept."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from c_programs import ASAN, DEBUG, RUNTIME, TEST_C, compile_c, sanitizer
from engine_models import make_model
from test_colibri_run import colibri_run, program

from colibri_tools.container import Role
from colibri_tools.engine import Drive, Engine, Memory, advise, estimate, wants_probe
from colibri_tools.errors import JobError
from colibri_tools.run import run

MIB = 1 << 20


@pytest.fixture(scope="module")
def memory_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    flags = [*DEBUG, *sanitizer(ASAN, folder)]
    sources = [TEST_C / "test_memory.c", RUNTIME / "memory.c"]
    return compile_c(sources, flags, folder / "test_memory")


# ---------------------------------------------------------------------------------------------
# What is available, in simulated trees


class Tree:
    """A root folder with /proc and control groups."""

    def __init__(self, root: Path, program: Path) -> None:
        self.root, self.program = root, program
        self.write("proc/meminfo", "MemTotal: 99 kB\nMemFree: 7 kB\nMemAvailable: 4194304 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def version_1(self, group: str, point: str = "/sys/fs/cgroup/memory", root: str = "/") -> None:
        self.write("proc/self/cgroup", f"12:cpu,cpuacct:/x\n5:memory:{group}\n0::/unified\n")
        self.write(
            "proc/self/mountinfo",
            "30 1 0:9 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"31 1 0:9 {root} {point} rw,nosuid shared:9 master:2 - cgroup cgroup rw,memory\n"
            "32 1 0:9 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        )

    def version_2(self, group: str, point: str = "/sys/fs/cgroup", root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{group}\n")
        self.write("proc/self/mountinfo", f"31 1 0:9 {root} {point} rw - cgroup2 cgroup2 rw\n")

    def limit_1(self, folder: str, limit: int, usage: int, inactive: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        stat = f"inactive_file 7\ntotal_inactive_file {inactive}\ntotal_active_file 1\n"
        self.write(f"{folder}/memory.stat", stat)

    def limit_2(
        self, folder: str, limit: str, usage: int, inactive: int = 0, high: str = "max"
    ) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\n")

    def available(self, stack_bytes: int = 0, **options: Any) -> tuple[int | None, str]:
        call = [str(self.program), "available", str(self.root), str(stack_bytes)]
        shown = subprocess.run(call, capture_output=True, text=True, check=True, **options).stdout
        number, limit = shown.rstrip("\n").split(" ", 1)
        return (None if number == "unknown" else int(number)), limit


@pytest.fixture
def tree(tmp_path: Path, memory_program: Path) -> Tree:
    return Tree(tmp_path, memory_program)


def test_free_memory_without_control_groups(tree: Tree) -> None:
    assert tree.available() == (4 << 30, "free memory")


def test_nothing_known_without_proc(tmp_path: Path, memory_program: Path) -> None:
    bare = Tree(tmp_path, memory_program)
    (tmp_path / "proc/meminfo").unlink()
    assert bare.available() == (None, "")


NO_LIMIT_1 = 9223372036854771712


@pytest.mark.parametrize("limited", ["job", "job/inner", "."])
def test_version_1_counts_every_group_above(tree: Tree, limited: str) -> None:
    tree.version_1("/job/inner")
    base = "sys/fs/cgroup/memory"
    for folder in (".", "job", "job/inner"):
        tree.limit_1(f"{base}/{folder}", NO_LIMIT_1, 3 << 30)
    assert tree.available() == (4 << 30, "free memory")
    tree.limit_1(f"{base}/{limited}", 900 * MIB, 500 * MIB, inactive=100 * MIB)
    assert tree.available() == (500 * MIB, "control group")


@pytest.mark.parametrize("limited", ["job", "job/inner", "."])
@pytest.mark.parametrize("kind", ["max", "high"])
def test_version_2_counts_every_group_above(tree: Tree, limited: str, kind: str) -> None:
    tree.version_2("/job/inner")
    base = "sys/fs/cgroup"
    for folder in ("job", "job/inner"):  # the topmost group has no such files
        tree.limit_2(f"{base}/{folder}", "max", 3 << 30)
    assert tree.available() == (4 << 30, "free memory")
    limits = {"limit": "max", "high": "max", "limit" if kind == "max" else "high": str(900 * MIB)}
    tree.limit_2(f"{base}/{limited}", usage=500 * MIB, inactive=100 * MIB, **limits)
    assert tree.available() == (500 * MIB, "control group")


def test_inside_a_container_the_mount_begins_at_a_group(tree: Tree) -> None:
    tree.version_1("/docker/abc/child", root="/docker/abc")
    tree.limit_1("sys/fs/cgroup/memory", 300 * MIB, 100 * MIB)
    tree.limit_1("sys/fs/cgroup/memory/child", 250 * MIB, 100 * MIB)
    assert tree.available() == (150 * MIB, "control group")
    # another group's name must not be taken for a part of the path
    tree.version_1("/docker/abcdef", root="/docker/abc")
    assert tree.available() == (200 * MIB, "control group")


@pytest.mark.parametrize("group", ["/", "/../../elsewhere", "/gone/with/it"])
def test_a_namespace_shows_its_own_top(tree: Tree, group: str) -> None:
    tree.version_2(group)
    tree.limit_2("sys/fs/cgroup", str(300 * MIB), 100 * MIB)
    assert tree.available() == (200 * MIB, "control group")


def test_mount_points_with_blanks_and_elsewhere(tree: Tree) -> None:
    tree.version_1("/job", point="/mnt/my\\040groups")
    tree.limit_1("mnt/my groups/job", 300 * MIB, 100 * MIB)
    assert tree.available() == (200 * MIB, "control group")


def test_more_used_than_allowed_is_nothing_left(tree: Tree) -> None:
    tree.version_2("/job")
    tree.limit_2("sys/fs/cgroup/job", str(300 * MIB), 400 * MIB)
    assert tree.available() == (0, "control group")
    tree.limit_2("sys/fs/cgroup/job", str(300 * MIB), 400 * MIB, inactive=500 * MIB)
    assert tree.available() == (300 * MIB, "control group")


@pytest.mark.parametrize(
    ("which", "key", "name"),
    [(resource.RLIMIT_AS, "VmSize", "RLIMIT_AS"), (resource.RLIMIT_DATA, "VmData", "RLIMIT_DATA")],
)
def test_resource_limits_count(tree: Tree, which: int, key: str, name: str, tmp_path: Path) -> None:
    # without sanitizers, which reserve terabytes
    plain = compile_c(
        [TEST_C / "test_memory.c", RUNTIME / "memory.c"], [*DEBUG], tmp_path / "plain"
    )
    tree.program = plain
    tree.write("proc/self/status", f"VmPeak: 999999 kB\n{key}:\t 102400 kB\n")

    def limit() -> None:
        resource.setrlimit(which, (500 * MIB, resource.RLIM_INFINITY))

    assert tree.available(preexec_fn=limit) == (400 * MIB, name)
    # thread stacks are a part of both; all that is left is a known nothing
    assert tree.available(32 * MIB, preexec_fn=limit) == (368 * MIB, name)
    assert tree.available(900 * MIB, preexec_fn=limit) == (0, name)


# ---------------------------------------------------------------------------------------------
# Sharing out


def split(program: Path, *numbers: int | str) -> tuple[int, int, int, int, bool]:
    call = [str(part) for part in (program, "split", *numbers)]
    words = subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
    budget, cache, reserve, minimum, fits = map(int, words)
    return budget, cache, reserve, minimum, bool(fits)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # fixed, least and whole cache, budget, cache, available;
        # budget, cache, reserve, minimum, fits
        ((100, 20, 900, 500, 0, 0), (500, 400, 0, 120, True)),
        ((100, 20, 900, 5000, 0, 0), (5000, 900, 0, 120, True)),
        ((100, 20, 900, 120, 0, 0), (120, 20, 0, 120, True)),
        ((100, 20, 900, 119, 0, 0), (119, 20, 0, 120, False)),
        ((100, 20, 900, 50, 0, 0), (50, 20, 0, 120, False)),
        # a cache beside the budget: both hold, or it is refused
        ((100, 20, 900, 500, 300, 0), (500, 300, 0, 400, True)),
        ((100, 20, 900, 400, 300, 0), (400, 300, 0, 400, True)),
        ((100, 20, 900, 399, 300, 0), (399, 300, 0, 400, False)),
        ((100, 20, 900, 1000, 5000, 0), (1000, 900, 0, 1000, True)),
        # nothing is known
        ((100, 20, 900, 0, 0, "unknown"), (1000, 900, 0, 120, True)),
        # nothing is left, which is something else
        ((100, 20, 900, 0, 0, 0), (0, 20, 0, 120, False)),
        ((100, 20, 900, 0, 50, 0), (0, 50, 0, 150, True)),
        ((100, 20, 900, 120, 0, 0), (120, 20, 0, 120, True)),
        # a sixteenth is left, 64 MiB to 1 GiB
        ((MIB, 1, 9 << 40, 0, 0, 8 << 30), (7680 * MIB, 7679 * MIB, 512 * MIB, MIB + 1, True)),
        ((MIB, 1, 9 << 40, 0, 0, 64 << 30), (63 << 30, (63 << 30) - MIB, 1 << 30, MIB + 1, True)),
        ((MIB, 1, 9 << 40, 0, 0, 200 * MIB), (136 * MIB, 135 * MIB, 64 * MIB, MIB + 1, True)),
        # the reserve is given up before the model is refused
        ((150 * MIB, MIB, MIB, 0, 0, 200 * MIB), (151 * MIB, MIB, 49 * MIB, 151 * MIB, True)),
        ((199 * MIB, MIB, MIB, 0, 0, 200 * MIB), (200 * MIB, MIB, 0, 200 * MIB, True)),
        ((200 * MIB, MIB, MIB, 0, 0, 200 * MIB), (200 * MIB, MIB, 0, 201 * MIB, False)),
        # a cache that was asked is tried whatever is available
        ((200 * MIB, MIB, MIB, 0, MIB, 100 * MIB), (100 * MIB, MIB, 0, 201 * MIB, True)),
    ],
)
def test_split(
    memory_program: Path, numbers: tuple[int | str, ...], expected: tuple[Any, ...]
) -> None:
    assert split(memory_program, *numbers) == expected


def test_a_budget_that_fits_is_never_exceeded(memory_program: Path) -> None:
    random = Random(4)
    for _ in range(60):
        fixed, least = random.randrange(1, 1 << 34), random.randrange(1, 1 << 30)
        whole = least + random.randrange(1 << 36)
        budget = random.choice([0, random.randrange(1, 1 << 37)])
        cache = random.choice([0, random.randrange(least, 2 * whole)])
        available: int | str = random.choice([0, "unknown", random.randrange(1, 1 << 37)])
        found, got, reserve, minimum, fits = split(
            memory_program, fixed, least, whole, budget, cache, available
        )
        assert least <= got <= whole
        assert not cache or got == min(cache, whole)
        if fits and (budget or not cache):
            assert fixed + got <= found
        if budget:
            assert (found, reserve) == (budget, 0)
            assert fits == (minimum <= budget)
        elif available != "unknown":
            assert found + reserve == available


# ---------------------------------------------------------------------------------------------
# Refused with the least that works


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 MB of experts in 36 blocks of 720 KiB, 3 MB of resident tensors."""
    return make_model(
        tmp_path_factory.mktemp("budget") / "model.colibri", n_layers=3, hidden_size=1536
    )


def minimum_of(text: str) -> int:
    return int(text.split("at least ")[1].split()[0])


@pytest.mark.parametrize("options", [{}, {"ctx": 4000}, {"batch_size": 1}, {"threads": 1}])
def test_the_least_budget_works_and_a_byte_less_does_not(
    model: Path, options: dict[str, int]
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    call = [model, "--tokens", "1,2,3", "--max-tokens", 2, *flags, "--ram-budget"]
    refused = colibri_run(*call, "1M")
    assert refused.returncode == 1
    least = minimum_of(refused.stderr)
    assert colibri_run(*call, least).returncode == 0
    below = colibri_run(*call, least - 1)
    assert below.returncode == 1
    assert minimum_of(below.stderr) == least
    run(model, tokens=[1, 2, 3], max_tokens=2, ram_budget=least, **options)
    with pytest.raises(JobError, match=f"at least {least} are needed"):
        run(model, tokens=[1, 2, 3], max_tokens=2, ram_budget=least - 1, **options)


def test_a_cache_beside_a_budget_holds_or_is_refused(model: Path) -> None:
    cache = 8 * MIB
    with pytest.raises(JobError, match=r"at least \d+ are needed .*experts 8388608,") as refused:
        estimate(model, ctx=8, ram_budget=MIB, expert_cache=cache)
    least = minimum_of(str(refused.value))
    plan = estimate(model, ctx=8, ram_budget=least, expert_cache=cache)
    assert (plan.cache_bytes, plan.total_bytes, plan.min_total_bytes) == (cache, least, least)
    assert estimate(model, ctx=8, ram_budget=4 * least, expert_cache=cache).cache_bytes == cache
    with pytest.raises(JobError, match=f"at least {least} are needed"):
        estimate(model, ctx=8, ram_budget=least - 1, expert_cache=cache)


def test_the_parts_add_up_and_the_cache_gets_what_is_left(model: Path) -> None:
    for budget in (40 * MIB, 64 * MIB, 1 << 40):
        m = estimate(model, ctx=64, ram_budget=budget)
        parts = (m.metadata_bytes, m.resident_bytes, m.kv_bytes, m.cache_bytes, m.scratch_bytes)
        assert m.total_bytes == sum(parts) + m.other_bytes
        assert m.cache_bytes == min(budget - m.total_bytes + m.cache_bytes, m.all_experts_bytes)
        assert m.budget_bytes == budget
        assert m.reserve_bytes == 0
    rows = estimate(model, ctx=64, logits_rows=50)
    assert rows.other_bytes == estimate(model, ctx=64, logits_rows=1).other_bytes + 49 * 131 * 4


# Bytes of up to 256 activations of 8 and of 16 bits (csrc/fast_internal.h).
CODES_8, CODES_16 = 384, 640


@pytest.mark.parametrize(
    ("options", "a_token"),
    [
        ({}, 0),
        ({"expert_dtypes": ("f16", "bf16"), "dtypes": {Role.ROUTER: "q8_0"}}, 0),
        ({"expert_dtypes": ("q4_0",)}, 2 * CODES_8),  # normed, and the rows of a group of experts
        ({"expert_dtypes": ("q8_0",)}, 2 * CODES_16),
        ({"expert_dtypes": ("q8_0", "f32", "q4_0")}, 2 * (CODES_8 + CODES_16)),
        ({"expert_dtypes": ("q8_0", "q4_0"), "width": 64}, 3 * (CODES_8 + CODES_16)),  # and hidden
        ({"dtypes": {Role.OUTPUT: "q8_0"}}, CODES_16),
        ({"dtypes": {Role.ATTN_Q: "q8_0", Role.ATTN_V: "q5_1"}}, CODES_8 + CODES_16),
        ({"dtypes": {Role.ATTN_O: "q4_1"}}, CODES_8),
        ({"dtypes": {Role.SHARED_UP: "q5_0"}, "shared_width": 32}, CODES_8),
        ({"dtypes": {Role.SHARED_DOWN: "q8_0"}, "shared_width": 32}, CODES_16),
        (
            {"dtypes": {Role.DENSE_GATE: "q8_0", Role.DENSE_DOWN: "q4_0"}}
            | {"dense_width": 64, "moe_layers": [1, 0, 1]},
            CODES_16 + CODES_8,
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_scratch_has_room_for_the_activations_that_the_weights_take(
    tmp_path: Path, options: dict[str, Any], a_token: int
) -> None:
    """Beyond exact precision's. 64 tokens: sums of whole units that scratch is rounded up to."""
    path = make_model(tmp_path / "model.colibri", **options)
    common = {"ctx": 256, "batch_size": 64, "kv_type": "f32"}
    exact, fast = (estimate(path, precision=p, **common) for p in ("exact", "fast"))
    assert fast.scratch_bytes - exact.scratch_bytes == 64 * a_token


def test_the_default_is_what_is_available_less_a_reserve(model: Path) -> None:
    m = estimate(model, ctx=64)
    assert m.available_bytes > 0
    assert m.available_limit
    assert m.budget_bytes + m.reserve_bytes == m.available_bytes
    assert 64 * MIB <= m.reserve_bytes <= 1 << 30


def run_with_address_space(model: Path, limit: int, *more: object) -> tuple[int, dict[str, Any]]:
    """Exit code and document of colibri-run with one compute thread, under RLIMIT_AS."""

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    call = [program(), model, "--tokens", "1,2", "--max-tokens", "2", "--threads", "1", "--json"]
    done = subprocess.run(
        [*map(str, call), *map(str, more)], capture_output=True, text=True, preexec_fn=set_limit
    )
    return done.returncode, json.loads(done.stdout)


def test_an_address_space_limit_bounds_the_default(model: Path) -> None:
    code, document = run_with_address_space(model, 700 * MIB)
    assert (code, document["memory"]["available_limit"]) == (0, "RLIMIT_AS")
    # what the stacks of five threads leave
    assert 600 * MIB < document["memory"]["available_bytes"] < 660 * MIB


def test_the_address_space_that_is_said_to_be_missing_is_enough(model: Path) -> None:
    code, document = run_with_address_space(model, 60 * MIB)
    found = re.search(r"(\d+) bytes .* at least, (\d+) are available", document["error"]["message"])
    assert code == 1
    assert found
    needed, available = map(int, found.groups())
    assert 0 < available < needed
    enough = 60 * MIB + needed - available
    assert run_with_address_space(model, enough)[0] == 0
    assert run_with_address_space(model, enough - 4096)[0] == 1


@pytest.mark.parametrize("limit_mib", [34, 28])
def test_no_address_space_left_is_known_to_be_none(model: Path, limit_mib: int) -> None:
    """The stacks alone take more: 0 is not "unknown", for which all experts would be planned."""
    code, document = run_with_address_space(model, limit_mib * MIB)
    assert code == 1
    assert " at least, 0 are available (RLIMIT_AS)" in document["error"]["message"]
    # a budget is tried all the same, as the message says, and what fails is named
    least = document["error"]["message"].split(" bytes of memory")[0].split()[-1]
    code, document = run_with_address_space(model, limit_mib * MIB, "--ram-budget", least)
    assert code == 1
    assert "cannot start 4 reading threads" in document["error"]["message"]
    # threads that are not started take nothing
    some = run_with_address_space(model, limit_mib * MIB, "--ram-budget", least, "--io-threads", 1)
    assert some[0] == 0


# ---------------------------------------------------------------------------------------------
# Kept


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 MB of experts in 192 blocks of 960 KiB, of which every token uses 48."""
    return make_model(
        tmp_path_factory.mktemp("large") / "model.colibri", n_layers=16, hidden_size=2048
    )


PROMPT = ",".join(str((7 * i) % 131) for i in range(48))


@pytest.mark.parametrize(
    ("budget_mib", "how"),
    [
        (75, []),
        (110, []),
        (160, []),
        (110, ["--batch-size", "16"]),
        (110, ["--logits"]),
        (110, ["--io-threads", "8"]),
    ],
)
def test_the_budget_is_kept(large: Path, tmp_path: Path, budget_mib: int, how: list[str]) -> None:
    if how == ["--logits"]:
        how = ["--logits", str(tmp_path / "x.npy")]
    budget = ["--ram-budget", f"{budget_mib}M"]
    done = colibri_run(large, "--tokens", PROMPT, "--max-tokens", 8, *budget, "--json", *how)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    memory, peak = document["memory"], document["peak_rss_bytes"]
    assert memory["total_bytes"] <= memory["budget_bytes"] == budget_mib * MIB
    # promised: 5 % + 50 MB; what is planned leaves no need for any of it but page rounding
    assert peak <= memory["budget_bytes"] + MIB
    # and it is used, not only kept
    assert peak >= memory["budget_bytes"] - 24 * MIB


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of version 1 with a limit of 120 MiB."""
    own = next(
        (line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
         if "memory" in line.split(":")[1].split(",")), None,
    )  # fmt: skip
    if own is None:
        pytest.skip("no memory control groups of version 1")
    folder = MEMORY_GROUPS / own.lstrip("/") / f"colibri-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(120 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield folder
    folder.rmdir()


def run_in(group: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    call = [program(), *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, preexec_fn=join, timeout=120)


def test_the_default_keeps_within_a_control_group(large: Path, group: Path) -> None:
    done = run_in(group, large, "--tokens", PROMPT, "--max-tokens", 8, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["memory"]["available_limit"] == "control group"
    assert 100 * MIB < document["memory"]["available_bytes"] <= 120 * MIB
    assert document["peak_rss_bytes"] <= document["memory"]["budget_bytes"] + MIB
    assert int((group / "memory.failcnt").read_text()) == 0


def test_a_control_group_that_is_too_small_is_named(large: Path, group: Path) -> None:
    (group / "memory.limit_in_bytes").write_text(str(20 * MIB))
    done = run_in(group, large, "--tokens", "1", "--max-tokens", 1)
    assert done.returncode == 1
    assert "are needed at least" in done.stderr
    assert "are available (control group)" in done.stderr


# ---------------------------------------------------------------------------------------------
# Warnings


def memory(**changes: Any) -> Memory:
    """A plan that there is nothing to say about: 10 GiB of experts, half in the cache."""
    names = dict.fromkeys(Memory.__dataclass_fields__, 0)
    m = Memory(**{**names, "available_limit": "control group"})
    m = replace(m, cache_bytes=5 << 30, token_bytes=1 << 30, all_experts_bytes=10 << 30)
    return replace(replace(m, total_bytes=6 << 30, available_bytes=8 << 30), **changes)


def drive(megabytes_per_second: float, direct: bool = True) -> Drive:
    return Drive(megabytes_per_second * 1e6, 1, 1, 0.3, 1 << 20, 2, direct)


def test_nothing_is_said_of_a_sound_plan() -> None:
    assert advise(memory(), drive(600)) == []


@pytest.mark.parametrize(
    ("changes", "speed", "words"),
    [
        (
            {"cache_bytes": 1 << 29},
            None,
            "cache (512 MiB) is smaller than the experts of one token (1.0 GiB)",
        ),
        (
            {"token_bytes": 5 << 30},
            None,
            "each token uses 50 % of all experts (5.0 GiB of 10.0 GiB)",
        ),
        (
            {},
            500,
            "it gives 500 MB/s, and a token misses about 512 MiB of experts (50 % of its 1.0 GiB",
        ),
        ({}, 500, "about 0.93 tokens/s"),
        (
            {"available_bytes": 5 << 30},
            None,
            "6.0 GiB of memory are planned, but only 5.0 GiB are available (control group)",
        ),
    ],
)
def test_warnings_name_their_numbers(changes: dict[str, Any], speed: float, words: str) -> None:
    advice = advise(memory(**changes), drive(speed) if speed else None)
    assert len(advice) == 1
    assert advice[0].warning
    assert words in advice[0].text


def test_what_fits_is_a_note() -> None:
    whole = memory(cache_bytes=10 << 30, token_bytes=9 << 30)
    advice = advise(whole, drive(1))
    assert [(a.warning, "all experts (10.0 GiB) fit" in a.text) for a in advice] == [(False, True)]


def test_a_slow_drive_is_told_from_its_cache() -> None:
    assert "100 MB/s (through the page cache)" in advise(memory(), drive(100, False))[0].text


def test_a_probe_is_wanted_where_a_slow_drive_would_hurt() -> None:
    assert wants_probe(memory())
    assert not wants_probe(memory(cache_bytes=10 << 30))
    assert not wants_probe(memory(token_bytes=16 * MIB))


def test_warnings_come_once_and_in_the_document(model: Path) -> None:
    call = [model, "--tokens", "1,2", "--max-tokens", 2, "--expert-cache", "2M"]
    shown = colibri_run(*call)
    assert shown.stderr.count("warning: the expert cache (2.0 MiB) is smaller") == 1
    document = json.loads(colibri_run(*call, "--json").stdout)
    python = run(model, tokens=[1, 2], max_tokens=2, expert_cache=2 * MIB).to_json()
    for found in (document, python):
        assert sum("is smaller than the experts" in text for text in found["warnings"]) == 1
    whole = json.loads(colibri_run(*call[:-2], "--json").stdout)
    assert len(whole["notes"]) == 1
    assert "fit into the cache" in whole["notes"][0]


SLOW_READS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>
static void delay(size_t n) { if (n >= 100000) usleep(200000); }
ssize_t pread(int fd, void *p, size_t n, off_t at) {
  ssize_t (*real)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, "pread");
  delay(n);
  return real(fd, p, n, at);
}
ssize_t preadv(int fd, const struct iovec *v, int n, off_t at) {
  ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
  delay(v->iov_len);
  return real(fd, v, n, at);
}
"""


def test_a_slow_drive_is_measured_and_warned_of(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of 0.2 s, four at once: 20 MB/s, where a token misses 40 MB."""
    source, shim = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_READS)
    compile_c([source], ["-shared", "-fPIC", "-ldl"], shim)
    call = [program(), large, "--tokens", "1", "--max-tokens", "0", "--ram-budget", "60M"]
    call = [*map(str, call), "--json"]
    env = {**os.environ, "LD_PRELOAD": str(shim)}
    shown = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60)
    monkeypatch.setattr("colibri_tools.run.probe_drive", lambda path, io_threads: drive(20))
    python = run(large, tokens=[1], max_tokens=0, ram_budget=60 * MIB).to_json()
    for document in (json.loads(shown.stdout), python):
        words = r"the drive is slow for this model: it gives (\d+) MB/s, and a token misses about"
        found = [re.match(words, text) for text in document["warnings"]]
        speeds = [int(match[1]) for match in found if match]
        assert len(speeds) == 1
        assert 5 <= speeds[0] <= 20


def test_a_model_that_uses_all_experts_is_warned_of(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model.colibri", top_k=12)
    call = [model, "--tokens", "1,2", "--max-tokens", 1, "--expert-cache", "200K"]
    shown = colibri_run(*call).stderr
    words = r"warning: each token uses 100 % of all experts \(1\.1 MiB of 1\.1 MiB\)"
    assert len(re.findall(words, shown)) == 1
    assert "warning: each token" not in colibri_run(*call[:-2]).stderr  # all fit


def test_an_open_model_took_what_was_planned(model: Path) -> None:
    with Engine(model, ctx=64, ram_budget=64 * MIB) as engine:
        planned = estimate(model, ctx=64, ram_budget=64 * MIB)
        same = replace(planned, available_bytes=engine.memory.available_bytes)
        assert engine.memory == same
