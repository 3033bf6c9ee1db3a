"""Every invariant of the prompt cache, looked at from outside: `check_integrity(cache)`, or a part of one."""

from __future__ import annotations

from collections import Counter
from functools import singledispatch

from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.disk_index import DiskIndex, crossed, on_disk
from llamahybrid.prompt_cache.disk_store import DiskStore
from llamahybrid.prompt_cache.nodes import ID_BYTES, Entry, Node, Place, Stored
from llamahybrid.prompt_cache.pins import Pins
from llamahybrid.prompt_cache.ram import Account
from llamahybrid.prompt_cache.ram_store import RamStore
from llamahybrid.prompt_cache.tree import Tree
from tests.lab.naive import NaivePromptCache


@singledispatch
def check_integrity(thing: object) -> None:
    """Raise AssertionError if anything in a cache, or in this part of one, is not as it says."""
    raise TypeError(f"nothing is known of {type(thing).__name__}")


@check_integrity.register
def _(cache: PromptCache) -> None:
    guard = cache.ram.guard
    if not guard.inside():  # else it is in the middle of a change
        with guard.lock:
            guard.enter(cache.ram)
            check_integrity(cache.ram.store)
    if cache.disk is not None:
        check_integrity(cache.disk.store)


@check_integrity.register
def _(cache: NaivePromptCache) -> None:
    cache.check_integrity()


@check_integrity.register
def _(store: RamStore) -> None:
    check_integrity(store.tree)
    check_integrity(store.account)
    check_integrity(store.pins)
    held = {e for e in store.tree.oldest_entries() if e.pins} | store.doomed
    assert held == store.pins.entries(), "pins and checkpoints disagree"
    assert all(e.node is None for e in store.doomed), "a doomed checkpoint is still in the tree"
    assert all(e.node is not None for e in store.live), "the live path names an evicted checkpoint"
    assert not any(n.bare() for n in store.tree.oldest_nodes()), "a segment that no checkpoint needs"
    stored = [*store.tree.oldest_entries(), *store.doomed]
    snapshots = [e.checkpoint.snapshot for e in stored]
    assert not any(s.flags.writeable for s in snapshots), "a stored snapshot can be written to"
    idle = {id(b) for stack in store.account._idle.values() for b in stack}
    assert not any(id(s) in idle for s in snapshots), "a stored snapshot lies in the pool"
    pinned = {e for e in store.tree.oldest_entries() if e.user_pinned}
    assert store.kept == pinned, "what the user pinned is miscounted"
    assert all(store.prefixes.cover(store.tree.path_of(e)) for e in pinned), "pinned by nobody"
    own = store.kept or store.prefixes.nbytes
    assert store.used() <= store.account.limit or held or own or store.account.reserved_bytes(), "over budget"


@check_integrity.register
def _(account: Account) -> None:
    buffers = [b for stack in account._idle.values() for b in stack]
    assert all(b.nbytes == size for size, stack in account._idle.items() for b in stack), "filed wrongly"
    assert len({id(b) for b in buffers}) == len(buffers), "a buffer lies in the pool twice"
    assert account.idle_bytes == sum(b.nbytes for b in buffers), "idle bytes miscounted"


@check_integrity.register
def _(pins: Pins) -> None:
    found = Counter(entry for _, entry in pins._used.values())
    assert found == {e: e.pins for e in found}, "pins and users disagree"


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
    assert tree.segment_bytes == sum(s.nbytes for s in segments), "segment bytes miscounted"
    assert len({id(s.record) for s in segments}) == len(segments), "two segments share their bytes"
    assert set(entries) == set(tree._line), "a checkpoint has no turn to be looked at"
    for order in (list(tree._entries), list(tree._nodes)):
        ages = [item.last_used for item in order]
        assert ages == sorted(ages), "the order of use is off"
    for entry in entries:
        assert entry.node is not None
        assert entry.above is entry.node.above(entry.position), "a checkpoint does not know the one above"
        assert set(entry.below) == set(entry.node.below(entry.position)), "nor those below"


@check_integrity.register
def _(store: DiskStore) -> None:
    guard = store.guard
    if not guard.inside():
        with guard.lock:
            guard.enter(store)
            check_integrity(store._index)


@check_integrity.register
def _(index: DiskIndex) -> None:
    check_integrity(index._tree)
    nodes = list(index._tree.oldest_nodes())
    places = [place for node in nodes for place in on_disk(node).places]
    records = [record for place in places for record in place.records]
    listed = {r.key: r for shard in index._shards.values() for r in shard.values()}
    assert {r.key: r for r in records} == listed, "keys and records disagree"
    assert len(records) == len(listed), "a record is there twice"
    assert index.nbytes == sum(r.nbytes for r in records), "bytes miscounted"
    assert set(index._checkpoints) == {r for r in records if r.is_checkpoint}, "checkpoints disagree"
    assert {p.digest: p for p in places} == index._anchors, "anchors disagree"
    bare = {s for node in nodes for s in on_disk(node).begun if s.start >= on_disk(node).deepest()}
    assert set(index._bare) == bare, "attention that nothing is behind"
    for place in places:
        assert place.records, "nothing ends at a place"
        _check_place(place)
    for node in nodes:
        here = on_disk(node)
        assert not node.tail(), "tokens that no record needs"
        below = [on_disk(child) for child in node.children.values()]
        assert here.below == sum(d.below + d.checkpoints() for d in below), "checkpoints miscounted"
        assert all(place.node is node for place in here.places), "a place does not know its node"
        ends = [node.start, *(place.position for place in here.places)]
        assert ends == sorted(set(ends)), "places are not in order"
        assert all(node.start <= s.start < node.end for s in here.begun), "attention begins elsewhere"
        assert len(set(here.through)) == len(here.through), "attention lies somewhere twice"
        for segment in (*here.through, *here.begun):
            assert listed.get(segment.key) is segment, "attention without a record"
            assert node in crossed(segment), "attention lies where it does not reach"


def _check_place(place: Place) -> None:
    assert place.node.start < place.position <= place.node.end, "a place is off its edge"
    for record in place.records:
        assert record.place is place, "a record does not know its place"
        assert record.key == key_of(record), "a foreign key"
        if not record.is_checkpoint:
            *_, top = crossed(record)
            assert record in on_disk(top).begun, "attention does not begin where it starts"


def key_of(record: Stored) -> str:
    """The name that a record must have, where it is."""
    sort = "attention" if not record.is_checkpoint else "prompt" if record.logits else "state"
    start = record.place.position if record.is_checkpoint else record.start
    return f"{record.place.digest.hex()}-{sort}-{start}-{record.place.position}"
