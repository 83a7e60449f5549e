"""A profile that was chosen for a model: loaded, and checked to be the model's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_tools.errors import UsageError
from colibri_tools.profile.file import RoutingProfile, load_profile, to_bytes

__all__ = ["Routing", "load_routing"]


@dataclass(frozen=True, eq=False, slots=True)
class Routing:
    """A profile and the SHA-256 of its contents, which a container records."""

    profile: RoutingProfile
    sha256: str

    def provenance(self) -> dict[str, Any]:
        """Return what a container made with it says about it."""
        return {
            "recipe.routing.sha256": self.sha256,
            "recipe.routing.tokens": self.profile.n_tokens,
            "recipe.routing.domains": list(self.profile.domains),
        }


def load_routing(path: Path, fingerprint: str) -> Routing:
    """Load the profile at `path` for the model with this fingerprint.

    Raises FormatError for a broken file, UsageError for the profile of another model.
    """
    profile = load_profile(path)
    if profile.fingerprint != fingerprint:
        raise UsageError(
            f"{path}: is a profile of another model ({profile.family}, {profile.n_rows} MoE "
            f"layers, fingerprint {profile.fingerprint[:12]}; this model's is {fingerprint[:12]})"
        )
    return Routing(profile, hashlib.sha256(to_bytes(profile)).hexdigest())
