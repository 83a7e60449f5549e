"""Hugging Face directories: the index decides, nothing outside is opened, gaps are named."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from sources_util import StTensor, f32, safetensors_bytes, write_hub_repo, write_sharded

from colibri_tools.errors import ColibriError, SourceError
from colibri_tools.sources import open_source, sniff

INDEX = "model.safetensors.index.json"
CONFIG = b'{"model_type": "x", "time_step_limit": [0.0, Infinity]}'


def five_shards() -> dict[str, dict[str, StTensor]]:
    """Five shards and an MTP file; each tensor holds its own number."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.w" for i in range(3)), "model.norm"]
    shards = {
        f"model-{i + 1:05d}-of-00005.safetensors": {name: f32([2, 2], start=10 * i)}
        for i, name in enumerate(names)
    }
    return shards | {"mtp.safetensors": {"model.layers.3.mtp": f32([2], start=90)}}


def refusal(path: Path) -> str:
    with pytest.raises(ColibriError) as caught:
        open_source(path)
    assert caught.value.message.isprintable()
    return caught.value.message


def weight_map(shards: Mapping[str, Mapping[str, StTensor]]) -> dict[str, str]:
    return {tensor: shard for shard, tensors in shards.items() for tensor in tensors}


# ---------------------------------------------------------------- whole checkpoints


def test_index_is_the_file_set_and_mtp_belongs_to_it(tmp_path: Path) -> None:  # case 1.5a
    shards = five_shards()
    with open_source(write_sharded(tmp_path, shards)) as source:
        assert [f.name for f in source.files] == sorted(shards)
        assert {n: source.files[t.file].name for n, t in source.tensors.items()} == weight_map(
            shards
        )
        for tensors in shards.values():
            for name, tensor in tensors.items():
                assert source.read(name) == tensor.data
        assert source.warnings == [] and source.notes == []
        assert source.missing_blobs[0] == "config.json"


def test_hashes_cover_header_and_file(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, five_shards())
    seen: list[int] = []
    with open_source(folder) as source:
        hashed = dict(source.hash_files(seen.append))
        for file in source.files:
            data = (folder / file.name).read_bytes()
            assert hashed[file] == hashlib.sha256(data).hexdigest()
            assert file.header_sha256 == hashlib.sha256(data[: file.data_offset]).hexdigest()
            assert file.size == len(data)
        assert sum(seen) == sum(f.size for f in source.files)
        assert json.dumps(source.describe(), allow_nan=False)


def test_single_file_without_index(tmp_path: Path) -> None:  # case 5.4 f
    (tmp_path / "anything.safetensors").write_bytes(safetensors_bytes({"a": f32([3])}))
    for path in (tmp_path, tmp_path / "anything.safetensors"):
        with open_source(path) as source:
            assert source.kind == "safetensors" and list(source.tensors) == ["a"]
            assert source.warnings == []


def test_index_file_itself_can_be_named(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, five_shards())
    write_sharded(tmp_path, {"other.safetensors": {"z": f32([1])}}, index="b" + INDEX)
    with open_source(folder / INDEX) as source:
        assert len(source.files) == 6
    with open_source(folder / ("b" + INDEX)) as source:
        assert list(source.tensors) == ["z"]


def test_other_index_name_works_if_it_is_the_only_one(tmp_path: Path) -> None:
    name = "model.fp16.safetensors.index.json"
    write_sharded(tmp_path, {"a.safetensors": {"x": f32([1])}}, index=name)
    with open_source(tmp_path) as source:
        assert list(source.tensors) == ["x"]
    write_sharded(tmp_path, {"b.safetensors": {"y": f32([1])}}, index="z" + name)
    assert "2 index files" in refusal(tmp_path)


