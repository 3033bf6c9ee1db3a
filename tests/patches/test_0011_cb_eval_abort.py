"""0011: an eval callback that says stop ends the decode as aborted, not as done."""

from __future__ import annotations

import ctypes

import pytest
from capi import EXACT, PARTIAL, Context, continued, lib

ABORTED = 2
Evaluate = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def stopped_by_the_callback(path):
    seen, stop_at = 0, 0

    @Evaluate
    def evaluate(_tensor, ask, _user):
        nonlocal seen
        seen += not ask
        return ask or not stop_at or seen < stop_at

    context = Context(path, cb_eval=ctypes.cast(evaluate, lib.ggml_backend_sched_eval_callback))
    context.feed(0, 12)
    snapshot = context.save(flags=PARTIAL)
    stop_at = seen + seen // 2
    status = context.feed(12, 13)
    stop_at = 0
    context.load(snapshot, flags=PARTIAL)
    return status, continued(context, path, 12)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "llama"])
def test_it_is_an_abort(run, tiny_model, arch):
    status, off = run(stopped_by_the_callback, tiny_model(arch))
    assert status == ABORTED
    assert off < EXACT
