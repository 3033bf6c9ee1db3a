"""A report as sections of sentences, tables and lists, which each format renders in its own way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llamahybrid.harness.render.sentences import (
    HAZARD,
    Sentence,
    of_target,
    outcome,
    overall,
    tabled,
    verdicts,
)
from llamahybrid.harness.report import (
    Outcome,
    Report,
    RequestFigures,
    TargetFigures,
    WorkloadFigures,
    place,
)

UNTOLD = "?"
"""A number that the target hides."""

TEXTS = frozenset(("workload", "target", "answers", "verdict", "hazard", "what happened", "texts"))
"""Heads of the columns of texts; the others are numbers."""

FAULTS, MISSES = "Faults", "Why tokens were not reused"

_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
_NUMBER = re.compile(r"\d[\d,]*")
_COUNTED = re.compile(r"\b(token|character|chat)s\b")


@dataclass(frozen=True)
class Table:
    """Rows of texts under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A target, or the comparison of all."""

    title: str
    outcome: Outcome | None = None
    """None: there are no verdicts."""
    about: str = ""
    """Kind and versions of the target."""
    sentences: Sequence[Sentence] = ()
    tables: Sequence[Table] = ()
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Texts by title; the first line of each is a summary."""


def sections(report: Report) -> list[Section]:
    """Return a section for each target with verdicts or an error, and one with tables of several."""
    found = [_target(target) for target in report.targets if target.error or verdicts(target)]
    tables: list[Table] = []
    if any(w.times for target in report.targets for w in target.workloads):
        tables.append(_times(report))
    elif len(report.targets) > 1 and any(map(tabled, report.targets)):
        tables.append(_side_by_side(report))
    return [*found, Section("Side by side", tables=tables)] if tables else found


def footer(report: Report) -> str:
    """Return date, machine, settings and models."""
    known = [*(f"{name} {value}" for name, value in report.machine.items()), *report.models]
    return f"{report.made}: {', '.join(known)}"


def _target(target: TargetFigures) -> Section:
    tables = []
    if target.hazards and not target.workloads:
        tables = [_hazards(target)]
    elif any(w.verdicts for w in tabled(target)):
        tables = [_workloads(target)]
    about = "; ".join((target.kind, *(f"{name} {version}" for name, version in target.versions.items())))
    lists = {FAULTS: _faults(target), MISSES: misses(r for w in tabled(target) for r in w.requests)}
    named = {title: texts for title, texts in lists.items() if texts}
    return Section(target.name, outcome(target), about, of_target(target), tables, named)


def _faults(target: TargetFigures) -> list[str]:
    """Return a text for each bad verdict."""
    named = [(w.workload, verdict) for w in target.workloads for verdict in w.verdicts]
    named += [("native memory", verdict) for verdict in target.hazards]
    return [f"{v.name}, {where}: {v.detail}" for where, v in named if v.outcome == "bad"]


def misses(requests: Iterable[RequestFigures]) -> list[str]:
    """Return the reasons why tokens were not reused, those of most requests first.

    Reasons that differ in numbers and quoted texts alone are one.
    """
    groups: dict[str, list[RequestFigures]] = {}
    for request in requests:
        if request.miss:
            kind = _COUNTED.sub(r"\1", _NUMBER.sub("#", _QUOTED.sub("''", request.miss)))
            groups.setdefault(kind, []).append(request)
    said = []
    for group in sorted(groups.values(), key=len, reverse=True):
        where = f"{group[0].workload}, {place(group[0])}"
        if len(group) > 1:
            workloads = len({each.workload for each in group})
            among = "" if workloads == 1 else f" of {workloads} workloads"
            where = f"{len(group)} requests{among} alike, the first of them {where}"
        said.append(f"{where}: {group[0].miss}")
    return said


def _workloads(target: TargetFigures) -> Table:
    rows = [
        (
            _name(w),
            _count(w.least),
            _count(w.decoded),
            ratio(w.ratio),
            answers(w.requests),
            overall(w.verdicts),
        )
        for w in tabled(target)
    ]
    return Table(("workload", "least", "decoded", "ratio", "answers", "verdict"), rows)


def _name(w: WorkloadFigures) -> str:
    """Return the name of a workload, with its length if it was shortened."""
    return w.workload + ("" if w.scale == 1.0 else f" (at {w.scale:.0%} of its length)")


def _count(number: int | None) -> str:
    return UNTOLD if number is None else f"{number:,}"


def ratio(value: float | None) -> str:
    """Return decoded over least."""
    return UNTOLD if value is None else f"{value:.2f}"


def answers(requests: Sequence[RequestFigures]) -> str:
    """Return the comparison of answers with a context that reused nothing, in a few letters."""
    found = Counter(request.answer for request in requests)
    if found["different"]:
        return f"{found['different']} differ"
    if found["unknown"]:
        return UNTOLD if found["unknown"] == len(requests) else f"{found['unknown']} untold"
    if found["tie"]:
        return f"{found['tie']} tied"
    return "same" if requests else UNTOLD


def _hazards(target: TargetFigures) -> Table:
    rows = [
        (each.name.removeprefix(HAZARD), each.outcome, each.detail.partition("\n")[0])
        for each in target.hazards
    ]
    return Table(("hazard", "verdict", "what happened"), rows)


def _times(report: Report) -> Table:
    """Return a row for each workload on each target, with the measurements of `llamahybrid bench`."""
    found = [(w, target.name) for target in report.targets for w in target.workloads]
    order = list(dict.fromkeys(w.workload for w, _ in found))
    rows, last = [], ""
    for w, target in sorted(found, key=lambda each: order.index(each[0].workload)):
        times = w.times
        if times is None:
            continue
        rows.append(
            (
                "" if w.workload == last else _name(w),
                target,
                ratio(w.ratio),
                "" if times.ttft is None else f"{times.ttft:.3f} s",
                "" if times.tokens_per_second is None else f"{times.tokens_per_second:.1f}",
                "" if times.resident is None else f"{times.resident / (1 << 20):.1f}",
            )
        )
        last = w.workload
    head = ("workload", "target", "decoded / least", "first token", "tokens/s", "MiB a chat")
    title = f"{', '.join(report.models)}, median of {report.machine.get('rounds', UNTOLD)}"
    return Table(head, rows, title)


def _side_by_side(report: Report) -> Table:
    """Return a row for each workload: ratios, times and texts compared with the first target."""
    first, *others = report.targets
    head = ["workload", first.name]
    for target in others:
        head += [target.name, "time", "texts"]
    figures = [{w.workload: w for w in tabled(target)} for target in others]
    rows = []
    for w in tabled(first):
        row = [w.workload, ratio(w.ratio)]
        for named in figures:
            row += _beside(w, named.get(w.workload))
        rows.append(row)
    return Table(head, rows, f"beside {first.name}")


def _beside(first: WorkloadFigures, other: WorkloadFigures | None) -> tuple[str, str, str]:
    """Return the ratio, the time as a share of the first target's, and the comparison of all answers."""
    if other is None:
        return "", "", ""
    one, two = (sum(request.seconds for request in w.requests) for w in (first, other))
    same = [r.text_hash for r in first.requests] == [r.text_hash for r in other.requests]
    return ratio(other.ratio), f"{two / one:.2f}" if one else UNTOLD, "same" if same else "differ"
