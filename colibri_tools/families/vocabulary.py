"""Token ids: how many there are, which one begins a text, which ones end it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colibri_tools.errors import FormatError, SourceError, quote
from colibri_tools.families.detect import Detected
from colibri_tools.families.schema import Form
from colibri_tools.sources import Source
from colibri_tools.sources.strict_json import parse_json_object

__all__ = ["Vocabulary", "read_vocabulary"]

_GGUF_EOS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
_GGUF_BOS = "tokenizer.ggml.bos_token_id"


@dataclass(slots=True)
class Vocabulary:
    """The spec's keys about tokens. `n_tokens` is the number of embedding rows when unknown."""

    tokenizer: str
    n_tokens: int
    bos_id: int = -1
    eos_ids: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_vocabulary(source: Source, detected: Detected, form: Form, n_rows: int) -> Vocabulary:
    """Read it from GGUF metadata or from the carried files of a Hugging Face checkpoint.

    Raises SourceError if the tokenizer makes ids that the embedding has no row for, FormatError
    for a file that is not the JSON it should be.
    """
    if source.kind == "gguf":
        return _from_gguf(source, n_rows)
    return _from_hf(source, detected, form, n_rows)


def _from_gguf(source: Source, n_rows: int) -> Vocabulary:
    metadata = source.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, Sequence) else n_rows
    _check_rows(source, "tokenizer.ggml.tokens", n_tokens, n_rows)
    # A container of a GGUF file carries the tokenizer.json that was made of its metadata.
    carried = "tokenizer.json" in source.blobs
    vocabulary = Vocabulary("hf-json" if carried else "none", n_tokens)
    for key in _GGUF_EOS:
        _add_eos(vocabulary, metadata.get(key), n_rows, key)
    _set_bos(vocabulary, [metadata.get(_GGUF_BOS)], n_rows)
    return vocabulary


def _from_hf(source: Source, detected: Detected, form: Form, n_rows: int) -> Vocabulary:
    def load(name: str) -> dict[str, Any]:
        data = source.blobs.get(name)
        if data is None:
            return {}
        return parse_json_object(data, f"{source.path}/{name}", allow_constants=True)

    tokenizer = load("tokenizer.json")
    ids = _tokenizer_ids(tokenizer, f"{source.path}/tokenizer.json") if tokenizer else {}
    n_tokens = 1 + max(ids.values(), default=n_rows - 1)
    _check_rows(source, "tokenizer.json", n_tokens, n_rows)
    vocabulary = Vocabulary("hf-json" if tokenizer else "none", n_tokens)
    generation = load("generation_config.json")
    configured, bos = _configured(detected, form)
    _add_eos(vocabulary, generation.get("eos_token_id"), n_rows, "generation_config.json")
    _add_eos(vocabulary, configured, n_rows, "config.json")
    named = load("tokenizer_config.json").get("eos_token")
    named = named.get("content") if isinstance(named, Mapping) else named
    if isinstance(named, str) and named in ids:
        _add_eos(vocabulary, ids[named], n_rows, "tokenizer_config.json")
    _set_bos(vocabulary, [generation.get("bos_token_id"), bos], n_rows)
    return vocabulary


def _configured(detected: Detected, form: Form) -> tuple[Any, Any]:
    """Return config.json's eos and bos; a key that is there with null means none."""
    eos, bos = form.defaults["eos_ids"], form.defaults["bos_id"]
    for level in reversed(detected.levels):
        eos = level.get("eos_token_id", eos)
        bos = level.get("bos_token_id", bos)
    return eos, bos


def _tokenizer_ids(tokenizer: Mapping[str, Any], where: str) -> dict[str, int]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    ids: dict[Any, Any] = {}
    if isinstance(vocab, Mapping):
        ids |= vocab
    elif isinstance(vocab, list):  # Unigram: [token, score] in the order of ids
        ids |= {str(entry[0]): i for i, entry in enumerate(vocab) if isinstance(entry, list)}
    else:
        raise FormatError(f"{where}: expected model.vocab to be an object or a list")
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, Mapping) for token in added):
        raise FormatError(f"{where}: expected added_tokens to be a list of objects")
    ids |= {token.get("content"): token.get("id") for token in added}
    for token, number in ids.items():
        if not isinstance(token, str) or isinstance(number, bool) or not isinstance(number, int):
            raise FormatError(f"{where}: token {quote(token)} has no whole number as its id")
        if not 0 <= number < 1 << 31:
            raise FormatError(f"{where}: token {quote(token)} has id {number}")
    return ids


def _check_rows(source: Source, where: str, n_tokens: int, n_rows: int) -> None:
    if n_tokens > n_rows:
        raise SourceError(
            f"{source.path}: {where} makes {n_tokens} token ids, but the embedding has only "
            f"{n_rows} rows; tokenizer and weights are not of one model"
        )


def _add_eos(vocabulary: Vocabulary, value: Any, n_rows: int, where: str) -> None:
    found = value if isinstance(value, (list, tuple)) else [value]
    for number in found:
        if number is None:
            continue
        if not _is_id(number, n_rows):
            vocabulary.warnings.append(
                f"{where}: eos token {quote(number)} is not an id below {n_rows} and is ignored"
            )
        elif number not in vocabulary.eos_ids:
            vocabulary.eos_ids.append(number)


def _set_bos(vocabulary: Vocabulary, candidates: Iterable[Any], n_rows: int) -> None:
    usable = (number for number in candidates if _is_id(number, n_rows))
    vocabulary.bos_id = next(usable, -1)


def _is_id(number: Any, n_rows: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < n_rows
