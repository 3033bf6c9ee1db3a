"""A Redis server that is slow, away, restarted, full or used by others (see also `test_stores`)."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from llamahybrid.prompt_cache.disk_folder import SHARDS
from llamahybrid.prompt_cache.remote_changes import PREFIX, record

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.remote import RemoteRecords
from tests.lab.fake_engine import FakeEngine
from tests.lab.redis_server import RedisServer

from .asking import SLOW, A, B, C, ask
from .stores import ServerStore, wait_until
from .test_stores import planned


@pytest.fixture
def store(server: RedisServer) -> Iterator[ServerStore]:
    made = ServerStore(server)
    yield made
    server.resume()
    made.close()


def shards(client: redis.Redis) -> list[str]:
    """The keys of shards in which anything lies."""
    return [name for letter in SHARDS if client.exists(name := f"{PREFIX}:shard:{letter}")]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How many seconds each read may take."""
    seen: list[float | None] = []
    load = RemoteRecords.load

    def noted(self: RemoteRecords, key: str, within: float | None = None) -> Any:
        seen.append(within)
        return load(self, key, within)

    monkeypatch.setattr(RemoteRecords, "load", noted)
    return seen


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_a_server_that_is_away_costs_one_warning_and_no_more_time_than_decoding(
    store: ServerStore, how: str, caplog: pytest.LogCaptureFixture, waits: list[float | None]
) -> None:
    ask(store.open(), A)
    cache = store.open()
    getattr(store.server, how)()
    costs = replace(SLOW, token_seconds=1e-3, prefill_seconds=1e-3)  # A takes 0.3 s to decode
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        for _ in range(5):
            plan = cache.plan(np.array([*A, 1], np.int32), FakeEngine(cache).view(), (), costs)
            assert plan.cached == 0
    assert all(seconds is not None and seconds <= 0.31 for seconds in waits)
    assert len(waits) <= 1, "it is left alone for a while"
    assert len([r for r in caplog.records if "remote cache failed" in r.message]) == 1
    assert ask(cache, C).cached == 0, "nor does storing wait"
    if how == "pause":
        store.server.resume()
        wait_until(lambda: planned(cache, [*A, 1]) == len(A))


def test_a_read_that_was_given_up_for_little_does_not_stop_one_that_saves_much(store: ServerStore) -> None:
    ask(store.open(), A)
    cache = store.open()
    little = replace(SLOW, token_seconds=1e-5, prefill_seconds=1e-5)
    store.server.pause()
    plan = cache.plan(np.array([*A, 1], np.int32), FakeEngine(cache).view(), (), little)
    assert plan.cached == 0
    store.server.resume()
    wait_until(lambda: planned(cache, [*A, 1]) == len(A))
    assert store.count(cache, "errors") == 0


