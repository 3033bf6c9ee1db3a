"""What became of the tokens of a request."""

from __future__ import annotations

import pytest

from llamahybrid.evaluate.render.bars import Bar, bar, labels
from tests.evaluate.reports import request


@pytest.mark.parametrize(
    ("figures", "reused", "again", "needed"),
    [
        ({}, 50, 0, 60),
        ({"cached": 20, "decoded": 90}, 20, 30, 60),
        ({"cached": 0, "decoded": 110}, 0, 50, 60),
        ({"cached": 20, "decoded": None}, 20, 30, 50),  # the answer is not told
        ({"cached": None, "decoded": 40}, 60, 0, 40),  # at least so many were not decoded
        ({"matched": None, "cached": 0, "decoded": 110}, 0, 0, 110),
        ({"matched": 100, "cached": 99, "decoded": 1}, 99, 0, 1),  # the last one is decoded in any case
    ],
)
def test_parts(figures: dict[str, int | None], reused: int, again: int, needed: int) -> None:
    found = bar(request(**figures), "turn 1")
    assert found == Bar("turn 1", reused, again, needed)


def test_nothing_is_drawn_of_what_is_not_told() -> None:
    assert bar(request(cached=None, decoded=None), "x") is None
    assert bar(request(total=None), "x") is None


def test_labels_say_whose_turn_it_is_where_there_are_several() -> None:
    assert labels([request(turn=0), request(turn=1)]) == ["turn 1", "turn 2"]
    assert labels([request(chat="1/0"), request(chat="ada")]) == ["chat 1/0, turn 1", "ada, turn 1"]


def test_parts_follow_each_other_and_empty_ones_are_left_out() -> None:
    assert Bar("", 5, 3, 2).spans == {"reused": (0, 5), "again": (5, 3), "needed": (8, 2)}
    assert Bar("", 5, 0, 2).spans == {"reused": (0, 5), "needed": (5, 2)}


def test_a_bar_in_words() -> None:
    assert Bar("turn 2", 1200, 30, 60).text == "turn 2: 1,200 reused, 30 decoded again, 60 had to be decoded"
