"""From a source tensor's name to the rule of a form that it follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from colibri_tools.families.schema import HEAD_ROLES, ExpertRule, Form, Prefix, TensorRule

__all__ = ["NameMatch", "NameTable", "choose_prefix"]

_NUMBER = "#"
_MAX_DIGITS = 6


@dataclass(frozen=True, slots=True)
class NameMatch:
    """A rule and the numbers the name has at its `{layer}` and `{expert}`, -1 for none."""

    rule: TensorRule | ExpertRule
    layer: int = -1
    expert: int = -1


class NameTable:
    """Exact lookup of names: numbers between dots are taken out, the rest is a dictionary key."""

    def __init__(self, form: Form, prefix: Prefix) -> None:
        self._prefix = prefix
        self._body: dict[str, tuple[TensorRule | ExpertRule, tuple[str, ...]]] = {}
        self._heads: dict[str, TensorRule] = {}
        rules: list[TensorRule | ExpertRule] = [*form.tensors, *form.experts]
        for rule in rules:
            if isinstance(rule, TensorRule) and rule.role in HEAD_ROLES:
                self._heads |= {head + rule.pattern: rule for head in prefix.heads}
            else:
                self._body[_key_of_pattern(rule.pattern)] = (rule, _numbers_of(rule.pattern))

    def match(self, name: str) -> NameMatch | None:
        """Return the rule that a source tensor's name follows, or None."""
        head = self._heads.get(name)
        if head is not None:
            return NameMatch(head)
        if not name.startswith(self._prefix.body):
            return None
        key, numbers = _key_of_name(name[len(self._prefix.body) :])
        found = self._body.get(key)
        if found is None or len(found[1]) != len(numbers):
            return None
        rule, placeholders = found
        return NameMatch(rule, **dict(zip(placeholders, numbers, strict=True)))


def choose_prefix(form: Form, names: Iterable[str]) -> Prefix:
    """Return the form's prefix that most names fit; the first one listed among equals."""
    all_names = list(names)

    def fits(prefix: Prefix) -> int:
        table = NameTable(form, prefix)
        return sum(table.match(name) is not None for name in all_names)

    return max(form.prefixes, key=fits)


def _key_of_pattern(pattern: str) -> str:
    return pattern.replace("{layer}", _NUMBER).replace("{expert}", _NUMBER)


def _numbers_of(pattern: str) -> tuple[str, ...]:
    return tuple(p[1:-1] for p in pattern.split(".") if p in ("{layer}", "{expert}"))


def _key_of_name(name: str) -> tuple[str, tuple[int, ...]]:
    parts = name.split(".")
    numbers = []
    for i, part in enumerate(parts):
        # "01" is not another way to write 1: it would fill the same slot under a second name.
        if _is_number(part):
            numbers.append(int(part))
            parts[i] = _NUMBER
    return ".".join(parts), tuple(numbers)


def _is_number(part: str) -> bool:
    plain = part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS
    return plain and (part == "0" or part[0] != "0")
