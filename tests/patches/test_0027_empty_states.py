"""0027: an empty sequence's state from a file, and of a hybrid; the rest is in the hazard catalogue."""

from __future__ import annotations

import ctypes

import pytest
from capi import PARTIAL, TWO, Context, lib, on, sound


@on("llama")
def test_an_empty_state_from_a_file_empties_the_sequence(path):
    context = Context(path, **TWO).grown(12)
    name = f"{path}.empty".encode()
    assert lib.llama_state_seq_save_file(context.ctx, name, 1, None, 0)
    count, tokens = ctypes.c_size_t(), (ctypes.c_int32 * 1)()
    assert lib.llama_state_seq_load_file(context.ctx, name, 0, tokens, 1, count)
    assert (context.first(), context.last()) == (-1, -1)


@pytest.mark.right_on_stock
@on("qwen35", "jamba", "falcon-h1", "lfm2")
def test_hybrid_loses_only_its_recurrent_part(path):
    """The PARTIAL state of an empty sequence leaves attention, byte for byte."""
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.grown(12)
    snapshot, whole = context.save(flags=PARTIAL), context.save()
    assert context.load(nothing, flags=PARTIAL)
    assert context.load(snapshot, flags=PARTIAL)
    assert context.save() == whole
    assert sound(context, 12)
