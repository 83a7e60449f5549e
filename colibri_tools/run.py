"""The `run` command as a function: a prompt in, generated text and measurements out."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

import numpy as np

from colibri_tools.chat import CHAT_MAX_TOKENS, Conversation
from colibri_tools.container import open as open_container
from colibri_tools.engine import (
    DEFAULT_BATCH_SIZE,
    Engine,
    Logits,
    Memory,
    Sampler,
    Sampling,
    Stats,
    advise,
    check_ids,
    estimate,
    probe_drive,
    wants_probe,
)
from colibri_tools.errors import FormatError, JobError, UsageError, quote
from colibri_tools.output import counted, format_bytes
from colibri_tools.run_report import Counters, Plan, Profile
from colibri_tools.text.derive import TOKENIZER_BLOB
from colibri_tools.text.loading import TokenizerMissing, load_tokenizer, without_surrogates
from colibri_tools.text.stop import StopTexts

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "Generation",
    "RunResult",
    "TextStream",
    "container_tokenizer",
    "context_limit",
    "make_sampling",
    "parse_tokens",
    "run",
]

DEFAULT_MAX_TOKENS = 128
_NO_BUDGET = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `run` made and what it took.

    `text` is the generated text without special tokens, None when the container has no tokenizer;
    `tokens` are the generated ids, with the end-of-text id that stopped it. `stop_reason` is
    "eos", "stop", "max-tokens", "context" or "interrupted".
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    peak_rss_bytes: int
    io: dict[str, Any]
    stop_reason: str
    seed: int | None
    stats: Stats
    memory: Memory
    plan: Plan
    precision: str = "fast"
    kv_type: str = "f16"
    profile: Profile | None = None
    notes: tuple[str, ...] = field(default=())
    """What came up while it ran; what was known before is in `plan`, and so for `warnings`."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it; the command's exit code is then 130."""
        return self.stop_reason == "interrupted"

    def to_json(self) -> dict[str, Any]:
        """The document of `colibri run --json`."""
        document: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": self.tokens_per_second,
            "peak_rss_bytes": self.peak_rss_bytes,
            "memory": self.plan.to_json(),
            "io": self.io,
            "stop_reason": self.stop_reason,
            "precision": self.precision,
            "kv_type": self.kv_type,
            "seed": self.seed,
            "notes": [*self.plan.notes, *self.notes],
            "warnings": [*self.plan.warnings, *self.warnings],
        }
        if self.profile:
            document["profile"] = self.profile.to_json()
        return document

    def render(self, console: Console) -> None:
        """Print the measurements; the text itself was streamed while it was made."""
        rate = f" ({self.tokens_per_second:.1f} tokens/s)" if self.generated_tokens > 1 else ""
        console.print(
            f"prompt: {counted(self.prompt_tokens, 'token')} in {self.prefill_seconds:.2f} s\n"
            f"generated: {counted(self.generated_tokens, 'token')} in "
            f"{self.decode_seconds:.2f} s{rate}, stopped: {self.stop_reason}",
            soft_wrap=True,
        )
        io, hit_rate = self.io, self.io["hit_rate"]
        console.print(
            f"experts: cache {format_bytes(self.memory.cache_bytes)} of "
            f"{format_bytes(self.memory.all_experts_bytes)}, "
            f"{'nothing asked' if hit_rate is None else f'{hit_rate:.1%} found in it'};\n"
            f"  {io['backend']} {'direct' if io['direct'] else 'buffered'}, {io['reads']} reads, "
            f"{format_bytes(io['bytes_read'])}, waited {io['wait_seconds']:.2f} s",
            soft_wrap=True,
        )
        console.print(f"memory: peak {format_bytes(self.peak_rss_bytes)}", soft_wrap=True)
        if self.profile:
            self.profile.render(console)


