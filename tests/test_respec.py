"""Respec: the spec is rebuilt from what the container carries, in place, and no crash harms it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
from container_util import Draft, make_container
from fault_util import build_shim
from fault_util import colibri as faulty_colibri
from gguf import GGMLQuantizationType
from oracle.cases import CASES
from repack_util import small_gguf, small_hf, small_spec
from tiny_containers import Containers, logits

import colibri_tools
from colibri_tools import respec as respec_module
from colibri_tools.container import SectionKind, rewrite
from colibri_tools.container.fileops import backup_path
from colibri_tools.container.kv import decode_kv, encode_kv
from colibri_tools.errors import ColibriError, FormatError, JobError, SourceError
from colibri_tools.output import Output
from colibri_tools.repack import repack
from colibri_tools.respec import VERSION_KEY, respec
from colibri_tools.verify import verify

Values = dict[str, Any]


def edited(path: Path, change: Callable[[Values], None], section: int = SectionKind.SPEC) -> Path:
    """Change a key-value section of a container; all checksums hold afterwards."""
    draft = Draft(bytearray(path.read_bytes()))
    values, types = decode_kv(draft.section_bytes(section), "section")
    change(values)
    draft.replace_section(section, encode_kv(values, types))
    path.write_bytes(draft.seal().data)
    return path


def sections(path: Path) -> dict[str, bytes]:
    """The contents of every section, and everything behind the metadata."""
    with colibri_tools.open(path) as container:
        found = {SectionKind(k).label: container.read(at, n) for k, at, n in container.sections}
        found["data"] = path.read_bytes()[container.data_offset :]
    return found


def copy_of(path: Path, folder: Path) -> Path:
    out = folder / "model.colibri"
    out.write_bytes(path.read_bytes())
    return out


def wrong_eps(spec: Values) -> None:
    spec["graph.norm_eps"] = 0.25


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repacked container that no test changes."""
    folder = tmp_path_factory.mktemp("respec")
    repack(small_hf(folder / "hf", "qwen3_moe"), folder / "fresh.colibri")
    return folder / "fresh.colibri"


@pytest.fixture
def altered(fresh: Path, tmp_path: Path) -> Path:
    """A copy of it with a wrong epsilon."""
    return edited(copy_of(fresh, tmp_path), wrong_eps)


# ---------------------------------------------------------------- unchanged


LONGROPE = CASES["phimoe-longrope-long"].spec.rope


