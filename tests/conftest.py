"""Fixtures shared by the tests."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from c_programs import Library
    from tiny_containers import Containers


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """Containers of tiny models, built on demand and once."""
    from tiny_containers import Containers  # late: most tests need no C extension

    return Containers(tmp_path_factory.mktemp("containers"))


@pytest.fixture(scope="session")
def asan_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """libcolibri with AddressSanitizer and UndefinedBehaviorSanitizer."""
    from c_programs import ASAN, compile_library

    return compile_library(ASAN, tmp_path_factory.mktemp("asan"))


@pytest.fixture(scope="session")
def tsan_library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """libcolibri with ThreadSanitizer."""
    from c_programs import TSAN, compile_library

    return compile_library(TSAN, tmp_path_factory.mktemp("tsan"))


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Give back the handlers that the command line's `main`, called in this process, sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
