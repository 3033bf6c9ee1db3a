"""What the tests of drafts share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from tests.lab.draft_fuzz import EveryDraft, Prescribed
from tests.lab.reference import Logits, Reference, Setting

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = [(7 * i + 1) % 200 for i in range(80)]


def take(llm: Any, prompt: list[int], n: int = 40, **options: Any) -> list[int]:
    """The first n tokens of the greedy answer."""
    stream = llm.generate(list(prompt), temp=0.0, **options)
    with closing(stream):
        return list(itertools.islice(stream, n))


@pytest.fixture
def open_model(tiny_model) -> Iterator[Callable[..., Any]]:
    """`open_model(arch, cls=Llama, **arguments)`, closed when the test ends."""
    with ExitStack() as stack:

        def opener(arch: str = "qwen35", cls: Any = Llama, **more: Any) -> Any:
            return stack.enter_context(closing(cls(str(tiny_model(arch)), **{**SETTINGS, **more})))

        yield opener


@pytest.fixture
def fresh(open_model) -> Callable[..., list[int]]:
    """`fresh(prompt, n, arch)`: the greedy answer of a stock `Llama` without drafts."""

    def answer(prompt: list[int], n: int = 40, arch: str = "qwen35", **more: Any) -> list[int]:
        return take(open_model(arch, llama_cpp.Llama, **more), prompt, n)

    return answer


@pytest.fixture
def logits_of(tiny_model) -> Iterator[Callable[[list[int], str], Logits]]:
    """`logits_of(tokens, arch)`: the logits behind tokens in a fresh context."""
    with ExitStack() as stack:

        def logits(tokens: list[int], arch: str = "qwen35") -> Logits:
            reference = stack.enter_context(closing(Reference(tiny_model(arch), Setting("default"))))
            return reference.logits(tokens)[0]

        yield logits


@pytest.fixture
def drafting(open_model) -> Callable[..., Any]:
    """`drafting(arch, text, …)`: drafts `text` (prompt and answer) whatever it costs, wrong now and then.

    `planes`: rollback planes, made with the context on either engine. `buys`: more when a draft needs them.
    """

    def opener(
        arch: str, text: list[int], *, planes: int = 0, buys: bool = False, seed: int = 1, **more: Any
    ) -> Any:
        draft = Prescribed(random.Random(seed), 200)
        draft.text = text
        llm = open_model(arch, draft_model=draft, draft_planes=planes, **more)
        llm.drafts.policy = EveryDraft(llm.runner.meter)
        llm.drafts.policy.buys = buys
        return llm

    return opener


def decode(live: Any, tokens: list[int]) -> Logits:
    """Decode in one batch; the logits of its last token."""
    live.decode(np.array(tokens, dtype=np.int32), "all")
    live.recount()
    return live.row.logits().copy()
