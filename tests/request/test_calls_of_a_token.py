"""What a token costs in calls of Python functions: with a large model each of them runs from a cold cache."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from llamahybrid import Llama
from llamahybrid.capi.openmp import team_ender

PROMPT = [(7 * i + 3) % 200 for i in range(60)]
TOKENS = 160


def calls(llm: Llama) -> float:
    """Of Python functions, for each token of an answer that runs alone."""
    seen = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal seen
        seen += event == "call"

    with closing(llm.generate(PROMPT, temp=0.0)) as answer:
        list(islice(answer, 20))
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            got = len(list(islice(answer, TOKENS)))
        finally:
            sys.setprofile(before)
    assert got == TOKENS
    return seen / TOKENS


@pytest.mark.parametrize(("slots", "most"), [(1, 100), (4, 168)])
def test_a_token_that_is_decoded_alone(tiny_model: Callable[..., Path], slots: int, most: int) -> None:
    """96 calls with one slot, 161 among four."""
    if slots > 1 and team_ender() is None:
        pytest.skip("without GNU's OpenMP another thread decodes for several slots")
    options: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with closing(Llama(str(tiny_model("qwen35")), n_parallel=slots, **options)) as llm:
        calls(llm)
        assert calls(llm) <= most
