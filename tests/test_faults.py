"""Injected faults: the complete right file or none, one line that says why, and a rerun that ends
with the same bytes. The shim is tests/c/fault_shim.c; docs/reliability.md has the commands.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
from fault_util import FLUSH_BYTES, build_shim, colibri, kill_sweep, names

from colibri_tools.container import flusher
from colibri_tools.errors import SourceError
from colibri_tools.repack import repack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD, /proc")

LEFT = ["m.colibri.journal", "m.colibri.partial"]
KILLS = int(os.environ.get("COLIBRI_KILLS", "10"))
"""Kills of each kind; 200 for the record in docs/reliability.md."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tm.default_spec("olmoe", experts=5, width=24)
    return tm.write_hf(tmp_path_factory.mktemp("source") / "hf", "olmoe", spec, shards=2)


@pytest.fixture(scope="module")
def sound(source: Path) -> Path:
    """The container of an undisturbed job."""
    path = source.parent / "sound.colibri"
    repack(source, path)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path / "m.colibri"


# -- faults that a job survives --------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "op=read,path=safetensors,nth=1,times=0,do=short",
        "op=write,path=.partial,nth=1,times=0,do=short",
        "op=write,path=.journal,nth=1,times=0,do=short",
        f"op=read,path=safetensors,nth=5,times=3,do={errno.EINTR}",
        f"op=write,path=.partial,nth=3,times=2,do={errno.EINTR}",
        f"op=write,path=.journal,nth=2,times=2,do={errno.EINTR}",
        f"op=sync,nth=1,times=2,do={errno.EINTR}",
        f"op=allocate,nth=1,times=2,do={errno.EINTR}",
        f"op=allocate,path=.partial,nth=1,do={errno.EOPNOTSUPP}",
        f"op=allocate,path=.partial,nth=1,do={errno.ENOSYS}",
        f"op=rename,nth=1,do={errno.EINVAL}",  # a file system without RENAME_NOREPLACE
        f"op=unlink,path=.journal,nth=1,do={errno.EIO}",  # a leftover, swept later
    ],
)
def test_these_faults_do_not_show(
    shim: Path, source: Path, sound: Path, out: Path, fault: str
) -> None:
    done = colibri("repack", source, "-o", out, "-q", shim=shim, fault=fault)
    assert (done.returncode, done.stderr) == (0, "")
    assert out.read_bytes() == sound.read_bytes()
    if "unlink" in fault:
        assert colibri("repack", source, "-o", out).returncode == 2
    assert names(out.parent) == [out.name]


# -- faults that end a job -------------------------------------------------------------------------


SYNC_IN_STEP = (
    "def wrote(self, n):\n"
    "    self._check(); self._unflushed += n\n"
    "    if self._unflushed >= f.FLUSH_BYTES: self._unflushed = 0; self.flush()\n"
    "f.Flusher.wrote = wrote"
)
"""The n-th call is the same one in every run: the job syncs where the thread of its own would."""


def fails(shim: Path, source: Path, out: Path, fault: str, **options: Any) -> tuple[str, list[str]]:
    """Repack with a fault that must end it; returns the message and what is left."""
    call = ("repack", source, "-o", out, "-q", "--threads", "1")
    done = colibri(*call, shim=shim, fault=fault, setup=SYNC_IN_STEP, **options)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
    return done.stderr, names(out.parent)


def goes_on(source: Path, sound: Path, out: Path) -> int:
    """The same command without the fault; returns how much was kept."""
    n_kept = repack(source, out).n_kept
    assert out.read_bytes() == sound.read_bytes()
    assert names(out.parent) == [out.name]
    return n_kept


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    "where",
    [
        "op=write,path=.partial,nth=1",
        "op=write,path=.partial,nth=20",
        "op=write,path=.partial,nth=46",  # the metadata
        "op=write,path=.journal,nth=2",
        "op=write,path=.journal,nth=3,times=0",
        "op=sync,path=.partial,nth=1",
        "op=sync,path=.partial,nth=2,times=0",
        "op=sync,path=.journal,nth=2",
        "op=rename,nth=1",
    ],
)
def test_a_failing_write_keeps_what_is_on_disk(
    shim: Path, source: Path, sound: Path, out: Path, where: str, code: int
) -> None:
    text, left = fails(shim, source, out, f"{where},do={code}")
    assert ("not enough disk space" if code != errno.EIO else os.strerror(code)) in text
    assert left in ([], LEFT)
    assert ("are kept in" in text and "--restart" in text) == bool(left)
    assert (goes_on(source, sound, out) > 0) == bool(left)


