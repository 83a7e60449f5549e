"""Planning, writing and reading containers."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import resource
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c import make_container as mc
from container_util import (
    BF16,
    F32,
    HIDDEN,
    Draft,
    make_container,
    payload_of,
    small_arguments,
    small_layouts,
    small_plan,
    small_residents,
    small_spec,
    tensor_data,
    write_container,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import colibri_tools
from colibri_tools import container as containers
from colibri_tools.container import (
    ContainerPlan,
    ContainerWriter,
    Group,
    PartRole,
    PartSpec,
    ResidentItem,
    Role,
    RowSpec,
    RuleError,
    Stream,
    destination,
    fileops,
    flusher,
    plan_container,
    writer,
)
from colibri_tools.container.reader import open_bytes
from colibri_tools.dtypes import dtype_by_name
from colibri_tools.errors import FormatError, JobError, SourceError, UsageError
from colibri_tools.verify import verify_container


@pytest.fixture(scope="module")
def plan() -> ContainerPlan:
    return small_plan()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound container that no test changes."""
    return make_container(tmp_path_factory.mktemp("sound") / "model.colibri")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- round trip ------------------------------------------------------------------------------------


def test_everything_is_read_back(sound: Path, plan: ContainerPlan) -> None:
    arguments = small_arguments()
    with colibri_tools.open(sound) as container:
        assert container.spec == arguments["spec"]
        assert container.provenance == arguments["provenance"]
        assert dict(container.blobs) == arguments["blobs"]
        assert container.alignment == 4096
        assert container.file_size == sound.stat().st_size == plan.file_size
        assert container.layouts == plan.layouts
        assert [dataclasses.astuple(row) for row in container.rows] == [(1, 0, 5), (2, 0, 3)]
        assert container.accounting() == plan.accounting()
        for planned in plan.tensors:
            tensor = container.tensors[planned.item.name]
            item = planned.item
            assert (tensor.role, tensor.group, tensor.layer) == (item.role, item.group, item.layer)
            assert (tensor.dtype, tensor.shape) == (item.dtype, item.shape)
            name = item.alias_of or item.name
            assert container.tensor(item.name).tobytes() == tensor_data(plan, name)
        for row, expert in plan.order:
            assert container.block(row, expert) == payload_of(plan, row, expert)


def test_index_is_a_structured_array(sound: Path, plan: ContainerPlan) -> None:
    with containers.open(sound) as container:
        index = container.index
        assert index.shape == (2, 5)
        assert index.dtype == containers.CELL_DTYPE
        assert not index.flags.writeable
        ranks = {(row, expert): rank for rank, (row, expert) in enumerate(plan.order)}
        assert all(index["rank"][place] == rank for place, rank in ranks.items())
        assert (index["offset"] % 4096 == 0).all()
        assert index[1, 3:].tobytes() == bytes(2 * 64)


def test_hottest_blocks_are_a_prefix_of_the_expert_region(sound: Path, plan: ContainerPlan) -> None:
    with containers.open(sound) as container:
        ends = [container.expert_offset]
        for row, expert in plan.order:
            cell = container.cell(row, expert)
            assert cell["offset"] == ends[-1]
            ends.append(ends[-1] + container.padded_bytes(int(cell["n_bytes"])))
        assert ends[-1] == container.file_size


@pytest.mark.parametrize("role", list(PartRole))
def test_parts_have_their_type_and_shape(sound: Path, plan: ContainerPlan, role: PartRole) -> None:
    with containers.open(sound) as container:
        part = plan.layout_of(0, 1).part(role)
        assert part is not None
        array = container.part(0, 1, role)
        expected = payload_of(plan, 0, 1)[part.offset : part.offset + part.n_bytes]
        assert array.tobytes() == expected
        assert array.shape == (part.rows, part.cols)
        assert array.dtype == (np.uint16 if part.dtype == BF16 else np.float32)
        floats = container.dequantize_part(0, 1, role)
        assert floats.dtype == np.float32 and floats.shape == (part.rows, part.cols)
        if part.dtype == F32:
            assert (floats == array).all()
        else:
            assert (floats.view(np.uint32) >> 16 == array).all()


