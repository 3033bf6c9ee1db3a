"""The least possible work, and decode counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest

from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.oracle import Exchange, least_decodes

Opener = Callable[..., Any]


@pytest.fixture
def llm(open_model: Opener) -> llama_cpp.Llama:
    opened: llama_cpp.Llama = open_model("llama", llama_cpp.Llama)
    return opened


@pytest.mark.parametrize(
    ("requests", "least"),
    [
        ([("abcdef", "xyz")], [6 + 2]),
        ([("abcdef", "xyz"), ("abcdefxyzq", "mn")], [8, 2 + 1]),  # z was sampled, never decoded
        ([("abcdef", "xyz"), ("abcdef", "pq")], [8, 1]),  # logits of that prompt were known
        ([("abcdef", "xyz"), ("abc", "pq")], [8, 1 + 1]),  # evaluated, but its logits were not kept
        ([("abcdef", "xyz"), ("abQ", "p"), ("abcdefx", "pq")], [8, 1, 1 + 1]),  # old branches stay known
        ([("abc", "")], [3]),
    ],
)
def test_least_number_of_decoded_tokens(requests: list[tuple[str, str]], least: list[int]) -> None:
    exchanges = [Exchange(tuple(map(ord, prompt)), tuple(map(ord, answer))) for prompt, answer in requests]
    assert least_decodes(exchanges) == least


@pytest.mark.parametrize("sizes", [[], [1, 1], [64, 1], [130, 1, 1, 3]])
def test_every_decoded_token_counts_once(llm: llama_cpp.Llama, sizes: list[int]) -> None:
    llm.eval([5])
    counter = DecodeCounter(llm)
    for size in sizes:
        llm.eval([5] * size)
        assert counter.take() == size
    assert counter.take() == 0


@pytest.mark.parametrize("option", [{"verbose": True}, {"no_perf": True}])
def test_contexts_with_wrong_counters_are_refused(open_model: Opener, option: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="verbose=False and no_perf=False"):
        DecodeCounter(open_model("qwen35", llama_cpp.Llama, **option))
