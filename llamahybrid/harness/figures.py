"""Figures and verdicts of the requests of a workload."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from llamahybrid.harness.misses import Past, explain, explain_text, parting
from llamahybrid.harness.oracle import Exchange, least_decodes
from llamahybrid.harness.report import RequestFigures, Sameness, Verdict, WorkloadFigures, place
from llamahybrid.harness.runner import RequestResult
from llamahybrid.harness.targets.base import Session
from llamahybrid.harness.traces.trace import rendered
from llamahybrid.harness.workloads.tokens import Workload

UNKNOWN_BEFORE = 64
"""Tokens that unrelated prompts may share: a template's head, a block of a paged cache."""

SHORT_EXCESS = 64
"""Tokens a request beyond the least that are no fault in shortened workloads: checkpoints have a distance."""

Checked = tuple[Sameness, str]


def past_of(played: RequestResult) -> Past:
    """Return a request in the form that later ones are compared with."""
    reply = played.reply
    return Past(played.ask, played.chat, played.turn, reply.prompt or (), reply.tokens or (), reply.cached)


def text_past(played: RequestResult) -> Past:
    """Return a request as `past_of`, with characters for unknown token ids."""
    codes = tuple(map(ord, rendered(played.ask)))
    return Past(played.ask, played.chat, played.turn, codes)


def checks(session: Session, played: Sequence[RequestResult], until: float | None = None) -> list[Checked]:
    """Compare answers with ones that reused nothing, until a `time.monotonic()`. Raises TargetError."""
    found: list[Checked] = []
    for each in played:
        if until is not None and time.monotonic() > until:
            found.append(("unknown", "the time was over before it was compared (see --minutes)"))
        else:
            found.append(session.sameness(each.ask, each.reply))
    return found


def requests(
    session: Session, name: str, played: Sequence[RequestResult], checked: Sequence[Checked]
) -> tuple[RequestFigures, ...]:
    """Return the figures of each request."""
    figures = []
    pasts = [past_of(each) for each in played]
    for index, (each, (same, _)) in enumerate(zip(played, checked, strict=True)):
        reply, past = each.reply, pasts[index]
        told = bool(past.prompt)
        history = pasts[:index]
        if session.parallel > 1:  # a later request may have been served first
            later = zip(played[index + 1 :], pasts[index + 1 :], strict=True)
            history += [other for one, other in later if one.sent < each.sent + reply.seconds]
        found = parting(past.prompt, history, each.ask.salt) if told else None
        if told:
            miss = explain(past, history, session.spell, reply.reason)
        else:
            miss = explain_text(text_past(each), [text_past(other) for other in played[:index]])
        cached, decoded = reply.cached, reply.decoded
        if decoded is None and reply.worked is not None and reply.tokens is not None:
            decoded = reply.worked + max(0, len(reply.tokens) - 1)
        figures.append(
            RequestFigures(
                workload=name,
                chat=each.chat,
                turn=each.turn,
                total=reply.total,
                matched=(found.at if found else 0) if told else None,
                cached=cached,
                left=None if reply.total is None or cached is None else reply.total - cached,
                decoded=decoded,
                ttft=reply.ttft,
                seconds=reply.seconds,
                answer=same,
                text_hash=hashlib.sha256(reply.text.encode("utf-8", "surrogatepass")).hexdigest()[:16],
                miss=miss,
            )
        )
    return tuple(figures)


def workload_figures(
    session: Session,
    workload: Workload,
    played: Sequence[RequestResult],
    total: int | None,
    *,
    scale: float = 1.0,
    until: float | None = None,
    cut_short: bool = False,
) -> WorkloadFigures:
    """Return a workload's figures. `total`: all decoded tokens, by native counters. Raises TargetError.

    Requests fresh answers of the session until `until`, a `time.monotonic()`, which disturbs its cache.
    `cut_short`: requests were left out for lack of time.
    """
    checked = checks(session, played, until)
    found = requests(session, workload.name, played, checked)
    least, decoded = totals(workload.measured_from, played, found, total)
    ratio = decoded / least if least and decoded is not None else None
    excess = None if scale == 1 or least is None or decoded is None else (decoded - least) / len(played)
    verdicts: tuple[Verdict, ...] = (
        reuse_verdict(ratio, workload.bound, excess),
        exact_verdict(played, checked),
        reports_verdict(played, found, checked),
        prefix_verdict(played, found, checked),
    )
    if cut_short:
        said = f"the time was over after {len(played)} requests (see --minutes)"
        verdicts = tuple(replace(each, detail=f"{each.detail}; {said}") for each in verdicts)
    return WorkloadFigures(
        workload.name, found, least, decoded, ratio, workload.bound, verdicts=verdicts, scale=scale
    )


