"""The guarded context: whatever upstream does to memory through it, the live sequence knows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamahybrid.errors import DecodeError
from llamahybrid.memory.sequence import LiveSequence

from .conftest import PROMPT


@pytest.fixture
def llm(open_model: Callable[..., Any]) -> Any:
    return open_model("llama", n_ctx=256)


def known(live: LiveSequence) -> bool:
    return live.state.holds(np.array(PROMPT))


def test_a_cleared_memory_is_empty(llm: Any, live: LiveSequence) -> None:
    llm._ctx.kv_cache_clear()
    assert live.n == 0
    assert live.native.positions() == (-1, -1)


def test_a_tail_is_cut_from_both(llm: Any, live: LiveSequence) -> None:
    assert llm._ctx.kv_cache_seq_rm(-1, 30, -1)
    assert live.n == 30
    assert live.fault() is None


@pytest.mark.parametrize(("start", "end"), [(60, -1), (90, -1), (5, 5), (9, 3)])
def test_an_empty_range_changes_nothing(llm: Any, live: LiveSequence, start: int, end: int) -> None:
    assert llm._ctx.kv_cache_seq_rm(0, start, end)
    assert known(live)
    assert live.fault() is None


def test_another_sequence_is_none_of_ours(llm: Any, live: LiveSequence) -> None:
    llm._ctx.kv_cache_seq_cp(0, 1, 0, 20)
    assert llm._ctx.kv_cache_seq_rm(1, 0, -1)
    assert known(live)
    assert live.fault() is None


def test_a_copy_onto_the_live_sequence_makes_it_unknown(llm: Any, live: LiveSequence) -> None:
    llm._ctx.kv_cache_seq_cp(0, 1, 0, 20)
    assert known(live)
    llm._ctx.kv_cache_seq_cp(1, 0, 0, 20)
    assert live.state.is_invalid


def test_shifted_positions_are_unknown(llm: Any, live: LiveSequence) -> None:
    llm._ctx.kv_cache_seq_shift(1, 0, 20, 1)
    assert known(live)
    llm._ctx.kv_cache_seq_shift(0, 20, 40, 1)
    assert live.state.is_invalid


def test_keeping_another_sequence_empties_ours(llm: Any, live: LiveSequence) -> None:
    llm._ctx.kv_cache_seq_keep(0)
    assert known(live)
    llm._ctx.kv_cache_seq_keep(1)
    assert live.n == 0


def test_counters_that_upstream_resets_are_no_decode_of_others(llm: Any, live: LiveSequence) -> None:
    llm._ctx.reset_timings()
    assert not live.touched_outside()


def test_a_decode_of_others_is_not_covered_up_by_a_reset(llm: Any, live: LiveSequence) -> None:
    live.native.decode([5], live.n, "last")
    assert live.touched_outside()
    llm._ctx.reset_timings()
    assert live.touched_outside()


def test_a_failed_decode_names_its_result(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._ctx, "call", SimpleNamespace(decode=lambda ctx, batch: -3))
    with pytest.raises(DecodeError, match="-3") as told:
        llm._ctx.decode(SimpleNamespace(batch=None))
    assert told.value.code == -3


def test_a_closed_context_decodes_nothing(llm: Any) -> None:
    context = llm._ctx
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        context.decode(SimpleNamespace(batch=None))


def test_another_adapter_disowns_what_is_live(llm: Any, live: LiveSequence) -> None:
    before = live.fingerprint
    llm._ctx.adapt(llm._ctx.adapters)
    assert live.fingerprint is before
    llm._ctx.adapt(type(llm._ctx.adapters)(modes=(("llama_set_warmup", True),)))
    assert live.fingerprint != before
    assert live.state.opaque


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_holes_are_refused_in_hybrid_memory_and_noted_in_plain_attention(
    open_model: Callable[..., Any], arch: str
) -> None:
    llm = open_model(arch, n_ctx=256)
    llm.eval(PROMPT)
    live = llm.runner.live
    assert llm._ctx.kv_cache_seq_rm(0, 2, 5) is (arch == "llama")
    assert live.state.is_invalid is (arch == "llama")
    assert (live.fault() is None) is (arch == "qwen35")