def test_side_files_are_carried_verbatim(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    files = {
        "config.json": CONFIG,
        "generation_config.json": b'{"eos_token_id": [2, 5]}',
        "tokenizer.json": b'{"model": {}}\n',
        "tokenizer_config.json": b'{"chat_template": "x"}',
        "chat_template.jinja": b"{{ messages }}\r\n",
        "merges.txt": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "preprocessor_config.json").write_bytes(b"{}")
    with open_source(tmp_path) as source:
        assert source.blobs == files
        assert source.config["model_type"] == "x"
        assert source.missing_blobs == []
        inodes = {(tmp_path / n).stat().st_ino for n in [*files, INDEX, "mtp.safetensors"]}
        assert inodes <= {inode for _, inode in source.identities()}


def test_missing_side_files_are_named(tmp_path: Path) -> None:  # case 7.2
    write_sharded(tmp_path, five_shards())
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with open_source(tmp_path) as source:
        assert source.missing_blobs == [
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": 1, "a": 2}', "config.json: broken JSON: key 'a' appears twice"),
        (b"[1]", "config.json: expected a JSON object"),
        (b'{"a": ' + b"[" * 5000, "nest deeper"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"", "config.json: broken JSON"),
    ],
)
def test_config_is_strict(tmp_path: Path, data: bytes, expected: str) -> None:
    write_sharded(tmp_path, five_shards())
    (tmp_path / "config.json").write_bytes(data)
    assert expected in refusal(tmp_path)


# ---------------------------------------------------------------- index and shards disagree


@pytest.mark.parametrize("gone", [0, 4, 5])
def test_missing_shard_is_named_with_its_tensors(tmp_path: Path, gone: int) -> None:  # case 5.2
    shards = five_shards()
    write_sharded(tmp_path, shards)
    name = list(shards)[gone]
    (tmp_path / name).unlink()
    message = refusal(tmp_path)
    for part in ("1 of 6 shards missing", "found 5", name, next(iter(shards[name])), "download"):
        assert part in message
    (tmp_path / "abc.incomplete").touch()
    assert "abc.incomplete" in refusal(tmp_path)


def test_all_missing_shards_are_counted(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    for path in tmp_path.glob("model-*"):
        path.unlink()
    message = refusal(tmp_path)
    assert "5 of 6 shards missing" in message and "and 1 more files" in message


def test_extra_and_stale_files_are_ignored_with_a_note(tmp_path: Path) -> None:  # 5.4 a, e
    write_sharded(tmp_path, five_shards())
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even looked at")
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"")
    os.mkfifo(tmp_path / "z.safetensors")
    with open_source(tmp_path) as source:
        assert len(source.tensors) == 6
        (note,) = source.notes
        for name in ("consolidated.safetensors", "model-00003-of-00003", "z.safetensors"):
            assert name in note


def test_stale_single_file_beside_an_index_is_warned_of(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"old": f32([1])}))
    with open_source(tmp_path) as source:
        assert "old" not in source.tensors
        assert any("model.safetensors" in warning for warning in source.warnings)


def test_tensor_that_its_file_lacks_is_an_error(tmp_path: Path) -> None:  # 5.4 b
    shards = five_shards()
    write_sharded(tmp_path, shards, weight_map(shards) | {"ghost.weight": "mtp.safetensors"})
    message = refusal(tmp_path)
    assert "'ghost.weight' should be in 'mtp.safetensors', but no shard has it" in message


def test_tensor_mapped_to_the_wrong_shard_is_an_error(tmp_path: Path) -> None:  # 5.4 d
    shards = five_shards()
    write_sharded(tmp_path, shards, weight_map(shards) | {"model.norm": "mtp.safetensors"})
    message = refusal(tmp_path)
    assert "'model.norm' should be in 'mtp.safetensors', but it is in" in message
    assert "model-00005-of-00005.safetensors" in message


def test_two_swapped_tensors_are_an_error(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": f32([1])}, "b.safetensors": {"y": f32([1])}}
    write_sharded(tmp_path, shards, {"x": "b.safetensors", "y": "a.safetensors"})
    assert "should be in" in refusal(tmp_path)


def test_unindexed_tensor_is_ignored_with_a_warning(tmp_path: Path) -> None:  # 5.4 c
    shards = five_shards()
    shards["mtp.safetensors"]["stranger"] = f32([3])
    chosen = weight_map(shards)
    del chosen["stranger"]
    write_sharded(tmp_path, shards, chosen)
    with open_source(tmp_path) as source:
        assert "stranger" not in source.tensors
        (warning,) = source.warnings
        assert "1 tensors are in the shards but not in" in warning and "'stranger'" in warning


def test_tensor_in_two_shards_comes_from_the_indexed_one(tmp_path: Path) -> None:
    shards = {
        "a.safetensors": {"x": f32([1], start=1), "k": f32([1])},
        "b.safetensors": {"x": f32([1], start=2)},
    }
    write_sharded(tmp_path, shards, {"x": "b.safetensors", "k": "a.safetensors"})
    with open_source(tmp_path) as source:
        assert source.read("x") == shards["b.safetensors"]["x"].data
        assert any("several shards" in warning for warning in source.warnings)


def test_files_without_index_are_ambiguous(tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({"a": f32([1])}))
    assert "2 .safetensors files and no index" in refusal(tmp_path)
    with open_source(tmp_path / "model.safetensors") as source:
        assert len(source.files) == 1


def test_one_shard_named_alone_is_warned_of(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, five_shards())
    with open_source(folder / "model-00002-of-00005.safetensors") as source:
        assert list(source.tensors) == ["model.layers.0.w"]
        assert "one shard of 5" in source.warnings[0]


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}', "", "{"],
)
def test_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


