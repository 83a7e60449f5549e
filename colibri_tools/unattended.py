"""Many prompts, one open model: `run --prompt-file F... --out DIR`.

Each file gets a result of its own, written whole or not at all. A result that is there already and
was made by the same job is kept, so a job that was interrupted goes on where it was; a file that
fails is reported and does not stop the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_tools import __version__
from colibri_tools.chat import CHAT_MAX_TOKENS, Conversation
from colibri_tools.container import open as open_container
from colibri_tools.engine import Engine, Sampler, Sampling
from colibri_tools.errors import ColibriError, JobError, UsageError, quote, quote_some
from colibri_tools.output import counted
from colibri_tools.run import DEFAULT_MAX_TOKENS, Generation, context_limit
from colibri_tools.text.loading import load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from tokenizers import Tokenizer

__all__ = ["FileResult", "FilesResult", "run_files"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class FileResult:
    """One prompt file: "done", "kept" (from an earlier run of the same job) or "failed"."""

    file: str
    status: str
    result: str | None
    generated_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class FilesResult:
    """What became of every file. `interrupted`: Ctrl-C came before the last one."""

    files: tuple[FileResult, ...]
    n_files: int
    seconds: float
    interrupted: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def n_failed(self) -> int:
        """Files without a result."""
        return sum(item.status == "failed" for item in self.files)

    @property
    def ok(self) -> bool:
        """Whether every file has its result."""
        return not self.n_failed and not self.interrupted

    def to_json(self) -> dict[str, Any]:
        """Return a dict that strict JSON can hold."""
        return {
            "ok": self.ok,
            "interrupted": self.interrupted,
            "n_files": self.n_files,
            "n_failed": self.n_failed,
            "seconds": self.seconds,
            "files": [
                {
                    "file": item.file,
                    "status": item.status,
                    "result": item.result,
                    "generated_tokens": item.generated_tokens,
                    "seconds": item.seconds,
                    "error": item.error,
                }
                for item in self.files
            ],
        }

    def render(self, console: Console) -> None:
        """Print the sum of it; failures were reported as they came."""
        count = {s: sum(f.status == s for f in self.files) for s in ("done", "kept", "failed")}
        tokens = sum(item.generated_tokens for item in self.files if item.status == "done")
        left = self.n_files - len(self.files)
        tail = f", {left} left for a rerun" if left else ""
        console.print(
            f"{count['done']} done, {count['kept']} kept from before, {count['failed']} failed"
            f"{tail}; {counted(tokens, 'token')} in {self.seconds:.1f} s",
            soft_wrap=True,
        )


@dataclass(frozen=True)
class _Job:
    """What, besides a prompt, a result depends on: the same job gives the same text."""

    container_id: str
    settings: dict[str, Any]

    def key(self, prompt: bytes) -> str:
        """Return a digest of job and prompt: whether an existing result is this one."""
        text = json.dumps([self.container_id, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode() + b"\0" + prompt).hexdigest()


def run_files(
    path: PathLike,
    files: Sequence[PathLike],
    out: PathLike,
    *,
    sampling: Sampling,
    chat: bool = False,
    system: str | None = None,
    stop: Sequence[str] = (),
    max_tokens: int | None = None,
    ignore_eos: bool = False,
    ctx: int | None = None,
    on_file: Callable[[FileResult], None] | None = None,
    **engine_options: Any,
) -> FilesResult:
    """Answer every prompt file; write `out`/NAME.json for each.

    A result has the text, its token ids, why it stopped, its timings, and what it was made with.
    Drawing starts from the same seed for every file, so a result is that of a run of its own.
    `ctx` None makes room for the longest prompt. Ctrl-C ends the job: what is written stays.

    Raises UsageError for files of one name, or results of another job in `out`; FormatError and
    JobError as opening a model does.
    """
    max_tokens = (
        (CHAT_MAX_TOKENS if chat else DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens
    )
    folder, started = Path(out), time.monotonic()
    targets = _targets(files, folder)
    prompts = _Prompts(path, chat, system)
    settings = {
        "version": __version__,
        "chat": chat,
        "system": system,
        "stop": list(stop),
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "precision": engine_options["precision"],
        "kv_type": engine_options["kv_type"],
        "sampling": _settings(sampling),
    }
    job = _Job(prompts.container_id, settings)
    done: list[FileResult] = []
    left = _sort_out(targets, job, done, on_file)
    folder.mkdir(parents=True, exist_ok=True)
    interrupted = False
    if left:
        if ctx is None:
            longest = max(prompts.length(file) for file, _ in left)
            ctx = min(longest + max_tokens, context_limit(path, engine_options))
        with Engine(path, ctx=ctx, **engine_options) as engine:
            worker = _Worker(engine, prompts, job, sampling, tuple(stop), max_tokens, ignore_eos)
            for file, target in left:
                item = worker.run(file, target)
                if item is None:
                    interrupted = True
                    break
                done.append(item)
                if on_file:
                    on_file(item)
    return FilesResult(tuple(done), len(targets), time.monotonic() - started, interrupted)


def _settings(sampling: Sampling) -> dict[str, Any]:
    if not sampling.temperature:  # greedy: the seed is not used
        return {"temperature": 0.0, "repetition_penalty": sampling.repetition_penalty}
    return {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}


def _targets(files: Sequence[PathLike], folder: Path) -> list[tuple[Path, Path]]:
    """Return every file with the name of its result. Raises UsageError for two of one name."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {quote(folder)}: is no folder")
    targets = [(Path(file), folder / f"{Path(file).name}.json") for file in files]
    names = [target for _, target in targets]
    double = sorted({str(name) for name in names if names.count(name) > 1})
    if double:
        raise UsageError(f"two prompt files would have one result: {quote_some(double)}")
    if any(str(file) == "-" for file, _ in targets):
        raise UsageError("--out is about files: standard input has no name for its result")
    return targets


