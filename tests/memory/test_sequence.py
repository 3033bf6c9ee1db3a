"""The live sequence notices whatever memory does that it did not order, and keeps only what is proven."""

import ctypes

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as native

from llamahybrid import Llama
from llamahybrid.errors import DecodeError, SnapshotError
from llamahybrid.memory.restore import apply_plan, recover
from llamahybrid.memory.state import common_prefix
from llamahybrid.prompt_cache.base import Plan

PROMPT = [(7 * i + 1) % 200 for i in range(60)]


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


@pytest.fixture
def llm(tiny_model):
    return Llama(str(tiny_model("qwen35")), n_ctx=256, n_threads=1, verbose=False)


@pytest.fixture
def live(llm):
    llm.eval(PROMPT)
    return llm.runner.live


def test_common_prefix():
    assert common_prefix(ids([1, 2, 3]), ids([1, 2, 4])) == 2
    assert common_prefix(ids([1, 2]), ids([1, 2, 4])) == 2
    assert common_prefix(ids([]), ids([1])) == 0


def test_a_sound_sequence_has_no_fault(live):
    assert live.fault() is None
    assert live.state.holds(ids(PROMPT))
    assert not live.touched_outside()


def test_a_hole_in_attention_shows_in_the_size(live, lose_cells):
    lose_cells(live.native._ctx.ctx, 2, 5)
    assert live.fault(deep=False) is None
    assert "bytes" in live.fault()


def test_lost_attention_shows_in_the_positions(llm, live):
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    memory = live.native._ctx.memory
    native.llama_memory_seq_rm(memory, 0, -1, -1)
    assert live.fault() is not None
    live.invalidate()
    with pytest.raises(SnapshotError, match="neither live nor stored"):
        live.restore(record, ids(PROMPT))


def test_a_decode_by_others_is_noticed(live):
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(live.native._ctx.ctx, batch) == 0
    assert live.touched_outside()


def test_a_restore_goes_back_to_the_very_logits(llm, live):
    before = live.row.logits().copy()
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    llm.eval([3, 4, 5])
    after = live.row.logits().copy()
    assert live.restore(record, ids(PROMPT)) is None
    assert live.n == len(PROMPT)
    assert live.row.logits() is None, "logits of another position are not the tip's"
    llm.n_tokens = len(PROMPT)
    llm.eval([3, 4, 5])
    assert np.array_equal(live.row.logits(), after)
    assert not np.array_equal(before, after)


def test_a_short_read_is_a_fault(llm, live, monkeypatch):
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    llm.eval([3, 4])
    monkeypatch.setattr(live.native, "load_partial", lambda data: False)
    assert "read" in live.restore(record, ids(PROMPT))
    assert live.state.is_invalid


def test_a_refused_cut_is_a_fault(llm, live, monkeypatch):
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    llm.eval([3, 4])
    monkeypatch.setattr(live.native, "cut", lambda position: False)
    assert "refused" in live.restore(record, ids(PROMPT))


def test_a_restore_over_attention_with_a_hole_is_a_fault(llm, live, lose_cells):
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    llm.eval([3, 4])
    lose_cells(live.native._ctx.ctx, 2, 5)
    assert "bytes" in live.restore(record, ids(PROMPT))
    assert live.state.is_invalid


def test_recurrent_memory_refuses_a_cut(live):
    assert not live.cut(30)
    assert live.state.holds(ids(PROMPT))
    assert live.fault() is None


def test_a_snapshot_is_refused_when_memory_is_not_as_believed(live, lose_cells):
    lose_cells(live.native._ctx.ctx, 2, 5)
    assert live.snapshot(lambda n: np.empty(n, dtype=np.uint8)) is None


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


@pytest.mark.parametrize(("code", "kept"), [(-1, True), (1, False)])
def test_logits_outlive_only_a_batch_that_was_never_looked_at(live, monkeypatch, code, kept):
    def refuse(*_):
        raise DecodeError(code, "refused")

    monkeypatch.setattr(live.native, "decode", refuse)
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert (live.row.logits() is not None) is kept


def test_a_refused_batch_that_changed_memory_all_the_same_is_not_believed(live, lose_cells, monkeypatch):
    def refuse(*_):
        lose_cells(live.native._ctx.ctx, 2, 5)
        raise DecodeError(1, "refused")

    monkeypatch.setattr(live.native, "decode", refuse)
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid


