"""Usage and timings from what requests did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamahybrid.request.report import RequestReport
from llamahybrid.server.usage import timings, usage

FIRST = RequestReport(
    total=100,
    matched=80,
    cached=75,
    source="ram",
    reason="",
    generated=10,
    last=9,
    plan_seconds=0.25,
    restore_seconds=0.25,
    prefill_seconds=0.5,
    first_token_seconds=1.0,
    last_token_seconds=3.0,
)
SECOND = RequestReport(total=100, matched=100, cached=99, source="live", reason="", generated=4, last=2)


def test_usage_counts_the_prompt_once_and_no_end() -> None:
    told = usage([FIRST, SECOND], lambda token: token == 2)
    assert told == {
        "prompt_tokens": 100,
        "completion_tokens": 13,
        "total_tokens": 113,
        "prompt_tokens_details": {"cached_tokens": 75},
    }
    assert usage([], bool)["total_tokens"] == 0


def test_timings_are_in_milliseconds() -> None:
    assert timings([FIRST]) == pytest.approx(
        {
            "cache_n": 75,
            "prompt_n": 25,
            "prompt_ms": 1000.0,
            "prompt_per_token_ms": 40.0,
            "prompt_per_second": 25.0,
            "predicted_n": 10,
            "predicted_ms": 2000.0,
            "predicted_per_token_ms": 200.0,
            "predicted_per_second": 5.0,
        }
    )
    assert timings([FIRST, SECOND])["predicted_n"] == 14
    assert timings([]) == {}


def test_nothing_is_divided_by_nothing() -> None:
    told = timings([RequestReport(total=5, matched=5, cached=5, source="live", reason="")])
    assert not any(told[name] for name in told if name != "cache_n")


def test_drafts_are_told_where_there_were_any() -> None:
    told = timings([RequestReport(5, 5, 5, "live", "", drafted=7, accepted=3)])
    assert (told["draft_n"], told["draft_n_accepted"]) == (7, 3)


def test_a_prompt_that_was_cancelled_is_timed_as_far_as_it_was_decoded() -> None:
    told = timings([replace(FIRST, unreached=20, generated=0)])
    assert (told["prompt_n"], told["prompt_per_token_ms"], told["prompt_per_second"]) == (5, 200.0, 5.0)
