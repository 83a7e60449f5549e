"""The engine, from Python: a thin layer over `runtime/include/colibri.h`.

Evaluation releases the GIL. Several tokens are evaluated in a thread of the model, so that Ctrl-C
stops them between layers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from colibri_tools.errors import ColibriError, FormatError, JobError, UsageError, quote
from colibri_tools.native import ffi, lib

__all__ = [
    "CHECK_MODES",
    "DEFAULT_BATCH_SIZE",
    "IO_MODES",
    "KV_TYPES",
    "PRECISIONS",
    "PRELOAD_ALL",
    "Advice",
    "Drive",
    "Engine",
    "EngineInfo",
    "LayerStats",
    "Logits",
    "Memory",
    "Observation",
    "Sampler",
    "Sampling",
    "Stats",
    "advise",
    "check_ids",
    "estimate",
    "probe_drive",
    "wants_probe",
]

CHECK_MODES = ("always", "first", "never")
IO_MODES = ("auto", "pread", "io_uring", "mmap", "buffered")
PRECISIONS = ("exact", "fast")
KV_TYPES = ("f32", "f16", "q8_0", "q4_0")

Logits: TypeAlias = npt.NDArray[np.float32]
Path: TypeAlias = "str | os.PathLike[str]"

_SIZES = ("expert-cache", "ram-budget", "preload")
"""Options in bytes."""

DEFAULT_BATCH_SIZE = int(lib.COLIBRI_DEFAULT_BATCH_SIZE)

PRELOAD_ALL = (1 << 64) - 1
"""As much as the expert cache holds."""

_POLL_SECONDS = 0.1
"""How long Ctrl-C may go unnoticed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What opening a container takes, in bytes, and what bounds it.

    `ctx` is in positions, `context_length` the model's own limit of them. `total_bytes` is what
    the C side is planned to be (Python and its imports come on top), `min_total_bytes` the least
    budget that works, `token_bytes` the experts that one token uses.
    """

    ctx: int
    context_length: int
    vocab_size: int
    n_tokens: int
    metadata_bytes: int
    resident_bytes: int
    kv_bytes: int
    cache_bytes: int
    min_cache_bytes: int
    token_bytes: int
    all_experts_bytes: int
    scratch_bytes: int
    other_bytes: int
    total_bytes: int
    min_total_bytes: int
    budget_bytes: int
    reserve_bytes: int
    available_bytes: int
    available_limit: str


@dataclass(frozen=True, slots=True)
class Drive:
    """What a drive gave to random reads of whole blocks, `depth` at once.

    `direct` False: they went through the page cache, and memory may have answered.
    """

    bytes_per_second: float
    bytes: int
    reads: int
    seconds: float
    block_bytes: int
    depth: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """Something to know about a plan before it runs; a warning when it will hurt."""

    warning: bool
    text: str


@dataclass(frozen=True, slots=True)
class LayerStats:
    """The part of `Stats` that belongs to one layer."""

    attention_seconds: float
    router_seconds: float
    experts_seconds: float
    io_wait_seconds: float
    expert_requests: int
    expert_hits: int
    reads: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An open model: sizes, and the options in force."""

    n_layers: int
    n_moe_layers: int
    hidden_size: int
    vocab_size: int
    n_tokens: int
    top_k: int
    max_experts: int
    context_length: int
    ctx: int
    batch_size: int
    n_sequences: int
    n_threads: int
    bos_id: int
    eos_ids: tuple[int, ...]
    kernels: str
    precision: str
    kv_type: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since opening, or since the last `Engine.reset_stats`."""

    tokens: int
    evals: int
    seconds: float
    attention_seconds: float
    router_seconds: float
    experts_seconds: float
    io_wait_seconds: float
    head_seconds: float
    expert_requests: int
    expert_hits: int
    reads: int
    bytes_read: int
    io_backend: str
    io_direct: bool
    io_reason: str
    prefetch_guessed: int
    prefetch_right: int
    prefetch_chosen: int
    prefetch_reads: int
    prefetch_useful_bytes: int
    prefetch_wasted_bytes: int
    prefetch_paused: int
    mirror_bytes: int
    mirror_failures: int

    @property
    def hit_rate(self) -> float | None:
        """Share of requested experts that were in the cache; None before any request."""
        return self.expert_hits / self.expert_requests if self.expert_requests else None

    @property
    def prefetch_recall(self) -> float | None:
        """Share of chosen experts that a guess had named; None where nothing was guessed."""
        return self.prefetch_right / self.prefetch_chosen if self.prefetch_chosen else None

    def prefetch(self) -> dict[str, Any] | None:
        """The `prefetch` object of `colibri run --profile --json`; None without a guess."""
        names = ("guessed", "right", "chosen", "reads", "useful_bytes", "wasted_bytes", "paused")
        counts = {name: getattr(self, f"prefetch_{name}") for name in names}
        return {"recall": self.prefetch_recall, **counts} if self.prefetch_guessed else None

    def io(self) -> dict[str, Any]:
        """The `io` object of `colibri run --json`."""
        return {
            "backend": self.io_backend,
            "direct": self.io_direct,
            "bytes_read": self.bytes_read,
            "reads": self.reads,
            "hit_rate": self.hit_rate,
            "wait_seconds": self.io_wait_seconds,
        }


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine writes down of routing while it evaluates, in arrays that are overwritten.

    Of sequence s and position p, choices are `experts` uint32 and `weights` float32
    [MoE layers, sequences, positions, top_k], best first; `early` uint32 is what each layer's
    router makes of the residual stream one MoE layer before (2^32 - 1 in the first one). Squares
    of what experts multiply are *added* to `inputs` float64 [MoE layers, experts, hidden] (gate
    and up) and `hidden` [MoE layers, experts, width of the widest] (down); None: not observed.
    """

    experts: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.float32]
    early: npt.NDArray[np.uint32]
    inputs: npt.NDArray[np.float64] | None = None
    hidden: npt.NDArray[np.float64] | None = None

    @classmethod
    def make(cls, info: EngineInfo, n_positions: int, widest: int | None = None) -> Observation:
        """Return arrays for all sequences of an engine; `widest` asks for sums of squares."""
        shape = (info.n_moe_layers, info.n_sequences, n_positions, info.top_k)
        choices = (np.zeros(shape, np.uint32), np.zeros(shape, np.float32))
        early = np.zeros(shape, np.uint32)
        if widest is None:
            return cls(*choices, early)
        cells = (info.n_moe_layers, info.max_experts)
        sums = (np.zeros((*cells, info.hidden_size)), np.zeros((*cells, widest)))
        return cls(*choices, early, *sums)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn: repetition penalty, temperature, top-k, top-p, min-p, in this order.

    Temperature 0 is greedy, the lowest id among equals. `top_k` 0, `top_p` 1, `min_p` 0 and
    `repetition_penalty` 1 are off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


