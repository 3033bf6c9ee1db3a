"""guidance, which cuts and decodes the context's memory itself (`llama_memory_seq_rm`, `llama_decode`).

guidance ignores the result of `llama_memory_seq_rm`, and memory that cannot be cut refuses: on a hybrid its
second prompt fails in `llama_decode`, because positions do not follow on each other. With ours the state
before the cut is restored, and the answers are right.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

import llamahybrid
from llamahybrid.harness.counters import DecodeCounter
from tests.conftest import TinyModel
from tests.integrations.sides import ASKED, SETTINGS, SYSTEM, needed, stock_and_ours

guidance = needed("guidance", "guidance")

from guidance import gen, models  # noqa: E402

OPTIONS: dict[str, Any] = {**SETTINGS, "n_ctx": 1024, "verbose": False}


def answer(model: Any, question: str) -> str:
    return str((model + SYSTEM + question + gen("answer", max_tokens=8, temperature=0.0))["answer"])


def opened(path: str) -> tuple[Any, Any]:
    model = models.LlamaCpp(path, echo=False, **OPTIONS)
    return model, model._interpreter.engine.model_obj


def test_plain_attention_says_the_same(tiny_model: TinyModel) -> None:
    """And what is then asked of the `Llama` itself is that of a fresh context."""
    prompt = list(range(40, 100))

    def scenario() -> Any:
        model, llm = opened(str(tiny_model("llama")))
        said = [answer(model, question) for question in (*ASKED, *ASKED)]
        return [*said, *islice(llm.generate(prompt, temp=0.0), 8)], llm

    stock, ours = stock_and_ours(scenario)
    assert ours.said == stock.said
    assert ours.decoded <= stock.decoded


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba"])
def test_hybrids_fail_with_stock_and_are_right_with_ours(tiny_model: TinyModel, arch: str) -> None:
    """Stock answers each question on a model of its own."""
    path, prompt = str(tiny_model(arch)), list(range(40, 100))
    right = [answer(opened(path)[0], question) for question in ASKED]
    model, llm = opened(path)
    answer(model, ASKED[0])
    with pytest.raises(Exception, match="llama_decode returned -1"):
        answer(model, ASKED[1])
    llm.reset()
    right += list(islice(llm.generate(prompt, temp=0.0), 8))

    llamahybrid.install()
    try:
        model, llm = opened(path)
        counter = DecodeCounter(llm)
        said = [answer(model, question) for question in ASKED]
        first = counter.take()
        again = [answer(model, question) for question in ASKED]
        assert counter.take() < first, "what was brought back once is there"
        assert isinstance(llm, llamahybrid.Llama)
        assert [*said, *islice(llm.generate(prompt, temp=0.0), 8)] == right
        assert again == said
    finally:
        llamahybrid.uninstall()
