"""The tokenizer of a GGUF file as a tokenizer.json.

Two kinds are rebuilt: byte-level BPE ("gpt2"), whose words are cut as its named pre-tokenizer does,
and SentencePiece BPE ("llama"), which merges by score. Everything else is refused, by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colibri_tools.errors import ColibriError, quote
from colibri_tools.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from colibri_tools.text.spm import SPACE, Piece, score_merges, spm_pipeline

__all__ = ["TokenizerUnknown", "gguf_tokenizer_json", "refuse_unknown"]

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_MODELS = ("gpt2", "llama")
_MARKERS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
"""Markers of a reply's parts that other runtimes print although they are control tokens."""


class TokenizerUnknown(ColibriError):
    """A tokenizer that cannot be rebuilt exactly; the message says which one and why."""


def refuse_unknown(metadata: Mapping[str, Any]) -> None:
    """Raise TokenizerUnknown for a kind or a pre-tokenizer that is not known. Reads no arrays."""
    model = metadata.get(_PREFIX + "model")
    if model is None:
        raise TokenizerUnknown("the file names no tokenizer")
    if model not in _MODELS:
        raise TokenizerUnknown(f"tokenizer model {quote(model)} is not one of {', '.join(_MODELS)}")
    pre = metadata.get(_PREFIX + "pre", "default")
    if model == "gpt2" and (not isinstance(pre, str) or pre not in PRE_TOKENIZERS):
        raise TokenizerUnknown(f"its pre-tokenizer {quote(pre)} is not known")


def gguf_tokenizer_json(metadata: Mapping[str, Any]) -> bytes:
    """Return the tokenizer.json of a GGUF file's metadata.

    Raises TokenizerUnknown for a tokenizer that cannot be rebuilt exactly.
    """
    refuse_unknown(metadata)
    tokens = _read_tokens(metadata)
    if metadata[_PREFIX + "model"] == "gpt2":
        document = _byte_level(metadata, tokens)
    else:
        document = _sentencepiece(metadata, tokens)
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class _Tokens:
    texts: list[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    ids: dict[str, int]


def _read_tokens(metadata: Mapping[str, Any]) -> _Tokens:
    texts = _list(metadata, "tokens")
    kinds = _list(metadata, "token_type", len(texts), 1)
    scores = _list(metadata, "scores", len(texts), 0.0)
    if not texts:
        raise TokenizerUnknown("the file has no tokens")
    texts = [f"[EMPTY_{i}]" if text == "" else text for i, text in enumerate(texts)]
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not _is_unicode(text):
            raise TokenizerUnknown(f"token {i} is not UTF-8")
    for i, score in enumerate(scores):
        if not isinstance(score, (int, float)) or not math.isfinite(score):
            raise TokenizerUnknown(f"the score of token {i} is {quote(score)}")
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) != len(texts):
        twice = next(text for i, text in enumerate(texts) if ids[text] != i)
        raise TokenizerUnknown(f"token {quote(twice)} is there twice")
    return _Tokens(texts, kinds, scores, ids)


def _list(metadata: Mapping[str, Any], key: str, n: int | None = None, fill: Any = None) -> Any:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return [] if n is None else [fill] * n
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TokenizerUnknown(f"{_PREFIX}{key}: expected an array")
    if n is not None and len(value) < n:
        raise TokenizerUnknown(f"{_PREFIX}{key}: expected {n} items, found {len(value)}")
    return list(value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise TokenizerUnknown(f"{_PREFIX}{key}: expected a bool, found {quote(value)}")
    return value


# ---------------------------------------------------------------- byte-level BPE


def _byte_level(metadata: Mapping[str, Any], tokens: _Tokens) -> dict[str, Any]:
    pre = PRE_TOKENIZERS[metadata.get(_PREFIX + "pre", "default")]
    merges = []
    for i, merge in enumerate(_list(metadata, "merges")):
        text = merge if isinstance(merge, str) else ""
        at = text.find(" ", 1)
        pair = (text[:at], text[at + 1 :])
        if at < 0 or not all(part in tokens.ids for part in (*pair, "".join(pair))):
            raise TokenizerUnknown(f"merge {i} {quote(merge)} is not of tokens")
        merges.append(pair)
    if not merges:
        raise TokenizerUnknown(f"the file has no {_PREFIX}merges")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "post_processor": _post_processor(metadata, tokens, pre.add_bos),
        "decoder": _BYTE_LEVEL,
        "model": {
            **_BPE,
            "ignore_merges": pre.ignore_merges,
            "vocab": tokens.ids,
            "merges": merges,
        },
    }


