"""Fixtures shared by the tests."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiny_containers import Containers


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """Containers of tiny models, built on demand and once."""
    from tiny_containers import Containers  # late: most tests need no C extension

    return Containers(tmp_path_factory.mktemp("containers"))


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Give back the handlers that the command line's `main`, called in this process, sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
