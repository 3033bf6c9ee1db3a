"""GGUF files in the making: what is set is what is read, and what is wrong says so."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from llamahybrid.capi.gguf import Gguf, Shape, quiet

VALUES = {
    "x.flag": True,
    "x.count": 7,
    "x.part": 0.25,
    "x.name": "naïve",
    "x.texts": ["a", "", "ü"],
    "x.none": [],
}
ARRAYS = {"x.signed": np.array([1, -2, 3], np.int32), "x.wide": np.array([1, 1 << 40], np.uint64)}


def test_values_come_back_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with Gguf() as gguf:
        gguf.set({**VALUES, "y.other": 1})
        gguf.set({**ARRAYS, "x.list": [3, 4]})
        gguf.write(path)
    with Gguf(path) as gguf:
        found = gguf.read("x.")
    assert np.asarray(found.pop("x.list")).tolist() == [3, 4]
    for name, array in ARRAYS.items():
        read = np.asarray(found.pop(name))
        assert read.dtype == array.dtype
        assert np.array_equal(read, array)
    assert found == VALUES


def test_a_key_that_is_set_twice_has_the_last_value() -> None:
    with Gguf() as gguf:
        gguf.set({"x": 1})
        gguf.set({"x": "text"})
        assert gguf.read("") == {"x": "text"}


def test_tensors_are_written_in_full(tmp_path: Path) -> None:
    path, data = tmp_path / "x.gguf", np.arange(12, dtype=np.float32)
    with Gguf() as gguf:
        gguf.add(Shape("weight", (4, 3)), data)
        gguf.write(path)
    assert data.tobytes() in path.read_bytes()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUX" + bytes(100))
    with quiet(), pytest.raises(OSError, match="not a GGUF file"):
        Gguf(path)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with quiet(), Gguf() as gguf, pytest.raises(OSError, match="cannot write"):
        gguf.write(tmp_path / "nowhere" / "x.gguf")


def test_unknown_architecture_has_no_tensors_and_a_reason() -> None:
    with Gguf() as gguf:
        gguf.set({"general.architecture": "nonsense"})
        shapes, reason = gguf.tensors()
    assert shapes == []
    assert "nonsense" in reason


def test_the_log_callback_of_before_comes_back() -> None:
    lines: list[bytes] = []
    callback = llama_cpp.llama_log_callback(lambda level, text, _: lines.append(text))
    log_get = ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_void_p)] * 2)(
        (
            "llama_log_get",
            llama_cpp.llama_cpp._lib,
        )  # a function object of our own: upstream's keeps its types
    )
    before, data = ctypes.c_void_p(), ctypes.c_void_p()
    log_get(ctypes.byref(before), ctypes.byref(data))
    llama_cpp.llama_log_set(callback, None)
    try:
        with quiet(), Gguf() as gguf:
            gguf.set({"general.architecture": "nonsense"})
            gguf.tensors()
        now, _ = ctypes.c_void_p(), ctypes.c_void_p()
        log_get(ctypes.byref(now), ctypes.byref(_))
        assert now.value == ctypes.cast(callback, ctypes.c_void_p).value
    finally:
        llama_cpp.llama_log_set(ctypes.cast(before, llama_cpp.llama_log_callback), data)
