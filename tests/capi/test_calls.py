"""Typed calls on one context: what goes in is what the library gets, and what it says comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama

from llamahybrid.capi.calls import NativeContext


@pytest.fixture
def native(tiny_model: Callable[..., Path]) -> Iterator[NativeContext]:
    llm = Llama(str(tiny_model("qwen35")), n_ctx=256, n_batch=64, n_threads=1, verbose=False)
    yield NativeContext(llm._ctx)
    llm.close()


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


def test_a_closed_context_raises_and_is_not_called(tiny_model: Callable[..., Path]) -> None:
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
