"""Every invariant of the prompt cache, looked at from outside: `check_integrity(cache)`, or a part of one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import singledispatch

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.block_store import BlockStore
from llamahybrid.prompt_cache.nodes import ID_BYTES, Entry, Node, lies_on, tokens_of
from llamahybrid.prompt_cache.store import RamStore
from llamahybrid.prompt_cache.tier import Tier
from llamahybrid.prompt_cache.tree import Tree
from llamahybrid.prompt_cache.worker import Late
from tests.lab.naive import NaivePromptCache

LOOKS = 3
"""Another process may evict a record and write it again between two looks."""


@singledispatch
def check_integrity(thing: object) -> None:
    """Raise AssertionError if anything in a cache, or in this part of one, is not as it says."""
    raise TypeError(f"nothing is known of {type(thing).__name__}")


@check_integrity.register
def _(cache: PromptCache) -> None:
    guard = cache.guard
    if not guard.inside():  # else it is in the middle of a change
        with guard.lock:
            guard.enter(cache.restart)
            check_ram(cache)
    if cache.disk is not None:
        check_integrity(cache.disk)


@check_integrity.register
def _(cache: NaivePromptCache) -> None:
    cache.check_integrity()


def check_ram(store: RamStore) -> None:
    """Raise AssertionError if anything that a cache has in RAM is not as it says."""
    check_integrity(store.tree)
    assert all(e in store.tree.entries() for e in store.held()), "what is gone is still held"
    assert not any(n.bare() for n in store.tree.oldest_nodes()), "a segment that no checkpoint needs"
    snapshots = [e.checkpoint.snapshot for e in store.tree.entries()]
    assert not any(s.flags.writeable for s in snapshots), "a stored snapshot can be written to"
    pinned = {e for e in store.tree.entries() if lies_on(store.tree.path_of(e), store.prefixes)}
    assert store.kept == pinned, "what the user pinned is miscounted"
    held = store.held() or store.prefixes or store.account.nbytes
    assert store.used() <= store.account.limit or held, "over budget"


@check_integrity.register
def _(tree: Tree) -> None:
    nodes: list[Node] = []
    entries: list[Entry] = []
    stack = list(tree._roots.values())
    assert all(r.children and not r.edge and not r.entries for r in stack), "a root is off"
    while stack:
        node = stack.pop()
        for first, child in node.children.items():
            assert child.parent is node, "a child does not know its parent"
            assert child.start == node.end, "an edge does not start where its parent ends"
            key = first.to_bytes(ID_BYTES, "little", signed=True)
            assert child.edge[:ID_BYTES] == key, "an edge is empty or filed wrongly"
            assert len(child.children) != 1, "an edge is not compressed"
            assert all(child.start < p <= child.end for p in child.entries), "a checkpoint is off its edge"
            assert child.weight == len(child.entries) + sum(c.weight for c in child.children.values()), (
                "checkpoints miscounted"
            )
            edges = [child.start, *(p for s in child.segments for p in (s.start, s.end)), child.end]
            assert edges == sorted(edges), "segments overlap or leave their edge"
            assert all(s.start < s.end for s in child.segments), "a segment is empty"
            assert all(e.node is child and e.position == p for p, e in child.entries.items()), "entry link"
            nodes.append(child)
            entries.extend(child.entries.values())
            stack.append(child)
    assert set(nodes) == set(tree._nodes), "orphan nodes"
    assert set(entries) == set(tree._entries), "orphan checkpoints"
    assert tree.token_bytes == sum(len(n.edge) for n in nodes), "token bytes miscounted"
    assert tree.entry_bytes == sum(e.nbytes for e in entries), "checkpoint bytes miscounted"
    segments = [s for n in nodes for s in n.segments]
    assert tree.segments == len(segments), "segments miscounted"
    assert tree.segment_bytes == sum(s.nbytes for s in segments), "segment bytes miscounted"
    assert len({id(s.record) for s in segments}) == len(segments), "two segments share their bytes"
    ages = [node.seen for node in tree._nodes]
    assert ages == sorted(ages), "the order of use is off"


@check_integrity.register
def _(tier: Tier) -> None:
    with suppress(Late):  # what was given up still runs
        tier.reader.call(60.0, check_integrity, tier.store)


@check_integrity.register
def _(store: BlockStore) -> None:
    store.rows.open()
    for one in store.each():
        for _ in range(LOOKS):
            sizes = store.rows.sizes(one.keys)
            items = one.items(sizes)
            assert len(items) == len(sizes), "a key twice"
            seen = {item.key: item for item in store.look(one.namespace, tokens_of(one.ids)).items}
            there = store.rows.sizes(one.keys)
            lost = [item for item in items if item.key in there and item != seen.get(item.key)]
            if not lost:
                break
            node = store.nodes(one.hashes[-1:]).get(one.hashes[-1], one.node)
            one = replace(one, node=node)  # its writer may have changed it since
        assert not lost, "a look-up of its own path finds another record, or none"