def test_quantized_tensors_are_rows_of_bytes(sound: Path) -> None:
    with containers.open(sound) as container:
        raw = container.tensor("layers.1.v")
        assert raw.dtype == np.uint8 and raw.shape == (32, 68)
        blocks = raw.reshape(-1, 34)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        expected = (scales * blocks[:, 2:].view(np.int8)).reshape(32, HIDDEN)
        assert (container.dequantize("layers.1.v") == expected).all()


def test_views_are_read_only_and_outlive_the_container(sound: Path, plan: ContainerPlan) -> None:
    with containers.open(sound) as container:
        block, norm = container.block(1, 2), container.tensor("norm")
    container.close()
    assert block == payload_of(plan, 1, 2)
    assert norm.tobytes() == tensor_data(plan, "norm")
    assert block.readonly and not norm.flags.writeable
    with pytest.raises(UsageError, match="closed"):
        container.block(0, 0)


def test_lookups_that_have_no_answer_are_refused(sound: Path) -> None:
    with containers.open(sound) as container:
        assert container.row_of(1) == 0
        with pytest.raises(UsageError, match="layer 0 has no experts"):
            container.row_of(0)
        with pytest.raises(UsageError, match="stream 1"):
            container.row_of(1, Stream.MTP)
        with pytest.raises(UsageError, match=r"experts 0 \.\.\. 2, not 3"):
            container.block(1, 3)
        with pytest.raises(UsageError, match="no part gate_bias"):
            container.part(1, 0, PartRole.GATE_BIAS)
        with pytest.raises(UsageError, match="no resident tensor 'nope'"):
            container.tensor("nope")
        with pytest.raises(UsageError, match="outside the file"):
            container.read(container.file_size - 1, 2)
        with pytest.raises(KeyError):
            container.blobs["nope"]


def test_alias_may_precede_its_target(sound: Path) -> None:
    with containers.open(sound) as container:
        head, embed = container.tensors["head"], container.tensors["embed"]
        assert next(iter(container.tensors)) == "head"
        assert head.alias_of == "embed" and embed.alias_of is None
        assert (head.offset, head.crc32c, head.sha256) == (
            embed.offset,
            embed.crc32c,
            embed.sha256,
        )
        assert (head.group, embed.group) == (Group.EVERY_TOKEN, Group.PER_ROW)


def test_groups_are_contiguous_and_aligned(sound: Path) -> None:
    with containers.open(sound) as container:
        starts = {}
        for tensor in container.tensors.values():
            if tensor.alias_of is None:
                starts.setdefault(tensor.group, tensor.offset)
        assert list(starts) == [Group.EVERY_TOKEN, Group.PER_ROW, Group.OPTIONAL]
        assert all(offset % 4096 == 0 for offset in starts.values())


@pytest.mark.parametrize("alignment", [4096, 16384, 65536, 2 << 20])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = make_container(tmp_path / "m.colibri", alignment=alignment)
    with containers.open(path) as container:
        assert (container.index["offset"] % alignment == 0).all()
        assert container.data_offset % alignment == 0
        used = container.accounting()
        assert (
            used.file_bytes
            == path.stat().st_size
            == (
                used.page0_bytes
                + used.metadata_bytes
                + used.resident_bytes
                + used.expert_bytes
                + used.padding_bytes
            )
        )
        assert used.padding_share == used.padding_bytes / used.file_bytes
    assert verify_container(path).ok


def test_container_without_tensors_and_blobs(tmp_path: Path) -> None:
    path = tmp_path / "m.colibri"
    make_container(path, residents=[], blobs={}, spec=small_spec(executable=False))
    with containers.open(path) as container:
        assert container.data_offset == container.expert_offset
        assert not container.tensors and not container.blobs
    assert verify_container(path).ok


def test_mtp_rows_are_found_by_stream(tmp_path: Path) -> None:
    rows = [
        RowSpec(1, Stream.MAIN, 5, (0, 1, 0, 0, 1)),
        RowSpec(2, Stream.MAIN, 3, (2, 2, 2)),
        RowSpec(3, Stream.MTP, 2, (0, 0)),
    ]
    path = make_container(
        tmp_path / "m.colibri", rows=rows, order=None, spec=small_spec(n_mtp_layers=1)
    )
    with containers.open(path) as container:
        assert container.row_of(3, Stream.MTP) == 2
        assert container.rows[2].stream is Stream.MTP
    assert verify_container(path).ok


