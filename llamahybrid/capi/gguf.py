"""The few native functions `tiny` needs that llama_cpp does not wrap, typed, from the library it has loaded.

Signatures: ggml/include/gguf.h, ggml/include/ggml.h, include/llama.h of llama.cpp. The loader of llama.cpp
knows the name and shape of every tensor of every architecture, so it is asked, and nothing is written twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llamahybrid.engine import installed
from llamahybrid.engine.bindings import loaded_from
from llamahybrid.errors import EngineError

Value: TypeAlias = "bool | int | float | str | list[int] | list[str] | npt.NDArray[Any]"
"""A GGUF value: whole numbers become u32 (an array says its own type), fractions f32."""

Floats: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.float16]"

_WARN, _ERROR = 3, 4  # ggml_log_level
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}  # ggml_type
_ARRAYS = {
    np.dtype(np.uint32): 4,
    np.dtype(np.int32): 5,
    np.dtype(np.float32): 6,
    np.dtype(np.bool_): 7,
    np.dtype(np.uint64): 10,
}  # gguf_type
_STRING, _ARRAY = 8, 9

_p, _s, _size, _i64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64
_SCALARS: dict[int, tuple[str, Any, Callable[[Any], Value]]] = {
    4: ("u32", ctypes.c_uint32, int),
    5: ("i32", ctypes.c_int32, int),
    6: ("f32", ctypes.c_float, float),
    7: ("bool", ctypes.c_bool, bool),
    _STRING: ("str", _s, bytes.decode),
}
_WRITTEN = ((bool, 7), (int, 4), (float, 6), (str, _STRING))  # a bool is an int, too
_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, _s, _p)
_TensorCallback = ctypes.CFUNCTYPE(None, _p, _p)


class _GgmlInit(ctypes.Structure):
    _fields_ = (("mem_size", _size), ("mem_buffer", _p), ("no_alloc", ctypes.c_bool))


class _GgufInit(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", _p))


class _TensorHead(ctypes.Structure):
    """The start of `struct ggml_tensor` (ggml.h): enough to read a shape."""

    _fields_ = (("type", ctypes.c_int), ("buffer", _p), ("ne", _i64 * 4))


@dataclass(frozen=True)
class Shape:
    """A tensor an architecture wants; `ne` in ggml order: the contiguous (input) dimension first."""

    name: str
    ne: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.ne))


def _native(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    for library in _libraries():
        function = getattr(library, name, None)
        if function is not None:
            return ctypes.CFUNCTYPE(result, *arguments)(ctypes.cast(function, _p).value or 0)
    raise EngineError(f"the loaded llama.cpp has no {name}; install llama-cpp-python 0.3.36 or newer")


def _libraries() -> Iterator[Any]:
    """The libllama that is loaded, then the ggml libraries it was linked with.

    On Linux and macOS a library's handle finds what it depends on, too; on Windows `gguf_*` and `ggml_*` are
    found in ggml-base.dll alone.
    """
    import llama_cpp.llama_cpp as llama

    yield llama._lib
    folder = loaded_from()
    for name in ("ggml-base", "ggml"):
        path = installed.library(folder, name) if folder else None
        if path is not None:
            yield ctypes.CDLL(str(path))


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect the library's warnings and errors in place of printing them; the old callback comes back."""
    lines: list[str] = []

    def keep(level: int, text: bytes, _: int | None) -> None:
        if level in (_WARN, _ERROR):
            lines.append(text.decode(errors="replace").strip())

    keeper = _LogCallback(keep)
    callback, data = _p(), _p()
    _native("llama_log_get", None, ctypes.POINTER(_p), ctypes.POINTER(_p))(callback, data)
    restore = _native("llama_log_set", None, _p, _p)
    restore(ctypes.cast(keeper, _p), None)
    try:
        yield lines
    finally:
        restore(callback, data)


