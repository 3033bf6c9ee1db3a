"""Blocks and events: hashes name all tokens up to a block's end, and events lead from one set to another."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.events import Prefixes, changes, hashes
from llamahybrid.prompt_cache.nodes import ids_of

PATHS = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=5)


def prefixes(paths: list[list[int]], size: int = 2, model: str = "a model") -> Prefixes:
    every = (ids_of(np.array(path, np.int32)) for path in paths)
    return {(model, ids): hashes(model, ids, size) for ids in every}


@given(PATHS, st.integers(1, 5))
def test_blocks_are_the_complete_ones_of_each_path(paths: list[list[int]], size: int) -> None:
    seen: dict[int, tuple[int, ...]] = {}
    for path in paths:
        (names,) = prefixes([path], size).values()
        assert len(names) == len(path) // size
        for i, name in enumerate(names, 1):
            assert seen.setdefault(name, tuple(path[: i * size])) == tuple(path[: i * size])
    assert len(set(seen.values())) == len(seen)
    assert all(0 <= name < 2**63 for name in seen)


def test_hashes_differ_between_models() -> None:
    (one,), (other,) = (prefixes([list(range(8))], 4, model).values() for model in "ab")
    assert set(one).isdisjoint(other)


@given(PATHS, PATHS)
def test_events_lead_from_one_set_to_the_other(old: list[list[int]], new: list[list[int]]) -> None:
    before, after = prefixes(old), prefixes(new)
    known = {name for names in before.values() for name in names}
    for event in changes(before, after, "CPU", 2):
        names = set(event["block_hashes"])
        assert len(names) == len(event["block_hashes"])
        if event["type"] == "BlockRemoved":
            assert known >= names, "sent though nobody has it"
            known -= names
            continue
        assert event["parent_block_hash"] is None or event["parent_block_hash"] in known
        assert known.isdisjoint(names), "sent again"
        known |= names
    assert known == {name for names in after.values() for name in names}


def test_new_blocks_of_a_path_are_one_event() -> None:
    found = prefixes([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9]])
    (first, second, third), (_, branch) = found.values()
    stored = list(changes({}, found, "CPU", 2))
    assert [event["block_hashes"] for event in stored] == [[first, second, third], [branch]]
    assert [event["parent_block_hash"] for event in stored] == [None, first]
    assert [event["token_ids"] for event in stored] == [[1, 2, 3, 4, 5, 6], [7, 8]]
    assert [event["block_size"] for event in stored] == [2, 2]
    assert {event["type"] for event in stored} == {"BlockStored"}
    assert {event["medium"] for event in stored} == {"CPU"}
    (removed,) = changes(found, {}, "DISK", 2)
    assert set(removed.pop("block_hashes")) == {first, second, third, branch}
    assert removed == {"type": "BlockRemoved", "medium": "DISK"}