def test_every_type_that_has_a_ggml_number_is_carried(tmp_path: Path) -> None:
    from colibri_tools.dtypes import DTYPES, FIRST_OTHER_ID

    types = [dtype for dtype in DTYPES if dtype.id < FIRST_OTHER_ID]
    extra = [
        ResidentItem(dtype.name, Role.OTHER, Group.OPTIONAL, -1, dtype, (3, dtype.block_weights))
        for dtype in types
    ]
    plan = small_plan(residents=small_residents() + extra)
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        for planned in plan.tensors:
            if planned.alias_index is None:
                out.write_tensor(planned.item.name, bytes(planned.n_bytes))
        for row, expert in plan.order:
            out.write_block(row, expert, bytes(plan.layout_of(row, expert).n_bytes))
        out.seal()
    with containers.open(tmp_path / "m.colibri") as container:
        for dtype in types:
            assert container.tensors[dtype.name].dtype is dtype
            assert container.tensor(dtype.name).nbytes == 3 * dtype.block_bytes


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_plan_gives_a_sound_container(data: st.DataObject) -> None:
    draw = data.draw
    hidden = draw(st.integers(1, 70))
    types = [dtype_by_name(name) for name in ("f32", "f16", "bf16")]
    layouts = []
    for width in draw(st.lists(st.integers(1, 90), min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(types))
        layouts.append(
            [
                PartSpec(PartRole.GATE, dtype, width, hidden),
                PartSpec(PartRole.UP, dtype, width, hidden),
                PartSpec(PartRole.DOWN, draw(st.sampled_from(types)), hidden, width),
            ]
        )
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    used = iter(list(range(len(layouts))) * 50)
    rows = [
        RowSpec(layer, Stream.MAIN, n, tuple(next(used) for _ in range(n)))
        for layer, n in enumerate(counts)
        if n
    ]
    layouts = layouts[: sum(counts)]
    order = [(row, expert) for row, spec in enumerate(rows) for expert in range(spec.n_experts)]
    spec = small_spec(
        executable=False,
        n_layers=len(counts),
        moe_layers=[int(n > 0) for n in counts],
        hidden_size=hidden,
        top_k=1,
    )
    plan = plan_container(
        spec=spec,
        blobs=draw(st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=99))),
        provenance={},
        residents=small_residents()[: draw(st.integers(0, 9))][2:],
        layouts=layouts,
        rows=rows,
        order=draw(st.permutations(order)),
        alignment=draw(st.sampled_from([4096, 8192])),
    )
    writer.check_plan(plan)
    used_bytes = plan.accounting()
    assert used_bytes.padding_bytes >= 0
    assert plan.file_size == plan.expert_offset + sum(
        -(-layout.n_bytes // plan.alignment) * plan.alignment
        for layout in (plan.layout_of(*place) for place in plan.order)
    )


# -- plans that are refused ------------------------------------------------------------------------


def refused_plan(**changes: Any) -> str:
    with pytest.raises((UsageError, FormatError)) as caught:
        writer.check_plan(small_plan(**changes))
    return caught.value.message


@pytest.mark.parametrize("alignment", [0, 512, 4095, 6144, 4 << 20])
def test_alignment_is_checked(alignment: int) -> None:
    assert str(alignment) in refused_plan(alignment=alignment)


def test_order_is_a_permutation_of_the_blocks() -> None:
    order = small_arguments()["order"]
    assert "order" in refused_plan(order=order[:-1])
    assert "order" in refused_plan(order=[*order[:-1], order[0]])
    assert "order" in refused_plan(order=[*order[:-1], (1, 3)])


def test_tensors_that_cannot_be_stored_are_refused() -> None:
    def item(dtype: str, *shape: int) -> list[ResidentItem]:
        role = Role.OTHER
        return [ResidentItem("x", role, Group.OPTIONAL, -1, dtype_by_name(dtype), shape)]

    assert "no type u8" in refused_plan(residents=item("u8", 3))
    assert "no type f8_e4m3" in refused_plan(residents=item("f8_e4m3", 3))
    assert "dimensions" in refused_plan(residents=item("f32"))
    assert "dimensions" in refused_plan(residents=item("f32", 1, 1, 1, 1, 1))
    assert "dimensions" in refused_plan(residents=item("f32", 3, 0))
    assert "multiple of q8_0" in refused_plan(residents=item("q8_0", 32, 40))


def test_names_are_unique_and_aliases_have_targets() -> None:
    items = small_residents()
    assert "same name" in refused_plan(residents=[*items, items[0]])
    lost = dataclasses.replace(items[1], alias_of="nope")
    assert "'nope'" in refused_plan(residents=[items[0], lost])
    chain = dataclasses.replace(items[0], name="third", alias_of="head")
    assert "'head'" in refused_plan(residents=[*items, chain])


def test_rows_and_layouts_agree() -> None:
    rows = [RowSpec(1, 0, 5, (0, 1, 0, 0)), RowSpec(2, 0, 3, (2, 2, 2))]
    assert "expected a layout for each" in refused_plan(rows=rows, order=None)
    rows = [RowSpec(1, 0, 5, (0, 1, 0, 0, 9)), RowSpec(2, 0, 3, (2, 2, 2))]
    assert "found 9" in refused_plan(rows=rows, order=None)
    assert "rule 23" in refused_plan(layouts=[*small_layouts(), small_layouts()[0]])


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"spec": small_spec(top_k=9)}, 24),
        ({"spec": small_spec(moe_layers=[1, 1, 1])}, 24),
        ({"spec": {"family": "x"}}, 12),
        ({"residents": []}, 24),
        ({"blobs": {"a/b": b""}}, 13),
        ({"layouts": [small_layouts()[0], small_layouts()[1], small_layouts()[2][:2]]}, 23),
    ],
)
def test_plan_that_breaks_a_rule_is_refused_before_a_file_exists(
    tmp_path: Path, changes: dict[str, Any], rule: int
) -> None:
    with pytest.raises(RuleError) as caught:
        ContainerWriter(small_plan(**changes), tmp_path / "m.colibri").__enter__()
    assert caught.value.rule == rule
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("provenance", "word"),
    [
        ({"Upper": 1}, "'Upper'"),
        ({"a": None}, "NoneType"),
        ({"a": 2**64}, "'a'"),
        ({"a": -(2**63) - 1}, "'a'"),
        ({"a": float("nan")}, "'a'"),
        ({"a": "nul\0"}, "'a'"),
        ({"a": [1, "x"]}, "list"),
        ({f"k{i}": i for i in range(5000)}, "4096"),
    ],
)
def test_values_that_no_section_can_hold(provenance: dict[str, Any], word: str) -> None:
    assert word in refused_plan(provenance=provenance)


