"""One store for several machines: what one wrote serves another; what is damaged, slow or gone is a miss."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamahybrid.prompt_cache import disk_writer, write_behind
from llamahybrid.prompt_cache.base import Bytes, Costs, LiveView, Plan
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.remote_changes import PREFIX, record
from tests.lab.redis_server import PROGRAM, RedisServer

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")

COSTS = Costs(prefill_seconds=1.0)
PATH = list(range(1, 41))


def view(tokens: list[int]) -> LiveView:
    ids = np.array(tokens, np.int32)
    return LiveView("model", ids, len(ids), True, False, False)


def state(tokens: list[int] = PATH) -> Bytes:
    payload = np.random.default_rng(1).integers(0, 255, 5000, dtype=np.uint8)
    return sealed(payload, namespace="model", tokens=np.array(tokens, np.int32))


def store(cache: PromptCache, tokens: list[int] = PATH, *, flush: bool = True) -> None:
    live = view(tokens)
    assert cache.admit(live, len(tokens), state(tokens), np.ones(8, np.float32))
    cache.queue_writes(live)
    assert not flush or cache.flush()


def plan(cache: PromptCache, tokens: list[int]) -> Plan:
    return cache.plan(np.array(tokens, np.int32), view([]), (), COSTS)


def until(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def records(cache: PromptCache) -> int:
    assert cache.remote is not None
    cache.remote.store.refresh()
    return cache.stats().extra["remote_records"]


def test_what_one_machine_stored_serves_another(machine: Callable[..., PromptCache]) -> None:
    one, other = machine(), machine()
    store(one)
    until(lambda: records(other))
    found = plan(other, [*PATH, 99])
    assert (found.cached, found.source) == (len(PATH), "remote")
    assert found.checkpoint is not None
    assert (found.checkpoint.snapshot == state()).all()
    again = plan(machine(), [*PATH, 99])  # what was there before it came
    assert again.cached == len(PATH)


def test_a_machine_that_dies_after_an_answer_has_left_its_state(
    machine: Callable[..., PromptCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    stopped = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    for module in (disk_writer, write_behind):  # no pause of any length will end
        monkeypatch.setattr(module, "time", stopped)
    one, other = machine(), machine()
    store(one, flush=False)
    until(lambda: records(other))


def test_a_damaged_record_is_a_miss_and_goes(
    machine: Callable[..., PromptCache], server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = machine(), machine()
    store(one)
    until(lambda: records(other))
    (key,) = server.client().keys(f"{PREFIX}:record:*")
    raw = bytearray(server.client().get(key))  # type: ignore[arg-type]
    raw[-1] ^= 1
    server.client().set(key, bytes(raw))
    assert plan(other, [*PATH, 99]).cached == 0
    assert other.stats().extra["remote_damaged"] == 1
    until(lambda: not server.client().exists(key))


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_a_server_that_is_away_costs_one_warning_and_no_time(
    machine: Callable[..., PromptCache],
    server: RedisServer,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llamahybrid.prompt_cache.remote_reads.TIMEOUT_SECONDS", 0.5)
    one, other = machine(), machine()
    store(one)
    until(lambda: records(other))
    getattr(server, how)()
    waited: list[float] = []

    def slow(seconds: float | None) -> bool:
        waited.append(seconds or 0.0)
        return False

    link = other.remote.store.records._link  # type: ignore[union-attr,attr-defined]
    read = link.read

    def noted(key: str, seconds: float) -> bytes | None:
        waited.append(seconds)
        answer: bytes | None = read(key, seconds)
        return answer

    monkeypatch.setattr(link, "read", noted)
    costs = Costs(prefill_seconds=0.3 / len(PATH))  # decoding takes 0.3 s
    tokens = np.array([*PATH, 99], np.int32)
    with caplog.at_level(logging.WARNING, "llamahybrid"):
        for _ in range(5):
            assert other.plan(tokens, view([]), (), costs).cached == 0
    assert max(waited, default=0.0) <= 0.3 + 1e-6
    assert len(waited) <= 1, "it is left alone for a while"
    assert len([r for r in caplog.records if "remote cache failed" in r.message]) == 1
    store(other, list(range(100, 130)), flush=False)  # nor does storing wait
    if how == "pause":
        server.resume()
        until(lambda: plan(other, [*PATH, 99]).cached == len(PATH))


def test_who_had_little_to_save_takes_nothing_from_who_has_much(
    machine: Callable[..., PromptCache], server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = machine(), machine()
    store(one)
    until(lambda: records(other))
    tokens, little = np.array([*PATH, 99], np.int32), Costs(prefill_seconds=1e-5)
    server.pause()
    assert other.plan(tokens, view([]), (), little).cached == 0
    server.resume()
    link = other.remote.store.records._link  # type: ignore[union-attr,attr-defined]
    until(lambda: link._reading is None)  # what was given up
    assert plan(other, [*PATH, 99]).cached == len(PATH)
    assert not caplog.records


def test_a_server_that_comes_back_empty_is_known_to_be(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one = machine()
    store(one)
    until(lambda: records(one) == 1)
    server.client().flushall()
    until(lambda: records(one) == 0)
    store(one, list(range(200, 240)))
    until(lambda: records(machine()) == 1)


def test_what_is_forgotten_is_gone_from_the_server(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one, other = machine(), machine()
    store(one)
    store(one, [7, *PATH])
    until(lambda: records(other) == 2)
    other.forget(PATH)
    until(lambda: len(server.client().keys(f"{PREFIX}:record:*")) == 1)
    one.clear()
    until(lambda: not server.client().keys(f"{PREFIX}:record:*"))
    until(lambda: records(other) == 0)


def test_the_budget_of_the_server_is_kept(machine: Callable[..., PromptCache], server: RedisServer) -> None:
    one = machine(remote_bytes=20_000)
    for first in range(8):
        store(one, [first, *PATH])
    assert one.stats().extra["remote_bytes"] <= 20_000
    assert one.stats().extra["remote_evicted"] >= 4
    client = server.client()
    until(lambda: sum(client.strlen(k) for k in client.keys(f"{PREFIX}:record:*")) <= 20_000)


def test_a_record_under_another_s_name_is_refused(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one, other = machine(), machine()
    store(one)
    store(one, [7, *PATH])
    until(lambda: records(other) == 2)
    first, second = server.client().keys(f"{PREFIX}:record:*")
    server.client().copy(first, second, replace=True)
    cached = {plan(other, [*PATH, 99]).cached, plan(other, [7, *PATH, 99]).cached}
    assert cached <= {0, len(PATH), len(PATH) + 1}
    assert 0 in cached


def test_garbage_on_the_server_stops_nothing(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    client = server.client()
    name = f"{'a' * 32}-state-5-5"
    client.set(record(name), b"nonsense")
    client.sadd(f"{PREFIX}:shard:a", name, b"\xff\xfe", "../../etc")
    client.hincrby(f"{PREFIX}:changes", "a", 1)
    one = machine()
    store(one)
    other = machine()
    until(lambda: plan(other, [*PATH, 99]).cached == len(PATH))


def test_an_address_that_means_nothing_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="URL"):
        PromptCache(ram_bytes=1 << 20, remote="what://is/this")


def test_it_pickles_with_its_address(server: RedisServer) -> None:
    cache = pickle.loads(pickle.dumps(PromptCache(ram_bytes=1 << 20, remote=server.url, remote_bytes=123)))
    assert cache.remote.store.limit == 123