def estimate(path: Path, **options: Any) -> Memory:
    """Return what `Engine(path, **options)` will take, reading metadata only.

    Raises what opening would raise for the same reasons.
    """
    memory, text = ffi.new("colibri_memory *"), _error_buffer()
    status = lib.colibri_estimate(os.fsencode(path), _options(**options), memory, text, len(text))
    _check(status, text, path)
    return _memory(memory)


def probe_drive(path: Path, *, io_threads: int = 0, seconds: float = 0.3) -> Drive:
    """Measure random reads of the container's blocks for about `seconds`, `io_threads` at once.

    Raises FormatError or JobError.
    """
    drive, text = ffi.new("colibri_drive *"), _error_buffer()
    status = lib.colibri_probe_drive(
        os.fsencode(path), _bounded("io-threads", io_threads, 0), seconds, drive, text, len(text)
    )
    _check(status, text, path)
    return Drive(**_fields(Drive, drive))


def wants_probe(memory: Memory) -> bool:
    """Return whether tokens will miss so much that the drive's speed is worth a probe."""
    return bool(lib.colibri_wants_probe(_c_memory(memory)[0]))


def advise(memory: Memory, drive: Drive | None = None) -> list[Advice]:
    """Return what there is to say about a plan, warnings first."""
    c, _keep = _c_memory(memory)
    c_drive = ffi.new("colibri_drive *", asdict(drive)) if drive else ffi.NULL
    advice = ffi.new("colibri_advice[]", lib.COLIBRI_MAX_ADVICE)
    n = lib.colibri_advise(c, c_drive, advice)
    return [Advice(bool(advice[i].warning), _text(advice[i].text)) for i in range(n)]


