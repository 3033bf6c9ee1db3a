"""The RAM tier by itself: what its calls answer, and what they do once something was forgotten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, LiveView, guard, ram_store, ram_tier
from llamahybrid.prompt_cache.base import LiveState, Loaded, Segment, Tokens
from llamahybrid.prompt_cache.eviction import ValueEviction
from llamahybrid.prompt_cache.ram_tier import RamTier
from tests.lab.fake_engine import FakeAttention
from tests.lab.integrity import check_integrity

SIZE = 1000
PATH = np.arange(1, 101, dtype=np.int32)
OTHER = PATH + 1000
ATTENTION = FakeAttention(8)


@pytest.fixture
def ram() -> RamTier:
    return RamTier(1 << 20, ValueEviction())


def view(tokens: Tokens = PATH, state: LiveState | None = None) -> LiveView:
    return LiveView("m", tokens, len(tokens), True, True, True, split=ATTENTION.split, state=state)


def admit(ram: RamTier, position: int, live: LiveView | None = None) -> bool:
    return ram.admit(live or view(), position, ram.buffer(SIZE), None)


def attention(start: int, end: int) -> Segment:
    return ATTENTION.of(PATH[:start].tolist(), PATH[start:end].tolist())


def forgotten() -> LiveState:
    state = LiveState(lambda: PATH)
    state.forgotten = True
    return state


# -- what is stored --------------------------------------------------------------------------------


def test_a_buffer_counts_until_it_is_admitted_and_then_as_what_it_holds(ram: RamTier) -> None:
    buffer = ram.buffer(SIZE)
    assert ram.stats().bytes_ram == SIZE
    assert ram.admit(view(), 50, buffer, None)
    assert ram.stats().bytes_ram == SIZE + 4 * 50


def test_a_buffer_beyond_the_budget_costs_nothing_that_is_kept(ram: RamTier) -> None:
    admit(ram, 50)
    huge = ram.buffer((1 << 20) + 1)
    assert not ram.admit(view(OTHER), 50, huge, None)
    assert (ram.stats().entries, ram.stats().refused) == (1, 1)


@pytest.mark.parametrize("pinned", ["by the user", "in use"])
def test_nothing_goes_for_what_can_never_fit(ram: RamTier, pinned: str) -> None:
    """Not for a checkpoint, a buffer, attention, what is about to be read, nor tokens."""
    ram.admit(view(), 50, ram.buffer(10 * SIZE), None)
    for token in range(2000, 2003):
        live = view(np.full(10, token, np.int32))
        assert ram.admit(live, 10, ram.buffer(SIZE), None)
    with ram.checkpoint_at("m", PATH[:50] if pinned == "in use" else PATH[:1]):
        if pinned == "by the user":
            ram.pin(PATH[:50])
        ram.resize(14 * SIZE)
        assert not ram.admit(view(OTHER), 50, np.zeros(5 * SIZE, np.uint8), None)
        buffer = ram.buffer(5 * SIZE)
        assert not ram.admit(view(OTHER), 50, buffer, None)
        assert ram.segment_buffer(view(OTHER), 5 * SIZE) is None
        assert not ram.store_segment(view(OTHER), Segment(0, 50, np.zeros(5 * SIZE, np.uint8)))
        assert ram.expect("m", OTHER[:50], 5 * SIZE) is None
        ram.remember("m", np.arange(2 * SIZE, dtype=np.int32), None)
        assert (ram.stats().entries, ram.stats().evictions, ram.stats().refused) == (4, 0, 5)
        assert ram.expect("m", OTHER[:50], 3 * SIZE) is not None
    assert ram.stats().evictions > 0


def test_one_that_is_pinned_stays_when_another_in_its_place_is_refused(ram: RamTier) -> None:
    admit(ram, 50)
    assert ram.store_segment(view(), attention(0, 50))
    ram.pin(PATH[:50])
    ram.resize(ram.stats().bytes_ram)
    assert not ram.admit(view(), 50, np.zeros(SIZE + 1, np.uint8), None)
    assert ram.peek(PATH, view(OTHER), Costs()) == 50
    assert ram.admit(view(), 50, np.ones(SIZE, np.uint8), None)
    assert ram.peek(PATH, view(OTHER), Costs()) == 50
    assert ram.stats().bytes_ram == ram.store.account.limit
    check_integrity(ram.store)


@pytest.mark.parametrize("position", [0, 101])
def test_a_position_that_is_not_live_is_an_error(ram: RamTier, position: int) -> None:
    with pytest.raises(ValueError, match="no position"):
        admit(ram, position)


def test_attention_is_missing_up_to_the_deepest_checkpoint(ram: RamTier) -> None:
    assert ram.missing(view()) == []
    admit(ram, 50)
    assert ram.missing(view()) == [(0, 50)]
    assert ram.store_segment(view(), attention(0, 30))
    assert ram.missing(view()) == [(30, 50)]
    assert ram.missing(replace(view(), split=None)) == [], "nobody could load it"


def test_attention_behind_all_checkpoints_is_not_kept(ram: RamTier) -> None:
    admit(ram, 50)
    assert not ram.store_segment(view(), attention(50, 60))
    assert ram.stats().segments == 0


def test_unstored_tokens_are_those_behind_the_deepest_checkpoint(ram: RamTier) -> None:
    assert ram.unstored(view()) == 100
    admit(ram, 60)
    assert ram.unstored(view()) == 40
    assert ram.unstored(view(OTHER)) == 100


def test_a_smaller_budget_holds_at_once(ram: RamTier) -> None:
    for position in (20, 40, 60):
        admit(ram, position)
    ram.resize(2 * SIZE)
    assert ram.stats().bytes_ram <= 2 * SIZE
    assert ram.stats().entries == 1


def test_attention_of_a_path_is_given_as_it_is_cut(ram: RamTier) -> None:
    admit(ram, 60)
    ram.store_segment(view(), attention(0, 30))
    ram.store_segment(view(), attention(30, 60))
    found = ram.attention("m", PATH, 0, 60)
    assert [(s.start, s.end) for s in found] == [(0, 30), (30, 60)]
    assert ram.attention("m", PATH, 0, 59) == found[:1]
    left = np.concatenate([PATH[:40], OTHER[:10]])
    assert ram.attention("m", left, 0, 50) == found[:1], "the second one is another path's"


def test_a_checkpoint_that_is_read_keeps_its_bytes(ram: RamTier) -> None:
    admit(ram, 50)
    with ram.checkpoint_at("m", PATH[:50]) as checkpoint:
        assert checkpoint is not None
        ram.clear()
        assert ram.stats().bytes_ram == SIZE
    assert ram.stats().entries == 0
    with ram.checkpoint_at("m", PATH[:49]) as none:
        assert none is None


def test_what_is_dropped_was_here(ram: RamTier) -> None:
    admit(ram, 50)
    with ram.checkpoint_at("m", PATH[:50]) as checkpoint:
        pass
    assert checkpoint is not None
    path = ram.drop(checkpoint)
    assert path is not None
    assert path.tolist() == PATH[:50].tolist()
    assert ram.drop(checkpoint) is None


# -- a request's start -----------------------------------------------------------------------------


def test_a_look_counts_nothing(ram: RamTier) -> None:
    admit(ram, 50)
    ram.store_segment(view(), attention(0, 50))
    assert ram.peek(PATH, view(OTHER), Costs()) == 50
    assert (ram.stats().hits, ram.stats().misses) == (0, 0)
    plan = ram.plan(PATH, view(OTHER), (), Costs())
    assert (plan.cached, ram.stats().hits, ram.stats().tokens_saved) == (50, 1, 50)


def test_what_is_known_of_a_prompt(ram: RamTier) -> None:
    admit(ram, 60)
    ram.store_segment(view(), attention(0, 40))
    longer = np.concatenate([PATH, OTHER[:20]])
    known = ram.known(longer, view(OTHER), Costs())
    assert (known.length, known.cached, known.branches) == (60, 0, False)
    assert known.missing == ((40, 60), (60, 120))
    assert ram.known(longer, view(PATH[:50]), Costs()).missing == ((40, 60), (60, 120))
    assert ram.known(longer, view(PATH[:60]), Costs()).missing == ((60, 120),)


# -- what was forgotten ----------------------------------------------------------------------------


def test_nothing_of_a_forgotten_sequence_is_stored(ram: RamTier) -> None:
    admit(ram, 50)
    live = view(state=forgotten())
    assert not admit(ram, 60, live)
    assert (ram.missing(live), ram.unstored(live), ram.segment_buffer(live, 10)) == ([], 0, None)
    assert not ram.store_segment(live, attention(0, 50))
    ram.remember("m", OTHER, live.state)
    assert (ram.stats().entries, ram.tree.match("m", OTHER).length) == (1, 0)


def test_a_forgotten_sequence_is_emptied_before_it_is_followed_again(ram: RamTier) -> None:
    live = [PATH]
    state = LiveState(lambda: live[0])
    assert ram.follow(state, PATH)
    ram.forget(PATH[:10])
    assert state.forgotten
    assert not ram.follow(state, OTHER)
    live[0] = PATH[:0]
    assert ram.follow(state, OTHER)
    assert not state.forgotten


def test_what_was_read_before_anything_was_forgotten_is_not_taken_in(ram: RamTier) -> None:
    loaded = Loaded(np.zeros(SIZE, np.uint8), None, (attention(0, 50),))
    for forget, entries in ((True, 0), (False, 1)):
        forgets = ram.known(PATH, view(), Costs()).forgets
        expected = ram.expect("m", PATH[:50], SIZE)
        assert expected is not None
        if forget:
            ram.forget(OTHER)
        ram.take_in(view(), PATH[:50], loaded, expected, forgets, "disk")
        assert (ram.stats().entries, ram.stats().segments) == (entries, entries)
        assert ram.store.account.reserved_bytes() == 0


def test_no_tokens_are_no_path_to_forget(ram: RamTier) -> None:
    state = LiveState(lambda: PATH)
    ram.follow(state, PATH)
    admit(ram, 50)
    ram.pin(PATH)
    forgets = ram.known(PATH, view(), Costs()).forgets
    assert ram.forget(PATH[:0]) == 0
    assert (ram.stats().entries, len(ram.pinned), state.forgotten) == (1, 1, False)
    assert ram.known(PATH, view(), Costs()).forgets == forgets, "what is being read may come"


def test_what_is_not_remembered_since_something_was_forgotten(ram: RamTier) -> None:
    forgets = ram.known(PATH, view(), Costs()).forgets
    ram.clear()
    ram.remember("m", PATH, None, forgets)
    assert ram.tree.match("m", PATH).length == 0
    ram.remember("m", PATH, None, forgets + 1)
    assert ram.tree.match("m", PATH).length == 100


def test_what_is_about_to_be_read_has_room_made_for_it(ram: RamTier) -> None:
    admit(ram, 50)
    ram.resize(2 * SIZE)
    assert ram.expect("m", OTHER[:50], 2 * SIZE) is None
    expected = ram.expect("m", OTHER[:50], SIZE + 500)
    assert expected is not None
    assert ram.stats().entries == 0
    assert ram.stats().bytes_ram >= SIZE + 500
    del expected
    assert ram.stats().bytes_ram < SIZE


def put(ram: RamTier, n: int) -> None:
    """A checkpoint of 50 bytes on a path of its own."""
    path = np.array([n, n], np.int32)
    assert ram.admit(LiveView("m", path, 2, True, False, False), 2, np.zeros(50, np.uint8), None)


@pytest.fixture
def crowded(ram: RamTier, monkeypatch: pytest.MonkeyPatch) -> RamTier:
    """A tier of many small checkpoints, in which each slice of work is over after one of them."""
    monkeypatch.setattr(guard, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(ram_tier, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(ram_store.time, "monotonic", count().__next__)
    for n in range(200):
        put(ram, n)
    return ram


@pytest.mark.parametrize("what", ["resize", "buffer"])
def test_others_come_in_while_many_go(crowded: RamTier, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(crowded.stats).result(timeout=60).entries)

    seen: list[int] = []
    monkeypatch.setattr(guard.time, "sleep", sleep)
    limit = crowded.stats().bytes_ram
    if what == "resize":
        crowded.resize(limit // 10)
    else:
        crowded.store.account.limit = limit
        crowded.buffer(limit * 9 // 10)
    assert crowded.stats().entries <= 20
    assert len(set(seen)) > 100, "one at a time"
    assert crowded.stats().bytes_ram <= crowded.store.account.limit
    assert crowded.store.account.excess == 0
    check_integrity(crowded.store)


def test_who_wants_room_while_a_budget_shrinks_makes_it_for_himself(
    crowded: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[int] = []

    def sleep(_: float) -> None:
        before = crowded.stats().evictions
        put(crowded, 1000 + len(gone))
        gone.append(crowded.stats().evictions - before)

    monkeypatch.setattr(guard.time, "sleep", sleep)
    crowded.resize(crowded.stats().bytes_ram // 2)
    assert gone
    assert max(gone) <= 2


def test_a_budget_whose_shrinking_was_interrupted_holds_with_the_next_call(
    crowded: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(guard.time, "sleep", interrupted)
    limit = crowded.stats().bytes_ram // 2
    with pytest.raises(KeyboardInterrupt):
        crowded.resize(limit)
    assert crowded.stats().bytes_ram > limit
    monkeypatch.undo()
    put(crowded, 1000)
    assert crowded.stats().bytes_ram <= limit


def test_a_budget_set_from_inside_holds_with_the_next_call(crowded: RamTier) -> None:
    limit = crowded.stats().bytes_ram // 2
    with crowded.guard.lock:
        crowded.resize(limit)
    assert crowded.stats().bytes_ram <= limit