def _sort_out(
    targets: Sequence[tuple[Path, Path]],
    job: _Job,
    done: list[FileResult],
    on_file: Callable[[FileResult], None] | None,
) -> list[tuple[Path, Path]]:
    """Return the files that are still to be answered; put what is kept or unreadable in `done`.

    Raises UsageError where a result of another job or prompt is in the way.
    """
    left = []
    for file, target in targets:
        try:
            key = job.key(file.read_bytes())
        except OSError as error:
            item = FileResult(str(file), "failed", None, error=f"{file}: {error.strerror}")
            done.append(item)
            if on_file:
                on_file(item)
            continue
        if not target.exists():
            left.append((file, target))
            continue
        if _key_of(target) != key:
            raise UsageError(
                f"{target}: is the result of another model, prompt or options; choose another "
                "--out, or remove it"
            )
        done.append(FileResult(str(file), "kept", str(target)))
    return left


def _key_of(target: Path) -> str | None:
    try:
        document = json.loads(target.read_bytes())
    except (OSError, ValueError):
        return None
    return document.get("job") if isinstance(document, dict) else None


class _Prompts:
    """Makes ids of prompt files, plain or as a message of a chat."""

    def __init__(self, path: PathLike, chat: bool, system: str | None) -> None:
        self._conversation = Conversation.open(path, system) if chat else None
        with open_container(path) as container:
            self.container_id = container.id
            self.tokenizer: Tokenizer = load_tokenizer(dict(container.blobs), path)
        self.ends = self._conversation.end_ids() if self._conversation else frozenset()

    def encode(self, file: Path) -> tuple[list[int], bytes]:
        """Return the ids and the bytes of a prompt. Raises JobError for what is no prompt."""
        try:
            data = file.read_bytes()
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JobError(f"{file}: not UTF-8 at byte {error.start}") from error
        except OSError as error:
            raise JobError(f"{file}: {error.strerror}") from error
        if self._conversation:
            self._conversation.reset()
            ids = self._conversation.ask(text)
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=True).ids
        if not ids:
            raise JobError(f"{file}: the prompt has no tokens")
        return ids, data

    def length(self, file: Path) -> int:
        """Return the tokens of a prompt, 1 for one that cannot be read."""
        try:
            return len(self.encode(file)[0])
        except ColibriError:
            return 1


@dataclass
class _Worker:
    """Answers one file after the other with one engine."""

    engine: Engine
    prompts: _Prompts
    job: _Job
    sampling: Sampling
    stops: tuple[str, ...]
    max_tokens: int
    ignore_eos: bool

    def run(self, file: Path, target: Path) -> FileResult | None:
        """Answer a file and write its result; None when Ctrl-C ended it."""
        started = time.monotonic()
        try:
            ids, prompt = self.prompts.encode(file)
            if len(ids) > self.engine.info.ctx:
                raise JobError(
                    f"{file}: the prompt has {counted(len(ids), 'token')}, the context "
                    f"{self.engine.info.ctx} positions; shorten it, or raise --ctx"
                )
            self.engine.rewind(0)
            generation = Generation(
                self.engine,
                Sampler(self.engine.info, self.sampling),
                self.prompts.tokenizer,
                ids,
                None,
                stops=self.stops,
                ends=self.prompts.ends,
            )
            generation.run(self.max_tokens, self.ignore_eos, None)
            if generation.stop_reason == "interrupted":
                return None
            _write(target, self._document(file, prompt, generation))
        except KeyboardInterrupt:
            return None
        except ColibriError as error:
            return FileResult(str(file), "failed", None, error=error.message)
        except OSError as error:
            message = f"{error.filename or target}: {error.strerror}"
            return FileResult(str(file), "failed", None, error=message)
        seconds = time.monotonic() - started
        return FileResult(str(file), "done", str(target), len(generation.tokens), seconds)

    def _document(self, file: Path, prompt: bytes, g: Generation) -> dict[str, Any]:
        steps = max(len(g.tokens) - 1, 0)
        return {
            "file": file.name,
            "prompt_sha256": hashlib.sha256(prompt).hexdigest(),
            "prompt_tokens": len(g.prompt),
            "text": "".join(g.pieces),
            "tokens": g.tokens,
            "generated_tokens": len(g.tokens),
            "stop_reason": g.stop_reason,
            "prefill_seconds": g.prefill_seconds,
            "decode_seconds": g.decode_seconds,
            "tokens_per_second": steps / g.decode_seconds if g.decode_seconds else 0.0,
            "container": self.job.container_id,
            "settings": self.job.settings,
            "job": self.job.key(prompt),
        }


def _write(target: Path, document: dict[str, Any]) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(document, file, indent=2, allow_nan=False, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
