"""One test for each numbered rule of docs/format.md: break it, and expect that rule's refusal.

Checksums are made to hold again after each change, so that the rule itself is what refuses.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from container_util import BF16, HIDDEN, Draft, make_container, small_residents, small_spec
from tiny_containers import Containers

from colibri_tools import native
from colibri_tools.container import SPEC_KEYS, RuleError, SectionKind, Stream
from colibri_tools.container import format as fmt
from colibri_tools.container.checks import check_layouts, check_rows
from colibri_tools.container.kv import KvType, decode_kv, encode_kv
from colibri_tools.container.reader import open_bytes
from colibri_tools.container.spec import OPTIONAL_SPEC_KEYS
from colibri_tools.engine import Engine
from colibri_tools.errors import FormatError, JobError, UsageError
from colibri_tools.respec import respec
from colibri_tools.verify import verify_container


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a sound container."""
    path = make_container(tmp_path_factory.mktemp("sound") / "model.colibri")
    return path.read_bytes()


@pytest.fixture
def draft(sound: bytes) -> Draft:
    """A copy to damage."""
    return Draft(bytearray(sound))


def refuses(draft: Draft, rule: int, *words: str) -> None:
    """Expect that opening names this rule and these words."""
    with pytest.raises(RuleError) as caught:
        draft.open()
    assert caught.value.rule == rule, caught.value.message
    for word in words:
        assert word in caught.value.message


def refuses_sealed(draft: Draft, rule: int, *words: str) -> None:
    """Expect the same although all checksums hold."""
    refuses(draft.seal(), rule, *words)


def verified(draft: Draft, path: Path) -> list[str]:
    """The messages of a verification."""
    path.write_bytes(draft.data)
    return [f"{error.kind}: {error.message}" for error in verify_container(path).errors]


def test_every_rule_has_a_test() -> None:
    page = Path(__file__).parent.parent / "docs" / "format.md"
    rules = {int(n) for n in re.findall(r"^(\d+)\. ", page.read_text("utf-8"), re.MULTILINE)}
    tested = {int(n) for n in re.findall(r"^test_rule_(\d+)_", "\n".join(globals()), re.MULTILINE)}
    assert rules == set(range(1, 29))
    assert tested == rules


def test_sound_container_opens(draft: Draft) -> None:
    assert draft.seal().open().n_blocks == 8


# -- page 0 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"), [("version", 2), ("version", 0), ("page0_bytes", 8192)]
)
def test_rule_01_version_and_page_size(draft: Draft, field: str, value: int) -> None:
    draft.page[field] = value
    refuses(draft.seal_page(), 1, field)


def test_rule_01_magic(draft: Draft) -> None:
    draft.data[7] = 1
    refuses(draft.seal_page(), 1, "magic")


@pytest.mark.parametrize("size", [0, 1, 4095])
def test_rule_01_shorter_than_a_page(sound: bytes, size: int) -> None:
    with pytest.raises(RuleError) as caught:
        open_bytes(sound[:size])
    assert caught.value.rule == 1


@pytest.mark.parametrize("bit", [0, 13, 63])
def test_rule_02_unknown_required_feature_is_named(draft: Draft, bit: int) -> None:
    draft.page["required_features"] = 1 << bit
    refuses(draft.seal_page(), 2, f"bit {bit};")


def test_rule_02_optional_features_do_not_stop(draft: Draft) -> None:
    draft.page["optional_features"] = (1 << 64) - 1
    assert draft.seal_page().open().n_blocks == 8


@pytest.mark.parametrize("alignment", [0, 1, 2048, 4095, 4097, 12288, 4 << 20, 1 << 63])
def test_rule_03_alignment(draft: Draft, alignment: int) -> None:
    draft.page["alignment"] = alignment
    refuses(draft.seal_page(), 3, "alignment", str(alignment))


def test_rule_04_crc_of_page_0(draft: Draft) -> None:
    draft.data[90] ^= 4
    refuses(draft, 4, "CRC-32C")


def test_rule_04_unfinished_file_has_no_page_0(draft: Draft) -> None:
    draft.data[: fmt.PAGE0_BYTES] = bytes(fmt.PAGE0_BYTES)
    refuses(draft, 1, "unfinished")


@pytest.mark.parametrize("change", [-1, 1, 4096, -4096])
def test_rule_05_cut_or_grown_file(sound: bytes, change: int) -> None:
    data = bytearray(sound[:change] if change < 0 else sound + bytes(change))
    with pytest.raises(RuleError) as caught:
        Draft(data).open()
    assert caught.value.rule == 5
    assert str(len(sound) + change) in caught.value.message


@pytest.mark.parametrize("count", [0, 6, 62, 2**32 - 1])
def test_rule_06_number_of_sections(draft: Draft, count: int) -> None:
    draft.page["n_sections"] = count
    refuses(draft.seal_page(), 6, "n_sections")


def _contents(draft: Draft) -> dict[int, bytes]:
    return {kind: bytes(draft.section_bytes(kind)) for kind in range(1, 8)}


def test_rule_06_kinds_ascend(draft: Draft) -> None:
    contents = _contents(draft)
    swapped = {kind: contents[kind] for kind in (1, 3, 2, 4, 5, 6, 7)}
    draft.place_sections(swapped)
    refuses_sealed(draft, 6, "kind")


def test_rule_06_kind_twice(draft: Draft) -> None:
    draft.section(2)["kind"] = 1
    refuses_sealed(draft, 6, "kind")


@pytest.mark.parametrize("kind", range(1, 8))
def test_rule_06_required_kind_is_missing(draft: Draft, kind: int) -> None:
    contents = _contents(draft)
    del contents[kind]
    draft.place_sections(contents | {99: b"x"}, flags={99: 0})
    refuses_sealed(draft, 6, SectionKind(kind).label)


@pytest.mark.parametrize("kind", range(1, 8))
def test_rule_06_required_kind_without_its_flag(draft: Draft, kind: int) -> None:
    draft.section(kind)["flags"] = 0
    refuses_sealed(draft, 6, SectionKind(kind).label)


