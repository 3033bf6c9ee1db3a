"""Rare events of the decode loop: faults, no thread, signals, cancels beside others, callbacks that block."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import PromptCache
from llamahybrid.core.runner import Runner
from llamahybrid.core.slots import Slots
from llamahybrid.errors import LlamaHybridError, RequestSuperseded
from tests.lab.waiting import wait_until
from tests.request.asking import (
    DEADLINE,
    WORDS,
    Started,
    begin,
    finish,
    in_thread,
    said,
    take,
    waits_for_reply,
)

Opened = Callable[..., Any]


def test_a_loop_that_gets_no_thread_says_so(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right, start = opened(), stock(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "llamahybrid-decode":
            raise RuntimeError("can't start new thread")  # as under a limit of processes
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            in_thread(take, llm, WORDS[:40])
    assert take(llm, WORDS[:40]) == right(WORDS[:40])


def test_a_clock_that_goes_back_ends_neither_requests_nor_writes(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program's tests may freeze the time, at any date, while a model is open."""
    right, now = stock(), [2e9]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for known in (False, True):  # the second one reads both from disk
        with closing(opened(prompt_cache=PromptCache(disk_dir=tmp_path))) as llm:
            assert take(llm, WORDS[:60]) == right(WORDS[:60])
            take(llm, WORDS[300:] if known else WORDS[200:300])  # now known: the time of a token
            now[0] -= 1e8
            assert take(llm, WORDS[100:180]) == right(WORDS[100:180])
            assert bool(llm.last_request.cached) is known
            assert take(llm, WORDS[20:60]) == right(WORDS[20:60])


def test_cancel_reaches_a_request_whose_message_is_not_read_yet(opened: Opened) -> None:
    llm, held, go_on = opened(), threading.Event(), threading.Event()

    def hold(progress: Any) -> None:
        held.set()
        assert go_on.wait(DEADLINE)

    def ask(**request: Any) -> Any:
        with llm.request(**request):
            return finish(llm.create_completion(WORDS[:40], max_tokens=4, temperature=0.0))

    first = Started(ask, on_progress=hold)
    assert held.wait(DEADLINE)  # the loop is in a callback, as it may be in a long batch
    second = Started(ask)
    wait_until(lambda: waits_for_reply(second))
    llm.cancel()
    go_on.set()
    assert [first.result(), second.result()] == ["cancelled", "cancelled"]


def test_tokens_sent_into_a_stream_are_lost_if_another_takes_its_slot_later(opened: Opened) -> None:
    both = []
    for preempted in (False, True):
        llm = opened(logits_all=True)
        stream, _ = begin(llm, WORDS[:40], 2)
        if preempted:
            take(llm, WORDS[100:140], 3)
        both.append([stream.send([3, 4]), *islice(stream, 4)])
    assert both[0] == both[1]
    take(llm, WORDS[100:140], 2)
    with pytest.raises(RequestSuperseded):
        next(stream)


def interrupted(llm: Any, handler: Callable[[], None], stream: bool) -> str:
    """The text of a completion whose caller runs a signal handler in the middle of the prompt."""
    caller, before = threading.get_ident(), signal.getsignal(signal.SIGUSR1)
    sent = list[int]()

    def interrupt(progress: Any) -> None:
        if 0 < progress.processed < progress.total and not sent:
            sent.append(progress.processed)
            signal.pthread_kill(caller, signal.SIGUSR1)

    def give_up(*_: Any) -> None:
        raise AssertionError("the request did not come back")

    ended = signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGUSR1, lambda *_: handler())
    signal.alarm(DEADLINE)
    try:
        with llm.request(on_progress=interrupt):
            made = llm.create_completion(WORDS[:300], max_tokens=6, temperature=0.0, stream=stream)
            text = said(made)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, ended)
        signal.signal(signal.SIGUSR1, before)
    assert sent
    return text


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="threads get no signals")
@pytest.mark.parametrize("stream", [True, False])
def test_a_signal_handler_may_use_the_model(opened: Opened, stock: Opened, stream: bool) -> None:
    """The handler runs in the thread that waits for a reply, inside that request."""
    llm, right, used = opened(), stock(), list[list[int]]()

    def use() -> None:
        llm.reset()
        llm.eval(WORDS[100:110])
        used.append([llm.n_tokens, llm.sample(temp=0.0)])

    text = interrupted(llm, use, stream)
    assert used
    assert all(each == [10, *right(WORDS[100:110], 1)] for each in used)
    assert text == llm.detokenize(right(WORDS[:300], 6)).decode(errors="ignore")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="threads get no signals")
