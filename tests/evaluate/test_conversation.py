"""Driving a conversation: what is sent, what is recorded, and what is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid.evaluate.conversation import Conversation, Record, Request, ask, converse
from llamahybrid.evaluate.counters import DecodeCounter

PROMPT = list(b"any prompt of some length")


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(str(tiny_model("llama")), n_ctx=512, verbose=False, n_threads=1, n_threads_batch=1)
    yield llm
    llm.close()


def test_a_request_is_recorded_as_it_was(llm: llama_cpp.Llama) -> None:
    counter = DecodeCounter(llm)
    llm.eval(PROMPT[:7])  # what somebody else decodes is not the request's
    llm.reset()
    record, answer = ask(llm, Request(6, PROMPT), counter)
    assert record.prompt == tuple(PROMPT)
    assert record.generated == answer.tokens == tuple(llm.input_ids[len(PROMPT) :][:5]) + answer.tokens[5:]
    assert len(record.generated) == 6
    assert record.decoded == len(PROMPT) + 5, "the last one is sampled, not decoded"
    assert record.cached == 0
    assert 0 < record.first_token_seconds <= record.seconds
    assert (record.usage_cached, record.report) == (None, None)
    assert record.text == answer.text()
    assert answer.text(2, 4) == llm.detokenize(list(answer.tokens[2:4])).decode(errors="ignore")
    assert "generate" not in vars(llm), "nobody watches any more"


def test_without_a_seed_it_is_greedy_and_with_one_it_is_that_one(llm: llama_cpp.Llama) -> None:
    def sampled(seed: int | None) -> tuple[int, ...]:
        llm.reset()
        return ask(llm, Request(12, PROMPT, seed=seed), DecodeCounter(llm))[1].tokens

    assert sampled(None) == sampled(None)
    assert sampled(3) == sampled(3)
    assert len({sampled(None), sampled(3), sampled(4)}) == 3


def test_messages_and_tools_go_through_the_chat_template(llm: llama_cpp.Llama) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    request = Request(4, messages=[{"role": "user", "content": "1+1?"}], tools=[tool], seed=1)
    record, _ = ask(llm, request, DecodeCounter(llm))
    prompt = llm.detokenize(list(record.prompt), special=True).decode()
    assert "<|im_start|>user\n1+1?<|im_end|>" in prompt
    assert '"name": "add"' in prompt
    assert len(record.generated) == 4


def test_each_request_is_built_from_the_answer_before(llm: llama_cpp.Llama) -> None:
    heard: list[tuple[int, ...]] = []
    told: list[Record] = []

    def talk() -> Conversation:
        prompt = list(PROMPT)
        for n in (3, 5):
            answer = yield Request(n, prompt)
            heard.append(answer.tokens)
            prompt += answer.tokens

    records = converse(llm, talk(), told.append)
    assert told == records
    assert [record.generated for record in records] == heard
    assert records[1].prompt == records[0].prompt + heard[0]
    assert [len(record.generated) for record in records] == [3, 5]


def test_a_conversation_without_a_request_has_no_records(llm: llama_cpp.Llama) -> None:
    def silent() -> Conversation:
        yield from ()

    assert converse(llm, silent()) == []
