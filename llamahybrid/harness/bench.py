"""Targets side by side: tokens decoded, time to the first token, throughput, memory.

Targets alternate at each workload, in rounds, so that a slow phase of the machine slows all of them; times
are medians over rounds. Token counts do not depend on the machine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from llamahybrid.engine.process import Progress
from llamahybrid.errors import LlamaHybridError
from llamahybrid.harness.collecting import LATE, Collector, left_out
from llamahybrid.harness.figures import judged, workload_figures
from llamahybrid.harness.plan import Speed, cost_of, fitting
from llamahybrid.harness.plan import measured as measured_speed
from llamahybrid.harness.report import Report, Times, WorkloadFigures
from llamahybrid.harness.runner import WorkloadRunner, unsuited
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
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
    failed: bool = False

    def play(self, session: Session, workload: Workload, scale: float) -> None:
        """Measure another round. Raises TargetError."""
        before = session.resident()
        session.decoded()
        began = time.perf_counter()
        played = WorkloadRunner(session).converse(workload, scale)
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
            measured_from = workload.measured_from
            figures = workload_figures(
                workload.name, found, decoded, measured_from=measured_from, scale=scale
            )
            self.first = replace(figures, verdicts=())

    def figures(self) -> WorkloadFigures:
        """Return the token counts of the first round, and the medians so far. Only after `play`."""
        times = Times(
            median(self.ttfts) if self.ttfts else None,
            median(self.rates) if self.rates else None,
            max(self.grown, default=None),
        )
        assert self.first is not None, "a round was played"
        return replace(self.first, times=times)


@dataclass
class Bench:
    """Measurements of a model on targets."""

    targets: Sequence[Target]
    model: ModelFile
    rounds: int = 3
    clients: Sequence[int] = (1, 4, 8)
    alone: Sequence[Workload] = ALONE
    progress: Progress = field(default=lambda *_: None)
    found: Callable[[Report], None] = field(default=lambda _: None)
    """Called with the report so far after each step."""
    minutes: float | None = None
    """Time for everything: conversations are shortened to fit, and the rest is left out. None: no limit."""
    _scale: float = field(default=1.0, init=False)

    def run(self) -> Report:
        """Measure everything; a target that dies is reported, not raised.

        KeyboardInterrupt and SystemExit end the run: the report is not `complete`.
        """
        options = {name: str(value) for name, value in self.model.options.items()}
        settings = {"rounds": str(self.rounds), "bytes": f"{self.model.path.stat().st_size:,}", **options}
        self._results = Collector(self.targets, [self.model], self.found, settings)
        return self._results.run(self._measure)

    def _measure(self) -> None:
        until = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        workloads = (*self.alone, *map(together, self.clients))
        steps = [(w, target) for _ in range(self.rounds) for w in workloads for target in self.targets]
        every: dict[tuple[str, str], _Measured] = defaultdict(_Measured)
        if until is not None:
            self.progress("measuring the model's speed", 0, len(steps))
            self._scale = self._fitting(workloads, until - time.monotonic())
        for done, (workload, target) in enumerate(steps):
            if until is not None and time.monotonic() > until:
                for late, other in steps[done:]:
                    if (late.name, other.name) not in every:
                        self._results.put(other, left_out(late.name, LATE))
                return
            self.progress(f"{target.name}: {workload.name}", done, len(steps))
            measured = every[workload.name, target.name]
            if not measured.failed:
                measured.failed = True
                with self._results.errors(target, workload.name):
                    self._results.put(target, self._play(target, workload, measured))
                    measured.failed = False
            target.close()  # each workload has a process of its own: memory is measured from its start

    def _fitting(self, workloads: Sequence[Workload], seconds: float) -> float:
        """Return the longest scale that fits into `seconds`, by the first target that opens."""
        for target in self.targets:
            try:
                with target.open(self.model, Shape(2048)) as session:
                    speed = measured_speed(session)
            except LlamaHybridError:
                continue
            finally:
                target.close()

            def needed(scale: float, speed: Speed = speed) -> float:
                return sum(speed.seconds(cost_of(each, scale)) for each in workloads)

            return fitting(needed, seconds / self.rounds / len(self.targets))
        return 1.0

    def _play(self, target: Target, workload: Workload, measured: _Measured) -> WorkloadFigures:
        with target.open(self.model, Shape(workload.n_ctx, workload.clients)) as session:
            if why := unsuited(session, workload):
                return left_out(workload.name, why)
            measured.play(session, workload, self._scale)
            return measured.figures()
