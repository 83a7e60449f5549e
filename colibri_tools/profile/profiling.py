"""`colibri profile-routing`: texts through the engine, and what its routers chose as a profile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from colibri_tools import __version__
from colibri_tools.container import Container, PartRole
from colibri_tools.container import open as open_container
from colibri_tools.container.format import Stream
from colibri_tools.engine import Engine, Memory, Observation, Sampler, Sampling, estimate
from colibri_tools.errors import ColibriError, UsageError, add_hint, quote
from colibri_tools.output import counted, format_bytes
from colibri_tools.profile.checkpoint import Checkpoint, Kept
from colibri_tools.profile.collect import Choices, Totals, empty_profile
from colibri_tools.profile.file import DECODE, PREFILL, RoutingProfile, save_profile
from colibri_tools.profile.fingerprint import container_fingerprint
from colibri_tools.profile.report import ProfileReport
from colibri_tools.profile.texts import DEFAULT_DOMAIN, InputText, Window, cut, read_texts
from colibri_tools.repack import Progress
from colibri_tools.sources import sniff

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ProfilingResult", "profile_routing"]

PathLike = str | os.PathLike[str]

_BATCH_SIZES = (4096, 2048, 1024, 512, 256, 128, 64)
_DEFAULT_WINDOW = 4096
_CHECKPOINT_SECONDS = 60.0
_CHECKPOINT_SHARE = 0.05
"""Of the time, at most, that saving what is counted so far may take."""
_MAX_COPY_BYTES = 256 << 20
"""Sums of squares up to this size are copied before each batch, in case it is interrupted."""


@dataclass(frozen=True, slots=True)
class ProfilingResult:
    """A profile that was made, and what it took. `seconds` and `tokens` are of this run alone."""

    out: str
    report: ProfileReport
    seconds: float
    tokens: int
    batch_size: int
    ctx: int
    n_sequences: int
    n_batches: int
    n_kept: int
    io: dict[str, Any]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return the report's data, and `run`, what making it took."""
        run = {
            "out": self.out,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "batch_size": self.batch_size,
            "ctx": self.ctx,
            "sequences": self.n_sequences,
            "batches": self.n_batches,
            "batches_kept": self.n_kept,
            "io": self.io,
            "notes": list(self.notes),
        }
        return {**self.report.to_json(), "run": run}

    def render(self, console: Console) -> None:
        """Print the report, and what making it took."""
        self.report.render(console)
        rate = self.tokens / self.seconds if self.seconds else 0.0
        tokens = counted(self.tokens, "token")
        console.print(
            f"{self.out}: {tokens} in {self.seconds:.1f} s ({rate:.0f}/s), in batches of up to "
            f"{self.batch_size}; {self.io['reads']} reads, {format_bytes(self.io['bytes_read'])}",
            soft_wrap=True,
        )


