"""A native context for probes: batches, cuts, copies, states, ranges, stopped decodes, and going on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.effect import Effect, Gap, Logits, NotApplicable, all_sound, refused, went_on

FULL, PARTIAL, ON_DEVICE = 0, 1, 2  # LLAMA_STATE_SEQ_FLAGS_*
ABORTED = 2  # llama_decode: the abort callback said stop
SPLIT = {"n_seq_max": 2, "kv_unified": False}
"""Two sequences, a stream of attention for each."""
TWO, THREE = ({"n_seq_max": n, "kv_unified": True} for n in (2, 3))
"""Two sequences, and three, in one stream."""
BOTH = {0: 12, 1: 12}
"""Two sequences of twelve tokens each, as `Context.filled` and `all_go_on` take them."""

Item: TypeAlias = tuple[int, int, Sequence[int]]
"""Token, position, sequences."""


class Context:
    """A native context; positions count from 0, `seq` is a sequence id, `text` chooses other tokens."""

    def __init__(self, tested: Any, params: dict[str, Any]) -> None:
        native = lib.llama_context_default_params()
        shape = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
        for name, value in {**shape, "n_seq_max": 1, "flash_attn_type": 0, **params}.items():
            setattr(native, name, value)
        self.tested, self.params = tested, params
        self.ctx = lib.llama_init_from_model(tested.model, native)
        if not self.ctx:
            raise RuntimeError("llama_init_from_model made no context")
        self.memory = lib.llama_get_memory(self.ctx)
        if not self.memory:
            raise NotApplicable("the architecture keeps no state between batches")
        self.alone = 1
        """Tokens that a clean run may decode one by one, where batches decide."""
        self.polls = 0
        """Polls of the abort callback so far."""
        self.stop_at: int | None = None
        """The poll that says stop."""

    def decode(self, items: Iterable[Item]) -> int:
        """Decode `items`, with logits for all of them; the native status."""
        rows = list(items)
        batch = lib.llama_batch_init(len(rows), 0, 8)
        batch.n_tokens = len(rows)
        for i, (token, position, seqs) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, len(seqs), 1
            for j, seq in enumerate(seqs):
                batch.seq_id[i][j] = seq
        status = int(lib.llama_decode(self.ctx, batch))
        lib.llama_batch_free(batch)
        return status

    def feed(self, begin: int, end: int, seq: int = 0, *, text: int = 0, chunk: int = 256) -> int:
        """Decode positions [begin, end) of a text in batches of `chunk`; the first status that is not 0."""
        for start in range(begin, end, chunk):
            status = self.decode(
                (self.tested.token(p, text), p, (seq,)) for p in range(start, min(end, start + chunk))
            )
            if status:
                return status
        return 0

    def grown(self, length: int, seq: int = 0, *, text: int = 0, chunk: int = 256) -> Context:
        """This context after decoding `length` tokens, which must succeed."""
        status = self.feed(0, length, seq, text=text, chunk=chunk)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {length} tokens in a clean context")
        if chunk == 1:
            self.alone = length
        return self

    def filled(self, lengths: Mapping[int, int]) -> Context:
        """Decode `lengths[seq]` tokens in each sequence, the text of its number; return this context."""
        for seq, length in lengths.items():
            self.grown(length, seq, text=seq)
        return self

    def logits(self) -> Logits:
        """A copy of the last row of logits of the last decode."""
        pointer = lib.llama_get_logits_ith(self.ctx, -1)
        row: Logits = np.ctypeslib.as_array(pointer, (self.tested.words,)).copy()
        return row

    def goes_on(self, length: int, seq: int = 0, *, text: int = 0) -> Gap | int:
        """Decode the token at position `length`; return the gap to a clean run, or a refused decode's status.

        Clean runs may differ by their batches alone (experts, thresholds). The nearer of two counts: of the
        text at once, and of the text whose last tokens are decoded singly, one or as many as in this context.
        """
        if status := self.feed(length, length + 1, seq, text=text):
            return status
        row = self.logits()
        found: Gap = self.tested.gap(row, self.tested.clean(length, text=text, **self.params))
        if found.exact or length < 2:
            return found
        alone = min(self.alone, length)
        apart: Gap = self.tested.gap(row, self.tested.clean(length, text=text, alone=alone, **self.params))
        return min(found, apart, key=lambda gap: gap.largest)

    def goes_on_after_refusal(self, length: int) -> Gap | int:
        """As `goes_on`; where the sequence was visibly dropped, another prompt must start clean instead."""
        if not length or self.last() >= 0:
            return self.goes_on(length)
        return self.starts_over(length, text=1)

    def starts_over(self, length: int, seq: int = 0, *, text: int = 0) -> Gap | int:
        """Decode a prompt from position 0 and go on: as `goes_on`, or the status of its own decode."""
        return self.feed(0, length, seq, text=text) or self.goes_on(length, seq, text=text)

    def has_logits(self) -> bool:
        """Tell whether the last decode left a row to sample from."""
        return bool(lib.llama_get_logits_ith(self.ctx, -1))

    def rm(self, seq: int, begin: int, end: int) -> bool:
        """`llama_memory_seq_rm`: remove positions [begin, end)."""
        return bool(lib.llama_memory_seq_rm(self.memory, seq, begin, end))

    def cp(self, source: int, target: int, begin: int = -1, end: int = -1) -> None:
        """`llama_memory_seq_cp`."""
        lib.llama_memory_seq_cp(self.memory, source, target, begin, end)

    def last(self, seq: int = 0) -> int:
        """Last position of a sequence, -1 when there is none."""
        return int(lib.llama_memory_seq_pos_max(self.memory, seq))

    def last_of(self, sequences: Iterable[int] = (0, 1)) -> list[int]:
        """Last position of each of these sequences."""
        return [self.last(seq) for seq in sequences]

    def first(self, seq: int = 0) -> int:
        """First position of a sequence, -1 when there is none."""
        return int(lib.llama_memory_seq_pos_min(self.memory, seq))

    def save(self, seq: int = 0, flags: int = FULL) -> bytes:
        """The state of a sequence."""
        size = lib.llama_state_seq_get_size_ext(self.ctx, seq, flags)
        buffer = (ctypes.c_uint8 * max(size, 1))()
        return ctypes.string_at(buffer, lib.llama_state_seq_get_data_ext(self.ctx, buffer, size, seq, flags))

    def read(self, blob: bytes, seq: int = 0, flags: int = FULL) -> int:
        """Restore a sequence; the bytes that the library says it read, 0 when it refused."""
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        return int(lib.llama_state_seq_set_data_ext(self.ctx, buffer, len(blob), seq, flags))

    def load(self, blob: bytes, seq: int = 0, flags: int = FULL) -> bool:
        """Restore a sequence; whether the library says that it read all of `blob`."""
        return self.read(blob, seq, flags) == len(blob)

    def goes_back(self, snapshot: bytes, length: int) -> bool:
        """Restore a PARTIAL snapshot of `length` tokens and cut there; whether both were granted."""
        return self.load(snapshot, flags=PARTIAL) and self.rm(0, length, -1)

    def save_whole(self) -> bytes:
        """The state of the whole context."""
        size = lib.llama_state_get_size(self.ctx)
        buffer = (ctypes.c_uint8 * max(size, 1))()
        return ctypes.string_at(buffer, lib.llama_state_get_data(self.ctx, buffer, size))

    def load_whole(self, blob: bytes) -> bool:
        """Restore the whole context; whether the library says that it read anything."""
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        return bool(lib.llama_state_set_data(self.ctx, buffer, len(blob)))

    def polls_of(self, decode: Callable[[], int]) -> int:
        """Return the number of times that a decode polls the abort callback."""
        self.count_polls()
        before = self.polls
        decode()
        return self.polls - before

    def stopped(self, poll: int, decode: Callable[[], int]) -> int:
        """The status of a decode whose poll of this number says stop."""
        self.count_polls()
        self.stop_at = self.polls + poll
        status = decode()
        self.stop_at = None
        return status

    def count_polls(self) -> None:
        """Install an abort callback that counts in `polls` and says stop from poll `stop_at` on."""

        def poll(_: int | None) -> bool:
            self.polls += 1
            return self.stop_at is not None and self.polls >= self.stop_at

        self._poll: Callable[..., bool] = lib.ggml_abort_callback(poll)
        lib.llama_set_abort_callback(self.ctx, self._poll, None)


def _range(name: str, *buffer: Any) -> Any:
    """A function for ranges of attention; NotApplicable where the library has none."""
    function = getattr(lib._lib, f"llama_state_seq_{name}_range", None)
    if function is None:
        raise NotApplicable("the library has no functions for ranges")
    function.argtypes = [ctypes.c_void_p, *buffer, *[ctypes.c_int32] * 3]
    function.restype = ctypes.c_size_t
    return function


def save_range(context: Context, begin: int, end: int) -> bytes:
    """The attention of positions [begin, end) of sequence 0; NotApplicable where there are no ranges."""
    size = _range("get_size")(context.ctx, 0, begin, end)
    if not size:
        raise NotApplicable("this memory has no ranges")
    buffer = ctypes.create_string_buffer(size)
    get = _range("get_data", ctypes.c_void_p, ctypes.c_size_t)
    return ctypes.string_at(buffer, get(context.ctx, buffer, size, 0, begin, end))


def load_range(context: Context, blob: bytes, begin: int, end: int) -> bool:
    """Restore the attention of positions [begin, end) of sequence 0; whether all of `blob` was read."""
    put = _range("set_data", ctypes.c_char_p, ctypes.c_size_t)
    return bool(put(context.ctx, blob, len(blob), 0, begin, end) == len(blob))


def cut(context: Context, to: int, length: int, seq: int = 0) -> Effect:
    """Cut `seq`, which holds the text of its number, from `length` to `to` tokens and go on from there."""
    done = context.rm(seq, to, -1)
    said = f"seq_rm to {to} of {length} tokens returned {done}".lower()
    found = context.goes_on(to if done else length, seq, text=seq)
    return went_on(found, said) if done else refused(found, said)


def all_go_on(
    judge: Callable[[Gap | int, str], Effect], context: Context, said: str, ends: Mapping[int, int] = BOTH
) -> Effect:
    """Go on with each of these sequences, which hold the text of their number, at its end."""
    return all_sound(judge(context.goes_on(end, seq, text=seq), said) for seq, end in ends.items())


def after_failure(context: Context, length: int) -> Effect:
    """Go on at `length`, the live state's end before a restore that returned 0."""
    said = f"the restore returned 0, {context.last() + 1} tokens left"
    return refused(context.goes_on_after_refusal(length), said)


def still_there(context: Context, before: bytes, length: int, said: str) -> Effect:
    """Go on at `length` after something was refused; `before` is the state that sequence 0 had then."""
    same = "the same" if context.save() == before else "other"
    said = f"{said}, {context.last() + 1} tokens left with {same} bytes"
    return refused(context.goes_on_after_refusal(length), said)


def next_prompt(context: Context, length: int, said: str, *, text: int = 1) -> Effect:
    """Decode another prompt from position 0 and go on."""
    return went_on(context.starts_over(length, text=text), said)


def stop(context: Context, polls: int, part: float, decode: Callable[[], int]) -> None:
    """Stop a decode of `polls` polls after `part` of them."""
    status = context.stopped(max(1, int(polls * part)), decode)
    if status != ABORTED:
        raise RuntimeError(f"the decode was not stopped: it returned {status}")
