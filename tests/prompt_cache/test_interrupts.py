"""Exceptions in the middle of a change, calls during a change, and forked processes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, PromptCache, room
from llamahybrid.prompt_cache.base import Bytes, Tokens
from llamahybrid.prompt_cache.eviction import Eviction
from llamahybrid.prompt_cache.nodes import Entry, Match
from llamahybrid.prompt_cache.tree import Tree
from tests.lab import interrupt_fuzz
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

from .stores import DEADLINE
from .test_segments import ELSEWHERE, PATH, plan_for, store, view

pytestmark = pytest.mark.xdist_group("serial")

AMPLE = 1 << 22
CHAT = list(range(100, 300))
OTHER = [*CHAT[:90], *range(500, 560)]


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def cached(cache: PromptCache, prompt: Sequence[int] = (*CHAT, 1)) -> int:
    plan = cache.plan(ids(prompt), FakeEngine(cache).view(), (), Costs())
    cache.release(plan)
    return plan.cached


class Halfway(Eviction):
    """Calls `now` in the middle of a change of the cache, with its lock held."""

    now: Callable[[], Any] | None = None

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        super().learn(tree, match, entries)
        now, self.now = self.now, None
        if now is not None:
            now()


@pytest.fixture
def halfway() -> Halfway:
    return Halfway()


@pytest.fixture
def cache(halfway: Halfway) -> PromptCache:
    made = PromptCache(AMPLE)
    made.eviction = halfway
    FakeEngine(made).prefill(CHAT)
    return made


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_tree_whose_making_was_interrupted_goes_without_a_word() -> None:
    tree = Tree.__new__(Tree)
    del tree
    gc.collect()


@pytest.mark.parametrize("disk", [False, True])
def test_an_interrupt_at_any_line_leaves_the_cache_sound_or_empty(disk: bool) -> None:
    """A sample of all lines, and those around the lock; `make fuzz` takes them all."""
    outcome, lines = interrupt_fuzz.Outcome(), interrupt_fuzz.all_lines(disk=disk)
    for line in lines[7 :: 20 if disk else 40]:
        interrupt_fuzz.at_line(line, 1, outcome, disk=disk)
    for line in (each for each in lines if each[0] == "guard"):
        for times in interrupt_fuzz.TIMES:
            interrupt_fuzz.at_line(line, times, outcome, disk=disk)
    assert not outcome.broken
    assert outcome.interrupted > (2 if disk else 10)


def test_half_a_change_is_never_read_and_pins_survive_it(
    cache: PromptCache, halfway: Halfway, caplog: pytest.LogCaptureFixture
) -> None:
    cache.pin(CHAT)
    plan = cache.plan(ids([*CHAT, 1]), FakeEngine(cache).view(), (), Costs())
    assert plan.checkpoint is not None
    before = plan.checkpoint.snapshot.tobytes()
    halfway.now = interrupt
    with pytest.raises(KeyboardInterrupt):
        cached(cache)
    stats = cache.stats()
    assert (stats.entries, stats.segments) == (0, 0)
    assert len(caplog.records) == 1
    assert stats.bytes_ram >= plan.checkpoint.snapshot.nbytes, "what is in use still counts"
    FakeEngine(cache).prefill(CHAT)
    assert plan.checkpoint.snapshot.tobytes() == before
    cache.release(plan)
    entries = cache.stats().entries
    cache.ram_bytes = 100
    assert cache.stats().entries == entries > 0, "what the user pinned"
    check_integrity(cache)


def test_a_restart_is_logged_without_the_lock(cache: PromptCache, halfway: Halfway) -> None:
    """A handler may hand the record to a thread that asks the cache, and wait for it."""
    told: list[str] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            within(DEADLINE, cache.stats)
            told.append(record.getMessage())

    handler, logger = Asking(), logging.getLogger("llamahybrid")
    halfway.now = interrupt
    logger.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cached(cache)
        assert cached(cache) == 0
    finally:
        logger.removeHandler(handler)
    assert len(told) == 1


@pytest.mark.parametrize("how", ["clear", "restart"])
def test_what_all_is_removed_from_goes_without_the_lock(
    cache: PromptCache, halfway: Halfway, how: str
) -> None:
    """A large cache takes long to give back."""
    locked: list[bool] = []
    cache.look(lambda store: weakref.finalize(store.tree, lambda: locked.append(cache.guard.inside())))
    if how == "clear":
        cache.clear()
    else:
        halfway.now = interrupt
        with pytest.raises(KeyboardInterrupt):
            cached(cache)
        cache.stats()
    gc.collect()
    assert locked == [False]


def test_running_out_of_memory_costs_nothing_that_is_kept(
    cache: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(n_bytes: int) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("llamahybrid.prompt_cache.room.new_buffer", none_left)
        with pytest.raises(MemoryError):
            cache.buffer(3000)
    assert cached(cache) == len(CHAT)


def test_a_deferred_forget_that_cuts_attention_reaches_all(cache: PromptCache, halfway: Halfway) -> None:
    """A segment crosses the end of what the user pinned; a finaliser calls."""
    store(cache, PATH, 150, 250)
    cache.pin(PATH[:200])
    live = FakeEngine(cache)
    cache.follow(live.followed, ids(PATH))
    halfway.now = lambda: cache.forget(PATH)
    assert cached(cache) == len(CHAT)
    assert (cache.forgets, live.followed.forgotten) == (1, True)
    assert plan_for(cache, [*PATH, 1], view(ELSEWHERE)).cached == 150
    assert plan_for(cache, [*PATH, 1], view(PATH[:220])).matched == 220, "no stored path is that long"
    assert cached(cache) == len(CHAT)
    check_integrity(cache)


def test_a_buffer_is_made_once_there_is_room_for_it(
    cache: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose memory is limited to that of its full cache."""
    made, free = room.new_buffer, cache.ram_bytes - cache.stats().bytes_ram

    def scarce(n_bytes: int) -> Bytes:
        if cache.stats().bytes_ram > cache.ram_bytes:
            raise MemoryError
        assert cache.stats().entries < entries
        return made(n_bytes)

    entries = cache.stats().entries
    monkeypatch.setattr(room, "new_buffer", scarce)
    assert cache.buffer(free + 1).nbytes == free + 1


