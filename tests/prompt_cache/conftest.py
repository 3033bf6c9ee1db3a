"""What the tests of the disk share, and those of a shared store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamahybrid.prompt_cache.cache import PromptCache
from tests.lab.redis_server import RedisServer

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
    started = RedisServer(tmp_path)
    yield started
    started.resume()
    started.kill()


@pytest.fixture
def machine(server: RedisServer) -> Callable[..., PromptCache]:
    """`machine(**more)`: the cache of one of those that share it."""
    return lambda **more: PromptCache(ram_bytes=1 << 20, remote=server.url, **more)
