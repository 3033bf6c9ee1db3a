"""0018: states and ranges in pieces are those in one; a piece of a split tensor is whole rows."""

from __future__ import annotations

import ctypes

import more_models
import pytest
from capi import FULL, ON_DEVICE, PARTIAL, Context, fresh, function, split

from llamahybrid.harness.hazards.context import save_range
from llamahybrid.harness.hazards.effect import NotApplicable, gap

BUFFER = 1 << 20
TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
FLASH = {"flash_attn_type": 1}
"""Attention whose values are in rows: only those can be split."""


class Pieces:
    """Output of `llama_state_seq_write_ext` and `..._range`; the taker says stop beyond `most` bytes."""

    def __init__(self, context, most=1 << 40):
        self.context, self.most = context, most
        self.data, self.lengths = b"", []

    def state(self, flags=FULL, seq=0):
        """The bytes that it says to have written of a state."""
        return self._write("ext", ctypes.c_int32(seq), ctypes.c_uint32(flags))

    def range(self, begin, end):
        """The bytes that it says to have written of a range of sequence 0."""
        return self._write("range", *map(ctypes.c_int32, (0, begin, end)))

    def _write(self, name, *arguments):
        write = function(f"llama_state_seq_write_{name}", ctypes.c_size_t)
        return write(ctypes.c_void_p(self.context.ctx), *arguments, TAKE(self._take), None)

    def _take(self, data, size, _):
        if len(self.data) + size > self.most:
            return False
        self.data += ctypes.string_at(data, size)
        self.lengths.append(size)
        return True


def in_pieces(context, begin, end):
    """Assert that full and PARTIAL states and a range are the same in pieces; return the longest piece."""
    state, part, middle = Pieces(context), Pieces(context), Pieces(context)
    for pieces, flags in ((state, FULL), (part, PARTIAL)):
        assert pieces.state(flags) == len(pieces.data)
        assert pieces.data == context.save(flags=flags)
    assert len(state.lengths) > 2
    assert middle.range(begin, end) == len(middle.data)
    try:
        assert middle.data == save_range(context, begin, end)
    except NotApplicable:  # this memory has no ranges
        assert not middle.data
    return max(length for each in (state, part, middle) for length in each.lengths)


def state_in_pieces(path):
    context = Context(path)
    assert context.feed(0, 40) == 0
    return in_pieces(context, 10, 30)


@pytest.mark.parametrize("arch", ["qwen35", "jamba", "mamba", "gemma3", "llama"])
def test_state_in_pieces_is_the_state_in_one(run, tiny_model, arch):
    assert run(state_in_pieces, tiny_model(arch)) > 0


def pieces_ended(path):
    """Bytes of stopped and of impossible writes; whether the state stayed, and the context goes on."""
    context = Context(path)
    assert context.feed(0, 40) == 0
    before = context.save()
    written = [Pieces(context, most).state() for most in (0, 4, len(before) // 2, len(before) - 1)]
    written += [Pieces(context).state(seq=seq) for seq in (-7, 300)]
    written += [Pieces(context).state(ON_DEVICE), Pieces(context).range(30, 10)]
    assert context.save() == before
    assert context.feed(40, 41) == 0
    assert gap(context.logits(), fresh(path, 40)).exact
    return written


@pytest.mark.parametrize("arch", ["qwen35", "mamba", "llama"])
def test_stopped_and_impossible_writes_return_0_and_change_nothing(run, tiny_model, arch):
    assert run(pieces_ended, tiny_model(arch)) == [0] * 8


def split_in_pieces(path):
    """3,000 tokens on split tensors, one of which is longer than the buffer."""
    shape = {**FLASH, "n_ctx": 4096, "n_ubatch": 256}
    context = Context(path, **shape)
    assert context.feed(0, 3000) == 0
    other = split(context.tested).context(**shape)
    assert other.load(context.save())
    return in_pieces(other, 10, 2900)


@pytest.mark.parametrize("arch", ["qwen35", "llama", "lfm2"])
def test_piece_of_a_split_tensor_is_whole_rows(run, tiny_model, arch):
    """Rows of KV at this width do not fill the buffer."""
    assert run(split_in_pieces, tiny_model(arch, embd=192)) == 1048320


def long_rows(path):
    """States in pieces, with rows of a split tensor that do not fit the buffer."""
    context = Context(path, **FLASH)
    assert context.feed(0, 40) == 0
    other = split(context.tested).context(**FLASH)
    assert other.load(context.save())
    return in_pieces(other, 10, 30)


def test_a_row_that_is_longer_than_the_buffer_is_a_piece(run, tmp_path):
    assert run(long_rows, more_models.make_long_rows(tmp_path / "long.gguf")) == 2 * BUFFER
