"""What a census knows while it runs, and the pieces both kinds of census share."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from colibri_tools.container.format import PartRole, Role
from colibri_tools.errors import SourceError
from colibri_tools.families.detect import Detected
from colibri_tools.families.hyper import Hyper
from colibri_tools.families.result import Slice, SourceMapping
from colibri_tools.families.schema import (
    BIASES,
    DropRule,
    ExpertRule,
    Family,
    Form,
    Prefix,
    TensorRule,
)
from colibri_tools.sources import Source, SourceTensor
from colibri_tools.sources.views import rearranged

__all__ = [
    "EXPERT_HINT",
    "MAX_EXPERTS",
    "PARTS",
    "Census",
    "drop_rule_of",
    "not_a_moe",
    "slices_of",
]

PARTS = (PartRole.GATE, PartRole.UP, PartRole.DOWN)
EXPERT_HINT = re.compile(r"expert|_exps|\bmoe\b|_moe", re.IGNORECASE)
MAX_EXPERTS = 65536


@dataclass(slots=True)
class Census:
    """What is known so far. `residents` and `experts` are keyed by slot."""

    source: Source
    family: Family
    form: Form
    prefix: Prefix
    hyper: Hyper
    mapping: SourceMapping
    residents: dict[tuple[Role, int], tuple[SourceTensor, TensorRule]] = field(default_factory=dict)
    experts: dict[int, dict[tuple[int, PartRole], Slice]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    moe_layers: list[int] = field(default_factory=list)
    n_experts: dict[int, int] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[PartRole, ...]:
        """The parts that every expert must have: one with a bias anywhere has it everywhere."""
        found = {part for slots in self.experts.values() for _, part in slots}
        return (*PARTS, *(part for part in BIASES if part in found))

    @property
    def n_layers(self) -> int:
        return int(self.hyper["n_layers"])

    def problem(self, text: str) -> None:
        self.mapping.problems.append(text)


def not_a_moe(source: Source, detected: Detected) -> SourceError:
    """Return the error for a dense model."""
    return SourceError(
        f"{source.path}: not a Mixture-of-Experts model: {detected.why} and no tensor of "
        f"{len(source.tensors)} belongs to an expert; a dense model has no experts to stream"
    )


def drop_rule_of(drops: Iterable[DropRule], name: str) -> str | None:
    """Return the name of the rule that drops a tensor, or None."""
    return next((rule.name for rule in drops if re.fullmatch(rule.regex, name)), None)


def slices_of(
    tensor: SourceTensor, rule: ExpertRule, expert: int
) -> Iterator[tuple[int, PartRole, Slice]]:
    """Yield (expert, part, slice) of a tensor of one expert, or of a stack if `expert` is -1.

    Raises SourceError for a stack that cannot be rearranged as the rule says.
    """
    shape = tensor.shape if expert < 0 else (1, *tensor.shape)
    n_experts, rows, cols = (*shape, 1) if rule.is_bias else shape
    if not tensor.dtype.is_known or n_experts > MAX_EXPERTS:
        return
    n_parts = len(rule.parts)
    if rule.transposed or rule.interleaved:
        tensor = rearranged(
            tensor,
            (n_experts, rows, cols),
            n_parts,
            transposed=rule.transposed,
            interleaved=rule.interleaved,
        )
        rows, cols = tensor.shape[1:]
    rows //= n_parts
    n_bytes = tensor.dtype.n_bytes(rows) if rule.is_bias else rows * tensor.dtype.row_bytes(cols)
    for i in range(n_experts):
        for j, part in enumerate(rule.parts):
            start = (i * n_parts + j) * n_bytes
            piece = Slice(tensor, start, n_bytes, *((1, rows) if rule.is_bias else (rows, cols)))
            yield (i if expert < 0 else expert), part, piece