def test_index_with_duplicate_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "'a' appears twice" in refusal(tmp_path)


# ---------------------------------------------------------------- downloads, pickles, oddities


def test_every_shard_header_is_checked_before_anything_else(tmp_path: Path) -> None:  # 5.11
    folder = write_sharded(tmp_path, five_shards())
    last = folder / "model-00005-of-00005.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    message = refusal(folder)
    assert last.name in message and "1 bytes missing" in message


def test_unfinished_downloads_are_warned_of(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    cache = tmp_path / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "abc.123.incomplete").touch()
    with open_source(tmp_path) as source:
        assert "abc.123.incomplete" in source.warnings[0]


def test_unfinished_downloads_beside_a_single_file_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes({"t": f32([1])}))
    (tmp_path / "b.safetensors.part").touch()
    for path in (tmp_path, tmp_path / "a.safetensors"):
        with open_source(path) as source:
            assert "b.safetensors.part" in source.warnings[0]


def test_file_that_aria2_is_still_filling_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    (tmp_path / "mtp.safetensors.aria2").touch()
    assert "still being downloaded" in refusal(tmp_path)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch marker",)


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # 13.5
    import pickle

    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Config"}}')
    assert "convert to safetensors first" in refusal(tmp_path)
    assert "never opened" in refusal(tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(_Bomb()))
    assert "pickle" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": f32([1])}))
    with open_source(tmp_path) as source:
        assert list(source.tensors) == ["a"]
    assert not (tmp_path / "marker").exists()


def test_empty_and_absent_places(tmp_path: Path) -> None:
    assert "no .safetensors or .gguf file" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "nope")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "no such file" in refusal(tmp_path / "dangling")
    (tmp_path / "loop").symlink_to("loop")
    assert "loop" in refusal(tmp_path / "loop")
    for name in ("", "a\0b"):
        with pytest.raises(SourceError):
            open_source(name)


def test_safetensors_beside_gguf_is_ambiguous(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "both safetensors" in refusal(tmp_path)
    with open_source(tmp_path / INDEX) as source:
        assert len(source.tensors) == 6


def test_sniff_tells_kinds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(safetensors_bytes({"a": f32([1])}))
    (tmp_path / "b").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "c").write_bytes(b"COLIBRI\0")
    (tmp_path / "d").write_bytes(b'{"routing": 1}')
    kinds = [sniff(tmp_path / name) for name in "abcd"]
    assert kinds == ["safetensors", "gguf", "colibri", "json"]
    assert sniff(tmp_path) == "directory"


# ---------------------------------------------------------------- path rules (case 13.1)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "{abs}/secret.safetensors",
        "sub/../../secret.safetensors",
        "sub/../inside.safetensors",
        "a\\..\\secret.safetensors",
        "C:secret.safetensors",
        "C:/secret.safetensors",
        "a\0b.safetensors",
        "",
        ".",
        "./inside.safetensors",
        "sub//x.safetensors",
        "x/",
        "a" * 5000,
    ],
)
def test_unsafe_names_are_refused_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.safetensors").write_bytes(safetensors_bytes({"t": f32([1])}))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "inside.safetensors").write_bytes(safetensors_bytes({"t": f32([1])}))
    chosen = {"t": name.replace("{abs}", str(tmp_path))}
    (folder / INDEX).write_text(json.dumps({"weight_map": chosen}))
    assert "unsafe file name" in refusal(folder)


def test_shards_in_real_subfolders_work(tmp_path: Path) -> None:
    shards = {"sub/deep/a.safetensors": {"t": f32([2])}}
    with open_source(write_sharded(tmp_path, shards)) as source:
        assert source.files[0].name == "sub/deep/a.safetensors"
        assert source.read("t") == f32([2]).data


