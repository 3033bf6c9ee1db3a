"""The C API as probes use it: a model, contexts on it, and clean runs to compare with.

Loads libllama when it is imported, so only the child process imports it. Struct layouts are those that
llama_cpp mirrors; functions are called at their addresses in the library that llama_cpp has loaded.
"""

from __future__ import annotations

import copy
import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from llamahybrid.hazards.probe import NotApplicable

FULL, PARTIAL, ON_DEVICE = 0, 1, 2  # LLAMA_STATE_SEQ_FLAGS_*
ABORTED = 2  # llama_decode: the abort callback said stop
_ERROR = 4  # ggml_log_level
_UNSHARED = (b"qwen4exp",)
"""Architectures that assert that each token is of one sequence (src/models/qwen4exp.cpp, set_input)."""

_MULTI_ROPE = (8, 40)  # LLAMA_ROPE_TYPE_MROPE, LLAMA_ROPE_TYPE_IMROPE

Logits: TypeAlias = npt.NDArray[np.float32]
Item: TypeAlias = tuple[int, int, Sequence[int]]
"""Token, position, sequences."""


def _log(level: int, text: bytes, _: int | None) -> None:
    """Let errors through: the last one is part of the report when the process dies."""
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_log)


@contextmanager
def memory_left(extra: int) -> Iterator[None]:
    """Let this process allocate at most about `extra` bytes more, so that a huge allocation fails at once."""
    if sys.platform != "linux":
        raise NotApplicable("memory can be limited on Linux only")
    import resource

    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_memory() -> int:
    """The most memory this process ever held, in bytes; only differences mean something.

    On Linux since its program was started: `ru_maxrss` may be that of the parent before.
    """
    if sys.platform == "win32":
        raise NotApplicable("peak memory is not known here")
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Gap:
    """How far a row of logits is off a clean run's."""

    largest: float
    """Largest absolute difference; infinite when a logit is not a number."""
    span: float
    """Range of the clean row."""

    @property
    def finite(self) -> bool:
        """Whether all logits were numbers."""
        return math.isfinite(self.largest)

    @property
    def exact(self) -> bool:
        """As close as two clean runs with other batches are, with a margin."""
        return self.largest < 1e-4 * self.span

    @property
    def reported(self) -> float | None:
        """The difference as JSON can hold it."""
        return self.largest if self.finite else None


def gap(got: Logits, wanted: Logits) -> Gap:
    """Compare two rows of logits, shape (vocabulary,); NotApplicable when the clean row tells nothing."""
    if not np.ptp(wanted):
        raise NotApplicable("the model gives no logits in this mode")
    largest = float(np.abs(got - wanted).max()) if np.isfinite(got).all() else math.inf
    return Gap(largest, float(np.ptp(wanted)))


class Context:
    """One native context; positions count from 0, `seq` is a sequence id, `text` chooses other tokens."""

    def __init__(self, bench: Bench, params: dict[str, Any]) -> None:
        native = lib.llama_context_default_params()
        shape = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
        for name, value in {**shape, "n_seq_max": 1, "flash_attn_type": 0, **params}.items():
            setattr(native, name, value)
        self.bench, self.params = bench, params
        self.ctx = lib.llama_init_from_model(bench.model, native)
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
                (self.bench.token(p, text), p, (seq,)) for p in range(start, min(end, start + chunk))
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

    def logits(self) -> Logits:
        """A copy of the last row of logits of the last decode."""
        pointer = lib.llama_get_logits_ith(self.ctx, -1)
        row: Logits = np.ctypeslib.as_array(pointer, (self.bench.words,)).copy()
        return row

    def goes_on(self, length: int, seq: int = 0, *, text: int = 0) -> Gap | int:
        """Decode the token at position `length`: how far off a clean run, or the status of a refused decode.

        Where batches alone decide (experts, thresholds), one clean run may be as far from another: then the
        nearer one counts, of the text at once and of the text with its last token decoded alone, or all of
        them where this context got them so.
        """
        if status := self.feed(length, length + 1, seq, text=text):
            return status
        row = self.logits()
        found = gap(row, self.bench.clean(length, text=text, **self.params))
        if found.exact or length < 2:
            return found
        alone = min(self.alone, length)
        apart = gap(row, self.bench.clean(length, text=text, alone=alone, **self.params))
        return min(found, apart, key=lambda gap: gap.largest)

    def goes_on_after_refusal(self, length: int) -> Gap | int:
        """As `goes_on`; where the sequence was visibly dropped, another prompt must start clean instead."""
        if not length or self.last() >= 0:
            return self.goes_on(length)
        return self.feed(0, length, text=1) or self.goes_on(length, text=1)

    def has_logits(self) -> bool:
        """Whether the last decode left a row to sample from."""
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

    def save_whole(self) -> bytes:
        """The state of the whole context."""
        size = lib.llama_state_get_size(self.ctx)
        buffer = (ctypes.c_uint8 * max(size, 1))()
        return ctypes.string_at(buffer, lib.llama_state_get_data(self.ctx, buffer, size))

    def load_whole(self, blob: bytes) -> bool:
        """Restore the whole context; whether the library says that it read anything."""
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        return bool(lib.llama_state_set_data(self.ctx, buffer, len(blob)))

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


