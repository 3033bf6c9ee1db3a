"""The bytes of a store in RAM: one tree, one lock, one budget, and eviction when room is needed.

Checkpoints and attention segments, buffers that are handed out, tree nodes and pins all count toward one
account. From any thread, see `guard`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from weakref import ref

from llamahybrid.prompt_cache.base import Bytes, CacheStats, LiveView, Plan, Tokens
from llamahybrid.prompt_cache.eviction import Eviction, bytes_to_stay
from llamahybrid.prompt_cache.guard import Guard, Pause, guarded
from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, Entry, Match, Node, ids_of, lies_on
from llamahybrid.prompt_cache.ram import Account, Expected, new_buffer
from llamahybrid.prompt_cache.tree import Tree

SLICE_SECONDS = 0.01
"""Longest time that evictions for new bytes or a smaller budget hold the lock at once."""

YIELD_SECONDS = 5e-5
"""The sleep in which other threads take the lock."""


class More(Pause):
    """More has to go first; other threads may have the lock before."""

    def spend(self, store: object) -> None:
        """Let them have it."""
        time.sleep(YIELD_SECONDS)


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

    def __init__(self, limit: int) -> None:
        """`limit`: bytes."""
        self.guard = Guard()
        self.account = Account(limit)
        self.eviction = Eviction()
        self.counts = Counts()
        self.prefixes: dict[bytes, Tokens] = {}
        """Prefixes that the user pinned; replaced, never changed, so that any thread may read them."""
        self.tree = Tree()
        self._begin()

    def _begin(self) -> None:
        self.tree = Tree(self.tree.damaged)
        self.users: list[tuple[ref[Plan], Entry]] = []
        """Plans, each with its checkpoint in the tree."""
        self.kept: set[Entry] = set()
        """Checkpoints in the tree that the user pinned."""

    def restart(self) -> None:
        """Begin with nothing. Checkpoints of plans count until they are collected."""
        for _, entry in self.users:
            self.account.reserve(entry.checkpoint.snapshot)
        self.guard.dropped.append(self.tree)
        self._begin()

    # -- buffers -----------------------------------------------------------------------------------

    def buffer(self, n_bytes: int) -> Bytes:
        """Return a buffer of exactly `n_bytes`, shape (n_bytes,), contents undefined, to fill and `admit`.

        The budget counts a buffer until it is admitted or collected. A buffer that pins leave no room for is
        not counted, and `admit` refuses it.
        """
        return self._made(n_bytes, self._claim(n_bytes, None))

    def segment_buffer(self, view: LiveView, n_bytes: int) -> Bytes | None:
        """Return a buffer of exactly `n_bytes` for attention of the live path; None if refused.

        The budget counts it until it is kept or collected. Evicts while other paths have anything.
        """
        room = self._claim(n_bytes, view)
        try:
            return None if room is None else self._made(n_bytes, room)
        except MemoryError:
            return None

    def _made(self, n_bytes: int, room: Expected | None) -> Bytes:
        """Make a buffer, without the lock; it is counted in place of its room."""
        buffer = new_buffer(n_bytes)
        if room is not None:
            self._exchange(room, buffer)
        return buffer

    @guarded()
    def _exchange(self, room: Expected, buffer: Bytes) -> None:
        self.account.unreserve(room)
        self.account.reserve(buffer)

    @guarded()
    def _claim(self, n_bytes: int, view: LiveView | None) -> Expected | None:
        """Make room for a buffer, and count it. `view`: its path's checkpoints are to stay."""
        if view is not None and not view.storable:
            return None
        path = None if view is None else self.tree.match(view.namespace, view.tokens)
        keep = () if path is None else path.entries()
        fits = self.make_room(n_bytes, path, keep=keep, sliced=True)
        self.counts.refused += view is not None and not fits
        return self._expected(n_bytes) if fits else None

    @guarded()
    def expect(self, namespace: str, path: Tokens, n_bytes: int) -> Expected | None:
        """Make room for bytes that are about to be read; None if there is none."""
        match = self.tree.match(namespace, path)
        index_bytes = ENTRY_BYTES + match.growth(len(path) - match.length)
        fits = self.make_room(n_bytes + index_bytes, match, sliced=True)
        self.counts.refused += not fits
        return self._expected(n_bytes) if fits else None

    def _expected(self, n_bytes: int) -> Expected:
        room = Expected(n_bytes)
        self.account.reserve(room)
        return room

    # -- room --------------------------------------------------------------------------------------

    def used(self) -> int:
        """Return the bytes that count toward the budget now."""
        return self.tree.nbytes + self.account.nbytes + self._prefix_bytes()

    def _prefix_bytes(self) -> int:
        return sum(map(len, self.prefixes))

    def held(self) -> set[Entry]:
        """Return the checkpoints that may not be evicted: in use, or pinned by the user."""
        self.users = [(user, entry) for user, entry in self.users if user() is not None]
        return self.kept.union(entry for _, entry in self.users)

    def in_use(self, entry: Entry) -> bool:
        """Return whether a plan needs a checkpoint."""
        return any(used is entry for _, used in self.users)

    def staying(self, path: Match | None = None, held: Collection[Entry] | None = None) -> int:
        """Return the bytes that no eviction frees: in use, handed out, or pinned by the user."""
        stay = bytes_to_stay(self.held() if held is None else held, path)
        return stay + self.account.nbytes + self._prefix_bytes()

    def make_room(
        self,
        need: int,
        path: Match | None = None,
        *,
        keep: Collection[Entry] = (),
        replaces: Entry | None = None,
        sliced: bool = False,
    ) -> bool:
        """Free `need` bytes by `eviction`'s order; False if that cannot be.

        Nothing is evicted where pins leave no room. `path`: tokens that must stay, with their nodes. `keep`:
        checkpoints; nothing is evicted once no others are left. `replaces`: a checkpoint that stays until it
        is replaced. `sliced`: raises More after `SLICE_SECONDS`; what was freed by then is free.
        """
        limit = self.account.limit - need
        held = self.held() if replaces is None else self.held() | {replaces}
        if need > 0 and self.used() > limit and self.staying(path, held) > limit:
            return False
        end, keep = time.monotonic() + SLICE_SECONDS, frozenset(keep)
        while self.used() > limit:
            victim = self.eviction.victim(self.tree, path, held, keep)
            if isinstance(victim, Entry):
                self.remove(victim)
                self.counts.evictions += 1
            elif victim is not None:
                self.tree.trim(victim, path.needs(victim) if path else 0)
            else:
                return False
            if sliced and time.monotonic() >= end:
                raise More
        return True

    @guarded(later=True)
    def resize(self, limit: int) -> None:
        """Set another budget, and evict down to it; requests meanwhile make room for themselves alone."""
        self.account.limit = limit
        try:
            self.make_room(0, sliced=True)
        except More:
            self.account.limit = max(limit, self.used())
            raise

    def remove(self, entry: Entry, *, replaced: bool = False) -> None:
        """Take a checkpoint out, with the segments that only it needed.

        A checkpoint in use counts until it is collected. `replaced`: another one comes in its place, so the
        segments stay.
        """
        node = entry.node
        assert node is not None
        self.tree.detach(entry)
        if not replaced:
            self.tree.prune(node)
        self.kept.discard(entry)
        snapshot = entry.checkpoint.snapshot
        if self.in_use(entry):
            self.account.reserve(snapshot)
        else:
            self.guard.dropped.append(snapshot)  # the system takes its time to take memory back
        self.users = [(user, used) for user, used in self.users if used is not entry]

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
    def release(self, plan: Plan) -> None:
        """Let the checkpoint of a plan go; harmless when called twice.

        A plan that is collected is released.
        """
        self.users = [(other, entry) for other, entry in self.users if other() is not plan]
        self.make_room(0)

    @property
    def pinned(self) -> Sequence[Tokens]:
        """Prefixes that the user pinned; from any thread."""
        return list(self.prefixes.values())

    @guarded(lambda *_: 0, later=True)
    def pin(self, tokens: Tokens) -> int:
        """See `PromptCache.pin`."""
        if len(tokens):
            self.prefixes = {**self.prefixes, ids_of(tokens): tokens}
        entries = self._on(tokens)
        self.kept.update(entries)
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
        on = self._on(tokens)
        self.kept.difference_update(e for e in on if not lies_on(tokens[: e.position], self.prefixes))

    def _on(self, tokens: Tokens) -> list[Entry]:
        """Return the checkpoints on a path, of any model."""
        return [e for name in self.tree.namespaces() for e in self.tree.match(name, tokens).entries()]

    # -- statistics --------------------------------------------------------------------------------

    @guarded(changes=False)
    def stats(self) -> CacheStats:
        """See `PromptCache.stats`."""
        tree = self.tree
        return CacheStats(
            entries=len(tree),
            bytes_ram=self.used(),
            segments=tree.segments,
            **vars(self.counts),
            extra={
                "segment_bytes": tree.segment_bytes,
                "index_bytes": tree.index_bytes,
                "tokens": tree.token_bytes // 4,
                "budget": self.account.limit,
                "damaged": tree.damaged,
                "restarts": self.guard.restarts,
            },
        )