def sources() -> Iterator[Any]:
    small: Values = {"experts": 5, "width": 24}
    for family in tm.ALL_FAMILIES:
        for kind in ("hf", "gguf"):
            yield pytest.param(family, kind, small, {}, id=f"{family}-{kind}")
            yield pytest.param(family, kind, small | {"tied": True}, {}, id=f"{family}-{kind}-tied")
    more: list[tuple[str, str, Values, Values]] = [
        ("mixtral", "hf", {}, {"form": "fused", "dtype": "bf16"}),
        ("mixtral", "gguf", {}, {"old_experts": True}),
        ("qwen2_moe", "hf", {"dense_layers": (1,)}, {"old_config": True}),
        ("qwen2_moe", "gguf", {"attention_bias": True}, {"dtype": "f16"}),
        ("qwen3_moe", "hf", {"attention_bias": True, "experts_of_layer": (5, 4, 3)}, {}),
        ("qwen3_moe", "hf", {"rope": {"rope_type": "yarn", "factor": 4.0}}, {}),
        ("olmoe", "hf", {"clip_qkv": 2.0}, {"shards": 3}),
        (
            "mixtral",
            "gguf",
            {
                "rope": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            {"split": 5},
        ),
        *(("phimoe", kind, {"rope": LONGROPE}, {}) for kind in ("hf", "gguf")),
        ("olmoe", "gguf", {"width": 64}, {"types": GGMLQuantizationType.Q8_0}),
    ]
    for number, (family, kind, changes, options) in enumerate(more):
        yield pytest.param(family, kind, small | changes, options, id=f"{family}-{kind}-{number}")


@pytest.mark.parametrize(("family", "kind", "changes", "options"), list(sources()))
def test_a_fresh_container_is_unchanged(
    family: str, kind: str, changes: Values, options: Values, containers: Containers
) -> None:
    spec = tm.default_spec(family, **changes)
    make = containers.hf if kind == "hf" else containers.gguf
    path = make(family, spec, **options)
    before, status = path.read_bytes(), path.stat()
    result = respec(path)
    assert (result.changes, result.changed, result.executable) == ((), False, True)
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def test_an_output_that_differs_from_the_embedding_is_still_no_alias(tmp_path: Path) -> None:
    repack(
        small_hf(tmp_path / "hf", "mixtral", overrides={"tie_word_embeddings": True}),
        tmp_path / "m.colibri",
    )
    assert not respec(tmp_path / "m.colibri").changed


@pytest.mark.parametrize("layers", [3, 2])
@pytest.mark.parametrize("config", ["known", "none"])
def test_an_unknown_family_is_unchanged_too(tmp_path: Path, layers: int, config: str) -> None:
    overrides = {"model_type": "novel_moe", "num_hidden_layers": layers}
    source = small_hf(tmp_path / "hf", "qwen3_moe", overrides=overrides)
    if config == "none":
        (source / "config.json").unlink()
    repack(source, tmp_path / "m.colibri")
    result = respec(tmp_path / "m.colibri")
    assert (result.changed, result.executable) == (False, False)


def test_a_second_stack_of_layers_does_not_take_the_experts_place(tmp_path: Path) -> None:
    """Residents that look like experts of another stack keep being residents."""

    def add_stacks(weights: Values) -> None:
        for stem in ("layers", "draft.layers"):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = (64, 24) if part == "down_proj" else (24, 64)
                weights[f"{stem}.0.mlp.experts.0.{part}.weight"] = np.ones(shape, np.float32)

    overrides = {"model_type": "novel_moe"}
    source = small_hf(tmp_path / "hf", "qwen3_moe", overrides=overrides, mutate=add_stacks)
    repack(source, tmp_path / "m.colibri")
    assert not respec(tmp_path / "m.colibri").changed


def test_an_unknown_gguf_architecture_is_unchanged_too(tmp_path: Path) -> None:
    spec = small_spec("qwen3_moe")
    values = tm.gguf_values("qwen3_moe", spec, tm.tensors("qwen3_moe", spec))
    metadata = {
        key.replace("qwen3moe.", "novel."): value
        for key, value in tm.gguf_metadata("qwen3_moe", spec).items()
    }
    stored = tm.encode_gguf(values, GGMLQuantizationType.F32)
    tm.write_gguf_tensors(tmp_path / "m.gguf", "novel", metadata, stored)
    repack(tmp_path / "m.gguf", tmp_path / "m.colibri")
    assert not respec(tmp_path / "m.colibri").changed


def test_unchanged_needs_no_right_to_write(fresh: Path, tmp_path: Path) -> None:
    path = copy_of(fresh, tmp_path)
    path.chmod(0o444)
    assert not respec(path).changed


# ---------------------------------------------------------------- changed

ALTERATIONS: dict[str, Callable[[Values], None]] = {
    "eps": wrong_eps,
    "router-norm": lambda spec: spec.update({"graph.router_norm": not spec["graph.router_norm"]}),
    "longer": lambda spec: spec.update({"eos_ids": [3, 5, 7, 9], "executable_lacks": "x" * 99}),
    "shorter": lambda spec: spec.update({"eos_ids": [], "family": "x"}),
    "kind": lambda spec: spec.update({"source_kind": "?", "graph.rope_pairing": "adjacent"}),
    "not-executable": lambda spec: spec.update({"executable": False, "executable_lacks": "faith"}),
    "counts": lambda spec: spec.update({"total_params": 1, "active_params": 1, "n_tokens": 7}),
}


@pytest.mark.parametrize("name", ALTERATIONS)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_wrong_spec_is_mended_to_that_of_a_fresh_repack(
    kind: str, name: str, tmp_path: Path
) -> None:
    write = small_hf if kind == "hf" else small_gguf
    source = write(tmp_path / ("hf" if kind == "hf" else "m.gguf"), "qwen2_moe")
    repack(source, tmp_path / "fresh.colibri")
    path = edited(copy_of(tmp_path / "fresh.colibri", tmp_path), ALTERATIONS[name])
    size = path.stat().st_size
    result = respec(path)
    assert result.changed and result.changes
    found, expected = sections(path), sections(tmp_path / "fresh.colibri")
    provenance, _ = decode_kv(found.pop("provenance"), "provenance")
    original, _ = decode_kv(expected.pop("provenance"), "provenance")
    assert found == expected
    assert provenance == {**original, VERSION_KEY: colibri_tools.__version__}
    assert path.stat().st_size == size
    assert verify(path).ok and verify(path, against=source).ok
    with colibri_tools.open(path) as container:
        assert container.id == result.id
    assert not respec(path).changed
    assert not backup_path(path).exists()


def test_changes_are_shown_and_a_dry_run_writes_nothing(altered: Path) -> None:
    before = altered.read_bytes()
    result = respec(altered, dry_run=True)
    assert [(c.key, c.old, c.new) for c in result.changes] == [("graph.norm_eps", 0.25, 1e-06)]
    assert result.dry_run and result.changed
    assert altered.read_bytes() == before
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["changes"] == [
        {"key": "graph.norm_eps", "old": 0.25, "new": 1e-06}
    ]


def test_run_obeys_the_new_spec(altered: Path, fresh: Path) -> None:
    tokens = [1, 2, 3, 4]
    assert not np.array_equal(logits(altered, tokens), logits(fresh, tokens))
    respec(altered)
    assert np.array_equal(logits(altered, tokens), logits(fresh, tokens))


def test_the_order_of_blocks_is_no_matter_of_the_source(fresh: Path, tmp_path: Path) -> None:
    path = edited(copy_of(fresh, tmp_path), lambda spec: spec.update(order="hotness"))
    assert not respec(path).changed
    with colibri_tools.open(path) as container:
        assert container.spec["order"] == "hotness"


def test_a_link_is_followed_and_the_mode_kept(altered: Path, tmp_path: Path) -> None:
    altered.chmod(0o640)
    link = tmp_path / "link.colibri"
    link.symlink_to(altered)
    assert respec(link).changed
    assert link.is_symlink() and stat.S_IMODE(altered.stat().st_mode) == 0o640


# ---------------------------------------------------------------- refusals


def refused(path: Path, error: type[ColibriError] = JobError) -> str:
    """Respec must fail and change nothing; returns the message."""
    before, names = path.read_bytes(), sorted(path.parent.iterdir())
    with pytest.raises(error) as caught:
        respec(path)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == names
    return caught.value.message


def test_a_damaged_blob_is_named(fresh: Path, tmp_path: Path) -> None:
    path = copy_of(fresh, tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b'"model_type"') + 1] ^= 4
    path.write_bytes(data)
    assert "section 'blobs': CRC-32C" in refused(path, FormatError)


