"""Requests survive JSON, and reuse is computed from the best figure that a target gives."""

from __future__ import annotations

import pytest

from llamahybrid.harness.targets.base import Reply


@pytest.mark.parametrize(
    ("told", "reused", "cached"),
    [
        ({}, None, None),
        ({"total": 10}, None, None),
        ({"total": 10, "worked": 4}, 6, 6),
        ({"total": 10, "worked": 4, "decoded": 5, "tokens": (1, 2, 3)}, 7, 7),  # the third was never decoded
        ({"total": 10, "decoded": 10, "tokens": (1,)}, 0, 0),
        ({"total": 10, "decoded": 0, "tokens": ()}, None, None),  # no answer, so nothing had to be decoded
        ({"total": 10, "decoded": 5}, None, None),  # prompt or answer?
        ({"total": 10, "worked": 4, "reported": 0}, 6, 0),  # what it says, true or not
        ({"reported": 3}, None, 3),
    ],
)
def test_reuse_is_taken_from_the_best_figure_there_is(
    told: dict[str, object], reused: int | None, cached: int | None
) -> None:
    reply = Reply("", 0.0, **told)
    assert (reply.reused, reply.cached) == (reused, cached)