@pytest.mark.parametrize("kind", [8, 16, 19, 1000])
def test_rule_06_unknown_required_kind(draft: Draft, kind: int) -> None:
    draft.place_sections(_contents(draft) | {kind: b"what is this"})
    refuses_sealed(draft, 6, "newer")


@pytest.mark.parametrize("content", [b"", b"what is this"])
def test_rule_06_unknown_optional_kind_is_skipped(draft: Draft, content: bytes) -> None:
    draft.place_sections(_contents(draft) | {1000: content}, flags={1000: 0})
    assert draft.seal().open().n_blocks == 8


def test_rule_06_checksums_of_skipped_sections_hold(draft: Draft) -> None:
    draft.place_sections(_contents(draft) | {1000: b"what is this"}, flags={1000: 0})
    draft.seal()
    draft.section_bytes(1000)[3] ^= 1
    refuses(draft, 9, "unknown section 1000")


@pytest.mark.parametrize("shift", [-64, 64, 1])
@pytest.mark.parametrize("kind", [1, 4, 7])
def test_rule_07_sections_do_not_overlap(draft: Draft, kind: int, shift: int) -> None:
    draft.section(kind)["offset"] = int(draft.section(kind)["offset"][0]) + shift
    refuses_sealed(draft, 7, "offset")


def test_rule_07_gaps_between_sections_are_zero(draft: Draft) -> None:
    spec = draft.section(SectionKind.SPEC)
    end = int(spec["offset"][0] + spec["n_bytes"][0])
    assert end % 64
    draft.data[end] = 1
    refuses(draft, 7, "gap")


@pytest.mark.parametrize("change", [-1, 1])
def test_rule_07_metadata_bytes(draft: Draft, change: int) -> None:
    draft.page["metadata_bytes"] = int(draft.page["metadata_bytes"][0]) + change
    refuses_sealed(draft, 7, "metadata_bytes")


@pytest.mark.parametrize("n_bytes", [fmt.MAX_METADATA_BYTES + 1, 1 << 62, (1 << 64) - 1])
def test_rule_07_metadata_is_bounded(draft: Draft, n_bytes: int) -> None:
    draft.section(SectionKind.LAYOUTS)["n_bytes"] = n_bytes
    refuses(draft.seal_page(), 7, "128 MiB")


def test_rule_08_reserve_is_zero(draft: Draft) -> None:
    draft.data[int(draft.page["data_offset"][0]) - 1] = 1
    refuses(draft, 8, "reserve")


@pytest.mark.parametrize("data_offset", [0, 4096, 1064961, 1 << 40, (1 << 64) - 4096])
def test_rule_08_data_offset(draft: Draft, data_offset: int) -> None:
    draft.page["data_offset"] = data_offset
    refuses(draft.seal_page(), 8, "data_offset")


def test_rule_08_writer_leaves_room_for_the_spec(draft: Draft) -> None:
    page = draft.page[0]
    reserve = int(page["data_offset"]) - 4096 - int(page["metadata_bytes"])
    assert reserve >= max(1 << 20, int(page["metadata_bytes"]) / 4)


@pytest.mark.parametrize("kind", range(1, 8))
def test_rule_09_crc_of_sections(draft: Draft, kind: int) -> None:
    draft.section_bytes(kind)[-1] ^= 1
    refuses(draft, 9, "CRC-32C", SectionKind(kind).label)


@pytest.mark.parametrize("kind", range(1, 8))
def test_rule_09_sha256_of_sections(draft: Draft, kind: int) -> None:
    draft.section(kind)["sha256"][0, 5] ^= 1
    table = draft.page["sections"][0][:7].tobytes()
    draft.page["id"][0] = np.frombuffer(hashlib.sha256(table).digest(), np.uint8)
    refuses(draft.seal_page(), 9, "SHA-256", SectionKind(kind).label)


def test_rule_09_id(draft: Draft) -> None:
    draft.page["id"][0, 0] ^= 1
    refuses(draft.seal_page(), 9, "id")


@pytest.mark.parametrize("offset", [52, 55, 80, 87, 120, 127, 128 + 7 * 64, 4091])
def test_rule_10_undescribed_bytes_of_page_0_are_zero(draft: Draft, offset: int) -> None:
    draft.data[offset] = 1
    refuses(draft.seal_page(), 10)


@pytest.mark.parametrize("offset", [4, 28])
def test_rule_10_undescribed_bits_of_the_section_table(draft: Draft, offset: int) -> None:
    draft.data[128 + 64 + offset] |= 0x80
    refuses_sealed(draft, 10)


# -- key-values and blobs --------------------------------------------------------------------------


def entry(key: bytes, kind: int, n: int, value: bytes, zero: int = 0) -> bytes:
    """One key-value entry, padded."""
    head = struct.pack("<HBBI", len(key), kind, zero, n)
    return head + key + bytes(-len(key) % 8) + value + bytes(-len(value) % 8)


def section_of(*entries: bytes, count: int | None = None, zero: int = 0) -> bytes:
    """A key-value section."""
    n = len(entries) if count is None else count
    return struct.pack("<II", n, zero) + b"".join(entries)


