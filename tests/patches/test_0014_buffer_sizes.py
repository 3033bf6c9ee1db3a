"""0014: the sizes of the backend buffers can be asked for in C."""

from __future__ import annotations

import ctypes

from capi import Context, lib


def sizes(path):
    names = ("llama_get_memory_buffer_size", "llama_get_compute_buffer_size")
    found = [getattr(lib._lib, name, None) for name in names]
    if None in found:
        return []
    for function in found:
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_size_t
    contexts = [
        Context(path, n_ctx=cells, n_rs_seq=planes) for cells, planes in ((256, 0), (512, 0), (512, 4))
    ]
    states = [len(context.save()) for context in contexts[:1] if context.feed(0, 256) == 0]
    return [[function(context.ctx) for context in contexts] for function in found], states[0]


def test_memory_grows_with_cells_and_planes(run, tiny_model):
    answer = run(sizes, tiny_model("qwen35"))
    assert answer, "no such function"
    (small, wide, planes), compute = answer[0]
    # a state of as many tokens as there are cells is the cells plus some words of metadata each
    assert small < answer[1] < 1.3 * small
    assert small < wide < planes
    assert all(size > 0 for size in compute)
