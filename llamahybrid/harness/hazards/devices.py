"""Tensors split over several devices, and states written in pieces.

The CPU serves as two devices, which hold such tensors but cannot compute with them: states come from a
context on the whole model, and bytes are compared, because nothing can be decoded on the split one. Copies of
tensors inside the library (stream copies, a resize of planes, ON_DEVICE) need real devices:
ggml_backend_tensor_copy (ggml-backend.cpp) takes split tensors for plain host memory where both parts are.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import FULL, ON_DEVICE, PARTIAL, Context, load_range, save_range
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.outcome import NotApplicable, Outcome, Verdict, all_sound, wrong
from llamahybrid.harness.hazards.steps import still_there

_TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_SPLIT = {"flash_attn_type": 1}
"""Attention whose values are in rows: only those can be split."""
_WIDE = 192
"""An embedding whose rows of KV do not fill the buffer of 1 MiB that states go through."""


class _Pieces:
    """Output of `llama_state_seq_write_ext` and `..._range`. Raises NotApplicable if they are missing."""

    def __init__(self, context: Context, most: int = 1 << 40) -> None:
        self.context, self.most = context, most
        self.data = b""
        self.lengths: list[int] = []

    def state(self, flags: int = FULL, seq: int = 0) -> int:
        """The bytes that it says to have written of a state."""
        return self._call("ext", ctypes.c_int32(seq), ctypes.c_uint32(flags))

    def range(self, begin: int, end: int) -> int:
        """The bytes that it says to have written of a range of sequence 0."""
        return self._call("range", ctypes.c_int32(0), ctypes.c_int32(begin), ctypes.c_int32(end))

    def _call(self, name: str, *arguments: Any) -> int:
        function = getattr(lib._lib, f"llama_state_seq_write_{name}", None)
        if function is None:
            raise NotApplicable("the library has no functions for states in pieces")
        function.restype = ctypes.c_size_t
        return int(function(ctypes.c_void_p(self.context.ctx), *arguments, _TAKE(self._take), None))

    def _take(self, data: int, size: int, _: object) -> bool:
        if len(self.data) + size > self.most:
            return False
        self.data += ctypes.string_at(data, size)
        self.lengths.append(size)
        return True


def _in_pieces(context: Context, begin: int, end: int) -> Outcome:
    """Compare full and PARTIAL states and a range, in pieces, with the same in one."""
    longest = 0
    for flags in (FULL, PARTIAL, None):
        pieces = _Pieces(context)
        if flags is None:
            written, said = pieces.range(begin, end), f"range [{begin}, {end})"
            try:
                whole = save_range(context, begin, end)
            except NotApplicable:
                whole = b""
        else:
            written, said = pieces.state(flags), f"state with flags {flags}"
            whole = context.save(flags=flags)
        if (written, pieces.data) != (len(whole), whole):
            return wrong(f"{said}: {written} bytes in pieces are not the {len(whole)} in one")
        if flags == FULL and len(pieces.lengths) < 3:
            return wrong(f"{said}: {written} bytes came in {len(pieces.lengths)} pieces")
        longest = max(longest, *pieces.lengths, 0)
    return Outcome(Verdict.EXACT, f"the same bytes in pieces of at most {longest}")


@probe("A state and a range handed out in pieces", "llama_context::state_seq_get_data")
def state_in_pieces(tested: ModelUnderTest) -> Outcome:
    """Forty tokens; compare their full and PARTIAL states and the range [10, 30) with the same in pieces."""
    outcome = _in_pieces(tested.context().grown(40), 10, 30)
    exact = outcome.verdict is Verdict.EXACT  # how long the pieces are depends on the model
    return replace(outcome, detail="the same bytes in pieces") if exact else outcome


@probe("A state in pieces whose taker says stop, and one that cannot be", "llama_context::state_seq_get_data")
def pieces_ended(tested: ModelUnderTest) -> Outcome:
    """Forty tokens; stop at once, early, half-way, before the last byte; ask for impossible ones; go on.

    Impossible are the sequences -7 and 300, a state ON_DEVICE and the range [30, 10).
    """
    context = tested.context().grown(40)
    before = context.save()
    written = [_Pieces(context, most).state() for most in (0, 4, len(before) // 2, len(before) - 1)]
    written += [_Pieces(context).state(seq=seq) for seq in (-7, 300)]
    written += [_Pieces(context).state(ON_DEVICE), _Pieces(context).range(30, 10)]
    said = f"the calls returned {written}"
    return wrong(said) if any(written) else still_there(context, before, 40, said)


def _split(tested: ModelUnderTest, length: int, **params: Any) -> tuple[Context, bytes]:
    """A context on split tensors that holds `length` tokens, and their state."""
    blob = tested.context(**_SPLIT, **params).grown(length, text=1).save()
    context = tested.split().context(**_SPLIT, **params)
    if not context.load(blob):
        raise RuntimeError("a sound state was refused by split tensors")
    return context, blob


@probe("A state of split tensors handed out in pieces", "llama_context::state_seq_get_data")
def split_tensors_in_pieces(tested: ModelUnderTest) -> Outcome:
    """Tensors split over two devices; 3,000 tokens, so that a tensor is longer than the buffer of 1 MiB.

    Compare full and PARTIAL states and the range [10, 2900) with the same in pieces.
    """
    context, _ = _split(tested, 3000, n_ctx=4096, n_ubatch=256)
    return _in_pieces(context, 10, 2900)


@probe("States and ranges of split tensors (control)", "llama_context::state_seq_set_data")
def split_tensors_restored(tested: ModelUnderTest) -> Outcome:
    """Tensors split over two devices; restore 40 tokens, their PARTIAL state and a range; remove; restore."""
    context, blob = _split(tested, 40)
    if context.save() != blob:
        return wrong("other bytes after the full state")
    if not context.load(context.save(flags=PARTIAL), flags=PARTIAL) or context.save() != blob:
        return wrong("other bytes after the PARTIAL state")
    try:
        part = save_range(context, 10, 20)
        if not load_range(context, part, 10, 20) or save_range(context, 10, 20) != part:
            return wrong("other bytes after a range")
    except NotApplicable:
        pass
    if not (context.rm(0, -1, -1) and context.load(blob)) or context.save() != blob:
        return wrong("other bytes after a removal and the full state")
    return Outcome(Verdict.EXACT, "the bytes are those that were restored")


@probe("A truncated state over live split tensors", "llama_context::state_seq_set_data")
def split_tensors_failed_restore(tested: ModelUnderTest) -> Outcome:
    """Tensors split over two devices, 40 live tokens; restore states of 30 others that end too early."""
    context, blob = _split(tested, 40)

    def offered(flags: int) -> Outcome:
        other = tested.context(**_SPLIT).grown(30).save(flags=flags)
        cuts = (40, len(other) // 2, -100, -8, -1)
        read = [context.read(other[:cut], flags=flags) for cut in cuts]
        left = context.last() + 1
        same = context.save() == blob
        bytes_left = "the same bytes" if same else "other bytes"
        said = f"the restores returned {read}, {left} tokens left with {bytes_left}"
        return Outcome(Verdict.REFUSED, said) if not any(read) and (same or not left) else wrong(said)

    return all_sound(offered(flags) for flags in (FULL, PARTIAL))
