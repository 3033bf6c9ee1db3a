"""Live sequences of one context: rows of their own, batches in common, buffers that are zeroed for all."""

import threading

import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.capi.calls import NativeContext
from llamahybrid.errors import DecodeError
from llamahybrid.memory.adoption import take_over
from llamahybrid.memory.context import GuardedContext

ONE = [(7 * i + 1) % 200 for i in range(40)]
TWO = [(11 * i + 5) % 200 for i in range(30)]


@pytest.fixture(params=["qwen35", "mamba", "llama"])
def lives(request, tiny_model):
    llm = Llama(str(tiny_model(request.param)), n_ctx=256, n_threads=1, verbose=False, n_parallel=2)
    yield [slot.evaluation.runner.live for slot in llm.slots.all]
    llm.close()


@pytest.fixture
def filled(lives):
    for live, tokens in zip(lives, (ONE, TWO), strict=True):
        live.decode(np.array(tokens, np.int32), "last")
        live.recount()
    return lives


def test_the_memory_for_undoing_a_batch_grows_and_is_kept(lives):
    shared = lives[0].shared
    first = shared.undo_buffer(20)
    assert first.nbytes == 20
    assert shared.undo_buffer(10).nbytes == 10
    assert shared.undo_buffer(20).ctypes.data == first.ctypes.data
    assert shared.undo_buffer(30).nbytes == 30
    shared.forget_undo()
    assert shared._undo.nbytes == 0


def row(live):
    return live.row.logits().copy()


def test_each_keeps_its_row(lives):
    one, two = lives
    one.decode(np.array(ONE, np.int32), "last")
    mine = row(one)
    two.decode(np.array(TWO, np.int32), "last")
    assert np.array_equal(row(one), mine)
    assert not np.array_equal(row(two), mine)
    assert np.array_equal(one.row.place(), mine)
    assert two.row.place() == -1, "it lies in the context"
    two.decode(np.array([3], np.int32), "none")
    assert two.row.logits() is None
    assert np.array_equal(row(one), mine)


def test_rows_of_a_step_are_read_where_they_lie_until_they_go(filled):
    one, two = filled
    one.shared.decode_step([(two, 4), (one, 3)])
    assert (two.row.place(), one.row.place()) == (0, 1)
    first, second = row(one), row(two)
    assert not np.array_equal(first, second)
    one.decode(np.array([5], np.int32), "last")
    assert np.array_equal(row(two), second)
    assert np.array_equal(two.row.place(), second)
    assert one.row.place() == -1
    assert not np.array_equal(row(one), first)


def test_a_step_that_leaves_one_out_copies_its_row(filled):
    one, two = filled
    one.shared.decode_step([(one, 3), (two, 4)])
    kept = row(one)
    two.shared.decode_step([(two, 5)])
    two.shared._decode_step([(two, 6)], [])
    assert np.array_equal(one.row.place(), kept)


def test_a_row_that_was_copied_when_an_interrupt_came_is_not_the_next_ones(filled):
    """The copy was noted, and that the row is gone from the context was not: its owner decodes next."""
    one, _ = filled
    one.decode(np.array([3], np.int32), "last")
    index = one.row.index
    one.row.keep()
    one.row.index = index
    stale = row(one)
    one.decode(np.array([5], np.int32), "last")
    assert one.row.place() == -1
    assert not np.array_equal(row(one), stale)


def test_after_a_step_that_failed_no_row_is_anybodys(filled, monkeypatch):
    """What a sequence had copied before is not its row for ever."""
    one, two = filled
    one.shared.decode_step([(one, 3), (two, 4)])
    one.decode(np.array([5], np.int32), "last")  # copies two's

    def refuse(*_):
        raise DecodeError(-1, "refused")

    monkeypatch.setattr(one.native, "decode_rows", refuse)
    with pytest.raises(DecodeError):
        one.shared.decode_step([(one, 3), (two, 4)])
    assert [live.row.logits() for live in filled] == [None, None]
    assert not any(live.row.exists_for_tip() for live in filled)