def test_a_plan_that_got_lost_is_released(cache: PromptCache) -> None:
    plan = cache.plan(ids([*CHAT, 1]), FakeEngine(cache).view(), (), Costs())
    cache.clear()
    assert cache.stats().bytes_ram > 0
    del plan
    gc.collect()
    cached(cache, [1])
    cache.ram_bytes = 0
    assert cache.stats().bytes_ram == 0


def test_a_cache_keeps_no_engine_alive(cache: PromptCache) -> None:
    engine = FakeEngine(cache)
    engine.prefill(OTHER)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def within(seconds: float, work: Callable[[], Any]) -> None:
    """The work is done in time, on a thread of its own, without an error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for itself"
    if errors:
        raise errors[0]


def test_a_finaliser_that_asks_the_cache_never_waits_for_it(cache: PromptCache, halfway: Halfway) -> None:
    """The collector may run a finaliser while its own thread changes the cache."""

    def last() -> None:
        assert cache.stats().entries > 0
        assert cache.pin(CHAT) == 0
        cache.unpin(CHAT)
        cache.ram_bytes = AMPLE // 2
        assert cache.flush()
        assert cache.forget(CHAT) == 0
        done.append(True)

    done: list[bool] = []
    halfway.now = last
    within(DEADLINE, lambda: FakeEngine(cache).prefill([7, 8, 9]))
    assert done
    assert cache.ram_bytes == AMPLE // 2
    check_integrity(cache)
    assert cached(cache, [7, 8, 9, 1]) == 3


def test_what_a_finaliser_forgets_goes_behind_the_change_that_runs(
    cache: PromptCache, halfway: Halfway
) -> None:
    halfway.now = lambda: cache.forget(CHAT)
    within(DEADLINE, lambda: cached(cache, [1, 2]))
    assert cached(cache) == 0


def test_what_a_handler_sets_holds_once_the_change_is_over(cache: PromptCache, halfway: Halfway) -> None:
    """No further request may come for a long time."""
    halfway.now = lambda: setattr(cache, "ram_bytes", AMPLE // 2)
    cache.plan(ids([1, 2]), FakeEngine(cache).view(), (), Costs())
    assert cache.ram_bytes == AMPLE // 2


def test_what_a_finaliser_forgets_in_a_change_that_fails_goes_with_the_next(cache: PromptCache) -> None:
    def fail(_: object) -> None:
        cache.forget(CHAT)
        raise LookupError

    with pytest.raises(LookupError):
        cache.look(fail)
    assert cached(cache) == 0


def test_half_a_change_is_not_read_from_inside(cache: PromptCache, halfway: Halfway) -> None:
    """A signal handler's calls are answered as by an empty store."""
    view, seen = FakeEngine(cache, state=list(CHAT)).view(), list[object]()

    def look() -> None:
        seen.append(cache.look(lambda store: len(store.tree)))
        seen.append(cache.peek(ids(CHAT), view, Costs()))
        seen.append(cache.plan(ids(CHAT), view, (), Costs()).cached)
        seen.append(cache.missing(view))
        seen.append(cache.unstored(view))
        seen.append(cache.attention(view.namespace, ids(CHAT), 0, len(CHAT)))
        seen.append(cache.admit(view, len(CHAT), np.zeros(8, np.uint8)))

    halfway.now = look
    assert cached(cache) == len(CHAT)
    assert seen == [0, 0, 0, [], 0, [], False]
    assert cache.look(lambda store: len(store.tree)) == cache.stats().entries > 0


@pytest.mark.parametrize("what", ["forget", "clear"])
def test_removing_inside_the_store_waits_for_no_writer(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer needs the lock that a finaliser's thread has: it would give up after ten seconds."""
    cache = PromptCache(1 << 24, tmp_path / "cache")
    FakeEngine(cache).request(CHAT)
    assert cache.flush()
    with cache.guard.lock:
        cache.forget(ids(CHAT)) if what == "forget" else cache.clear()
    assert cache.close()
    assert not caplog.text
    again = PromptCache(1 << 24, tmp_path / "cache")
    assert cached(again) == 0
    again.close()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_signal_handler_may_look_in_at_any_time() -> None:
    cache = PromptCache(interrupt_fuzz.BUDGET)
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(cache.stats().bytes_ram))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        interrupt_fuzz.work(cache)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check_integrity(cache)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have(
    cache: PromptCache, halfway: Halfway
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(DEADLINE)

    halfway.now = wait
    thread = threading.Thread(target=lambda: cached(cache))
    thread.start()
    assert inside.wait(DEADLINE)
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.alarm(60)
        sound = cache.stats().entries == 0
        FakeEngine(cache).prefill(CHAT)
        os._exit(0 if sound and cached(cache) == len(CHAT) else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert cached(cache) == len(CHAT)
