"""Journal and resume: what an interrupted job left is used, and only if it is still right."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from container_util import payload_of, small_plan, tensor_data, write_container
from fault_util import colibri, command, environment, names

import colibri_tools
import colibri_tools.repack as repack_module
from colibri_tools import planner
from colibri_tools.container import ContainerPlan, ContainerWriter, destination, flusher
from colibri_tools.container import journal as journal_module
from colibri_tools.container.journal import RECORD_BYTES
from colibri_tools.container.workfiles import SourceState
from colibri_tools.errors import JobError, SourceError, UsageError
from colibri_tools.profile.profiling import profile_routing
from colibri_tools.repack import repack
from colibri_tools.rewrite import reorder
from colibri_tools.verify import verify_container

LEFT = ["m.colibri.journal", "m.colibri.partial"]
N_TENSORS, N_BLOCKS = 32, 8


# -- the writer ------------------------------------------------------------------------------------


def fill(out: ContainerWriter, n_blocks: int = N_BLOCKS) -> tuple[int, int]:
    """Write or keep all tensors and some blocks; returns how many were kept and written."""
    kept = written = 0
    for planned in out.plan.tensors:
        name = planned.item.name
        if planned.alias_index is None:
            if out.keep_tensor(name):
                kept += 1
            else:
                out.write_tensor(name, tensor_data(out.plan, name))
                written += 1
    for row, expert in out.plan.order[:n_blocks]:
        if out.keep_block(row, expert):
            kept += 1
        else:
            out.write_block(row, expert, payload_of(out.plan, row, expert))
            written += 1
    return kept, written


def interrupt(path: Path, n_blocks: int = 5, **options: Any) -> ContainerPlan:
    """A job that is ended after some blocks."""
    plan = small_plan()
    with pytest.raises(KeyboardInterrupt), ContainerWriter(plan, path, **options) as out:
        fill(out, n_blocks)
        raise KeyboardInterrupt
    return plan


def finish(path: Path, **options: Any) -> tuple[int, int]:
    """Go on and seal; returns how many tensors and blocks were kept and written."""
    with ContainerWriter(small_plan(), path, **options) as out:
        counts = fill(out)
        out.seal()
    return counts


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The container of an undisturbed job."""
    path = tmp_path_factory.mktemp("sound") / "m.colibri"
    write_container(small_plan(), path)
    return path.read_bytes()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "m.colibri"


@pytest.mark.parametrize("n_blocks", [0, 1, 5, 8])
def test_a_rerun_goes_on_and_gives_the_same_bytes(
    out: Path, expected: bytes, n_blocks: int
) -> None:
    interrupt(out, n_blocks)
    assert names(out.parent) == LEFT
    assert finish(out) == (N_TENSORS + n_blocks, N_BLOCKS - n_blocks)
    assert out.read_bytes() == expected
    assert names(out.parent) == [out.name]


def test_a_job_interrupted_again_and_again_gets_there(out: Path, expected: bytes) -> None:
    for n_blocks in range(N_BLOCKS + 1):
        interrupt(out, n_blocks)
    assert finish(out) == (N_TENSORS + N_BLOCKS, 0)
    assert out.read_bytes() == expected


def test_restart_discards_what_was_left(out: Path, expected: bytes) -> None:
    interrupt(out)
    assert finish(out, restart=True) == (0, N_TENSORS + N_BLOCKS)
    assert out.read_bytes() == expected
    assert names(out.parent) == [out.name]


def places(plan: ContainerPlan) -> dict[str, int]:
    """A byte of every kind of region of the partial file."""
    tensor = plan.tensor("layers.1.q")
    block = int(plan.cells[plan.order[0]]["offset"])
    payload = int(plan.cells[plan.order[0]]["n_bytes"])
    padded = plan.cells[plan.order[1]]
    assert padded["n_bytes"] % plan.alignment
    return {
        "page 0": 0,
        "metadata": 5000,
        "reserve": plan.data_offset - 1,
        "tensor": tensor.offset + 7,
        "gap between tensors": plan.expert_offset - 1,
        "first of a block": block,
        "last of a block": block + payload - 1,
        "padding of a block": int(padded["offset"] + padded["n_bytes"]),
        "block not written": int(plan.cells[plan.order[7]]["offset"]) + 1,
    }


