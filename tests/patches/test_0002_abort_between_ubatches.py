"""0002: a decode can be stopped between ubatches exactly; stopped inside one, it drops what it spoiled."""

from __future__ import annotations

import pytest
from capi import EXACT, PARTIAL, Context, continued

ABORTED = 2
HYBRID_AND_RECURRENT = ("qwen35", "jamba", "lfm2", "mamba")


def _polls(path: str, length: int, **params: object) -> int:
    """Polls of the abort callback while a fresh context decodes `length` tokens."""
    context = Context(path, **params)
    context.count_polls()
    context.feed(0, length)
    return context.polls


def between_ubatches(path):
    context = Context(path, n_ubatch=16)
    context.count_polls()
    context.stop_at = _polls(path, 16, n_ubatch=16) + 1
    status = context.feed(0, 48)
    readable = context.has_logits()
    context.stop_at = None
    return status, context.ends()[1], readable, continued(context, path, 16)


def before_anything(path):
    context = Context(path)
    context.feed(0, 12)
    context.count_polls()
    context.stop_at = 1
    status = context.feed(12, 20)
    context.stop_at = None
    return status, context.ends()[1], continued(context, path, 12)


def _stopped_inside(path: str, part: float, **params: object) -> tuple[Context, bytes]:
    """A context of 12 tokens that was stopped in the middle of the next one, and a snapshot from before."""
    context = Context(path, **params)
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    context.count_polls()
    context.feed(12, 13)
    context.load(snapshot, flags=PARTIAL)
    context.rm(0, 12, -1)
    context.stop_at = context.polls + int(context.polls * part)
    assert context.feed(12, 13) == ABORTED
    context.stop_at = None
    return context, snapshot


def inside(path):
    return [
        (context.ends()[1], context.feed(12, 13))
        for part in (0.1, 0.5, 0.97)
        for planes in (0, 4)
        for context, _ in [_stopped_inside(path, part, n_rs_seq=planes)]
    ]


def inside_then_restored(path):
    worst = 0.0
    for planes in (0, 4):
        context, snapshot = _stopped_inside(path, 0.5, n_rs_seq=planes)
        assert context.load(snapshot, flags=PARTIAL)
        assert context.rm(0, 12, -1)
        worst = max(worst, continued(context, path, 12))
    return worst


def with_a_bystander(path):
    shape = {"n_seq_max": 3, "kv_unified": True}
    outcomes = []
    for part in (0.1, 0.5, 0.97):
        context = Context(path, **shape)
        for seq in range(3):
            context.feed(0, 8, seq)
        context.count_polls()
        context.stop_at = int(_polls(path, 1) * part)
        assert context.decode([(5, 8, (0,)), (6, 8, (2,))]) == ABORTED
        context.stop_at = None
        outcomes.append(continued(context, path, 8, 1, **shape))
    return outcomes


def with_shared_tokens(path):
    context = Context(path, n_seq_max=2, kv_unified=True)
    context.count_polls()
    context.stop_at = _polls(path, 8) // 2
    assert context.decode([(position + 1, position, (0, 1)) for position in range(8)]) == ABORTED
    return context.ends(0), context.ends(1)


@pytest.mark.parametrize("arch", HYBRID_AND_RECURRENT)
def test_the_ubatches_before_the_stop_are_kept_exactly(run, tiny_model, arch):
    status, last, readable, off = run(between_ubatches, tiny_model(arch))
    assert (status, last, readable) == (ABORTED, 15, False)
    assert off < EXACT


def test_a_stop_that_is_already_there_costs_nothing(run, tiny_model):
    status, last, off = run(before_anything, tiny_model("qwen35"))
    assert (status, last) == (ABORTED, 11)
    assert off < EXACT


@pytest.mark.parametrize("arch", HYBRID_AND_RECURRENT)
def test_a_spoilt_state_is_not_decoded_on(run, tiny_model, arch):
    for last, status in run(inside, tiny_model(arch)):
        assert last == -1
        assert status < 0 or arch == "mamba"  # there nothing is left: an empty sequence may start anywhere
    assert run(inside_then_restored, tiny_model(arch)) < EXACT


def test_a_moved_bystander_is_exact_or_dropped(run, tiny_model):
    assert all(off is None or off < EXACT for off in run(with_a_bystander, tiny_model("qwen35")))


def test_every_sequence_of_a_shared_token_is_cleaned(run, tiny_model):
    assert run(with_shared_tokens, tiny_model("llama")) == [[-1, -1], [-1, -1]]
