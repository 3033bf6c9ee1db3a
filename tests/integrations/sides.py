"""The same program with stock llama-cpp-python and with ours installed: what was said, what was decoded."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

import llamahybrid
from llamahybrid.evaluate.counters import DecodeCounter

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
    """One run."""

    said: Said
    decoded: int
    llm: Any


def side(scenario: Scenario) -> Side:
    """Run it as things are installed now."""
    said, llm = scenario()
    counter = DecodeCounter.__new__(
        DecodeCounter
    )  # since the context was made, whatever that was told to print
    counter._llm, counter._last = llm, 0
    return Side(said, counter.take(), llm)


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