def test_linked_subfolder_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.safetensors").write_bytes(safetensors_bytes({"t": f32([1])}))
    folder = tmp_path / "model"
    write_sharded(folder, {"x.safetensors": {"u": f32([1])}}, {"t": "sub/a.safetensors"})
    (folder / "sub").symlink_to(outside)
    assert "'sub' on the way is not a real directory" in refusal(folder)
    (folder / "sub").unlink()
    (folder / "real").mkdir()
    (folder / "real" / "a.safetensors").write_bytes(safetensors_bytes({"t": f32([1])}))
    (folder / "sub").symlink_to("real")  # even a link that stays inside
    assert "not a real directory" in refusal(folder)


def special_file(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        cwd = Path.cwd()
        os.chdir(path.parent)  # socket paths are short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
        os.chdir(cwd)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "socket"])
@pytest.mark.parametrize("victim", ["a.safetensors", "config.json", INDEX])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, victim: str) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"t": f32([1])}})
    (tmp_path / victim).unlink(missing_ok=True)
    special_file(tmp_path / victim, kind)
    message = refusal(tmp_path)
    assert re.search("expected a regular file|outside the checkpoint", message), message


@pytest.mark.timeout(10)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "fifo"])
def test_devices_named_by_the_user_are_refused(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "expected a regular file" in refusal(tmp_path / path)


def test_links_inside_the_folder_work_up_to_two_hops(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"x.safetensors": {"t": f32([2])}})
    (tmp_path / "x.safetensors").rename(tmp_path / "store")
    (tmp_path / "hop").symlink_to("store")
    for target in ("store", "hop"):
        (tmp_path / "x.safetensors").symlink_to(target)
        with open_source(tmp_path) as source:
            assert source.read("t") == f32([2]).data
        (tmp_path / "x.safetensors").unlink()
    (tmp_path / "hop2").symlink_to("hop")
    (tmp_path / "x.safetensors").symlink_to("hop2")
    assert "more than 2 links" in refusal(tmp_path)