class Bench:
    """A model under test, and what it has to offer."""

    def __init__(self, path: str, gpu_layers: int = 0) -> None:
        lib.llama_log_set(_LOG, None)
        lib.llama_backend_init()
        self.path = path
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama_model_load_from_file made no model of {path}")
        self.words = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))

    def token(self, position: int, text: int = 0) -> int:
        """The token at a position of one of the test texts."""
        return (7 * position + 31 * text + 1) % min(self.words, 128)

    def context(self, **params: Any) -> Context:
        """A fresh context; keywords are fields of `llama_context_params`."""
        return Context(self, params)

    def clean(self, length: int, *, text: int = 0, alone: int = 0, **params: Any) -> Logits:
        """Logits at position `length` in a context that saw that text only, its last `alone` apart."""
        params.pop("cb_eval", None)
        context = self.context(**params).grown(length - alone, text=text)
        if context.feed(length - alone, length + 1, text=text, chunk=1):
            raise RuntimeError("a clean context refused to go on")
        return context.logits()

    def split(self) -> Bench:
        """The model again, each tensor in two parts: the CPU serves as two devices.

        It holds such tensors, but it cannot compute with them: states come from a context on the whole model.
        Raises NotApplicable where that cannot be.
        """
        if lib.llama_model_is_recurrent(self.model):  # for rwkv7 llama-model.cpp aborts while it loads
            raise NotApplicable("purely recurrent models are not split over devices")
        folder = Path(lib._lib._name).parent
        names = ("libggml.so", "libggml.dylib", "ggml.dll")
        found = [path for name in names if (path := folder / name).exists()]
        if not found:
            raise NotApplicable("no libggml beside libllama")
        device = ctypes.CDLL(str(found[0])).ggml_backend_dev_by_type
        device.restype = ctypes.c_void_p
        cpu = device(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
        params = lib.llama_model_default_params()
        devices = (ctypes.c_void_p * 3)(cpu, cpu, None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        params.split_mode, params.n_gpu_layers = 3, 99  # LLAMA_SPLIT_MODE_TENSOR
        other = copy.copy(self)
        other.model = lib.llama_model_load_from_file(self.path.encode(), params)
        if not other.model:
            raise NotApplicable("tensors of this architecture cannot be split over devices")
        return other

    def with_planes(self, count: int = 4, **params: Any) -> Context:
        """A context with `count` rollback planes; raises NotApplicable where the model has none."""
        context = self.context(n_rs_seq=count, **params)
        if lib.llama_n_rs_seq(context.ctx) != count:
            raise NotApplicable("the architecture has no rollback planes")
        return context

    def need_recurrent(self) -> None:
        """Raise NotApplicable unless the model keeps a recurrent state."""
        if not (lib.llama_model_is_recurrent(self.model) or lib.llama_model_is_hybrid(self.model)):
            raise NotApplicable("the architecture keeps no recurrent state")

    def need_attention(self) -> None:
        """Raise NotApplicable for a purely recurrent model."""
        if lib.llama_model_is_recurrent(self.model):
            raise NotApplicable("the architecture keeps no attention KV")

    def need_hybrid(self) -> None:
        """Raise NotApplicable unless the model keeps both."""
        if not lib.llama_model_is_hybrid(self.model):
            raise NotApplicable("the architecture is no hybrid")

    def need_window(self) -> None:
        """Raise NotApplicable unless the model attends through a sliding window."""
        if not lib.llama_model_n_swa(self.model):
            raise NotApplicable("the model has no sliding window")

    def need_shared_tokens(self) -> None:
        """Raise NotApplicable where a token is of one sequence only."""
        name = ctypes.create_string_buffer(64)
        lib.llama_model_meta_val_str(self.model, b"general.architecture", name, len(name))
        if name.value in _UNSHARED:
            raise NotApplicable("a token of two sequences ends the process on purpose (GGML_ASSERT)")

    def need_multi_rope(self, yes: bool) -> None:
        """Raise NotApplicable unless positions are (`yes`) or are not M-RoPE's."""
        if (lib.llama_model_rope_type(self.model) in _MULTI_ROPE) != yes:
            raise NotApplicable(f"positions are {'not ' if yes else ''}M-RoPE's")
