"""Several slots: each has a KV stream of its own, of as many tokens as `n_ctx` says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from llamahybrid.errors import LlamaHybridError
from llamahybrid.memory.paging import RangePager
from tests.conftest import take

from .conftest import PROMPT, decode, sequences

pytestmark = [pytest.mark.patched]
OTHER = [(11 * i + 5) % 200 for i in range(50)]
Opener = Callable[..., Any]


def segments_of(llm: Any) -> int:
    return int(llm.prompt_cache.stats().segments)


def test_slots_may_all_be_full(open_model: Opener) -> None:
    both = sequences(open_model("llama", n_ctx=256, n_parallel=2))
    tokens = [(7 * i + 1) % 200 for i in range(256)]
    for live in both:
        decode(live, tokens[:200])
        decode(live, tokens[200:])
    assert [live.n for live in both] == [256, 256]
    assert [live.fault() for live in both] == [None, None]


def test_attention_that_is_costly_to_read_is_stored_once_another_chat_comes(open_model: Opener) -> None:
    """The patched library reads what is new alone, and so at the end of each request."""
    llm = open_model(n_parallel=2)
    take(llm, PROMPT)
    assert bool(segments_of(llm)) is RangePager.available()
    for prompt in (OTHER, OTHER[::-1]):
        take(llm, prompt)
    assert segments_of(llm)
    take(llm, [*PROMPT, 3])
    assert llm.last_request.cached >= len(PROMPT)


def test_sequences_of_slots_are_not_copied_by_hand(open_model: Opener) -> None:
    """The library ends the process where it is asked for a part of a stream."""
    llm = open_model(n_parallel=2)
    llm.eval(PROMPT)
    with pytest.raises(LlamaHybridError, match="slots"):
        llm._ctx.kv_cache_seq_cp(0, 1, 0, 20)
    assert take(llm, [*PROMPT, 3])


def test_memory_of_all_slots_is_told_at_opening(open_model: Opener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llamahybrid"):
        open_model("llama", n_ctx=1024, n_parallel=3)
        open_model("llama", n_ctx=1024)
    (said,) = [message for message in caplog.messages if "context memory" in message]
    assert said.startswith("3 requests at once, each of at most 1024 tokens")