ONE = struct.pack("<Q", 1)
NAN = struct.pack("<d", float("nan"))
BROKEN_KV = {
    "no header": b"1234",
    "count too large": section_of(entry(b"a", 1, 1, ONE), count=2),
    "count too small": section_of(entry(b"a", 1, 1, ONE), entry(b"b", 1, 1, ONE), count=1),
    "count over 4096": section_of(*(entry(f"k{i:05}".encode(), 1, 1, ONE) for i in range(4097))),
    "count of 2^32-1": section_of(count=2**32 - 1),
    "zero word": section_of(zero=1),
    "zero byte": section_of(entry(b"a", 1, 1, ONE, zero=1)),
    "trailing bytes": section_of(entry(b"a", 1, 1, ONE)) + bytes(8),
    "descending keys": section_of(entry(b"b", 1, 1, ONE), entry(b"a", 1, 1, ONE)),
    "key twice": section_of(entry(b"a", 1, 1, ONE), entry(b"a", 1, 1, ONE)),
    "empty key": section_of(entry(b"", 1, 1, ONE)),
    "key of 129": section_of(entry(b"a" * 129, 1, 1, ONE)),
    "key of 65535": section_of(struct.pack("<HBBI", 65535, 1, 0, 1) + bytes(16)),
    "upper case key": section_of(entry(b"A", 1, 1, ONE)),
    "key with newline": section_of(entry(b"a\n", 1, 1, ONE)),
    "key padding": section_of(struct.pack("<HBBI", 1, 1, 0, 1) + b"a" + b"\1" * 7 + ONE),
    "type 0": section_of(entry(b"a", 0, 1, ONE)),
    "type 9": section_of(entry(b"a", 9, 1, ONE)),
    "u64 of two": section_of(entry(b"a", 1, 2, ONE + ONE)),
    "bool of none": section_of(entry(b"a", 4, 0, b"")),
    "bool of 2": section_of(entry(b"a", 4, 1, struct.pack("<Q", 2))),
    "f64 NaN": section_of(entry(b"a", 3, 1, NAN)),
    "f64 inf": section_of(entry(b"a", 3, 1, struct.pack("<d", float("inf")))),
    "f64 array NaN": section_of(entry(b"a", 7, 2, ONE + NAN)),
    "string not UTF-8": section_of(entry(b"a", 5, 2, b"\xff\xfe")),
    "string with NUL": section_of(entry(b"a", 5, 2, b"a\0")),
    "string padding": section_of(struct.pack("<HBBI", 1, 5, 0, 1) + b"a" + bytes(7) + b"x" * 8),
    "string too long": section_of(entry(b"a", 5, 2**32 - 1, b"abc")),
    "u64 array too long": section_of(entry(b"a", 6, 2**32 - 1, ONE)),
    "string array too long": section_of(entry(b"a", 8, 2**32 - 1, bytes(16))),
    "string array element too long": section_of(entry(b"a", 8, 1, struct.pack("<I", 99) + b"x")),
    "string array not UTF-8": section_of(entry(b"a", 8, 1, struct.pack("<I", 1) + b"\xff")),
    "string array padding": section_of(entry(b"a", 8, 1, struct.pack("<I", 0) + b"\1")),
    "value cut": section_of(entry(b"a", 1, 1, ONE))[:-1],
    "value missing": section_of(struct.pack("<HBBI", 1, 1, 0, 1) + b"a" + bytes(7)),
}


@pytest.mark.parametrize("name", BROKEN_KV)
@pytest.mark.parametrize("kind", [SectionKind.PROVENANCE, SectionKind.SPEC])
def test_rule_11_key_values(draft: Draft, kind: SectionKind, name: str) -> None:
    draft.replace_section(kind, BROKEN_KV[name])
    refuses_sealed(draft, 11, kind.label)


def test_rule_11_sections_are_bounded() -> None:
    with pytest.raises(RuleError, match=str(fmt.MAX_KV_BYTES)):
        decode_kv(bytes(fmt.MAX_KV_BYTES + 8), "spec")


