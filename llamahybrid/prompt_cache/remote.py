"""Records on a Redis or Valkey server, for whoever shares it: the disk tier's records, its index, its checks.

A record whose file would be damaged is damaged here, too; whoever may write to that server is trusted as the
owner of a folder is. Nothing here waits for the server but `load`, and that for as long as it is told.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.disk import lies_in, named
from llamahybrid.prompt_cache.disk_folder import SHARDS
from llamahybrid.prompt_cache.records import Head, Record, read_head, read_record
from llamahybrid.prompt_cache.remote_changes import discard, publish, withdraw
from llamahybrid.prompt_cache.remote_link import Link, News
from llamahybrid.prompt_cache.remote_reads import Noted

UNKNOWN_SECONDS = 0.25
"""What a read may take where costs are not measured yet."""

MOST_SECONDS = 30.0
MOST_BYTES = 512 << 20
"""A server takes no longer value."""

FIRST_SECONDS = 2.0
"""How long a new cache waits for what is there already."""


class RemoteRecords:
    """The records on a server, by key: what `disk.RecordStore` is for a folder."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that means nothing; a server that is away may come later."""
        self._link = Link(url)
        weakref.finalize(self, self._link.close).atexit = False  # what is written then is to be sent, too
        self._shards: dict[str, set[str]] = {shard: set() for shard in SHARDS}
        self._dirty: set[str] = set(SHARDS)
        self._noted: dict[str, Noted] = {}  # records that `opened` was not asked for yet
        self._own: dict[str, tuple[int, bool]] = {}  # what we changed and were not told of: number, it comes
        self._refused = 0
        self._link.wait(FIRST_SECONDS)

    @property
    def misfits(self) -> int:
        """Keys on the server that are of another type than ours, and left alone."""
        return len(self._link.server.misfits)

    def changed(self) -> Iterator[str]:
        """See `RecordStore.changed`."""
        self._link.check()
        for shard in SHARDS:
            if (news := self._link.news.pop(shard, None)) is not None:
                self._take_in(shard, news)
        dirty, self._dirty = self._dirty, set()
        yield from dirty

    def _take_in(self, shard: str, news: News) -> None:
        """What a shard is now: as we were told, but for what we changed since."""
        there = set(news.listed)
        for key, (number, comes) in list(self._own.items()):
            if key[0] != shard:
                continue
            if number <= news.sent:
                del self._own[key]
            else:
                (there.add if comes else there.discard)(key)
        for key in self._shards[shard] - there:
            self._noted.pop(key, None)
        self._noted.update((key, noted) for key, noted in news.noted.items() if key in there)
        self._shards[shard] = there
        self._dirty.add(shard)

    def look_again(self, shard: str) -> None:
        """See `RecordStore.look_again`."""
        self._dirty.add(shard)
        self._link.ask(shard)  # what we were told may be lost

    def listed(self, shard: str) -> set[str]:
        """See `RecordStore.listed`."""
        return set(self._shards[shard])

    @contextmanager
    def opened(self, key: str) -> Iterator[tuple[BinaryIO, Head, float]]:
        """See `RecordStore.opened`; a record's head and ids were read when it was noticed.

        One whose head was forgotten since is asked for again, and is gone until then.
        """
        noted = self._noted.get(key)
        if noted is None:
            self._link.ask(key)
            raise RecordGone("the remote cache is asked again what a record is")
        file = io.BytesIO(noted.start)
        yield file, named(key, read_head(file, noted.nbytes)), 0.0
        self._noted.pop(key, None)  # the index has it now

    def load(self, key: str, within: float | None = None) -> Record:
        """A whole record, checked. Raises as `RecordStore.load`; OSError, too, where it takes too long.

        `within`: seconds that it may take; None or 0: nobody knows what it saves.
        """
        seconds = min(within or UNKNOWN_SECONDS, MOST_SECONDS)
        raw = self._link.read(key, seconds)
        if raw is None:
            raise RecordGone("the record is gone")
        record = read_record(io.BytesIO(raw), len(raw))
        named(key, record.head)
        return record

    def takes(self, n_bytes: int) -> bool:
        """See `RecordStore.takes`."""
        self._link.check()
        return n_bytes <= MOST_BYTES

    def prepare(self, key: str, parts: Sequence[bytes | memoryview]) -> str:
        """See `RecordStore.prepare`."""
        if not lies_in(key, key[:1]):
            raise RecordError("not a key of a record")
        self._link.check()
        return self._link.upload(parts)

    def commit(self, part: str, key: str) -> None:
        """What was prepared will be the record of this key, for everybody, soon."""
        self._shards[key[0]].add(key)
        self._own[key] = self._link.later(publish(part, key), key, comes=True), True

    def abandon(self, part: str) -> None:
        """See `RecordStore.abandon`."""
        self._link.later(discard(part))

    def delete(self, key: str) -> None:
        """Remove a record, soon."""
        self._shards[key[0]].discard(key)
        self._noted.pop(key, None)
        self._own[key] = self._link.later(withdraw(key), key), False

    def sweep(self) -> int:
        """Parts that nobody finished go by themselves."""
        return 0

    def catch_up(self, seconds: float) -> bool:
        """See `RecordStore.catch_up`."""
        return self._link.wait(seconds)

    def settle(self, seconds: float) -> bool:
        """Wait until what was committed and deleted is so for everybody, at most so long; whether it is."""
        sent = self._link.settle(seconds)
        before, self._refused = self._refused, self._link.refused
        return sent and before == self._refused
