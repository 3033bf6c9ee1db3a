"""The lock of a step: who holds it in no step has it taken away, and nobody else."""

import threading
import time
from collections.abc import Callable

import pytest

from llamahybrid.request.step_frames import StepFrames
from llamahybrid.request.step_lock import POLL, StepLock


@pytest.fixture
def frames() -> StepFrames:
    return StepFrames()


@pytest.fixture
def lock(frames: StepFrames) -> StepLock:
    return StepLock(frames)


class Holder:
    """Another thread that has the lock, in a step or not, until it is told to end."""

    def __init__(self, lock: StepLock, enter: Callable[[], None] = lambda: None) -> None:
        self._lock = lock
        self._enter = enter
        self._has, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._has.wait(20)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(20)

    def _run(self) -> None:
        self._enter()
        self._lock.acquire()
        self._has.set()
        self._over.wait(20)


def test_one_thread_has_it_at_a_time(lock: StepLock) -> None:
    assert lock.acquire()
    assert lock.held
    lock.release()
    assert not lock.held
    with Holder(lock):
        assert not lock.acquire(wait=False)
        assert not lock.acquire()
        assert not lock.held
        lock.release()  # somebody else's is not given back
        assert not lock.acquire(wait=False)


def test_a_lock_that_nobody_has_stays_and_nobody_is_in(lock: StepLock) -> None:
    told: list[bool] = []
    assert not lock.heal(lambda: told.append(lock.held))
    assert told == [True], "before somebody can be in"
    assert not lock.held


def test_one_look_at_a_lock_that_others_hold_replaces_nothing(lock: StepLock) -> None:
    """Between two looks its owner may have left, and somebody come."""
    told: list[int] = []
    with Holder(lock):
        assert not lock.heal(lambda: told.append(1))
        assert not lock.heal(lambda: told.append(2))  # at once: no second look yet
        assert not told
        time.sleep(POLL)
        assert lock.heal(lambda: told.append(3))
        assert told == [3]
        assert lock.acquire(wait=False)


def test_of_two_who_look_at_once_one_replaces_it(
    lock: StepLock, frames: StepFrames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes later would take the new one away from who has it by then."""
    told: list[int] = []
    with Holder(lock):
        assert not lock.heal(lambda: told.append(1))
        time.sleep(POLL)

        def looked(thread: int) -> bool:
            monkeypatch.undo()
            assert lock.heal(lambda: told.append(2))
            assert lock.acquire(wait=False)
            return False

        monkeypatch.setattr(frames, "run_in", looked)
        assert not lock.heal(lambda: told.append(3))
        assert told == [2]
        assert lock.held


def test_a_lock_that_was_given_back_between_two_looks_is_not_replaced(lock: StepLock) -> None:
    """The same thread may have it again: it is not the same hold."""
    holds, looked = threading.Event(), threading.Event()
    again, over = threading.Event(), threading.Event()

    def twice() -> None:
        lock.acquire()
        holds.set()
        looked.wait(20)
        lock.release()
        lock.acquire()
        again.set()
        over.wait(20)

    thread = threading.Thread(target=twice, daemon=True)
    thread.start()
    holds.wait(20)
    assert not lock.heal(lambda: None)
    looked.set()
    assert again.wait(20)
    time.sleep(POLL)
    assert not lock.heal(lambda: None), "a first look at it"
    time.sleep(POLL)
    assert lock.heal(lambda: None)
    over.set()
    thread.join(20)


def test_who_is_in_a_step_keeps_it(lock: StepLock, frames: StepFrames) -> None:
    stays, over, has = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        frames.enter()
        lock.acquire()
        has.set()
        over.wait(20)

    thread = threading.Thread(target=lambda: (step(), stays.wait(20)), daemon=True)
    thread.start()
    assert has.wait(20)
    for _ in range(2):
        assert not lock.heal(lambda: None)
        time.sleep(POLL)
    over.set()  # it leaves the step with the lock in hand
    deadline = time.monotonic() + 20
    while not lock.heal(lambda: None) and time.monotonic() < deadline:
        time.sleep(POLL / 2)
    assert lock.acquire(wait=False)
    stays.set()
    thread.join(20)


def test_who_is_about_to_take_it_is_known(lock: StepLock) -> None:
    assert not lock.wanted
    lock.want()
    assert lock.wanted
    lock.want_no_more()
    assert not lock.wanted
