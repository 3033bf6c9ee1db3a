"""Attention KV of a range: its layout is learnt from a payload; every byte survives a cut and a join."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from llamahybrid.memory.segment import CELL_BYTES, SegmentLayout, StackedLayout
from llamahybrid.prompt_cache.base import Bytes

HEAD = 8
REST = b"what an empty recurrent part says"


def payload(
    n: int,
    *,
    start: int = 0,
    transposed: bool = False,
    cell_bytes: int = 12,
    rest: bytes = REST,
    seed: int = 0,
) -> Bytes:
    """As src/llama-kv-cache.cpp writes two layers of n cells, each byte its own."""
    rng = np.random.default_rng((start, seed))
    positions = np.arange(start, start + n, dtype=np.int32)
    cells = rng.integers(0, 256, (n, cell_bytes), dtype=np.uint8)
    cells[:, :4] = positions[:, None].view(np.uint8)
    data = b"head" + struct.pack("<I", n) + cells.tobytes() + struct.pack("<II", transposed, 2)
    for _ in range(2):
        data += struct.pack("<iQ", 1, 6) + rng.bytes(n * 6)
    for _ in range(2):
        if transposed:
            data += struct.pack("<iII", 1, 2, 3) + rng.bytes(3 * n * 2)
        else:
            data += struct.pack("<iQ", 1, 10) + rng.bytes(n * 10)
    return np.frombuffer(data + rest, dtype=np.uint8)


def learnt(data: Bytes, n: int) -> SegmentLayout:
    layout = SegmentLayout.learn(data, n, HEAD, len(REST))
    assert layout is not None
    return layout


@pytest.mark.parametrize("cell_bytes", CELL_BYTES)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_of_one_payload_holds_for_others(transposed: bool, cell_bytes: int) -> None:
    layout = learnt(payload(5, transposed=transposed, cell_bytes=cell_bytes), 5)
    other = payload(9, start=40, transposed=transposed, cell_bytes=cell_bytes)
    assert layout.transposed is transposed
    assert layout.size(9) == other.nbytes
    assert layout.count(other) == 9
    assert layout.first_position(other) == 40


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_what_is_cut_in_two_is_whole_again_when_joined(transposed: bool, at: int) -> None:
    whole = payload(7, start=30, transposed=transposed)
    layout = learnt(whole, 7)
    first, second = (np.zeros(layout.size(n), dtype=np.uint8) for n in (at, 7 - at))
    layout.cut(whole, at, (first, second))
    assert layout.first_position(second) == 30 + at
    joined = np.zeros(layout.size(layout.count(first) + layout.count(second)), dtype=np.uint8)
    layout.join([first, second], joined)
    assert joined.tobytes() == whole.tobytes()


def test_a_piece_holds_its_own_cells_and_nothing_else() -> None:
    whole = payload(7, transposed=True)
    layout = learnt(whole, 7)
    one, rest = np.zeros(layout.size(1), dtype=np.uint8), np.zeros(layout.size(6), dtype=np.uint8)
    layout.cut(whole, 1, (one, rest))
    changed = whole.copy()
    changed[HEAD + 12 : HEAD + 24] ^= 255  # the second cell's metadata
    again = np.zeros(layout.size(1), dtype=np.uint8)
    layout.cut(changed, 1, (again, np.zeros(layout.size(6), dtype=np.uint8)))
    assert again.tobytes() == one.tobytes()


@pytest.mark.parametrize("lost", [1, 6, 40])
def test_a_payload_that_is_not_all_accounted_for_has_no_layout(lost: int) -> None:
    whole = payload(5)
    assert SegmentLayout.learn(whole[:-lost], 5, HEAD, len(REST)) is None
    assert SegmentLayout.learn(whole, 6, HEAD, len(REST)) is None, "of another number of cells"


def test_cells_at_scattered_positions_have_no_layout() -> None:
    whole = payload(5).copy()
    whole[HEAD + 12 : HEAD + 16] = np.array([9], dtype=np.int32).view(np.uint8)
    assert SegmentLayout.learn(whole, 5, HEAD, len(REST)) is None


def test_bytes_of_another_layout_are_refused() -> None:
    layout = learnt(payload(5), 5)
    with pytest.raises(ValueError, match="no 5 cells of this layout"):
        layout.count(payload(5, cell_bytes=20))


# -- two parts -------------------------------------------------------------------------------------


def stacked(n: int, start: int = 0, *, transposed: bool = False) -> Bytes:
    """As src/llama-kv-cache-iswa.cpp writes n cells: layers with a window in a part of their own."""
    first = payload(n, start=start, transposed=transposed, rest=b"")
    second = payload(n, start=start, transposed=transposed, rest=b"", seed=1)
    return np.concatenate([first, second])


def learnt_stack(n: int, *, transposed: bool = False) -> StackedLayout:
    whole = stacked(n, transposed=transposed)
    layout = StackedLayout.learn(whole, n, HEAD, len(whole) // 2)
    assert layout is not None
    return layout


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_both_parts_are_cut_and_joined(transposed: bool, at: int) -> None:
    layout, whole = learnt_stack(5, transposed=transposed), stacked(7, 30, transposed=transposed)
    assert layout.transposed is transposed
    assert (layout.size(7), layout.count(whole), layout.first_position(whole)) == (whole.nbytes, 7, 30)
    first, second = (np.zeros(layout.size(n), dtype=np.uint8) for n in (at, 7 - at))
    layout.cut(whole, at, (first, second))
    assert layout.first_position(second) == 30 + at
    for part, half in zip(layout.parts, np.split(whole, 2), strict=True):
        pieces = tuple(np.zeros(part.size(n), dtype=np.uint8) for n in (at, 7 - at))
        part.cut(half, at, pieces)
        assert all(p.tobytes() in q.tobytes() for p, q in zip(pieces, (first, second), strict=True))
    joined = np.zeros(layout.size(layout.count(first) + layout.count(second)), dtype=np.uint8)
    layout.join([first, second], joined)
    assert joined.tobytes() == whole.tobytes()


@pytest.mark.parametrize("disordered", [(), (0,), (1,), (0, 1)])
def test_both_parts_are_sorted(disordered: tuple[int, ...]) -> None:
    layout, whole = learnt_stack(5), stacked(5)
    mixed = whole.copy()
    for part, half in enumerate(np.split(mixed, 2)):
        if part in disordered:
            cells = half[HEAD : HEAD + 60].reshape(5, 12)
            cells[[1, 3]] = cells[[3, 1]]
    assert layout.sort(mixed, 5) == bool(disordered)
    for half in np.split(mixed, 2):
        assert half[HEAD : HEAD + 60].reshape(5, 12)[:, :4].copy().view(np.int32).ravel().tolist() == [
            *range(5)
        ]


def test_a_stack_that_is_not_all_accounted_for_has_no_layout() -> None:
    whole = stacked(5)
    half = len(whole) // 2
    for data, first in ((whole[:-1], half), (whole, half - 1), (whole[:half], half)):
        assert StackedLayout.learn(data, 5, HEAD, first) is None
    with pytest.raises(ValueError, match="no 5 cells of this layout"):
        learnt_stack(5).count(whole[:-8])
