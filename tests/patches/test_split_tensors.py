"""Tensors that are split over devices are never host memory (`llama_io_in_host`, of 0018)."""

from __future__ import annotations

from contextlib import suppress

import pytest
from capi import FULL, PARTIAL, Context

from llamahybrid.harness.hazards.context import save_range
from llamahybrid.harness.hazards.outcome import NotApplicable


def split_states(path):
    """States of a context whose tensors are split over two devices: are they those of the whole model."""
    context = Context(path, flash_attn_type=1)
    assert context.feed(0, 40) == 0
    other = context.tested.split().context(flash_attn_type=1)
    assert other.load(context.save())
    same = [other.save(0, flags) == context.save(0, flags) for flags in (FULL, PARTIAL)]
    with suppress(NotApplicable):
        same.append(save_range(other, 10, 30) == save_range(context, 10, 30))
    return [*same, len(other.save_whole()) == len(context.save_whole())]


@pytest.mark.parametrize("arch", ["llama", "qwen35", "lfm2"])
def test_split_tensors_are_not_taken_for_host_memory(run_both, tiny_model, arch):
    """They have no address, even where both devices are the CPU."""
    assert set(run_both(split_states, tiny_model(arch))) == {True}
