"""Resident memory against the budget: a short run of the campaign."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab.footprint import in_a_process, made


@pytest.mark.full
@pytest.mark.xdist_group("serial")
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory as Linux tells it")
def test_resident_memory_keeps_the_budget(tmp_path: Path) -> None:
    found = in_a_process(made("qwen35", tmp_path), 64, conversations=16, seed=1)
    assert found.evictions > 0
    assert found.counted <= found.budget
    assert found.budget / 2 < found.grown <= found.allowed