@pytest.mark.parametrize("stream", [True, False])
def test_a_state_that_a_signal_handler_saves_hides_no_tokens(
    opened: Opened, stock: Opened, stream: bool
) -> None:
    llm, states = opened(), list[Any]()
    text = interrupted(llm, lambda: states.append(llm.save_state()), stream)
    answer = stock()(WORDS[:300], 6)
    assert text == llm.detokenize(answer).decode(errors="ignore")
    assert states
    assert llm.input_ids[: llm.n_tokens].tolist() == [*WORDS[:300], *answer[:5]]


def test_answers_closed_in_a_callback_hold_up_no_request(opened: Opened) -> None:
    """`on_request` runs in the loop's thread, for which the threads of these answers wait."""
    llm = opened(n_parallel=2)
    answers = [llm.create_completion(WORDS[:40], max_tokens=50, n=3, stream=True)]
    next(answers[0])

    def close(report: Any) -> None:
        if answers:
            answers.pop().close()

    llm.on_request = close
    in_thread(lambda: llm.create_completion(WORDS[100:140], max_tokens=3))


# -- faults and finalizers ---------------------------------------------------------------------------


def test_a_state_that_cannot_be_stored_ends_no_request(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right, failed = opened(), stock(), list[int]()
    stream, said = begin(llm, WORDS[:60], 3)
    save_tip = Runner.save_tip

    def fail(runner: Runner, stays: int = 0) -> None:
        if failed:
            save_tip(runner, stays)
            return
        failed.append(runner.live.n)
        raise MemoryError("there is no room for a state")

    monkeypatch.setattr(Runner, "save_tip", fail)
    assert take(llm, WORDS[100:160], 4) == right(WORDS[100:160], 4)
    assert failed
    assert [*said, *islice(stream, 3)] == right(WORDS[:60], 6)


def test_a_slot_that_cannot_be_given_fails_one_request(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right = opened(n_parallel=2), stock()
    stream, said = begin(llm, WORDS[:60], 3)

    def fail(slots: Slots, request: Any) -> None:
        raise MemoryError("there is no room to look for one")

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "best", fail)
        with pytest.raises(MemoryError):
            take(llm, WORDS[100:160])
    assert [*said, *islice(stream, 3)] == right(WORDS[:60], 6)
    assert take(llm, WORDS[100:160], 4) == right(WORDS[100:160], 4)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_finalizer_in_the_loops_thread_changes_no_answer(opened: Opened, stock: Opened, slots: int) -> None:
    """The collector runs in any thread: in that of the loop, `reset` would come between two batches."""
    llm, right, raised = opened(n_parallel=slots), stock(), list[str]()

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            try:
                llm.eval([7, 7, 7])
            except LlamaHybridError as error:
                raised.append(str(error))

    def leave_garbage(progress: Any) -> None:
        if 100 < progress.processed < progress.total and not raised:
            gc.disable()
            Finalized()
            gc.set_threshold(1)  # collected by the loop's thread, as the caller's waits
            gc.enable()
        else:
            gc.set_threshold(*threshold)

    threshold, prompt = gc.get_threshold(), WORDS[:300]
    try:
        with llm.request(on_progress=leave_garbage):
            assert take(llm, prompt) == right(prompt)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert len(raised) == 1
