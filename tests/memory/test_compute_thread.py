"""What others depend on is done in a thread where no interrupt comes, and waited for whatever comes here."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest

from llamahybrid.memory import compute_thread
from llamahybrid.memory.compute_thread import ComputeThread


def nothing():
    pass


@pytest.fixture
def thread():
    one = ComputeThread()
    yield one
    one.close()


@pytest.fixture
def interrupt_in():
    """`interrupt_in(seconds)`: a KeyboardInterrupt comes then, while the main thread waits for work."""

    def interrupt(number, frame):
        while frame is not None:
            if frame.f_code is ComputeThread.run.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds, again=0.0: signal.setitimer(signal.ITIMER_REAL, seconds, again)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_all_is_done_in_one_thread_and_in_order(thread):
    seen = []
    for i in range(100):
        thread.run(lambda i=i: seen.append((i, threading.get_ident())), nothing)
    assert [i for i, _ in seen] == list(range(100))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_what_is_raised_there_is_raised_here(thread):
    def fail():
        raise ValueError("there")

    with pytest.raises(ValueError, match="there"):
        thread.run(fail, nothing)


def test_work_that_asks_for_work_does_it_at_once(thread):
    seen = []
    thread.run(lambda: thread.run(lambda: seen.append(threading.get_ident()), nothing), nothing)
    assert seen != [threading.get_ident()]


def test_what_comes_after_it_is_done_there_and_nobody_waits_for_that(thread):
    seen, goes_on = [], threading.Event()

    def after():
        goes_on.wait(20)
        seen.append(("after", threading.get_ident()))

    thread.run(lambda: seen.append(("first", threading.get_ident())), nothing, after)
    assert [what for what, _ in seen] == ["first"]
    goes_on.set()
    thread.run(lambda: seen.append(("second", threading.get_ident())), nothing)
    assert [what for what, _ in seen] == ["first", "after", "second"]
    assert len({ident for _, ident in seen}) == 1


def test_what_comes_after_it_comes_when_it_failed_and_may_fail_itself(thread):
    seen = []

    def fail():
        raise ValueError("there")

    def after():
        seen.append("after")
        raise ValueError("nobody waits")

    with pytest.raises(ValueError, match="there"):
        thread.run(fail, nothing, after)
    thread.run(lambda: thread.run(nothing, nothing, after), nothing)
    thread.run(lambda: seen.append("goes on"), nothing)
    assert seen == ["after", "after", "goes on"]


def test_an_interrupt_waits_for_the_end(thread, interrupt_in):
    seen, told = [], threading.Event()

    def work():
        interrupt_in(0.001)  # who asked for it waits by now
        seen.append("told at once" if told.wait(20) else "told too late to cut it short")

    with pytest.raises(KeyboardInterrupt):
        thread.run(work, told.set)
    assert seen == ["told at once"]


def test_a_volley_of_interrupts_waits_too(thread, interrupt_in):
    done = []
    for _ in range(20):
        interrupt_in(0.001, 0.003)
        with pytest.raises(KeyboardInterrupt):
            thread.run(lambda: (time.sleep(0.03), done.append(1)), nothing)
        interrupt_in(0)
        thread.settle()  # one that comes in the handler of another one leaves early
    assert len(done) == 20


def test_work_that_was_left_alone_is_waited_for(thread, monkeypatch):
    """A second interrupt came while the first was handled."""
    begun, goes_on, seen = threading.Event(), threading.Event(), []

    def leave(self, task):
        hand_over(self, task)
        begun.wait(10)
        task.over = True  # nobody waits any more

    def work():
        begun.set()
        goes_on.wait(20)
        seen.append("first")

    hand_over = ComputeThread._hand_over
    monkeypatch.setattr(ComputeThread, "_hand_over", leave)
    thread.run(work, nothing)
    monkeypatch.undo()
    assert seen == []
    threading.Timer(0.2, goes_on.set).start()
    thread.run(lambda: seen.append("second"), nothing)
    assert seen == ["first", "second"]


def test_a_thread_that_is_gone_is_started_again(thread):
    thread.run(nothing, nothing)
    before = thread._desk.thread
    thread.close()
    before.join(10)
    seen = []
    thread.run(lambda: seen.append(1), nothing)
    assert seen == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_one_of_its_own(thread):
    thread.run(nothing, nothing)
    child = os.fork()
    if child == 0:
        seen = []
        signal.alarm(20)
        thread.run(lambda: seen.append(1), nothing)
        os._exit(0 if seen == [1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_threads_it_is_done_here(thread, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compute_thread.threading.Thread, "start", refuse)
    seen = []
    thread.run(lambda: seen.append(threading.get_ident()), nothing, lambda: seen.append("after"))
    assert seen == [threading.get_ident(), "after"]


def test_the_thread_ends_with_its_owner():
    owner = ComputeThread()
    owner.run(nothing, nothing)
    thread = owner._desk.thread
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_it_keeps_nothing_alive_that_it_worked_on(thread):
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    thread.run(lambda thing=thing: None, nothing)
    del thing
    thread.run(nothing, nothing)
    gc.collect()
    assert gone() is None


def test_a_thread_that_is_taken_for_dead_does_nothing_twice(thread, monkeypatch):
    """An interrupt inside `Thread.is_alive` marks a running thread as stopped (CPython 3.11)."""
    monkeypatch.setattr(compute_thread.threading.Thread, "is_alive", lambda self: False)
    seen = []
    for _ in range(3):
        thread.run(lambda: seen.append(threading.get_ident()), nothing)
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_of_two_threads_that_were_started_one_serves(thread):
    thread.run(nothing, nothing)
    thread._desk.start()
    seen = []
    for _ in range(20):
        thread.run(lambda: seen.append(threading.get_ident()), nothing)
    assert len(seen) == 20
    assert len(set(seen)) == 1
