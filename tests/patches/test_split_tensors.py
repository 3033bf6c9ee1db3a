"""Tensors that are split over devices: their states, and restores that succeed or fail."""

from __future__ import annotations

from contextlib import suppress

import pytest
from capi import FULL, PARTIAL, Context, split

from llamahybrid.harness.hazards.context import load_range, save_range
from llamahybrid.harness.hazards.effect import NotApplicable

FLASH = {"flash_attn_type": 1}
CUTS = (40, 0.5, -100, -8, -1)
"""Ends of truncated states: bytes from the beginning or the end, or a part."""


def both(path):
    """Contexts that hold 40 tokens: on the whole model, and on tensors split over two devices."""
    context = Context(path, **FLASH)
    assert context.feed(0, 40) == 0
    other = split(context.tested).context(**FLASH)
    assert other.load(context.save())
    return context, other


def split_states(path):
    """Are the states of split tensors those of the whole model."""
    context, other = both(path)
    same = [other.save(0, flags) == context.save(0, flags) for flags in (FULL, PARTIAL)]
    with suppress(NotApplicable):
        same.append(save_range(other, 10, 30) == save_range(context, 10, 30))
    return [*same, len(other.save_whole()) == len(context.save_whole())]


@pytest.mark.parametrize("arch", ["llama", "qwen35", "lfm2"])
def test_split_tensors_are_not_taken_for_host_memory(run_both, tiny_model, arch):
    """They have no address (`llama_io_in_host`, of 0018), even where both devices are the CPU."""
    assert set(run_both(split_states, tiny_model(arch))) == {True}


def restored(path):
    """Do a PARTIAL state, a range, and the state after a removal come back byte for byte."""
    blob = (other := both(path)[1]).save()
    same = [other.load(other.save(flags=PARTIAL), flags=PARTIAL) and other.save() == blob]
    with suppress(NotApplicable):
        part = save_range(other, 10, 20)
        same.append(load_range(other, part, 10, 20) and save_range(other, 10, 20) == part)
    return [*same, other.rm(0, -1, -1) and other.load(blob) and other.save() == blob]


@pytest.mark.parametrize(("arch", "options"), [("llama", {}), ("qwen35", {}), ("gemma3", {"window": 16})])
def test_states_of_split_tensors_are_restored(run_both, tiny_model, arch, options):
    assert set(run_both(restored, tiny_model(arch, **options))) == {True}


def failed(path):
    """Bytes that restores of truncated states of others read; the live state stays, or is dropped whole."""
    other = both(path)[1]
    before, donor = other.save(), Context(path, **FLASH)
    assert donor.feed(0, 30, text=1) == 0
    read = []
    for flags in (FULL, PARTIAL):
        state = donor.save(flags=flags)
        ends = [int(cut * len(state)) if isinstance(cut, float) else cut for cut in CUTS]
        read += [other.read(state[:end], flags=flags) for end in ends]
        assert other.save() == before or other.last() < 0
    return read


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_truncated_state_over_split_tensors_is_refused(run_both, tiny_model, arch):
    assert run_both(failed, tiny_model(arch)) == [0] * 10
