"""Talking with a container in its own chat template: `run --chat`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from colibri_tools.container import open as open_container
from colibri_tools.errors import JobError, UsageError
from colibri_tools.text.loading import decode_text, load_tokenizer
from colibri_tools.text.template import ChatTemplate, Message, find_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from colibri_tools.engine import Engine, Sampling
    from colibri_tools.run import Generation

__all__ = ["CHAT_MAX_TOKENS", "Conversation", "chat", "interactive"]

CHAT_MAX_TOKENS = 1024
"""The longest reply, unless --max-tokens says otherwise."""

RESET = "/reset"

_PROBE = "PROBE"


@dataclass
class Conversation:
    """The messages so far, and the template and tokenizer that make ids of them."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | os.PathLike[str], system: str | None = None) -> Conversation:
        """Return an empty conversation with the container at `path`.

        Raises UsageError if it carries no template or no tokenizer.
        """
        with open_container(path) as container:
            blobs: Mapping[str, bytes] = dict(container.blobs)
        return cls(find_template(blobs, path), load_tokenizer(blobs, path), system)

    def reset(self) -> None:
        """Forget all messages; the system message stays."""
        self.messages.clear()

    def ask(self, text: str) -> list[int]:
        """Add a message of the user; return the ids of everything, up to where a reply begins.

        If the template refuses it, the message is not added. Raises JobError.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            return self._encode(self.template.render(self._all()))
        except BaseException:
            self.messages.pop()
            raise

    def reply(self, text: str) -> None:
        """Add what the model answered."""
        self.messages.append({"role": "assistant", "content": text})

    def end_ids(self) -> frozenset[int]:
        """Return the id that the template writes behind a reply, if it is a special token.

        A base model's end of text is often not what ends a turn.
        """
        messages = [
            {"role": "user", "content": _PROBE},
            {"role": "assistant", "content": _PROBE},
        ]
        try:
            text = self.template.render(messages, generate=False)
        except JobError:
            return frozenset()
        tail = self._encode(text[text.rfind(_PROBE) + len(_PROBE) :]) if _PROBE in text else []
        added = self.tokenizer.get_added_tokens_decoder()
        special = bool(tail) and tail[0] in added and added[tail[0]].special
        return frozenset(tail[:1]) if special else frozenset()

    def _all(self) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages]

    def _encode(self, text: str) -> list[int]:
        # The template writes BOS itself.
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def chat(
    path: str | os.PathLike[str],
    *,
    system: str | None = None,
    stop: Sequence[str] = (),
    max_tokens: int | None = None,
    ignore_eos: bool = False,
    sampling: Sampling,
    read: Callable[[], str | None] | None = None,
    write: Callable[[str], None],
    note: Callable[[str], None],
    **engine_options: Any,
) -> None:
    """Hold a conversation until the input ends.

    `read` returns a line without its end, None at the end; by default it is standard input.
    "/reset" starts anew. `write` gets replies as they are made, `note` remarks. What earlier turns
    put into the engine is used again. Ctrl-C ends a reply, not the conversation.
    """
    from colibri_tools.engine import Engine

    conversation = Conversation.open(path, system)
    read = read or _reader(note)
    with Engine(path, **engine_options) as engine, _own_interrupts():
        talk = _Talk(
            engine,
            conversation,
            sampling,
            tuple(stop),
            frozenset() if ignore_eos else conversation.end_ids(),
            CHAT_MAX_TOKENS if max_tokens is None else max_tokens,
            ignore_eos,
            write,
            note,
        )
        while (line := _read_line(read, write)) is not None:
            if line == RESET:
                conversation.reset()
                note("a new conversation")
            elif line.strip():
                talk.answer(line)


@dataclass
class _Talk:
    """A conversation and the engine that answers. `known` are the ids that the engine has."""

    engine: Engine
    conversation: Conversation
    sampling: Sampling
    stops: tuple[str, ...]
    ends: frozenset[int]
    max_tokens: int
    ignore_eos: bool
    write: Callable[[str], None]
    note: Callable[[str], None]
    known: list[int] = field(default_factory=list)

    def answer(self, line: str) -> None:
        """Write the reply to a line, and remember both."""
        try:
            ids = self.conversation.ask(line)
        except JobError as error:
            self.note(error.message)
            return
        ctx = self.engine.info.ctx
        if len(ids) >= ctx:
            self.conversation.messages.pop()
            self.note(
                f"the conversation has {len(ids)} tokens, the context {ctx} positions; "
                f"begin anew with {RESET}, or raise --ctx"
            )
            return
        generation = self._generate(ids)
        self.conversation.reply("".join(generation.pieces))
        self.write("\n")
        _remark(generation.stop_reason, self.note)

    def _generate(self, ids: list[int]) -> Generation:
        from colibri_tools.engine import Sampler
        from colibri_tools.run import Generation

        shared = min(_shared(self.known, ids), self.engine.position)
        self.engine.rewind(shared)
        generation = Generation(
            self.engine,
            Sampler(self.engine.info, self.sampling),
            self.conversation.tokenizer,
            ids,
            self.write,
            stops=self.stops,
            ends=self.ends,
            reused=shared,
        )
        generation.run(self.max_tokens, self.ignore_eos, None)
        self.known = [*ids, *generation.tokens][: self.engine.position]
        return generation


def _shared(known: Sequence[int], ids: Sequence[int]) -> int:
    """How many ids the engine has already; the last one is evaluated in any case."""
    pairs = zip(known, ids[:-1], strict=False)
    return next(
        (i for i, (old, new) in enumerate(pairs) if old != new), min(len(known), len(ids) - 1)
    )


def _remark(stop_reason: str, note: Callable[[str], None]) -> None:
    remarks = {
        "max-tokens": "the reply is cut off; --max-tokens makes it longer",
        "context": f"the context is full; begin anew with {RESET}, or raise --ctx",
        "interrupted": "the reply is stopped",
    }
    if stop_reason in remarks:
        note(remarks[stop_reason])


def _read_line(read: Callable[[], str | None], write: Callable[[str], None]) -> str | None:
    while True:
        try:
            return read()
        except KeyboardInterrupt:  # the line is given up, as in a shell
            write("\n")


def _reader(note: Callable[[str], None]) -> Callable[[], str | None]:
    """Lines of standard input: with a prompt and editing on a terminal, bare otherwise."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        note(f"{RESET} begins anew, Ctrl-C stops a reply, Ctrl-D leaves")
        return _read_terminal

    def read() -> str | None:
        raw = sys.stdin.buffer.readline()
        if not raw:
            return None
        text, bad = decode_text(raw.removesuffix(b"\n").removesuffix(b"\r"))
        if bad is not None:
            note(f"the input is not UTF-8 at byte {bad} of the line; U+FFFD stands for it")
        return text

    return read


def _read_terminal() -> str | None:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines with it
    try:
        return decode_text(input("> ").encode("utf-8", "surrogateescape"))[0]
    except EOFError:
        sys.stdout.write("\n")
        return None


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Every Ctrl-C raises KeyboardInterrupt here; elsewhere a second one ends the program."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_NOT_IN_A_CONVERSATION = ("prompt", "prompt_file", "tokens", "logits", "profile")


def interactive(
    path: str | os.PathLike[str],
    *,
    write: Callable[[str], None],
    note: Callable[[str], None],
    **options: Any,
) -> None:
    """Hold a conversation with the options of `run`. Raises UsageError for those it cannot have."""
    from colibri_tools.run import make_sampling

    for name in _NOT_IN_A_CONVERSATION:
        if options.pop(name, None):
            raise UsageError(f"--{name} needs a single answer: give --prompt with --chat")
    options.pop("chat", None)
    if "" in options.get("stop", ()):
        raise UsageError("--stop: expected a text, found an empty one")
    options["precision"] = options.get("precision") or "fast"
    drawing = {name: options.pop(name, None) for name in _DRAWING}
    chat(path, sampling=make_sampling(**drawing), write=write, note=note, **options)


_DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
