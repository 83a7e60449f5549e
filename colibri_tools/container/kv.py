"""Key-value sections, spec and provenance (docs/format.md, section 2)."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from colibri_tools.container.checks import RuleError
from colibri_tools.container.format import (
    MAX_KV_BYTES,
    MAX_KV_ELEMENTS,
    MAX_KV_ENTRIES,
    align,
)
from colibri_tools.errors import UsageError, quote

__all__ = ["KvType", "KvTypes", "decode_kv", "encode_kv"]

_RULE = 11
_HEAD = struct.Struct("<II")
_ENTRY = struct.Struct("<HBBI")
_KEY = re.compile(rb"[a-z0-9_.]{1,128}")


class KvType(IntEnum):
    """The type of a value."""

    U64 = 1
    I64 = 2
    F64 = 3
    BOOL = 4
    STRING = 5
    U64_ARRAY = 6
    F64_ARRAY = 7
    STRING_ARRAY = 8


KvTypes = Mapping[str, KvType]

_SCALARS = {KvType.U64: "<Q", KvType.I64: "<q", KvType.F64: "<d", KvType.BOOL: "<Q"}
_ARRAYS = {KvType.U64_ARRAY: "<u8", KvType.F64_ARRAY: "<f8"}


def encode_kv(values: Mapping[str, Any], types: KvTypes | None = None) -> bytes:
    """Return the section that holds `values`, keys sorted.

    `types` says how a key is stored; other keys follow their Python type: bool, int (u64, or i64
    when negative), float, str, and sequences of int, float or str (an empty one of str).
    Raises UsageError for a key or value that the format cannot hold.
    """
    chunks = [_HEAD.pack(len(values), 0)]
    for key in sorted(values):
        kind = (types or {}).get(key) or _infer(key, values[key])
        chunks.append(_encode_entry(key, kind, values[key]))
    section = b"".join(chunks)
    n_elements = sum(len(value) for value in values.values() if isinstance(value, (list, tuple)))
    if len(values) > MAX_KV_ENTRIES or len(section) > MAX_KV_BYTES or n_elements > MAX_KV_ELEMENTS:
        raise UsageError(
            f"a key-value section holds at most {MAX_KV_ENTRIES} entries, {MAX_KV_ELEMENTS} "
            f"elements of arrays and {MAX_KV_BYTES} bytes, not {len(values)} entries, "
            f"{n_elements} elements and {len(section)} bytes"
        )
    return section


def decode_kv(data: bytes | memoryview, place: str) -> tuple[dict[str, Any], dict[str, KvType]]:
    """Return the values and the types of a section's keys, in order.

    Arrays become lists. Raises RuleError (rule 11) naming `place` and the key.
    """
    data = memoryview(data)
    if not 8 <= len(data) <= MAX_KV_BYTES:
        raise RuleError(_RULE, place, "bytes", f"8 ... {MAX_KV_BYTES}", len(data))
    count, zero = _HEAD.unpack_from(data)
    if zero or count > MAX_KV_ENTRIES:
        raise RuleError(_RULE, place, "count", f"at most {MAX_KV_ENTRIES}", count | zero << 32)
    values: dict[str, Any] = {}
    types: dict[str, KvType] = {}
    position, previous, room = 8, b"", MAX_KV_ELEMENTS
    for _ in range(count):
        key, kind, value, position = _decode_entry(data, position, room, place)
        room -= len(value) if isinstance(value, list) else 0
        if key <= previous:
            raise RuleError(
                _RULE, place, f"key {quote(key.decode())}", "keys strictly ascending", "not so"
            )
        previous = key
        values[key.decode()] = value
        types[key.decode()] = kind
    if position != len(data):
        raise RuleError(_RULE, place, "end of the entries", len(data), position)
    return values, types


def _infer(key: str, value: Any) -> KvType:
    if isinstance(value, bool):
        return KvType.BOOL
    if isinstance(value, int):
        return KvType.U64 if value >= 0 else KvType.I64
    if isinstance(value, float):
        return KvType.F64
    if isinstance(value, str):
        return KvType.STRING
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, str) for item in value):
            return KvType.STRING_ARRAY
        if all(isinstance(item, int) for item in value):
            return KvType.U64_ARRAY
        if all(isinstance(item, (int, float)) for item in value):
            return KvType.F64_ARRAY
    raise _bad(key, f"a value of type {type(value).__name__}")


def _encode_entry(key: str, kind: KvType, value: Any) -> bytes:
    raw_key = key.encode("ascii", "replace")
    if not _KEY.fullmatch(raw_key):
        raise UsageError(f"key {quote(key)}: expected 1 ... 128 characters of [a-z0-9_.]")
    try:
        n, raw = _encode_value(kind, value)
    except (struct.error, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise _bad(key, f"{quote(value)} as {kind.name.lower()} ({error})") from None
    return _ENTRY.pack(len(raw_key), kind, 0, n) + _pad8(raw_key) + _pad8(raw)


def _encode_value(kind: KvType, value: Any) -> tuple[int, bytes]:
    if kind is KvType.STRING:
        raw = _encode_text(value)
        return len(raw), raw
    if kind is KvType.STRING_ARRAY:
        texts = [_encode_text(item) for item in value]
        return len(texts), b"".join(struct.pack("<I", len(raw)) + raw for raw in texts)
    if kind is KvType.BOOL and not isinstance(value, bool):
        raise ValueError("not a bool")
    code = _SCALARS.get(kind)
    items: Sequence[Any] = [value] if code else list(value)
    code = code or ("<Q" if kind is KvType.U64_ARRAY else "<d")
    if code == "<d" and not all(math.isfinite(item) for item in items):
        raise ValueError("not finite")
    return len(items), struct.pack(f"<{len(items)}{code[1]}", *items)


def _encode_text(value: Any) -> bytes:
    if "\0" in value:
        raise ValueError("contains NUL")
    raw: bytes = value.encode("utf-8")
    return raw


def _bad(key: str, what: str) -> UsageError:
    return UsageError(f"key {quote(key)}: the container format cannot hold {what}")


def _pad8(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 8)


def _decode_entry(
    data: memoryview, start: int, room: int, place: str
) -> tuple[bytes, KvType, Any, int]:
    """Return (key, type, value, end); `room` is how many elements an array may have."""
    entry = _take(data, start, _ENTRY.size, place, "an entry")
    key_bytes, type_code, zero, n = _ENTRY.unpack(entry)
    key = bytes(_take_padded(data, start + _ENTRY.size, key_bytes, place, "a key"))
    if not _KEY.fullmatch(key):
        raise RuleError(_RULE, place, "key", "1 ... 128 characters of [a-z0-9_.]", quote(key))
    name = f"key {quote(key.decode())}"
    if zero or type_code not in KvType.__members__.values():
        raise RuleError(_RULE, place, f"{name}: type", "1 ... 8", type_code | zero << 8)
    kind = KvType(type_code)
    if kind >= KvType.U64_ARRAY and n > room:
        raise RuleError(_RULE, place, f"{name}: elements", f"at most {room} more", n)
    position = start + _ENTRY.size + align(key_bytes, 8)
    if kind is KvType.STRING_ARRAY:
        value, end = _decode_strings(data, position, n, place, name)
        _check_padding(data, end, place, name)
        return key, kind, value, align(end, 8)
    if kind in _SCALARS and n != 1:
        raise RuleError(_RULE, place, f"{name}: elements", 1, n)
    n_bytes = n if kind is KvType.STRING else 8 * n
    raw = _take_padded(data, position, n_bytes, place, name)
    return key, kind, _decode_value(kind, raw, place, name), position + align(n_bytes, 8)


def _decode_value(kind: KvType, raw: memoryview, place: str, name: str) -> Any:
    if kind is KvType.STRING:
        return _decode_text(raw, place, name)
    if kind in _ARRAYS:
        array = np.frombuffer(raw, _ARRAYS[kind])
        if kind is KvType.F64_ARRAY and not np.isfinite(array).all():
            raise RuleError(_RULE, place, name, "finite numbers", "NaN or Inf")
        return array.tolist()
    value = struct.unpack(_SCALARS[kind], raw)[0]
    if kind is KvType.F64 and not math.isfinite(value):
        raise RuleError(_RULE, place, name, "a finite number", value)
    if kind is KvType.BOOL:
        if value > 1:
            raise RuleError(_RULE, place, name, "0 or 1", value)
        return bool(value)
    return value


def _decode_strings(
    data: memoryview, position: int, n: int, place: str, name: str
) -> tuple[list[str], int]:
    if n > (len(data) - position) // 4:
        raise RuleError(_RULE, place, f"{name}: elements", "what the section has room for", n)
    texts = []
    for _ in range(n):
        n_bytes = int.from_bytes(_take(data, position, 4, place, name), "little")
        raw = _take(data, position + 4, n_bytes, place, name)
        texts.append(_decode_text(raw, place, name))
        position += 4 + n_bytes
    return texts, position


def _decode_text(raw: memoryview, place: str, name: str) -> str:
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError:
        raise RuleError(_RULE, place, name, "UTF-8", quote(bytes(raw[:60]))) from None
    if "\0" in text:
        raise RuleError(_RULE, place, name, "a string without NUL", quote(text))
    return text


def _take(data: memoryview, start: int, n_bytes: int, place: str, name: str) -> memoryview:
    if n_bytes > len(data) - start:
        raise RuleError(
            _RULE, place, name, f"within the section's {len(data)} bytes", start + n_bytes
        )
    return data[start : start + n_bytes]


def _take_padded(data: memoryview, start: int, n_bytes: int, place: str, name: str) -> memoryview:
    raw = _take(data, start, n_bytes, place, name)
    _check_padding(data, start + n_bytes, place, name)
    return raw


def _check_padding(data: memoryview, end: int, place: str, name: str) -> None:
    padding = bytes(_take(data, end, -end % 8, place, name))
    if any(padding):
        raise RuleError(_RULE, place, f"{name}: padding", "zero", padding.hex())
