"""0013: a hybrid says that it cannot be shifted, and its attention alone can still be cut."""

from __future__ import annotations

from capi import Context, lib


def can_shift(path):
    return bool(lib.llama_memory_can_shift(Context(path).memory))


def test_hybrid_cannot_be_shifted(run, tiny_model):
    assert not run(can_shift, tiny_model("jamba"))
