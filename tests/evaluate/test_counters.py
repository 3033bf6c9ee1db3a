"""Decoded tokens are counted exactly, on a real context, from the very first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid.evaluate.counters import DecodeCounter


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(str(tiny_model("qwen35")), n_ctx=512, n_batch=64, verbose=False, n_threads_batch=1)
    yield llm
    llm.close()


def test_nothing_decoded_counts_as_nothing(llm: llama_cpp.Llama) -> None:
    assert DecodeCounter(llm).take() == 0


@pytest.mark.parametrize("sizes", [[1], [1, 1], [2], [63], [64, 1], [130, 1, 1, 3]])
def test_every_token_counts_once(llm: llama_cpp.Llama, sizes: list[int]) -> None:
    counter = DecodeCounter(llm)
    for size in sizes:
        llm.eval([5] * size)
        assert counter.take() == size
    assert counter.take() == 0


def test_a_counter_made_later_does_not_see_what_was_before(llm: llama_cpp.Llama) -> None:
    first = DecodeCounter(llm)
    llm.eval([5])
    second = DecodeCounter(llm)
    llm.eval([6])
    assert (second.take(), first.take()) == (1, 2)


@pytest.mark.parametrize("option", [{"verbose": True}, {"no_perf": True}])
def test_contexts_whose_counters_cannot_be_trusted_are_refused(
    tiny_model: Callable[..., Path], option: dict[str, bool]
) -> None:
    llm = llama_cpp.Llama(str(tiny_model("qwen35")), **{"n_ctx": 256, "verbose": False, **option})
    with pytest.raises(ValueError, match="verbose=False and no_perf=False"):
        DecodeCounter(llm)
    llm.close()
