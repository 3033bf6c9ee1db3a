"""A workload on a session: requests, comparison of their answers, figures and times."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import replace
from statistics import median

from llamahybrid.harness.figures import judged, workload_figures
from llamahybrid.harness.plan import Plan
from llamahybrid.harness.report import Times, WorkloadFigures
from llamahybrid.harness.runner import WorkloadRunner
from llamahybrid.harness.steps import Say
from llamahybrid.harness.targets.base import Session
from llamahybrid.harness.workloads.tokens import Workload


def played(
    session: Session,
    plan: Plan,
    say: Say,
    workload: Workload,
    bad: Set[str] = frozenset(),
    compare: bool = True,
) -> WorkloadFigures:
    """Play a workload and return its figures. Raises TargetError.

    `bad`: faults that the directed probes found; `compare`: compare the answers with fresh ones.
    """
    before = session.resident()
    session.decoded()
    began = time.perf_counter()
    player = WorkloadRunner(
        session, lambda _: say(f"{workload.name}, {len(player.played)} done"), plan.ask_until
    )
    results = player.converse(workload, plan.scale)
    seconds = time.perf_counter() - began
    decoded, after = session.decoded(), session.resident()
    if compare:
        say(f"{workload.name}, comparing answers")
    until = plan.compare_until
    found = judged(session, workload.name, results, compare=compare, until=until, sound=not bad)
    figures = workload_figures(
        workload.name,
        found,
        decoded,
        measured_from=workload.measured_from,
        bound=workload.bound,
        scale=plan.scale,
        cut_short=player.cut_short,
    )
    counted = [each.reply.ttft for each in results if each.number >= workload.measured_from]
    ttfts = [ttft for ttft in counted if ttft is not None]
    made = sum(len(each.reply.tokens or ()) for each in results)
    grown = None if before is None or after is None else max(0, after - before)
    chats = max(1, len({each.chat for each in results}))
    times = Times(
        median(ttfts) if ttfts else None,
        made / seconds if made else None,
        grown if grown is None else grown // chats,
    )
    return replace(figures, times=times)
