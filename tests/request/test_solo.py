"""An answer that runs alone is decoded in its own thread; a second request joins it at the next step."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest

from llamahybrid import Llama
from llamahybrid.capi.calls import NativeContext
from llamahybrid.errors import DecodeError
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.request import batcher as batcher_module
from llamahybrid.request import solo as solo_module
from llamahybrid.request.solo import TOKENS_BEFORE
from llamahybrid.request.step_lock import StepLock
from llamahybrid.request.ticket import this_thread

WORDS = np.random.default_rng(5).integers(1, 200, 400).tolist()
ENOUGH = TOKENS_BEFORE + 2
"""Tokens after which an answer is decoded in its own thread: the prompt gives the first."""


@pytest.fixture
def ended(monkeypatch):
    """Threads whose OpenMP team was ended, in order."""
    threads = []
    monkeypatch.setattr(solo_module, "team_ender", lambda: lambda: threads.append(threading.current_thread()))
    return threads


@pytest.fixture
def batches(monkeypatch):
    """(thread, tokens) of each native batch."""
    seen = []
    decode, rows = NativeContext.decode, NativeContext.decode_rows

    def one(self, tokens, *rest):
        seen.append((threading.current_thread(), len(tokens)))
        return decode(self, tokens, *rest)

    def several(self, tokens, *rest):
        seen.append((threading.current_thread(), len(tokens)))
        return rows(self, tokens, *rest)

    monkeypatch.setattr(NativeContext, "decode", one)
    monkeypatch.setattr(NativeContext, "decode_rows", several)
    return seen


@pytest.fixture
def opened(tiny_model, ended):
    made = []

    def open_one(arch="qwen35", n_parallel=2, **more):
        options = {"n_ctx": 1024, "n_batch": 256, "n_threads": 1, "verbose": False, **more}
        made.append(Llama(str(tiny_model(arch)), n_parallel=n_parallel, **options))
        return made[-1]

    yield open_one
    for llm in made:
        llm.close()


def ask(llm, prompt, n=20):
    return list(islice(llm.generate(prompt, temp=0.0), n))


def here(batches):
    """How many batches were decoded in the calling thread."""
    return sum(thread is threading.current_thread() for thread, _ in batches)


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "gemma3", "llama"])
def test_all_but_the_first_tokens_are_decoded_in_the_thread_that_asks(opened, batches, arch):
    one, several = opened(arch, n_parallel=1), opened(arch, n_parallel=3)
    wanted = ask(one, WORDS[:50])
    batches.clear()
    assert ask(several, WORDS[:50]) == wanted
    assert here(batches) == 20 - 1 - TOKENS_BEFORE
    assert here(batches[: -(20 - 1 - TOKENS_BEFORE)]) == 0
    steps, rows = several.slots.batcher.cells.steps, several.slots.batcher.rows
    assert (steps, rows) == (19, 19), "those of the compute thread and its own"


def test_one_team_at_a_time(opened, ended):
    llm = opened()
    ended.clear()
    compute = llm.slots.batcher._shared.thread._desk.thread
    stream = llm.generate(WORDS[:50], temp=0.0)
    list(islice(stream, TOKENS_BEFORE + 1))
    assert ended == []
    next(stream)
    assert ended == [compute], "before it decodes itself"
    list(islice(stream, 5))
    assert ended == [compute]
    stream.close()
    assert ended == [compute, threading.current_thread()], "it may never come again"
    ask(llm, WORDS[:50], 3)
    assert len(ended) == 2, "too few tokens"
    ask(llm, WORDS[:50])
    assert ended == [compute, threading.current_thread()] * 2


def test_who_had_the_whole_context_leaves_no_team(opened, ended):
    """It may have decoded an image."""
    llm = opened()
    ended.clear()
    llm.requests.whole(lambda: None)
    assert ended == [threading.current_thread()]


def test_who_wants_the_lock_gets_it_before_the_next_token(opened, batches, monkeypatch):
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    list(islice(stream, ENOUGH))
    batches.clear()
    monkeypatch.setattr(StepLock, "wanted", 1)
    next(stream)
    assert len(batches) == 1
    assert here(batches) == 0
    stream.close()


def test_a_prompt_inside_a_step_is_decoded_with_the_other_team(opened, ended, batches):
    """As those of a chat handler that asks twice."""
    llm = opened()

    def twice():
        ask(llm, WORDS[:50])
        assert here(batches[-1:]) == 1
        ended.clear()
        batches.clear()
        stream = llm.generate(WORDS[60:90], temp=0.0)
        next(stream)
        assert ended == [threading.current_thread()]
        assert here(batches) == 0
        stream.close()

    llm.requests.whole(twice)


def test_a_team_that_an_interrupt_left_ends_before_the_next_prompt(opened, ended, batches):
    llm = opened()
    llm.slots.batcher.solo.team_of = this_thread()
    ended.clear()
    batches.clear()
    stream = llm.generate(WORDS[:50], temp=0.0)
    next(stream)
    assert ended == [threading.current_thread()]
    stream.close()


@pytest.fixture
def beside():
    """`beside(job)`: a thread does it; its future."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_a_second_request_joins_at_the_next_step(opened, batches, ended, beside, monkeypatch):
    llm = opened(n_ctx=4096)
    alone = [ask(llm, WORDS[:40], 60), ask(llm, WORDS[100:150], 30)]
    stream = llm.generate(WORDS[:40], temp=0.0)
    said = list(islice(stream, ENOUGH + 2))
    assert batches[-1] == (threading.current_thread(), 1)
    me, decode = threading.current_thread(), LiveSequence.decode
    monkeypatch.setattr(batcher_module, "GRACE_SECONDS", 60.0)
    ended.clear()
    batches.clear()
    joined = []

    def arrive(self, tokens, outputs, here=False):
        """The second one comes in the middle of the first one's step."""
        if here and not joined:
            joined.append(beside(ask, llm, WORDS[100:150], 30))
            while not llm._gate._lock.wanted:
                time.sleep(1e-3)
        return decode(self, tokens, outputs, here)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveSequence, "decode", arrive)
        said.append(next(stream))
    assert ended == [me], "it may be away for long now"
    said += list(islice(stream, 60 - len(said)))
    assert [said, joined[0].result(60)] == alone
    mine = [i for i, (thread, _) in enumerate(batches) if thread is me]
    merged = [i for i, (_, tokens) in enumerate(batches) if tokens == 2]
    assert mine[0] == 0
    assert len(merged) > 5
    assert not [i for i in mine if merged[0] < i < merged[-1]]
    assert mine[1:] == [] or mine[1] > merged[-1], "its next step was for both"
    assert ended[0] is me


