"""Which restore point serves a prompt: the deepest that is whole, live before stored, if it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint, Costs, LiveView
from llamahybrid.prompt_cache.base import Segment
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.selection import choose, reachable

ROW = np.zeros(3, np.float32)


def entry(position: int, logits: bool = False) -> Entry:
    return Entry(Checkpoint("m", position, np.zeros(8, np.uint8), ROW if logits else None), None)


def view(
    n: int, floor: int | None = None, attention: bool = False, tip: bool = False, limit: int | None = None
) -> LiveView:
    """A live sequence of `n` tokens, recurrent unless there is a floor to cut to."""
    cut_floor = n if floor is None else floor
    return LiveView("m", np.arange(n, dtype=np.int32), cut_floor, True, attention, tip, reuse_limit=limit)


def chosen(
    total: int,
    live_lcp: int,
    live: LiveView,
    *entries: Entry,
    reach: int = 0,
    costs: Costs = Costs(),  # noqa: B008
) -> tuple[int, str]:
    choice = choose(total, live_lcp, live, entries, reach, costs)
    return choice.position, choice.source


@pytest.mark.parametrize(
    ("live", "stored", "kept", "loaded", "reach"),
    [
        (0, [(0, 40), (40, 90)], 0, [(0, 40), (40, 90)], 90),
        (60, [(0, 40), (40, 90)], 40, [(40, 90)], 90),  # live memory is cut back to the segment's start
        (60, [(0, 20), (20, 40)], 60, [], 60),  # live memory holds all of it
        (60, [(0, 40), (70, 90)], 60, [], 60),  # a gap
        (0, [(0, 40), (50, 90)], 0, [(0, 40)], 40),
    ],
)
def test_attention_reaches_as_far_as_it_has_no_gap(
    live: int, stored: Sequence[tuple[int, int]], kept: int, loaded: list[tuple[int, int]], reach: int
) -> None:
    found = reachable(live, [Segment(a, b, np.zeros(1, np.uint8)) for a, b in stored])
    assert (found.live_kept, [(s.start, s.end) for s in found.segments], found.reach) == (kept, loaded, reach)


@pytest.mark.parametrize(("end", "lcp", "position"), [(100, 100, 100), (99, 100, 99), (100, 99, 99)])
def test_logits_kept_of_a_prompts_end_serve_there_alone(end: int, lcp: int, position: int) -> None:
    live = replace(view(120, floor=10), end_logits=(end, ROW))
    choice = choose(100, lcp, live, [], 0)
    assert (choice.position, choice.source) == (position, "live")
    assert (choice.logits is ROW) is (position == 100)
    assert chosen(100, 100, replace(live, reuse_limit=99)) == (99, "live")


def test_a_few_shared_tokens_of_a_long_prompt_are_decoded_again() -> None:
    """They would cut the first batch elsewhere, and save nothing."""
    assert chosen(1112, 0, view(0), entry(6)) == (0, "none")
    assert chosen(1112, 100, view(100), entry(106)) == (100, "live")
    assert chosen(1112, 0, view(0), entry(8)) == (8, "ram")
    assert chosen(8, 0, view(0), entry(6)) == (6, "ram"), "most of it"
    slow_batches = Costs(token_seconds=1e-3, prefill_seconds=1e-3, batch_seconds=40e-3)
    assert chosen(1112, 0, view(0), entry(39), costs=slow_batches) == (0, "none")
    assert chosen(1112, 0, view(0), entry(41), costs=slow_batches) == (41, "ram")
    assert chosen(39, 0, view(0), entry(39, logits=True), costs=slow_batches) == (39, "ram")
    busy = Costs(token_seconds=1e-3, prefill_seconds=1e-3, batch_seconds=1.0)
    assert chosen(1112, 0, view(0), entry(63), costs=busy) == (0, "none")
    assert chosen(1112, 0, view(0), entry(64), costs=busy) == (64, "ram")


def anywhere(n: int, limit: int | None = None) -> LiveView:
    """A live sequence whose attention is all of its state."""
    return replace(view(n, floor=0, attention=True, limit=limit), attention_is_all=True)


def test_plain_attention_is_resumed_at_every_position_it_covers() -> None:
    assert chosen(100, 0, anywhere(0), reach=37) == (37, "ram")
    assert chosen(100, 20, anywhere(50), reach=37) == (37, "ram")
    assert chosen(100, 30, anywhere(50), reach=37) == (30, "live"), "seven tokens are decoded sooner"
    assert chosen(100, 0, anywhere(0), reach=100) == (99, "ram"), "one is left to sample from"
    assert chosen(100, 20, anywhere(50, limit=25), reach=90) == (20, "live")
    assert chosen(100, 0, anywhere(0), entry(60), reach=37) == (37, "ram"), "a mark is no state"
    assert chosen(100, 0, anywhere(0), reach=0) == (0, "none")


def test_a_mark_at_the_very_place_is_what_the_request_uses() -> None:
    mark = entry(37)
    assert choose(100, 0, anywhere(0), [entry(20), mark], 37).entry is mark
    assert choose(100, 0, anywhere(0), [entry(20)], 37).entry is None


def test_attention_that_is_live_but_has_to_be_loaded_again_is_paid_for() -> None:
    costs = Costs(token_seconds=1e-2, prefill_seconds=1e-3, restore_seconds=1e-3, segment_seconds=1e-4)
    for kept, place in ((900, (1000, "ram")), (0, (900, "live"))):
        choice = choose(2000, 900, anywhere(900), [], 1000, costs, kept)
        assert (choice.position, choice.source) == place
