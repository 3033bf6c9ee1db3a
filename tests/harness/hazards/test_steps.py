"""Steps that many probes share: what they ask of a context, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamahybrid.harness.hazards.context import PARTIAL, TWO
from llamahybrid.harness.hazards.model import Bench
from llamahybrid.harness.hazards.outcome import Verdict, refused, went_on
from llamahybrid.harness.hazards.steps import after_failure, all_go_on, cut, next_prompt, still_there, stop


def test_a_cut_is_judged_by_what_was_said(bench: Callable[[str], Bench]) -> None:
    context = bench("llama").context().grown(12)
    granted = cut(context, 8, 12)
    assert (granted.verdict, granted.detail) == (Verdict.EXACT, "seq_rm to 8 of 12 tokens returned true")
    other = bench("jamba").context().grown(12)
    kept = cut(other, 8, 12)
    assert (kept.verdict, kept.detail) == (Verdict.REFUSED, "seq_rm to 8 of 12 tokens returned false")


def test_a_cut_of_another_text_than_was_said_is_seen(bench: Callable[[str], Bench]) -> None:
    context = bench("llama").context().grown(12, text=3)
    assert cut(context, 8, 12).verdict is Verdict.WRONG


def test_all_go_on_or_the_first_that_does_not_is_named(bench: Callable[[str], Bench]) -> None:
    context = bench("jamba").context(**TWO).filled({0: 12, 1: 6})
    assert all_go_on(refused, context, "no", {0: 12, 1: 6}).verdict is Verdict.REFUSED
    context = bench("jamba").context(**TWO).filled({0: 12}).grown(6, 1, text=0)
    assert all_go_on(went_on, context, "yes", {0: 12, 1: 6}).verdict is Verdict.WRONG


def test_what_is_left_after_a_refusal_is_said(bench: Callable[[str], Bench]) -> None:
    context = bench("jamba").context().grown(12)
    before = context.save()
    held = still_there(context, before, 12, "it was refused")
    assert (held.verdict, held.detail) == (
        Verdict.REFUSED,
        "it was refused, 12 tokens left with the same bytes",
    )
    after = still_there(context, before, 13, "it was refused")
    assert after.detail == "it was refused, 13 tokens left with other bytes"
    left = after_failure(context, 14)
    assert (left.verdict, left.detail) == (Verdict.REFUSED, "the restore returned 0, 14 tokens left")
    context.load(bench("jamba").context().grown(14, text=2).save(flags=PARTIAL), flags=PARTIAL)
    assert after_failure(context, 14).verdict is not Verdict.EXACT


def test_another_prompt_is_judged_beside_a_clean_run(bench: Callable[[str], Bench]) -> None:
    context = bench("jamba").context().grown(12)
    beside = next_prompt(context, 8, "not removed")
    assert (beside.verdict, beside.detail) == (Verdict.REFUSED, "not removed; the next decode returned -1")
    context.rm(0, -1, -1)
    assert next_prompt(context, 8, "removed").verdict is Verdict.EXACT


def test_a_decode_that_was_to_be_stopped_and_was_not_tells_nothing(bench: Callable[[str], Bench]) -> None:
    context = bench("llama").context()
    polls = context.polls_of(lambda: context.feed(0, 8))
    stop(context, polls, 0.5, lambda: context.feed(8, 16))
    end = context.last() + 1
    with pytest.raises(RuntimeError, match="the decode was not stopped: it returned 0"):
        stop(context, polls, 2.0, lambda: context.feed(end, end + 8))
