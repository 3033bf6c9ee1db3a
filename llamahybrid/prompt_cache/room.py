"""The bytes of a store in RAM: one tree, one lock, one budget, and eviction when room is needed.

Checkpoints and attention segments, buffers idle and handed out, tree nodes and pins all count toward one
account. From any thread; calls from inside (a finaliser, a signal handler) are answered as by an empty
store, see `guard`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llamahybrid.prompt_cache.base import Bytes, CacheStats, LiveView, Segment, Tokens
from llamahybrid.prompt_cache.eviction import Eviction, bytes_to_stay
from llamahybrid.prompt_cache.guard import Guard, Pause, guarded
from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, Entry, Match, Node, ids_of, lies_on
from llamahybrid.prompt_cache.ram import Account, Expected, new_buffer
from llamahybrid.prompt_cache.tree import Cut, Tree

SLICE_SECONDS = 0.01
"""Longest time that evictions for new bytes or a smaller budget hold the lock at once."""

YIELD_SECONDS = 5e-5
"""The sleep in which other threads take the lock."""


class More(Pause):
    """More has to go first; other threads may have the lock before."""

    def spend(self, store: object) -> None:
        """Let them have it."""
        time.sleep(YIELD_SECONDS)


MORE = More()


class User:
    """A user of a checkpoint's bytes."""


@dataclass
class Counts:
    """Counters of a store; see `CacheStats`."""

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    evictions: int = 0
    refused: int = 0


