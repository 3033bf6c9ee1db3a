"""Fixtures of the tests of drafts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

import llama_cpp
import pytest

from tests.lab.draft_fuzz import EveryDraft, Prescribed

PROMPT = [(7 * i + 1) % 200 for i in range(80)]


def take(llm: Any, prompt: list[int], n: int = 40, **options: Any) -> list[int]:
    """The first n tokens of the greedy answer."""
    stream = llm.generate(list(prompt), temp=0.0, **options)
    with closing(stream):
        return list(itertools.islice(stream, n))


@pytest.fixture
def fresh(open_model) -> Callable[..., list[int]]:
    """`fresh(prompt, n, arch)`: the greedy answer of a stock `Llama` without drafts."""

    def answer(prompt: list[int], n: int = 40, arch: str = "qwen35", **more: Any) -> list[int]:
        return take(open_model(arch, llama_cpp.Llama, **more), prompt, n)

    return answer


@pytest.fixture
def drafting(open_model) -> Callable[..., Any]:
    """`drafting(arch, text, …)`: drafts `text` (prompt and answer) whatever it costs, wrong now and then.

    `planes`: rollback planes.
    """

    def opener(arch: str, text: list[int], *, planes: int = 0, seed: int = 1, **more: Any) -> Any:
        draft = Prescribed(random.Random(seed), 200)
        draft.text = text
        llm = open_model(arch, draft_model=draft, draft_planes=planes, **more)
        llm.slots.all[0].drafts.policy = EveryDraft(llm.runner.meter)
        return llm

    return opener
