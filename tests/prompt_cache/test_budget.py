"""The byte budget: exact, never exceeded, and what goes first when it is full."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, PromptCache, ram
from llamahybrid.prompt_cache.base import Tokens

from .fake_engine import FakeEngine

SIZE = 1000
NO_COSTS = Costs()


def view(tokens: Sequence[int] | Tokens, needs_attention: bool = False) -> LiveView:
    n = len(tokens)
    return LiveView("m", np.asarray(tokens, np.int32), n, True, needs_attention, False)


def fill(cache: PromptCache, tokens: Sequence[int], *positions: int, size: int = SIZE) -> list[bool]:
    """Checkpoints along one path; the snapshot's first byte says where it was taken."""
    done = []
    for position in positions:
        buffer = cache.buffer(size)
        buffer[:] = position % 251
        done.append(cache.admit(view(tokens[:position]), position, buffer))
    return done


def kept(cache: PromptCache, tokens: Sequence[int], *positions: int) -> list[int]:
    """Which of the positions still have a checkpoint."""
    found = []
    for position in positions:
        plan = cache.plan(np.array([*tokens[:position], -1], np.int32), view([-2]), (), NO_COSTS)
        cache.release(plan)
        if plan.cached == position:
            assert plan.checkpoint is not None
            assert set(plan.checkpoint.snapshot.tolist()) == {position % 251}
            found.append(position)
    return found


def test_every_byte_is_counted_once() -> None:
    cache = PromptCache(1 << 20)
    path = list(range(100))
    fill(cache, path, 40, 100)
    assert cache.stats().bytes_ram == 2 * SIZE + 4 * 100
    cache.admit(view(path), 100, cache.buffer(SIZE), np.zeros(50, np.float32))
    assert cache.stats().bytes_ram == 2 * SIZE + 4 * 100 + 4 * 50 + SIZE  # the replaced buffer lies idle
    cache.remember("m", np.array([*path[:60], 7, 7], np.int32))
    assert cache.stats().bytes_ram == 3 * SIZE + 4 * 102 + 4 * 50
    taken = cache.buffer(SIZE)
    assert cache.stats().extra["idle_bytes"] == 0
    cache.recycle(taken)
    assert cache.stats().extra["idle_bytes"] == SIZE
    cache.clear()
    assert cache.stats().bytes_ram == 0


def test_a_view_is_copied_so_that_it_holds_no_uncounted_memory() -> None:
    cache = PromptCache(1 << 20)
    big = np.zeros(100_000, np.uint8)
    cache.admit(view([1, 2]), 2, big[:SIZE])
    big[:] = 9
    plan = cache.plan(np.array([1, 2, 3], np.int32), view([0]), (), NO_COSTS)
    assert plan.checkpoint is not None
    assert plan.checkpoint.snapshot.base is None
    assert not plan.checkpoint.snapshot.any()


def test_stored_logits_are_a_copy() -> None:
    cache = PromptCache(1 << 20)
    logits = np.ones(8, np.float32)
    cache.admit(view([1, 2]), 2, cache.buffer(SIZE), logits)
    logits[:] = 0
    plan = cache.plan(np.array([1, 2], np.int32), view([0]), (), NO_COSTS)
    assert plan.logits is not None
    assert plan.logits.tolist() == [1.0] * 8


def test_buffers_are_used_again_and_guarded() -> None:
    cache = PromptCache(3 * SIZE)
    buffer = cache.buffer(SIZE)
    cache.recycle(buffer)
    assert cache.buffer(SIZE) is buffer
    cache.admit(view([1]), 1, buffer)
    with pytest.raises(ValueError, match="leave it to the cache"):
        cache.recycle(buffer)
    with pytest.raises(ValueError, match="read-only"):
        buffer[0] = 1
    other = cache.buffer(SIZE)
    cache.recycle(other)
    with pytest.raises(ValueError, match="leave it to the cache"):
        cache.recycle(other)


def test_a_full_cache_hands_out_the_buffer_of_what_goes() -> None:
    cache = PromptCache(2 * SIZE + 100)
    first = cache.buffer(SIZE)
    cache.admit(view([1]), 1, first)
    fill(cache, [2], 1)
    cache.plan(np.array([3], np.int32), view([0]), (), NO_COSTS)
    assert cache.buffer(SIZE) is first
    assert cache.stats().evictions == 1


def test_a_checkpoint_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    cache = PromptCache(5 * SIZE)
    fill(cache, [1, 2, 3], 1, 3)
    assert fill(cache, [7, 8], 2, size=6 * SIZE) == [False]
    assert (cache.stats().refused, cache.stats().entries, cache.stats().evictions) == (1, 2, 0)


def test_positions_outside_the_live_sequence_are_an_error() -> None:
    cache = PromptCache()
    for position in (0, 4):
        with pytest.raises(ValueError, match="no position"):
            cache.admit(view([1, 2, 3]), position, cache.buffer(SIZE))


