"""Targets side by side: tokens decoded, time to the first token, throughput, memory.

Targets alternate at each workload, in rounds, so that a slow phase of the machine slows all of them; times
are medians over rounds. Token counts do not depend on the machine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import ClassVar

from llamahybrid.harness.figures import judged, workload_figures
from llamahybrid.harness.plan import Plan, cost_of
from llamahybrid.harness.report import Times, WorkloadFigures
from llamahybrid.harness.runner import WorkloadRunner, unsuited
from llamahybrid.harness.steps import Run, Say, Step
from llamahybrid.harness.targets.base import Session, Shape
from llamahybrid.harness.workloads.multi_user import four_users
from llamahybrid.harness.workloads.tokens import (
    Workload,
    edit_middle,
    exact_append,
    regenerate,
    thinking_stripped,
)

TURNS = 5

LONG_CHAT = partial(thinking_stripped, system=3500, turns=10, answer=60, thinking=30)
USERS = partial(four_users, system=800, turns=4, answer=40, thinking=0)

ALONE = (
    Workload("thinking stripped, 10 turns from 3,500 tokens", LONG_CHAT, n_ctx=8192),
    Workload("an answer regenerated five times", partial(regenerate, system=1400, answers=6)),
    Workload(
        "a question in the middle edited",
        partial(edit_middle, system=500, turns=4, message=300, edited=2),
    ),
    Workload("four users in turn", USERS, n_ctx=8192),
)


def together(clients: int) -> Workload:
    """Return the workload of `clients` chats at once."""
    name = "one client" if clients == 1 else f"{clients} clients at once"
    chat = partial(exact_append, system=200, turns=TURNS, message=40)
    return Workload(name, chat, n_ctx=1024 * clients, measured_from=0, clients=clients)


@dataclass
class _Measured:
    """Measurements of a workload on a target, over rounds."""

    ttfts: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    first: WorkloadFigures | None = None
    """Requests and token counts of the first round."""

    def play(self, workload: Workload, session: Session, plan: Plan, say: Say) -> WorkloadFigures:
        """Measure another round; return the token counts of the first one, and the medians so far.

        Raises TargetError.
        """
        before = session.resident()
        session.decoded()
        began = time.perf_counter()
        played = WorkloadRunner(session, until=plan.until).converse(workload, plan.scale)
        seconds = time.perf_counter() - began
        decoded, after = session.decoded(), session.resident()
        counted = [each for each in played if each.number >= workload.measured_from]
        self.ttfts += [each.reply.ttft for each in counted if each.reply.ttft is not None]
        if made := sum(len(each.reply.tokens or ()) for each in played):
            self.rates.append(made / seconds)
        if before is not None and after is not None:
            self.grown.append(max(0, after - before) // max(1, len({each.chat for each in played})))
        if self.first is None:
            found = judged(session, workload.name, played, compare=False)
            figures = workload_figures(
                workload.name, found, decoded, measured_from=workload.measured_from, scale=plan.scale
            )
            self.first = replace(figures, verdicts=())
        times = Times(
            median(self.ttfts) if self.ttfts else None,
            median(self.rates) if self.rates else None,
            max(self.grown, default=None),
        )
        return replace(self.first, times=times)


@dataclass
class Bench(Run):
    """Measurements of a model on targets."""

    rounds: int = 3
    clients: Sequence[int] = (1, 4, 8)
    alone: Sequence[Workload] = ALONE
    fresh: ClassVar[bool] = True  # memory is measured from a process's start

    def settings(self) -> dict[str, str]:
        """Return the rounds, and size and options of the model."""
        (model,) = self.models
        options = {name: str(value) for name, value in model.options.items()}
        return {"rounds": str(self.rounds), "bytes": f"{model.path.stat().st_size:,}", **options}

    def parts(self) -> Sequence[Sequence[Step]]:
        """Return one part, in which targets alternate."""
        workloads = (*self.alone, *map(together, self.clients))
        shortest = min(workloads, key=lambda each: cost_of(each, 1.0).prompt)
        every: dict[tuple[str, str], _Measured] = defaultdict(_Measured)
        steps = [
            Step(
                target,
                model,
                each.name,
                Shape(each.n_ctx, each.clients),
                partial(every[each.name, target.name].play, each),
                cost=partial(cost_of, each),
                unsuited=partial(unsuited, workload=each),
                place=each.name,
                always=each is shortest and not number,
            )
            for number in range(self.rounds)
            for each in workloads
            for target, model in self.pairs()
        ]
        return [steps]
