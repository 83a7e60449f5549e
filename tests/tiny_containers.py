"""Containers made from tiny models, each built once per test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models as tm
from tiny_models import TinySpec

from colibri_tools.engine import Engine
from colibri_tools.repack import repack


class Containers:
    """Writes checkpoints and repacks them below `root`; equal requests share one container."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Path] = {}
        self._count = 0

    def hf(self, family: str, spec: TinySpec | None = None, **options: Any) -> Path:
        """The container of `tm.write_hf(.., **options)`."""
        return self._build(tm.write_hf, "", family, spec, options)

    def gguf(self, family: str, spec: TinySpec | None = None, **options: Any) -> Path:
        """The container of `tm.write_gguf(.., **options)`."""
        return self._build(tm.write_gguf, ".gguf", family, spec, options)

    def from_source(self, source: Path) -> Path:
        """The container of a checkpoint on disk."""
        out = self.folder() / "model.colibri"
        repack(source, out)
        return out

    def folder(self) -> Path:
        """A new empty folder."""
        self._count += 1
        folder = self.root / str(self._count)
        folder.mkdir()
        return folder

    def _build(
        self,
        write: Callable[..., Path | list[Path]],
        suffix: str,
        family: str,
        spec: TinySpec | None,
        options: dict[str, Any],
    ) -> Path:
        key = repr((write.__name__, family, spec, sorted(options.items(), key=lambda kv: kv[0])))
        once = any(callable(v) for v in options.values())
        if not once and key in self._made:
            return self._made[key]
        written = write(self.folder() / f"source{suffix}", family, spec, **options)
        out = self.from_source(written if isinstance(written, Path) else written[0])
        if not once:
            self._made[key] = out
        return out


def logits(path: Path, tokens: list[int], **options: Any) -> np.ndarray:
    """Logits at every position, float32 [n, vocab]."""
    with Engine(path, threads=1, **options) as engine:
        return np.array(engine.forward(tokens))
