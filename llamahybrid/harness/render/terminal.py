"""A report in the terminal, whole at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable

from llamahybrid.harness.render.document import TEXTS, Table, footer, headline, sections
from llamahybrid.harness.report import Report
from llamahybrid.harness.report_diff import Change, Kind

_COLOURS = {"ok": "green", "bad": "red", "cannot tell": "yellow"}
_MARKS = {"ok": "-", "bad": "!", "cannot tell": "?"}
_LONGEST = 38
"""Letters of a name that stays in one line."""
_WHOLE = frozenset(("least", "decoded", "ratio", "answers", "verdict", "hazard"))
"""Columns that are never wrapped."""
_MOST = 8
"""Lines of a list; the JSON report has all."""
_KINDS: tuple[tuple[Kind, str], ...] = (("worse", "red"), ("better", "green"), ("note", "dim"))


def show(report: Report, console: Console) -> None:
    """Print the report."""
    for section in sections(report):
        if section.outcome is not None:
            console.print(f"[bold]{escape(section.title)}[/] {_coloured(section.outcome)}", highlight=False)
        if section.about:
            console.print(escape(section.about), style="dim", highlight=False)
        for found in section.findings:
            mark = f"[{_COLOURS[found.outcome]}]{_MARKS[found.outcome]}[/] "
            _hanging(console, mark, found.text, 2)
        for table in section.tables:
            console.print(_table(table))
        for title, texts in section.lists.items():
            if any("hazard" in table.head for table in section.tables):
                continue  # the table has the first lines
            console.print(f"{title}:", highlight=False)
            more = [f"and {len(texts) - _MOST} more, in the JSON report"] if len(texts) > _MOST else []
            for text in (*texts[:_MOST], *more):
                _hanging(console, "- ", text.partition("\n")[0], 2)
        console.print()
    console.print(headline(report), style="bold", highlight=False)
    console.print(escape(footer(report)), style="dim", highlight=False)


def _hanging(console: Console, mark: str, text: str, indent: int = 0) -> None:
    """Print a text with its wrapped lines beside the mark."""
    grid = RichTable.grid()
    grid.add_row(mark, escape(text))
    console.print(Padding(grid, (0, indent)), highlight=False)


def _table(table: Table) -> RichTable:
    """Return a table whose names are folded, never cut."""
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for i, name in enumerate(table.head):
        longest = max((len(row[i]) for row in table.rows), default=0)
        shown.add_column(
            escape(name),
            justify="left" if name in TEXTS else "right",
            overflow="fold",
            no_wrap=name in _WHOLE,
            min_width=min(longest, _LONGEST) if name == "workload" and "verdict" in table.head else None,
        )
    for row in table.rows:
        shown.add_row(*(_coloured(cell) if cell in _COLOURS else escape(cell) for cell in row))
    return shown


def _coloured(outcome: str) -> str:
    return f"[{_COLOURS[outcome]}]{outcome}[/]"


def show_changes(changes: Sequence[Change], console: Console) -> None:
    """Print changes for the worse, then for the better, then notes."""
    for kind, colour in _KINDS:
        for change in changes:
            if change.kind == kind:
                _hanging(console, f"[{colour}]{kind:<8}[/]", f"{change.where}: {change.text}")
    if all(change.kind == "note" for change in changes):
        console.print("nothing got better or worse")
