"""One context: how it goes on, beside one that saw nothing else, and how a decode is stopped."""

from __future__ import annotations

from collections.abc import Callable

from llamahybrid.harness.hazards.context import ABORTED, PARTIAL, TWO
from llamahybrid.harness.hazards.model import Bench
from llamahybrid.harness.hazards.outcome import Gap


def test_what_goes_on_is_compared_with_a_run_that_saw_nothing_else(bench: Callable[[str], Bench]) -> None:
    model = bench("jamba")
    context = model.context().grown(8)
    found = context.goes_on(8)
    assert isinstance(found, Gap)
    assert found.exact
    context.decode([(model.token(9, text=1), 9, (0,))])  # a token of another text
    found = context.goes_on(10)
    assert isinstance(found, Gap)
    assert not found.exact
    assert context.goes_on(30) == -1, "the status of a refused decode"
    assert context.rm(0, -1, -1)
    found = context.goes_on_after_refusal(11)
    assert isinstance(found, Gap)
    assert found.exact, "what was dropped is not missed"


def test_a_decode_stops_at_the_poll_that_is_named(bench: Callable[[str], Bench]) -> None:
    context = bench("llama").context()
    once = context.polls_of(lambda: context.feed(0, 8))
    assert once > 1
    assert context.stopped(1, lambda: context.feed(8, 16)) == ABORTED
    assert context.polls == once + 1
    end = context.last() + 1
    assert context.stopped(once + 1, lambda: context.feed(end, end + 8)) == 0, "there is no such poll"


def test_each_sequence_holds_the_text_of_its_number(bench: Callable[[str], Bench]) -> None:
    context = bench("jamba").context(**TWO).filled({1: 6, 0: 8})
    assert context.last_of() == [7, 5]
    for seq, length in ((0, 8), (1, 6)):
        found = context.goes_on(length, seq, text=seq)
        assert isinstance(found, Gap)
        assert found.exact


def test_a_snapshot_is_gone_back_to(bench: Callable[[str], Bench]) -> None:
    context = bench("jamba").context().grown(8)
    snapshot = context.save(flags=PARTIAL)
    assert context.feed(8, 12) == 0
    assert not context.rm(0, 8, -1), "a hybrid cannot forget"
    assert not context.goes_back(snapshot[:-8], 8)
    assert context.goes_back(snapshot, 8)
    found = context.goes_on(8)
    assert isinstance(found, Gap)
    assert found.exact


def test_another_prompt_starts_over_or_says_why_not(bench: Callable[[str], Bench]) -> None:
    context = bench("jamba").context().grown(8)
    assert context.starts_over(8, text=1) == -1, "the old prompt is still there"
    assert context.rm(0, -1, -1)
    found = context.starts_over(8, text=1)
    assert isinstance(found, Gap)
    assert found.exact