class Engine:
    """An open container and a sequence of tokens, or several.

    `ram_budget` bounds all that `memory` counts, in bytes; None is what is available, less a
    reserve. `expert_cache` None is what the budget leaves, at most all experts; `preload` bytes
    of it are read at open. `mirror` is a file with some of the blocks once more, which are read
    from there. `io` is one of `IO_MODES`, `io_threads` 0 the default number of reads at once,
    `prefetch_depth` how many MoE layers ahead experts are guessed for. `pin_threads`
    keeps compute thread i on the i-th CPU. `logits_rows` tells the budget how many rows of
    logits the caller will hold. `ctx` None is the smaller of 4096 and the model's context length;
    each of `sequences` has as many positions. `check` is when checksums are compared: resident
    tensors and the embedding at open, expert blocks at their "first" read or "always"; or "never"
    anything but metadata. `precision` "fast" quantizes activations where weights are; "exact"
    computes in float32. `kv_type` is how keys and values are kept: one of `KV_TYPES`; None is f32
    in exact and f16 in fast precision. One thread at a time uses an engine, but for `cancel`.
    Raises FormatError, JobError or UsageError.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int = 0,
        expert_cache: int | None = None,
        ctx: int | None = None,
        batch_size: int | None = None,
        io_threads: int = 0,
        check: str = "first",
        io: str = "auto",
        prefetch_depth: int = 0,
        preload: int = 0,
        mirror: Path | None = None,
        ram_budget: int | None = None,
        logits_rows: int = 0,
        pin_threads: bool = False,
        precision: str = "exact",
        kv_type: str | None = None,
        sequences: int = 1,
    ) -> None:
        self.path = path
        self._model: Any = None
        self._target: Any = None
        self._observed: Any = None
        self.choices: npt.NDArray[np.uint32] | None = None
        """Experts of the last traced `forward`, [MoE layers, tokens, top_k], best first."""
        self.choice_weights: npt.NDArray[np.float32] | None = None
        """Their weights, of the same shape."""
        options = _options(
            threads=threads,
            expert_cache=expert_cache,
            ctx=ctx,
            batch_size=batch_size,
            io_threads=io_threads,
            check=check,
            io=io,
            prefetch_depth=prefetch_depth,
            preload=preload,
            mirror=mirror,
            ram_budget=ram_budget,
            logits_rows=logits_rows,
            pin_threads=pin_threads,
            precision=precision,
            kv_type=kv_type,
            sequences=sequences,
        )
        self._model = _open_model(path, options)
        self.info = self._read_info()
        memory = ffi.new("colibri_memory *")
        lib.colibri_get_memory(self._model, memory)
        self.memory = _memory(memory)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free everything. May be called twice."""
        if self._model is not None:
            ffi.release(self._model)
            self._model = None

    @property
    def position(self) -> int:
        """Tokens in the sequence; of several, in the first."""
        return int(lib.colibri_position(self._handle()))

    def position_of(self, sequence: int) -> int:
        """Tokens in one of several sequences."""
        return int(lib.colibri_sequence_position(self._handle(), self._sequence(sequence)))

    def forward(self, tokens: Sequence[int], *, trace: bool = False) -> Logits:
        """Evaluate a new sequence; return the logits of every position, float32 [n, vocab].

        With `trace`, `choices` and `choice_weights` hold what the routers chose.
        """
        self.rewind(0)
        n, info = len(tokens), self.info
        self.choices = self.choice_weights = None
        if not trace:
            return self.eval(tokens, n)
        choices = np.zeros((info.n_moe_layers, n, info.top_k), np.uint32)
        weights = np.zeros(choices.shape, np.float32)
        pointers = ffi.from_buffer("uint32_t[]", choices), ffi.from_buffer("float[]", weights)
        self._call(lib.colibri_trace, *pointers, n)
        try:
            logits = self.eval(tokens, n)
        finally:
            self._call(lib.colibri_trace, ffi.NULL, ffi.NULL, 0)
        self.choices, self.choice_weights = choices, weights
        return logits

    def eval(self, tokens: Sequence[int], n_logits: int = 1) -> Logits:
        """Append tokens; return the logits of the last `n_logits` positions, [n_logits, vocab].

        Raises UsageError for ids out of range or a full context, and KeyboardInterrupt; the
        sequence is then as before.
        """
        ids = self.check_tokens(tokens)
        logits = np.empty((n_logits, self.info.vocab_size), np.float32)
        # Kept here too: whatever interrupts this call, the memory outlives the evaluation.
        self._target = ffi.from_buffer("float[]", logits)
        if len(tokens) == 1:  # soon over: not worth a thread
            self._call(lib.colibri_eval, ids, 1, self._target, n_logits)
        else:
            self._eval_in_thread(ids, len(tokens), n_logits)
        return logits

    def observe(self, observation: Observation | None) -> None:
        """Write down from now on what `observation` has room for; None ends it.

        After an evaluation that failed, its sums of squares hold a part of it.
        """
        if observation is None:
            self._call(lib.colibri_observe, ffi.NULL)
            self._observed = None
            return
        o = observation
        _, n_sequences, n_positions, _ = o.experts.shape
        values = {
            "n_sequences": n_sequences,
            "n_positions": n_positions,
            "experts": ffi.from_buffer("uint32_t[]", o.experts),
            "weights": ffi.from_buffer("float[]", o.weights),
            "early": ffi.from_buffer("uint32_t[]", o.early),
        }
        if o.inputs is not None and o.hidden is not None:
            values["inputs"] = ffi.from_buffer("double[]", o.inputs)
            values["hidden"] = ffi.from_buffer("double[]", o.hidden)
            values["width"] = o.hidden.shape[2]
        self._observed = values  # the arrays outlive what writes to them
        self._call(lib.colibri_observe, ffi.new("colibri_observation *", values))

    def forward_many(self, texts: Sequence[Sequence[int]]) -> list[Logits]:
        """Evaluate a new sequence for each of `texts`, at most `sequences` of them, together.

        Returns the logits of every position of each, float32 [n, vocab], the same bits as
        `forward` gives. Every distinct expert of a batch is read once for all of them.
        """
        for sequence in range(len(texts)):
            self.rewind(0, sequence)
        return self.eval_many(dict(enumerate(texts)), [len(tokens) for tokens in texts])

    def eval_many(
        self, tokens: Mapping[int, Sequence[int]], n_logits: int | Sequence[int] = 1
    ) -> list[Logits]:
        """Append tokens to several sequences, given by number, together.

        Returns, for each in the order of `tokens`, the logits of its last `n_logits` positions,
        float32 [n_logits, vocab]. Raises as `eval` does; all sequences are then as before.
        """
        model, vocab = self._handle(), self.info.vocab_size
        counts = [n_logits] * len(tokens) if isinstance(n_logits, int) else list(n_logits)
        if len(counts) != len(tokens):
            raise UsageError(f"n_logits: expected {len(tokens)} numbers, found {len(counts)}")
        logits = np.empty((sum(counts), vocab), np.float32)
        # One array, so that the output head is read once; kept here as in `eval`.
        self._target = ffi.from_buffer("float[]", logits)
        appends, arrays, at = ffi.new("colibri_append[]", max(len(tokens), 1)), [], 0
        for append, (number, ids), count in zip(appends, tokens.items(), counts, strict=False):
            arrays.append(self._ids(ids))
            append.sequence = self._sequence(number)
            append.tokens, append.n_tokens = arrays[-1], len(ids)
            append.logits, append.n_logits = self._target + at * vocab, count
            at += count
        if sum(len(ids) for ids in tokens.values()) <= self.info.n_sequences:
            self._call(lib.colibri_eval_sequences, appends, len(tokens))
        else:
            self._in_thread(
                model, lambda: self._call(lib.colibri_eval_sequences_start, appends, len(tokens))
            )
        return np.split(logits, np.cumsum(counts)[:-1])

    def _sequence(self, number: int) -> int:
        if 0 <= number < self.info.n_sequences:
            return number
        raise UsageError(f"sequence {number}: this engine was opened for {self.info.n_sequences}")

    def _eval_in_thread(self, ids: Any, n_tokens: int, n_logits: int) -> None:
        self._in_thread(
            self._handle(),
            lambda: self._call(lib.colibri_eval_start, ids, n_tokens, self._target, n_logits),
        )

    def _in_thread(self, model: Any, start: Callable[[], None]) -> None:
        try:
            start()
            while (status := lib.colibri_wait(model, _POLL_SECONDS)) == lib.COLIBRI_BUSY:
                pass
        except BaseException:
            lib.colibri_cancel(model)
            lib.colibri_wait(model, -1.0)
            raise
        _check(status, lib.colibri_error(model), self.path)

    def check_tokens(self, tokens: Sequence[int]) -> Any:
        """Return tokens as a C array. Raises UsageError if they cannot be appended now."""
        ids = self._ids(tokens)
        self._call(lib.colibri_check_input, ids, len(tokens))
        return ids

    def _ids(self, tokens: Sequence[int]) -> Any:
        check_ids(tokens, self.info.vocab_size)
        return ffi.new("uint32_t[]", list(tokens))

    def rewind(self, position: int, sequence: int = 0) -> None:
        """Forget the tokens of a sequence from `position` on."""
        self._call(lib.colibri_rewind_sequence, self._sequence(sequence), position)

    def cancel(self) -> None:
        """End a running evaluation; it raises KeyboardInterrupt. For other threads."""
        lib.colibri_cancel(self._handle())

    def sanity_check(self) -> None:
        """Evaluate one token. Raises JobError if logits are not finite, or all equal."""
        self._call(lib.colibri_sanity_check)

    def is_eos(self, token: int) -> bool:
        """Return whether a token ends a text."""
        return token in self.info.eos_ids

    def stats(self) -> Stats:
        """Return the counters."""
        m = ffi.new("colibri_metrics *")
        lib.colibri_get_metrics(self._handle(), m)
        values = _fields(Stats, m)
        values["io_backend"] = _text(m.io_backend)
        values["io_reason"] = _text(m.io_reason)
        return Stats(**values)

    def layer_stats(self) -> list[LayerStats]:
        """Return the counters of each layer."""
        m, found = ffi.new("colibri_layer_metrics *"), []
        for layer in range(self.info.n_layers):
            lib.colibri_get_layer_metrics(self._handle(), layer, m)
            found.append(LayerStats(**_fields(LayerStats, m)))
        return found

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        lib.colibri_reset_metrics(self._handle())

    def _handle(self) -> Any:
        if self._model is None:
            raise UsageError(f"{os.fspath(self.path)}: the engine is closed")
        return self._model

    def _call(self, function: Any, *arguments: Any) -> None:
        model = self._handle()
        _check(function(model, *arguments), lib.colibri_error(model), self.path)

    def _read_info(self) -> EngineInfo:
        c = ffi.new("colibri_info *")
        lib.colibri_get_info(self._model, c)
        values = _fields(EngineInfo, c, but=("eos_ids",))
        for name in ("kernels", "precision", "kv_type"):
            values[name] = _text(values[name])
        return EngineInfo(**values, eos_ids=tuple(c.eos_ids[i] for i in range(c.n_eos_ids)))


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UsageError for a token that is no id of the model."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"token {i} of the input is {token}; this model's ids are 0 to {vocab_size - 1}"
            )


