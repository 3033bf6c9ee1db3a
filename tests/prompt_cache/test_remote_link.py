"""The connection: nothing of it is waited for longer than said, and what was forgotten is asked again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from llamahybrid.prompt_cache import remote_link
from llamahybrid.prompt_cache.lateness import ReadLate
from llamahybrid.prompt_cache.remote import RemoteRecords
from llamahybrid.prompt_cache.remote_changes import PREFIX, discard, publish, record, withdraw
from llamahybrid.prompt_cache.remote_link import Link
from tests.lab.redis_server import PROGRAM, RedisServer

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")

KEY = f"{'a' * 32}-state-5-5"


def test_changes_are_sent_in_order(server: RedisServer) -> None:
    link, client = Link(server.url), server.client()
    part = link.upload([b"one ", memoryview(b"record")])
    assert client.ttl(part) > 0
    link.later(publish(part, KEY))
    assert link.wait(10)
    assert client.get(record(KEY)) == b"one record"
    assert client.ttl(record(KEY)) == -1, "it stays"
    assert client.smembers(f"{PREFIX}:shard:a") == {KEY.encode()}
    assert link.read(KEY, 10) == b"one record"
    link.later(withdraw(KEY))
    assert link.wait(10)
    assert link.read(KEY, 10) is None
    part = link.upload([b"x"])
    link.later(discard(part))
    assert link.wait(10)
    assert not client.exists(part)


def test_a_part_that_went_by_itself_is_no_record(server: RedisServer) -> None:
    link, client = Link(server.url), server.client()
    part = link.upload([b"x"])
    client.delete(part)
    link.later(publish(part, KEY))
    assert link.wait(10)
    assert not client.exists(record(KEY))
    assert not link._outbox


def test_who_reads_waits_no_longer_than_said_and_the_next_not_at_all(server: RedisServer) -> None:
    link = Link(server.url)
    assert link.wait(10)
    server.pause()
    waits: list[float] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return super().wait(timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_link.threading, "Event", Counted)
        with pytest.raises(OSError, match=r"longer than 0\.050 s"):
            link.read(KEY, 0.05)
        with pytest.raises(OSError, match=r"slow|does not answer"):
            link.read(KEY, 0.05)
    assert waits == [0.05]


def test_two_that_read_at_once_are_both_answered_and_who_gave_up_is_not(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(server.url)
    link.later(publish(link.upload([b"one"]), KEY))
    assert link.wait(10)
    asked, get = [], link._client.get
    monkeypatch.setattr(link._client, "get", lambda key: (asked.append(key), get(key))[1])
    server.pause()
    answers: list[bytes | None] = []
    readers = [threading.Thread(target=lambda: answers.append(link.read(KEY, 60))) for _ in range(2)]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 20
    while not (link._reading is not None and link._reads.qsize() == 1):
        assert time.monotonic() < end
        time.sleep(0.005)
    with pytest.raises(ReadLate):
        link.read(KEY, 0.01)
    server.resume()
    for reader in readers:
        reader.join(20)
    assert answers == [b"one", b"one"]
    assert link.read(KEY, 60) == b"one"  # it has come to it
    assert asked.count(record(KEY)) == 3


def test_a_server_that_was_never_there_is_said_to_be_away(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.kill()
    link = Link(server.url)
    assert not link.wait(0.2)
    with pytest.raises(OSError, match="does not answer"):
        link.check()
    server.start()
    assert link.wait(20)
    link.check()
    server.kill()


def test_a_thread_that_died_is_made_again(server: RedisServer) -> None:
    link = Link(server.url)
    assert link.wait(10)
    for name in ("poll", "read"):
        link._threads[name] = threading.Thread(target=time.sleep, args=(0,))
    assert link.wait(10)
    assert link.read(KEY, 10) is None


def test_threads_end_with_the_cache_that_they_are_of(server: RedisServer) -> None:
    records = RemoteRecords(server.url)
    threads = list(records._link._threads.values())
    assert len(threads) == 2
    del records
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
