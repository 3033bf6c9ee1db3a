"""The RAM tier: what several conversations leave behind in memory, under one lock, within one byte budget."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np

from llamahybrid.prompt_cache.base import (
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
from llamahybrid.prompt_cache.eviction import Eviction
from llamahybrid.prompt_cache.guard import SLICE_SECONDS, Guard, guarded, in_slices, no, nothing, zero
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.pins import User
from llamahybrid.prompt_cache.planning import Known, plan_request, restore_point, unplanned
from llamahybrid.prompt_cache.ram import Account, Expected, new_buffer, owned
from llamahybrid.prompt_cache.ram_store import RamStore, row
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.write_policy import Point, restart_points

Seen = TypeVar("Seen")

RESTARTED = "an exception came while the prompt cache was changed; what it held in RAM is gone"


class RamTier:
    """Checkpoints and attention segments in RAM, indexed by a radix tree of tokens; from any thread.

    Its methods do what those of `PromptCache` say. An exception in the middle of a change, such as a
    KeyboardInterrupt, costs what it holds, at most (`guard`).
    """

    def __init__(self, limit: int, eviction: Eviction) -> None:
        self.guard = Guard(RESTARTED)
        self.store = RamStore(Account(limit), eviction)
        self.followed: list[weakref.ref[LiveState]] = []
        """Contexts that `forget` has to reach."""
        self._forgets = 0

    def restart(self) -> None:
        """See `Guarded`."""
        store = self.store.renewed()
        store.counts.damaged += self.store.tree.damaged
        self.store = store

    @property
    def tree(self) -> Tree:
        """Of what is stored now."""
        return self.store.tree

    def resize(self, limit: int) -> None:
        """Another budget: what no longer fits goes."""
        try:
            if self._resize(limit, math.inf if self.guard.inside() else SLICE_SECONDS):
                in_slices(self._shrink)
        finally:
            self.store.account.excess = 0  # after an interrupt the rest goes as others want room

    @guarded(no, later=True)
    def _resize(self, limit: int, seconds: float) -> bool:
        self.store.account.limit = limit
        return self.store.shrink(seconds)

    @guarded(no)
    def _shrink(self, seconds: float) -> bool:
        return self.store.shrink(seconds)

    @guarded(nothing, changes=False)
    def look(self, see: Callable[[RamStore], Seen]) -> Seen | None:
        """What is seen of it, which leaves it as it is; None from inside."""
        return see(self.store)

    # -- a request's start -------------------------------------------------------------------------

    @guarded(lambda *_: True, changes=False)
    def follow(self, state: LiveState, prompt: Tokens) -> bool:
        """See `BasePromptCache.follow`."""
        if state.forgotten and len(state.tokens()):
            return False
        others = [ref for ref in self.followed if ref() is not None and ref() is not state]
        self.followed = [*others, weakref.ref(state)]
        state.prompt = prompt  # before the mark goes: `forget` may be next
        state.forgotten = False
        return True

    @guarded(lambda _, tokens, *rest, **more: unplanned(len(tokens)), changes=False)
    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """See `BasePromptCache.plan`; no more than one entry is pinned by a plan."""
        match = self.tree.match(view.namespace, tokens)
        self.guard.changing = True
        plan = plan_request(self.store, match, tokens, view, boundaries, costs)
        counts = self.store.counts
        counts.hits, counts.misses = counts.hits + (plan.cached > 0), counts.misses + (plan.cached == 0)
        counts.tokens_saved += plan.cached
        return plan

    @guarded(zero, changes=False)
    def peek(self, tokens: Tokens, view: LiveView, costs: Costs) -> int:
        """See `BasePromptCache.peek`."""
        live = 0 if view.forgotten else common_prefix(tokens, view.tokens)
        match = self.tree.match(view.namespace, tokens)
        return restore_point(match, match.entries(), len(tokens), live, view, costs)[0].position

    @guarded(nothing, later=True)
    def release(self, user: object) -> None:
        """A plan, or who else uses the bytes of a checkpoint, no longer needs them."""
        self.store.release(user)
        self.store.make_room(0)

    # -- what is stored ----------------------------------------------------------------------------

    def admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None) -> bool:
        """See `PromptCache.admit`."""
        if not 0 < position <= len(view.tokens):
            raise ValueError(f"no position {position} in a live sequence of {len(view.tokens)} tokens")
        return self._admit(view, position, snapshot, row(logits))

    @guarded(no, changes=False)
    def _admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None) -> bool:
        if not view.storable:
            return False
        store, tree = self.store, self.tree
        path = view.tokens[:position]
        match = tree.match(view.namespace, path)
        old = next((e for e in match.entries()[-1:] if e.position == position), None)
        if logits is None and old is not None:
            logits = old.checkpoint.logits
        new_bytes = snapshot.nbytes + (0 if logits is None else logits.nbytes)
        self.guard.changing = True
        growth = 4 * (position - match.length)
        counted = store.account.reserved(snapshot)
        if not store.room_for(new_bytes - counted + growth, match, old):
            store.counts.refused += 1
            return False
        if old is not None:
            store.remove(old, replaced=True)
        store.account.unreserve(snapshot)
        checkpoint = Checkpoint(view.namespace, position, owned(snapshot), logits)
        checkpoint.snapshot.flags.writeable = False
        marked = position in store.boundaries.get(view.namespace, ())
        match = tree.insert(view.namespace, path)
        entry = store.put(match, checkpoint, path, marked)
        asked = prompt_end(view.tokens, view.state)
        entry.turns = match.turns(asked) if asked else max(0, match.turns(position) - 1)
        match.end_prompt(asked)
        if old is not None:
            entry.take_over(old)
        store.make_room(0)
        return entry.node is not None

    @guarded(lambda *_: [], changes=False)
    def missing(self, view: LiveView) -> list[tuple[int, int]]:
        """See `BasePromptCache.missing`: nothing behind the deepest checkpoint, where no restore needs it."""
        match = self.tree.match(view.namespace, view.tokens)
        entries = match.entries()
        wanted = entries and view.split is not None and view.storable
        return match.missing(entries[-1].position) if wanted else []

    @guarded(zero, changes=False)
    def unstored(self, view: LiveView) -> int:
        """See `BasePromptCache.unstored`."""
        if not view.storable:
            return 0
        entries = self.tree.match(view.namespace, view.tokens).entries()
        return len(view.tokens) - (entries[-1].position if entries else 0)

    @guarded(nothing, changes=False)
    def segment_buffer(self, view: LiveView, n_bytes: int) -> Bytes | None:
        """A buffer for attention; evicts while other paths have anything."""
        store = self.store
        if not view.storable:
            return None
        match = self.tree.match(view.namespace, view.tokens)
        self.guard.changing = True
        fits = store.make_room(n_bytes, match, keep=match.entries())
        store.counts.refused += not fits
        self.guard.changing = False  # running out of memory costs nothing
        return store.account.reserve(new_buffer(n_bytes)) if fits else None

    @guarded(no, changes=False)
    def store_segment(self, view: LiveView, segment: Segment) -> bool:
        """Keep attention; evicts while other paths have anything."""
        store, tree = self.store, self.tree
        if not view.storable:
            return False
        match = tree.match(view.namespace, view.tokens)
        self.guard.changing = True
        counted = store.account.reserved(segment.record)
        fits = store.make_room(segment.nbytes - counted, match, keep=match.entries())
        match = tree.match(view.namespace, view.tokens)
        needed = any(e.position > segment.start for e in match.entries())
        stored = bool(fits and needed and match.length >= segment.end and tree.store(match, segment))
        store.account.unreserve(segment.record)
        store.counts.refused += not fits
        return stored

    @guarded(nothing, changes=False)
    def remember(
        self, namespace: str, tokens: Tokens, state: LiveState | None, forgets: int | None = None
    ) -> None:
        """See `BasePromptCache.remember`; never at the price of a checkpoint on the path itself.

        `forgets`: not if anything was forgotten since (`Known.forgets`).
        """
        if (state is not None and state.forgotten) or forgets not in (None, self._forgets):
            return
        match = self.tree.match(namespace, tokens)
        self.guard.changing = True
        if self.store.make_room(4 * (len(tokens) - match.length), match, keep=match.entries()):
            self.tree.insert(namespace, tokens).end_prompt(prompt_end(tokens, state))
            self.store.make_room(0)

    # -- buffers -----------------------------------------------------------------------------------

    def buffer(self, n_bytes: int) -> Bytes:
        """See `PromptCache.buffer`."""
        in_slices(partial(self._make_way, n_bytes))
        return self._buffer(n_bytes)

    @guarded(no)
    def _make_way(self, n_bytes: int, seconds: float) -> bool:
        """Thousands may have to go for one: some of them; whether more have to."""
        return self.store.make_room(n_bytes, reuse=n_bytes, seconds=seconds) is None

    @guarded(lambda _, n_bytes: new_buffer(n_bytes))
    def _buffer(self, n_bytes: int) -> Bytes:
        store = self.store
        fits = store.make_room(n_bytes, reuse=n_bytes)
        buffer = store.account.reuse(n_bytes) if fits else None
        self.guard.changing = False  # running out of memory costs nothing
        if not fits:
            return new_buffer(n_bytes)  # to be refused by `admit`: were it counted, others would go for it
        return store.account.reserve(new_buffer(n_bytes) if buffer is None else buffer)

    # -- the user's own say ------------------------------------------------------------------------

    @guarded(zero, later=True)
    def pin(self, tokens: Tokens) -> int:
        """See `PromptCache.pin`."""
        return self.store.pin(tokens)

    @guarded(nothing, later=True)
    def unpin(self, tokens: Tokens) -> None:
        """See `PromptCache.unpin`."""
        self.store.unpin(tokens)

    @guarded(zero, later=True)
    def forget(self, tokens: Tokens) -> int:
        """See `PromptCache.forget`."""
        if not len(tokens):
            return 0
        self._forgets += 1
        for ref in self.followed:
            if (state := ref()) is not None:
                state.forget(tokens)
        return self.store.forget(tokens)

    @guarded(nothing, later=True)
    def drop(self, checkpoint: Checkpoint) -> Tokens | None:
        """Take a checkpoint out that did not prove right; the tokens before it, None if it is not here."""
        entry = self.tree.find(checkpoint)
        if entry is None:
            return None
        path = self.tree.path_of(entry)
        self.store.remove(entry)
        return path

    @guarded(nothing, later=True)
    def drop_segment(self, segment: Segment) -> None:
        """Take a segment out that did not prove right."""
        self.store.counts.damaged += self.tree.remove_segment(segment)

    @guarded(nothing, later=True)
    def clear(self) -> None:
        """See `BasePromptCache.clear`."""
        self._forgets += 1
        self.store.clear()

    # -- looking in --------------------------------------------------------------------------------

    def _counted(self) -> CacheStats:
        """See `PromptCache.stats`."""
        return self.store.stats(self.guard.restarts)

    stats = guarded(_counted, changes=False)(_counted)  # from inside, too: a signal handler may ask

    # -- what the disk tier gives ------------------------------------------------------------------

    @guarded(lambda *_: Known(), changes=False)
    def known(self, tokens: Tokens, view: LiveView, costs: Costs) -> Known:
        """What RAM knows of a prompt."""
        match, live_lcp = self.tree.match(view.namespace, tokens), common_prefix(tokens, view.tokens)
        choice, _ = restore_point(match, match.entries(), len(tokens), live_lcp, view, costs)
        missing: list[Range] = []
        if view.needs_attention:
            missing = [*match.missing(match.length), (match.length, len(tokens))]
        missing = [(a, b) for a, b in missing if b > max(a, live_lcp)]
        return Known(match.length, match.branches(), choice.position, tuple(missing), self._forgets)

    @guarded(nothing, changes=False)
    def expect(self, namespace: str, path: Tokens, n_bytes: int) -> Expected | None:
        """Make room for what is about to be read; None if there is none."""
        store, match = self.store, self.tree.match(namespace, path)
        growth = 4 * (len(path) - match.length)
        self.guard.changing = True
        fits = store.make_room(n_bytes + growth, match)
        store.counts.refused += not fits
        return store.account.reserve(Expected(n_bytes)) if fits else None

    @guarded(nothing)
    def take_in(
        self, view: LiveView, path: Tokens, loaded: Loaded, expected: Expected, forgets: int, lay: Outside
    ) -> None:
        """Take what was read, where it is not here already; unless anything was forgotten since.

        `lay`: where it was read from.
        """
        store, tree = self.store, self.tree
        store.account.unreserve(expected)
        if forgets != self._forgets:
            return
        match = tree.insert(view.namespace, path)
        if not any(e.position == len(path) for e in match.entries()):
            loaded.snapshot.flags.writeable = False
            checkpoint = Checkpoint(view.namespace, len(path), loaded.snapshot, loaded.logits)
            store.put(match, checkpoint, path).read_from = lay
        for segment in loaded.segments:
            for start, end in clipped(match.missing(len(path)), segment.end, segment.start):
                try:
                    part = part_of(segment, path, start, end, view.split)
                except (ValueError, MemoryError):
                    store.counts.damaged += 1
                    continue
                if part is not None:
                    tree.store(match, part)

    # -- what the disk tier writes -----------------------------------------------------------------

    @guarded(lambda *_: [], changes=False)
    def restart_points(self, namespace: str, path: Tokens) -> list[Point]:
        """What of a path is worth writing, see `write_policy.restart_points`."""
        return restart_points(self.tree.match(namespace, path))

    @contextmanager
    def checkpoint_at(self, namespace: str, path: Tokens) -> Iterator[Checkpoint | None]:
        """The checkpoint at the end of a path, or None; its bytes stay as they are in this context."""
        user = User()
        try:
            yield self._use(user, namespace, path)
        finally:
            self.release(user)

    @guarded(nothing)
    def _use(self, user: object, namespace: str, path: Tokens) -> Checkpoint | None:
        entries = self.tree.match(namespace, path).entries()
        if not entries or entries[-1].position != len(path):
            return None
        self.store.pins.use(user, entries[-1])
        return entries[-1].checkpoint

    @guarded(lambda *_: [], changes=False)
    def attention(self, namespace: str, path: Tokens, start: int, end: int) -> list[Segment]:
        """The segments of [start, end) of a path, as they are cut now."""
        match = self.tree.match(namespace, path)
        known = min(end, match.length)  # the last segment may belong to a path that left this one
        return [s for s in match.segments() if start <= s.start and s.end <= known]

    def splitter(self, namespace: str) -> Splitter | None:
        """How segments of a namespace are cut, where that is known; from any thread."""
        return self.tree.splitters.get(namespace)

    @property
    def pinned(self) -> Sequence[Tokens]:
        """Prefixes that the user pinned."""
        return self.store.pinned


def prompt_end(live: Tokens, state: LiveState | None) -> int:
    """Where the prompt of the running request ends in the live tokens; 0: they are not its own yet."""
    n = 0 if state is None else len(state.prompt)
    return n if state is not None and np.array_equal(live[:n], state.prompt) else 0