def test_who_is_away_while_another_one_begins_comes_back_to_the_batcher(opened, ended, beside, batches):
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    list(islice(stream, ENOUGH))
    other = llm.generate(WORDS[100:150], temp=0.0)
    beside(next, other).result(60)
    ended.clear()
    batches.clear()
    list(islice(stream, ENOUGH))
    assert ended[0] is threading.current_thread()
    assert here(batches) == 0, "the other one may go on at any moment"
    other.close()
    stream.close()


def test_it_ends_even_before_its_turn_comes(opened, ended, beside, monkeypatch):
    """What the other one decodes meanwhile is a piece of a prompt, maybe."""
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    list(islice(stream, ENOUGH))
    me, decodes, goes_on = threading.current_thread(), threading.Event(), threading.Event()
    real = NativeContext.decode

    def wait(self, *args):
        if not decodes.is_set():
            decodes.set()
            assert goes_on.wait(60)
        return real(self, *args)

    monkeypatch.setattr(NativeContext, "decode", wait)
    other = beside(ask, llm, WORDS[100:150], 1)
    assert decodes.wait(60)
    ended.clear()

    def watch():
        until = time.monotonic() + 20
        while not ended and time.monotonic() < until:
            time.sleep(1e-3)
        found = list(ended)
        goes_on.set()
        return found

    watching = beside(watch)
    next(stream)
    assert watching.result(60) == [me]
    other.result(60)
    stream.close()


def test_each_thread_begins_anew(opened, batches, ended, beside):
    """An answer that many threads advance leaves no team behind in each."""
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    for _ in range(2 * ENOUGH):
        thread = threading.Thread(target=next, args=(stream,))
        thread.start()
        thread.join()
    workers = {thread for thread, _ in batches[-ENOUGH:]}
    assert len(workers) == 1
    list(islice(stream, ENOUGH))
    assert here(batches[-1:]) == 1
    beside(next, stream).result(60)
    ended.clear()
    next(stream)
    assert ended == [threading.current_thread()]
    stream.close()


