"""Faults of memory: refused before anything changes, or noticed afterwards and never built on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamahybrid.capi.calls import NativeContext
from llamahybrid.errors import DecodeError, SnapshotError
from llamahybrid.memory.restore import apply_plan, recover, restore
from llamahybrid.memory.segment import seal_segment
from llamahybrid.prompt_cache.base import Plan

from .conftest import PROMPT, decode, foreign_decode, ids, new

pytestmark = [pytest.mark.patched]

Opener = Callable[..., Any]
LIVE = ids(PROMPT)


def no(*_: Any, **__: Any) -> bool:
    """A library that refuses."""
    return False


def refuse(code: int, then: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """A decode that reports `code`, after `then()`."""

    def failing(*_: Any) -> None:
        then()
        raise DecodeError(code, f"llama_decode returned {code}")

    return failing


# -- refused, and nothing changed ------------------------------------------------------------------


@pytest.fixture
def saved(live: Any) -> tuple[Any, Any]:
    """A snapshot of the prompt and all its attention; the sequence is empty again."""
    record, segment = live.snapshot(new), live.page_out(0, len(PROMPT), new)
    live.empty()
    return record, segment


def refused(live: Any, match: str, *arguments: Any) -> None:
    before = live.tokens.tolist()
    with pytest.raises(SnapshotError, match=match):
        restore(live, *arguments)
    assert live.tokens.tolist() == before
    assert live.fault() is None


def test_a_snapshot_of_other_tokens_is_refused(live: Any, saved: tuple[Any, Any]) -> None:
    record, segment = saved
    for tokens in ([*PROMPT[:-1], 199], [199, *PROMPT[1:]], PROMPT[:-1]):
        refused(live, "other tokens|another range|neither live", record, ids(tokens), [segment], 0)


@pytest.mark.parametrize("byte", [0, 70, -1])
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_record_is_refused(live: Any, saved: tuple[Any, Any], part: int, byte: int) -> None:
    record, segment = saved
    (record, segment.record)[part][byte] ^= 1
    refused(live, ".", record, LIVE, [segment], 0)


def test_a_snapshot_of_another_computation_is_refused(open_model: Opener, saved: tuple[Any, Any]) -> None:
    other = open_model(n_ctx=256, cache_salt="another")
    refused(other.runner.live, "another model", saved[0], LIVE, [saved[1]], 0)


def test_attention_that_is_neither_live_nor_stored_is_refused(live: Any) -> None:
    record, first, last = live.snapshot(new), live.page_out(0, 20, new), live.page_out(30, len(PROMPT), new)
    live.empty()
    for segments, kept in (((), 0), ([first, last], 0), ([last], 30), ([first], 0)):
        refused(live, "neither live nor stored", record, LIVE, segments, kept)


def test_a_segment_of_another_layout_is_refused(live: Any, saved: tuple[Any, Any]) -> None:
    record, segment = saved
    shorter = seal_segment(segment.record[:-8].copy(), live.identity.namespace, LIVE, 0)
    refused(live, "another layout", record, LIVE, [shorter], 0)


def test_a_hybrid_is_never_restored_from_attention_alone(live: Any, saved: tuple[Any, Any]) -> None:
    refused(live, "not all of this memory's state", None, LIVE, [saved[1]], 0)


def test_memory_that_cannot_be_verified_is_never_restored(open_model: Opener) -> None:
    live = open_model("deepseek4", n_ctx=256).runner.live
    decode(live, PROMPT)
    refused(live, "cannot be verified", live.snapshot(new), LIVE)


def test_a_cut_that_memory_cannot_make_exactly_is_refused(live: Any, open_model: Opener) -> None:
    assert not live.cut(30)
    assert live.state.holds(LIVE)
    window = open_model("gemma3", n_ctx=1024, n_batch=32, swa_full=False)
    window.eval([(7 * i + 1) % 200 for i in range(600)])
    assert not window.runner.live.cut(100)
    assert not window._ctx.kv_cache_seq_rm(0, 100, -1)
    for each in (live, window.runner.live):
        assert each.fault() is None


# -- failed, and nothing built on it ---------------------------------------------------------------


@pytest.mark.parametrize(("call", "said"), [("load_partial", "did not read"), ("cut", "refused to cut")])
def test_a_restore_that_the_library_refuses_is_a_fault(
    live: Any, monkeypatch: pytest.MonkeyPatch, call: str, said: str
) -> None:
    record = live.snapshot(new)
    decode(live, [3, 4])
    monkeypatch.setattr(live.native, call, no)
    assert said in restore(live, record, LIVE)
    assert live.state.is_invalid


def test_a_restore_over_attention_with_a_hole_is_a_fault(
    llm: Any, live: Any, lose_cells: Callable[[Any, int, int], None]
) -> None:
    record = live.snapshot(new)
    decode(live, [3, 4])
    lose_cells(llm.ctx, 2, 5)
    assert "bytes" in restore(live, record, LIVE)
    assert live.state.is_invalid


def test_a_state_of_another_size_than_its_snapshot_is_a_fault(
    open_model: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = open_model("mamba", n_ctx=256).runner.live
    decode(live, PROMPT)
    record = live.snapshot(new)
    monkeypatch.setattr(live.native, "state_size", lambda partial: 12)
    assert "another size" in restore(live, record, LIVE)


def test_an_interrupted_restore_leaves_nothing_to_build_on(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = live.snapshot(new)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live.native, "cut", interrupt)
    with pytest.raises(KeyboardInterrupt):
        restore(live, record, LIVE)
    assert live.state.is_invalid


@pytest.mark.parametrize(
    ("kept", "call", "said"), [(40, "cut", "before a restore"), (0, "append", "refused")]
)
def test_attention_that_the_library_refuses_is_a_fault(
    plain: Any, monkeypatch: pytest.MonkeyPatch, kept: int, call: str, said: str
) -> None:
    segment = plain.page_out(kept, len(PROMPT), new)
    monkeypatch.setattr(plain.native if call == "cut" else type(plain.profile.pager), call, no)
    assert said in restore(plain, None, LIVE, [segment], kept)
    assert plain.state.is_invalid


@pytest.mark.parametrize(("code", "kept"), [(1, True), (-1, True), (2, False), (-2, False), (-3, False)])
def test_a_failed_decode_keeps_only_what_the_library_leaves_unchanged(
    live: Any, monkeypatch: pytest.MonkeyPatch, code: int, kept: bool
) -> None:
    monkeypatch.setattr(NativeContext, "decode_parts", refuse(code))
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert live.state.holds(LIVE) is kept
    assert live.state.is_invalid is not kept


def test_a_refused_batch_that_changed_memory_all_the_same_is_not_believed(
    llm: Any, live: Any, lose_cells: Callable[[Any, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeContext, "decode_parts", refuse(1, lambda: lose_cells(llm.ctx, 2, 5)))
    with pytest.raises(DecodeError):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid


def test_a_decode_that_left_other_memory_than_ordered_is_an_error(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.native, "positions", lambda: (5, 5))
    with pytest.raises(DecodeError, match="wrong after a decode"):
        live.decode(ids([1]), "last")
    assert live.state.is_invalid


def test_a_state_that_was_not_saved_whole_is_no_snapshot(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.native, "save_partial", lambda out: False)
    assert live.snapshot(new) is None


@pytest.mark.parametrize("restored", [False, True])
def test_only_a_sequence_that_grew_by_itself_refutes_the_size_rule(
    live: Any, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    if restored:
        record = live.snapshot(new)
        decode(live, [3, 4])
        assert restore(live, record, LIVE) is None
    size = live.native.state_size
    monkeypatch.setattr(live.native, "state_size", lambda partial: size(partial=partial) + (not partial))
    assert live.learn_size_rule() is not restored
    assert (live.fault() is None) is not restored


# -- a plan, and an undo ---------------------------------------------------------------------------


def live_plan(cached: int, logits: Any = None) -> Plan:
    return Plan(len(PROMPT), len(PROMPT), cached, "live", checkpoint=None, logits=logits)


def test_a_plan_that_memory_does_not_follow_is_a_fault(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plain.native, "cut", no)
        assert "refused to cut" in apply_plan(plain, live_plan(40), LIVE)
    monkeypatch.setattr(plain.native, "state_size", lambda partial: 12)
    assert "bytes" in apply_plan(plain, live_plan(40), LIVE)


def test_stored_logits_become_the_tips_or_a_fault(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = np.arange(plain.n_vocab, dtype=np.float32)
    assert apply_plan(plain, live_plan(len(PROMPT), wanted), LIVE) is None
    assert np.array_equal(plain.row.logits(), wanted)
    monkeypatch.setattr(plain.native, "logits", lambda *_: None)
    assert "no output row" in apply_plan(plain, live_plan(len(PROMPT), wanted), LIVE)


def test_a_plan_from_nothing_removes_unknown_content(llm: Any) -> None:
    foreign_decode(llm, [5], 0)
    live = llm.runner.live
    assert apply_plan(live, live_plan(0), LIVE) is None
    assert live.native.positions() == (-1, -1)


def test_a_stopped_batch_is_undone(live: Any, plain: Any) -> None:
    record = live.snapshot(new)
    decode(live, [3, 4])
    for each, undo in ((live, (len(PROMPT), record)), (plain, (40, None)), (plain, (0, None))):
        each.invalidate_tip()
        assert recover(each, undo)
        assert each.state.holds(LIVE[: undo[0]])
        assert each.fault() is None


def test_an_undo_that_memory_does_not_bear_out_leaves_nothing_to_build_on(
    live: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = live.snapshot(new)
    decode(live, [3, 4])
    monkeypatch.setattr(live.native, "load_partial", no)
    assert not recover(live, (len(PROMPT), record))
    monkeypatch.setattr(plain.native, "state_size", lambda partial: 12)
    assert not recover(plain, (40, None))
    assert live.state.is_invalid
    assert plain.state.is_invalid
