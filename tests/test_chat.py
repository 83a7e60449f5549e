"""Chat templates, conversations, stop texts, and the tokenize commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_models import make_model
from test_run import BOS, EOS, VOCAB, byte_tokenizer
from text_vocab import bpe_metadata, write_vocab

from colibri_tools.chat import Conversation, chat
from colibri_tools.detokenize import detokenize
from colibri_tools.engine import Engine, Sampling
from colibri_tools.errors import FormatError, JobError, UsageError
from colibri_tools.run import run
from colibri_tools.text.stop import StopTexts
from colibri_tools.text.template import ChatTemplate, find_template
from colibri_tools.tokenize import tokenize

ASK = [{"role": "user", "content": "Hi"}]
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def blobs(**files: Any) -> dict[str, bytes]:
    names = {"jinja": "chat_template.jinja", "json": "chat_template.json"}
    names |= {"config": "tokenizer_config.json", "map": "special_tokens_map.json"}
    return {
        names[key]: value.encode() if isinstance(value, str) else json.dumps(value).encode()
        for key, value in files.items()
    }


def rendered(**files: Any) -> str:
    return find_template(blobs(**files), "m").render(ASK)


# ---------------------------------------------------------------- which template


def test_case_7_3_the_jinja_file_wins() -> None:
    config = {"chat_template": "config"}
    assert rendered(config=config) == "config"
    assert rendered(config=config, json={"chat_template": "json"}) == "json"
    assert rendered(config=config, json={"chat_template": "json"}, jinja="jinja") == "jinja"


def test_case_7_3_of_named_templates_it_is_the_default() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert rendered(config={"chat_template": named}) == "D"
    assert rendered(json={"chat_template": {"default": "D", "rag": "R"}}) == "D"
    with pytest.raises(FormatError, match="template named 'default', found 'tool_use'"):
        rendered(config={"chat_template": named[:1]})
    with pytest.raises(FormatError, match="expected a chat template, found"):
        rendered(config={"chat_template": 7})


def test_case_7_3_a_gguf_has_its_own(tmp_path: Path) -> None:
    metadata = bpe_metadata("gpt-2") | {"tokenizer.chat_template": PLAIN}
    raw = write_vocab(tmp_path / "v.gguf", metadata).read_bytes()
    template = find_template({"gguf-metadata.bin": raw}, "m")
    assert template.name == "tokenizer.chat_template"
    end = metadata["tokenizer.ggml.tokens"][0]
    assert template.render(ASK) == f"{end}user:Hi{end}assistant:"


def test_without_a_template_the_plain_prompt_is_offered() -> None:
    with pytest.raises(UsageError, match="no chat template; give the whole text with --prompt"):
        find_template({}, "m")


def test_special_tokens_are_those_of_the_config() -> None:
    config = {"chat_template": PLAIN, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    assert rendered(config=config) == "<s>user:Hi</s>assistant:"
    config.pop("eos_token")
    assert rendered(config=config, map={"eos_token": "<end>", "bos_token": "no"}).startswith("<s>")
    assert "<end>" in rendered(config=config, map={"eos_token": "<end>"})


# ---------------------------------------------------------------- rendering


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),  # blocks are trimmed
        ("{{ {'a': '<é>', 'b': 1} | tojson }}", '{"a": "<é>", "b": 1}'),  # no HTML, no escapes
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% for m in messages %}{% continue %}x{% endfor %}y", "y"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}t{% endif %}{% if documents is none %}d{% endif %}", "d"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_templates_get_what_transformers_gives_them(template: str, expected: str) -> None:
    assert rendered(jinja=template) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('touch marker') }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10000000) | list }}",
        "{{ raise_exception('not like this') }}",
        "{{ 1 / 0 }}",
        "{{ messages['x'].y.z }}",
        "{% for x in",
        "{{ messages[0]['content'] + 1 }}",
    ],
)
def test_case_7_3_a_template_stays_in_its_sandbox(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"m: chat_template\.jinja") as caught:
        rendered(jinja=template)
    assert "\n" not in caught.value.message
    assert not list(tmp_path.iterdir())


@pytest.mark.oracle
def test_rendering_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    compiled = transformers._compile_jinja_template(PLAIN)
    expected = compiled.render(
        messages=ASK, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    config = {"chat_template": PLAIN, "bos_token": "<s>", "eos_token": "</s>"}
    assert rendered(config=config) == expected


# ---------------------------------------------------------------- stop texts


def test_stop_texts_are_not_shown_nor_what_follows() -> None:
    for cut in range(1, 12):
        text, stop = "one\nUser: two", StopTexts(["\nUser:", "###"])
        shown = "".join(stop.push(text[i : i + cut]) for i in range(0, len(text), cut))
        assert (shown, stop.hit, stop.finish()) == ("one", True, "")


def test_what_only_begins_like_a_stop_is_shown_late_but_whole() -> None:
    stop = StopTexts(["\nUser:"])
    assert stop.push("a\nUs") == "a"
    assert stop.push("x") == "\nUsx"
    assert stop.push("\nUser") == ""
    assert stop.finish() == "\nUser"
    assert not stop.hit


def test_the_first_stop_in_the_text_counts() -> None:
    stop = StopTexts(["world", "lo"])
    assert stop.push("hello world") == "hel"


# ---------------------------------------------------------------- conversations


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes as tokens, and a template that ends a turn with </s>, which is no end of text here."""
    config = {"chat_template": PLAIN, "bos_token": "<s>", "eos_token": "</s>"}
    files = {"tokenizer.json": byte_tokenizer().to_str().encode(), **blobs(config=config)}
    spec = {"tokenizer": "hf-json", "bos_id": BOS, "vocab_size": VOCAB, "n_tokens": 258}
    path = tmp_path_factory.mktemp("chat") / "model.colibri"
    return make_model(path, blobs=files, tied=True, context_length=400, **spec)


