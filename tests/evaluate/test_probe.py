"""`llamahybrid probe`: which scenarios run, and what is said of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from llamahybrid.evaluate.compare import WORKLOADS
from llamahybrid.evaluate.probe import chosen, probe

TinyModel = Callable[..., Path]
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}


def run(model: Path, scenario: str, *, as_json: bool = False) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    probe(model, [scenario], ONE_THREAD, as_json=as_json, console=console)
    return console.export_text()


def test_the_followup_is_said_in_ollamas_words(tiny_model: TinyModel) -> None:
    out = run(tiny_model("qwen35"), "long answer, follow-up")
    said = re.search(r"total (\d+), matched (\d+), cached (\d+)", out)
    assert said, out
    total, matched, cached = map(int, said.groups())
    assert (total, matched) == (430, 96)
    assert cached >= 94


def test_five_turns_stand_beside_theirs(tiny_model: TinyModel) -> None:
    out = run(tiny_model("qwen35"), "five turns")
    rows = [row for row in out.splitlines() if re.match(r"│ [1-5] ", row)]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [row[1] for row in cells] == ["57", "192", "305", "443", "603"]
    assert [row[3] for row in cells] == ["0.0", "0.0", "61.6", "67.9", "72.8"]
    assert all(int(row[6]) <= 1 for row in cells)


def test_json_counts_what_stock_decodes(tiny_model: TinyModel) -> None:
    (scenario,) = json.loads(run(tiny_model("qwen35"), "regenerate x 6", as_json=True))["scenarios"]
    assert scenario["texts_equal"] is True
    assert [r["decoded"] for r in scenario["stock"]["requests"]] == [339] * 7
    assert scenario["ours"]["decoded"] < scenario["stock"]["decoded"] == 6 * 339


def test_without_names_all_that_suit_the_model_run_but_the_very_long_prompt() -> None:
    every = {workload.name for workload in chosen((), template=True)}
    assert set(WORKLOADS) - every == {"prompt of 49,623 tokens"}
    plain = {workload.name for workload in chosen((), template=False)}
    assert every - plain == {name for name in WORKLOADS if name.startswith("chat: ")}


def test_a_name_must_be_known_and_suit_the_model() -> None:
    assert [workload.name for workload in chosen(["five turns"], template=False)] == ["five turns"]
    with pytest.raises(ValueError, match=r"no scenario called nonsense; there are: .*mid-generation"):
        chosen(["five turns", "nonsense"], template=True)
    with pytest.raises(ValueError, match="no chat template"):
        chosen(["chat: edit a message"], template=False)
