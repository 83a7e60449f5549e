"""Verify of a container that lacks one tensor, for every family and every role.

A tensor is taken away by giving its entry of the directory a role that no graph needs. All
checksums of the file hold.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import row_models as rm
import tiny_models as tm
from container_util import Draft
from test_mutation import small
from tiny_containers import Containers

from colibri_tools import container as files
from colibri_tools.container import Group, Role
from colibri_tools.verify import verify

UNNEEDED = {Role.OTHER, Role.ROPE_FACTORS}
"""Roles that no graph needs: rope factors are part of the angular frequencies."""


def containers_of(containers: Containers, family: str) -> list[Path]:
    """The family's container from either kind of source."""
    made = [containers.hf(family, small(family))]
    if family != "flex_olmo":
        made.append(containers.gguf(family, small(family)))
    return made


def without(path: Path, out: Path, role: Role, layer: int) -> Path:
    """A container in which one tensor has its role no more."""
    draft = Draft(bytearray(path.read_bytes()))
    entries = draft["tensors"]
    (at,) = np.flatnonzero((entries["role"] == role) & (entries["layer"] == layer))
    entries["role"][at] = Role.ROPE_FACTORS
    out.write_bytes(draft.seal().data)
    return out


@pytest.mark.parametrize("family", (*tm.ALL_FAMILIES, *rm.RECIPES))
def test_a_missing_tensor_of_any_role_is_named(containers: Containers, family: str) -> None:
    """The last layer that has the role: a census that looked at the first only would not do."""
    for path in containers_of(containers, family):
        found = verify(path, quick=True)
        assert found.ok, found.errors
        with files.open(path) as container:
            last = {
                Role(t.role): t.layer
                for t in sorted(container.tensors.values(), key=lambda t: t.layer)
                if t.group != Group.OPTIONAL and t.role not in UNNEEDED
            }
        out = containers.folder() / "m.colibri"
        for role, layer in last.items():
            report = verify(without(path, out, role, layer), quick=True)
            assert not report.ok, role
            wanted = f"expected a tensor of role {role.label}, found none"
            if role is Role.ROUTER:  # the container does not even open
                wanted = "found no router"
            said = [e for e in report.errors if wanted in e.message]
            assert said and said[0].layer == (layer if layer >= 0 else None), (role, report.errors)
