"""Real timer signals: a short campaign, in a process of its own, since the test runner has a timer, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lab import signal_fuzz


@pytest.mark.parametrize("arch", signal_fuzz.ARCHITECTURES)
def test_an_interrupt_at_any_moment(arch: str) -> None:
    campaign = [sys.executable, "-m", "tests.lab.signal_fuzz", "--seconds", "120", "--seed", "7"]
    done = subprocess.run(
        [*campaign, "--count", "50", "--arch", arch], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 rounds" in done.stdout


def test_the_timer_interrupts_what_takes_longer() -> None:
    child = (
        "import time; from tests.lab.signal_fuzz import Timer\n"
        "timer = Timer()\n"
        "with timer.installed():\n"
        "    print(timer.interrupts(0.05, lambda: time.sleep(20)), timer.interrupts(20, int))\n"
    )
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"]
