"""Chat handlers of a program's own, which run with the whole context to themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import llama_cpp
import pytest
from llama_cpp import llama_chat_format

from llamahybrid.errors import RequestCancelled
from tests.lab.waiting import wait_until
from tests.request.asking import WORDS, Started, in_thread, said

MESSAGES = [{"role": "user", "content": "x"}]
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
Opened = Callable[..., Any]

pytestmark = pytest.mark.parametrize("slots", [1, 2])


def test_a_handler_evaluates_after_a_completion(opened: Opened, stock: Opened, slots: int) -> None:
    llm, sampled = opened(n_parallel=slots), list[int]()

    def handler(llama: Any, **_: Any) -> Any:
        made = llama.create_completion(WORDS[:20], **ASKED)
        llama.reset()
        llama.eval(WORDS[40:60])
        sampled.append(llama.sample(temp=0.0))
        return made

    llm.chat_handler = handler
    llm.create_chat_completion(MESSAGES)
    assert sampled == stock()(WORDS[40:60], 1)


def test_a_handler_asks_while_it_streams(opened: Opened, slots: int) -> None:
    llm = opened(n_parallel=slots)
    alone, texts = said(llm.create_completion(WORDS[:20], **ASKED)), list[str]()

    def handler(llama: Any, **_: Any) -> Any:
        text = ""
        for chunk in llama.create_completion(WORDS[:20], stream=True, **ASKED):
            text += chunk["choices"][0]["text"]
            llama.create_completion(WORDS[100:120], max_tokens=2)
        texts.append(text)
        return llama.create_completion(WORDS[:5], max_tokens=1)

    llm.chat_handler = handler
    llm.create_chat_completion(MESSAGES)
    assert texts == [alone]


def test_a_registered_handler_gets_its_model_whatever_tool_is_chosen(opened: Opened, slots: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    given = list[bool]()

    @llama_chat_format.register_chat_completion_handler(f"registered-{slots}")
    def handler(llama: Any, **_: Any) -> Any:
        given.append(isinstance(llama, llama_cpp.Llama))
        return iter([llama(WORDS[:20], **ASKED)])

    llm = opened(n_parallel=slots, chat_format=f"registered-{slots}")
    for choice in (None, {"type": "function", "function": {"name": "f"}}):
        made = llm.create_chat_completion(MESSAGES, tools=[tool], tool_choice=choice, stream=True)
        assert said(next(made)) == said(llm.create_completion(WORDS[:20], **ASKED))
        assert not list(made)
    assert all(given)


def test_a_stream_that_a_handler_began_goes_on_beside_others(opened: Opened, slots: int) -> None:
    llm = opened(n_parallel=slots)
    prompts = WORDS[:20], WORDS[100:120]
    alone = [said(llm.create_completion(prompt, **ASKED)) for prompt in prompts]

    def handler(llama: Any, **_: Any) -> Any:
        stream = llama.create_completion(prompts[0], stream=True, **ASKED)
        return itertools.chain([next(stream)], stream)

    llm.chat_handler = handler
    begun = llm.create_chat_completion(MESSAGES, stream=True)
    llm.chat_handler = None
    other = llm.create_completion(prompts[1], stream=True, **ASKED)
    texts = ["", ""]
    for pair in itertools.zip_longest(begun, other):
        for i, chunk in enumerate(pair):
            texts[i] += chunk["choices"][0]["text"] if chunk else ""
    assert texts == alone


def test_cancel_reaches_requests_of_a_chat_handler(opened: Opened, slots: int) -> None:
    llm, seen = opened(n_parallel=slots), list[int]()

    def note(ids: Any, _: Any) -> bool:
        seen.append(len(ids))
        return len(seen) == 5 and bool(in_thread(llm.cancel))

    criteria = llama_cpp.StoppingCriteriaList([note])
    llm.chat_handler = lambda llama, **_: llama.create_completion(
        WORDS[:20], max_tokens=900, temperature=0.0, stopping_criteria=criteria
    )
    assert llm.create_chat_completion(MESSAGES)["choices"][0]["finish_reason"] == "cancelled"
    assert len(seen) < 900


def test_a_cancel_of_a_chat_that_waits_ends_no_other(opened: Opened, slots: int) -> None:
    llm, handles = opened(n_parallel=slots), list[Any]()

    def wait_and_be_cancelled() -> None:
        with suppress(RequestCancelled), llm.request() as handle:
            handles.append(handle)
            llm.create_chat_completion(MESSAGES)

    def handler(llama: Any, **_: Any) -> Any:
        stream = llama.create_completion(WORDS[:20], stream=True, **ASKED)
        chunks, second = [next(stream)], Started(wait_and_be_cancelled)
        wait_until(lambda: handles)
        wait_until(lambda: handles[0].cancel() or not second.is_alive())
        return said([*chunks, *stream])

    right = said(llm.create_completion(WORDS[:20], **ASKED))
    llm.chat_handler = handler
    assert llm.create_chat_completion(MESSAGES) == right


def test_a_chat_cancelled_before_its_handler_asks_decodes_nothing(opened: Opened, slots: int) -> None:
    llm, made = opened(n_parallel=slots), list[Any]()

    def handler(llama: Any, **_: Any) -> Any:
        llm.cancel()  # as Ctrl-C in the caller's thread, while an image is encoded
        made.append(llama.create_completion(WORDS[:20], **ASKED))
        return made[0]

    llm.chat_handler = handler
    llm.create_chat_completion(MESSAGES)
    assert made[0]["choices"][0]["finish_reason"] == "cancelled"
    assert made[0]["usage"]["completion_tokens"] == 0


def test_last_request_is_that_of_a_chat_handler(opened: Opened, slots: int) -> None:
    llm = opened(n_parallel=slots)
    llm.create_completion(WORDS[:50], **ASKED)
    llm.chat_handler = lambda llama, **_: llama.create_completion(WORDS[100:120], **ASKED)
    llm.create_chat_completion(MESSAGES)
    assert llm.last_request.total == 20


def test_error_of_on_request_inside_a_handler_reaches_the_caller(opened: Opened, slots: int) -> None:
    llm, told = opened(n_parallel=slots), list[Any]()

    def on_request(report: Any) -> None:
        told.append(report)
        raise LookupError("on_request")

    llm.chat_handler = lambda llama, **_: llama.create_completion(WORDS[:20], **ASKED)
    llm.on_request = on_request
    with pytest.raises(LookupError, match="on_request"):
        llm.create_chat_completion(MESSAGES)
    llm.on_request = None
    assert len(told) == 1
    assert said(llm.create_chat_completion(MESSAGES)) == said(llm.create_completion(WORDS[:20], **ASKED))