def test_a_server_that_comes_back_empty_is_filled_again(store: ServerStore) -> None:
    cache = store.open()
    ask(cache, A)
    assert cache.flush()
    store.server.client().flushall()
    other = PromptCache(1 << 24, **store.arguments(None))
    assert planned(other, [*A, 1]) == 0
    other.close()
    cache.ram_bytes = 0
    cache.ram_bytes = 1 << 24
    wait_until(lambda: planned(cache, [*A, 1]) == 0)
    ask(cache, A)
    assert cache.flush()
    assert planned(store.open(), [*A, 1]) == len(A)


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_was_never_there_costs_warnings_and_no_request_waits(
    caplog: pytest.LogCaptureFixture, silent: bool
) -> None:
    """One refuses connections; another accepts them and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if silent:
            taken.listen()
        cache = PromptCache(1 << 24, remote=f"redis://127.0.0.1:{taken.getsockname()[1]}/0")
        wait_until(lambda: ask(cache, C) and "reading from the remote cache failed" in caplog.text)
        for prompt in (A, B):
            assert ask(cache, prompt).cached <= 150
        assert ask(cache, [*A, 1]).cached == len(A)
        assert not cache.flush(0.0)
        cache.clear()  # or the process would try to write at its end


def test_an_address_that_means_nothing_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="URL"):
        PromptCache(ram_bytes=1 << 20, remote="what://is/this")


def test_an_answer_is_on_the_server_without_a_flush(store: ServerStore) -> None:
    """A machine that dies later has left its state."""
    ask(store.open(), A)
    wait_until(store.records)


def test_a_full_server_is_read_and_things_go_from_it(store: ServerStore) -> None:
    ask(store.open(), A)
    store.open()
    store.server.client().config_set("maxmemory", "1mb")
    cache = store.open()
    assert planned(cache, [*A, 1]) == len(A)
    ask(cache, C)
    cache.flush()
    cache.clear()
    assert not store.records()


def test_records_that_the_server_evicted_are_misses(store: ServerStore) -> None:
    cache = store.open()
    ask(cache, A)
    assert cache.flush()
    client = store.server.client()
    client.delete(*store.records())
    new = PromptCache(1 << 24, **store.arguments(None))
    assert planned(new, [*A, 1]) == 0
    wait_until(lambda: not shards(client))
    ask(new, A)
    assert new.close()
    assert planned(store.open(), [*A, 1]) == len(A)


def test_a_removal_that_the_server_refuses_is_said_and_can_be_repeated(
    store: ServerStore, caplog: pytest.LogCaptureFixture
) -> None:
    cache, client = store.open(), store.server.client()
    ask(cache, A)
    assert cache.flush()
    client.config_set("min-replicas-to-write", 1)  # nothing is written any more
    cache.forget(A)
    assert "forget it again" in caplog.text
    assert store.records()
    client.config_set("min-replicas-to-write", 0)
    caplog.clear()

    def gone() -> bool:
        cache.forget(A)
        return not store.records()

    wait_until(gone)


def list_as_record(client: redis.Redis) -> str:
    key = f"{'a' * 32}-state-5-5"
    client.lpush(record(key), "x")
    client.sadd(f"{PREFIX}:shard:a", key)
    client.hincrby(f"{PREFIX}:changes", "a", 1)
    return record(key)


def text_as_shard(client: redis.Redis) -> str:
    name = next(name for letter in SHARDS if (name := f"{PREFIX}:shard:{letter}") not in shards(client))
    client.set(name, "text")
    return name


def text_as_changes(client: redis.Redis) -> str:
    client.delete(f"{PREFIX}:changes")
    client.set(f"{PREFIX}:changes", "text")
    return f"{PREFIX}:changes"


@pytest.mark.parametrize("put", [list_as_record, text_as_shard, text_as_changes])
def test_a_key_of_another_type_is_left_alone_and_costs_nothing_else(
    store: ServerStore, caplog: pytest.LogCaptureFixture, put: Callable[[redis.Redis], str]
) -> None:
    for prompt in (A, B, C):
        ask(store.open(), prompt)
    store.open()
    client = store.server.client()
    name = put(client)
    with caplog.at_level(logging.WARNING):
        cache = store.open()
        for prompt in (A, B, C):
            wait_until(lambda prompt=prompt: planned(cache, [*prompt, 1]) == len(prompt))
    assert [name in message for message in caplog.messages] == [True]
    assert store.count(cache, "errors") == 1
    assert client.exists(name), "it is another program's"


def test_a_record_that_became_another_type_is_a_miss_for_its_conversation_alone(store: ServerStore) -> None:
    for prompt in (A, C):
        ask(store.open(), prompt, "recurrent")
    cache = store.open()
    client = store.server.client()
    for name in store.records():
        if name.endswith(f"-{len(A)}"):
            client.delete(name)
            client.lpush(name, "x")
    assert FakeEngine(cache, "recurrent", costs=SLOW).request([*A, 1]).cached < len(A)
    assert FakeEngine(cache, "recurrent", costs=SLOW).request([*C, 1]).cached == len(C)


def test_garbage_on_the_server_stops_nothing(store: ServerStore) -> None:
    client = store.server.client()
    client.sadd(f"{PREFIX}:shard:a", b"\xff\xfe", "../../etc")
    store.add(f"{'a' * 32}-state-5-5", b"nonsense")
    ask(store.open(), A)
    assert planned(store.open(), [*A, 1]) == len(A)


def test_closed_caches_leave_no_thread(store: ServerStore) -> None:
    before = set(threading.enumerate())
    cache = PromptCache(1 << 24, **store.arguments(None))
    ask(cache, A)
    assert cache.close()
    assert set(threading.enumerate()) - before
    del cache
    wait_until(lambda: gc.collect() >= 0 and not set(threading.enumerate()) - before)
