"""The decode loop under threads: closing beside readers, many switches of one slot, faults, forks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from llamahybrid.core.runner import Runner
from llamahybrid.core.slots import Slots
from llamahybrid.errors import LlamaHybridError
from tests.request.asking import WORDS, begin, take

Opened = Callable[..., Any]


def test_streams_that_take_turns_at_every_token(opened: Opened, stock: Opened) -> None:
    """With one slot each token needs a switch, and no switch may grow a stack."""
    llm, right, before = opened(), stock(), sys.getrecursionlimit()
    prompts = WORDS[:30], WORDS[100:130]
    streams = [llm.generate(prompt, temp=0.0) for prompt in prompts]
    sys.setrecursionlimit(300)
    try:
        said = list(islice(zip(*streams, strict=True), 100))
    finally:
        sys.setrecursionlimit(before)
    assert [list(each) for each in zip(*said, strict=True)] == [right(prompt, 100) for prompt in prompts]


def test_a_state_that_cannot_be_stored_ends_no_request(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right, failed = opened(), stock(), list[int]()
    stream, said = begin(llm, WORDS[:60], 3)
    save_tip = Runner.save_tip

    def fail(runner: Runner, stays: int = 0) -> None:
        if failed:
            save_tip(runner, stays)
            return
        failed.append(runner.live.n)
        raise MemoryError("there is no room for a state")

    monkeypatch.setattr(Runner, "save_tip", fail)
    assert take(llm, WORDS[100:160], 4) == right(WORDS[100:160], 4)
    assert failed
    assert [*said, *islice(stream, 3)] == right(WORDS[:60], 6)


def test_a_slot_that_cannot_be_given_fails_one_request(
    opened: Opened, stock: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, right = opened(n_parallel=2), stock()
    stream, said = begin(llm, WORDS[:60], 3)

    def fail(slots: Slots, request: Any) -> None:
        raise MemoryError("there is no room to look for one")

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "best", fail)
        with pytest.raises(MemoryError):
            take(llm, WORDS[100:160])
    assert [*said, *islice(stream, 3)] == right(WORDS[:60], 6)
    assert take(llm, WORDS[100:160], 4) == right(WORDS[100:160], 4)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_finalizer_in_the_loops_thread_changes_no_answer(opened: Opened, stock: Opened, slots: int) -> None:
    """The collector runs in any thread: in that of the loop, `reset` would come between two batches."""
    llm, right, raised = opened(n_parallel=slots), stock(), list[str]()

    class Finalized:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            try:
                llm.eval([7, 7, 7])
            except LlamaHybridError as error:
                raised.append(str(error))

    def leave_garbage(progress: Any) -> None:
        if 100 < progress.processed < progress.total and not raised:
            gc.disable()
            Finalized()
            gc.set_threshold(1)  # collected by the loop's thread, as the caller's waits
            gc.enable()
        else:
            gc.set_threshold(*threshold)

    threshold, prompt = gc.get_threshold(), WORDS[:300]
    try:
        with llm.request(on_progress=leave_garbage):
            assert take(llm, prompt) == right(prompt)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert len(raised) == 1
