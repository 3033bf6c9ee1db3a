"""A first token does not wait for what is stored of its prompt, and nothing of that is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid.core import slots
from llamahybrid.core.checkpoints import Checkpoints
from llamahybrid.core.request import Feed
from llamahybrid.errors import DecodeError, RequestCancelled
from llamahybrid.memory.sequence import LiveSequence
from tests.lab.costs import REAL, decide_by
from tests.lab.waiting import wait_until
from tests.request.asking import WORDS, Batches, begin, in_thread, take

PROMPT, OTHER = WORDS[:150], WORDS[200:300]
Opened = Callable[..., Any]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stores no prompt only because nobody asks for a token."""
    monkeypatch.setattr(slots, "SETTLE_SECONDS", 1e9)


def entries(llm: Any) -> int:
    found: int = llm.prompt_cache.stats().entries
    return found


def with_prefill(opened: Opened, seconds: float, n_batch: int = 512) -> Any:
    """Open a model, and let it decide as if a token of a prompt took `seconds`."""
    llm = opened(n_batch=n_batch, n_ubatch=n_batch)
    decide_by(llm, replace(REAL, prefill_seconds=seconds))
    for tokens in (1, 512):
        llm.requests.loop._scheduler._meter.decoded(tokens, 1.0)
    return llm


def repeated(llm: Any) -> tuple[int, int]:
    """Ask for the same prompt again; return its cached tokens, and its length."""
    take(llm, PROMPT, 1)
    return llm.last_request.cached, len(PROMPT)


def test_first_token_comes_before_the_end_of_its_prompt_is_stored(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, order = opened(), list[str]()
    publish, checkpoint = Feed.publish, Checkpoints.checkpoint
    monkeypatch.setattr(Feed, "publish", lambda *args: (order.append("token"), publish(*args))[1])
    stored = lambda *args, **more: (order.append("stored"), checkpoint(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr(Checkpoints, "checkpoint", stored)
    llm.create_completion(PROMPT, max_tokens=4)
    assert order[:2] == ["token", "stored"]


def test_prompt_is_stored_where_nobody_asks_for_a_token(opened: Opened) -> None:
    llm = opened()
    stream, _ = begin(llm, PROMPT)
    wait_until(lambda: llm.slots.all[0].runner.checkpoints.due is None)
    assert entries(llm) > 0
    stream.close()
    take(llm, OTHER, 2)
    assert repeated(llm) == (150, 150)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("deed", ["close", "reset", "another prompt", "next token"])
def test_prompt_is_stored_before_its_end_goes(opened: Opened, deed: str) -> None:
    llm = opened()
    stream, _ = begin(llm, PROMPT)
    if deed == "close":
        stream.close()
    elif deed == "reset":
        llm.reset()
    elif deed == "next token":
        next(stream)
        stream.close()
    take(llm, OTHER, 2)
    assert repeated(llm) == (150, 150)
    assert "stored logits" in llm.last_request.reason


@pytest.mark.usefixtures("patient")
def test_same_prompt_beside_it_is_not_decoded_again(opened: Opened) -> None:
    llm = opened(n_parallel=2)
    running, _ = begin(llm, PROMPT)
    assert repeated(llm) == (150, 150)
    running.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_is_stored_once_others_may_have_decoded(opened: Opened, stock: Opened, tokens: int) -> None:
    llm = opened()
    stream, _ = begin(llm, PROMPT)
    before = entries(llm)
    llama_cpp.llama_perf_context_reset(llm.ctx)
    list(islice(stream, tokens))
    stream.close()
    assert entries(llm) == before
    assert take(llm, PROMPT) == stock()(PROMPT)


@pytest.mark.usefixtures("patient")
def test_logits_are_stored_behind_their_own_tokens_only(opened: Opened) -> None:
    llm = opened()
    stream, _ = begin(llm, PROMPT)
    points, before = llm.slots.all[0].runner.checkpoints, entries(llm)
    end = replace(points.due.end, tokens=points.due.end.tokens[::-1])
    points.due = points.due._replace(end=end)
    stream.close()
    assert (points.due, entries(llm)) == (None, before)


@pytest.mark.usefixtures("patient")
def test_error_while_a_prompt_is_stored_ends_no_answer(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = opened()
    stream, said = begin(llm, PROMPT)

    def fail(*_: Any, **__: Any) -> bool:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "checkpoint", fail)
        said.append(next(stream))
    assert [*said, next(stream)] == stock()(PROMPT, 3)
    assert "the end of a prompt was not stored" in caplog.text
    stream.close()


def test_logits_are_stored_as_they_were_computed(opened: Opened, stock: Opened) -> None:
    """A reader may change the native row, as a sampler of its own does."""
    llm = opened()
    stream, _ = begin(llm, PROMPT)
    row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),))
    row[:] = 0
    stream.close()
    take(llm, OTHER, 2)
    assert take(llm, PROMPT) == stock()(PROMPT)


