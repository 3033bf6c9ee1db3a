"""Targets side by side: tokens decoded, time to the first token, throughput, memory.

Targets alternate at each workload, in rounds, so that a slow phase of the machine slows all of them; times
are medians over rounds. Token counts do not depend on the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

from llamahybrid.harness.plan import Plan, cost_of
from llamahybrid.harness.play import played
from llamahybrid.harness.report import Times, WorkloadFigures
from llamahybrid.harness.runner import unsuited
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
        rounds: dict[tuple[str, str], list[WorkloadFigures]] = defaultdict(list)
        steps = [
            Step(
                target,
                model,
                each.name,
                Shape(each.n_ctx, each.clients),
                partial(_round, each, rounds[each.name, target.name]),
                cost=partial(cost_of, each, compared=False),
                unsuited=partial(unsuited, workload=each),
                place=each.name,
                always=each is shortest and not number,
            )
            for number in range(self.rounds)
            for each in workloads
            for target, model in self.pairs()
        ]
        return [steps]


def _round(
    workload: Workload, rounds: list[WorkloadFigures], session: Session, plan: Plan, say: Say
) -> WorkloadFigures:
    """Play another round; return the token counts of the first one, and the times of all."""
    figures = played(session, plan, say, workload, compare=False)
    rounds.append(replace(figures, bound=None, verdicts=()))

    def over_rounds(name: str, pick: Any = median) -> Any:
        values = [getattr(each.times, name) for each in rounds]
        known = [value for value in values if value is not None]
        return pick(known) if known else None

    times = Times(over_rounds("ttft"), over_rounds("tokens_per_second"), over_rounds("resident", max))
    return replace(rounds[0], times=times)