def test_a_carried_config_that_is_no_json_is_named(fresh: Path, tmp_path: Path) -> None:
    path = copy_of(fresh, tmp_path)
    draft = Draft(bytearray(path.read_bytes()))
    blobs = draft.section_bytes(SectionKind.BLOBS)
    at = bytes(blobs).index(b'"model_type"')
    blobs[at : at + 1] = b"!"
    path.write_bytes(draft.seal().data)
    assert "config.json" in refused(path, FormatError)


def test_a_family_that_this_version_lacks_is_refused(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(fresh, tmp_path)
    monkeypatch.setattr("colibri_tools.families.detect.FAMILIES", ())
    assert "'qwen3_moe' in its carried files, which is no family" in refused(path)


def test_a_family_learnt_since_needs_a_repack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("colibri_tools.families.detect.FAMILIES", ())
        repack(small_hf(tmp_path / "hf", "mixtral"), tmp_path / "m.colibri")
    assert "did not know the family mixtral" in refused(tmp_path / "m.colibri")


def test_a_container_without_source_files_is_refused(tmp_path: Path) -> None:
    message = refused(make_container(tmp_path / "m.colibri", blobs={}))
    assert "there is no model type (no config.json?)" in message


def test_a_config_of_another_model_is_refused(fresh: Path, tmp_path: Path) -> None:
    path = copy_of(fresh, tmp_path)
    draft = Draft(bytearray(path.read_bytes()))
    blobs = draft.section_bytes(SectionKind.BLOBS)
    at = bytes(blobs).index(b'"num_attention_heads": 8')
    blobs[at : at + 24] = b'"num_attention_heads": 4'
    path.write_bytes(draft.seal().data)
    assert "heads x head size" in refused(path, SourceError)


def test_keys_and_sections_of_a_newer_version_are_not_thrown_away(
    altered: Path, tmp_path: Path
) -> None:
    draft = Draft(bytearray(altered.read_bytes()))
    entries = draft.page["sections"][0][: int(draft.page["n_sections"][0])]
    contents = {int(e["kind"]): bytes(draft.section_bytes(int(e["kind"]))) for e in entries}
    draft.place_sections(contents | {18: b"signature"}, flags={18: 0})
    newer = tmp_path / "newer.colibri"
    newer.write_bytes(draft.seal().data)
    assert "section kind 18" in refused(newer)
    draft = Draft(bytearray(altered.read_bytes()))
    draft.page["optional_features"] = 1
    newer.write_bytes(draft.seal_page().data)
    assert "an optional feature" in refused(newer)
    edited(altered, lambda spec: spec.update({"graph.not_yet": True}))
    assert "'graph.not_yet'" in refused(altered)


def test_metadata_that_outgrow_their_reserve_are_refused_with_the_shortfall(
    altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with colibri_tools.open(altered) as container:
        room = container.data_offset - 4096 - container.metadata_bytes
    real = respec_module._provenance
    monkeypatch.setattr(respec_module, "_provenance", lambda c: real(c) + bytes(room + 4096))
    message = refused(altered)
    needed = int(message.split("the new metadata need ")[1].split()[0])
    assert 3968 <= needed <= 4224  # 4096, one more key, sections begin at multiples of 64


def test_what_is_no_container_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no container")
    refused(tmp_path / "x", FormatError)
    with pytest.raises(SourceError):
        respec(tmp_path / "absent")
    with pytest.raises(SourceError):
        respec(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_read_only_file_is_not_changed(altered: Path) -> None:
    altered.chmod(0o444)
    assert "cannot be opened for writing" in refused(altered)


def test_a_second_respec_at_the_same_time_is_refused(altered: Path) -> None:
    with rewrite.locked(altered):
        assert "another job is rewriting it" in refused(altered)
    assert respec(altered).changed


# ---------------------------------------------------------------- crashes

N_STEPS = 8
"""Write and sync of the copy, then of zero, of the rest and of page 0."""


class Stop(Exception):
    """Stands for the end of the process."""


def steps(monkeypatch: pytest.MonkeyPatch, at: int, end: Callable[[], None]) -> list[str]:
    """Make the `at`-th write (half of it done) or fsync of files end the process."""
    done: list[str] = []
    real_write, real_sync = os.pwritev, os.fsync

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        done.append(f"write {offset}")
        if len(done) > at:
            real_write(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
            end()
        return real_write(fd, buffers, offset)

    def sync(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            done.append("sync")
            if len(done) > at:
                end()
        real_sync(fd)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "fsync", sync)
    return done


def die() -> None:
    os._exit(9)


def killed(path: Path, at: int) -> int:
    """Respec in a process that ends like one that is killed; returns its exit code."""

    def child() -> None:
        with pytest.MonkeyPatch.context() as patch:
            steps(patch, at, die)
            respec(path)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode or 0


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("at", range(N_STEPS + 1))
def test_a_kill_at_any_step_is_mended_by_the_next_respec(at: int, altered: Path) -> None:
    before = altered.read_bytes()
    assert killed(altered, at) == (9 if at < N_STEPS else 0)
    try:
        with colibri_tools.open(altered) as container:
            assert container.spec["graph.norm_eps"] == (1e-06 if at > N_STEPS - 2 else 0.25)
    except FormatError as error:
        assert 2 <= at < N_STEPS - 1
        assert "'colibri respec" in error.message and not verify(altered).ok
        with pytest.raises(FormatError):
            respec(altered, dry_run=True)
    data_offset = 1 << 20  # the reserve alone is more
    assert altered.read_bytes()[data_offset:] == before[data_offset:]
    result = respec(altered)
    assert bool(result.notes) == (at < N_STEPS)
    assert verify(altered).ok
    with colibri_tools.open(altered) as container:
        assert container.spec["graph.norm_eps"] == 1e-06
    assert not backup_path(altered).exists()


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("how", ["kill", "half"])
@pytest.mark.parametrize("nth", range(1, 13))
def test_a_power_cut_at_any_call_is_mended_by_the_next_respec(
    nth: int, how: str, altered: Path, shim: Path
) -> None:
    """What was not synced is lost or not, page by page, at random. There are 11 calls."""
    before = altered.read_bytes()
    for seed in (1, 2):
        altered.write_bytes(before)
        fault = f"op=any,nth={nth},do={how},lose={17 * nth + seed}"
        done = faulty_colibri("respec", altered, shim=shim, fault=fault)
        assert done.returncode == (-signal.SIGKILL if nth < 12 else 0), done.stderr
        try:
            with colibri_tools.open(altered) as container:
                assert container.spec["graph.norm_eps"] in (1e-06, 0.25)
        except FormatError as error:
            assert "'colibri respec" in error.message
        respec(altered)
        assert verify(altered).ok and not backup_path(altered).exists()
        with colibri_tools.open(altered) as container:
            assert container.spec["graph.norm_eps"] == 1e-06
            end = container.data_offset
        assert altered.read_bytes()[end:] == before[end:]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", range(N_STEPS))
def test_a_failing_write_or_sync_leaves_it_as_it_was(
    at: int, error: int, altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = altered.read_bytes()
    failed: list[int] = []

    def fail() -> None:
        if not failed:  # a full disk takes back what was there
            failed.append(1)
            raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        steps(patch, at, fail)
        message = refused(altered)
    assert "rewriting its metadata failed" in message and "it is as it was" in message
    assert altered.read_bytes() == before
    assert not backup_path(altered).exists()


def test_a_disk_that_fails_for_good_keeps_the_copy(
    altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = altered.read_bytes()
    with monkeypatch.context() as patch:
        steps(patch, 4, fail)
        with pytest.raises(JobError, match=r"brings them back from 'model\.colibri\.respec'"):
            respec(altered)
    assert respec(altered).notes == ("an earlier respec was interrupted; its changes are undone",)
    assert altered.read_bytes() != before and verify(altered).ok


def test_ctrl_c_leaves_it_as_it_was(altered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        if not caught:
            caught.append(1)
            raise KeyboardInterrupt

    caught: list[int] = []
    before = altered.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        steps(patch, 5, interrupt)
        respec(altered)
    assert altered.read_bytes() == before
    assert not backup_path(altered).exists()


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_the_copy_is_not_trusted_for_another_file(altered: Path) -> None:
    """The copy is whole, but the container was replaced by a damaged one of another model."""
    killed(altered, 5)
    data = bytearray(altered.read_bytes())
    data[-5000:] = bytes(5000)
    altered.write_bytes(data)
    assert "is the copy of another container's" in refused(altered)


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["cut", "bit", "link", "fifo", "folder"])
def test_a_copy_that_is_damaged_or_no_file_is_refused(
    kind: str, altered: Path, tmp_path: Path
) -> None:
    killed(altered, 5)
    backup = backup_path(altered)
    data = backup.read_bytes()
    backup.unlink()
    if kind == "cut":
        backup.write_bytes(data[:5000])
    elif kind == "bit":
        backup.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        backup.symlink_to("elsewhere")
    elif kind == "fifo":
        os.mkfifo(backup)
    else:
        backup.mkdir()
    expected = {
        "cut": "cannot be used",
        "bit": "section 'spec'",
        "link": "cannot be opened",
        "fifo": "found something else",
        "folder": "found something else",
    }
    assert expected[kind] in refused(altered)


@pytest.mark.parametrize("kind", ["text", "link", "folder"])
def test_what_only_has_the_name_of_a_copy_is_kept(kind: str, altered: Path, tmp_path: Path) -> None:
    other = backup_path(altered)
    (tmp_path / "notes").write_text("my notes")
    if kind == "text":
        other.write_text("my notes")
    elif kind == "link":
        other.symlink_to("notes")
    else:
        other.mkdir()
    assert "found something else; move it away" in refused(altered)


@pytest.mark.parametrize("n_bytes", [0, 5, 4096, 5000])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_copy_that_was_not_finished_is_removed(n_bytes: int, zeros: bool, altered: Path) -> None:
    data = bytes(n_bytes) if zeros else altered.read_bytes()[:n_bytes]
    backup_path(altered).write_bytes(data)
    assert respec(altered).changed
    assert not backup_path(altered).exists()


def test_the_copy_alone_brings_the_container_back(altered: Path) -> None:
    """As docs/format.md says: the copy is the bytes in front of the data, to be put back."""
    before = altered.read_bytes()
    copies: list[bytes] = []

    def look() -> None:
        copies.append(backup_path(altered).read_bytes())
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        steps(patch, 5, look)
        respec(altered)
    assert copies[0] + before[len(copies[0]) :] == before


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_blobs_of_a_reader_from_before_are_never_misread(altered: Path) -> None:
    """A respec may move the blobs; a container that was opened before says so."""
    edited(altered, lambda spec: spec.update(executable_lacks="x" * 999))
    with colibri_tools.open(altered) as container:
        config = container.blobs["config.json"]
        block = bytes(container.block(0, 0))
        respec(altered)
        with pytest.raises(SourceError, match="rewritten while it was open"):
            container.blobs["config.json"]
        assert bytes(container.block(0, 0)) == block
    with colibri_tools.open(altered) as container:
        assert container.blobs["config.json"] == config


# ---------------------------------------------------------------- command line


def colibri(*args: str | Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-W", "error", "-c", "from colibri_tools.cli import main; main()"]
    return subprocess.run([*call, *map(str, args)], capture_output=True, text=True, timeout=120)


def test_the_command_shows_then_changes_then_says_unchanged(altered: Path) -> None:
    done = colibri("respec", altered, "--dry-run")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "graph.norm_eps: 0.25 -> 1e-06",
        f"would change 1 key of the spec: {altered}",
    ]
    assert f"changed 1 key of the spec: {altered}" in colibri("respec", altered).stdout
    assert colibri("respec", altered).stdout == f"unchanged: {altered}\n"


def test_json_has_every_key(altered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_mode=True).result(respec(altered))
    document = json.loads(capsys.readouterr().out)
    assert list(document) == [
        "path",
        "dry_run",
        "changed",
        "changes",
        "new_tables",
        "family",
        "executable",
        "id",
        "warnings",
        "notes",
    ]
    done = colibri("respec", altered.parent / "absent", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (1, False)


def test_errors_name_the_file_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ColibriError, match=r"^nothing\.colibri: "):
        respec("nothing.colibri")
