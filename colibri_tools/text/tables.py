"""A tokenizer.json as the tokenizer tables of a container (docs/format.md, section 12).

What the C tokenizer does is a part of what the tokenizers library can: byte-level BPE, and BPE over
characters with byte fallback as SentencePiece has it. A tokenizer with anything else has no tables.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any

from colibri_tools.errors import quote
from colibri_tools.text.regex import ProgramBuilder, RegexUnsupported

__all__ = ["TablesUnsupported", "byte_token", "tokenizer_tables"]

VERSION = 1
NO_ID = 0xFFFFFFFF
MAX_TOKENS = 1 << 22
MAX_TEXT_BYTES = 65535
"""Of one token."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACE = "\u2581"


class TablesUnsupported(Exception):
    """A tokenizer that the C code cannot do; the text says what it has."""


class Kind(IntEnum):
    """What a text is made of before merging."""

    BYTES = 1
    PIECES = 2


class Flag(IntFlag):
    """How encoding and decoding differ."""

    IGNORE_MERGES = 1
    BYTE_FALLBACK = 2
    FUSE_UNKNOWN = 4
    STRIP_SPACE = 8


class TokenFlag(IntFlag):
    """What a token is."""

    IN_MODEL = 1
    SPECIAL = 2
    BYTE = 4
    ABSENT = 8


class AddedFlag(IntFlag):
    """How an added token is found."""

    NORMALIZED = 1
    LSTRIP = 2
    RSTRIP = 4


class Normalizer(IntEnum):
    """Steps over the text between added tokens."""

    NFC = 1
    REPLACE = 2
    PREPEND = 3


class Step(IntEnum):
    """Steps that cut a text into pieces."""

    ISOLATED = 1
    MATCHES = 2
    BETWEEN = 3
    MATCH_BEGINS = 4
    METASPACE = 5


SCHEMES = {"never": 0, "first": 1, "always": 2}


