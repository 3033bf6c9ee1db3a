"""Changes for the better or worse from one report to another.

Verdicts and token counts are exact: each change of a verdict counts, and each change of a count beyond
`GRAIN`. Times are not compared: between two runs the load of a machine changes more than a build does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from llamahybrid.harness.report import (
    PROBE,
    Report,
    RequestFigures,
    TargetFigures,
    Verdict,
    WorkloadFigures,
    place,
)

Kind: TypeAlias = Literal["worse", "better", "note"]
_T = TypeVar("_T")

GRAIN = 0.01
"""A change of a token count has to exceed this share of the least possible count."""
GRAIN_TOKENS = 2
"""A change of a token count has to exceed this number of tokens a request: caches that weigh measured times
place checkpoints a few tokens elsewhere on a busy machine."""


@dataclass(frozen=True)
class Change:
    """A difference between two reports."""

    kind: Kind
    where: str
    """Target and workload."""
    text: str


def changes(old: Report, new: Report, *, strict: bool = False) -> list[Change]:
    """Return all differences, target by target and workload by workload, in the order of the newer report.

    With `strict`, results that NEW lacks are worse, otherwise a note.
    """
    missing: Kind = "worse" if strict else "note"
    found: list[Change] = []
    if old.models != new.models:
        text = f"{', '.join(old.models)} before, {', '.join(new.models)} now"
        found.append(Change("note", "models", text))
    for name, report in (("OLD", old), ("NEW", new)):
        if not report.complete:
            found.append(Change("note", name, "was stopped before its end"))
    targets = [{target.name: target for target in report.targets} for report in (old, new)]
    for name, was, now in _paired(found, missing, "", *targets):
        found += (Change(kind, name, text) for kind, text in _target(was, now))
        workloads = [{w.workload: w for w in target.workloads} for target in (was, now)]
        for where, before, after in _paired(found, missing, f"{name}, ", *workloads):
            verdicts = _verdicts(before.verdicts, after.verdicts, missing)
            found += (Change(kind, where, text) for kind, text in (*verdicts, *_workload(before, after)))
        verdicts = _verdicts(was.hazards, now.hazards, missing)
        found += (Change(kind, name, text) for kind, text in verdicts)
    return found


def _paired(
    found: list[Change], missing: Kind, prefix: str, old: Mapping[str, _T], new: Mapping[str, _T]
) -> Iterator[tuple[str, _T, _T]]:
    """Yield place, old and new value of each name, the new names first; report those without a pair."""
    for name in dict.fromkeys((*new, *old)):
        if name not in old:
            found.append(Change("note", prefix + name, "is new: there is nothing to compare it with"))
        elif name not in new:
            found.append(Change(missing, prefix + name, "was left out"))
        else:
            yield prefix + name, old[name], new[name]


def _target(old: TargetFigures, new: TargetFigures) -> Iterator[tuple[Kind, str]]:
    if new.error is not None and old.error is None:
        yield "worse", f"ran to its end, and now stopped: {new.error}"
    elif old.error is not None and new.error is None:
        yield "better", "did not run to its end, and now does"
    for name in sorted({*old.versions, *new.versions}):
        was, now = old.versions.get(name, "unknown"), new.versions.get(name, "unknown")
        if was != now:
            yield "note", f"{name}: {was} before, {now} now"


def _verdicts(old: Sequence[Verdict], new: Sequence[Verdict], missing: Kind) -> Iterator[tuple[Kind, str]]:
    """Yield changed verdicts; a change to "cannot tell" is worse."""
    before, after = ({verdict.name: verdict for verdict in each} for each in (old, new))
    for name, verdict in after.items():
        detail = f": {verdict.detail}".partition("\n")[0] if verdict.detail else ""
        was = before[name].outcome if name in before else None
        if was is None:
            yield "note", f"{name} is {verdict.outcome}, and was not looked at before{detail}"
        elif was != verdict.outcome:
            kind: Kind = "better" if verdict.outcome == "ok" else "worse"
            yield kind, f"{name} was {was}, is {verdict.outcome}{detail}"
    for name in before.keys() - after.keys():
        yield missing, f"no verdict any more on {name}"


def _workload(old: WorkloadFigures, new: WorkloadFigures) -> Iterator[tuple[Kind, str]]:
    yield from _answers(old.requests, new.requests)
    if PROBE in new.workload:
        return  # its verdict is enough: reuse of odd prompts depends on measured times
    first, second = (sorted((r.chat, r.turn, r.total or 0) for r in w.requests) for w in (old, new))
    if first == second and old.least == new.least:
        grain = max(GRAIN * (new.least or 0), GRAIN_TOKENS * len(new.requests))
        yield from _number("tokens decoded", old.decoded, new.decoded, grain, _most(old, new))
        was, now = _reused(old.requests), _reused(new.requests)
        yield from _number("tokens reported as reused", was, now, grain, sign=-1)
        return
    if not any(request.answer == "tie" for request in (*old.requests, *new.requests)):
        why = "another model, length, vocabulary or answers"
        yield "note", f"other prompts than before ({why}): ratios are compared"
    # else a tied answer went the other way, and is part of the prompts that follow
    yield from _number("decoded over the least", old.ratio, new.ratio, GRAIN * max(1.0, old.ratio or 0.0))


def _answers(old: Sequence[RequestFigures], new: Sequence[RequestFigures]) -> Iterator[tuple[Kind, str]]:
    """Yield changes of answers: differing now, no longer differing, no longer comparable."""
    before = {(request.chat, request.turn): request.answer for request in old}
    pairs = [(before.get((r.chat, r.turn), r.answer), r.answer, r) for r in new]
    untold = ("unknown", "not compared")
    groups: tuple[tuple[Kind, str, list[RequestFigures]], ...] = (
        ("worse", "differ", [r for was, now, r in pairs if now == "different" != was]),
        (
            "better",
            "no longer differ",
            [r for was, now, r in pairs if was == "different" and now in ("same", "tie")],
        ),
        (
            "worse",
            "cannot be compared any more",
            [r for was, now, r in pairs if now == "unknown" and was not in untold],
        ),
    )
    for kind, text, found in groups:
        if found:
            yield kind, f"{len(found)} answers {text}, the first of them of {place(found[0])}"


def _number(
    name: str, old: float | None, new: float | None, grain: float, more: str = "", sign: int = 1
) -> Iterator[tuple[Kind, str]]:
    """Yield a change beyond `grain`; `sign`: 1: more is worse, -1: less is; `more`: added to a worse one."""
    if old is None:
        return
    was = f"{old:,}" if isinstance(old, int) else f"{old:.2f}"
    if new is None:
        yield "worse", f"{name}: {was} before, now it cannot be told"
    elif abs(new - old) > grain:
        now = f"{new:,}" if isinstance(new, int) else f"{new:.2f}"
        worse = sign * (new - old) > 0
        yield "worse" if worse else "better", f"{name}: {was} before, {now} now{more if worse else ''}"


def _most(old: WorkloadFigures, new: WorkloadFigures) -> str:
    """Return the request that grew most, in words."""
    before = {(request.chat, request.turn): request.decoded or 0 for request in old.requests}
    grown = [((r.decoded or 0) - before[r.chat, r.turn], r) for r in new.requests]
    by, request = max(grown, key=lambda each: each[0], default=(0, None))
    return f", most of it at {place(request)} ({by:+,})" if by > 0 else ""


def _reused(requests: Sequence[RequestFigures]) -> int | None:
    known = [request.cached for request in requests if request.cached is not None]
    return sum(known) if len(known) == len(requests) else None
