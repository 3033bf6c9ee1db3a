"""Records of a path that is to be forgotten, and rows that lead to no record any more."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.block_store import BATCH, BlockStore
from llamahybrid.prompt_cache.blocks import Item, Place, digest_of, shared
from llamahybrid.prompt_cache.nodes import ids_of


@dataclass
class Forgotten:
    """Records of a forgotten path."""

    items: list[tuple[Item, Place]] = field(default_factory=list)
    """Records that go."""
    torn: list[tuple[Item, Place, int]] = field(default_factory=list)
    """Attention among them that others need up to a position."""


def on_path(store: BlockStore, tokens: Tokens, stays: int = 0) -> Forgotten:
    """Records of a path, in any namespace: all that go on from it, and those that lead only there.

    Records that other paths share stay, and those that end within its first `stays` tokens.
    """
    ids, total, forgotten = ids_of(tokens), len(tokens), Forgotten()
    near: dict[str, list[tuple[int, Place]]] = defaultdict(list)
    for place, path in store.each():
        if length := shared(path.ids, ids):
            near[path.namespace].append((length, place))
    for places in near.values():
        others = max((n for n, place in places if n < min(total, place.end)), default=0)
        keep = max(stays, others)
        ours = [place for n, place in places if n == total or (n == place.end and n > keep)]
        kept = [place for n, place in places if n == place.end <= keep and n < total]
        gone = [(item, place) for place in ours for item in place.items]
        forgotten.items += gone
        if others or any(item.is_checkpoint for place in kept for item in place.items):
            forgotten.torn += [(i, p, keep) for i, p in gone if i.start < keep < i.end]
    return forgotten


def sweep(store: BlockStore) -> None:
    """Remove records that no path leads to, and rows that lead to no record.

    Damaged and evicted rows leave them. Rows that another process adds later stay; what
    it adds just then may go, which is a miss.
    """
    rows = store.rows
    before = [key for kind in (b"r", b"p", b"n") for key in rows.keys(kind)]
    alive = set[bytes]()
    for place, path in store.each():
        alive |= {item.key for item in place.items} | {b"n" + hash_ for hash_ in path.blocks}
        alive.add(b"p" + digest_of(place.block, place.tail))
    dead = [key for key in before if key not in alive]
    for key in dead:
        if key.startswith(b"r"):
            rows.remove(key)
    dead = [key for key in dead if not key.startswith(b"r")]
    for at in range(0, len(dead), BATCH):
        rows.update(dead[at : at + BATCH], dict.fromkeys)
