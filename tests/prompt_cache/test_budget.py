"""The byte budget: exact, never exceeded, and the order of eviction."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, PromptCache, room
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, NODE_BYTES
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

from .stores import DEADLINE

SIZE = 100_000
ROOM = 30_000
"""For the nodes and token ids of a few paths, and what each checkpoint takes besides its snapshot."""

NO_COSTS = Costs()


def path_bytes(tokens: int, nodes: int = 1) -> int:
    """Bytes of nodes and of their tokens."""
    return 4 * tokens + NODE_BYTES * nodes


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
    points = 2 * (SIZE + ENTRY_BYTES)
    assert cache.stats().bytes_ram == points + path_bytes(100)
    cache.admit(view(path), 100, cache.buffer(SIZE), np.zeros(50, np.float32))
    assert cache.stats().bytes_ram == points + path_bytes(100) + 4 * 50, "the replaced one is counted"
    cache.remember("m", np.array([*path[:60], 7, 7], np.int32))
    assert cache.stats().bytes_ram == points + path_bytes(102, 3) + 4 * 50
    taken = cache.buffer(SIZE)
    assert cache.stats().bytes_ram == points + path_bytes(102, 3) + 4 * 50 + SIZE
    del taken
    cache.clear()
    assert cache.stats().bytes_ram == 0


def test_logits_are_copied_and_buffers_become_read_only() -> None:
    cache = PromptCache(1 << 20)
    buffer, logits = cache.buffer(SIZE), np.ones(8, np.float32)
    cache.admit(view([1, 2]), 2, buffer, logits)
    logits[:] = 0
    plan = cache.plan(np.array([1, 2], np.int32), view([0]), (), NO_COSTS)
    assert plan.checkpoint is not None
    assert plan.checkpoint.snapshot is buffer
    assert plan.logits is not None
    assert plan.logits.tolist() == [1.0] * 8
    with pytest.raises(ValueError, match="read-only"):
        buffer[0] = 1


def test_positions_outside_the_live_sequence_are_an_error() -> None:
    cache = PromptCache()
    for position in (0, 4):
        with pytest.raises(ValueError, match="no position"):
            cache.admit(view([1, 2, 3]), position, cache.buffer(SIZE))


def test_of_equal_conversations_the_longest_unused_goes_first() -> None:
    cache = PromptCache(3 * SIZE + ROOM)
    old, used, new, live = ([i] * 10 for i in range(1, 5))
    fill(cache, used, 10)
    fill(cache, old, 10)
    fill(cache, new, 10)
    assert kept(cache, used, 10) == [10]
    fill(cache, live, 10)
    assert kept(cache, old, 10) == []
    assert kept(cache, used, 10) == [10]
    assert kept(cache, live, 10) == [10]


def test_a_prompt_alone_keeps_its_newest_checkpoint_and_others_all_along_it() -> None:
    cache = PromptCache(8 * SIZE + ROOM)
    path = list(range(4000))
    fill(cache, path, *range(100, 4001, 100))
    left = kept(cache, path, *range(100, 4001, 100))
    assert len(left) == 8
    assert left[-1] == 4000
    assert max(np.diff([0, *left])) <= 2 * 4000 / 8


def test_pinned_snapshots_stay_until_released() -> None:
    cache = PromptCache(2 * SIZE + ROOM)
    fill(cache, [1, 2, 3], 3)
    plan = cache.plan(np.array([1, 2, 3, 4], np.int32), view([0]), (), NO_COSTS)
    assert plan.checkpoint is not None
    fill(cache, [5, 6, 7], 1, 2, 3)
    assert cache.plan(np.array([1, 2, 3, 4], np.int32), view([0]), (), NO_COSTS).cached == 3
    cache.clear()
    assert (cache.stats().entries, cache.stats().bytes_ram) == (0, SIZE)
    fill(cache, [8, 8], 1, 2)
    assert set(plan.checkpoint.snapshot.tolist()) == {3}


def test_pins_outlast_what_the_budget_asks_for_until_the_last_one_is_taken_back() -> None:
    cache = PromptCache(1 << 20)
    path = list(range(200))
    cache.pin(path)
    cache.pin(path[:150])
    fill(cache, path, 100, 180)
    cache.unpin([7])
    cache.unpin(path)
    cache.ram_bytes = 4 * 200
    assert kept(cache, path, 100, 180) == [100]
    cache.unpin(path[:150])
    assert cache.stats().bytes_ram <= cache.ram_bytes
    cache.pin(path)
    cache.clear()
    cache.ram_bytes = 1 << 20
    fill(cache, path, 180)
    cache.ram_bytes = 100
    assert cache.stats().entries == 0, "no pin survives"


def test_a_request_beside_a_budget_that_shrinks_does_not_evict_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptCache(1 << 24)
    for first in range(40):
        fill(cache, [first, 1, 2], 3, size=1000)
    kept: list[tuple[int, int]] = []

    def request(_: float) -> None:
        before = cache.stats().entries
        cache.release(cache.plan(np.array([0, 5], np.int32), view([0]), (), NO_COSTS))
        kept.append((before, cache.stats().entries))

    monkeypatch.setattr(room.time, "sleep", request)  # lets others have the lock
    monkeypatch.setattr(room, "SLICE_SECONDS", 0.0)
    cache.ram_bytes = 100
    assert len(kept) > 10
    assert all(before == after for before, after in kept)
    assert cache.stats().entries == 0


def test_evictions_for_a_large_buffer_let_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptCache(1 << 20)
    for first in range(40):
        fill(cache, [first, 1, 2], 3, size=20_000)
    left: list[int] = []
    monkeypatch.setattr(room.time, "sleep", lambda _: left.append(cache.stats().entries))
    monkeypatch.setattr(room, "SLICE_SECONDS", 0.0)
    large = cache.buffer(500_000)
    assert cache.stats().bytes_ram <= 1 << 20
    assert len(set(left)) > 10
    segment = cache.segment_buffer(view([1, 2], needs_attention=True), 500_000)
    assert segment is not None
    assert cache.stats().bytes_ram <= 1 << 20
    del large, segment
    for first in range(40):
        fill(cache, [first, 1, 2], 3, size=20_000)
    left.clear()
    assert cache.expect("m", np.array([1, 2], np.int32), 500_000) is not None
    assert len(set(left)) > 10
    left.clear()
    assert cache.admit(view([1, 2]), 2, np.zeros(900_000, np.uint8))
    assert len(set(left)) > 10
    for first in range(40):
        fill(cache, [first, 1, 3], 3, size=20_000)
    left.clear()
    cache.remember("m", np.arange(200_000, dtype=np.int32))
    assert len(set(left)) > 10
    assert cache.stats().bytes_ram <= 1 << 20
    large, segment = cache.buffer(500_000), cache.segment_buffer(view([1, 2], needs_attention=True), 500_000)
    assert segment is not None
    assert large.nbytes == segment.nbytes == 500_000


@pytest.mark.parametrize("what", ["buffer", "segment_buffer"])
def test_a_request_does_not_wait_while_memory_is_found_for_another(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, waits, new_buffer = PromptCache(1 << 20), [], room.new_buffer

    def made(n_bytes: int) -> Bytes:
        other = threading.Thread(target=cache.stats, daemon=True)
        other.start()
        other.join(DEADLINE)
        waits.append(other.is_alive())
        return new_buffer(n_bytes)

    monkeypatch.setattr(room, "new_buffer", made)
    here = (view([1, 2]), SIZE) if what == "segment_buffer" else (SIZE,)
    assert getattr(cache, what)(*here).nbytes == SIZE
    assert waits == [False]


def test_a_checkpoint_that_pins_leave_no_room_for_is_refused_and_evicts_nothing() -> None:
    cache = PromptCache(4 * SIZE)
    fill(cache, [1, 2], 2, size=2 * SIZE)
    fill(cache, [3, 4], 2)
    plan = cache.plan(np.array([1, 2, 4], np.int32), view([0]), (), NO_COSTS)
    assert not cache.admit(view([5, 6]), 2, np.zeros(2 * SIZE, np.uint8))
    assert kept(cache, [3, 4], 2) == [2]
    cache.release(plan)
    assert cache.admit(view([5, 6]), 2, np.zeros(2 * SIZE, np.uint8))


def test_buffers_handed_out_count_until_admitted_or_collected() -> None:
    cache = PromptCache(4 * SIZE)
    taken = [cache.buffer(SIZE) for _ in range(3)]
    assert cache.stats().bytes_ram == 3 * SIZE
    fill(cache, [1, 2], 2)
    assert cache.stats().entries == 0 or cache.stats().bytes_ram <= 4 * SIZE
    cache.clear()
    assert cache.admit(view([1, 2]), 2, taken[0])
    index = ENTRY_BYTES + path_bytes(2)
    assert cache.stats().bytes_ram == 3 * SIZE + index
    taken.pop()
    assert cache.stats().bytes_ram == 2 * SIZE + index
    taken.clear()
    assert cache.stats().bytes_ram == SIZE + index


def test_a_buffer_too_large_for_the_budget_is_not_counted() -> None:
    cache = PromptCache(SIZE)
    buffer = cache.buffer(2 * SIZE)
    assert buffer.nbytes == 2 * SIZE
    assert cache.stats().bytes_ram == 0


def test_cuts_of_one_prompt_fill_half_the_budget_at_most() -> None:
    cache = PromptCache(8 * SIZE)
    prompt = np.arange(9000, dtype=np.int32)
    boundaries = range(500, 9000, 500)
    plan = cache.plan(prompt, view([]), boundaries, Costs(snapshot_bytes=SIZE))
    assert len(plan.cuts) == 4
    assert 8500 in plan.cuts
    assert len(cache.plan(prompt, view([]), boundaries, Costs(snapshot_bytes=100 * SIZE)).cuts) == 1


def test_a_path_asked_for_again_outlives_one_that_was_not() -> None:
    cache = PromptCache(path_bytes(250, 2))
    for token in (1, 2):
        cache.remember("m", np.full(100, token, np.int32))
    cache.plan(np.full(100, 1, np.int32), view([]), (), NO_COSTS)
    cache.remember("m", np.full(100, 3, np.int32))
    matched = [cache.plan(np.full(100, t, np.int32), view([]), (), NO_COSTS).matched for t in (1, 2, 3)]
    assert matched == [100, 0, 100]


def test_an_older_checkpoint_goes_before_a_younger_remembered_path() -> None:
    cache = PromptCache(2 * (SIZE + ENTRY_BYTES) + path_bytes(115, 3))
    fill(cache, [1] * 10, 10)
    cache.remember("m", np.full(100, 2, np.int32))
    fill(cache, [3] * 10, 10)
    assert kept(cache, [1] * 10, 10) == []
    assert cache.plan(np.full(100, 2, np.int32), view([]), (), NO_COSTS).matched == 100


def test_remembered_paths_go_with_age_and_never_cost_a_live_checkpoint() -> None:
    cache = PromptCache(2 * (1000 + ENTRY_BYTES) + path_bytes(1000, 3))
    live = list(range(500))
    cache.remember("m", np.full(400, 7, np.int32))
    fill(cache, live, 100, 500, size=1000)
    cache.remember("m", np.full(400, 8, np.int32))
    plan = cache.plan(np.full(400, 7, np.int32), view(live), (), NO_COSTS)
    assert plan.matched == 0
    cache.remember("m", np.array([*live, *range(5000, 6000)], np.int32))
    assert kept(cache, live, 100, 500) == [100, 500]


@pytest.mark.parametrize(("prompts", "snapshot_bytes"), [(20_000, 0), (2_000, 4096)])
def test_distinct_prompts_without_end_stay_within_the_budget(prompts: int, snapshot_bytes: int) -> None:
    """Also their nodes: Python's own memory stays near what the cache counts."""
    cache, draw = PromptCache(4 << 20), np.random.default_rng(0)
    tracemalloc.start()
    try:
        for number in range(prompts):
            prompt = draw.integers(0, 50_000, 24).astype(np.int32)
            cache.release(cache.plan(prompt, view([]), (), NO_COSTS))
            if snapshot_bytes:
                cache.admit(view(prompt), len(prompt), cache.buffer(snapshot_bytes))
            cache.remember("m", prompt)
            if number % 500 == 0:
                assert cache.stats().bytes_ram <= cache.ram_bytes
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.stats().bytes_ram > cache.ram_bytes // 2
    assert used < 1.25 * cache.ram_bytes
    check_integrity(cache)


def test_a_cache_that_is_dropped_gives_its_bytes_back_at_once() -> None:
    cache = PromptCache(1 << 20)
    fill(cache, [1, 2, 3, 4], 2, 4)
    fill(cache, [1, 2, 7, 8], 4)
    plan = cache.plan(np.array([1, 2, 3, 4, 5], np.int32), view([-2]), (), NO_COSTS)
    assert plan.checkpoint is not None
    snapshot = weakref.ref(plan.checkpoint.snapshot)
    gc.disable()
    try:
        del cache, plan
        assert snapshot() is None
    finally:
        gc.enable()


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
                check_integrity(cache)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that a missing lock shows
    threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert errors == []
    assert cache.stats().bytes_ram <= 6000
    assert cache.stats().hits > 0