@pytest.mark.parametrize("number", [0, 2])
def test_counters_that_another_thread_resets_cost_no_checkpoint(opened: Opened, number: int) -> None:
    """Each completion with `verbose=True` resets them, upstream's default."""
    llm = opened()
    batches = Batches(llm)
    batches.after[number] = lambda: in_thread(llm._ctx.reset_timings)
    llm.create_completion(PROMPT, max_tokens=4)
    batches.stop()
    counted = sum(llm.slots.all[0].live.shared.counters[:2])
    assert counted <= sum(batches.sizes[number + 1 :]) + 2, "they are reset behind the batch; 0 reads as 1"
    assert repeated(llm) == (150, 150)


@pytest.mark.usefixtures("patient")
def test_nothing_is_stored_while_code_of_the_caller_runs(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SETTLE_SECONDS", 1e-3)
    llm, seen = opened(), []

    def process(_: Any, scores: Any) -> Any:
        time.sleep(0.02)
        seen.append(llm.slots.all[0].runner.checkpoints.due is not None)
        return scores

    processors = llama_cpp.LogitsProcessorList([process])
    take(llm, PROMPT, 2, logits_processor=processors)
    assert seen == [True, False]


def test_short_batch_that_fails_costs_no_more_than_itself(opened: Opened, stock: Opened) -> None:
    llm = with_prefill(opened, 1e-3, 64)
    batches = Batches(llm)

    def fail() -> None:
        raise DecodeError(-3, "computing failed")

    batches.after[4] = fail
    with pytest.raises(DecodeError):
        take(llm, WORDS)
    done = sum(batches.sizes[:4])
    batches.stop()
    assert take(llm, WORDS) == stock(n_ubatch=64)(WORDS)
    assert llm.last_request.cached == done > 0


@pytest.mark.parametrize("prefill", [0.1, 1e-3])
def test_error_of_a_batch_is_raised_where_it_cannot_be_undone(
    opened: Opened, stock: Opened, prefill: float
) -> None:
    llm = with_prefill(opened, prefill, 64)
    batches = Batches(llm)

    def fail() -> None:
        llama_cpp.llama_set_warmup(llm.ctx, False)  # as a change of adapters
        raise DecodeError(-3, "computing failed")

    batches.after[4] = fail
    with pytest.raises(DecodeError, match="computing failed"):
        take(llm, WORDS)
    batches.stop()
    assert take(llm, WORDS) == stock(n_ubatch=64)(WORDS)


@pytest.mark.parametrize(("prefill", "copies"), [(0.1, True), (1e-5, False)])
def test_state_is_copied_before_batches_that_take_time_alone(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, prefill: float, copies: bool
) -> None:
    """A batch that is over at once is not stopped, and on a GPU the copy takes as long."""
    llm, copied = with_prefill(opened, prefill), []
    snapshot = LiveSequence.snapshot
    monkeypatch.setattr(LiveSequence, "checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(Checkpoints, "stage", lambda *_: None)
    monkeypatch.setattr(
        LiveSequence, "snapshot", lambda *args, **more: (copied.append(1), snapshot(*args, **more))[1]
    )
    take(llm, OTHER)
    assert bool(copied) is copies


def test_cancel_during_a_short_batch_ends_the_request_behind_it(opened: Opened) -> None:
    llm = with_prefill(opened, 1e-5)
    batches = Batches(llm)
    batches.before[0] = lambda: threading.Thread(target=llm.cancel).start()
    with pytest.raises(RequestCancelled):
        take(llm, OTHER)
    batches.stop()
    assert (llm.last_request.cancelled, llm.last_request.unreached) == (True, 0)
    assert take(llm, OTHER)


def test_cancel_during_a_short_batch_of_eval_raises_behind_it(opened: Opened) -> None:
    llm = with_prefill(opened, 1e-5)
    batches = Batches(llm)
    batches.before[0] = llm.cancel
    with pytest.raises(RequestCancelled):
        llm.eval(OTHER)
    batches.stop()
    assert llm.n_tokens == sum(batches.sizes) == len(OTHER)


def test_stored_logits_serve_where_the_last_batch_had_none(opened: Opened, stock: Opened) -> None:
    """Beside the chunk of another prompt; the context has no row for them then."""
    llm = opened(n_parallel=2)
    take(llm, PROMPT)
    llm.slots.all[1].live.decode(OTHER[:20], "none")
    assert take(llm, PROMPT) == stock()(PROMPT)
    assert llm.last_request.cached == len(PROMPT)