@pytest.mark.parametrize("target", ["{abs}/secret", "../secret", "sub/../../secret", "away/secret"])
@pytest.mark.parametrize("victim", ["x.safetensors", "config.json"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, target: str, victim: str) -> None:
    (tmp_path / "secret").write_bytes(safetensors_bytes({"t": f32([2])}))
    folder = write_sharded(tmp_path / "model", {"x.safetensors": {"t": f32([2])}})
    (folder / "sub").mkdir()
    (folder / "away").symlink_to(tmp_path)
    (folder / victim).unlink(missing_ok=True)
    (folder / victim).symlink_to(target.replace("{abs}", str(tmp_path)))
    assert "outside the checkpoint's folder" in refusal(folder)
    if victim == "x.safetensors":
        with open_source(folder, follow_links=True) as source:
            assert source.read("t") == f32([2]).data


def test_a_folder_whose_name_starts_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model-evil").mkdir()
    (tmp_path / "model-evil" / "s").write_bytes(safetensors_bytes({"t": f32([2])}))
    folder = write_sharded(tmp_path / "model", {"x.safetensors": {"t": f32([2])}})
    (folder / "x.safetensors").unlink()
    (folder / "x.safetensors").symlink_to("../model-evil/s")
    assert "outside the checkpoint's folder" in refusal(folder)


# ---------------------------------------------------------------- Hub cache (5.7, 5.9)


def hub_files() -> dict[str, bytes]:
    return {
        "model.safetensors": safetensors_bytes({"t": f32([5])}),
        "config.json": CONFIG,
        "sub/extra.txt": b"x",
    }


def test_hub_snapshot_file_and_repository_all_open(tmp_path: Path) -> None:
    files = hub_files()
    repo = write_hub_repo(tmp_path, files)
    snapshot = repo / "snapshots" / ("a" * 40)
    (tmp_path / "link-to-snapshot").symlink_to(snapshot)
    (tmp_path / "my-file").symlink_to(snapshot / "model.safetensors")
    for path in (
        snapshot,
        snapshot / "model.safetensors",
        repo,
        tmp_path / "link-to-snapshot",
        tmp_path / "my-file",
    ):
        with open_source(path) as source:
            assert source.read("t") == f32([5]).data
            assert source.config["model_type"] == "x", path
            (file,) = source.files
            assert file.name == "model.safetensors"
            assert file.blob_sha256 == hashlib.sha256(files["model.safetensors"]).hexdigest()


def test_hub_blob_named_directly_is_judged_by_content(tmp_path: Path) -> None:  # 5.9
    repo = write_hub_repo(tmp_path, {"model.safetensors": hub_files()["model.safetensors"]})
    (blob,) = (repo / "blobs").iterdir()
    with open_source(blob) as source:
        assert source.kind == "safetensors"


def test_hub_blob_may_be_a_link_within_blobs(tmp_path: Path) -> None:
    repo = write_hub_repo(tmp_path, hub_files())
    for blob in list((repo / "blobs").iterdir()):
        blob.rename(blob.with_name("store-" + blob.name))
        blob.symlink_to("store-" + blob.name)
    with open_source(repo) as source:
        assert source.read("t") == f32([5]).data


def test_hub_links_to_another_repository_are_refused(tmp_path: Path) -> None:
    write_hub_repo(tmp_path, hub_files(), repo="models--private--z")
    repo = write_hub_repo(tmp_path, {"config.json": CONFIG})
    snapshot = repo / "snapshots" / ("a" * 40)
    digest = hashlib.sha256(hub_files()["model.safetensors"]).hexdigest()
    link = snapshot / "model.safetensors"
    link.symlink_to(f"../../../models--private--z/blobs/{digest}")
    assert "outside the checkpoint's folder" in refusal(repo)
    link.unlink()
    (repo / "blobs" / "trick").symlink_to("../../models--private--z/blobs")
    link.symlink_to(f"../../blobs/trick/{digest}")
    assert "outside the checkpoint's folder" in refusal(repo)


def test_hub_repository_with_two_snapshots_follows_main(tmp_path: Path) -> None:
    repo = write_hub_repo(tmp_path, {"model.safetensors": safetensors_bytes({"old": f32([1])})})
    write_hub_repo(
        tmp_path, {"model.safetensors": safetensors_bytes({"new": f32([1])})}, revision="b" * 40
    )
    with open_source(repo) as source:
        assert list(source.tensors) == ["new"]
    (repo / "refs" / "main").unlink()
    message = refusal(repo)
    assert "a" * 40 in message and "b" * 40 in message and "2 snapshots" in message
    (repo / "refs" / "main").write_text("c" * 40)
    assert "refs/main names" in refusal(repo)
    for evil in ("../..", "/etc", "a\\b", ".."):
        (repo / "refs" / "main").write_text(evil)
        assert "refs/main" in refusal(repo)


def test_hub_repository_without_refs_but_one_snapshot(tmp_path: Path) -> None:
    repo = write_hub_repo(tmp_path, hub_files())
    (repo / "refs" / "main").unlink()
    with open_source(repo) as source:
        assert list(source.tensors) == ["t"]


def test_hub_cache_root_lists_its_models(tmp_path: Path) -> None:
    write_hub_repo(tmp_path, hub_files())
    assert "models--x--y" in refusal(tmp_path)


def test_hub_snapshot_with_missing_blob_is_named(tmp_path: Path) -> None:
    repo = write_hub_repo(tmp_path, hub_files())
    digest = hashlib.sha256(hub_files()["model.safetensors"]).hexdigest()
    blob = repo / "blobs" / digest
    blob.rename(blob.with_name(digest + ".incomplete"))
    assert "model.safetensors: no such file" in refusal(repo)


def test_open_files_are_closed_after_a_refusal(tmp_path: Path) -> None:
    write_sharded(tmp_path, five_shards())
    (tmp_path / "config.json").write_text("{")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        refusal(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_reads_are_the_same_from_many_threads(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tensors = {f"t{i}": f32([50, 7], start=1000 * i) for i in range(40)}
    write_sharded(tmp_path, {"a.safetensors": tensors})
    with open_source(tmp_path) as source, ThreadPoolExecutor(8) as pool:
        source.advise_sequential()
        read = list(pool.map(source.read, list(tensors) * 5))
        for tensor in source.tensors.values():
            source.will_need(tensor)
            source.drop(tensor)
        source.check_unchanged()
    assert read == [tensor.data for tensor in tensors.values()] * 5


def test_replaced_file_is_noticed(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, {"a.safetensors": {"t": f32([4])}})
    with open_source(folder) as source:
        (folder / "new").write_bytes((folder / "a.safetensors").read_bytes())
        (folder / "new").replace(folder / "a.safetensors")
        with pytest.raises(SourceError, match="changed"):
            source.check_unchanged()
