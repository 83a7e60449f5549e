"""What repack, respec and verify do about text, and colibri-run --prompt."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
from c_programs import ROOT
from container_util import Draft
from repack_util import small_hf
from test_colibri_run import colibri_run
from text_strings import HAND_PICKED, random_strings
from text_vocab import LETTERS, bpe_metadata, fixture, spm_metadata
from tokenizers import Tokenizer

import colibri_tools
from colibri_tools.container import SectionKind
from colibri_tools.detokenize import detokenize
from colibri_tools.errors import JobError, UsageError
from colibri_tools.repack import repack
from colibri_tools.respec import respec
from colibri_tools.run import run
from colibri_tools.text.gguf_tokenizer import TokenizerUnknown, gguf_tokenizer_json
from colibri_tools.text.hf_files import hf_tokenizer_json
from colibri_tools.text.native_tokenizer import NativeTokenizer
from colibri_tools.text.tables import tokenizer_tables
from colibri_tools.tokenize import tokenize
from colibri_tools.verify import verify

FIXTURE = ROOT / "fixtures" / "tiny-moe"


def section(path: Path, kind: SectionKind = SectionKind.TOKENIZER) -> bytes | None:
    with colibri_tools.open(path) as container:
        for found, offset, n_bytes in container.sections:
            if found == kind:
                return container.read(offset, n_bytes)
    return None


def gguf_model(path: Path, metadata: dict[str, Any]) -> Path:
    """A tiny model with as many rows as the vocabulary has tokens."""
    spec = tm.default_spec("mixtral", vocab=len(metadata["tokenizer.ggml.tokens"]))
    return tm.write_gguf(path, "mixtral", spec, metadata=metadata)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


@pytest.fixture(scope="module")
def shipped(folder: Path) -> Path:
    repack(FIXTURE, folder / "shipped.colibri")
    return folder / "shipped.colibri"


@pytest.fixture(scope="module", params=["gpt-2", "spm"])
def from_gguf(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, Path]:
    """A GGUF file and its container."""
    metadata = spm_metadata() if request.param == "spm" else bpe_metadata(request.param)
    source = gguf_model(folder / f"{request.param}.gguf", metadata)
    out = folder / f"{request.param}.colibri"
    repack(source, out)
    return source, out


# ---------------------------------------------------------------- conversion


def test_case_7_2_a_gguf_carries_its_tokenizer_in_both_forms(from_gguf: tuple[Path, Path]) -> None:
    source, out = from_gguf
    with colibri_tools.open(out) as container:
        assert set(container.blobs) == {"gguf-metadata.bin", "tokenizer.json"}
        assert container.spec["tokenizer"] == "hf-json"
        assert "tokenizer_lacks" not in container.spec
        assert container.provenance["tokenizer.made_from"] == "gguf-metadata.bin"
        document = json.loads(container.blobs["tokenizer.json"])
    assert section(out) == tokenizer_tables(document)
    assert verify(out).ok
    assert verify(out, against=source).ok
    assert not respec(out).changed
    text = "The file system is"
    assert tokenize(out, text) == tokenize(source, text)


def test_the_shipped_model_and_its_gguf_form_have_the_same_ids(shipped: Path, folder: Path) -> None:
    gguf = gguf_model(folder / "form.gguf", bpe_metadata("gpt-2"))
    for text in HAND_PICKED[:12]:
        assert tokenize(shipped, text).tokens == tokenize(gguf, text).tokens
    assert detokenize(gguf, tokenize(gguf, "Grüße 🐦").tokens).text == "Grüße 🐦"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "its pre-tokenizer 'unheard-of' is not known"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not one of gpt2, llama"),
    ],
)
def test_an_unknown_tokenizer_is_named_and_never_guessed(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    source = gguf_model(tmp_path / "m.gguf", bpe_metadata("gpt-2") | changes)
    out = tmp_path / "m.colibri"
    result = repack(source, out)
    assert any(words in warning for warning in result.warnings)
    with colibri_tools.open(out) as container:
        assert container.spec["tokenizer"] == "none"
        assert container.spec["tokenizer_lacks"] == words
        assert set(container.blobs) == {"gguf-metadata.bin"}
    assert section(out) is None
    with pytest.raises(UsageError, match="give the prompt as ids with --tokens"):
        run(out, prompt="x")
    done = colibri_run(out, "--prompt", "x")
    assert done.returncode == 2
    assert words in done.stderr and "--tokens, or use 'colibri run'" in done.stderr
    assert run(out, tokens=[1], max_tokens=1, ignore_eos=True).generated_tokens == 1


def test_a_tokenizer_that_c_cannot_do_has_no_tables(tmp_path: Path) -> None:
    source = small_hf(tmp_path / "hf", "mixtral")
    letters = {chr(ord("a") + i): i for i in range(26)}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    (source / "tokenizer.json").write_text(json.dumps(document))
    out = tmp_path / "m.colibri"
    repack(source, out)
    assert section(out) is None
    assert run(out, prompt="AB", max_tokens=0).prompt_tokens == 2
    done = colibri_run(out, "--prompt", "AB")
    assert done.returncode == 2 and "its normalizer is 'Lowercase'" in done.stderr
    with pytest.raises(JobError, match="no tokenizer tables: its normalizer is 'Lowercase'"):
        NativeTokenizer.open(out)


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf.message"])
def test_a_sentencepiece_file_alone_names_the_extra(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    source = small_hf(tmp_path / "hf", "mixtral")
    (source / "tokenizer.model").write_bytes(b"\x0a\x03abc")
    result = repack(source, tmp_path / "m.colibri")
    extra = "pip install 'colibri-tools[tokenizers-extra]'"
    assert any(extra in warning for warning in result.warnings)
    with pytest.raises(UsageError, match="tokenizers-extra"):
        tokenize(tmp_path / "m.colibri", "a")


def test_what_is_no_sentencepiece_file_is_said() -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(TokenizerUnknown, match=r"tokenizer.model is no SentencePiece model"):
        hf_tokenizer_json({"tokenizer.model": b"\x0a\x03abc"}, "tokenizer.model")


def sentencepiece_model(metadata: dict[str, Any]) -> bytes:
    """A tokenizer.model with the pieces of a GGUF vocabulary."""
    pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = pb2.ModelProto()
    keys = ("tokens", "scores", "token_type")
    columns = [metadata[f"tokenizer.ggml.{key}"] for key in keys]
    for text, score, kind in zip(*columns, strict=True):
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.unk_id = 0
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    found: bytes = model.SerializeToString()
    return found


def test_a_sentencepiece_file_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    raw = sentencepiece_model(spm_metadata())
    config = json.dumps({"add_bos_token": False}).encode()
    blobs = {"tokenizer.model": raw, "tokenizer_config.json": config}
    ours = Tokenizer.from_str(hf_tokenizer_json(blobs, "tokenizer.model").decode())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=raw)
    runs = [f"a{' ' * n}{' b'[n % 2]}" for n in range(1, 90)]
    for text in (*HAND_PICKED, *runs, *random_strings(3000, (), 31)):
        assert ours.encode(text).ids == theirs.encode(text), ascii(text)


def test_tokens_beside_a_sentencepiece_file_take_spaces_as_the_config_says() -> None:
    pytest.importorskip("sentencepiece")
    raw = sentencepiece_model(spm_metadata())
    n = len(spm_metadata()["tokenizer.ggml.tokens"])
    token = {"content": "<|user|>", "special": True, "rstrip": True}
    config = {"add_bos_token": False, "added_tokens_decoder": {str(n): token}}
    blobs = {"tokenizer.model": raw, "tokenizer_config.json": json.dumps(config).encode()}
    document = hf_tokenizer_json(blobs, "tokenizer.model")
    ours = Tokenizer.from_str(document.decode())
    native = NativeTokenizer(tokenizer_tables(json.loads(document)))
    assert ours.encode("<|user|>\n\n").ids == native.encode("<|user|>\n\n") == [n]
    assert native.encode("<|user|>\n\nis") == native.encode("<|user|>is")


def test_special_tokens_of_phimoe_take_the_space_behind_them() -> None:
    """As in its tokenizer.json, which a GGUF file does not say."""
    metadata = spm_metadata() | {"general.architecture": "phimoe"}
    strips = {
        token["content"]: token["rstrip"]
        for token in json.loads(gguf_tokenizer_json(metadata))["added_tokens"]
    }
    assert strips.pop("<unk>") is strips.pop("<s>") is False
    assert strips and all(strips.values())


CASES_OF_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
PUBLISHED = {  # the module, its file, its pattern, whether it composes characters
    "tokenization_kimi": (
        "tiktoken.model",
        rf"[\p{{Han}}]+|{CASES_OF_LETTERS % ('*', '+')}|{CASES_OF_LETTERS % ('+', '*')}|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        False,
    ),
    "tokenization_hy": (
        "hy.tiktoken",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        True,
    ),
}


@pytest.mark.parametrize("module", PUBLISHED)
def test_ranks_give_the_ids_of_tiktoken(module: str) -> None:
    """With a token that no pair of others makes: it stands for a whole word only."""
    tiktoken = pytest.importorskip("tiktoken")
    name, pattern, composes = PUBLISHED[module]
    vocab = sorted(fixture()["model"]["vocab"].items(), key=lambda kv: kv[1])[1:]
    raw = [*(bytes(LETTERS[char] for char in token) for token, _ in vocab), b"qzxqzx"]
    lines = b"\n".join(base64.b64encode(token) + b" %d" % i for i, token in enumerate(raw))
    config = json.dumps({"auto_map": {"AutoTokenizer": [f"{module}.Tokenizer", None]}})
    blobs = {name: lines, "tokenizer_config.json": config.encode()}
    document = hf_tokenizer_json(blobs, name)
    ours = Tokenizer.from_str(document.decode())
    native = NativeTokenizer(tokenizer_tables(json.loads(document)))
    special = [token["content"] for token in json.loads(document)["added_tokens"]]
    assert len(special) == (210 if composes else 256)
    theirs = tiktoken.Encoding(
        "theirs",
        pat_str=pattern,
        mergeable_ranks={token: i for i, token in enumerate(raw)},
        special_tokens={text: i for i, text in enumerate(special, len(raw))},
    )
    words = ["qzxqzx", " qzxqzx", "qzxqzxq", "e\u0301qzxqzx"]
    for text in (*words, *HAND_PICKED, *random_strings(3000, (*special, "qzxqzx"), 32)):
        plain = unicodedata.normalize("NFC", text) if composes else text
        expected = theirs.encode(plain, allowed_special="all")
        assert ours.encode(text).ids == native.encode(text) == expected, ascii(text)
    assert ours.encode("qzxqzx").ids == [len(raw) - 1]


def test_ranks_give_the_ids_of_the_merges(tmp_path: Path) -> None:
    """A tiktoken list of the shipped vocabulary; its pattern is known by the name of its code."""
    metadata = bpe_metadata("kimi-k2")
    vocab = sorted(fixture()["model"]["vocab"].items(), key=lambda kv: kv[1])[1:]
    raw = [bytes(LETTERS[char] for char in token) for token, _ in vocab]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(raw)]
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(len(raw) + 1): {"content": "[EOS]", "special": True}},
    }
    blobs = {
        "tiktoken.model": b"\n".join(lines),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    ours = Tokenizer.from_str(hf_tokenizer_json(blobs, "tiktoken.model").decode())
    merged = Tokenizer.from_str(gguf_tokenizer_json(metadata).decode())
    for text in HAND_PICKED:
        assert ours.encode(text).ids == [i - 1 for i in merged.encode(text).ids], ascii(text)
    assert ours.encode("a[EOS]").ids[-1] == len(raw) + 1
    blobs["tokenizer_config.json"] = b"{}"
    with pytest.raises(TokenizerUnknown, match="Python code of the checkpoint"):
        hf_tokenizer_json(blobs, "tiktoken.model")


# ---------------------------------------------------------------- respec


def without_tables(path: Path, out: Path) -> Path:
    """The container as an earlier version made it, from the same source."""
    import colibri_tools.repack as repacking
    from colibri_tools.text.derive import TextParts

    own = repacking.text_parts
    repacking.text_parts = lambda source: TextParts()  # type: ignore[assignment]
    try:
        repack(path, out)
    finally:
        repacking.text_parts = own
    return out


def test_respec_adds_tables_to_a_container_of_an_earlier_version(tmp_path: Path) -> None:
    old = without_tables(FIXTURE, tmp_path / "old.colibri")
    assert section(old) is None
    assert "colibri respec" in colibri_run(old, "--prompt", "x").stderr
    assert respec(old, dry_run=True).new_tables and section(old) is None
    result = respec(old)
    assert result.changed and result.new_tables and not result.changes
    assert section(old) == tokenizer_tables(fixture())
    assert verify(old).ok
    assert not respec(old).changed
    assert colibri_run(old, "--prompt", "The", "--max-tokens", 2).returncode == 0


def test_a_gguf_container_of_an_earlier_version_talks(tmp_path: Path) -> None:
    source = gguf_model(tmp_path / "m.gguf", bpe_metadata("gpt-2"))
    old = without_tables(source, tmp_path / "old.colibri")
    with colibri_tools.open(old) as container:
        assert container.spec["tokenizer"] == "none"
    expected = tokenize(source, "The file").tokens
    assert run(old, prompt="The file", max_tokens=0).prompt_tokens == len(expected)
    assert respec(old).new_tables
    assert section(old) is not None
    with colibri_tools.open(old) as container:
        assert container.spec["tokenizer"] == "none"  # the carried files stay as they are
    assert verify(old, against=source).ok
    assert NativeTokenizer.open(old).encode("The file") == expected


def test_tables_that_do_not_fit_are_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = without_tables(FIXTURE, tmp_path / "old.colibri")
    big = tokenizer_tables(fixture()) + bytes(2 << 20)
    monkeypatch.setattr("colibri_tools.text.derive.tokenizer_tables", lambda document: big)
    result = respec(old)
    assert not result.changed and not result.new_tables
    assert any("no tokenizer tables" in warning for warning in result.warnings)


# ---------------------------------------------------------------- colibri-run --prompt


@pytest.mark.parametrize("text", ["The file system is", "Grüße, 🐦 und", "<|endoftext|>int x", " "])
def test_the_program_gives_the_text_of_python(shipped: Path, text: str) -> None:
    expected = run(shipped, prompt=text, max_tokens=24)
    done = colibri_run(shipped, "--prompt", text, "--max-tokens", 24, "--json")
    document = json.loads(done.stdout, object_pairs_hook=no_duplicates)
    assert document["tokens"] == expected.tokens
    assert document["text"] == expected.text
    assert set(document) == set(expected.to_json())
    shown = colibri_run(shipped, "--prompt", text, "--max-tokens", 24)
    assert shown.stdout == f"{expected.text}\n"


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(pairs) == len(dict(pairs)), "a key twice"
    return dict(pairs)


def test_the_document_of_ids_has_no_key_twice(shipped: Path) -> None:
    done = colibri_run(shipped, "--tokens", "5,6", "--max-tokens", 2, "--json", "--profile")
    assert "text" not in json.loads(done.stdout, object_pairs_hook=no_duplicates)


def test_a_character_in_pieces_is_shown_when_it_is_whole(from_gguf: tuple[Path, Path]) -> None:
    """Random weights: most tokens are parts of characters."""
    for seed in range(3):
        options = {"max_tokens": 60, "temperature": 5.0, "seed": seed, "ignore_eos": True}
        expected = run(from_gguf[1], prompt="a", **options)  # type: ignore[arg-type]
        done = colibri_run(
            from_gguf[1], "--prompt", "a", "--max-tokens", 60, "--temperature", 5.0, "--seed", seed,
            "--ignore-eos", "--json",
        )  # fmt: skip
        document = json.loads(done.stdout)
        assert document["tokens"] == expected.tokens
        if b"spm" not in os.fsencode(from_gguf[1]):  # there, bytes that are no character differ
            assert document["text"] == expected.text


def test_a_prompt_that_is_no_utf8_is_said(shipped: Path) -> None:
    expected = run(shipped, prompt="a\ufffdb", max_tokens=3)
    done = colibri_run(shipped, "--prompt", "a\udcffb", "--max-tokens", 3, "--json")
    document = json.loads(done.stdout)
    assert document["tokens"] == expected.tokens
    assert "the prompt is not UTF-8: U+FFFD stands for what is none" in document["warnings"]
    shown = colibri_run(shipped, "--prompt", "a\udcffb", "--max-tokens", 3)
    assert "warning: the prompt is not UTF-8" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "a", "--tokens", "1"], "one of --prompt and --tokens"),
        ([], "--prompt or --tokens is missing"),
        (["--prompt", ""], "--prompt: expected a value"),
    ],
)
def test_wrong_prompts_are_usage_errors(shipped: Path, arguments: list[str], words: str) -> None:
    done = colibri_run(shipped, *arguments)
    assert done.returncode == 2 and words in done.stderr


# ---------------------------------------------------------------- a static program alone


def static_program(compiler: str, folder: Path) -> None:
    """As docs/runtime.md says, in less time."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    source = folder / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    probe = [compiler, "-static", str(source), "-o", str(folder / "main")]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("no static libraries here")
    (folder / "main").unlink()
    source.unlink()
    variables = [f"CC={compiler}", "STATIC_OPT=-O1", f"STATIC_OUT={folder / 'colibri-run'}"]
    call = ["make", "-C", str(ROOT), "static", *variables]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
