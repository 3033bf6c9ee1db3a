"""Decodes by other code in an idle slot are noticed, whatever slots do before it is used again.

The other code calls `llama_decode` with as many tokens as were live, so that positions and sizes stay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest

from tests.request.asking import WORDS, begin, take

pytestmark = [pytest.mark.patched]
ELDER, CHAT, OTHER = WORDS[:60], WORDS[60:80], WORDS[200:215]
Opened = Callable[..., Any]


def decode_instead(llm: Any, n: int) -> None:
    """Other tokens in place of the n that a sequence holds, by calls that nobody watches."""
    native = ctypes.CDLL(llama_cpp.llama_cpp._lib._name)
    native.llama_decode.argtypes = [ctypes.c_void_p, llama_cpp.llama_batch]
    memory = ctypes.c_void_p(llama_cpp.llama_get_memory(llm.ctx))
    seqs = range(llm.context_params.n_seq_max)
    (seq,) = [seq for seq in seqs if llama_cpp.llama_memory_seq_pos_max(memory, seq) == n - 1]
    assert native.llama_memory_seq_rm(memory, seq, -1, -1)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 9 + i % 7, i, 1, i == n - 1
        batch.seq_id[i][0] = seq
    assert native.llama_decode(llm.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)


@pytest.mark.parametrize("deed", ["nothing", "another answer", "two answers", "a long prompt", "a reset"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_tokens_that_others_decoded_in_an_idle_slot_are_noticed(
    opened: Opened, stock: Opened, deed: str, flash_attn: bool
) -> None:
    llm = opened(n_parallel=4, n_ctx=256, flash_attn=flash_attn)
    take(llm, ELDER)
    chat = [*CHAT, *take(llm, CHAT)]
    running = [begin(llm, OTHER)[0]] if deed != "nothing" else []
    if deed == "two answers":
        running.append(begin(llm, WORDS[300:310])[0])
    decode_instead(llm, len(chat) - 1)
    for _ in range(4):
        for answer in running:
            next(answer)
    if deed == "a long prompt":
        take(llm, WORDS[180:380], 3)
    elif deed == "a reset":
        llm.reset()
    for answer in running:
        answer.close()
    assert take(llm, [*chat, 7]) == stock(flash_attn=flash_attn)([*chat, 7])
    assert llm.last_request.source != "live"


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_tokens_that_others_decoded_get_into_no_saved_state(opened: Opened, n_parallel: int) -> None:
    llm, fresh = (opened(n_parallel=n_parallel, flash_attn=True) for _ in range(2))
    llm.eval(CHAT)
    decode_instead(llm, len(CHAT))
    state = llm.save_state()
    take(llm, ELDER)
    llm.load_state(state)
    llm.eval([7])
    fresh.eval([*CHAT, 7])
    assert take(llm, [8], reset=False) == take(fresh, [8], reset=False)