@pytest.mark.parametrize(
    "where",
    [
        "op=open,path=.journal",
        "op=open,path=.partial",
        "op=write,path=.journal",
        "op=sync,path=.journal",
        "op=allocate,path=.journal",
        "op=allocate,path=.partial",
    ],
)
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
def test_a_start_that_fails_leaves_nothing(
    shim: Path, source: Path, sound: Path, out: Path, where: str, code: int
) -> None:
    text, left = fails(shim, source, out, f"{where},nth=1,do={code}")
    assert left == []
    assert "are kept in" not in text
    assert goes_on(source, sound, out) == 0


def test_a_failed_sync_is_not_believed_later(
    shim: Path, source: Path, sound: Path, out: Path
) -> None:
    """After a failed sync the system may drop the pages and report success the next time."""
    fault = f"op=sync,path=.partial,nth=1,do={errno.EIO}"
    for flush_bytes in (FLUSH_BYTES, 1 << 30):  # on the way, and when the file is finished
        text, left = fails(shim, source, out, fault, flush_bytes=flush_bytes)
        assert left == [] and "are kept" not in text


def test_a_full_disk_under_a_sparse_file(shim: Path, source: Path, sound: Path, out: Path) -> None:
    # Without fallocate a file system accepts the size and runs full later.
    fault = f"op=write,path=.partial,nth=30,times=0,do={errno.ENOSPC}"
    text, left = fails(shim, source, out, fault)
    assert left == LEFT and "29 of" not in text
    assert goes_on(source, sound, out) > 0


def test_a_directory_that_cannot_be_synced_is_said(
    shim: Path, source: Path, sound: Path, out: Path
) -> None:
    # The third sync of the folder comes after the rename.
    fault = f"op=sync,path=place,nth=3,do={errno.EIO}"
    done = colibri("repack", source, "-o", out, shim=shim, fault=fault)
    assert done.returncode == 1
    assert "the file is complete, but" in done.stderr
    assert out.read_bytes() == sound.read_bytes()
    assert names(out.parent) == [out.name]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_case_10_7_a_source_that_cannot_be_read(
    shim: Path, source: Path, sound: Path, out: Path, code: int
) -> None:
    text, left = fails(shim, source, out, f"op=read,path=safetensors,nth=25,times=0,do={code}")
    assert os.strerror(code) in text
    assert "model.layers." in text and "at offset " in text
    assert left in ([], LEFT)
    goes_on(source, sound, out)


@pytest.mark.parametrize("where", ["op=write,path=.partial,nth=30", "op=rename,nth=1"])
def test_an_earlier_output_survives(
    shim: Path, source: Path, sound: Path, out: Path, where: str
) -> None:
    out.write_bytes(b"precious")
    fault = f"{where},do={errno.EIO}"
    done = colibri("repack", source, "-o", out, "--force", shim=shim, fault=fault)
    assert done.returncode == 1
    assert out.read_bytes() == b"precious"
    repack(source, out, force=True)
    assert out.read_bytes() == sound.read_bytes()
    assert names(out.parent) == [out.name]


