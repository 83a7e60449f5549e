"""How a container was encoded, as it says itself: enough to encode its source again.

An encoding is a function of the weights, the type, the effort and the importance. The type of each
matrix is in the container; effort and the importance's digest are in its provenance.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri_tools.container import Container
from colibri_tools.dtypes import DType
from colibri_tools.errors import UsageError
from colibri_tools.families.result import SourceMapping
from colibri_tools.profile.fingerprint import mapping_fingerprint
from colibri_tools.quantize.importance import Importance, load_importance
from colibri_tools.quantize.matrices import Key, Matrix, list_matrices
from colibri_tools.sources import Source, SourceTensor

__all__ = ["Recipe", "read_recipe"]


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """What makes a matrix of the container from one of the source."""

    effort: str
    importance: Importance | None
    matrices: Mapping[Key, Matrix]

    def encoded(self, key: Key, dtype: DType) -> tuple[SourceTensor, int] | None:
        """Return a source tensor as another type and where the matrix begins in it.

        None for what is no matrix, and so keeps its type.
        """
        matrix = self.matrices.get(key)
        if matrix is None or matrix.cols % dtype.block_weights:
            return None
        weights = matrix.weights_by(self.importance)
        return matrix.encoded(dtype, self.effort, weights), matrix.start_as(dtype)


def read_recipe(
    container: Container,
    source: Source,
    mapping: SourceMapping,
    importance: str | os.PathLike[str] | None,
) -> Recipe | None:
    """Return how a container was encoded, None for one whose numbers were carried.

    Raises UsageError for one that was encoded twice, or whose importance is missing or another.
    """
    made = container.provenance
    prefixes = [key.removesuffix("recipe.type") for key in made if _is_recipe(key)]
    if not prefixes:
        if importance is not None:
            raise UsageError(f"{container.path}: was not encoded, so --importance says nothing")
        return None
    if len(prefixes) > 1:
        raise UsageError(
            f"{container.path}: was encoded {len(prefixes)} times; what lies between is not in it, "
            "so it cannot be compared with a source"
        )
    loaded = _importance(container, f"{prefixes[0]}recipe.", source, mapping, importance)
    effort = str(made.get(f"{prefixes[0]}recipe.effort", "normal"))
    return Recipe(effort, loaded, {m.key: m for m in list_matrices(mapping)})


def _is_recipe(key: str) -> bool:
    head = key.removesuffix("recipe.type")
    return head != key and head == "from." * (len(head) // 5)


def _importance(
    container: Container,
    prefix: str,
    source: Source,
    mapping: SourceMapping,
    path: str | os.PathLike[str] | None,
) -> Importance | None:
    wanted: Any = container.provenance.get(f"{prefix}importance.sha256")
    if wanted is None:
        if path is not None:
            raise UsageError(f"{container.path}: was encoded without importance")
        return None
    if path is None:
        raise UsageError(
            f"{container.path}: was encoded with importance (a "
            f"{container.provenance.get(f'{prefix}importance.kind')}, SHA-256 {wanted[:16]}...); "
            "give that file with --importance"
        )
    found = load_importance(path, mapping, lambda: mapping_fingerprint(source, mapping))
    if found.sha256 != wanted:
        raise UsageError(
            f"{os.fspath(path)}: expected the importance with SHA-256 {wanted[:16]}..., found "
            f"{found.sha256[:16]}..."
        )
    return found
