"""The result of a look-up: restore points on a prompt's path, and the attention that they need from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llamahybrid.prompt_cache.base import Range, clipped
from llamahybrid.prompt_cache.blocks import Item, Kind, Reach


@dataclass(frozen=True)
class Piece:
    """The attention [start, end) of a record."""

    item: Item
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, about."""
        return self.item.nbytes * (self.end - self.start) // max(1, self.item.end - self.item.start)


@dataclass(frozen=True)
class Offer:
    """A restore point for a prompt, with the attention that is needed from there."""

    position: int
    checkpoint: Item | None
    """None where attention is all that is needed."""
    pieces: tuple[Piece, ...]
    """Ascending."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory, about."""
        return sum(p.nbytes for p in self.pieces) + (self.checkpoint.nbytes if self.checkpoint else 0)

    @property
    def items(self) -> list[Item]:
        """The records to read."""
        first = [self.checkpoint] if self.checkpoint else []
        return list(dict.fromkeys([*first, *(p.item for p in self.pieces)]))


@dataclass(frozen=True)
class Seen:
    """The result of looking a prompt up in a store."""

    total: int = 0
    """Tokens of the prompt."""
    length: int = 0
    """Tokens of it with which any record begins."""
    followers: tuple[int, ...] = ()
    """Tokens that are known to follow there, two at most."""
    items: tuple[Item, ...] = ()
    """Records that end on its path, the shallowest first."""
    borrowed: tuple[Reach, ...] = ()
    """Attention that checkpoints on it need, up to there."""
    through: tuple[Reach, ...] = ()
    """Other attention that runs along it and leaves it."""

    def checkpoint(self, position: int) -> Item | None:
        """The checkpoint at a position; the one with logits, if there is one."""
        there = [i for i in self.items if i.end == position and i.is_checkpoint]
        return max(there, key=lambda item: item.kind, default=None)

    def along(self, end: int) -> list[Reach]:
        """Attention that the path has up to a position."""
        own = (Reach(i, i.end) for i in self.items if not i.is_checkpoint)
        return [Reach(r.item, min(r.end, end)) for r in (*own, *self.borrowed, *self.through)]

    def serves(self, position: int, *, logits: bool, attention: bool) -> bool:
        """The path can be restored at a position, by a prompt that leaves it there, too; with its logits,
        with its attention, if asked."""
        point = self.checkpoint(position)
        if point is None or (logits and point.kind != Kind.PROMPT):
            return False
        own = (Reach(i, i.end) for i in self.items if not i.is_checkpoint)
        reaches = [r for r in (*own, *self.borrowed) if r.end <= position]
        return not attention or cover(reaches, [(0, position)])[1] is None

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
        along = (reach for reach in self.along(self.total) if reach.item.key not in refused)
        reaches = [Reach(reach.item, min(reach.end, limit)) for reach in along]
        if anywhere:
            pieces, hole = cover(reaches, clipped(missing, limit))
            position = limit if hole is None else hole
            return Offer(position, None, tuple(pieces)) if pieces and position > above else None
        points: dict[int, Item] = {}
        for item in sorted(self.items, key=lambda item: (item.end, item.kind)):
            serves = item.is_checkpoint and (item.end < self.total or item.kind == Kind.PROMPT)
            if serves and above < item.end <= limit and item.key not in refused:
                points[item.end] = item
        for end in reversed(points):
            pieces, hole = cover(reaches, clipped(missing, end))
            if hole is None:
                return Offer(end, points[end], tuple(pieces))
        return None


def cover(reaches: Sequence[Reach], ranges: Iterable[Range]) -> tuple[list[Piece], int | None]:
    """The fewest pieces for ascending ranges, up to the first hole; its position, None without one."""
    pieces: list[Piece] = []
    for start, end in ranges:
        at = max(start, pieces[-1].end if pieces else 0)
        while at < end:
            best = max((r for r in reaches if r.item.start <= at < r.end), key=lambda r: r.end, default=None)
            if best is None:
                return pieces, at
            low = max(best.item.start, pieces[-1].end if pieces else 0)
            at = min(best.end, end)
            pieces.append(Piece(best.item, low, at))
    return pieces, None


def uncovered(reaches: Sequence[Reach], end: int) -> list[Range]:
    """Ranges of [0, end), ascending, that no attention covers."""
    ranges, at = list[Range](), 0
    while at < end:
        covered = max((r.end for r in reaches if r.item.start <= at), default=0)
        if covered > at:
            at = covered
            continue
        start, at = at, min((r.item.start for r in reaches if r.item.start > at < r.end), default=end)
        ranges.append((start, min(at, end)))
    return ranges
