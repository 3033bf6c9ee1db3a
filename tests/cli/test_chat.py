"""The chat in the terminal: what typed lines do, and what is said after each turn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from llamahybrid.cli.chat import turn_line
from llamahybrid.cli.main import app
from llamahybrid.request.report import RequestReport

TinyModel = Callable[..., Path]


def run(model: Path, typed: str, *arguments: str) -> str:
    arguments = ("chat", str(model), "--threads", "1", "--max-tokens", "8", *arguments)
    result = CliRunner().invoke(app, arguments, input=typed, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def reports(out: str) -> list[dict[str, int]]:
    """The numbers of each turn's line."""
    lines = [line for line in out.splitlines() if "first token after" in line]
    return [
        {name: int(n) for name, n in re.findall(r"(total|matched|cached|left) (\d+)", line)} for line in lines
    ]


def chat(model: Path, typed: str) -> list[dict[str, int]]:
    return reports(run(model, typed, "--system", "Be brief."))


def test_a_chat_reports_each_turn(tiny_model: TinyModel) -> None:
    first, second = chat(tiny_model("qwen35"), "Hello there\n\nAnd again\n/exit\nnever said\n")
    assert first["cached"] == 0 < second["cached"]
    assert all(turn["total"] == turn["cached"] + turn["left"] for turn in (first, second))


def test_regenerating_decodes_no_prompt_token(tiny_model: TinyModel) -> None:
    first, again = chat(tiny_model("qwen35"), "Hello there\n/regen\n")
    assert again == {"total": first["total"], "matched": first["total"], "cached": first["total"], "left": 0}


def test_editing_drops_what_came_after(tiny_model: TinyModel) -> None:
    out = run(tiny_model("qwen35"), "Hello there\nAnd again\n/edit 1 Hello yours\n", "--system", "Be brief.")
    first, second, edited = reports(out)
    assert edited["total"] == first["total"] < second["total"]
    assert re.search(r"differs\s+at\s+token[^;]+\swas\s", out), "it spells where its history parts"


def test_what_cannot_be_done_is_answered_with_help(tiny_model: TinyModel) -> None:
    wrong = ("/regen", "/edit 3 x", "/edit one x", "/edit 1", "/nonsense")
    out = run(tiny_model("qwen35"), "".join(f"{line}\n" for line in wrong))
    assert out.count("/edit N TEXT") == 1 + len(wrong)
    assert reports(out) == []


def line(**more: Any) -> str:
    return turn_line(RequestReport(**{"total": 9, "matched": 4, "cached": 4, "source": "live", **more}))


def test_a_reason_stands_at_the_end_where_there_is_one() -> None:
    plain = line(reason="", first_token_seconds=0.0123)
    assert plain == "total 9, matched 4, cached 4, left 5, first token after 12 ms"
    assert line(reason="whole prompt known", first_token_seconds=0.0123) == f"{plain}; whole prompt known"


def test_drafts_are_told_where_there_were_any() -> None:
    told = line(reason="", drafted=12, accepted=9, rollbacks={"planes": 2, "snapshot": 1})
    assert told.endswith(", drafted 12, accepted 9, taken back 2 by planes, 1 by snapshot")
    assert line(reason="", drafted=3, accepted=3).endswith(", drafted 3, accepted 3")
    assert "draft" not in line(reason="")
