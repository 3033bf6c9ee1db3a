"""What is written to disk, later: places of the RAM tier wait, no bytes; what is there then is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamahybrid.prompt_cache.base import NOTHING, Bytes, Logits, Segment, Tokens, clipped, same_start
from llamahybrid.prompt_cache.disk_store import WRITE, DiskStore
from llamahybrid.prompt_cache.envelope import sealed
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.ram_tier import RamTier
from llamahybrid.prompt_cache.records import head_of, key_of, pack
from llamahybrid.prompt_cache.tearing import Torn
from llamahybrid.prompt_cache.write_behind import WriteBehind
from llamahybrid.prompt_cache.write_policy import MOST_SECONDS, QUIET_SECONDS, WriteBudget


@dataclass(eq=False)
class Job:
    """A restore point of the RAM tier that is to be written, with its attention, if it is there then."""

    namespace: str
    path: Tokens
    """The live path it lies on."""
    position: int
    logits: bool
    attention: bool
    """Its attention is stored apart, and is to be on disk, too."""
    due: float
    since: float
    """When something of this conversation began to wait."""
    cancelled: bool = False
    refused: bool = False

    def lies_on(self, path: Tokens) -> bool:
        """Its state belongs to a prefix of this path."""
        return self.position <= common_prefix(self.path, path)


class DiskWriter:
    """Writes restore points to a store, behind what happens; not every one, and not more than a budget."""

    def __init__(
        self, store: DiskStore, source: RamTier, hourly: int, quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        """`hourly`: bytes that may be written an hour."""
        self._store = store
        self.source = source
        self.budget = WriteBudget(hourly)
        self.queue = WriteBehind(self._write, store.records.settle)
        self.quiet_seconds = quiet_seconds
        """See `write_policy`; 0: everything is written at once."""

    def __len__(self) -> int:
        """States that wait or are being written."""
        return len(self.queue)

    def later(
        self, namespace: str, path: Tokens, points: Sequence[tuple[int, bool]], *, attention: bool
    ) -> None:
        """Queue restore points of a live path, the best first: (position, it has logits).

        What waits on this path and is not among them is superseded.
        """
        new = self._store.lacks(namespace, path, points, attention=attention)
        now = time.monotonic()

        def change(jobs: list[Job]) -> list[Job]:
            mine = [job for job in jobs if job.namespace == namespace and job.lies_on(path)]
            since = min((job.since for job in mine), default=now)
            due = min(now + self.quiet_seconds, since + MOST_SECONDS)
            places = {position for position, _ in points}
            kept = {job.position: job.due for job in mine if job.position in places}
            self._store.counts.superseded += sum(job.position not in places for job in mine)
            wanted = [
                Job(namespace, path, position, logits, attention, kept.get(position, due), since)
                for position, logits in new
            ]
            return [job for job in jobs if job not in mine] + wanted

        self.queue.change(change)

    def flush(self, seconds: float | None = None) -> bool:
        """Write what waits, within so long (None: a minute); False if not all that was to be written is."""
        before = self._store.counts.deferred, self._store.counts.errors, self.queue.failures
        done = self.queue.flush(seconds)
        after = self._store.counts.deferred, self._store.counts.errors, self.queue.failures
        return done and before == after

    def rest(self) -> None:
        """Nothing is expected any more: its thread ends as soon as nothing waits."""
        self.queue.rest()

    def cancel(self, tokens: Tokens | None, seconds: float, stays: int = 0) -> bool:
        """Give up what waits of a path, of all that goes on from it, and what leads to it; None: everything.

        What is being written of it leaves nothing behind. False if that still runs after so many seconds.
        States within its first `stays` tokens wait on, with no more than these.
        """
        within: list[Job] = []

        def concerned(job: Job) -> bool:
            if tokens is None:
                return True
            if not same_start(job.path, tokens):
                return False
            if job.position <= stays:
                within.append(replace(job, path=job.path[:stays].copy()))
            return True

        stopped = self.queue.cancel(concerned, seconds)
        if within:
            self.queue.change(lambda jobs: [*jobs, *within])
        return stopped

    def keep(self, torn: Torn, path: Tokens, part: Segment) -> bool:
        """Write what stays of a record that goes, at once; False if it does not fit. Raises OSError.

        Not if that went meanwhile: who removed it may have forgotten what is written here, too.
        """
        job = Job(torn.namespace, path, len(path), logits=False, attention=True, due=0.0, since=0.0)
        return self._put(job, part.start, path, None, part.record, torn.key)

    # -- the writer's thread -----------------------------------------------------------------------

    def _write(self, job: Job) -> None:
        """Write what is at a place now; the RAM tier may have given it up meanwhile."""
        store = self._store
        if store.may_write_in():
            store.counts.errors += 1
        else:
            self._write_now(job)
        if seconds := store.may_write_in():  # the disk refused, then or now
            self.queue.again(job, seconds)

    def _write_now(self, job: Job) -> None:
        store, path = self._store, job.path[: job.position]
        point = (job.position, job.logits)
        if not store.lacks(job.namespace, job.path, [point], attention=job.attention):
            return
        if not self.budget.open():
            store.counts.deferred += 1
            return
        try:
            with self.source.checkpoint_at(job.namespace, path) as state:
                if state is None or not self._write_attention(job):
                    store.counts.dropped += 1
                    return
                self._put(job, job.position, path, state.logits, state.snapshot)
        except OSError as error:
            store.refused(WRITE, error)

    def _write_attention(self, job: Job) -> bool:
        """Write what of a state's attention is not on disk; False if it is not to be had."""
        if not job.attention:
            return True
        segments = self.source.attention(job.namespace, job.path, 0, len(job.path))
        for start, end in self._store.uncovered(job.namespace, job.path[: job.position]):
            at = start
            for segment in segments:
                if clipped([(at, end)], segment.end, segment.start) and segment.start <= at:
                    if not self._put(job, segment.start, job.path[: segment.end], None, segment.record):
                        return False
                    at = segment.end
            if at < end:
                return False
        return True

    def _put(
        self, job: Job, start: int, path: Tokens, logits: Logits | None, state: Bytes, part_of: str = ""
    ) -> bool:
        """Write one record; False if it does not fit, is not wanted any more, or is sealed otherwise.

        `part_of`: see `DiskStore.commit`.
        """
        key = key_of(job.namespace, start, path, logits=logits is not None)
        if self._store.has(key):
            return True
        if not state.nbytes:  # attention is all
            state = sealed(NOTHING, namespace=job.namespace, tokens=path)
        parts = pack(state, path, logits, self._store.base_of(job.namespace, path))
        head = head_of(parts[0])
        if head.key != key:
            return False
        if not self._store.records.takes(head.nbytes):  # nothing goes for what cannot come
            return False
        pinned = self.source.pinned
        if job.cancelled or not self._store.make_room(head.nbytes, job.namespace, job.path, pinned):
            return False
        part = self._store.records.prepare(head.key, parts)
        try:
            if self._store.commit(part, head, path, lambda: not job.cancelled, part_of):
                self.budget.spend(head.nbytes)
                return True
        except BaseException:
            self._store.records.abandon(part)
            raise
        self._store.records.abandon(part)
        return False
