"""Tensors that are split over devices: their states, and restores that succeed or fail."""

from __future__ import annotations

from contextlib import suppress

import pytest
from capi import FLASH, FULL, PARTIAL, Context, NotApplicable, load_range, on, save_range, split

pytestmark = pytest.mark.right_on_stock
CUTS = (40, 0.5, -100, -8, -1)
"""Ends of truncated states: bytes from the beginning or the end, or a part."""


def both(path):
    """Contexts that hold 40 tokens: on the whole model, and on tensors split over two devices."""
    context = Context(path, **FLASH).grown(40)
    other = split(context.tested).context(**FLASH)
    assert other.load(context.save())
    return context, other


@on("llama", "qwen35", "lfm2")
def test_split_tensors_are_not_taken_for_host_memory(path):
    """They have no address (`llama_io_in_host`, of 0018), even where both devices are the CPU."""
    context, other = both(path)
    for flags in (FULL, PARTIAL):
        assert other.save(0, flags) == context.save(0, flags)
    with suppress(NotApplicable):
        assert save_range(other, 10, 30) == save_range(context, 10, 30)
    assert len(other.save_whole()) == len(context.save_whole())


@on("llama", "qwen35", windowed=("gemma3",))
def test_states_of_split_tensors_are_restored(path):
    """A PARTIAL state, a range, and the state after a removal come back byte for byte."""
    blob = (other := both(path)[1]).save()
    assert other.load(other.save(flags=PARTIAL), flags=PARTIAL)
    assert other.save() == blob
    with suppress(NotApplicable):
        part = save_range(other, 10, 20)
        assert load_range(other, part, 10, 20)
        assert save_range(other, 10, 20) == part
    assert other.rm(0, -1, -1)
    assert other.load(blob)
    assert other.save() == blob


@on("llama", "qwen35")
def test_truncated_state_over_split_tensors_is_refused(path):
    """The live state stays, or is dropped whole."""
    other = both(path)[1]
    before, donor = other.save(), Context(path, **FLASH).grown(30, text=1)
    for flags in (FULL, PARTIAL):
        state = donor.save(flags=flags)
        for cut in CUTS:
            end = int(cut * len(state)) if isinstance(cut, float) else cut
            assert other.read(state[:end], flags=flags) == 0
        assert other.save() == before or other.last() < 0
