"""0007: a sequence id out of range, a partial copy between streams and a shift that cannot be are refused."""

from __future__ import annotations

import pytest
from capi import EXACT, Context, continued, lib

SPLIT = {"n_seq_max": 2, "kv_unified": False}


def position_of_all(path):
    return Context(path).ends(-1)


def state_into_a_far_sequence(path):
    context = Context(path)
    context.feed(0, 12)
    return context.read(context.save(), 300)


def everything_by_any_negative_id(path):
    context = Context(path)
    context.feed(0, 12)
    return context.rm(-7, -1, -1), context.ends(0)


def copy_to_a_far_sequence(path):
    context = Context(path)
    context.feed(0, 12)
    context.cp(0, 300)
    lib.llama_memory_seq_keep(context.memory, -3)
    return continued(context, path, 12)


def partial_copy_between_streams(path):
    context = Context(path, **SPLIT)
    context.feed(0, 12)
    context.cp(0, 1, 2, 5)
    return context.ends(1), continued(context, path, 12, **SPLIT)


def shift_of_an_unshiftable(path):
    context = Context(path)
    context.feed(0, 12)
    lib.llama_memory_seq_add(context.memory, 0, 0, -1, 5)
    lib.llama_memory_seq_div(context.memory, 0, 0, -1, 2)
    return continued(context, path, 12)


def test_a_range_that_does_not_exist_is_empty(run, tiny_model):
    assert run(position_of_all, tiny_model("llama")) == [-1, -1]


def test_a_state_for_a_sequence_that_cannot_be_is_refused(run, tiny_model):
    assert run(state_into_a_far_sequence, tiny_model("qwen35")) == 0


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_any_negative_id_means_all(run, tiny_model, arch):
    assert run(everything_by_any_negative_id, tiny_model(arch)) == [True, [-1, -1]]


def test_a_far_copy_changes_nothing(run, tiny_model):
    assert run(copy_to_a_far_sequence, tiny_model("llama")) < EXACT


def test_a_partial_copy_between_streams_changes_nothing(run, tiny_model):
    copied, off = run(partial_copy_between_streams, tiny_model("llama"))
    assert copied == [-1, -1]
    assert off < EXACT


def test_a_shift_under_m_rope_changes_nothing(run, tiny_model):
    assert run(shift_of_an_unshiftable, tiny_model("qwen35")) < EXACT
