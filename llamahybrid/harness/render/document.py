"""A report as sections of findings, tables and lists, which each format renders in its own way."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llamahybrid.harness.report import (
    HAZARD,
    NOT_RUN,
    PROBE,
    Outcome,
    Report,
    RequestFigures,
    TargetFigures,
    Times,
    Verdict,
    WorkloadFigures,
    overall,
    place,
)

UNTOLD = "?"
"""A number that the target hides."""

TEXTS = frozenset(("workload", "target", "answers", "verdict", "hazard", "what happened", "texts"))
"""Heads of the columns of texts; the others are numbers."""

FAULTS, MISSES = "Faults", "Why tokens were not reused"

PROPERTIES: Mapping[str, tuple[str, str]] = {
    "reuse": ("decodes no known token again", "decodes known tokens again"),
    "exact": (
        "answers as a context that reused nothing",
        "answers differ from a context that reused nothing: reused state was wrong",
    ),
    "reports-what-it-reused": ("reports reused tokens correctly", "reports tokens as reused that were not"),
    "memory-flat": ("memory does not grow from request to request", "memory grows with each request"),
    "hits": ("reuses a prompt that goes on", "decodes a prompt that goes on again: the cache does not hit"),
    "restores-a-prefix": (
        "restores prefixes of the prompt only",
        "restored state that is no prefix of the prompt",
    ),
    "cuts-the-tail": (
        "answers correctly after a long cut",
        "continues from removed tokens after a long cut: the tail was not cut",
    ),
    "rolls-back-to-its-position": (
        "rolls the last tokens back",
        "continues from a wrong state after a rollback of the last tokens",
    ),
    "own-attention": (
        "keeps conversations at equal positions apart",
        "answered a conversation from the attention of another one at equal positions",
    ),
    "salt-kept-apart": ("keeps users with different salts apart", "reused the prompt of another salt"),
    HAZARD: ("safe from the hazards of the native memory", "hit by hazards of the native memory"),
}
"""Meaning of a verdict that is ok, and of one that is bad, by name."""

MOST_NAMED = 3
"""Most workloads or hazards whose names a finding has."""

_WORST_FIRST: Sequence[Outcome] = ("bad", "cannot tell", "ok")
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")
_NUMBER = re.compile(r"\d[\d,]*")
_COUNTED = re.compile(r"\b(token|character|chat)s\b")


@dataclass(frozen=True)
class Finding:
    """The verdicts on a property in words."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of texts under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A target, or the comparison of all."""

    title: str
    outcome: Outcome | None = None
    """None: there are no verdicts."""
    about: str = ""
    """Kind and versions of the target."""
    findings: Sequence[Finding] = ()
    tables: Sequence[Table] = ()
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Texts by title; the first line of each is a summary."""


def sections(report: Report) -> list[Section]:
    """Return a section for each target with verdicts or an error, and one with a table of all."""
    found = [_target(target) for target in report.targets if target.error or target.verdicts]
    ran = [w for target in report.targets for w in tabled(target)]
    if ran and (len(report.targets) > 1 or not any(w.verdicts for w in ran)):
        found.append(Section("Side by side", tables=[_side_by_side(report)]))
    return found


def headline(report: Report) -> str:
    """Return the whole report in one sentence."""
    stopped = "" if report.complete else "the run was stopped before its end; so far: "
    ran = [w.ran for target in report.targets for w in target.workloads]
    part = "" if all(ran) else f" in the {sum(ran):,} of {_number(len(ran), 'workload')} that ran"
    number = _number(len(report.targets), "target")
    if not any(t.error or any(v.name != "runs" for v in t.verdicts) for t in report.targets):
        return f"{stopped}{number} measured{part}."
    counted = Counter(target.outcome for target in report.targets)
    bad = [{each.name for each in t.verdicts if each.outcome == "bad"} for t in report.targets]
    counts = {
        "with faults": sum(bool(names - {"reuse"}) for names in bad),
        "without wrong results, but decoding more than necessary": bad.count({"reuse"}),
        "did not run to the end": sum(target.error is not None for target in report.targets),
        "cannot be judged": counted["cannot tell"],
    }
    others = "".join(f"; {count} {text}" for text, count in counts.items() if count)
    return f"{stopped}{counted['ok']} of {number} without a fault{part}{others}."


def footer(report: Report) -> str:
    """Return date, machine, settings and models."""
    known = [*(f"{name} {value}" for name, value in report.machine.items()), *report.models]
    return f"{report.made}: {', '.join(known)}"


def described(verdict: Verdict) -> str:
    """Return a verdict in words."""
    said = _meaning(HAZARD if verdict.name.startswith(HAZARD) else verdict.name, verdict.outcome)
    return f"{said}: {verdict.detail}" if verdict.detail else said


def _meaning(name: str, outcome: Outcome) -> str:
    ok, bad = PROPERTIES.get(name, (f"{name!r} holds", f"{name!r} does not hold"))
    return {"ok": ok, "bad": bad, "cannot tell": f"cannot tell: {ok}"}[outcome]


def tabled(target: TargetFigures) -> list[WorkloadFigures]:
    """Return the workloads of tables: those that ran, and of directed probes the bad ones."""
    return [w for w in target.workloads if w.ran and (PROBE not in w.workload or w.outcome == "bad")]


def _target(target: TargetFigures) -> Section:
    tables = []
    if target.hazards and not target.workloads:
        tables = [_hazards(target)]
    elif any(w.verdicts for w in tabled(target)):
        tables = [_workloads(target)]
    about = "; ".join((target.kind, *(f"{name} {version}" for name, version in target.versions.items())))
    placed = [(w.workload, verdict) for w in target.workloads for verdict in w.verdicts]
    placed += [("native memory", verdict) for verdict in target.hazards]
    faults = [f"{v.name}, {where}: {v.detail}" for where, v in placed if v.outcome == "bad"]
    lists = {FAULTS: faults, MISSES: misses(r for w in tabled(target) for r in w.requests)}
    named = {title: texts for title, texts in lists.items() if texts}
    return Section(target.name, target.outcome, about, findings(target), tables, named)


def findings(target: TargetFigures) -> list[Finding]:
    """Return a finding for each property of a target, faults first."""
    found = [] if target.error is None else [Finding("bad", f"did not run to its end: {target.error}")]
    placed: dict[str, list[tuple[str, Verdict]]] = defaultdict(list)
    for w in target.workloads:
        for verdict in w.verdicts:
            placed[verdict.name].append((w.workload, verdict))
    for verdict in target.hazards:
        placed[HAZARD].append((verdict.name.removeprefix(HAZARD), verdict))
    for name, pairs in placed.items():
        worst = min((verdict.outcome for _, verdict in pairs), key=_WORST_FIRST.index)
        if name == HAZARD and worst != "bad":  # a hazard may not apply
            worst = overall(verdict for _, verdict in pairs)
        of_worst = [pair for pair in pairs if pair[1].outcome == worst]
        number = _number(len(pairs), "hazard" if name == HAZARD else "workload")
        text = _meaning(name, worst)
        if name == "runs":
            text = f"{number} did not run"
        elif len(of_worst) < len(pairs):
            named = ", ".join(where for where, _ in of_worst[:MOST_NAMED])
            more = f" and {len(of_worst) - MOST_NAMED} more" if len(of_worst) > MOST_NAMED else ""
            text += f", in {len(of_worst)} of {number} ({named}{more})"
        text += _totals(target, name)
        where, first = of_worst[0]
        if worst != "ok" and first.detail:
            detail = first.detail.partition("\n")[0].removeprefix(NOT_RUN)
            text += f". {'First' if len(of_worst) > 1 else 'There'}: {where}: {detail}"
        found.append(Finding(worst, text))
    return sorted(found, key=lambda each: _WORST_FIRST.index(each.outcome))


def _totals(target: TargetFigures, name: str) -> str:
    """Return the totals behind a kind of verdict, as far as known."""
    if name == "reuse":
        known = [w for w in target.workloads if w.decoded is not None and w.least is not None]
        decoded, least = sum(w.decoded or 0 for w in known), sum(w.least or 0 for w in known)
        times = f"{decoded / least:.2f} times the least" if least else ""
        return f": {decoded:,} tokens decoded, the least possible is {least:,}, {times}" if least else ""
    if name == "exact":
        counted = Counter(request.answer for w in target.workloads for request in w.requests)
        ties = f", {counted['tie']} but for two tokens that were equally likely" if counted["tie"] else ""
        told = sum(counted[each] for each in ("same", "tie", "different"))
        return f": {counted['same'] + counted['tie']} of {told} compared{ties}" if told else ""
    return ""


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
        (_name(w), _count(w.least), _count(w.decoded), ratio(w.ratio), answers(w.requests), w.outcome)
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
    if found["not compared"]:
        return f"{found['same']} same" if found["same"] else UNTOLD
    return "same" if requests else UNTOLD


def _hazards(target: TargetFigures) -> Table:
    rows = [
        (each.name.removeprefix(HAZARD), each.outcome, each.detail.partition("\n")[0])
        for each in target.hazards
    ]
    return Table(("hazard", "verdict", "what happened"), rows)


def _side_by_side(report: Report) -> Table:
    """Return a row for each workload on each target; texts are compared with the first target's."""
    found = [(w, target.name) for target in report.targets for w in tabled(target)]
    rows = []
    for name in dict.fromkeys(w.workload for w, _ in found):
        here = [pair for pair in found if pair[0].workload == name]
        texts = [[r.text_hash for r in w.requests] for w, _ in here]
        for number, (w, target) in enumerate(here):
            times = w.times or Times()
            cells = ["" if number else _name(w), target, ratio(w.ratio)]
            cells.append("same" if texts[number] == texts[0] else "differ")
            cells.append("" if times.ttft is None else f"{times.ttft:.3f} s")
            cells.append("" if times.tokens_per_second is None else f"{times.tokens_per_second:.1f}")
            cells.append("" if times.resident is None else f"{times.resident / (1 << 20):.1f}")
            rows.append(cells)
    return Table(("workload", "target", "ratio", "texts", "first token", "tokens/s", "MiB a chat"), rows)


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
