"""Typed calls on one context: what goes in is what the library gets, and what it says comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama

from llamahybrid.capi.calls import NativeContext, Outputs, TokenBatch


@pytest.fixture
def native(tiny_model: Callable[..., Path]) -> Iterator[NativeContext]:
    llm = Llama(str(tiny_model("qwen35")), n_ctx=256, n_batch=64, n_threads=1, verbose=False)
    yield NativeContext(llm._ctx)
    llm.close()


def read(batch: TokenBatch) -> list[tuple[int, int, int]]:
    """(token, position, output) of each token, from the structure itself."""
    b = batch.batch
    return [(b.token[i], b.pos[i], b.logits[i]) for i in range(b.n_tokens)]


@pytest.mark.parametrize(("outputs", "rows"), [("none", [0, 0, 0]), ("last", [0, 0, 1]), ("all", [1, 1, 1])])
def test_a_batch_says_what_it_was_filled_with(outputs: Outputs, rows: list[int]) -> None:
    batch = TokenBatch(8)
    batch.fill([9] * 8, 100, "all")  # a larger one before leaves nothing behind
    batch.fill(np.array([5, 6, 7], dtype=np.int32), 20, outputs)
    assert read(batch) == [(5 + i, 20 + i, row) for i, row in enumerate(rows)]
    assert batch.n_tokens() == 3


@pytest.mark.parametrize(("outputs", "row"), [("none", 0), ("last", 1), ("all", 1)])
def test_a_batch_of_one_token_does_too(outputs: Outputs, row: int) -> None:
    batch = TokenBatch(8)
    batch.fill([9] * 8, 100, "none" if row else "all")
    batch.fill((5,), 20, outputs)
    assert read(batch) == [(5, 20, row)]


def test_positions_and_counters_follow_a_decode(native: NativeContext) -> None:
    assert native.positions() == (-1, -1)
    before = native.counters()
    native.decode([5, 6, 7], 0, "last")
    assert native.positions()[1] == 2
    assert native.counters() != before
    native.clear()
    assert native.positions() == (-1, -1)


def test_a_partial_state_comes_back_bit_for_bit(native: NativeContext) -> None:
    native.decode([5, 6, 7], 0, "last")
    state = np.empty(native.state_size(partial=True), dtype=np.uint8)
    assert native.save_partial(state) is not None
    native.decode([8], 3, "last")
    again = np.empty_like(state)
    assert native.save_partial(again) is not None
    assert again.tobytes() != state.tobytes()
    assert native.load_partial(state)
    assert native.save_partial(again) is not None
    assert again.tobytes() == state.tobytes()


def test_a_buffer_of_the_wrong_size_is_not_filled_in_part(native: NativeContext) -> None:
    native.decode([5, 6, 7], 0, "last")
    assert native.save_partial(np.empty(native.state_size(partial=True) - 1, dtype=np.uint8)) is None


def test_logits_are_those_of_the_last_row(native: NativeContext) -> None:
    native.decode([5, 6, 7], 0, "none")
    native.decode([5], 3, "last")
    one = native.logits(16)
    assert one is not None
    kept = one.copy()
    native.decode([9], 4, "last")
    other = native.logits(16)
    assert other is not None
    assert not np.array_equal(kept, other)


def test_a_closed_context_is_said_and_not_called(tiny_model: Callable[..., Path]) -> None:
    llm = Llama(str(tiny_model("qwen35")), n_ctx=256, n_threads=1, verbose=False)
    native = NativeContext(llm._ctx)
    llm.close()
    calls: list[Callable[[], Any]] = [
        native.counters,
        native.synchronize,
        lambda: native.n_ctx,
        lambda: native.logits(16),
        lambda: native.state_size(partial=True),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_without_the_shim_the_last_result_is_unknown(native: NativeContext) -> None:
    native.decode([5], 0, "last")
    assert native.last_result() is None, "a context that nobody guards keeps no result"
