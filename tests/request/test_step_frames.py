"""Who is in the middle of a step: true after any interrupt, and asked while other threads run on."""

import gc
import os
import sys
import threading
import weakref

import pytest

from llamahybrid.request.step_frames import StepFrames, executes


@pytest.fixture
def frames():
    return StepFrames()


def test_a_call_is_in_a_step_until_it_leaves(frames):
    def step():
        frames.enter()
        assert frames.run_in()
        frames.leave()
        assert not frames.run_in()
        frames.enter()
        return threading.get_ident()

    thread = step()
    assert not frames.run_in(thread), "it returned without a word"


def test_a_step_that_an_exception_left_is_over_though_its_frame_is_kept(frames):
    def step():
        frames.enter()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        step()
    assert kept.tb is not None
    assert not frames.run_in()


def test_steps_in_steps(frames):
    def inner():
        frames.enter()
        frames.leave()

    frames.enter()
    inner()
    assert frames.run_in()
    frames.leave()
    assert not frames.run_in()


def test_another_thread(frames):
    inside, go_on = threading.Event(), threading.Event()

    def step():
        frames.enter()
        inside.set()
        go_on.wait(20)

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(20)
    number = thread.ident
    assert frames.run_in(number)
    go_on.set()
    thread.join(20)
    assert not frames.run_in(number)


def test_a_step_that_is_left_keeps_nothing_alive(frames):
    class Something:
        pass

    def step():
        held = Something()
        frames.enter()
        gone.append(weakref.ref(held))
        frames.leave()

    gone = []
    gc.disable()
    try:
        step()
        assert gone[0]() is None
    finally:
        gc.enable()


def test_a_frame_that_runs_is_not_cleared():
    value = "here"
    assert executes(sys._getframe())
    assert value == "here"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_process_has_the_threads_that_it_has(frames):
    inside, go_on = threading.Event(), threading.Event()

    def step():
        frames.enter()
        inside.set()
        go_on.wait(20)

    thread = threading.Thread(target=step)
    thread.start()
    inside.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(int(frames.run_in(thread.ident)))
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    thread.join(20)


def test_no_list_of_threads_is_asked_for(frames, monkeypatch):
    """A collection under the interpreter's lock of that list had threads wait for each other for ever."""

    def refuse():
        raise AssertionError("asked")

    monkeypatch.setattr(sys, "_current_frames", refuse)
    frames.enter()
    assert frames.run_in()
    assert not frames.run_in(1)
    frames.leave()
