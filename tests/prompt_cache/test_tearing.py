"""Which records of attention run on from what stays into what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from llamahybrid.prompt_cache.disk_index import DiskIndex
from llamahybrid.prompt_cache.nodes import ids_of
from llamahybrid.prompt_cache.records import head_of
from llamahybrid.prompt_cache.tearing import torn

from .asking import record_of

PATH = np.arange(100, dtype=np.int32)
OTHER = np.concatenate((PATH[:50], PATH[:30]))


def index_of(*records: tuple[int, np.ndarray]) -> DiskIndex:
    """Of (start, path): attention, or a snapshot where it starts at the path's end."""
    index = DiskIndex()
    for start, path in records:
        head = head_of(record_of("m", start, path, None, np.zeros(10, np.uint8))[0])
        index.add(head, ids_of(path), 0)
    return index


@pytest.mark.parametrize(("stays", "end"), [(0, 50), (20, 50), (60, 60)])
def test_attention_is_torn_where_pins_or_other_paths_end(stays: int, end: int) -> None:
    index = index_of((10, PATH[:10]), (0, PATH), (end, PATH), (80, OTHER))
    assert [(each.namespace, each.end) for each in torn(index, PATH[:70], stays)] == [("m", end)]


def test_where_nothing_is_restored_nothing_is_torn() -> None:
    index = index_of((0, PATH), (90, PATH[:90]))
    assert torn(index, PATH[:70], 60) == []
    assert torn(index, PATH[1:], 60) == [], "no such path"


def test_what_others_go_on_from_is_kept_for_their_checkpoints() -> None:
    """Theirs lie behind it, and none on the part that is shared."""
    index = index_of((0, PATH), (50, OTHER), (80, OTHER))
    assert [(each.namespace, each.end) for each in torn(index, PATH[:70], 0)] == [("m", 50)]
