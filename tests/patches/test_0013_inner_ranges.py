"""0013: a hybrid does not drop a part of the history that its recurrent state keeps."""

from __future__ import annotations

import pytest
from capi import EXACT, PARTIAL, Context, continued, lib


def from_the_middle(path):
    context = Context(path)
    context.feed(0, 12)
    removed = [context.rm(0, 2, 5), context.rm(0, 0, 5), context.rm(0, -1, 11)]
    nothing = [context.rm(0, 5, 5), context.rm(0, 5, 2), context.rm(0, 12, 40)]
    return removed, nothing, continued(context, path, 12)


def can_shift(path):
    return bool(lib.llama_memory_can_shift(Context(path).memory))


def attention_alone(path):
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    context.feed(12, 20)
    context.load(nothing, flags=PARTIAL)
    cut = context.rm(0, 12, 20)
    context.load(snapshot, flags=PARTIAL)
    return cut, continued(context, path, 12)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "lfm2"])
def test_an_inner_range_is_refused(run, tiny_model, arch):
    removed, nothing, off = run(from_the_middle, tiny_model(arch))
    assert removed == [False, False, False]
    assert nothing == [True, True, True]
    assert off < EXACT


def test_an_inner_range_is_refused_with_a_window(run, tiny_model):
    removed, _, off = run(from_the_middle, tiny_model("lfm2", window=16))
    assert removed == [False, False, False]
    assert off < EXACT


def test_a_hybrid_says_that_it_cannot_be_shifted(run, tiny_model):
    assert not run(can_shift, tiny_model("jamba"))


def test_attention_can_be_cut_while_the_state_is_out(run_both, tiny_model):
    cut, off = run_both(attention_alone, tiny_model("qwen35"))
    assert cut
    assert off < EXACT
