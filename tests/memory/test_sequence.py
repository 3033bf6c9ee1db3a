"""The live sequence notices whatever memory does that it did not order, and keeps only what is proven."""

import ctypes

import llama_cpp
import pytest

from llamahybrid.errors import DecodeError
from llamahybrid.prompt_cache.nodes import common_prefix

from .conftest import PROMPT, ids, new


def test_a_decode_by_others_is_noticed(llm, live):
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    assert live.touched_outside()


def test_recurrent_memory_refuses_a_cut(live):
    assert not live.cut(30)
    assert live.state.holds(ids(PROMPT))
    assert live.fault() is None


def test_a_snapshot_is_refused_when_memory_is_not_as_believed(llm, live, lose_cells):
    lose_cells(llm.ctx, 2, 5)
    assert live.snapshot(new) is None


def test_a_failed_decode_leaves_nothing_at_the_tip_to_build_on(live, monkeypatch):
    def fail(*_):
        raise DecodeError(2, "llama_decode returned 2")

    monkeypatch.setattr(live.native, "decode", fail)
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid
    assert common_prefix(live.tokens, ids(PROMPT)) == len(PROMPT), "attention before the batch is still good"


def test_a_refused_batch_changes_nothing(live, monkeypatch):
    def refuse(*_):
        raise DecodeError(1, "llama_decode returned 1")

    monkeypatch.setattr(live.native, "decode", refuse)
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert live.state.holds(ids(PROMPT))


def test_a_refused_batch_that_changed_memory_all_the_same_is_not_believed(llm, live, lose_cells, monkeypatch):
    def refuse(*_):
        lose_cells(llm.ctx, 2, 5)
        raise DecodeError(1, "refused")

    monkeypatch.setattr(live.native, "decode", refuse)
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid


def test_a_full_context_that_was_spoilt_is_sound_again_once_emptied(llm):
    live = llm.runner.live
    llm.eval((PROMPT * 5)[: live.capacity])
    live.require_zeroing()
    assert live.state.is_invalid
    live.empty()
    assert not live.state.is_invalid
    assert live.fault() is None


def test_a_cut_that_is_refused_or_lies_ahead_changes_nothing(plain, monkeypatch):
    assert not plain.cut(len(PROMPT) + 5)
    monkeypatch.setattr(plain.native, "cut", lambda position: False)
    assert not plain.cut(40)
    assert plain.state.holds(ids(PROMPT))
    assert plain.row.logits() is not None


@pytest.mark.parametrize("answer", [True, False])
def test_memory_that_does_not_empty_by_a_cut_is_cleared(plain, monkeypatch, answer):
    monkeypatch.setattr(plain.native, "cut", lambda position: answer)
    plain.empty()
    assert plain.native.positions() == (-1, -1)
    assert plain.row.logits() is None


def test_nothing_is_saved_of_an_empty_sequence_or_of_half_a_state(live, monkeypatch):
    monkeypatch.setattr(live.native, "save_partial", lambda out: None)
    assert live.snapshot(new) is None
    monkeypatch.undo()
    live.empty()
    assert live.snapshot(new) is None


def test_a_cut_behind_the_window_is_refused(open_model):
    llm = open_model("gemma3", n_ctx=1024, n_batch=32, swa_full=False)
    llm.eval([(7 * i + 1) % 200 for i in range(600)])
    live = llm.runner.live
    assert live.view().cut_floor > 100
    assert not live.cut(100)
    assert not llm._ctx.kv_cache_seq_rm(0, 100, -1)
    assert live.fault() is None


def test_a_decode_that_left_other_memory_than_ordered_is_an_error(live, monkeypatch):
    monkeypatch.setattr(live.native, "positions", lambda: (5, 5))
    with pytest.raises(DecodeError, match="not what it should be"):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid
