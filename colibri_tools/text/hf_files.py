"""Tokenizers of Hugging Face checkpoints that come without a tokenizer.json.

A `tokenizer.model` is a SentencePiece model or a list of tokens with their ranks (tiktoken). Both
are turned into what a GGUF file would say, and from there into a tokenizer.json.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from colibri_tools.errors import quote
from colibri_tools.text.gguf_tokenizer import TokenizerUnknown, gguf_tokenizer_json
from colibri_tools.text.tables import byte_token

__all__ = ["TOKENIZER_FILES", "hf_tokenizer_json"]

TOKENIZER_FILES = ("tokenizer.model", "tiktoken.model", "hy.tiktoken")
EXTRA = "pip install 'colibri-tools[tokenizers-extra]'"


@dataclass(frozen=True, slots=True)
class _Code:
    """A module's pre-tokenizer, and the special tokens it puts behind the ranks by itself."""

    pre: str
    special: tuple[str, ...]


_KNOWN_CODE = {
    "tokenization_kimi": _Code("kimi-k2", ("<|reserved_token_{id}|>",) * 256),
    "tokenization_hy": _Code(
        "hunyuan",
        (
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{i}|>" for i in range(205)),
        ),
    ),
}
"""A list of ranks leaves its pattern to Python code of the checkpoint, which is never run; of these
modules it is known what they hold."""

_BPE = 2
_CONTROL, _USER_DEFINED = 3, 4


def hf_tokenizer_json(blobs: Mapping[str, bytes], name: str) -> bytes:
    """Return the tokenizer.json of the carried file `name`. Raises TokenizerUnknown."""
    config = _json(blobs, "tokenizer_config.json")
    ranks = _read_ranks(blobs[name])
    added = _added(blobs, config)
    if ranks is None:
        found = _from_sentencepiece(blobs[name], name, config)
    else:
        code = _known_code(name, config)
        found = _from_ranks(ranks, code.pre)
        own = {i: text.format(id=i) for i, text in enumerate(code.special, len(ranks))}
        added = {i: (text, _CONTROL) for i, text in own.items()} | added
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    _add_tokens(metadata, added, name)
    _add_special_ids(metadata, config)
    return _with_flags(gguf_tokenizer_json(metadata), config)


