"""What a report says, in sentences that need no manual: every rendering begins with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamahybrid.harness.report import (
    PROBE,
    Outcome,
    Report,
    RequestFigures,
    TargetFigures,
    Verdict,
    WorkloadFigures,
)

HAZARD = "hazard:"
"""How the names of native hazards begin."""


@dataclass(frozen=True)
class Sentence:
    """One finding."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class _Words:
    ok: str
    bad: str
    untold: str

    def of(self, outcome: Outcome) -> str:
        if outcome == "cannot tell":
            return f"Whether {self.untold} cannot be told"
        return self.ok if outcome == "ok" else self.bad


_KNOWN: Mapping[str, _Words] = {
    "reuse": _Words(
        "It reuses what it decoded before",
        "It decodes again what it had decoded before",
        "it reuses what it decoded before",
    ),
    "exact": _Words(
        "Its answers are those of a context that reused nothing",
        "Its answers are not those of a context that reused nothing: reused state was wrong",
        "its answers are those of a context that reused nothing",
    ),
    "reports-what-it-reused": _Words(
        "It reused as many tokens as it reports",
        "It reports tokens as reused that it did not reuse",
        "it reused as many tokens as it reports",
    ),
    "memory-flat": _Words(
        "Its memory does not grow from request to request",
        "Its memory grows with each request",
        "its memory grows from request to request",
    ),
    "runs": _Words(
        "It ran every workload",
        "It did not run every workload",
        "it would come through all workloads",
    ),
    "hits": _Words(
        "A prompt that goes on is reused",
        "A prompt that goes on is decoded again: the cache does not hit",
        "a prompt that goes on is reused",
    ),
    "restores-a-prefix": _Words(
        "What it restores is a prefix of the prompt",
        "It restored what is no prefix of the prompt",
        "what it restores is a prefix of the prompt",
    ),
    "cuts-the-tail": _Words(
        "A history that was cut far back is answered rightly",
        "After a long cut it goes on from what should be gone: the tail was not cut",
        "a history that was cut far back is answered rightly",
    ),
    "rolls-back-to-its-position": _Words(
        "The last tokens can be taken back",
        "After the last tokens were taken back it goes on from a wrong state: a stale rollback",
        "the last tokens can be taken back",
    ),
    "own-attention": _Words(
        "Conversations at the same positions do not mix",
        "A conversation was answered from the attention of another one at the same positions",
        "conversations at the same positions are kept apart",
    ),
    "salt-kept-apart": _Words(
        "Users with different salts are kept apart",
        "What one user sent was reused for a user with another salt",
        "users with different salts are kept apart",
    ),
}


def described(name: str, outcome: Outcome) -> str:
    """What a verdict of this name and outcome means, without its detail."""
    if name.startswith(HAZARD):
        name = f"the memory hazard {name.removeprefix(HAZARD)!r}"
        words = _Words(f"It is safe from {name}", f"It is hit by {name}", f"it is safe from {name}")
    else:
        plain = repr(name)
        words = _KNOWN.get(name) or _Words(f"{plain} holds", f"{plain} does not hold", f"{plain} holds")
    return words.of(outcome)


def sentence(verdict: Verdict) -> Sentence:
    """One verdict in words, with its detail."""
    detail = f": {verdict.detail}" if verdict.detail else ""
    return Sentence(verdict.outcome, _ended(described(verdict.name, verdict.outcome) + detail))


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """bad before cannot tell before ok; of nothing: cannot tell."""
    found = set(outcomes) or {"cannot tell"}
    return "bad" if "bad" in found else "cannot tell" if "cannot tell" in found else "ok"


def verdicts(target: TargetFigures) -> list[Verdict]:
    """All that were come to, in order: workload by workload, then hazards."""
    return [*(verdict for w in target.workloads for verdict in w.verdicts), *target.hazards]


def overall(found: Iterable[Verdict]) -> Outcome:
    """bad where one is; ok where none is, and something could be told."""
    outcomes = {verdict.outcome for verdict in found}
    return "bad" if "bad" in outcomes else "ok" if "ok" in outcomes else "cannot tell"


def outcome(target: TargetFigures) -> Outcome:
    """`overall` of all of a target; bad where it did not run to its end."""
    return "bad" if target.error is not None else overall(verdicts(target))


def faults(workload: WorkloadFigures) -> str:
    """What came of a workload, with the names of what is bad."""
    names = [verdict.name for verdict in workload.verdicts if verdict.outcome == "bad"]
    return f"bad: {', '.join(names)}" if names else overall(workload.verdicts)


def tabled(target: TargetFigures) -> list[WorkloadFigures]:
    """The workloads that tables show: those that ran, and of directed probes those that are bad."""
    ran = [w for w in target.workloads if not any(verdict.name == "runs" for verdict in w.verdicts)]
    return [w for w in ran if PROBE not in w.workload or overall(w.verdicts) == "bad"]


