"""What stays: a checkpoint until its last user let go, or is gone; what lies on a prefix that is pinned."""

from __future__ import annotations

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.pins import Pins, Prefixes, pinned_before
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


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_a_prefix_is_pinned_once_and_counts_once() -> None:
    pinned = Prefixes()
    for _ in range(3):
        pinned.add(ids(1, 2, 3))
    pinned.add(ids())
    pinned.add(ids(1, 2))
    assert [p.tolist() for p in pinned.tokens] == [[1, 2, 3], [1, 2]]
    assert pinned.nbytes == 4 * 5
    pinned.remove(ids(1, 2, 3))
    pinned.remove(ids(9))
    assert ([p.tolist() for p in pinned.tokens], pinned.nbytes) == ([[1, 2]], 4 * 2)


def test_who_reads_them_meanwhile_reads_them_as_they_were() -> None:
    pinned = Prefixes()
    pinned.add(ids(1))
    before = pinned.tokens
    pinned.add(ids(2))
    assert [p.tolist() for p in before] == [[1]]


def test_what_is_covered_lies_on_one_of_them() -> None:
    pinned = Prefixes()
    pinned.add(ids(1, 256, 3))
    assert [pinned.cover(ids(*path)) for path in ((1,), (1, 256, 3), (1, 256, 3, 4), (256,), (2,))] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_those_that_begin_with_what_is_forgotten_go() -> None:
    pinned = Prefixes()
    for path in ((1,), (1, 2), (1, 2, 3), (4, 1, 2)):
        pinned.add(ids(*path))
    copy = pinned.copy()
    pinned.forget(ids(1, 2))
    assert [p.tolist() for p in pinned.tokens] == [[1], [4, 1, 2]]
    assert len(copy.tokens) == 4


def test_the_longest_pinned_beginning() -> None:
    pinned = [ids(1), ids(1, 2), ids(1, 2, 3), ids(1, 2, 3, 4), ids(1, 9), ids()]
    assert pinned_before(pinned, ids(1, 2, 3)) == 2
    assert pinned_before(pinned, ids(7)) == 0