class Room:
    """A tree of checkpoints and segments within a byte budget."""

    def __init__(self, limit: int, eviction: Eviction) -> None:
        """`limit`: bytes."""
        self.guard = Guard()
        self.account = Account(limit, self.guard.dropped)
        self.eviction = eviction
        self.counts = Counts()
        self.prefixes: dict[bytes, Tokens] = {}
        """Prefixes that the user pinned; replaced, never changed, so that any thread may read them."""
        self.tree = Tree()
        self._begin()

    def _begin(self) -> None:
        self.tree = self.tree.emptied()
        self.users: list[tuple[weakref.ref[object], Entry]] = []
        """Plans, and readers of bytes, each with its checkpoint."""
        self.doomed: set[Entry] = set()
        """Checkpoints in use that are no longer in the tree."""
        self.kept: set[Entry] = set()
        """Checkpoints in the tree that the user pinned."""

    def restart(self) -> None:
        """Begin with nothing, after half a change. Checkpoints of plans count until they are collected."""
        for entry in self.in_use():
            self.account.reserve(entry.checkpoint.snapshot)
        self._begin()
        self.account.free_all()

    @guarded()
    def exchange_parts(self, cut: Cut, parts: Sequence[Segment]) -> None:
        """Replace a segment by its parts, see `Tree.exchange`."""
        self.tree.exchange(cut, parts)

    # -- buffers -----------------------------------------------------------------------------------

    def buffer(self, n_bytes: int) -> Bytes:
        """Return a buffer of exactly `n_bytes`, shape (n_bytes,), contents undefined, to fill and `admit`.

        The budget counts a buffer until it is admitted or collected. A buffer that pins leave no room for is
        not counted, and `admit` refuses it.
        """
        counted = self._filled(n_bytes)
        return new_buffer(n_bytes) if counted is None else counted

    def segment_buffer(self, view: LiveView, n_bytes: int) -> Bytes | None:
        """Return a buffer of exactly `n_bytes` for attention of the live path; None if refused.

        The budget counts it until it is kept or collected. Evicts while other paths have anything.
        """
        try:
            return self._filled(n_bytes, view)
        except MemoryError:
            return None

    def _filled(self, n_bytes: int, view: LiveView | None = None) -> Bytes | None:
        """Claim room under the lock, and make the buffer without it."""
        claimed = self._claim(n_bytes, view)
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
    def _claim(self, n_bytes: int, view: LiveView | None) -> Bytes | Expected | Pause | None:
        """Claim an idle buffer, or the room for a new one. `view`: its path's checkpoints are to stay."""
        if view is not None and not view.storable:
            return None
        path = None if view is None else self.tree.match(view.namespace, view.tokens)
        keep = () if path is None else path.entries()
        fits = self.make_room(n_bytes, path, keep=keep, reuse=n_bytes, sliced=True)
        if isinstance(fits, More):
            return fits
        self.counts.refused += view is not None and not fits
        idle = self.account.reuse(n_bytes) if fits else None
        return self.account.reserve(Expected(n_bytes) if idle is None else idle) if fits else None

    @guarded()
    def expect(self, namespace: str, path: Tokens, n_bytes: int) -> Expected | Pause | None:
        """Make room for bytes that are about to be read; None if there is none."""
        match = self.tree.match(namespace, path)
        index_bytes = ENTRY_BYTES + match.growth(len(path) - match.length)
        fits = self.make_room(n_bytes + index_bytes, match, sliced=True)
        if isinstance(fits, More):
            return fits
        self.counts.refused += not fits
        return self.account.reserve(Expected(n_bytes)) if fits else None

    # -- room --------------------------------------------------------------------------------------

    def used(self) -> int:
        """Return the bytes that count toward the budget now."""
        doomed = sum(e.nbytes for e in self.doomed)
        return self.tree.nbytes + doomed + self.account.nbytes + self._prefix_bytes()

    def _prefix_bytes(self) -> int:
        return sum(map(len, self.prefixes))

    def staying(self, path: Match | None = None) -> int:
        """Return the bytes that no eviction frees: in use, handed out, or pinned by the user."""
        held = bytes_to_stay(self.in_use() | self.kept, path)
        return held + self.account.reserved_bytes() + self._prefix_bytes()

    def _cannot_hold(self, need: int, path: Match | None = None) -> bool:
        """Return whether pins leave no room for `need` bytes, even if everything else went."""
        limit = self.account.limit
        return self.used() + need > limit and self.staying(path) + need > limit

    def _room_for(self, need: int, path: Match, old: Entry | None) -> bool | More:
        """Make room for a checkpoint on a path. `old`: its predecessor at the same place, which stays until
        then."""
        user = User()
        if old is not None:
            need -= ENTRY_BYTES + (0 if old.in_use else old.nbytes)
            self.use(user, old)
        fits = not self._cannot_hold(need, path) and self.make_room(need, path, sliced=True)
        self.drop_users(user)
        return fits

    def make_room(
        self,
        need: int,
        path: Match | None = None,
        *,
        keep: Collection[Entry] = (),
        reuse: int | None = None,
        sliced: bool = False,
    ) -> bool | More:
        """Free `need` bytes: idle buffers, then by `eviction`'s order; False if that cannot be.

        Nothing is evicted where pins leave no room. `path`: tokens that must stay, with their nodes. `keep`:
        checkpoints; nothing is evicted once no others are left. `reuse`: an idle buffer of this size is as
        good as room for one. `sliced`: More after `SLICE_SECONDS`; what was freed by then is free.
        """
        self.drop_users()
        if need > 0 and self._cannot_hold(need, path):
            return False
        return self._evict(self.account.limit - need, path, keep, reuse, sliced)

    def _evict(
        self,
        limit: int,
        path: Match | None = None,
        keep: Collection[Entry] = (),
        reuse: int | None = None,
        sliced: bool = False,
    ) -> bool | More:
        """Free bytes until no more than `limit` are used; arguments and result as of `make_room`."""
        end, keep = time.monotonic() + SLICE_SECONDS, frozenset(keep)
        while (over := self.used() - limit) > 0:
            if reuse is not None and self.account.has_idle(reuse):
                return True
            if self.account.idle_bytes:
                self.account.free(over)
            elif isinstance(victim := self.eviction.victim(self.tree, path, keep), Entry):
                self.remove(victim)
                self.counts.evictions += 1
            elif victim is not None:
                self.tree.trim(victim, path.needs(victim) if path else 0)
            else:
                return False
            if sliced and time.monotonic() >= end:
                return MORE
        return True

    def resize(self, limit: int) -> None:
        """Set another budget, and evict down to it, a few at a time, so that other threads have the lock."""
        self._shrink(limit, sliced=not self.guard.inside())

    @guarded(later=True)
    def _shrink(self, limit: int, *, sliced: bool) -> Pause | None:
        """Lower the budget; requests between two slices make room for themselves alone."""
        self.drop_users()
        more = isinstance(self._evict(limit, sliced=sliced), More)
        self.account.limit = max(limit, self.used()) if more else limit
        return MORE if self.account.limit > limit else None

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
        if entry.in_use:
            self.doomed.add(entry)
        else:
            self.account.keep(entry.checkpoint.snapshot)

    def remove_below(self, top: Node, stays: int) -> None:
        """Remove an edge and everything below it, except what ends within its first `stays` tokens."""
        leaf = top.leaf()
        while True:  # one leaf at a time: the tree closes up behind it
            while leaf.segments and leaf.segments[-1].end > stays:
                self.tree.shorten(leaf)
            for entry in [e for e in leaf.entries.values() if e.position > stays]:
                self.remove(entry)
            parent = leaf.parent
            self.tree.trim(leaf)
            if leaf is top or parent is None:
                return
            leaf = parent.leaf()

    # -- pins --------------------------------------------------------------------------------------

    @guarded(later=True)
    def release(self, user: object) -> None:
        """Unpin the checkpoint that `user` (a plan) named; harmless when called twice.

        A plan that is collected is released.
        """
        self.drop_users(user)
        self.make_room(0)

    def use(self, user: object, entry: Entry) -> None:
        """Keep a checkpoint's bytes until `user` is dropped or collected."""
        self.users.append((weakref.ref(user), entry))
        entry.in_use = True

    def in_use(self) -> set[Entry]:
        """Return the checkpoints that users name."""
        return {entry for _, entry in self.users}

    def drop_users(self, user: object = None) -> None:
        """Drop `user` and those that were collected; a checkpoint out of the tree goes with its last one."""
        before = self.in_use()
        self.users = [(ref, e) for ref, e in self.users if (it := ref()) is not None and it is not user]
        for entry in before - self.in_use():
            entry.in_use = False
            if entry in self.doomed:
                self.doomed.remove(entry)
                if entry.recycled:
                    self.account.keep(entry.checkpoint.snapshot)

    @property
    def pinned(self) -> Sequence[Tokens]:
        """Prefixes that the user pinned; from any thread."""
        return list(self.prefixes.values())

    @guarded(0, later=True)
    def pin(self, tokens: Tokens) -> int:
        """See `PromptCache.pin`."""
        if len(tokens):
            self.prefixes = {**self.prefixes, ids_of(tokens): tokens}
        entries = self._on(tokens)
        for entry in entries:
            self._keep(entry, True)
        self.make_room(0)
        return len(entries)

    @guarded(later=True)
    def unpin(self, tokens: Tokens) -> None:
        """See `PromptCache.unpin`."""
        self._unpin(tokens, lambda ids: ids == ids_of(tokens))
        self.make_room(0)

    def _unpin(self, tokens: Tokens, gone: Callable[[bytes], bool]) -> None:
        """Unpin prefixes; checkpoints on this path are kept no longer, unless they lie on another one."""
        self.prefixes = {ids: prefix for ids, prefix in self.prefixes.items() if not gone(ids)}
        for entry in self._on(tokens):
            self._keep(entry, lies_on(tokens[: entry.position], self.prefixes))

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
                "damaged": tree.damaged,
                "restarts": self.guard.restarts,
            },
        )

    def stats(self) -> CacheStats:
        """See `PromptCache.stats`; from inside, too: a signal handler may ask."""
        return self._stats() if self.guard.inside() else self._counted()

    _counted = guarded(changes=False)(_stats)
