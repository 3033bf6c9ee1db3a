"""Measured comparisons as tables for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import llama_cpp
from rich.table import Table

from llamahybrid.engine import bindings
from llamahybrid.harness.ab_test import Comparison
from llamahybrid.harness.oracle import least_decodes

PR_22534_CACHED = (0.0, 0.0, 61.6, 67.9, 72.8)
"""Per cent of each prompt that llama.cpp PR 22534 reports as cached in its five-turn table."""

OLLAMA_15914 = "ollama PR 15914: cached 30 before, 94 after"


def machine() -> str:
    """The machine and the versions a measurement belongs to, in one line."""
    host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    versions = f"llama-cpp-python {llama_cpp.__version__}, llamahybrid {bindings.version('llamahybrid')}"
    return f"{host}, Python {platform.python_version()}, {versions}"


def yes(equal: bool) -> str:
    """A coloured yes or no."""
    return "[green]yes[/]" if equal else "[red]no[/]"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, readable at both ends."""
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def table_of(title: str, first: str, *numbers: str) -> Table:
    """A table whose columns but the first are numbers."""
    table = Table(first, title=title)
    for head in numbers:
        table.add_column(head, justify="right")
    return table


def comparison_table(comparisons: Sequence[Comparison], title: str) -> Table:
    """One line a scenario: least possible, decoded and ratio of each, time, and whether the texts agree."""
    decoded = "stock decoded", "ratio", "ours decoded", "ratio"
    table = table_of(title, "scenario", "least", *decoded, "time ours/stock", "texts equal")
    for c in comparisons:
        kept = c.ours.ratio <= c.workload.bound
        table.add_row(
            c.workload.name,
            f"{c.ours.least:,}",
            f"{c.stock.decoded:,}",
            f"{c.stock.ratio:.2f}",
            f"{c.ours.decoded:,}",
            f"[{'green' if kept else 'red'}]{c.ours.ratio:.3f}[/]",
            f"{c.ours.seconds / c.stock.seconds:.2f}",
            yes(c.texts_equal),
        )
    return table


def five_turn_table(comparison: Comparison) -> Table:
    """Ours beside llama.cpp PR 22534's own five-turn table."""
    cached = "theirs cached %", "ours cached", "ours cached %"
    title = "five turns of llama.cpp PR 22534"
    table = table_of(title, "turn", "prompt", "matched", *cached, "matched, not cached")
    records = comparison.ours.records
    for turn, (record, least, theirs) in enumerate(
        zip(records, least_decodes(records), PR_22534_CACHED, strict=True), 1
    ):
        total = len(record.prompt)
        matched = total - (least - max(0, len(record.generated) - 1))
        table.add_row(
            str(turn),
            str(total),
            str(matched),
            f"{theirs:.1f}",
            str(record.cached),
            f"{100 * record.cached / total:.1f}",
            str(matched - record.cached),
        )
    return table


def followup_line(comparison: Comparison) -> str:
    """The follow-up of the ollama probe in that probe's words."""
    report = comparison.ours.records[-1].report
    words = (
        f"total {report.total}, matched {report.matched}, cached {report.cached}" if report else "no report"
    )
    return f"long answer, follow-up: {words} ({OLLAMA_15914})"
