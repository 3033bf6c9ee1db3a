"""Delayed writes: positions wait, no bytes; the checkpoints that RAM has there at the time are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, TimeoutError
from dataclasses import dataclass, field, replace
from typing import Any

from llamahybrid.prompt_cache.base import NOTHING, Bytes, Logits, Range, Segment, Tokens, clipped
from llamahybrid.prompt_cache.blocks import Item, Seen, chain, digest_at, spans
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, pack, sealed
from llamahybrid.prompt_cache.nodes import common_prefix, ids_of
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.worker import Late, Worker
from llamahybrid.prompt_cache.write_policy import MOST_SECONDS, Point, WriteBudget


@dataclass(eq=False)
class Job:
    """Restore points of a live path that are to be written, with their attention, if they are there then."""

    namespace: str
    path: Tokens
    points: tuple[Point, ...]
    """The best first."""
    attention: bool
    """Their attention is stored apart, and is to be written, too."""
    due: float = 0.0
    """The earliest `time.monotonic` to write it."""
    since: float = 0.0
    """When something of this conversation began to wait."""
    seen: Seen = field(default_factory=Seen)
    """Records of its path outside RAM, as far as was looked and written since."""
    forgets: int = 0
    """`RamStore.forgets` when its writing began."""
    pinned: dict[bytes, int] | None = None
    """Bytes of records on pinned paths, which make no room; None: room was not needed."""

    def lies_on(self, path: Tokens) -> bool:
        """All its states belong to prefixes of this path."""
        return max((p.position for p in self.points), default=0) <= common_prefix(self.path, path)


class Writer:
    """Writes restore points to a tier, behind what happens; not every one, and not more than a budget."""

    def __init__(self, tier: Any, hourly: int, quiet_seconds: float) -> None:
        """`hourly`: bytes that may be written an hour."""
        self._tier = tier
        self._ram: RamStore = tier.ram
        self.budget = WriteBudget(hourly)
        self.quiet_seconds = quiet_seconds
        """See `write_policy`; 0: everything is written at once."""
        self.default_limit: Callable[[int], int] | None = None
        """Returns the tier's limit by the bytes of its records, for each job; None: it stays as it is."""
        self.closed = False
        """`Tier.close` was called, and nothing was queued since."""
        self._namespaces: dict[str, None] = {}
        self.worker = Worker(f"llamahybrid-{tier.name}-write", tier.rows.release, self._tick)
        self._begin()

    def _begin(self) -> None:
        self._jobs: list[Job] = []
        self._running: Job | None = None
        self._failures = 0
        """Jobs that were not written, each time."""
        self._lock = threading.RLock()  # a finaliser may come in again on the same thread

    def fork(self) -> None:
        """In a process that was forked: its parent writes what waits there."""
        self._begin()
        self.worker.fork()

    def __len__(self) -> int:
        """Jobs that are not done; without the lock, so that a signal handler may ask at any time."""
        return len(self._jobs) + (self._running is not None)

    def later(self, namespace: str, path: Tokens, points: Sequence[Point], *, attention: bool) -> None:
        """Queue restore points of a live path, the best first: places wait, no bytes.

        They supersede older jobs on this path. `path`: an array that nobody changes.
        """
        if not (self._tier.limit or self.default_limit) or not points:
            return
        self.closed, now = False, time.monotonic()
        with self._lock:
            mine = [job for job in self._jobs if job.namespace == namespace and job.lies_on(path)]
            since = min((job.since for job in mine), default=now)
            due = min(now + self.quiet_seconds, since + MOST_SECONDS)
            places = {point.position for point in points}
            self._tier.counts.superseded += len({p.position for job in mine for p in job.points} - places)
            new = Job(namespace, path, tuple(points), attention, due, since)
            self._jobs = [*(job for job in self._jobs if job not in mine), new]
        self.worker.wake()

    def flush(self, seconds: float) -> bool:
        """Write all that waits within `seconds`; False if a part of it is not written."""
        counts = self._tier.counts
        before = counts.deferred, self._failures
        with self._lock:
            for job in self._jobs:
                job.due = 0.0
        try:
            if len(self):
                self.worker.post(self._write_all).result(seconds)
        except (TimeoutError, CancelledError, Late):
            return False
        return before == (counts.deferred, self._failures)

    def clear(self) -> None:
        """Give up all that waits."""
        with self._lock:
            self._jobs = []

    # -- the writer's thread -----------------------------------------------------------------------

    def _tick(self) -> float | None:
        """See `Worker`: write a job that is due."""
        with self._lock:
            job = min(self._jobs, key=lambda job: job.due, default=None)
        if job is None:
            return None
        seconds = max(0.0, job.due - time.monotonic())
        if not seconds:
            self._do(job)
        return seconds

    def _write_all(self) -> None:
        for job in list(self._jobs):
            self._do(job)

    def _do(self, job: Job) -> None:
        """Write a job, unless it does not wait any more; it waits again where the store fails."""
        with self._lock:
            if job not in self._jobs:
                return
            self._running = job
            self._jobs = [other for other in self._jobs if other is not job]
        written = False
        try:
            written = self._write(job)
        finally:
            with self._lock:
                if not written:
                    self._failures += 1
                    job.due = time.monotonic() + self._tier.writing.left()
                    self._jobs = [*self._jobs, job]
                self._running = None

    def _write(self, job: Job) -> bool:
        tier = self._tier
        if tier.writing.left():  # it failed just now
            if not any(self._nbytes(job, point) for point in job.points):
                return True  # evicted, or forgotten
            tier.counts.errors += 1
            return False
        try:
            while not tier.opened(self._write_now, job):
                pass  # a path was forgotten: RAM is looked at anew
        except BaseException as error:  # the thread must go on
            tier.writing.failed(error)
            return False
        return True

    def _write_now(self, job: Job) -> bool:
        """Write the checkpoints of a job; RAM may have evicted them since. False: a path was forgotten."""
        tier, store, job.forgets = self._tier, self._tier.store, self._ram.forgets
        if self.default_limit is not None:  # the disk may have been full, or its index locked, at the start
            tier.limit = self.default_limit(tier.rows.nbytes)
        self._namespaces[job.namespace] = None
        job.pinned = None  # a pin may be new, where the job was tried before
        job.seen = store.look(job.namespace, job.path)
        ready = [point for point in job.points if self._is_ready(job, point)]
        if ready and not self.budget.open():
            tier.counts.deferred += 1
            ready.clear()
        for point in sorted(ready):  # the rows first: no record is there that `forget` does not find
            store.link(job.namespace, job.path[: point.position], point.why)
            attended = not job.attention or self._write_attention(job, point.position)
            if job.forgets != self._ram.forgets:
                return False
            if not attended:
                ready.remove(point)
                tier.counts.dropped += self.budget.open()
        for point in ready:
            path = job.path[: point.position]
            hash_ = digest_at(job.namespace, ids_of(path))
            state = self._ram.checkpoint_at(job.namespace, path)
            if state is None:
                tier.counts.dropped += 1
                continue
            empty = not state.snapshot.nbytes  # attention is all
            sealed_ = sealed(NOTHING, namespace=job.namespace, tokens=path) if empty else state.snapshot
            written = self._put(job, b"r" + hash_, (len(path), len(path)), sealed_, state.logits)
            if written and state.logits is not None:
                store.note_logits(hash_)
        if self.budget.hourly:
            store.used(job.namespace, job.path, store.look(job.namespace, job.path))
        return True

    def _is_ready(self, job: Job, point: Point) -> bool:
        """A state is not written yet, is still in RAM, and fits."""
        if job.seen.serves(point.position, logits=point.logits, attention=job.attention):
            return False
        nbytes = self._nbytes(job, point)
        self._tier.counts.dropped += not nbytes
        return 0 < nbytes <= int(self._tier.limit)

    def _nbytes(self, job: Job, point: Point) -> int:
        """Bytes of the record of a state, about; 0 where RAM has evicted it."""
        state = self._ram.checkpoint_at(job.namespace, job.path[: point.position])
        return 0 if state is None else state.snapshot.nbytes + HEADER_BYTES

    def _write_attention(self, job: Job, position: int) -> bool:
        """Write the attention before a position that is not there yet; False where it is not to be had."""
        path = chain(job.namespace, ids_of(job.path[:position]))[1:]
        keys = {span: b"a" + prefix.hash for span, prefix in zip(spans(position), path, strict=True)}
        there = self._tier.rows.sizes([*keys.values()])
        missing = dict.fromkeys(span for span, key in keys.items() if key not in there)
        for segment in self._attention(job, list(missing)):
            span = segment.start, segment.end
            forgotten = job.forgets != self._ram.forgets
            if forgotten or not self._put(job, keys[span], span, segment.record):
                return False
            del missing[span]
        return not missing

    def _attention(self, job: Job, missing: Sequence[Range]) -> Iterator[Segment]:
        """Yield attention of these ranges, as far as RAM has it, one after the other: each is a copy."""
        begun: list[Segment] = []
        ends = {end: start for start, end in missing}
        for segment in self._ram.attention(job.namespace, job.path, 0, len(job.path)):
            split, ranges = segment.split, clipped(missing, segment.end, segment.start)
            if split is None or not ranges:
                continue
            try:
                for part in split.parts(segment, job.path[: segment.end], ranges):
                    begun = [*begun, part] if begun and begun[-1].end == part.start else [part]
                    if part.end in ends:
                        whole, begun = begun, []
                        if ends[part.end] == whole[0].start:
                            yield part if len(whole) == 1 else split.join(whole, job.path[: part.end])
            except ValueError:
                begun = []

    def _put(self, job: Job, key: bytes, span: Range, state: Bytes, logits: Logits | None = None) -> bool:
        """Write one record of a path; False if it does not fit.

        `span`: of attention; of a checkpoint its end, twice.
        """
        tier = self._tier
        if not self.budget.open():
            tier.counts.deferred += 1
            return False
        parts = pack(state, logits, job.namespace, job.path[: span[1]])
        n_bytes = sum(map(len, parts))
        if not self._make_room(n_bytes, job):
            return False
        tier.rows.write(key, parts)
        self.budget.spend(n_bytes)
        tier.wrote(key, n_bytes)
        job.seen = replace(job.seen, items=(*job.seen.items, Item(key, *span, n_bytes)))
        return True

    def _make_room(self, n_bytes: int, job: Job) -> bool:
        """Let records go that were used longest ago until one more fits, but none on pinned paths, nor what
        this path needs; False if that cannot be. Nothing goes where it would not be enough."""
        tier, store = self._tier, self._tier.store
        held = tier.rows.measure()
        limit = min(tier.limit, held + tier.rows.free())
        if held + n_bytes > limit:
            places = {point.position for point in job.points}
            own = [i for i in job.seen.items if not i.is_checkpoint or i.end in places]
            spared = {i.key: i.nbytes for i in own}
            if job.pinned is None:  # once: what is written later goes last anyway
                pinned = [(n, p, store.look(n, p)) for n in self._namespaces for p in self._ram.pinned]
                job.pinned = {i.key: i.nbytes for *_, seen in pinned for i in seen.items}
                for namespace, tokens, seen in pinned:
                    store.used(namespace, tokens, seen)
                store.used(job.namespace, job.path, replace(job.seen, items=tuple(own)))
            if sum((spared | job.pinned).values()) + n_bytes > limit:
                return False
        gone = tier.rows.make_room(n_bytes, limit)
        tier.counts.evicted += gone or 0
        return gone is not None
