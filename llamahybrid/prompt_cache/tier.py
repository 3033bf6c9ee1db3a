"""A store behind the RAM tier, in a folder or on a server: looked up by each prompt, written behind requests.

When a restore point there serves a prompt better than RAM does, its records are read, checked, and taken
into the RAM tier; everything else then happens there. A store that fails is never an error of a request: it
counts as a miss, and no request waits for a lock. A process that was forked goes on with the same store, with
nothing of its parent's that waits to be written.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from llamahybrid.prompt_cache.base import LiveView, Loaded, Outside, Segment, Splitter, Tokens, part_of
from llamahybrid.prompt_cache.block_store import BlockStore, Rows
from llamahybrid.prompt_cache.blocks import Item, Node, Place
from llamahybrid.prompt_cache.disk import LOCK_SECONDS, Busy
from llamahybrid.prompt_cache.forgetting import on_path, sweep_nodes
from llamahybrid.prompt_cache.loading import Counts, Loader
from llamahybrid.prompt_cache.nodes import tokens_of
from llamahybrid.prompt_cache.pins import pinned_before
from llamahybrid.prompt_cache.reader import Breaker, Late, ReadCosts, Reader
from llamahybrid.prompt_cache.seen import Offer, Seen
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.write_policy import DEFAULT_WRITE_BYTES, QUIET_SECONDS, Point
from llamahybrid.prompt_cache.writer import Job, PathWork, Writer

logger = logging.getLogger("llamahybrid")

FIRST_SECONDS = 2.0
"""The wait of a new cache for its store to open."""

CANCEL_SECONDS = 10.0
"""The longest wait of `forget` for a record that is being written."""

UNKNOWN_SECONDS = {"disk": 5.0, "remote": 0.25}
"""The limit of a look-up or a read whose saving is unknown."""

MOST_SECONDS = 30.0
ENOUGH_SECONDS = 0.2
"""A timeout from this length on counts as a failure of the store."""

Placed: TypeAlias = tuple[str, Tokens, Place]
"""A place with its namespace and all its tokens."""

READ, WRITE = "reading from", "writing to"


class Store(Rows, Protocol):
    """The place of a tier: its rows, and more."""

    nbytes: int
    """Bytes of all records, as seen last."""

    def open(self) -> None:
        """Make it ready; harmless when it is."""

    def is_open(self) -> bool:
        """Return whether a look-up can begin at once."""

    def fork(self) -> None:
        """In a process that was forked: nothing of its parent's is used."""

    def make_room(self, n_bytes: int, limit: int) -> int | None:
        """Evict records until `n_bytes` fit; the number of evicted ones, None where the rest is too much."""

    def clear(self) -> None:
        """Remove everything."""

    def forgotten(self) -> None:
        """Erase the traces of removed rows."""

    def release(self) -> None:
        """A thread that used it ends."""

    def count(self) -> int:
        """The number of records."""

    def longest_unused(self, keys: Sequence[bytes]) -> bytes:
        """Which of these records goes first; b"" where that is not told."""


