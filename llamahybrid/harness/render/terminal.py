"""A report in the terminal: sentences, then a table a target, whole at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from llamahybrid.harness.render.dedupe import alike
from llamahybrid.harness.render.formatting import UNTOLD, answers, counted, length, ratio
from llamahybrid.harness.render.sentences import headline, of_target, outcome, overall, tabled
from llamahybrid.harness.report import Outcome, Report, TargetFigures, WorkloadFigures
from llamahybrid.harness.report_diff import Changes, Kind

COLOURS: dict[Outcome, str] = {"ok": "green", "bad": "red", "cannot tell": "yellow"}


_MARKS: dict[Outcome, str] = {"ok": "-", "bad": "!", "cannot tell": "?"}

_LONGEST = 38
"""A name up to here is in one line, beside figures and a verdict."""

_KINDS: tuple[tuple[Kind, str], ...] = (("worse", "red"), ("better", "green"), ("note", "dim"))


def show(report: Report, console: Console) -> None:
    """Print it."""
    for target in report.targets:
        console.print(f"[bold]{escape(target.name)}[/] {coloured(outcome(target))}", highlight=False)
        for said in of_target(target):
            mark = f"[{COLOURS[said.outcome]}]{_MARKS[said.outcome]}[/] "
            grid = Table.grid()
            grid.add_row(mark, escape(said.text))
            console.print(Padding(grid, (0, 2)), highlight=False)
        if tabled(target):
            console.print(table(target))
        for kind, lines in (("bad", faults(target)), ("miss", misses(target))):
            for line in first(lines):
                console.print(f"{kind}: {escape(line)}", highlight=False)
        console.print()
    if len(report.targets) > 1 and any(map(tabled, report.targets)):
        console.print(side_by_side(report))
    console.print(headline(report), style="bold", highlight=False)
    known = ", ".join([*report.machine.values(), *report.models])
    console.print(escape(f"{report.made}: {known}"), style="dim", highlight=False)


def table(target: TargetFigures) -> Table:
    """A line a workload. A name that is too long is folded, never cut."""
    longest = max((len(w.workload + length(w.scale)) for w in tabled(target)), default=0)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    shown.add_column("workload", overflow="fold", min_width=min(longest, _LONGEST))
    for head in ("least", "decoded", "ratio"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("answers", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for w in tabled(target):
        numbers = counted(w.least), counted(w.decoded), ratio(w.ratio), answers(w.requests)
        shown.add_row(escape(w.workload + length(w.scale)), *numbers, coloured(overall(w.verdicts)))
    return shown


def side_by_side(report: Report) -> Table:
    """A line a workload: of each target decoded over least, and time and texts beside the first target's."""
    first, *others = report.targets
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=f"beside {escape(first.name)}")
    shown.add_column("workload", overflow="fold")
    shown.add_column(escape(first.name), justify="right", overflow="fold")
    for target in others:
        for head in (escape(target.name), "time", "texts"):
            shown.add_column(head, justify="right", overflow="fold")
    tables = [{w.workload: w for w in tabled(target)} for target in others]
    for w in tabled(first):
        cells = [escape(w.workload), ratio(w.ratio)]
        for figures in tables:
            cells += _beside(w, figures.get(w.workload))
        shown.add_row(*cells)
    return shown


def _beside(first: WorkloadFigures, other: WorkloadFigures | None) -> tuple[str, str, str]:
    """Decoded over least, the share of the first one's time, and whether all answers are the same."""
    if other is None:
        return "", "", ""
    one, two = (sum(request.seconds for request in w.requests) for w in (first, other))
    same = [r.text_hash for r in first.requests] == [r.text_hash for r in other.requests]
    return ratio(other.ratio), f"{two / one:.2f}" if one else UNTOLD, "same" if same else "differ"


def faults(target: TargetFigures) -> list[str]:
    """Each verdict that is bad, by its name, where, and why."""
    named = [(w.workload, verdict) for w in target.workloads for verdict in w.verdicts]
    named += [("native memory", verdict) for verdict in target.hazards]
    return [f"{v.name}, {where}: {v.detail}" for where, v in named if v.outcome == "bad"]


def misses(target: TargetFigures) -> list[str]:
    """Why tokens were not reused, in the workloads of the table: probes part on purpose."""
    return [each.text for each in alike(request for w in tabled(target) for request in w.requests)]


def first(lines: Sequence[str], most: int = 8) -> list[str]:
    """The first few; all are in the report."""
    more = [f"and {len(lines) - most} more, in the JSON report"] if len(lines) > most else []
    return [*lines[:most], *more]


def coloured(result: Outcome) -> str:
    """An outcome as rich markup."""
    return f"[{COLOURS[result]}]{result}[/]"


def show_changes(changes: Changes, console: Console) -> None:
    """Print what got worse, then what got better, then what else is to be said."""
    for kind, colour in _KINDS:
        for change in changes.of(kind):
            grid = Table.grid()
            grid.add_row(f"[{colour}]{kind:<8}[/]", escape(f"{change.where}: {change.text}"))
            console.print(grid, highlight=False)
    if not (changes.of("worse") or changes.of("better")):
        console.print("nothing got better or worse")
