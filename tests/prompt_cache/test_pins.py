"""Who uses which checkpoint: it stays until the last user let go, or is gone."""

from __future__ import annotations

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.pins import Pins
from tests.lab.integrity import check_integrity


class User:
    """Anybody who can be held weakly."""


def entry(position: int = 5) -> Entry:
    return Entry(Checkpoint("m", position, np.zeros(8, np.uint8)), None)


def test_each_user_counts_until_it_lets_go_once() -> None:
    pins, one, first, second = Pins(), entry(), User(), User()
    pins.use(first, one)
    pins.use(second, one)
    assert (one.pins, pins.entries()) == (2, {one})
    assert pins.release(first) is one
    assert pins.release(first) is None, "it held nothing any more"
    assert (one.pins, pins.entries()) == (1, {one})
    assert pins.release(second) is one
    assert (one.pins, pins.entries()) == (0, set())
    check_integrity(pins)


def test_a_user_that_is_gone_is_found_once() -> None:
    pins, one, user = Pins(), entry(), User()
    pins.use(user, one)
    assert pins.release_collected() == []
    del user
    assert pins.entries() == {one}, "nothing happens in the collector"
    assert pins.release_collected() == [one]
    assert (pins.release_collected(), one.pins) == ([], 0)


def test_equal_users_are_not_the_same() -> None:
    pins, one, other, first, second = Pins(), entry(), entry(), [User()], User()
    pins.use(first[0], one)
    pins.use(second, other)
    first.clear()  # its address may be another's now
    assert pins.release(User()) is None
    assert pins.release(second) is other
    assert pins.release_collected() == [one]


def test_a_miscount_is_noticed() -> None:
    pins, one, user = Pins(), entry(), User()
    pins.use(user, one)
    one.pins += 1
    with pytest.raises(AssertionError, match="disagree"):
        check_integrity(pins)
