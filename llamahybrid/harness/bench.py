"""Targets side by side: tokens decoded, time to the first token, throughput, restart, memory, saving a state.

Targets alternate at each workload, in rounds, so that a slow phase of the machine slows all of them; times
are medians over rounds. Token counts do not depend on the machine.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from llamahybrid.engine.process import Progress
from llamahybrid.errors import LlamaHybridError
from llamahybrid.harness import figures
from llamahybrid.harness.collecting import LATE, Collector, left_out
from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.plan import Cost, Speed, cost_of, fitting
from llamahybrid.harness.plan import measured as measured_speed
from llamahybrid.harness.report import Report, RequestFigures, Saving, Times, WorkloadFigures
from llamahybrid.harness.runner import WorkloadRunner, suits
from llamahybrid.harness.targets.base import ModelFile, Session, Shape, Target
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import (
    Workload,
    edit_middle,
    exact_append,
    regenerate,
    thinking_stripped,
)

TURNS = 5
RESTART_TOKENS = 2000
SAVED_TOKENS = 2000
SAVED = "a state saved and restored"
"""The pseudo-workload that has `Times.saving` alone."""
RESTARTING = ("ours",)
"""Kinds of targets that keep conversations for the next process."""


def four_users(speech: Speech) -> Conversation:
    """Four chats of 800 tokens and more take turns."""
    histories = [speech.message(800, "system") for _ in range(4)]
    for _ in range(4):
        for i, history in enumerate(histories):
            history += speech.message(50) + speech.reply()
            answer = yield Request(40, list(history), chat=str(i))
            history += answer.tokens


LONG_CHAT = partial(thinking_stripped, system=3500, turns=10, answer=60, thinking=30)

ALONE = (
    Workload("thinking stripped, 10 turns from 3,500 tokens", LONG_CHAT, n_ctx=8192),
    Workload("an answer regenerated five times", partial(regenerate, system=1400, answers=6)),
    Workload(
        "a question in the middle edited",
        partial(edit_middle, system=500, turns=4, message=300, edited=2),
    ),
    Workload("four users in turn", four_users, n_ctx=8192),
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
    savings: list[Saving] = field(default_factory=list)
    requests: tuple[RequestFigures, ...] = ()
    """Of the first round."""
    decoded: int | None = None
    least: int | None = None
    failed: bool = False

    def figures(self, workload: str, scale: float) -> WorkloadFigures:
        """Return the medians so far."""
        times = Times(
            median(self.ttfts) if self.ttfts else None,
            median(self.rates) if self.rates else None,
            max(self.grown, default=None),
            _median(self.savings),
        )
        ratio = self.decoded / self.least if self.least and self.decoded is not None else None
        requests, least, decoded = self.requests, self.least, self.decoded
        return WorkloadFigures(workload, requests, least, decoded, ratio, scale=scale, times=times)


def _median(found: Sequence[Saving]) -> Saving | None:
    if not found:
        return None
    names = ("save", "restore", "memcpy")
    return Saving(found[0].bytes, *(median(getattr(each, name) for each in found) for name in names))


Step = Callable[[_Measured], None]


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

    def _measure(self) -> bool:
        until = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        steps = list(self._steps())
        every: dict[tuple[str, str], _Measured] = defaultdict(_Measured)
        if until is not None:
            self.progress("measuring the model's speed", 0, len(steps))
            self._scale = self._fitting(until - time.monotonic())
        for done, (name, target, step) in enumerate(steps):
            if until is not None and time.monotonic() > until:
                for late, other, _ in steps[done:]:
                    if (late, other.name) not in every:
                        self._results.put(other, left_out(late, LATE))
                return True
            self.progress(f"{target.name}: {name}", done, len(steps))
            measured = every[name, target.name]
            if not measured.failed:
                try:
                    step(measured)
                    if measured != _Measured():
                        self._results.put(target, measured.figures(name, self._scale))
                except LlamaHybridError as error:
                    measured.failed = True
                    self._results.fail(target, f"{name}: {error}")
            target.close()  # each step has a process of its own, so that memory is measured from its start
        return True

    def _fitting(self, seconds: float) -> float:
        """Return the longest scale that fits into `seconds`, by the first target that opens."""
        for target in self.targets:
            try:
                with target.open(self.model, Shape(2048)) as session:
                    speed = measured_speed(session)
            except LlamaHybridError:
                continue
            finally:
                target.close()
            return fitting(partial(self._seconds, speed), seconds / self.rounds / len(self.targets))
        return 1.0

    def _seconds(self, speed: Speed, scale: float) -> float:
        """Return the seconds of a round on one target."""
        workloads = [*self.alone, *map(together, self.clients)]
        states = Cost(2 * RESTART_TOKENS + SAVED_TOKENS, 32).at(scale)
        return sum(map(speed.seconds, [*(cost_of(each, scale) for each in workloads), states]))

    def _steps(self) -> Iterator[tuple[str, Target, Step]]:
        for number in range(self.rounds):
            for workload in (*self.alone, *map(together, self.clients)):
                for target in self.targets:
                    yield workload.name, target, partial(self._play, target, workload)
            for target in self.targets:
                if target.kind in RESTARTING:
                    yield "restart, from disk", target, partial(self._restart, target, number)
            for target in self.targets:
                yield SAVED, target, partial(self._save, target, number)

    def _play(self, target: Target, workload: Workload, measured: _Measured) -> None:
        with target.open(self.model, Shape(workload.n_ctx, workload.clients)) as session:
            if suits(session, workload):
                _play(session, workload, measured, self._scale)

    def _restart(self, target: Target, number: int, measured: _Measured) -> None:
        shape = Shape(4096)
        with tempfile.TemporaryDirectory(prefix="llamahybrid-bench-") as folder, _kept_in(target, folder):
            with target.open(self.model, shape) as session:
                if session.vocabulary is None:
                    return
                speech = Speech(session.vocabulary, seed=number, scale=self._scale)
                prompt = speech.message(RESTART_TOKENS, "system") + speech.message(40) + speech.reply()
                answer = WorkloadRunner(session).ask(Request(16, prompt)).tokens or ()
            target.close()
            with target.open(self.model, shape) as session:
                session.decoded()
                after = WorkloadRunner(session).ask(
                    Request(16, [*prompt, *answer, *speech.message(40), *speech.reply()])
                )
                measured.decoded = session.decoded()
        if after.total is not None:
            known = len(prompt) + max(0, len(answer) - 1)
            measured.least = after.total - known + max(0, len(after.tokens or ()) - 1)
        if after.ttft is not None:
            measured.ttfts.append(after.ttft)

    def _save(self, target: Target, number: int, measured: _Measured) -> None:
        with target.open(self.model, Shape(SAVED_TOKENS + 96)) as session:
            if session.vocabulary is None:
                return
            speech = Speech(session.vocabulary, seed=number, scale=self._scale)
            saving = session.saving(speech.words(SAVED_TOKENS))
            if saving is not None:
                measured.savings.append(saving)


@contextmanager
def _kept_in(target: Target, folder: str) -> Iterator[None]:
    """Let processes of the target keep conversations in a folder, and end them."""
    target.kept_in = folder
    try:
        yield
    finally:
        target.kept_in = None
        target.close()  # it would write into the folder after its removal


def _play(session: Session, workload: Workload, measured: _Measured, scale: float) -> None:
    before = session.resident()
    session.decoded()
    began = time.perf_counter()
    played = WorkloadRunner(session).converse(workload, scale)
    seconds = time.perf_counter() - began
    decoded, after = session.decoded(), session.resident()
    counted = [each for each in played if each.number >= workload.measured_from]
    measured.ttfts += [each.reply.ttft for each in counted if each.reply.ttft is not None]
    if made := sum(len(each.reply.tokens or ()) for each in played):
        measured.rates.append(made / seconds)
    if before is not None and after is not None:
        measured.grown.append(max(0, after - before) // max(1, len({each.chat for each in played})))
    if not measured.requests:
        found = figures.judged(session, workload.name, played, compare=False)
        measured.requests = tuple(each.figures for each in found)
        total = decoded if workload.clients > 1 else None
        measured.least, measured.decoded = figures.totals(workload.measured_from, found, total)