# -- writing ---------------------------------------------------------------------------------------


def test_same_bytes_for_any_number_of_threads_and_order(
    tmp_path: Path, plan: ContainerPlan, sound: Path
) -> None:
    names = [p.item.name for p in plan.tensors if p.alias_index is None]
    jobs: list[Any] = [*names, *plan.order]
    random.Random(5).shuffle(jobs)
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:

        def write(job: Any) -> None:
            if isinstance(job, tuple):
                out.write_block(*job, memoryview(payload_of(plan, *job)))
            else:
                data = tensor_data(plan, job)
                out.write_tensor(job, (data[at : at + 1000] for at in range(0, len(data), 1000)))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, jobs))
        out.seal()
    assert (tmp_path / "m.colibri").read_bytes() == sound.read_bytes()


def test_arrays_are_written_as_they_are(tmp_path: Path, plan: ContainerPlan) -> None:
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        out.write_tensor("norm", np.arange(HIDDEN, dtype="<f4"))
        out.write_tensor("layers.0.q", np.ones((128, 64), np.uint16))
        with pytest.raises(UsageError, match="contiguous"):
            out.write_tensor("layers.0.o", np.ones((128, 64), np.uint16).T)


def test_seal_returns_the_id_of_the_content(tmp_path: Path, plan: ContainerPlan) -> None:
    first = write_container(plan, tmp_path / "a.colibri")
    second = write_container(plan, tmp_path / "b.colibri")
    with containers.open(tmp_path / "a.colibri") as container:
        assert container.id == first == second
    other = write_container(small_plan(provenance={"x": 1}), tmp_path / "c.colibri")
    assert other != first


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        path = make_container(tmp_path / "m.colibri")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_nothing_but_the_container_is_left(sound: Path) -> None:
    assert leftovers(sound.parent) == ["model.colibri"]


