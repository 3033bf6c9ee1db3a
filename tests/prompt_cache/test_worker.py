"""A worker's thread: late work, interrupted waits, and work that raises."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from llamahybrid.prompt_cache import worker
from llamahybrid.prompt_cache.worker import Late, Worker

DEADLINE = 60


@pytest.fixture
def ended() -> threading.Event:
    return threading.Event()


@pytest.fixture
def made(ended: threading.Event) -> Worker:
    return Worker("test", ended.set)


def test_work_that_ends_as_the_wait_ends_has_its_result(
    made: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "wait", lambda futures, _: wait(futures))
    assert made.call(0.0, lambda: 5) == 5


def test_calls_behind_an_interrupted_wait_are_late_at_once(
    made: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, go_on = threading.Event(), threading.Event()

    def work() -> None:
        runs.set()
        go_on.wait(DEADLINE)

    def interrupted(*_: object) -> None:
        assert runs.wait(DEADLINE)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.call(DEADLINE, work)
    with pytest.raises(Late, match="still runs"):
        made.call(DEADLINE, lambda: 5)
    go_on.set()


def test_a_thread_that_due_work_ends_closes_what_it_has_open(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises, raised = [True], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())

    def tick() -> None:
        if raises.pop() if raises else False:
            raise MemoryError

    made = Worker("test", ended.set, tick)
    made.wake()
    assert ended.wait(DEADLINE)
    assert made.call(DEADLINE, lambda: 5) == 5, "another thread is there"
    assert raised.wait(DEADLINE)
