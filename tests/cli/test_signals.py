"""Unhandled signals are delivered again."""

from __future__ import annotations

import os
import signal
import time

import pytest

from llamahybrid.cli.signals import delivered

pytestmark = pytest.mark.xdist_group("serial")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to one thread on Windows")
def test_missed_signal_is_delivered_again() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with delivered(lambda: len(came) >= 2):  # as where readline missed the first
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 60
            while len(came) < 2 and time.monotonic() < deadline:
                signal.sigtimedwait([], 0.05)
        assert came == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
