"""Answers compared with those of fresh contexts: same, tie, different or unknown."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llamahybrid.harness.targets import reference
from tests.conftest import take

PROMPT = [(7 * i + 3) % 200 for i in range(50)]


ROW = np.array([0, 0.5, 0.995, 1], np.float32)
MODEL = SimpleNamespace(model=None)


@pytest.mark.parametrize(
    ("answer", "greedy", "first", "found"),
    [
        ([3, 3], True, None, ("same", "")),
        ([3, 2], True, None, ("tie", "")),
        ([2, 1], True, None, ("different", "token 2 of the answer lies 50.0% ")),
        ([3, 3], True, ROW[::-1], ("different", "its first logits lie 100.0% ")),
        ([0, 0], False, ROW, ("same", "")),  # sampled: judged by its logits
        ([0, 0], False, None, ("unknown", "sampled")),
        ([3, 3], True, ROW * np.nan, ("different", "its first logits lie inf% ")),
        ([], False, ROW, ("unknown", "no token came")),  # the end may have been sampled
        ([], True, None, ("different", "no token came, where a fresh context goes on")),
    ],
)
def test_answer_is_same_tie_different_or_unknown(
    answer: list[int], greedy: bool, first: Any, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said(monkeypatch, ROW)
    same, detail = reference.compare(MODEL, PROMPT, answer, greedy, first)
    assert same == found[0]
    assert detail.startswith(found[1])


@pytest.mark.parametrize(("gpu", "found"), [(False, "different"), (True, "tie")])
def test_right_answers_lie_further_apart_where_there_is_a_gpu(
    gpu: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = np.array([0, 0.5, 0.985, 1], np.float32)
    said(monkeypatch, row)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: gpu)
    assert reference.compare(MODEL, PROMPT, [2], True, row + np.float32(0.01))[0] == found


def said(monkeypatch: pytest.MonkeyPatch, row: Any, ends: bool = False) -> None:
    """Fresh contexts say `row` each time; `ends`: its best token ends an answer."""
    monkeypatch.setattr(reference, "rows", lambda llm, prompt, answer: [row] * (len(answer) + 1))
    monkeypatch.setattr(llama_cpp, "llama_model_get_vocab", lambda model: model)
    monkeypatch.setattr(llama_cpp, "llama_vocab_is_eog", lambda vocab, token: ends)


@pytest.mark.parametrize(
    ("again", "first", "found"),
    [
        ([0, 0.5, 1, 0.95], [0, 0.5, 1, 0.95], "tie"),  # bit for bit what stock's own prefix reuse computes
        ([0, 0.5, 0.97, 0.985], [0, 0.5, 0.96, 0.97], "tie"),  # two right contexts differ by 2 %
        ([0, 0.5, 0.95, 1], [0, 0.5, 0.97, 0.97], "different"),  # they do not differ
        ([0, 1, 0, 0], [0, 0.5, 1, 0], "unknown"),  # by so much that nothing can be told by it
    ],
)
def test_answer_is_compared_with_stock_reuse_where_a_fresh_context_differs(
    again: list[float], first: list[float], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, reused = np.array([0, 0.5, 0.95, 1], np.float32), np.array(again, np.float32)
    monkeypatch.setattr(reference, "rows", lambda *given: [reused if len(given) == 4 else cold])
    same, _ = reference.compare(MODEL, PROMPT, [2], True, np.array(first, np.float32), [0, 50, 51])
    assert same == found


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_rows_depend_on_pieces_by_rounding_alone(arch: str, open_model: Callable[..., Any]) -> None:
    llm = open_model(arch, llama_cpp.Llama)
    whole, pieces = (
        reference.rows(llm, PROMPT, [5, 6], given)
        for given in (None, reference.pieces_of(50, 3, 512, [0, 10, 11, 12, 13]))
    )
    assert len(whole) == len(pieces) == 3
    assert max(map(reference.difference, whole, pieces)) < 1e-3


def test_empty_answer_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said(monkeypatch, ROW, ends=True)
    for prompt in (PROMPT, []):
        assert reference.compare(MODEL, prompt, [], True, None)[0] == "unknown"


@pytest.mark.parametrize("row", [ROW * np.nan, ROW * 0])
def test_constant_or_nan_logits_cannot_be_compared(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, row)
    for first in (None, row, ROW):
        same, detail = reference.compare(MODEL, PROMPT, [3, 3], True, first)
        assert (same, "tell nothing" in detail) == ("unknown", True)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_comparison_leaves_the_context_alone(arch: str, open_model: Callable[..., Any]) -> None:
    llm = open_model(arch, llama_cpp.Llama, n_batch=16)  # the prompt goes in four batches
    answer = take(llm, PROMPT, 6)
    position = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)
    assert reference.compare(llm, PROMPT, answer, True, None) == ("same", "")
    assert len(reference.rows(llm, PROMPT, answer)) == 7
    wrong = int(reference.rows(llm, PROMPT, [])[0].argmin())
    assert reference.compare(llm, PROMPT, [wrong, *answer], True, None)[0] == "different"
    assert llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0) == position
