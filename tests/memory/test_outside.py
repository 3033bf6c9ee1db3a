"""What others decoded is known as long as it can be told; tests/differential/test_outside.py decodes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamahybrid.memory.outside import OutsideTokens


class Live:
    """A live sequence whose memory cuts exactly from `floor` on."""

    def __init__(self, floor: int = 0) -> None:
        self.native = SimpleNamespace(positions=lambda: (0, 0))
        self.profile = SimpleNamespace(cut_floor=lambda n, first: floor)
        self.shared = SimpleNamespace(counters=(0,))


class Batch:
    """Tokens from a position on, as a `llama_batch` holds them."""

    def __init__(self, tokens: list[int], start: int, seq: int = 0) -> None:
        self.n_tokens = len(tokens)
        self.token = tokens
        self.pos = list(range(start, start + len(tokens)))
        self.n_seq_id = [1] * len(tokens)
        self.seq_id = [[seq]] * len(tokens)


def outside(live: Any = None) -> tuple[OutsideTokens, list[list[int]]]:
    """One that knows of five tokens, and what was brought back."""
    brought: list[list[int]] = []

    def bring_back(tokens: Any) -> bool:
        brought.append(tokens.tolist())
        return True

    known = OutsideTokens(live or Live(), bring_back)
    known.decoded(Batch([5, 6, 7], 0))
    known.decoded(Batch([8, 9], 3))
    return known, brought


def test_a_cut_that_was_refused_is_made_by_bringing_back_what_is_kept() -> None:
    known, brought = outside()
    assert known.removed(False, 0, 3, -1) is True
    assert brought == [[5, 6, 7]]
    known.decoded(Batch([4], 3))
    assert known.removed(False, -1, 2, -1) is True
    assert brought[1:] == [[5, 6]]


def test_one_that_was_exact_is_left_at_that() -> None:
    known, brought = outside()
    assert known.removed(True, 0, 3, -1) is None
    assert known.removed(False, 0, 2, -1) is True
    assert brought == [[5, 6]]


def test_one_behind_the_window_is_not_believed() -> None:
    known, brought = outside(Live(floor=4))
    assert known.removed(True, 0, 3, -1) is True
    assert brought == [[5, 6, 7]]


@pytest.mark.parametrize(
    "change",
    [
        lambda known: known.forget(),
        lambda known: known.decoded(Batch([4], 7)),
        lambda known: known.decoded(Batch([4], 5, seq=1)),
        lambda known: known.removed(True, 0, 1, 3),
        lambda known: setattr(known._live.shared, "counters", (1,)),
    ],
    ids=["memory was changed", "a gap", "another sequence", "a hole", "we decoded"],
)
def test_what_cannot_be_told_stays_refused(change: Any) -> None:
    known, brought = outside()
    change(known)
    assert known.removed(False, 0, 2, -1) is None
    assert brought == []


def test_where_nothing_can_be_brought_back_now_the_refusal_stands() -> None:
    known = OutsideTokens(Live(), lambda tokens: False)  # type: ignore[arg-type]
    known.decoded(Batch([5, 6, 7], 0))
    assert known.removed(False, 0, 2, -1) is None
    assert not known.known


def test_all_of_it_goes_without_anything_known() -> None:
    known, brought = outside()
    known.forget()
    assert known.removed(False, -1, 0, -1) is True
    assert brought == [[]]
    assert np.size(brought[0]) == 0
