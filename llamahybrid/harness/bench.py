"""The peers in one run: tokens decoded, time to the first token, throughput, restarts, memory, saves.

Targets take turns at each workload, in rounds, so that a machine that is slower for a while is so for all of
them; times are medians over rounds. Counts do not depend on the machine.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from statistics import median
from typing import Any

from llamahybrid.errors import LlamaHybridError
from llamahybrid.harness.check import machine
from llamahybrid.harness.conversation import Conversation, Record, Request
from llamahybrid.harness.oracle import least_decodes
from llamahybrid.harness.plan import Cost, Speed, cost_of, fitting
from llamahybrid.harness.plan import measured as measured_speed
from llamahybrid.harness.runner import Played, Player, suits
from llamahybrid.harness.targets.base import Ask, ModelFile, Reply, Saving, Session, Shape, Target
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload

FORMAT = 1
ANSWER = 48
"""Tokens of an answer where throughput is measured."""

TURNS = 5
RESTART_TOKENS = 2000
SAVED_TOKENS = 2000
SAVED = "a state saved and restored"
"""The name of what is no workload: `Cell.saving` is all that is measured of it."""
RESTARTING = ("ours",)
"""Kinds of targets that keep conversations for the next process."""


def long_chat(speech: Speech) -> Conversation:
    """Ten turns from 3,500 tokens on; each answer thinks first, and history goes back without that."""
    history = speech.message(3500, "system")
    for _ in range(10):
        history += speech.message(60)
        answer = yield Request(60, history + speech.reply(thinking=True))
        history += speech.reply() + speech.spoken(answer.tokens[speech.size(30) :])


def regenerated(speech: Speech) -> Conversation:
    """A prompt of 1,500 tokens, answered six times."""
    prompt = speech.message(1400, "system") + speech.message(97) + speech.reply()
    for seed in range(6):
        yield Request(40, prompt, seed=seed)


def edited(speech: Speech) -> Conversation:
    """Four turns of 300 tokens; then the second question is rewritten, and the chat goes on."""
    parts = [speech.message(500, "system")]
    for turn in range(6):
        if turn == 4:
            parts[3] = speech.message(300) + speech.reply()
        parts.append(speech.message(300) + speech.reply())
        answer = yield Request(40, [token for part in parts for token in part])
        parts.append(list(answer.tokens))


def four_users(speech: Speech) -> Conversation:
    """Four chats of 800 tokens and more take turns."""
    histories = [speech.message(800, "system") for _ in range(4)]
    for _ in range(4):
        for i, history in enumerate(histories):
            history += speech.message(50) + speech.reply()
            answer = yield Request(40, list(history), chat=str(i))
            history += answer.tokens


def chat(speech: Speech) -> Conversation:
    """One client of several: a system prompt of 200 tokens, then turns of 40."""
    history = speech.message(200, "system")
    for _ in range(TURNS):
        history += speech.message(40) + speech.reply()
        answer = yield Request(ANSWER, history)
        history += answer.tokens


ALONE = (
    Workload("thinking stripped, 10 turns from 3,500 tokens", long_chat, n_ctx=8192),
    Workload("an answer regenerated five times", regenerated),
    Workload("a question in the middle edited", edited),
    Workload("four users in turn", four_users, n_ctx=8192),
)


def together(clients: int) -> Workload:
    """So many chats at once."""
    name = "one client" if clients == 1 else f"{clients} clients at once"
    return Workload(name, chat, n_ctx=1024 * clients, measured_from=0, clients=clients)


@dataclass(frozen=True)
class Cell:
    """One workload on one target."""

    workload: str
    target: str
    requests: int = 0
    decoded: int | None = None
    """Tokens, in one round; None: the target hides it."""
    least: int | None = None
    """Tokens that had to be decoded, likewise."""
    ttft: float | None = None
    """Seconds to the first token, median over requests and rounds."""
    tokens_per_second: float | None = None
    """Answers' tokens of all clients over the time of all, median over rounds."""
    resident: int | None = None
    """Bytes by which the process grew a conversation, largest round."""
    error: str | None = None
    saving: Saving | None = None
    """Of a state of `SAVED_TOKENS` tokens, medians over rounds; None: not measured, or hidden."""

    @property
    def ratio(self) -> float | None:
        """Tokens decoded over the least possible."""
        return None if self.decoded is None or not self.least else self.decoded / self.least


