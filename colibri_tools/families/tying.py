"""Is the output matrix the embedding? Flag, presence and bytes decide together."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_tools.errors import quote
from colibri_tools.sources import Source, SourceTensor

__all__ = ["Tying", "decide_output"]

_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Tying:
    """`tied` means one matrix serves as both; `problem` stops the job."""

    tied: bool
    problem: str | None = None
    warning: str | None = None


def decide_output(
    source: Source,
    flag: bool | None,
    embedding: SourceTensor,
    output: SourceTensor | None,
    *,
    headless: bool,
) -> Tying:
    """Decide from the config's flag (None for GGUF, where absence means tied) and the tensors.

    `headless` is true for names of a base model, which is exported without an output matrix.
    """
    if output is None:
        if flag is None or flag:
            return Tying(True)
        base = " (the names look like an export of the base model, without its head)"
        return Tying(
            False,
            problem="the output matrix lm_head.weight is missing and tie_word_embeddings is "
            f"false{base if headless else ''}; fetch a complete checkpoint, or set the flag to "
            "true if this model shares its embedding",
        )
    if not flag:
        return Tying(False)
    if _same_bytes(source, embedding, output):
        return Tying(True)
    return Tying(
        False,
        warning=f"tie_word_embeddings is true, but {quote(output.name)} differs from "
        f"{quote(embedding.name)}: both are kept and the output matrix is used as stored",
    )


def _same_bytes(source: Source, first: SourceTensor, second: SourceTensor) -> bool:
    if (first.dtype, first.shape, first.n_bytes) != (second.dtype, second.shape, second.n_bytes):
        return False
    for start in range(0, first.n_bytes, _CHUNK):
        n_bytes = min(_CHUNK, first.n_bytes - start)
        if source.read(first, start, n_bytes) != source.read(second, start, n_bytes):
            return False
    return True
