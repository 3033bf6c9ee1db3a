"""`forget`: gone from RAM, disk, live memory, idle buffers and from what is queued; and it stays gone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamahybrid.prompt_cache import BasePromptCache, Costs, PromptCache
from llamahybrid.prompt_cache.base import LiveState, Tokens
from llamahybrid.prompt_cache.disk import RecordStore
from llamahybrid.prompt_cache.lateness import ReadLate
from llamahybrid.prompt_cache.records import Head
from tests.lab.fake_engine import FakeEngine, Kind
from tests.lab.integrity import check_integrity
from tests.lab.naive import NaivePromptCache

from .asking import SLOW

AMPLE = 1 << 22
SECRET = list(range(1000, 1200))
OTHER = list(range(50, 150))
KINDS: tuple[Kind, ...] = ("recurrent", "hybrid", "window", "plain", "paged")


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def known(cache: BasePromptCache, namespace: str = "model") -> int:
    """How much of the secret is known to the cache, live memory aside."""
    plan = cache.plan(ids(SECRET), FakeEngine(cache, namespace=namespace).view(), (), Costs())
    cache.release(plan)
    return plan.matched


@pytest.fixture(params=[lambda: PromptCache(AMPLE), NaivePromptCache])
def cache(request: pytest.FixtureRequest) -> BasePromptCache:
    made: BasePromptCache = request.param()
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "generated"), [(1, 0), (20, 80), (200, 0), (230, 80)])
def test_the_next_request_does_not_bring_it_back(
    cache: BasePromptCache, kind: Kind, length: int, generated: int
) -> None:
    engine = FakeEngine(cache, kind)
    engine.prefill(SECRET)
    engine.generate(range(7000, 7000 + generated))
    cache.forget([*SECRET, *range(7000, 7080)][:length])
    engine.prefill(OTHER)
    assert known(cache) == 0
    assert engine.prefill([*SECRET, 5]).cached == 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_start_from_what_is_still_live(cache: BasePromptCache, kind: Kind) -> None:
    engine = FakeEngine(cache, kind)
    engine.prefill(SECRET)
    cache.forget(SECRET[:20])
    plan = engine.prefill([*SECRET, 5])
    assert (plan.cached, plan.source, plan.matched) == (0, "none", 0)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "window"])
def test_asked_for_again_it_is_a_chat_like_any_other(cache: BasePromptCache, kind: Kind) -> None:
    one, two = FakeEngine(cache, kind), FakeEngine(cache, kind)
    one.prefill(SECRET)
    cache.forget(SECRET)
    one.prefill(SECRET)
    assert one.prefill([*SECRET, 5]).cached == len(SECRET)
    assert two.prefill([*SECRET, 5, 6]).cached >= len(SECRET)


def test_every_context_that_shares_the_cache_forgets(cache: BasePromptCache) -> None:
    engines = [FakeEngine(cache, "hybrid", name) for name in ("a", "a", "b")]
    for engine in engines:
        engine.prefill(SECRET)
    bystander = FakeEngine(cache, "hybrid", "a")
    bystander.prefill([*SECRET[:10], *OTHER])
    cache.forget(SECRET[:50])
    for engine in engines:
        engine.prefill(OTHER)
    assert (known(cache, "a"), known(cache, "b")) == (10, 0)
    assert bystander.prefill([*SECRET[:10], *OTHER, 1]).source == "live"


def test_a_request_that_runs_meanwhile_leaves_nothing_behind(cache: BasePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    assert cache.follow(engine.followed, ids(SECRET))
    engine.decode(SECRET[:30])
    cache.forget(SECRET[:100])  # it has not come so far
    assert not engine.checkpoint()
    engine.decode(SECRET[30:])
    assert not engine.checkpoint(engine.logits)
    view = engine.view()
    assert (cache.missing(view), cache.unstored(view)) == ([], 0)
    assert not cache.store_segment(view, engine.attention_of([], SECRET[:20]))
    assert cache.peek(ids(SECRET), view, Costs()) == 0
    engine.generate(range(100))
    assert known(cache) == 0
    assert engine.prefill([*SECRET, 5]).cached == 0


def test_one_that_has_decoded_nothing_yet_leaves_nothing_behind(cache: BasePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    assert cache.follow(engine.followed, ids(SECRET))
    cache.forget(SECRET[:100])
    engine.decode(SECRET)
    assert not engine.checkpoint(engine.logits)


def test_what_was_decoded_without_a_request_is_reached_too(cache: BasePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    engine.prefill(OTHER)
    engine.state = list(SECRET)
    cache.forget(SECRET[:100])
    engine.prefill(OTHER)
    assert known(cache) == 0


def test_its_attention_is_not_stored_for_who_asks_again(cache: BasePromptCache) -> None:
    old, new = FakeEngine(cache, "hybrid"), FakeEngine(cache, "hybrid", pages=False)
    old.prefill(SECRET)
    cache.forget(SECRET)
    new.prefill(SECRET)
    new.pages = True
    assert cache.missing(new.view()) != []
    assert cache.missing(old.view()) == []
    assert not cache.store_segment(old.view(), old.attention_of([], SECRET[:20]))


def test_what_only_begins_alike_goes_on(cache: BasePromptCache) -> None:
    engine = FakeEngine(cache, "hybrid")
    engine.prefill([*SECRET[:50], *OTHER])
    cache.forget(SECRET[:60])
    cache.forget([])
    plan = engine.prefill([*SECRET[:50], *OTHER, 1])
    assert (plan.source, plan.cached) == ("live", 50 + len(OTHER))


def test_a_context_that_is_gone_is_not_followed() -> None:
    cache = PromptCache(AMPLE)
    for _ in range(5):
        FakeEngine(cache).prefill(OTHER)
    gc.collect()
    engine = FakeEngine(cache)
    engine.prefill(OTHER)
    assert len(cache.ram.followed) <= 2


def test_no_token_of_it_is_kept_to_know_what_was_forgotten() -> None:
    cache = PromptCache(AMPLE)
    state = LiveState(lambda: ids(SECRET))
    cache.follow(state, ids(SECRET))
    cache.forget(SECRET[:3])
    assert state.forgotten
    assert len(state.prompt) == 0
    assert not cache.follow(state, ids(OTHER)), "it is still live"
    assert state.forgotten


def test_its_bytes_do_not_lie_idle() -> None:
    cache = PromptCache(AMPLE)
    FakeEngine(cache, "recurrent").prefill(SECRET)
    plan = cache.plan(ids([*SECRET, 1]), FakeEngine(cache).view(), (), Costs())
    taken = cache.plan(ids([*SECRET, 1]), FakeEngine(cache, "recurrent").view(), (), Costs())
    assert taken.checkpoint is not None
    before = taken.checkpoint.snapshot.tobytes()
    cache.forget(SECRET)
    assert cache.stats().extra["idle_bytes"] == 0
    assert taken.checkpoint.snapshot.tobytes() == before, "who reads it may go on"
    cache.release(plan)
    cache.release(taken)
    assert (cache.stats().bytes_ram, cache.stats().extra["idle_bytes"]) == (0, 0)


def test_a_replaced_checkpoint_in_use_does_not_lie_idle_later() -> None:
    cache = PromptCache(AMPLE)
    engine = FakeEngine(cache, "recurrent")
    engine.prefill(SECRET)
    plan = cache.plan(ids([*SECRET, 1]), FakeEngine(cache, "recurrent").view(), (), Costs())
    engine.checkpoint()
    cache.forget(SECRET)
    cache.release(plan)
    assert cache.stats().bytes_ram == 0


def test_pins_of_it_go_and_a_pinned_beginning_stays() -> None:
    cache = PromptCache(AMPLE)
    engine = FakeEngine(cache, "hybrid")
    cache.pin(SECRET[:60])
    cache.pin(SECRET[:150])
    cache.pin(OTHER)
    engine.prefill(SECRET, [60])
    engine.prefill([3, 2, 1])
    cache.forget(SECRET[:120])
    assert sorted(map(len, cache.ram.pinned)) == [60, len(OTHER)]
    check_integrity(cache)
    plan = FakeEngine(cache, "hybrid").prefill([*SECRET, 5], [60])
    assert (plan.matched, plan.cached, [s.end for s in plan.segments]) == (60, 60, [60])


# -- and the disk ----------------------------------------------------------------------------------


def on_disk(folder: Path) -> int:
    """Records that hold any of the secret."""
    store = RecordStore(folder)
    return sum(int(np.isin(store.load(key).tokens, SECRET).any()) for key in store.keys())  # noqa: SIM118


def test_what_is_queued_for_the_disk_is_forgotten_too(tmp_path: Path) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    engine = FakeEngine(cache, "hybrid")
    engine.prefill(SECRET)
    engine.generate(range(7000, 7080))
    cache.forget(SECRET[:20])
    engine.prefill(OTHER)
    cache.close()
    assert on_disk(tmp_path) == 0
    later = PromptCache(AMPLE, tmp_path)
    assert FakeEngine(later, "hybrid").prefill([*SECRET, 5]).matched == 0
    assert FakeEngine(later, "hybrid").prefill([*OTHER, 5]).source == "disk"
    later.close()


def test_to_forget_nothing_changes_nothing_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    FakeEngine(cache, "hybrid").prefill(SECRET)
    assert cache.pin(SECRET) > 0
    before = cache.stats()
    assert before.extra["disk_waiting"] > 0
    monkeypatch.setattr(cache.disk, "forget", pytest.fail)  # a server that is away is waited for there
    assert cache.forget([]) == 0
    assert (cache.stats(), len(cache.ram.pinned)) == (before, 1)
    cache.close()
    assert on_disk(tmp_path) > 0


def test_a_pinned_beginning_stays_on_disk(tmp_path: Path) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    engine = FakeEngine(cache, "hybrid")
    engine.prefill(SECRET[:60])
    cache.pin(SECRET[:60])
    cache.pin(SECRET[:150])
    cache.flush()
    engine.prefill(SECRET)
    cache.flush()
    cache.forget(SECRET[:120])
    store = RecordStore(tmp_path)
    assert {len(store.load(key).tokens) for key in store.keys()} == {60}  # noqa: SIM118
    cache.close()
    later = PromptCache(AMPLE, tmp_path)
    plan = FakeEngine(later, "hybrid", costs=SLOW).prefill(SECRET)
    assert (plan.source, plan.cached, plan.matched) == ("disk", 60, 60)
    later.forget(SECRET[:60])
    assert on_disk(tmp_path) == 0, "it is not pinned there"
    later.close()


def test_what_ends_meanwhile_is_not_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    engine = FakeEngine(cache, "hybrid")
    engine.prefill(SECRET)
    assert cache.disk is not None
    on_the_disk = cache.disk.forget

    def racing(*args: Any) -> bool:
        done = on_the_disk(*args)
        engine.page_out()  # another thread's request is over
        cache.flush()
        return done

    monkeypatch.setattr(cache.disk, "forget", racing)
    cache.forget(SECRET[:20])
    cache.close()
    assert on_disk(tmp_path) == 0


def test_what_ends_while_all_is_cleared_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    engine = FakeEngine(cache, "hybrid")
    engine.prefill(SECRET)
    assert cache.disk is not None
    empty = cache.disk.clear

    def racing(*args: Any) -> bool:
        done = empty(*args)
        cache.queue_writes(engine.view())  # another thread's request is over
        cache.flush()
        return done

    monkeypatch.setattr(cache.disk, "clear", racing)
    cache.clear()
    cache.close()
    assert on_disk(tmp_path) == 0


@pytest.mark.parametrize("meanwhile", ["load", "known"])
def test_what_is_read_meanwhile_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    first = PromptCache(AMPLE, tmp_path)
    FakeEngine(first, "hybrid").prefill(SECRET)
    first.close()
    cache = PromptCache(AMPLE, tmp_path)
    assert cache.disk is not None
    method = getattr(cache.disk, meanwhile)
    forgotten: list[int] = []

    def slow(*args: Any) -> Any:
        result = method(*args)
        if not forgotten:
            forgotten.append(cache.forget(SECRET[:20]))
        return result

    monkeypatch.setattr(cache.disk, meanwhile, slow)
    if meanwhile == "known":
        monkeypatch.setattr("llamahybrid.prompt_cache.cache.promote", lambda *args: None)
    plan = cache.plan(ids([*SECRET, 5]), FakeEngine(cache, "hybrid").view(), (), Costs())
    assert forgotten
    assert (plan.cached, plan.matched) == (0, 0)
    stats = cache.stats()
    assert (stats.entries, stats.segments, stats.bytes_ram) == (0, 0, 0)
    assert stats.extra["disk_records"] == 0
    cache.close()


@pytest.mark.parametrize("going", ["forget", "clear"])
def test_what_is_read_while_the_disk_is_emptied_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, going: str
) -> None:
    first = PromptCache(AMPLE, tmp_path)
    FakeEngine(first, "hybrid").prefill(SECRET)
    first.close()
    cache = PromptCache(AMPLE, tmp_path)
    assert cache.disk is not None
    on_the_disk, plans = getattr(cache.disk, going), []

    def racing(*args: Any) -> Any:
        view = FakeEngine(cache, "hybrid").view()
        plans.append(cache.plan(ids([*SECRET, 5]), view, (), Costs()))  # another thread's request begins
        cache.release(plans[0])
        return on_the_disk(*args)

    monkeypatch.setattr(cache.disk, going, racing)
    cache.forget(SECRET[:20]) if going == "forget" else cache.clear()
    assert plans[0].cached == len(SECRET)
    stats = cache.stats()
    assert (stats.entries, stats.segments, stats.extra["tokens"]) == (0, 0, 0)
    cache.close()


def test_what_is_read_while_all_is_cleared_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PromptCache(AMPLE, tmp_path)
    FakeEngine(first, "hybrid").prefill(SECRET)
    first.close()
    cache = PromptCache(AMPLE, tmp_path)
    assert cache.disk is not None
    load = cache.disk.load

    def slow(*args: Any) -> Any:
        loaded = load(*args)
        cache.clear()
        return loaded

    monkeypatch.setattr(cache.disk, "load", slow)
    plan = cache.plan(ids([*SECRET, 5]), FakeEngine(cache, "hybrid").view(), (), Costs())
    assert (plan.cached, cache.stats().entries) == (0, 0)
    cache.close()


def part_pinned(cache: PromptCache) -> FakeEngine:
    """A conversation with a checkpoint where its pinned beginning ends, all its attention in one piece."""
    FakeEngine(cache, "hybrid").prefill(OTHER)  # from the first request on is known how attention is cut
    engine = FakeEngine(cache, "hybrid")
    cache.pin(SECRET[:60])
    engine.decode(SECRET[:60])
    assert engine.checkpoint(engine.logits)
    engine.decode(SECRET[60:])
    assert engine.checkpoint()
    engine.page_out()
    return engine


@pytest.mark.parametrize("how", ["waiting", "written", "by another process"])
def test_a_pinned_beginning_is_restored_after_a_restart(tmp_path: Path, how: str) -> None:
    """What waits of it is written, and attention that runs on into what is forgotten stays up to its end."""
    cache = PromptCache(AMPLE, tmp_path)
    part_pinned(cache)
    if how != "waiting":
        cache.flush()
        assert (0, 200) in {(h.start, h.end) for h in heads(tmp_path) if not h.is_snapshot}
    if how == "by another process":
        cache.close()
        cache = PromptCache(AMPLE, tmp_path)
        cache.pin(SECRET[:60])
        FakeEngine(cache, "hybrid").prefill(OTHER)
    cache.forget(SECRET[:120])
    cache.close()
    assert not any(
        np.isin(RecordStore(tmp_path).load(h.key).tokens, SECRET[60:]).any() for h in heads(tmp_path)
    )
    later = PromptCache(AMPLE, tmp_path)
    plan = FakeEngine(later, "hybrid", costs=SLOW).prefill(SECRET)
    assert (plan.source, plan.cached, plan.matched) == ("disk", 60, 60)
    later.close()


def test_a_beginning_that_cannot_be_read_in_time_keeps_nothing_from_being_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read from a server is given up with an exception of its own."""
    cache = PromptCache(AMPLE, tmp_path)
    part_pinned(cache)
    cache.flush()
    assert cache.disk is not None

    def late(*_: Any) -> None:
        raise ReadLate("too slow")

    monkeypatch.setattr(cache.disk.store.records, "load", late)
    cache.forget(SECRET[:120])
    cache.close()
    assert not any(head.end == 200 for head in heads(tmp_path))


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_forgotten_while_a_beginning_is_kept_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    part_pinned(cache)
    cache.flush()
    assert cache.disk is not None
    records = cache.disk.store.records
    prepare, others = records.prepare, [cache.clear if everything else lambda: cache.forget(SECRET[:20])]

    def racing(*args: Any) -> str:
        part = prepare(*args)
        while others:  # another thread's
            others.pop()()
        return part

    monkeypatch.setattr(records, "prepare", racing)
    cache.forget(SECRET[:120])
    assert not others
    cache.close()
    assert on_disk(tmp_path) == 0