def totals(
    measured_from: int, played: Sequence[RequestResult], found: Sequence[RequestFigures], total: int | None
) -> tuple[int | None, int | None]:
    """Return least and decoded tokens of the counted requests; None: token ids or counters are hidden."""
    records = []
    for each in played:
        reply = each.reply
        if reply.prompt is None or reply.tokens is None:
            return None, None
        records.append(Exchange(reply.prompt, reply.tokens))
    each_least = least_decodes(records, [each.ask.salt for each in played])
    counts = [each.number >= measured_from for each in played]
    least = sum(n for n, count in zip(each_least, counts, strict=True) if count)
    decoded = [each.decoded for each in found]
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


def exact_verdict(played: Sequence[RequestResult], checked: Sequence[Checked]) -> Verdict:
    """Return the verdict on answers compared with contexts that reused nothing."""
    wrong = [(each, said) for each, (same, said) in zip(played, checked, strict=True) if same == "different"]
    unknown = [said for same, said in checked if same == "unknown"]
    if wrong:
        first, said = wrong[0]
        many = f"{len(wrong)} of {len(checked)} answers are wrong"
        return Verdict("exact", "bad", f"{many}; {place(first)}: {said}")
    if unknown:
        return Verdict("exact", "cannot tell", f"{len(unknown)} of {len(checked)} answers: {unknown[0]}")
    ties = sum(same == "tie" for same, _ in checked)
    tied = f", {ties} tie{'' if ties == 1 else 's'}" if ties else ""
    return Verdict("exact", "ok", f"{len(checked)} answers as without reuse{tied}")


def _over(played: RequestResult, figures: RequestFigures) -> int:
    """Return the tokens that a request reused, or reports, beyond all that was decoded before."""
    if figures.matched is None or (played.reply.tokens is None and figures.turn):
        return 0  # answers without ids may have been reused
    most = max(n for n in (played.reply.reused, figures.cached, 0) if n is not None)
    return max(0, most - figures.matched)


def reports_verdict(
    played: Sequence[RequestResult], found: Sequence[RequestFigures], checked: Sequence[Checked]
) -> Verdict:
    """Return the verdict on the numbers of reused tokens that the target reports."""
    name, known = "reports-what-it-reused", False
    for each, figures, (same, _) in zip(played, found, checked, strict=True):
        reply, where = each.reply, place(each)
        if reply.reported is None:
            continue
        if reply.total is not None and not 0 <= reply.reported <= reply.total:
            return Verdict(name, "bad", f"{where}: {reply.reported} reused of a prompt of {reply.total}")
        if reply.reused is not None:
            known = True
            if reply.reported != reply.reused:
                said = f"it says {reply.reported} tokens were reused, its counters say {reply.reused}"
                return Verdict(name, "bad", f"{where}: {said}")
        if _over(each, figures) and same in ("same", "tie"):
            said = f"{figures.cached} tokens reused, but only {figures.matched} of them had ever been said"
            return Verdict(name, "bad", f"{where}: {said}, and the answer is right")
    if known:
        return Verdict(name, "ok", "what it says agrees with what it decoded")
    return Verdict(name, "cannot tell", "it says nothing, or nothing to compare it with")


def prefix_verdict(
    played: Sequence[RequestResult], found: Sequence[RequestFigures], checked: Sequence[Checked]
) -> Verdict:
    """Return the verdict on reuse beyond the common prefix of prompts."""
    name, known = "restores-a-prefix", False
    for each, figures, (same, said) in zip(played, found, checked, strict=True):
        known |= figures.matched is not None and figures.cached is not None
        if (over := _over(each, figures)) and same == "different":
            where = place(each)
            more = f"{over} tokens more were reused than the prompt has in common with anything before"
            return Verdict(name, "bad", f"{where}: {more}; {said}")
    if not known:
        return Verdict(name, "cannot tell", "the target hides token ids or what it reused")
    return Verdict(name, "ok", "never more than what prompts have in common")
