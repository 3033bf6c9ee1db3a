"""Outlines of a cache: shared prefixes once, bytes that add up, the checkpoints that are evicted next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.nodes import Match, tokens_of
from llamahybrid.prompt_cache.outline import Branch, CacheOutline, outline, outline_of_places
from llamahybrid.prompt_cache.tree import Tree
from tests.lab.fake_engine import FakeEngine

from .asking import A, B, ask
from .test_budget import ROOM, SIZE, fill, kept


def paths(seen: CacheOutline) -> list[list[int]]:
    """The tokens up to the end of each leaf, put together from the branches."""
    ends: list[list[int]] = []
    for branch in seen.branches:
        before = ends[branch.parent] if branch.parent >= 0 else []
        assert len(before) == branch.start
        ends.append([*before, *tokens_of(branch.ids).tolist()])
        assert len(ends[-1]) == branch.end
    parents = {branch.parent for branch in seen.branches}
    return [path for i, path in enumerate(ends) if i not in parents]


def require_once(seen: CacheOutline) -> None:
    """No two branches that go on from the same place begin with the same token."""
    firsts = [(b.namespace, b.parent, tokens_of(b.ids)[0]) for b in seen.branches]
    assert len(set(firsts)) == len(firsts)


def total(branches: Sequence[Branch], tier: str) -> int:
    return sum(getattr(branch, tier).nbytes for branch in branches)


def held(cache: PromptCache) -> int:
    """Bytes of snapshots, logits and segments in RAM."""
    stats = cache.stats()
    return stats.bytes_ram - stats.extra["index_bytes"]


def begins(paths: Sequence[Sequence[int]], path: Sequence[int]) -> bool:
    return any(list(each[: len(path)]) == list(path) for each in paths)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_was_asked_each_path_is_there_and_bytes_add_up(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    asked: list[list[int]] = []
    folder = tmp_path / "cache"
    for _ in range(3):
        cache = PromptCache(1 << 24, folder)
        for _ in range(6):
            base = asked[rng.integers(len(asked))] if asked and rng.random() < 0.8 else []
            cut = int(rng.integers(len(base) + 1))
            asked.append([*base[:cut], *rng.integers(0, 3, int(rng.integers(20, 200))).tolist()])
            ask(cache, asked[-1], "hybrid" if rng.random() < 0.5 else "recurrent")
        cache.close()
        seen = outline(cache)
        require_once(seen)
        assert total(seen.branches, "disk") == cache.stats().extra["disk_bytes"]
        assert total(seen.branches, "ram") == held(cache)
        assert sum(b.ram.checkpoints for b in seen.branches) == cache.stats().entries
        assert [b for b in seen.branches if "disk" in b.goes_next]
        assert all(begins(paths(seen), prompt) for prompt in asked[-6:])


def test_of_many_the_last_used_are_shown_and_the_others_counted() -> None:
    cache = PromptCache(1 << 24)
    system = list(range(100))
    for chat in range(40):
        fill(cache, [*system, *range(1000 * chat + 1000, 1000 * chat + 1020)], 120)
    seen = outline(cache, limit=11)
    top = seen.branches[0]
    assert (top.start, top.end, top.more) == (0, 100, 30)
    shown = {int(tokens_of(b.ids)[0]) // 1000 - 1 for b in seen.branches[1:]}
    assert len(shown) == 10
    assert len(shown & set(range(30, 40))) >= 7, "but for what goes next, the newest"
    assert 0 in shown or any("ram" in b.goes_next for b in seen.branches)
    more = PromptCache(1 << 24)
    for chat in range(40):
        fill(more, range(1000 * chat, 1000 * chat + 20), 20)
    assert outline(more, limit=10).more == 30


def test_the_branch_shown_to_go_next_goes_next() -> None:
    cache = PromptCache(1 << 20)
    for chat in range(20):
        path = range(1000 * chat, 1000 * chat + 100)
        fill(cache, path, 50, 100)
        kept(cache, path, 50, 100)
    for _ in range(5):
        seen = outline(cache)
        going = [b for b in seen.branches if "ram" in b.goes_next]
        assert going
        before = {int(tokens_of(b.ids)[0]): b.ram.checkpoints for b in seen.branches}
        entries = cache.stats().entries
        while cache.stats().entries == entries:
            cache.ram_bytes = cache.stats().bytes_ram - 1
        now = {int(tokens_of(b.ids)[0]): b.ram.checkpoints for b in outline(cache).branches}
        less = {first for first in before if now.get(first, 0) < before[first]}
        assert less <= {int(tokens_of(b.ids)[0]) for b in going}


def test_a_pinned_branch_is_shown_as_pinned_and_never_to_go() -> None:
    cache = PromptCache(1 << 20)
    fill(cache, range(100), 50, 100)
    fill(cache, range(1000, 1100), 100)
    cache.pin(range(100))
    pinned = [b for b in outline(cache).branches if b.ram.pinned]
    assert [b.ram.pinned for b in pinned] == [2]
    assert not any(b.goes_next for b in pinned)


@pytest.mark.parametrize("disk", [False, True])
def test_the_tokens_of_a_path_are_put_together_once(
    disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each thing that is stored on it: a path may have 100,000 tokens."""
    cache = PromptCache(1 << 24, tmp_path / "cache" if disk else None)
    ask(cache, A, "hybrid")
    cache.close()
    if disk:
        cache.ram_bytes = 0
    inserted: list[Tokens] = []
    real = Tree.insert

    def insert(tree: Tree, namespace: str, tokens: Tokens) -> Match:
        inserted.append(tokens)
        return real(tree, namespace, tokens)

    monkeypatch.setattr(Tree, "insert", insert)
    kept = [branch.disk if disk else branch.ram for branch in outline(cache).branches]
    assert sum(each.checkpoints + each.attention for each in kept) > len(inserted) > 0
    assert len({tuple(tokens.tolist()) for tokens in inserted}) == len(inserted)


