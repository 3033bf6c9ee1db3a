"""The guarded context: after any of upstream's calls on memory the next answer is a fresh context's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.capi.calls import NativeContext
from llamahybrid.capi.shim import library
from llamahybrid.errors import DecodeError
from tests.conftest import take

from .conftest import LONGER, PROMPT, foreign_decode

CALLS: dict[str, Callable[[Any], object]] = {
    "clear": lambda ctx: ctx.kv_cache_clear(),
    "cut the tail": lambda ctx: ctx.kv_cache_seq_rm(-1, 30, -1),
    "cut a hole": lambda ctx: ctx.kv_cache_seq_rm(0, 2, 5),
    "cut an empty range": lambda ctx: ctx.kv_cache_seq_rm(0, 9, 3),
    "cut behind the end": lambda ctx: ctx.kv_cache_seq_rm(0, 90, -1),
    "copy to another sequence": lambda ctx: ctx.kv_cache_seq_cp(0, 1, 0, -1),
    "keep ours": lambda ctx: ctx.kv_cache_seq_keep(0),
    "keep another": lambda ctx: ctx.kv_cache_seq_keep(1),
    "reset the counters": lambda ctx: ctx.reset_timings(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
def test_after_a_call_on_memory_the_answer_is_a_fresh_contexts(
    open_model: Callable[..., Any], fresh: Callable[..., list[int]], arch: str, call: str
) -> None:
    llm = open_model(arch, n_ctx=256)
    llm.eval(PROMPT)
    CALLS[call](llm._ctx)
    assert take(llm, LONGER) == fresh(LONGER, arch=arch)
    if call in ("cut an empty range", "cut behind the end", "keep ours", "reset the counters"):
        assert llm.last_request.cached == len(PROMPT)
    assert take(llm, LONGER) == fresh(LONGER, arch=arch)


def test_shifted_positions_and_copies_onto_the_live_sequence_make_it_unknown(
    open_model: Callable[..., Any], fresh: Callable[..., list[int]]
) -> None:
    for change in (
        lambda ctx: ctx.kv_cache_seq_shift(0, 20, 40, 1),
        lambda ctx: (ctx.kv_cache_seq_cp(0, 1, 0, 20), ctx.kv_cache_seq_cp(1, 0, 0, 20)),
    ):
        llm = open_model("llama", n_ctx=256)
        llm.eval(PROMPT)
        change(llm._ctx)
        assert take(llm, LONGER) == fresh(LONGER, arch="llama")
        assert llm.last_request.cached == 0


def test_a_decode_of_others_is_not_covered_up_by_a_reset_of_the_counters(
    open_model: Callable[..., Any], fresh: Callable[..., list[int]]
) -> None:
    llm = open_model("llama", n_ctx=256)
    llm.eval(PROMPT)
    foreign_decode(llm, [5], len(PROMPT))
    llm._ctx.reset_timings()
    assert take(llm, LONGER) == fresh(LONGER, arch="llama")
    assert llm.last_request.cached == 0


def test_holes_are_refused_in_hybrid_memory(llm: Any, live: Any) -> None:
    assert not llm._ctx.kv_cache_seq_rm(0, 2, 5)
    assert live.fault() is None


@pytest.mark.parametrize("code", [-3, 1])
def test_a_failed_decode_names_its_result(llm: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(library(), "decode", lambda ctx, batch: code)
    with pytest.raises(DecodeError, match=str(code)) as told:
        llm._ctx.decode(SimpleNamespace(batch=None))
    assert told.value.code == code


@pytest.mark.parametrize("cls", [Llama, llama_cpp.Llama])
def test_a_closed_context_is_not_called(open_model: Callable[..., Any], cls: Any) -> None:
    llm = open_model(cls=cls)
    context, native = llm._ctx, NativeContext(llm._ctx)
    llm.close()
    calls: list[Callable[[], Any]] = [
        native.counters,
        lambda: native.n_ctx,
        lambda: native.logits(16),
        lambda: native.state_size(partial=True),
    ]
    if cls is Llama:
        calls.append(lambda: context.decode(SimpleNamespace(batch=None)))
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
