"""0015: attention KV of a token range can be saved and restored, apart from recurrent state and windows."""

from __future__ import annotations

import heap
import pytest
from capi import PARTIAL, Context, NotApplicable, load_range, on, save_range, sound


@on("qwen35", "jamba", "falcon-h1", "llama", "gemma3")
def test_a_switch_through_ranges_is_exact(path):
    donor = Context(path).grown(40)
    parts = [(a, b, save_range(donor, a, b)) for a, b in ((10, 25), (25, 40))]
    snapshot = donor.save(flags=PARTIAL)
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.grown(10)
    assert context.feed(10, 60, text=3) == 0
    apart = len(snapshot) < len(donor.save())  # plain attention has nothing beside its cells
    if apart:
        context.load(nothing, flags=PARTIAL)
    assert context.rm(0, 10, -1)
    assert all(load_range(context, blob, a, b) for a, b, blob in parts)
    assert not apart or context.load(snapshot, flags=PARTIAL)
    assert sound(context, 40)


@on("qwen35", "llama")
def test_a_damaged_or_foreign_range_changes_nothing(path):
    context = Context(path).grown(40)
    blob, before = save_range(context, 10, 25), context.save()
    load_range(context, b"", 10, 25)
    assert not any(load_range(context, blob[:cut], 10, 25) for cut in (2, 6, 40, len(blob) - 1))
    others = ((0, 15), (10, 20), (25, 10), (-1, 25), (25, 40))
    assert not any(load_range(context, blob, a, b) for a, b in others)
    assert not load_range(context, before, 0, 40)
    assert len(save_range(context, 50, 60)) <= 64
    assert context.save() == before
    assert sound(context, 40)


@on("mamba")
def test_a_recurrent_memory_has_no_ranges(path):
    context = Context(path).grown(40)
    with pytest.raises(NotApplicable, match="this memory has no ranges"):
        save_range(context, 0, 40)
    assert sound(context, 40)


@on("llama")
def test_range_is_set_without_copying_other_cells(path):
    context, _ = heap.filled(path)
    blob = save_range(context, 128, 192)
    assert load_range(context, blob, 128, 192)
    before = context.save()
    assert heap.growth(lambda: load_range(context, blob, 128, 192)) < heap.LEAST_COPY
    assert not load_range(context, blob[:-1], 128, 192)
    assert not load_range(context, blob, 128, 160)
    assert context.save() == before
