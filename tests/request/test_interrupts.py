"""Ctrl-C at any moment of a request: what was decoded is kept, and nothing wrong is believed afterwards."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from itertools import islice
from pathlib import Path

import pytest

import llamahybrid
from llamahybrid import PromptCache
from llamahybrid.capi import shim
from llamahybrid.capi.calls import NativeContext
from llamahybrid.client import answers, completion, handle, requests
from llamahybrid.core import loop, scheduler, slots
from tests.request.asking import ARCHS, WORDS, Batches, begin, in_thread, take

pytestmark = [
    pytest.mark.xdist_group("serial"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPT = WORDS[:150]
FIRST, SECOND = WORDS[:80], WORDS[100:150]
BATCH = 32

needs_shim = pytest.mark.skipif(not shim.available, reason="the shim tells what a decode came to")


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C raises KeyboardInterrupt, in a shell's background jobs too, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c(*_):
    """The main thread is interrupted, wherever it waits, as by the terminal."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


def interrupt(batches, number, before):
    (batches.before if before else batches.after)[number] = ctrl_c


@needs_shim
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("arch", ARCHS)
def test_interrupt_in_a_prompt_loses_nothing_that_was_decoded(opened, stock, arch, number, before):
    llm = opened(arch, n_batch=BATCH, n_ubatch=BATCH)
    interrupt(batches := Batches(llm), number, before)
    with pytest.raises(KeyboardInterrupt):
        take(llm, PROMPT)
    batches.stop()
    done = sum(batches.sizes[: number + (not before)])
    assert take(llm, PROMPT) == stock(arch)(PROMPT)
    assert llm.last_request.cached >= done


@needs_shim
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_interrupt_in_an_answer_loses_nothing(opened, stock, arch, before):
    llm = opened(arch)
    stream, said = begin(llm, PROMPT, 3)
    interrupt(batches := Batches(llm), 0, before)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    batches.stop()
    stream.close()
    assert take(llm, [*PROMPT, *said]) == stock(arch)([*PROMPT, *said])
    assert llm.last_request.cached >= len(PROMPT) + 2


