"""The native shim and its stand-ins: the few things that must not run in Python, behind typed functions.

The shim (``native/shim.cdef.h``) is compiled when llamahybrid is installed. Without a compiler everything
here still works: numpy and ctypes take over, and a stop takes effect between decodes only.
"""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llamahybrid.errors import EngineError
from llamahybrid.upstream import OPTIONAL

try:
    _shim: Any = import_module("llamahybrid._shim")
except ImportError:
    _shim = None

Bytes: TypeAlias = npt.NDArray[np.uint8]

available: bool = _shim is not None
"""The compiled shim is there."""

REQUIRED = ("llama_decode", "llama_state_seq_get_data_ext", "llama_state_seq_set_data_ext")
THREW = -1001
"""Result of a decode that libllama threw out of (memory ran out, mostly): nobody knows what memory holds."""

BATCH = ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits")
"""Fields of ``struct llama_batch`` (include/llama.h)."""


class Library:
    """The libllama that llama_cpp has loaded; `library()` gives the one of this process.

    Every method takes a ``llama_context *`` as an integer and releases the GIL while native code runs.
    """

    def __init__(self) -> None:
        from llama_cpp import llama_cpp

        self._api: Any = llama_cpp
        missing = [name for name in REQUIRED if _address(self._api._lib, name) is None]
        if missing:
            raise EngineError(
                f"the loaded libllama lacks {', '.join(missing)}; install llama-cpp-python 0.3.36 or newer"
            )
        self.optional = frozenset(name for name in OPTIONAL if _address(self._api._lib, name) is not None)
        """The functions of `OPTIONAL` that this library has."""
        addresses = [_address(self._api._lib, name) for name in REQUIRED]
        if _shim is not None and not _shim.lib.llh_bind(*addresses, _layout(llama_cpp.llama_batch)):
            raise EngineError(
                "struct llama_batch has another layout here than the shim was compiled for; "
                "install a llamahybrid that knows this llama-cpp-python"
            )

    def decode(self, ctx: int, batch: Any) -> int:
        """Decode a ctypes `llama_batch`: the result of `llama_decode`, or `THREW`."""
        if _shim is None:
            return int(_own(self._api, "llama_decode")(ctx, batch))
        result = _shim.ffi.new("int32_t *")
        _shim.lib.llh_decode_batch(ctx, ctypes.addressof(batch), result)
        return int(result[0])

    def state_size(self, ctx: int, seq: int, flags: int) -> int:
        """Bytes of a sequence's state."""
        return int(self._api.llama_state_seq_get_size_ext(ctx, seq, flags))

    def save_state(self, ctx: int, out: Bytes, seq: int, flags: int) -> bool:
        """Write a sequence's state into `out`; True where it fills that exactly.

        `flags`: ``LLAMA_STATE_SEQ_FLAGS_*`` of llama.h.
        """
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError("out must be a contiguous, writeable array")
        if _shim is not None:
            written = _shim.lib.llh_state_get(ctx, _bytes(out), out.nbytes, seq, flags)
        else:
            get = self._api.llama_state_seq_get_data_ext
            written = get(ctx, _pointer(out, ctypes.c_uint8), out.nbytes, seq, flags)
        return bool(0 < written == out.nbytes)

    def save_range(self, ctx: int, out: Bytes, seq: int, start: int, end: int) -> bool:
        """Write the attention of positions [start, end), where the library has ranges, as `save_state`."""
        get = range_function("get_data", ctypes.c_void_p, ctypes.c_size_t)
        written = get(ctx, out.ctypes.data, out.nbytes, seq, start, end)
        return bool(0 < written == out.nbytes)

    def load_state(self, ctx: int, data: Bytes, seq: int, flags: int) -> bool:
        """Load a sequence's state from `data`, shape (size,); False where it was refused.

        Native code trusts what it reads: hand it only bytes whose checksum holds. Stock has destroyed the
        destination when it refuses.
        """
        data = np.ascontiguousarray(data, np.uint8)
        if _shim is not None:
            read = _shim.lib.llh_state_set(ctx, _bytes(data), data.nbytes, seq, flags)
        else:
            load = _own(self._api, "llama_state_seq_set_data_ext")
            read = load(ctx, _pointer(data, ctypes.c_uint8), data.nbytes, seq, flags)
        return bool(0 < read == data.nbytes)

    def set_stop(self, ctx: int, stop: Stop) -> None:
        """Let `stop`, which the caller keeps alive, end decodes from within, where that can be."""
        if available and "llama_set_abort_callback" in self.optional:
            callback = ctypes.cast(stop.address or 0, self._api.ggml_abort_callback)
            self._api.llama_set_abort_callback(ctx, callback, stop.data)


@cache
def library() -> Library:
    """The library of this process, bound on first use; imports llama_cpp.

    Raises:
        EngineError: a function or a struct layout is not what the shim was made for.
    """
    return Library()


@cache
def range_function(what: str, *arguments: Any) -> Any:
    """`llama_state_seq_{what}_range` of the patched library, which llama_cpp does not declare.

    It takes (context, `arguments`, sequence, start, end), and returns bytes.
    """
    function = getattr(library()._api._lib, f"llama_state_seq_{what}_range")
    function.argtypes = [ctypes.c_void_p, *arguments, *[ctypes.c_int32] * 3]
    function.restype = ctypes.c_size_t
    return function


class Stop:
    """A stop that belongs to one request and never ends another; safe from any thread.

    Native code reads it while it decodes. Without the shim nothing does.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._block = (
            None if _shim is None else _shim.ffi.gc(_shim.lib.llh_stop_new(), _shim.lib.llh_stop_free)
        )
        if _shim is not None:
            _shim.lib.llh_stop_arm(self._block, True)
        self.running = 0
        """Number of the request that runs now; 0: none."""

    @property
    def address(self) -> int | None:
        """The native ``ggml_abort_callback``; None without the shim."""
        return None if _shim is None else _integer(_shim.ffi.addressof(_shim.lib, "llh_stop_poll"))

    @property
    def data(self) -> int | None:
        """The argument of the callback, valid as long as this object lives; None without the shim."""
        return None if _shim is None else _integer(self._block)

    def begin(self) -> int:
        """Start the next request; its number."""
        number = next(self._numbers)
        self._run(number)
        return number

    def end(self) -> None:
        """No request runs any more."""
        self._run(0)

    def request(self, number: int) -> None:
        """Stop request `number` if it is the one that runs; nothing happens to any other."""
        if number and number == self.running and _shim is not None:
            _shim.lib.llh_stop_request(self._block, number)

    def _run(self, number: int) -> None:
        self.running = number
        if _shim is not None:
            _shim.lib.llh_stop_begin(self._block, number)


def _layout(struct: Any) -> list[int]:
    """Offset and size of each field of `BATCH`, then the size of the struct; 0 for a field that it lacks."""
    fields = [getattr(struct, name, None) for name in BATCH]
    places = [(field.offset, field.size) if field is not None else (0, 0) for field in fields]
    return [*itertools.chain.from_iterable(places), ctypes.sizeof(struct)]


def _address(library: Any, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def _own(api: Any, name: str) -> Any:
    """A function as an object of our own: calls of llama_cpp's are taken for those of others."""
    function, known = api._lib[name], getattr(api, name)
    function.argtypes, function.restype = known.argtypes, known.restype
    return function


def _bytes(array: Bytes) -> Any:
    return _shim.ffi.from_buffer("uint8_t[]", array)


def _integer(pointer: Any) -> int:
    return int(_shim.ffi.cast("uintptr_t", pointer))


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
