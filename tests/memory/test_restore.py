"""Back to an earlier state: what is refused before anything changes, and what is a fault afterwards."""

import ctypes

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from llamahybrid.errors import SnapshotError
from llamahybrid.memory.paging import seal_segment
from llamahybrid.memory.restore import apply_plan, recover, restore
from llamahybrid.prompt_cache.base import Plan

from .conftest import PROMPT, ids, new


def test_a_restore_goes_back_to_the_very_logits(llm, live):
    before = live.row.logits().copy()
    record = live.snapshot(new)
    llm.eval([3, 4, 5])
    after = live.row.logits().copy()
    assert restore(live, record, ids(PROMPT)) is None
    assert live.n == len(PROMPT)
    assert live.row.logits() is None, "logits of another position are not the tip's"
    llm.n_tokens = len(PROMPT)
    llm.eval([3, 4, 5])
    assert np.array_equal(live.row.logits(), after)
    assert not np.array_equal(before, after)


def test_attention_that_is_gone_is_not_taken_for_live(llm, live):
    record = live.snapshot(new)
    native.llama_memory_seq_rm(native.llama_get_memory(llm.ctx), 0, -1, -1)
    assert "position" in live.fault()
    live.invalidate()
    with pytest.raises(SnapshotError, match="neither live nor stored"):
        restore(live, record, ids(PROMPT))


def test_memory_that_cannot_be_verified_is_never_restored(open_model):
    llm = open_model("deepseek4", n_ctx=256)
    llm.eval(PROMPT)
    live = llm.runner.live
    record = live.snapshot(new)
    with pytest.raises(SnapshotError, match="cannot be verified"):
        restore(live, record, ids(PROMPT))


def test_a_short_read_is_a_fault(llm, live, monkeypatch):
    record = live.snapshot(new)
    llm.eval([3, 4])
    monkeypatch.setattr(live.native, "load_partial", lambda data: False)
    assert "read" in restore(live, record, ids(PROMPT))
    assert live.state.is_invalid


def test_a_refused_cut_is_a_fault(llm, live, monkeypatch):
    record = live.snapshot(new)
    llm.eval([3, 4])
    monkeypatch.setattr(live.native, "cut", lambda position: False)
    assert "refused" in restore(live, record, ids(PROMPT))


def test_a_restore_over_attention_with_a_hole_is_a_fault(llm, live, lose_cells):
    record = live.snapshot(new)
    llm.eval([3, 4])
    lose_cells(llm.ctx, 2, 5)
    assert "bytes" in restore(live, record, ids(PROMPT))
    assert live.state.is_invalid


def test_a_state_of_another_size_than_its_snapshot_is_a_fault(open_model, monkeypatch):
    llm = open_model("mamba", n_ctx=256)
    llm.eval(PROMPT)
    live = llm.runner.live
    record = live.snapshot(new)
    monkeypatch.setattr(live.native, "state_size", lambda partial: 12)
    assert "another size" in restore(live, record, ids(PROMPT))


def test_an_interrupted_restore_leaves_nothing_to_build_on(llm, live, monkeypatch):
    record = live.snapshot(new)
    llm.eval([3, 4])

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(live.native, "cut", interrupt)
    with pytest.raises(KeyboardInterrupt):
        restore(live, record, ids(PROMPT))
    assert live.state.is_invalid


def test_a_range_that_is_missing_is_refused(live):
    record, first, last = live.snapshot(new), live.page_out(0, 20, new), live.page_out(30, len(PROMPT), new)
    live.empty()
    for segments, kept in (([first, last], 0), ([last], 30), ([first], 0)):
        with pytest.raises(SnapshotError, match="neither live nor stored"):
            restore(live, record, ids(PROMPT), segments, kept)


def test_a_segment_of_another_layout_is_refused(live):
    record, segment = live.snapshot(new), live.page_out(0, len(PROMPT), new)
    shorter = seal_segment(segment.record[:-8].copy(), live.identity.namespace, ids(PROMPT), 0)
    live.empty()
    with pytest.raises(SnapshotError, match="another layout"):
        restore(live, record, ids(PROMPT), [shorter], 0)


# -- a plan ----------------------------------------------------------------------------------------


def live_plan(cached, logits=None):
    total = len(PROMPT)
    return Plan(total, total, cached, "live", checkpoint=None, logits=logits)


