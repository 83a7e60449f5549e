"""Regular expressions of pre-tokenizers as programs for the C tokenizer.

The part of Oniguruma's syntax that tokenizers use: alternatives, groups, classes with nesting and
intersection, `\\p{...}`, greedy and possessive quantifiers, lookahead, `$`, `\\b`. A program is a
backtracking one; what each instruction does is in docs/format.md. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from colibri_tools.errors import quote

__all__ = ["CATEGORIES", "CharClass", "Op", "ProgramBuilder", "RegexUnsupported"]

_NAMES = "LuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCoCn"
CATEGORIES = tuple(_NAMES[i : i + 2] for i in range(0, len(_NAMES), 2))
MAX_CODE = 1 << 14
MAX_REPEAT = 1024
LAST_CHARACTER = 0x10FFFF
BY_CATEGORY = 1 << 31
"""Set in an item's first number: the second is a set of categories, one bit each."""

_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD_SYMBOLS = (
    "\xb2\xb3\xb9\xbc-\xbe\u24b6-\u24e9"
    "\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189"
)
_HAN = (
    "\u2e80-\u2e99\u2e9b-\u2ef3\u2f00-\u2fd5\u3005\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufa6d\ufa70-\ufad9\U00016fe2\U00016fe3\U00016ff0\U00016ff1"
    "\U00020000-\U0002a6df\U0002a700-\U0002b739\U0002b740-\U0002b81d\U0002b820-\U0002cea1"
    "\U0002ceb0-\U0002ebe0\U0002ebf0-\U0002ee5d\U0002f800-\U0002fa1d\U00030000-\U0003134a"
    "\U00031350-\U000323af"
)
_FOLDS = {"s": "\u017f", "k": "\u212a"}
"""Letters outside ASCII that (?i:...) takes for one inside."""

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}


class RegexUnsupported(Exception):
    """A pattern that has no program here; the text says what it uses."""


class Op(IntEnum):
    """Instructions: number, then two operands."""

    MATCH = 0
    CLASS = 1
    SPLIT = 2
    JUMP = 3
    LOOK = 4
    ATOMIC = 5
    LINE_END = 6
    BOUNDARY = 7


Item: TypeAlias = "tuple[int, int]"


@dataclass(frozen=True)
class CharClass:
    """Characters that every one of `sets` holds; a set is (negated, items)."""

    sets: tuple[tuple[bool, tuple[Item, ...]], ...]


# ---------------------------------------------------------------- syntax tree


@dataclass(frozen=True)
class _Chars:
    chars: CharClass


@dataclass(frozen=True)
class _Row:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Either:
    choices: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repeat:
    body: _Node
    least: int
    most: int | None
    possessive: bool


@dataclass(frozen=True)
class _Look:
    body: _Node
    negated: bool


@dataclass(frozen=True)
class _Assert:
    op: Op


_Node: TypeAlias = "_Chars | _Row | _Either | _Repeat | _Look | _Assert"


def _ranges(text: str) -> tuple[Item, ...]:
    """Return the items of characters and `a-b` ranges."""
    items: list[Item] = []
    i = 0
    while i < len(text):
        is_range = text[i + 1 : i + 2] == "-" and i + 2 < len(text)
        items.append((ord(text[i]), ord(text[i + 2 if is_range else i])))
        i += 3 if is_range else 1
    return tuple(items)


def _categories(name: str) -> tuple[Item, ...]:
    mask = sum(1 << i for i, known in enumerate(CATEGORIES) if known.startswith(name))
    if not mask or len(name) > 2:
        raise RegexUnsupported(f"the property {quote(name)}")
    return ((BY_CATEGORY, mask),)


_WORD = (
    *_categories("L"),
    *_categories("M"),
    *_categories("Nd"),
    *_categories("Nl"),
    *_categories("Pc"),
    *_ranges(_WORD_SYMBOLS),
)
_SHORTHANDS = {"s": _ranges(_SPACE), "d": _categories("Nd"), "w": _WORD}
_NAMED = {"Han": _ranges(_HAN), "Nd": _categories("Nd")}


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self.text, self.at = pattern, 0
        self.fold = False

    def parse(self) -> _Node:
        node = self.either()
        if self.at < len(self.text):
            raise RegexUnsupported("an unmatched ')'")
        return node

    def peek(self, n: int = 1) -> str:
        return self.text[self.at : self.at + n]

    def take(self) -> str:
        if self.at >= len(self.text):
            raise RegexUnsupported("an end in the middle of something")
        self.at += 1
        return self.text[self.at - 1]

    def accept(self, word: str) -> bool:
        found = self.text.startswith(word, self.at)
        self.at += len(word) if found else 0
        return found

    def either(self) -> _Node:
        choices = [self.row()]
        while self.accept("|"):
            choices.append(self.row())
        return choices[0] if len(choices) == 1 else _Either(tuple(choices))

    def row(self) -> _Node:
        parts: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.quantified(self.atom()))
        return parts[0] if len(parts) == 1 else _Row(tuple(parts))

    def atom(self) -> _Node:
        if self.accept("("):
            return self.group()
        if self.accept("["):
            return _Chars(self.char_class())
        if self.accept("$"):
            return _Assert(Op.LINE_END)
        if self.peek() in ("^", "*", "+", "?"):
            raise RegexUnsupported(quote(self.peek()))
        if self.accept("."):
            return _Chars(CharClass(((True, _ranges("\n")),)))
        if self.peek(2) == "\\b":
            self.at += 2
            return _Assert(Op.BOUNDARY)
        return _Chars(CharClass((self.one(self.take()),)))

    def group(self) -> _Node:
        fold = self.fold
        looks = {"?=": False, "?!": True}
        opened = self.peek(2)
        if opened in looks:
            self.at += 2
            node: _Node = _Look(self.either(), looks[opened])
        else:
            if self.accept("?i:"):
                self.fold = True
            elif not self.accept("?:") and self.peek() == "?":
                raise RegexUnsupported(f"a group that begins {quote('(' + self.peek(3))}")
            node = self.either()
        self.fold = fold
        if not self.accept(")"):
            raise RegexUnsupported("a group without an end")
        return node

    def quantified(self, node: _Node) -> _Node:
        while True:
            bounds = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(self.peek())
            braces = bounds is None and self.peek() == "{"
            if bounds is not None:
                self.at += 1
            elif braces:
                bounds = self.braces()
            if bounds is None:
                return node
            if self.accept("?"):
                raise RegexUnsupported("a lazy quantifier")
            # {n}+ repeats the repetition in this syntax; it is not used, and not read wrongly.
            if braces and self.peek() == "+":
                raise RegexUnsupported("a quantifier behind {...}")
            node = _Repeat(node, *bounds, self.accept("+"))

    def braces(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        body = self.text[self.at + 1 : end] if end >= 0 else ""
        low, comma, high = body.partition(",")
        if not low.isdigit() or not (high.isdigit() or not high):
            raise RegexUnsupported(f"the quantifier {quote('{' + body + '}')}")
        self.at = end + 1
        least = int(low)
        most = int(high) if high else (None if comma else least)
        if least > MAX_REPEAT or (most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise RegexUnsupported(f"the quantifier {quote('{' + body + '}')}")
        return least, most

    def one(self, char: str) -> tuple[bool, tuple[Item, ...]]:
        """Return the set of a character or an escape that begins with `char`."""
        if char != "\\":
            return False, self.folded(((ord(char), ord(char)),))
        name = self.take()
        if name.lower() in _SHORTHANDS and name.isalpha():
            return name.isupper(), _SHORTHANDS[name.lower()]
        if name in "pP":
            return self.property(name == "P")
        if name.isalnum() and name not in _ESCAPES:
            escape = quote("\\" + name)
            raise RegexUnsupported(f"the escape {escape}")
        char = _ESCAPES.get(name, name)
        return False, ((ord(char), ord(char)),)

    def property(self, negated: bool) -> tuple[bool, tuple[Item, ...]]:
        if not self.accept("{"):
            raise RegexUnsupported("a property without braces")
        end = self.text.find("}", self.at)
        name = self.text[self.at : end] if end >= 0 else ""
        self.at = end + 1
        if name.startswith("^"):
            negated, name = not negated, name[1:]
        return negated, _NAMED[name] if name in _NAMED else _categories(name)

    def folded(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        if not self.fold:
            return items
        found = list(items)
        for low, high in items:
            if low == high and chr(low).isascii() and chr(low).isalpha():
                letter = chr(low).lower()
                found += _ranges(letter + letter.upper() + _FOLDS.get(letter, ""))
            elif low != high or low > 127:
                raise RegexUnsupported("a range or a letter outside ASCII in (?i:...)")
        return tuple(dict.fromkeys(found))

    def char_class(self) -> CharClass:
        """Parse behind `[`, to its `]`."""
        negated = self.accept("^")
        sets: list[tuple[bool, tuple[Item, ...]]] = []
        items: list[Item] = []
        first = True
        while first or self.peek() != "]":
            first = False
            if self.accept("&&"):
                sets.append((False, tuple(items)))
                items = []
            elif self.accept("["):
                inner = self.char_class()
                if items or len(inner.sets) != 1 or self.peek() != "]":
                    raise RegexUnsupported("a class in a class")
                sets.append(inner.sets[0])
                self.at += 1
                return self._joined(negated, sets)
            else:
                items += self.class_item()
        self.at += 1
        sets.append((False, tuple(items)))
        return self._joined(negated, sets)

    def _joined(self, negated: bool, sets: Sequence[tuple[bool, tuple[Item, ...]]]) -> CharClass:
        if not negated:
            return CharClass(tuple(sets))
        if len(sets) > 1:
            raise RegexUnsupported("a negated intersection")
        return CharClass(((not sets[0][0], sets[0][1]),))

    def class_item(self) -> tuple[Item, ...]:
        negated, items = self.one(self.take())
        if negated:
            items = _complement(items)
        is_char = len(items) == 1 and items[0][0] == items[0][1]
        if not self.fold and is_char and self.peek() == "-" and self.peek(2) != "-]":
            self.at += 1
            negated, last = self.one(self.take())
            if negated or len(last) != 1 or last[0][0] != last[0][1] or last[0] < items[0]:
                raise RegexUnsupported("a range without an end")
            return ((items[0][0], last[0][0]),)
        return items


def _complement(items: Sequence[Item]) -> tuple[Item, ...]:
    if len(items) == 1 and items[0][0] == BY_CATEGORY:
        return ((BY_CATEGORY, items[0][1] ^ ((1 << len(CATEGORIES)) - 1)),)
    if any(low == BY_CATEGORY for low, _ in items):
        raise RegexUnsupported("a negated escape in a class")
    found, start = [], 0
    for low, high in sorted(items):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, LAST_CHARACTER))


# ---------------------------------------------------------------- programs


@dataclass
class ProgramBuilder:
    """Programs that share their classes. `code` is (op, a, b)."""

    code: list[tuple[int, int, int]] = field(default_factory=list)
    classes: dict[CharClass, int] = field(default_factory=dict)
    n_sets: int = 0

    def add(self, pattern: str) -> int:
        """Append the program of a pattern; return where it begins. Raises RegexUnsupported."""
        entry = len(self.code)
        self._emit(_Parser(pattern).parse())
        self._put(Op.MATCH)
        return entry

    def class_of(self, chars: CharClass) -> int:
        """Return the number of the first set of a class; its others follow."""
        if chars not in self.classes:
            self.classes[chars] = self.n_sets
            self.n_sets += len(chars.sets)
        return self.classes[chars]

    def sets(self) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
        """Yield (negated, whether the next set must hold too, items) in order of number."""
        for chars in self.classes:
            for i, (negated, items) in enumerate(chars.sets):
                yield negated, i + 1 < len(chars.sets), items

    def _put(self, op: Op, a: int = 0, b: int = 0) -> int:
        if len(self.code) >= MAX_CODE:
            raise RegexUnsupported("more repetitions than there is room for")
        self.code.append((op, a, b))
        return len(self.code) - 1

    def _emit(self, node: _Node) -> None:
        if isinstance(node, _Chars):
            self._put(Op.CLASS, self.class_of(node.chars))
        elif isinstance(node, _Row):
            for part in node.parts:
                self._emit(part)
        elif isinstance(node, _Either):
            self._emit_either(node)
        elif isinstance(node, _Repeat):
            self._emit_repeat(node)
        elif isinstance(node, _Look):
            self._emit_inner(Op.LOOK, node.body, int(node.negated))
        elif node.op is Op.BOUNDARY:
            self._put(Op.BOUNDARY, self.class_of(CharClass(((False, _WORD),))))
        else:
            self._put(node.op)

    def _emit_inner(self, op: Op, body: _Node, b: int = 0) -> None:
        """A program in the program, behind which `a` points."""
        at = self._put(op)
        self._emit(body)
        self._put(Op.MATCH)
        self.code[at] = (op, len(self.code), b)

    def _emit_either(self, node: _Either) -> None:
        jumps = []
        for choice in node.choices[:-1]:
            at = self._put(Op.SPLIT)
            self._emit(choice)
            jumps.append(self._put(Op.JUMP))
            self.code[at] = (Op.SPLIT, at + 1, len(self.code))
        self._emit(node.choices[-1])
        for at in jumps:
            self.code[at] = (Op.JUMP, len(self.code), 0)

    def _emit_repeat(self, node: _Repeat) -> None:
        if node.possessive:
            greedy = _Repeat(node.body, node.least, node.most, False)
            return self._emit_inner(Op.ATOMIC, greedy)
        for _ in range(node.least):
            self._emit(node.body)
        if node.most is None:
            if _can_be_empty(node.body):
                raise RegexUnsupported("a repetition of what can be empty")
            at = self._put(Op.SPLIT)
            self._emit(node.body)
            self._put(Op.JUMP, at)
            self.code[at] = (Op.SPLIT, at + 1, len(self.code))
            return None
        splits = []
        for _ in range(node.most - node.least):
            splits.append(self._put(Op.SPLIT))
            self._emit(node.body)
        for at in splits:
            self.code[at] = (Op.SPLIT, at + 1, len(self.code))
        return None


def _can_be_empty(node: _Node) -> bool:
    if isinstance(node, _Row):
        return all(_can_be_empty(part) for part in node.parts)
    if isinstance(node, _Either):
        return any(_can_be_empty(choice) for choice in node.choices)
    if isinstance(node, _Repeat):
        return node.least == 0 or _can_be_empty(node.body)
    return not isinstance(node, _Chars)
