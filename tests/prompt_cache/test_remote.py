"""A Redis server that is slow, away, restarted, full or used by others (see also `test_stores`)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.remote import PREFIX
from llamahybrid.prompt_cache.worker import Worker
from tests.lab.fake_engine import FakeEngine
from tests.lab.redis_server import RedisServer
from tests.lab.waiting import wait_until

from .asking import SLOW, A, B, C, ask
from .stores import ServerStore
from .test_stores import chat, planned


@pytest.fixture
def store(server: RedisServer) -> Iterator[ServerStore]:
    made = ServerStore(server)
    yield made
    server.resume()
    made.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time limits of look-ups and reads, in seconds."""
    seen: list[float] = []
    call = Worker.call

    def noted(self: Worker, seconds: float, *arguments: Any) -> Any:
        seen.append(seconds)
        return call(self, seconds, *arguments)

    monkeypatch.setattr(Worker, "call", noted)
    return seen


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_a_server_that_is_away_costs_one_warning_and_no_more_time_than_decoding(
    store: ServerStore, how: str, caplog: pytest.LogCaptureFixture, waits: list[float]
) -> None:
    ask(store.open(), A)
    cache = store.open()
    getattr(store.server, how)()
    waits.clear()
    costs = replace(SLOW, token_seconds=1e-3, prefill_seconds=1e-3)  # A takes 0.3 s to decode
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        for _ in range(5):
            plan = cache.plan(np.array([*A, 1], np.int32), FakeEngine(cache).view(), (), costs)
            assert plan.cached == 0
    assert all(seconds <= 0.31 for seconds in waits)
    assert len(waits) <= 2, "it is left alone for a while"
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


def test_states_that_ram_has_evicted_do_not_wait_for_a_server_that_is_away(store: ServerStore) -> None:
    cache = store.open(ram_bytes=12_000)
    assert cache.remote is not None
    store.server.kill()
    for number in range(20):
        ask(cache, chat(number))
        assert not cache.flush()
    assert len(cache.remote.writer) < 10
    assert cache.stats().extra["remote_failed"]


@pytest.mark.parametrize("evicted", [False, True])
def test_a_server_that_comes_back_empty_is_filled_again(store: ServerStore, evicted: bool) -> None:
    """Empty, or with the rows but not the records, which the server has evicted."""
    cache = store.open()
    ask(cache, A)
    assert cache.flush()
    client = store.server.client()
    client.delete(*map(bytes.fromhex, store.records())) if evicted else client.flushall()
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
    """A server refuses connections, or accepts them and never answers."""
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


@pytest.mark.parametrize("kind", [b"r", b"n"])
def test_keys_of_another_type_are_left_alone_and_cost_their_conversation_alone(
    store: ServerStore, kind: bytes
) -> None:
    ask(store.open(), C, "recurrent")
    store.open()
    client = store.server.client()
    before = set(client.keys(PREFIX + b"*"))
    other = FakeEngine(store.open(), "recurrent", namespace="other", costs=SLOW)
    other.request(A)
    store.open()
    theirs = [name for name in set(client.keys(PREFIX + kind + b"*")) - before]
    for name in theirs:
        client.delete(name)
        client.lpush(name, "x")
    cache = store.open(0)
    assert FakeEngine(cache, "recurrent", namespace="other", costs=SLOW).request([*A, 1]).cached == 0
    assert FakeEngine(cache, "recurrent", costs=SLOW).request([*C, 1]).cached >= len(C)
    assert all(client.type(name) == b"list" for name in theirs), "they are another program's"


def test_a_user_without_the_commands_of_operators_reads_and_writes(store: ServerStore) -> None:
    rights = ["+@all", "-@dangerous"]
    store.server.client().acl_setuser("worker", True, passwords="+secret", categories=rights, keys="*")
    url = store.server.url.replace("//", "//worker:secret@")
    cache = store.open(remote=url)
    ask(cache, A)
    assert cache.flush()
    assert store.count(cache, "errors") == 0
    assert planned(store.open(remote=url), [*A, 1]) == len(A)


def test_garbage_on_the_server_stops_nothing(store: ServerStore) -> None:
    client = store.server.client()
    for kind in (b"n", b"a", b"r"):
        client.set(PREFIX + kind + b"../../etc", b"nonsense")
        client.set(PREFIX + kind + bytes(16), b"nonsense")
    ask(store.open(), A)
    cache = store.open()
    assert planned(cache, [*A, 1]) == len(A)
    cache.forget(A)
    assert planned(store.open(), [*A, 1]) == 0
