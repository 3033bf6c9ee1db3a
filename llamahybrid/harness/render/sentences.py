"""A report in sentences: the beginning of every rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamahybrid.harness.report import (
    NOT_RUN,
    PROBE,
    Outcome,
    Report,
    TargetFigures,
    Verdict,
    WorkloadFigures,
)

_WORST_FIRST: Sequence[Outcome] = ("bad", "cannot tell", "ok")
HAZARD = "hazard:"
"""Prefix of the names of native hazards."""


@dataclass(frozen=True)
class Sentence:
    """A finding in words."""

    outcome: Outcome
    text: str


_KNOWN: Mapping[str, tuple[str, str]] = {
    "reuse": ("reuses decoded tokens", "decodes known tokens again"),
    "exact": (
        "answers as a context that reused nothing",
        "answers differ from a context that reused nothing: reused state was wrong",
    ),
    "reports-what-it-reused": ("reports reused tokens correctly", "reports tokens as reused that were not"),
    "memory-flat": ("memory does not grow from request to request", "memory grows with each request"),
    "runs": ("runs", "does not run"),
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
}
"""Meaning of a verdict that is ok, and of one that is bad."""


def described(name: str, outcome: Outcome) -> str:
    """Return the meaning of a verdict's name and outcome, without its detail."""
    if name.startswith(HAZARD):
        hazard = repr(name.removeprefix(HAZARD))
        ok, bad = f"safe from the memory hazard {hazard}", f"hit by the memory hazard {hazard}"
    else:
        ok, bad = _KNOWN.get(name) or (f"{name!r} holds", f"{name!r} does not hold")
    return {"ok": ok, "bad": bad, "cannot tell": f"cannot tell: {ok}"}[outcome]


def sentence(verdict: Verdict) -> Sentence:
    """Return a verdict in words, with its detail."""
    detail = f": {verdict.detail}" if verdict.detail else ""
    return Sentence(verdict.outcome, _ended(described(verdict.name, verdict.outcome) + detail))


def verdicts(target: TargetFigures) -> list[Verdict]:
    """Return all verdicts of a target: workload by workload, then hazards."""
    return [*(verdict for w in target.workloads for verdict in w.verdicts), *target.hazards]


def overall(found: Iterable[Verdict]) -> Outcome:
    """Return bad if one is; ok if none is and one is ok."""
    outcomes = {verdict.outcome for verdict in found}
    return "bad" if "bad" in outcomes else "ok" if "ok" in outcomes else "cannot tell"


def outcome(target: TargetFigures) -> Outcome:
    """Return `overall` of a target's verdicts; bad if the target did not run to its end."""
    return "bad" if target.error is not None else overall(verdicts(target))


def tabled(target: TargetFigures) -> list[WorkloadFigures]:
    """Return the workloads of tables: those that ran, and of directed probes the bad ones."""
    ran = [w for w in target.workloads if w.ran]
    return [w for w in ran if PROBE not in w.workload or overall(w.verdicts) == "bad"]


def headline(report: Report) -> str:
    """Return the whole report in one sentence."""
    stopped = "" if report.complete else "the run was stopped before its end; so far: "
    ran = [w.ran for target in report.targets for w in target.workloads]
    part = "" if all(ran) else f" in the {sum(ran):,} of {_number(len(ran), 'workload')} that ran"
    if not any(t.error or any(v.name != "runs" for v in verdicts(t)) for t in report.targets):
        return f"{stopped}{_number(len(report.targets), 'target')} measured{part}."
    counted = Counter(outcome(target) for target in report.targets)
    good = f"{counted['ok']} of {_number(len(report.targets), 'target')} without a fault{part}"
    faults = [{each.name for each in verdicts(t) if each.outcome == "bad"} for t in report.targets]
    with_faults, slow = sum(map(bool, faults)), faults.count({"reuse"})
    bad = f"{with_faults} with faults" if with_faults else ""
    if slow:
        bad += f", {'all' if slow == with_faults else slow} of them only by decoding more than necessary"
    died = sum(target.error is not None for target in report.targets)
    not_run = f"{died} did not run to the end" if died else ""
    untold = f"{counted['cannot tell']} cannot be judged" if counted["cannot tell"] else ""
    return stopped + "; ".join(filter(None, (good, bad, not_run, untold))) + "."


