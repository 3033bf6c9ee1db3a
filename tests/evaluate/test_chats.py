"""Chats are what their names promise once a template has made prompts of them; the answers are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import llama_cpp
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llamahybrid.evaluate.chats import (
    CHAT_WORKLOADS,
    agent_chat,
    edited_chat,
    regenerated_chat,
    stripped_chat,
)
from llamahybrid.evaluate.conversation import Answer, Conversation, Request
from llamahybrid.evaluate.oracle import common_prefix
from llamahybrid.evaluate.speech import Speech
from llamahybrid.tiny.vocab import CHAT_TEMPLATE
from tests.lab.pretend import PretendSpeech


def spelled(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def asked(start: Callable[[Speech], Conversation]) -> Iterator[Request]:
    """The requests as they are sent; answer number n is n times the letters of the alphabet."""
    conversation, number = start(PretendSpeech()), 0
    request: Request | None = next(conversation)
    while request is not None:
        yield deepcopy(request)
        number += 1
        try:
            request = conversation.send(Answer(tuple(range(number, number + request.max_tokens)), spelled))
        except StopIteration:
            request = None


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[..., Path]) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(str(tiny_model("llama")), vocab_only=True, verbose=False)
    yield llm
    llm.close()


def prompt(request: Request) -> str:
    template = Jinja2ChatFormatter(CHAT_TEMPLATE, eos_token="<|im_end|>", bos_token="")
    tools = list(request.tools) or None
    return str(template(messages=list(request.messages), tools=tools).prompt)


def test_a_stripped_chat_diverges_where_the_template_started_the_thinking(
    vocabulary: llama_cpp.Llama,
) -> None:
    requests = list(asked(stripped_chat))
    assert len(requests) == 8
    prompts = [vocabulary.tokenize(prompt(r).encode(), add_bos=False, special=True) for r in requests]
    (think,) = vocabulary.tokenize(b"<think>", add_bos=False, special=True)
    for before, after in pairwise(prompts):
        kept = common_prefix(before, after)
        assert before[kept] == think
        assert len(before) - kept == 2


def test_what_a_client_sends_back_is_the_answer_without_its_thinking() -> None:
    *_, last = asked(stripped_chat)
    answers = [m["content"] for m in last.messages if m["role"] == "assistant"]
    assert answers == [spelled(range(n + 60, n + 100)) for n in range(1, 8)]


def test_an_agent_keeps_its_thinking_until_the_next_question() -> None:
    prompts = [prompt(request) for request in asked(agent_chat)]
    assert [p.count("<think>") for p in prompts] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert [p.count("<tool_response>") for p in prompts] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert all('"name": "fetch"' in p.partition("<|im_end|>")[0] for p in prompts)


def test_a_regenerated_answer_has_another_seed_and_nothing_else() -> None:
    requests = list(asked(regenerated_chat))
    assert [request.seed for request in requests] == list(range(7))
    assert len({prompt(request) for request in requests}) == 1


def test_the_third_message_is_rewritten_and_the_rest_kept() -> None:
    *_, before, edited, _last = asked(edited_chat)
    assert len(edited.messages) == len(before.messages) + 2
    different = [i for i, (a, b) in enumerate(zip(before.messages, edited.messages, strict=False)) if a != b]
    assert different == [5]
    assert [m for m in edited.messages if m["role"] == "user"][2] == edited.messages[5]


def test_all_of_them_need_a_template() -> None:
    assert all(workload.template and workload.name.startswith("chat: ") for workload in CHAT_WORKLOADS)
