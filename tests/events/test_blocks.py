"""Blocks and events: hashes name all tokens up to a block's end, and events lead from one set to another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.events import Blocks, changes, cut
from llamahybrid.prompt_cache.nodes import ids_of, tokens_of

PATHS = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=5)


def blocks(paths: list[list[int]], size: int = 2, seed: int = 0) -> Blocks:
    found: Blocks = {}
    for path in paths:
        found |= cut(ids_of(np.array(path, np.int32)), size, seed)
    return found


@given(PATHS, st.integers(1, 5))
def test_blocks_are_the_complete_ones_of_each_path(paths: list[list[int]], size: int) -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for name, (parent, ids) in blocks(paths, size).items():
        before = () if parent is None else seen[parent]
        seen[name] = (*before, *(int(t) for t in tokens_of(ids)))
    wanted = {tuple(path[:end]) for path in paths for end in range(size, len(path) + 1, size)}
    assert sorted(seen.values()) == sorted(wanted)
    assert all(0 <= name < 2**63 for name in seen)


def test_hashes_differ_between_models() -> None:
    path = list(range(8))
    assert blocks([path], 4, 1).keys().isdisjoint(blocks([path], 4, 2))


@given(PATHS, PATHS)
def test_events_lead_from_one_set_to_the_other(old: list[list[int]], new: list[list[int]]) -> None:
    before, after = blocks(old), blocks(new)
    known = set(before)
    for event in changes(before, after, "CPU"):
        if event["type"] == "BlockRemoved":
            known -= set(event["block_hashes"])
            continue
        assert event["parent_block_hash"] is None or event["parent_block_hash"] in known
        known |= set(event["block_hashes"])
    assert known == set(after)


def test_consecutive_blocks_are_one_event() -> None:
    found = blocks([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8]])
    first, second, third, branch = found
    stored = list(changes({}, found, "CPU"))
    assert [event["block_hashes"] for event in stored] == [[first, second, third], [branch]]
    assert [event["parent_block_hash"] for event in stored] == [None, first]
    assert [event["token_ids"] for event in stored] == [[1, 2, 3, 4, 5, 6], [7, 8]]
    assert [event["block_size"] for event in stored] == [2, 2]
    assert {event["type"] for event in stored} == {"BlockStored"}
    assert {event["medium"] for event in stored} == {"CPU"}
    (removed,) = changes(found, {}, "DISK")
    assert removed == {"type": "BlockRemoved", "block_hashes": list(found), "medium": "DISK"}
