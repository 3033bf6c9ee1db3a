"""0009: a restore copies what it replaces only; what a failed one leaves is in the hazard catalogue."""

from __future__ import annotations

import heap
import pytest
from capi import on


@pytest.mark.right_on_stock
@on("llama")
def test_restore_copies_only_its_own_cells(path):
    """A small state over a small one, beside many cells of another sequence."""
    context, at = heap.filled(path)
    state = at(heap.CELLS)
    assert context.load(state, 1)
    assert heap.growth(lambda: context.load(state, 1)) < heap.LEAST_COPY
    assert context.last(1) - heap.CELLS == 63