@pytest.mark.parametrize("compiler", ["cc", "musl-gcc"])
def test_a_static_program_needs_nothing_but_the_container(compiler: str, shipped: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        static_program(compiler, root)
        shutil.copy(shipped, root / "model.colibri")
        assert sorted(path.name for path in root.iterdir()) == ["colibri-run", "model.colibri"]
        for io in ("pread", "io_uring"):
            command = [
                "chroot",
                str(root),
                "/colibri-run",
                "/model.colibri",
                "--prompt",
                "The file",
            ]
            command += ["--json", "--max-tokens", "12", "--io", io]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            expected = run(shipped, prompt="The file", max_tokens=12, io=io)
            found = json.loads(done.stdout)
            assert found["text"] == expected.text
            assert found["io"]["backend"] == expected.io["backend"]


# ---------------------------------------------------------------- verify


def test_verify_names_tables_that_cannot_be_used(shipped: Path, tmp_path: Path) -> None:
    draft = Draft(bytearray(shipped.read_bytes()))
    tables = draft.section_bytes(SectionKind.TOKENIZER)
    tables[12] ^= 1  # of the number of tokens
    path = tmp_path / "broken.colibri"
    path.write_bytes(draft.seal().data)
    report = verify(path)
    assert [error.message for error in report.errors] == [
        "tokenizer tables: its size is not what its counts say"
    ]
    done = colibri_run(path, "--prompt", "a")
    assert done.returncode == 1 and "tokenizer tables" in done.stderr
