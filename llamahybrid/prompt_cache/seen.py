"""The result of a look-up: restore points on a prompt's path, and the attention that they need from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llamahybrid.prompt_cache.base import Range, clipped
from llamahybrid.prompt_cache.blocks import BLOCK, Item


@dataclass(frozen=True)
class Offer:
    """A restore point for a prompt, with the attention that is needed from there."""

    position: int
    checkpoint: Item | None
    """None where attention is all that is needed."""
    attention: tuple[Item, ...]
    """Ascending; the last one may reach beyond `position`."""

    @property
    def items(self) -> list[Item]:
        """The records to read."""
        return [*([self.checkpoint] if self.checkpoint else []), *self.attention]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory, about."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class Seen:
    """The result of looking a prompt up in a store."""

    total: int = 0
    """Tokens of the prompt."""
    length: int = 0
    """Tokens of it with which any path begins."""
    followers: tuple[int, ...] = ()
    """Tokens that are known to follow there, two at most."""
    items: tuple[Item, ...] = ()
    """Records on its path, the shallowest first."""

    def serves(self, position: int, *, logits: bool, attention: bool) -> bool:
        """The path can be restored at a position, by a prompt that leaves it there, too; with its logits,
        with its attention, if asked."""
        points = [item for item in self.items if item.is_checkpoint and item.end == position]
        if not points or (logits and not points[0].logits):
            return False
        before = [item for item in self.items if item.end <= position and item.node is None]
        return not attention or cover(before, [(0, position)])[1] is None

    def offer(
        self,
        above: int,
        limit: int,
        missing: Sequence[Range],
        *,
        anywhere: bool = False,
        without: Iterable[bytes] = (),
    ) -> Offer | None:
        """The deepest restore point at a position in (above, limit].

        `missing`: ascending ranges whose attention would have to come from here. `anywhere`: attention is all
        of the state, so that any position that it reaches will do. `without`: keys of records that do not
        count.
        """
        refused = frozenset(without)
        items = [item for item in self.items if item.key not in refused]
        if anywhere:
            attention, hole = cover(items, clipped(missing, limit))
            position = limit if hole is None else hole
            return Offer(position, None, tuple(attention)) if attention and position > above else None
        for item in reversed(items):
            serves = item.is_checkpoint and (item.end < self.total or item.logits)
            if serves and above < item.end <= limit:
                attention, hole = cover(items, clipped(missing, item.end))
                if hole is None:
                    return Offer(item.end, item, tuple(attention))
        return None


def cover(items: Iterable[Item], ranges: Iterable[Range]) -> tuple[list[Item], int | None]:
    """The attention for ascending ranges, up to the first hole; its position, None without one."""
    longest: dict[int, Item] = {}
    for item in items:
        if not item.is_checkpoint and (item.start not in longest or item.end > longest[item.start].end):
            longest[item.start] = item
    found: dict[Item, None] = {}
    for start, end in ranges:
        at = start
        while at < end:
            there = longest.get(at - at % BLOCK)
            if there is None or there.end <= at:
                return list(found), at
            found[there] = None
            at = there.end
    return list(found), None
