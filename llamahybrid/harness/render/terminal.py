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
from llamahybrid.harness.render.sentences import (
    HAZARD,
    headline,
    of_target,
    outcome,
    overall,
    tabled,
    verdicts,
)
from llamahybrid.harness.report import Outcome, Report, TargetFigures, WorkloadFigures
from llamahybrid.harness.report_diff import Changes, Kind

COLOURS: dict[Outcome, str] = {"ok": "green", "bad": "red", "cannot tell": "yellow"}


_MARKS: dict[Outcome, str] = {"ok": "-", "bad": "!", "cannot tell": "?"}

_LONGEST = 38
"""Letters of a name that stays in one line."""

_KINDS: tuple[tuple[Kind, str], ...] = (("worse", "red"), ("better", "green"), ("note", "dim"))


def show(report: Report, console: Console) -> None:
    """Print the report."""
    for target in report.targets:
        _show_target(target, console)
    if measured := [w for target in report.targets for w in target.workloads if w.times is not None]:
        console.print(times_table(report))
        if any(w.times is not None and w.times.saving for w in measured):
            console.print(savings_table(report))
    elif len(report.targets) > 1 and any(map(tabled, report.targets)):
        console.print(side_by_side(report))
    console.print(headline(report), style="bold", highlight=False)
    known = ", ".join([*(f"{name} {value}" for name, value in report.machine.items()), *report.models])
    console.print(escape(f"{report.made}: {known}"), style="dim", highlight=False)


def _show_target(target: TargetFigures, console: Console) -> None:
    """Print verdicts, workloads and hazards of a target; nothing of one that has times alone."""
    if not (target.error or verdicts(target)):
        return
    console.print(f"[bold]{escape(target.name)}[/] {coloured(outcome(target))}", highlight=False)
    for said in of_target(target):
        mark = f"[{COLOURS[said.outcome]}]{_MARKS[said.outcome]}[/] "
        grid = Table.grid()
        grid.add_row(mark, escape(said.text))
        console.print(Padding(grid, (0, 2)), highlight=False)
    if target.hazards and not target.workloads:
        console.print(hazards_table(target))
    else:
        if any(w.verdicts for w in tabled(target)):
            console.print(table(target))
        for kind, lines in (("bad", faults(target)), ("miss", misses(target))):
            for line in first(lines):
                console.print(f"{kind}: {escape(line)}", highlight=False)
    console.print()


def table(target: TargetFigures) -> Table:
    """Return a row for each workload. A long name is folded, never cut."""
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


def hazards_table(target: TargetFigures) -> Table:
    """Return a row for each hazard of a libllama."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("hazard", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    shown.add_column("what happened", overflow="fold")
    for each in target.hazards:
        shown.add_row(
            each.name.removeprefix(HAZARD), coloured(each.outcome), escape(each.detail.partition("\n")[0])
        )
    return shown


def times_table(report: Report) -> Table:
    """Return a row for each workload on each target, with the measurements of `llamahybrid bench`."""
    scale = next((w.scale for target in report.targets for w in target.workloads), 1.0)
    rounds = report.machine.get("rounds", "?")
    title = f"{', '.join(report.models)}, median of {rounds}{length(scale)}"
    shown = Table("workload", "target", title=escape(title), box=SIMPLE_HEAD, pad_edge=False)
    for head in ("decoded / least", "first token", "tokens/s", "MiB a chat"):
        shown.add_column(head, justify="right")
    names = dict.fromkeys(w.workload for target in report.targets for w in target.workloads)
    for name in names:
        shown.add_section()
        label = escape(name)
        for target in report.targets:
            w = next((each for each in target.workloads if each.workload == name), None)
            if w is None or w.times is None or w.times.saving is not None:
                continue
            times = w.times
            shown.add_row(
                label,
                escape(target.name),
                ratio(w.ratio),
                "" if times.ttft is None else f"{times.ttft:.3f} s",
                "" if times.tokens_per_second is None else f"{times.tokens_per_second:.1f}",
                "" if times.resident is None else f"{times.resident / (1 << 20):.1f}",
            )
            label = ""
    return shown


def savings_table(report: Report) -> Table:
    """Return the cost of saving and restoring a state on each target, beside a memcpy of as many bytes."""
    shown = Table("target", title="a state saved and restored in memory")
    shown.add_column("MiB", justify="right", no_wrap=True)
    for head in ("memcpy", "save", "restore", "save / memcpy", "restore / memcpy"):
        shown.add_column(head, justify="right")
    for target in report.targets:
        for w in target.workloads:
            found = w.times and w.times.saving
            if found:
                milliseconds = (f"{1e3 * s:.2f} ms" for s in (found.memcpy, found.save, found.restore))
                ratios = (f"{seconds / found.memcpy:.1f}" for seconds in (found.save, found.restore))
                shown.add_row(escape(target.name), f"{found.bytes / (1 << 20):.1f}", *milliseconds, *ratios)
    return shown


def side_by_side(report: Report) -> Table:
    """Return a row for each workload: ratios, times and texts compared with the first target."""
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
    """Return the ratio, the time as a share of the first target's, and the comparison of all answers."""
    if other is None:
        return "", "", ""
    one, two = (sum(request.seconds for request in w.requests) for w in (first, other))
    same = [r.text_hash for r in first.requests] == [r.text_hash for r in other.requests]
    return ratio(other.ratio), f"{two / one:.2f}" if one else UNTOLD, "same" if same else "differ"


def faults(target: TargetFigures) -> list[str]:
    """Return a line for each bad verdict."""
    named = [(w.workload, verdict) for w in target.workloads for verdict in w.verdicts]
    named += [("native memory", verdict) for verdict in target.hazards]
    return [f"{v.name}, {where}: {v.detail}".partition("\n")[0] for where, v in named if v.outcome == "bad"]


def misses(target: TargetFigures) -> list[str]:
    """Return the reasons why tokens were not reused, in the workloads of the table."""
    return [each.text for each in alike(request for w in tabled(target) for request in w.requests)]


def first(lines: Sequence[str], most: int = 8) -> list[str]:
    """Return the first lines; the report has all."""
    more = [f"and {len(lines) - most} more, in the JSON report"] if len(lines) > most else []
    return [*lines[:most], *more]


def coloured(result: Outcome) -> str:
    """Return an outcome as rich markup."""
    return f"[{COLOURS[result]}]{result}[/]"


def show_changes(changes: Changes, console: Console) -> None:
    """Print changes for the worse, then for the better, then notes."""
    for kind, colour in _KINDS:
        for change in changes.of(kind):
            grid = Table.grid()
            grid.add_row(f"[{colour}]{kind:<8}[/]", escape(f"{change.where}: {change.text}"))
            console.print(grid, highlight=False)
    if not (changes.of("worse") or changes.of("better")):
        console.print("nothing got better or worse")