def test_a_plan_that_memory_does_not_follow_is_a_fault(plain, monkeypatch):
    monkeypatch.setattr(plain.native, "cut", lambda position: False)
    assert "refused to cut" in apply_plan(plain, live_plan(40), ids(PROMPT))
    monkeypatch.undo()
    monkeypatch.setattr(plain.native, "state_size", lambda partial: 12)
    assert "bytes" in apply_plan(plain, live_plan(40), ids(PROMPT))


def test_stored_logits_are_the_tips_or_it_is_a_fault(plain, monkeypatch):
    wanted = np.arange(plain.n_vocab, dtype=np.float32)
    plain.state.tip_logits = False
    assert apply_plan(plain, live_plan(len(PROMPT), wanted), ids(PROMPT)) is None
    assert np.array_equal(plain.row.logits(), wanted)
    monkeypatch.setattr(plain.native, "logits", lambda *_: None)
    assert "no output row" in apply_plan(plain, live_plan(len(PROMPT), wanted), ids(PROMPT))


def test_a_plan_from_nothing_removes_what_nobody_knew_of(llm):
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    live = llm.runner.live
    assert live.n == 0
    assert apply_plan(live, live_plan(0), ids(PROMPT)) is None
    assert live.native.positions() == (-1, -1)


# -- an undo ---------------------------------------------------------------------------------------


def test_a_stopped_batch_is_undone_by_a_cut_where_memory_can_be_cut(plain):
    plain.invalidate_tip()
    assert recover(plain, (40, None))
    assert plain.state.holds(ids(PROMPT[:40]))
    assert recover(plain, (0, None))
    assert plain.n == 0


def test_an_undo_that_memory_refuses_or_does_not_bear_out_leaves_nothing_to_build_on(plain, monkeypatch):
    monkeypatch.setattr(plain.native, "cut", lambda position: False)
    assert not recover(plain, (40, None))
    assert plain.state.is_invalid
    monkeypatch.undo()
    monkeypatch.setattr(plain.native, "state_size", lambda partial: 12)
    assert not recover(plain, (40, None))
    assert plain.state.is_invalid


def test_a_stopped_batch_is_undone_by_a_snapshot_where_memory_cannot_be_cut(live, monkeypatch):
    record = live.snapshot(new)
    for took in (True, False):
        live.decode([3, 4], "last")
        live.invalidate_tip()
        if not took:
            monkeypatch.setattr(live.native, "load_partial", lambda data: False)
        assert recover(live, (len(PROMPT), record)) is took
        assert live.state.holds(ids(PROMPT)) is took


# -- where attention is all of the state -----------------------------------------------------------


def test_a_hybrid_is_never_restored_from_attention_alone(live):
    segment = live.page_out(0, len(PROMPT), new)
    live.empty()
    with pytest.raises(SnapshotError, match="not all of this memory's state"):
        restore(live, None, ids(PROMPT), [segment], 0)
    assert live.n == 0


def test_attention_alone_must_be_whole(plain):
    parts = [plain.page_out(0, 20, new), plain.page_out(30, len(PROMPT), new)]
    plain.empty()
    with pytest.raises(SnapshotError, match="neither live nor stored"):
        restore(plain, None, ids(PROMPT), parts, 0)
    assert plain.n == 0


def test_a_cut_that_is_refused_before_attention_is_put_back_is_a_fault(plain, monkeypatch):
    segment = plain.page_out(40, len(PROMPT), new)
    monkeypatch.setattr(plain.native, "cut", lambda position: False)
    assert "before a restore" in restore(plain, None, ids(PROMPT), [segment], 40)
    assert plain.state.is_invalid


def test_what_a_pager_misses_afterwards_is_a_fault(plain, monkeypatch):
    segment = plain.page_out(40, len(PROMPT), new)
    monkeypatch.setattr(type(plain.profile.pager), "holds", lambda pager, end: False)
    assert "not there" in restore(plain, None, ids(PROMPT), [segment], 40)
    assert plain.state.is_invalid


def test_a_restore_from_attention_alone_says_nothing_of_the_row(plain):
    """Nobody knows of what is put back that it is numbers, until a token is decoded behind it."""
    segment = plain.page_out(0, len(PROMPT), new)
    assert plain.row.proves_finite()
    assert restore(plain, None, ids(PROMPT), [segment], 0) is None
    assert not plain.row.proves_finite()
