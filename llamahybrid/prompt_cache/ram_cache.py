"""RamCache: what several conversations leave behind in RAM, within one byte budget."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from llamahybrid.prompt_cache.base import (
    BasePromptCache,
    Bytes,
    CacheStats,
    Checkpoint,
    Costs,
    LiveView,
    Logits,
    Outline,
    Plan,
    Segment,
    Tokens,
)
from llamahybrid.prompt_cache.eviction import ByWorth, Eviction, Spare, Tail
from llamahybrid.prompt_cache.nodes import Entry, Match, common_prefix
from llamahybrid.prompt_cache.placement import prefill_cuts
from llamahybrid.prompt_cache.ram import (
    BufferPool,
    Loans,
    Reserve,
    default_ram_bytes,
    is_whole,
    new_buffer,
    owned,
)
from llamahybrid.prompt_cache.selection import choose, difference, explain, reachable
from llamahybrid.prompt_cache.tree import Tree


class RamCache(BasePromptCache):
    """Checkpoints and attention segments in RAM, indexed by a radix tree of tokens.

    `ram_bytes`: budget for snapshots, segments, logits, token arrays, and buffers idle or handed out, counted
    exactly; None: an eighth of physical memory, within 256 MiB and 8 GiB. Only what is pinned or handed out
    at one time can be more than that. May be shared by threads and by several models.

    A snapshot handed to `admit` belongs to the cache from then on and becomes read-only: its buffer may be
    used again once its entry is gone. What a `Plan` names is safe until `release(plan)`.

    >>> cache = RamCache(ram_bytes=1 << 20)
    >>> cache.stats().entries
    0
    """

    def __init__(self, ram_bytes: int | None = None, eviction: Eviction | None = None) -> None:
        self._eviction = ByWorth() if eviction is None else eviction
        self._lock = threading.Lock()
        self._limit = default_ram_bytes() if ram_bytes is None else ram_bytes
        self._tree = Tree()
        self._pool = BufferPool()
        self._live: list[Entry] = []  # checkpoints on the path last seen live, shallowest first
        self._tails: dict[str, int] = {}  # see `Outline.tail`, by namespace
        self._boundaries: dict[str, frozenset[int]] = {}  # of the last prompt, by namespace
        self._plans: dict[int, tuple[Plan, Entry]] = {}  # by id(plan); holding the plan keeps the id its own
        self._pinned: list[Tokens] = []
        self._loans = Loans()  # buffers handed out and not yet admitted
        self._held: Counter[Entry] = Counter()  # by a disk tier that writes them
        self._doomed: set[Entry] = set()  # out of the tree, but pinned
        self._expected = 0  # bytes about to be read from disk
        self._reserve = Reserve(self._pool, self._lock, lambda: (self._limit, self._limit - self._used()))
        self._hits = self._misses = self._saved = self._evictions = self._refused = 0

    @property
    def ram_bytes(self) -> int:
        """The budget; setting it evicts what no longer fits (pinned entries go when released)."""
        return self._limit

    @ram_bytes.setter
    def ram_bytes(self, n_bytes: int) -> None:
        with self._lock:
            self._limit = n_bytes
            self._make_room(0)

    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        """See `BasePromptCache.plan`; no more than one entry is pinned by a plan."""
        total = len(tokens)
        live_lcp = common_prefix(tokens, view.tokens)
        with self._lock:
            if boundaries:
                self._boundaries[view.namespace] = frozenset(boundaries)
            if view.split is not None:
                self._tree.splitters[view.namespace] = view.split
            match = self._tree.match(view.namespace, tokens)
            self._live = match.entries()
            self._eviction.learn(self._tree, match, self._live)
            self._tree.visit(match, self._live)
            self._tree.touch(match)
            matched = max(live_lcp, match.length)
            attention = reachable(live_lcp, match.segments() if view.split is not None else ())
            choice = choose(total, live_lcp, view, self._live, attention.reach, costs)
            cached = choice.position
            if choice.source == "ram" and cached > live_lcp:
                self._tree.divide(view.namespace, match, cached)
                attention = reachable(live_lcp, match.segments())
            cuts: tuple[int, ...] = ()
            outline = None
            if view.needs_checkpoints:
                parted = match.length == matched and match.branches()
                self._tails[view.namespace] = tail = match.tail() or self._tails.get(view.namespace, 0)
                marks, most = tuple(boundaries), self._most_cuts(costs)
                outline = Outline(total, cached, matched, marks, most, parted, tail)
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
                reason=explain(choice, total, matched, len(view.tokens)),
                differs=difference(tokens, view.tokens, live_lcp, match),
                stored=any(e.position == cached for e in self._live),
                segments=attention.up_to(cached) if choice.source == "ram" and cached > live_lcp else (),
                kept=attention.kept,
            )
            self._hits, self._misses = self._hits + (cached > 0), self._misses + (cached == 0)
            self._saved += cached
            if choice.entry is not None:
                choice.entry.pins += 1
                choice.entry.from_disk = False
                self._tree.touch_entry(choice.entry)
                self._plans[id(plan)] = (plan, choice.entry)
            self._make_room(0)  # a segment in two parts takes a little more
            return plan

    def release(self, plan: Plan) -> None:
        """See `BasePromptCache.release`."""
        with self._lock:
            if id(plan) not in self._plans:
                return
            _, entry = self._plans.pop(id(plan))
            self._let_go(entry)

    def admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None = None) -> bool:
        """See `BasePromptCache.admit`. Raises ValueError unless 0 < position <= len(view.tokens)."""
        if not 0 < position <= len(view.tokens):
            raise ValueError(f"no position {position} in a live sequence of {len(view.tokens)} tokens")
        path = view.tokens[:position]
        kept = None if logits is None else np.array(logits, dtype=np.float32)
        with self._lock:
            match = self._tree.match(view.namespace, path)
            old = next((e for e in match.entries() if e.position == position), None)
            if kept is None and old is not None:
                kept = old.checkpoint.logits
            new_bytes = snapshot.nbytes + (0 if kept is None else kept.nbytes)
            if new_bytes + path.nbytes > self._limit - self._pinned_bytes():
                self._refused += 1
                return False
            if old is not None:
                self._remove(old, replaced=True)
            whole = match if len(path) == len(view.tokens) else self._tree.match(view.namespace, view.tokens)
            self._live = whole.entries()
            growth = 4 * (position - match.length)
            counted = self._loans.counted(snapshot)
            if not self._make_room(new_bytes - counted + growth, match, position):
                self._tree.prune_path(self._tree.match(view.namespace, path))
                self._refused += 1
                return False
            self._loans.end(snapshot)
            checkpoint = Checkpoint(view.namespace, position, owned(snapshot), kept)
            checkpoint.snapshot.flags.writeable = False
            marked = position in self._boundaries.get(view.namespace, ())
            entry = self._tree.attach(self._tree.insert(view.namespace, path), checkpoint, marked)
            entry.kept = self._is_pinned(path)
            if old is not None:
                entry.take_over(old)
            self._live = sorted([*self._live, entry], key=lambda e: e.position)
            self._make_room(0)
            return entry.node is not None

    def missing(self, view: LiveView) -> list[tuple[int, int]]:
        """See `BasePromptCache.missing`: nothing behind the deepest checkpoint, where no restore needs it."""
        with self._lock:
            match = self._tree.match(view.namespace, view.tokens)
            entries = match.entries()
            return match.missing(entries[-1].position) if entries and view.split is not None else []

    def unstored(self, view: LiveView) -> int:
        """See `BasePromptCache.unstored`."""
        with self._lock:
            entries = self._tree.match(view.namespace, view.tokens).entries()
            return len(view.tokens) - (entries[-1].position if entries else 0)

    def room(self, view: LiveView, n_bytes: int) -> Bytes | None:
        """See `BasePromptCache.room`; at the price of the least worth while other paths have anything."""
        with self._lock:
            match = self._tree.match(view.namespace, view.tokens)
            self._live = match.entries()
            if n_bytes > self._limit or not self._make_room(n_bytes, match, ladder=False):
                self._refused += 1
                return None
            return self._loans.lend(new_buffer(n_bytes))

    def keep(self, view: LiveView, segment: Segment) -> bool:
        """See `BasePromptCache.keep`; at the price of the least worth while other paths have anything."""
        with self._lock:
            match = self._tree.match(view.namespace, view.tokens)
            self._live = match.entries()
            counted = self._loans.counted(segment.record)
            fits = self._make_room(segment.nbytes - counted, match, ladder=False)
            match = self._tree.match(view.namespace, view.tokens)
            needed = any(e.position > segment.start for e in match.entries())
            kept = fits and needed and match.length >= segment.end and self._tree.store(match, segment)
            self._loans.end(segment.record)
            self._refused += not fits
            return kept

    def remember(self, namespace: str, tokens: Tokens) -> None:
        """See `BasePromptCache.remember`; never at the price of a checkpoint on the path itself."""
        with self._lock:
            match = self._tree.match(namespace, tokens)
            self._live = match.entries()
            if self._make_room(4 * (len(tokens) - match.length), match, ladder=False):
                self._tree.insert(namespace, tokens)
                self._make_room(0)
            self._reserve.refill()

    def buffer(self, n_bytes: int) -> Bytes:
        """A buffer of exactly `n_bytes`, shape (n_bytes,), contents undefined, to fill and `admit`.

        It counts toward the budget until it is admitted, recycled or collected.
        """
        if n_bytes > self._limit:
            return np.empty(n_bytes, np.uint8)  # to be refused by `admit`: nothing should go for it
        with self._lock:
            self._make_room(n_bytes, reuse=n_bytes)
            buffer = self._pool.take(n_bytes)
            if buffer is None:
                buffer = new_buffer(n_bytes)
            return self._loans.lend(buffer)

    def reserve(self, n_bytes: int) -> None:
        """Have idle buffers of `n_bytes` > 0 ready, now and again after each request while there is room.

        They count toward the budget, and go as soon as something is worth storing in their place.
        """
        self._reserve.of(n_bytes)

    def recycle(self, buffer: Bytes) -> None:
        """Give back a buffer that was not admitted. Raises ValueError for one that belongs to the cache."""
        with self._lock:
            if not buffer.flags.writeable:
                raise ValueError("this buffer was admitted or recycled before: leave it to the cache")
            self._loans.end(buffer)
            if is_whole(buffer) and self._used() + buffer.nbytes <= self._limit:
                self._pool.put(buffer)

    def pin(self, prefix: Sequence[int] | Tokens) -> int:
        """Keep the checkpoints on this path, now and later, whatever the budget asks for; how many there are.

        Their segments stay with them. `unpin` takes it back. Pins do not survive `clear`.
        """
        tokens = np.array(prefix, dtype=np.int32)
        with self._lock:
            self._pinned.append(tokens)
            entries = [e for n in self._tree.namespaces() for e in self._tree.match(n, tokens).entries()]
            for entry in entries:
                entry.kept = True
            return len(entries)

    def unpin(self, prefix: Sequence[int] | Tokens) -> None:
        """Let what `pin(prefix)` kept go by its worth again; harmless for a prefix that was not pinned."""
        tokens = np.array(prefix, dtype=np.int32)
        with self._lock:
            self._pinned = [p for p in self._pinned if not np.array_equal(p, tokens)]
            for name in self._tree.namespaces():
                for entry in self._tree.match(name, tokens).entries():
                    entry.kept = self._is_pinned(tokens[: entry.position])
            self._make_room(0)

    def forget(self, prefix: Sequence[int] | Tokens) -> int:
        """Forget this token path and all that goes on from it; bytes freed. What others share of it stays."""
        tokens = np.array(prefix, dtype=np.int32)
        with self._lock:
            before = self._used() - self._pool.nbytes
            for name in self._tree.namespaces():
                while (match := self._tree.match(name, tokens)).path and match.length == len(tokens):
                    leaf = match.path[-1].leaf()  # one at a time: the tree closes up behind it
                    for entry in list(leaf.entries.values()):
                        self._remove(entry)
                    while leaf.segments:
                        self._tree.shorten(leaf)
                    self._tree.trim(leaf)
            self._pool.clear()  # their bytes are not to lie about
            return before - self._used()

    def drop(self, checkpoint: Checkpoint) -> None:
        """See `BasePromptCache.drop`."""
        with self._lock:
            entry = self._tree.find(checkpoint)
            if entry is not None:
                self._remove(entry)

    def clear(self) -> None:
        """See `BasePromptCache.clear`."""
        with self._lock:
            for entry in list(self._tree.oldest_entries()):
                self._remove(entry)
            self._tree = Tree()
            self._pool.clear()
            self._pinned.clear()

    def stats(self) -> CacheStats:
        """See `BasePromptCache.stats`; `extra`: remembered tokens, idle buffer bytes, the budget."""
        with self._lock:
            return CacheStats(
                entries=len(self._tree),
                bytes_ram=self._used(),
                hits=self._hits,
                misses=self._misses,
                tokens_saved=self._saved,
                evictions=self._evictions,
                refused=self._refused,
                segments=sum(len(n.segments) for n in self._tree.oldest_nodes()),
                extra={
                    "segment_bytes": self._tree.segment_bytes,
                    "tokens": self._tree.token_bytes // 4,
                    "idle_bytes": self._pool.nbytes,
                    "budget": self._limit,
                },
            )

    def check_integrity(self) -> None:
        """See `BasePromptCache.check_integrity`."""
        with self._lock:
            self._tree.check_integrity()
            self._pool.check_integrity()
            pins = self._held + Counter(entry for _, entry in self._plans.values())
            held = {e for e in self._tree.oldest_entries() if e.pins} | self._doomed
            assert pins == {e: e.pins for e in held}, "pins and plans disagree"
            assert all(e.node is None for e in self._doomed), "a doomed checkpoint is still in the tree"
            assert all(e.node is not None for e in self._live), "the live path names an evicted checkpoint"
            stored = [*self._tree.oldest_entries(), *self._doomed]
            snapshots = [e.checkpoint.snapshot for e in stored]
            assert not any(s.flags.writeable for s in snapshots), "a stored snapshot can be written to"
            assert not any(self._pool.holds(s) for s in snapshots), "a stored snapshot lies in the pool"
            assert self._used() <= self._limit or held or self._loans.nbytes(), "over budget"

    def _pin_entry(self, entry: Entry) -> None:
        """Keep a checkpoint's bytes for somebody who reads them."""
        entry.pins += 1
        self._held[entry] += 1

    def _unpin_entry(self, entry: Entry) -> None:
        self._held[entry] -= 1
        if not self._held[entry]:
            del self._held[entry]
        self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        """A pin is gone: a checkpoint out of the tree goes with the last of them."""
        entry.pins -= 1
        if not entry.pins and entry in self._doomed:
            self._doomed.remove(entry)
            self._pool.put(entry.checkpoint.snapshot)
        self._make_room(0)

    def _is_pinned(self, path: Tokens) -> bool:
        """A path lies on a pinned prefix."""
        return any(np.array_equal(p[: len(path)], path) for p in self._pinned)

    def _used(self) -> int:
        """Bytes that count toward the budget now."""
        doomed = sum(e.nbytes for e in self._doomed)
        stored = self._tree.token_bytes + self._tree.entry_bytes + self._tree.segment_bytes
        return stored + doomed + self._pool.nbytes + self._loans.nbytes() + self._expected

    def _most_cuts(self, costs: Costs) -> int:
        """Cuts whose snapshots fill half the budget: the other half keeps what is known already."""
        return max(1, self._limit // (2 * max(1, costs.snapshot_bytes)))

    def _pinned_bytes(self) -> int:
        return sum(e.nbytes for e in {*self._held, *(entry for _, entry in self._plans.values())})

    def _remove(self, entry: Entry, *, replaced: bool = False) -> None:
        """Take a checkpoint out, with the segments only it needed; its buffer goes to the pool when unused.

        `replaced`: another one comes in its place, so the segments stay.
        """
        node = entry.node
        assert node is not None
        above = entry.above
        self._tree.detach(entry)
        if not replaced:
            self._tree.prune(node)
            if above is not None:
                above.heir = True
        if entry in self._live:
            self._live.remove(entry)
        if entry.pins:
            self._doomed.add(entry)
        else:
            self._pool.put(entry.checkpoint.snapshot)

    def _make_room(
        self,
        need: int,
        path: Match | None = None,
        incoming: int | None = None,
        *,
        ladder: bool = True,
        reuse: int | None = None,
    ) -> bool:
        """Free `need` bytes: idle buffers, then by `eviction`'s order; False if pins or `ladder` forbid it.

        `path`: tokens that must stay, with the nodes they lie on. `ladder`: checkpoints of the live path
        may go. `reuse`: an idle buffer of this size is as good as room for one.
        """
        while (over := self._used() + need - self._limit) > 0:
            if reuse is not None and self._pool.count(reuse):
                return True
            if self._pool.nbytes:
                self._pool.free(over)
                continue
            victim = self._eviction.victim(self._tree, path, self._live, incoming, ladder)
            match victim:
                case None:
                    return False
                case Entry():
                    self._remove(victim)
                    self._evictions += 1
                case Tail():
                    self._tree.trim(victim.node, path.keep(victim.node) if path else 0)
                case Spare():
                    self._tree.shorten(victim.node)
        return True