def test_looking_makes_nothing_older_or_younger() -> None:
    """The same requests leave the same behind, looked at or not."""

    def left(look: bool) -> list[list[int]]:
        cache = PromptCache(6 * SIZE + ROOM)
        for chat in range(30):
            path = range(1000 * (chat % 7), 1000 * (chat % 7) + 100)
            fill(cache, path, 50, 100)
            kept(cache, path, 50, 100)
            if look:
                outline(cache)
        return [kept(cache, range(1000 * chat, 1000 * chat + 100), 50, 100) for chat in range(7)]

    assert left(look=True) == left(look=False) != []


def test_slots_mark_what_runs_in_them_and_show_nothing_of_their_own() -> None:
    cache = PromptCache(1 << 24)
    for prompt in (A, B):
        ask(cache, prompt)
    secret = [*A[:200], 77777, 77778]
    live = [("model", np.array(secret, np.int32)), ("other", np.array(B, np.int32))]
    seen = outline(cache, live)
    assert [(b.start, b.slots) for b in seen.branches if b.slots] == [(0, [0]), (150, [0])]
    assert not any(77777 in path for path in paths(seen))


def test_only_what_is_asked_for_is_shown() -> None:
    cache = PromptCache(1 << 24)
    ask(cache, A)
    FakeEngine(cache, namespace="model+tenant").request(B, answer=[1])
    assert {b.namespace for b in outline(cache).branches} == {"model", "model+tenant"}
    assert {b.namespace for b in outline(cache, shown=lambda name: "+" not in name).branches} == {"model"}
    assert not outline(cache, shown=lambda name: False).branches


def test_an_empty_cache(folder: Path) -> None:
    assert outline(PromptCache(1 << 20)) == CacheOutline(())
    assert outline(PromptCache(1 << 20, folder)) == CacheOutline(())
    assert outline_of_places([], b"") == CacheOutline(())
