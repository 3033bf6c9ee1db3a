"""Stock and ours on one conversation: recorded requests, counted tokens, and the least possible number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from llamahybrid.harness import demo
from llamahybrid.harness.ab_test import Comparer, Comparison, Side
from llamahybrid.harness.conversation import Conversation, Record, Request, ask, converse
from llamahybrid.harness.counters import DecodeCounter
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload
from tests.conftest import TinyModel

Opener = Callable[..., Any]
PROMPT = list(b"any prompt of some length")
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


@pytest.fixture
def llm(open_model: Opener) -> llama_cpp.Llama:
    opened: llama_cpp.Llama = open_model("llama", llama_cpp.Llama)
    return opened


def record(prompt: str, generated: str, decoded: int = 0) -> Record:
    return Record(tuple(map(ord, prompt)), tuple(map(ord, generated)), decoded, 0.25, 0.5, "", None, None)


@pytest.mark.parametrize(
    ("requests", "least"),
    [
        ([("abcdef", "xyz")], [6 + 2]),
        ([("abcdef", "xyz"), ("abcdefxyzq", "mn")], [8, 2 + 1]),  # z was sampled, never decoded
        ([("abcdef", "xyz"), ("abcdef", "pq")], [8, 1]),  # logits of that prompt were known
        ([("abcdef", "xyz"), ("abc", "pq")], [8, 1 + 1]),  # evaluated, but its logits were not kept
        ([("abcdef", "xyz"), ("abQ", "p"), ("abcdefx", "pq")], [8, 1, 1 + 1]),  # old branches stay known
        ([("abc", "")], [3]),
    ],
)
def test_least_number_of_decoded_tokens(requests: list[tuple[str, str]], least: list[int]) -> None:
    assert least_decodes([record(*request) for request in requests]) == least


@pytest.mark.parametrize("sizes", [[], [1, 1], [64, 1], [130, 1, 1, 3]])
def test_every_decoded_token_counts_once(llm: llama_cpp.Llama, sizes: list[int]) -> None:
    llm.eval([5])
    counter = DecodeCounter(llm)
    for size in sizes:
        llm.eval([5] * size)
        assert counter.take() == size
    assert counter.take() == 0


@pytest.mark.parametrize("option", [{"verbose": True}, {"no_perf": True}])
def test_contexts_with_wrong_counters_are_refused(open_model: Opener, option: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="verbose=False and no_perf=False"):
        DecodeCounter(open_model("qwen35", llama_cpp.Llama, **option))


def test_request_is_recorded_with_its_tokens_and_times(llm: llama_cpp.Llama) -> None:
    counter = DecodeCounter(llm)
    llm.eval(PROMPT[:7])  # not part of the request
    llm.reset()
    record, answer = ask(llm, Request(6, PROMPT), counter)
    assert record.prompt == tuple(PROMPT)
    assert record.generated == answer.tokens
    assert len(record.generated) == 6
    assert record.decoded == len(PROMPT) + 5, "the last token is sampled, not decoded"
    assert record.cached == 0
    assert 0 < record.first_token_seconds <= record.seconds
    assert record.text == answer.text()


def test_request_without_a_seed_is_greedy(llm: llama_cpp.Llama) -> None:
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


def test_each_request_is_built_from_the_answer_before(llm: llama_cpp.Llama) -> None:
    def talk() -> Conversation:
        prompt = list(PROMPT)
        for n in (3, 5):
            answer = yield Request(n, prompt)
            prompt += answer.tokens

    first, second = converse(llm, talk())
    assert second.prompt == first.prompt + first.generated
    assert [len(first.generated), len(second.generated)] == [3, 5]


def two_questions(speech: Speech) -> Conversation:
    prompt = speech.message(20)
    answer = yield Request(4, prompt)
    yield Request(4, [*prompt, *answer.tokens, *speech.message(10)])


TWO = Workload("two", two_questions, n_ctx=512)


def test_both_sides_run_the_same_conversation(tiny_model: TinyModel) -> None:
    comparison = Comparer(tiny_model("qwen35"), {**ONE_THREAD, "n_batch": 64}).run(TWO)
    assert comparison.texts_equal
    stock, ours = comparison.stock.records, comparison.ours.records
    assert [r.prompt for r in stock] == [r.prompt for r in ours]
    assert [r.report is None for r in stock] == [True, True]
    assert all(r.report for r in ours)


def test_texts_are_equal_when_every_request_sampled_the_same() -> None:
    first, second = record("abcdef", "xyz", 8), record("abcdefxQ", "mn", 4)
    same = Comparison(TWO, Side([first, second], 1), Side([record("abcdef", "xyz", 1), second], 1))
    assert same.texts_equal
    other = Comparison(TWO, same.stock, Side([record("abcdef", "xyQ", 8), second], 1))
    assert not other.texts_equal, "in a request that is not measured, either"
    assert other.as_json()["texts_equal"] is False


def test_comparison_neither_reads_nor_writes_the_configured_cache(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tmp_path / "chats"
    monkeypatch.setenv("LLAMAHYBRID_RAM", "64MiB")
    monkeypatch.setenv("LLAMAHYBRID_DISK", str(chats))
    comparer = Comparer(tiny_model("qwen35"), ONE_THREAD)
    for _ in range(2):
        assert comparer.run(TWO).ours.records[0].cached == 0, "of an earlier run"
    assert not chats.exists()


def test_demo_holds_where_texts_are_equal_and_no_turn_decodes_more(tiny_model: TinyModel) -> None:
    shown = Comparer(tiny_model("qwen35"), ONE_THREAD).run(replace(demo.DEMO, n_ctx=8192))
    assert demo.holds(shown)
    first, *rest = shown.ours.records
    assert f"{shown.ours.decoded:,}" in demo.summary(shown)
    other_text = replace(first, generated=(*first.generated[:-1], first.generated[-1] + 1))
    more_tokens = replace(first, decoded=first.decoded + 1)
    for changed in (other_text, more_tokens):
        assert not demo.holds(replace(shown, ours=Side([changed, *rest], 0)))
