"""What people see: the probe's tables and JSON, the demo's verdict, and the chat in the terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llamahybrid.cli.main import app
from llamahybrid.evaluate import demo
from llamahybrid.evaluate.compare import Comparer, Comparison, Side

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The demo's chat on a tiny model."""
    from llamahybrid import tiny

    model = tiny.make("qwen35", tmp_path_factory.mktemp("demo") / "model.gguf")
    return Comparer(model, {"n_threads": 1, "n_threads_batch": 1}).run(replace(demo.DEMO, n_ctx=8192))


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


def test_the_demo_holds(probed: Comparison) -> None:
    assert demo.holds(probed)
    assert len(probed.ours.records) == 8
    assert probed.ours.decoded < probed.stock.decoded
    assert f"{probed.ours.decoded:,}" in demo.summary(probed)


def test_the_demo_fails_when_a_text_differs(probed: Comparison) -> None:
    *rest, last = probed.ours.records
    wrong = replace(last, generated=(*last.generated[:-1], last.generated[-1] + 1))
    assert not demo.holds(replace(probed, ours=Side([*rest, wrong], 0)))


def test_the_demo_fails_when_one_turn_decodes_more_than_stock(probed: Comparison) -> None:
    first, *rest = probed.ours.records
    assert not demo.holds(replace(probed, ours=Side([replace(first, decoded=first.decoded + 1), *rest], 0)))


def reports(out: str) -> list[dict[str, int]]:
    """The numbers of each turn's line."""
    lines = [line for line in out.splitlines() if "first token after" in line]
    return [
        {name: int(n) for name, n in re.findall(r"(total|matched|cached|left) (\d+)", line)} for line in lines
    ]


def chat(model: Path, typed: str) -> list[dict[str, int]]:
    return reports(run("chat", str(model), "--max-tokens", "8", "--system", "Be brief.", typed=typed))


def test_a_chat_reports_each_turn(tiny_model: TinyModel) -> None:
    first, second = chat(tiny_model("qwen35"), "Hello there\n\nAnd again\n/exit\nnever said\n")
    assert first["cached"] == 0 < second["cached"]
    assert all(turn["total"] == turn["cached"] + turn["left"] for turn in (first, second))


def test_regenerating_decodes_no_prompt_token(tiny_model: TinyModel) -> None:
    first, again = chat(tiny_model("qwen35"), "Hello there\n/regen\n")
    assert again == {"total": first["total"], "matched": first["total"], "cached": first["total"], "left": 0}


def test_editing_drops_what_came_after(tiny_model: TinyModel) -> None:
    first, second, edited = chat(tiny_model("qwen35"), "Hello there\nAnd again\n/edit 1 Hello yours\n")
    assert edited["total"] == first["total"] < second["total"]


@pytest.mark.parametrize("typed", ["/regen", "/edit 3 x", "/edit one x", "/edit 1", "/nonsense"])
def test_what_cannot_be_done_is_answered_with_help(tiny_model: TinyModel, typed: str) -> None:
    out = run("chat", str(tiny_model("qwen35")), typed=f"{typed}\n")
    assert out.count("/edit N TEXT") == 2
    assert reports(out) == []


@pytest.mark.parametrize("command", ["chat", "probe"])
def test_a_file_that_is_no_model_is_one_clear_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(200))
    result = CliRunner().invoke(app, [command, str(tmp_path / "bad.gguf"), "--threads", "1"])
    assert result.exit_code != 0
    assert "Failed to load model" in result.output
    assert "Traceback" not in result.output


def test_the_chat_spells_where_its_history_parts(tiny_model: TinyModel) -> None:
    out = run(
        "chat", str(tiny_model("qwen35")), "--max-tokens", "4", typed="Hello there\n/edit 1 Hello yours\n"
    )
    assert re.search(r"differs\s+at\s+token[^;]+\swas\s", out)