def test_seal_names_what_was_not_written(tmp_path: Path, plan: ContainerPlan) -> None:
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        for planned in plan.tensors:
            if planned.alias_index is None and planned.item.name != "norm":
                out.write_tensor(planned.item.name, tensor_data(plan, planned.item.name))
        for row, expert in plan.order[:-1]:
            out.write_block(row, expert, payload_of(plan, row, expert))
        with pytest.raises(
            JobError, match=r"2 tensors and blocks .*'tensor norm', 'layer 1 expert 2'"
        ):
            out.seal()
    assert leftovers(tmp_path) == WORK_FILES


def test_each_tensor_and_block_is_written_once(tmp_path: Path, plan: ContainerPlan) -> None:
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        out.write_tensor("norm", tensor_data(plan, "norm"))
        with pytest.raises(JobError, match="'norm' is written twice"):
            out.write_tensor("norm", tensor_data(plan, "norm"))
        out.write_block(1, 0, payload_of(plan, 1, 0))
        with pytest.raises(JobError, match=r"layer 2 expert 0 .* is written twice"):
            out.write_block(1, 0, payload_of(plan, 1, 0))


def test_wrong_sizes_and_names_are_refused(tmp_path: Path, plan: ContainerPlan) -> None:
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        with pytest.raises(UsageError, match="expected 256 bytes, found 255"):
            out.write_tensor("norm", bytes(255))
        with pytest.raises(UsageError, match="expected 64 bytes, found more"):
            out.write_tensor("layers.0.q_norm", [bytes(64), b"x"])
        with pytest.raises(UsageError, match="'head' is an alias of 'embed'"):
            out.write_tensor("head", b"")
        with pytest.raises(UsageError, match="no tensor 'nope'"):
            out.write_tensor("nope", b"")
        with pytest.raises(UsageError, match="no block of row 1, expert 3"):
            out.write_block(1, 3, b"")
        with pytest.raises(UsageError, match=r"bytes, found 3"):
            out.write_block(1, 2, b"abc")
    with pytest.raises(UsageError, match="not open"):
        out.write_tensor("layers.1.attn_norm", bytes(256))
    with pytest.raises(UsageError, match="not open"):
        out.seal()


WORK_FILES = ["m.colibri.journal", "m.colibri.partial"]


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_failure_keeps_what_was_written_and_says_so(tmp_path: Path, error: BaseException) -> None:
    plan = small_plan()
    with (
        pytest.raises(type(error)) as caught,
        ContainerWriter(plan, tmp_path / "m.colibri") as out,
    ):
        out.write_block(0, 0, payload_of(plan, 0, 0))
        assert leftovers(tmp_path) == WORK_FILES
        raise error
    assert leftovers(tmp_path) == WORK_FILES
    text = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert "1 of 8 blocks and 0 of 32 tensors are kept in" in text
    assert "m.colibri.partial and " in text and "--restart" in text


@pytest.mark.parametrize("error", [SourceError("x"), FormatError("x"), UsageError("x")])
def test_a_refusal_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    plan = small_plan()
    with pytest.raises(type(error), match=r"^x$"), ContainerWriter(plan, tmp_path / "m") as out:
        out.write_block(0, 0, payload_of(plan, 0, 0))
        raise error
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), JobError("x")])
def test_a_failure_before_anything_is_written_leaves_nothing(
    tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)), ContainerWriter(small_plan(), tmp_path / "m"):
        raise error
    assert leftovers(tmp_path) == []


def test_partial_file_has_no_page_0_until_it_is_sealed(tmp_path: Path, plan: ContainerPlan) -> None:
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        out.write_block(0, 0, payload_of(plan, 0, 0))
        assert out.partial_path.stat().st_size == plan.file_size
        with pytest.raises(RuleError, match="unfinished"):
            containers.open(out.partial_path)


# -- the output's name -----------------------------------------------------------------------------


def start(path: Path, **options: Any) -> None:
    with ContainerWriter(small_plan(), path, **options):
        pass


