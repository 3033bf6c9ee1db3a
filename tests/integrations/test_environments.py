"""The environments of `make integrations`, which have pytest without the plugins of `.venv`."""

from __future__ import annotations

import subprocess
import sys

from tests.integrations.environments import ROOT


def test_tests_are_collected_without_xdist() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "--collect-only",
        "tests/cli/test_console.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
