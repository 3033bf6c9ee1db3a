"""Changes on a Redis or Valkey server, each to be run with a client; `remote_link` says what lies where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llamahybrid.prompt_cache.envelope import VERSION

try:
    import redis
except ImportError as error:  # pragma: no cover
    raise ImportError("a remote cache needs redis: pip install 'llamahybrid[remote]'") from error

PREFIX = f"llamahybrid-{VERSION}"


def record(key: str) -> str:
    """Where a record lies."""
    return f"{PREFIX}:record:{key}"


def publish(part: str, key: str) -> Callable[[Any], None]:
    """What was uploaded is the record of this key from then on."""

    def change(client: Any) -> None:
        pipe = client.pipeline()
        pipe.rename(part, record(key))
        pipe.persist(record(key))
        listed(pipe, "sadd", key)
        try:
            pipe.execute()
        except redis.ResponseError:  # it took too long, and went by itself
            withdraw(key)(client)
            raise

    return change


def withdraw(key: str) -> Callable[[Any], None]:
    """Remove a record."""

    def change(client: Any) -> None:
        pipe = client.pipeline()
        pipe.delete(record(key))
        listed(pipe, "srem", key)
        try:
            pipe.execute()
        except redis.ResponseError:  # a full server begins no transaction, but lets things go
            client.delete(record(key))
            client.srem(f"{PREFIX}:shard:{key[0]}", key)
            with suppress(redis.ResponseError):
                client.hincrby(f"{PREFIX}:changes", key[0], 1)

    return change


def discard(part: str) -> Callable[[Any], None]:
    """Remove what was uploaded."""

    def change(client: Any) -> None:
        client.delete(part)

    return change


def listed(pipe: Any, command: str, key: str) -> None:
    """A shard's set has a key more ("sadd") or less ("srem"), and others are told."""
    getattr(pipe, command)(f"{PREFIX}:shard:{key[0]}", key)
    pipe.hincrby(f"{PREFIX}:changes", key[0], 1)