class Tier:
    """Records of one store; at most `limit` bytes, shared with other processes.

    With a limit of 0 nothing is written, and nothing goes to make room for it.
    """

    def __init__(
        self,
        rows: Store,
        limit: int,
        source: RamStore,
        hourly: int | None = None,
        name: Outside = "disk",
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`hourly`: bytes that may be written an hour; None: `DEFAULT_WRITE_BYTES`. `name`: what the user
        knows it as. `quiet_seconds`: see `write_policy`; 0: everything is written at once.

        Raises OSError when it cannot be used.
        """
        self.rows = rows
        self.store = BlockStore(rows)
        self.limit = limit
        self.name = name
        self.counts = Counts()
        self.writer = Writer(self, source, DEFAULT_WRITE_BYTES if hourly is None else hourly, quiet_seconds)
        self._reader = Reader(f"llamahybrid-{name}-read")
        self._changer = Reader(f"llamahybrid-{name}-change")
        self._uncleared = False  # a clear has failed: no look-up until one succeeds
        self._loader = Loader(self.store, self.counts, name)
        self._costs = ReadCosts()
        self._breakers = {READ: Breaker(), WRITE: Breaker()}
        self._warned: set[str] = set()
        _tiers.add(self)
        try:
            self._reader.call(FIRST_SECONDS, rows.open)
        except Busy as error:
            self.counts.late += 1
            self._warn(READ, error)

    # -- reading -----------------------------------------------------------------------------------

    def look(self, namespace: str, tokens: Tokens, within: float | None = None) -> Seen | None:
        """Look a prompt up; None where the store cannot tell now. `within`: seconds that a hit saves."""
        if self._uncleared or self._breakers[READ].left():
            return None
        seconds = self._seconds(within) if self.rows.is_open() else LOCK_SECONDS
        started = time.monotonic()
        try:
            return self._reader.call(seconds, self._looked, namespace, tokens)
        except Busy as error:
            self._was_late(time.monotonic() - started, error)
        except Exception as error:  # no file in a folder is worth a request
            self.refused(READ, error)
        return None

    def _looked(self, namespace: str, tokens: Tokens) -> Seen:
        self.rows.open()
        return self.store.look(namespace, tokens)

    def _seconds(self, within: float | None) -> float:
        """The longest wait for a read that saves `within` seconds; at a folder no less than the default."""
        least = UNKNOWN_SECONDS[self.name]
        if self.name == "disk":
            return min(max(least, within or 0.0), MOST_SECONDS)
        return min(within or least, MOST_SECONDS)

    def _was_late(self, seconds: float, error: OSError) -> None:
        self.counts.late += 1
        if self.name == "remote" and isinstance(error, Late) and seconds >= ENOUGH_SECONDS:
            self.refused(READ, error)

    def without(self) -> set[bytes]:
        """Keys of records that do not serve now."""
        return self._loader.left_alone()

    def seconds(self, n_bytes: int) -> float:
        """Measured time of reading `n_bytes`; 0 while not measured."""
        return self._costs.seconds(n_bytes)

    def load(
        self,
        namespace: str,
        tokens: Tokens,
        offer: Offer,
        split: Splitter | None,
        within: float | None = None,
    ) -> Loaded | None:
        """Read and check what an offer names for a prompt; None, with what is damaged removed, if that fails.

        `within`: seconds that it saves, and may take.
        """
        seconds = self._seconds(within)
        started = time.monotonic()
        try:
            loaded = self._reader.call(seconds, self._loader.load, namespace, tokens, offer, split)
        except Busy as error:
            spent = time.monotonic() - started
            self._costs.measured(offer.nbytes, spent)
            self._was_late(spent, error)
            return None
        except (OSError, MemoryError) as error:
            self.refused(READ, error)
            return None
        if loaded is not None:
            self._costs.measured(offer.nbytes, time.monotonic() - started)
            self._breakers[READ].worked()
            self.counts.loaded += 1
        return loaded

    # -- writing -----------------------------------------------------------------------------------

    def later(self, view: LiveView, path: Tokens, points: Sequence[Point]) -> None:
        """Queue restore points of a live path (see `restart_points`): places wait, no bytes.

        `path`: a copy of the live tokens.
        """
        if not self.limit or not points:
            return
        if view.needs_attention and view.split is None:
            return  # nobody could put its attention back
        self.writer.later(view.namespace, path, points, attention=view.needs_attention)

    def wrote(self, item: Item) -> None:
        """A record was written."""
        self._loader.serves_again(item)
        self.counts.written += 1
        self.counts.written_bytes += item.nbytes
        self.counts.failed = 0
        self._breakers[WRITE].worked()

    def remove_wrong(self) -> None:
        """Remove records that did not prove right; on the writer's thread."""
        while self._loader.wrong:
            item = self._loader.wrong[0]
            self.store.unlink([item])
            self._loader.serves_again(self._loader.wrong.popleft())

    def may_write_in(self) -> float:
        """Seconds until the store, which failed just now, may be tried again; 0: it did not."""
        return self._breakers[WRITE].left()

    def refused_writing(self, error: OSError) -> None:
        """A write failed."""
        self.refused(WRITE, error)

    def flush(self, seconds: float | None = None) -> bool:
        """Write the queue within `seconds` (None: a minute); False if a part of it is not written."""
        return self.writer.flush(seconds)

    def close(self, seconds: float | None = None) -> bool:
        """`flush`, and a warning where not all was written. The store may be used again afterwards."""
        done = self.flush(seconds)
        if len(self.writer):
            logger.warning("%d states were not written to the %s cache", len(self.writer), self.name)
        self.writer.queue.rest()
        for thread in (self._reader, self._changer):
            thread.rest(self.rows.release)
        return done

    # -- forgetting --------------------------------------------------------------------------------

    def discard(self, namespace: str, tokens: Tokens) -> None:
        """Remove the checkpoint at the end of these tokens: it did not prove right."""
        try:
            self._changer.call(CANCEL_SECONDS, self._discarded, namespace, tokens)
        except OSError as error:
            self.refused(WRITE, error)

    def _discarded(self, namespace: str, tokens: Tokens) -> None:
        seen = self._looked(namespace, tokens)
        wrong = [i for i in seen.items if i.is_checkpoint and i.end == len(tokens)]
        self.counts.damaged += len(wrong)
        for item in wrong:
            self._loader.leave_alone(item)
        self.store.unlink(wrong)

    def forget(self, tokens: Tokens, seconds: float = CANCEL_SECONDS) -> bool:
        """Remove every record of a path and of all that goes on from it, and what of it waits to be written.

        A record that is just being written never appears. False if that write still runs after `seconds`, or
        if the store failed to remove something; `forget` may be called again. Records that end within
        a beginning which the user pinned stay.
        """
        stays = pinned_before(self.writer.source.pinned, tokens)
        return self._remove(tokens, stays, seconds)

    def clear(self, seconds: float = CANCEL_SECONDS) -> bool:
        """Remove every record, and what waits to be written. False: see `forget`."""
        return self._remove(None, 0, seconds)

    def _remove(self, tokens: Tokens | None, stays: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        stopped = self.writer.cancel(tokens, seconds, stays)
        left = max(LOCK_SECONDS, end - time.monotonic())
        try:
            if tokens is None:
                self._changer.call(left, self._cleared)
                return stopped
            return self._changer.call(left, self._forgot, tokens, stays) and stopped
        except OSError as error:
            self.refused(WRITE, error)
            return False

    def _cleared(self) -> None:
        self._uncleared = True
        self.rows.open()
        self.rows.clear()
        self._uncleared = False

    def _forgot(self, tokens: Tokens, stays: int) -> bool:
        self.rows.open()
        forgotten, done = on_path(self.store, tokens, stays), True
        for item, place, keep in forgotten.torn:
            if not self._keep_beginning(item, place, keep):
                logger.warning("attention of what stays goes from the %s with what is forgotten", self.name)
        for item, _ in forgotten.items:
            try:
                self._loader.leave_alone(item)
                self.store.unlink([item])
                self._loader.serves_again(item)
            except OSError as error:
                self.refused(WRITE, error)
                done = False
        if forgotten.items:
            sweep_nodes(self.store)
            self.rows.forgotten()
        return done

    def _keep_beginning(self, item: Item, place: Place, keep: int) -> bool:
        """Write the part of attention up to `keep` that others need, before the record goes."""
        path = self.store.path_of(place)
        split = None if path is None else self.writer.source.splitter(path.namespace)
        if path is None or split is None:
            return False
        tokens = tokens_of(path.ids)
        try:
            record = self.rows.read(item.key)
            stored = Segment(item.start, item.end, record.state)
            part = part_of(stored, tokens, item.start, keep, split)
            if part is None:
                return False
            job = Job(path.namespace, tokens[:keep], (), attention=True, due=0.0, since=0.0)
            work = PathWork(job, self.store.look(path.namespace, tokens[:keep]))
            return self.writer.put(work, tokens[:keep], item.start, part.record, None, item.why)
        except (OSError, ValueError, MemoryError) as error:
            self.refused(READ, error)
            return False

    # -- statistics and views-----------------------------------------------------------------------

    def refused(self, what: str, error: BaseException) -> None:
        """The store failed: say so once, and leave it alone for a while."""
        self.counts.errors += 1
        self._breakers[what].failed()
        if what == WRITE:
            self.counts.failed = 1
        self._warn(what, error)

    def _warn(self, what: str, error: BaseException) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s the %s cache failed, and is tried again later: %s", what, self.name, error)

    def glance(self, seconds: float, most: int) -> tuple[list[Placed], bytes]:
        """The newest places, at most `most`, with namespaces and tokens, and the key of the record that goes
        next, if these are all places; nothing where the look takes longer than `seconds`."""
        try:
            return self._reader.call(seconds, self._glanced, most)
        except OSError:
            return [], b""

    def _glanced(self, most: int) -> tuple[list[Placed], bytes]:
        self.rows.open()
        known: dict[bytes, Node | None] = {}
        found: list[Placed] = []
        for digest, raw in self.rows.recent(b"p", most):
            place = Place.unpack(digest, raw)
            path = None if place is None else self.store.path_of(place, known)
            if place is not None and path is not None:
                found.append((path.namespace, tokens_of(path.ids), place))
        keys = [item.key for *_, place in found for item in place.items] if len(found) < most else []
        return found, self.rows.longest_unused(keys)

    def stats(self) -> dict[str, int]:
        """Records, bytes and counts (`Counts`), for `PromptCache.stats`."""
        counts = {"records": self.rows.count(), "bytes": self.rows.nbytes, **vars(self.counts)}
        return {f"{self.name}_{name}": n for name, n in {**counts, "waiting": len(self.writer)}.items()}

    def fork(self) -> None:
        """In a process that was forked."""
        self.rows.fork()


def _in_child() -> None:
    for tier in list(_tiers):
        tier.fork()


_tiers: weakref.WeakSet[Tier] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