def heads(folder: Path) -> list[Head]:
    store = RecordStore(folder)
    return [store.head(key) for key in store.keys()]  # noqa: SIM118


def test_what_others_share_of_it_stays_on_disk(tmp_path: Path) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    engine = part_pinned(cache)
    cache.unpin(SECRET[:60])
    cache.flush()
    engine.prefill([*SECRET[:100], *OTHER])
    cache.close()
    cache = PromptCache(AMPLE, tmp_path)
    FakeEngine(cache, "hybrid").prefill(OTHER)
    cache.forget(SECRET[:120])
    cache.close()
    later = PromptCache(AMPLE, tmp_path)
    plan = FakeEngine(later, "hybrid", costs=SLOW).prefill([*SECRET[:100], *OTHER, 5])
    assert (plan.source, plan.cached) == ("disk", 100 + len(OTHER))
    later.close()


def test_what_cannot_be_cut_goes_and_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PromptCache(AMPLE, tmp_path)
    part_pinned(cache)
    cache.close()
    cache = PromptCache(AMPLE, tmp_path)
    cache.pin(SECRET[:60])
    cache.forget(SECRET[:120])
    cache.close()
    assert "goes from the disk" in caplog.text
    assert not any(not h.is_snapshot and h.end == 200 for h in heads(tmp_path))


def test_what_there_is_no_room_for_goes_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what is forgotten stays for that."""
    cache = PromptCache(AMPLE, tmp_path)
    part_pinned(cache)
    cache.flush()
    assert cache.disk is not None
    monkeypatch.setattr(cache.disk.store, "make_room", lambda *_: False)
    cache.forget(SECRET[:120])
    assert "goes from the disk" in caplog.text
    stored = [RecordStore(tmp_path).load(h.key).tokens for h in heads(tmp_path)]
    assert not any(np.isin(tokens, SECRET[60:]).any() for tokens in stored)
    cache.close()
