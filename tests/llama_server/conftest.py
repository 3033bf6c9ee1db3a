"""llama-server of the pinned source, stock and patched, built when it is not there yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import server_build


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of it for the full suite, and tests that need the programs: the first run builds them."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker("full")
        if "servers" in getattr(item, "fixturenames", ()):
            item.add_marker("server")
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def servers() -> server_build.Servers:
    return server_build.make(lambda *_: None)