def profile_routing(
    path: PathLike,
    out: PathLike,
    *,
    texts: Sequence[PathLike] = (),
    domains: Sequence[tuple[str, PathLike]] = (),
    token_files: Sequence[tuple[str, PathLike]] = (),
    generate: int = 0,
    seed: int = 0,
    trace: bool = False,
    importance: bool = False,
    ctx: int | None = None,
    batch_size: int | None = None,
    threads: int = 0,
    io_threads: int = 0,
    ram_budget: int | None = None,
    expert_cache: int | None = None,
    precision: str = "exact",
    force: bool = False,
    restart: bool = False,
    checkpoint_seconds: float = _CHECKPOINT_SECONDS,
    progress: Progress | None = None,
) -> ProfilingResult:
    """Evaluate texts with the container `path`; write which experts they chose to `out`.

    `texts` are of the domain "text", `domains` name theirs; `token_files` hold ids, a text a line,
    and their domain. A text is cut into windows of `ctx` tokens (the smaller of 4096 and the
    model's limit), each evaluated as a sequence of its own. With `generate`, as many tokens are
    drawn behind each text, at temperature 1, and counted as decode. `trace` keeps every choice,
    `importance` the squares of what experts multiply. `batch_size` None is the largest that memory
    allows, up to 4096. `progress` is called with tokens done and in total.

    An interrupted job leaves `OUT.partial`, with which the same call goes on. Raises UsageError,
    FormatError and JobError.
    """
    out = Path(out)
    _check_paths(Path(path), out, [*texts, *(p for _, p in (*domains, *token_files))], force)
    if generate < 0:
        raise UsageError(f"--generate: expected 0 or more, found {generate}")
    named = [(DEFAULT_DOMAIN, Path(text)) for text in texts]
    named += [(name, Path(text)) for name, text in domains]
    if not named and not token_files:
        raise UsageError("there is no text to profile; give --text, --domain or --tokens-file")
    with open_container(path) as container:
        _check_runs(container)
        inputs = read_texts(container, named, [(n, Path(p)) for n, p in token_files])
        model = _Model.of(container)
    settings = _Settings(generate, seed, trace, importance, precision)
    engine_options = {
        "threads": threads,
        "io_threads": io_threads,
        "ram_budget": ram_budget,
        "expert_cache": expert_cache,
        "precision": precision,
    }
    asked = {"ctx": ctx, "batch_size": batch_size}
    checkpoint = Checkpoint(out, settings.job(model, inputs, asked), restart=restart)
    try:
        job = _Job(Path(path), model, inputs, settings, asked, engine_options, checkpoint.kept)
        result = _run(job, checkpoint, checkpoint_seconds, progress or (lambda done, total: None))
        profile = result.report.profile
        save_profile(profile, out, force=force)
        checkpoint.remove()
        return replace(result, out=os.fspath(out), notes=job.notes)
    finally:
        checkpoint.close()


def _check_paths(path: Path, out: Path, texts: Sequence[PathLike], force: bool) -> None:
    if out.exists():
        if any(Path(p).exists() and out.samefile(p) for p in (path, *texts)):
            raise UsageError(f"{out}: is an input; name another file to write")
        if not force:
            raise UsageError(f"{out}: exists already; --force replaces it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {quote(out.absolute().parent)}")
    if path.exists() and (path.is_dir() or sniff(path) != "colibri"):
        raise UsageError(
            f"{path}: is no container, and only containers run; make one with 'colibri repack'"
        )


def _check_runs(container: Container) -> None:
    if not container.spec.get("executable", False):
        lacks = container.spec.get("executable_lacks", "this version does not run its family")
        raise UsageError(f"{container.path}: cannot be profiled, as it cannot run: {lacks}")
    if not any(row.stream == Stream.MAIN for row in container.rows):
        raise UsageError(f"{container.path}: has no MoE layers, so there is no routing to profile")


