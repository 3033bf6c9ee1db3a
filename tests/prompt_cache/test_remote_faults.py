"""A shared store whose server is full, evicts, is away or is asked at a bad moment; and what is forgotten."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from llamahybrid.prompt_cache import remote, remote_link
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.remote_changes import PREFIX, publish, record, withdraw
from llamahybrid.prompt_cache.remote_link import Link
from tests.lab.redis_server import PROGRAM, RedisServer
from tests.prompt_cache.test_remote import PATH, plan, records, store, until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")

KEY = f"{'a' * 32}-state-5-5"


def link_of(cache: PromptCache) -> Link:
    assert cache.remote is not None
    link: Link = cache.remote.store.records._link  # type: ignore[attr-defined]
    return link


def stored(server: RedisServer) -> list[Any]:
    found: list[Any] = server.client().keys(f"{PREFIX}:record:*")  # type: ignore[assignment]
    return found


def test_a_full_server_is_read_and_lets_things_go(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one = machine()
    store(one)
    server.client().config_set("maxmemory", "1mb")
    other = machine()
    assert link_of(other).wait(10)
    assert plan(other, [*PATH, 99]).cached == len(PATH)
    one.clear()
    assert not stored(server)
    assert not link_of(one)._outbox


def test_a_change_that_is_refused_stops_nothing(server: RedisServer) -> None:
    link, client = Link(server.url), server.client()
    client.set(f"{PREFIX}:shard:a", "no set")
    link.later(withdraw(KEY), KEY)
    other = KEY.replace("a", "b", 1)
    link.later(publish(link.upload([b"x"]), other), other, comes=True)
    assert link.settle(10)
    assert client.exists(record(other))
    assert link.refused == 1


def test_what_was_not_removed_is_said_and_can_be_removed_later(
    machine: Callable[..., PromptCache], server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    one, client = machine(), server.client()
    store(one)
    client.config_set("min-replicas-to-write", 1)  # nothing is written any more
    one.forget(PATH)
    assert "forget it again" in caplog.text
    assert stored(server)
    client.config_set("min-replicas-to-write", 0)
    until(lambda: records(one))
    caplog.clear()
    one.forget(PATH)
    assert not stored(server)
    assert not caplog.records


def test_all_is_known_again_after_an_exception_in_the_middle(
    machine: Callable[..., PromptCache],
) -> None:
    one = machine()
    for first in range(5):
        store(one, [first, *PATH])
    assert one.remote is not None
    one.remote.store.guard.changing = True  # as an interrupt leaves it
    until(lambda: records(one) == 5)
    assert one.stats().extra["remote_errors"] == 0


def test_what_was_just_stored_elsewhere_is_forgotten_too(
    machine: Callable[..., PromptCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "POLL_SECONDS", 60.0)
    one, other = machine(), machine()
    store(one)
    other.forget(PATH)
    assert not stored(server)


def test_what_is_forgotten_does_not_come_back(
    machine: Callable[..., PromptCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine()
    store(one)
    link, listing, told = link_of(one), threading.Event(), threading.Event()
    follow, send = link._follow, link._send

    def slow(*args: Any) -> None:
        listing.set()
        told.wait(20)
        follow(*args)  # what the server says now: the record is there, it goes only then

    monkeypatch.setattr(link, "_follow", slow)
    key = stored(server)[0].decode().removeprefix(f"{PREFIX}:record:")
    link.ask(key[0])
    link._wake.put(None)
    assert listing.wait(20)
    assert one.remote is not None
    one.remote.store.clear()  # while the shard is being read
    monkeypatch.setattr(link, "_send", lambda: None)
    told.set()
    until(lambda: link.news)
    assert records(one) == 0
    for _ in range(2):  # what was asked for again meanwhile is told
        assert link.wait(10)
        assert records(one) == 0
    monkeypatch.setattr(link, "_send", send)


def test_what_the_server_evicts_itself_is_not_asked_for_for_ever(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one, client = machine(), server.client()
    store(one)
    client.delete(*stored(server))
    new = machine()
    until(lambda: not any(client.scard(f"{PREFIX}:shard:{letter}") for letter in "0123456789abcdef"))
    assert records(new) == 0
    until(lambda: records(one) == 0)


def test_nothing_goes_for_what_cannot_come(
    machine: Callable[..., PromptCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine(remote_bytes=12_000)
    store(one)
    store(one, [1, *PATH])
    monkeypatch.setattr(remote, "MOST_BYTES", 4000)
    store(one, [2, *PATH])
    assert (records(one), one.stats().extra["remote_evicted"]) == (2, 0)
    monkeypatch.undo()
    monkeypatch.setattr(remote_link, "STALE_SECONDS", 0.2)
    server.kill()
    time.sleep(0.3)
    store(one, [3, *PATH], flush=False)
    assert not one.flush(10)
    assert records(one) == 2
    assert one.stats().extra["remote_evicted"] == 0


def test_a_record_that_was_read_is_not_kept(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    class Noted(remote_link._Read):
        def __init__(self, key: str) -> None:
            super().__init__(key)
            made.append(weakref.ref(self))

    monkeypatch.setattr(remote_link, "_Read", Noted)
    link = Link(server.url)
    assert link.wait(10)
    server.client().set(record(KEY), b"x")
    assert link.read(KEY, 10) == b"x"
    until(lambda: gc.collect() >= 0 and made[0]() is None)


def test_a_finaliser_in_its_thread_may_ask_the_cache(
    machine: Callable[..., PromptCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "STALE_SECONDS", 1000.0)  # it does not just give up
    cache = machine()
    link, asked = link_of(cache), threading.Event()

    class News(dict[str, Any]):
        """As the collector may, between any two lines that change what was told."""

        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            if not asked.is_set():
                cache.clear()
                asked.set()

    link.news = News()
    link.ask("a")
    assert asked.wait(5)
    assert link.wait(10)


def test_no_lock_of_its_own_is_waited_for_by_a_finaliser(server: RedisServer) -> None:
    link = Link(server.url)
    assert link.wait(10)
    locks = [x for x in vars(link).values() if isinstance(x, type(threading.Lock()) | threading.Event)]
    for lock in locks:
        held = lock._cond if isinstance(lock, threading.Event) else lock
        with held:
            thread = threading.Thread(target=link.close, daemon=True)
            thread.start()
            thread.join(5)
            assert not thread.is_alive()
    assert not locks


def test_what_is_written_at_the_end_of_a_process_is_stored(server: RedisServer) -> None:
    program = f"""
from tests.prompt_cache.test_remote import *
cache = PromptCache(ram_bytes=1 << 20, remote={server.url!r})
store(cache, flush=False)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert len(stored(server)) == 1


def test_what_was_to_be_sent_is_sent_when_the_cache_goes(server: RedisServer) -> None:
    records_ = remote.RemoteRecords(server.url)
    link = records_._link
    server.client().set(record(KEY), b"x")
    server.pause()
    until(lambda: link._begun > link._finished)  # it asks, and gets no answer
    records_.delete(KEY)
    del records_
    server.resume()
    until(lambda: not server.client().exists(record(KEY)))


def test_one_thread_of_each_kind_runs(server: RedisServer) -> None:
    link = Link(server.url)
    assert link.wait(10)
    first = dict(link._threads)
    link._threads = {}  # as when two callers find none
    assert link.wait(10)
    for name, thread in link._threads.items():
        thread.join(10)
        assert not thread.is_alive()
        assert first[name].is_alive()
    link.close()
