"""Resumable prefixes are those that the planner would use, and on disk those of the next process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamahybrid.prompt_cache.base import LiveView
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.resumable import MOST_PATHS, in_ram, on_disk_paths


def view(tokens: list[int], namespace: str = "model") -> LiveView:
    ids = np.array(tokens, np.int32)
    return LiveView(namespace, ids, len(ids), True, False, False)


def store(cache: PromptCache, tokens: list[int], *positions: int) -> None:
    live = view(tokens)
    for position in positions:
        path = live.tokens[:position]
        state = sealed(np.zeros(64, np.uint8), namespace=live.namespace, tokens=path)
        assert cache.admit(live, position, state)
    cache.remember(live.namespace, live.tokens)


def paths(cache: PromptCache, namespace: str = "model") -> set[tuple[int, ...]]:
    return {tuple(int(t) for t in path) for path in in_ram(cache, view([], namespace))}


def test_each_path_up_to_its_deepest_checkpoint() -> None:
    cache = PromptCache(ram_bytes=1 << 20)
    store(cache, [1, 2, 3, 4, 5, 6], 2, 4)
    store(cache, [1, 2, 7, 8], 3)
    store(cache, [9, 9, 9])
    assert paths(cache) == {(1, 2, 3, 4), (1, 2, 7)}
    assert paths(cache, "another") == set()


def test_a_shared_checkpoint_serves_branches_without_one() -> None:
    cache = PromptCache(ram_bytes=1 << 20)
    store(cache, [*range(9), 3, 4], 9)
    store(cache, [*range(9), 7, 8], 9)
    assert paths(cache) == {tuple(range(9))}


def test_the_disk_tells_what_lies_there(tmp_path: Path) -> None:
    cache = PromptCache(ram_bytes=1 << 20, disk_dir=tmp_path)
    store(cache, [1, 2, 3, 4, 5, 6], 4)
    live = view([1, 2, 3, 4, 5, 6])
    assert list(on_disk_paths(cache, live)) == []
    cache.queue_writes(live)
    assert cache.flush()
    assert [list(path) for path in on_disk_paths(cache, live)] == [[1, 2, 3, 4]]
    assert list(on_disk_paths(PromptCache(ram_bytes=1 << 20), live)) == []


def test_of_very_many_paths_some_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_PATHS >= 1000
    monkeypatch.setattr("llamahybrid.prompt_cache.resumable.MOST_PATHS", 3)
    cache = PromptCache(ram_bytes=1 << 20)
    for first in range(10):
        store(cache, [first, 1, 2], 3)
    assert len(paths(cache)) == 3