class Sampler:
    """Draws token ids below `n_tokens` from logits. Raises UsageError for senseless numbers."""

    def __init__(self, info: EngineInfo | Memory, sampling: Sampling) -> None:
        c, sampler, text = ffi.new("colibri_sampling *"), ffi.new("colibri_sampler **"), None
        lib.colibri_sampling_init(c)
        if not 0 <= sampling.top_k < 1 << 32:
            raise UsageError(f"top-k: expected 0 or more, found {sampling.top_k}")
        c.temperature = sampling.temperature
        c.top_k = sampling.top_k
        c.top_p = sampling.top_p
        c.min_p = sampling.min_p
        c.repetition_penalty = sampling.repetition_penalty
        c.seed = sampling.seed & ((1 << 64) - 1)
        text = _error_buffer()
        status = lib.colibri_sampler_open(
            c, info.vocab_size, info.n_tokens, sampler, text, len(text)
        )
        _check(status, text, None)
        self._sampler = ffi.gc(sampler[0], lib.colibri_sampler_close)

    def accept(self, tokens: Sequence[int]) -> None:
        """Count tokens as part of the text, for the repetition penalty."""
        for token in tokens:
            lib.colibri_sampler_accept(self._sampler, token)

    def draw(self, logits: Logits) -> int:
        """Return a token for one row of logits, float32 [vocab]."""
        token = ffi.new("uint32_t *")
        pointer = ffi.from_buffer("float[]", np.ascontiguousarray(logits))
        if lib.colibri_sampler_draw(self._sampler, pointer, token) != lib.COLIBRI_OK:
            raise JobError("a logit is NaN or infinite; 'colibri verify' finds NaN in weights")
        return int(token[0])


