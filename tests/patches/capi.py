"""The C API as the probes use it, and the child process that runs one probe against one library.

`python capi.py MODULE PROBE MODEL` imports MODULE from this folder and prints PROBE(MODEL) as JSON: a library
that dies takes only this process with it. Which library is loaded is decided by `LLAMA_CPP_LIB_PATH`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

FULL, PARTIAL, ON_DEVICE = 0, 1, 2  # LLAMA_STATE_SEQ_FLAGS_*
EXACT = 1e-4  # two clean runs differ by less, as a part of the range of the logits

Logits: TypeAlias = npt.NDArray[np.float32]
Item: TypeAlias = tuple[int, int, Sequence[int]]  # token, position, sequences


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _drop(level: int, text: bytes, user: int) -> None:
    """Keep the native log out of the tests' output."""


lib.llama_log_set(_drop, None)
lib.llama_backend_init()


def token(position: int, seq: int = 0) -> int:
    """The token of the test text of sequence `seq` at `position`."""
    return (7 * position + 31 * seq + 1) % 128


def difference(got: Logits, wanted: Logits) -> float:
    """Largest difference of two logit rows, as a part of the wanted row's range; infinite when not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - wanted).max() / np.ptp(wanted))


class Context:
    """One native context on the model at `path`; keywords are fields of `llama_context_params`."""

    def __init__(self, path: str, **params: Any) -> None:
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(path.encode(), model_params)
        context_params = lib.llama_context_default_params()
        shape = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
        for name, value in {**shape, "n_seq_max": 1, "flash_attn_type": 0, **params}.items():
            setattr(context_params, name, value)
        self.ctx = lib.llama_init_from_model(self.model, context_params)
        assert self.ctx, "no context"
        self.mem = lib.llama_get_memory(self.ctx)
        self.polls = 0
        self.stop_at: int | None = None

    def decode(self, items: Iterable[Item]) -> int:
        """Decode `items` with logits for all of them; the native status."""
        rows = list(items)
        batch = lib.llama_batch_init(len(rows), 0, 8)
        batch.n_tokens = len(rows)
        for i, (word, position, seqs) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = word, position, len(seqs), 1
            for j, seq in enumerate(seqs):
                batch.seq_id[i][j] = seq
        status = int(lib.llama_decode(self.ctx, batch))
        lib.llama_batch_free(batch)
        return status

    def feed(self, begin: int, end: int, seq: int = 0, *, text: int | None = None, chunk: int = 256) -> int:
        """Decode positions [begin, end) of the test text `text` (default: that of `seq`) into `seq`."""
        words = seq if text is None else text
        for start in range(begin, end, chunk):
            stop = min(end, start + chunk)
            status = self.decode((token(p, words), p, (seq,)) for p in range(start, stop))
            if status:
                return status
        return 0

    def logits(self, row: int = -1) -> Logits:
        """A copy of the logits of one row of the last decode."""
        pointer = lib.llama_get_logits_ith(self.ctx, row)
        words = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        return np.ctypeslib.as_array(pointer, (words,)).copy()

    def has_logits(self) -> bool:
        """Whether the last decode left a last row to sample from."""
        return bool(lib.llama_get_logits_ith(self.ctx, -1))

    def rm(self, seq: int, begin: int, end: int) -> bool:
        """`llama_memory_seq_rm`."""
        return bool(lib.llama_memory_seq_rm(self.mem, seq, begin, end))

    def cp(self, source: int, target: int, begin: int = -1, end: int = -1) -> None:
        """`llama_memory_seq_cp`."""
        lib.llama_memory_seq_cp(self.mem, source, target, begin, end)

    def ends(self, seq: int = 0) -> tuple[int, int]:
        """First and last position the memory reports for `seq`."""
        return (
            int(lib.llama_memory_seq_pos_min(self.mem, seq)),
            int(lib.llama_memory_seq_pos_max(self.mem, seq)),
        )

    def save(self, seq: int = 0, flags: int = FULL) -> bytes:
        """The state of `seq` (`llama_state_seq_get_data_ext`)."""
        size = lib.llama_state_seq_get_size_ext(self.ctx, seq, flags)
        buffer = (ctypes.c_uint8 * max(size, 1))()
        return ctypes.string_at(buffer, lib.llama_state_seq_get_data_ext(self.ctx, buffer, size, seq, flags))

    def load(self, blob: bytes, seq: int = 0, flags: int = FULL) -> int:
        """Bytes read from `blob` into `seq` (`llama_state_seq_set_data_ext`), 0 when refused."""
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        return int(lib.llama_state_seq_set_data_ext(self.ctx, buffer, len(blob), seq, flags))

    def count_polls(self) -> None:
        """Count the polls of the abort callback in `polls`, and stop at the poll numbered `stop_at`."""

        def poll(_: int | None) -> bool:
            self.polls += 1
            return self.stop_at is not None and self.polls >= self.stop_at

        self._poll = lib.ggml_abort_callback(poll)
        lib.llama_set_abort_callback(self.ctx, self._poll, None)


def fresh(path: str, length: int, *, text: int = 0, seq: int = 0, **params: Any) -> Logits:
    """Logits at position `length` of the test text in a context that saw nothing else."""
    context = Context(path, **params)
    assert context.feed(0, length, seq, text=text) == 0
    assert context.feed(length, length + 1, seq, text=text) == 0
    return context.logits()


def continued(context: Context, path: str, length: int, seq: int = 0, **params: Any) -> float | None:
    """How far off the context is when it goes on at position `length`; None when it refuses to."""
    if context.feed(length, length + 1, seq):
        return None
    return difference(context.logits(), fresh(path, length, text=seq, seq=seq, **params))


if __name__ == "__main__":
    sys.modules["capi"] = sys.modules["__main__"]
    module, probe, model = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), probe)(model)))
