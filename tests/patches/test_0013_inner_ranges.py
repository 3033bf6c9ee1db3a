"""0013: a hybrid says that it cannot be shifted, and its attention alone can still be cut."""

from __future__ import annotations

from capi import Context, lib, on


@on("jamba")
def test_hybrid_cannot_be_shifted(path):
    assert not lib.llama_memory_can_shift(Context(path).memory)
