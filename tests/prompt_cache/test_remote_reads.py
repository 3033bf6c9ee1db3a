"""What a server is asked: a key of another type than ours is left alone, and nothing else is lost by it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import redis

from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.disk_folder import SHARDS
from llamahybrid.prompt_cache.remote_changes import PREFIX, record
from llamahybrid.prompt_cache.remote_reads import Server
from tests.lab.redis_server import PROGRAM, RedisServer
from tests.prompt_cache.test_remote import PATH, plan, records, store, until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")

KEY = f"{'a' * 32}-state-5-5"
CHANGES = f"{PREFIX}:changes"


def shard_of(letter: str) -> str:
    return f"{PREFIX}:shard:{letter}"


def letters(client: redis.Redis) -> list[str]:
    """Shards in which anything lies."""
    return [letter for letter in SHARDS if client.exists(shard_of(letter))]


def list_as_record(client: redis.Redis) -> str:
    client.lpush(record(KEY), "x")
    client.sadd(shard_of("a"), KEY)
    client.hincrby(CHANGES, "a", 1)
    return record(KEY)


def text_as_shard(client: redis.Redis) -> str:
    name = shard_of(next(letter for letter in SHARDS if letter not in letters(client)))
    client.set(name, "text")
    return name


def text_as_changes(client: redis.Redis) -> str:
    client.delete(CHANGES)
    client.set(CHANGES, "text")
    return CHANGES


def list_as_epoch(client: redis.Redis) -> str:
    client.delete(f"{PREFIX}:epoch")
    client.lpush(f"{PREFIX}:epoch", "x")
    return f"{PREFIX}:epoch"


@pytest.mark.parametrize("put", [list_as_record, text_as_shard, text_as_changes, list_as_epoch])
def test_a_key_of_another_type_costs_nothing_else(
    machine: Callable[..., PromptCache],
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    put: Callable[[redis.Redis], str],
) -> None:
    one = machine()
    paths = [[first, *PATH] for first in range(6)]
    for path in paths:
        store(one, path)
    name = put(server.client())
    with caplog.at_level(logging.WARNING):
        other = machine()
        until(lambda: records(other) == len(paths))
        assert [plan(other, [*path, 99]).cached for path in paths] == [len(path) for path in paths]
        assert other.remote is not None
        assert other.remote.store.records.catch_up(10)  # it is asked again, and nothing more is said
    (warning,) = caplog.messages
    assert name in warning
    assert other.stats().extra["remote_errors"] == 1
    assert server.client().exists(name), "it is not ours to remove"


def test_a_shard_that_was_put_right_is_known_again(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one, client = machine(), server.client()
    store(one)
    (letter,) = letters(client)
    client.rename(shard_of(letter), "aside")
    client.set(shard_of(letter), "text")
    other = machine()
    assert records(other) == 0
    client.rename("aside", shard_of(letter))
    until(lambda: records(other) == 1)
    assert plan(other, [*PATH, 99]).cached == len(PATH)


def test_a_shard_that_went_wrong_has_no_records_until_it_is_put_right(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one, client = machine(), server.client()
    store(one)
    (letter,) = letters(client)
    client.rename(shard_of(letter), "aside")
    client.set(shard_of(letter), "text")
    client.hincrby(CHANGES, letter, 1)
    until(lambda: records(one) == 0)
    client.rename("aside", shard_of(letter))
    until(lambda: records(one) == 1)


def test_a_record_that_became_another_type_is_damaged_and_keeps_nobody_from_reading(
    machine: Callable[..., PromptCache], server: RedisServer
) -> None:
    one, other, client = machine(), machine(), server.client()
    for path in (PATH, [7, *PATH]):
        store(one, path)
    until(lambda: records(other) == 2)
    name = next(k for k in client.keys(f"{PREFIX}:record:*") if b"-41-" in k)
    client.delete(name)
    client.lpush(name, "x")
    assert plan(other, [7, *PATH, 99]).cached == 0
    assert plan(other, [*PATH, 99]).cached == len(PATH), "reading is not put off"
    extra = other.stats().extra
    assert (extra["remote_damaged"], extra["remote_errors"]) == (1, 0)


def test_what_the_server_refuses_otherwise_is_an_error(server: RedisServer) -> None:
    asked = Server(server.url)
    server.client().execute_command("ACL", "SETUSER", "default", "-hmget")
    with pytest.raises(redis.ResponseError, match="permission"):
        asked.changes()
    assert not asked.misfits