@pytest.fixture
def plain(tiny_model):
    llm = Llama(str(tiny_model("llama")), n_ctx=256, n_threads=1, verbose=False)
    llm.eval(PROMPT)
    yield llm.runner.live
    llm.close()


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
    monkeypatch.setattr(plain.native, "logits", lambda n_vocab: None)
    assert "no output row" in apply_plan(plain, live_plan(len(PROMPT), wanted), ids(PROMPT))


def test_wrong_positions_are_a_fault_though_the_size_is_right(live, monkeypatch):
    monkeypatch.setattr(live.native, "positions", lambda: (5, 5))
    assert "position" in live.fault()
    assert not live.learn_size_rule()
    assert live.profile.linear


def test_an_empty_sequence_has_no_fault(live):
    live.empty()
    assert live.fault() is None


def test_what_is_not_known_is_never_sound_whatever_memory_says(llm):
    llm.eval([5])
    live = llm.runner.live
    live.invalidate()
    assert live.fault() is not None
    for spoil in (live.require_zeroing, live.invalidate_tip):
        spoil()
        assert live.state.is_invalid
        assert live.n == 1


def test_a_full_context_that_was_spoilt_is_sound_again_once_emptied(llm):
    live = llm.runner.live
    llm.eval((PROMPT * 5)[: live.capacity])
    live.require_zeroing()
    assert live.state.is_invalid
    live.empty()
    assert not live.state.is_invalid
    assert live.fault() is None


@pytest.mark.parametrize("restored", [False, True])
def test_only_a_sequence_that_grew_by_itself_refutes_the_size_rule(llm, live, monkeypatch, restored):
    if restored:
        record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
        llm.eval([3, 4])
        assert live.restore(record, ids(PROMPT)) is None
    size = live.native.state_size
    monkeypatch.setattr(live.native, "state_size", lambda partial: size(partial=partial) + (not partial))
    assert live.learn_size_rule() is not restored
    assert live.profile.linear is restored
    assert (live.fault() is None) is not restored


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


def test_a_cut_that_is_refused_or_lies_ahead_changes_nothing(plain, monkeypatch):
    assert not plain.cut(len(PROMPT) + 5)
    monkeypatch.setattr(plain.native, "cut", lambda position: False)
    assert not plain.cut(40)
    assert plain.state.holds(ids(PROMPT))
    assert plain.row.logits() is not None


def test_a_cut_takes_the_logits_with_it(plain):
    assert plain.cut(40)
    assert plain.row.logits() is None


@pytest.mark.parametrize("answer", [True, False])
def test_memory_that_does_not_empty_by_a_cut_is_cleared(plain, monkeypatch, answer):
    monkeypatch.setattr(plain.native, "cut", lambda position: answer)
    plain.empty()
    assert plain.native.positions() == (-1, -1)
    assert plain.row.logits() is None


def test_nothing_is_saved_of_an_empty_sequence_or_of_half_a_state(live, monkeypatch):
    monkeypatch.setattr(live.native, "save_partial", lambda out: None)
    assert live.snapshot(lambda n: np.empty(n, dtype=np.uint8)) is None
    monkeypatch.undo()
    live.empty()
    assert live.snapshot(lambda n: np.empty(n, dtype=np.uint8)) is None


def test_memory_that_cannot_be_verified_is_never_restored(tiny_model):
    llm = Llama(str(tiny_model("deepseek4")), n_ctx=256, n_threads=1, verbose=False)
    llm.eval(PROMPT)
    live = llm.runner.live
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    with pytest.raises(SnapshotError, match="cannot be verified"):
        live.restore(record, ids(PROMPT))


def test_a_cut_behind_the_window_is_refused(tiny_model):
    llm = Llama(str(tiny_model("gemma3")), n_ctx=1024, n_batch=32, n_threads=1, verbose=False, swa_full=False)
    llm.eval([(7 * i + 1) % 200 for i in range(600)])
    live = llm.runner.live
    assert live.view().cut_floor > 100
    assert not live.cut(100)
    assert not llm._ctx.kv_cache_seq_rm(0, 100, -1)
    assert live.fault() is None


