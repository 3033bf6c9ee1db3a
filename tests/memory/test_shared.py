"""Sequences of one context: rows of logits of their own, batches in common, failures that stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llamahybrid.capi.calls import NativeContext
from llamahybrid.errors import DecodeError

from .conftest import decode, ids, sequences

ONE = [(7 * i + 1) % 200 for i in range(40)]
TWO = [(11 * i + 5) % 200 for i in range(30)]


@pytest.fixture(params=["qwen35", "gemma3"])
def filled(request: pytest.FixtureRequest, open_model: Callable[..., Any]) -> list[Any]:
    """Two sequences that hold `ONE` and `TWO`."""
    both = sequences(open_model(request.param, n_ctx=256, n_parallel=2))
    for live, tokens in zip(both, (ONE, TWO), strict=True):
        decode(live, tokens)
    return both


def together(step: list[tuple[Any, int]]) -> Any:
    """Decode a token of each sequence, in one batch."""
    return step[0][0].shared.decode_parts([(live, (token,), "last") for live, token in step])


def row(live: Any) -> Any:
    return live.row.logits().copy()


def test_each_sequence_keeps_its_row(filled: list[Any]) -> None:
    """The other one decodes alone, or in the same batch."""
    one, two = filled
    mine, other = row(one), row(two)
    assert not np.array_equal(mine, other)
    two.decode(ids([3]), "none")
    assert two.row.logits() is None
    assert np.array_equal(row(one), mine)
    together([(two, 4), (one, 3)])
    mine, other = row(one), row(two)
    assert not np.array_equal(mine, other)
    one.decode(ids([5]), "last")
    assert np.array_equal(row(two), other)
    assert not np.array_equal(row(one), mine)
    kept = row(one)
    together([(two, 5)])
    assert np.array_equal(row(one), kept)


def test_a_refused_step_leaves_both_sequences_unchanged(
    filled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = filled

    def refuse(*_: Any) -> None:
        raise DecodeError(1, "no room")

    monkeypatch.setattr(NativeContext, "decode_parts", refuse)
    with pytest.raises(DecodeError):
        together([(one, 3), (two, 4)])
    assert [live.tokens.tolist() for live in filled] == [ONE, TWO]
    assert [live.fault() for live in filled] == [None, None]
    assert [live.row.logits() for live in filled] == [None, None], "rows of nobody"


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_in_a_step_leaves_nothing_wrong(
    filled: list[Any], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    one, two = filled
    decode_parts = NativeContext.decode_parts

    def stop(*arguments: Any) -> None:
        if after:
            decode_parts(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(NativeContext, "decode_parts", stop)
    with pytest.raises(KeyboardInterrupt):
        together([(one, 3), (two, 4)])
    for live in filled:
        assert live.fault() is None or live.state.is_invalid
        assert live.row.logits() is None


def test_another_callers_decode_is_noticed_and_our_own_is_not_taken_for_one(filled: list[Any]) -> None:
    one, two = filled
    together([(one, 3), (two, 4)])
    assert one.shared.look() is None
    one.native.decode([5], one.n, "none")
    two.native.synchronize()
    assert one.shared.look() is not None
    assert [live.n for live in filled] == [0, 0]