_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def _pre_tokenizer(pre: PreTokenizer) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in pre.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _BYTE_LEVEL]}


def _added_tokens(metadata: Mapping[str, Any], tokens: _Tokens) -> list[dict[str, Any]]:
    """Tokens that are found in the text itself: control, unknown and user-defined ones."""
    # The file does not say which tokens swallow what follows; of phi-3 and its MoE it is known.
    name = str(metadata.get("general.name", "")).lower()
    is_moe = metadata.get("general.architecture") == "phimoe"
    strips = is_moe or "phi-3" in name or "phi3" in name
    keeps = {"<unk>", "<s>", "<|endoftext|>"}
    return [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and text not in keeps,
            "normalized": False,
            "special": kind != _USER_DEFINED and text not in _MARKERS,
        }
        for i, (text, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=False))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(
    metadata: Mapping[str, Any], tokens: _Tokens, add_bos: bool, defaults: tuple[int, ...] = ()
) -> dict[str, Any] | None:
    """What is added around a text: BOS before, EOS behind."""
    if _flag(metadata, "add_sep_token", False):
        raise TokenizerUnknown(f"{_PREFIX}add_sep_token is set")
    wanted = [
        ("bos", _flag(metadata, "add_bos_token", add_bos)),
        ("eos", _flag(metadata, "add_eos_token", False)),
    ]
    used: dict[str, int] = {}
    for i, (name, is_wanted) in enumerate(wanted):
        default = defaults[i] if i < len(defaults) else None
        number = metadata.get(f"{_PREFIX}{name}_token_id", default)
        if not is_wanted:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens.texts):
            raise TokenizerUnknown(
                f"{_PREFIX}add_{name}_token is set, but {name}_token_id is {quote(number)}"
            )
        used[name] = number
    if not used:
        return None

    def special(number: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens.texts[number], "type_id": 0}}

    def template(sequences: str) -> list[dict[str, Any]]:
        around: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            around += [special(used["bos"])] if "bos" in used else []
            around.append({"Sequence": {"id": sequence, "type_id": type_id}})
            around += [special(used["eos"])] if "eos" in used else []
        return around

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("AB"),
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]}
            for number in used.values()
            for text in (tokens.texts[number],)
        },
    }


# ---------------------------------------------------------------- SentencePiece BPE


def _sentencepiece(metadata: Mapping[str, Any], tokens: _Tokens) -> dict[str, Any]:
    # What is found in the text itself never comes of a merge; SPACE is not in the text yet.
    pieces = [
        Piece(text, float(score))
        for text, score, kind in zip(tokens.texts, tokens.scores, tokens.kinds, strict=False)
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED) or SPACE in text
    ]
    for byte in range(256):
        token = f"<0x{byte:02X}>"
        if token not in tokens.ids:
            raise TokenizerUnknown(f"byte token {token} is missing")
    merges = score_merges(pieces, tokens.ids)
    if isinstance(merges, str):
        raise TokenizerUnknown(merges)
    if _flag(metadata, "remove_extra_whitespaces", False):
        raise TokenizerUnknown(f"{_PREFIX}remove_extra_whitespaces is set")
    unknown = metadata.get(_PREFIX + "unknown_token_id", 0)
    is_id = isinstance(unknown, int) and 0 <= unknown < len(tokens.texts)
    prefix = _flag(metadata, "add_space_prefix", True)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        **spm_pipeline(prefix),
        "post_processor": _post_processor(metadata, tokens, True, (1, 2)),
        "model": {
            **_BPE,
            "unk_token": tokens.texts[unknown] if is_id else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": tokens.ids,
            "merges": merges,
        },
    }
