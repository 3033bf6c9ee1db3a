"""0033: what lies scattered over a cache in host memory is saved without a note for each value."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import heap
import pytest
from capi import EXACT, FULL, PARTIAL, Context, continued, lib

from llamahybrid.hazards.context import save_range
from llamahybrid.hazards.outcome import NotApplicable

SHARED = {"n_seq_max": 2, "kv_unified": True, "n_ctx": 1024}
TOKENS = 200


def of_two_by_turns(path):
    """A state whose cells take turns with another's: its bytes, what saving it took, and what it is worth."""
    context = Context(path, **SHARED)
    for position in range(TOKENS):
        for seq in (0, 1):
            assert context.feed(position, position + 1, seq) == 0
    state = (ctypes.c_uint8 * int(lib.llama_state_seq_get_size_ext(context.ctx, 1, FULL)))()
    written = []

    def save():
        written.append(lib.llama_state_seq_get_data_ext(context.ctx, state, len(state), 1, FULL))

    grown = heap.growth(save)
    assert written == [len(state)]
    other = Context(path, **SHARED)
    assert other.load(bytes(state), 1)
    return len(state), grown, continued(other, path, TOKENS, 1, **SHARED)


@pytest.mark.parametrize("arch", ["llama", "qwen35", "gemma3"])
def test_saving_scattered_cells_takes_no_memory_beside_the_state(run, tiny_model, arch):
    size, grown, apart = run(of_two_by_turns, tiny_model(arch))
    if grown is None:
        pytest.skip("the heap cannot be measured here")
    assert grown < size / 8
    assert apart < EXACT


def split_states(path):
    """States of a context whose tensors are split over two devices: are they those of the whole model."""
    context = Context(path, flash_attn_type=1)
    assert context.feed(0, 40) == 0
    other = context.bench.split().context(flash_attn_type=1)
    assert other.load(context.save())
    same = [other.save(0, flags) == context.save(0, flags) for flags in (FULL, PARTIAL)]
    with suppress(NotApplicable):
        same.append(save_range(other, 10, 30) == save_range(context, 10, 30))
    return [*same, len(other.save_whole()) == len(context.save_whole())]


@pytest.mark.parametrize("arch", ["llama", "qwen35", "lfm2"])
def test_split_tensors_are_not_taken_for_host_memory(run_both, tiny_model, arch):
    """They have no address, even where both devices are the CPU."""
    assert set(run_both(split_states, tiny_model(arch))) == {True}
