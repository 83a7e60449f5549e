"""Text to ids: GGUF tokenizers against llama.cpp, the C tokenizer against the library."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_strings import HAND_PICKED, random_strings
from text_vocab import MARK, SEPARATOR, bpe_metadata, fixture, spm_metadata, write_vocab
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from colibri_tools.errors import FormatError
from colibri_tools.families.table import FAMILIES
from colibri_tools.sources import open_source, parse_gguf_metadata
from colibri_tools.text.derive import made_tokenizer
from colibri_tools.text.gguf_tokenizer import TokenizerUnknown, gguf_tokenizer_json
from colibri_tools.text.loading import decode_text
from colibri_tools.text.native_tokenizer import NativeTokenizer
from colibri_tools.text.pretokenizers import PRE_TOKENIZERS
from colibri_tools.text.regex import CATEGORIES, CharClass, ProgramBuilder, RegexUnsupported
from colibri_tools.text.tables import TablesUnsupported, tokenizer_tables

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "oracle" / "values" / "tokenizer-ids.json").read_text()
)
DISTINCT = list({row: name for name, row in PRE_TOKENIZERS.items()}.values())

# Where llama.cpp does otherwise than the tokenizer that the name stands for: it does not compose
# characters (NFC), and writes some patterns in the terms of a simpler engine, in which
_APPROXIMATED = {"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"}  # é has no case,
_OTHER_SCRIPTS = {"afmoe"}  # U+F900 became U+8C48, so a range of scripts is another one,
_MARKS_APART = {"kimi-k2"}  # a mark does not belong to the word before it,
_ASCII_SPACES = {"deepseek-llm", "deepseek-coder"}  # only ASCII has white space,
_ASCII_DIGITS = {"superbpe"}  # and digits, and
_DIGITS_APART = {"tiny_aya", "cohere2moe", "afmoe"}  # what is around digits is not looked at.
# It also merges words that are tokens (gpt-4o, llama4, kimi-k2, hunyuan); the shipped vocabulary
# has none that merging does not find.


def comparable(name: str, text: str) -> bool:
    if PRE_TOKENIZERS[name].nfc and unicodedata.normalize("NFC", text) != text:
        return False
    odd = [char for char in text if not char.isascii()]
    unequal = (
        name in _APPROXIMATED | _OTHER_SCRIPTS and odd,
        name in _MARKS_APART and any(unicodedata.category(char)[0] == "M" for char in odd),
        name in _ASCII_SPACES and any(char.isspace() for char in odd),
        name in _ASCII_DIGITS and any(char.isnumeric() for char in odd),
        name in _DIGITS_APART and any(char.isnumeric() for char in text),
        "\u017f" in text,
    )
    return not any(unequal)


def built(metadata: dict[str, Any]) -> tuple[Tokenizer, NativeTokenizer]:
    raw = gguf_tokenizer_json(metadata)
    return Tokenizer.from_str(raw.decode()), NativeTokenizer(tokenizer_tables(json.loads(raw)))


def with_pre_tokenizer(**changes: Any) -> tuple[Tokenizer, NativeTokenizer]:
    """The shipped tokenizer with other parts."""
    document = {**fixture(), **changes}
    return Tokenizer.from_str(json.dumps(document)), NativeTokenizer(tokenizer_tables(document))


def same_ids(pair: tuple[Tokenizer, NativeTokenizer], texts: Any) -> None:
    python, native = pair
    for text in texts:
        assert native.encode(text) == python.encode(text).ids, ascii(text)


# ---------------------------------------------------------------- against llama.cpp


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_ids_of_a_gguf_equal_llama_cpp(name: str) -> None:
    python, native = built(bpe_metadata(name))
    n_compared = 0
    for i, text in enumerate(HAND_PICKED):
        expected = GOLDEN[name].get(str(i), GOLDEN["base"][i])
        if comparable(name, text):
            n_compared += 1
            assert python.encode(text).ids == native.encode(text) == expected, ascii(text)
    assert n_compared >= 15


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_a_sentencepiece_gguf_equal_llama_cpp(prefix: bool) -> None:
    python, native = built(spm_metadata(prefix=prefix))
    for text, expected in zip(HAND_PICKED, GOLDEN["spm" if prefix else "spm-bare"], strict=True):
        assert python.encode(text).ids == native.encode(text) == expected, ascii(text)


@pytest.mark.skipif("COLIBRI_LLAMA_TOKENIZE" not in os.environ, reason="names llama-tokenize")
@pytest.mark.parametrize("name", ["smollm", "spm", "spm-bare", *DISTINCT])
def test_ten_thousand_random_strings_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    """Live: COLIBRI_LLAMA_TOKENIZE=.../llama-tokenize, COLIBRI_GGUF=a model for "smollm"."""
    from oracle.make_tokenizer_ids import llama_ids

    path, separator, special = tmp_path / "vocab.gguf", SEPARATOR, [MARK]
    if name == "smollm":
        if "COLIBRI_GGUF" not in os.environ:
            pytest.skip("COLIBRI_GGUF names no file")
        path, separator = Path(os.environ["COLIBRI_GGUF"]), "<repo_name>"
        special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
        python, native = _of_file(path)
    else:
        is_spm = name.startswith("spm")
        metadata = spm_metadata(prefix=name == "spm") if is_spm else bpe_metadata(name)
        write_vocab(path, metadata)
        python, native = built(metadata)
    texts = [*HAND_PICKED, *random_strings(10_000, special, 11)]
    if not name.startswith("spm"):
        texts = [text for text in texts if comparable(name, text)]
    program = os.environ["COLIBRI_LLAMA_TOKENIZE"]
    for text, expected in zip(texts, llama_ids(program, path, texts, separator), strict=True):
        assert python.encode(text).ids == native.encode(text) == expected, ascii(text)


def _of_file(path: Path) -> tuple[Tokenizer, NativeTokenizer]:
    with open_source(path) as source:
        return built(dict(source.metadata))


def test_a_vocabulary_written_as_gguf_is_the_same_tokenizer(tmp_path: Path) -> None:
    """The shipped tokenizer.json and its GGUF form, on 10,000 strings."""
    path = write_vocab(tmp_path / "vocab.gguf", bpe_metadata("gpt-2"))
    metadata = parse_gguf_metadata(path.read_bytes(), "vocab")
    made = made_tokenizer({"gguf-metadata.bin": b""}, metadata)
    assert made is not None
    ours, original = Tokenizer.from_str(made[0].decode()), Tokenizer.from_str(json.dumps(fixture()))
    texts = [*HAND_PICKED, *random_strings(10_000, ["<|endoftext|>"], 5)]
    for text in texts:
        assert ours.encode(text).ids == original.encode(text).ids, ascii(text)


def test_the_names_of_every_family_are_known() -> None:
    """docs/cli.md lists what the published models of each family have in their GGUF files."""
    text = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| (SentencePiece|`.+?`) \|$", text, re.MULTILINE)
    listed = {family: names for families, names in rows for family in families.split(", ")}
    expected = {family.name for family in FAMILIES if family.gguf is not None}
    assert expected <= set(listed)
    for family, names in listed.items():
        known = re.findall(r"`([^`]+)`", names)
        assert known or names == "SentencePiece", family
        assert set(known) <= set(PRE_TOKENIZERS), family


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        *((name, True) for name in ("gpt-4o", "llama4", "kimi-k2", "hunyuan", "glm4")),
        *((name, False) for name in ("qwen2", "deepseek-v3", "refact")),
    ],
)
def test_a_word_that_is_a_token_stays_one(name: str, stays: bool) -> None:
    """As tiktoken, whose tokenizers these were; the token is none that merging finds."""
    metadata = bpe_metadata(name)
    for key, value in (("tokens", "qzxqzx"), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    python, native = built(metadata)
    ids = python.encode("qzxqzx").ids
    assert native.encode("qzxqzx") == ids
    assert (ids == [len(metadata["tokenizer.ggml.tokens"]) - 1]) is stays


# ---------------------------------------------------------------- C against Python


def test_c_equals_python_on_ten_thousand_strings() -> None:
    texts = [*HAND_PICKED, *random_strings(10_000, ["<|endoftext|>"], 2)]
    same_ids(with_pre_tokenizer(), texts)


@pytest.mark.parametrize("name", DISTINCT)
def test_c_equals_python_for_every_pre_tokenizer(name: str) -> None:
    special = ["<|endoftext|>", MARK, SEPARATOR]
    same_ids(built(bpe_metadata(name)), random_strings(300, special, 3))


@pytest.mark.parametrize("prefix", [True, False])
def test_c_equals_python_for_sentencepiece(prefix: bool) -> None:
    same_ids(built(spm_metadata(prefix=prefix)), random_strings(2000, [MARK, "<s>"], 4))


BYTE_LEVEL = {**fixture()["pre_tokenizer"], "use_regex": False}


def split(pattern: dict[str, str], behavior: str = "Isolated", invert: bool = False) -> Any:
    step = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [step, BYTE_LEVEL]}


@pytest.mark.parametrize(
    "step",
    [
        split({"Regex": r"\s+"}),
        split({"Regex": r"\w+"}, "Removed", True),
        split({"Regex": r"\p{L}+"}, "Removed"),
        split({"Regex": r"[aeiou]"}, "MergedWithNext"),
        split({"String": "an"}),
        split({"String": "."}),
        split({"Regex": r"\b"}),
        split({"Regex": r"(?=\p{Lu})"}),
        split({"Regex": r"(?:a|an|and)(?!\s)"}),
        split({"Regex": r"[^\P{L}\p{Lu}]+"}),
        split({"Regex": r"[\p{L}&&[^a-m]]+"}),
        split({"Regex": r"\d{2,}|x{3}y?|[[:]]"}),
        split({"Regex": r".$"}),
        split({"Regex": r"[\S]++[\s]?+"}),
        split({"Regex": r"(?i:the|IS|k)"}),
        split({"Regex": r"[\]\-^a\\]+"}),
        split({"Regex": r"\P{^L}\p{^L}"}),
    ],
    ids=lambda step: str(step["pretokenizers"][0]["pattern"]),
)
def test_c_equals_python_for_this_split(step: Any) -> None:
    same_ids(with_pre_tokenizer(pre_tokenizer=step), [*HAND_PICKED, *random_strings(300, (), 6)])


def added(content: str, number: int, **flags: bool) -> dict[str, Any]:
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": number, "content": content} | {key: flags.get(key, False) for key in keys}


def test_c_equals_python_for_added_tokens() -> None:
    tokens = [
        added("<|endoftext|>", 0, special=True),
        added("<a>", 4096, lstrip=True),
        added("<ab", 4097, rstrip=True),
        added("<ab>", 4098, special=True, lstrip=True, rstrip=True),
        added("e\u0301t", 4099, normalized=True),
        added("  ", 4100, normalized=True),
        added("\uff5cend\uff5c", 4101),
    ]
    special = [token["content"] for token in tokens]
    texts = [*random_strings(2000, [*special, "\xe9t"], 7)]
    normal = with_pre_tokenizer(added_tokens=tokens, normalizer={"type": "NFC"})
    same_ids(normal, texts)
    same_ids(with_pre_tokenizer(added_tokens=tokens), texts)
    python, native = normal
    rng = random.Random(8)
    for _ in range(500):
        ids = [rng.choice([0, *range(4096, 4102), rng.randrange(4096)]) for _ in range(6)]
        assert native.decode(ids) == python.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("cut", [True, False])
def test_c_equals_python_for_metaspace(scheme: str, cut: bool) -> None:
    document = json.loads(gguf_tokenizer_json(spm_metadata()))
    document["normalizer"] = None
    document["pre_tokenizer"] = {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": cut
    }  # fmt: skip
    pair = Tokenizer.from_str(json.dumps(document)), NativeTokenizer(tokenizer_tables(document))
    same_ids(pair, [*HAND_PICKED, *random_strings(500, [MARK], 9)])


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_c_decodes_as_python_does(kind: str) -> None:
    python, native = built(bpe_metadata("gpt-2") if kind == "bytes" else spm_metadata())
    rng, n_tokens = random.Random(10), python.get_vocab_size()
    for text in [*HAND_PICKED, *random_strings(1000, [MARK], 10)]:
        ids = python.encode(text).ids
        rng.shuffle(ids) if rng.random() < 0.5 else None
        ids += [rng.randrange(n_tokens) for _ in range(rng.randint(0, 3))]
        assert native.decode(ids) == python.decode(ids, skip_special_tokens=True), ids


ALL = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200))]


def test_categories_of_all_characters_are_those_of_the_regex_engine() -> None:
    """Each class of characters becomes words: equal words, equal classes."""
    pattern = "|".join(rf"\p{{{name}}}+" for name in CATEGORIES if name not in ("Cs", "Cn"))
    pair = with_pre_tokenizer(pre_tokenizer=split({"Regex": pattern}))
    rng = random.Random(12)
    shuffled = rng.sample(ALL, 60_000)
    same_ids(pair, ["".join(shuffled[i : i + 2000]) for i in range(0, len(shuffled), 2000)])
    _same_words(r"\w+")
    _same_words(r"\s+")


def _same_words(pattern: str) -> None:
    """Which characters match, all of them: digits around each show whether it is one word."""
    builder = ProgramBuilder()
    builder.add(pattern)
    text = "".join(ALL)
    step = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    found = {i for _, (start, end) in step.pre_tokenize_str(text) for i in range(start, end)}
    (negated, _, items), *_ = builder.sets()
    ours = {i for i, char in enumerate(ALL) if _holds(items, char) != negated}
    # The database of this Python may be older than the engine's.
    old = {i for i, char in enumerate(ALL) if unicodedata.category(char) == "Cn"}
    assert not (found ^ ours) - old


def _holds(items: Any, char: str) -> bool:
    category = CATEGORIES.index(unicodedata.category(char))
    return any(
        high >> category & 1 if low == 1 << 31 else low <= ord(char) <= high for low, high in items
    )


def test_composition_of_all_characters_is_that_of_the_normalizer() -> None:
    python, native = with_pre_tokenizer(normalizer={"type": "NFC"})
    nfd = normalizers.NFD()
    marks = [char for char in ALL if ord(char) >= 0x300 and unicodedata.combining(char)]
    rng = random.Random(13)
    texts = []
    for char in ALL:
        parts = nfd.normalize_str(char)
        if parts != char:
            texts.append(char + parts + rng.choice(marks) + rng.choice(marks) + parts)
    rng.shuffle(texts)
    same_ids((python, native), ["".join(texts[i : i + 40]) for i in range(0, len(texts), 40)])


def test_a_byte_that_is_no_utf8_is_one_replacement_character_in_both() -> None:
    python, native = with_pre_tokenizer()
    rng = random.Random(14)
    for _ in range(3000):
        raw = bytes(rng.choice([0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 0xED])
                    for _ in range(rng.randint(1, 9)))  # fmt: skip
        text, _ = decode_text(raw)
        assert native.encode(raw) == python.encode(text).ids, raw
    assert decode_text(b"ab\xe2\x82c") == ("ab\ufffd\ufffdc", 2)
    assert decode_text("é".encode()) == ("é", None)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not known"),
        ({"model": "t5"}, "tokenizer model 't5' is not one of gpt2, llama"),
        ({"merges": ["a nothing-like-this"]}, "merge 0 'a nothing-like-this' is not of tokens"),
        ({"merges": []}, "no tokenizer.ggml.merges"),
        ({"tokens": ["a", "a"]}, "token 'a' is there twice"),
        ({"tokens": ["a", "\udcff"]}, "token 1 is not UTF-8"),
        ({"add_bos_token": True, "bos_token_id": 1 << 30}, "bos_token_id is '1073741824'"),
        ({"add_bos_token": 1}, "expected a bool, found '1'"),
        ({"add_sep_token": True}, "add_sep_token is set"),
        ({"token_type": [1]}, "token_type: expected 4098 items, found 1"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changes: dict[str, Any], words: str) -> None:
    metadata = bpe_metadata("gpt-2") | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    with pytest.raises(TokenizerUnknown) as caught:
        gguf_tokenizer_json(metadata)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.__setitem__(t.index("<0x41>"), "x41"), "byte token <0x41> is missing"),
        (lambda t: t.__setitem__(t.index("e"), "no e"), "character that is no token itself"),
    ],
)
def test_a_sentencepiece_vocabulary_with_a_hole_is_refused(
    change: Callable[[list[str]], None], words: str
) -> None:
    metadata = spm_metadata()
    change(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(TokenizerUnknown) as caught:
        gguf_tokenizer_json(metadata)
    assert words in caught.value.message


def test_pieces_of_one_score_are_refused() -> None:
    metadata = spm_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    words = [i for i, text in enumerate(tokens) if text in ("in", "at")]
    scores[words[0]] = scores[words[1]]
    with pytest.raises(TokenizerUnknown, match="have the same score"):
        gguf_tokenizer_json(metadata)
    metadata = spm_metadata() | {"tokenizer.ggml.remove_extra_whitespaces": True}
    with pytest.raises(TokenizerUnknown, match="remove_extra_whitespaces is set"):
        gguf_tokenizer_json(metadata)


def test_runs_of_one_score_that_merge_otherwise_are_refused() -> None:
    metadata = spm_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    for n in (*range(4, 15), 16):  # four are three and one from the left, two and two by any rank
        tokens[tokens.index("\u2581" * n)] = f"unused {n}"
    with pytest.raises(TokenizerUnknown, match="have the same score"):
        gguf_tokenizer_json(metadata)


def test_runs_of_one_score_that_another_piece_holds_are_refused() -> None:
    """Then the order in which a run is merged tells whether that piece comes about."""
    metadata = spm_metadata()
    for key, value in (("tokens", "\u2581\u2581a"), ("scores", -0.5), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    with pytest.raises(TokenizerUnknown, match="have the same score"):
        gguf_tokenizer_json(metadata)


@pytest.mark.parametrize(
    "pattern",
    [
        "a*?", "(?<=a)b", "^a", "(?<n>a)", r"\1", "(a", "a)", "[a", "a{2}+", "(a*)*", r"\p{Greek}",
        "[^a&&[b]]", "[a[b]]", "[b-a]", "*", "(?i:é)", "a{5000}", "\\",
    ],
)  # fmt: skip
def test_a_pattern_that_c_cannot_do_is_refused(pattern: str) -> None:
    with pytest.raises(RegexUnsupported):
        ProgramBuilder().add(pattern)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {**fixture()["model"], "type": "Unigram"}}, "model is 'Unigram'"),
        ({"model": {**fixture()["model"], "dropout": 0.1}}, "model has dropout"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer is 'NFKC'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer is 'Whitespace'"),
        ({"pre_tokenizer": split({"Regex": "a"}, "Contiguous")}, "splits 'Contiguous'"),
        ({"pre_tokenizer": split({"Regex": "(?<=a)"})}, "a pattern has"),
        ({"post_processor": {"type": "RobertaProcessing"}}, "post-processor is"),
        ({"decoder": {"type": "WordPiece"}}, "decoder is"),
        ({"added_tokens": [added("x", 4096, single_word=True)]}, "'x' is a single word"),
        ({"model": {}}, "not as expected"),
    ],
)
def test_a_tokenizer_without_tables_says_what_it_has(changes: Any, words: str) -> None:
    with pytest.raises(TablesUnsupported, match=words):
        tokenizer_tables({**fixture(), **changes})


def test_texts_that_take_too_long_are_refused_and_not_waited_for() -> None:
    _, native = with_pre_tokenizer(pre_tokenizer=split({"Regex": r"(?=(\d{3})+(?!\d))"}))
    assert len(native.encode("1" * 300)) > 100
    with pytest.raises(Exception, match="takes too long"):
        native.encode("1" * 100_000)


# ---------------------------------------------------------------- tables as untrusted input


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, 2, "version"),
        (4, 3, "kind"),
        (8, 16, "flags"),
        (12, 0, "no tokens"),
        (12, 1 << 30, "limit"),
        (16, 7, "size"),
        (52, 1 << 30, "unknown token"),
        (60, 1, "flags"),
        (64, 1 << 30, "a token"),
    ],
)
def test_broken_tables_are_refused(offset: int, value: int, words: str) -> None:
    tables = bytearray(tokenizer_tables(fixture()))
    struct.pack_into("<I", tables, offset, value)
    with pytest.raises(FormatError, match=words):
        NativeTokenizer(bytes(tables))


def test_cut_tables_are_refused() -> None:
    tables = tokenizer_tables(fixture())
    for n in (0, 10, 63, 64, 1000, len(tables) - 1):
        with pytest.raises(FormatError):
            NativeTokenizer(tables[:n])
    with pytest.raises(FormatError):
        NativeTokenizer(tables + b"x")


def test_classes_share_their_sets() -> None:
    builder = ProgramBuilder()
    builder.add(r"[a&&[^b]]+\s")
    builder.add(r"\s|[a&&[^b]]")
    assert len(list(builder.sets())) == 3
    assert all(isinstance(chars, CharClass) for chars in builder.classes)
