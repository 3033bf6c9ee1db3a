"""0014: the sizes of the backend buffers can be asked for in C."""

from __future__ import annotations

from ctypes import c_size_t, c_void_p

from capi import Context, function, on


@on("qwen35")
def test_memory_grows_with_cells_and_planes(path):
    memory = function("llama_get_memory_buffer_size", c_size_t, c_void_p)
    compute = function("llama_get_compute_buffer_size", c_size_t, c_void_p)
    sizes = ((256, 0), (512, 0), (512, 4))
    contexts = [Context(path, n_ctx=cells, n_rs_seq=planes) for cells, planes in sizes]
    small, wide, planes = (memory(context.ctx) for context in contexts)
    # a state of as many tokens as there are cells is the cells plus some words of metadata each
    assert small < len(contexts[0].grown(256).save()) < 1.3 * small
    assert small < wide < planes
    assert all(compute(context.ctx) > 0 for context in contexts)