def run(
    path: str | os.PathLike[str],
    *,
    prompt: str | None = None,
    prompt_file: str | os.PathLike[str] | None = None,
    tokens: Sequence[int] | str | None = None,
    max_tokens: int | None = None,
    ctx: int | None = None,
    threads: int = 0,
    batch_size: int | None = None,
    expert_cache: int | None = None,
    check: str = "first",
    ram_budget: int | None = None,
    preload: int = 0,
    mirror: str | os.PathLike[str] | None = None,
    io: str = "auto",
    io_threads: int = 0,
    prefetch_depth: int = 0,
    pin_threads: bool = False,
    precision: str | None = None,
    kv_type: str | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    ignore_eos: bool = False,
    logits: str | os.PathLike[str] | None = None,
    profile: bool = False,
    chat: bool = False,
    system: str | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> RunResult:
    """Evaluate a prompt and generate up to `max_tokens` tokens; 0 evaluates the prompt only.

    Exactly one of `prompt`, `prompt_file` ("-" is standard input) and `tokens` (ids, or a string
    "1,2,3") is the prompt; text is encoded as the container's tokenizer.json does it, with its
    beginning-of-text token. With `chat` it is a message, put into the container's chat template
    behind a `system` one. Any of the texts `stop` ends the generated text and is not part of it.
    `max_tokens` None is 128, in a chat 1024. `on_text` is called with each piece of
    generated text as it comes (ids and a space when there is no tokenizer). `logits` names a .npy
    file for the prompt's logits, float32 [positions, vocab]. `precision` None is "fast", but
    "exact" with `logits`. `ctx` None makes room for the prompt
    and `max_tokens`. What bounds memory and how experts are read is as `Engine` has it. `on_plan`
    is called before the model is opened. With `profile`, and where tokens will miss much in the
    cache, the drive is probed for 0.3 s before. Once the model is open, Ctrl-C does not raise: the
    result holds what was made until then.

    Raises UsageError for options that contradict each other or the model, FormatError and JobError.
    """
    sampling = make_sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    check_text_options(chat=chat, system=system, stop=stop, tokens=tokens)
    if max_tokens is None:
        max_tokens = CHAT_MAX_TOKENS if chat else DEFAULT_MAX_TOKENS
    if max_tokens < 0:
        raise UsageError(f"max-tokens: expected 0 or more, found {max_tokens}")
    _check_logits_path(path, logits)
    given = _read_prompt(path, _text_prompt(prompt, prompt_file, tokens), tokens, chat, system)
    if stop and given.tokenizer is None:
        raise UsageError(f"--stop is about text, and {os.fspath(path)} has no tokenizer")
    options = _EngineOptions(
        threads=threads,
        batch_size=batch_size,
        expert_cache=expert_cache,
        check=check,
        ram_budget=ram_budget,
        preload=preload,
        mirror=mirror,
        io=io,
        io_threads=io_threads,
        prefetch_depth=prefetch_depth,
        pin_threads=pin_threads,
        precision=precision or ("fast" if logits is None else "exact"),
        kv_type=kv_type,
        logits_rows=0,
    )
    ctx = _choose_ctx(path, len(given.ids), max_tokens, ctx, options)
    if logits is not None:
        options["logits_rows"] = min(ctx, batch_size or DEFAULT_BATCH_SIZE)
    memory = estimate(path, ctx=ctx, **options)
    check_ids(given.ids, memory.vocab_size)
    sampler = Sampler(memory, sampling)
    plan = _plan(path, memory, io_threads, profile)
    if on_plan:
        on_plan(plan)
    with Engine(path, ctx=ctx, **options) as engine:
        generation = Generation(
            engine, sampler, given.tokenizer, given.ids, on_text, stops=stop, ends=given.ends
        )
        generation.run(max_tokens, ignore_eos, logits)
        return generation.result(sampling, plan, profile, given.warnings)


def _plan(path: str | os.PathLike[str], memory: Memory, io_threads: int, profile: bool) -> Plan:
    drive = None
    if profile or wants_probe(memory):
        drive = probe_drive(path, io_threads=io_threads)
    return Plan(memory, drive, tuple(advise(memory, drive)))


def parse_tokens(tokens: Sequence[int] | str) -> list[int]:
    """Return ids from a list or from text like "1,2,3". Raises UsageError."""
    if not isinstance(tokens, str):
        return list(tokens)
    parts = [part.strip() for part in tokens.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise UsageError(f"--tokens: expected ids separated by commas, found {quote(part)}")
    return [int(part) for part in parts]


class TextStream:
    """Turns ids into text piece by piece, never cutting a character.

    A tokenizer's text of a token may depend on those before it, and a token may be part of a
    character. So a few tokens are decoded again with every new one, and what ends in an
    unfinished character is held back until it is complete, or until `finish`.
    """

    _CONTEXT = 6
    """Prompt tokens decoded along, so that a leading space is not lost."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-self._CONTEXT :])
        self._shown = len(self._ids)
        self._start = 0

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete now."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return what was held back."""
        return self._take(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._start, self._shown = self._shown, len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class _EngineOptions(TypedDict):
    threads: int
    batch_size: int | None
    expert_cache: int | None
    check: str
    ram_budget: int | None
    preload: int
    mirror: str | os.PathLike[str] | None
    io: str
    io_threads: int
    prefetch_depth: int
    pin_threads: bool
    precision: str
    kv_type: str | None
    logits_rows: int


class Generation:
    """One run: prefill, then tokens one by one until something stops it.

    `stops` are texts, `ends` ids that end it besides the model's own. The engine has the first
    `reused` ids of the prompt already.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        prompt: list[int],
        on_text: Callable[[str], None] | None,
        *,
        stops: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
        reused: int = 0,
    ) -> None:
        self.engine, self.sampler, self.prompt = engine, sampler, prompt
        self.stops, self.ends, self.reused = StopTexts(stops), ends, reused
        self.stream = TextStream(tokenizer, prompt) if tokenizer else None
        self.on_text = on_text or (lambda text: None)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.prefill_seconds = self.decode_seconds = 0.0
        self.token_seconds: list[float] = []
        self.after_prefill: Counters | None = None
        self.stop_reason = "max-tokens"

    def run(self, max_tokens: int, ignore_eos: bool, logits: str | os.PathLike[str] | None) -> None:
        start = time.perf_counter()
        decoding = None
        try:
            last = self.prefill(logits)
            self.after_prefill = self.counters()
            decoding = time.perf_counter()
            self.sampler.accept(self.prompt)
            self.stop_reason = self.decode(last, max_tokens, ignore_eos)
        except KeyboardInterrupt:
            self.stop_reason = "interrupted"
        end = time.perf_counter()
        self.prefill_seconds = (decoding or end) - start
        self.decode_seconds = end - (decoding or end)
        if self.stream and not self.stops.hit:
            self.show(self.stops.push(self.stream.finish()))
            self.show(self.stops.finish())

    def prefill(self, logits: str | os.PathLike[str] | None) -> Logits:
        """Evaluate the prompt; return the logits of its last position."""
        if logits is None:
            whole: Logits = self.engine.eval(self.prompt[self.reused :])[-1]
            return whole
        n, step = len(self.prompt), self.engine.info.batch_size
        with _npy_rows(logits, n, self.engine.info.vocab_size) as file:
            for start in range(0, n, step):
                part = self.prompt[start : start + step]
                rows = self.engine.eval(part, len(part))
                file.write(rows.astype("<f4", copy=False).data)
        last: Logits = rows[-1]
        return last

    def decode(self, logits: Logits, max_tokens: int, ignore_eos: bool) -> str:
        """Generate tokens; return what stopped it."""
        while len(self.tokens) < max_tokens:
            token = self.sampler.draw(logits)
            self.sampler.accept([token])
            self.tokens.append(token)
            ended = not ignore_eos and (self.engine.is_eos(token) or token in self.ends)
            if self.stream is None:
                self.show(f"{token} ")
            elif not ended:
                self.show(self.stops.push(self.stream.push(token)))
            if ended or self.stops.hit:
                return "eos" if ended else "stop"
            if len(self.tokens) == max_tokens:
                break
            if self.engine.position == self.engine.info.ctx:
                return "context"
            start = time.perf_counter()
            logits = self.engine.eval([token])[-1]
            self.token_seconds.append(time.perf_counter() - start)
        return "max-tokens"

    def counters(self) -> Counters:
        return Counters(self.engine.stats(), tuple(self.engine.layer_stats()))

    def show(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.on_text(text)

    def profile(self, plan: Plan) -> Profile:
        now = self.counters()
        return Profile.of(self.after_prefill or now, now, self.token_seconds, plan.drive)

    def result(
        self, sampling: Sampling, plan: Plan, profile: bool, warnings: Sequence[str] = ()
    ) -> RunResult:
        """Return what was made, and what it took."""
        steps = max(len(self.tokens) - 1, 0)  # the first token comes out of the prompt
        stats = self.engine.stats()
        notes = []
        if not stats.io_direct:
            warnings = [*warnings, f"reads go through the page cache: {stats.io_reason}"]
        elif stats.io_reason:  # another backend than the one that was asked for
            warnings = [*warnings, stats.io_reason]
        if self.stop_reason == "context":
            notes.append(f"the context of {self.engine.info.ctx} positions is full; see --ctx")
        return RunResult(
            text="".join(self.pieces) if self.stream else None,
            tokens=self.tokens,
            prompt_tokens=len(self.prompt),
            generated_tokens=len(self.tokens),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            tokens_per_second=steps / self.decode_seconds if self.decode_seconds else 0.0,
            peak_rss_bytes=_peak_rss_bytes(),
            io=stats.io(),
            stop_reason=self.stop_reason,
            seed=sampling.seed if sampling.temperature else None,
            stats=stats,
            memory=self.engine.memory,
            plan=plan,
            precision=self.engine.info.precision,
            kv_type=self.engine.info.kv_type,
            profile=self.profile(plan) if profile else None,
            notes=tuple(notes),
            warnings=tuple(warnings),
        )


def _peak_rss_bytes() -> int:
    # not getrusage: its maximum includes what the parent process had before exec
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def make_sampling(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
    seed: int | None,
) -> Sampling:
    """Return how tokens are drawn. Raises UsageError for options that do nothing."""
    drawing = {"top-k": top_k, "top-p": top_p, "min-p": min_p, "seed": seed}
    for name, value in drawing.items():
        if value is not None and temperature == 0:
            raise UsageError(f"--{name} is about drawing tokens: it needs --temperature above 0")
    return Sampling(
        temperature=temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        min_p=min_p or 0.0,
        repetition_penalty=repetition_penalty,
        seed=secrets.randbits(32) if seed is None else seed,
    )


def _check_logits_path(path: str | os.PathLike[str], logits: str | os.PathLike[str] | None) -> None:
    if logits is None:
        return
    if Path(logits).exists() and Path(path).exists() and Path(path).samefile(logits):
        raise UsageError(f"--logits: {quote(logits)} is the model itself")
    if not Path(logits).parent.is_dir():
        raise UsageError(f"--logits: there is no folder {quote(Path(logits).parent)}")


def _text_prompt(
    prompt: str | None,
    prompt_file: str | os.PathLike[str] | None,
    tokens: Sequence[int] | str | None,
) -> str | None:
    """Return the prompt as text, None for ids. Raises UsageError unless exactly one is given."""
    if sum(source is not None for source in (prompt, prompt_file, tokens)) != 1:
        raise UsageError("give exactly one of --prompt, --prompt-file and --tokens")
    if prompt_file is None:
        return prompt
    name = os.fspath(prompt_file)
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {quote(name)}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise UsageError(f"--prompt-file {quote(name)}: {error.strerror}") from error


def container_tokenizer(path: str | os.PathLike[str], *, needed: bool) -> Tokenizer | None:
    """The container's tokenizer, None when it has none that can be used and none is needed."""
    with open_container(path) as container:
        if container.spec["tokenizer"] == "hf-json" and TOKENIZER_BLOB not in container.blobs:
            raise FormatError(
                f"{os.fspath(path)}: the spec names a tokenizer, but the blob {TOKENIZER_BLOB} "
                "is missing"
            )
        try:
            return load_tokenizer(container.blobs, path)
        except TokenizerMissing:
            if needed:
                raise
            return None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as ids, and what goes with its text: ids that end an answer, and warnings."""

    ids: list[int]
    tokenizer: Tokenizer | None
    ends: frozenset[int]
    warnings: list[str]


def _read_prompt(
    path: str | os.PathLike[str],
    text: str | None,
    tokens: Sequence[int] | str | None,
    chat: bool,
    system: str | None,
) -> _Prompt:
    """Return a text or ids as a prompt of the container at `path`; raise UsageError for none."""
    warnings = []
    if text is not None and (clean := without_surrogates(text)) != text:
        warnings.append("the prompt is not UTF-8: U+FFFD stands for what is none")
        text = clean
    ends: frozenset[int] = frozenset()
    tokenizer: Tokenizer | None
    if chat and text is not None:
        conversation = Conversation.open(path, system)
        tokenizer, ends = conversation.tokenizer, conversation.end_ids()
        ids = conversation.ask(text)
    else:
        tokenizer = container_tokenizer(path, needed=tokens is None)
        ids = _encode(tokenizer, text) if tokens is None else parse_tokens(tokens)
    if not ids:
        raise UsageError("the prompt has no tokens; give a text, or ids with --tokens")
    return _Prompt(ids, tokenizer, ends, warnings)


def _encode(tokenizer: Tokenizer | None, text: str | None) -> list[int]:
    assert tokenizer is not None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=True).ids
    return ids


def check_text_options(
    *, chat: bool, system: str | None, stop: Sequence[str], tokens: Sequence[int] | str | None
) -> None:
    """Raise UsageError for options about text that contradict each other."""
    if chat and tokens is not None:
        raise UsageError("--chat is about text: it excludes --tokens")
    if system is not None and not chat:
        raise UsageError("--system is a message of a chat: it needs --chat")
    if "" in stop:
        raise UsageError("--stop: expected a text, found an empty one")


def context_limit(path: str | os.PathLike[str], options: Mapping[str, Any]) -> int:
    """Return the positions that the model allows. Raises as opening it would."""
    # Only the model's limit is asked here: no budget is in the way.
    free = {**options, "ram_budget": _NO_BUDGET}
    return estimate(path, ctx=1, **free).context_length


def _choose_ctx(
    path: str | os.PathLike[str],
    n_prompt: int,
    max_tokens: int,
    ctx: int | None,
    options: Mapping[str, Any],
) -> int:
    if ctx is not None:  # whether the model allows it
        estimate(path, ctx=ctx, **{**options, "ram_budget": _NO_BUDGET})
    limit = context_limit(path, options)
    chosen = min(n_prompt + max_tokens, limit) if ctx is None else ctx
    if n_prompt > chosen:
        advice = "shorten it" if ctx is None or ctx == limit else f"raise --ctx (up to {limit})"
        raise UsageError(
            f"the prompt has {counted(n_prompt, 'token')}, the context {chosen} positions; {advice}"
        )
    return chosen


@contextmanager
def _npy_rows(path: str | os.PathLike[str], rows: int, cols: int) -> Iterator[BinaryIO]:
    """A file behind a .npy header of float32 [rows, cols], renamed to `path` when complete."""
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        partial.unlink(missing_ok=True)  # never write through a link that waits there
        with partial.open("xb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, cols)}
            np.lib.format.write_array_header_1_0(file, header)
            yield file
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise JobError(f"--logits {quote(path)}: {error.strerror}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
