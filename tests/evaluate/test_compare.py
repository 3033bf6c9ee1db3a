"""Both implementations' ways through a conversation: what is counted, and on which options they run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

from llamahybrid import Llama
from llamahybrid.evaluate.chats import CHAT_WORKLOADS
from llamahybrid.evaluate.compare import (
    WORKLOADS,
    Comparer,
    Comparison,
    Side,
)
from llamahybrid.evaluate.conversation import Conversation, Record, Request
from llamahybrid.evaluate.crowds import CROWDS
from llamahybrid.evaluate.speech import Speech
from llamahybrid.evaluate.workloads import TOKEN_WORKLOADS, Workload

TinyModel = Callable[..., Path]


def record(prompt: str, generated: str, decoded: int) -> Record:
    return Record(tuple(map(ord, prompt)), tuple(map(ord, generated)), decoded, 0.25, 0.5, "", None, None)


FIRST, AGAIN = record("abcdef", "xyz", 8), record("abcdefxQ", "mn", 4)


def test_a_side_counts_what_was_measured_only() -> None:
    side = Side([FIRST, AGAIN], measured_from=1)
    assert side.measured == [AGAIN]
    assert (side.decoded, side.least, side.ratio, side.seconds) == (4, 2, 2.0, 0.5)
    assert Side([FIRST, AGAIN], 0).decoded == 12


def test_texts_are_equal_when_every_request_sampled_the_same() -> None:
    workload = Workload("two", lambda _: iter(()))  # type: ignore[arg-type, return-value]
    same = Comparison(workload, Side([FIRST, AGAIN], 1), Side([record("abcdef", "xyz", 1), AGAIN], 1))
    assert same.texts_equal
    other = Comparison(workload, same.stock, Side([record("abcdef", "xyQ", 8), AGAIN], 1))
    assert not other.texts_equal, "in a request that is not measured, either"
    document = json.loads(json.dumps(other.as_json()))
    assert document["scenario"] == "two"
    assert document["texts_equal"] is False
    assert [each["decoded"] for each in document["stock"]["requests"]] == [8, 4]
    assert document["ours"]["ratio"] == other.ours.ratio


def two_questions(speech: Speech) -> Conversation:
    prompt = speech.message(20)
    answer = yield Request(4, prompt)
    yield Request(4, [*prompt, *answer.tokens, *speech.message(10)])


def test_both_run_the_same_conversation_with_the_same_options(tiny_model: TinyModel) -> None:
    made: list[llama_cpp.Llama] = []

    class Watched(Llama):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            made.append(self)

    said: list[str] = []
    options = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 64, "n_ctx": 99}
    comparer = Comparer(tiny_model("qwen35"), options, said.append)
    workload = Workload("two", two_questions, n_ctx=512)
    side = comparer.side(Watched, workload, "ours")
    (llm,) = made
    assert (llm.n_batch, llm.context_params.n_ctx) == (64, 512), "the workload's context counts"
    assert llm._model.model is None, "closed again"
    assert said == [f"two: ours, prompt of {n} tokens done" for n in (20, 34)]
    comparison = comparer.run(workload)
    assert comparison.texts_equal
    assert [r.prompt for r in comparison.stock.records] == [r.prompt for r in side.records]
    assert [r.report is None for r in comparison.stock.records] == [True, True], "stock is upstream's class"
    assert all(r.report for r in comparison.ours.records)


def test_a_model_says_whether_it_has_a_template(tiny_model: TinyModel) -> None:
    assert Comparer(tiny_model("llama")).has_template()
    spm = tiny_model("llama", vocab="llama-spm", embd=32, layers=2, heads=1)
    assert not Comparer(spm).has_template()


def test_every_workload_is_known_by_its_name() -> None:
    assert set(WORKLOADS.values()) == {*TOKEN_WORKLOADS, *CROWDS, *CHAT_WORKLOADS}
    assert all(workload.name == name for name, workload in WORKLOADS.items())


def test_what_the_environment_keeps_is_neither_reused_nor_added_to(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tmp_path / "chats"
    monkeypatch.setenv("LLAMAHYBRID_RAM", "64MiB")
    monkeypatch.setenv("LLAMAHYBRID_DISK", str(chats))
    comparer = Comparer(tiny_model("qwen35"), {"n_threads": 1, "n_threads_batch": 1})
    for _ in range(2):
        ours = comparer.run(Workload("two", two_questions, n_ctx=512)).ours
        assert ours.records[0].cached == 0, "of an earlier run"
    assert not chats.exists()
