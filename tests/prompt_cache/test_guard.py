"""Exceptions that come in the middle of a change, and calls that come in while one is made."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid.prompt_cache import Costs, Plan, PromptCache, ram_tier
from llamahybrid.prompt_cache.base import Segment, Tokens
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.eviction import ValueEviction
from llamahybrid.prompt_cache.nodes import Entry, Match
from llamahybrid.prompt_cache.pins import Prefixes
from llamahybrid.prompt_cache.ram import Account
from llamahybrid.prompt_cache.ram_store import RamStore
from llamahybrid.prompt_cache.tree import Tree
from tests.lab import interrupt_fuzz
from tests.lab.fake_engine import FakeEngine
from tests.lab.integrity import check_integrity

AMPLE = 1 << 22
CHAT = list(range(100, 300))
OTHER = [*CHAT[:90], *range(500, 560)]


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def filled(**kwargs: Any) -> PromptCache:
    cache = PromptCache(AMPLE, **kwargs)
    FakeEngine(cache).prefill(CHAT)
    return cache


def planned(cache: PromptCache, prompt: Sequence[int] = (*CHAT, 1)) -> Plan:
    return cache.plan(ids(prompt), FakeEngine(cache).view(), (), Costs())


def interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def serves(cache: PromptCache) -> None:
    """Its books are right, its lock is free, and it stores and finds what it is given."""
    assert interrupt_fuzz.verdict(cache, 60) is None


# -- wherever it comes -----------------------------------------------------------------------------


def test_an_interrupt_at_any_line_leaves_the_cache_sound_or_empty() -> None:
    """One in so many; `make fuzz` takes them all."""
    outcome = interrupt_fuzz.Outcome()
    for line in interrupt_fuzz.all_lines(disk=False)[7::40]:
        interrupt_fuzz.at_line(line, 1, outcome, disk=False)
    assert not outcome.broken
    assert outcome.interrupted > 15
    assert outcome.restarts > 0


def test_the_lock_is_left_wherever_it_was_taken() -> None:
    outcome = interrupt_fuzz.Outcome()
    lines = [line for line in interrupt_fuzz.all_lines(disk=False) if line[0] == "guard"]
    assert len(lines) > 8
    for line in lines:
        interrupt_fuzz.at_line(line, 2, outcome, disk=False)
    assert not outcome.broken


def test_a_broken_lock_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptCache(interrupt_fuzz.BUDGET)
    taken, done = threading.Event(), threading.Event()

    def take() -> None:
        with cache.ram.guard.lock:
            taken.set()
            done.wait()

    threading.Thread(target=take, daemon=True).start()
    taken.wait()
    assert interrupt_fuzz.verdict(cache, 0.2) == "its lock is held"
    done.set()
    monkeypatch.setattr(interrupt_fuzz, "check_integrity", interrupt)
    assert "KeyboardInterrupt" in str(interrupt_fuzz.verdict(cache, 60))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("how", [interrupt_fuzz.by_timer, interrupt_fuzz.by_thread])
def test_interrupts_at_random_moments(
    how: Callable[[random.Random, interrupt_fuzz.Outcome], None],
) -> None:
    outcome = interrupt_fuzz.Outcome()
    chance = random.Random(3)
    for _ in range(6):
        how(chance, outcome)
    assert not outcome.broken
    assert outcome.interrupted > 3, "the others hit the loop around the work, if any"


def test_a_cache_keeps_no_engine_alive() -> None:
    cache = PromptCache(AMPLE)
    engine = FakeEngine(cache)
    engine.prefill(CHAT)
    cache.plan(ids(OTHER), engine.view(), (), Costs())
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


# -- what it costs ---------------------------------------------------------------------------------


def test_half_a_change_is_never_read(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled()
    lent = cache.buffer(5000)
    plan = planned(cache)
    assert plan.checkpoint is not None
    before = plan.checkpoint.snapshot.tobytes()
    cache.ram.tree.splitters["model"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        cache.remember("model", ids(OTHER))
    with caplog.at_level(logging.WARNING):
        stats = cache.stats()
    assert (stats.entries, stats.segments, stats.extra["restarts"]) == (0, 0, 1)
    assert len(caplog.records) == 1
    assert stats.bytes_ram == lent.nbytes + plan.checkpoint.snapshot.nbytes, "what is in use still counts"
    FakeEngine(cache).prefill(OTHER)
    assert plan.checkpoint.snapshot.tobytes() == before
    cache.release(plan)
    check_integrity(cache)
    del plan, lent
    serves(cache)


def test_it_is_said_once_and_not_under_the_lock(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled()

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=cache.stats)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()

    logger = logging.getLogger("llamahybrid")
    handler = Asking()
    logger.addHandler(handler)
    try:
        for _ in range(2):
            FakeEngine(cache).prefill(CHAT)
            cache.ram.tree.splitters["model"] = interrupt
            with pytest.raises(KeyboardInterrupt):
                cache.remember("model", ids(OTHER))
            cache.stats()
    finally:
        logger.removeHandler(handler)
    assert cache.stats().extra["restarts"] == 2
    assert len(caplog.records) == 1


def test_what_the_user_pinned_and_set_survives() -> None:
    cache = filled()
    cache.pin(CHAT)
    cache.ram.tree.splitters["model"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        cache.remember("model", ids(OTHER))
    assert cache.ram_bytes == AMPLE
    FakeEngine(cache).prefill(CHAT)
    entries = cache.stats().entries
    assert entries > 0
    cache.ram_bytes = 100
    assert cache.stats().entries == entries


CHANGES: list[tuple[type, str, Callable[[PromptCache], object]]] = [
    (Tree, "touch", planned),
    (Tree, "attach", lambda c: FakeEngine(c, state=CHAT[:70]).checkpoint()),
    (Tree, "store", lambda c: FakeEngine(c).prefill([7, *CHAT])),
    (RamStore, "make_room", lambda c: c.buffer(100)),
    (RamStore, "make_room", lambda c: c.segment_buffer(FakeEngine(c, state=CHAT).view(), 100)),
    (RamStore, "shrink", lambda c: setattr(c, "ram_bytes", 50_000)),
    (RamStore, "release", lambda c: c.release(planned(c))),
    (RamStore, "remove", lambda c: c.drop(next(c.ram.tree.oldest_entries()).checkpoint)),
    (Tree, "trim", lambda c: c.forget(CHAT)),
    (Tree, "remove_segment", lambda c: c.drop_segment(Segment(0, 1, np.zeros(1, np.uint8)))),
    (Prefixes, "cover", lambda c: c.unpin(CHAT)),
    (Account, "free_all", lambda c: c.clear()),
    (Account, "keep", lambda c: [FakeEngine(c, state=CHAT[:70]).checkpoint() for _ in range(2)]),
]


@pytest.mark.parametrize(("owner", "method", "call"), CHANGES)
def test_every_change_that_does_not_come_to_its_end_is_known(
    owner: type, method: str, call: Callable[[PromptCache], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(cache)
    stats = cache.stats()
    assert (stats.extra["restarts"], stats.entries, stats.segments) == (1, 0, 0)
    check_integrity(cache)
    FakeEngine(cache).prefill(CHAT)
    assert planned(cache).cached == len(CHAT)


@pytest.mark.parametrize("method", ["match"])
def test_before_anything_is_changed_an_interrupt_costs_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled()
    engine = FakeEngine(cache, state=list(CHAT))
    with monkeypatch.context() as patch:
        patch.setattr(Tree, method, interrupt)
        for call in (
            lambda: planned(cache),
            lambda: cache.missing(engine.view()),
            lambda: cache.unstored(engine.view()),
            lambda: cache.segment_buffer(engine.view(), 100),
            lambda: cache.remember("model", ids(CHAT)),
            engine.checkpoint,
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert cache.stats().extra["restarts"] == 0
    assert planned(cache).cached == len(CHAT)


def test_running_out_of_memory_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()

    def none_left(n_bytes: int) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ram_tier, "new_buffer", none_left)
        with pytest.raises(MemoryError):
            cache.buffer(3000)
        with pytest.raises(MemoryError):
            cache.segment_buffer(FakeEngine(cache, state=list(CHAT)).view(), 3000)
    assert (cache.stats().extra["restarts"], planned(cache).cached) == (0, len(CHAT))


# -- what is handed out and lost -------------------------------------------------------------------


def test_a_plan_that_got_lost_is_released() -> None:
    cache = filled()
    plan = planned(cache)
    checkpoint = plan.checkpoint
    assert checkpoint is not None
    cache.drop(checkpoint)
    assert len(cache.ram.store.doomed) == 1
    del plan
    planned(cache, [1])
    assert not cache.ram.store.doomed
    assert not cache.ram.store.pins.entries()
    check_integrity(cache)


def test_bytes_that_are_written_stay_until_the_writer_is_gone_however_it_went() -> None:
    cache = filled()
    writer = cache.ram.checkpoint_at("model", ids(CHAT))
    assert writer.__enter__() is not None
    assert len(cache.ram.store.pins.entries()) == 1
    assert not writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not cache.ram.store.pins.entries()
    writer = cache.ram.checkpoint_at("model", ids(CHAT))
    writer.__enter__()
    assert len(cache.ram.store.pins.entries()) == 1
    del writer  # its thread was killed
    gc.collect()
    planned(cache, [1])
    assert not cache.ram.store.pins.entries()


# -- from inside -----------------------------------------------------------------------------------


class Collecting(ValueEviction):
    """Runs the garbage collector at the worst of moments, under the lock."""

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        super().learn(tree, match, entries)
        gc.collect()


class Finalised:
    """A reference cycle with a finaliser."""

    def __init__(self, last: Callable[[], None]) -> None:
        self.last, self.me = last, self

    def __del__(self) -> None:
        self.last()


def within(seconds: float, work: Callable[[], None]) -> None:
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


def test_a_finaliser_under_the_lock_never_waits_for_it() -> None:
    cache = filled(eviction=Collecting())
    engine = FakeEngine(cache, state=list(CHAT))
    plan, other = planned(cache), planned(cache)
    assert plan.checkpoint is not None
    assert other.checkpoint is not None
    view, entries = engine.view(), cache.stats().entries
    seen: list[object] = []

    def last() -> None:
        assert cache.ram.guard.inside()
        nothing = planned(cache)
        seen.extend(
            [nothing.cached, nothing.total, cache.stats().entries, cache.peek(ids(CHAT), view, Costs())]
        )
        seen.extend(
            [cache.missing(view), cache.unstored(view), cache.segment_buffer(view, 10), engine.checkpoint()]
        )
        seen.append(cache.store_segment(view, engine.attention_of([], CHAT)))
        seen.extend([cache.follow(engine.followed, ids(CHAT)), cache.forget(OTHER), cache.pin(CHAT[:50])])
        seen.append(cache.ram.attention("model", ids(CHAT), 0, 10))
        cache.remember("model", ids([1, 2, 3]))
        cache.queue_writes(view)
        cache.buffer(100)
        cache.drop_segment(Segment(0, 1, np.zeros(1, np.uint8)))
        check_integrity(cache)
        with cache.ram.checkpoint_at("model", ids(CHAT)) as found:
            seen.append(found)
        cache.release(plan)
        cache.drop(other.checkpoint)

    def request() -> None:
        gc.disable()
        try:
            Finalised(last)
            FakeEngine(cache).prefill([7, 8, 9])
        finally:
            gc.enable()

    within(60, request)
    assert seen == [0, 201, entries, 0, [], 0, None, False, False, True, 0, 0, [], None]
    cache.stats()
    assert len(cache.ram.store.doomed) == 1, "what was to be done is done"
    assert cache.ram.store.pins.entries() == cache.ram.store.doomed
    cache.release(other)
    assert not cache.ram.store.pins.entries()
    assert len(cache.ram.pinned) == 1
    check_integrity(cache)


def test_who_comes_in_again_under_the_lock_of_the_folder_never_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(disk_dir=tmp_path)
    cache.queue_writes(FakeEngine(cache, state=list(CHAT)).view())
    assert cache.flush()
    assert cache.disk is not None
    store, listed = cache.disk.store, RecordStore.listed
    cache.disk.writer.quiet_seconds = 1000.0
    monkeypatch.setattr("llamahybrid.prompt_cache.disk_writer.MOST_SECONDS", 1000.0)
    other = FakeEngine(cache)
    other.prefill(OTHER)
    cache.queue_writes(other.view())
    waiting = len(cache.disk.writer)
    assert waiting
    held = cache.stats().extra["disk_records"]
    assert held
    seen: list[object] = []

    def coming_in_again(records: RecordStore, shard: str) -> set[str]:
        if not seen:
            seen.append(store.guard.inside())
            seen.extend([cache.stats().extra["disk_records"], planned(cache, [1, 2]).cached])
            cache.queue_writes(other.view())
            seen.append(len(cache.disk.writer))  # type: ignore[union-attr]
            seen.append(cache.disk.forget(ids(CHAT), 0.0))  # type: ignore[union-attr]
            seen.append(store.has("k"))
        return listed(records, shard)

    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "listed", coming_in_again)
        store.records.look_again("0")
        within(60, store.refresh)
    assert seen == [True, held, 0, waiting, False, False]
    assert cache.stats().extra["disk_records"] == 0, "what was to be forgotten is gone"
    assert not RecordStore(tmp_path).keys()
    assert cache.flush()
    check_integrity(cache)


def test_what_is_forgotten_in_a_finaliser_is_gone_for_the_next_request() -> None:
    cache = filled(eviction=Collecting())
    gc.disable()
    try:
        Finalised(lambda: [None for _ in [cache.forget(CHAT)]].clear())
        within(60, lambda: cache.release(planned(cache, [1, 2])))
    finally:
        gc.enable()
    assert planned(cache).matched == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_signal_handler_may_look_in_at_any_time() -> None:
    cache = PromptCache(interrupt_fuzz.BUDGET)
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(cache.stats().bytes_ram))
    try:
        with pytest.MonkeyPatch.context():
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
            interrupt_fuzz.work(cache)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    check_integrity(cache)


# -- a child process -------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    cache = filled()
    inside, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> Any:
        inside.set()
        go_on.wait(60)
        raise ValueError

    cache.ram.tree.splitters["model"] = slow
    thread = threading.Thread(target=lambda: cache.remember("model", ids(OTHER)))
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.alarm(30)
        ok = cache.stats().extra["restarts"] == 1 and cache.stats().entries == 0
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert cache.stats().extra["restarts"] == 0
