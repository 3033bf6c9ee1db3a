"""0010: pending stream copies and shifts are carried out before a state is saved or restored."""

from __future__ import annotations

import pytest
from capi import EXACT, Context, continued, difference, fresh, lib

SPLIT = {"n_seq_max": 2, "kv_unified": False}


def saved_copy(path):
    context = Context(path, **SPLIT)
    context.feed(0, 12)
    context.cp(0, 1)
    blob = context.save(1)
    other = Context(path, **SPLIT)
    assert other.load(blob, 1)
    assert other.feed(12, 13, 1, text=0) == 0
    return difference(other.logits(), fresh(path, 12))


def restored_below_a_copy(path):
    donor = Context(path, **SPLIT)
    donor.feed(0, 12, 1)
    blob = donor.save(1)
    context = Context(path, **SPLIT)
    context.feed(0, 12)
    context.cp(0, 1)
    context.rm(1, -1, -1)
    assert context.load(blob, 1)
    return continued(context, path, 12, 1, **SPLIT)


def saved_shift(path):
    context = Context(path)
    context.feed(0, 12)
    lib.llama_memory_seq_add(context.memory, 0, 0, -1, 5)
    blob = context.save()
    other = Context(path)
    assert other.load(blob)
    for each in (context, other):
        assert each.feed(17, 18, text=0) == 0
    return difference(other.logits(), context.logits())


@pytest.mark.parametrize("probe", [saved_copy, restored_below_a_copy])
@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_copy_between_streams_is_made_first(run, tiny_model, probe, arch):
    assert run(probe, tiny_model(arch)) < EXACT


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_shift_is_made_first(run, tiny_model, arch):
    assert run(saved_shift, tiny_model(arch)) < EXACT
