"""RamCache: what several conversations leave behind in RAM, within one byte budget."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from llamahybrid.prompt_cache.base import (
    BasePromptCache,
    Bytes,
    CacheStats,
    Checkpoint,
    Costs,
    LiveState,
    LiveView,
    Logits,
    Outline,
    Plan,
    Segment,
    Tokens,
)
from llamahybrid.prompt_cache.eviction import ByWorth, Eviction
from llamahybrid.prompt_cache.guard import Guard, guarded, no, nothing, zero
from llamahybrid.prompt_cache.nodes import Entry, Match, common_prefix
from llamahybrid.prompt_cache.placement import prefill_cuts
from llamahybrid.prompt_cache.ram import Reserve, default_ram_bytes, is_whole, new_buffer, owned
from llamahybrid.prompt_cache.ram_store import RamStore, row
from llamahybrid.prompt_cache.selection import Attention, Choice, choose, difference, reachable, reason
from llamahybrid.prompt_cache.tree import Tree


class RamCache(BasePromptCache):
    """Checkpoints and attention segments in RAM, indexed by a radix tree of tokens.

    `ram_bytes`: budget for snapshots, segments, logits, token arrays, and buffers idle or handed out, counted
    exactly; None: an eighth of physical memory, within 256 MiB and 8 GiB. Only what is pinned or handed out
    at one time can be more than that. May be shared by threads and by several models.

    A snapshot handed to `admit` belongs to the cache from then on and becomes read-only: its buffer may be
    used again once its entry is gone. What a `Plan` names is safe until `release(plan)`, or while the plan
    exists. An exception in the middle of a change, such as a KeyboardInterrupt, costs what RAM holds, at most
    (`guard`).

    >>> cache = RamCache(ram_bytes=1 << 20)
    >>> cache.stats().entries
    0
    """

    def __init__(self, ram_bytes: int | None = None, eviction: Eviction | None = None) -> None:
        limit = default_ram_bytes() if ram_bytes is None else ram_bytes
        self._guard = Guard()
        self._store = RamStore(limit, ByWorth() if eviction is None else eviction)
        self._followed: list[weakref.ref[LiveState]] = []  # contexts that `forget` has to reach
        self._forgets = 0
        self._reserve = Reserve(self)
        self._hits = self._misses = self._saved = self._refused = self._damaged = 0

    def _restart(self) -> None:
        """See `Guarded`."""
        store = self._store.renewed()
        self._damaged += self._store.tree.damaged
        self._store = store

    @property
    def _tree(self) -> Tree:
        return self._store.tree

    @property
    def ram_bytes(self) -> int:
        """The budget; setting it evicts what no longer fits (pinned entries go when released)."""
        return self._store.limit

    @ram_bytes.setter
    def ram_bytes(self, n_bytes: int) -> None:
        self._resize(n_bytes)

    @guarded(nothing, later=True)
    def _resize(self, n_bytes: int) -> None:
        self._store.limit = n_bytes
        self._store.make_room(0)

    # -- a request's start -------------------------------------------------------------------------

    @guarded(lambda *_: True, changes=False)
    def follow(self, state: LiveState, prompt: Tokens) -> bool:
        """See `BasePromptCache.follow`."""
        if state.forgotten and len(state.tokens()):
            return False
        others = [ref for ref in self._followed if ref() is not None and ref() is not state]
        self._followed = [*others, weakref.ref(state)]
        state.prompt = prompt  # before the mark goes: `forget` may be next
        state.forgotten = False
        return True

    @guarded(lambda _, tokens, *rest, **more: unplanned(len(tokens)), changes=False)
    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """See `BasePromptCache.plan`; no more than one entry is pinned by a plan."""
        total = len(tokens)
        store, tree = self._store, self._tree
        live_lcp = common_prefix(tokens, view.tokens)
        match = tree.match(view.namespace, tokens)
        entries = match.entries()
        parted = match.branches()
        self._guard.changing = True
        if boundaries:
            store.boundaries[view.namespace] = frozenset(boundaries)
        if view.split is not None:
            tree.splitters[view.namespace] = view.split
        store.let_lost_go()
        store.live = entries
        store.eviction.learn(tree, match, entries)
        tree.visit(match, entries)
        tree.touch(match)
        choice, attention = self._choice(match, entries, total, live_lcp, view, costs)
        while choice.source == "ram" and choice.position > live_lcp:
            damaged = tree.damaged
            tree.divide(view.namespace, match, choice.position)
            if tree.damaged == damaged:
                attention = reachable(live_lcp, match.segments())
                break
            choice, attention = self._choice(match, entries, total, live_lcp, view, costs)  # one went
        cached = choice.position
        matched = max(live_lcp, match.length)
        cuts: tuple[int, ...] = ()
        outline = None
        if view.needs_checkpoints:
            known = match.length == matched and parted
            store.tails[view.namespace] = tail = match.tail() or store.tails.get(view.namespace, 0)
            marks, most = tuple(boundaries), store.most_cuts(costs)
            outline = Outline(total, cached, matched, marks, most, known, tail)
            cuts = prefill_cuts(outline, costs)
        plan = Plan(
            total=total,
            matched=matched,
            cached=cached,
            source=choice.tier,
            checkpoint=choice.entry.checkpoint if choice.entry and choice.source == "ram" else None,
            logits=choice.logits,
            cuts=cuts,
            outline=outline,
            reason=reason(choice, total, matched, len(view.tokens)),
            differs=difference(tokens, view.tokens, live_lcp, match),
            stored=any(e.position == cached for e in entries),
            segments=attention.up_to(cached) if choice.source == "ram" and cached > live_lcp else (),
            kept=attention.kept,
        )
        self._hits, self._misses = self._hits + (cached > 0), self._misses + (cached == 0)
        self._saved += cached
        if choice.entry is not None:
            choice.entry.from_disk = False
            tree.touch_entry(choice.entry)
            store.pins.hold(plan, choice.entry)
        store.make_room(0)  # a segment in two parts takes a little more
        return plan

    @guarded(zero, changes=False)
    def peek(self, tokens: Tokens, view: LiveView, costs: Costs) -> int:
        """See `BasePromptCache.peek`."""
        live = 0 if view.forgotten else common_prefix(tokens, view.tokens)
        match = self._tree.match(view.namespace, tokens)
        return self._choice(match, match.entries(), len(tokens), live, view, costs)[0].position

    @guarded(nothing, later=True)
    def release(self, plan: Plan) -> None:
        """See `BasePromptCache.release`."""
        self._store.let_go(plan)
        self._store.make_room(0)

    # -- what is stored ----------------------------------------------------------------------------

    def admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None = None) -> bool:
        """See `BasePromptCache.admit`. Raises ValueError unless 0 < position <= len(view.tokens)."""
        if not 0 < position <= len(view.tokens):
            raise ValueError(f"no position {position} in a live sequence of {len(view.tokens)} tokens")
        return self._admit(view, position, snapshot, row(logits))

    @guarded(no, changes=False)
    def _admit(self, view: LiveView, position: int, snapshot: Bytes, kept: Logits | None) -> bool:
        if view.forgotten:
            return False
        store, tree = self._store, self._tree
        path = view.tokens[:position]
        match = tree.match(view.namespace, path)
        old = next((e for e in match.entries() if e.position == position), None)
        if kept is None and old is not None:
            kept = old.checkpoint.logits
        new_bytes = snapshot.nbytes + (0 if kept is None else kept.nbytes)
        if store.cannot_hold(new_bytes + path.nbytes):
            self._refused += 1
            return False
        self._guard.changing = True
        if old is not None:
            store.remove(old, replaced=True)
        whole = match if len(path) == len(view.tokens) else tree.match(view.namespace, view.tokens)
        store.live = whole.entries()
        growth = 4 * (position - match.length)
        counted = store.loans.counted(snapshot)
        if not store.make_room(new_bytes - counted + growth, match, position):
            tree.prune_path(tree.match(view.namespace, path))
            self._refused += 1
            return False
        store.loans.end(snapshot)
        checkpoint = Checkpoint(view.namespace, position, owned(snapshot), kept)
        checkpoint.snapshot.flags.writeable = False
        marked = position in store.boundaries.get(view.namespace, ())
        entry = store.put(tree.insert(view.namespace, path), checkpoint, path, marked)
        if old is not None:
            entry.take_over(old)
        store.live = sorted([*store.live, entry], key=lambda e: e.position)
        store.make_room(0)
        return entry.node is not None

    @guarded(lambda *_: [], changes=False)
    def missing(self, view: LiveView) -> list[tuple[int, int]]:
        """See `BasePromptCache.missing`: nothing behind the deepest checkpoint, where no restore needs it."""
        match = self._tree.match(view.namespace, view.tokens)
        entries = match.entries()
        wanted = entries and view.split is not None and not view.forgotten
        return match.missing(entries[-1].position) if wanted else []

    @guarded(zero, changes=False)
    def unstored(self, view: LiveView) -> int:
        """See `BasePromptCache.unstored`."""
        if view.forgotten:
            return 0
        entries = self._tree.match(view.namespace, view.tokens).entries()
        return len(view.tokens) - (entries[-1].position if entries else 0)

    @guarded(nothing, changes=False)
    def room(self, view: LiveView, n_bytes: int) -> Bytes | None:
        """See `BasePromptCache.room`; at the price of the least worth while other paths have anything."""
        store = self._store
        if view.forgotten:
            return None
        match = self._tree.match(view.namespace, view.tokens)
        self._guard.changing = True
        store.live = match.entries()
        fits = n_bytes <= store.limit and store.make_room(n_bytes, match, ladder=False)
        self._refused += not fits
        self._guard.changing = False  # running out of memory costs nothing
        return store.loans.lend(new_buffer(n_bytes)) if fits else None

    @guarded(no, changes=False)
    def keep(self, view: LiveView, segment: Segment) -> bool:
        """See `BasePromptCache.keep`; at the price of the least worth while other paths have anything."""
        store, tree = self._store, self._tree
        if view.forgotten:
            return False
        match = tree.match(view.namespace, view.tokens)
        self._guard.changing = True
        store.live = match.entries()
        counted = store.loans.counted(segment.record)
        fits = store.make_room(segment.nbytes - counted, match, ladder=False)
        match = tree.match(view.namespace, view.tokens)
        needed = any(e.position > segment.start for e in match.entries())
        kept = fits and needed and match.length >= segment.end and tree.store(match, segment)
        store.loans.end(segment.record)
        self._refused += not fits
        return kept

    def remember(self, namespace: str, tokens: Tokens, state: LiveState | None = None) -> None:
        """See `BasePromptCache.remember`; never at the price of a checkpoint on the path itself."""
        self._remember(namespace, tokens, state, None)
        self._reserve.refill()

    @guarded(nothing, changes=False)
    def _remember(self, namespace: str, tokens: Tokens, state: LiveState | None, forgets: int | None) -> None:
        """`remember`, unless `forget` was called again since it was so many times."""
        if (state is not None and state.forgotten) or forgets not in (None, self._forgets):
            return
        match = self._tree.match(namespace, tokens)
        self._guard.changing = True
        self._store.live = match.entries()
        if self._store.make_room(4 * (len(tokens) - match.length), match, ladder=False):
            self._tree.insert(namespace, tokens)
            self._store.make_room(0)

    # -- buffers -----------------------------------------------------------------------------------

    def buffer(self, n_bytes: int) -> Bytes:
        """A buffer of exactly `n_bytes`, shape (n_bytes,), contents undefined, to fill and `admit`.

        It counts toward the budget until it is admitted, recycled or collected.
        """
        if n_bytes > self._store.limit:
            return np.empty(n_bytes, np.uint8)  # to be refused by `admit`: nothing should go for it
        return self._buffer(n_bytes)

    @guarded(lambda _, n_bytes: new_buffer(n_bytes))
    def _buffer(self, n_bytes: int) -> Bytes:
        store = self._store
        store.make_room(n_bytes, reuse=n_bytes)
        buffer = store.pool.take(n_bytes)
        self._guard.changing = False  # running out of memory costs nothing
        return store.loans.lend(new_buffer(n_bytes) if buffer is None else buffer)

    def reserve(self, n_bytes: int) -> None:
        """Have idle buffers of `n_bytes` > 0 ready, now and again after each request while there is room.

        They count toward the budget, and go as soon as something is worth storing in their place.
        """
        self._reserve.of(n_bytes)

    @guarded(no, changes=False)
    def wants_idle(self, n_bytes: int, most: int, share: float, most_bytes: int) -> bool:
        """See `ram.Shelf`."""
        store = self._store
        allowed = min(most_bytes, int(store.limit * share)) - store.pool.nbytes
        free = store.limit - store.used()
        return store.pool.count(n_bytes) < most and n_bytes <= min(allowed, free)

    @guarded(nothing)
    def put_idle(self, buffer: Bytes) -> None:
        """See `ram.Shelf`."""
        if self._store.used() + buffer.nbytes <= self._store.limit:
            self._store.pool.put(buffer)

    @guarded(nothing, changes=False)
    def recycle(self, buffer: Bytes) -> None:
        """Give back a buffer that was not admitted. Raises ValueError for one that belongs to the cache."""
        if not buffer.flags.writeable:
            raise ValueError("this buffer was admitted or recycled before: leave it to the cache")
        self._guard.changing = True
        self._store.loans.end(buffer)
        if is_whole(buffer) and self._store.used() + buffer.nbytes <= self._store.limit:
            self._store.pool.put(buffer)

    # -- the user's own say ------------------------------------------------------------------------

    @guarded(zero, later=True)
    def pin(self, prefix: Sequence[int] | Tokens) -> int:
        """Keep the checkpoints on this path, now and later, whatever the budget asks for; how many there are.

        Their segments stay with them. `unpin` takes it back. Pins do not survive `clear`.
        """
        tokens = np.array(prefix, dtype=np.int32)
        self._store.pinned = [*self._store.pinned, tokens]
        entries = [e for n in self._tree.namespaces() for e in self._tree.match(n, tokens).entries()]
        for entry in entries:
            entry.kept = True
        return len(entries)

    @guarded(nothing, later=True)
    def unpin(self, prefix: Sequence[int] | Tokens) -> None:
        """Let what `pin(prefix)` kept go by its worth again; harmless for a prefix that was not pinned."""
        store = self._store
        tokens = np.array(prefix, dtype=np.int32)
        store.pinned = [p for p in store.pinned if not np.array_equal(p, tokens)]
        for name in self._tree.namespaces():
            for entry in self._tree.match(name, tokens).entries():
                entry.kept = store.is_pinned(tokens[: entry.position])
        store.make_room(0)

    @guarded(zero, later=True)
    def forget(self, prefix: Sequence[int] | Tokens) -> int:
        """See `BasePromptCache.forget`; what the user pinned of the path's beginning stays, too."""
        tokens = np.array(prefix, dtype=np.int32)
        self._forgets += 1
        for ref in self._followed:
            if (state := ref()) is not None:
                state.forget(tokens)
        return self._store.forget(tokens)

    @guarded(nothing, later=True)
    def drop(self, checkpoint: Checkpoint) -> None:
        """See `BasePromptCache.drop`."""
        entry = self._tree.find(checkpoint)
        if entry is not None:
            self._store.remove(entry)

    @guarded(nothing, later=True)
    def drop_segment(self, namespace: str, segment: Segment) -> None:
        """See `BasePromptCache.drop_segment`; counted as damaged."""
        self._damaged += self._tree.remove_segment(segment)

    @guarded(nothing, later=True)
    def clear(self) -> None:
        """See `BasePromptCache.clear`."""
        store = self._store
        for entry in list(self._tree.oldest_entries()):
            store.remove(entry)
        self._damaged += store.tree.damaged
        store.tree = Tree(lean=True)
        store.pool.clear()
        store.pinned = []

    # -- looking in --------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """See `BasePromptCache.stats`; `extra`: remembered tokens, idle buffer bytes, the budget, segments
        that were damaged, and how often an exception cost what RAM held.
        """
        return self._stats()

    def _look(self) -> CacheStats:
        store = self._store
        return CacheStats(
            entries=len(store.tree),
            bytes_ram=store.used(),
            hits=self._hits,
            misses=self._misses,
            tokens_saved=self._saved,
            evictions=store.evictions,
            refused=self._refused,
            segments=store.segments(),
            extra={
                "segment_bytes": store.tree.segment_bytes,
                "tokens": store.tree.token_bytes // 4,
                "idle_bytes": store.pool.nbytes,
                "budget": store.limit,
                "damaged": self._damaged + store.tree.damaged,
                "restarts": self._guard.restarts,
            },
        )

    _stats = guarded(_look, changes=False)(_look)  # from inside, too: a signal handler may ask

    @guarded(nothing, changes=False)
    def check_integrity(self) -> None:
        """See `BasePromptCache.check_integrity`."""
        self._store.check_integrity()

    # -- for the disk tier -------------------------------------------------------------------------

    @guarded(nothing)
    def _hold(self, user: object, namespace: str, path: Tokens) -> Checkpoint | None:
        """The checkpoint at the end of a path, whose bytes stay until `user` lets go."""
        entries = self._tree.match(namespace, path).entries()
        if not entries or entries[-1].position != len(path):
            return None
        self._store.pins.hold(user, entries[-1])
        return entries[-1].checkpoint

    @guarded(nothing, later=True)
    def _let_go(self, user: object) -> None:
        self._store.let_go(user)
        self._store.make_room(0)

    def _choice(
        self, match: Match, entries: Sequence[Entry], total: int, live_lcp: int, view: LiveView, costs: Costs
    ) -> tuple[Choice, Attention]:
        """The restore point for a prompt with what is live and in RAM, and how far attention reaches."""
        attention = reachable(live_lcp, match.segments() if view.split is not None else ())
        return choose(total, live_lcp, view, entries, attention.reach, costs), attention


def unplanned(total: int) -> Plan:
    """The plan of a prompt that is decoded from its first token on."""
    return Plan(total=total, matched=0, cached=0, source="none", checkpoint=None, logits=None)
