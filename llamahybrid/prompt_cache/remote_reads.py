"""What lies on a Redis or Valkey server, as it says when it is asked; `remote_link` says what lies where.

Whoever else uses that server may have put a key of another type where one of ours belongs. It is left alone
and counted, all others are of use as before, and the first one is named in a warning.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from llamahybrid.prompt_cache.disk_folder import SHARDS
from llamahybrid.prompt_cache.records import HEAD_BYTES, KEY, head_of
from llamahybrid.prompt_cache.remote_changes import PREFIX, listed, record

logger = logging.getLogger("llamahybrid")

TIMEOUT_SECONDS = 5.0
"""Of one command; a record of 150 MiB takes 1.3 s on a link of 1 Gbit/s."""

HEADS = 256
"""Records whose heads are asked for at once."""


@dataclass(frozen=True)
class Noted:
    """What is known of a record that was not read."""

    nbytes: int
    start: bytes
    """Its head and its ids."""


class Server:
    """What is asked of one server, on the polling thread; redis.RedisError where it does not answer."""

    def __init__(self, url: str) -> None:
        """`url`: as redis-py takes it, "redis://host:6379/0". Raises ValueError for what is none."""
        pool = {"socket_timeout": TIMEOUT_SECONDS, "socket_connect_timeout": TIMEOUT_SECONDS}
        # A command that took too long is not sent again: who asked has given up.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self.client: Any = redis.Redis.from_url(url, **pool, health_check_interval=15, retry=retry)
        self.answered = 0.0
        """When it did so last, `time.monotonic`."""
        self.misfits: set[str] = set()
        """Keys that were found to be of another type than ours."""

    def changes(self) -> tuple[bytes | None, Sequence[bytes | None]]:
        """The data's name, and a counter for each shard; a server that is full tells, too."""
        names = f"{PREFIX}:epoch", f"{PREFIX}:changes"
        for _ in range(2):
            epoch, counters = self._ask([("get", names[0]), ("hmget", names[1], list(SHARDS))])
            if epoch is not None:
                break
            with suppress(redis.ResponseError):
                self.client.set(names[0], secrets.token_hex(8), nx=True)
        return epoch, [None] * len(SHARDS) if counters is None else counters

    def listed(self, shard: str) -> set[str] | None:
        """What may be keys in a shard; None where no shard of ours can be told."""
        (members,) = self._ask([("smembers", f"{PREFIX}:shard:{shard}")])
        return None if members is None else {_text(key) for key in members}

    def heads(self, keys: Sequence[str]) -> dict[str, Noted]:
        """Heads and ids of those that are there; what is no record is left out."""
        noted: dict[str, Noted] = {}
        for at in range(0, len(keys), HEADS):
            noted.update(self._heads(keys[at : at + HEADS]))
        return noted

    def _heads(self, keys: Sequence[str]) -> dict[str, Noted]:
        sizes = self._ask([("strlen", record(key)) for key in keys])
        heads = self._ask([("getrange", record(key), 0, HEAD_BYTES - 1) for key in keys])
        ends: dict[str, int] = {}
        for key, head in zip(keys, heads, strict=True):
            with suppress(ValueError):  # RecordError is one
                ends[key] = HEAD_BYTES + 4 * head_of(head or b"").end
        starts = self._ask([("getrange", record(key), 0, end - 1) for key, end in ends.items()])
        size = dict(zip(keys, sizes, strict=True))
        self._bury([key for key in keys if size[key] == 0 and KEY.fullmatch(key)])
        found = zip(ends, starts, strict=True)  # one that goes meanwhile is cut short
        return {
            key: Noted(size[key], start)
            for key, start in found
            if size[key] and start is not None and len(start) == ends[key]
        }

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to commands (name, key, arguments); None from a key of another type than ours."""
        pipe = self.client.pipeline(transaction=False)
        for command, *arguments in commands:
            getattr(pipe, command)(*arguments)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        for at, (answer, command) in enumerate(zip(answers, commands, strict=True)):
            if isinstance(answer, redis.RedisError):
                if not is_misfit(answer):
                    raise answer
                self._leave_alone(command[1])
                answers[at] = None
        self.answered = time.monotonic()  # there may be many
        return answers

    def _leave_alone(self, name: str) -> None:
        if not self.misfits:
            logger.warning(
                "the remote cache leaves %r alone, which is of another type than ours: delete it there", name
            )
        self.misfits.add(name)

    def _bury(self, keys: Iterable[str]) -> None:
        """Records that the server has evicted itself: nobody is to ask for them for ever."""
        if not (keys := list(keys)):
            return
        with self.client.pipeline() as pipe, suppress(redis.WatchError, redis.ResponseError):
            pipe.watch(*map(record, keys))  # another machine may be storing one
            gone = [key for key in keys if not pipe.exists(record(key))]
            pipe.multi()
            for key in gone:
                listed(pipe, "srem", key)
            pipe.execute()


def is_misfit(error: BaseException | None) -> bool:
    """A key is of another type than the command takes."""
    return isinstance(error, redis.ResponseError) and "WRONGTYPE" in str(error)


def _text(key: bytes | str) -> str:
    return key.decode("ascii", "replace") if isinstance(key, bytes) else key
