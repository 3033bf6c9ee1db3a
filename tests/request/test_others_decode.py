"""What others decode in an idle slot is noticed, whatever slots do before it is used again.

By `llama_decode` itself: as many tokens as were there, so that neither positions nor sizes tell.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid.memory.sequence import LiveSequence

WORDS = np.random.default_rng(1).integers(1, 200, 900).tolist()
ELDER, CHAT, OTHER = WORDS[:60], WORDS[60:80], WORDS[200:215]

Deed = Callable[[Any, Callable[[], None]], None]
"""`deed(llm, touch)`: what slots do, while others `touch` the one with `CHAT`."""


def ask(llm: Any, prompt: list[int], n: int = 3) -> list[int]:
    with closing(llm.generate(prompt, temp=0.0)) as answer:
        return list(itertools.islice(answer, n))


def holder(llm: Any, prompt: list[int]) -> LiveSequence:
    """The live sequence that begins with a prompt."""
    lives = [slot.evaluation.runner.live for slot in llm.slots.all]
    return next(live for live in lives if live.tokens[: len(prompt)].tolist() == prompt)


def decode_instead(llm: Any, live: LiveSequence) -> None:
    """Other tokens in place of those that are live, by calls that nobody watches."""
    native = ctypes.CDLL(llama_cpp.llama_cpp._lib._name)
    native.llama_decode.argtypes = [ctypes.c_void_p, llama_cpp.llama_batch]
    memory = ctypes.c_void_p(llama_cpp.llama_get_memory(llm.ctx))
    assert native.llama_memory_seq_rm(memory, live.native.seq, -1, -1)
    batch = llama_cpp.llama_batch_init(live.n, 0, 1)
    batch.n_tokens = live.n
    for i in range(live.n):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 9 + i % 7, i, 1, i == live.n - 1
        batch.seq_id[i][0] = live.native.seq
    assert native.llama_decode(llm.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)


def nothing(llm: Any, touch: Callable[[], None]) -> None:
    touch()


def cells_run_out(llm: Any, touch: Callable[[], None]) -> None:
    """The elder idle slot gives its own away."""
    touch()
    elder = holder(llm, ELDER)
    ask(llm, WORDS[300 : 300 + llm.n_ctx() - 50])
    assert elder.n == 0 or elder.tokens[0] == WORDS[300]


def an_answer_goes_on(llm: Any, touch: Callable[[], None]) -> None:
    with closing(llm.generate(OTHER, temp=0.0)) as answer:
        next(answer)
        touch()
        list(itertools.islice(answer, 8))


def a_prompt_goes_on(llm: Any, touch: Callable[[], None]) -> None:
    llm.eval(OTHER)
    touch()
    llm.eval(OTHER)


def a_reset(llm: Any, touch: Callable[[], None]) -> None:
    touch()
    llm.reset()


def a_clear(llm: Any, touch: Callable[[], None]) -> None:
    touch()
    llm._ctx.kv_cache_clear()


DEEDS: list[Deed] = [nothing, cells_run_out, an_answer_goes_on, a_prompt_goes_on, a_reset, a_clear]


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_noticed(open_slots: Callable[..., Any], deed: Deed, masked: bool) -> None:
    """`masked`: idle slots give way for what computing beside them costs, too."""
    options = {"n_parallel": 3, "n_ctx": 256, "flash_attn": not masked}
    llm = open_slots(**options)
    ask(llm, ELDER)
    chat = CHAT + ask(llm, CHAT)
    deed(llm, lambda: decode_instead(llm, holder(llm, CHAT)))
    wanted = ask(open_slots(**options), [*chat, 7], 8)
    assert ask(llm, [*chat, 7], 8) == wanted
    assert llm.last_request.source != "live"


def test_it_is_noticed_though_answers_go_on_together(open_slots: Callable[..., Any]) -> None:
    llm = open_slots(n_parallel=3, flash_attn=True)
    chat = CHAT + ask(llm, CHAT)
    answers = [llm.generate(prompt, temp=0.0) for prompt in (OTHER, ELDER)]
    for answer in answers:
        next(answer)
    decode_instead(llm, holder(llm, CHAT))
    shared, lives = holder(llm, CHAT).shared, [holder(llm, prompt) for prompt in (OTHER, ELDER)]
    assert shared.decode_step([(live, 5) for live in lives]) == [None, None]
    assert lives[0].touched_outside()
    for answer in answers:
        answer.close()
    assert ask(llm, [*chat, 7], 8) == ask(open_slots(n_parallel=3, flash_attn=True), [*chat, 7], 8)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_nothing_of_it_is_stored_where_its_slot_gives_way(open_slots: Callable[..., Any], arch: str) -> None:
    llm = open_slots(arch, flash_attn=True)
    llm.eval(WORDS[:200])
    decode_instead(llm, llm.runner.live)
    llm.runner.save_tip()
    stats = llm.prompt_cache.stats()
    assert (stats.entries, stats.segments) == (0, 0)


def test_nothing_of_it_is_stored_for_another_slot(open_slots: Callable[..., Any]) -> None:
    llm = open_slots(flash_attn=True)
    with closing(llm.generate(WORDS[:200], temp=0.0)) as answer:
        next(answer)
        decode_instead(llm, llm.runner.live)
        llm.runner.share()
        assert llm.prompt_cache.stats().segments == 0


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_it_gets_into_no_saved_state(open_slots: Callable[..., Any], n_parallel: int) -> None:
    llm = open_slots(n_parallel=n_parallel, flash_attn=True)
    llm.eval(CHAT)
    decode_instead(llm, holder(llm, CHAT))
    state = llm.save_state()
    ask(llm, ELDER)
    llm.load_state(state)
    llm.eval([7])
    fresh = open_slots(n_parallel=n_parallel, flash_attn=True)
    fresh.eval([*CHAT, 7])
    assert list(itertools.islice(llm.generate([8], temp=0.0, reset=False), 8)) == list(
        itertools.islice(fresh.generate([8], temp=0.0, reset=False), 8)
    )


def test_what_is_lost_takes_no_cells_from_who_comes(open_slots: Callable[..., Any]) -> None:
    llm = open_slots("llama", n_ctx=512, flash_attn=True)
    for prompt in (WORDS[:200], WORDS[200:400]):
        ask(llm, prompt)
    decode_instead(llm, holder(llm, WORDS[:200]))
    ask(llm, OTHER)
    assert len(ask(llm, OTHER + WORDS[400:880])) == 3
