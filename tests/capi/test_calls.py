"""Typed calls on one context: arguments reach the library, and its results come back."""

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


def test_a_buffer_of_the_wrong_size_is_not_filled_in_part(native: NativeContext) -> None:
    native.decode([5, 6, 7], 0, "last")
    assert not native.save_partial(np.empty(native.state_size(partial=True) - 1, dtype=np.uint8))


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
