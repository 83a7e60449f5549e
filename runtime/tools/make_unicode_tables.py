"""Write runtime/src/unicode_tables.h: general categories and canonical composition.

    python runtime/tools/make_unicode_tables.py

Needs tokenizers, and `unicodedata2` of the version below (`pip install unicodedata2==16.0.0`) or a
Python whose own `unicodedata` has it. It is the version of the regex engine in the tokenizers
library, with which the C tokenizer has to agree; a test compares them over all characters. The
library's normalizer is of an older version: characters that it does not know are left out of the
tables of composition. What is there is the same in all versions.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import normalizers

VERSION = "16.0.0"
OUT = Path(__file__).parent.parent / "src" / "unicode_tables.h"
NAMES = "LuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCoCn"
CATEGORIES = [NAMES[i : i + 2] for i in range(0, len(NAMES), 2)]
SURROGATES = range(0xD800, 0xE000)
NFD = normalizers.NFD()
HANGUL = range(0xAC00, 0xD7A4)

HEAD = f"""// Written by runtime/tools/make_unicode_tables.py from Unicode {VERSION}.
// clang-format off
#ifndef COLIBRI_UNICODE_TABLES_H
#define COLIBRI_UNICODE_TABLES_H

#include <stdint.h>
"""


def database() -> Any:
    """Return the module that has the wanted version."""
    if unicodedata.unidata_version == VERSION:
        return unicodedata
    import unicodedata2

    if unicodedata2.unidata_version != VERSION:
        sys.exit(f"expected Unicode {VERSION}, found {unicodedata2.unidata_version}")
    return unicodedata2


def runs(values: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, value) where the value changes."""
    found: list[tuple[int, int]] = []
    for code, value in enumerate(values):
        if not found or found[-1][1] != value:
            found.append((code, value))
    return found


def array(comment: str, declaration: str, numbers: Sequence[int], per_line: int) -> str:
    """Return a C array."""
    words = [f"0x{number:x}," for number in numbers]
    if declaration.endswith("[3]"):
        words = ["{" + " ".join(words[i : i + 3])[:-1] + "}," for i in range(0, len(words), 3)]
        per_line //= 3
    lines = ["    " + " ".join(words[i : i + per_line]) for i in range(0, len(words), per_line)]
    return (
        f"\n// {comment}\nstatic const uint32_t {declaration} = {{\n" + "\n".join(lines) + "\n};\n"
    )


def known_class(data: Any, char: str) -> int:
    """Return the combining class of a character, 0 if the normalizer does not know it."""
    own = int(data.combining(char))
    low, high = "\u0334", "\u0300"  # of class 1 and 230
    other = low if own > 1 else high
    text = "a" + (char + other if own > 1 else other + char)
    moved = NFD.normalize_str(text) != text
    return own if own and moved else 0


def main() -> None:
    data = database()
    codes = range(0x110000)
    categories = runs(CATEGORIES.index(data.category(chr(code))) for code in codes)
    classes = runs(
        0 if code in SURROGATES or not data.combining(chr(code)) else known_class(data, chr(code))
        for code in codes
    )
    singles: list[int] = []
    pairs: list[tuple[int, int, int]] = []
    for code in codes:
        parts = data.decomposition(chr(code)).split()
        if not parts or parts[0].startswith("<") or code in SURROGATES or code in HANGUL:
            continue
        if NFD.normalize_str(chr(code)) == chr(code):
            continue
        first, second = [*(int(part, 16) for part in parts), 0][:2]
        singles += [code, first, second]
        if data.normalize("NFC", chr(first) + chr(second)) == chr(code) and second:
            pairs.append((first, second, code))
    flat = [number for pair in sorted(pairs) for number in pair]
    text = HEAD
    text += array(
        f"First character << 5 | category, in the order {' '.join(CATEGORIES)}.",
        f"kUnicodeCategories[{len(categories)}]",
        [first << 5 | value for first, value in categories],
        12,
    )
    text += array(
        "First character << 8 | canonical combining class.",
        f"kUnicodeCombining[{len(classes)}]",
        [first << 8 | value for first, value in classes],
        12,
    )
    text += array(
        "Character, and the one or two that it decomposes into; without Hangul syllables.",
        f"kUnicodeDecompositions[{len(singles) // 3}][3]",
        singles,
        12,
    )
    text += array(
        "Two characters, sorted, and the one that they compose to; without Hangul syllables.",
        f"kUnicodeCompositions[{len(flat) // 3}][3]",
        flat,
        12,
    )
    OUT.write_text(text + "\n#endif\n")


if __name__ == "__main__":
    main()
