"""The disk behind the RAM tier: what of it could serve a prompt, and what is written to it, later.

Where a restore point on disk serves a prompt better than RAM does, its records are read, checked, and taken
into the RAM tier; everything else then happens there. What the disk refuses is never an error of a request.
A process that was forked goes on with the same folder, with nothing of its parent's that waits to be written.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import numpy as np

from llamahybrid.prompt_cache.base import (
    NOTHING,
    LiveView,
    Loaded,
    Outside,
    Range,
    Segment,
    Splitter,
    Tokens,
    part_of,
)
from llamahybrid.prompt_cache.disk_index import Offer
from llamahybrid.prompt_cache.disk_store import READ, TINY, WRITE, DiskStore, Records
from llamahybrid.prompt_cache.disk_writer import DiskWriter
from llamahybrid.prompt_cache.lateness import ENOUGH_SECONDS, Lateness, ReadCosts, ReadLate
from llamahybrid.prompt_cache.pins import pinned_before
from llamahybrid.prompt_cache.ram_tier import RamTier
from llamahybrid.prompt_cache.records import Record
from llamahybrid.prompt_cache.tearing import torn
from llamahybrid.prompt_cache.write_policy import DEFAULT_WRITE_BYTES, QUIET_SECONDS

logger = logging.getLogger("llamahybrid")

CANCEL_SECONDS = 10.0
"""How long `forget` waits for a record that is just being written."""


class DiskTier:
    """Records of one folder, or on a server; at most `limit` bytes, shared with other processes.

    With a limit of 0 nothing is written, and nothing goes to make room for it.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | Records,
        limit: int,
        source: RamTier,
        hourly: int | None = None,
        name: Outside = "disk",
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """`place`: a folder, which is made if need be. Raises OSError when it cannot be used.

        `hourly`: bytes that may be written an hour; None: `DEFAULT_WRITE_BYTES`. `name`: see `DiskStore`.
        `quiet_seconds`: see `write_policy`; 0: everything is written at once.
        """
        self.store = DiskStore(place, limit, name)
        hourly = DEFAULT_WRITE_BYTES if hourly is None else hourly
        self.writer = DiskWriter(self.store, source, hourly, quiet_seconds)
        self._lateness = Lateness()
        self._costs = ReadCosts()

    # -- reading -----------------------------------------------------------------------------------

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
        try:
            return self.store.offer(namespace, tokens, above, limit, missing, anywhere=anywhere)
        except Exception as error:  # no file in a folder is worth a request
            self.store.refused(READ, error)
            return None

    def known(self, namespace: str, tokens: Tokens) -> tuple[int, list[int]]:
        """See `DiskIndex.known`."""
        try:
            return self.store.known(namespace, tokens)
        except Exception as error:
            self.store.refused(READ, error)
            return 0, []

    def seconds(self, n_bytes: int) -> float:
        """What reading so many bytes takes, as measured; 0 while not measured."""
        return max(self._costs.seconds(n_bytes), self._lateness.seconds())

    def _gave_up(self, seconds: float, error: ReadLate) -> None:
        """A read had not come after so long; who had little to save says nothing to who has much."""
        self._lateness.gave_up(seconds)
        if seconds >= ENOUGH_SECONDS:
            self.store.refused(READ, error)

    def load(
        self, offer: Offer, path: Tokens, split: Splitter | None, within: float | None = None
    ) -> Loaded | None:
        """Read and check what an offer names on `path`; None, with what is damaged removed, if that fails.

        `within`: seconds that it saves, and may take, where that can be told.
        """
        started = time.perf_counter()
        state: Record | None = None
        segments: list[Segment] = []
        whole = True
        for key in offer.keys:
            spent = time.perf_counter() - started
            try:
                record = self.store.load(key, within and max(within - spent, TINY))
            except ReadLate as error:
                self._gave_up(time.perf_counter() - started, error)
                return None
            if record is None and self.store.has(key):
                return None  # the disk refused: it may be sound
            if record is None:
                whole = False  # what else is damaged of this offer goes with it, not at the next start
                continue
            state = state or record
            pieces = [piece for piece in offer.pieces if piece.key == key]
            needed = offer.position if key == offer.checkpoint else max(piece.end for piece in pieces)
            if not np.array_equal(record.tokens[:needed], path[:needed]):
                self.store.misplaced(key)
                return None
            try:
                for piece in pieces:
                    end = min(piece.end, len(path))
                    stored = Segment(record.head.start, record.head.end, record.state)
                    part = part_of(stored, record.tokens, piece.start, end, split)
                    segments += [] if part is None else [part]
            except ValueError as error:
                self.store.damaged(key, error)
                whole = False
            except MemoryError as error:  # the record is sound
                self.store.refused(READ, error)
                return None
        if not whole:
            return None
        self._lateness.worked()
        self._costs.measured(offer.nbytes, time.perf_counter() - started)
        self.store.counts.loaded += 1
        attention = tuple(sorted(segments, key=lambda s: s.start))
        if not offer.checkpoint:
            return Loaded(NOTHING, None, attention)
        assert state is not None
        return Loaded(state.state, state.logits, attention)

    # -- writing -----------------------------------------------------------------------------------

    def later(self, view: LiveView, path: Tokens, points: Sequence[tuple[int, bool]]) -> None:
        """Queue restore points of a live path (see `restart_points`): places wait, no bytes.

        `path`: a copy of the live tokens.
        """
        if not self.store.limit:
            return
        if view.needs_attention and view.split is None:
            return  # nobody could put its attention back
        try:
            self.writer.later(view.namespace, path, points, attention=view.needs_attention)
        except Exception as error:
            self.store.refused(WRITE, error)

    def flush(self, seconds: float | None = None) -> bool:
        """Write all that was queued, within so long (None: a minute); False if not all of it is written."""
        return self.writer.flush(seconds)

    def close(self, seconds: float | None = None) -> bool:
        """`flush`, and a warning where not all was written. The folder may be used again afterwards."""
        done = self.flush(seconds)
        if len(self.writer):
            name = self.store.name
            logger.warning("%d states were not written to the %s cache", len(self.writer), name)
        self.writer.rest()
        return done

    # -- forgetting --------------------------------------------------------------------------------

    def forget(self, tokens: Tokens, seconds: float = CANCEL_SECONDS) -> bool:
        """Remove every record of a path and of all that goes on from it, and what of it waits to be written.

        What is just being written of it never becomes a record. False if that still runs after so many
        seconds, or if the disk refused to remove something; it may be called again. Records that end within
        a beginning which the user pinned stay.
        """
        return self._remove(tokens, seconds)

    def clear(self, seconds: float = CANCEL_SECONDS) -> bool:
        """Remove every record, and what waits to be written. False: see `forget`."""
        return self._remove(None, seconds)

    def _remove(self, tokens: Tokens | None, seconds: float) -> bool:
        end, store = time.monotonic() + seconds, self.store

        def left() -> float:
            return max(0.0, end - time.monotonic())

        stays = 0 if tokens is None else pinned_before(self.writer.source.pinned, tokens)
        stopped = self.writer.cancel(tokens, seconds, stays)
        caught_up = store.records.catch_up(left())
        if tokens is None:
            removed = store.clear()
        else:
            self._keep_beginnings(tokens, stays, end)
            removed = store.remove_path(tokens, stays)
        return store.records.settle(left()) and removed and caught_up and stopped

    def _keep_beginnings(self, tokens: Tokens, stays: int, until: float) -> None:
        """Write what stays of attention that runs on into a path which is about to be removed.

        `until`: when no read is waited for any longer; whatever fails here, the path is to be removed.
        """
        store = self.store
        store.refresh()
        for each in store.look(lambda index: torn(index, tokens, stays)) or ():
            split = self.writer.source.splitter(each.namespace)
            record: Record | None = None
            try:
                if split is not None:
                    record = store.load(each.key, max(until - time.monotonic(), TINY))
            except ReadLate as error:
                store.refused(READ, error)
            kept = False
            try:
                if record is not None:
                    whole = Segment(record.head.start, record.head.end, record.state)
                    part = part_of(whole, record.tokens, whole.start, each.end, split)
                    kept = part is not None and self.writer.keep(each, record.tokens[: each.end], part)
            except (ValueError, MemoryError) as error:
                store.refused(READ, error)
            except OSError as error:
                store.refused(WRITE, error)
            if not kept:
                logger.warning("attention of what stays goes from the %s with what is forgotten", store.name)

    # -- what is told ------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Records, bytes and counts (`DiskCounts`), for `PromptCache.stats`.

        Each key on a server that is of another type than ours is an error, too.
        """
        name, counts = self.store.name, self.store.stats()
        counts[f"{name}_errors"] += getattr(self.store.records, "misfits", 0)  # a folder has none
        return {**counts, f"{name}_waiting": len(self.writer)}
