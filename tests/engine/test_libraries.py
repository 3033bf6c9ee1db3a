"""Functions of a library that cannot be loaded are read from its file."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llamahybrid.engine import libraries
from tests.engine.compiled import cuda_engine


def test_gpu_build_is_inspected_without_its_driver(tmp_path: Path) -> None:
    folder = cuda_engine(tmp_path / "lib")
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(str(folder / "libllama.so"))
    libraries.require_loadable(folder)
    assert libraries.optional(folder) == ("llama_n_rs_seq", "llama_state_seq_get_data_range")