def requests(target: TargetFigures) -> list[RequestFigures]:
    """All requests of a target, workload by workload."""
    return [request for workload in target.workloads for request in workload.requests]


def headline(report: Report) -> str:
    """The whole report in one sentence."""
    counted = Counter(outcome(target) for target in report.targets)
    good = f"{counted['ok']} of {_number(len(report.targets), 'target')} came through without a fault"
    bad = f"{counted['bad']} did not" if counted["bad"] else ""
    slow = sum(_only_slow(target) for target in report.targets)
    if slow:
        bad += f", {'all' if slow == counted['bad'] else slow} of them only by decoding more than they had to"
    untold = f"of {counted['cannot tell']} it cannot be told" if counted["cannot tell"] else ""
    stopped = "" if report.complete else "the run was stopped before its end"
    return "; ".join(filter(None, (good, bad, untold, stopped))) + "."


def _only_slow(target: TargetFigures) -> bool:
    """Nothing is bad but the work it took."""
    names = {verdict.name for verdict in verdicts(target) if verdict.outcome == "bad"}
    return target.error is None and names == {"reuse"}


def of_target(target: TargetFigures) -> list[Sentence]:
    """A target in a few sentences, one for each kind of verdict, faults first."""
    said = (
        []
        if target.error is None
        else [Sentence("bad", _ended(f"It did not run to its end: {target.error}"))]
    )
    names = dict.fromkeys(verdict.name for w in target.workloads for verdict in w.verdicts)
    said += [_summed(target, name) for name in names]
    said += _hazards(target.hazards)
    order: Sequence[Outcome] = ("bad", "cannot tell", "ok")
    return sorted(said, key=lambda one: order.index(one.outcome))


def _summed(target: TargetFigures, name: str) -> Sentence:
    """Verdicts of one name, of all workloads: where it is bad, or what came of it everywhere."""
    found = [
        (w.workload, verdict) for w in target.workloads for verdict in w.verdicts if verdict.name == name
    ]
    result = worst(verdict.outcome for _, verdict in found)
    counted = [pair for pair in found if pair[1].outcome == result]
    if result == "cannot tell" and len(counted) < len(found):  # elsewhere it could be told, and was well
        text = (
            f"{described(name, 'ok')} in {len(found) - len(counted)} of {_number(len(found), 'workload')}; "
        )
        text += f"for {_quoted(where for where, _ in counted)} it cannot be told"
    elif result == "ok":
        text = described(name, result) + _figures(target, name)
    else:
        text = f"{described(name, result)}, in {len(counted)} of {_number(len(found), 'workload')}"
        text += f" ({_quoted(where for where, _ in counted)})" if len(counted) < len(found) else ""
        text += _figures(target, name)
    detail = counted[0][1].detail
    if result != "ok" and detail:
        text += f". {'First' if len(counted) > 1 else 'There'}: {detail}"
    return Sentence(result, _ended(text))


def _figures(target: TargetFigures, name: str) -> str:
    """Totals behind a kind of verdict, where they are known."""
    if name == "reuse":
        known = [
            (w.decoded, w.least) for w in target.workloads if w.decoded is not None and w.least is not None
        ]
        decoded, least = (sum(figures) for figures in zip(*known, strict=True)) if known else (0, 0)
        if least:
            times = f"{decoded / least:.2f} times the least"
            return f": {decoded:,} tokens decoded where {least:,} had to be, {times}"
    if name == "exact":
        counted = Counter(request.answer for request in requests(target))
        ties = f", {counted['tie']} but for two tokens that were equally likely" if counted["tie"] else ""
        told = sum(counted.values()) - counted["unknown"]
        if told:
            return f": {counted['same'] + counted['tie']} of {told} compared{ties}"
    return ""


def _hazards(found: Sequence[Verdict]) -> list[Sentence]:
    """One sentence on all hazards."""
    if not found:
        return []
    counted = Counter(verdict.outcome for verdict in found)
    tried = f"{_number(len(found), 'hazard')} of the native memory"
    if counted["bad"]:
        hit = [v.name.removeprefix(HAZARD) for v in found if v.outcome == "bad"]
        more = f" and {len(hit) - 3} more" if len(hit) > 3 else ""
        return [Sentence("bad", f"{counted['bad']} of {tried} hit it: {', '.join(hit[:3])}{more}.")]
    if counted["ok"]:
        untold = f"; of {counted['cannot tell']} it cannot be told" if counted["cannot tell"] else ""
        return [Sentence("ok", f"None of {tried} hits it{untold}.")]
    return [Sentence("cannot tell", f"Whether any of {tried} hits it cannot be told.")]


def _quoted(names: Iterable[str], most: int = 3) -> str:
    """Names in quotes, the first few of them."""
    every = [f"“{name}”" for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
