"""`llamahybrid probe`: which scenarios run, and what is said of them."""

from __future__ import annotations

import json
import re

from typer.testing import CliRunner

from llamahybrid.cli.main import app


def run(*arguments: str, typed: str = "") -> str:
    result = CliRunner().invoke(app, [*arguments, "--threads", "1"], input=typed, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_probe_says_the_followup_in_ollamas_words(tiny_model: TinyModel) -> None:
    out = run("probe", str(tiny_model("qwen35")), "--scenario", "long answer, follow-up")
    said = re.search(r"total (\d+), matched (\d+), cached (\d+)", out)
    assert said, out
    total, matched, cached = map(int, said.groups())
    assert (total, matched) == (430, 96)
    assert cached >= 94


def test_the_probe_shows_five_turns_beside_theirs(tiny_model: TinyModel) -> None:
    out = run("probe", str(tiny_model("qwen35")), "--scenario", "five turns")
    rows = [row for row in out.splitlines() if re.match(r"│ [1-5] ", row)]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [row[1] for row in cells] == ["57", "192", "305", "443", "603"]
    assert [row[3] for row in cells] == ["0.0", "0.0", "61.6", "67.9", "72.8"]
    assert all(int(row[6]) <= 1 for row in cells)


def test_the_probe_as_json_counts_what_stock_decodes(tiny_model: TinyModel) -> None:
    arguments = ("--json", "--scenario", "regenerate x 6")
    (scenario,) = json.loads(run("probe", str(tiny_model("qwen35")), *arguments))["scenarios"]
    assert scenario["texts_equal"] is True
    assert [r["decoded"] for r in scenario["stock"]["requests"]] == [339] * 7
    assert scenario["ours"]["decoded"] < scenario["stock"]["decoded"] == 6 * 339


def test_an_unknown_scenario_is_refused_with_the_list(tiny_model: TinyModel) -> None:
    result = CliRunner().invoke(app, ["probe", str(tiny_model("qwen35")), "--scenario", "nonsense"])
    assert result.exit_code == 2
    assert "mid-generation" in result.output