def test_existing_output_needs_force_and_survives_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "m.colibri"
    path.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists; use --force"):
        start(path)
    with pytest.raises(RuntimeError), ContainerWriter(small_plan(), path, force=True):
        raise RuntimeError
    assert path.read_bytes() == b"precious"
    assert leftovers(tmp_path) == ["m.colibri"]
    write_container(small_plan(), path, force=True)
    assert verify_container(path).ok
    assert leftovers(tmp_path) == ["m.colibri"]


@pytest.mark.parametrize("make", ["directory", "fifo", "link to a directory"])
def test_output_that_is_no_file_is_refused_also_with_force(tmp_path: Path, make: str) -> None:
    path = tmp_path / "m.colibri"
    if make == "directory":
        path.mkdir()
    elif make == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "d").mkdir()
        path.symlink_to("d")
    with pytest.raises(UsageError, match="found"):
        start(path, force=True)
    assert path.exists() and "m.colibri.partial" not in leftovers(tmp_path)


def test_output_without_a_directory_or_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        start(tmp_path / "missing" / "m.colibri")
    with pytest.raises(UsageError, match="directory name"):
        writer.check_output(f"{tmp_path}/x/")
    with pytest.raises(UsageError, match="exists"):
        (tmp_path / "dangling").symlink_to("nowhere")
        start(tmp_path / "dangling")


@pytest.mark.parametrize("kind", ["same", "hard link", "symbolic link", "partial"])
def test_output_that_is_an_input_is_refused_also_with_force(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"numbers")
    out = tmp_path / "m.colibri"
    if kind == "same":
        out = source
    elif kind == "hard link":
        out.hardlink_to(source)
    elif kind == "symbolic link":
        out.symlink_to(source)
    else:
        (tmp_path / "m.colibri.partial").hardlink_to(source)
    status = source.stat()
    with pytest.raises(UsageError, match="is an input"):
        start(out, force=True, forbid_identities={(status.st_dev, status.st_ino)})
    assert source.read_bytes() == b"numbers"


def test_left_partial_file_is_named_and_kept(tmp_path: Path) -> None:
    partial = tmp_path / "m.colibri.partial"
    partial.write_bytes(b"old")
    with pytest.raises(JobError, match=r"m\.colibri\.partial cannot be resumed, .* --restart"):
        start(tmp_path / "m.colibri")
    assert partial.read_bytes() == b"old"
    assert leftovers(tmp_path) == ["m.colibri.partial"]


def test_two_jobs_for_one_output(tmp_path: Path, plan: ContainerPlan) -> None:
    with ContainerWriter(plan, tmp_path / "m.colibri") as out:
        with pytest.raises(JobError, match="another job is writing"):
            start(tmp_path / "m.colibri")
        assert out.partial_path.exists()


def test_output_of_a_job_that_finished_before_the_lock_is_kept(
    plan: ContainerPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.colibri"
    inner = writer.check_plan

    def finish_another_job(checked: ContainerPlan) -> None:
        inner(checked)
        out.write_text("finished")

    monkeypatch.setattr(writer, "check_plan", finish_another_job)
    with pytest.raises(UsageError, match="exists"), ContainerWriter(plan, out):
        raise AssertionError("begun")
    assert out.read_text() == "finished"
    assert leftovers(tmp_path) == ["m.colibri"]


@pytest.mark.parametrize("noreplace", [True, False])
def test_output_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noreplace: bool
) -> None:
    if not noreplace:
        monkeypatch.setattr(fileops, "_rename_noreplace", lambda old, new: False)
    path = tmp_path / "m.colibri"
    plan = small_plan()
    with pytest.raises(JobError, match="appeared there meanwhile"):
        real = writer.encode_metadata

        def appear(*args: Any) -> Any:
            path.write_bytes(b"other")
            return real(*args)

        with ContainerWriter(plan, path) as out:
            _fill(out)
            monkeypatch.setattr(writer, "encode_metadata", appear)
            out.seal()
    assert path.read_bytes() == b"other"
    assert leftovers(tmp_path) == ["m.colibri", *WORK_FILES]
    write_container(plan, path, force=True)
    assert verify_container(path).ok
    assert leftovers(tmp_path) == ["m.colibri"]


def test_publishing_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileops, "_rename_noreplace", lambda old, new: False)
    make_container(tmp_path / "m.colibri")
    assert leftovers(tmp_path) == ["m.colibri"]


