"""Hyper-parameters: config.json or GGUF metadata, through a form's key table, checked."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.errors import SourceError, quote
from colibri_tools.families.schema import REQUIRED, Form, Key

__all__ = ["Hyper", "config_levels", "read_hyper"]

MAX_INT = (1 << 31) - 1
MAX_ITEMS = 65536

NULL_IS_A_VALUE = frozenset(("window", "chunk", "head_dim", "n_kv_heads", "router_groups"))
"""Where null does not mean the default but none: no window, a width that follows from others."""


@dataclass(slots=True)
class Hyper:
    """Values by canonical name. `given` are those that the source states itself."""

    values: dict[str, Any]
    given: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str) -> Any:
        """Return the value, or None for a name this form does not know."""
        return self.values.get(name)


def config_levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the config's dictionaries, the language model's own first."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return [nested, config]
    return [config]


def read_hyper(form: Form, levels: Sequence[Mapping[str, Any]], where: str, arch: str) -> Hyper:
    """Read every key of `form` from `levels`, the first that has it winning. Null counts as
    absent, but for `NULL_IS_A_VALUE`.

    `where` names the source in messages, `arch` fills `{arch}`. Raises SourceError for a value of a
    wrong type or size, and for a required one that is missing.
    """
    hyper = Hyper(dict(form.defaults))
    for name, key in form.keys.items():
        # Whether the output matrix is tied is a property of the whole model, not of its text part.
        searched = levels[::-1] if name == "tied" else levels
        found = _lookup(key, searched, arch)
        if found is None or found[1] == []:
            if name in NULL_IS_A_VALUE and _has_null(key, searched):
                hyper.values[name] = None
            continue
        full_name, value = found
        hyper.values[name] = _checked(key, value, f"{where}: {full_name}")
        hyper.given.add(name)
        _warn_disagreement(hyper, name, key, levels, arch)
    for name, value in hyper.values.items():
        if value is REQUIRED:
            names = " or ".join(quote(n.format(arch=arch)) for n in form.keys[name].names)
            raise SourceError(f"{where}: no key {names}, which this model family needs")
    derived = _Derived(hyper.values)
    hyper.values = {name: derived[name] for name in hyper.values}
    return hyper


class _Derived(UserDict[str, Any]):
    """Values, of which those that are functions of the others are computed when asked for."""

    def __getitem__(self, name: str) -> Any:
        value = self.data[name]
        return value(self) if callable(value) else value


def _lookup(key: Key, levels: Sequence[Mapping[str, Any]], arch: str) -> tuple[str, Any] | None:
    for level in levels:
        for name in key.names:
            full = name.format(arch=arch)
            if level.get(full) is not None:
                return full, level[full]
    return None


def _has_null(key: Key, levels: Sequence[Mapping[str, Any]]) -> bool:
    return any(name in level for level in levels for name in key.names)


def _warn_disagreement(
    hyper: Hyper, name: str, key: Key, levels: Sequence[Mapping[str, Any]], arch: str
) -> None:
    if name != "tied" or len(levels) < 2:
        return
    nested = _lookup(key, levels[:1], arch)
    if nested is not None and nested[1] != hyper[name]:
        hyper.warnings.append(
            f"config.json: {nested[0]} is {_text(hyper[name])} at the top level and "
            f"{_text(nested[1])} inside; the top level decides"
        )


def _checked(key: Key, value: Any, where: str) -> Any:
    check = _CHECKS[key.kind]
    result = check(value)
    if result is None:
        raise SourceError(f"{where}: expected {_EXPECTED[key.kind]}, found {quote(value)}")
    return result


def _int(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and 0 < len(value) <= MAX_ITEMS:
        # GGUF writes some counts once per layer.
        first = value[0]
        value = first if all(item == first for item in value) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INT:
        return None
    return value


def _last(value: Any) -> int | None:
    return -1 if value == -1 and not isinstance(value, bool) else _int(value)


def _pattern(value: Any) -> int | str | tuple[bool, ...] | None:
    if isinstance(value, str):
        return value if 0 < len(value) <= MAX_ITEMS else None
    if isinstance(value, Sequence):
        return _items(value, _bool) or None
    return _int(value)


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _flag(value: Any) -> bool | None:
    """A switch that some configs write as a number."""
    return bool(value) if isinstance(value, (bool, int)) else None


def _flags(value: Any) -> tuple[bool, ...] | None:
    return _items(value, _flag)


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _ints(value: Any) -> tuple[int, ...] | None:
    return _items(value, _int)


def _strs(value: Any) -> tuple[str, ...] | None:
    return _items(value, _str)


def _items(value: Any, check: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_ITEMS:
        return None
    items = tuple(check(item) for item in value)
    return None if None in items else items


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_CHECKS: dict[str, Any] = {
    "int": _int,
    "last": _last,
    "pattern": _pattern,
    "float": _float,
    "bool": _bool,
    "flag": _flag,
    "flags": _flags,
    "str": _str,
    "ints": _ints,
    "strs": _strs,
}
_EXPECTED = {
    "int": f"one whole number, 0 ... {MAX_INT}",
    "last": f"one whole number, -1 ... {MAX_INT}",
    "pattern": f"one whole number, 0 ... {MAX_INT}, a string, or a list of true and false",
    "float": "a finite number",
    "bool": "true or false",
    "flag": "true or false",
    "flags": "a list of true or false",
    "str": "a string",
    "ints": "a list of whole numbers",
    "strs": "a list of strings",
}
