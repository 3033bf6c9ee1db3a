"""0027: an empty sequence's state from a file, and of a hybrid; the rest is in the hazard catalogue."""

from __future__ import annotations

import ctypes

import pytest
from capi import EXACT, PARTIAL, Context, continued, lib

SHARED = {"n_seq_max": 2, "kv_unified": True}


def emptied_from_file(path):
    context = Context(path, **SHARED)
    context.feed(0, 12)
    name = f"{path}.empty".encode()
    assert lib.llama_state_seq_save_file(context.ctx, name, 1, None, 0)
    count, tokens = ctypes.c_size_t(), (ctypes.c_int32 * 1)()
    assert lib.llama_state_seq_load_file(context.ctx, name, 0, tokens, 1, count)
    return context.ends()


def recurrent_part_dropped(path):
    """Load the PARTIAL state of an empty sequence into a hybrid: attention stays, byte for byte."""
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.feed(0, 12)
    snapshot, whole = context.save(flags=PARTIAL), context.save()
    assert context.load(nothing, flags=PARTIAL)
    assert context.load(snapshot, flags=PARTIAL)
    return context.save() == whole, continued(context, path, 12)


def test_an_empty_state_from_a_file_empties_the_sequence(run, tiny_model):
    assert run(emptied_from_file, tiny_model("llama")) == [-1, -1]


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "falcon-h1", "lfm2"])
def test_hybrid_loses_only_its_recurrent_part(run_both, tiny_model, arch):
    same, off = run_both(recurrent_part_dropped, tiny_model(arch))
    assert same
    assert off < EXACT
