"""Changes for the better or worse from one report to another.

Verdicts and token counts are exact: each change of a verdict counts, and each change of a count beyond
`GRAIN`. Times are not compared: between two runs the load of a machine changes more than a build does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from llamahybrid.harness.report import (
    PROBE,
    Outcome,
    Report,
    RequestFigures,
    TargetFigures,
    Verdict,
    WorkloadFigures,
    place,
)

Kind: TypeAlias = Literal["worse", "better", "note"]
_Said: TypeAlias = tuple[Kind, str]
_T = TypeVar("_T")

_GOOD = ("same", "tie")

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
    return list(_changes(old, new, "worse" if strict else "note"))


def _changes(old: Report, new: Report, missing: Kind) -> Iterator[Change]:
    if old.models != new.models:
        yield Change("note", "models", f"{', '.join(old.models)} before, {', '.join(new.models)} now")
    for name, report in (("OLD", old), ("NEW", new)):
        if not report.complete:
            yield Change("note", name, "was stopped before its end")
    names = [{target.name: target for target in report.targets} for report in (old, new)]
    for name, was, now in _paired(*names):
        if was is None or now is None:
            yield _unpaired(name, was is None, missing)
            continue
        yield from _at(name, _target(was, now))
        workloads = [{w.workload: w for w in target.workloads} for target in (was, now)]
        for workload, before, after in _paired(*workloads):
            where = f"{name}, {workload}"
            if before is None or after is None:
                yield _unpaired(where, before is None, missing)
            else:
                yield from _at(where, _workload(before, after, missing))
        yield from _at(name, _verdicts(was.hazards, now.hazards, missing))


def _paired(old: Mapping[str, _T], new: Mapping[str, _T]) -> Iterator[tuple[str, _T | None, _T | None]]:
    """Yield name, old and new value of each name, the new names first; None: there is no such value."""
    for name in dict.fromkeys((*new, *old)):
        yield name, old.get(name), new.get(name)


def _unpaired(where: str, is_new: bool, missing: Kind) -> Change:
    if is_new:
        return Change("note", where, "is new: there is nothing to compare it with")
    return Change(missing, where, "was left out")


def _at(where: str, found: Iterable[_Said]) -> Iterator[Change]:
    for kind, text in found:
        yield Change(kind, where, text)


def _target(old: TargetFigures, new: TargetFigures) -> Iterator[_Said]:
    if new.error is not None and old.error is None:
        yield "worse", f"ran to its end, and now stopped: {new.error}"
    elif old.error is not None and new.error is None:
        yield "better", "did not run to its end, and now does"
    for name in sorted({*old.versions, *new.versions}):
        was, now = old.versions.get(name, "unknown"), new.versions.get(name, "unknown")
        if was != now:
            yield "note", f"{name}: {was} before, {now} now"


def _workload(old: WorkloadFigures, new: WorkloadFigures, missing: Kind) -> Iterator[_Said]:
    yield from _verdicts(old.verdicts, new.verdicts, missing)
    yield from _answers(old.requests, new.requests)
    if PROBE in new.workload:
        return  # its verdict is enough: reuse of odd prompts depends on measured times
    if _same_prompts(old, new):
        least = max(old.least or 0, new.least or 0)
        grain = max(GRAIN * least, GRAIN_TOKENS * len(new.requests))
        yield from _count("tokens decoded", old.decoded, new.decoded, grain, _most(old, new))
        was, now = _reused(old.requests), _reused(new.requests)
        yield from _count("tokens reported as reused", was, now, grain, more_is_better=True)
        return
    if not any(request.answer == "tie" for request in (*old.requests, *new.requests)):
        yield (
            "note",
            "other prompts than before (another model, length, vocabulary or answers): ratios are compared",
        )
    # else a tied answer went the other way, and is part of the prompts that follow
    if old.ratio is None or new.ratio is None:
        if old.ratio is not None:
            yield "worse", f"decoded {old.ratio:.2f} times the least before; now it cannot be told"
    elif abs(new.ratio - old.ratio) > GRAIN * max(1.0, old.ratio):
        kind: Kind = "worse" if new.ratio > old.ratio else "better"
        yield kind, f"decoded {old.ratio:.2f} times the least before, {new.ratio:.2f} times now"


def _verdicts(old: Sequence[Verdict], new: Sequence[Verdict], missing: Kind) -> Iterator[_Said]:
    before = {verdict.name: verdict for verdict in old}
    after = {verdict.name: verdict for verdict in new}
    for name, verdict in after.items():
        detail = f": {verdict.detail}".partition("\n")[0] if verdict.detail else ""
        if name not in before:
            if verdict.outcome == "bad":
                yield "note", f"{name} is bad, and was not looked at before{detail}"
        elif (kind := _change(before[name].outcome, verdict.outcome)) is not None:
            yield kind, f"{name} was {before[name].outcome}, is {verdict.outcome}{detail}"
    if fresh := sorted(name for name in after.keys() - before.keys() if after[name].outcome != "bad"):
        yield "note", f"verdicts on {_some(fresh)} are new: there is nothing to compare them with"
    if gone := sorted(before.keys() - after.keys()):
        yield missing, f"no verdict any more on {_some(gone)}"


def _change(old: Outcome, new: Outcome) -> Kind | None:
    """Return the kind of change of a verdict. A change to "cannot tell" is worse."""
    if old == new:
        return None
    return "better" if new == "ok" or (old, new) == ("cannot tell", "ok") else "worse"


def _answers(old: Sequence[RequestFigures], new: Sequence[RequestFigures]) -> Iterator[_Said]:
    """Yield changes of answers: differing now, no longer differing, no longer comparable."""
    before = {(request.chat, request.turn): request.answer for request in old}
    pairs = [(before[r.chat, r.turn], r.answer, r) for r in new if (r.chat, r.turn) in before]
    groups: tuple[tuple[Kind, str, list[RequestFigures]], ...] = (
        ("worse", "differ", [r for was, now, r in pairs if now == "different" != was]),
        ("better", "no longer differ", [r for was, now, r in pairs if was == "different" and now in _GOOD]),
        ("worse", "cannot be compared any more", [r for was, now, r in pairs if now == "unknown" != was]),
    )
    for kind, text, found in groups:
        if found:
            first = place(found[0])
            yield kind, f"{len(found)} answers {text}, the first of them of {first}"


def _count(
    name: str,
    old: int | None,
    new: int | None,
    grain: float,
    more: str = "",
    *,
    more_is_better: bool = False,
) -> Iterator[_Said]:
    if old is None:
        return
    if new is None:
        yield "worse", f"{name}: {old:,} before, now it cannot be told"
    elif abs(new - old) > grain:
        kind: Kind = "better" if (new > old) is more_is_better else "worse"
        yield kind, f"{name}: {old:,} before, {new:,} now{more if kind == 'worse' else ''}"


def _most(old: WorkloadFigures, new: WorkloadFigures) -> str:
    """Return the request that grew most, in words."""
    before = {(request.chat, request.turn): request.decoded for request in old.requests}
    pairs = [(before.get((request.chat, request.turn)), request) for request in new.requests]
    grown = [(b.decoded - a, b) for a, b in pairs if a is not None and b.decoded is not None]
    if not grown:
        return ""
    by, request = max(grown, key=lambda each: each[0])
    return f", most of it at {place(request)} ({by:+,})" if by > 0 else ""


def _same_prompts(old: WorkloadFigures, new: WorkloadFigures) -> bool:
    """Tell whether the requests are the same and of the same lengths, so that counts are comparable."""
    first, second = (sorted((r.chat, r.turn, r.total or 0) for r in w.requests) for w in (old, new))
    return first == second and old.least == new.least


def _reused(requests: Sequence[RequestFigures]) -> int | None:
    known = [request.cached for request in requests if request.cached is not None]
    return sum(known) if len(known) == len(requests) else None


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