def test_where_teams_cannot_be_ended_all_is_decoded_in_one_thread(tiny_model, batches, monkeypatch):
    monkeypatch.setattr(solo_module, "team_ender", lambda: None)
    llm = Llama(str(tiny_model("qwen35")), n_parallel=2, n_ctx=256, n_threads=1, verbose=False)
    batches.clear()
    ask(llm, WORDS[:40])
    assert here(batches) == 0
    llm.close()


def test_in_a_child_process_no_thread_of_the_parent_is_waited_for(opened, batches, ended, monkeypatch):
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    list(islice(stream, ENOUGH))
    ended.clear()
    batches.clear()
    own = os.getpid()
    monkeypatch.setattr(solo_module.os, "getpid", lambda: own + 1)
    next(stream)
    stream.close()
    monkeypatch.undo()
    assert here(batches) == 0
    assert ended == []


@pytest.mark.parametrize("moment", ["decode", "counters"])
def test_an_interrupt_costs_idle_slots_nothing(opened, monkeypatch, moment):
    """It comes in the middle of a token, or before that is counted."""
    llm = opened(n_parallel=3, flash_attn=True)  # else idle slots give way to others
    ask(llm, WORDS[:40])
    idle = llm.runner.live
    held = idle.n
    stream = llm.generate(WORDS[100:150], temp=0.0)
    list(islice(stream, ENOUGH))
    assert llm.runner.live is not idle
    real = getattr(NativeContext, moment)

    def once(self, *args):
        monkeypatch.setattr(NativeContext, moment, real)
        real(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeContext, moment, once)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert not idle.touched_outside()
    wanted = opened(n_parallel=1, flash_attn=True)
    for prompt in (WORDS[:40], WORDS[100:150]):
        assert ask(llm, prompt) == ask(wanted, prompt)
        assert idle.n >= held
    assert llm.slots.batcher._shared.uncounted is None


def test_what_others_decode_is_noticed_after_an_interrupt_that_was_not_counted(opened, monkeypatch):
    llm = opened(n_parallel=3)
    ask(llm, WORDS[:40])
    idle = llm.runner.live
    stream = llm.generate(WORDS[100:150], temp=0.0)
    list(islice(stream, ENOUGH))
    real = NativeContext.counters

    def once(self):
        monkeypatch.setattr(NativeContext, "counters", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeContext, "counters", once)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert llm.slots.batcher._shared.uncounted is not None
    idle.native.decode(WORDS[:5], idle.n, "none")
    assert idle.touched_outside()


def test_what_others_decode_is_noticed_after_an_interrupt_that_was_counted(opened, monkeypatch):
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    list(islice(stream, ENOUGH))
    real = NativeContext.decode

    def once(self, *args):
        monkeypatch.setattr(NativeContext, "decode", real)
        real(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeContext, "decode", once)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    live = llm.runner.live
    live.native.decode([5], live.n, "last")
    assert live.touched_outside()


def test_a_token_that_cannot_be_decoded_is_tried_once_more_and_fails_by_itself(opened, monkeypatch):
    llm = opened()
    wanted = ask(llm, WORDS[:40])
    real, failed = LiveSequence.decode, []

    def fail(self, tokens, outputs, here=False):
        if here and not failed:
            failed.append(tokens)
            raise DecodeError(1, "no slot")
        return real(self, tokens, outputs, here)

    monkeypatch.setattr(LiveSequence, "decode", fail)
    assert ask(llm, WORDS[:40]) == wanted
    assert failed


def test_without_a_cell_the_step_is_not_its_own(opened, batches, monkeypatch):
    llm = opened()
    stream = llm.generate(WORDS[:40], temp=0.0)
    list(islice(stream, ENOUGH))
    batches.clear()
    free = iter([0])
    cells = llm.slots.batcher.cells
    real = cells.free
    monkeypatch.setattr(cells, "free", lambda: next(free, real()))
    next(stream)
    assert here(batches) == 0
    next(stream)
    stream.close()
