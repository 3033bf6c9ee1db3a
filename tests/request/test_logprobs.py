"""Log-probabilities of a prompt and its answer (`echo`), and stock's order of rows on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid import Llama
from tests.request.asking import in_thread

Opened = Callable[..., Any]
ASKED: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "logprobs": 2, "echo": True}
PROMPT = "Once upon a time there was"


@pytest.mark.parametrize("arch", ["qwen35", "gemma3", pytest.param("mamba", marks=pytest.mark.full)])
@pytest.mark.parametrize("n_parallel", [1, 2])
def test_each_token_is_scored_by_the_row_before_it(open_model: Opened, arch: str, n_parallel: int) -> None:
    llm = open_model(arch, n_parallel=n_parallel, logits_all=True)
    llm(PROMPT + " a king", max_tokens=3)  # something to reuse
    (choice,) = llm(PROMPT, **ASKED)["choices"]
    assert llm(llm.tokenize(PROMPT.encode()), **ASKED)["choices"] == [choice]
    stock = open_model(arch, llama_cpp.Llama, logits_all=True)
    tokens = stock.tokenize(choice["text"].encode())
    stock.eval(tokens)
    odds = llama_cpp.Llama.logits_to_logprobs(np.array(stock.scores[: len(tokens)]))
    right = [float(odds[n - 1][token]) for n, token in enumerate(tokens)][1:]
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(right, abs=1e-3)
    assert "".join(told["tokens"]) == choice["text"]
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(name)] == name


def test_stocks_order_of_rows_on_request(open_model: Opened) -> None:
    """Its usage, too, and its scores of an answer that the model ends."""
    told = []
    for cls, more in ((Llama, {"stock_logprobs": True}), (llama_cpp.Llama, {})):
        llm = open_model(cls=cls, logits_all=True, **more)
        end = llama_cpp.LogitsProcessorList([Ends(llm, PROMPT)])
        told.append([llm(PROMPT, **ASKED), llm(PROMPT, logits_processor=end, **ASKED)])
    for ours, theirs in zip(*told, strict=True):
        assert {name: ours["usage"][name] for name in theirs["usage"]} == theirs["usage"]
        (ours,), (theirs,) = ours["choices"], theirs["choices"]
        assert (ours["text"], ours["finish_reason"]) == (theirs["text"], theirs["finish_reason"])
        assert ours["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
        numbers, expected = (each["logprobs"]["token_logprobs"][1:] for each in (ours, theirs))
        assert numbers == pytest.approx(expected, abs=1e-3)
    assert theirs["finish_reason"] == "stop"


class Ends:
    """A processor of logits that ends an answer after two tokens."""

    def __init__(self, llm: llama_cpp.Llama, prompt: str) -> None:
        self._end = llm.token_eos()
        self._length = len(llm.tokenize(prompt.encode())) + 2

    def __call__(self, ids: Any, scores: Any) -> Any:
        if len(ids) >= self._length:
            scores[:] = -100.0
            scores[self._end] = 100.0
        return scores


@pytest.mark.parametrize("stock_logprobs", [False, True])
def test_an_empty_prompt_is_echoed_with_logprobs(open_model: Opened, stock_logprobs: bool) -> None:
    options = {"kv_overrides": {"tokenizer.ggml.add_bos_token": True}, "stock_logprobs": stock_logprobs}
    llm = open_model(logits_all=True, **options)
    made = llm("", **ASKED)
    assert made["choices"][0]["text"] == llm("", **{**ASKED, "logprobs": None})["choices"][0]["text"]
    assert made["choices"][0]["logprobs"]["tokens"]


def test_logprobs_of_a_prompt_that_another_thread_has_decoded(open_model: Opened) -> None:
    """Rows of logits that this thread has are those of another prompt, as long as this one."""
    asked = {**ASKED, "max_tokens": 1}
    prompt, other = list(range(40, 80)), list(range(80, 120))
    llm = open_model(n_parallel=2, logits_all=True)
    llm.create_completion(other, **asked)
    (right,) = in_thread(lambda: llm.create_completion(prompt, **asked))["choices"]
    (told,) = llm.create_completion([*prompt, 7], **asked)["choices"]
    scores = [each["logprobs"]["token_logprobs"][1 : len(prompt)] for each in (told, right)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
