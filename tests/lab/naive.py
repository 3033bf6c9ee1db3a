"""A prompt cache by brute force: a dict of token tuples, no budget. The twin of `PromptCache` in tests.

Its methods are described at `PromptCache` and `RamStore`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamahybrid.prompt_cache.base import (
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
    Source,
    Tokens,
)
from llamahybrid.prompt_cache.ladder import MIN_SPACING
from llamahybrid.prompt_cache.nodes import FOLLOWING, LONGEST_TAIL
from llamahybrid.prompt_cache.placement import prefill_cuts
from llamahybrid.prompt_cache.selection import CONTINUED, MOST_MOVED

Path = tuple[int, ...]


class NaivePromptCache:
    """Keeps everything it is given and tries every prefix of the prompt, one by one."""

    serves_others = False
    """Attention may be stored later."""

    def __init__(self) -> None:
        self._checkpoints: dict[tuple[str, Path], Checkpoint] = {}
        self._attention: dict[tuple[str, Path], Segment] = {}
        """Segments of one token, by the path that ends with it."""
        self._paths: set[tuple[str, Path]] = set()
        self._followed: list[LiveState] = []
        self._moved: dict[str, list[tuple[Path, bool]]] = {}
        self._continued: dict[str, int] = {}
        self._hits = self._misses = self._saved = 0

    def follow(self, state: LiveState, prompt: Tokens) -> bool:
        if state.forgotten and len(state.tokens()):
            return False
        if state not in self._followed:
            self._followed.append(state)
        state.prompt, state.forgotten = prompt, False
        return True

    def plan(self, tokens: Tokens, view: LiveView, boundaries: Sequence[int], costs: Costs) -> Plan:
        prompt, live = tuple(tokens.tolist()), tuple(view.tokens.tolist())
        known = [path for name, path in self._paths if name == view.namespace]
        matched = max(_shared(prompt, path) for path in [live, *known])
        cached, source, checkpoint, logits = self._deepest(prompt, live, view)
        self._hits, self._misses = self._hits + (cached > 0), self._misses + (cached == 0)
        self._saved += cached
        followers = {path[matched] for path in known if path[:matched] == prompt[:matched] and path[matched:]}
        parted = matched > 0 and len(followers) > 1
        cuts: tuple[int, ...] = ()
        outline: Outline | None = None
        if view.needs_checkpoints:
            keeps = self._keeps_asking(view.namespace, prompt, self._tail(view.namespace, prompt, matched))
            growing = self._growing(view.namespace, prompt, cached)
            outline = Outline(
                len(prompt), cached, matched, tuple(boundaries), None, parted, growing, keeps_asking=keeps
            )
            cuts = prefill_cuts(outline, costs)
        kept = min(_shared(prompt, live), cached)
        segments: tuple[Segment, ...] = ()
        if source == "ram" and view.needs_attention:
            segments = tuple(self._attention[view.namespace, prompt[: i + 1]] for i in range(kept, cached))
        return Plan(
            len(prompt),
            matched,
            cached,
            source,
            checkpoint,
            logits,
            cuts,
            outline,
            segments=segments,
            live_kept=kept,
        )

    def peek(self, tokens: Tokens, view: LiveView, costs: Costs) -> int:
        live = () if view.forgotten else tuple(view.tokens.tolist())
        return self._deepest(tuple(tokens.tolist()), live, view)[0]

    def release(self, plan: Plan) -> None:
        """Nothing is ever evicted, so nothing needs a pin."""

    def buffer(self, n_bytes: int) -> Bytes:
        return np.empty(n_bytes, np.uint8)

    def queue_writes(self, view: LiveView) -> None:
        """Nothing lies outside."""

    def admit(self, view: LiveView, position: int, snapshot: Bytes, logits: Logits | None = None) -> bool:
        """See `RamStore.admit`; refuses only what was forgotten."""
        if view.forgotten:
            return False
        path = tuple(view.tokens[:position].tolist())
        old = self._checkpoints.get((view.namespace, path))
        if logits is None and old is not None:
            logits = old.logits
        elif logits is not None:
            logits = np.array(logits)
        self._checkpoints[view.namespace, path] = Checkpoint(
            view.namespace, position, snapshot.copy(), logits
        )
        self._paths.add((view.namespace, path))
        return True

    def missing(self, view: LiveView) -> list[tuple[int, int]]:
        """See `RamStore.missing`; token by token."""
        if view.split is None or view.forgotten:
            return []
        live = tuple(view.tokens.tolist())
        wanted = range(len(live) - self.unstored(view))
        return [(i, i + 1) for i in wanted if (view.namespace, live[: i + 1]) not in self._attention]

    def unstored(self, view: LiveView) -> int:
        if view.forgotten:
            return 0
        live = tuple(view.tokens.tolist())
        here = (c for c in range(len(live), 0, -1) if (view.namespace, live[:c]) in self._checkpoints)
        return len(live) - next(here, 0)

    def segment_buffer(self, view: LiveView, n_bytes: int) -> Bytes | None:
        return np.empty(n_bytes, np.uint8)

    def store_segment(self, view: LiveView, segment: Segment) -> bool:
        """See `RamStore.store_segment`; every token by itself."""
        assert view.split is not None
        if view.forgotten:
            return False
        each = [(at, at + 1) for at in range(segment.start, segment.end)]
        for one in view.split.parts(segment, view.tokens[: segment.end], each):
            self._attention.setdefault((view.namespace, tuple(view.tokens[: one.end].tolist())), one)
        return True

    def remember(self, namespace: str, tokens: Tokens, state: LiveState | None = None) -> None:
        if state is None or not state.forgotten:
            self._paths.add((namespace, tuple(tokens.tolist())))

    def drop(self, checkpoint: Checkpoint) -> None:
        self._checkpoints = {k: c for k, c in self._checkpoints.items() if c is not checkpoint}

    def drop_segment(self, segment: Segment) -> None:
        self._attention = {k: s for k, s in self._attention.items() if s is not segment}

    def forget(self, prefix: Sequence[int] | Tokens) -> int:
        """See `PromptCache.forget`; of the path's beginning stays what lies on any other path."""
        gone = tuple(int(token) for token in prefix)
        self._moved = {} if gone else self._moved
        for state in self._followed:
            state.forget(np.array(gone, np.int32))
        for name in {name for name, _ in self._paths} if gone else ():
            paths = [path for namespace, path in self._paths if namespace == name]
            others = [path for path in paths if _shared(path, gone) < min(len(path), len(gone))]
            stays = max((_shared(path, gone) for path in others), default=0)
            self._paths = {p for p in self._paths if not _lost(p, name, gone, stays)} | {(name, gone[:stays])}
            self._checkpoints = {
                p: c for p, c in self._checkpoints.items() if not _lost(p, name, gone, stays)
            }
            self._attention = {p: s for p, s in self._attention.items() if not _lost(p, name, gone, stays)}
        return 0

    def clear(self) -> None:
        self._checkpoints.clear()
        self._attention.clear()
        self._paths.clear()
        self._moved.clear()
        self._continued.clear()

    def stats(self) -> CacheStats:
        """See `PromptCache.stats`; token arrays are not counted, the tuples are no arrays."""
        n_bytes = sum(
            c.snapshot.nbytes + (0 if c.logits is None else c.logits.nbytes)
            for c in self._checkpoints.values()
        )
        return CacheStats(len(self._checkpoints), n_bytes, self._hits, self._misses, self._saved)

    def check_integrity(self) -> None:
        """Raise AssertionError unless everything is filed under its own path."""
        for (name, path), checkpoint in self._checkpoints.items():
            assert (name, len(path)) == (checkpoint.namespace, checkpoint.position), "filed wrongly"
        for (_, path), one in self._attention.items():
            assert (one.start, one.end) == (len(path) - 1, len(path)), "filed wrongly"

    def _deepest(
        self, prompt: Path, live: Path, view: LiveView
    ) -> tuple[int, Source, Checkpoint | None, Logits | None]:
        """Try every position from the prompt's end down; the live state first."""
        limit = len(prompt) if view.reuse_limit is None else min(len(prompt), view.reuse_limit)
        for c in range(limit, 0, -1):
            is_live = live[:c] == prompt[:c]
            stored = self._checkpoints.get((view.namespace, prompt[:c]))
            if view.attention_is_all and c < len(prompt) and self._attended(prompt[:c], live, view):
                shared = min(_shared(prompt, live), limit, len(prompt) - 1)
                if c < shared + MIN_SPACING:
                    return shared, "live" if shared else "none", None, None
                return c, "ram", None, None
            logits = stored.logits if stored is not None and c == len(prompt) else None
            tip = is_live and c == len(live) and view.tip_logits
            ends_with_logits = c < len(prompt) or tip or logits is not None
            if not ends_with_logits:
                continue
            if is_live and c >= view.cut_floor:
                return c, "live", None, None if tip else logits
            if stored is None or (view.needs_attention and not self._attended(prompt[:c], live, view)):
                continue
            shared = min(_shared(prompt, live), c)
            if c - (shared if shared >= view.cut_floor else 0) >= min(MIN_SPACING, len(prompt) - c):
                return c, "ram", stored, logits
        return 0, "none", None, None

    def _tail(self, namespace: str, prompt: Path, matched: int) -> int:
        shared = prompt[:matched]
        known = {
            p[matched] for n, p in self._paths if n == namespace and p[:matched] == shared and p[matched:]
        }
        behind = [p for n, p in self._checkpoints if n == namespace and p[:matched] == shared and p[matched:]]
        for path in sorted(behind, key=len) if matched and len(known) == 1 else ():
            if any(p[: len(path)] != path for p in behind if len(p) >= len(path)):
                return 0
            if self._checkpoints[namespace, path].logits is not None:
                return len(path) - matched if len(path) - matched <= LONGEST_TAIL else 0
        return 0

    def _growing(self, namespace: str, prompt: Path, cached: int) -> tuple[int, ...]:
        """See `Habits.growing`; learns from this prompt first."""
        known = [path for name, path in self._paths if name == namespace]
        matched = max((_shared(prompt, path) for path in known), default=0)
        moved = self._moved.setdefault(namespace, [])
        text = self._following(namespace, prompt[:matched]) if matched else None
        if text is not None and _last_place(text, prompt[matched:]) is not None:
            moved[:] = [text, *(other for other in moved if other != text)][:MOST_MOVED]
        places = {_last_place(text, prompt[cached:]) for text in moved} - {None}
        return tuple(sorted(cached + place for place in places if place is not None))

    def _following(self, namespace: str, shared: Path) -> tuple[Path, bool] | None:
        """See `Match.following`."""
        behind = [p[len(shared) :] for n, p in self._paths if n == namespace and p[: len(shared)] == shared]
        text: Path = ()
        while len(text) < FOLLOWING:
            following = {p[len(text)] for p in behind if p[: len(text)] == text and len(p) > len(text)}
            if len(following) != 1:
                return None
            text += tuple(following)
            stored = self._checkpoints.get((namespace, shared + text))
            if stored is not None and stored.logits is not None:
                return text, True
        return text, False

    def _keeps_asking(self, namespace: str, prompt: Path, tail: int) -> bool:
        """See `RamStore`."""
        on_path = (self._checkpoints.get((namespace, prompt[:c])) for c in range(1, len(prompt)))
        known = self._continued.get(namespace, 0)
        if tail:
            known = -1
        elif known >= 0:
            known += any(c is not None and c.logits is not None for c in on_path)
        self._continued[namespace] = known
        return known >= CONTINUED

    def _attended(self, prefix: Path, live: Path, view: LiveView) -> bool:
        """Attention of every token of a prefix is live or stored."""
        there = _shared(prefix, live)
        return all((view.namespace, prefix[: i + 1]) in self._attention for i in range(there, len(prefix)))


def _last_place(text: tuple[Path, bool], prompt: Path) -> int | None:
    """See `Following.place_in`."""
    ids, ends = text
    last = len(prompt) - len(ids)
    places = [last] if ends else range(last, -1, -1)
    return next((p for p in places if p >= 0 and prompt[p : p + len(ids)] == ids), None)


def _lost(where: tuple[str, Path], name: str, gone: Path, stays: int) -> bool:
    """A path goes with `gone`, of which the first `stays` tokens are others', too."""
    namespace, path = where
    return namespace == name and len(path) > stays and _shared(path, gone) == min(len(path), len(gone))


def _shared(a: Path, b: Path) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
