"""Records of a path that is to be forgotten, and rows that lead to no record any more."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamahybrid.prompt_cache.base import Tokens
from llamahybrid.prompt_cache.block_store import MOST_PARENTS, BlockStore
from llamahybrid.prompt_cache.blocks import (
    BLOCK,
    BLOCK_BYTES,
    HASH_BYTES,
    NO_PARENT,
    Item,
    Node,
    Place,
    chain,
    shared,
)
from llamahybrid.prompt_cache.nodes import ids_of


@dataclass
class Forgotten:
    """Records of a forgotten path."""

    items: list[tuple[Item, Place]] = field(default_factory=list)
    """Records that go."""
    torn: list[tuple[Item, Place, int]] = field(default_factory=list)
    """Attention among them that others need up to a position."""


@dataclass
class _Near:
    """Records along a path and behind it, in one namespace."""

    before: list[tuple[Item, Place]] = field(default_factory=list)
    behind: list[tuple[Item, Place]] = field(default_factory=list)
    shared: int = 0
    """Tokens that another path has in common with it."""


def on_path(store: BlockStore, tokens: Tokens, stays: int = 0) -> Forgotten:
    """Records of a path, in any namespace: all that go on from it, and those that lead only there.

    Records that other paths share stay, and those that end within its first `stays` tokens. All rows are
    read once; no record is.
    """
    ids, forgotten = ids_of(tokens), Forgotten()
    parents, along = dict[bytes, bytes](), dict[bytes, tuple[bytes, int]]()
    for hash_, raw in store.rows.rows(b"n"):
        parents[hash_] = raw[:HASH_BYTES]
        if raw[:HASH_BYTES] == NO_PARENT:
            along |= {h: (hash_, k) for k, h in enumerate(chain(hash_, ids))}
    branches: dict[bytes, tuple[bytes, bytes]] = {}
    alike: dict[bytes, int] = {}
    roots: dict[bytes, _Near] = {}
    for digest, raw in store.rows.rows(b"p"):
        place = Place.unpack(digest, raw)
        found = None if place is None else _branch(place.block, parents, along, branches)
        if place is None or found is None:
            continue
        at, following = found
        root, k = along[at]
        rest = ids[BLOCK_BYTES * k :]
        if following and following not in alike:
            node = Node.unpack(store.rows.get([b"n" + following])[0])
            alike[following] = shared(node.text, rest) if node else 0
        length = BLOCK * k + (alike[following] if following else shared(place.tail, rest))
        near, named = roots.setdefault(root, _Near()), [(item, place) for item in place.items]
        if length == len(tokens):
            near.behind += named
        elif length == place.end:
            near.before += named
        else:
            near.shared = max(near.shared, length)
    for near in roots.values():
        keep = max(stays, near.shared)
        gone = near.behind + [(item, place) for item, place in near.before if item.end > keep]
        forgotten.items += gone
        if near.shared or any(item.is_checkpoint and item.end <= keep for item, _ in near.before):
            forgotten.torn += [(i, p, keep) for i, p in gone if i.start < keep < i.end]
    return forgotten


def sweep(store: BlockStore) -> None:
    """Remove records that no path leads to, and rows that lead to no record.

    A record without a place, or a place without its blocks, is left by a damaged or an evicted row. Places
    and records that another process adds meanwhile stay.
    """
    rows = store.rows
    records, places = list(rows.keys(b"r")), set(rows.keys(b"p"))
    parents = {hash_: raw[:HASH_BYTES] for hash_, raw in rows.rows(b"n")}
    alive, named, dead = {NO_PARENT}, set[bytes](), list[bytes]()
    for digest, raw in rows.rows(b"p"):
        place = Place.unpack(digest, raw)
        way, hash_ = list[bytes](), b"" if place is None else place.block
        while hash_ not in alive and hash_ in parents and len(way) <= MOST_PARENTS:
            way.append(hash_)
            hash_ = parents[hash_]
        if place is not None and hash_ in alive:
            alive.update(way)
            named |= {item.key for item in place.items}
        elif b"p" + digest in places:
            dead.append(b"p" + digest)
    for key in records:
        if key not in named:
            rows.remove(key)
    dead += [b"n" + hash_ for hash_ in parents if hash_ not in alive]
    for at in range(0, len(dead), BLOCK):
        rows.update(dead[at : at + BLOCK], dict.fromkeys)


def _branch(
    block: bytes,
    parents: dict[bytes, bytes],
    along: dict[bytes, tuple[bytes, int]],
    known: dict[bytes, tuple[bytes, bytes]],
) -> tuple[bytes, bytes] | None:
    """The deepest block on a path that leads to another one, and the next on the way; b"" if it is that
    one."""
    way: list[bytes] = []
    hash_ = block
    while hash_ not in known and hash_ not in along:
        way.append(hash_)
        if hash_ not in parents or len(way) > MOST_PARENTS:
            return None
        hash_ = parents[hash_]
    at, following = known.get(hash_, (hash_, b""))
    known.setdefault(hash_, (at, following))
    for each in reversed(way):
        following = following or each
        known[each] = (at, following)
    return known[block]
