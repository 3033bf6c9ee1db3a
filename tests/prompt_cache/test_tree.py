"""The radix tree: matching, splitting, closing up, and an integrity check that notices damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.prompt_cache import Checkpoint
from llamahybrid.prompt_cache.base import Segment, Tokens
from llamahybrid.prompt_cache.nodes import Entry, common_prefix, ids_of
from llamahybrid.prompt_cache.tree import Tree
from tests.lab.fake_engine import FakeAttention
from tests.lab.integrity import check_integrity


def ids(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def put(tree: Tree, path: Tokens, position: int) -> Entry:
    return tree.attach(tree.insert("m", path), Checkpoint("m", position, np.zeros(10, np.uint8)))


def edges(tree: Tree) -> list[list[int]]:
    return sorted(node.tokens.tolist() for node in tree.oldest_nodes())


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_prefix_is_the_token_by_token_one(a: Sequence[int], b: Sequence[int]) -> None:
    n = common_prefix(ids(*a), ids(*b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
def test_every_inserted_path_is_matched_in_full_and_stored_once(paths: list[list[int]]) -> None:
    tree = Tree()
    for path in paths:
        tree.insert("m", ids(*path))
        check_integrity(tree)
    assert all(tree.match("m", ids(*path, 9)).length == len(path) for path in paths)
    prefixes = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    assert tree.token_bytes == 4 * len(prefixes)


def test_a_growing_path_stays_one_edge_and_a_branch_splits_it() -> None:
    tree = Tree()
    tree.insert("m", ids(1, 2))
    tree.insert("m", ids(1, 2, 3, 4))
    assert edges(tree) == [[1, 2, 3, 4]]
    tree.insert("m", ids(1, 2, 9))
    assert edges(tree) == [[1, 2], [3, 4], [9]]
    tree.insert("m", ids(1))
    assert edges(tree) == [[1, 2], [3, 4], [9]]


def test_a_split_keeps_each_checkpoint_on_the_edge_that_covers_it() -> None:
    tree = Tree()
    shallow, deep = put(tree, ids(1, 2, 3, 4), 2), put(tree, ids(1, 2, 3, 4), 4)
    tree.insert("m", ids(1, 2, 9))
    assert shallow.node is not None
    assert deep.node is not None
    assert (shallow.node.tokens.tolist(), deep.node.tokens.tolist()) == ([1, 2], [3, 4])
    assert tree.match("m", ids(1, 2, 9)).entries() == [shallow]
    assert tree.match("m", ids(1, 2, 3)).entries() == [shallow]
    check_integrity(tree)


def test_trimming_cuts_to_the_deepest_checkpoint_and_closes_up_a_lone_child() -> None:
    tree = Tree()
    kept = put(tree, ids(1, 2, 3, 4, 5), 4)
    tree.insert("m", ids(1, 2, 9))
    leaf = tree.match("m", ids(1, 2, 9)).path[-1]
    tree.trim(leaf)
    assert edges(tree) == [[1, 2, 3, 4, 5]]
    check_integrity(tree)
    tree.trim(tree.match("m", ids(1)).path[-1])
    assert edges(tree) == [[1, 2, 3, 4]]
    tree.detach(kept)
    tree.trim(tree.match("m", ids(1)).path[-1], needed=3)
    assert edges(tree) == [[1, 2, 3]]
    tree.trim(tree.match("m", ids(1)).path[-1])
    assert edges(tree) == []
    assert (tree.token_bytes, tree.entry_bytes, len(tree)) == (0, 0, 0)
    check_integrity(tree)


def request(tree: Tree, tokens: Tokens) -> None:
    match = tree.match("m", tokens)
    tree.visit(match, match.entries())


def test_checkpoints_know_their_neighbours_on_every_branch() -> None:
    tree = Tree()
    deep, other = put(tree, ids(1, 2, 3, 4), 4), put(tree, ids(1, 2, 9, 9), 4)
    assert deep.above is None
    shared = put(tree, ids(1, 2, 3, 4), 2)
    assert (deep.above, other.above, set(shared.below)) == (shared, shared, {deep, other})
    between = put(tree, ids(1, 2, 3, 4), 3)
    assert (deep.above, between.above, set(shared.below)) == (between, shared, {between, other})
    tree.detach(shared)
    assert (between.above, other.above, set(between.below)) == (None, None, {deep})
    tree.detach(between)
    assert deep.above is None
    check_integrity(tree)


def test_a_request_counts_on_its_path_and_marks_what_it_leaves_behind() -> None:
    tree = Tree()
    first, mid, end = (put(tree, ids(1, 2, 3, 4, 5, 6), p) for p in (2, 4, 6))
    request(tree, ids(1, 2, 3, 4, 9))
    assert [(e.hits, e.passes, e.abandoned) for e in (first, mid, end)] == [
        (0, 1, False),
        (1, 0, False),
        (0, 0, True),
    ]
    request(tree, ids(1, 2, 3, 4, 5, 6, 7))
    assert (end.hits, end.abandoned) == (1, False)


def test_where_several_paths_go_on_none_is_left_behind() -> None:
    tree = Tree()
    deep = [put(tree, ids(1, 2, 3, 4, n), 5) for n in (5, 6)]
    request(tree, ids(1, 2, 3, 9))
    assert not any(e.abandoned for e in deep)


def test_namespaces_have_roots_of_their_own() -> None:
    tree = Tree()
    tree.insert("a", ids(1, 2))
    assert tree.match("b", ids(1, 2)).length == 0
    tree.insert("b", ids(1, 3))
    assert tree.match("a", ids(1, 3)).length == 1
    check_integrity(tree)


def test_nothing_of_the_callers_array_is_kept() -> None:
    tree = Tree()
    tokens = ids(1, 2, 3)
    tree.insert("m", tokens)
    tokens[:] = 0
    assert tree.match("m", ids(1, 2, 3)).length == 3


def _damage_tokens(tree: Tree) -> None:
    tree.token_bytes += 4


def _damage_entries(tree: Tree) -> None:
    tree.entry_bytes -= 1


def _damage_start(tree: Tree) -> None:
    next(iter(tree.oldest_nodes())).start += 1


def _damage_filing(tree: Tree) -> None:
    node = next(iter(tree.oldest_nodes()))
    node.edge = ids_of(ids(77)) + node.edge[4:]


def _damage_parent(tree: Tree) -> None:
    next(iter(tree.oldest_nodes())).parent = None


def _damage_link(tree: Tree) -> None:
    next(iter(tree.oldest_entries())).node = None


def _damage_index(tree: Tree) -> None:
    node = next(iter(tree.oldest_entries())).node
    assert node is not None
    node.entries.clear()


def _damage_age(tree: Tree) -> None:
    next(iter(tree.oldest_nodes())).last_used = 10**9


def _damage_above(tree: Tree) -> None:
    next(e for e in tree.oldest_entries() if e.above).above = None


def _damage_below(tree: Tree) -> None:
    next(e for e in tree.oldest_entries() if e.below).below.clear()


def _damage_line(tree: Tree) -> None:
    tree._line.popitem()


@pytest.mark.parametrize(
    "damage",
    [
        _damage_tokens,
        _damage_entries,
        _damage_start,
        _damage_filing,
        _damage_parent,
        _damage_link,
        _damage_index,
        _damage_age,
        _damage_above,
        _damage_below,
        _damage_line,
    ],
)
def test_the_integrity_check_notices(damage: Callable[[Tree], None]) -> None:
    tree = Tree()
    put(tree, ids(1, 2, 3, 4), 4)
    put(tree, ids(1, 2, 9, 9), 4)
    put(tree, ids(1, 2, 9, 9), 2)
    check_integrity(tree)
    damage(tree)
    with pytest.raises(AssertionError):
        check_integrity(tree)


def damaged(segment: Segment, path: Tokens, at: int) -> tuple[Segment, Segment]:
    raise ValueError("damaged")


def test_of_the_deepest_segment_what_lies_before_a_place_can_stay() -> None:
    tree, attention = Tree(), FakeAttention(8)
    tree.splitters["m"] = attention.split
    match = tree.insert("m", ids(*range(1, 11)))
    (node,) = match.path
    put(tree, ids(*range(1, 11)), 10)
    tree.store(match, attention.of([], list(range(1, 5))))
    tree.store(match, attention.of(list(range(1, 5)), list(range(5, 11))))
    tree.shorten(node, "m", 7)
    assert [(s.start, s.end) for s in node.segments] == [(0, 4), (4, 7)]
    assert tree.segment_bytes == sum(s.nbytes for s in node.segments)
    tree.shorten(node)
    assert [(s.start, s.end) for s in node.segments] == [(0, 4)]
    tree.splitters["m"] = damaged
    tree.shorten(node, "m", 2)
    assert (node.segments, tree.segment_bytes, tree.damaged) == ([], 0, 1)
