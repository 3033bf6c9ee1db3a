"""0009: a restore copies what it replaces only; what a failed one leaves is in the hazard catalogue."""

from __future__ import annotations

import heap
import pytest


def beside_many(path):
    """A small state over a small one, beside many cells of another sequence."""
    context, at = heap.filled(path)
    state = at(heap.CELLS)

    assert context.load(state, 1)
    return heap.growth(lambda: context.load(state, 1)), context.last(1) - heap.CELLS


def test_restore_copies_only_its_own_cells(run_both, tiny_model):
    grown, last = run_both(beside_many, tiny_model("llama"))
    if grown is None:
        pytest.skip("the heap cannot be measured here")
    assert grown < heap.LEAST_COPY
    assert last == 63
