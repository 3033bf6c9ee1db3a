"""A chat whose attention was not stored, and whose slot goes otherwise than for another prompt.

That is so while its answer runs, or where there was no room for it at its end; here nothing is stored then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest

from llamahybrid import Llama, PromptCache
from llamahybrid.memory.context import GuardedContext
from llamahybrid.request.checkpoints import Checkpoints
from llamahybrid.request.step_frames import Step
from llamahybrid.request.ticket import Ticket

WORDS = np.random.default_rng(1).integers(1, 200, 400).tolist()
RUNS, ENDED = WORDS[50:100], WORDS[150:250]


@pytest.fixture
def opened(open_model: Callable[..., Any]) -> Callable[..., Any]:
    def make(**more: Any) -> Any:
        return open_model(**{"n_parallel": 2, "n_batch": 64, "n_ctx": 1024, **more})

    return make


@pytest.fixture
def beside(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A model whose first slot holds a chat that ended beside an answer, and that answer."""
    llm = opened()
    state = llm.save_state()
    answer = llm.generate(RUNS, temp=0.0)
    next(answer)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "page_out", lambda *_, **__: None)
        list(islice(llm.generate(ENDED, temp=0.0), 2))
    llm.state = state
    assert llm.slots.here() is llm.slots.all[0]
    assert llm.prompt_cache.ram.missing(llm.runner.checkpoints.view())
    yield llm, answer
    answer.close()


def reset(llm: Llama) -> None:
    llm.reset()


def begin_by_hand(llm: Any) -> None:
    llm.n_tokens = 0
    llm.eval([1, 2, 3])


def load_a_state(llm: Any) -> None:
    llm.load_state(llm.state)


def make_room(llm: Any) -> None:
    """For the older of two requests that wait for cells; the younger one has not begun in its slot."""
    cells = llm.slots.batcher.cells
    older, younger = Ticket(), Ticket()
    older.step = younger.step = Step()
    lives = [slot.evaluation.runner.live for slot in llm.slots.all]
    cells._short = {older: lives[1], younger: lives[0]}
    assert cells._give_way()
    cells._short = {}


def forget_the_other(llm: Any) -> None:
    """Whose bytes are zeroed before its slot is used again, and these with them."""
    llm.prompt_cache.forget(RUNS)
    llm.cancel()
    runner = llm.slots.all[1].evaluation.runner
    runner.serve(b"")
    assert llm.slots.all[0].evaluation.runner.live.state.is_invalid


@pytest.mark.parametrize("deed", [reset, begin_by_hand, load_a_state, make_room, forget_the_other])
def test_its_checkpoints_can_be_restored(beside: tuple[Any, Any], deed: Callable[[Any], None]) -> None:
    llm, answer = beside
    view = llm.slots.all[0].evaluation.runner.checkpoints.view()
    deed(llm)
    assert llm.prompt_cache.ram.missing(view) == []
    answer.close()
    list(islice(llm.generate([*ENDED, 3], temp=0.0), 1))
    assert llm.last_request.cached == len(ENDED)


def test_they_can_be_by_another_model_with_this_cache(opened: Callable[..., Any]) -> None:
    cache = PromptCache(1 << 26)
    llm = opened(prompt_cache=cache)
    answers = [llm.generate(prompt, temp=0.0) for prompt in (RUNS, ENDED)]
    for answer in answers:
        next(answer)
    llm.close()
    other = opened(prompt_cache=cache)
    for prompt in (RUNS, ENDED):
        list(islice(other.generate([*prompt, 3], temp=0.0), 1))
        assert other.last_request.cached == len(prompt)


def test_an_answer_that_runs_goes_on_from_its_prompt_where_bytes_are_zeroed(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it was stored yet, and for the one that was forgotten all are zeroed."""
    llm = opened(flash_attn=True)  # idle slots keep their cells
    decoded: list[int] = []
    with closing(llm.generate(RUNS, temp=0.0)) as answer:
        said = list(islice(answer, 3))
        list(islice(llm.generate(ENDED, temp=0.0), 2))
        llm.prompt_cache.forget(ENDED)
        list(islice(llm.generate(WORDS[300:350], temp=0.0), 2))
        inner = GuardedContext.decode

        def note(context: GuardedContext, batch: Any) -> None:
            decoded.append(batch.n_tokens())
            inner(context, batch)

        monkeypatch.setattr(GuardedContext, "decode", note)
        next(answer)
    assert decoded == [len(said)]
