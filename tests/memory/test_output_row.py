"""The output row: whose logits it holds, and what it proves of a state."""

import numpy as np
import pytest

from llamahybrid.errors import DecodeError
from llamahybrid.memory.output_row import OutputRow
from llamahybrid.memory.restore import restore
from llamahybrid.memory.state import SequenceState

from .conftest import PROMPT, ids, new


@pytest.mark.parametrize(("code", "kept"), [(-1, True), (1, False)])
def test_logits_outlive_only_a_batch_that_was_never_looked_at(live, monkeypatch, code, kept):
    def refuse(*_):
        raise DecodeError(code, "refused")

    monkeypatch.setattr(live.native, "decode", refuse)
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert (live.row.logits() is not None) is kept


def test_a_cut_takes_the_logits_with_it(plain):
    assert plain.cut(40)
    assert plain.row.logits() is None


@pytest.mark.parametrize("row_follows", [False, True])
def test_an_output_row_proves_only_states_that_it_came_from(llm, live, row_follows):
    record = live.snapshot(new)
    llm.eval([3, 4])
    assert restore(live, record, ids(PROMPT), row_follows=row_follows) is None
    assert live.row.proves_finite() is row_follows
    assert restore(live, record, ids(PROMPT), row_follows=False) is None
    assert restore(live, record, ids(PROMPT), row_follows=True) is None
    assert not live.row.proves_finite(), "one that proved nothing before proves nothing now"


class Row:
    """A context whose output row is `values`; None: it has none."""

    def __init__(self, values):
        self.values = values

    def logits(self, n_vocab, index=-1):
        return self.values


class Alone:
    """A context with one sequence."""

    def holds_row(self, row):
        return True

    def take_row(self, row):
        pass


def row_of(values, **known):
    state = SequenceState(ids([0]), **known)
    return OutputRow(Row(values), state, 3, Alone()), state


def test_stored_logits_become_the_tips():
    row, _ = row_of(np.zeros(3, np.float32))
    assert row.logits() is None, "whose it is was not known"
    assert row.put(np.arange(3, dtype=np.float32))
    assert row.logits().tolist() == [0, 1, 2]
    assert row.proves_finite()


def test_a_context_without_a_row_takes_no_logits():
    row, state = row_of(None, row_covers_tip=True)
    assert not row.exists()
    assert not row.put(np.zeros(3, np.float32))
    assert not state.tip_logits
    assert not row.proves_finite()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_row_with_one_value_that_is_no_number_proves_nothing(number):
    row, _ = row_of(np.array([0, number, 0], np.float32), row_covers_tip=True)
    assert not row.proves_finite()