def test_holes_are_refused_in_hybrid_memory_and_noted_in_plain_attention(tiny_model):
    hybrid = Llama(str(tiny_model("qwen35")), n_ctx=256, n_threads=1, verbose=False)
    hybrid.eval(PROMPT)
    assert not hybrid._ctx.kv_cache_seq_rm(0, 2, 5)
    assert hybrid.runner.live.fault() is None
    plain = Llama(str(tiny_model("llama")), n_ctx=256, n_threads=1, verbose=False)
    plain.eval(PROMPT)
    assert plain._ctx.kv_cache_seq_rm(0, 2, 5)
    assert plain.runner.live.state.is_invalid


@pytest.mark.parametrize("n_batch", [1, 3])
def test_the_trial_fits_into_any_batch(tiny_model, n_batch):
    llm = Llama(str(tiny_model("qwen35")), n_ctx=256, n_batch=n_batch, n_threads=1, verbose=False)
    llm.eval(PROMPT)
    assert llm.runner.live.fault() is None


def test_an_interrupted_restore_leaves_nothing_to_build_on(llm, live, monkeypatch):
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    llm.eval([3, 4])

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(live.native, "cut", interrupt)
    with pytest.raises(KeyboardInterrupt):
        live.restore(record, ids(PROMPT))
    assert live.state.is_invalid


def test_a_decode_that_left_other_memory_than_ordered_is_an_error(live, monkeypatch):
    monkeypatch.setattr(live.native, "positions", lambda: (5, 5))
    with pytest.raises(DecodeError, match="not what it should be"):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid


def test_a_state_of_another_size_than_its_snapshot_is_a_fault(tiny_model, monkeypatch):
    llm = Llama(str(tiny_model("mamba")), n_ctx=256, n_threads=1, verbose=False)
    llm.eval(PROMPT)
    live = llm.runner.live
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    monkeypatch.setattr(live.native, "state_size", lambda partial: 12)
    assert "another size" in live.restore(record, ids(PROMPT))


@pytest.fixture
def decoded_natively(llm, live):
    """Two tokens decoded by other code; the last position is 61."""
    for token in (5, 6):
        batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1)
        assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    return live


def test_native_content_is_adopted_and_never_saved(decoded_natively):
    live = decoded_natively
    assert live.adopt_native(len(PROMPT) + 2)
    assert live.state.opaque
    assert live.fault() is None
    assert (live.tokens[-2:] < 0).all()
    assert live.tokens[-1] != live.tokens[-2]
    assert live.snapshot(lambda n: np.empty(n, dtype=np.uint8)) is None
    assert live.page_out(0, 40, lambda n: np.empty(n, dtype=np.uint8)) is None


@pytest.mark.parametrize("n", [61, 10_000])
def test_native_content_that_is_not_there_is_not_adopted(decoded_natively, n):
    assert not decoded_natively.adopt_native(n)


def test_nothing_is_adopted_behind_an_invalid_tip(decoded_natively):
    decoded_natively.invalidate()
    assert not decoded_natively.adopt_native(len(PROMPT) + 2)


@pytest.mark.parametrize("whole", [False, True])
def test_an_images_fewer_positions_go_with_the_image(llm, live, whole):
    """A state from before an image is sound, whatever positions the image took."""
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    state = llm.save_state()
    batch = llama_cpp.llama_batch_get_one((ctypes.c_int32 * 1)(5), 1)
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    assert live.adopt_native(len(PROMPT) + 3), "counted for three tokens, one position taken"
    assert live.fault() is None
    if whole:
        llm.load_state(state)
    else:
        assert live.restore(record, ids(PROMPT)) is None
    assert live.state.holds(ids(PROMPT))


@pytest.mark.parametrize("row_follows", [False, True])
def test_an_output_row_proves_only_states_that_it_came_from(llm, live, row_follows):
    record = live.snapshot(lambda n: np.empty(n, dtype=np.uint8))
    llm.eval([3, 4])
    assert live.restore(record, ids(PROMPT), row_follows=row_follows) is None
    assert live.row.proves_finite() is row_follows
    assert live.restore(record, ids(PROMPT), row_follows=False) is None
    assert live.restore(record, ids(PROMPT), row_follows=True) is None
    assert not live.row.proves_finite(), "one that proved nothing before proves nothing now"
