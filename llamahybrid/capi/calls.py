"""NativeContext: the few native calls that read or change one sequence of a context's memory.

Everything is checked by the caller (`LiveSequence`); here are just typed calls without Python loops. Some
arguments end the process or are misread, and none of the calls passes them: sequence -1, ids out of range
(asserted in src/llama-memory-recurrent.cpp, seq_rm, and src/llama-kv-cache.cpp, seq_pos_max), empty batches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaContext

from llamahybrid.capi.shim import Bytes, Stop, library

Logits: TypeAlias = npt.NDArray[np.float32]
Tokens: TypeAlias = npt.NDArray[np.int32]

PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
FULL = 0

LAST_ROW = -1
"""The library's index for the output row of a batch's last token (include/llama.h, llama_get_logits_ith)."""

Outputs = Literal["none", "last", "all"]

Part: TypeAlias = tuple[int, int, Sequence[int] | Tokens, Outputs]
"""Sequence, first position, tokens, and the rows of logits that are wanted."""


class TokenBatch:
    """A native batch over arrays of our own: what `LlamaContext.decode` takes, without Python loops.

    Made once and filled again for every decode. For sequence 0 alone the ids are left NULL, which the library
    reads as that (src/llama-batch.cpp).
    """

    def __init__(self, capacity: int, *, sequences: bool = False) -> None:
        """`sequences`: its tokens may be of any sequence."""
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._outputs = np.zeros(capacity, dtype=np.int8)
        self._ids = np.zeros(capacity, dtype=np.int32)
        self._counts = np.ones(capacity, dtype=np.int32)
        self._places = self._ids.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._ids.itemsize
        integers = ctypes.POINTER(ctypes.c_int32)
        self.batch = llama_cpp.llama_batch(
            0,
            self._tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            None,
            self._positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            self._counts.ctypes.data_as(integers) if sequences else None,
            self._places.ctypes.data_as(ctypes.POINTER(integers)) if sequences else None,
            self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, parts: Sequence[Part]) -> list[int]:
        """Put the tokens of some sequences one after the other; return the index of each one's last token."""
        at, rows = 0, []
        for seq, position, tokens, outputs in parts:
            n = len(tokens)
            if n == 1:
                self._tokens[at], self._ids[at], self._positions[at] = tokens[0], seq, position
            else:
                part = slice(at, at + n)
                self._tokens[part], self._ids[part] = tokens, seq
                self._positions[part] = np.arange(position, position + n)
                self._outputs[part] = outputs == "all"
            at += n
            self._outputs[at - 1] = outputs != "none"
            rows.append(at - 1)
        self.batch.n_tokens = at
        return rows

    def n_tokens(self) -> int:
        """Tokens in the batch."""
        return int(self.batch.n_tokens)


class NativeContext:
    """Typed native calls on one context, for one of its sequences."""

    def __init__(self, ctx: LlamaContext, seq: int = 0, batch: TokenBatch | None = None) -> None:
        """`batch`: one that several share."""
        self.seq = seq
        self._ctx = ctx
        self._batch = batch or TokenBatch(int(llama_cpp.llama_n_batch(ctx.ctx)))

    @property
    def _pointer(self) -> Any:
        if self._ctx.ctx is None:
            raise RuntimeError("the context is closed")
        return self._ctx.ctx

    def decode(self, tokens: Sequence[int] | Tokens, first_position: int, outputs: Outputs) -> None:
        """Decode tokens of this sequence, as `decode_parts`."""
        self.decode_parts([(self.seq, first_position, tokens, outputs)])

    def decode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Decode tokens of some sequences; return the index of each one's last output row.

        Calls the context object's `decode`, so that wrappers of it see every batch. Raises RuntimeError that
        names the native result when it is not 0.
        """
        rows = self._batch.fill(parts)
        self._ctx.decode(self._batch)
        return rows

    def set_stop(self, stop: Stop) -> None:
        """Let `stop` end decodes from inside, until other code sets an abort callback of its own."""
        library().set_stop(self._pointer, stop)

    def synchronize(self) -> None:
        """Wait for queued computation."""
        llama_cpp.llama_synchronize(self._pointer)

    def positions(self) -> tuple[int, int]:
        """(pos_min, pos_max) of the sequence; (-1, -1) when it is empty."""
        memory = self._ctx.memory
        return (
            int(llama_cpp.llama_memory_seq_pos_min(memory, self.seq)),
            int(llama_cpp.llama_memory_seq_pos_max(memory, self.seq)),
        )

    def planes(self) -> int:
        """Rollback planes of the context (`n_rs_seq`): 0 where the library or the architecture has none."""
        if "llama_n_rs_seq" not in library().optional:
            return 0
        return int(llama_cpp.llama_n_rs_seq(self._pointer))

    def cut(self, position: int) -> bool:
        """Remove the tail [position, end); False where the memory cannot."""
        return bool(llama_cpp.llama_memory_seq_rm(self._ctx.memory, self.seq, position, -1))

    def clear(self) -> None:
        """Empty the memory and zero its buffers: the only cure for NaN that got into a state."""
        llama_cpp.llama_memory_clear(self._ctx.memory, True)

    def state_size(self, *, partial: bool) -> int:
        """Bytes of the sequence's state."""
        return library().state_size(self._pointer, self.seq, PARTIAL if partial else FULL)

    def save_partial(self, out: Bytes) -> bool:
        """Write the PARTIAL state into `out` (uint8, `state_size` long); False on failure."""
        saved = library().save_state(self._pointer, out, self.seq, PARTIAL)
        return saved and not getattr(self._ctx, "lost", False)

    def load_partial(self, data: Bytes) -> bool:
        """Read a PARTIAL state; False where it was refused (stock has destroyed the destination then)."""
        return library().load_state(self._pointer, data, self.seq, PARTIAL)

    def logits(self, n_vocab: int, index: int = LAST_ROW) -> Logits | None:
        """The output row of one of the batch's tokens, the last by default, valid until the next decode.

        A view into native memory, shape (n_vocab,); None where there is none.
        """
        pointer = llama_cpp.llama_get_logits_ith(self._pointer, index)
        if not pointer:
            return None
        rows: Logits = np.ctypeslib.as_array(pointer, shape=(n_vocab,))
        return rows

    def all_logits(self, n: int, n_vocab: int) -> Logits:
        """The output rows of the last batch, shape (n, n_vocab), as a view into native memory."""
        rows: Logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._pointer), shape=(n, n_vocab))
        return rows

    def reset_counters(self) -> None:
        """Set the library's counters to zero."""
        llama_cpp.llama_perf_context_reset(self._pointer)

    def counters(self) -> tuple[float, ...]:
        """Tokens and milliseconds decoded by this context, in batches and singly, by the library's count.

        The times are needed because each count reads max(1, n) (src/llama-context.cpp,
        perf_get_data).
        """
        context = self._pointer
        llama_cpp.llama_synchronize(context)
        data = llama_cpp.llama_perf_context(context)
        return data.n_p_eval, data.n_eval, data.t_p_eval_ms, data.t_eval_ms
