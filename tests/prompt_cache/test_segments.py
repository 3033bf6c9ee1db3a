"""Stored attention: which segments serve a prompt, where they are cut, what they stay for, what they cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, Plan, PromptCache
from llamahybrid.prompt_cache.base import NOTHING, Loaded, Segment
from llamahybrid.prompt_cache.envelope import HEADER_BYTES
from llamahybrid.prompt_cache.nodes import ENTRY_BYTES
from tests.lab.fake_engine import FakeAttention, FakeEngine
from tests.lab.integrity import check_integrity

from .test_budget import path_bytes

ENGINE = FakeEngine(PromptCache(0))
"""Makes segments, cuts them and tells what is in them."""

SIZE = 1000
POINT = SIZE + ENTRY_BYTES
"""Bytes of a checkpoint."""

PATH = list(range(300))
ELSEWHERE = [-7]


def view(tokens: Sequence[int], pages: bool = True) -> LiveView:
    n = len(tokens)
    ids = np.array(tokens, np.int32)
    return LiveView("m", ids, n, True, True, False, split=ENGINE.paging if pages else None)


def piece(path: Sequence[int], start: int, end: int) -> Segment:
    return ENGINE.attention_of(path[:start], path[start:end])


def bytes_of(*ranges: tuple[int, int]) -> int:
    return sum(piece(PATH, a, b).nbytes for a, b in ranges)


def store(cache: PromptCache, path: Sequence[int], *positions: int) -> None:
    """Checkpoints on a path, and its attention up to the deepest one."""
    for position in positions:
        assert cache.admit(view(path[:position]), position, cache.buffer(SIZE))
    for start, end in cache.missing(view(path)):
        assert cache.store_segment(view(path), piece(path, start, end))


def plan_for(cache: PromptCache, prompt: Sequence[int], live: LiveView) -> Plan:
    plan = cache.plan(np.array(prompt, np.int32), live, (), Costs())
    cache.release(plan)
    return plan


def test_attention_of_live_tokens_that_a_window_lost_reaches_nowhere() -> None:
    """The cache shares 50 tokens with them; attention behind these belongs to another path."""
    cache = PromptCache(1 << 22)
    whole = replace(view(PATH[:200]), cut_floor=0, tip_logits=False, attention_is_all=True)
    for position in (100, 200):
        cache.admit(replace(whole, tokens=whole.tokens[:position]), position, NOTHING)
    assert cache.store_segment(whole, piece(PATH[:200], 0, 200))
    live = [*PATH[:50], *range(7000, 7300)]
    window = replace(whole, tokens=np.array(live, np.int32), cut_floor=300)
    plan = plan_for(cache, [*live[:200], 1, 2, 3], window)
    assert (plan.matched, plan.cached) == (200, 50)


def calls_to_take_in(segments: int) -> int:
    """Count the calls of Python that take a checkpoint behind so many segments into RAM."""
    cache, path = PromptCache(1 << 30), list(range(10 * segments))
    pieces = tuple(piece(path, at, at + 10) for at in range(0, len(path), 10))
    tokens, calls = np.array(path, np.int32), 0
    expected = cache.expect("m", tokens, sum(s.nbytes for s in pieces))
    assert expected is not None

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    loaded = Loaded(np.zeros(SIZE, np.uint8), None, pieces)
    sys.setprofile(count)
    cache.insert_loaded(view([]), tokens, loaded, expected, 0, "disk")
    sys.setprofile(None)
    assert cache.stats().segments == segments
    check_integrity(cache)
    return calls


def test_the_time_to_take_in_segments_grows_with_their_number() -> None:
    assert calls_to_take_in(800) < 5 * calls_to_take_in(200)


def ranges(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    return [(s.start, s.end) for s in segments]


# -- what serves -----------------------------------------------------------------------------------


def test_a_restore_inside_a_segment_gets_the_part_before_it() -> None:
    cache = PromptCache(1 << 20)
    store(cache, PATH, 150, 250)
    plan = plan_for(cache, [*PATH[:200], 999], view(ELSEWHERE))
    assert (plan.cached, ranges(plan.segments)) == (150, [(0, 150)])
    assert ENGINE.tokens_in(plan.segments[0], []) == PATH[:150]
    check_integrity(cache)


def test_a_context_that_cannot_load_segments_gets_none_and_spoils_none() -> None:
    cache = PromptCache(1 << 20)
    store(cache, PATH, 150, 250)
    assert plan_for(cache, PATH, view(ELSEWHERE)).cached == 250
    assert plan_for(cache, PATH, view(ELSEWHERE, pages=False)).cached == 0
    cache.remember("m", np.array([*PATH[:200], 999], np.int32))
    assert plan_for(cache, PATH, view(ELSEWHERE)).cached == 250


def test_no_segment_is_loaded_that_live_attention_covers() -> None:
    cache = PromptCache(1 << 20)
    cache.remember("m", np.array(PATH, np.int32))
    assert cache.admit(view(PATH[:200]), 200, cache.buffer(SIZE))
    assert cache.store_segment(view(PATH), piece(PATH, 100, 300))
    plan = plan_for(cache, [*PATH[:250], 999], view([*PATH[:250], -1]))
    assert (plan.cached, plan.source, plan.segments) == (200, "ram", ())


# -- what is stored --------------------------------------------------------------------------------


def test_attention_is_wanted_up_to_the_deepest_checkpoint() -> None:
    cache = PromptCache(1 << 20)
    cache.remember("m", np.array(PATH, np.int32))
    assert cache.missing(view(PATH)) == []
    cache.admit(view(PATH[:100]), 100, cache.buffer(SIZE))
    assert cache.missing(view(PATH)) == [(0, 100)]
    assert cache.missing(view(PATH, pages=False)) == []
    assert cache.store_segment(view(PATH), piece(PATH, 20, 60))
    assert cache.missing(view(PATH)) == [(0, 20), (60, 100)]
    assert cache.store_segment(view(PATH), piece(PATH, 0, 20))
    assert cache.missing(view(PATH)) == [(60, 100)]


@pytest.mark.parametrize(("start", "end"), [(30, 60), (0, 20), (80, 120), (100, 300), (10, 400)])
def test_a_segment_that_overlaps_or_leaves_its_path_is_not_kept(start: int, end: int) -> None:
    cache = PromptCache(1 << 20)
    cache.remember("m", np.array(PATH[:200], np.int32))
    cache.remember("m", np.array(PATH[:100] + [-1] * 50, np.int32))
    cache.admit(view(PATH[:200]), 200, cache.buffer(SIZE))
    longer = [*PATH, *range(300, 400)]
    assert cache.store_segment(view(PATH), piece(PATH, 0, 50))
    assert not cache.store_segment(view(longer), piece(longer, start, end))
    check_integrity(cache)


# -- eviction --------------------------------------------------------------------------------------


def test_segments_go_with_the_last_checkpoint_that_needs_them() -> None:
    cache = PromptCache(1 << 20)
    one, two = PATH, PATH[:100] + [-1] * 100
    store(cache, one, 200)
    plan_for(cache, two, view(one))  # says how the segment is cut where they part
    store(cache, two, 200)
    for chat, left in ((one, two), (two, [])):
        plan = plan_for(cache, [*chat[:200], 999], view(ELSEWHERE))
        assert plan.checkpoint is not None
        cache.drop(plan.checkpoint)
        assert plan_for(cache, [*left[:200], 999], view(ELSEWHERE)).cached == len(left)
        check_integrity(cache)
    assert (cache.stats().segments, cache.stats().extra["segment_bytes"]) == (0, 0)


def test_a_checkpoint_taken_again_keeps_its_segments() -> None:
    cache = PromptCache(1 << 20)
    store(cache, PATH, 200)
    cache.admit(view(PATH[:200]), 200, cache.buffer(SIZE))
    assert plan_for(cache, PATH, view(ELSEWHERE)).cached == 200


def test_a_checkpoint_stays_when_its_replacement_is_refused() -> None:
    cache = PromptCache(6 * SIZE + path_bytes(300))
    store(cache, PATH[:200], 200)
    lent = cache.buffer(2 * SIZE)
    assert not cache.admit(view(PATH[:200]), 200, np.zeros(4 * SIZE, np.uint8))
    assert lent.nbytes == 2 * SIZE
    assert plan_for(cache, PATH, view(ELSEWHERE)).cached == 200
    check_integrity(cache)


# -- what it may cost ------------------------------------------------------------------------------


def test_no_segment_is_kept_at_the_price_of_a_checkpoint_of_its_path() -> None:
    need = bytes_of((0, 300))
    for budget, fits in ((need + 3 * POINT - 1, False), (need + 3 * POINT, True)):
        cache = PromptCache(budget + path_bytes(300))
        for position in (100, 200, 300):
            cache.admit(view(PATH[:position]), position, cache.buffer(SIZE))
        plan_for(cache, [5], view(ELSEWHERE))  # another request came in between
        assert (cache.segment_buffer(view(PATH), need) is not None) is fits
        assert cache.store_segment(view(PATH), piece(PATH, 0, 300)) is fits
        stats = cache.stats()
        assert (stats.entries, stats.segments, stats.refused) == (3, fits, 0 if fits else 2)
        check_integrity(cache)


def test_room_for_a_segment_is_made_before_it_is_saved() -> None:
    other = list(range(500, 800))
    cache = PromptCache(2 * POINT + path_bytes(600, 2) + 2 * bytes_of((0, 300)) - 1)
    for path in (other, PATH):
        assert cache.admit(view(path), 300, cache.buffer(SIZE))
        plan_for(cache, [5], view(ELSEWHERE))
    for start, end in cache.missing(view(other)):
        assert cache.store_segment(view(other), piece(other, start, end))
    whole = piece(PATH, 0, 300)
    before = cache.stats()
    room = cache.segment_buffer(view(PATH), whole.nbytes)
    assert room is not None
    assert room.nbytes == whole.nbytes
    assert cache.stats().evictions > before.evictions
    assert cache.stats().bytes_ram <= cache.ram_bytes
    held = cache.stats().bytes_ram
    room[:] = whole.record
    assert cache.store_segment(view(PATH), Segment(0, 300, room))
    assert cache.stats().bytes_ram == held, "counted once"
    del room
    assert cache.stats().bytes_ram == held
    check_integrity(cache)


def test_attention_that_another_chat_needs_stays() -> None:
    cache = PromptCache(1 << 20)
    one, two = PATH[:200], PATH[:100] + [-1] * 100
    store(cache, one, 200)
    cache.pin(one)
    plan_for(cache, two, view(one))
    store(cache, two, 200)
    cache.ram_bytes = 100
    assert plan_for(cache, [*one, 999], view(ELSEWHERE)).cached == 200


def test_room_for_a_segment_is_not_made_from_its_own_path() -> None:
    budget = POINT + bytes_of((0, 100)) + path_bytes(310, 2)
    cache = PromptCache(budget)
    cache.admit(view(PATH[:100]), 100, cache.buffer(SIZE))
    cache.remember("m", np.array(PATH, np.int32))
    cache.remember("m", np.full(11, -1, np.int32))  # younger, and one token too many
    assert cache.store_segment(view(PATH), piece(PATH, 0, 100))
    assert plan_for(cache, PATH, view(ELSEWHERE)).matched == 300


def test_a_path_that_closes_up_while_room_is_made_gets_its_segment() -> None:
    cache = PromptCache(POINT + bytes_of((100, 150)) + path_bytes(200, 3))
    cache.remember("m", np.array(PATH[:100] + [-1] * 50, np.int32))
    cache.admit(view(PATH[:200]), 200, cache.buffer(SIZE))
    assert cache.store_segment(view(PATH[:200]), piece(PATH, 100, 150))
    assert plan_for(cache, PATH[:100] + [-1] * 50, view(ELSEWHERE)).matched == 100
    check_integrity(cache)


def test_a_path_longer_than_others_does_not_protect_them() -> None:
    cache = PromptCache(POINT + path_bytes(320))
    cache.remember("m", np.full(100, -1, np.int32))
    cache.remember("m", np.array(PATH[:200], np.int32))
    assert cache.admit(view(PATH), 300, np.zeros(SIZE, np.uint8))
    assert plan_for(cache, [-1] * 100, view(ELSEWHERE)).matched == 0


@pytest.mark.parametrize("how", ["plan", "remember", "admit", "forget"])
def test_a_segment_is_cut_without_the_lock_and_its_parts_take_no_more_than_the_budget(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, locked, parts = PromptCache(1 << 20), list[bool](), FakeAttention.parts

    def watched(*arguments: Any) -> Iterator[Segment]:
        locked.append(cache.guard.inside())
        return parts(*arguments)

    monkeypatch.setattr(FakeAttention, "parts", watched)
    cache.remember("m", np.full(3, -1, np.int32))
    store(cache, PATH, 150, 250)
    branch = [*PATH[:200], 999]
    more = {"plan": 0, "remember": 4, "admit": 4 + SIZE, "forget": 4 * 200}
    cache.ram_bytes = cache.stats().bytes_ram + more[how]
    if how == "plan":
        plan = cache.plan(np.array(branch, np.int32), view(ELSEWHERE), (), Costs())
        assert plan.cached == 150
    elif how == "remember":
        cache.remember("m", np.array(branch, np.int32))
    elif how == "forget":
        cache.pin(PATH[:200])
        cache.forget(PATH)
        assert cache.stats().extra["segment_bytes"] == bytes_of((0, 200)), "what is pinned stays"
    else:
        cache.admit(view(branch), 201, np.zeros(SIZE, np.uint8))
    assert locked == [False]
    assert cache.stats().bytes_ram <= cache.ram_bytes
    check_integrity(cache)


# -- what is damaged -------------------------------------------------------------------------------


def damage(cache: PromptCache, path: Sequence[int], which: int) -> None:
    """Flip a bit of one of the stored segments of a path."""
    segments = plan_for(cache, [*path, 999], view(ELSEWHERE)).segments
    segments[which].record[HEADER_BYTES + 16] ^= 1


@pytest.mark.parametrize("how", ["plan", "remember", "admit"])
def test_a_flipped_bit_is_a_miss_once_and_for_no_other_chat(how: str) -> None:
    cache = PromptCache(1 << 20)
    one, other = PATH, list(range(500, 800))
    for path in (one, other):
        store(cache, path, 150, 250)
        plan_for(cache, path, view(path))
    damage(cache, one, 0)
    branch = [*PATH[:200], 999]
    if how == "remember":
        cache.remember("m", np.array(branch, np.int32))
    elif how == "admit":
        assert cache.admit(view(branch), 201, np.zeros(SIZE, np.uint8))
    plan = plan_for(cache, branch, view(ELSEWHERE))
    assert (plan.matched >= 200, plan.cached, plan.segments) == (True, 0, ())
    check_integrity(cache)
    stats = cache.stats()
    assert (stats.extra["damaged"], stats.extra["restarts"], stats.segments) == (1, 0, 1)
    assert plan_for(cache, [*other[:200], 999], view(ELSEWHERE)).cached == 150
    assert plan_for(cache, branch, view(PATH)).cached >= 150, "live attention serves as ever"
    for start, end in cache.missing(view(PATH)):
        assert cache.store_segment(view(PATH), piece(PATH, start, end))
    assert plan_for(cache, [*PATH[:160], 999], view(ELSEWHERE)).cached == 150, "stored anew"


def test_a_damaged_segment_leaves_the_segments_before_it() -> None:
    cache = PromptCache(1 << 20)
    for position in (100, 250):
        assert cache.admit(view(PATH[:position]), position, cache.buffer(SIZE))
        for start, end in cache.missing(view(PATH)):
            assert cache.store_segment(view(PATH), piece(PATH, start, end))
    plan_for(cache, PATH, view(PATH))
    assert cache.admit(view(PATH[:200]), 200, cache.buffer(SIZE))
    damage(cache, PATH, 1)
    plan = plan_for(cache, [*PATH[:240], 999], view(ELSEWHERE))
    assert (plan.cached, ranges(plan.segments)) == (100, [(0, 100)])
    check_integrity(cache)


def test_no_memory_for_two_parts_costs_that_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptCache(1 << 20)
    store(cache, PATH, 150, 250)

    def starved(*_: object) -> Iterator[Segment]:
        raise MemoryError

    monkeypatch.setattr(FakeAttention, "parts", starved)
    cache.remember("m", np.array([*PATH[:200], 999], np.int32))
    assert (cache.stats().segments, cache.stats().entries) == (0, 2)
    assert cache.stats().extra["damaged"] == 1
    check_integrity(cache)


def test_a_segment_that_does_not_load_goes_and_the_checkpoints_stay() -> None:
    cache = PromptCache(1 << 20)
    store(cache, PATH, 150, 250)
    cache.drop_segment(piece(PATH, 0, 250))
    assert cache.stats().segments == 1, "not this one"
    for segment in plan_for(cache, PATH, view(ELSEWHERE)).segments:
        cache.drop_segment(segment)
    stats = cache.stats()
    assert (stats.segments, stats.entries, stats.extra["damaged"]) == (0, 2, 1)
    assert stats.extra["segment_bytes"] == 0
    check_integrity(cache)
