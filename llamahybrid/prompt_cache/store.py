"""What conversations leave behind in memory: one tree, one lock, one byte budget.

Checkpoints and attention segments, buffers idle and handed out, and pins all count toward one account. From
any thread; calls from inside (a finaliser, a signal handler) are answered as by an empty store, see `guard`.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from llamahybrid.prompt_cache.base import (
    NOTHING,
    Bytes,
    CacheStats,
    Checkpoint,
    Costs,
    LiveState,
    LiveView,
    Loaded,
    Logits,
    Outside,
    Plan,
    Range,
    Segment,
    Splitter,
    Tokens,
    clipped,
    part_of,
)
from llamahybrid.prompt_cache.eviction import Eviction, Tail, bytes_to_stay
from llamahybrid.prompt_cache.guard import SLICE_SECONDS, Guard, guarded, in_slices
from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, Entry, Match, Node, common_prefix
from llamahybrid.prompt_cache.pins import Pins, Prefixes, User, pinned_before
from llamahybrid.prompt_cache.planning import Known, plan_request, restore_point, unplanned
from llamahybrid.prompt_cache.ram import Account, Expected, new_buffer, owned
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.write_policy import Point, restart_points

MOST_NAMES = 64
"""Namespaces that a little is kept of although they have no path any more: there is one for each salt."""

RESTARTED = "an exception came while the prompt cache was changed; what it held in RAM is gone"

Found = TypeVar("Found")


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
    """Checkpoints and attention in RAM. Methods that `PromptCache` has, too, do what is said there."""

    def __init__(self, limit: int, eviction: Eviction) -> None:
        self.guard = Guard(self._restart, RESTARTED)
        self.account = Account(limit)
        self.eviction = eviction
        self.counts = Counts()
        self.prefixes = Prefixes()
        """What the user pinned."""
        self._followed: list[weakref.ref[LiveState]] = []
        """Contexts that `forget` has to reach."""
        self._forgets = 0
        self._begin()

    def _begin(self) -> None:
        self.tree = Tree()
        self.pins = Pins()
        self.doomed: set[Entry] = set()
        """Out of the tree, but in use."""
        self.kept: set[Entry] = set()
        """Checkpoints in the tree that the user pinned."""
        self.tails: dict[str, int] = {}
        """See `Outline.tail`; by namespace."""
        self.boundaries: dict[str, frozenset[int]] = {}
        """Of the last prompt, by namespace."""

    def _restart(self) -> None:
        """Begin with nothing, after half a change. What plans name counts until it is collected."""
        for entry in self.pins.entries():
            self.account.reserve(entry.checkpoint.snapshot)
        requests, damaged = self.tree.requests, self.tree.damaged
        self._begin()
        self.tree.requests, self.tree.damaged = requests, damaged
        self.prefixes = self.prefixes.copy()
        self.account.free_all()
        self.account.excess = 0

    @guarded(changes=False)
    def look(self, see: Callable[[RamStore], Found]) -> Found | None:
        """Return `see(self)`, which leaves all as it is; None from inside."""
        return see(self)

    # -- a request's start -------------------------------------------------------------------------

    @guarded(True, changes=False)
    def follow(self, state: LiveState, prompt: Tokens) -> bool:
        """See `PromptCache.follow`."""
        if state.forgotten and len(state.tokens()):
            return False
        others = [ref for ref in self._followed if ref() is not None and ref() is not state]
        self._followed = [*others, weakref.ref(state)]
        state.prompt = prompt  # before the mark goes: `forget` may be next
        state.forgotten = False
        return True

    @guarded(lambda tokens, *_: unplanned(len(tokens)))
    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """See `PromptCache.plan`; a plan pins one entry at most."""
        self.release_collected()
        if boundaries:
            self.boundaries[view.namespace] = frozenset(boundaries)
        if view.split is not None:
            self.tree.splitters[view.namespace] = view.split
        self._let_names_go(view.namespace)
        match = self.tree.match(view.namespace, tokens)
        entries = match.entries()
        self.eviction.learn(self.tree, match, entries)
        self.tree.visit(match, entries)
        self.tree.touch(match)
        tail, limit = self.tails.get(view.namespace, 0), self.account.limit
        plan, entry = plan_request(self.tree, match, tokens, view, boundaries, costs, limit, tail)
        if plan.outline is not None:
            self.tails[view.namespace] = plan.outline.tail
        if entry is None and view.attention_is_all and plan.source == "ram":  # attention before it stays
            entry = self._put(match, Checkpoint(view.namespace, plan.cached, NOTHING), tokens[: plan.cached])
        if entry is not None:
            entry.read_from = None
            self.tree.touch_entry(entry)
            self.pins.use(plan, entry)
        self.make_room(0)  # a segment in two parts takes a little more
        self.counts.hits += plan.cached > 0
        self.counts.misses += plan.cached == 0
        self.counts.tokens_saved += plan.cached
        return plan

    @guarded(0, changes=False)
    def peek(self, tokens: Tokens, view: LiveView, costs: Costs) -> int:
        """See `PromptCache.peek`."""
        live = 0 if view.forgotten else common_prefix(tokens, view.tokens)
        match = self.tree.match(view.namespace, tokens)
        return restore_point(match, match.entries(), len(tokens), live, view, costs)[0].position

    @guarded(later=True)
    def release(self, user: object) -> None:
        """Let go of the checkpoint that a plan, or another user, needs."""
        self._release(user)
        self.make_room(0)

    def _let_names_go(self, namespace: str) -> None:
        """Forget what is known of namespaces without a path, but this one, where those are many."""
        known: dict[str, Any]
        for known in (self.tails, self.boundaries, self.tree.splitters):
            if len(known) > MOST_NAMES:
                for name in known.keys() - {namespace, *self.tree.namespaces()}:
                    del known[name]

    # -- what is stored ----------------------------------------------------------------------------

    def admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None) -> bool:
        """See `PromptCache.admit`."""
        if not 0 < position <= len(view.tokens):
            raise ValueError(f"no position {position} in a live sequence of {len(view.tokens)} tokens")
        if not view.storable:
            return False
        row = None if logits is None else np.array(logits, dtype=np.float32)
        return self._admit(view, position, snapshot, row)

    @guarded(False)
    def _admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None) -> bool:
        path = view.tokens[:position]
        match = self.tree.match(view.namespace, path)
        old = next((e for e in match.entries()[-1:] if e.position == position), None)
        if logits is None and old is not None:
            logits = old.checkpoint.logits
        need = snapshot.nbytes + (0 if logits is None else logits.nbytes) + ENTRY_BYTES
        need += match.growth(position - match.length)
        if not self._room_for(need - self.account.reserved(snapshot), match, old):
            self.counts.refused += 1
            return False
        if old is not None:
            self.remove(old, replaced=True)
        self.account.unreserve(snapshot)
        checkpoint = Checkpoint(view.namespace, position, owned(snapshot), logits)
        checkpoint.snapshot.flags.writeable = False
        match = self.tree.insert(view.namespace, path)
        entry = self._put(match, checkpoint, path, position in self.boundaries.get(view.namespace, ()))
        asked = prompt_end(view.tokens, view.state)
        entry.turns = match.turns(asked) if asked else max(0, match.turns(position) - 1)
        match.end_prompt(asked)
        if old is not None:
            entry.take_over(old)
        self.make_room(0)
        return entry.node is not None

    def _room_for(self, need: int, path: Match, old: Entry | None) -> bool:
        """Make room for a checkpoint on a path. `old`: the one at its place, which stays until then, with
        what the user pinned."""
        user = User()
        if old is not None:
            need -= ENTRY_BYTES + (0 if old.pins else old.nbytes)
            self.pins.use(user, old)
        fits = not self._cannot_hold(need, path) and bool(self.make_room(need, path))
        self._release(user)
        return fits

    def _put(self, match: Match, checkpoint: Checkpoint, path: Tokens, marked: bool = False) -> Entry:
        """Index a checkpoint at the end of `path`, on this match. `marked`: a message starts there."""
        entry = self.tree.attach(match, checkpoint, marked)
        self._keep(entry, self.prefixes.cover(path))
        return entry

    @guarded(lambda *_: [], changes=False)
    def missing(self, view: LiveView) -> list[Range]:
        """See `PromptCache.missing`."""
        match = self.tree.match(view.namespace, view.tokens)
        entries = match.entries()
        wanted = entries and view.split is not None and view.storable
        return match.missing(entries[-1].position) if wanted else []

    @guarded(0, changes=False)
    def unstored(self, view: LiveView) -> int:
        """See `PromptCache.unstored`."""
        if not view.storable:
            return 0
        entries = self.tree.match(view.namespace, view.tokens).entries()
        return len(view.tokens) - (entries[-1].position if entries else 0)

    @guarded(False)
    def _has_room(self, n_bytes: int, namespace: str, path: Tokens) -> bool:
        """Make room for attention of a path; not at the price of its own checkpoints."""
        match = self.tree.match(namespace, path)
        fits = bool(self.make_room(n_bytes, match, keep=match.entries()))
        self.counts.refused += not fits
        return fits

    def segment_buffer(self, view: LiveView, n_bytes: int) -> Bytes | None:
        """See `PromptCache.segment_buffer`."""
        if not view.storable or not self._has_room(n_bytes, view.namespace, view.tokens):
            return None
        return self._reserved(new_buffer(n_bytes))

    @guarded(False)
    def store_segment(self, view: LiveView, segment: Segment) -> bool:
        """See `PromptCache.store_segment`."""
        if not view.storable:
            return False
        match = self.tree.match(view.namespace, view.tokens)
        counted = self.account.reserved(segment.record)
        fits = self.make_room(segment.nbytes - counted, match, keep=match.entries())
        match = self.tree.match(view.namespace, view.tokens)
        needed = any(e.position > segment.start for e in match.entries())
        stored = bool(fits and needed and match.length >= segment.end and self.tree.store(match, segment))
        self.account.unreserve(segment.record)
        self.counts.refused += not fits
        return stored

    @guarded()
    def remember(
        self, namespace: str, tokens: Tokens, state: LiveState | None = None, forgets: int | None = None
    ) -> None:
        """See `PromptCache.remember`. `forgets`: not if anything was forgotten since (`Known.forgets`)."""
        if (state is not None and state.forgotten) or forgets not in (None, self._forgets):
            return
        match = self.tree.match(namespace, tokens)
        if self.make_room(match.growth(len(tokens) - match.length), match, keep=match.entries()):
            self.tree.insert(namespace, tokens).end_prompt(prompt_end(tokens, state))
            self.make_room(0)

    def remove(self, entry: Entry, *, replaced: bool = False) -> None:
        """Take a checkpoint out, with the segments only it needed; its buffer goes to the pool when unused.

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

    # -- buffers and room --------------------------------------------------------------------------

    def buffer(self, n_bytes: int) -> Bytes:
        """See `PromptCache.buffer`."""
        in_slices(partial(self._make_way, n_bytes))
        fits, buffer = self._reuse(n_bytes)
        if not fits:
            return new_buffer(n_bytes)  # to be refused by `admit`: were it counted, others would go for it
        return self._reserved(new_buffer(n_bytes)) if buffer is None else buffer

    @guarded(False)
    def _make_way(self, n_bytes: int, seconds: float) -> bool:
        """Let some of the thousands go that may have to for one buffer; True if more have to."""
        return self.make_room(n_bytes, reuse=n_bytes, seconds=seconds) is None

    @guarded((False, None))
    def _reuse(self, n_bytes: int) -> tuple[bool, Bytes | None]:
        """Return whether a buffer fits, and an idle one, if there is one."""
        fits = bool(self.make_room(n_bytes, reuse=n_bytes))
        buffer = self.account.reuse(n_bytes) if fits else None
        return fits, None if buffer is None else self.account.reserve(buffer)

    @guarded(lambda buffer: buffer)
    def _reserved(self, buffer: Bytes) -> Bytes:
        return self.account.reserve(buffer)

    def used(self) -> int:
        """Bytes that count toward the budget now."""
        doomed = sum(e.nbytes for e in self.doomed)
        return self.tree.nbytes + doomed + self.account.nbytes + self.prefixes.nbytes

    def staying(self, path: Match | None = None) -> int:
        """Bytes that no eviction frees: in use, handed out, or pinned by the user; see `make_room`."""
        held = bytes_to_stay(self.pins.entries() | self.kept, path)
        return held + self.account.reserved_bytes() + self.prefixes.nbytes

    def _cannot_hold(self, need: int, path: Match | None = None) -> bool:
        """Return whether pins leave no room for `need` bytes, whatever else went."""
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

        Nothing goes for what pins leave no room for. `path`: tokens that must stay, with the nodes they lie
        on. `keep`: checkpoints; nothing goes once no others are left. `reuse`: an idle buffer of this size is
        as good as room for one. None: it has taken so many `seconds` already, and is not done.
        """
        end, keep = time.monotonic() + seconds, frozenset(keep)
        self.release_collected()
        if need > 0 and self._cannot_hold(need, path):
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

    def resize(self, limit: int) -> None:
        """Set another budget: what no longer fits goes, a few at a time, so that others have the lock."""
        try:
            self.account.limit = limit
            if self._shrink(math.inf if self.guard.inside() else SLICE_SECONDS):
                in_slices(self._shrink)
        finally:
            self.account.excess = 0  # after an interrupt the rest goes as others want room

    @guarded(False, later=True)
    def _shrink(self, seconds: float) -> bool:
        """Free what lies beyond the limit, for so long at most; True if more is to go.

        Until it has, the account allows for that: a request makes room for itself alone.
        """
        self.release_collected()
        account, end = self.account, time.monotonic() + seconds
        account.excess = 0
        while (over := self.used() - account.limit) > 0 and self._free_some(over):
            if time.monotonic() >= end:
                account.excess = max(0, self.used() - account.limit)
                return account.excess > 0
        return False

    def _release(self, user: object) -> None:
        entry = self.pins.release(user)
        if entry is not None:
            self._unpinned(entry)

    def release_collected(self) -> None:
        """Release what users need that were collected before they did so."""
        for entry in self.pins.release_collected():
            self._unpinned(entry)

    def _unpinned(self, entry: Entry) -> None:
        """A checkpoint that is out of the tree goes with its last user."""
        if not entry.pins and entry in self.doomed:
            self.doomed.remove(entry)
            if entry.recycled:
                self.account.keep(entry.checkpoint.snapshot)

    # -- the user's own say ------------------------------------------------------------------------

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
        """Keep the checkpoints on this path that lie on pinned prefixes, and no more: some of these went."""
        for entry in self._on(tokens):
            self._keep(entry, self.prefixes.cover(tokens[: entry.position]))

    def _on(self, tokens: Tokens) -> list[Entry]:
        """The checkpoints on a path, of any model."""
        return [e for name in self.tree.namespaces() for e in self.tree.match(name, tokens).entries()]

    def _keep(self, entry: Entry, pinned: bool) -> None:
        entry.user_pinned = pinned
        (self.kept.add if pinned else self.kept.discard)(entry)

    @guarded(later=True)
    def clear(self) -> None:
        """See `PromptCache.clear`; what is in use goes with its last user."""
        self._forgets += 1
        for entry in list(self.tree.oldest_entries()):
            self.remove(entry)
        self.counts.damaged += self.tree.damaged
        self.tree = Tree()
        self.account.free_all()
        self.prefixes = Prefixes()

    @guarded(0, later=True)
    def forget(self, tokens: Tokens) -> int:
        """See `PromptCache.forget`. Pins of it go; one of its beginning holds that."""
        if not len(tokens):
            return 0
        self._forgets += 1
        for ref in self._followed:
            if (state := ref()) is not None:
                state.forget(tokens)
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

    @guarded(later=True)
    def drop(self, checkpoint: Checkpoint) -> Tokens | None:
        """Take a checkpoint out that did not prove right; the tokens before it, None if it is not here."""
        entry = self.tree.find(checkpoint)
        if entry is None:
            return None
        path = self.tree.path_of(entry)
        self.remove(entry)
        return path

    @guarded(later=True)
    def drop_segment(self, segment: Segment) -> None:
        """Take a segment out that did not prove right."""
        self.counts.damaged += self.tree.remove_segment(segment)

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
            segments=sum(len(n.segments) for n in tree.oldest_nodes()),
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

    # -- for the tiers outside ---------------------------------------------------------------------

    @guarded(lambda *_: Known(), changes=False)
    def known(self, tokens: Tokens, view: LiveView, costs: Costs) -> Known:
        """Return what RAM knows of a prompt."""
        match, live_lcp = self.tree.match(view.namespace, tokens), common_prefix(tokens, view.tokens)
        choice, _ = restore_point(match, match.entries(), len(tokens), live_lcp, view, costs)
        missing: list[Range] = []
        if view.needs_attention:
            missing = [*match.missing(match.length), (match.length, len(tokens))]
        missing = [(a, b) for a, b in missing if b > max(a, live_lcp)]
        return Known(match.length, match.branches(), choice.position, tuple(missing), self._forgets)

    @guarded()
    def expect(self, namespace: str, path: Tokens, n_bytes: int) -> Expected | None:
        """Make room for what is about to be read; None if there is none."""
        match = self.tree.match(namespace, path)
        fits = self.make_room(n_bytes + ENTRY_BYTES + match.growth(len(path) - match.length), match)
        self.counts.refused += not fits
        return self.account.reserve(Expected(n_bytes)) if fits else None

    @guarded()
    def insert_loaded(
        self, view: LiveView, path: Tokens, loaded: Loaded, expected: Expected, forgets: int, source: Outside
    ) -> None:
        """Take what was read, where it is not here already; unless anything was forgotten since."""
        self.account.unreserve(expected)
        if forgets != self._forgets:
            return
        match = self.tree.insert(view.namespace, path)
        if not any(e.position == len(path) for e in match.entries()):
            loaded.snapshot.flags.writeable = False
            checkpoint = Checkpoint(view.namespace, len(path), loaded.snapshot, loaded.logits)
            self._put(match, checkpoint, path).read_from = source
        for segment in loaded.segments:
            for start, end in clipped(match.missing(len(path)), segment.end, segment.start):
                try:
                    part = part_of(segment, path, start, end, view.split)
                except (ValueError, MemoryError):
                    self.counts.damaged += 1
                    continue
                if part is not None:
                    self.tree.store(match, part)

    @guarded(lambda *_: [], changes=False)
    def restart_points(self, namespace: str, path: Tokens) -> list[Point]:
        """Return what of a path is worth writing, see `write_policy.restart_points`."""
        return restart_points(self.tree.match(namespace, path))

    @contextmanager
    def checkpoint_at(self, namespace: str, path: Tokens) -> Iterator[Checkpoint | None]:
        """The checkpoint at the end of a path, or None; its bytes stay as they are in this context."""
        user = User()
        try:
            yield self._use(user, namespace, path)
        finally:
            self.release(user)

    @guarded()
    def _use(self, user: object, namespace: str, path: Tokens) -> Checkpoint | None:
        entries = self.tree.match(namespace, path).entries()
        if not entries or entries[-1].position != len(path):
            return None
        self.pins.use(user, entries[-1])
        return entries[-1].checkpoint

    @guarded(lambda *_: [], changes=False)
    def attention(self, namespace: str, path: Tokens, start: int, end: int) -> list[Segment]:
        """Return the segments of [start, end) of a path, as they are cut now."""
        match = self.tree.match(namespace, path)
        known = min(end, match.length)  # the last segment may belong to a path that left this one
        return [s for s in match.segments() if start <= s.start and s.end <= known]

    def splitter(self, namespace: str) -> Splitter | None:
        """Return how segments of a namespace are cut, where that is known; from any thread."""
        return self.tree.splitters.get(namespace)


def prompt_end(live: Tokens, state: LiveState | None) -> int:
    """Return where the prompt of the running request ends in the live tokens; 0: they are not its own yet."""
    n = 0 if state is None else len(state.prompt)
    return n if state is not None and np.array_equal(live[:n], state.prompt) else 0
