"""0028: NaN in attention KV goes with the sequence that had it."""

from __future__ import annotations

import ctypes

import cells
import more_models
import numpy as np
import pytest
from capi import EXACT, PARTIAL, Context, continued, difference, fresh, lib

SHARED = {"n_seq_max": 2, "kv_unified": True}
SPLIT = {"n_seq_max": 2, "kv_unified": False}


def _with_nan(context: Context, seq: int, length: int) -> bytes:
    """The state of a sequence with NaN where the state of another text first has other values for long."""
    state = context.save(seq)
    other = Context(context.path, **context.params)
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


def continued_text(context: Context, path: str, length: int, text: int) -> float:
    """As `continued`, for sequence 0 with another text."""
    assert context.feed(length, length + 1, text=text) == 0
    return difference(context.logits(), fresh(path, length, text=text, **context.params))


def removed(path):
    context = Context(path, **SHARED)
    _poison(context)
    assert context.rm(0, -1, -1)
    context.feed(0, 12, text=1)
    return continued_text(context, path, 12, 1)


def all_removed(path):
    context = Context(path, **SHARED)
    _poison(context)
    if not context.rm(-1, -1, -1):
        return float("inf")  # a hybrid before 0005
    context.feed(0, 12, text=1)
    return continued_text(context, path, 12, 1)


def kept_the_other(path):
    context = Context(path, **SHARED)
    context.feed(0, 12, 1)
    _poison(context)
    lib.llama_memory_seq_keep(context.memory, 1)
    return continued(context, path, 12, 1, **SHARED)


def replaced(path):
    """A shorter state restored over the poisoned one."""
    context = Context(path, **SHARED)
    state = Context(path, **SHARED)
    state.feed(0, 12)
    _poison(context)
    assert context.load(state.save())
    return continued(context, path, 12, **SHARED)


def in_view_later(path):
    """The freed cell lies beyond what the next prompt has in view at first."""
    context = Context(path, **SHARED)
    _poison(context, length=300)
    assert context.rm(0, -1, -1)
    context.feed(0, 250, text=1)
    early = continued_text(context, path, 250, 1)
    for position in range(251, 270):
        assert context.feed(position, position + 1, text=1) == 0
    return max(early, continued_text(context, path, 270, 1))


def copied_stream(path):
    """A copied stream brings the content of its source's free cells."""
    context = Context(path, **SPLIT)
    _poison(context)
    assert context.rm(0, -1, -1)
    context.feed(0, 12)
    _poison(context, 1)
    assert context.rm(1, -1, -1)
    context.cp(0, 1)
    off = continued(context, path, 12, **SPLIT)
    assert context.feed(12, 13, 1, text=0) == 0
    return off, bool(np.isfinite(context.logits()).all())


ARCHS = ["llama", "gemma3", "qwen35", "jamba", "qwen4exp"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("probe", [all_removed, kept_the_other, replaced, in_view_later])
def test_nan_is_gone(run, tiny_model, probe, arch):
    assert run(probe, tiny_model(arch)) < EXACT


@pytest.mark.parametrize("arch", list(more_models.SPECS))
def test_nan_is_gone_with_an_indexer(run, more_model, arch):
    assert run(removed, more_model(arch)) < EXACT


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_nan_does_not_come_with_a_copied_stream(run, tiny_model, arch):
    off, finite = run(copied_stream, tiny_model(arch))
    assert off < EXACT
    assert finite


def zeroed_again(path):
    """Which cells the decode after a whole restore zeroes, of two that were never taken and a freed one."""
    if not cells.told():
        return None
    context = Context(path, n_seq_max=3, kv_unified=True, n_ctx=1024)
    assert context.feed(0, 20) == 0
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
    return [not any(ctypes.string_at(place, mine.row)) for place in places]


@pytest.mark.needs("0018")
def test_a_whole_restore_does_not_take_all_cells_for_written(run, tiny_model):
    """Otherwise the next decode zeroes all free cells: most of its time in a large cache."""
    assert run(zeroed_again, tiny_model("llama")) == [False, False, True]