def _fill(out: ContainerWriter) -> None:
    for planned in out.plan.tensors:
        if planned.alias_index is None:
            out.write_tensor(planned.item.name, tensor_data(out.plan, planned.item.name))
    for row, expert in out.plan.order:
        out.write_block(row, expert, payload_of(out.plan, row, expert))


# -- space and failing file systems ----------------------------------------------------------------


def test_space_is_checked_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "available_bytes", lambda out: 1_000_000)
    with pytest.raises(JobError, match=r"1429504 bytes needed, 1000000 available"):
        start(tmp_path / "m.colibri")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["allocate", "pwritev", "fsync"])
def test_failing_writes_at_the_start_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writer if call == "allocate" else os, call, fail)
    expected = "failed" if code == errno.EIO else "not enough disk space: 1429504 bytes needed"
    with pytest.raises(JobError, match=expected):
        make_container(tmp_path / "m.colibri")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_failing_writes_later_keep_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    plan = small_plan()
    real = os.pwritev
    calls = 0

    def fail(fd: int, buffers: list[Any], offset: int) -> int:
        nonlocal calls
        calls += offset >= plan.expert_offset
        if calls == 4 and offset >= plan.expert_offset:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", fail)
    expected = "failed" if code == errno.EIO else "not enough disk space: 1429504 bytes needed"
    with pytest.raises(JobError, match=f"{expected}.*3 of 8 blocks and 32 of 32 tensors are kept"):
        make_container(tmp_path / "m.colibri")
    assert leftovers(tmp_path) == WORK_FILES


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        head = memoryview(buffers[0])[:777]
        return real(fd, [head], offset)

    monkeypatch.setattr(os, "pwritev", short)
    assert verify_container(make_container(tmp_path / "m.colibri")).ok


def test_file_size_limit_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(JobError, match="ulimit -f"):
            make_container(tmp_path / "m.colibri")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(tmp_path) == []


def test_file_systems_without_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: Path
) -> None:
    monkeypatch.setattr(fileops.sys, "platform", "other")
    path = make_container(tmp_path / "m.colibri")
    assert path.read_bytes() == sound.read_bytes()


def test_flusher_syncs_while_a_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (real(fd), synced.set())[0])
    monkeypatch.setattr(flusher, "FLUSH_BYTES", 4096)
    with ContainerWriter(small_plan(), tmp_path / "m.colibri") as out:
        _fill(out)
        assert synced.wait(10)
        out.seal()
    assert verify_container(tmp_path / "m.colibri").ok


@pytest.mark.parametrize("when", ["next write", "seal"])
def test_errors_of_the_flusher_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    plan = small_plan()
    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(flusher, "FLUSH_BYTES", plan.file_size if when == "seal" else 4096)
    with (
        pytest.raises(JobError, match="finishing the file" if when == "seal" else "writing"),
        ContainerWriter(plan, tmp_path / "m.colibri") as out,
    ):
        _fill(out)
        assert out._flusher is not None
        if when == "seal":  # else the writes so far have started a sync, and its error may be there
            out._flusher.wrote(plan.file_size)
        deadline = time.monotonic() + 10
        while out._flusher._error is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if when == "next write":
            out._write(plan.data_offset, [memoryview(b"x")], "more")
        out.seal()
    assert leftovers(tmp_path) == []


# -- what is opened --------------------------------------------------------------------------------


def test_things_that_are_no_container(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        containers.open(tmp_path / "missing")
    with pytest.raises(SourceError, match="found a directory"):
        containers.open(tmp_path)
    with pytest.raises(SourceError, match="no file"):
        containers.open("/dev/null")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SourceError, match="no file"):
        containers.open(tmp_path / "fifo")
    (tmp_path / "text").write_bytes(b"GGUF" + bytes(5000))
    advice = r"found 'GGUF.*'; this is no container, 'colibri repack' makes one from a checkpoint"
    with pytest.raises(RuleError, match=rf"text: page 0: magic: expected 'COLIBRI.*', {advice}"):
        containers.open(tmp_path / "text")
    (tmp_path / "text").write_text("short")
    with pytest.raises(RuleError, match=r"found a file of 5 bytes; this is no container"):
        containers.open(tmp_path / "text")


