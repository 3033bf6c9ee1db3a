"""Functions of a library that cannot be loaded are read from its file."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llamahybrid.engine import libraries
from tests.engine.compiled import cuda_engine, shared


def test_gpu_build_is_inspected_without_its_driver(tmp_path: Path) -> None:
    folder = cuda_engine(tmp_path / "lib")
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(str(folder / "libllama.so"))
    libraries.require_loadable(folder)
    assert libraries.optional(folder) == ("llama_n_rs_seq", "llama_state_seq_get_data_range")


def test_backends_of_a_static_build_are_read_from_its_names(tmp_path: Path) -> None:
    code = "".join(f"void ggml_backend_{name}_reg(void){{}}" for name in ("cpu", "cuda", "vk"))
    shared(tmp_path / "lib" / "libllama.so", code)
    assert libraries.backends(tmp_path / "lib") == {"cpu", "cuda", "vulkan"}
