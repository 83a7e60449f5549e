"""The tokenizers of Mixtral as published, which mistral-common ships, against SentencePiece."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from text_strings import HAND_PICKED, random_strings
from tokenizers import Tokenizer

from colibri_tools.text.gguf_tokenizer import gguf_tokenizer_json
from colibri_tools.text.hf_files import hf_tokenizer_json
from colibri_tools.text.native_tokenizer import NativeTokenizer
from colibri_tools.text.tables import tokenizer_tables

NAMES = {
    "8x7B": "tokenizer.model.v1",
    "8x22B-Instruct": "mistral_instruct_tokenizer_240323.model.v3",
}


@pytest.fixture(params=NAMES)
def raw(request: pytest.FixtureRequest) -> bytes:
    """A tokenizer.model. The package itself is not imported: it needs others."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mistral-common is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return (folder / NAMES[request.param]).read_bytes()


def as_gguf(processor: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of it."""
    ids = range(processor.vocab_size())

    def kind(i: int) -> int:
        known = ((processor.IsUnknown, 2), (processor.IsControl, 3), (processor.IsByte, 6))
        return next((number for test, number in known if test(i)), 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.IdToPiece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.GetScore(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.add_bos_token": False,
    }


def test_ids_equal_sentencepiece_from_either_kind_of_source(raw: bytes) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=raw)
    config = json.dumps({"add_bos_token": False}).encode()
    blobs = {"tokenizer.model": raw, "tokenizer_config.json": config}
    documents = hf_tokenizer_json(blobs, "tokenizer.model"), gguf_tokenizer_json(as_gguf(theirs))
    ours = [Tokenizer.from_str(document.decode()) for document in documents]
    native = NativeTokenizer(tokenizer_tables(json.loads(documents[0])))
    runs = [f"a{' ' * n}b" for n in range(1, 100)]
    for text in (*HAND_PICKED, *runs, *random_strings(10_000, (), 41)):
        expected = theirs.encode(text)
        for tokenizer in ours:
            assert tokenizer.encode(text).ids == expected, ascii(text)
        assert native.encode(text) == expected, ascii(text)