@pytest.mark.parametrize("value", [0, 0.5, ""])
def test_rule_11_elements_are_bounded(value: object) -> None:
    half = [value] * (fmt.MAX_KV_ELEMENTS // 2)
    section = encode_kv({"a": half, "b": half, "c": 1})
    assert len(decode_kv(section, "spec")[0]["b"]) == len(half)
    with pytest.raises(UsageError, match=str(fmt.MAX_KV_ELEMENTS)):
        encode_kv({"a": half, "b": half, "c": [value]})
    one_more = bytearray(section + encode_kv({"d": [1]})[8:])
    one_more[0] += 1
    with pytest.raises(RuleError, match="key 'd': elements: expected at most 0 more, found 1"):
        decode_kv(bytes(one_more), "spec")


def test_rule_11_every_type_is_read_back(draft: Draft) -> None:
    values = {
        "a.u64": 2**64 - 1,
        "b.i64": -(2**63),
        "c.f64": 0.1,
        "d.bool": True,
        "e.string": "später",
        "f.u64s": [0, 2**64 - 1],
        "g.f64s": [0.1, -2.5e300],
        "h.strings": ["", "x", "später"],
        "i.none": [],
    }
    draft.replace_section(SectionKind.PROVENANCE, encode_kv(values))
    assert draft.seal().open().provenance == values


def spec_section(**changes: object) -> bytes:
    """A spec section, where None removes a key."""
    spec = {k: v for k, v in (small_spec() | changes).items() if v is not None}
    types = {k: v for k, v in SPEC_KEYS.items() if k not in changes}
    return encode_kv(spec, types)


@pytest.mark.parametrize("key", sorted(small_spec()))
def test_rule_12_missing_key(draft: Draft, key: str) -> None:
    draft.replace_section(SectionKind.SPEC, spec_section(**{key: None}))
    refuses_sealed(draft, 12, key)


@pytest.mark.parametrize("key", sorted(small_spec()))
def test_rule_12_key_of_another_type(draft: Draft, key: str) -> None:
    wrong = [1.5] if not isinstance(small_spec()[key], str) else 7
    if key == "graph.rope_inv_freq":
        wrong = 1.5
    draft.replace_section(SectionKind.SPEC, spec_section(**{key: wrong}))
    refuses_sealed(draft, 12, key)


@pytest.mark.parametrize("moe_layers", [[0, 1], [0, 1, 1, 0], [0, 1, 2]])
def test_rule_12_moe_layers_is_one_flag_per_layer(draft: Draft, moe_layers: list[int]) -> None:
    draft.replace_section(SectionKind.SPEC, spec_section(moe_layers=moe_layers))
    refuses_sealed(draft, 12, "moe_layers")


def test_rule_12_unknown_and_optional_keys_are_accepted(draft: Draft) -> None:
    changes = {"graph.new_switch": 1, "anything": "x", "executable_lacks": "nothing"}
    draft.replace_section(SectionKind.SPEC, spec_section(**changes))
    assert draft.seal().open().spec["graph.new_switch"] == 1


@pytest.mark.parametrize("key", sorted(OPTIONAL_SPEC_KEYS))
def test_rule_12_optional_keys_of_another_type(draft: Draft, tmp_path: Path, key: str) -> None:
    """In both readers."""
    wrong = [1] if SPEC_KEYS[key] is KvType.STRING else "word"
    draft.replace_section(SectionKind.SPEC, spec_section(**{key: wrong}))
    refuses_sealed(draft, 12, key)
    path = tmp_path / "m.colibri"
    path.write_bytes(draft.data)
    with pytest.raises(FormatError, match=f'rule 12: spec: key "{key}"'):
        Engine(path)


def blobs_section(*blobs: tuple[bytes, bytes], **patch: tuple[int, int]) -> bytes:
    """A blobs section; `patch` overwrites (offset, u64)."""
    names = b"".join(name for name, _ in blobs)
    at_name, end = 8 + 32 * len(blobs), 8 + 32 * len(blobs) + len(names)
    entries, data = b"", b""
    start_of_data = end
    for name, content in blobs:
        start = fmt.align(end, 64)
        entries += struct.pack("<IIQQQ", at_name, len(name), start, len(content), 0)
        data += bytes(start - end) + content
        at_name, end = at_name + len(name), start + len(content)
    out = bytearray(struct.pack("<II", len(blobs), 0) + entries + names + data)
    assert len(out) == end >= start_of_data
    for offset, value in patch.values():
        out[offset : offset + 8] = struct.pack("<Q", value)
    return bytes(out)


TWO = ((b"a", b"12345"), (b"b", b"678"))
BROKEN_BLOBS = {
    "empty section": b"",
    "count over 1024": blobs_section(*((b"%04d" % i, b"") for i in range(1025))),
    "count too large": blobs_section(*TWO, x=(0, 3)),
    "count of 2^32-1": blobs_section(*TWO, x=(0, 2**32 - 1)),
    "zero word": blobs_section(*TWO, x=(0, 2 | 1 << 32)),
    "entry's zero word": blobs_section(*TWO, x=(8 + 24, 1)),
    "descending names": blobs_section(*TWO[::-1]),
    "name twice": blobs_section(TWO[0], TWO[0]),
    "empty name": blobs_section((b"", b"x")),
    "name of 256": blobs_section((b"x" * 256, b"x")),
    "name with slash": blobs_section((b"a/b", b"x")),
    "name with backslash": blobs_section((b"a\\b", b"x")),
    "name with NUL": blobs_section((b"a\0b", b"x")),
    "name not UTF-8": blobs_section((b"\xff", b"x")),
    "name beyond the section": blobs_section(TWO[0], x=(8, 41 | 2**31 << 32)),
    "name elsewhere": blobs_section(*TWO, x=(8, 73 | 1 << 32)),
    "datum elsewhere": blobs_section(*TWO, x=(8 + 8, 192)),
    "datum beyond the section": blobs_section(*TWO, x=(8 + 32 + 16, 2**63)),
    "datum shorter": blobs_section(*TWO, x=(8 + 32 + 16, 2)),
    "trailing bytes": blobs_section(*TWO) + b"\0",
    "gap": blobs_section(*TWO)[:127] + b"\1" + blobs_section(*TWO)[128:],
}


@pytest.mark.parametrize("name", BROKEN_BLOBS)
def test_rule_13_blobs(draft: Draft, name: str) -> None:
    draft.replace_section(SectionKind.BLOBS, BROKEN_BLOBS[name])
    words = {"empty section": "at least 8", "datum beyond the section": "data_bytes"}
    refuses_sealed(draft, 13, "blob", words.get(name, ""))


def test_rule_13_sound_blobs(draft: Draft) -> None:
    draft.replace_section(SectionKind.BLOBS, blobs_section(*TWO))
    assert dict(draft.seal().open().blobs) == {"a": b"12345", "b": b"678"}
    draft.replace_section(SectionKind.BLOBS, blobs_section())
    assert len(bytes(draft.section_bytes(SectionKind.BLOBS))) == 8
    assert not draft.seal().open().blobs


# -- resident directory ----------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-64, 64, 1, 1 << 62])
@pytest.mark.parametrize("entry_number", [1, 5, -2, -1])
def test_rule_14_tensors_follow_each_other(draft: Draft, entry_number: int, shift: int) -> None:
    moved = int(draft["tensors"]["offset"][entry_number]) + shift
    draft["tensors"]["offset"][entry_number] = moved
    refuses_sealed(draft, 14)


def test_rule_14_groups_ascend(draft: Draft) -> None:
    groups = draft["tensors"]["group"]
    assert groups.tolist() == [1] * (len(groups) - 2) + [2, 3]
    groups[0] = 3  # an alias, so that nothing moves
    refuses_sealed(draft, 14, "group", "at least 3")


@pytest.mark.parametrize("group", [0, 4, 65535])
def test_rule_14_unknown_group(draft: Draft, group: int) -> None:
    draft["tensors"]["group"][-1] = group
    refuses_sealed(draft, 14, "group")


@pytest.mark.parametrize("expert_offset", [0, 4096, 1 << 40, 1064960])
def test_rule_14_expert_offset(draft: Draft, expert_offset: int) -> None:
    draft.page["expert_offset"] = expert_offset
    refuses_sealed(draft, 14, "at most" if expert_offset == 1064960 else "expert_offset")


def test_rule_14_experts_follow_the_last_tensor_at_once(sound: bytes) -> None:
    start = int(Draft(bytearray(sound)).page["expert_offset"][0])
    draft = Draft(bytearray(sound[:start] + bytes(4096) + sound[start:]))
    draft.page["expert_offset"] = start + 4096
    draft.page["file_size"] = len(draft.data)
    cells = draft["cells"]
    cells["offset"][cells["flags"] == 1] += np.uint64(4096)
    refuses_sealed(draft, 14, "expert_offset", str(start))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["alias_of"].__setitem__(0, 10**6),
        lambda t: t["alias_of"].__setitem__(0, 0),
        lambda t: t["flags"].__setitem__(0, 3),
        lambda t: t["alias_of"].__setitem__(5, 1),
        lambda t: t["offset"].__setitem__(0, 4096),
        lambda t: t["crc32c"].__setitem__(0, 1),
        lambda t: t["sha256"].__setitem__((0, 3), t["sha256"][0, 3] ^ 1),
        lambda t: t["zero"].__setitem__((7, 11), 1),
    ],
    ids=["far", "self", "flag", "no alias", "offset", "crc", "sha", "zero"],
)
def test_rule_14_aliases(draft: Draft, change: Callable[[np.ndarray], None]) -> None:
    tensors = draft["tensors"]
    assert tensors["flags"][0] == 1
    change(tensors)
    refuses_sealed(draft, 14)


