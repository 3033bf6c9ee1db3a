"""Directed probes: short scripts that each show one kind of fault.

Each runs in a session of its own. Workloads detect faults; directed probes name them.
"""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from llamahybrid.harness import figures
from llamahybrid.harness.conversation import Message
from llamahybrid.harness.figures import UNKNOWN_BEFORE, Judged
from llamahybrid.harness.report import PROBE, Outcome, RequestFigures, Sameness, Verdict, WorkloadFigures
from llamahybrid.harness.runner import WorkloadRunner
from llamahybrid.harness.targets.base import Ask, Reply, Session, Shape

SHAPE = Shape(2048)


class Script:
    """Sends pieces to a session: as token ids if it takes them, else as messages."""

    def __init__(self, session: Session, seed: int = 0, scale: float = 1.0) -> None:
        self.session = session
        self.scale = scale
        self.player = WorkloadRunner(session)
        self._random = random.Random(f"probe/{session.nonce}/{seed}")
        self._words = session.vocabulary.words if session.vocabulary else range(10_000)

    @property
    def ids(self) -> bool:
        """True if the session takes token ids."""
        return self.session.takes_tokens

    def words(self, n: int) -> list[int]:
        """Return a piece of `n` tokens, or a sentence of about that many."""
        n = n if self.scale == 1.0 else max(1, round(n * self.scale))
        return self._random.choices(self._words, k=n if self.ids else max(1, n // 3))

    def ask(self, *pieces: Sequence[int], n: int = 12, chat: str = "0", salt: str = "") -> Reply:
        """Send a prompt of these pieces, each a message if there are no token ids."""
        if self.ids:
            return self.player.ask(Ask(n, tuple(t for piece in pieces for t in piece), salt=salt), chat)
        messages: list[Message] = [{"role": "user", "content": _text(piece)} for piece in pieces]
        return self.player.ask(Ask(n, messages=tuple(messages), salt=salt), chat)


def _text(piece: Sequence[int]) -> str:
    return " ".join(f"w{word}" for word in piece)


@dataclass(frozen=True)
class Found:
    """The requests of a probe, for its judge."""

    requests: Sequence[Judged]
    bad: Set[str]
    """Verdicts of earlier probes that were bad."""

    def first(self, same: Sameness, since: int = 0) -> str | None:
        """Return the words on the first answer from request `since` on that compares so; None: none does."""
        return next((each.said for each in self.requests[since:] if each.same == same), None)


Judgement: TypeAlias = tuple[Outcome, str]
"""Outcome and detail of a verdict."""


@dataclass(frozen=True)
class Probe:
    """A script and its judge."""

    name: str
    """Name of the verdict."""
    about: str
    run: Callable[[Script], None]
    judge: Callable[[Found], Judgement]
    ids: bool = False
    """Needs token ids."""


def hits(script: Script) -> None:
    """A prompt, and that prompt with more at its end."""
    head = script.words(160)
    reply = script.ask(head)
    script.ask(head, [*(reply.tokens or ()), *script.words(20)])


def _judge_hits(found: Found) -> Judgement:
    total, cached = found.requests[0].figures.total, found.requests[1].reused
    if cached is None or total is None:
        return "cannot tell", "the target does not say what it reused"
    said = f"a prompt of {total} tokens went on: {cached} of them were reused"
    return "ok" if cached >= total // 2 else "bad", said


def beside(script: Script) -> None:
    """A long prompt; then one that shares its first half; then its text behind another start."""
    half, rest = script.words(110), script.words(110)
    script.ask(half, rest)
    script.ask(half, script.words(130))
    script.ask(script.words(8), half, rest, chat="1")


def _judge_beside(found: Found) -> Judgement:
    verdict = figures.prefix_verdict(found.requests)
    return verdict.outcome, verdict.detail


def cut(script: Script) -> None:
    """A history, then one that parts from it far before its end and is shorter."""
    first, second = script.words(60), script.words(60)
    script.ask(first, second, script.words(120))
    script.ask(first, second, script.words(30))
    script.ask(first, script.words(40))


def rollback(script: Script) -> None:
    """The last few tokens removed, again and again, as rollback planes of a recurrent memory allow."""
    history = script.words(150)
    for back in (1, 2, 3, 2):
        reply = script.ask(history, n=16)
        history = [*history, *(reply.tokens or ())[: -1 - back], *script.words(12)]
    script.ask(history, n=16)


def interleaved(script: Script) -> None:
    """Two conversations with nothing in common, at the same positions, in turn."""
    first, second = script.words(150), script.words(190)
    one = script.ask(first, n=12, chat="a")
    two = script.ask(second, n=12, chat="b")
    first = [*first, *(one.tokens or ())]
    second = [*second, *(two.tokens or ())]
    script.ask(first, script.words(16), chat="a")
    script.ask(second, script.words(16), chat="b")


def _exact(right: str, blamed: str = "") -> Callable[[Found], Judgement]:
    """Return a judge of all answers but the first; `blamed`: a fault that explains this one, too."""

    def judge(found: Found) -> Judgement:
        if wrong := found.first("different", 1):
            if any(each.over for each in found.requests):
                return "cannot tell", f"more was reused than there was in common; {wrong}"
            if blamed in found.bad:
                return "cannot tell", f"{blamed!r} is bad, which shows here, too; {wrong}"
            return "bad", wrong
        if unknown := found.first("unknown", 1):
            return "cannot tell", unknown
        return "ok", right

    return judge


def salted(script: Script) -> None:
    """A prompt under one salt, twice, then under another."""
    head = script.words(400)
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    script.ask(head, salt=one)
    script.ask(head, script.words(9), salt=one)
    script.ask(head, script.words(9), salt=two)


_APART = "salts are not kept apart, or cache_salt is not known"


def _judge_salted(found: Found) -> Judgement:
    same, other = found.requests[1].reused, found.requests[2].reused
    if same is None or other is None:
        return "cannot tell", "the target does not say what it reused"
    if other > UNKNOWN_BEFORE:
        return "bad", f"{other} tokens of another salt's prompt were reused: {_APART}"
    if same <= UNKNOWN_BEFORE:
        return "cannot tell", "nothing is reused under one salt either"
    return "ok", f"{same} tokens were reused under one salt, {other} under another"


def reported(script: Script) -> None:
    """Two prompts with nothing in common; then the second again."""
    script.ask(script.words(300), chat="0")
    other = script.words(300)
    script.ask(other, chat="1")
    script.ask(other, chat="1")


def _judge_reported(found: Found) -> Judgement:
    requests = [each.figures for each in found.requests]
    for number, each in enumerate(requests[:2]):
        if each.matched is None and each.cached is not None and each.cached > UNKNOWN_BEFORE:
            said = f"{each.cached} of {each.total} tokens reused of a prompt that nobody had asked before"
            return "bad", f"request {number}: {said}"
    verdict = figures.reports_verdict(found.requests)
    known = all(each.matched is None and each.cached is not None for each in requests)
    if verdict.outcome == "cannot tell" and known:
        return "cannot tell", "nothing for prompts that are new; beyond that it cannot be checked"
    return verdict.outcome, verdict.detail


PROBES = (
    Probe("hits", "a prompt that goes on", hits, _judge_hits),
    Probe("reports-what-it-reused", "prompts with nothing in common", reported, _judge_reported),
    Probe("restores-a-prefix", "a longer history that is no prefix", beside, _judge_beside),
    Probe(
        "cuts-the-tail",
        "a history cut far back",
        cut,
        _exact("answers after long cuts are those of fresh contexts"),
    ),
    Probe(
        "rolls-back-to-its-position",
        "the last tokens taken back",
        rollback,
        _exact("answers after short cuts are right", blamed="cuts-the-tail"),
        ids=True,
    ),
    Probe(
        "own-attention",
        "two conversations at the same positions",
        interleaved,
        _exact("answers of conversations in turn are right"),
    ),
    Probe("salt-kept-apart", "a prompt under two salts", salted, _judge_salted),
)


def run(session: Session, probe: Probe, bad: set[str], scale: float = 1.0) -> WorkloadFigures:
    """Run one probe in a fresh session, its prompts shortened by `scale`; `bad`: verdicts so far.

    Raises TargetError.
    """
    requests: tuple[RequestFigures, ...] = ()
    name, judgement = f"{PROBE}{probe.about}", _unsuited(session, probe)
    if judgement is None:
        script = Script(session, len(bad), scale)
        probe.run(script)
        found = figures.judged(session, name, script.player.played)
        requests, judgement = tuple(each.figures for each in found), probe.judge(Found(found, bad))
    return WorkloadFigures(name, requests, verdicts=(Verdict(probe.name, *judgement),), scale=scale)


def _unsuited(session: Session, probe: Probe) -> Judgement | None:
    if probe.ids and not session.takes_tokens:
        return "cannot tell", "the target takes no token ids"
    if probe.run is salted and session.salts is False:
        return "cannot tell", "the target has no salts"
    return None


MEMORY = f"{PROBE}the same two prompts, over and over"
WARM, COUNTED, ROUNDS = 24, 40, 4
"""Requests before memory is measured, between two measurements, and number of further measurements."""
MEMORY_PROMPT = 120
"""Tokens of each of these requests."""


def memory(session: Session, share: float = 1.0) -> WorkloadFigures:
    """Measure memory during two prompts in turn, which give it no reason to grow.

    The median of several measurements counts, because an allocator takes pages by chance.
    `share` of the requests are made, and of the prompts' length. Raises TargetError.
    """
    verdict_name = "memory-flat"
    first, state = session.resident(), session.state_bytes
    if first is None or state is None:
        untold = Verdict(verdict_name, "cannot tell", "its memory, or a state's size, is not told")
        return WorkloadFigures(MEMORY, verdicts=(untold,))
    script = Script(session, scale=max(0.25, share))
    prompts = script.words(MEMORY_PROMPT), script.words(MEMORY_PROMPT)
    warm, counted = (max(4, round(n * share)) for n in (WARM, COUNTED))

    def say(count: int) -> None:
        for number in range(count):
            script.ask(prompts[number % 2], n=2)

    session.keep_no_rows()  # else the harness makes memory grow
    say(warm)
    looks = [session.resident() or 0]
    for _ in range(ROUNDS):
        say(counted)
        looks.append(session.resident() or 0)
    growth = int(statistics.median(b - a for a, b in pairwise(looks)) / counted)
    said = f"{growth:,} bytes a request; a conversation's state takes {state:,}"
    verdict = Verdict(verdict_name, "bad" if growth > state // 2 else "ok", said)
    return WorkloadFigures(MEMORY, memory_growth=growth, verdicts=(verdict,))
