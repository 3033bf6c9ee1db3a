"""Eviction policies to compare with: least recently used, and Marconi's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamahybrid.prompt_cache.eviction import Victim, bare_tail
from llamahybrid.prompt_cache.nodes import Entry, Match
from llamahybrid.prompt_cache.tree import Tree


class Lru:
    """The checkpoint that no request was restored from for longest, wherever it lies."""

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """Nothing is learned; the tree keeps the order of use."""

    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, thin: bool
    ) -> Victim | None:
        """See `Eviction.victim`."""
        stays = set() if thin else set(live)
        free = (e for e in tree.oldest_entries() if not e.pins and not e.user_pinned and e not in stays)
        entry = next(free, None)
        return bare_tail(tree, path, entry) or entry


@dataclass(frozen=True)
class Shape:
    """Layers of a model, for its FLOPs: how many of each kind, width and state width."""

    attention: int
    recurrent: int
    mlp: int
    width: int
    state: int

    def flops(self, tokens: int) -> float:
        """FLOPs of a prefill, by the formulas in the appendix of the Marconi paper."""
        n, d = tokens, self.width
        attention = 8 * n * d**2 + 4 * n**2 * d
        recurrent = 12 * n * d**2 + 16 * n * d * self.state + 10 * n
        return self.attention * attention + self.recurrent * recurrent + self.mlp * 16 * n * d**2


class Marconi(Lru):
    """Least recency + alpha x FLOP efficiency first, both scaled to [0, 1] over all checkpoints.

    After Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025), section 4.2: FLOP
    efficiency is the FLOPs that a checkpoint saves over the one above it per byte of its state and of the KV
    between the two; one with more than one below it does not go; a hit renews only the one restored from.
    The paper tunes alpha by replaying past requests; here it is given.
    """

    def __init__(self, alpha: float, shape: Shape, token_bytes: int) -> None:
        self.alpha = alpha
        self.shape = shape
        self.token_bytes = token_bytes

    def victim(
        self, tree: Tree, path: Match | None, live: Sequence[Entry], incoming: int | None, thin: bool
    ) -> Victim | None:
        """See `Eviction.victim`."""
        stays = set() if thin else set(live)
        entries = list(tree.oldest_entries())
        free = [
            e for e in entries if len(e.below) <= 1 and not e.pins and not e.user_pinned and e not in stays
        ]
        if not free:
            return super().victim(tree, path, live, incoming, thin)
        oldest, newest = entries[0].last_used, entries[-1].last_used
        efficiencies = {e: self.efficiency(e) for e in entries}
        low, span = min(efficiencies.values()), max(efficiencies.values()) - min(efficiencies.values())

        def score(entry: Entry) -> float:
            recency = (entry.last_used - oldest) / max(1, newest - oldest)
            return recency + self.alpha * (efficiencies[entry] - low) / (span or 1.0)

        entry = min(free, key=score)
        return bare_tail(tree, path, entry) or entry

    def efficiency(self, entry: Entry) -> float:
        """FLOPs saved over the checkpoint above, per byte."""
        above = 0 if entry.above is None else entry.above.position
        n_bytes = entry.nbytes + self.token_bytes * (entry.position - above)
        return (self.shape.flops(entry.position) - self.shape.flops(above)) / n_bytes