_kept_with: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What C structs point to lives as long as they do."""


def _options(
    *,
    threads: int = 0,
    expert_cache: int | None = None,
    ctx: int | None = None,
    batch_size: int | None = None,
    io_threads: int = 0,
    check: str = "first",
    io: str = "auto",
    prefetch_depth: int = 0,
    preload: int = 0,
    mirror: Path | None = None,
    ram_budget: int | None = None,
    logits_rows: int = 0,
    pin_threads: bool = False,
    precision: str = "exact",
    kv_type: str | None = None,
    sequences: int = 1,
) -> Any:
    options = ffi.new("colibri_options *")
    lib.colibri_options_init(options)
    options.n_threads = _bounded("threads", threads, 0)
    options.io_threads = _bounded("io-threads", io_threads, 0)
    # 0 means the default in C, so an explicit 0 is refused here.
    options.ctx = 0 if ctx is None else _bounded("ctx", ctx, 1)
    options.batch_size = 0 if batch_size is None else _bounded("batch-size", batch_size, 1)
    if expert_cache is not None:
        options.expert_cache_bytes = _bounded("expert-cache", expert_cache, 1)
    if ram_budget is not None:
        options.ram_budget_bytes = _bounded("ram-budget", ram_budget, 1)
    options.check = _choice("check", "CHECK_", CHECK_MODES, check)
    options.io = _choice("io", "IO_", IO_MODES, io)
    options.prefetch_depth = _bounded("prefetch-depth", prefetch_depth, 0)
    if mirror is not None:
        name = ffi.new("char[]", os.fsencode(mirror))
        options.mirror = name
        _kept_with[options] = name
    options.preload_bytes = (
        PRELOAD_ALL if preload == PRELOAD_ALL else _bounded("preload", preload, 0)
    )
    options.logits_rows = _bounded("logits-rows", logits_rows, 0)
    options.pin_threads = pin_threads
    options.precision = _choice("precision", "", PRECISIONS, precision)
    if kv_type is not None:
        options.kv_type = _choice("kv-type", "KV_", KV_TYPES, kv_type)
    options.n_sequences = _bounded("sequences", sequences, 1)
    return options


def _choice(option: str, prefix: str, names: tuple[str, ...], name: str) -> int:
    if name not in names:
        raise UsageError(f"{option}: expected {', '.join(names)}, found {quote(name)}")
    return int(getattr(lib, f"COLIBRI_{prefix}{name.upper().removeprefix('IO_')}"))


def _open_model(path: Path, options: Any) -> Any:
    """Return the C handle. In a thread, as reading a large model must not be deaf to Ctrl-C."""
    model, text = ffi.new("colibri_model **"), _error_buffer()
    status: list[int] = []
    given_up, lock = threading.Event(), threading.Lock()

    def open_model() -> None:
        found = lib.colibri_open(os.fsencode(path), options, model, text, len(text))
        with lock:
            status.append(found)
            if given_up.is_set():
                lib.colibri_close(model[0])

    thread = threading.Thread(target=open_model, name="colibri-open", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
    except BaseException:
        with lock:
            given_up.set()
            if status:
                lib.colibri_close(model[0])
        raise
    _check(status[0], text, path)
    return ffi.gc(model[0], lib.colibri_close)


def _bounded(name: str, value: int, least: int) -> int:
    most = (1 << (63 if name in _SIZES else 31)) - 1
    if least <= value <= most:
        return value
    expected = f"{least} or more" if value < least else f"at most {most}"
    raise UsageError(f"{name}: expected {expected}, found {value}")


def _error_buffer() -> Any:
    return ffi.new("char[]", lib.COLIBRI_ERROR_BYTES)


def _check(status: int, text: Any, path: Path | None) -> None:
    if status == lib.COLIBRI_OK:
        return
    if status == lib.COLIBRI_CANCELLED:
        raise KeyboardInterrupt
    message = _text(text)
    if status == lib.COLIBRI_BUSY:
        message = "an evaluation is still running"
    # A wrong argument is the caller's; everything else is about the file.
    if path is not None and status != lib.COLIBRI_ERROR_ARGUMENT:
        name = os.fspath(path)
        message = message if name in message else f"{name}: {message}"
    raise _error_class(status)(message)


def _error_class(status: int) -> type[ColibriError]:
    if status == lib.COLIBRI_ERROR_ARGUMENT:
        return UsageError
    return FormatError if status == lib.COLIBRI_ERROR_FORMAT else JobError


def _text(pointer: Any) -> str:
    raw: bytes = ffi.string(pointer)
    return raw.decode("utf-8", "replace")


def _memory(c: Any) -> Memory:
    limit = _text(c.available_limit)
    return Memory(**_fields(Memory, c, but=("available_limit",)), available_limit=limit)


def _c_memory(memory: Memory) -> tuple[Any, Any]:
    """The C struct, and what has to live as long."""
    limit = ffi.new("char[]", memory.available_limit.encode())
    return ffi.new("colibri_memory *", {**asdict(memory), "available_limit": limit}), limit


def _fields(kind: Any, c: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {name: getattr(c, name) for name in kind.__dataclass_fields__ if name not in but}
