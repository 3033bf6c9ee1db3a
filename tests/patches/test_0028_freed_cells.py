"""0028: NaN in attention KV goes with the sequence that had it."""

from __future__ import annotations

import ctypes

import cells
import numpy as np
import pytest
from capi import PARTIAL, SPLIT, TWO, Context, lib, on, sound

ARCHS = ("llama", "gemma3", "qwen35", "jamba", "qwen4exp")


def _with_nan(context: Context, seq: int, length: int) -> bytes:
    """The state of a sequence with NaN where the state of another text first has other values for long."""
    state = context.save(seq)
    other = Context(context.tested.path, **context.params)
    other.feed(0, length, seq, text=9)
    apart = np.frombuffer(state, np.uint8) != np.frombuffer(other.save(seq), np.uint8)
    share = np.convolve(apart, np.ones(256), "valid")
    place = int(np.argmax(share > 200)) + 64
    return state[:place] + b"\xff" * 128 + state[place + 128 :]


def _poison(context: Context, seq: int = 0, length: int = 40) -> None:
    """Decode tokens of a sequence after which its attention KV and its logits hold NaN."""
    context.feed(0, length - 1, seq)
    model = context.tested.model
    if lib.llama_model_is_hybrid(model):
        state = context.save(seq, PARTIAL)
        assert context.load(state[:-4000] + b"\xff" * 4000, seq, PARTIAL)
    else:
        assert context.load(_with_nan(context, seq, length - 1), seq)
    context.feed(length - 1, length, seq)
    assert not np.isfinite(context.logits()).all()


@on("dots3note", "deepseek32", "minimax-m3", "gemma4")
def test_nan_is_gone_with_the_tokens_of_a_model_with_an_indexer(path):
    context = Context(path, **TWO)
    _poison(context)
    assert context.rm(0, -1, -1)
    context.feed(0, 12, text=1)
    assert sound(context, 12, text=1)


@on(*ARCHS)
def test_nan_is_gone_when_all_is_removed(path):
    context = Context(path, **TWO)
    _poison(context)
    assert context.rm(-1, -1, -1), "which a hybrid refuses before 0005"
    context.feed(0, 12, text=1)
    assert sound(context, 12, text=1)


@on(*ARCHS)
def test_nan_is_gone_when_the_other_sequence_is_kept(path):
    context = Context(path, **TWO)
    context.feed(0, 12, 1)
    _poison(context)
    lib.llama_memory_seq_keep(context.memory, 1)
    assert sound(context, 12, 1)


@on(*ARCHS)
def test_nan_is_gone_when_a_shorter_state_is_restored(path):
    context, state = Context(path, **TWO), Context(path, **TWO).grown(12).save()
    _poison(context)
    assert context.load(state)
    assert sound(context, 12)


@on(*ARCHS)
def test_nan_is_gone_from_cells_that_come_into_view_later(path):
    context = Context(path, **TWO)
    _poison(context, length=300)
    assert context.rm(0, -1, -1)
    context.feed(0, 250, text=1)
    assert sound(context, 250, text=1)
    assert context.feed(251, 270, text=1, chunk=1) == 0
    assert sound(context, 270, text=1)


@on("llama", "qwen35")
def test_nan_does_not_come_with_a_copied_stream(path):
    """A copied stream brings the content of its source's free cells."""
    context = Context(path, **SPLIT)
    _poison(context)
    assert context.rm(0, -1, -1)
    context.grown(12)
    _poison(context, 1)
    assert context.rm(1, -1, -1)
    context.cp(0, 1)
    assert sound(context, 12)
    assert context.feed(12, 13, 1, text=0) == 0
    assert np.isfinite(context.logits()).all()


@pytest.mark.needs("0018")
@on("llama")
def test_a_whole_restore_does_not_take_all_cells_for_written(path):
    """Otherwise the next decode zeroes all free cells: most of its time in a large cache.

    Two cells that were never taken stay as they are, and a freed one is zeroed.
    """
    context = Context(path, n_seq_max=3, kv_unified=True, n_ctx=1024).grown(20)
    state = context.save_whole()
    assert context.feed(0, 12, 1) == 0
    mine = cells.of(context, 0, 20)
    freed = cells.of(context, 1, 12).begin + mine.row  # the first one takes the next token
    places = [mine.begin + 200 * mine.row, mine.begin + 1000 * mine.row, freed]
    ctypes.memset(places[0], 1, mine.row)
    ctypes.memset(places[1], 1, mine.row)
    assert any(ctypes.string_at(freed, mine.row))
    assert context.load_whole(state)
    assert context.feed(20, 21) == 0
    assert [not any(ctypes.string_at(place, mine.row)) for place in places] == [False, False, True]
