"""Blocks: named by all tokens up to their end, each after its parent, cut once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamahybrid.events.blocks import Blocks, change
from llamahybrid.prompt_cache.nodes import tokens_of

PATHS = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=5)


@given(PATHS, st.integers(1, 5))
def test_blocks_are_the_whole_ones_of_each_path(paths: list[list[int]], size: int) -> None:
    blocks = Blocks(size, "model").of(np.array(path, np.int32) for path in paths)
    seen: dict[int, tuple[int, ...]] = {}
    for name, block in blocks.items():
        before = () if block.parent is None else seen[block.parent]
        seen[name] = (*before, *(int(t) for t in tokens_of(block.ids)))
    wanted = {tuple(path[:end]) for path in paths for end in range(size, len(path) + 1, size)}
    assert sorted(seen.values()) == sorted(wanted)
    assert all(0 <= name < 2**63 for name in seen)


def test_others_have_other_hashes() -> None:
    path = np.arange(8, dtype=np.int32)
    assert Blocks(4, "one").of([path]).keys().isdisjoint(Blocks(4, "another").of([path]))


def test_a_block_without_tokens_is_none() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Blocks(0, "model")


@given(PATHS, PATHS)
def test_a_change_leads_from_one_set_to_the_other(old: list[list[int]], new: list[list[int]]) -> None:
    blocks = Blocks(2, "model")
    before = blocks.of(np.array(path, np.int32) for path in old)
    after = blocks.of(np.array(path, np.int32) for path in new)
    told = change(before, after)
    known = set(before) - set(told.removed)
    for block in told.stored:
        assert block.parent is None or block.parent in known
        known.add(block.hash)
    assert known == set(after)
