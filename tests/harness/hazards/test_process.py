"""The memory of the process: how much is left, and how much was held."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from llamahybrid.harness.hazards.process import memory_left, peak_memory


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_memory_runs_out_when_told_to_and_only_then() -> None:
    with memory_left(64 << 20), pytest.raises(MemoryError):
        np.empty(1 << 30, np.uint8)
    assert np.empty(1 << 30, np.uint8).nbytes == 1 << 30


@pytest.mark.skipif(sys.platform == "win32", reason="peak memory is not known there")
def test_the_peak_is_what_was_held_at_most() -> None:
    before = peak_memory()
    np.ones(256 << 20, np.uint8)
    assert peak_memory() >= min(before, 256 << 20)
    assert peak_memory() >= 256 << 20
    assert peak_memory() >= before