def test_a_message_is_put_into_the_template(model: Path) -> None:
    result = run(model, prompt="Hi", chat=True, system="Be brief", max_tokens=0)
    text = b"system:Be brief|user:Hi|assistant:"
    assert result.prompt_tokens == 1 + len(text)  # "|" stands for </s>, one token too
    conversation = Conversation.open(model, "Be brief")
    ids = conversation.ask("Hi")
    assert ids[:7] == [BOS, *b"system"] and ids.count(BOS) == 1 and ids.count(EOS) == 2


def test_case_7_4_what_the_template_ends_a_turn_with_ends_a_reply(model: Path) -> None:
    conversation = Conversation.open(model)
    assert conversation.end_ids() == {EOS}
    with Engine(model) as engine:
        assert EOS not in engine.info.eos_ids
    free = run(
        model, prompt="Hi", chat=True, max_tokens=300, ignore_eos=True, temperature=3, seed=4
    )
    assert EOS in free.tokens
    ended = run(model, prompt="Hi", chat=True, max_tokens=300, temperature=3, seed=4)
    assert ended.tokens == free.tokens[: free.tokens.index(EOS) + 1]
    assert ended.stop_reason == "eos"


def test_a_template_that_ends_with_text_adds_no_end() -> None:
    tokenizer = byte_tokenizer()
    for text in ("{{ messages[1].content }}x", "{{ raise_exception('no') }}", "nothing"):
        assert not Conversation(ChatTemplate(text, "t", "m"), tokenizer).end_ids()


