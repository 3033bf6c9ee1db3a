"""The same program with stock llama-cpp-python and with ours installed: what was said, what was decoded."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import llama_cpp
import pytest

import llamahybrid
from tests.lab.waiting import listens, wait_until

SYSTEM = "You are a guide to the rivers of Austria, and answer briefly and to the point. " * 3
ASKED = ("Which rivers flow through Vienna?", "And which of them through Graz?", "Name a third one, please.")

SETTINGS: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1, "seed": 7}

Said: TypeAlias = Sequence[object]
Scenario: TypeAlias = Callable[[], tuple[Said, Any]]
"""Runs the program: what was said, and the `llama_cpp.Llama` that it used, still open."""


def needed(name: str, environment: str) -> Any:
    """The package; where it is not installed the tests are skipped, but not in its own environment."""
    if os.environ.get("LLAMAHYBRID_INTEGRATION") == environment:
        return importlib.import_module(name)
    return pytest.importorskip(name)


@dataclass(frozen=True)
class Side:
    """Result of a run."""

    said: Said
    decoded: int
    llm: Any


def side(scenario: Scenario) -> Side:
    """Run it as things are installed now."""
    said, llm = scenario()
    counted = llama_cpp.llama_perf_context(llm.ctx)  # since the context was made
    return Side(said, int(counted.n_p_eval + counted.n_eval), llm)


def stock_and_ours(scenario: Scenario, **defaults: Any) -> tuple[Side, Side]:
    """Both; the package was imported before either, so that its classes are bound early."""
    stock = side(scenario)
    assert not isinstance(stock.llm, llamahybrid.Llama)
    llamahybrid.install(**defaults)
    try:
        ours = side(scenario)
    finally:
        llamahybrid.uninstall()
    assert isinstance(ours.llm, llamahybrid.Llama)
    assert any(stock.said), "nothing was said, so nothing was compared"
    return stock, ours


def reuses(scenario: Scenario, share: float = 0.7, **defaults: Any) -> Side:
    """The same is said with ours, and at most `share` of what stock decodes is decoded; our side."""
    stock, ours = stock_and_ours(scenario, **defaults)
    assert ours.said == stock.said
    assert ours.decoded <= share * stock.decoded, f"{ours.decoded} of {stock.decoded} tokens"
    return ours


@contextmanager
def listening(command: Sequence[str], port: int, log: Path, **options: Any) -> Iterator[None]:
    """Run a server until the block ends, which begins once it listens on its port."""
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **options)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        return listens(port)

    try:
        wait_until(ready)
        yield
    finally:
        process.terminate()
        process.wait(60)
