"""The run command's function: prompts, streaming, stopping, options, and what it reports."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import make_model
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from colibri_tools.engine import Engine
from colibri_tools.errors import FormatError, JobError, UsageError
from colibri_tools.run import RunResult, TextStream, parse_tokens, run

BOS, EOS, VOCAB = 256, 257, 270  # 258 ... 269 are rows without a token


def byte_tokenizer() -> Tokenizer:
    """Every byte a token (id = byte), and <s> before every text."""
    letters = bytes_to_letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def bytes_to_letters() -> list[str]:
    """GPT-2's printable letter of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def text_model(path: Path, **changes: Any) -> Path:
    blobs = {"tokenizer.json": byte_tokenizer().to_str().encode()}
    spec = {"tokenizer": "hf-json", "bos_id": BOS, "vocab_size": VOCAB, "n_tokens": 258}
    return make_model(path, blobs=blobs, tied=True, **(spec | changes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("run") / "model.colibri", context_length=400)


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return make_model(tmp_path_factory.mktemp("mute") / "model.colibri")


# ---------------------------------------------------------------------------------------------
# Prompts


def test_text_is_encoded_with_its_beginning(model: Path) -> None:
    result = run(model, prompt="Grüße", max_tokens=0)
    assert result.prompt_tokens == 1 + len("Grüße".encode())
    ids = [BOS, *"Grüße".encode()]
    assert (
        run(model, prompt="Grüße", max_tokens=9).tokens
        == run(model, tokens=ids, max_tokens=9).tokens
    )


def test_prompt_file_and_standard_input(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("naïve\r\n".encode())
    expected = run(model, prompt="naïve\r\n", max_tokens=5)
    assert run(model, prompt_file=file, max_tokens=5).tokens == expected.tokens
    stdin = io.TextIOWrapper(io.BytesIO(file.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(model, prompt_file="-", max_tokens=5).tokens == expected.tokens


def test_tokens_as_text_and_as_list(mute: Path) -> None:
    assert parse_tokens("1, 2,3") == [1, 2, 3]
    assert (
        run(mute, tokens="1,2,3", max_tokens=4).tokens
        == run(mute, tokens=[1, 2, 3], max_tokens=4).tokens
    )


@pytest.mark.parametrize("text", ["", "1,", "1,,2", "1;2", "-1", "1.5", "x", "²"])
def test_bad_token_lists_are_refused(mute: Path, text: str) -> None:
    with pytest.raises(UsageError, match="--tokens: expected ids separated by commas"):
        run(mute, tokens=text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of --prompt, --prompt-file and --tokens"),
        ({"prompt": "a", "tokens": "1"}, "exactly one of"),
        ({"prompt": "a", "prompt_file": "x"}, "exactly one of"),
        ({"tokens": []}, "the prompt has no tokens"),
        ({"tokens": "1,999"}, "token 1 of the input is 999"),
        ({"prompt_file": "/nonexistent/x"}, "--prompt-file '/nonexistent/x': No such file"),
        ({"prompt": "a", "max_tokens": -1}, "max-tokens: expected 0 or more"),
        ({"prompt": "a", "top_k": 5}, "--top-k is about drawing tokens"),
        ({"prompt": "a", "top_p": 0.5}, "--top-p is about drawing tokens"),
        ({"prompt": "a", "min_p": 0.5}, "--min-p is about drawing tokens"),
        ({"prompt": "a", "seed": 1}, "--seed is about drawing tokens"),
        ({"prompt": "a", "temperature": 1.0, "top_p": 2.0}, "top-p: expected a number above 0"),
        ({"prompt": "a", "ctx": 401}, "context of 401: this model allows up to 400"),
        ({"prompt": "a" * 500}, "the prompt has 501 tokens, the context 400 positions; shorten"),
        ({"prompt": "a" * 50, "ctx": 20}, "51 tokens, the context 20 positions; raise --ctx"),
        ({"prompt": "a", "logits": "/nonexistent/x.npy"}, "--logits: there is no folder"),
    ],
)
def test_senseless_options_are_refused(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        run(model, **options)
    assert words in error.value.message


def test_prompt_file_must_be_utf8(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab\xff")
    with pytest.raises(UsageError, match="not UTF-8 at byte 2"):
        run(model, prompt_file=tmp_path / "x")


def test_text_needs_a_tokenizer(mute: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer.*--tokens"):
        run(mute, prompt="hello")
    lost = make_model(tmp_path / "lost.colibri", tokenizer="hf-json")
    with pytest.raises(FormatError, match=r"blob tokenizer\.json is missing"):
        run(lost, prompt="hello")
    broken = make_model(
        tmp_path / "broken.colibri", tokenizer="hf-json", blobs={"tokenizer.json": b"{}"}
    )
    with pytest.raises(FormatError, match=r"tokenizer\.json cannot be used"):
        run(broken, tokens="1")


# ---------------------------------------------------------------------------------------------
# Generation


def test_generated_tokens_are_the_models_choice(model: Path) -> None:
    result = run(model, tokens=[1, 2, 3], max_tokens=20)
    with Engine(model) as engine:
        logits = engine.forward([1, 2, 3, *result.tokens])
    assert result.tokens == [int(row[:258].argmax()) for row in logits[2:-1]]
    assert result.stop_reason == "max-tokens"
    assert result.generated_tokens == len(result.tokens) == 20


def test_every_eos_id_ends_the_text(model: Path, tmp_path: Path) -> None:
    free = run(model, tokens=[1, 2, 3], max_tokens=12).tokens
    first = free.index(free[7])
    ending = text_model(tmp_path / "e.colibri", eos_ids=[EOS, free[7]], context_length=400)
    stopped = run(ending, tokens=[1, 2, 3], max_tokens=12)
    assert stopped.tokens == free[: first + 1]
    assert stopped.stop_reason == "eos"
    assert run(ending, tokens=[1, 2, 3], max_tokens=12, ignore_eos=True).tokens == free


def test_rows_without_a_token_are_never_made(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.colibri", n_tokens=3)
    for options in ({}, {"temperature": 10.0, "seed": 1}):
        assert max(run(path, tokens=[1], max_tokens=60, **options).tokens) < 3


def test_a_seed_repeats_a_text(model: Path) -> None:
    def texts(**options: Any) -> RunResult:
        return run(model, prompt="a", max_tokens=30, temperature=1.5, **options)

    assert texts(seed=3).tokens == texts(seed=3, threads=1, batch_size=1).tokens
    assert texts(seed=3).tokens != texts(seed=4).tokens
    unseeded = texts()
    assert texts(seed=unseeded.seed).tokens == unseeded.tokens


def test_a_full_context_ends_the_text(model: Path) -> None:
    result = run(model, tokens=[1, 2, 3], max_tokens=50, ctx=10)
    assert result.stop_reason == "context"
    assert result.generated_tokens == 8  # the last one needs no position of its own
    assert any("context of 10 positions" in note for note in result.notes)


# ---------------------------------------------------------------------------------------------
# Streaming


def test_pieces_make_up_the_text_and_cut_no_character(model: Path) -> None:
    pieces: list[str] = []
    result = run(model, prompt="é", max_tokens=200, on_text=pieces.append)
    assert "".join(pieces) == result.text
    assert result.text == bytes(t for t in result.tokens if t < 256).decode("utf-8", "replace")


def test_characters_of_several_tokens_come_whole() -> None:
    text = "Größe: 5 €, 👩‍🚀 漢字 end"
    stream = TextStream(byte_tokenizer(), [BOS, *b"before"])
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[2:4] == ["", "ö"]


def test_unfinished_characters_come_at_the_end() -> None:
    stream = TextStream(byte_tokenizer(), [])
    pieces = [stream.push(byte) for byte in "ab€".encode()[:-1]]
    assert pieces == ["a", "b", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_leading_spaces_survive() -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")], unk_token=None)
    )
    tokenizer.decoder = decoders.Metaspace()  # drops the first space of what it decodes
    stream = TextStream(tokenizer, [2, 2])
    assert [stream.push(2), stream.push(1), stream.push(2)] == [" a", "a", " a"]


def test_special_tokens_are_no_text(model: Path) -> None:
    stream = TextStream(byte_tokenizer(), [])
    assert [stream.push(t) for t in (BOS, ord("x"), EOS, ord("y"))] == ["", "x", "", "y"]


def test_ids_are_streamed_without_a_tokenizer(mute: Path) -> None:
    pieces: list[str] = []
    result = run(mute, tokens=[1, 2], max_tokens=3, on_text=pieces.append)
    assert pieces == [f"{token} " for token in result.tokens]
    assert result.text is None


# ---------------------------------------------------------------------------------------------
# Interrupting


def test_ctrl_c_keeps_what_was_made(model: Path) -> None:
    expected = run(model, tokens=[1], max_tokens=9).tokens
    made = 0

    def press_ctrl_c(text: str) -> None:
        nonlocal made
        made += 1
        if made == 2:
            signal.raise_signal(signal.SIGINT)

    result = run(model, tokens=[1], max_tokens=200, on_text=press_ctrl_c)
    assert result.interrupted
    assert 1 <= len(result.tokens) < 200
    assert result.tokens[:9] == expected[: len(result.tokens)][:9]


@pytest.mark.parametrize("logits", [False, True])
def test_ctrl_c_stops_a_prompt(tmp_path: Path, logits: bool) -> None:
    path = make_model(tmp_path / "model.colibri")
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    # many seconds of work, were it not stopped
    result = run(
        path,
        tokens=[1, 2] * 2040,
        max_tokens=9,
        threads=1,
        batch_size=64 if logits else 1,
        logits=tmp_path / "logits.npy" if logits else None,
    )
    timer.join()
    assert result.interrupted
    assert result.tokens == []
    assert list(tmp_path.iterdir()) == [path]
    assert result.stats.tokens < 4080


# ---------------------------------------------------------------------------------------------
# Results


def test_logits_of_all_prompt_positions(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits.npy"
    tokens = list(range(40))
    run(model, tokens=tokens, max_tokens=0, logits=out, batch_size=7)
    found = np.load(out)
    with Engine(model) as engine:
        expected = engine.forward(tokens)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
    assert list(tmp_path.iterdir()) == [out]


def test_logits_never_replace_the_model(model: Path, tmp_path: Path) -> None:
    before = model.read_bytes()
    link = tmp_path / "link.npy"
    link.symlink_to(model)
    for path in (model, link):
        with pytest.raises(UsageError, match="is the model itself"):
            run(model, tokens=[1], logits=path)
    assert model.read_bytes() == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(JobError, match="--logits"):
        run(model, tokens=[1], max_tokens=0, logits=tmp_path / "folder")


def test_json_has_every_key(model: Path) -> None:
    result = run(model, prompt="hello", max_tokens=5, profile=True)
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    keys = (
        "text tokens prompt_tokens generated_tokens prefill_seconds decode_seconds "
        "tokens_per_second peak_rss_bytes io"
    )
    assert set(keys.split()) <= set(document)
    io_keys = {"backend", "direct", "bytes_read", "reads", "hit_rate", "wait_seconds"}
    assert set(document["io"]) == io_keys
    assert document["tokens_per_second"] > 0
    assert 0 < document["io"]["hit_rate"] < 1
    assert {"memory", "notes", "warnings"} <= set(document)
    assert "profile" not in run(model, prompt="hello", max_tokens=0).to_json()


def test_report_shows_cache_and_profile(model: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    run(model, prompt="hello", max_tokens=5, profile=True, expert_cache=1 << 17).render(console)
    text = console.file.getvalue()
    for words in ("6 tokens", "5 tokens", "cache 128 KiB of", "attention", "io wait", "peak"):
        assert words in text
