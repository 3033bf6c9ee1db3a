"""Costs kept between starts: they come back, and are never believed when they make no sense."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamahybrid import Llama, files
from llamahybrid.memory.remembered_costs import RememberedCosts
from llamahybrid.prompt_cache import Costs

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


def test_a_user_without_a_home_folder_keeps_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHYBRID_CACHE_DIR", "~nobody-of-that-name")
    RememberedCosts(b"model", (2, 2)).save(KEPT)
    assert RememberedCosts(b"model", (2, 2)).load() is None


def test_nothing_is_kept_before_prefill_was_measured(folder: Path) -> None:
    RememberedCosts(b"model", ()).save(Costs(token_seconds=1.0))
    assert not folder.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "7",
        '{"version": 2}',
        json.dumps({"version": 99, "token_seconds": 1}),
        "[" * 100_000,
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, content: str) -> None:
    kept = RememberedCosts(b"model", ())
    kept.save(KEPT)
    (file,) = folder.iterdir()
    file.write_text(content)
    assert RememberedCosts(b"model", ()).load() is None
    RememberedCosts(b"model", ()).save(KEPT)
    assert RememberedCosts(b"model", ()).load() == KEPT


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9, "much", None])
def test_costs_that_make_no_sense_are_not_believed(folder: Path, seconds: object) -> None:
    RememberedCosts(b"model", ()).save(KEPT)
    (file,) = folder.iterdir()
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "token_seconds": seconds}))
    assert RememberedCosts(b"model", ()).load() is None


def test_a_folder_that_cannot_be_made_costs_nothing(folder: Path) -> None:
    folder.write_text("in the way")
    kept = RememberedCosts(b"model", ())
    assert kept.load() is None
    kept.save(KEPT)
    assert folder.read_text() == "in the way"


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_disk_that_is_full_keeps_nothing_of_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    kept = RememberedCosts(b"model", ())
    kept.save(KEPT)
    before = [file.read_bytes() for file in folder.iterdir()]

    class Full(io.FileIO):
        write = full

    with monkeypatch.context() as patch:
        if fails == "write":
            patch.setattr(files, "open", Full, raising=False)
        else:
            patch.setattr(os, "replace", full)
        kept.save(replace(KEPT, prefill_seconds=2e-3))
    assert [file.read_bytes() for file in folder.iterdir()] == before


def test_a_model_starts_with_what_was_measured_before(folder: Path, tiny_model: Callable[..., Path]) -> None:
    def opened() -> Llama:
        return Llama(str(tiny_model("qwen35")), n_ctx=512, verbose=False, n_threads=1, n_threads_batch=1)

    first = opened()
    assert first.runner is not None
    assert first.runner.meter.costs().token_seconds > 0, "the trial at the start measures a token"
    assert first.runner.meter.costs().prefill_seconds == 0
    stream = first.generate(list(range(5, 205)), temp=0.0)
    next(stream)
    stream.close()
    known = first.runner.meter.costs()
    assert known.prefill_seconds > 0
    first.close()
    second = opened()
    assert second.runner is not None
    assert second.runner.meter.costs() == known
    second.close()
