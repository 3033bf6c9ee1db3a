"""Delayed writes: positions wait, no bytes; the checkpoints that RAM has there at the time are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamahybrid.errors import SnapshotError
from llamahybrid.prompt_cache.base import NOTHING, Bytes, Logits, Tokens, part_of, same_start
from llamahybrid.prompt_cache.blocks import Item, Kind, Reach, Why, digest_at
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, header_of, path_digest, sealed
from llamahybrid.prompt_cache.nodes import common_prefix, ids_of
from llamahybrid.prompt_cache.records import HEAD_BYTES, pack
from llamahybrid.prompt_cache.seen import Seen, cover, uncovered
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.write_behind import WriteBehind
from llamahybrid.prompt_cache.write_policy import MOST_SECONDS, QUIET_SECONDS, Point, WriteBudget


@dataclass(eq=False)
class Job:
    """Restore points of a live path that are to be written, with their attention, if they are there then."""

    namespace: str
    path: Tokens
    points: tuple[Point, ...]
    """The best first."""
    attention: bool
    """Their attention is stored apart, and is to be written, too."""
    due: float
    since: float
    """When something of this conversation began to wait."""
    cancelled: bool = False
    refused: bool = False

    def lies_on(self, path: Tokens) -> bool:
        """All its states belong to prefixes of this path."""
        return max((p.position for p in self.points), default=0) <= common_prefix(self.path, path)


class Writer:
    """Writes restore points to a tier, behind what happens; not every one, and not more than a budget."""

    def __init__(
        self, tier: Any, source: RamStore, hourly: int, quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        """`hourly`: bytes that may be written an hour."""
        self._tier = tier
        self.source = source
        self.budget = WriteBudget(hourly)
        self.queue = WriteBehind(self._write, tier.rows.release)
        self.quiet_seconds = quiet_seconds
        """See `write_policy`; 0: everything is written at once."""
        self._namespaces: dict[str, None] = {}

    def __len__(self) -> int:
        """States that wait or are being written, about."""
        return len(self.queue)

    def later(self, namespace: str, path: Tokens, points: Sequence[Point], *, attention: bool) -> None:
        """Queue restore points of a live path, the best first; others that wait on this path are
        superseded."""
        now = time.monotonic()

        def change(jobs: list[Job]) -> list[Job]:
            mine = [job for job in jobs if job.namespace == namespace and job.lies_on(path)]
            since = min((job.since for job in mine), default=now)
            due = min(now + self.quiet_seconds, since + MOST_SECONDS)
            places = {point.position for point in points}
            passed = {p.position for job in mine for p in job.points} - places
            self._tier.counts.superseded += len(passed)
            new = [Job(namespace, path, tuple(points), attention, due, since)] if points else []
            return [job for job in jobs if job not in mine] + new

        self.queue.change(change)

    def flush(self, seconds: float | None = None) -> bool:
        """Write the queue within `seconds` (None: a minute); False if a part of it is not written."""
        counts = self._tier.counts
        before = counts.deferred, counts.errors, self.queue.failures
        done = self.queue.flush(seconds)
        return done and before == (counts.deferred, counts.errors, self.queue.failures)

    def cancel(self, tokens: Tokens | None, seconds: float, stays: int = 0) -> bool:
        """Give up what waits of a path, of all that goes on from it, and what leads to it; None: everything.

        A write of it that runs leaves nothing behind. False if it still runs after `seconds`.
        States within its first `stays` tokens wait on, with no more than these.
        """
        within: list[Job] = []

        def concerned(job: Job) -> bool:
            if tokens is None:
                return True
            if not same_start(job.path, tokens):
                return False
            kept = tuple(p for p in job.points if p.position <= stays)
            if kept:
                within.append(replace(job, path=job.path[:stays].copy(), points=kept))
            return True

        stopped = self.queue.cancel(concerned, seconds)
        if within:
            self.queue.change(lambda jobs: [*jobs, *within])
        return stopped

    # -- the writer's thread -----------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        """Write the checkpoints of a job; RAM may have evicted them since."""
        tier = self._tier
        if tier.may_write_in():
            tier.counts.errors += 1
        else:
            try:
                try:
                    tier.rows.open()
                    self._write_now(job)
                except OSError:
                    if tier.rows.is_open():
                        raise
                    tier.rows.open()  # its folder was removed, or its index damaged
                    self._write_now(job)
            except OSError as error:
                tier.refused_writing(error)
        if seconds := tier.may_write_in():  # it failed, then or now
            self.queue.again(job, seconds)

    def _write_now(self, job: Job) -> None:
        store = self._tier.store
        self._namespaces[job.namespace] = None
        self._tier.remove_wrong()
        work = PathWork(job, store.look(job.namespace, job.path))
        lacking = [p for p in job.points if not self._serves(work, p)]
        ready = [point for point in lacking if self._fits(job, point)]
        if job.attention:
            bare = {p for p in sorted(ready) if not self._write_attention(work, p.position)}
            self._tier.counts.dropped += len(bare) if self.budget.open() else 0
            ready = [point for point in ready if point not in bare]
        for point in ready:
            if job.cancelled:
                return
            if not self.budget.open():
                self._tier.counts.deferred += 1
                continue
            with self.source.checkpoint_at(job.namespace, job.path[: point.position]) as state:
                if state is None:
                    self._tier.counts.dropped += 1
                    continue
                path = job.path[: point.position]
                self.put(work, path, None, state.snapshot, state.logits, point.why)
        if not job.cancelled and self.budget.hourly:
            store.used(job.namespace, job.path, store.look(job.namespace, job.path))

    def _serves(self, work: PathWork, point: Point) -> bool:
        return work.seen.serves(point.position, logits=point.logits, attention=work.job.attention)

    def _fits(self, job: Job, point: Point) -> bool:
        """A state is still in RAM, and fits in the budgets."""
        if not self.budget.open():
            self._tier.counts.deferred += 1
            return False
        with self.source.checkpoint_at(job.namespace, job.path[: point.position]) as state:
            if state is None:
                self._tier.counts.dropped += 1
                return False
            return bool(state.snapshot.nbytes + HEAD_BYTES <= self._tier.limit)

    def _write_attention(self, work: PathWork, position: int) -> bool:
        """Write the attention before a position that is not there yet; False where it is not to be had."""
        job = work.job
        split = self.source.splitter(job.namespace)
        segments = self.source.attention(job.namespace, job.path, 0, len(job.path))
        for start, end in uncovered(work.seen.along(position), position):
            at = start
            for segment in segments:
                if not segment.start <= at < segment.end or at >= end:
                    continue
                stop = min(end, segment.end)
                try:
                    part = part_of(segment, job.path[: segment.end], at, stop, split)
                except ValueError:
                    return False
                part = segment if part is None and segment.end <= position else part
                if part is None or not self.put(
                    work, job.path[: part.end], part.start, part.record, None, Why.TIP
                ):
                    return False
                at = part.end
            if at < end:
                return False
        return True

    def put(
        self, work: PathWork, path: Tokens, start: int | None, state: Bytes, logits: Logits | None, why: Why
    ) -> bool:
        """Write one record of a path; False if it does not fit, is not wanted any more, or is sealed
        otherwise.

        `start`: of attention.
        """
        job, tier = work.job, self._tier
        if not state.nbytes:  # attention is all
            state = sealed(NOTHING, namespace=job.namespace, tokens=path)
        if not _sealed_for(state, job.namespace, path, start):
            return False
        parts = pack(state, logits, why)
        kind = Kind.ATTENTION if start is not None else Kind.STATE if logits is None else Kind.PROMPT
        item = item_of(job.namespace, path, start, sum(map(len, parts)), kind, why)
        borrowed: list[Reach] = []
        if item.is_checkpoint and job.attention:
            pieces, _ = cover(work.seen.along(item.end), [(0, item.end)])
            borrowed = [
                Reach(p.item, p.end) for p in pieces if not work.has(p.item.key) or p.item.end > item.end
            ]
        if work.has(item.key):
            return bool(tier.store.link(job.namespace, path, item, borrowed, lambda: not job.cancelled))
        if job.cancelled or not self.budget.open() or not self._make_room(item.nbytes, work):
            return False
        tier.rows.write(item.key, parts)
        if not tier.store.link(job.namespace, path, item, borrowed, lambda: not job.cancelled):
            tier.rows.remove(item.key)
            return False
        self.budget.spend(item.nbytes)
        tier.wrote(item)
        if kind == Kind.PROMPT and (old := replace(item, kind=Kind.STATE)) and work.has(old.key):
            tier.rows.remove(old.key)  # the one with logits says what the one without does
        work.add(item)
        return True

    def _make_room(self, n_bytes: int, work: PathWork) -> bool:
        """Let records go that were used longest ago until one more fits, but none on pinned paths, nor what
        this path needs; False if that cannot be. Nothing goes where it would not be enough."""
        tier, store = self._tier, self._tier.store
        limit = tier.limit
        if tier.rows.nbytes + n_bytes > limit:
            places = {p.position for p in work.job.points}
            own = [i for i in work.seen.items if not i.is_checkpoint or i.end in places]
            spared = {i.key: i.nbytes for i in (*own, *(r.item for r in work.along()))}
            pinned = [(n, p, store.look(n, p)) for n in self._namespaces for p in self.source.pinned]
            spared |= {i.key: i.nbytes for *_, seen in pinned for i in seen.items}
            if sum(spared.values()) + n_bytes > limit:
                return False
            for namespace, tokens, seen in pinned:
                store.used(namespace, tokens, seen)
            kept = replace(work.seen, items=tuple(own))
            store.used(work.job.namespace, work.job.path, kept)
        gone = tier.rows.make_room(n_bytes, limit)
        tier.counts.evicted += gone or 0
        return gone is not None


class PathWork:
    """A job, and what lies outside RAM of its path, as far as was looked and written since."""

    def __init__(self, job: Job, seen: Seen) -> None:
        self.job = job
        self.seen = seen
        self._keys = {i.key for i in seen.items}

    def has(self, key: bytes) -> bool:
        """A record is there."""
        return key in self._keys

    def along(self) -> Sequence[Reach]:
        """Attention of other paths that this one rests on."""
        return (*self.seen.borrowed, *self.seen.through)

    def add(self, item: Item) -> None:
        """A record is there from now on."""
        self._keys.add(item.key)
        items = sorted((*self.seen.items, item), key=lambda i: (i.end, i.kind))
        self.seen = replace(self.seen, items=tuple(items))


def item_of(namespace: str, path: Tokens, start: int | None, nbytes: int, kind: Kind, why: Why) -> Item:
    """A record at the end of a path, written now; `start`: of attention."""
    digest = digest_at(namespace, ids_of(path))
    return Item(digest, len(path) if start is None else start, len(path), nbytes, kind, why, int(time.time()))


def _sealed_for(state: Bytes, namespace: str, path: Tokens, start: int | None) -> bool:
    """An envelope is of this prefix: the model's fingerprint may have changed between a look and the seal."""
    try:
        header = header_of(state[:HEADER_BYTES].tobytes())
    except SnapshotError:
        return False
    place = (len(path) if start is None else start, len(path))
    return (header.start, header.end) == place and header.digest == path_digest(namespace, path)
