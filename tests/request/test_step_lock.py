"""The lock of a step: who holds it in no step has it taken away, and nobody else."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from llamahybrid.request import step_lock
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
    assert lock.held()
    lock.release()
    assert not lock.held()
    with Holder(lock):
        assert not lock.acquire(wait=False)
        assert not lock.acquire()
        assert not lock.held()
        lock.release()  # somebody else's is not given back
        assert not lock.acquire(wait=False)


def test_a_lock_that_nobody_has_stays(lock: StepLock) -> None:
    assert not lock.heal()
    assert not lock.held()


def test_one_look_at_a_lock_that_others_hold_replaces_nothing(
    lock: StepLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks its owner may have left, and somebody come."""
    now = [1000.0]
    monkeypatch.setattr(step_lock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Holder(lock):
        assert not lock.heal()
        assert not lock.heal()  # at once: no second look yet
        now[0] += POLL
        assert lock.heal()
        assert lock.acquire(wait=False)


@pytest.mark.parametrize("nth", [1, 2])
def test_of_two_who_look_at_once_one_replaces_it(
    lock: StepLock, frames: StepFrames, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Who comes later would take the new one away from who has it by then."""
    with Holder(lock):
        assert not lock.heal()
        time.sleep(POLL)
        looks = []

        def looked(thread: int) -> bool:
            looks.append(thread)
            if len(looks) == nth:  # this one is slow; meanwhile another one looks, too, and goes in
                monkeypatch.undo()
                assert lock.heal()
                assert lock.acquire(wait=False)
            return False

        monkeypatch.setattr(frames, "run_in", looked)
        lock.heal()
        assert len(looks) >= nth
        assert lock.held()


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
    assert not lock.heal()
    looked.set()
    assert again.wait(20)
    time.sleep(POLL)
    assert not lock.heal(), "a first look at it"
    time.sleep(POLL)
    assert lock.heal()
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
        assert not lock.heal()
        time.sleep(POLL)
    over.set()  # it leaves the step with the lock in hand
    deadline = time.monotonic() + 20
    while not lock.heal() and time.monotonic() < deadline:
        time.sleep(POLL / 2)
    assert lock.acquire(wait=False)
    stays.set()
    thread.join(20)


def test_who_is_about_to_take_it_is_known(frames: StepFrames, lock: StepLock) -> None:
    frames.enter()
    assert not lock.wanted
    lock.want()
    assert lock.wanted == 1
    lock.want_no_more()
    assert not lock.wanted


def test_who_was_interrupted_on_the_way_to_it_is_about_to_take_it_no_more(
    frames: StepFrames, lock: StepLock
) -> None:
    def leaves_it_so() -> None:
        frames.enter()
        lock.want()

    leaves_it_so()
    assert not lock.wanted


# -- one that lives, but does not show it ------------------------------------------------------------


@pytest.fixture
def one_runs() -> Iterator[None]:
    """Only the calling thread runs Python, unless it waits: as where others have the processor for long."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def run_on(seconds: float) -> None:
    """Wait without letting another thread run Python."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Taker:
    """Another thread that wants the lock for its step, and tells whether it has it once it goes on."""

    def __init__(self, lock: StepLock, frames: StepFrames) -> None:
        self._lock, self._frames = lock, frames
        self._waits = threading.Event()
        self.saw: list[bool] = []
        self._thread = threading.Thread(target=self._step, daemon=True)

    def __enter__(self) -> "Taker":
        self._thread.start()
        assert self._waits.wait(20)
        time.sleep(0.02)  # until it waits for the lock
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(20)

    def _step(self) -> None:
        self._frames.enter()
        self._waits.set()
        while not self._lock.acquire():
            pass
        self.saw.append(self._lock.held())
        self._lock.release()
        self._frames.leave()


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="of CPython's lock")
def test_one_who_has_got_it_and_not_gone_on_yet(lock: StepLock, frames: StepFrames, one_runs: None) -> None:
    """The lock is taken, and says that nobody has it, until its taker may run Python again."""

    def look_twice() -> None:
        frames.enter()
        assert lock.acquire()
        with Taker(lock, frames) as taker:
            lock.release()
            run_on(0.02)
            lock.heal()
            run_on(POLL)
            lock.heal()
        assert taker.saw == [True], "it is in the middle of its step"
        frames.leave()

    look_twice()


def test_one_who_has_got_a_lock_that_was_replaced_meanwhile(lock: StepLock, frames: StepFrames) -> None:
    """Its former holder was in no step, was found so, and gave it back all the same."""

    def look_twice() -> None:
        frames.enter()
        lock.heal()
        time.sleep(POLL)
        assert lock.heal()
        frames.leave()

    assert lock.acquire()
    former = lock._lock
    with Taker(lock, frames) as taker:
        thread = threading.Thread(target=look_twice)
        thread.start()
        thread.join(20)
        former.rlock.release()
    assert taker.saw == [True]


@pytest.mark.parametrize("nth", [1, 2])
def test_one_who_takes_it_after_a_look(
    lock: StepLock, frames: StepFrames, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Its holder was in no step, but gives it back, after the one or the other look at that."""
    goes, gone, takes, taken, over = (threading.Event() for _ in range(5))
    saw: list[bool] = []
    run_in, looks = frames.run_in, [0]

    def hold() -> None:
        assert lock.acquire()
        takes.set()
        goes.wait(20)
        lock.release()
        gone.set()

    def step() -> None:
        frames.enter()
        while not lock.acquire():
            pass
        taken.set()
        over.wait(20)
        saw.append(lock.held())
        lock.release()
        frames.leave()

    threads = [threading.Thread(target=each, daemon=True) for each in (hold, step)]
    threads[0].start()
    assert takes.wait(20)
    assert not lock.heal()
    time.sleep(POLL)

    def looked(thread: int) -> bool:
        answer = run_in(thread)
        looks[0] += 1
        if looks[0] == nth:
            goes.set()
            assert gone.wait(20)
            threads[1].start()
            assert taken.wait(20)
        return answer

    monkeypatch.setattr(frames, "run_in", looked)
    lock.heal()
    over.set()
    for thread in threads:
        thread.join(20)
    assert looks[0] >= nth
    assert saw == [True]


def test_by_what_a_lock_was_replaced_is_said_once(lock: StepLock) -> None:
    """Two found that nobody is in with it; one is slow, and so is who looks which one serves."""
    old = lock._lock
    old.doubted = True
    old.replace()
    assert lock.acquire()
    old.replace()
    lock._first = old
    assert lock.held()


def test_what_an_interrupt_left_is_given_back_however_often_it_was_taken(lock: StepLock) -> None:
    assert lock.acquire()
    assert lock.acquire()
    lock.give_up()
    assert not lock.held()
    with Holder(lock):
        lock.give_up()
        assert not lock.acquire(wait=False)


def test_who_takes_it_once_more_keeps_it_though_it_is_doubted(lock: StepLock) -> None:
    assert lock.acquire()
    lock._lock.doubted = True
    assert lock.acquire()
    lock.release()
    assert lock.held()
    lock.release()
    assert not lock.held()
    before = lock._lock
    assert lock.acquire()
    assert lock._lock is not before, "who takes a doubted one replaces it"
    assert lock.held()
