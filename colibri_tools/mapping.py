"""From a source's tensors to the slots of a container: the census.

Every source tensor is used exactly once or dropped by a named rule, and every slot is filled
exactly once; whatever does not fit is a problem that stops a job before any output exists.
"""

from __future__ import annotations

from colibri_tools.families.census import map_known
from colibri_tools.families.detect import detect_family
from colibri_tools.families.generic import map_unknown
from colibri_tools.families.precision import interpret
from colibri_tools.families.refuse import refuse_schemes
from colibri_tools.families.result import (
    Assignment,
    ExpertSlots,
    MappedResident,
    MappedRow,
    Slice,
    SourceMapping,
)
from colibri_tools.sources import Source

__all__ = [
    "Assignment",
    "ExpertSlots",
    "MappedResident",
    "MappedRow",
    "Slice",
    "SourceMapping",
    "map_source",
]


def map_source(source: Source) -> SourceMapping:
    """Find the family of `source` and the place of each of its tensors.

    What does not fit is in `problems` of the result; call `require_complete` before using it.
    Raises SourceError for a source that cannot be repacked at all: not a MoE, quantized in a way
    that cannot be carried, experts under unknown names, hyper-parameters missing or absurd.
    """
    detected = detect_family(source)
    seen = interpret(source, detected)
    refuse_schemes(seen.source, seen.scheme)
    take = map_known if detected.family else map_unknown
    mapping = take(seen.source, detected)
    seen.finish(mapping)
    mapping.warnings[:0] = source.warnings
    mapping.notes[:0] = source.notes
    return mapping