def test_other_conversations_go_first_the_longest_unused_before_others() -> None:
    cache = PromptCache(4 * SIZE + 200)
    old, used, live = [1] * 10, [2] * 10, [3] * 10
    fill(cache, old, 10)
    fill(cache, used, 10)
    fill(cache, live, 5)
    assert kept(cache, used, 10) == [10]
    fill(cache, live, 8, 10)
    assert kept(cache, old, 10) == []
    assert kept(cache, used, 10) == [10]
    assert kept(cache, live, 5, 8, 10) == [5, 8, 10]


def test_on_the_live_path_gaps_grow_with_the_distance_and_both_ends_stay() -> None:
    cache = PromptCache(8 * SIZE + 4 * 4000)
    path = list(range(4000))
    fill(cache, path, *range(100, 4001, 100))
    left = kept(cache, path, *range(100, 4001, 100))
    assert len(left) == 8
    assert (left[0], left[-1]) == (100, 4000)
    assert 3900 in left
    gaps = np.diff(left)
    assert gaps[0] == max(gaps)
    assert gaps[-1] == min(gaps)


def test_prompt_ends_outlive_what_lies_around_them() -> None:
    cache = PromptCache(6 * SIZE + 4 * 2000 + 40)
    path = list(range(2000))
    for position in range(100, 2001, 50):
        logits = np.zeros(10, np.float32) if position == 1500 else None
        cache.admit(view(path[:position]), position, cache.buffer(SIZE), logits)
    assert cache.plan(np.array(path[:1500], np.int32), view([0]), (), NO_COSTS).cached == 1500


def test_pinned_snapshots_stay_until_released() -> None:
    cache = PromptCache(2 * SIZE + 400)
    fill(cache, [1, 2, 3], 3)
    plan = cache.plan(np.array([1, 2, 3, 4], np.int32), view([0]), (), NO_COSTS)
    assert plan.checkpoint is not None
    fill(cache, [5, 6, 7], 1, 2, 3)
    assert cache.plan(np.array([1, 2, 3, 4], np.int32), view([0]), (), NO_COSTS).cached == 3
    cache.clear()
    assert (cache.stats().entries, cache.stats().bytes_ram) == (0, SIZE)
    fill(cache, [8, 8], 1, 2)
    assert set(plan.checkpoint.snapshot.tolist()) == {3}


def test_remembered_paths_go_with_age_and_never_cost_a_live_checkpoint() -> None:
    cache = PromptCache(2 * SIZE + 4 * 1000)
    live = list(range(500))
    cache.remember("m", np.full(400, 7, np.int32))
    fill(cache, live, 100, 500)
    cache.remember("m", np.full(400, 8, np.int32))
    plan = cache.plan(np.full(400, 7, np.int32), view(live), (), NO_COSTS)
    assert plan.matched == 0
    cache.remember("m", np.array([*live, *range(5000, 6000)], np.int32))
    assert kept(cache, live, 100, 500) == [100, 500]


def test_a_smaller_budget_takes_effect_at_once() -> None:
    cache = PromptCache(1 << 20)
    fill(cache, list(range(50)), 10, 20, 30, 40, 50)
    cache.ram_bytes = 2 * SIZE + 300
    assert cache.stats().bytes_ram <= cache.ram_bytes
    assert cache.stats().entries == 2
    cache.check_integrity()


@pytest.mark.parametrize(
    ("pages", "expected"),
    [(1 << 10, ram.MIN_RAM_BYTES), (1 << 20, 1 << 29), (1 << 30, ram.MAX_RAM_BYTES)],
)
def test_the_default_is_an_eighth_of_memory_within_limits(
    monkeypatch: pytest.MonkeyPatch, pages: int, expected: int
) -> None:
    monkeypatch.setattr(ram.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.__getitem__)
    assert PromptCache().ram_bytes == expected


def test_a_system_that_does_not_tell_its_memory_gets_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(ram.os, "sysconf", unknown)
    assert PromptCache().ram_bytes == ram.MIN_RAM_BYTES


def test_two_threads_share_one_cache() -> None:
    """Both work under one starving budget; every restore is proven by the fake engine, bytes stay exact."""
    cache = PromptCache(6000)
    errors: list[BaseException] = []

    def chat(seed: int) -> None:
        rng = np.random.default_rng(seed)
        engine = FakeEngine(cache, "recurrent", costs=NO_COSTS, snapshot_tokens=16)
        try:
            for _ in range(150):
                keep = int(rng.integers(0, len(engine.state) + 1))
                prompt = (engine.state[:keep] + rng.integers(0, 2, 12).tolist())[:80]
                engine.prefill(prompt)
                engine.generate(rng.integers(0, 2, 8).tolist())
                stats = cache.stats()
                assert stats.bytes_ram <= 6000 + 2 * 400  # what two plans may keep pinned
                cache.check_integrity()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.stats().bytes_ram <= 6000
    assert cache.stats().hits > 0
