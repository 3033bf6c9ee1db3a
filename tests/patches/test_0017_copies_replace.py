"""0017: what is copied into a sequence takes the place of what it holds at these positions."""

from __future__ import annotations

import heap
import pytest
from capi import Context, gap, on


@pytest.mark.right_on_stock
@on("llama")
def test_a_copy_allocates_for_what_it_replaces_only(path):
    """Copy tokens that both sequences have, then a few tokens onto many."""
    context, at = heap.filled(path)
    context.cp(0, 1)
    assert heap.growth(lambda: context.cp(0, 1)) < heap.LEAST_COPY
    context.rm(1, -1, -1)
    end = heap.CELLS - 256
    assert context.load(at(end), 1)
    assert heap.growth(lambda: context.cp(1, 0)) < heap.LEAST_COPY
    assert context.last(0) - end == 63


@on("llama")
def test_interleaved_cells_are_replaced_one_by_one(path):
    """Onto a sequence that has other tokens at some of these positions, shares others and lacks the rest."""
    shape = {"n_seq_max": 3, "kv_unified": True}
    context, plain = Context(path, **shape).grown(40), Context(path, **shape).grown(21)
    context.cp(0, 1, 0, 8)
    assert context.feed(8, 12, seq=1, text=2) == 0
    context.cp(0, 1, 12, 16)
    assert context.feed(16, 30, seq=1, text=2) == 0
    context.cp(0, 1, 4, 20)
    assert len(context.save(1)) > len(plain.save())
    context.rm(1, 20, -1)
    assert context.feed(20, 21, seq=1, text=0) == 0
    assert len(context.save(1)) == len(plain.save()) < len(context.save(0))
    assert plain.rm(0, 20, -1)
    assert plain.feed(20, 21) == 0
    assert gap(context.logits(), plain.logits()).exact