@dataclass(frozen=True)
class Results:
    """A whole run."""

    made: str
    machine: dict[str, str]
    model: dict[str, Any]
    rounds: int
    versions: dict[str, dict[str, str]]
    """By target."""
    cells: tuple[Cell, ...]
    complete: bool = True
    """All that was asked for is in it; otherwise the run goes on, or was stopped."""
    scale: float = 1.0
    """Length of messages and answers, as a share of the full one."""
    format: int = FORMAT

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        """What `as_json` gave. Raises ValueError for another format."""
        if data.get("format") != FORMAT:
            raise ValueError(f"not a bench of format {FORMAT}")
        return cls(**{**data, "cells": tuple(_cell(cell) for cell in data["cells"])})


def _cell(data: dict[str, Any]) -> Cell:
    saving = data.get("saving")
    return Cell(**{**data, "saving": None if saving is None else Saving(**saving)})


@dataclass
class _Measured:
    """Of one workload on one target, over rounds."""

    ttfts: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    savings: list[Saving] = field(default_factory=list)
    decoded: int | None = None
    least: int | None = None
    requests: int = 0
    error: str | None = None

    def cell(self, workload: str, target: str) -> Cell:
        return Cell(
            workload,
            target,
            self.requests,
            self.decoded,
            self.least,
            median(self.ttfts) if self.ttfts else None,
            median(self.rates) if self.rates else None,
            max(self.grown) if self.grown else None,
            self.error,
            _median(self.savings),
        )


def _median(found: Sequence[Saving]) -> Saving | None:
    if not found:
        return None
    save, restore, memcpy = (
        median(getattr(s, name) for s in found) for name in ("save", "restore", "memcpy")
    )
    return Saving(found[0].bytes, save, restore, memcpy)


Progress = Callable[[str, int, int], None]
"""What runs, how many steps are done, and of how many."""


@dataclass
class Bench:
    """What is to be measured."""

    targets: Sequence[Target]
    model: ModelFile
    rounds: int = 3
    clients: Sequence[int] = (1, 4, 8)
    alone: Sequence[Workload] = ALONE
    progress: Progress = field(default=lambda *_: None)
    found: Callable[[Results], None] = field(default=lambda _: None)
    """Hears what there is after each step: a long run that is stopped is not lost."""
    minutes: float | None = None
    """Time for all of it: conversations are shortened so that it suffices, and what is left at its end is
    left out. None: no limit."""
    _scale: float = field(default=1.0, init=False)

    def run(self) -> Results:
        """Measure all; a target that dies is reported, not raised.

        KeyboardInterrupt and SystemExit end it: the results are what was measured, and not `complete`.
        """
        found: dict[tuple[str, str], _Measured] = defaultdict(_Measured)
        try:
            return self._run(found)
        except (KeyboardInterrupt, SystemExit):
            for target in self.targets:
                target.close(1.0)
            return self._results(found, complete=False)

    def _run(self, found: dict[tuple[str, str], _Measured]) -> Results:
        until = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        steps = list(self._steps())
        results = self._results(found, complete=not steps)
        if until is not None:
            self.progress("measuring the model's speed", 0, len(steps))
            self._scale = self._fitting(until - time.monotonic())
        for done, (name, target, step) in enumerate(steps):
            if until is not None and time.monotonic() > until:
                return self._results(found, complete=False)
            self.progress(f"{target.name}: {name}", done, len(steps))
            measured = found[name, target.name]
            if measured.error is None:
                try:
                    step(measured)
                except LlamaHybridError as error:
                    measured.error = str(error)
            target.close()  # a process of its own each time: nobody's memory is another's
            results = self._results(found, complete=done + 1 == len(steps))
            self.found(results)
        return results

    def _fitting(self, seconds: float) -> float:
        """The longest scale at which all takes `seconds` at most, by the first target that opens."""
        for target in self.targets:
            try:
                with target.open(self.model, Shape(2048)) as session:
                    speed, _ = measured_speed(session)
            except LlamaHybridError:
                continue
            finally:
                target.close()
            return fitting(partial(self._seconds, speed), seconds / self.rounds / len(self.targets))
        return 1.0

    def _seconds(self, speed: Speed, scale: float) -> float:
        """Seconds of a round on one target."""
        workloads = [*self.alone, *map(together, self.clients)]
        states = Cost(2 * RESTART_TOKENS + SAVED_TOKENS, 32).at(scale)
        return sum(map(speed.seconds, [*(cost_of(each, scale) for each in workloads), states]))

    def _results(self, found: Mapping[tuple[str, str], _Measured], complete: bool) -> Results:
        cells = (measured.cell(*key) for key, measured in found.items())
        about = {"name": self.model.name, "bytes": self.model.path.stat().st_size, **self.model.options}
        return Results(
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine(),
            about,
            self.rounds,
            {target.name: target.versions() for target in self.targets},
            tuple(cell for cell in cells if cell.requests or cell.error),
            complete,
            self._scale,
        )

    def _steps(self) -> Iterator[tuple[str, Target, Callable[[_Measured], None]]]:
        every = [*self.alone, *map(together, self.clients)]
        for round_ in range(self.rounds):
            for workload in every:
                for target in self.targets:
                    yield workload.name, target, self._plays(target, workload, first=not round_)
            for target in self.targets:
                if target.kind in RESTARTING:
                    yield "restart, from disk", target, self._restarts(target, round_)
            for target in self.targets:
                yield SAVED, target, self._saves(target, round_)

    def _plays(self, target: Target, workload: Workload, first: bool) -> Callable[[_Measured], None]:
        def step(measured: _Measured) -> None:
            with target.open(self.model, Shape(workload.n_ctx, workload.clients)) as session:
                if suits(session, workload):
                    _play(session, workload, measured, first, self._scale)

        return step

    def _restarts(self, target: Target, number: int) -> Callable[[_Measured], None]:
        def step(measured: _Measured) -> None:
            with tempfile.TemporaryDirectory(prefix="llamahybrid-bench-") as folder, _kept_in(target, folder):
                shape = Shape(4096)
                with target.open(self.model, shape) as session:
                    vocabulary = session.vocabulary
                    if vocabulary is None:
                        return
                    speech = Speech(vocabulary, seed=number, scale=self._scale)
                    prompt = speech.message(RESTART_TOKENS, "system") + speech.message(40) + speech.reply()
                    player = Player(session)
                    reply = player.ask(_ask(prompt))
                target.close()
                with target.open(self.model, shape) as session:
                    session.decoded()
                    after = Player(session).ask(
                        _ask([*prompt, *(reply.tokens or ()), *speech.message(40), *speech.reply()])
                    )
                    measured.requests += 1
                    measured.decoded = session.decoded()
                    if after.total is not None:
                        known = len(prompt) + max(0, len(reply.tokens or ()) - 1)
                        measured.least = after.total - known + max(0, len(after.tokens or ()) - 1)
                    if after.ttft is not None:
                        measured.ttfts.append(after.ttft)

        return step

    def _saves(self, target: Target, number: int) -> Callable[[_Measured], None]:
        def step(measured: _Measured) -> None:
            with target.open(self.model, Shape(SAVED_TOKENS + 96)) as session:
                measured.requests += 1
                if session.vocabulary is None:
                    return
                saving = session.saving(
                    Speech(session.vocabulary, seed=number, scale=self._scale).words(SAVED_TOKENS)
                )
                if saving is not None:
                    measured.savings.append(saving)

        return step


