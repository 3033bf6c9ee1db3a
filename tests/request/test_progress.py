"""Progress of a long prompt while it is decoded, as reported to the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from llamahybrid.core.report import PromptProgress
from llamahybrid.errors import LlamaHybridError
from tests.request.asking import WORDS

PROMPT = WORDS[:400]
LONGER = [*PROMPT, *PROMPT[100::-1][:100]]


def numbers(told: list[PromptProgress]) -> list[int]:
    """The processed tokens of each report; cached and total are those of the prompt."""
    assert len({(progress.total, progress.cached) for progress in told}) == 1
    assert [each.seconds for each in told] == sorted(each.seconds for each in told)
    return [progress.processed for progress in told]


@pytest.mark.parametrize("arch", ["qwen35", "gemma3"])
@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_prompt_is_told_of_at_its_restore_point_and_after_each_batch(
    opened: Callable[..., Any], arch: str, n_parallel: int
) -> None:
    llm, told = opened(arch, n_parallel=n_parallel), list[PromptProgress]()
    llm.on_progress = told.append
    llm.create_completion(PROMPT, max_tokens=2)
    far = numbers(told)
    assert (far[0], far[-1], told[0].total, told[0].cached) == (0, 400, 400, 0)
    assert far == sorted(set(far))
    assert max(b - a for a, b in itertools.pairwise(far)) <= 64, "a batch"
    told.clear()
    llm.create_completion(LONGER, max_tokens=2)
    far = numbers(told)
    assert far[0] == told[0].cached == llm.last_request.cached > 300
    assert far[-1] == told[0].total == 500


def test_a_handle_has_its_own_and_its_answers_are_told_of_once(opened: Callable[..., Any]) -> None:
    llm, others, own = opened(n_parallel=3), list[PromptProgress](), list[PromptProgress]()
    llm.on_progress = others.append
    with llm.request(on_progress=own.append):
        stream = llm.create_completion(PROMPT, max_tokens=2, n=3, stream=True)
    for _ in stream:
        pass
    assert numbers(own)[-1] == 400
    assert not others


def test_error_of_on_progress_ends_the_request_and_keeps_its_progress(opened: Callable[..., Any]) -> None:
    llm = opened()

    def stop(progress: PromptProgress) -> None:
        if progress.processed >= 200:
            raise OSError("enough")

    with pytest.raises(OSError, match="enough"), llm.request(on_progress=stop):
        llm.create_completion(PROMPT, max_tokens=2)
    llm.create_completion(PROMPT, max_tokens=2)
    assert 0 < llm.last_request.cached <= 264


def test_on_progress_may_cancel_and_not_ask(opened: Callable[..., Any]) -> None:
    llm = opened()
    llm.on_progress = lambda progress: llm.cancel() if progress.processed else None
    made = llm.create_completion(PROMPT, max_tokens=2)
    assert made["choices"][0]["finish_reason"] == "cancelled"
    llm.on_progress = lambda _: llm.create_completion([1, 2], max_tokens=1)
    with pytest.raises(LlamaHybridError, match="on_progress"):
        llm.create_completion(LONGER, max_tokens=2)
