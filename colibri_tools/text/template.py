"""The chat template that a container carries: which one counts, and how it is rendered.

A template is code of whoever made the checkpoint. It runs in jinja2's sandbox, with the functions
that transformers gives it and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from colibri_tools.errors import FormatError, JobError, UsageError, quote, quote_some
from colibri_tools.text.loading import carried_metadata

__all__ = ["ChatTemplate", "Message", "find_template"]

Message: TypeAlias = "dict[str, str]"

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_GGUF_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
_GGUF_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, where it was found, and the special tokens that it may name."""

    text: str
    name: str
    where: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """Return the text of a conversation; with `generate` up to where a reply begins.

        Raises JobError for a template that fails or refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            template = _environment().from_string(self.text)
            text: str = template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=generate,
                **self.special_tokens,
            )
            return text
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f", line {line}" if line else ""
            raise JobError(f"{self.where}: {self.name}{place}: {error}") from error
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise JobError(
                f"{self.where}: {self.name}: {type(error).__name__}: {error}; give the whole text "
                "with --prompt alone, without --chat"
            ) from error


def find_template(blobs: Mapping[str, bytes], path: str | os.PathLike[str]) -> ChatTemplate:
    """Return the template among the carried files of `path`.

    `chat_template.jinja` comes first, then `chat_template.json`, then the one of
    tokenizer_config.json (of several the one named "default"), then that of a GGUF file. Raises
    UsageError where there is none, FormatError for a file that is not what it should be.
    """
    where = os.fspath(path)
    metadata = carried_metadata(blobs, where)
    config = _object(blobs, "tokenizer_config.json", where)
    special_tokens = {**_gguf_tokens(metadata), **_hf_tokens(blobs, config, where)}
    if "chat_template.jinja" in blobs:
        text: Any = blobs["chat_template.jinja"].decode("utf-8", "replace")
        return ChatTemplate(text, "chat_template.jinja", where, special_tokens)
    places = (
        ("chat_template.json", _object(blobs, "chat_template.json", where).get("chat_template")),
        ("tokenizer_config.json", config.get("chat_template")),
        (_GGUF_TEMPLATE, metadata.get(_GGUF_TEMPLATE)),
    )
    for name, found in places:
        text = _default_of(found, f"{where}: {name}")
        if text is not None:
            return ChatTemplate(text, name, where, special_tokens)
    raise UsageError(
        f"{where}: it carries no chat template; give the whole text with --prompt, without --chat"
    )


def _default_of(found: Any, where: str) -> str | None:
    """Return a template that is a string, or the default of a list or an object of named ones."""
    if isinstance(found, list) and all(isinstance(entry, Mapping) for entry in found):
        found = {str(entry.get("name")): entry.get("template") for entry in found}
    if isinstance(found, Mapping):
        if "default" not in found:
            raise FormatError(
                f"{where}: expected a template named 'default', found {quote_some(sorted(found))}"
            )
        found = found["default"]
    if found is not None and not isinstance(found, str):
        raise FormatError(f"{where}: expected a chat template, found {quote(found)}")
    return found


def _object(blobs: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    from colibri_tools.sources.strict_json import parse_json_object

    if name not in blobs:
        return {}
    return parse_json_object(blobs[name], f"{where}/{name}", allow_constants=True)


def _hf_tokens(blobs: Mapping[str, bytes], config: Mapping[str, Any], where: str) -> dict[str, str]:
    named = {**_object(blobs, "special_tokens_map.json", where), **config}
    found = {}
    for key in _SPECIAL:
        token = named.get(f"{key}_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            found[f"{key}_token"] = text
    return found


def _gguf_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    if not isinstance(tokens, Sequence):
        return found
    for key in _SPECIAL:
        number = metadata.get(f"tokenizer.ggml.{_GGUF_NAMES.get(key, key)}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            found[f"{key}_token"] = str(tokens[number])
    return found


# ---------------------------------------------------------------- the sandbox


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, which matters in training only."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which is not what the models were trained with.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
