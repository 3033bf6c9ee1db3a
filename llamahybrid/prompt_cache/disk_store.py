"""A folder and its index under one lock: always agreeing, or read again.

A change of the index that an exception or an interrupt ends half-way leaves it in doubt, and the next call
reads the folder again (`guard`). An error that may pass (too many open files, a network disk that is away)
never removes anything: only that a file is not there says that it is gone, only reading twice that it is
damaged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.base import Outside, Range, Tokens
from llamahybrid.prompt_cache.disk import DiskCounts, RecordStore, lies_in
from llamahybrid.prompt_cache.disk_folder import SHARDS
from llamahybrid.prompt_cache.disk_index import DiskIndex, Offer
from llamahybrid.prompt_cache.guard import Guard, guarded, no, nothing, zero
from llamahybrid.prompt_cache.lateness import ReadLate
from llamahybrid.prompt_cache.nodes import ids_of
from llamahybrid.prompt_cache.records import Head, Record, read_ids
from llamahybrid.prompt_cache.refusals import MOST_UNREADABLE, Backoff, RefusedRecords, of_one

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.remote import RemoteRecords

Records: TypeAlias = "RecordStore | RemoteRecords"
"""Where records lie: in a folder, or on a server."""

Seen = TypeVar("Seen")

logger = logging.getLogger("llamahybrid")

TINY = 1e-3
"""Seconds: what is left of a time that is over."""

READ, WRITE = "reading from", "writing to"


class DiskStore:
    """Records in one place and their index, at most `limit` bytes, shared with other processes."""

    def __init__(self, place: str | os.PathLike[str] | Records, limit: int, name: Outside = "disk") -> None:
        """`place`: a folder, which is made if need be. `name`: what the user knows it as.

        Raises OSError when it cannot be used.
        """
        self.limit = limit
        self.name = name
        self.counts = DiskCounts()
        self.records: Records = RecordStore(place) if isinstance(place, str | os.PathLike) else place
        self._warned: set[str] = set()
        self._refused = RefusedRecords()
        self._backoffs = {READ: Backoff(), WRITE: Backoff()}
        self.guard = Guard()
        self._index = DiskIndex()
        self.records.sweep()
        self.refresh()

    def restart(self) -> None:
        """Whatever became of the index: it is read again."""
        self._index = DiskIndex()
        for shard in SHARDS:
            self.records.look_again(shard)
        self._refresh()

    # -- looking -----------------------------------------------------------------------------------

    @guarded(nothing)
    def refresh(self) -> None:
        """Take note of what was added and removed, by this process or another."""
        self._refresh()

    @guarded(nothing)
    def offer(
        self,
        namespace: str,
        tokens: Tokens,
        above: int,
        limit: int,
        missing: Sequence[Range],
        *,
        anywhere: bool = False,
    ) -> Offer | None:
        """See `DiskIndex.offer`; knows what other processes have added."""
        self._refresh()
        if not self._backoffs[READ].over():
            return None
        offer = self._index.offer_attention if anywhere else self._index.offer
        return offer(namespace, tokens, above, limit, missing)

    @guarded(lambda *_: (0, []), changes=False)
    def known(self, namespace: str, tokens: Tokens) -> tuple[int, list[int]]:
        """See `DiskIndex.known`."""
        return self._index.known(namespace, tokens)

    @guarded(lambda _, namespace, path: [(0, len(path))], changes=False)
    def uncovered(self, namespace: str, path: Tokens) -> list[Range]:
        """See `DiskIndex.uncovered`."""
        return self._index.uncovered(namespace, path)

    @guarded(zero, changes=False)
    def base_of(self, namespace: str, path: Tokens) -> int:
        """See `DiskIndex.base_of`."""
        return self._index.base_of(namespace, path)

    @guarded(lambda _, namespace, path, points, **__: list(points))
    def lacks(
        self, namespace: str, path: Tokens, points: Sequence[tuple[int, bool]], *, attention: bool
    ) -> list[tuple[int, bool]]:
        """Which restore points of a path (position, with logits) are not here; see `DiskIndex.serves`."""
        self._refresh()
        return [
            (end, logits)
            for end, logits in points
            if not self._index.serves(namespace, path[:end], logits=logits, attention=attention)
        ]

    @guarded(no, changes=False)
    def has(self, key: str) -> bool:
        """A record of this key is known."""
        return key in self._index

    @guarded(nothing, changes=False)
    def look(self, see: Callable[[DiskIndex], Seen]) -> Seen | None:
        """What is seen of the index as it was read last, which leaves it as it is; None from inside."""
        return see(self._index)

    def load(self, key: str, within: float | None = None) -> Record | None:
        """Read and check a record; None, with a record that is damaged removed, if that fails.

        `within`: seconds that it may take, where that can be told. Raises ReadLate when they are over.
        """
        began = time.monotonic()
        try:
            try:
                record = self.records.load(key, within)
            except RecordGone:
                raise
            except RecordError:
                left = within and max(within - (time.monotonic() - began), TINY)
                record = self.records.load(key, left)  # once more: it may have been written right
            self._backoffs[READ].worked()
            return record
        except RecordError as error:
            self.damaged(key, error)
        except ReadLate:
            raise
        except (OSError, MemoryError) as error:
            if of_one(error):
                self._leave_alone(key, error)
            else:
                self.refused(READ, error)
        return None

    def may_write_in(self) -> float:
        """Seconds until the disk, which refused just now, may be tried again; 0: it did not."""
        return self._backoffs[WRITE].left()

    def _counted(self) -> dict[str, int]:
        """Records, bytes and counts."""
        counts = {f"{self.name}_{name}": value for name, value in vars(self.counts).items()}
        return {f"{self.name}_records": len(self._index), f"{self.name}_bytes": self._index.nbytes, **counts}

    stats = guarded(_counted, changes=False)(_counted)  # from inside, too: a signal handler may ask

    # -- changing ----------------------------------------------------------------------------------

    @guarded(no)
    def commit(
        self, part: str, head: Head, path: Tokens, wanted: Callable[[], bool], part_of: str = ""
    ) -> bool:
        """What was prepared becomes a record, if it is `wanted` at this very moment; False if it is not.

        `part_of`: a record that it was cut from; without that one it is not wanted, either.
        """
        if not wanted() or (part_of and part_of not in self._index):
            return False
        self.records.commit(part, head.key)
        self._refused.replaced(head.key)
        if head.key not in self._index:
            self._index.add(head, ids_of(path), 0)
        if head.is_snapshot:  # the one with logits says what the one without does
            for key in self._index.at(head.namespace, path):
                if key != head.key:
                    self._erase(key)
        self.counts.written += 1
        self.counts.written_bytes += head.nbytes
        self.counts.failed = 0
        self._backoffs[WRITE].worked()
        return True

    @guarded(no)
    def make_room(self, n_bytes: int, namespace: str, path: Tokens, pinned: Sequence[Tokens]) -> bool:
        """Evict records until one of this path fits, but none on `pinned` paths; False if that cannot be.

        Nothing goes where it would not be enough.
        """
        if self._over(n_bytes) <= 0:
            return True
        self._retry()
        spared = [(namespace, path), *((None, p) for p in pinned)]
        if self._over(n_bytes) > self._index.evictable(spared):
            return False
        while self._over(n_bytes) > 0:
            record = self._index.victim(spared)
            if record is None or not self._erase(record.key):
                return False
            self.counts.evicted += 1
        return True

    @guarded(nothing, later=True)
    def discard(self, namespace: str, tokens: Tokens) -> None:
        """Remove the checkpoint at the end of these tokens: it did not prove right."""
        keys = self._index.at(namespace, tokens)
        self.counts.damaged += len(keys)
        self._erase_all(keys)

    @guarded(no, later=True)
    def remove_path(self, tokens: Tokens, stays: int = 0) -> bool:
        """Remove every record of a path and of all that goes on from it; False if not all could be.

        What ends within its first `stays` tokens stays.
        """
        fresh = self._refresh(anyway=True)
        erased = self._erase_all(self._index.on_path(tokens, stays))
        return self._retry() and erased and fresh and not self._refused.any_unreadable()

    @guarded(no, later=True)
    def clear(self) -> bool:
        """Remove every record, whatever can be read of it; False if not all could be."""
        whole = self._refresh(anyway=True)
        for shard in SHARDS:
            try:
                there = {key for key in self.records.listed(shard) if lies_in(key, shard)}
            except OSError:
                there, whole = set(), False
            whole &= self._erase_all([*there.union(self._index.keys(shard))])
        return whole

    @guarded(nothing, later=True)
    def damaged(self, key: str, error: Exception) -> None:
        """A record is not what it should be: it goes. Or it is not there, and not known any more."""
        self._damaged(key, error)

    @guarded(nothing, later=True)
    def misplaced(self, key: str) -> None:
        """A sound record is not what the index took it for: it is left alone from now on."""
        self._index.remove(key)
        self._refused.misplaced.add(key)

    @guarded(nothing, later=True)
    def _leave_alone(self, key: str, error: BaseException) -> None:
        """A record cannot be read: it is not known for a while."""
        self._index.remove(key)
        self._unreadable(key, error)

    def refused(self, what: str, error: BaseException) -> None:
        """The disk refused: say so once, and leave it alone for a while."""
        self.counts.errors += 1
        self._backoffs[what].failed()
        if what == WRITE:
            self.counts.failed = 1
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s the %s cache failed, and is tried again later: %s", what, self.name, error)

    # -- with the lock held ------------------------------------------------------------------------

    def _refresh(self, *, anyway: bool = False) -> bool:
        """Read what changed; False if that cannot be told. `anyway`: if the disk refused just now, too."""
        if not anyway and not self._backoffs[READ].over():
            return False
        try:
            fresh: list[str] = []
            for name in self._refused.due():
                self.records.look_again(name[0])
            for shard in self.records.changed():
                there, known = self._listed(shard), self._index.keys(shard)
                for key in [key for key in known if key not in there]:
                    self._index.remove(key)
                    self.counts.gone += 1
                new = [key for key in there if key not in self._index and key not in self._refused]
                fresh += [key for key in new if lies_in(key, shard)]
            if fresh:
                self._take_in(fresh)
        except (OSError, MemoryError) as error:
            for shard in SHARDS:
                self.records.look_again(shard)
            self.refused(READ, error)
            return False
        return True

    def _listed(self, shard: str) -> set[str]:
        """What lies in a shard; nothing where it alone cannot be read. Raises OSError."""
        try:
            there = self.records.listed(shard)
        except OSError as error:
            if not of_one(error):
                raise
            self._unreadable(shard, error)
            return set()
        self._refused.seen(shard, there)
        return there

    def _take_in(self, keys: Iterable[str]) -> None:
        """Take note of records, those with the shorter prefixes first: others are read from there on."""
        used: dict[str, float] = {}
        unreadable = 0
        for key in sorted(sorted(keys), key=_end):
            try:
                try:
                    used[key] = self._note(key)
                except RecordGone:
                    raise
                except RecordError:
                    used[key] = self._note(key)
            except RecordGone:
                continue
            except RecordError as error:
                self._damaged(key, error)
            except OSError as error:
                unreadable += 1
                if not of_one(error):
                    raise
                self._unreadable(key, error)
                if unreadable == MOST_UNREADABLE:
                    raise
        self._index.in_order_of_use(used)

    def _note(self, key: str) -> float:
        """Read a record's head and take note of it; when it was used last."""
        with self.records.opened(key) as (file, head, used):
            base = head.base if self._index.knows(head) else 0
            self._index.add(head, read_ids(file, head, base), base)
        return used

    def _damaged(self, key: str, error: Exception) -> None:
        gone = isinstance(error, RecordGone)
        if not gone:
            logger.warning("a record of the %s cache is dropped: %s", self.name, error)
        self.counts.gone += gone
        self.counts.damaged += not gone
        if gone:  # another process may be writing it anew
            self._index.remove(key)
        else:
            self._erase(key)

    def _erase_all(self, keys: list[str]) -> bool:
        return all([self._erase(key) for key in keys])

    def _erase(self, key: str) -> bool:
        """A record goes, from the index and from the folder; False if it stays in the folder."""
        n_bytes = self._index.size(key)
        self._index.remove(key)
        try:
            self.records.delete(key)
        except OSError as error:
            self._refused.stuck[key] = n_bytes or self._refused.stuck.get(key, 0)
            self.refused(WRITE, error)
            return False
        self._refused.replaced(key)
        return True

    def _retry(self) -> bool:
        """Remove what could not be removed before; whether nothing of it is left."""
        for key in list(self._refused.stuck):
            with suppress(OSError):
                self.records.delete(key)
                self._refused.replaced(key)
        return not self._refused.stuck

    def _over(self, n_bytes: int) -> int:
        """Bytes beyond the limit, if there were so many more."""
        return self._index.nbytes + self._refused.nbytes + n_bytes - self.limit

    def _unreadable(self, name: str, error: BaseException) -> None:
        """One record or shard is left alone for a while; said once."""
        if self._refused.unreadable(name):
            self.counts.errors += 1
            logger.warning("a part of the %s cache cannot be read, and is left out: %s", self.name, error)


def _end(key: str) -> int:
    """Tokens of a record's prefix."""
    return int(key.rpartition("-")[2])