def test_stop_texts_end_a_run(model: Path) -> None:
    free = run(model, prompt="Hi", max_tokens=60, temperature=2, seed=1, ignore_eos=True)
    assert free.text is not None
    word = free.text[10:12]
    at = free.text.index(word)
    ended = run(
        model, prompt="Hi", max_tokens=60, temperature=2, seed=1, ignore_eos=True, stop=[word]
    )
    assert (ended.text, ended.stop_reason) == (free.text[:at], "stop")
    assert ended.tokens == free.tokens[: len(ended.tokens)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": [1], "chat": True}, "--chat is about text"),
        ({"prompt": "a", "system": "b"}, "--system is a message of a chat"),
        ({"prompt": "a", "stop": [""]}, "--stop: expected a text"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    model: Path, options: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(model, **options)


def talk(model: Path, lines: list[str], **options: Any) -> tuple[list[str], list[str]]:
    """What was written, cut at line ends, and the notes."""
    written: list[str] = []
    notes: list[str] = []
    source: Iterator[str] = iter(lines)
    options = {"max_tokens": 12, "sampling": Sampling(temperature=1.5, seed=3)} | options
    chat(
        model,
        read=lambda: next(source, None),
        write=written.append,
        note=notes.append,
        ignore_eos=True,
        **options,
    )
    return written, notes


def replies(model: Path, lines: list[str], **options: Any) -> list[str]:
    found: list[str] = []
    text = ""
    for piece in talk(model, lines, **options)[0]:
        if piece == "\n":  # the end of a reply comes as a piece of its own
            found.append(text)
            text = ""
        else:
            text += piece
    return found


def test_a_conversation_remembers_and_forgets(model: Path) -> None:
    first, second = replies(model, ["one", "two"])[:2]
    alone = replies(model, ["two"])[0]
    again = replies(model, ["one", "/reset", "two"])
    assert (again[0], again[-1]) == (first, alone)
    assert second != alone


def test_what_is_reused_of_earlier_turns_changes_no_reply(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["one", "two", "/reset", "one", "three"]
    evaluated: list[int] = []
    own = Engine.eval

    def counted(self: Engine, tokens: Any, n_logits: int = 1) -> Any:
        evaluated.append(len(tokens))
        return own(self, tokens, n_logits)

    monkeypatch.setattr(Engine, "eval", counted)
    reused = replies(model, lines)
    n_reused = sum(evaluated)
    evaluated.clear()
    monkeypatch.setattr("colibri_tools.chat._shared", lambda known, ids: 0)
    assert replies(model, lines) == reused
    assert n_reused < sum(evaluated)


def test_a_reply_that_is_cut_off_says_so(model: Path) -> None:
    assert "the reply is cut off; --max-tokens makes it longer" in talk(model, ["one"])[1]


def test_a_full_context_is_told_and_the_conversation_goes_on(model: Path) -> None:
    lines = ["x" * 60, "/reset", "hi"]
    written, notes = talk(model, lines, ctx=50)
    assert any("the context 50 positions; begin anew with /reset" in note for note in notes)
    assert notes[-2:] == [
        "a new conversation",
        "the reply is cut off; --max-tokens makes it longer",
    ]
    assert written[-1] == "\n"
    assert any("the context is full" in note for note in talk(model, ["x" * 20], ctx=50,
               max_tokens=100)[1])  # fmt: skip


def test_a_template_that_refuses_a_message_ends_nothing(tmp_path: Path) -> None:
    template = (
        "{% if 'no' in messages[-1].content %}{{ raise_exception('I will not') }}{% endif %}x"
    )
    files = {"tokenizer.json": byte_tokenizer().to_str().encode(), **blobs(jinja=template)}
    spec = {"tokenizer": "hf-json", "vocab_size": VOCAB, "n_tokens": 258}
    model = make_model(tmp_path / "m.colibri", blobs=files, tied=True, **spec)
    written, notes = talk(model, ["no", "yes"])
    assert "I will not" in notes[0]
    assert written[-1] == "\n"


def colibri(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    code = "from colibri_tools.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(os.fsencode, map(str, arguments))],
        input=stdin,
        capture_output=True,
        timeout=120,
    )


def test_a_conversation_over_a_pipe(model: Path) -> None:
    done = colibri(
        "run", model, "--chat", "--max-tokens", 5, "--ignore-eos", stdin=b"one\n\n/reset\nb\xff\n"
    )
    assert done.returncode == 0, done.stderr
    assert b"note: a new conversation" in done.stderr
    assert b"not UTF-8 at byte 1" in done.stderr
    refused = colibri("run", model, "--chat", "--json")
    assert refused.returncode == 2
    assert "give --prompt with --chat" in json.loads(refused.stdout)["error"]["message"]
    assert colibri("run", model, "--chat", "--profile").returncode == 2


# ---------------------------------------------------------------- tokenize, detokenize


def test_tokenize_and_back(model: Path, tmp_path: Path) -> None:
    ids = [BOS, *"Grüße</s>".encode()[:7], EOS]
    assert tokenize(model, "Grüße</s>").tokens == ids
    assert tokenize(model, "Grüße", special=False).tokens == list("Grüße".encode())
    assert detokenize(model, ids).text == "Grüße"
    assert detokenize(model, "256,71,257", special=True).text == "<s>G</s>"
    with pytest.raises(UsageError, match=r"token 1 is 258; this tokenizer's ids are 0 to 257"):
        detokenize(model, [1, 258])
    path = write_vocab(tmp_path / "v.gguf", bpe_metadata("gpt-2"))
    assert detokenize(path, tokenize(path, "two words").tokens).text == "two words"


def test_tokenize_reads_standard_input_and_shows_json(model: Path) -> None:
    done = colibri("tokenize", model, "--json", stdin=b"a\xffb")
    document = json.loads(done.stdout)
    assert document["tokens"] == [BOS, 0x61, 0xEF, 0xBF, 0xBD, 0x62]
    assert document["text"] == "a\ufffdb"
    assert document["warnings"] == ["not UTF-8 at byte 1: U+FFFD stands for it"]
    shown = colibri("detokenize", model, "--tokens", "71,114", "--json")
    assert json.loads(shown.stdout) == {"tokens": [71, 114], "text": "Gr", "warnings": []}
    assert colibri("tokenize", model, "--text", "Gr").stdout == b"256,71,114\n"
    assert colibri("detokenize", model, "--tokens", "71,114").stdout == b"Gr\n"


def test_a_prompt_that_is_no_utf8_is_said(model: Path) -> None:
    result = run(model, prompt="a\udcffb", max_tokens=0)
    assert result.prompt_tokens == 1 + len("a\ufffdb".encode())
    assert any("not UTF-8" in warning for warning in result.warnings)


def test_case_7_1_rows_without_a_token_are_never_sampled(model: Path) -> None:
    result = run(model, prompt="a", max_tokens=300, temperature=50, seed=2, ignore_eos=True)
    assert len(set(result.tokens)) > 100 and max(result.tokens) < 258
