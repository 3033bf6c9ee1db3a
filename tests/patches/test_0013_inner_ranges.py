"""0013: a hybrid says that it cannot be shifted, and its attention alone can still be cut."""

from __future__ import annotations

from capi import EXACT, PARTIAL, Context, continued, lib


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


def test_a_hybrid_says_that_it_cannot_be_shifted(run, tiny_model):
    assert not run(can_shift, tiny_model("jamba"))


def test_attention_can_be_cut_while_the_recurrent_state_is_removed(run_both, tiny_model):
    cut, off = run_both(attention_alone, tiny_model("qwen35"))
    assert cut
    assert off < EXACT