@dataclass(frozen=True, slots=True)
class _Model:
    """What is asked of the container before it is opened to run."""

    fingerprint: str
    family: str
    top_k: int
    layers: tuple[int, ...]
    n_experts: tuple[int, ...]
    widest: int
    hidden_size: int
    context_length: int

    @classmethod
    def of(cls, container: Container) -> _Model:
        rows = [i for i, row in enumerate(container.rows) if row.stream == Stream.MAIN]
        gates = (
            part.rows
            for row in rows
            for expert in range(container.rows[row].n_experts)
            for part in container.layout_of(row, expert).parts
            if part.role == PartRole.GATE
        )
        return cls(
            fingerprint=container_fingerprint(container),
            family=str(container.spec["family"]),
            top_k=int(container.spec["top_k"]),
            layers=tuple(container.rows[row].layer for row in rows),
            n_experts=tuple(container.rows[row].n_experts for row in rows),
            widest=max(gates),
            hidden_size=int(container.spec["hidden_size"]),
            context_length=int(container.spec["context_length"]),
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """What decides the numbers in the profile."""

    generate: int
    seed: int
    trace: bool
    importance: bool
    precision: str

    def job(
        self, model: _Model, inputs: list[InputText], asked: dict[str, int | None]
    ) -> dict[str, Any]:
        """Return what another run must have alike to go on."""
        return {
            "model": model.fingerprint,
            "texts": [[t.record.domain, t.record.sha256] for t in inputs],
            "generate": self.generate,
            "seed": self.seed,
            "trace": self.trace,
            "importance": self.importance,
            "precision": self.precision,
            "tool version": __version__,
            **asked,
        }


# --- one job --------------------------------------------------------------------------------------


class _Job:
    """Windows of texts, in batches, and the engine's sizes for them."""

    def __init__(
        self,
        path: Path,
        model: _Model,
        inputs: list[InputText],
        settings: _Settings,
        asked: dict[str, int | None],
        engine_options: dict[str, Any],
        kept: Kept | None,
    ) -> None:
        self.path, self.model, self.inputs, self.settings = path, model, inputs, settings
        self.engine_options = dict(engine_options)
        self._asked_budget = engine_options["ram_budget"] is not None
        self.domains = tuple(dict.fromkeys(t.record.domain for t in inputs))
        self.kept = kept
        length = self._window_length(asked["ctx"])
        self.windows = cut(inputs, length)
        longest = max(len(w.tokens) for w in self.windows) + settings.generate
        if kept is not None:  # batches must be the same ones
            self.plan = kept.plan
            self._leave_room(self.plan)
        else:
            self.plan = self._choose_plan(longest, asked["batch_size"])
        self.batches = list(self._pack(self.plan["batch_size"], self.plan["sequences"]))

    def _window_length(self, ctx: int | None) -> int:
        limit, n = self.model.context_length, self.settings.generate
        if ctx is not None and not 1 <= ctx <= limit:
            raise UsageError(f"--ctx: expected 1 to the model's {limit}, found {ctx}")
        length = (ctx or min(_DEFAULT_WINDOW, limit)) - n
        if length < 1:
            raise UsageError(
                f"--generate {n}: leaves no room for text in a context of {length + n} positions"
            )
        return length

    def _choose_plan(self, longest: int, batch_size: int | None) -> dict[str, int]:
        """The largest batch whose plan leaves a cache for a token's experts; else the largest."""
        failure: ColibriError | None = None
        possible: list[tuple[Memory, dict[str, int]]] = []
        total = sum(len(w.tokens) for w in self.windows)
        for size in _BATCH_SIZES if batch_size is None else (batch_size,):
            if batch_size is None and size > 64 and size >= 2 * total:
                continue  # the next one holds everything too
            sequences = max(1, min(len(self.windows), size // longest))
            plan = {"ctx": longest, "batch_size": size, "sequences": sequences}
            try:
                self._leave_room(plan)
                memory = estimate(self.path, **(self.engine_options | plan))
            except ColibriError as error:
                failure = failure or error
                continue
            possible.append((memory, plan))
            if memory.cache_bytes >= min(memory.token_bytes, memory.all_experts_bytes):
                return plan
        if not possible:
            assert failure is not None
            raise failure
        return possible[0][1]

    def _leave_room(self, plan: dict[str, int]) -> None:
        """Keep memory for what is observed and counted, unless a budget is asked for."""
        if self._asked_budget:
            return
        free = estimate(self.path, **(self.engine_options | plan | {"ram_budget": None}))
        m = self.model
        cells = len(m.layers) * max(m.n_experts)
        own = 12 * len(m.layers) * plan["sequences"] * plan["ctx"] * m.top_k
        own += 4 * 8 * cells * max(m.n_experts)  # two tables of pairs, and while they grow
        if self.settings.importance:
            sums = 8 * cells * (m.hidden_size + m.widest)
            own += 2 * sums + (sums if sums <= _MAX_COPY_BYTES else 0)
        self.engine_options["ram_budget"] = max(free.budget_bytes - own, 1)

    def _pack(self, batch_size: int, sequences: int) -> Iterator[list[Window]]:
        batch: list[Window] = []
        n = 0
        for window in self.windows:
            if batch and (n + len(window.tokens) > batch_size or len(batch) == sequences):
                yield batch
                batch, n = [], 0
            batch.append(window)
            n += len(window.tokens)
        yield batch

    def start(self) -> Totals:
        """Return what is counted already: nothing, or what an earlier run kept."""
        if self.kept is not None:
            return Totals(self.kept.profile, self.settings.trace)
        m = self.model
        nothing = empty_profile(
            m.fingerprint, m.family, m.top_k, m.layers, m.n_experts, self.domains
        )
        made_by = f"colibri-tools {__version__}"
        texts = tuple(t.record for t in self.inputs)
        nothing = replace(nothing, texts=texts, made_by=made_by, precision=self.settings.precision)
        return Totals(nothing, self.settings.trace)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of how the texts were taken."""
        notes = []
        n_cut = len({w.text for w in self.windows if not w.ends})
        if n_cut:
            length = max(len(w.tokens) for w in self.windows)
            notes.append(
                f"{n_cut} of {len(self.inputs)} texts are longer than a window of "
                f"{counted(length, 'token')} and were cut; see --ctx"
            )
        digests = [t.record.sha256 for t in self.inputs]
        if len(set(digests)) < len(digests):
            notes.append("some texts are the same, and count as often as they are given")
        return tuple(notes)


def _run(job: _Job, checkpoint: Checkpoint, every: float, progress: Progress) -> ProfilingResult:
    totals = job.start()
    done = job.kept.n_batches if job.kept else 0
    n_kept = done
    started = time.monotonic()
    sizes = [sum(len(w.tokens) for w in batch) for batch in job.batches]
    with Engine(job.path, **(job.engine_options | job.plan)) as engine:
        profiler = _Profiler(job, engine, totals)
        saver = _Saver(checkpoint, job.plan, every)
        try:
            for batch in job.batches[done:]:
                progress(sum(sizes[:done]), sum(sizes))
                profiler.evaluate(batch)
                done += 1
                saver.maybe(profiler, done)
        except BaseException as error:
            if done > n_kept and profiler.forget_part():
                saver.save(profiler, done)
            if checkpoint.kept is not None:
                add_hint(
                    error,
                    f"{sum(sizes[: checkpoint.kept.n_batches])} of {sum(sizes)} tokens are kept in "
                    f"{checkpoint.path.name}; the same command goes on from there",
                )
            raise
        progress(sum(sizes), sum(sizes))
        stats = engine.stats()
    return ProfilingResult(
        out="",
        report=ProfileReport(profiler.profile()),
        seconds=time.monotonic() - started,
        tokens=stats.tokens,
        batch_size=job.plan["batch_size"],
        ctx=job.plan["ctx"],
        n_sequences=job.plan["sequences"],
        n_batches=len(job.batches),
        n_kept=n_kept,
        io=stats.io() | {"requests": stats.expert_requests},
    )


class _Saver:
    """Saves what is counted so far now and then, taking a small share of the time."""

    def __init__(self, checkpoint: Checkpoint, plan: dict[str, int], every: float) -> None:
        self.checkpoint, self.plan, self.every = checkpoint, plan, every
        self.last = time.monotonic()

    def maybe(self, profiler: _Profiler, done: int) -> None:
        if time.monotonic() - self.last >= self.every:
            self.save(profiler, done)

    def save(self, profiler: _Profiler, done: int) -> None:
        before = time.monotonic()
        self.checkpoint.save(Kept(profiler.profile(), done, self.plan))
        self.last = time.monotonic()
        self.every = max(self.every, (self.last - before) / _CHECKPOINT_SHARE)


class _Profiler:
    """Evaluates batches and adds up what the engine observed."""

    def __init__(self, job: _Job, engine: Engine, totals: Totals) -> None:
        self.job, self.engine, self.totals = job, engine, totals
        self._within_batch = self._adding = False
        self._before: list[npt.NDArray[np.float64]] = []
        widest = job.model.widest if job.settings.importance else None
        self.seen = Observation.make(engine.info, job.plan["ctx"], widest)
        inputs = totals.profile.inputs
        if self.seen.inputs is not None and self.seen.hidden is not None and inputs:
            self.seen.inputs[:] = inputs["gate"]
            self.seen.hidden[:] = inputs["down"]
        engine.observe(self.seen)

    def _sums(self) -> list[npt.NDArray[np.float64]]:
        """What the engine adds to while it evaluates."""
        return [a for a in (self.seen.inputs, self.seen.hidden) if a is not None]

    def _keep(self) -> None:
        sums = self._sums()
        if sum(array.nbytes for array in sums) > _MAX_COPY_BYTES:
            return
        if not self._before:
            self._before = [np.empty_like(array) for array in sums]
        for copy, array in zip(self._before, sums, strict=True):
            copy[:] = array

    def forget_part(self) -> bool:
        """Take a part of a batch that failed out of all sums; False if it cannot be."""
        if self._adding:
            return False
        if not self._within_batch or not self._sums():
            return True
        for copy, array in zip(self._before, self._sums(), strict=False):
            array[:] = copy
        return bool(self._before)

    def profile(self) -> RoutingProfile:
        """Return the profile of all batches so far."""
        if self.seen.inputs is None or self.seen.hidden is None:
            return self.totals.result()
        return self.totals.result(inputs={"gate": self.seen.inputs, "down": self.seen.hidden})

    def evaluate(self, batch: list[Window]) -> None:
        """Evaluate windows together, generate behind those that end a text, and count."""
        engine, generate = self.engine, self.job.settings.generate
        self._keep()
        self._within_batch = True
        writing = [s for s, window in enumerate(batch) if window.ends and generate]
        for sequence in range(engine.info.n_sequences):
            engine.rewind(0, sequence)
        tokens = {s: window.tokens for s, window in enumerate(batch)}
        logits = engine.eval_many(tokens, [int(s in writing) for s in tokens])
        self._generate(batch, {s: logits[s][-1] for s in writing})
        choices = self._choices(batch)
        self._adding = True
        self.totals.add(choices)
        self._adding = self._within_batch = False

    def _generate(self, batch: list[Window], logits: dict[int, Any]) -> None:
        """Draw tokens, one of every text at once: each step reads a distinct expert once."""
        engine, settings = self.engine, self.job.settings
        samplers = {
            s: Sampler(engine.info, Sampling(1.0, seed=settings.seed + batch[s].text))
            for s in logits
        }
        for _ in range(settings.generate):
            drawn = {s: samplers[s].draw(row) for s, row in logits.items()}
            drawn = {s: token for s, token in drawn.items() if not engine.is_eos(token)}
            if not drawn:
                return
            rows = engine.eval_many({s: [token] for s, token in drawn.items()})
            logits = {s: row[-1] for s, row in zip(drawn, rows, strict=True)}

    def _choices(self, batch: list[Window]) -> Choices:
        lengths = [self.engine.position_of(s) for s in range(len(batch))]
        domains = [self.job.inputs[w.text].record.domain for w in batch]
        numbers = [self.job.domains.index(name) for name in domains]
        phase, start = [], []
        for window, n in zip(batch, lengths, strict=True):
            own = np.full(n, DECODE)
            own[: len(window.tokens)] = PREFILL
            phase.append(own)
            start.append(np.arange(n) == 0)

        def joined(array: Any) -> Any:
            return np.concatenate([array[:, s, :n] for s, n in enumerate(lengths)], axis=1)

        return Choices(
            experts=joined(self.seen.experts),
            weights=joined(self.seen.weights),
            early=joined(self.seen.early),
            domain=np.repeat(numbers, lengths),
            phase=np.concatenate(phase),
            start=np.concatenate(start),
        )
