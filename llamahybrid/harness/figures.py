"""Figures and verdicts of the requests of a workload."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamahybrid.harness.misses import explain, explain_text, parting
from llamahybrid.harness.oracle import Exchange, least_decodes
from llamahybrid.harness.report import RequestFigures, Sameness, Verdict, WorkloadFigures, place
from llamahybrid.harness.runner import RequestResult
from llamahybrid.harness.targets.base import Session
from llamahybrid.harness.traces.trace import rendered

UNKNOWN_BEFORE = 64
"""Tokens that unrelated prompts may share: a template's head, a block of a paged cache."""

SHORT_EXCESS = 64
"""Tokens a request beyond the least that are no fault in shortened workloads: checkpoints have a distance."""


@dataclass(frozen=True)
class Judged:
    """A request with its figures, and the comparison of its answer with one that reused nothing."""

    played: RequestResult
    figures: RequestFigures
    said: str
    """The difference in words, or the reason why it is unknown."""

    @property
    def same(self) -> Sameness:
        """The result of the comparison."""
        return self.figures.answer

    @property
    def reused(self) -> int | None:
        """Reused tokens by counters, else as reported."""
        reused = self.played.reply.reused
        return self.figures.cached if reused is None else reused

    @property
    def over(self) -> int:
        """Tokens that were reused, or reported as that, beyond all that was decoded before."""
        reply, figures = self.played.reply, self.figures
        if figures.matched is None or (reply.tokens is None and figures.turn):
            return 0  # answers without ids may have been reused
        most = max(n for n in (reply.reused, figures.cached, 0) if n is not None)
        return max(0, most - figures.matched)


def judged(
    session: Session,
    name: str,
    played: Sequence[RequestResult],
    *,
    compare: bool = True,
    until: float | None = None,
    sound: bool = True,
) -> list[Judged]:
    """Return each request of a workload with its figures. Raises TargetError.

    Answers are compared with fresh ones of the session until `until`, a `time.monotonic()`; the requests for
    that disturb its cache. With `compare` False no answer is compared. `sound`: as of `explain`.
    """
    compared: list[tuple[Sameness, str]] = []
    for each in played if until is None else reversed(played):  # the last ones reuse most
        late = until is not None and time.monotonic() > until
        if late or not compare:
            compared.append(("not compared", "the time was over (see --minutes)"))
        else:
            compared.append(session.sameness(each.request, each.reply))
    if until is not None:
        compared.reverse()
    texts = [_in_characters(each) for each in played]
    found = []
    for index, (each, (same, said)) in enumerate(zip(played, compared, strict=True)):
        reply, matched = each.reply, None
        if each.prompt:
            history = list(played[:index])
            if session.parallel > 1:  # a later request may have been served first
                history += [one for one in played[index + 1 :] if one.sent < each.sent + reply.seconds]
            matched, _ = parting(each.prompt, history, each.request.salt)
            miss = explain(each, history, session.spell, sound)
        else:
            miss = explain_text(texts[index], texts[:index])
        figures = RequestFigures(
            workload=name,
            chat=each.chat,
            turn=each.turn,
            total=reply.total,
            matched=matched,
            cached=reply.cached,
            decoded=reply.all_decoded,
            ttft=reply.ttft,
            seconds=reply.seconds,
            answer=same,
            text_hash=hashlib.sha256(reply.text.encode("utf-8", "surrogatepass")).hexdigest()[:16],
            miss=miss,
        )
        found.append(Judged(each, figures, said))
    return found


def _in_characters(played: RequestResult) -> RequestResult:
    """Return a request with the characters of its prompt in place of unknown token ids."""
    codes = tuple(map(ord, rendered(played.request)))
    return replace(played, reply=replace(played.reply, prompt=codes, tokens=()))


def workload_figures(
    name: str,
    found: Sequence[Judged],
    total: int | None = None,
    *,
    measured_from: int = 0,
    bound: float | None = None,
    scale: float = 1.0,
    cut_short: bool = False,
) -> WorkloadFigures:
    """Return a workload's figures and verdicts.

    `total`: all decoded tokens, by native counters; `measured_from`: number of the first counted request;
    `bound`: None: no verdict on reuse; `cut_short`: requests were left out for lack of time.
    """
    least, decoded = totals(measured_from, found, total)
    ratio = decoded / least if least and decoded is not None else None
    verdicts = [exact_verdict(found), reports_verdict(found), prefix_verdict(found)]
    if bound is not None:
        excess = None if scale == 1 or least is None or decoded is None else (decoded - least) / len(found)
        verdicts.insert(0, reuse_verdict(ratio, bound, excess))
    if cut_short:
        said = f"the time was over after {len(found)} requests (see --minutes)"
        verdicts = [replace(each, detail=f"{each.detail}; {said}") for each in verdicts]
    requests = tuple(each.figures for each in found)
    return WorkloadFigures(
        name, requests, least, decoded, ratio, bound, verdicts=tuple(verdicts), scale=scale
    )