def test_errors_name_the_file(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.colibri"
    path.write_bytes(sound.read_bytes()[:-1])
    with pytest.raises(RuleError) as caught:
        containers.open(path)
    assert str(caught.value).startswith(f"{path}: page 0: file_size")


def test_container_written_straight_from_the_page(tmp_path: Path) -> None:
    path = tmp_path / "m.colibri"
    path.write_bytes(mc.build(mc.small()).to_bytes())
    with containers.open(path) as container:
        assert [row.n_experts for row in container.rows] == [5, 3, 2]
        assert container.provenance["weights"] == [0.5, -1.0]
        assert container.blobs["config.json"] == b'{"a": 1}'
        assert container.tensors["mtp.unknown"].role == 999
        assert container.tensors["größe.alias"].alias_of == "größe"
        assert container.tensor("mtp.unknown").shape == (3, 1, 2, 5)
    errors = verify_container(path).errors
    assert {error.kind for error in errors} <= {"census", "nonfinite"}


def test_metadata_alone_can_be_opened(sound: Path, plan: ContainerPlan) -> None:
    head = sound.read_bytes()[: plan.data_offset]
    container = open_bytes(head, plan.file_size)
    assert container.n_blocks == 8
    with pytest.raises(SourceError, match="only the first"):
        container.block(0, 0)


def big_plan() -> ContainerPlan:
    layouts = [
        [
            PartSpec(PartRole.GATE, F32, 1, 1),
            PartSpec(PartRole.UP, F32, 1, 1),
            PartSpec(PartRole.DOWN, F32, 1, 1),
        ]
    ]
    n_layers, n_experts = 60, 384
    rows = [RowSpec(layer, 0, n_experts, (0,) * n_experts) for layer in range(n_layers)]
    spec = small_spec(executable=False, n_layers=n_layers, moe_layers=[1] * n_layers, hidden_size=1)
    order = [(row, expert) for row in range(n_layers) for expert in range(n_experts)]
    random.Random(1).shuffle(order)
    return plan_container(
        spec=spec,
        blobs={},
        provenance={},
        residents=[],
        layouts=layouts,
        rows=rows,
        order=order,
    )


def test_large_index_is_checked_in_no_time() -> None:
    plan = big_plan()
    assert plan.n_blocks == 23040
    started = time.process_time()
    writer.check_plan(plan)
    assert time.process_time() - started < 1.0


HOSTILE = """
import resource, sys, time
from colibri_tools.container import open
from colibri_tools import native
from colibri_tools.errors import ColibriError
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    started = time.process_time()
    try:
        open(path)
    except ColibriError as error:
        print(error.message)
    else:
        raise SystemExit(f"{path} was opened")
    assert time.process_time() - started < 1.0, path
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert after - before < 200 << 10, (before, after)
"""


def test_hostile_counts_cost_neither_time_nor_memory(sound: Path, tmp_path: Path) -> None:
    def patch(name: str, change: Any) -> Path:
        draft = Draft(bytearray(sound.read_bytes()))
        change(draft)
        path = tmp_path / name
        path.write_bytes(draft.seal().data)
        return path

    def sizes(draft: Draft) -> None:
        draft["layouts"]["parts"]["shape"][:] = 1 << 48
        draft["layouts"]["parts"]["n_bytes"][:] = 1 << 62

    def sparse(draft: Draft) -> None:
        draft.page["file_size"] = 1 << 40

    paths = [
        patch("tensors", lambda d: d["directory"].__setitem__("n_tensors", 2**32 - 1)),
        patch("names", lambda d: d["directory"].__setitem__("names_bytes", 2**64 - 1)),
        patch("rows", lambda d: d["row_table"].__setitem__("n_rows", 2**32 - 1)),
        patch("columns", lambda d: d["row_table"].__setitem__("n_columns", 65536)),
        patch("layouts", lambda d: d["layout_table"].__setitem__("n_layouts", 2**32 - 1)),
        patch("sizes", sizes),
        patch("section", lambda d: d.section(6).__setitem__("n_bytes", (1 << 30) - 1)),
        patch("sparse", sparse),
    ]
    os.truncate(tmp_path / "sparse", 1 << 40)
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(paths)
