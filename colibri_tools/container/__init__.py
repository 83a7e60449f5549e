"""The container, `model.colibri`: plan, write, read and check it (docs/format.md)."""

from colibri_tools.container.checks import RuleError
from colibri_tools.container.format import CELL_DTYPE, Group, PartRole, Role, SectionKind, Stream
from colibri_tools.container.layout import (
    Accounting,
    ContainerPlan,
    PartSpec,
    PlannedLayout,
    PlannedPart,
    PlannedTensor,
    ResidentItem,
    RowSpec,
    plan_container,
)
from colibri_tools.container.reader import Container, ResidentTensor, open
from colibri_tools.container.spec import SPEC_KEYS
from colibri_tools.container.writer import ContainerWriter, check_output

__all__ = [
    "CELL_DTYPE",
    "SPEC_KEYS",
    "Accounting",
    "Container",
    "ContainerPlan",
    "ContainerWriter",
    "Group",
    "PartRole",
    "PartSpec",
    "PlannedLayout",
    "PlannedPart",
    "PlannedTensor",
    "ResidentItem",
    "ResidentTensor",
    "Role",
    "RowSpec",
    "RuleError",
    "SectionKind",
    "Stream",
    "check_output",
    "open",
    "plan_container",
]