def tokenizer_tables(document: Mapping[str, Any]) -> bytes:
    """Return the section's bytes. Raises TablesUnsupported."""
    try:
        return _Tables(document).encode()
    except RegexUnsupported as error:
        raise TablesUnsupported(f"a pattern has {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise TablesUnsupported(f"its file is not as expected ({error})") from error


class _Tables:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self.model: Mapping[str, Any] = document["model"]
        self.document = document
        self.text = bytearray()
        self.places: dict[bytes, int] = {}
        self.normalizers: list[tuple[int, int, int, int, int]] = []
        self.steps: list[tuple[int, int, int]] = []
        self.programs = ProgramBuilder()
        self.is_bytes = False

    def encode(self) -> bytes:
        self._check_model()
        for part in _sequence(self.document.get("normalizer"), "normalizers"):
            self._add_normalizer(part)
        for part in _sequence(self.document.get("pre_tokenizer"), "pretokenizers"):
            self._add_pre_tokenizer(part)
        strip = self._decoder()
        prefix, suffix = self._around()
        added = self._added()
        tokens = self._tokens()
        merges = self._merges()
        items, sets = self._classes()
        self._check_limits(merges, added, items)
        kind = Kind.BYTES if self.is_bytes else Kind.PIECES
        head = struct.pack(
            "<16I",
            VERSION,
            kind,
            self._flags() | (Flag.STRIP_SPACE if strip else 0),
            len(tokens) // 8,
            len(merges) // 12,
            len(added) // 12,
            len(items) // 8,
            len(sets) // 12,
            len(self.programs.code),
            len(self.steps),
            len(self.normalizers),
            len(prefix),
            len(suffix),
            self._unknown(),
            len(self.text),
            0,
        )
        return b"".join(
            (
                head,
                tokens,
                merges,
                added,
                items,
                sets,
                _pack("<3I", self.programs.code),
                _pack("<3I", self.steps),
                _pack("<5I", self.normalizers),
                struct.pack(f"<{len(prefix) + len(suffix)}I", *prefix, *suffix),
                bytes(self.text),
            )
        )

    def _check_limits(self, merges: bytes, added: bytes, items: bytes) -> None:
        """What the C reader refuses (docs/format.md, section 12)."""
        counts = {
            "merges": (len(merges) // 12, 1 << 24),
            "added tokens": (len(added) // 12, 1 << 16),
            "class items": (len(items) // 8, 1 << 16),
            "class sets": (self.programs.n_sets, 1 << 12),
            "steps": (len(self.steps), 64),
            "normalizers": (len(self.normalizers), 16),
        }
        for what, (n, most) in counts.items():
            if n > most:
                raise TablesUnsupported(f"it has {n} {what}, more than {most}")

    # ------------------------------------------------------------ model

    def _check_model(self) -> None:
        model = self.model
        if model.get("type", "BPE") != "BPE":
            raise TablesUnsupported(f"its model is {quote(model['type'])}")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise TablesUnsupported(f"its model has {key}")
        if model.get("byte_fallback"):
            missing = [b for b in range(256) if f"<0x{b:02X}>" not in model["vocab"]]
            if missing:
                raise TablesUnsupported(f"byte token <0x{missing[0]:02X}> is missing")

    def _flags(self) -> int:
        pairs = (
            ("ignore_merges", Flag.IGNORE_MERGES),
            ("byte_fallback", Flag.BYTE_FALLBACK),
            ("fuse_unk", Flag.FUSE_UNKNOWN),
        )
        return sum(flag for key, flag in pairs if self.model.get(key))

    def _unknown(self) -> int:
        token = self.model.get("unk_token")
        return NO_ID if token is None else int(self.model["vocab"].get(token, NO_ID))

    def _tokens(self) -> bytes:
        vocab: Mapping[str, int] = self.model["vocab"]
        added = {int(token["id"]): token for token in self.document.get("added_tokens") or []}
        n_tokens = 1 + max([*vocab.values(), *added], default=-1)
        if n_tokens > MAX_TOKENS:
            raise TablesUnsupported(f"its ids go to {n_tokens - 1}")
        entries: list[tuple[int, int, int]] = [(0, 0, TokenFlag.ABSENT)] * n_tokens
        as_bytes = self.model.get("byte_fallback")
        for token, number in vocab.items():
            raw = _raw(token) if self.is_bytes else token.encode()
            flags = TokenFlag.IN_MODEL
            if raw is None:  # outside the alphabet: no text ever becomes it
                raw, flags = token.encode(), TokenFlag(0)
            if as_bytes and _is_byte(token):
                flags |= TokenFlag.BYTE
            entries[number] = (*self._place(raw), flags)
        for number, token in added.items():
            content = self._content(token)
            flags = TokenFlag(entries[number][2]) & ~TokenFlag.ABSENT
            if vocab.get(token["content"]) != number or content != token["content"]:
                raw = (_raw(content) if self.is_bytes else None) or content.encode()
                entries[number] = (*self._place(raw), flags)
            if token.get("special"):
                entries[number] = (*entries[number][:2], flags | TokenFlag.SPECIAL)
        return _pack("<IHH", entries)

    def _merges(self) -> bytes:
        vocab: Mapping[str, int] = self.model["vocab"]
        rows = []
        for merge in self.model["merges"]:
            left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
            rows.append((vocab[left], vocab[right], vocab[left + right]))
        return _pack("<3I", rows)

    def _added(self) -> bytes:
        rows = []
        for token in self.document.get("added_tokens") or []:
            if token.get("single_word"):
                raise TablesUnsupported(f"added token {quote(token['content'])} is a single word")
            flags = sum(
                flag
                for key, flag in (
                    ("normalized", AddedFlag.NORMALIZED),
                    ("lstrip", AddedFlag.LSTRIP),
                    ("rstrip", AddedFlag.RSTRIP),
                )
                if token.get(key)
            )
            content = self._content(token)
            if not content:
                continue
            rows.append((int(token["id"]), *self._place(content.encode()), flags))
        return _pack("<IIHH", rows)

    def _content(self, token: Mapping[str, Any]) -> str:
        """What an added token is found as, and decoded to."""
        content = str(token["content"])
        if token.get("normalized") and self.normalizers:
            return _normalized(self.document, content)
        return content

    # ------------------------------------------------------------ steps

    def _add_normalizer(self, part: Mapping[str, Any]) -> None:
        kind = part["type"]
        if kind == "NFC":
            self.normalizers.append((Normalizer.NFC, 0, 0, 0, 0))
        elif kind == "Prepend":
            self._add_text_step(Normalizer.PREPEND, part["prepend"], "")
        elif kind == "Replace" and "String" in part["pattern"]:
            self._add_text_step(Normalizer.REPLACE, part["pattern"]["String"], part["content"])
        else:
            raise TablesUnsupported(f"its normalizer is {quote(kind)}")

    def _add_text_step(self, op: Normalizer, old: str, new: str) -> None:
        if not old:
            raise TablesUnsupported("its normalizer has an empty text")
        places = (*self._place(old.encode()), *self._place(new.encode()))
        self.normalizers.append((op, *places))

    def _add_pre_tokenizer(self, part: Mapping[str, Any]) -> None:
        add = _PRE_TOKENIZERS.get(part["type"])
        if add is None:
            raise TablesUnsupported(f"its pre-tokenizer is {quote(part['type'])}")
        if self.is_bytes:
            raise TablesUnsupported("its pre-tokenizer goes on behind ByteLevel")
        add(self, part)

    def _add_step(self, step: Step, pattern: str) -> None:
        self.steps.append((step, self.programs.add(pattern), 0))

    def _add_split(self, part: Mapping[str, Any]) -> None:
        pattern = part["pattern"]
        regex = pattern["Regex"] if "Regex" in pattern else _escaped(pattern["String"])
        step = _BEHAVIORS.get((part["behavior"], bool(part.get("invert"))))
        if step is None:
            raise TablesUnsupported(f"its pre-tokenizer splits {quote(part['behavior'])}")
        self._add_step(step, regex)

    def _add_digits(self, part: Mapping[str, Any]) -> None:
        self._add_step(Step.ISOLATED, r"\p{N}" if part["individual_digits"] else r"\p{N}+")

    def _add_byte_level(self, part: Mapping[str, Any]) -> None:
        if part.get("add_prefix_space"):
            raise TablesUnsupported("its pre-tokenizer adds a space in front")
        if part.get("use_regex", True):
            self._add_step(Step.ISOLATED, _GPT2)
        self.is_bytes = True

    def _add_metaspace(self, part: Mapping[str, Any]) -> None:
        if self.steps or part["replacement"] != _SPACE:
            raise TablesUnsupported("its Metaspace is not the first step")
        self.steps.append((Step.METASPACE, SCHEMES[part["prepend_scheme"]], 0))
        if part.get("split", True):
            self._add_step(Step.MATCH_BEGINS, _SPACE)

    def _classes(self) -> tuple[bytes, bytes]:
        items: list[tuple[int, int]] = []
        sets: list[tuple[int, int, int]] = []
        for negated, goes_on, members in self.programs.sets():
            sets.append((len(items), len(members), negated | goes_on << 1))
            items += members
        return _pack("<2I", items), _pack("<3I", sets)

    # ------------------------------------------------------------ around and behind

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the ids that are added before and behind a text."""
        prefix: list[int] = []
        suffix: list[int] = []
        for part in _sequence(self.document.get("post_processor"), "processors"):
            if part["type"] == "ByteLevel":
                continue
            if part["type"] != "TemplateProcessing" or prefix or suffix:
                raise TablesUnsupported(f"its post-processor is {quote(part['type'])}")
            side = prefix
            for item in part["single"]:
                if "Sequence" in item:
                    side = suffix
                else:
                    side += part["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        return prefix, suffix

    def _decoder(self) -> bool:
        """Check that the decoder is the one of this kind; return whether it strips a space."""
        decoder = self.document.get("decoder")
        parts = list(_sequence(decoder, "decoders"))
        names = [part["type"] for part in parts]
        if self.is_bytes:
            if names != ["ByteLevel"]:
                raise TablesUnsupported(f"its decoder is {quote(names)}")
            return False
        is_plain = not self.model.get("byte_fallback")
        if names == ["Metaspace"] and is_plain and parts[0]["replacement"] == _SPACE:
            return bool(parts[0]["prepend_scheme"] != "never")
        replaces = names[:1] == ["Replace"] and (
            parts[0]["pattern"] == {"String": _SPACE} and parts[0]["content"] == " "
        )
        if not replaces or names[1:3] != ["ByteFallback", "Fuse"]:
            raise TablesUnsupported(f"its decoder is {quote(names)}")
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if parts[3:] not in ([], [strip]):
            raise TablesUnsupported(f"its decoder is {quote(names)}")
        return len(parts) == 4

    def _place(self, raw: bytes) -> tuple[int, int]:
        if len(raw) > MAX_TEXT_BYTES:
            raise TablesUnsupported(f"a token has {len(raw)} bytes")
        if raw not in self.places:
            self.places[raw] = len(self.text)
            self.text += raw
        return self.places[raw], len(raw)


_PRE_TOKENIZERS: dict[str, Callable[[_Tables, Mapping[str, Any]], None]] = {
    "Split": _Tables._add_split,
    "Digits": _Tables._add_digits,
    "ByteLevel": _Tables._add_byte_level,
    "Metaspace": _Tables._add_metaspace,
}
_BEHAVIORS = {
    ("Isolated", False): Step.ISOLATED,
    ("Removed", True): Step.MATCHES,
    ("Removed", False): Step.BETWEEN,
    ("MergedWithNext", False): Step.MATCH_BEGINS,
}


def _sequence(part: Any, members: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a Sequence, or the one part, or nothing."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for member in part[members]:
        yield from _sequence(member, members)


def _normalized(document: Mapping[str, Any], content: str) -> str:
    import json

    from tokenizers import Tokenizer

    bare = {**document, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    bare |= {"pre_tokenizer": None, "post_processor": None, "decoder": None}
    normalizer = Tokenizer.from_str(json.dumps(bare)).normalizer
    return str(normalizer.normalize_str(content))


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if not char.isalnum() and char.isascii() else char for char in text)


def _pack(form: str, rows: Sequence[tuple[int, ...]]) -> bytes:
    packer = struct.Struct(form)
    return b"".join(packer.pack(*row) for row in rows)


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token[:3] == "<0x" and token[5] == ">"


def _alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _alphabet()


def _raw(token: str) -> bytes | None:
    """Return the bytes that a token of a byte-level vocabulary stands for, None if it is none."""
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return None


_CHARACTERS = {byte: char for char, byte in _ALPHABET.items()}


def byte_token(raw: bytes) -> str:
    """Return how a byte-level vocabulary writes these bytes."""
    return "".join(_CHARACTERS[byte] for byte in raw)
