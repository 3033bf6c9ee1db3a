"""Conversations of random sizes, played with tokens alone: no length is the one the schedule was made for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_conversations_of_any_sizes_lose_little() -> None:
    """The bounds of mean, 95th percentile and named sizes are the benchmark's."""
    options = ["--draws", "250", "--first", "20000", "--longest", "2048"]
    command = [sys.executable, "-m", "benchmarks.draws", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
