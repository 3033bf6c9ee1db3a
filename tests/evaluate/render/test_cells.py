"""Figures as cells."""

from __future__ import annotations

import pytest

from llamahybrid.evaluate.render.cells import answers, counted, ratio
from tests.evaluate.reports import request


def test_what_is_hidden_is_a_question_mark() -> None:
    assert [counted(None), counted(0), counted(1234)] == ["?", "0", "1,234"]
    assert [ratio(None), ratio(1.006)] == ["?", "1.01"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (("same", "same"), "same"),
        (("same", "tie"), "1 tied"),
        (("unknown", "unknown"), "?"),
        (("same", "unknown"), "1 untold"),
        (("different", "unknown", "different"), "2 differ"),
        ((), "?"),
    ],
)
def test_answers(found: tuple[str, ...], said: str) -> None:
    assert answers([request(answer=each) for each in found]) == said
