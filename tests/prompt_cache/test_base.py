"""What a cache is told and hands out: parts of segments, ranges, and how far forgetting reaches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from llamahybrid.prompt_cache.base import LiveState, Segment, Tokens, clipped, part_of, same_start

PATH = np.arange(10, dtype=np.int32)


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def cells(start: int, end: int) -> Segment:
    """A segment whose bytes are its positions."""
    return Segment(start, end, np.arange(start, end, dtype=np.uint8))


def split(segment: Segment, path: Tokens, at: int) -> tuple[Segment, Segment]:
    """Refuses what does not lie within, as the real one does."""
    assert len(path) == segment.end
    assert segment.start < at < segment.end
    return cells(segment.start, at), cells(at, segment.end)


@pytest.mark.parametrize(("start", "end"), [(2, 8), (2, 5), (5, 8), (4, 6), (3, 4)])
def test_a_part_of_a_segment_is_its_own_cells(start: int, end: int) -> None:
    part = part_of(cells(2, 8), PATH[:8], start, end, split)
    assert part is not None
    assert (part.start, part.end, part.record.tolist()) == (start, end, list(range(start, end)))


def test_where_none_can_be_cut_only_a_whole_segment_is_a_part() -> None:
    whole = cells(2, 8)
    assert part_of(whole, PATH[:8], 2, 8, None) is whole
    assert part_of(whole, PATH[:8], 2, 7, None) is None
    assert part_of(whole, PATH[:8], 3, 8, None) is None


@pytest.mark.parametrize(
    ("start", "end", "left"),
    [
        (0, 30, [(2, 5), (8, 20)]),
        (3, 10, [(3, 5), (8, 10)]),
        (5, 8, []),
        (4, 9, [(4, 5), (8, 9)]),
        (20, 30, []),
    ],
)
def test_ranges_are_clipped_and_none_of_them_is_empty(
    start: int, end: int, left: list[tuple[int, int]]
) -> None:
    assert clipped([(2, 5), (8, 20)], end, start) == left


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [((1, 2), (1, 2, 3), True), ((1, 2, 3), (1,), True), ((1, 2), (1, 3), False), ((), (1,), False)],
)
def test_paths_begin_alike_where_one_begins_the_other(a: Sequence[int], b: Sequence[int], same: bool) -> None:
    assert same_start(ids(*a), ids(*b)) is same_start(ids(*b), ids(*a)) is same


@pytest.mark.parametrize(
    ("live", "prompt", "reached"),
    [
        ((1, 2, 3, 4), (), True),
        ((), (1, 2, 3, 4), True),
        ((1, 2), (), True),  # what leads to it is forgotten, too
        ((), (1, 2), True),
        ((1, 2, 9), (7,), False),
        ((), (), False),
    ],
)
def test_a_context_forgets_what_is_live_and_what_is_on_its_way(
    live: Sequence[int], prompt: Sequence[int], reached: bool
) -> None:
    state = LiveState(lambda: ids(*live))
    state.prompt = ids(*prompt)
    state.forget(ids(1, 2, 3))
    assert state.forgotten is reached
    assert state.prompt.tolist() == ([] if reached else list(prompt))
    assert state.prompt.base is None or not reached, "no token of it is held on to"
