"""Comparisons as tables: the figures in them, for people."""

from __future__ import annotations

import os
from typing import Any

import llama_cpp
import pytest
from rich.table import Table

import llamahybrid
from llamahybrid.evaluate import tables
from llamahybrid.evaluate.compare import Comparison, Side
from llamahybrid.evaluate.conversation import Record
from llamahybrid.evaluate.workloads import Workload, five_turns
from llamahybrid.request.report import RequestReport


def record(prompt: str, generated: str, decoded: int, seconds: float, **more: object) -> Record:
    rest: dict[str, Any] = {"first_token_seconds": 0.0, "text": "", "usage_cached": None, "report": None}
    ids = tuple(map(ord, prompt)), tuple(map(ord, generated))
    return Record(*ids, decoded, seconds=seconds, **{**rest, **more})


def comparison(workload: Workload, stock: list[Record], ours: list[Record]) -> Comparison:
    return Comparison(workload, Side(stock, workload.measured_from), Side(ours, workload.measured_from))


def rows(table: Table) -> list[list[str]]:
    return [list(cells) for cells in zip(*(column.cells for column in table.columns), strict=True)]


def test_a_scenario_is_one_line() -> None:
    first = record("abc", "xy", 4, 1.0)
    stock, ours = record("abcxyz", "q", 6, 8.0), record("abcxyz", "q", 4, 2.0)
    made = comparison(Workload("name", five_turns, bound=1.5), [first, stock], [first, ours])
    (row,) = rows(tables.comparison_table([made], "title"))
    # known are "abcx"; y was sampled and never decoded
    assert row == ["name", "2", "6", "3.00", "4", "[red]2.000[/]", "0.25", "[green]yes[/]"]
    other = comparison(
        Workload("name", five_turns, bound=2.0), [first, stock], [first, record("abcxyz", "p", 4, 2.0)]
    )
    assert rows(tables.comparison_table([other], "title"))[0][5:] == ["[green]2.000[/]", "0.25", "[red]no[/]"]


def test_five_turns_stand_beside_the_figures_of_the_pull_request() -> None:
    records = [record("a" * n + "z", "bc", n - n // 2, 1.0) for n in (10, 20, 30, 40, 50)]
    table = tables.five_turn_table(comparison(Workload("five", five_turns), records, records))
    assert [row[3] for row in rows(table)] == ["0.0", "0.0", "61.6", "67.9", "72.8"]
    # the second's first 10 tokens were decoded before; 10 were decoded now, one of them of the answer
    assert rows(table)[1][:3] == ["2", "21", "10"]
    assert rows(table)[1][4:] == ["12", f"{100 * 12 / 21:.1f}", "-2"]


def test_the_followup_is_told_in_the_words_of_the_probe_it_repeats() -> None:
    report = RequestReport(total=430, matched=96, cached=95, source="live", reason="")
    made = record("ab", "c", 1, 1.0, report=report)
    line = tables.followup_line(comparison(Workload("x", five_turns), [made], [made]))
    assert line.startswith("long answer, follow-up: total 430, matched 96, cached 95 (ollama PR 15914")
    none = record("ab", "c", 1, 1.0)
    assert "no report" in tables.followup_line(comparison(Workload("x", five_turns), [none], [none]))


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.00123, "1.2"), (0.0999, "99.9"), (0.25, "250"), (2, "2,000")]
)
def test_milliseconds_are_readable_at_both_ends(seconds: float, said: str) -> None:
    assert tables.milliseconds(seconds) == said


def test_a_measurement_names_machine_and_versions() -> None:
    said = tables.machine()
    assert f"{os.cpu_count()} cores" in said
    assert f"llama-cpp-python {llama_cpp.__version__}, llamahybrid {llamahybrid.__version__}" in said