@pytest.mark.parametrize("where", list(places(small_plan())))
def test_damage_in_the_partial_file_is_found_and_repaired(
    out: Path, expected: bytes, where: str
) -> None:
    plan = interrupt(out)
    with (out.parent / LEFT[1]).open("r+b") as file:
        file.seek(places(plan)[where])
        file.write(b"\xa5")
    with ContainerWriter(plan, out) as writer:
        kept, _ = fill(writer)
        n_damaged = writer.n_damaged
        writer.seal()
    in_entry = where in ("tensor", "first of a block", "last of a block", "padding of a block")
    assert (n_damaged, kept) == (in_entry, N_TENSORS + 5 - in_entry)
    assert out.read_bytes() == expected


def test_a_cut_or_grown_partial_file_is_repaired(out: Path, expected: bytes) -> None:
    plan = interrupt(out)
    os.truncate(out.parent / LEFT[1], int(plan.cells[plan.order[4]]["offset"]) + 100)
    assert finish(out) == (N_TENSORS + 4, 4)
    assert out.read_bytes() == expected
    out.unlink()
    interrupt(out)
    with (out.parent / LEFT[1]).open("ab") as file:
        file.write(b"more")
    finish(out)
    assert out.read_bytes() == expected


def test_a_read_error_in_the_partial_file_means_writing_again(
    out: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = interrupt(out)
    real, bad = os.preadv, int(plan.cells[plan.order[2]]["offset"])

    def fail(fd: int, buffers: Any, offset: int) -> int:
        if offset == bad:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    assert finish(out) == (N_TENSORS + 4, 4)
    assert out.read_bytes() == expected


# -- the journal -----------------------------------------------------------------------------------


def header_bytes(journal: Path) -> int:
    data = journal.read_bytes()
    return 16 + struct.unpack("<I", data[12:16])[0] + 4


def kept_with(out: Path, journal: bytes) -> int:
    """How much a rerun keeps with this journal; the files are left as they were."""
    copy = out.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    shutil.copy(out.parent / LEFT[1], copy / LEFT[1])
    (copy / LEFT[0]).write_bytes(journal)
    kept, _ = finish(copy / "m.colibri")
    assert verify_container(copy / "m.colibri").ok
    return kept


def test_the_torn_tail_of_a_journal_is_ignored(out: Path, expected: bytes) -> None:
    interrupt(out, 2)
    journal = (out.parent / LEFT[0]).read_bytes()
    head = header_bytes(out.parent / LEFT[0])
    n = N_TENSORS + 2
    end = head + n * RECORD_BYTES
    assert len(journal) >= head + (N_TENSORS + N_BLOCKS) * RECORD_BYTES  # reserved from the start
    assert not any(journal[end:])
    for cut in (0, 1, 17, 63):
        assert kept_with(out, journal[: end - RECORD_BYTES + cut]) == n - 1
    assert kept_with(out, journal[: end - 30] + bytes(30) + journal[end:]) == n - 1
    assert kept_with(out, journal[:end] + b"\xff" * 1000) == n
    assert kept_with(out, journal[:head]) == 0


def test_records_behind_a_bad_one_do_not_count(out: Path) -> None:
    interrupt(out, 2)
    journal = bytearray((out.parent / LEFT[0]).read_bytes())
    head = header_bytes(out.parent / LEFT[0])
    for at in (0, 4, 8, 12, 16, 20, 51, 52, 60):
        changed = bytearray(journal)
        changed[head + 5 * RECORD_BYTES + at] ^= 1
        assert kept_with(out, changed) == 5, at
    swapped = bytearray(journal)
    first, second = (slice(head + i * RECORD_BYTES, head + (i + 1) * RECORD_BYTES) for i in (3, 4))
    swapped[first], swapped[second] = journal[second], journal[first]
    assert kept_with(out, swapped) == 3


def test_records_after_a_torn_tail_are_found_again(out: Path, expected: bytes) -> None:
    interrupt(out, 2)
    journal = out.parent / LEFT[0]
    end = header_bytes(journal) + (N_TENSORS + 2) * RECORD_BYTES
    journal.write_bytes(journal.read_bytes()[: end - 7] + b"\xee" * 500)
    interrupt(out, 6)
    assert finish(out) == (N_TENSORS + 6, 2)
    assert out.read_bytes() == expected


def test_records_behind_a_bad_one_stay_dead(out: Path) -> None:
    plan = interrupt(out, 2)
    journal = out.parent / LEFT[0]
    data = bytearray(journal.read_bytes())
    data[header_bytes(journal) + 5 * RECORD_BYTES] ^= 4
    journal.write_bytes(data)
    with pytest.raises(KeyboardInterrupt), ContainerWriter(plan, out) as writer:
        # The sixth record is written again; the seventh of before has the right number and CRC.
        writer.write_block(1, 0, payload_of(plan, 1, 0))
        raise KeyboardInterrupt
    with (
        pytest.raises(KeyboardInterrupt, match="1 of 8 blocks and 5 of 32 tensors"),
        ContainerWriter(plan, out),
    ):
        raise KeyboardInterrupt


def test_a_journal_removed_before_it_was_locked_is_not_used(
    out: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = out.parent / LEFT[0]
    real, calls = journal_module.fcntl.flock, 0

    def flock(fd: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # the job that had the lock finishes right now
            journal.unlink()
        real(fd, operation)

    monkeypatch.setattr(journal_module.fcntl, "flock", flock)
    plan = small_plan()
    with ContainerWriter(plan, out) as writer:
        assert calls == 2
        assert names(out.parent) == LEFT
        fill(writer)
        writer.seal()
    assert out.read_bytes() == expected
    assert names(out.parent) == [out.name]


def test_a_file_system_without_locks_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(journal_module.fcntl, "flock", flock)
    with pytest.raises(JobError, match="cannot lock files"):
        finish(out)
    assert names(out.parent) == []


@pytest.mark.parametrize("at", [0, 8, 12, 100, -1])
def test_a_damaged_journal_is_refused_until_restart(out: Path, expected: bytes, at: int) -> None:
    interrupt(out)
    journal = out.parent / LEFT[0]
    data = bytearray(journal.read_bytes())
    data[header_bytes(journal) - 1 if at < 0 else at] ^= 0x80
    journal.write_bytes(data)
    words = "no journal of colibri" if at == 0 else "journal is damaged"
    before = (out.parent / LEFT[1]).read_bytes()
    with pytest.raises(JobError, match=words):
        finish(out)
    assert (out.parent / LEFT[1]).read_bytes() == before
    assert journal.read_bytes() == data
    if at == 0:
        journal.unlink()
    finish(out, restart=True)
    assert out.read_bytes() == expected


def test_a_foreign_file_with_the_journals_name_is_never_touched(out: Path) -> None:
    journal = out.parent / LEFT[0]
    journal.write_text("notes of a day")
    for options in ({}, {"restart": True}):
        with pytest.raises(JobError, match="no journal of colibri"):
            finish(out, **options)
    assert journal.read_text() == "notes of a day"
    assert names(out.parent) == [journal.name]


@pytest.mark.parametrize("content", [b"", bytes(4096), b"CLB", b"CLBJRNL\0" + bytes(100)])
def test_a_journal_that_was_only_begun_is_begun_again(
    out: Path, expected: bytes, content: bytes
) -> None:
    (out.parent / LEFT[0]).write_bytes(content)
    finish(out)
    assert out.read_bytes() == expected
    assert names(out.parent) == [out.name]


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("make", ["link", "directory", "fifo"])
def test_names_that_are_no_files_are_refused(out: Path, name: str, make: str) -> None:
    path, target = out.parent / name, out.parent / "target"
    if make == "link":
        target.write_text("precious")
        path.symlink_to(target)
    elif make == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = names(out.parent)
    for options in ({}, {"restart": True}):
        with pytest.raises(JobError):
            finish(out, **options)
    assert names(out.parent) == before
    if make == "link":
        assert target.read_text() == "precious"


def test_a_partial_file_with_a_second_name_is_not_written(out: Path, expected: bytes) -> None:
    interrupt(out)
    second = out.parent / "second"
    second.hardlink_to(out.parent / LEFT[1])
    before = second.read_bytes()
    assert finish(out) == (0, N_TENSORS + N_BLOCKS)
    assert second.read_bytes() == before
    assert out.read_bytes() == expected


def test_a_journal_beside_a_finished_file_is_swept(out: Path, expected: bytes) -> None:
    interrupt(out)
    journal = (out.parent / LEFT[0]).read_bytes()
    finish(out)
    (out.parent / LEFT[0]).write_bytes(journal)
    with pytest.raises(UsageError, match="exists"):
        finish(out)
    assert names(out.parent) == [out.name]
    (out.parent / LEFT[0]).write_bytes(journal)
    (out.parent / LEFT[1]).hardlink_to(out)  # renaming by link and unlink was cut in between
    with pytest.raises(UsageError, match="exists"):
        finish(out)
    assert names(out.parent) == [out.name]
    assert out.read_bytes() == expected


def test_sync_comes_before_the_journal_and_the_journal_is_synced(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record is written after a sync of the partial that came after its last write."""
    events: list[tuple[str, str, int]] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            result = real(fd, *args)
            events.append((name, path.suffix, args[1] if len(args) > 1 else -1))
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("pwritev", "fsync", "fdatasync"):
        watch(name)
    monkeypatch.setattr(flusher, "FLUSH_BYTES", 1)
    interrupt(out)
    appends = [i for i, event in enumerate(events) if event[:2] == ("pwritev", ".journal")][1:]
    assert appends
    for at in appends:
        journaled = [name for name, suffix, _ in events[at:] if suffix == ".journal"]
        assert journaled[:2] == ["pwritev", "fsync"]
        assert any(event[:2] == ("fdatasync", ".partial") for event in events[:at])


def test_space_that_the_partial_file_has_counts(
    out: Path, monkeypatch: pytest.MonkeyPatch, expected: bytes
) -> None:
    plan = interrupt(out)
    monkeypatch.setattr(destination, "available_bytes", lambda path: 0)
    destination.check_space(out, plan.file_size)
    finish(out)
    assert out.read_bytes() == expected
    with pytest.raises(JobError, match="not enough disk space"):
        finish(out, force=True)


# -- what must be the same -------------------------------------------------------------------------

STATE = SourceState("a.safetensors", 100, "17", "00ff")


@pytest.mark.parametrize(
    ("changes", "sources", "words"),
    [
        ({"blobs": {"config.json": b"{}"}}, [STATE], "source file 'config.json' has changed"),
        ({"provenance": {"tool": "x"}}, [STATE], "tool was 'colibri-tools test', now 'x'"),
        ({"alignment": 8192}, [STATE], "the plan of the container has changed"),
        ({}, [], r"'a\.safetensors' is no longer there"),
        ({}, [STATE, SourceState("b", 1, "1", "")], "'b' is new"),
        ({}, [SourceState("a.safetensors", 101, "17", "00ff")], "had 100 bytes, has 101"),
        ({}, [SourceState("a.safetensors", 100, "18", "00ff")], "was written to or replaced"),
        ({}, [SourceState("a.safetensors", 100, "17", "00fe")], "was written to or replaced"),
    ],
)
def test_another_job_is_refused_and_told_what_differs(
    out: Path, changes: dict[str, Any], sources: list[SourceState], words: str
) -> None:
    interrupt(out, sources=[STATE])
    before = [(out.parent / name).read_bytes() for name in LEFT]
    plan = small_plan(**changes)
    with (
        pytest.raises(UsageError, match=f"{words}.*--restart"),
        ContainerWriter(plan, out, sources=sources),
    ):
        pass
    assert [(out.parent / name).read_bytes() for name in LEFT] == before
    with ContainerWriter(plan, out, sources=sources, restart=True) as writer:
        assert fill(writer)[0] == 0
        writer.seal()
    assert verify_container(out).ok
    assert names(out.parent) == [out.name]


def test_a_refusal_after_a_resume_leaves_nothing(out: Path) -> None:
    interrupt(out)
    with pytest.raises(SourceError), ContainerWriter(small_plan(), out) as writer:
        fill(writer)
        raise SourceError("NaN")
    assert names(out.parent) == []


# -- repack ----------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    spec = tm.default_spec("olmoe", experts=5, width=24)
    return tm.write_hf(tmp_path / "src" / "hf", "olmoe", spec, shards=2)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path / "m.colibri"


def stop_after(n: int) -> Callable[[int, int], None]:
    """A progress callback that interrupts at its n-th call."""
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == n:
            raise KeyboardInterrupt

    return progress


def interrupt_repack(source: Path, out: Path, n: int = 12, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        repack(source, out, threads=1, progress=stop_after(n), **options)
    assert names(out.parent) == LEFT


def reference(source: Path, folder: Path, **options: Any) -> bytes:
    repack(source, folder / "reference", **options)
    return (folder / "reference").read_bytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [2, 7, 20])
def test_repack_goes_on_where_it_stopped(
    source: Path, place: Path, tmp_path: Path, n: int, threads: int
) -> None:
    interrupt_repack(source, place, n)
    done: list[tuple[int, int]] = []
    result = repack(source, place, threads=threads, progress=lambda *a: done.append(a))
    assert result.n_kept >= n - 1  # a tensor's last bytes count before it is finished
    assert any("went on with an earlier job" in note for note in result.notes)
    assert done[-1][0] == done[-1][1]  # what was kept counts as done
    assert place.read_bytes() == reference(source, tmp_path)
    assert names(place.parent) == [place.name]


def test_reorder_goes_on_where_it_stopped(source: Path, place: Path, tmp_path: Path) -> None:
    model, profile = tmp_path / "model", tmp_path / "p.profile"
    repack(source, model)
    ids = tmp_path / "ids"
    ids.write_text(" ".join(str(i % 61) for i in range(100)))
    profile_routing(model, profile, token_files=[("text", ids)])
    hot = tmp_path / "hot"
    reorder(model, hot, routing=profile)
    with pytest.raises(KeyboardInterrupt):
        reorder(model, place, routing=profile, threads=1, progress=stop_after(20))
    assert names(place.parent) == LEFT
    with pytest.raises(UsageError, match=r"order was 'hotness', now 'coactivation'.*--restart"):
        reorder(model, place, routing=profile, order="coactivation")
    result = reorder(model, place, routing=profile)
    assert result.n_kept >= 19
    assert place.read_bytes() == hot.read_bytes() != model.read_bytes()
    assert names(place.parent) == [place.name]


def test_repack_keeps_nothing_of_a_source_with_nan(tmp_path: Path, place: Path) -> None:
    def poison(weights: dict[str, Any]) -> None:
        name = next(n for n in reversed(list(weights)) if "experts.4.down_proj" in n)
        weights[name][3, 5] = np.nan

    spec = tm.default_spec("olmoe", experts=5, width=24)
    bad = tm.write_hf(tmp_path / "bad", "olmoe", spec, mutate=poison)
    with pytest.raises(SourceError, match=r"expert 4 down \[3, 5\]"):
        repack(bad, place, threads=1)
    assert names(place.parent) == []


def test_repack_with_other_options_is_refused(source: Path, place: Path) -> None:
    interrupt_repack(source, place)
    before = [(place.parent / name).read_bytes() for name in LEFT]
    with pytest.raises(UsageError, match=r"align was 4096, now 8192.*--restart"):
        repack(source, place, align=8192)
    with pytest.raises(UsageError, match="whole source files were not hashed"):
        repack(source, place, hash_sources=True)
    repack(source, place, align=8192, dry_run=True)
    assert [(place.parent / name).read_bytes() for name in LEFT] == before
    assert repack(source, place, align=8192, restart=True).n_kept == 0
    assert names(place.parent) == [place.name]


def test_another_version_of_the_tool_is_refused(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_repack(source, place)
    monkeypatch.setattr(planner, "__version__", "99.0")
    with pytest.raises(UsageError, match=r"tool version was '.*', now '99\.0'"):
        repack(source, place)


@pytest.mark.parametrize("change", ["touched", "replaced", "config"])
def test_a_changed_source_is_refused(source: Path, place: Path, change: str) -> None:
    interrupt_repack(source, place)
    shard = sorted(source.glob("*.safetensors"))[0]
    if change == "touched":
        os.utime(shard, (1, 1))
    elif change == "replaced":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        other = shard.with_suffix(".new")
        other.write_bytes(data)
        other.replace(shard)
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    words = "config.json" if change == "config" else shard.name
    with pytest.raises(UsageError, match=f"'{words}' (was written|has changed).*--restart"):
        repack(source, place)
    assert names(place.parent) == LEFT


def test_force_leaves_the_earlier_output_until_the_end(
    source: Path, place: Path, tmp_path: Path
) -> None:
    place.write_bytes(b"precious")
    with pytest.raises(KeyboardInterrupt):
        repack(source, place, force=True, threads=1, progress=stop_after(12))
    assert place.read_bytes() == b"precious"
    assert names(place.parent) == ["m.colibri", *LEFT]
    with pytest.raises(UsageError, match="exists; use --force"):
        repack(source, place)
    assert names(place.parent) == ["m.colibri", *LEFT]
    assert repack(source, place, force=True).n_kept >= 11
    assert place.read_bytes() == reference(source, tmp_path)
    assert names(place.parent) == [place.name]


def test_a_stopped_thread_gives_up_a_long_tensor(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack_module, "CHUNK_BYTES", 64)
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        time.sleep(0.002)

    with pytest.raises(KeyboardInterrupt):
        repack(source, place, threads=2, progress=progress)
    assert calls < 30  # a tensor has hundreds of pieces here


# -- two processes ---------------------------------------------------------------------------------

PAUSE = (
    "import sys, colibri_tools.repack as r\n"
    "inner = r.ContainerWriter.seal\n"
    "def seal(self): print('ready', flush=True); sys.stdin.readline(); return inner(self)\n"
    "r.ContainerWriter.seal = seal"
)


def start_paused(source: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """A repack that waits for a line before it seals."""
    process = subprocess.Popen(
        command("repack", source, "-o", out, "-q", *options, setup=PAUSE, flush_bytes=1 << 30),
        env=environment(None),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_process_is_turned_away(source: Path, place: Path, tmp_path: Path) -> None:
    first = start_paused(source, place)
    before = [(place.parent / name).read_bytes() for name in LEFT]
    for options in ([], ["--restart"], ["--force"], ["--align", "8192"]):
        second = colibri("repack", source, "-o", place, *options)
        assert second.returncode == 1
        assert len(second.stderr.splitlines()) == 1
        assert "another job is writing" in second.stderr
        assert [(place.parent / name).read_bytes() for name in LEFT] == before
    _, stderr = first.communicate("\n", timeout=60)
    assert (first.returncode, stderr) == (0, "")
    assert place.read_bytes() == reference(source, tmp_path)
    assert names(place.parent) == [place.name]


def test_many_at_once_give_one_right_file(source: Path, place: Path, tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            command("repack", source, "-o", place),
            env=environment(None),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    texts = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs].count(0) == 1, texts
    for job, text in zip(jobs, texts, strict=True):
        assert job.returncode in (0, 1, 2), text
        assert not job.returncode or "another job" in text or "exists" in text or "there" in text
    assert place.read_bytes() == reference(source, tmp_path)
    assert names(place.parent) == [place.name]


def test_reading_goes_on_while_another_process_replaces_the_file(
    source: Path, place: Path, tmp_path: Path
) -> None:
    repack(source, place)
    old = place.read_bytes()
    process = start_paused(source, place, "--force", "--align", "8192")
    with colibri_tools.open(place) as container:
        assert verify_container(place).ok  # beside the partial file of another job
        before = [bytes(container.block(0, expert)) for expert in range(5)]
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
        assert place.read_bytes() != old
        assert [bytes(container.block(0, expert)) for expert in range(5)] == before
    assert verify_container(place).ok


# -- signals ---------------------------------------------------------------------------------------


def test_a_second_signal_ends_at_once_and_the_rerun_goes_on(
    source: Path, place: Path, tmp_path: Path
) -> None:
    setup = PAUSE + (
        "\nimport time\n"
        "def flush(self): print('flushing', flush=True); time.sleep(60)\n"
        "r.ContainerWriter._stop_flusher = lambda self, flush: globals()['flush'](self)"
    )
    process = subprocess.Popen(
        command("repack", source, "-o", place, setup=setup),
        env=environment(None),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    journal = place.parent / LEFT[0]
    while not any(journal.read_bytes()[header_bytes(journal) :]):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "flushing\n"
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert process.returncode == -signal.SIGTERM
    assert repack(source, place).n_kept > 0
    assert place.read_bytes() == reference(source, tmp_path)
