"""What goes over the wire, byte for byte where vLLM's form fixes it."""

from __future__ import annotations

import msgpack
import numpy as np

from llamahybrid.events import wire
from llamahybrid.events.blocks import Blocks, change


def test_blocks_that_follow_one_another_are_one_event() -> None:
    paths = [np.array(path, np.int32) for path in ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8])]
    blocks = Blocks(2, "model").of(paths)
    first, second, third, branch = blocks
    stored = list(wire.events_of(change({}, blocks), "CPU", 2))
    assert [event["block_hashes"] for event in stored] == [[first, second, third], [branch]]
    assert [event["parent_block_hash"] for event in stored] == [None, first]
    assert [event["token_ids"] for event in stored] == [[1, 2, 3, 4, 5, 6], [7, 8]]
    assert {event["type"] for event in stored} == {"BlockStored"}
    assert {event["medium"] for event in stored} == {"CPU"}
    (removed,) = wire.events_of(change(blocks, {}), "DISK", 2)
    assert removed == {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "DISK"}


def test_a_batch_is_time_events_rank() -> None:
    at, events, rank = msgpack.unpackb(wire.batch([wire.CLEARED], rank=3))
    assert isinstance(at, float)
    assert (events, rank) == ([{"type": "AllBlocksCleared"}], 3)


def test_sequence_numbers_are_eight_bytes_big_endian() -> None:
    assert wire.number(258) == b"\0\0\0\0\0\0\1\2"
    assert wire.END == b"\xff" * 8
