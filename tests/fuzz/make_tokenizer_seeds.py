"""Write the seeds of the target of tokenizer tables: `make_tokenizer_seeds.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from colibri_tools.text.tables import byte_token, tokenizer_tables

TEXT = "  Grüße e\u0301<a>, it's 1234 \U0001f426\n\n▁b".encode()


def bpe(merges: list[tuple[str, str]], tokens: list[str], **model: Any) -> dict[str, Any]:
    """A BPE model with these tokens and what the merges make."""
    names = [*tokens, *("".join(pair) for pair in merges)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(names))}
    return {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges], **model}


def added(content: str, number: int, **flags: bool) -> dict[str, Any]:
    """An added token."""
    return {"id": number, "content": content, **flags}


def documents() -> dict[str, dict[str, Any]]:
    """Small tokenizers of every kind, by name."""
    letters = [byte_token(bytes([byte])) for byte in range(256)]
    merges = [("i", "t"), ("1", "2"), ("Ġ", "Ġ"), ("it", "'"), ("3", "4"), ("12", "34")]
    level = {"type": "ByteLevel", "add_prefix_space": False}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    patterns = (r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)", r"(?i:'s|'t)?+[\p{L}&&[^a-c]]++$|\s+(?!\S)")
    splits = [{**split, "pattern": {"Regex": pattern}} for pattern in patterns]
    prefix = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
        "special_tokens": {"<s>": {"ids": [0]}},
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = bpe(
        [("\u2581", "\u2581"), ("\u2581", "b"), ("i", "t")],
        ["<unk>", *names, "\u2581", "b", "i", "t"],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    decoders = [{**replace, "pattern": {"String": "\u2581"}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    spm = {"model": pieces, "decoder": {"type": "Sequence", "decoders": decoders}}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    return {
        "gpt2": {"model": bpe(merges, letters), "pre_tokenizer": level, "decoder": level},
        "patterns": {
            "model": bpe(merges, letters, ignore_merges=True),
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*splits, {**level, "use_regex": False}],
            },
            "post_processor": prefix,
            "decoder": level,
            "added_tokens": [
                added("<a>", 262, lstrip=True, special=True),
                added("e\u0301", 263, normalized=True, rstrip=True),
            ],
        },
        "spm": {**spm, "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}},
        "metaspace": {**spm, "pre_tokenizer": metaspace},
    }


def seeds() -> dict[str, bytes]:
    """The seeds by name: length of the text, text, tables."""
    head = len(TEXT).to_bytes(2, "little") + TEXT
    return {name: head + tokenizer_tables(document) for name, document in documents().items()}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in seeds().items():
        (folder / name).write_bytes(raw)


if __name__ == "__main__":
    main()
