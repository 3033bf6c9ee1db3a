"""The disk behind the RAM tier: what of it could serve a prompt, and what is written to it, later.

Where a restore point on disk serves a prompt better than RAM does, its records are read, checked, and taken
into the RAM tier; everything else then happens there. What the disk refuses is never an error of a request.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from llamahybrid.errors import RecordError, RecordGone
from llamahybrid.prompt_cache.base import Bytes, Checkpoint, Logits, Segment, Splitter, Tokens, part_of
from llamahybrid.prompt_cache.disk import DISK_ERRORS, RecordStore
from llamahybrid.prompt_cache.disk_index import DiskIndex, Offer, Range
from llamahybrid.prompt_cache.nodes import Entry
from llamahybrid.prompt_cache.records import SEGMENT, SNAPSHOT, Head, key_of, pack
from llamahybrid.prompt_cache.write_behind import WriteBehind

logger = logging.getLogger("llamahybrid")

READ_SAMPLES = 15
"""Recent reads that say what reading costs."""

INDEX_GROWTH = 16 << 10
"""Bytes by which the index may grow for one record."""

LARGE_READ = 1 << 20
"""Bytes from which a read tells the bandwidth."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """What an offer gave: checked, in memory."""

    snapshot: Bytes
    logits: Logits | None
    segments: tuple[Segment, ...]
    """Ascending."""


class Job(NamedTuple):
    """A place of the RAM tier that is to be written, if there is still something then."""

    namespace: str
    path: Tokens
    kind: int
    start: int
    end: int


class Upstairs(Protocol):
    """The RAM tier, as its disk tier needs it; from any thread."""

    def held(self, namespace: str, path: Tokens) -> AbstractContextManager[Checkpoint | None]:
        """The checkpoint at the end of a path; its bytes stay as they are in this context."""

    def attention(self, namespace: str, path: Tokens, start: int, end: int) -> list[Segment]:
        """The segments of [start, end) of a path, as they are cut now."""


@dataclass
class DiskCounts:
    """What happened between this process and the folder."""

    written: int = 0
    loaded: int = 0
    damaged: int = 0
    """Records that did not prove right; they are removed."""
    gone: int = 0
    """Records that another process has removed."""
    dropped: int = 0
    """Evicted from RAM before they could be written."""
    evicted: int = 0
    failed: int = 0
    """1: the disk refused, and nothing is written any more."""


class DiskTier:
    """Records of one folder, at most `limit` bytes, shared with other processes."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit: int,
        upstairs: Upstairs,
    ) -> None:
        """Open a folder, making it if need be. Raises `DISK_ERRORS` when it cannot be used."""
        self.limit = limit
        self.counts = DiskCounts()
        self.pinned: Sequence[Tokens] = ()
        """Paths whose records are never evicted."""
        self._upstairs = upstairs
        self._store = RecordStore(folder)
        self._lock = threading.RLock()
        self._index = DiskIndex()
        self._queued: set[str] = set()
        self._writer = WriteBehind(self._write)
        self._latencies: deque[float] = deque(maxlen=READ_SAMPLES)
        self._rates: deque[float] = deque(maxlen=READ_SAMPLES)
        self._readable = True
        with self._lock:
            self._store.sweep()
            self._refresh()

    # -- reading -----------------------------------------------------------------------------------

    def offer(
        self, namespace: str, tokens: Tokens, above: int, limit: int, missing: Sequence[Range]
    ) -> Offer | None:
        """See `DiskIndex.offer`; knows what other processes have added."""
        with self._lock:
            self._refresh()
            return self._index.offer(namespace, tokens, above, limit, missing) if self._readable else None

    def known(self, namespace: str, tokens: Tokens) -> tuple[int, list[int]]:
        """See `DiskIndex.known`."""
        with self._lock:
            return self._index.known(namespace, tokens)

    def seconds(self, n_bytes: int) -> float:
        """What reading so many bytes takes, as measured; 0 while not measured."""
        latency = median(self._latencies) if self._latencies else 0.0
        return latency + (n_bytes * median(self._rates) if self._rates else 0.0)

    def _measured(self, n_bytes: int, seconds: float) -> None:
        """A read of so many bytes took so long; a small one says little of the bandwidth."""
        if n_bytes < LARGE_READ:
            self._latencies.append(seconds)
        else:
            self._rates.append(seconds / n_bytes)

    def load(self, offer: Offer, path: Tokens, split: Splitter | None) -> Loaded | None:
        """Read and check what an offer names on `path`; None, with what is damaged removed, if that fails."""
        started = time.perf_counter()
        records: dict[str, tuple[Head, Bytes]] = {}
        segments: list[Segment] = []
        for key in offer.keys:
            try:
                head, payload = records[key] = self._store.load(key)
                if key == offer.checkpoint.key and not np.array_equal(head.tokens, path):
                    raise RecordError("a record holds other tokens than it did")
                for wanted in (s for s in offer.segments if s.key == key):
                    end = min(wanted.end, len(path))
                    if not np.array_equal(head.tokens[:end], path[:end]):
                        raise RecordError("a record holds other tokens than it did")
                    whole = Segment(head.start, head.end, payload)
                    part = part_of(whole, head.tokens, wanted.start, end, split)
                    segments += [] if part is None else [part]
            except ValueError as error:
                self._damaged(key, error)
                return None
            except DISK_ERRORS as error:
                self._unreadable(error)
                return None
        self._measured(offer.nbytes, time.perf_counter() - started)
        self.counts.loaded += 1
        head, snapshot = records[offer.checkpoint.key]
        return Loaded(snapshot, head.logits, tuple(sorted(segments, key=lambda s: s.start)))

    # -- writing -----------------------------------------------------------------------------------

    def later(
        self, namespace: str, path: Tokens, entries: Iterable[Entry], segments: Iterable[Segment]
    ) -> None:
        """Queue what of a path is not on disk yet: places wait, no bytes.

        Attention comes first: a checkpoint on disk never waits for what it needs.
        """
        if self.counts.failed:
            return
        with self._lock:
            jobs = []
            for what in self._index.lacks(namespace, path, entries, segments):
                at = (
                    (SEGMENT, what.start, what.end)
                    if isinstance(what, Segment)
                    else (SNAPSHOT, what.position, what.position)
                )
                job = Job(namespace, path, *at)
                if (name := _name(job)) not in self._queued:
                    self._queued.add(name)
                    jobs.append(job)
        self._writer.add(jobs)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all that was queued is written, at most so long; False if it is not."""
        return self._writer.flush(seconds)

    def close(self) -> None:
        """Write what is queued and let go of the folder."""
        self.flush()
        self._store.close()

    # -- forgetting --------------------------------------------------------------------------------

    def forget(self, tokens: Tokens) -> None:
        """Remove every record of a path and of all that goes on from it."""
        with self._lock:
            self._refresh()
            self._index.remove_path(tokens)
            self._erase_dead()

    def discard(self, namespace: str, tokens: Tokens) -> None:
        """Remove the checkpoint at the end of these tokens: it did not prove right."""
        with self._lock:
            self.counts.damaged += self._index.remove_checkpoint(namespace, tokens)
            self._erase_dead()

    def clear(self) -> None:
        """Remove every record."""
        with self._lock:
            self._index = DiskIndex()
            try:
                self._index.dead += self._store.keys()
            except DISK_ERRORS as error:
                self._unreadable(error)
            self._erase_dead()

    def stats(self) -> dict[str, int]:
        """Records, bytes and counts, for `PromptCache.stats`."""
        with self._lock:
            try:
                size = self._store.nbytes
            except DISK_ERRORS:
                size = 0
            counts = {f"disk_{name}": value for name, value in vars(self.counts).items()}
            return {"disk_records": len(self._index), "disk_bytes": size, **counts}

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index is whole."""
        with self._lock:
            self._index.check_integrity()
            assert not self._index.dead, "a record is neither named nor erased"

    # -- what both need ----------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Take note of what was added, by this process or another; the longest unused first."""
        try:
            fresh = self._store.fresh() if self._readable else []
            found = [(key, head) for key in fresh if (head := self._head(key)) is not None]
        except DISK_ERRORS as error:
            self._unreadable(error)
            return
        for key, head in sorted(found, key=lambda one: one[1].used):
            self._index.add(key, head)
        self._erase_dead()

    def _head(self, key: str) -> Head | None:
        """A record that is not known yet, and sound as far as its head tells."""
        if key in self._index:
            return None
        try:
            return self._store.head(key)
        except RecordError as error:
            self._damaged(key, error)
            return None

    def _erase_dead(self) -> None:
        try:
            while self._index.dead:
                self._store.delete(self._index.dead[-1])
                self._index.dead.pop()
        except DISK_ERRORS as error:
            self._index.dead.clear()
            self._fail(error)

    def _damaged(self, key: str, error: Exception) -> None:
        """A record is not what it should be: it goes, from the folder and from the index."""
        gone = isinstance(error, RecordGone)
        if not gone:
            logger.warning("a record of the disk cache is dropped: %s", error)
        with self._lock:
            self.counts.gone += gone
            self.counts.damaged += not gone
            self._index.remove_record(key)
            self._erase_dead()

    def _fail(self, error: Exception) -> None:
        """The disk takes nothing more: say so once, and go on without writing."""
        if not self.counts.failed:
            logger.warning("nothing more is written to the disk cache: %s", error)
        self.counts.failed = 1

    def _unreadable(self, error: Exception) -> None:
        """The disk gives nothing more: go on without it."""
        self._readable = False
        self._fail(error)

    # -- the writer's thread -----------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        """Write what is at a place now; the RAM tier may have given it up meanwhile."""
        path = job.path[: job.end]
        try:
            if job.kind == SEGMENT:
                found = self._upstairs.attention(job.namespace, path, job.start, job.end)
                for s in found:
                    self._put(job.namespace, SEGMENT, s.start, path[: s.end], None, s.record)
                self.counts.dropped += not found
                return
            with self._upstairs.held(job.namespace, path) as state:
                if state is not None:
                    self._put(job.namespace, SNAPSHOT, job.end, path, state.logits, state.snapshot)
                self.counts.dropped += state is None
        except DISK_ERRORS as error:
            self._fail(error)
        finally:
            with self._lock:
                self._queued.discard(_name(job))

    def _put(
        self, namespace: str, kind: int, start: int, path: Tokens, logits: Logits | None, payload: Bytes
    ) -> None:
        """Write one record and take note of it, unless it adds nothing or does not fit."""
        has_row = logits is not None
        with self._lock:
            self._refresh()
            new = self._index.adds(namespace, kind, start, path, logits=has_row)
        if self.counts.failed or not new:
            return
        key = key_of(namespace, kind, start, path, logits=has_row)
        parts = pack(namespace, kind, start, path, logits, payload)
        if not self._room(sum(map(len, parts)), namespace, path):
            return
        self._store.write(key, parts)
        self.counts.written += 1
        with self._lock:
            self._refresh()

    def _room(self, n_bytes: int, namespace: str, path: Tokens) -> bool:
        """Make room for a record of this path; False if that cannot be."""
        with self._lock:
            spared = [(namespace, path), *((None, p) for p in self.pinned)]
            while self._store.nbytes + n_bytes + INDEX_GROWTH > self.limit:
                if not self._index.evict(spared):
                    return False
                self.counts.evicted += 1
                self._erase_dead()
            return True


def _name(job: Job) -> str:
    return key_of(job.namespace, job.kind, job.start, job.path[: job.end])
