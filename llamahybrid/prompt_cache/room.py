"""The bytes of a store in RAM: one tree, one lock, one budget, and eviction when room is needed.

Checkpoints and attention segments, buffers idle and handed out, tree nodes and pins all count toward one
account. From any thread; calls from inside (a finaliser, a signal handler) are answered as by an empty
store, see `guard`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llamahybrid.prompt_cache.base import Bytes, CacheStats, Tokens
from llamahybrid.prompt_cache.eviction import Eviction, Tail, bytes_to_stay
from llamahybrid.prompt_cache.guard import Guard, guarded
from llamahybrid.prompt_cache.nodes import Entry, Match
from llamahybrid.prompt_cache.pins import Pins, Prefixes
from llamahybrid.prompt_cache.ram import Account, Expected, new_buffer
from llamahybrid.prompt_cache.tree import Tree

RESTARTED = "an exception came while the prompt cache was changed; its content in RAM is gone"

SLICE_SECONDS = 0.01
"""Longest time that evictions for a buffer or a smaller budget hold the lock at once."""

YIELD_SECONDS = 5e-5
"""The sleep in which other threads take the lock."""

Claimed: TypeAlias = Bytes | Expected | None
"""A buffer, or room for one; of no bytes while more has to go first; None if none fits."""


@dataclass
class Counts:
    """Counters of a store; see `CacheStats`."""

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    evictions: int = 0
    refused: int = 0
    damaged: int = 0
    """Damaged segments, without those that the present tree counts."""


class Room:
    """A tree of checkpoints and segments within a byte budget."""

    def __init__(self, limit: int, eviction: Eviction) -> None:
        """`limit`: bytes."""
        self.guard = Guard(RESTARTED)
        self.account = Account(limit, self.guard.dropped)
        self.eviction = eviction
        self.counts = Counts()
        self.prefixes = Prefixes()
        """Prefixes that the user pinned."""
        self._begin()

    def _begin(self) -> None:
        self.tree = Tree()
        self.pins = Pins()
        self.doomed: set[Entry] = set()
        """Checkpoints in use that are no longer in the tree."""
        self.kept: set[Entry] = set()
        """Checkpoints in the tree that the user pinned."""

    def restart(self) -> None:
        """Begin with nothing, after half a change. Checkpoints of plans count until they are collected."""
        for entry in self.pins.entries():
            self.account.reserve(entry.checkpoint.snapshot)
        requests, damaged = self.tree.requests, self.tree.damaged
        self._begin()
        self.tree.requests, self.tree.damaged = requests, damaged
        self.prefixes = self.prefixes.copy()
        self.account.free_all()

    # -- buffers -----------------------------------------------------------------------------------

    def buffer(self, n_bytes: int) -> Bytes:
        """Return a buffer of exactly `n_bytes`, shape (n_bytes,), contents undefined, to fill and `admit`.

        The budget counts a buffer until it is admitted or collected. A buffer that pins leave no room for is
        not counted, and `admit` refuses it.
        """
        counted = self._filled_claim(n_bytes, lambda: self._claim(n_bytes))
        return new_buffer(n_bytes) if counted is None else counted

    def _filled_claim(self, n_bytes: int, claim: Callable[[], Claimed]) -> Bytes | None:
        """Claim room under the lock, a slice of time at once, and make the buffer without it."""
        while (claimed := claim()) is not None and claimed.nbytes < n_bytes:
            time.sleep(YIELD_SECONDS)
        if not isinstance(claimed, Expected):
            return claimed
        buffer = new_buffer(n_bytes)
        self._exchange(claimed, buffer)
        return buffer

    @guarded()
    def _exchange(self, claimed: Expected, buffer: Bytes) -> None:
        self.account.unreserve(claimed)
        self.account.reserve(buffer)

    @guarded()
    def _claim(self, n_bytes: int) -> Claimed:
        return self.claim(n_bytes)

    def claim(self, n_bytes: int, path: Match | None = None, keep: Collection[Entry] = ()) -> Claimed:
        """Claim an idle buffer, or the room for a new one; arguments as of `make_room`."""
        fits = self.make_room(n_bytes, path, keep=keep, reuse=n_bytes, seconds=SLICE_SECONDS)
        if not fits:
            return Expected(0) if fits is None else None
        idle = self.account.reuse(n_bytes)
        return self.account.reserve(Expected(n_bytes) if idle is None else idle)

    # -- room --------------------------------------------------------------------------------------

    def used(self) -> int:
        """Return the bytes that count toward the budget now."""
        doomed = sum(e.nbytes for e in self.doomed)
        return self.tree.nbytes + doomed + self.account.nbytes + self.prefixes.nbytes

    def staying(self, path: Match | None = None) -> int:
        """Return the bytes that no eviction frees: in use, handed out, or pinned by the user."""
        held = bytes_to_stay(self.pins.entries() | self.kept, path)
        return held + self.account.reserved_bytes() + self.prefixes.nbytes

    def _cannot_hold(self, need: int, path: Match | None = None) -> bool:
        """Return whether pins leave no room for `need` bytes, even if everything else went."""
        limit = self.account.limit
        return self.used() + need > limit and self.staying(path) + need > limit

    def make_room(
        self,
        need: int,
        path: Match | None = None,
        *,
        keep: Collection[Entry] = (),
        reuse: int | None = None,
        seconds: float = math.inf,
    ) -> bool | None:
        """Free `need` bytes: idle buffers, then by `eviction`'s order; False if that cannot be.

        Nothing is evicted where pins leave no room. `path`: tokens that must stay, with their nodes. `keep`:
        checkpoints; nothing is evicted once no others are left. `reuse`: an idle buffer of this size is as
        good as room for one. None where more than `seconds` are needed: what was freed by then is free.
        """
        end = time.monotonic() + seconds
        keep = frozenset(keep)
        self.release_collected()
        if need > 0 and self._cannot_hold(need, path):
            return False
        while (over := self.used() + need - self.account.limit) > 0:
            if reuse is not None and self.account.has_idle(reuse):
                return True
            if not self._free_some(over, path, keep):
                return False
            if time.monotonic() >= end:
                return None
        return True

    def _free_some(self, over: int, path: Match | None = None, keep: Collection[Entry] = ()) -> bool:
        """Free idle buffers, or evict once; False if nothing may be evicted."""
        if self.account.idle_bytes:
            self.account.free(over)
            return True
        victim = self.eviction.victim(self.tree, path, keep)
        if isinstance(victim, Entry):
            self.remove(victim)
            self.counts.evictions += 1
        elif isinstance(victim, Tail):
            self.tree.trim(victim.node, path.needs(victim.node) if path else 0)
        return victim is not None

    def resize(self, limit: int) -> None:
        """Set another budget, and evict down to it, a few at a time, so that other threads have the lock."""
        seconds = math.inf if self.guard.inside() else SLICE_SECONDS
        while self._shrink(limit, seconds):
            time.sleep(YIELD_SECONDS)

    @guarded(False, later=True)
    def _shrink(self, limit: int, seconds: float) -> bool:
        """Lower the budget by what can be evicted in `seconds`; True if more has to go.

        Requests between two calls make room for themselves alone.
        """
        self.release_collected()
        end = time.monotonic() + seconds
        while (over := self.used() - limit) > 0 and self._free_some(over):
            if time.monotonic() >= end:
                self.account.limit = max(limit, self.used())
                return self.used() > limit
        self.account.limit = limit
        return False

    def remove(self, entry: Entry, *, replaced: bool = False) -> None:
        """Take a checkpoint out, with the segments that only it needed; an unused buffer goes to the pool.

        `replaced`: another one comes in its place, so the segments stay.
        """
        node, above = entry.node, entry.above
        assert node is not None
        self.tree.detach(entry)
        if not replaced:
            self.tree.prune(node)
            if above is not None:
                above.deeper_gone = True
        self.kept.discard(entry)
        if entry.pins:
            self.doomed.add(entry)
        else:
            self.account.keep(entry.checkpoint.snapshot)

    # -- pins --------------------------------------------------------------------------------------

    @guarded(later=True)
    def release(self, user: object) -> None:
        """Unpin the checkpoint that `user` (a plan) named; harmless when called twice.

        A plan that is collected is released.
        """
        self._release(user)
        self.make_room(0)

    def _release(self, user: object) -> None:
        entry = self.pins.release(user)
        if entry is not None:
            self._unpinned(entry)

    def release_collected(self) -> None:
        """Release the checkpoints of users that were collected."""
        for entry in self.pins.release_collected():
            self._unpinned(entry)

    def _unpinned(self, entry: Entry) -> None:
        """Let a checkpoint that is out of the tree go with its last user."""
        if not entry.pins and entry in self.doomed:
            self.doomed.remove(entry)
            if entry.recycled:
                self.account.keep(entry.checkpoint.snapshot)

    @property
    def pinned(self) -> Sequence[Tokens]:
        """Prefixes that the user pinned; from any thread."""
        return self.prefixes.tokens

    @guarded(0, later=True)
    def pin(self, tokens: Tokens) -> int:
        """See `PromptCache.pin`."""
        self.prefixes.add(tokens)
        entries = self._on(tokens)
        for entry in entries:
            self._keep(entry, True)
        self.make_room(0)
        return len(entries)

    @guarded(later=True)
    def unpin(self, tokens: Tokens) -> None:
        """See `PromptCache.unpin`."""
        self.prefixes.remove(tokens)
        self._keep_pinned(tokens)
        self.make_room(0)

    def _keep_pinned(self, tokens: Tokens) -> None:
        """Keep only those checkpoints on this path that lie on pinned prefixes, after some were unpinned."""
        for entry in self._on(tokens):
            self._keep(entry, self.prefixes.cover(tokens[: entry.position]))

    def _on(self, tokens: Tokens) -> list[Entry]:
        """Return the checkpoints on a path, of any model."""
        return [e for name in self.tree.namespaces() for e in self.tree.match(name, tokens).entries()]

    def _keep(self, entry: Entry, pinned: bool) -> None:
        entry.user_pinned = pinned
        (self.kept.add if pinned else self.kept.discard)(entry)

    # -- statistics --------------------------------------------------------------------------------

    def _stats(self) -> CacheStats:
        """See `PromptCache.stats`."""
        counts, tree = self.counts, self.tree
        return CacheStats(
            entries=len(tree),
            bytes_ram=self.used(),
            hits=counts.hits,
            misses=counts.misses,
            tokens_saved=counts.tokens_saved,
            evictions=counts.evictions,
            refused=counts.refused,
            segments=tree.segments,
            extra={
                "segment_bytes": tree.segment_bytes,
                "index_bytes": tree.index_bytes,
                "tokens": tree.token_bytes // 4,
                "idle_bytes": self.account.idle_bytes,
                "budget": self.account.limit,
                "damaged": counts.damaged + tree.damaged,
                "restarts": self.guard.restarts,
            },
        )

    def stats(self) -> CacheStats:
        """See `PromptCache.stats`; from inside, too: a signal handler may ask."""
        return self._stats() if self.guard.inside() else self._counted()

    _counted = guarded(changes=False)(_stats)
