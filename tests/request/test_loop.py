"""The decode loop under threads: closing beside readers, many switches of one slot, faults, forks."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from llamahybrid.errors import ModelClosed
from llamahybrid.memory.shared import SharedContext
from tests.request.asking import DEADLINE, WORDS, each, take

Opened = Callable[..., Any]


def test_a_close_beside_readers_frees_the_context(opened: Opened) -> None:
    for _ in range(4):
        llm, begun = opened(n_parallel=2), threading.Semaphore(0)

        def read(seed: int, llm: Any = llm, begun: Any = begun) -> None:
            with suppress(ModelClosed):
                for _ in llm.create_completion(WORDS[seed : seed + 40], max_tokens=200, stream=True):
                    begun.release()

        threads = [threading.Thread(target=read, args=(10 * i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            assert begun.acquire(timeout=DEADLINE)
        llm.close()
        assert llm.ctx is None
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()


def test_streams_that_take_turns_at_every_token(opened: Opened, stock: Opened) -> None:
    """One slot, and so a switch a token: what is done at each is not kept on a stack."""
    llm, right, before = opened(), stock(), sys.getrecursionlimit()
    prompts = WORDS[:30], WORDS[100:130]
    streams = [llm.generate(prompt, temp=0.0) for prompt in prompts]
    sys.setrecursionlimit(300)
    try:
        said = list(islice(zip(*streams, strict=True), 100))
    finally:
        sys.setrecursionlimit(before)
    assert [list(each) for each in zip(*said, strict=True)] == [right(prompt, 100) for prompt in prompts]


def test_answers_whose_batches_in_common_are_found_faulty_are_decoded_alone(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right = opened(n_parallel=2), stock()
    together = SharedContext.decode_parts

    def faulty(shared: Any, parts: Any) -> list[str | None]:
        faults = together(shared, parts)
        for live, _, _ in parts:
            live.invalidate_tip()
        return ["another size" for _ in faults]

    monkeypatch.setattr(SharedContext, "decode_parts", faulty)
    prompts = [WORDS[:40], WORDS[100:150]]
    assert each(lambda prompt: take(llm, prompt, 6), prompts) == [right(prompt, 6) for prompt in prompts]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_stream_goes_on_in_a_forked_child(opened: Opened) -> None:
    llm = opened()
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0}
    for start in (0, 100, 200):
        prompt = WORDS[start : start + 30]
        whole = llm.create_completion(prompt, **asked)["choices"][0]["text"]
        stream = llm.create_completion(prompt, stream=True, **asked)
        text = next(stream)["choices"][0]["text"]
        child = os.fork()
        if child == 0:
            signal.alarm(DEADLINE)  # a child that hangs is red, too
            try:
                text += "".join(chunk["choices"][0]["text"] for chunk in stream)
                os._exit(0 if text == whole else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stream.close()
