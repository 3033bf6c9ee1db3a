"""The least possible work, on histories whose answer is known by hand."""

from __future__ import annotations

import pytest

from llamahybrid.evaluate.conversation import Record
from llamahybrid.evaluate.oracle import common_prefix, least_decodes, oracle_ratio


def record(prompt: str, generated: str, decoded: int = 0) -> Record:
    return Record(
        tuple(map(ord, prompt)), tuple(map(ord, generated)), decoded, 0.0, 0.0, generated, None, None
    )


@pytest.mark.parametrize(
    ("a", "b", "length"), [("", "", 0), ("abc", "", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("x", "y", 0)]
)
def test_common_prefix(a: str, b: str, length: int) -> None:
    assert common_prefix(tuple(map(ord, a)), tuple(map(ord, b))) == length


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
def test_least_decodes(requests: list[tuple[str, str]], least: list[int]) -> None:
    assert least_decodes([record(*request) for request in requests]) == least


def test_the_ratio_leaves_out_what_was_asked_before() -> None:
    records = [record("abcdef", "xyz", decoded=8), record("abcdefxQ", "mn", decoded=4)]
    assert oracle_ratio(records) == 12 / 10
    assert oracle_ratio(records, first=1) == 4 / 2


def test_cached_is_what_the_counters_leave_of_the_prompt() -> None:
    assert record("abcdef", "xyz", decoded=5).cached == 3
    assert record("abcdef", "", decoded=6).cached == 0