def of_target(target: TargetFigures) -> list[Sentence]:
    """Return a sentence for each kind of verdict on a target, faults first."""
    said = (
        [] if target.error is None else [Sentence("bad", _ended(f"did not run to its end: {target.error}"))]
    )
    names = dict.fromkeys(verdict.name for w in target.workloads for verdict in w.verdicts)
    said += [_summed(target, name) for name in names]
    said += _hazards(target.hazards)
    return sorted(said, key=lambda one: _WORST_FIRST.index(one.outcome))


def _summed(target: TargetFigures, name: str) -> Sentence:
    """Return a sentence on all verdicts of one name."""
    found = [(w.workload, each) for w in target.workloads for each in w.verdicts if each.name == name]
    result = min((verdict.outcome for _, verdict in found), key=_WORST_FIRST.index)
    counted = [pair for pair in found if pair[1].outcome == result]
    text = described(name, result)
    if name == "runs":
        why = found[0][1].detail.removeprefix(NOT_RUN)
        first = ". First: " if any(verdict.detail != found[0][1].detail for _, verdict in found) else ": "
        return Sentence(result, _ended(f"{_number(len(found), 'workload')} did not run{first}{why}"))
    if result == "cannot tell" and len(counted) < len(found):  # ok in the other workloads
        text = (
            f"{described(name, 'ok')} in {len(found) - len(counted)} of {_number(len(found), 'workload')}; "
        )
        text += f"cannot tell in {_quoted(where for where, _ in counted)}"
    elif result == "ok":
        text += _figures(target, name)
    else:
        text += f", in {len(counted)} of {_number(len(found), 'workload')}"
        text += f" ({_quoted(where for where, _ in counted)})" if len(counted) < len(found) else ""
        text += _figures(target, name)
    detail = counted[0][1].detail
    if result != "ok" and detail:
        text += f". {'First' if len(counted) > 1 else 'There'}: {detail}"
    return Sentence(result, _ended(text))


def _figures(target: TargetFigures, name: str) -> str:
    """Return the totals behind a kind of verdict, as far as known."""
    if name == "reuse":
        known = [
            (w.decoded, w.least) for w in target.workloads if w.decoded is not None and w.least is not None
        ]
        decoded, least = (sum(figures) for figures in zip(*known, strict=True)) if known else (0, 0)
        if least:
            times = f"{decoded / least:.2f} times the least"
            return f": {decoded:,} tokens decoded, the least possible is {least:,}, {times}"
    if name == "exact":
        counted = Counter(request.answer for w in target.workloads for request in w.requests)
        ties = f", {counted['tie']} but for two tokens that were equally likely" if counted["tie"] else ""
        told = sum(counted.values()) - counted["unknown"]
        if told:
            return f": {counted['same'] + counted['tie']} of {told} compared{ties}"
    return ""


def _hazards(found: Sequence[Verdict]) -> list[Sentence]:
    """Return a sentence on all hazards."""
    if not found:
        return []
    counted = Counter(verdict.outcome for verdict in found)
    tried = f"{_number(len(found), 'hazard')} of the native memory"
    if counted["bad"]:
        hit = [v.name.removeprefix(HAZARD) for v in found if v.outcome == "bad"]
        more = f" and {len(hit) - 3} more" if len(hit) > 3 else ""
        return [Sentence("bad", f"{counted['bad']} of {tried} hit it: {', '.join(hit[:3])}{more}.")]
    if counted["ok"]:
        untold = f"; {counted['cannot tell']} cannot be judged" if counted["cannot tell"] else ""
        return [Sentence("ok", f"None of {tried} hits it{untold}.")]
    return [Sentence("cannot tell", f"Cannot tell: {tried}.")]


def _quoted(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, in quotes."""
    every = [f"“{name}”" for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
