"""0018: states and ranges in pieces are those in one; a piece of a split tensor is whole rows."""

from __future__ import annotations

import ctypes

from capi import (
    FLASH,
    FULL,
    ON_DEVICE,
    PARTIAL,
    Context,
    NotApplicable,
    function,
    on,
    save_range,
    sound,
    split,
)

BUFFER = 1 << 20
TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


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
        write.argtypes = None
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


def on_split_tensors(path, length, **shape):
    """A context on split tensors that holds so many tokens."""
    context = Context(path, **FLASH, **shape).grown(length)
    other = split(context.tested).context(**FLASH, **shape)
    assert other.load(context.save())
    return other


@on("qwen35", "jamba", "mamba", "gemma3", "llama")
def test_state_in_pieces_is_the_state_in_one(path):
    assert in_pieces(Context(path).grown(40), 10, 30) > 0


@on("qwen35", "mamba", "llama")
def test_stopped_and_impossible_writes_return_0_and_change_nothing(path):
    context = Context(path).grown(40)
    before = context.save()
    assert not any(Pieces(context, most).state() for most in (0, 4, len(before) // 2, len(before) - 1))
    assert not any(Pieces(context).state(seq=seq) for seq in (-7, 300))
    assert not Pieces(context).state(ON_DEVICE)
    assert not Pieces(context).range(30, 10)
    assert context.save() == before
    assert sound(context, 40)


@on("qwen35", "llama", "lfm2", embd=192)
def test_piece_of_a_split_tensor_is_whole_rows(path):
    """One tensor is longer than the buffer, which rows of KV at this width do not fill."""
    assert in_pieces(on_split_tensors(path, 3000, n_ctx=4096, n_ubatch=256), 10, 2900) == 1048320


@on("long-rows")
def test_a_row_that_is_longer_than_the_buffer_is_a_piece(path):
    assert in_pieces(on_split_tensors(path, 40), 10, 30) == 2 * BUFFER
