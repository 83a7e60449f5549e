"""Fixtures shared by the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny_containers import Containers


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """Containers of tiny models, built on demand and once."""
    from tiny_containers import Containers  # late: most tests need no C extension

    return Containers(tmp_path_factory.mktemp("containers"))
