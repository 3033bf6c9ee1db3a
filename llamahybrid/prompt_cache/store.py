"""The store in RAM: prompts planned, checkpoints and attention kept, forgotten, handed to tiers outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import ref

import numpy as np

from llamahybrid.prompt_cache.base import (
    NOTHING,
    Bytes,
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
    Tokens,
)
from llamahybrid.prompt_cache.guard import guarded
from llamahybrid.prompt_cache.nodes import (
    ENTRY_BYTES,
    ID_BYTES,
    Entry,
    Match,
    Node,
    common_prefix,
    ids_of,
    lies_on,
    pinned_before,
)
from llamahybrid.prompt_cache.ram import Expected
from llamahybrid.prompt_cache.room import Room
from llamahybrid.prompt_cache.selection import (
    UNMEASURED,
    Habits,
    Known,
    plan_request,
    restore_point,
)
from llamahybrid.prompt_cache.tree import Cut

MOST_NAMES = 64
"""Namespaces without a path of which a little is kept: each salt has one."""

Found = TypeVar("Found")


class RamStore(Room):
    """Checkpoints and attention of many conversations in RAM."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes."""
        super().__init__(limit)
        self._followed: list[ref[LiveState]] = []
        """Contexts that `forget` has to reach."""
        self.forgets = 0

    def _begin(self) -> None:
        super()._begin()
        self.habits = defaultdict[str, Habits](Habits)
        """By namespace."""

    @guarded(lambda see: see(RamStore(0)), changes=False)
    def look(self, see: Callable[[RamStore], Found]) -> Found:
        """Return `see(self)`, which changes nothing."""
        return see(self)

    # -- a request's start -------------------------------------------------------------------------

    @guarded(changes=False)
    def follow(self, state: LiveState, prompt: Tokens) -> bool:
        """Begin a request for `prompt` on a context, which `forget` is to reach from now on.

        False while the live tokens there are forgotten: the context must be emptied first.
        """
        if state.forgotten and len(state.tokens()):
            return False
        others = [other for other in self._followed if other() not in (None, state)]
        self._followed = [*others, ref(state)]
        state.prompt = prompt  # before the mark goes: `forget` may be next
        state.forgotten = False
        return True

    @guarded(lambda tokens, *_: Plan(len(tokens), 0, 0, "none", None, None))
    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """See `PromptCache.plan`; a plan pins one checkpoint at most."""
        match, live_lcp = self.tree.match(view.namespace, tokens), common_prefix(tokens, view.tokens)
        entries = match.entries()
        start = choice, _ = restore_point(match, entries, len(tokens), live_lcp, view, costs)
        if choice.loads(live_lcp, view):
            self.tree.require_cut(view.namespace, match, choice.position)
        habits = self.habits[view.namespace]
        if boundaries:
            habits.boundaries = frozenset(boundaries)
        self._let_names_go(view.namespace)
        self.eviction.learn(self.tree, match, entries)
        self.tree.visit(match, entries)
        self.tree.touch(match)
        habits.learn(match, entries, tokens)
        plan = plan_request(match, tokens, view, boundaries, costs, self.account.limit, habits, start)
        entry = choice.entry
        if entry is None and view.attention_is_all and plan.source == "ram":  # attention before it stays
            entry = self._put(match, Checkpoint(view.namespace, plan.cached, NOTHING), tokens[: plan.cached])
        if entry is not None:
            entry.read_from = None
            self.tree.to_the_end([entry])
            self.users.append((ref(plan), entry))
        self.make_room(0)  # a segment in two parts takes a little more
        self.counts.hits += plan.cached > 0
        self.counts.misses += plan.cached == 0
        self.counts.tokens_saved += plan.cached
        return plan

    def peek(self, tokens: Tokens, view: LiveView, costs: Costs) -> int:
        """Return how many tokens of a prompt a request would not have to decode now, as far as RAM can tell.

        Nothing is counted, nothing grows older or younger, and no disk is read.
        """
        return self.known(tokens, view, costs).cached

    def _let_names_go(self, namespace: str) -> None:
        """Drop notes on namespaces without a path, except this one, where there are many."""
        if len(self.habits) > MOST_NAMES:
            for name in self.habits.keys() - {namespace, *self.tree.namespaces()}:
                del self.habits[name]

    # -- storing -----------------------------------------------------------------------------------

    @guarded()
    def exchange_parts(self, cut: Cut, parts: Sequence[Segment]) -> None:
        """Replace a segment by its parts, see `Tree.exchange`."""
        self.tree.exchange(cut, parts)

    def admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None = None) -> bool:
        """Keep the checkpoint at `view.tokens[:position]`, evicting to stay in budget; False if refused.

        `snapshot`: the whole of a `buffer`, which becomes read-only. A second admission at the same place
        replaces it; logits once known are kept. Raises ValueError unless 0 < position <= len(view.tokens).
        """
        if not 0 < position <= len(view.tokens):
            raise ValueError(f"no position {position} in a live sequence of {len(view.tokens)} tokens")
        row = None if logits is None else np.array(logits, dtype=np.float32)
        return self._admit(view, position, snapshot, row)

    @guarded(lambda *_: False)
    def _admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None) -> bool:
        if not view.storable:  # under the lock: `forget` may come at any time
            return False
        path = view.tokens[:position]
        match = self.tree.match(view.namespace, path)
        self.tree.require_branch(view.namespace, match, position)
        old = next((e for e in match.entries()[-1:] if e.position == position), None)
        if logits is None and old is not None:
            logits = old.checkpoint.logits
        need = snapshot.nbytes + (0 if logits is None else logits.nbytes) + ENTRY_BYTES
        need += match.growth(position - match.length) - self.account.reserved(snapshot)
        if old is not None:
            need -= ENTRY_BYTES + (0 if self.in_use(old) else old.nbytes)
        if not self.make_room(need, match, replaces=old, sliced=True):
            self.counts.refused += 1
            return False
        if old is not None:
            self.remove(old, replaced=True)
        self.account.unreserve(snapshot)
        checkpoint = Checkpoint(view.namespace, position, snapshot, logits)
        snapshot.flags.writeable = False
        match = self.tree.insert(view.namespace, path)
        entry = self._put(match, checkpoint, path, position in self.habits[view.namespace].boundaries)
        asked = 0 if view.state is None else view.state.prompt_end(view.tokens)
        entry.turns = match.turns(asked) if asked else max(0, match.turns(position) - 1)
        match.end_prompt(asked)
        if old is not None:
            entry.take_over(old)
        self.make_room(0)
        return entry.node is not None

    def _put(self, match: Match, checkpoint: Checkpoint, path: Tokens, marked: bool = False) -> Entry:
        """Index a checkpoint at the end of `path`, on this match. `marked`: a message starts there."""
        entry = self.tree.attach(match, checkpoint, marked)
        if lies_on(path, self.prefixes):
            self.kept.add(entry)
        return entry

    @guarded(lambda *_: [], changes=False)
    def missing(self, view: LiveView) -> list[Range]:
        """Return ranges of the live path, ascending, whose attention a restore needs and is not stored."""
        match = self.tree.match(view.namespace, view.tokens)
        entries = match.entries()
        wanted = entries and view.split is not None and view.storable
        return match.missing(entries[-1].position) if wanted else []

    @guarded(lambda *_: 0, changes=False)
    def unstored(self, view: LiveView) -> int:
        """Return the number of live tokens behind the deepest checkpoint on their path."""
        if not view.storable:
            return 0
        entries = self.tree.match(view.namespace, view.tokens).entries()
        return len(view.tokens) - (entries[-1].position if entries else 0)

    @guarded(lambda *_: False)
    def store_segment(self, view: LiveView, segment: Segment) -> bool:
        """Keep a segment of the live path; False if refused or not missing. Evicts as `segment_buffer`."""
        if not view.storable:
            return False
        match = self.tree.match(view.namespace, view.tokens)
        counted, keep = self.account.reserved(segment.record), match.entries()
        fits = self.make_room(segment.nbytes - counted, match, keep=keep, sliced=True)
        match = self.tree.match(view.namespace, view.tokens)
        needed = any(e.position > segment.start for e in match.entries())
        stored = fits and needed and match.length >= segment.end and self.tree.store(match, segment)
        self.account.unreserve(segment.record)
        self.counts.refused += not fits
        return stored

    @guarded()
    def remember(
        self, namespace: str, tokens: Tokens, state: LiveState | None = None, forgets: int | None = None
    ) -> None:
        """Note that these tokens were evaluated (no state): `matched` and branch points rest on it.

        `state`: their context; nothing is noted once it was forgotten. `forgets`: `Known.forgets`; nothing
        is noted if anything was forgotten since. Never at the price of a checkpoint on the path itself.
        """
        if (state is not None and state.forgotten) or forgets not in (None, self.forgets):
            return
        match = self.tree.match(namespace, tokens)
        self.tree.require_branch(namespace, match, len(tokens))
        need, keep = match.growth(len(tokens) - match.length), match.entries()
        if self.make_room(need, match, keep=keep, sliced=True):
            match = self.tree.insert(namespace, tokens)
            match.end_prompt(0 if state is None else state.prompt_end(tokens))
            self.make_room(0)

    # -- forgetting --------------------------------------------------------------------------------

    @guarded(later=True)
    def clear(self) -> None:
        """See `PromptCache.clear`; a checkpoint in use goes with its last user."""
        self.forgets += 1
        self.prefixes = {}
        self.restart()

    @guarded(lambda *_: 0, later=True)
    def forget(self, tokens: Tokens) -> int:
        """See `PromptCache.forget`. Pins of it go; pins of its beginning stay."""
        if not len(tokens):
            return 0
        stays = pinned_before(self.pinned, tokens)
        for name in self.tree.namespaces():
            match = self.tree.match(name, tokens)
            if match.length >= stays and match.own_edge(len(tokens)) is not None:
                self.tree.require_cut(name, match, stays)
        self.forgets += 1
        for followed in self._followed:
            if (state := followed()) is not None:
                state.forget(tokens)
        before = self.used()
        for name in self.tree.namespaces():
            top = self.tree.match(name, tokens).own_edge(len(tokens))
            if top is not None:
                self.remove_below(top, stays)
        self._unpin(tokens, lambda ids: ids.startswith(ids_of(tokens)))
        for habits in self.habits.values():
            habits.moved = ()  # texts of any prompt
        freed = before - self.used()
        self.make_room(0)
        return freed

    @guarded(later=True)
    def drop(self, checkpoint: Checkpoint) -> Tokens | None:
        """Remove a damaged checkpoint; return the tokens before it, None if it is not here."""
        entry = self.tree.find(checkpoint)
        if entry is None:
            return None
        path = self.tree.path_of(entry)
        self.remove(entry)
        return path

    @guarded(later=True)
    def drop_segment(self, segment: Segment) -> None:
        """Remove a damaged segment; the checkpoints behind it stay."""
        self.tree.damaged += self.tree.remove_segment(segment)

    # -- for the tiers outside ---------------------------------------------------------------------

    @guarded(lambda *_: b"", changes=False)
    def restorable(self, leaf: Node, view: LiveView) -> bytes:
        """Return the deepest restorable prefix of the path to a leaf, see `ids_of`; b"" if the leaf is gone.

        `view`: an empty context's.
        """
        if leaf not in self.tree:
            return b""
        match = Match(leaf.end, tuple(leaf.path())[::-1])
        choice, _ = restore_point(match, match.entries(), leaf.end + 1, 0, view, UNMEASURED)
        return b"".join(node.edge for node in match.path)[: ID_BYTES * choice.position]

    @guarded(lambda *_: Known(), changes=False)
    def known(self, tokens: Tokens, view: LiveView, costs: Costs) -> Known:
        """Return what RAM knows of a prompt."""
        match = self.tree.match(view.namespace, tokens)
        live_lcp = 0 if view.forgotten else common_prefix(tokens, view.tokens)
        choice, _ = restore_point(match, match.entries(), len(tokens), live_lcp, view, costs)
        missing: list[Range] = []
        if view.needs_attention:
            missing = [*match.missing(match.length), (match.length, len(tokens))]
        missing = [(a, b) for a, b in missing if b > max(a, live_lcp)]
        return Known(match.length, match.branches(), choice.position, tuple(missing), self.forgets)

    @guarded()
    def insert_loaded(
        self,
        view: LiveView,
        path: Tokens,
        loaded: Loaded,
        expected: Expected,
        forgets: int,
        source: Outside,
    ) -> None:
        """Add what was read, where it is missing here, unless anything was forgotten since."""
        match = self.tree.match(view.namespace, path)
        self.tree.require_branch(view.namespace, match, len(path))
        self.account.unreserve(expected)
        if forgets != self.forgets:
            return
        match = self.tree.insert(view.namespace, path)
        if not any(e.position == len(path) for e in match.entries()):
            loaded.snapshot.flags.writeable = False
            checkpoint = Checkpoint(view.namespace, len(path), loaded.snapshot, loaded.logits)
            self._put(match, checkpoint, path).read_from = source
        self.tree.fill(match, path, loaded.segments)

    @guarded(lambda *_: None, changes=False)
    def checkpoint_at(self, namespace: str, path: Tokens) -> Checkpoint | None:
        """Return the checkpoint at the end of a path, or None."""
        entries = self.tree.match(namespace, path).entries()
        return entries[-1].checkpoint if entries and entries[-1].position == len(path) else None

    @guarded(lambda *_: [], changes=False)
    def attention(self, namespace: str, path: Tokens, start: int, end: int) -> list[Segment]:
        """Return the segments of [start, end) of a path, as they are cut now."""
        match = self.tree.match(namespace, path)
        known = min(end, match.length)  # the last segment may belong to a path that left this one
        return [s for s in match.segments() if start <= s.start and s.end <= known]
