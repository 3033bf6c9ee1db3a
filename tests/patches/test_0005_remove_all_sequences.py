"""0005: sequence -1 means all sequences in `llama_memory_seq_rm` on recurrent and hybrid memory too."""

from __future__ import annotations

import pytest
from capi import EXACT, Context, continued

TWO = {"n_seq_max": 2, "kv_unified": True}


def everything(path):
    context = Context(path, **TWO)
    for seq in range(2):
        context.feed(0, 12, seq)
    removed = context.rm(-1, -1, -1)
    ends = context.ends(0), context.ends(1)
    context.feed(0, 12, 1)
    return removed, ends, continued(context, path, 12, 1, **TWO)


def nothing_and_a_part(path):
    context = Context(path, **TWO)
    for seq in range(2):
        context.feed(0, 12, seq)
    answers = [context.rm(-1, begin, end) for begin, end in ((12, -1), (5, 5), (6, -1), (0, 6))]
    return answers, max(continued(context, path, 12, seq, **TWO) for seq in range(2))


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_all_sequences_are_removed(run, tiny_model, arch):
    removed, ends, off = run(everything, tiny_model(arch))
    assert removed
    assert ends == [[-1, -1], [-1, -1]]
    assert off < EXACT


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_only_all_or_nothing_can_be_removed(run, tiny_model, arch):
    answers, off = run(nothing_and_a_part, tiny_model(arch))
    assert answers == [True, True, False, False]
    assert off < EXACT