class Gguf:
    """A GGUF file in the making: metadata first, then tensors, then `write`. Close it (a context manager)."""

    def __init__(self, source: Path | None = None) -> None:
        """Start empty, or with the metadata of `source`."""
        if source is None:
            self._gguf = _native("gguf_init_empty", _p)()
        else:
            load = _native("gguf_init_from_file", _p, _s, _GgufInit)
            self._gguf = load(str(source).encode(), _GgufInit(True, None))
        if not self._gguf:
            raise OSError(f"{source} is not a GGUF file that can be read")
        self._ggml = _p()
        self._data: list[Floats] = []

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_: object) -> None:
        _native("gguf_free", None, _p)(self._gguf)
        if self._ggml:
            _native("ggml_free", None, _p)(self._ggml)

    def set(self, values: Mapping[str, Value]) -> None:
        """Set metadata, replacing keys that exist."""
        for key, value in values.items():
            self._set(key.encode(), value)

    def _set(self, key: bytes, value: Value) -> None:
        kind = next((number for python, number in _WRITTEN if isinstance(value, python)), _ARRAY)
        if kind != _ARRAY:
            suffix, native, _ = _SCALARS[kind]
            scalar = value.encode() if isinstance(value, str) else value
            _native(f"gguf_set_val_{suffix}", None, _p, _s, native)(self._gguf, key, scalar)
        elif isinstance(value, list) and (not value or isinstance(value[0], str)):
            texts = (_s * len(value))(*(str(text).encode() for text in value))
            put = _native("gguf_set_arr_str", None, _p, _s, ctypes.POINTER(_s), _size)
            put(self._gguf, key, texts, len(value))
        else:
            array = np.ascontiguousarray(value, None if isinstance(value, np.ndarray) else np.uint32)
            put = _native("gguf_set_arr_data", None, _p, _s, ctypes.c_int, _p, _size)
            put(self._gguf, key, _ARRAYS[array.dtype], array.ctypes.data, array.size)

    def read(self, prefix: str) -> dict[str, Value]:
        """All metadata whose key starts with `prefix`."""
        count = _native("gguf_get_n_kv", _i64, _p)(self._gguf)
        key_of = _native("gguf_get_key", _s, _p, _i64)
        keys = {key_of(self._gguf, at).decode(): at for at in range(count)}
        return {key: self._read(at) for key, at in keys.items() if key.startswith(prefix)}

    def length(self, key: str) -> int:
        """Items of an array; 0 where there is none of that name."""
        at = _native("gguf_find_key", _i64, _p, _s)(self._gguf, key.encode())
        return int(_native("gguf_get_arr_n", _size, _p, _i64)(self._gguf, at)) if at >= 0 else 0

    def _read(self, at: int) -> Value:
        kind = _native("gguf_get_kv_type", ctypes.c_int, _p, _i64)(self._gguf, at)
        if kind != _ARRAY:
            suffix, native, python = _SCALARS[kind]
            return python(_native(f"gguf_get_val_{suffix}", native, _p, _i64)(self._gguf, at))
        n = _native("gguf_get_arr_n", _size, _p, _i64)(self._gguf, at)
        item = _native("gguf_get_arr_type", ctypes.c_int, _p, _i64)(self._gguf, at)
        if item == _STRING:
            text_of = _native("gguf_get_arr_str", _s, _p, _i64, _size)
            return [text_of(self._gguf, at, i).decode() for i in range(n)]
        dtype = next(dtype for dtype, number in _ARRAYS.items() if number == item)
        start = _native("gguf_get_arr_data", _p, _p, _i64)(self._gguf, at)
        return np.frombuffer(ctypes.string_at(start, n * dtype.itemsize), dtype)

    def tensors(self) -> tuple[list[Shape], str]:
        """Ask llama.cpp which tensors a model with this metadata has.

        Returns the shapes, or an empty list and the library's own reason why there is no such model.
        """
        import llama_cpp

        shapes: dict[str, Shape] = {}
        name_of = _native("ggml_get_name", _s, _p)
        rank_of = _native("ggml_n_dims", ctypes.c_int, _p)

        def note(tensor: int, _: int | None) -> None:
            head = _TensorHead.from_address(tensor)
            name = name_of(tensor).decode()
            shapes.setdefault(name, Shape(name, tuple(head.ne[: rank_of(tensor)])))

        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mtp = True  # prediction layers are tensors, too
        init = _native("llama_model_init_from_user", _p, _p, _TensorCallback, _p, type(params))
        llama_cpp.llama_backend_init()
        with quiet() as log:
            model = init(self._gguf, _TensorCallback(note), None, params)
            if model:
                _native("llama_model_free", None, _p)(model)
        if not model:
            return [], next((line for line in log if "error loading" in line), " ".join(log))
        return list(shapes.values()), ""

    def add(self, shape: Shape, data: Floats) -> None:
        """Add a tensor; `data` is kept alive until the file is written."""
        if not self._ggml:
            room = 100_000 * _native("ggml_tensor_overhead", _size)()
            self._ggml = _p(_native("ggml_init", _p, _GgmlInit)(_GgmlInit(room, None, True)))
        self._data.append(data)
        make = _native("ggml_new_tensor", _p, _p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(_i64))
        rank = len(shape.ne)
        tensor = make(self._ggml, _TYPES[data.dtype], rank, (_i64 * rank)(*shape.ne))
        name = shape.name.encode()
        _native("ggml_set_name", _p, _p, _s)(tensor, name)
        _native("gguf_add_tensor", None, _p, _p)(self._gguf, tensor)
        _native("gguf_set_tensor_data", None, _p, _s, _p)(self._gguf, name, data.ctypes.data)

    def write(self, path: Path) -> None:
        """Write metadata and tensors; raises OSError when that fails."""
        write = _native("gguf_write_to_file", ctypes.c_bool, _p, _s, ctypes.c_bool)
        if not write(self._gguf, str(path).encode(), False):
            raise OSError(f"cannot write {path}")