def test_rule_14_alias_with_another_shape(draft: Draft) -> None:
    shape = draft["tensors"]["shape"]
    shape[0, :2] = shape[0, 1], shape[0, 0]
    refuses_sealed(draft, 14, "shape")


def test_rule_14_gaps_between_tensors_are_zero(draft: Draft, tmp_path: Path) -> None:
    ends = draft["tensors"]["offset"] + draft["tensors"]["n_bytes"]
    gap = next(int(end) for end in ends[1:] if end % 64)
    draft.data[gap] = 1
    (message,) = verified(draft, tmp_path / "m.colibri")
    assert "padding" in message and str(gap) in message


@pytest.mark.parametrize("field", ["n_bytes", "type", "n_dims"])
@pytest.mark.parametrize("value", [0, 5, 31, 2**32 - 1])
def test_rule_15_sizes(draft: Draft, field: str, value: int) -> None:
    assert draft["tensors"]["type"][4] == BF16.id
    draft["tensors"][field][4] = value
    refuses_sealed(draft, 15)


def test_rule_15_at_most_four_dimensions(draft: Draft) -> None:
    patch = draft["tensors"][-1]
    assert patch["shape"].tolist() == [7, 3, 1, 0]
    patch["shape"][3] = 1
    patch["n_dims"] = 5
    refuses_sealed(draft, 15, "n_dims")
    patch["n_dims"] = 4
    assert draft.seal().open().tensors["vision.patch"].shape == (7, 3, 1, 1)


@pytest.mark.parametrize("type_id", [4, 31, 99, 0x1000, 0x1001, 2**32 - 1])
def test_rule_15_types_that_no_container_has(draft: Draft, type_id: int) -> None:
    draft["tensors"]["type"][4] = type_id
    refuses_sealed(draft, 15, "type")


@pytest.mark.parametrize(
    "shape",
    [
        (0, 64, 0, 0),
        (2**48 + 1, 1, 0, 0),
        (2**48, 2**15, 0, 0),
        (2**48, 2**48, 0, 0),
        (2**63, 2**63, 0, 0),
        (2**64 - 1, 2**64 - 1, 0, 0),
        (128, 64, 1, 0),
        (64, 128, 0, 1),
        (2**40, 2**22, 0, 0),
    ],
)
def test_rule_15_shapes(draft: Draft, shape: tuple[int, ...]) -> None:
    assert draft["tensors"]["n_dims"][3] == 2
    draft["tensors"]["shape"][3] = shape
    refuses_sealed(draft, 15)


def test_rule_15_rows_are_whole_quant_blocks(draft: Draft) -> None:
    tensors = draft["tensors"]
    v = int(np.flatnonzero(tensors["type"] == 8)[0])
    assert tensors["shape"][v, 1] == HIDDEN
    tensors["shape"][v, :2] = HIDDEN, HIDDEN // 2 - 16
    refuses_sealed(draft, 15, "multiple of 32")


def test_rule_15_layout_parts(draft: Draft) -> None:
    draft["layouts"]["parts"]["n_bytes"][0, 1] += np.uint64(64)
    refuses_sealed(draft, 23, "bytes")


@pytest.mark.parametrize("field", ["name_offset", "name_bytes"])
@pytest.mark.parametrize("value", [0, 1, 256, 2**32 - 1])
def test_rule_16_names(draft: Draft, field: str, value: int) -> None:
    draft["tensors"][field][4] = value
    refuses_sealed(draft, 16)


def test_rule_16_names_are_unique(draft: Draft) -> None:
    directory = bytes(draft.section_bytes(SectionKind.DIRECTORY))
    assert directory.count(b"layers.1.up") == 0
    changed = directory.replace(b"layers.1.q_norm", b"layers.0.q_norm")
    draft.replace_section(SectionKind.DIRECTORY, changed)
    refuses_sealed(draft, 16, "layers.0.q_norm", "twice")


def with_last_name(draft: Draft, name: bytes, n_bytes: int) -> Draft:
    """Give the last tensor a name of which its entry claims `n_bytes`."""
    old = int(draft["tensors"]["name_bytes"][-1])
    draft["tensors"]["name_bytes"][-1] = n_bytes
    names_bytes = int(draft["directory"]["names_bytes"][0])
    draft["directory"]["names_bytes"] = names_bytes + len(name) - old
    directory = bytes(draft.section_bytes(SectionKind.DIRECTORY))
    draft.replace_section(SectionKind.DIRECTORY, directory[:-old] + name)
    return draft


def test_rule_16_length_of_names(draft: Draft) -> None:
    refuses_sealed(with_last_name(draft, b"x" * 256, 256), 16, "name_bytes")


def test_rule_16_longest_name(draft: Draft) -> None:
    assert "x" * 255 in with_last_name(draft, b"x" * 255, 255).seal().open().tensors


def test_rule_16_names_end_with_the_last(draft: Draft) -> None:
    refuses_sealed(with_last_name(draft, b"xyz", 2), 16, "end of the names")


def test_rule_16_names_are_utf8(draft: Draft) -> None:
    draft.section_bytes(SectionKind.DIRECTORY)[-3] = 0xFF
    refuses_sealed(draft, 16, "UTF-8")


@pytest.mark.parametrize("field", ["n_tensors", "entry_bytes", "names_bytes"])
@pytest.mark.parametrize("value", [0, 32, 1 << 20, 2**32 - 1])
def test_rule_16_directory_header(draft: Draft, field: str, value: int) -> None:
    draft["directory"][field] = value
    too_many = field == "n_tensors" and value > fmt.MAX_TENSORS
    refuses_sealed(draft, 16, f"at most {fmt.MAX_TENSORS}" if too_many else "")


def test_rule_16_directory_fills_its_section(draft: Draft) -> None:
    directory = bytes(draft.section_bytes(SectionKind.DIRECTORY))
    draft.replace_section(SectionKind.DIRECTORY, directory + b"x")
    refuses_sealed(draft, 16)
    draft.replace_section(SectionKind.DIRECTORY, directory[:9])
    refuses_sealed(draft, 16)


