"""What a library has is told from its file where it cannot be loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from llamahybrid.engine import symbols
from llamahybrid.upstream import OPTIONAL
from tests.engine.compiled import cuda_engine


def test_a_gpu_build_needs_no_driver_to_be_looked_at(tmp_path: Path) -> None:
    folder = cuda_engine(tmp_path / "lib")
    with pytest.raises(OSError, match="libcuda"):
        ctypes.CDLL(str(folder / "libllama.so"))
    assert symbols.optional(folder) == ("llama_n_rs_seq", "llama_state_seq_get_data_range")
    assert set(symbols.optional(folder)) < set(OPTIONAL)
