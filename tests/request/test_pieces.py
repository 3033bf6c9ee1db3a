"""How much of a prompt is decoded between two steps of the answers that wait for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.request.pieces import (
    BURST_SECONDS,
    PIECE_OVER,
    PIECE_SECONDS,
    PIECE_STEPS,
    SMALLEST_PIECE,
    UNMEASURED,
    PieceLine,
    pace,
    pace_between,
    piece_of,
)
from llamahybrid.request.step_frames import Step
from llamahybrid.request.ticket import Ticket


def test_who_came_first_goes_first_and_the_next_one_is_told_when_it_does() -> None:
    line, first, second = PieceLine(), Ticket(), Ticket()
    first.step = second.step = Step()
    line.enter(first, 64)
    bell = line.enter(second, 1)
    assert line.first() == (first, 64)
    assert [line.begins_with(ticket) for ticket in (first, second)] == [True, False]
    line.leave(first)
    assert bell.acquire(timeout=0)
    assert line.first() == (second, 1)


def test_one_whose_thread_is_gone_keeps_nobody_waiting() -> None:
    line, gone, over, here = PieceLine(), Ticket(), Ticket(), Ticket()
    over.step = here.step = Step()
    over.over = True
    for ticket in (gone, over, here):
        line.enter(ticket, 64)
    assert line.begins_with(here)


def test_prompts_take_sixteen_steps_between_two_but_no_less_than_nobody_minds() -> None:
    assert pace(1e-3, 1, 0) == PIECE_SECONDS
    assert pace(1.0, 1, 0) == PIECE_STEPS


def test_the_fewer_answers_wait_for_the_more_prompts_the_longer_they_do() -> None:
    assert pace(0.01, 3, 1) == pytest.approx(PIECE_SECONDS * 4 / 3)
    assert pace(0.01, 1, 3) == pytest.approx(PIECE_SECONDS * 4)
    assert pace(0.01, 0, 3) == pytest.approx(PIECE_SECONDS * 3)


def test_prompts_that_came_first_go_first_but_nobody_waits_for_all_of_a_large_burst() -> None:
    assert pace(0.01, 1, 3, came_first=True) == pace(0.01, 3, 1, came_first=True) == BURST_SECONDS
    assert pace(1.0, 1, 3, came_first=True) == pytest.approx(PIECE_STEPS * 4), "of a large model: no less"


def test_a_prompt_came_first_if_all_answers_began_when_it_was_there() -> None:
    answers = old, young = Ticket(), Ticket()
    early, late = Ticket(), Ticket()
    for ticket in (old, early):
        ticket.asks()
    old.answers()
    young.asks()
    young.answers()
    late.asks()
    beside = pace(0.01, 2, 2)
    assert pace_between(0.01, answers, [early, late]) == BURST_SECONDS
    assert pace_between(0.01, answers, [late, early]) == beside
    assert pace_between(0.01, [young], [early]) == BURST_SECONDS
    assert pace_between(0.01, answers, []) == pace(0.01, 2, 0)
    by_hand = Ticket()
    assert pace_between(0.01, [old, by_hand], [early, late]) == beside, "nobody knows when that one began"
    by_hand.over = True
    assert pace_between(0.01, [old, by_hand], [early]) == BURST_SECONDS


@given(st.integers(1, 4096), st.floats(1e-3, 100.0), st.floats(1e-6, 1.0))
def test_pieces_are_of_one_size_and_take_no_longer_than_they_may(
    tokens: int, seconds: float, each: float
) -> None:
    sizes, left = [], tokens
    while left:
        sizes.append(piece_of(left, seconds, each))
        left -= sizes[-1]
    largest = max(SMALLEST_PIECE, int(seconds / each))
    assert max(sizes) <= PIECE_OVER * largest
    assert min(sizes) * 2 >= min(tokens, largest), "no small rest has a batch of its own"


def test_while_nothing_was_measured_pieces_are_small() -> None:
    assert piece_of(512, 0.5, 0.0) == UNMEASURED
