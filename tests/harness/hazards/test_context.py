"""Contexts for probes: requirements on models, comparison with clean runs, stopped decodes, batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamahybrid.harness.hazards.context import ABORTED, PARTIAL, TWO
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.outcome import Gap, NotApplicable
from llamahybrid.harness.hazards.steps import stop


@pytest.mark.parametrize(
    ("arch", "refused"),
    [
        ("qwen35", {"window", "other positions"}),
        ("mamba", {"hybrid", "attention", "window", "planes", "M-RoPE"}),
        ("llama", {"hybrid", "recurrent", "window", "planes", "M-RoPE"}),
        ("gemma3", {"hybrid", "recurrent", "planes", "M-RoPE"}),
        ("jamba", {"window", "planes", "M-RoPE"}),
        ("qwen4exp", {"window", "other positions", "shared tokens"}),
        ("bert", {"hybrid", "recurrent", "window", "planes", "M-RoPE", "memory"}),
    ],
)
def test_requirement_that_a_model_lacks_is_not_applicable(
    tested: Callable[[str], ModelUnderTest], arch: str, refused: set[str]
) -> None:
    model = tested(arch)
    needs: dict[str, Callable[[], object]] = {
        "hybrid": model.need_hybrid,
        "recurrent": model.need_recurrent,
        "attention": model.need_attention,
        "window": model.need_window,
        "M-RoPE": lambda: model.need_multi_rope(True),
        "other positions": lambda: model.need_multi_rope(False),
        "planes": lambda: model.with_planes(2),
        "shared tokens": model.need_shared_tokens,
        "memory": model.context,
    }
    found = set()
    for name, need in needs.items():
        try:
            need()
        except NotApplicable:
            found.add(name)
    assert found == refused


def test_logits_are_compared_with_a_clean_run(
    tested: Callable[[str], ModelUnderTest],
) -> None:
    model = tested("jamba")
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
    assert found.exact, "the dropped state is not compared"


def test_decode_stops_at_the_given_poll(tested: Callable[[str], ModelUnderTest]) -> None:
    context = tested("llama").context()
    once = context.polls_of(lambda: context.feed(0, 8))
    assert once > 1
    assert context.stopped(1, lambda: context.feed(8, 16)) == ABORTED
    assert context.polls == once + 1
    end = context.last() + 1
    assert context.stopped(once + 1, lambda: context.feed(end, end + 8)) == 0, "there is no such poll"


def test_each_sequence_has_its_own_text(tested: Callable[[str], ModelUnderTest]) -> None:
    context = tested("jamba").context(**TWO).filled({1: 6, 0: 8})
    assert context.last_of() == [7, 5]
    for seq, length in ((0, 8), (1, 6)):
        found = context.goes_on(length, seq, text=seq)
        assert isinstance(found, Gap)
        assert found.exact


def test_snapshot_is_restored(tested: Callable[[str], ModelUnderTest]) -> None:
    context = tested("jamba").context().grown(8)
    snapshot = context.save(flags=PARTIAL)
    assert context.feed(8, 12) == 0
    assert not context.rm(0, 8, -1), "a hybrid cannot forget"
    assert not context.goes_back(snapshot[:-8], 8)
    assert context.goes_back(snapshot, 8)
    found = context.goes_on(8)
    assert isinstance(found, Gap)
    assert found.exact


def test_decode_that_was_not_stopped_is_an_error(
    tested: Callable[[str], ModelUnderTest],
) -> None:
    context = tested("llama").context()
    polls = context.polls_of(lambda: context.feed(0, 8))
    stop(context, polls, 0.5, lambda: context.feed(8, 16))
    end = context.last() + 1
    with pytest.raises(RuntimeError, match="the decode was not stopped: it returned 0"):
        stop(context, polls, 2.0, lambda: context.feed(end, end + 8))
