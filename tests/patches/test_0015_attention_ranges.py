"""0015: attention KV of a token range can be saved and restored, apart from recurrent state and windows."""

from __future__ import annotations

from ctypes import c_int32, c_size_t, c_void_p, create_string_buffer, string_at

import heap
import pytest
from capi import EXACT, PARTIAL, Context, continued, function


class Ranges:
    """The functions that 0015 adds, bound to a context."""

    def __init__(self, context: Context) -> None:
        self.ctx = context.ctx
        place, bytes_of = [c_int32] * 3, (c_void_p, c_void_p, c_size_t)
        self._size = function("llama_state_seq_get_size_range", c_size_t, c_void_p, *place)
        self._get = function("llama_state_seq_get_data_range", c_size_t, *bytes_of, *place)
        self._set = function("llama_state_seq_set_data_range", c_size_t, *bytes_of, *place)

    def save(self, begin: int, end: int) -> bytes:
        size = self._size(self.ctx, 0, begin, end)
        buffer = create_string_buffer(max(size, 1))
        return string_at(buffer, self._get(self.ctx, buffer, size, 0, begin, end))

    def load(self, blob: bytes, begin: int, end: int) -> int:
        return int(self._set(self.ctx, blob, len(blob), 0, begin, end))


def switched(path):
    donor = Context(path)
    donor.feed(0, 40)
    parts = [(a, b, Ranges(donor).save(a, b)) for a, b in ((10, 25), (25, 40))]
    snapshot = donor.save(flags=PARTIAL)
    context = Context(path)
    nothing = context.save(flags=PARTIAL)
    context.feed(0, 10)
    context.feed(10, 60, text=3)
    apart = len(snapshot) < len(donor.save())  # plain attention has nothing beside its cells
    if apart:
        context.load(nothing, flags=PARTIAL)
    assert context.rm(0, 10, -1)
    read = [Ranges(context).load(blob, a, b) == len(blob) for a, b, blob in parts]
    if apart:
        read.append(context.load(snapshot, flags=PARTIAL))
    return all(read), continued(context, path, 40)


def damaged(path):
    context = Context(path)
    context.feed(0, 40)
    ranges = Ranges(context)
    blob, before = ranges.save(10, 25), context.save()
    read = [ranges.load(blob[:cut], 10, 25) for cut in (0, 2, 6, 40, len(blob) - 1)]
    read += [ranges.load(blob, a, b) for a, b in ((0, 15), (10, 20), (25, 10), (-1, 25), (25, 40))]
    read += [ranges.load(before, 0, 40), len(ranges.save(50, 60)) > 64]
    return sum(read), context.save() == before, continued(context, path, 40)


def without_cells(path):
    context = Context(path)
    context.feed(0, 40)
    return len(Ranges(context).save(0, 40)), continued(context, path, 40)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "falcon-h1", "llama", "gemma3"])
def test_a_switch_through_ranges_is_exact(run, tiny_model, arch):
    read, off = run(switched, tiny_model(arch))
    assert read
    assert off < EXACT


@pytest.mark.parametrize("arch", ["qwen35", "llama"])
def test_a_damaged_or_foreign_range_changes_nothing(run, tiny_model, arch):
    read, same, off = run(damaged, tiny_model(arch))
    assert read == 0
    assert same
    assert off < EXACT


def test_a_recurrent_memory_has_no_ranges(run, tiny_model):
    size, off = run(without_cells, tiny_model("mamba"))
    assert size == 0
    assert off < EXACT


def beside_many(path):
    context, _ = heap.filled(path)
    ranges = Ranges(context)
    blob = ranges.save(128, 192)
    assert ranges.load(blob, 128, 192) == len(blob)
    before = context.save()
    grown = heap.growth(lambda: ranges.load(blob, 128, 192))
    refused = ranges.load(blob[:-1], 128, 192) + ranges.load(blob, 128, 160)
    return grown, refused, context.save() == before


def test_range_is_set_without_copying_other_cells(run, tiny_model):
    grown, refused, same = run(beside_many, tiny_model("llama"))
    if grown is None:
        pytest.skip("the heap cannot be measured here")
    assert grown < heap.LEAST_COPY
    assert refused == 0
    assert same
