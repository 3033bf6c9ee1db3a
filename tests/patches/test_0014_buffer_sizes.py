"""0014: the sizes of the backend buffers can be asked for in C."""

from __future__ import annotations

from ctypes import c_size_t, c_void_p

from capi import Context, function


def sizes(path):
    names = ("llama_get_memory_buffer_size", "llama_get_compute_buffer_size")
    found = [function(name, c_size_t, c_void_p) for name in names]
    contexts = [
        Context(path, n_ctx=cells, n_rs_seq=planes) for cells, planes in ((256, 0), (512, 0), (512, 4))
    ]
    states = [len(context.save()) for context in contexts[:1] if context.feed(0, 256) == 0]
    return [[size(context.ctx) for context in contexts] for size in found], states[0]


def test_memory_grows_with_cells_and_planes(run, tiny_model):
    ((small, wide, planes), compute), state = run(sizes, tiny_model("qwen35"))
    # a state of as many tokens as there are cells is the cells plus some words of metadata each
    assert small < state < 1.3 * small
    assert small < wide < planes
    assert all(size > 0 for size in compute)
