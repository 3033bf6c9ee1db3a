"""`llamahybrid probe`: its scenarios and its output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from llamahybrid.harness.probe import chosen, probe

TinyModel = Callable[..., Path]
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


def run(model: Path, scenario: str, *, as_json: bool = False) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    probe(model, [scenario], ONE_THREAD, as_json=as_json, console=console)
    return console.export_text()


def test_json_counts_what_stock_decodes(tiny_model: TinyModel) -> None:
    (scenario,) = json.loads(run(tiny_model("qwen35"), "regenerate x 6", as_json=True))["scenarios"]
    assert scenario["texts_equal"] is True
    assert [r["decoded"] for r in scenario["stock"]["requests"]] == [339] * 7
    assert scenario["ours"]["decoded"] < scenario["stock"]["decoded"] == 6 * 339


def test_unknown_scenarios_are_refused() -> None:
    assert [workload.name for workload in chosen(["five turns"], template=False)] == ["five turns"]
    with pytest.raises(ValueError, match=r"no scenario called nonsense; there are: .*mid-generation"):
        chosen(["five turns", "nonsense"], template=True)
    with pytest.raises(ValueError, match="no chat template"):
        chosen(["chat: edit a message"], template=False)