def _json(blobs: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(blobs.get(name, b"{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TokenizerUnknown(f"{name} is not a JSON object")
    return found


# ---------------------------------------------------------------- SentencePiece


def _from_sentencepiece(data: bytes, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise TokenizerUnknown(
            f"{name} is read by sentencepiece and protobuf, which are not installed: {EXTRA}"
        ) from error
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise TokenizerUnknown(f"{name} is no SentencePiece model") from error
    normalizer = model.normalizer_spec
    wrong = {
        "its model type is not BPE": model.trainer_spec.model_type != _BPE,
        "it normalizes characters": bool(normalizer.precompiled_charsmap),
        "it removes extra whitespace": normalizer.remove_extra_whitespaces,
        "spaces are suffixes": model.trainer_spec.treat_whitespace_as_suffix,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise TokenizerUnknown(f"{name}: {what}")
    return {
        "model": "llama",
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "unknown_token_id": model.trainer_spec.unk_id,
        "add_space_prefix": bool(config.get("add_prefix_space", normalizer.add_dummy_prefix)),
    }


# ---------------------------------------------------------------- ranks


def _read_ranks(data: bytes) -> list[bytes] | None:
    """Return the tokens in order of rank, None if the file is no list of them."""
    tokens: list[bytes] = []
    for line in data.splitlines():
        parts = line.split()
        if not parts:
            continue
        try:
            raw = base64.b64decode(parts[0], validate=True)
            rank = int(parts[1])
        except (IndexError, ValueError, binascii.Error):
            return None
        if rank != len(tokens) or len(parts) != 2:
            return None
        tokens.append(raw)
    return tokens or None


def _known_code(name: str, config: Mapping[str, Any]) -> _Code:
    auto_map = config.get("auto_map")
    code = auto_map.get("AutoTokenizer", "") if isinstance(auto_map, Mapping) else ""
    module = str(code[0] if isinstance(code, list) and code else code).split(".")[0]
    known = _KNOWN_CODE.get(module.rpartition("--")[2])
    if known is None:
        raise TokenizerUnknown(
            f"{name} lists tokens only; how text is cut is in Python code of the checkpoint "
            f"({quote(module or 'unnamed')}), which is never run"
        )
    return known


def _from_ranks(ranks: list[bytes], pre: str) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [byte_token(raw) for raw in ranks],
        "token_type": [1] * len(ranks),
        "merges": list(_merges(ranks)),
    }


def _merges(ranks: list[bytes]) -> Iterator[str]:
    """Yield all pairs of tokens that make a token, in order of the rank of what they make."""
    known = {raw: rank for rank, raw in enumerate(ranks)}
    for raw in ranks:
        cuts = [
            (known[raw[:i]], known[raw[i:]], i)
            for i in range(1, len(raw))
            if raw[:i] in known and raw[i:] in known
        ]
        for _, _, i in sorted(cuts):
            yield f"{byte_token(raw[:i])} {byte_token(raw[i:])}"


# ---------------------------------------------------------------- added tokens


def _added(blobs: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    """Return text and kind of the tokens that the other files add, by id."""
    found: dict[int, tuple[str, int]] = {}
    for text, number in _json(blobs, "added_tokens.json").items():
        if isinstance(number, int):
            found[number] = (text, _USER_DEFINED)
    decoder = config.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(token, Mapping) and str(key).isdigit():
            kind = _CONTROL if token.get("special") else _USER_DEFINED
            found[int(key)] = (str(token.get("content", "")), kind)
    return found


def _add_tokens(metadata: dict[str, Any], added: Mapping[int, tuple[str, int]], name: str) -> None:
    prefix = "tokenizer.ggml."
    tokens, kinds = metadata[f"{prefix}tokens"], metadata[f"{prefix}token_type"]
    scores = metadata.get(f"{prefix}scores")
    for number, (text, kind) in sorted(added.items()):
        while len(tokens) < number < len(tokens) + 65536:  # ids that nobody uses
            tokens.append(f"[unused {len(tokens)}]")
            kinds.append(5)
        if number > len(tokens):
            raise TokenizerUnknown(f"added token {quote(text)} has id {number}")
        if number == len(tokens):
            tokens.append(text)
            kinds.append(kind)
        elif tokens[number] != text:
            raise TokenizerUnknown(
                f"id {number} is {quote(tokens[number])} in {name} and {quote(text)} in "
                "tokenizer_config.json"
            )
        else:
            kinds[number] = kind
    if scores is not None:
        scores += [0.0] * (len(tokens) - len(scores))


def _with_flags(document: bytes, config: Mapping[str, Any]) -> bytes:
    """Return the tokenizer.json with what tokenizer_config.json says of spaces around tokens."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return document
    found = json.loads(document)
    for token in found["added_tokens"]:
        said = decoder.get(str(token["id"]))
        if isinstance(said, Mapping):
            token |= {key: bool(said.get(key)) for key in ("single_word", "lstrip", "rstrip")}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def _add_special_ids(metadata: dict[str, Any], config: Mapping[str, Any]) -> None:
    prefix = "tokenizer.ggml."
    ids = {text: i for i, text in enumerate(metadata[f"{prefix}tokens"])}
    is_llama = metadata[f"{prefix}model"] == "llama"
    for side, default in (("bos", is_llama), ("eos", False)):
        token = config.get(f"{side}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if text in ids:
            metadata[f"{prefix}{side}_token_id"] = ids[text]
        wanted = config.get(f"add_{side}_token", default)
        metadata[f"{prefix}add_{side}_token"] = bool(wanted)
