"""Sentences that say the same of many requests are said once, with how many there are."""

from __future__ import annotations

from dataclasses import replace

from llamahybrid.evaluate.render.likeness import alike
from llamahybrid.evaluate.report import RequestFigures

ONE = RequestFigures("a chat", "0", 1, 9, 9, 9, 0, 1, 0.1, 1.0, "same", "", None)


def missed(workload: str, turn: int, miss: str | None) -> RequestFigures:
    return replace(ONE, workload=workload, turn=turn, miss=miss)


def lost(tokens: str, was: str, now: str) -> str:
    return f"{tokens} were decoded again: {was!r} was {now!r}; the model's thinking stood there: keep it"


def test_numbers_and_texts_make_no_new_sentence() -> None:
    said = lost("1,879 tokens", "b3;:", "<think>")
    found = alike(
        [
            missed("a", 1, "another sentence"),
            missed("a", 2, said),
            missed("a", 3, None),
            missed("b", 4, lost("1 token", "it's", 'a "word"; said')),
            missed("b", 5, lost("12 tokens", "\\", "'\"")),
        ]
    )
    assert [(each.requests, each.workloads) for each in found] == [(3, 2), (1, 1)]
    assert found[0].text == f"3 requests of 2 workloads alike, the first of them a, chat 0, turn 3: {said}"
    assert found[1].text == "a, chat 0, turn 2: another sentence"


def test_within_one_workload_only_requests_are_counted() -> None:
    found = alike([missed("a", turn, f"{turn} tokens") for turn in (1, 2)])
    assert [each.text for each in found] == [
        "2 requests alike, the first of them a, chat 0, turn 2: 1 tokens"
    ]


def test_other_words_are_another_sentence() -> None:
    assert len(alike([missed("a", 1, "it was evicted"), missed("a", 2, "it was not kept")])) == 2
