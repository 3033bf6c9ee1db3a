"""0012: with a stream per sequence, a sequence that has none is empty and cannot be changed."""

from __future__ import annotations

import pytest
from capi import EXACT, Context, continued, lib

SPLIT = {"n_seq_max": 2, "kv_unified": False}


def far_sequence(path):
    context = Context(path, **SPLIT)
    context.feed(0, 12)
    context.cp(0, 5)
    context.cp(5, 0)
    lib.llama_memory_seq_add(context.memory, 5, 0, -1, 3)
    lib.llama_memory_seq_div(context.memory, 5, 0, -1, 3)
    said = [context.rm(5, -1, -1), context.rm(5, 3, 5), context.read(context.save(), 5), *context.ends(5)]
    return said, continued(context, path, 12, **SPLIT)


def keep_a_far_sequence(path):
    context = Context(path, **SPLIT)
    context.feed(0, 12)
    lib.llama_memory_seq_keep(context.memory, 5)
    return continued(context, path, 12, **SPLIT)


@pytest.mark.parametrize(
    ("arch", "window"), [("llama", None), ("gemma3", 16), ("qwen35", None), ("lfm2", 16)]
)
def test_a_sequence_without_a_stream_is_refused(run, tiny_model, arch, window):
    said, off = run(far_sequence, tiny_model(arch, window=window))
    assert said == [False, False, 0, -1, -1]
    assert off < EXACT


def test_keeping_a_sequence_without_a_stream_changes_nothing(run, tiny_model):
    assert run(keep_a_far_sequence, tiny_model("llama")) < EXACT