def test_a_step_of_both_is_what_each_would_have_done(filled, tiny_model):
    one, two = filled
    one.shared.decode_step([(one, 3), (two, 4)])
    assert [one.n, two.n] == [41, 31]
    together = row(one), row(two)
    assert one.fault() is None
    assert two.fault() is None
    for live, tokens in zip(filled, ([*ONE, 3], [*TWO, 4]), strict=True):
        live.empty()
        live.decode(np.array(tokens[:-1], np.int32), "last")
        live.decode((tokens[-1],), "last")
    for mine, alone in zip(together, (row(one), row(two)), strict=True):
        assert np.abs(mine - alone).max() < 1e-3


def test_a_step_that_fails_leaves_both_as_they_were(filled, monkeypatch):
    one, two = filled

    def refuse(self, tokens, positions, seqs):
        raise DecodeError(1, "no room")

    monkeypatch.setattr(NativeContext, "decode_rows", refuse)
    with pytest.raises(DecodeError):
        one.shared.decode_step([(one, 3), (two, 4)])
    assert [one.n, two.n] == [40, 30]
    assert one.fault() is None
    assert two.fault() is None


def test_an_interrupt_behind_a_step_is_told_by_its_result(filled, monkeypatch):
    one, two = filled
    decode = NativeContext.decode_rows

    def stop(self, *args):
        decode(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeContext, "decode_rows", stop)
    with pytest.raises(KeyboardInterrupt):
        one.shared.decode_step([(one, 3), (two, 4)])
    for live in filled:
        assert live.fault() is None or live.state.is_invalid
        assert live.row.logits() is None


def test_a_decode_that_never_began_leaves_nobody_anothers_row(filled, monkeypatch):
    one, _two = filled  # the last batch was the second's
    mine, raised = row(one), []

    def stop(self, *args):
        raised.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GuardedContext, "decode", stop)
        with pytest.raises(KeyboardInterrupt):
            one.decode((3,), "last")
    assert raised
    assert one.n == 40
    logits = one.row.logits()
    assert logits is None or np.array_equal(logits, mine)


def test_what_is_zeroed_for_one_is_known_to_be_gone_for_the_other(filled):
    one, two = filled
    one.require_zeroing()
    one.empty()
    assert two.state.is_invalid
    two.empty()
    two.decode(np.array(TWO, np.int32), "last")
    assert two.fault() is None


def test_a_sequence_moves_into_another(filled):
    one, two = filled
    mine = row(two)
    take_over(one, two)
    two.empty()
    assert one.tokens.tolist() == TWO
    assert one.fault() is None
    assert np.array_equal(row(one), mine)
    one.decode((9,), "last")
    two.decode(np.array([*TWO, 9], np.int32), "last")
    assert np.abs(row(one) - row(two)).max() < 1e-3


def test_a_step_is_made_where_no_interrupt_comes(filled, monkeypatch):
    one, two = filled
    decode, where = NativeContext.decode_rows, []

    def note(self, *args):
        where.append(threading.current_thread())
        decode(self, *args)

    monkeypatch.setattr(NativeContext, "decode_rows", note)
    one.shared.decode_step([(one, 3), (two, 4)])
    assert where[0] is not threading.main_thread()


def test_what_another_caller_decoded_makes_all_unknown(filled):
    one, two = filled
    one.native.decode([5], 40, "none")
    two.native.synchronize()
    assert one.touched_outside()
    one.shared.lose_all()
    assert [live.state.is_invalid for live in filled] == [True, True]


def test_nobody_else_decoded(filled):
    one, two = filled
    assert not one.touched_outside()
    one.shared.decode_step([(one, 3), (two, 4)])
    assert not one.touched_outside()
    assert not two.touched_outside()