def test_rule_17_role_once_per_layer(draft: Draft) -> None:
    tensors = draft["tensors"]
    tensors["layer"][tensors["role"] == 25] = 1
    refuses_sealed(draft, 17, "attn_q_norm", "twice")


@pytest.mark.parametrize("role", [0, 9, 47, 52, 65535])
def test_rule_17_roles_of_needed_tensors_are_known(draft: Draft, role: int) -> None:
    draft["tensors"]["role"][4] = role
    refuses_sealed(draft, 17, "role")


@pytest.mark.parametrize("role", [0, 9, 65535])
def test_rule_17_optional_tensors_may_have_any_role(draft: Draft, role: int) -> None:
    assert draft["tensors"]["group"][-1] == 3
    draft["tensors"]["role"][-1] = role
    assert draft.seal().open().tensors["vision.patch"].role == role


@pytest.mark.parametrize("layer", [-2, 3, 2**31 - 1, -(2**31)])
def test_rule_17_layer(draft: Draft, layer: int) -> None:
    draft["tensors"]["layer"][-1] = layer
    refuses_sealed(draft, 17, "layer")


# -- rows, index, layouts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "row", "value"),
    [
        ("layer", 0, 2),
        ("layer", 1, 1),
        ("layer", 0, -1),
        ("stream", 0, 1),
        ("stream", 1, 2),
        ("n_experts", 1, 0),
        ("n_experts", 1, 6),
        ("n_experts", 0, 4),
        ("flags", 0, 1),
        ("zero", 0, 1),
    ],
)
def test_rule_18_rows(draft: Draft, field: str, row: int, value: int) -> None:
    draft["rows"][field][row] = value
    refuses_sealed(draft, 18)


@pytest.mark.parametrize(("n_rows", "n_experts"), [(fmt.MAX_ROWS + 1, 1), (1, fmt.MAX_COLUMNS + 1)])
def test_rule_18_rows_and_columns_are_bounded(n_rows: int, n_experts: int) -> None:
    rows = np.zeros(n_rows, fmt.ROW_DTYPE)
    rows["layer"] = np.arange(n_rows)
    rows["n_experts"] = n_experts
    with pytest.raises(RuleError, match="at most 65536"):
        check_rows(rows, n_experts)