def test_interrupt_beside_a_cancel_is_an_interrupt(opened):
    llm = opened()
    batches = Batches(llm)
    batches.before[1] = lambda: (llm.cancel(), ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        take(llm, PROMPT)


@pytest.mark.parametrize("arch", [*ARCHS, pytest.param("jamba", marks=pytest.mark.full)])
@pytest.mark.parametrize("call", ["load_partial", "cut"])
def test_interrupt_in_a_restore(opened, stock, monkeypatch, tmp_path, arch, call):
    """Memory is the new chat's, or half of it; the old one was live before."""
    llm, right = opened(arch, prompt_cache=PromptCache(1 << 26, tmp_path)), stock(arch)
    prompts = [SECOND, [*SECOND, 7, 8, 9], FIRST, [*SECOND, 7, 8, 9]]
    for prompt in (FIRST, SECOND):
        assert take(llm, prompt, 12) == right(prompt, 12)
    real = getattr(NativeContext, call)

    def once(self, *args, **kwargs):
        monkeypatch.setattr(NativeContext, call, real)
        done = real(self, *args, **kwargs)
        ctrl_c()
        return done

    monkeypatch.setattr(NativeContext, call, once)
    try:
        take(llm, FIRST, 12)
    except KeyboardInterrupt:
        pass
    else:
        assert call == "cut" or arch == "llama", "a restore was at stake"  # llama's has no partial state
    for prompt in prompts:
        assert take(llm, prompt, 12) == right(prompt, 12)
    llm.close()
    later = opened(arch, prompt_cache=PromptCache(1 << 26, tmp_path))
    for prompt in reversed(prompts):
        assert take(later, prompt, 12) == right(prompt, 12)


@needs_shim
def test_interrupt_while_the_loop_s_thread_starts_is_an_interrupt(opened, monkeypatch):
    """CPython loses its own lock where it comes in `Condition.wait`, and says so in place of it."""
    llm = opened("llama")
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        try:
            raise KeyboardInterrupt
        finally:
            threading.Lock().release()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.create_completion(FIRST, max_tokens=1)
    monkeypatch.undo()
    assert llm.create_completion(FIRST, max_tokens=1)["choices"][0]["finish_reason"] == "length"


def test_interrupt_costs_idle_slots_nothing(opened, stock):
    llm = opened(n_parallel=3, flash_attn=True)  # else idle slots are preempted
    take(llm, WORDS[:40])
    stream, _ = begin(llm, WORDS[100:150], 6)
    interrupt(batches := Batches(llm), 0, before=False)
    with pytest.raises(KeyboardInterrupt):
        list(islice(stream, 3))
    batches.stop()
    stream.close()
    right = stock(flash_attn=True)
    chat = [*WORDS[:40], *right(WORDS[:40], 7)]
    assert take(llm, chat) == right(chat)
    assert llm.last_request.source == "live"
    assert take(llm, WORDS[100:150]) == right(WORDS[100:150])


PACKAGE = (str(Path(llamahybrid.__file__).parent),)
TURN = tuple(str(module.__file__) for module in (completion, requests, loop, scheduler, slots))
"""Modules through which a request takes its turn."""
SEVERAL = tuple(str(module.__file__) for module in (answers, handle))
"""Modules of several answers to one prompt."""


def at_line(number, work, files=PACKAGE):
    """Run `work()` with Ctrl-C before line `number` of these files; return how many lines it ran."""
    count = [0]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(files):
            return None
        if event in ("line", "return"):
            count[0] += 1
            if count[0] == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return count[0]


def stream(llm):
    with contextlib.closing(llm.generate(FIRST, temp=0.0)) as tokens:
        list(islice(tokens, 2))


def complete(llm):
    llm.create_completion(FIRST, max_tokens=2, temperature=0.0)


def complete_twice(llm):
    llm.create_completion(FIRST, max_tokens=2, temperature=0.0, n=2)


def stream_twice(llm):
    with contextlib.closing(llm.create_completion(FIRST, max_tokens=2, n=2, stream=True)) as chunks:
        list(chunks)


@pytest.mark.parametrize(
    ("ask", "files", "step"),
    [
        (stream, PACKAGE, 37),
        (complete, TURN, 1),
        (complete_twice, SEVERAL, 1),
        (stream_twice, SEVERAL, 1),
        pytest.param(stream, PACKAGE, 1, marks=pytest.mark.full),
    ],
    ids=["package", "turn", "two whole", "two streamed", "package, each line"],
)
@pytest.mark.parametrize("slots", [1, 2])
def test_interrupt_at_any_line_leaves_the_model_usable(opened, stock, impatient, slots, ask, files, step):
    llm, right = opened(n_parallel=slots), stock()
    ask(llm)
    lines = at_line(0, lambda: ask(llm), files)
    assert lines > 50
    for number in range(1, lines, step):
        at_line(number, lambda: ask(llm), files)
        for other in (True, False) if number % 2 else (False, True):
            answer = in_thread(take, llm, SECOND, 2) if other else take(llm, SECOND, 2)
            assert answer == right(SECOND, 2), (number, other)


@pytest.mark.parametrize("step", [61, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("slots", [1, 2])
def test_interrupt_at_any_line_of_a_models_first_request_leaves_it_usable(opened, stock, slots, step):
    """Its thread starts, or does not, or has just been started."""
    lines = number = 1
    while number <= lines:
        llm = opened(n_parallel=slots)
        lines = max(lines, at_line(number if number > 1 else 0, lambda llm=llm: stream(llm)))
        assert take(llm, SECOND, 2) == stock()(SECOND, 2), number
        llm.close()
        number += step
    assert lines > 300
