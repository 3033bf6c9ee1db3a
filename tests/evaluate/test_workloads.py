"""Workloads are what their names promise: run on stock, whose behaviour is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import llama_cpp
import pytest

from llamahybrid.evaluate.conversation import Conversation, Record, converse
from llamahybrid.evaluate.oracle import common_prefix, least_decodes, oracle_ratio
from llamahybrid.evaluate.speech import Speech
from llamahybrid.evaluate.workloads import (
    FIVE_TURNS,
    LONG_PROMPT,
    exact_append,
    five_turns,
    long_prompt,
    long_then_followup,
    mid_generation,
    regenerate,
    thinking_stripped,
    unrelated,
)

Run: TypeAlias = Callable[[Callable[[Speech], Conversation]], list[Record]]


@pytest.fixture
def llm(tiny_model: Callable[..., Path]) -> Iterator[llama_cpp.Llama]:
    llm = llama_cpp.Llama(str(tiny_model("mamba")), n_ctx=8192, verbose=False, n_threads_batch=1)
    yield llm
    llm.close()


@pytest.fixture
def run(llm: llama_cpp.Llama) -> Run:
    return lambda workload: converse(llm, workload(Speech(llm)))


def totals(records: list[Record]) -> list[int]:
    return [len(record.prompt) for record in records]


def matched(records: list[Record]) -> list[int]:
    return [
        len(r.prompt) - (least - (len(r.generated) - 1))
        for r, least in zip(records, least_decodes(records), strict=True)
    ]


def test_exact_append_costs_stock_nothing_extra(run: Run) -> None:
    assert oracle_ratio(run(exact_append)) == 1.0


def test_stock_decodes_a_stripped_chat_again_every_turn(run: Run) -> None:
    records = run(thinking_stripped)
    assert [r.decoded for r in records] == [len(r.prompt) + len(r.generated) - 1 for r in records]
    assert matched(records)[1:] == [total - 2 for total in totals(records)[:-1]]


def test_regenerated_answers_differ_by_seed(run: Run) -> None:
    records = run(regenerate)
    assert len(records) == 7
    assert len({r.prompt for r in records}) == 1
    assert len({r.generated for r in records}) > 3


def test_five_turns_have_the_lengths_of_the_pull_request(run: Run) -> None:
    records = run(five_turns)
    assert tuple(totals(records)) == FIVE_TURNS
    assert matched(records)[1:] == [total - 2 for total in FIVE_TURNS[:-1]]


def test_the_followup_has_430_tokens_of_which_96_match(run: Run) -> None:
    records = run(long_then_followup)
    assert len(records[0].generated) == 300
    assert (totals(records)[1], matched(records)[1]) == (430, 96)


def test_followups_keep_these_shares_of_a_700_token_answer(run: Run) -> None:
    first, *rest = run(mid_generation)
    known = first.prompt + first.generated
    assert len(first.generated) == 700
    assert [common_prefix(r.prompt, known) - len(first.prompt) for r in rest] == [665, 490, 315, 140, 56]


def test_unrelated_prompts_share_next_to_nothing(run: Run) -> None:
    assert max(matched(run(unrelated))) <= 2


def test_the_long_prompt_is_exactly_as_long_as_ollamas(llm: llama_cpp.Llama) -> None:
    requests = list(long_prompt(Speech(llm)))
    assert [len(request.tokens) for request in requests] == [LONG_PROMPT] * 3
    assert requests[0].tokens == requests[1].tokens
    assert 24_000 < common_prefix(requests[0].tokens, requests[2].tokens) < 26_000
