"""What a target's process does to the one that is measured in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llamahybrid.capi import openmp
from llamahybrid.evaluate.targets.base import Ask
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


@pytest.mark.parametrize("n_bytes", [None, 0])
def test_ours_without_a_cache_knows_no_salts(
    n_bytes: int | None, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMAHYBRID_RAM", raising=False)
    if n_bytes is not None:
        monkeypatch.setenv("LLAMAHYBRID_RAM", str(n_bytes))
    child = Child()
    try:
        about = child.open("ours", str(tiny_model("qwen35")), OPTIONS, 256, 1)
        assert about["salts"] is (n_bytes is None)
    finally:
        child.close()


def test_what_a_class_reports_is_a_number_of_any_integer_type(tiny_model: Callable[..., Path]) -> None:
    child = Child()
    try:
        child.open("stock", str(tiny_model("qwen35")), OPTIONS, 256, 1)
        ask = Ask(2, (5, 6, 7)).as_json()
        child.llm.last_request = SimpleNamespace(cached=np.int64(0))
        assert type(child.ask(ask)["reported"]) is int
        child.llm.last_request = SimpleNamespace(cached=1.5)
        with pytest.raises(TypeError):
            child.ask(ask)
    finally:
        child.close()


def test_a_session_of_ours_knows_nothing_of_the_one_before(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLAMAHYBRID_RAM` gives a program one cache: prompts of one probe would be hits in the next."""
    monkeypatch.setenv("LLAMAHYBRID_RAM", "16MiB")
    child = Child()
    try:
        for _ in range(2):
            child.open("ours", str(tiny_model("qwen35")), OPTIONS, 256, 1)
            assert child.llm.prompt_cache.ram_bytes == 16 << 20
            assert child.ask(Ask(2, tuple(range(5, 69))).as_json())["reported"] == 0
    finally:
        child.close()
