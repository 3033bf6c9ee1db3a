"""What a target's process does to the one that is measured in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.capi import openmp
from llamahybrid.evaluate.targets.child import Child

OPTIONS = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 64, "seed": 7}


def test_it_keeps_no_team_of_its_own(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes for a look at the state's size, and then others decode."""
    ended: list[threading.Thread] = []
    monkeypatch.setattr(openmp, "team_ender", lambda: lambda: ended.append(threading.current_thread()))
    child = Child()
    try:
        child.open("stock", str(tiny_model("qwen35")), OPTIONS, 256, 1)
        assert ended == [threading.current_thread()]
    finally:
        child.close()
