"""Small vocabularies as GGUF files say them, made of the shipped tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny-moe" / "tokenizer.json"
SEPARATOR = "<|separator|>"
MARK = "<|mark|>"
LETTERS = {
    **{chr(b): b for b in [*range(33, 127), *range(161, 173), *range(174, 256)]},
    **{chr(256 + i): b for i, b in enumerate([*range(33), *range(127, 161), 173])},
}


def fixture() -> dict[str, Any]:
    """The shipped tokenizer.json."""
    found: dict[str, Any] = json.loads(FIXTURE.read_text())
    return found


def bpe_metadata(pre: str) -> dict[str, Any]:
    """The shipped vocabulary with two more tokens, under a pre-tokenizer's name."""
    document = fixture()
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [1] * len(tokens)
    for token in document["added_tokens"]:
        kinds[token["id"]] = 3
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, SEPARATOR, MARK],
        "tokenizer.ggml.token_type": [*kinds, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def spm_metadata(*, prefix: bool = True) -> dict[str, Any]:
    """A SentencePiece vocabulary: bytes, and the shipped merges that are whole characters."""
    pieces: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    texts: dict[str, None] = {}
    for token, number in sorted(fixture()["model"]["vocab"].items(), key=lambda kv: kv[1]):
        if number == 0:
            continue
        raw = bytes(LETTERS[char] for char in token)
        text = raw.decode("utf-8", "replace").replace(" ", "\u2581")
        if "\ufffd" not in text and text.isprintable() and text.strip("\u2581"):
            texts[text] = None
    letters = dict.fromkeys(char for text in texts for char in text)
    words = [text for text in texts if len(text) > 1]
    runs = ["\u2581" * n for n in (3, 2, 4, 8, 5, 6, 7, *range(9, 15), 16)]  # as Llama 2's
    pieces += [(run, -1e9, 1) for run in runs]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    pieces += [(letter, -1e6 - rank, 1) for rank, letter in enumerate({**letters, "\u2581": None})]
    pieces += [(SEPARATOR, 0.0, 3), (MARK, -1000.0, 4)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text for text, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def write_vocab(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **metadata,
    }.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value with the type that converters write."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
