"""0003: a hybrid whose attention and recurrent state end at different positions is not decoded with."""

from __future__ import annotations

import pytest
from capi import PARTIAL, Context


def snapshot_into_empty_attention(path):
    context = Context(path)
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    empty = Context(path)
    empty.load(snapshot, flags=PARTIAL)
    return empty.feed(12, 13)


def recurrent_part_lost(path):
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.feed(0, 12)
    context.load(nothing, flags=PARTIAL)
    again = context.feed(0, 12)
    assert context.rm(0, -1, -1)
    return again, context.feed(0, 12)


def test_a_snapshot_without_its_attention_is_refused(run, tiny_model):
    assert run(snapshot_into_empty_attention, tiny_model("qwen35")) < 0


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "falcon-h1", "lfm2"])
def test_attention_without_its_state_is_refused_until_removed(run, tiny_model, arch):
    torn, removed = run(recurrent_part_lost, tiny_model(arch))
    assert torn < 0
    assert removed == 0


def test_the_windowed_hybrid_is_guarded_too(run, tiny_model):
    torn, removed = run(recurrent_part_lost_with_a_window, tiny_model("lfm2", window=16))
    assert torn < 0
    assert removed == 0


def recurrent_part_lost_with_a_window(path):
    """As above, for a PARTIAL snapshot that holds the window too: only its last part is cut off."""
    context = Context(path)
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    context.load(snapshot[:-8], flags=PARTIAL)
    again = context.feed(0, 12)
    assert context.rm(0, -1, -1)
    return again, context.feed(0, 12)
