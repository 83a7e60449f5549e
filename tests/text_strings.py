"""Strings on which tokenizers have differed, and random ones made of such parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

HAND_PICKED = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t \t",
    "Hello world",
    " Hello  world ",
    "\xe9",
    "e\u0301",
    "A\u030a\u0327",
    "na\xefve cafe\u0301",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab",
    "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e",
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f \U0001f469\u200d\U0001f467 \U0001f1e9",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3",
    "I've been 'told he's there, 'RE you sure? 'M not 'LL 'd We'Ve",
    "x = {\n    'a': 1,\n\t\t\"b\": [2, 3],\n}\n\n\n",
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2",
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438",
    "!!!!!!?????? ------=======",
    "\r\n\r\n",
    "a\xa0b\u2003c\u3000d",
    "\u200b\ufeff",
    "\xdf \u017f \ufb01 \u212b \u212a",
    "def f():\n\treturn '''doc'''",
    "www.example.com/a?b=c&d=%20",
    "ABCdefGHI camelCase HTTPServer",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0e44\u0e17\u0e22 \u0e40\u0e21\u0e37\u0e2d\u0e07",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "Vi\u1ec7t Nam Tie\u0302\u0301ng",
    "\u2460\u2461 \xbd \u2153 \u2167 \u0663\u0664\u0665 12\xbd",
    "\x01\x7f",
    "\u2581 \u2581\u2581 a\u2581b",
    "<0x0A> <0xFF>",
    "\U0001d4b3 \U00010400\U00010428 \U00020000\U00020001",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                      x",
    f"{' ' * 15}a{' ' * 30}b{' ' * 31}",
)

_TEXT = "the of and to in is you that it he was for on are as with his they at be this"
_WORDS = _TEXT.split()
_POOLS = (
    "\u0301\u0300\u0323\u0327\u0345\u05b0",
    "\xe9\xe8\xea\xeb\u0101\u010d\u0111\u0148\u0159\u0161\u017e\xf8\xe6\u0153\xdf",
    "\u65e5\u672c\u8a9e\u6f22\u5b57\u4e2d\u6587\u304b\u306a\u30ab\u30ca\ud55c\uad6d\uc5b4",
    "0123456789\u0663\u096a\u2167\xbd",
    "   \t\n\r\xa0\u3000\u2028",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\u201c\u201d\u2018\u2019\u2014\u2026\u3001\u3002",
    "\U0001f680\U0001f600\U0001f469\u200d\U0001f467\U0001f3fd\U0001f1e9\u2764\ufe0f",
    "\u043a\u0438\u0440\u03b3\u03c1\u05d1\u0639\u0939\u093f\u0e44\u01c5\u01c8",
    "ABCXYZabcxyz'sS'tT'reRE",
)


def random_strings(n: int, special: Sequence[str] = (), seed: int = 1) -> Iterator[str]:
    """Yield n strings; `special` are put in between, also inside of words."""
    rng = random.Random(seed)
    for _ in range(n):
        yield "".join(_part(rng, special) for _ in range(rng.randint(1, 14)))


def _part(rng: random.Random, special: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.4:
        return (" " if rng.random() < 0.7 else "") + rng.choice(_WORDS)
    if kind < 0.8:
        return "".join(rng.choices(rng.choice(_POOLS), k=rng.randint(1, 6)))
    if kind < 0.9:
        places = ((0x20, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000))
        return chr(rng.randrange(*rng.choice(places))) * rng.randint(1, 2)
    if kind < 0.95 and special:
        return rng.choice(special)
    return " " * rng.randint(1, 40)
