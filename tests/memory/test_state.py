"""What a sequence is taken to hold: plain values, and whatever is not proven ends with an id of no prompt."""

import numpy as np
import pytest

from llamahybrid.memory.state import INVALID, SequenceState
from llamahybrid.prompt_cache.nodes import common_prefix

from .conftest import ids


@pytest.fixture
def state():
    made = SequenceState.empty(4)
    made.replace_tokens(ids([5, 6, 7]))
    return made


@pytest.mark.parametrize(
    ("tokens", "starts", "holds"),
    [
        ([5, 6, 7], True, True),
        ([5, 6], True, False),
        ([], True, False),
        ([5, 9], False, False),
        ([5, 6, 7, 8], False, False),
    ],
)
def test_it_is_these_tokens_or_begins_with_them(state, tokens, starts, holds):
    assert state.starts_with(ids(tokens)) is starts
    assert state.holds(ids(tokens)) is holds


def test_native_content_is_itself_and_stands_for_no_token(state):
    assert not state.opaque
    state.ids[1] = -3
    assert state.opaque
    assert state.holds(ids([5, -3, 7]))
    assert not state.holds(ids([5, -4, 7])), "another image in the same place"
    assert not state.holds(ids([5, 99, 7]))


def test_what_is_disowned_goes_on_all_the_same(state):
    state.disown()
    assert state.holds(ids([5, 6, 7]))
    assert not state.holds(ids([5, 6, 8]))
    assert state.starts_with(ids([]))


def test_what_an_image_takes_beyond_its_positions_goes_with_it(state):
    state.ids[1], state.extra_bytes, state.lag = -3, 40, 1
    state.cut(2)
    assert (state.n, state.extra_bytes, state.lag) == (2, 40, 0)
    state.cut(1)
    assert (state.n, state.extra_bytes) == (1, 0)


def test_an_invalid_tip_matches_nothing_and_spares_what_lies_before_it(state):
    state.invalidate_tip()
    assert state.tokens.tolist() == [5, 6, 7, INVALID]
    assert not state.starts_with(ids([5, 6]))
    assert not state.holds(state.tokens)
    assert common_prefix(state.tokens, ids([5, 6, 7, 8])) == 3
    state.invalidate_tip()
    assert state.n == 4, "once is enough"


def test_a_full_context_has_room_for_an_invalid_tip():
    state = SequenceState.empty(2)
    state.replace_tokens(ids([1, 2]))
    state.invalidate_tip()
    assert state.is_invalid
    assert state.n == 3


def test_what_is_disowned_begins_with_an_id_that_no_other_has(state):
    other = SequenceState.empty(1)
    other.replace_tokens(ids([5]))
    for each in (state, other):
        each.disown()
        assert each.tokens[0] < 0
    assert state.tokens[0] != other.tokens[0]
    assert state.tokens[1:].tolist() == [6, 7]


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_and_what_is_invalid_are_disowned_already(n):
    state = SequenceState.empty(1)
    state.ids[0] = INVALID
    state.n = n
    state.disown()
    assert state.ids[0] == INVALID


def test_other_tokens_are_not_covered_by_the_row_that_is_there(state):
    state.tip_logits = state.row_covers_tip = True
    state.replace_tokens(ids([1]))
    assert not state.row_covers_tip
    assert np.array_equal(state.tokens, [1])
