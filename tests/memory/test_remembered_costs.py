"""Costs kept between starts: they come back, and are never believed when they make no sense."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamahybrid.memory.remembered_costs import RememberedCosts
from llamahybrid.prompt_cache import Costs
from tests.conftest import take

pytestmark = pytest.mark.usefixtures("measured_costs")

KEPT = Costs(token_seconds=1e-2, prefill_seconds=1e-3, snapshot_seconds=1e-4, restore_seconds=2e-4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("LLAMAHYBRID_COSTS")
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", str(tmp_path))
    return tmp_path / "costs"


def test_costs_come_back(folder: Path) -> None:
    RememberedCosts(b"model", (2, 2)).save(KEPT)
    assert RememberedCosts(b"model", (2, 2)).load() == KEPT
    assert RememberedCosts(b"model", (4, 2)).load() is None
    assert RememberedCosts(b"other", (2, 2)).load() is None
    assert len(list(folder.iterdir())) == 1, "no temporary file is left"


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 99, "token_seconds": 1}', "[" * 100_000, "\x00\xff"]
)
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, content: str) -> None:
    kept = RememberedCosts(b"model", ())
    kept.save(KEPT)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert RememberedCosts(b"model", ()).load() is None
    RememberedCosts(b"model", ()).save(KEPT)
    assert RememberedCosts(b"model", ()).load() == KEPT


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9, "much", None])
def test_costs_that_make_no_sense_are_not_believed(folder: Path, seconds: object) -> None:
    RememberedCosts(b"model", ()).save(KEPT)
    (file,) = folder.iterdir()
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "token_seconds": seconds}))
    assert RememberedCosts(b"model", ()).load() is None


def test_a_disk_that_is_full_keeps_the_earlier_costs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    RememberedCosts(b"model", ()).save(KEPT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        RememberedCosts(b"model", ()).save(replace(KEPT, prefill_seconds=2e-3))
    assert RememberedCosts(b"model", ()).load() == KEPT
    assert len(list(folder.iterdir())) == 1, "no temporary file is left"


def test_a_model_starts_with_the_costs_of_its_last_start(
    folder: Path, open_model: Callable[..., Any]
) -> None:
    first = open_model()
    assert first.runner.meter.costs().token_seconds > 0, "the trial at the start measures a token"
    assert first.runner.meter.costs().prefill_seconds == 0
    take(first, list(range(5, 205)), 1)
    known = first.runner.meter.costs()
    assert known.prefill_seconds > 0
    first.close()
    assert open_model().runner.meter.costs() == known