def test_rule_18_cells_are_bounded() -> None:
    n_columns = 4096
    rows = np.zeros(fmt.MAX_CELLS // n_columns + 1, fmt.ROW_DTYPE)
    rows["layer"] = np.arange(len(rows))
    rows["n_experts"] = n_columns
    check_rows(rows[:-1], n_columns)
    with pytest.raises(RuleError, match=f"at most {fmt.MAX_CELLS}"):
        check_rows(rows, n_columns)


@pytest.mark.parametrize("field", ["n_rows", "n_columns", "entry_bytes", "zero"])
@pytest.mark.parametrize("value", [1, 65537, 2**32 - 1])
def test_rule_18_row_table_header(draft: Draft, field: str, value: int) -> None:
    draft["row_table"][field] = value
    refuses_sealed(draft, 18)


def test_rule_18_dense_layers_have_no_row(draft: Draft) -> None:
    assert [row.layer for row in draft.open().rows] == [1, 2]


@pytest.mark.parametrize("column", [3, 4])
@pytest.mark.parametrize("field", ["offset", "rank", "flags", "sha256"])
def test_rule_19_cells_beyond_the_row_are_zero(draft: Draft, field: str, column: int) -> None:
    draft["cells"][field][1, column] = 1
    refuses_sealed(draft, 19, "layer 2 expert", "beyond 3")


@pytest.mark.parametrize(
    ("field", "value"),
    [("flags", 0), ("flags", 3), ("part", 1), ("layout", 3), ("layout", 2), ("n_bytes", 64)],
)
def test_rule_19_fields_of_cells(draft: Draft, field: str, value: int) -> None:
    draft["cells"][field][0, 3] = value
    refuses_sealed(draft, 19, "layer 1 expert 3")


def test_rule_19_lookup_beyond_the_row_is_refused(draft: Draft) -> None:
    container = draft.open()
    for row, expert in [(1, 3), (1, -1), (0, 5), (2, 0), (-1, 0)]:
        with pytest.raises(UsageError, match=r"expert|row"):
            container.block(row, expert)


def test_rule_19_index_has_a_cell_for_each_row_and_column(draft: Draft) -> None:
    index = bytes(draft.section_bytes(SectionKind.INDEX))
    draft.replace_section(SectionKind.INDEX, index[:-64])
    refuses_sealed(draft, 19, "bytes")


@pytest.mark.parametrize("rank", [0, 8, 2**32 - 1])
def test_rule_20_ranks_are_a_permutation(draft: Draft, rank: int) -> None:
    assert draft["cells"]["rank"][1, 1] == 6
    draft["cells"]["rank"][1, 1] = rank
    refuses_sealed(draft, 20, "rank")


@pytest.mark.parametrize("shift", [4096, -4096, 64, 1 << 63])
def test_rule_20_blocks_follow_each_other(draft: Draft, shift: int) -> None:
    draft["cells"]["offset"][0, 4] = int(draft["cells"]["offset"][0, 4]) + shift
    refuses_sealed(draft, 20, "layer 1 expert 4")


def test_rule_20_swapped_ranks(draft: Draft) -> None:
    ranks = draft["cells"]["rank"]
    ranks[0, 0], ranks[0, 1] = ranks[0, 1], ranks[0, 0]
    refuses_sealed(draft, 20, "offset")


def test_rule_20_file_ends_with_the_last_block(sound: bytes) -> None:
    draft = Draft(bytearray(sound + bytes(4096)))
    draft.page["file_size"] = len(draft.data)
    refuses_sealed(draft, 20, "file_size")


def test_rule_21_padding_behind_blocks_is_zero(draft: Draft, tmp_path: Path) -> None:
    cell = draft["cells"][0, 2]
    draft.data[int(cell["offset"]) + int(cell["n_bytes"])] = 7
    (message,) = verified(draft, tmp_path / "m.colibri")
    assert message.startswith("padding: layer 1 expert 2, padding")


def test_rule_22_checksums_of_payloads(draft: Draft, tmp_path: Path) -> None:
    draft.data[int(draft["cells"]["offset"][1, 2]) + 100] ^= 0x10
    (message,) = verified(draft, tmp_path / "m.colibri")
    assert message.startswith("checksum: layer 2 expert 2")
    assert "CRC-32C" in message and "SHA-256" in message


@pytest.mark.parametrize("field", ["crc32c", "sha256"])
def test_rule_22_each_checksum_counts(draft: Draft, field: str, tmp_path: Path) -> None:
    draft["cells"][field][1, 2] ^= 1
    draft["tensors"][field][5] ^= 1
    messages = verified(draft.seal(), tmp_path / "m.colibri")
    assert len(messages) == 2
    assert all(m.startswith("checksum") for m in messages)
    assert sum("CRC-32C" in m for m in messages) == (2 if field == "crc32c" else 0)


@pytest.mark.parametrize(
    ("field", "part", "value"),
    [
        ("role", 0, 0),
        ("role", 1, 1),
        ("role", 2, 7),
        ("role", 2, 4),
        ("permutation", 0, 1),
        ("type", 0, 99),
        ("offset", 1, 64),
        ("offset", 2, 1 << 63),
        ("n_bytes", 0, 1 << 63),
        ("zero", 0, 1),
        ("shape", 0, 0),
        ("shape", 1, 1 << 48),
        ("role", 4, 1),
    ],
)
def test_rule_23_parts(draft: Draft, field: str, part: int, value: int) -> None:
    draft["layouts"]["parts"][field][0, part] = value
    refuses_sealed(draft, 23, "layout 0")


@pytest.mark.parametrize("part", range(6))
def test_rule_23_shapes_of_parts_agree(draft: Draft, part: int) -> None:
    slot = draft["layouts"]["parts"][1, part]
    slot["shape"] = slot["shape"][1], slot["shape"][0]
    refuses_sealed(draft, 23, "layout 1", "shape")


@pytest.mark.parametrize(
    ("field", "value"), [("n_bytes", 64), ("n_parts", 2), ("n_parts", 9), ("flags", 1), ("zero", 1)]
)
def test_rule_23_layouts(draft: Draft, field: str, value: int) -> None:
    draft["layouts"][field][0] = value
    refuses_sealed(draft, 23, "layout 0")


@pytest.mark.parametrize("field", ["n_layouts", "entry_bytes"])
@pytest.mark.parametrize("value", [0, 4, 65537, 2**32 - 1])
def test_rule_23_layout_table_header(draft: Draft, field: str, value: int) -> None:
    draft["layout_table"][field] = value
    refuses_sealed(draft, 23, "layout table")


@pytest.mark.parametrize("roles", [(2, 3, 4), (1, 3, 4), (1, 2, 4)])
def test_rule_23_gate_up_and_down_are_there(draft: Draft, roles: tuple[int, ...]) -> None:
    draft["layouts"]["parts"]["role"][0, :3] = roles
    refuses_sealed(draft, 23, "layout 0", "gate, up and down")


def test_rule_23_number_of_layouts(draft: Draft) -> None:
    draft.replace_section(SectionKind.LAYOUTS, struct.pack("<II", 0, 576))
    refuses_sealed(draft, 23, "1 ... 1024", "found 0")
    with pytest.raises(RuleError, match="found 1025"):
        check_layouts(np.zeros(1025, fmt.LAYOUT_DTYPE), HIDDEN, 1 << 40)


def test_rule_23_no_two_layouts_are_equal(draft: Draft) -> None:
    draft["layouts"][2] = draft["layouts"][0]
    refuses_sealed(draft, 23, "equal")


def test_rule_23_each_layout_is_used(draft: Draft) -> None:
    extra = draft["layouts"][:1].copy()
    extra["parts"]["type"][0, 0] = 1
    extra["parts"]["n_bytes"][0, 0] = 33 * 64 * 2
    shift = fmt.align(33 * 64 * 2, 64) - fmt.align(33 * 68, 64)
    extra["parts"]["offset"][0, 1:3] += np.uint64(shift)
    extra["n_bytes"] += np.uint64(shift)
    table = bytearray(draft.section_bytes(SectionKind.LAYOUTS)) + extra.tobytes()
    table[0:4] = struct.pack("<I", 4)
    draft.replace_section(SectionKind.LAYOUTS, bytes(table))
    refuses_sealed(draft, 23, "layout 3", "use")


def test_rule_23_hidden_size(draft: Draft) -> None:
    draft.replace_section(SectionKind.SPEC, spec_section(hidden_size=63))
    refuses_sealed(draft, 23, "shape")


def test_rule_23_bytes_between_parts_are_zero(draft: Draft, tmp_path: Path) -> None:
    cell = draft["cells"][0, 0]
    part = draft["layouts"]["parts"][0, 0]
    start, n_bytes = int(cell["offset"]), int(cell["n_bytes"])
    gap = start + int(part["n_bytes"])
    assert gap < start + int(draft["layouts"]["parts"][0, 1]["offset"])
    draft.data[gap] = 1
    payload = bytes(draft.data[start : start + n_bytes])
    cell["crc32c"] = native.crc32c(payload)
    cell["sha256"] = np.frombuffer(hashlib.sha256(payload).digest(), np.uint8)
    (message,) = verified(draft.seal(), tmp_path / "m.colibri")
    assert message.startswith("padding: layer 1 expert 0, gap in front of up")


@pytest.mark.parametrize("moe_layers", [[1, 1, 1], [0, 1, 0], [1, 0, 1]])
def test_rule_24_rows_are_the_moe_layers(draft: Draft, moe_layers: list[int]) -> None:
    draft.replace_section(SectionKind.SPEC, spec_section(moe_layers=moe_layers))
    refuses_sealed(draft, 24, "layer")


def test_rule_24_rows_are_layers_of_the_spec(draft: Draft) -> None:
    draft["rows"]["layer"][1] = 3
    refuses_sealed(draft, 24, "layer 2")
    draft["rows"]["stream"][1] = 1
    draft.replace_section(SectionKind.SPEC, spec_section(moe_layers=[0, 1, 0], n_mtp_layers=0))
    refuses_sealed(draft, 24, "layers below 3")
    draft.replace_section(SectionKind.SPEC, spec_section(moe_layers=[0, 1, 0], n_mtp_layers=1))
    assert draft.seal().open().rows[1].stream is Stream.MTP


def test_rule_24_top_k(draft: Draft) -> None:
    draft.replace_section(SectionKind.SPEC, spec_section(top_k=4))
    refuses_sealed(draft, 24, "top_k", "3")


def test_rule_24_router_has_a_row_for_each_expert(draft: Draft) -> None:
    tensors = draft["tensors"]
    routers = np.flatnonzero(tensors["role"] == 33)
    tensors["shape"][routers[0], :2] = 8, 40
    refuses_sealed(draft, 24, "layer 1", "router")


def test_rule_24_router_is_there(draft: Draft) -> None:
    tensors = draft["tensors"]
    tensors["role"][tensors["role"] == 33] = 51
    refuses_sealed(draft, 24, "router")


def test_rule_24_models_that_are_not_executed_need_no_router(draft: Draft) -> None:
    tensors = draft["tensors"]
    tensors["role"][tensors["role"] == 33] = 51
    draft.replace_section(SectionKind.SPEC, spec_section(executable=False))
    assert draft.seal().open().spec["executable"] is False


# -- rewriting in place (tests/test_respec.py has the rest) ----------------------------------------


@pytest.fixture
def altered(containers: Containers) -> Draft:
    """A model whose spec is not what its config says."""
    draft = Draft(bytearray(containers.hf("olmoe").read_bytes()))
    values, types = decode_kv(draft.section_bytes(SectionKind.SPEC), "spec")
    draft.replace_section(SectionKind.SPEC, encode_kv({**values, "graph.norm_eps": 0.5}, types))
    return draft.seal()


def test_rule_25_respec_changes_spec_and_provenance_only(altered: Draft, tmp_path: Path) -> None:
    path = tmp_path / "m.colibri"
    path.write_bytes(altered.data)
    assert respec(path).changed
    after = Draft(bytearray(path.read_bytes()))
    after.open()
    data_offset = int(altered.page["data_offset"][0])
    assert after.data[data_offset:] == altered.data[data_offset:]
    for field in ("alignment", "file_size", "data_offset", "expert_offset", "n_sections"):
        assert after.page[field] == altered.page[field]
    changed = [k for k in range(1, 8) if after.section_bytes(k) != altered.section_bytes(k)]
    assert changed == [SectionKind.SPEC, SectionKind.PROVENANCE]
    values, _ = decode_kv(after.section_bytes(SectionKind.PROVENANCE), "provenance")
    assert "respec.tool_version" in values


def test_rule_26_every_step_is_on_disk_before_the_next(
    altered: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.colibri"
    path.write_bytes(altered.data)
    done: list[tuple[str, int, bool]] = []
    write, sync = os.pwritev, os.fsync

    def log(what: str, fd: int, data: memoryview) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        done.append((f"{what} {name}", len(data), any(data)))

    def logged_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        log(f"write {offset}", fd, buffers[0])
        return write(fd, buffers, offset)

    def logged_sync(fd: int) -> None:
        log("sync", fd, memoryview(b""))
        sync(fd)

    monkeypatch.setattr(os, "pwritev", logged_write)
    monkeypatch.setattr(os, "fsync", logged_sync)
    respec(path)
    end = int(altered.page["data_offset"][0])
    assert done == [
        ("write 0 m.colibri.respec", end, True),
        ("sync m.colibri.respec", 0, False),
        (f"sync {tmp_path.name}", 0, False),
        ("write 0 m.colibri", 4096, False),
        ("sync m.colibri", 0, False),
        ("write 4096 m.colibri", end - 4096, True),
        ("sync m.colibri", 0, False),
        ("write 0 m.colibri", 4096, True),
        ("sync m.colibri", 0, False),
        (f"sync {tmp_path.name}", 0, False),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.colibri"]


def test_rule_27_a_copy_is_put_back_where_it_belongs(altered: Draft, tmp_path: Path) -> None:
    path, copy = tmp_path / "m.colibri", tmp_path / "m.colibri.respec"
    end = int(altered.page["data_offset"][0])
    path.write_bytes(bytes(end) + altered.data[end:])
    copy.write_bytes(altered.data[:end])
    assert respec(path).notes[0].endswith("its changes are undone")
    assert not copy.exists()
    copy.write_bytes(altered.data[:end])
    assert respec(path).notes[0].endswith("is whole, m.colibri.respec is removed")
    assert not copy.exists()
    path.write_bytes(bytes(len(altered.data)))
    copy.write_bytes(altered.data[:end])
    with pytest.raises(JobError, match="the copy of another container's"):
        respec(path)
    path.write_bytes(bytes(end) + altered.data[end:])
    copy.write_bytes(altered.data[: end - 1])
    with pytest.raises(JobError, match="cannot be used"):
        respec(path)


def test_streams_and_residents_are_what_the_rules_assume() -> None:
    assert [int(stream) for stream in Stream] == [0, 1]
    assert len({item.name for item in small_residents()}) == len(small_residents())
    assert [int(kind) for kind in KvType] == list(range(1, 9))


def test_rule_28_tokenizer_tables_are_checked_by_verify(sound: bytes, tmp_path: Path) -> None:
    """Every reader opens the container; what uses the tables refuses them (test_tokenizers.py)."""
    draft = Draft(bytearray(sound))
    n_sections = int(draft.page["n_sections"][0])
    kinds = [int(entry["kind"]) for entry in draft.page["sections"][0][:n_sections]]
    contents = {kind: bytes(draft.section_bytes(kind)) for kind in kinds}
    contents[SectionKind.TOKENIZER] = bytes(64)
    draft.place_sections(contents, {SectionKind.TOKENIZER: 0})
    path = tmp_path / "model.colibri"
    path.write_bytes(draft.seal().data)
    messages = [error.message for error in verify_container(path).errors]
    assert messages == ["tokenizer tables: its version is not 1"]