# -- sources that move -----------------------------------------------------------------------------


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("what", ["shrinks", "grows", "is replaced", "is overwritten", "goes away"])
def test_a_source_that_changes_while_it_is_read(
    source: Path, tmp_path: Path, out: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "FLUSH_BYTES", FLUSH_BYTES)
    mine = copied(source, tmp_path / "copy")
    shard = sorted(mine.glob("*.safetensors"))[-1]
    data, calls = shard.read_bytes(), 0

    def change(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls != 10:
            return
        if what == "shrinks":
            os.truncate(shard, len(data) // 2)
        elif what == "grows":
            with shard.open("ab") as file:
                file.write(b"more")
        elif what == "is replaced":
            (mine / "other").write_bytes(data)
            (mine / "other").replace(shard)
        elif what == "is overwritten":
            shard.write_bytes(data)
        else:
            shard.unlink()

    with pytest.raises(SourceError, match=shard.name):
        repack(mine, out, threads=1, progress=change)
    # What went away may come back (a drive, a mount); anything else makes the work worthless.
    assert names(out.parent) == (LEFT if what == "goes away" else [])


# -- limits ----------------------------------------------------------------------------------------


def test_case_10_5_a_file_size_limit(source: Path, sound: Path, out: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

    done = colibri("repack", source, "-o", out, preexec_fn=limit)
    assert done.returncode == 1
    assert "ulimit -f" in done.stderr and len(done.stderr.splitlines()) == 1
    assert names(out.parent) == []


LIMIT_MEMORY = (
    "import colibri_tools.repack as r, resource, re, pathlib\n"
    "inner = r._Copier.run\n"
    "def run(self, n):\n"
    "    status = pathlib.Path('/proc/self/status').read_text()\n"
    "    size = int(re.search(r'VmSize:\\s+(\\d+)', status)[1]) << 10\n"
    "    resource.setrlimit(resource.RLIMIT_AS, (size + ({room} << 20),) * 2)\n"
    "    inner(self, n)\n"
    "r._Copier.run = run"
)


def limited(source: Path, out: Path, room: int) -> Any:
    return colibri(
        "repack", source, "-o", out, "--threads", "1", setup=LIMIT_MEMORY.format(room=room)
    )


def test_case_10_4_a_memory_limit(tmp_path: Path, out: Path) -> None:
    """48 MiB of experts pass through room for a few of them, 3 MiB each; less is an error."""
    spec = tm.default_spec("mixtral", hidden=512, width=512, experts=4, layers=4)
    big = tm.write_hf(tmp_path / "big", "mixtral", spec)
    done = limited(big, out, 24)  # the thread's stack takes 8 of it
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 48 << 20
    sound = out.read_bytes()
    out.unlink()
    done = limited(big, out, 1)
    assert done.returncode == 1
    assert "memory" in done.stderr or "thread" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert names(out.parent) in ([], LEFT)
    repack(big, out)
    assert out.read_bytes() == sound


# -- kills -----------------------------------------------------------------------------------------


@pytest.mark.timeout(60 + 20 * KILLS)
@pytest.mark.parametrize("lose", [False, True], ids=["kill -9", "power cut"])
def test_case_10_1_killed_anywhere_it_can_be_finished(
    shim: Path, source: Path, out: Path, lose: bool
) -> None:
    report = kill_sweep(shim, source, out.parent, KILLS, 20240607, lose=lose)
    assert report["points"] == KILLS
    assert report["kills"] >= KILLS // 2
    assert report["went on"] > 0 and report["blocks_kept"] > 0


# -- reading a container ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        f"op=read,path=sound,direct=1,nth=1,times=0,do={errno.EINVAL}",
        f"op=read,path=sound,nth=3,times=4,do={errno.EINTR}",
        "op=read,path=sound,nth=1,times=0,do=short",
        "op=read,path=sound,direct=1,nth=1,times=0,do=short",
    ],
)
def test_run_is_the_same_with_a_worse_drive(shim: Path, sound: Path, fault: str) -> None:
    call = ("run", sound, "--tokens", "1,2,3", "--max-tokens", "5")
    expected = colibri(*call)
    found = colibri(*call, shim=shim, fault=fault)
    assert expected.returncode == found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout


def test_case_10_7_run_names_what_cannot_be_read(shim: Path, sound: Path) -> None:
    call = ("run", sound, "-q", "--tokens", "1,2,3", "--max-tokens", "5")
    fault = f"op=read,path=sound,direct=1,nth=8,times=0,do={errno.EIO}"
    done = colibri(*call, shim=shim, fault=fault)
    assert done.returncode == 1
    assert "expert" in done.stderr and os.strerror(errno.EIO) in done.stderr
    assert len(done.stderr.splitlines()) == 1
