"""Edges and what lies on them, and how far a prompt follows: what the tree asks of its parts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llamahybrid.prompt_cache import Checkpoint
from llamahybrid.prompt_cache.base import Logits, Segment, Tokens
from llamahybrid.prompt_cache.nodes import (
    ID_BYTES,
    LONGEST_TAIL,
    Entry,
    Node,
    OnDisk,
    Place,
    Stored,
    ids_of,
    token_at,
    tokens_of,
)
from llamahybrid.prompt_cache.tree import Tree


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def path(length: int, branch: int = 0, at: int = 0) -> Tokens:
    """Tokens 1, 2, 3, ...; of another `branch` from `at` on."""
    tokens = np.arange(1, length + 1, dtype=np.int32)
    tokens[at:] += 1000 * branch
    return tokens


def put(tree: Tree, tokens: Tokens, logits: Logits | None = None) -> Entry:
    return tree.attach(tree.insert("m", tokens), Checkpoint("m", len(tokens), np.zeros(8, np.uint8), logits))


def segment(tree: Tree, tokens: Tokens, start: int, end: int) -> None:
    assert tree.store(tree.match("m", tokens), Segment(start, end, np.zeros(8, np.uint8)))


# -- tokens as edges have them ---------------------------------------------------------------------


def test_edges_are_the_same_bytes_on_every_machine() -> None:
    assert ids_of(ids(1, -2)) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert ids_of(np.array([1, 7, -2, 7], ">i4")[::2]) == ids_of(ids(1, -2))
    assert token_at(ids_of(ids(5, -6)), 1) == -6


def test_tokens_of_an_edge_are_an_array_of_their_own() -> None:
    edge = ids_of(ids(3, 4))
    found = tokens_of(edge)
    found[0] = 9
    assert (tokens_of(edge).tolist(), found.dtype) == ([3, 4], np.int32)


# -- a node ----------------------------------------------------------------------------------------


def test_the_tail_of_a_leaf_is_what_nothing_needs() -> None:
    tree = Tree()
    node = put(tree, path(10)).node
    assert node is not None
    tree.insert("m", path(30))
    leaf = tree.match("m", path(30)).path[-1]
    assert [leaf.tail(), leaf.tail(12), leaf.tail(40)] == [20, 18, 0]
    put(tree, path(20))
    segment(tree, path(30), 0, 15)
    assert leaf.tail() == 10
    tree.insert("m", path(30, 1, at=25))
    assert tree.match("m", path(20)).path[0].tail() == 0, "others go on from there"


def test_neighbours_are_the_nearest_on_the_way() -> None:
    tree = Tree()
    first, second = put(tree, path(10)), put(tree, path(20))
    left, right = put(tree, path(40)), put(tree, path(40, 1, at=30))
    trunk = tree.match("m", path(20)).path[0]
    assert trunk.above(20) is first
    assert trunk.above(10) is None
    assert left.node is not None
    assert left.node.above(40) is second
    assert trunk.below(10) == [second]
    assert set(trunk.below(20)) == {left, right}
    assert left.node.below(40) == []


def test_segments_without_a_checkpoint_behind_their_start_are_bare() -> None:
    tree = Tree()
    put(tree, path(10)), put(tree, path(30))
    for start, end in ((0, 10), (10, 20), (20, 30)):
        segment(tree, path(30), start, end)
    deepest = tree.match("m", path(30)).entries()[-1]
    node = deepest.node
    assert node is not None
    assert node.bare() == 0
    tree.detach(deepest)
    assert node.bare() == 2
    put(tree, path(40, 1, at=30))
    assert tree.match("m", path(10)).path[0].bare() == 0, "one below needs them"


def test_the_way_up_ends_below_the_root() -> None:
    tree = Tree()
    tree.insert("m", path(10))
    tree.insert("m", path(10, 1, at=5))
    leaf = tree.match("m", path(10)).path[-1]
    assert [(n.start, n.end) for n in leaf.path()] == [(5, 10), (0, 5)]
    assert list(leaf.path())[-1].leaf() in set(leaf.path()) | set(tree.match("m", path(10, 1, at=5)).path)


def test_one_that_takes_over_goes_on_with_how_the_old_one_fared() -> None:
    old, new = (Entry(Checkpoint("m", 3, np.zeros(1, np.uint8)), None) for _ in range(2))
    old.born, old.hits, old.passes, old.abandoned = 1, 2, 3, True
    new.take_over(old)
    assert (new.born, new.hits, new.passes, new.abandoned) == (1, 2, 3, True)


def test_bytes_of_a_checkpoint_are_snapshot_and_logits() -> None:
    entry = Entry(Checkpoint("m", 3, np.zeros(10, np.uint8), np.zeros(5, np.float32)), None)
    assert entry.nbytes == 30


# -- a match ---------------------------------------------------------------------------------------


def test_what_follows_a_match_is_the_path_used_last() -> None:
    tree = Tree()
    for branch in (0, 1):
        tree.insert("m", path(10, branch, at=5))
    for branch in (1, 0, 1):
        tree.touch(tree.match("m", path(10, branch, at=5)))
        assert tree.match("m", path(5)).follower() == 6 + 1000 * branch
    assert tree.match("m", path(3)).follower() == 4
    assert tree.match("m", path(10)).follower() is None
    assert tree.match("m", ids(77)).follower() is None


def test_paths_part_where_a_match_ends_and_nowhere_else() -> None:
    tree = Tree()
    for branch in (0, 1):
        tree.insert("m", path(10, branch, at=5))
    assert [tree.match("m", path(n)).branches() for n in (4, 5, 6, 10)] == [False, True, False, False]
    assert not tree.match("m", ids(77)).branches()


def test_what_is_left_behind_is_one_paths() -> None:
    tree = Tree()
    kept, deeper, deepest = (put(tree, path(n)) for n in (10, 20, 30))
    assert tree.match("m", path(15, 1, at=12)).left_behind() == [deeper, deepest]
    assert tree.match("m", path(10)).left_behind() == [deeper, deepest]
    assert tree.match("m", path(30)).left_behind() == []
    put(tree, path(30, 1, at=25))
    assert tree.match("m", path(15, 2, at=12)).left_behind() == [deeper], "then it parts"
    assert kept not in tree.match("m", path(15, 2, at=12)).left_behind()


@pytest.mark.parametrize(("end", "tail"), [(20 + LONGEST_TAIL, LONGEST_TAIL), (21 + LONGEST_TAIL, 0)])
def test_a_tail_is_measured_to_the_end_of_the_last_prompt(end: int, tail: int) -> None:
    tree = Tree()
    put(tree, path(22))  # a cut, no prompt's end
    put(tree, path(end), np.zeros(2, np.float32))
    assert tree.match("m", path(30, 1, at=20)).tail() == tail


def test_missing_ranges_end_where_an_edge_does() -> None:
    tree = Tree()
    put(tree, path(30)), put(tree, path(30, 1, at=20))
    segment(tree, path(30), 5, 10)
    match = tree.match("m", path(30))
    assert match.missing(30) == [(0, 5), (10, 20), (20, 30)]
    assert match.missing(12) == [(0, 5), (10, 12)]
    assert match.missing(7) == [(0, 5)]


# -- what lies on disk for an edge -----------------------------------------------------------------


def record(place: Place, *, checkpoint: bool = True, logits: bool = False, start: int = 0) -> Stored:
    stored = Stored(f"{place.position}", checkpoint, start, logits, 10, place)
    place.records.append(stored)
    return stored


def edge(*positions: int) -> tuple[Node, OnDisk]:
    node, disk = Node(None, 0, bytes(ID_BYTES * 100)), OnDisk()
    node.disk = disk
    for position in positions:
        disk.add(Place(node, position, b""))
    return node, disk


def test_places_are_found_whatever_order_they_came_in() -> None:
    _, disk = edge(30, 10, 20)
    assert [p.position for p in disk.places] == [10, 20, 30]
    found = disk.place(20)
    assert found is disk.places[1]
    assert [disk.place(n) for n in (5, 15, 31)] == [None, None, None]


def test_of_two_checkpoints_at_a_place_the_one_with_logits_is_best() -> None:
    _, disk = edge(10)
    place = disk.places[0]
    assert place.best() is None
    record(place, checkpoint=False)
    assert place.best() is None
    record(place)
    best = record(place, logits=True)
    record(place)
    assert place.best() is best


def test_the_deepest_checkpoint_is_no_attention_and_may_lie_below() -> None:
    _, disk = edge(10, 20)
    record(disk.places[1], checkpoint=False)
    assert (disk.deepest(), disk.checkpoints()) == (0, 0)
    record(disk.places[0])
    assert (disk.deepest(), disk.checkpoints()) == (10, 1)
    disk.below = 1
    assert disk.deepest() == math.inf


def test_an_edge_that_is_divided_and_joined_has_all_of_it_again() -> None:
    node, disk = edge(10, 20, 30)
    for place in disk.places:
        record(place)
    early, late = (record(disk.places[2], checkpoint=False, start=n) for n in (5, 25))
    disk.begun, disk.through = {early: None, late: None}, (early, late)
    upper = Node(None, 0, bytes(ID_BYTES * 20))
    above = disk.split(upper)
    assert [[p.position for p in part.places] for part in (above, disk)] == [[10, 20], [30]]
    assert all(place.node is upper for place in above.places)
    assert (above.below, above.checkpoints()) == (1, 2)
    assert (list(above.begun), list(disk.begun)) == ([early], [late])
    assert (above.through, disk.through) == ((early,), (early, late))
    above.join(disk, node)
    assert [p.position for p in above.places] == [10, 20, 30]
    assert all(place.node is node for place in disk.places)
    assert (list(above.begun), above.through, above.below) == ([early, late], (early, late), 0)
