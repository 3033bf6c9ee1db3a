"""PromptCache: many conversations, one tree, RAM and, if a folder is given, disk behind it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llamahybrid.prompt_cache.base import (
    HERE_ONLY,
    CacheStats,
    Checkpoint,
    Costs,
    LiveView,
    Plan,
    Segment,
    Tokens,
    part_of,
)
from llamahybrid.prompt_cache.disk_index import Range, clipped
from llamahybrid.prompt_cache.disk_tier import DiskTier, Loaded
from llamahybrid.prompt_cache.eviction import Eviction
from llamahybrid.prompt_cache.guard import guarded, nothing
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.ram import Expected
from llamahybrid.prompt_cache.ram_cache import RamCache
from llamahybrid.prompt_cache.write_policy import restart_points

logger = logging.getLogger("llamahybrid")

MAX_DISK_BYTES = 32 << 30
DISK_SHARE = 1 / 4
"""The default disk budget: so much of what is free, at most."""


class PromptCache(RamCache):
    """Checkpoints and attention segments of many conversations, indexed by a radix tree of tokens.

    `ram_bytes`: see `RamCache`. `disk_dir`: a folder that keeps them for later processes; several may share
    it. `disk_bytes`: its budget; None: a quarter of what is free, at most 32 GiB. `disk_write_bytes`: what
    this process may write to it in an hour (0: nothing); None: 8 GiB. A folder that cannot be used costs a
    warning and the disk, nothing else. `eviction`: another order in which things go from RAM. May be shared
    by threads and by several models.

    >>> cache = PromptCache(ram_bytes=1 << 20)
    >>> cache.stats().entries
    0
    """

    def __init__(
        self,
        ram_bytes: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        disk_write_bytes: int | None = None,
        *,
        eviction: Eviction | None = None,
    ) -> None:
        super().__init__(ram_bytes, eviction)
        self._disk_arguments = (disk_dir, disk_bytes, disk_write_bytes)
        self._disk: DiskTier | None = None
        if disk_dir is None:
            return
        folder = Path(disk_dir).expanduser()
        try:
            limit = default_disk_bytes(folder) if disk_bytes is None else disk_bytes
            self._disk = DiskTier(folder, limit, self, disk_write_bytes)
        except OSError as error:
            logger.warning("the disk cache in %s cannot be used: %s", folder, error)

    def __reduce__(self) -> tuple[type[PromptCache], tuple[object, ...]]:
        """Pickles as an empty cache with the same budgets: state belongs to the process that made it."""
        return type(self), (self.ram_bytes, *self._disk_arguments)

    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """See `BasePromptCache.plan`; what the disk knows better is taken into RAM first."""
        if self._disk is not None and view.needs_checkpoints:
            self._bring(self._disk, tokens, view, costs)
            self._recall(self._disk, tokens, view)
        return super().plan(tokens, view, boundaries, costs)

    def settle(self, view: LiveView) -> None:
        """A request is over: queue for the disk what is new on the live path."""
        if self._disk is None or view.namespace.endswith(HERE_ONLY):
            return
        path = view.tokens.copy()
        if not view.forgotten:
            self._disk.later(view, path, self._restart_points(view.namespace, path))

    @guarded(lambda *_: [], changes=False)
    def _restart_points(self, namespace: str, path: Tokens) -> list[tuple[int, bool]]:
        """What of a path is worth writing, see `write_policy.restart_points`."""
        return restart_points(self._tree.match(namespace, path))

    @property
    def leaves_process(self) -> bool:
        """What is kept is written to a folder, for later processes and others."""
        return self._disk is not None

    def flush(self, seconds: float | None = None) -> bool:
        """Write what is queued for the disk, within so long (None: a minute); False if not all of it is."""
        return self._disk is None or self._disk.flush(seconds)

    def close(self) -> bool:
        """`flush`, and a warning where not all was written; RAM stays, and the cache may be used again."""
        return self._disk is None or self._disk.close()

    def pin(self, prefix: Sequence[int] | Tokens) -> int:
        """See `RamCache.pin`; records of this path stay on disk, too."""
        found = super().pin(prefix)
        self._tell_pins()
        return found

    def unpin(self, prefix: Sequence[int] | Tokens) -> None:
        """See `RamCache.unpin`."""
        super().unpin(prefix)
        self._tell_pins()

    def forget(self, prefix: Sequence[int] | Tokens) -> int:
        """See `RamCache.forget`; from the disk, too, and from what is queued for it."""
        freed = super().forget(prefix)  # first, so that nothing can be queued again
        if self._disk is not None:
            if not self._disk.forget(np.array(prefix, dtype=np.int32)):
                logger.warning("not all that was to be forgotten is gone from the disk; forget it again")
            self._tell_pins()
        return freed

    def drop(self, checkpoint: Checkpoint) -> None:
        """See `BasePromptCache.drop`; from the disk, too."""
        path = None if self._disk is None else self._path_of(checkpoint)
        if self._disk is not None and path is not None:
            self._disk.discard(checkpoint.namespace, path)
        super().drop(checkpoint)

    @guarded(nothing, changes=False)
    def _path_of(self, checkpoint: Checkpoint) -> Tokens | None:
        """The tokens before a checkpoint; None if it is not in RAM."""
        entry = self._tree.find(checkpoint)
        return None if entry is None else self._tree.path_of(entry)

    def clear(self) -> None:
        """See `BasePromptCache.clear`; the disk is emptied, too."""
        if self._disk is not None:
            self._disk.clear()
        super().clear()
        self._tell_pins()

    def stats(self) -> CacheStats:
        """See `RamCache.stats`; `extra` has what `DiskCounts` counts, too."""
        stats = super().stats()
        if self._disk is not None:
            stats.extra.update(self._disk.stats())
        return stats

    def check_integrity(self) -> None:
        """See `BasePromptCache.check_integrity`."""
        super().check_integrity()
        if self._disk is not None:
            self._disk.check_integrity()

    # -- between the tiers -------------------------------------------------------------------------

    def _bring(self, disk: DiskTier, tokens: Tokens, view: LiveView, costs: Costs) -> None:
        """Take the best restore point on disk into RAM, if there is one that is deeper and comes cheaper."""
        total, live_lcp = len(tokens), common_prefix(tokens, view.tokens)
        limit = total if view.reuse_limit is None else min(total, view.reuse_limit)
        if view.needs_attention and view.split is None:
            limit = min(limit, live_lcp)  # no other attention can be put back
        forgets = self._forgets
        while True:
            best, missing = self._at_hand(tokens, view, live_lcp, costs)
            offer = disk.offer(view.namespace, tokens, best, limit, missing)
            if offer is None:
                return
            saved = (offer.position - best) * costs.prefill_seconds
            if saved and disk.seconds(offer.nbytes) > saved:
                return
            path = tokens[: offer.position]
            expected = self._expect(view.namespace, path, offer.nbytes)
            if expected is None:
                limit = offer.position - 1
                continue
            loaded = disk.load(offer, path, view.split)
            if loaded is not None:
                self._take_in(view, path, loaded, expected, forgets)
                return
            del expected
            limit = offer.position - 1  # never the same again, whatever the disk says

    def _recall(self, disk: DiskTier, tokens: Tokens, view: LiveView) -> None:
        """Know what the disk knows of a prompt's path: where to cut depends on it."""
        forgets = self._forgets
        length, followers = disk.known(view.namespace, tokens)
        known, branches = self._known(view.namespace, tokens)
        if length > known or (length == known and len(followers) > 1 and not branches):
            path = tokens[:length].astype(np.int32)
            for longer in [np.append(path, np.int32(token)) for token in followers] or [path]:
                self._remember(view.namespace, longer, view.state, forgets)

    @guarded(lambda *_: (0, True), changes=False)
    def _known(self, namespace: str, tokens: Tokens) -> tuple[int, bool]:
        """How much of a prompt is known in RAM, and whether known paths part there."""
        match = self._tree.match(namespace, tokens)
        return match.length, match.branches()

    @guarded(lambda *_: (0, []), changes=False)
    def _at_hand(
        self, tokens: Tokens, view: LiveView, live_lcp: int, costs: Costs
    ) -> tuple[int, list[Range]]:
        """The restore point without the disk, and where attention is neither live nor in RAM."""
        match = self._tree.match(view.namespace, tokens)
        best = self._choice(match, match.entries(), len(tokens), live_lcp, view, costs)[0].position
        if not view.needs_attention:
            return best, []
        missing = [*match.missing(match.length), (match.length, len(tokens))]
        return best, [(a, b) for a, b in missing if b > max(a, live_lcp)]

    @guarded(nothing, changes=False)
    def _expect(self, namespace: str, path: Tokens, n_bytes: int) -> Expected | None:
        """Make room for what is about to be read; None if there is none."""
        match = self._tree.match(namespace, path)
        growth = 4 * (len(path) - match.length)
        self._guard.changing = True
        fits = self._store.make_room(n_bytes + growth, match, len(path))
        self._refused += not fits
        return self._store.loans.lend(Expected(n_bytes)) if fits else None

    @guarded(nothing)
    def _take_in(
        self, view: LiveView, path: Tokens, loaded: Loaded, expected: Expected, forgets: int
    ) -> None:
        """Put what was read into RAM, where it is not there already; unless anything was forgotten since."""
        self._store.loans.end(expected)
        if forgets != self._forgets:
            return
        match = self._tree.insert(view.namespace, path)
        if not any(e.position == len(path) for e in match.entries()):
            loaded.snapshot.flags.writeable = False
            checkpoint = Checkpoint(view.namespace, len(path), loaded.snapshot, loaded.logits)
            self._store.put(match, checkpoint, path).from_disk = True
        for segment in loaded.segments:
            for start, end in clipped(match.missing(len(path)), segment.end, segment.start):
                try:
                    part = part_of(segment, path, start, end, view.split)
                except (ValueError, MemoryError):
                    self._damaged += 1
                    continue
                if part is not None:
                    self._tree.store(match, part)

    @contextmanager
    def held(self, namespace: str, path: Tokens) -> Iterator[Checkpoint | None]:
        """The checkpoint at the end of a path, or None; its bytes stay as they are in this context."""
        user = User()
        try:
            yield self._hold(user, namespace, path)
        finally:
            self._let_go(user)

    @guarded(lambda *_: [], changes=False)
    def attention(self, namespace: str, path: Tokens, start: int, end: int) -> list[Segment]:
        """The segments of [start, end) of a path, as they are cut now."""
        match = self._tree.match(namespace, path)
        known = min(end, match.length)  # the last segment may belong to a path that left this one
        return [s for s in match.segments() if start <= s.start and s.end <= known]

    def _tell_pins(self) -> None:
        if self._disk is not None:
            self._disk.pinned = tuple(self._store.pinned)


class User:
    """Somebody who reads the bytes of a checkpoint."""


def default_disk_bytes(folder: Path) -> int:
    """A quarter of what is free where `folder` lies or is going to lie, at most `MAX_DISK_BYTES`."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return min(MAX_DISK_BYTES, int(shutil.disk_usage(there).free * DISK_SHARE))
