"""Rows and records on a Redis or Valkey server, under the keys of a folder, for several machines.

Everybody who may write to that server is trusted as the owner of a folder is; damaged records are refused all
the same. The server's own `maxmemory` and `maxmemory-policy` (allkeys-lru) are the budget and the order of
eviction; keys unused for `KEEP_SECONDS` expire. A key of another type than ours is left alone. Commands are
those of Redis 4.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from llamahybrid.errors import RecordGone
from llamahybrid.prompt_cache.block_store import BATCH, Rows, Values
from llamahybrid.prompt_cache.blocks import FORMAT
from llamahybrid.prompt_cache.envelope import Record, read_record

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:  # pragma: no cover
    raise ImportError("a remote cache needs redis: pip install 'llamahybrid[remote]'") from error

PREFIX = f"llamahybrid-{FORMAT}:".encode()

TIMEOUT_SECONDS = 5.0
"""Of one command; a record of 150 MiB takes 1.3 s on a link of 1 Gbit/s."""

KEEP_SECONDS = 30 * 86400
MOST_BYTES = 512 << 20
"""A server takes no longer value."""


class RemoteRows(Rows):
    """The rows and records of one server (`Rows`)."""

    def __init__(self, url: str) -> None:
        """`url`: as redis-py takes it, "redis://host:6379/0". Raises ValueError for what is none; a server
        that is away may come later."""
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            health_check_interval=15,
            retry=retry,
        )

    # -- reading -----------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Rows.get`; a key of another type is missing."""
        if not keys:
            return []
        with _errors():
            values: list[bytes | None] = self._client.mget([PREFIX + key for key in keys])
            return values

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """See `Rows.sizes`; a key of another type is missing."""
        found = zip(keys, self._each("strlen", keys), strict=True)
        return {key: size for key, size in found if isinstance(size, int) and size}

    def read(self, key: bytes) -> Record:
        """See `Rows.read`."""
        (raw,) = self.get([key])
        if raw is None:
            raise RecordGone("the record is gone")
        return read_record(io.BytesIO(raw), len(raw))

    def keys(self, kind: bytes) -> Iterator[bytes]:
        """See `Rows.keys`; in no order, without those of another type."""
        with _errors():
            names = self._client.scan_iter(match=PREFIX + kind + b"*", count=BATCH)
            while some := [name[len(PREFIX) :] for name in islice(names, BATCH)]:
                types = self._each("type", some)
                yield from (key for key, type_ in zip(some, types, strict=True) if type_ == b"string")

    # -- changing ----------------------------------------------------------------------------------

    def update(self, keys: Sequence[bytes], change: Callable[[Values], Values]) -> None:
        """See `Rows.update`; repeated when another machine has changed one of the rows."""

        def changed(pipe: Any) -> None:
            rows: Values = dict(zip(keys, pipe.mget([PREFIX + key for key in keys]), strict=True))
            new = change(dict(rows))
            pipe.multi()
            for key, value in new.items():
                if value is None:
                    pipe.delete(PREFIX + key)
                elif value != rows.get(key):
                    pipe.set(PREFIX + key, value, ex=KEEP_SECONDS)

        with _errors():
            self._client.transaction(changed, *(PREFIX + key for key in keys))

    def write(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """See `Rows.write`."""
        with _errors():
            self._client.set(PREFIX + key, b"".join(parts), ex=KEEP_SECONDS)
            with suppress(redis.ResponseError):  # INFO is for operators: not every user of a server may ask
                self.nbytes = int(self._client.info("memory").get("used_memory", 0))

    def remove(self, key: bytes) -> None:
        """See `Rows.remove`."""
        with _errors():
            self._client.delete(PREFIX + key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `Rows.touch`."""
        self._each("expire", keys, KEEP_SECONDS)

    def make_room(self, n_bytes: int, limit: int) -> int | None:
        """The server lets go what it has no room for."""
        return 0 if n_bytes <= MOST_BYTES else None

    def clear(self) -> None:
        """Remove everything of ours."""
        keys = self.keys(b"")
        while some := list(islice(keys, BATCH)):
            with _errors():
                self._client.delete(*(PREFIX + key for key in some))

    def _each(self, command: str, keys: Sequence[bytes], *arguments: object) -> list[Any]:
        """A command's answers for each key; an error of one is its answer."""
        answers: list[Any] = []
        with _errors():
            for at in range(0, len(keys), BATCH):
                pipe = self._client.pipeline(transaction=False)
                for key in keys[at : at + BATCH]:
                    getattr(pipe, command)(PREFIX + key, *arguments)
                answers += pipe.execute(raise_on_error=False)
        return answers


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of redis-py into OSError."""
    try:
        yield
    except redis.RedisError as error:
        raise OSError(f"the remote cache: {error}") from error
