"""0017: what is copied into a sequence takes the place of what it holds at these positions."""

from __future__ import annotations

import heap
import pytest
from capi import EXACT, Context, difference


def beside_many(path):
    """Copy tokens that both sequences have, then a few tokens onto many."""
    context, at = heap.filled(path)
    context.cp(0, 1)
    again = heap.growth(lambda: context.cp(0, 1))
    context.rm(1, -1, -1)
    end = heap.CELLS - 256
    assert context.load(at(end), 1)
    return again, heap.growth(lambda: context.cp(1, 0)), context.last(0) - end


def test_a_copy_allocates_for_what_it_replaces_only(run_both, tiny_model):
    again, little, last = run_both(beside_many, tiny_model("llama"))
    if again is None:
        pytest.skip("the heap cannot be measured here")
    assert again < heap.LEAST_COPY
    assert little < heap.LEAST_COPY
    assert last == 63


def interleaved(path):
    """Onto a sequence that has other tokens at some of these positions, shares others and lacks the rest."""
    shape = {"n_seq_max": 3, "kv_unified": True}
    context, plain = Context(path, **shape), Context(path, **shape)
    assert context.feed(0, 40) == plain.feed(0, 21) == 0
    context.cp(0, 1, 0, 8)
    assert context.feed(8, 12, seq=1, text=2) == 0
    context.cp(0, 1, 12, 16)
    assert context.feed(16, 30, seq=1, text=2) == 0
    context.cp(0, 1, 4, 20)
    left = len(context.save(1)) - len(plain.save())
    context.rm(1, 20, -1)
    assert context.feed(20, 21, seq=1, text=0) == 0
    sizes = len(context.save(1)) - len(plain.save()), len(context.save(0)) > len(plain.save())
    assert plain.rm(0, 20, -1)
    assert plain.feed(20, 21) == 0
    return difference(context.logits(), plain.logits()), left > 0, sizes


def test_interleaved_cells_are_replaced_one_by_one(run, tiny_model):
    apart, longer, sizes = run(interleaved, tiny_model("llama"))
    assert apart < EXACT
    assert longer
    assert sizes == [0, True]