def totals(measured_from: int, found: Sequence[Judged], total: int | None) -> tuple[int | None, int | None]:
    """Return least and decoded tokens of the counted requests; None: token ids or counters are hidden."""
    records = []
    for each in found:
        reply = each.played.reply
        if reply.prompt is None or reply.tokens is None:
            return None, None
        records.append(Exchange(reply.prompt, reply.tokens))
    each_least = least_decodes(records, [each.played.request.salt for each in found])
    counts = [each.played.number >= measured_from for each in found]
    least = sum(n for n, count in zip(each_least, counts, strict=True) if count)
    decoded = [each.figures.decoded for each in found]
    if None not in decoded:
        pairs = zip(decoded, counts, strict=True)
        return least, sum(n for n, count in pairs if count and n is not None)
    if total is None:
        return least, None
    return least, max(0, total - (sum(each_least) - least))  # uncounted requests as if they decoded the least


def reuse_verdict(ratio: float | None, bound: float, excess: float | None = None) -> Verdict:
    """Return the verdict on decoded tokens over the least possible.

    `excess`: tokens a request decoded beyond the least, in a shortened workload.
    """
    if ratio is None:
        return Verdict("reuse", "cannot tell", "the target hides token ids or what it decoded")
    said = f"decoded {ratio:.2f} times the least possible, at most {bound:.2f} expected"
    if ratio <= bound:
        return Verdict("reuse", "ok", said)
    if excess is not None and excess <= SHORT_EXCESS:
        return Verdict("reuse", "cannot tell", f"{said}, but its prompts were shortened too much to judge")
    return Verdict("reuse", "bad", said)


def exact_verdict(found: Sequence[Judged]) -> Verdict:
    """Return the verdict on answers compared with contexts that reused nothing."""
    wrong = [each for each in found if each.same == "different"]
    unknown = [each.said for each in found if each.same == "unknown"]
    if wrong:
        many = f"{len(wrong)} of {len(found)} answers are wrong"
        return Verdict("exact", "bad", f"{many}; {place(wrong[0].played)}: {wrong[0].said}")
    if unknown:
        return Verdict("exact", "cannot tell", f"{len(unknown)} of {len(found)} answers: {unknown[0]}")
    told = [each.same for each in found if each.same != "not compared"]
    late = "" if len(told) == len(found) else f"; the time was over before the other {len(found) - len(told)}"
    if not told:
        return Verdict("exact", "cannot tell", "the time was over before an answer was compared")
    ties = told.count("tie")
    tied = f", {ties} tie{'' if ties == 1 else 's'}" if ties else ""
    return Verdict("exact", "ok", f"{len(told)} answers as without reuse{tied}{late}")


def reports_verdict(found: Sequence[Judged]) -> Verdict:
    """Return the verdict on the numbers of reused tokens that the target reports."""
    name, known = "reports-what-it-reused", False
    for each in found:
        reply, where = each.played.reply, place(each.played)
        if reply.reported is None:
            continue
        if reply.total is not None and not 0 <= reply.reported <= reply.total:
            return Verdict(name, "bad", f"{where}: {reply.reported} reused of a prompt of {reply.total}")
        if reply.reused is not None:
            known = True
            if reply.reported != reply.reused:
                said = f"it says {reply.reported} tokens were reused, its counters say {reply.reused}"
                return Verdict(name, "bad", f"{where}: {said}")
        if each.over and each.same in ("same", "tie"):
            figures = each.figures
            said = f"{figures.cached} tokens reused, but only {figures.matched} of them had ever been said"
            return Verdict(name, "bad", f"{where}: {said}, and the answer is right")
    if known:
        return Verdict(name, "ok", "what it says agrees with what it decoded")
    return Verdict(name, "cannot tell", "it says nothing, or nothing to compare it with")


def prefix_verdict(found: Sequence[Judged]) -> Verdict:
    """Return the verdict on reuse beyond the common prefix of prompts."""
    name, known = "restores-a-prefix", False
    for each in found:
        known |= each.figures.matched is not None and each.figures.cached is not None
        if each.over and each.same == "different":
            more = f"{each.over} tokens more were reused than the prompt has in common with anything before"
            return Verdict(name, "bad", f"{place(each.played)}: {more}; {each.said}")
    if not known:
        return Verdict(name, "cannot tell", "the target hides token ids or what it reused")
    return Verdict(name, "ok", "never more than what prompts have in common")
