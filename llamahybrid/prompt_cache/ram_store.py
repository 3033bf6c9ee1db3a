"""What lies in RAM and what it takes: the tree, buffers idle and handed out, pins, all within one account.

Not locked: that is its owner's. After an exception in the middle of a change there is no telling what holds,
so a store is then given up for a new one (`renewed`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamahybrid.prompt_cache.base import (
    NOTHING,
    CacheStats,
    Checkpoint,
    Costs,
    Logits,
    Tokens,
)
from llamahybrid.prompt_cache.eviction import Eviction, Tail, bytes_to_stay
from llamahybrid.prompt_cache.nodes import Entry, Match, Node
from llamahybrid.prompt_cache.pins import Pins, Prefixes, User, pinned_before
from llamahybrid.prompt_cache.ram import Account
from llamahybrid.prompt_cache.tree import Tree

MOST_NAMES = 64
"""Namespaces that a little is kept of although they have no path any more: there is one for each salt."""


@dataclass
class Counts:
    """What happened so far; see `CacheStats`."""

    hits: int = 0
    misses: int = 0
    tokens_saved: int = 0
    evictions: int = 0
    refused: int = 0
    damaged: int = 0
    """Segments that did not prove right, but for those that the present tree counts."""


class RamStore:
    """Checkpoints and segments in RAM, within an account's limit but for what is pinned or handed out."""

    def __init__(self, account: Account, eviction: Eviction, counts: Counts | None = None) -> None:
        self.account = account
        """Buffers that are idle, or handed out and not kept yet, and what is about to be read from disk."""
        self.counts = Counts() if counts is None else counts
        self.eviction = eviction
        self.tree = Tree()
        self.pins = Pins()
        self.doomed: set[Entry] = set()
        """Out of the tree, but pinned."""
        self.tails: dict[str, int] = {}
        """See `Outline.tail`; by namespace."""
        self.boundaries: dict[str, frozenset[int]] = {}
        """Of the last prompt, by namespace."""
        self.prefixes = Prefixes()
        """What the user pinned."""
        self.kept: set[Entry] = set()
        """Checkpoints in the tree that lie there."""

    @property
    def pinned(self) -> Sequence[Tokens]:
        """Prefixes that the user pinned; from any thread."""
        return self.prefixes.tokens

    def renewed(self) -> RamStore:
        """An empty one with the same account, eviction, and prefixes that the user pinned.

        What plans name stays theirs, and counts until they are released.
        """
        store = RamStore(self.account, self.eviction, self.counts)
        store.account.free_all()
        store.account.excess = 0
        store.tree.requests = self.tree.requests
        store.prefixes = self.prefixes.copy()
        for entry in self.pins.entries():
            store.account.reserve(entry.checkpoint.snapshot)
        return store

    def used(self) -> int:
        """Bytes that count toward the budget now."""
        doomed = sum(e.nbytes for e in self.doomed)
        stored = self.tree.token_bytes + self.tree.entry_bytes + self.tree.segment_bytes
        return stored + doomed + self.account.nbytes + self.prefixes.nbytes

    def let_names_go(self, namespace: str) -> None:
        """Forget what is known of namespaces without a path, but this one, where those are many."""
        known: dict[str, Any]
        for known in (self.tails, self.boundaries, self.tree.splitters):
            if len(known) > MOST_NAMES:
                for name in known.keys() - {namespace, *self.tree.namespaces()}:
                    del known[name]

    def most_cuts(self, costs: Costs) -> int:
        """Cuts whose snapshots fill half the budget: the other half keeps what is known already."""
        return max(1, self.account.limit // (2 * max(1, costs.snapshot_bytes)))

    def put(self, match: Match, checkpoint: Checkpoint, path: Tokens, marked: bool = False) -> Entry:
        """Index a checkpoint at the end of `path`, which lies on this match of an inserted path.

        `marked`: a message, or a marked part of one, starts there.
        """
        entry = self.tree.attach(match, checkpoint, marked)
        self._keep(entry, self.prefixes.cover(path))
        return entry

    def anchor(self, namespace: str, match: Match, path: Tokens) -> Entry:
        """A checkpoint without a snapshot at the end of `path`, on this match: attention before it stays."""
        return self.put(match, Checkpoint(namespace, len(path), NOTHING), path)

    def remove(self, entry: Entry, *, replaced: bool = False) -> None:
        """Take a checkpoint out, with the segments only it needed; its buffer goes to the pool when unused.

        `replaced`: another one comes in its place, so the segments stay.
        """
        node = entry.node
        assert node is not None
        above = entry.above
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

    def pin(self, tokens: Tokens) -> int:
        """Keep the checkpoints on this path, now and later; how many there are."""
        self.prefixes.add(tokens)
        entries = self._on(tokens)
        for entry in entries:
            self._keep(entry, True)
        self.make_room(0)
        return len(entries)

    def unpin(self, tokens: Tokens) -> None:
        """Let what was kept for this path go again."""
        self.prefixes.remove(tokens)
        self._keep_pinned(tokens)
        self.make_room(0)

    def _keep_pinned(self, tokens: Tokens) -> None:
        """Prefixes went: keep the checkpoints on this path that lie on others, and no more."""
        for entry in self._on(tokens):
            self._keep(entry, self.prefixes.cover(tokens[: entry.position]))

    def _on(self, tokens: Tokens) -> list[Entry]:
        """The checkpoints on a path, of any model."""
        return [e for name in self.tree.namespaces() for e in self.tree.match(name, tokens).entries()]

    def _keep(self, entry: Entry, pinned: bool) -> None:
        entry.user_pinned = pinned
        (self.kept.add if pinned else self.kept.discard)(entry)

    def clear(self) -> None:
        """Take out everything; what is in use goes with its last user."""
        for entry in list(self.tree.oldest_entries()):
            self.remove(entry)
        self.counts.damaged += self.tree.damaged
        self.tree = Tree()
        self.account.free_all()
        self.prefixes = Prefixes()

    def forget(self, tokens: Tokens) -> int:
        """Take out a path and all that goes on from it, but for what others share; bytes freed.

        Pins of it go. One of its beginning holds that. A path of no tokens is none.
        """
        if not len(tokens):
            return 0
        before = self.used() - self.account.idle_bytes
        stays = pinned_before(self.pinned, tokens)
        for name in self.tree.namespaces():
            match = self.tree.match(name, tokens)
            top = match.own_edge(len(tokens))
            if top is not None:
                self.tree.divide(name, match, stays)
                self._forget_below(top, stays)
        for entry in self.doomed:  # still in use: their bytes go back to the system afterwards
            entry.recycled = False
        self.prefixes.forget(tokens)
        self._keep_pinned(tokens)
        self.account.free_all()  # their bytes are not to lie about
        freed = before - self.used()
        self.make_room(0)
        return freed

    def _forget_below(self, top: Node, stays: int) -> None:
        """Take out what lies on an edge and below it, but for what ends within its first `stays` tokens."""
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

    def release(self, user: object) -> None:
        """`user` no longer needs its checkpoint: one that is out of the tree goes with its last user."""
        entry = self.pins.release(user)
        if entry is not None:
            self._unpinned(entry)

    def release_collected(self) -> None:
        """Release what users need that were collected before they did so."""
        for entry in self.pins.release_collected():
            self._unpinned(entry)

    def _unpinned(self, entry: Entry) -> None:
        if not entry.pins and entry in self.doomed:
            self.doomed.remove(entry)
            if entry.recycled:
                self.account.keep(entry.checkpoint.snapshot)

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

        Nothing goes for what pins leave no room for. `path`: tokens that must stay, with the nodes they lie
        on. `keep`: checkpoints; nothing goes once no others are left. `reuse`: an idle buffer of this size is
        as good as room for one. None: it has taken so many `seconds` already, and is not done.
        """
        end, keep = time.monotonic() + seconds, frozenset(keep)
        self.release_collected()
        if need > 0 and self.cannot_hold(need, path):
            return False
        while (over := self.used() + need - self.account.limit - self.account.excess) > 0:
            if reuse is not None and self.account.has_idle(reuse):
                return True
            if not self._free_some(over, path, keep):
                return False
            if time.monotonic() >= end:
                return None
        return True

    def _free_some(self, over: int, path: Match | None = None, keep: Collection[Entry] = ()) -> bool:
        """Free idle buffers, or what goes first; False if nothing may."""
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

    def shrink(self, seconds: float) -> bool:
        """Free what lies beyond the limit, for so long at most; whether more is to go.

        Until it has, the account allows for that: who wants room meanwhile makes it for himself alone.
        """
        self.release_collected()
        account, end = self.account, time.monotonic() + seconds
        account.excess = 0
        while (over := self.used() - account.limit) > 0 and self._free_some(over):
            if time.monotonic() >= end:
                account.excess = max(0, self.used() - account.limit)
                return account.excess > 0
        return False

    def room_for(self, need: int, path: Match, old: Entry | None) -> bool:
        """`make_room` for a checkpoint on a path. `old`: the one at its place, to be replaced afterwards.

        Until then that one stays, and what the user pinned with it.
        """
        self.release_collected()
        user = User()
        if old is not None:
            need -= 0 if old.pins else old.nbytes
            self.pins.use(user, old)
        fits = not self.cannot_hold(need, path) and bool(self.make_room(need, path))
        self.release(user)
        return fits

    def cannot_hold(self, need: int, path: Match | None = None) -> bool:
        """Return whether pins leave no room for `need` bytes, whatever else went; see `make_room`."""
        limit = self.account.limit
        return self.used() + need > limit and self.staying(path) + need > limit

    def staying(self, path: Match | None = None) -> int:
        """Bytes that no eviction frees: in use, handed out, or pinned by the user; see `make_room`."""
        held = bytes_to_stay(self.pins.entries() | self.kept, path)
        return held + self.account.reserved_bytes() + self.prefixes.nbytes

    def stats(self, restarts: int) -> CacheStats:
        """See `RamTier.stats`."""
        counts = self.counts
        return CacheStats(
            entries=len(self.tree),
            bytes_ram=self.used(),
            hits=counts.hits,
            misses=counts.misses,
            tokens_saved=counts.tokens_saved,
            evictions=counts.evictions,
            refused=counts.refused,
            segments=sum(len(n.segments) for n in self.tree.oldest_nodes()),
            extra={
                "segment_bytes": self.tree.segment_bytes,
                "tokens": self.tree.token_bytes // 4,
                "idle_bytes": self.account.idle_bytes,
                "budget": self.account.limit,
                "damaged": counts.damaged + self.tree.damaged,
                "restarts": restarts,
            },
        )


def row(logits: Logits | None) -> Logits | None:
    """A copy of logits to keep."""
    return None if logits is None else np.array(logits, dtype=np.float32)
