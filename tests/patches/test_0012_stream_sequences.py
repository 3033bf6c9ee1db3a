"""0012: with a stream per sequence, a sequence that has none is empty and cannot be changed."""

from __future__ import annotations

from capi import SPLIT, Context, lib, on, sound


@on("llama", "qwen35", windowed=("gemma3", "lfm2"))
def test_a_sequence_without_a_stream_is_refused(path):
    context = Context(path, **SPLIT).grown(12)
    context.cp(0, 5)
    context.cp(5, 0)
    lib.llama_memory_seq_add(context.memory, 5, 0, -1, 3)
    lib.llama_memory_seq_div(context.memory, 5, 0, -1, 3)
    assert not context.rm(5, -1, -1)
    assert not context.rm(5, 3, 5)
    assert not context.read(context.save(), 5)
    assert (context.first(5), context.last(5)) == (-1, -1)
    assert sound(context, 12)


@on("llama")
def test_keeping_a_sequence_without_a_stream_changes_nothing(path):
    context = Context(path, **SPLIT).grown(12)
    lib.llama_memory_seq_keep(context.memory, 5)
    assert sound(context, 12)