def _ask(tokens: Sequence[int]) -> Ask:
    return Ask.of(Request(16, tokens))


@contextmanager
def _kept_in(target: Target, folder: str) -> Iterator[None]:
    """Processes that the target starts meanwhile keep conversations in a folder."""
    target.kept_in = folder
    try:
        yield
    finally:
        target.kept_in = None


def _play(session: Session, workload: Workload, measured: _Measured, first: bool, scale: float) -> None:
    before = session.resident()
    session.decoded()
    began = time.perf_counter()
    played = Player(session).converse(workload, scale)
    seconds = time.perf_counter() - began
    decoded, after = session.decoded(), session.resident()
    counted = played[workload.measured_from :] if workload.clients == 1 else played
    measured.ttfts += [each.reply.ttft for each in counted if each.reply.ttft is not None]
    made = sum(len(each.reply.tokens) for each in played if each.reply.tokens is not None)
    if made:
        measured.rates.append(made / seconds)
    if before is not None and after is not None:
        measured.grown.append(max(0, after - before) // max(1, len({each.chat for each in played})))
    if first:
        measured.requests = len(played)
        measured.least = _least(played, workload)
        alone = [_decoded(each.reply) for each in counted]
        known = [count for count in alone if count is not None]
        if known and len(known) == len(alone):
            measured.decoded = sum(known)
        else:  # what some requests hide is in no sum of the others
            measured.decoded = decoded if workload.clients > 1 else None


def _least(played: Sequence[Played], workload: Workload) -> int | None:
    """Tokens that the requests that count had to decode; None where ids are hidden."""
    records = []
    for each in played:
        if each.reply.prompt is None or each.reply.tokens is None:
            return None
        records.append(Record(each.reply.prompt, each.reply.tokens, 0, 0.0, 0.0, "", None, None))
    first = workload.measured_from if workload.clients == 1 else 0
    return sum(least_decodes(records)[first:])


def _decoded(reply: Reply) -> int | None:
    """By native counters, or else by what the target says that it decoded; None where it hides that."""
    if reply.decoded is not None:
        return reply.decoded
    if reply.worked is None or reply.tokens is None:
        return None
    return reply.worked + max(0, len(reply.tokens) - 1)
