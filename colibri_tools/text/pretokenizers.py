"""How a byte-level BPE tokenizer cuts text into words, by the name that a GGUF file gives.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves what that means to the reader.
The patterns here are those of the tokenizers that the names stand for; a name that is not listed
cannot be guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied one after the other; what matches and what lies between are pieces.

    `nfc`: text is composed first (Unicode NFC). `ignore_merges`: a whole piece that is a token
    stays one. `add_bos`: whether a text begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _cl100k(numbers: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{_OTHERS}|{_SPACES}"


def _o200k(endings: str, numbers: str, no_han: str = "", others: str = r"[\r\n/]*") -> str:
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{no_han}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{no_han}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{endings}|"
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{endings}|"
        rf"{numbers}| ?[^\s\p{{L}}\p{{N}}]+{others}|{_SPACES}"
    )


_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_V3_WORDS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), nfc=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_O200K = PreTokenizer((_o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_DEEPSEEK_V3 = PreTokenizer(
    (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3_WORDS)
)
_ALPHABETS = (  # of deepseek-llm: letters of scripts with case
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    r"\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    r"\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    r"\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    r"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    r"\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    r"\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_IDEOGRAPHS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+"
)
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


def _literal(pattern: str) -> str:
    """Replace \\uXXXX and \\UXXXXXXXX by the characters: the regex engine has no such escapes."""
    out, rest = [], pattern
    while (at := rest.find("\\")) >= 0:
        out.append(rest[:at])
        width = {"u": 4, "U": 8}.get(rest[at + 1], 0)
        out.append(chr(int(rest[at + 2 : at + 2 + width], 16)) if width else rest[at : at + 2])
        rest = rest[at + 2 + width :]
    return "".join([*out, rest])


_ROWS: dict[str, PreTokenizer] = {
    "gpt-2 phi-2 trillion gigachat mellum a.x-4.0 mpt jais": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "smollm starcoder refact codeshell mellum2 minerva-7b": _SINGLE_DIGITS,
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": _LLAMA3,
    "dbrx smaug-bpe chatglm-bpe": _CL100K,
    "glm4 glm5": PreTokenizer(_CL100K.patterns, ignore_merges=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen kormo megrez solar-open grok-2": PreTokenizer(_QWEN2.patterns),
    "hunyuan": PreTokenizer(_QWEN2.patterns, nfc=True, ignore_merges=True),
    "stablelm2": _QWEN2,
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "gpt-4o llama4": PreTokenizer(_O200K.patterns, ignore_merges=True),
    "kanana2 talkie minimax-m2": _O200K,
    "tekken": PreTokenizer((_o200k("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer(
        (r"[\p{Han}]+|" + _o200k(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*"),),
        ignore_merges=True,
    ),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K.patterns), nfc=True),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK_V3,
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_ALPHABETS}]+",
            rf"\s?[{_PUNCTUATION}]+",
            r"\s+$",
            _IDEOGRAPHS,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")),
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|"
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
        nfc=True,
    ),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}|"
            rf" ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
        )
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "afmoe": PreTokenizer((_THREES_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK_V3_WORDS)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2.patterns)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True),
    "youtu": PreTokenizer(
        (
            r"[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|"
            r"[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _o200k(f"{_CONTRACTIONS}?", r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: PreTokenizer(
        tuple(_literal(pattern) for pattern in row.patterns),
        row.nfc,
        row.ignore_merges,
        row.add_bos,
    )
    for names, row in _ROWS.items()
    for name in names.split()
}
"""By name. "default" is what a file without the key means."""
