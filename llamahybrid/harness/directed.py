"""Directed probes: short scripts that each show one kind of fault.

Each runs in a session of its own. Workloads detect faults; directed probes name them.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from llamahybrid.harness import figures
from llamahybrid.harness.conversation import Conversation, Request
from llamahybrid.harness.figures import UNKNOWN_BEFORE, Judged
from llamahybrid.harness.plan import Cost, cost_of
from llamahybrid.harness.report import PROBE, Outcome, Verdict, WorkloadFigures
from llamahybrid.harness.runner import NO_TOKENS, WorkloadRunner
from llamahybrid.harness.targets.base import Session, Shape
from llamahybrid.harness.workloads.speech import Speech
from llamahybrid.harness.workloads.tokens import Workload

SHAPE = Shape(2048)

SHORTEST_SCRIPT = 0.5
"""Scripts are not shortened below this: a cache may keep nothing of very short prompts."""

Judgement: TypeAlias = tuple[Outcome, str]
"""Outcome and detail of a verdict."""
Judge: TypeAlias = Callable[[Sequence[Judged], Set[str]], Judgement]
"""Judges the requests of a probe, beside the names of earlier verdicts that were bad."""


@dataclass(frozen=True)
class Probe:
    """A script and its judge."""

    name: str
    """Name of the verdict."""
    about: str
    script: Callable[[Speech], Conversation]
    judge: Judge
    ids: bool = False
    """Needs token ids."""

    @property
    def workload(self) -> Workload:
        """The script under the name of the probe."""
        return Workload(f"{PROBE}{self.about}", self.script)

    def cost(self, scale: float) -> Cost:
        """Return its cost in workloads of this length."""
        return replace(cost_of(self.workload, max(SHORTEST_SCRIPT, scale)), least=1.0)


def hits(speech: Speech) -> Conversation:
    """A prompt, and that prompt with more at its end."""
    head = speech.words(160)
    answer = yield Request(12, head)
    yield Request(12, [*head, *answer.tokens, *speech.words(20)])


def _judge_hits(found: Sequence[Judged], _: Set[str]) -> Judgement:
    total, cached = found[0].figures.total, found[1].reused
    if cached is None or total is None:
        return "cannot tell", "the target does not say what it reused"
    said = f"a prompt of {total} tokens went on: {cached} of them were reused"
    return "ok" if cached >= total // 2 else "bad", said


def beside(speech: Speech) -> Conversation:
    """A long prompt; then one that shares its first half; then its text behind another start."""
    half, rest = speech.words(110), speech.words(110)
    yield Request(12, half + rest)
    yield Request(12, half + speech.words(130))
    yield Request(12, speech.words(8) + half + rest, chat="1")


def _judge_beside(found: Sequence[Judged], _: Set[str]) -> Judgement:
    verdict = figures.prefix_verdict(found)
    return verdict.outcome, verdict.detail


def cut(speech: Speech) -> Conversation:
    """A history, then one that parts from it far before its end and is shorter."""
    first, second = speech.words(60), speech.words(60)
    yield Request(12, first + second + speech.words(120))
    yield Request(12, first + second + speech.words(30))
    yield Request(12, first + speech.words(40))


def rollback(speech: Speech) -> Conversation:
    """The last few tokens removed, again and again, as rollback planes of a recurrent memory allow."""
    history = speech.words(150)
    for back in (1, 2, 3, 2):
        answer = yield Request(16, history)
        history = [*history, *answer.tokens[: -1 - back], *speech.words(12)]
    yield Request(16, history)


def interleaved(speech: Speech) -> Conversation:
    """Two conversations with nothing in common, at the same positions, in turn."""
    first, second = speech.words(150), speech.words(190)
    one = yield Request(12, first, chat="a")
    two = yield Request(12, second, chat="b")
    yield Request(12, [*first, *one.tokens, *speech.words(16)], chat="a")
    yield Request(12, [*second, *two.tokens, *speech.words(16)], chat="b")


def _exact(right: str, blamed: str = "") -> Judge:
    """Return a judge of all answers but the first; `blamed`: a fault that explains this one, too."""

    def judge(found: Sequence[Judged], bad: Set[str]) -> Judgement:
        first = {each.same: each.said for each in reversed(found[1:])}
        if wrong := first.get("different"):
            if any(each.over for each in found):
                return "cannot tell", f"more was reused than there was in common; {wrong}"
            if blamed in bad:
                return "cannot tell", f"{blamed!r} is bad, which shows here, too; {wrong}"
            return "bad", wrong
        if unknown := first.get("unknown") or first.get("not compared"):
            return "cannot tell", unknown
        return "ok", right

    return judge


def salted(speech: Speech) -> Conversation:
    """A prompt under one salt, twice, then under another."""
    head = speech.words(400)
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    yield Request(12, head, salt=one)
    yield Request(12, head + speech.words(9), salt=one)
    yield Request(12, head + speech.words(9), salt=two)


_APART = "salts are not kept apart, or cache_salt is not known"


def _judge_salted(found: Sequence[Judged], _: Set[str]) -> Judgement:
    same, other = found[1].reused, found[2].reused
    if same is None or other is None:
        return "cannot tell", "the target does not say what it reused"
    if other > UNKNOWN_BEFORE:
        return "bad", f"{other} tokens of another salt's prompt were reused: {_APART}"
    if same <= UNKNOWN_BEFORE:
        return "cannot tell", "nothing is reused under one salt either"
    return "ok", f"{same} tokens were reused under one salt, {other} under another"


def reported(speech: Speech) -> Conversation:
    """Two prompts with nothing in common; then the second again."""
    yield Request(12, speech.words(300), chat="0")
    other = speech.words(300)
    yield Request(12, other, chat="1")
    yield Request(12, other, chat="1")


def _judge_reported(found: Sequence[Judged], _: Set[str]) -> Judgement:
    requests = [each.figures for each in found]
    for number, each in enumerate(requests[:2]):
        if each.matched is None and each.cached is not None and each.cached > UNKNOWN_BEFORE:
            said = f"{each.cached} of {each.total} tokens reused of a prompt that nobody had asked before"
            return "bad", f"request {number}: {said}"
    verdict = figures.reports_verdict(found)
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


def run(
    session: Session, probe: Probe, bad: Set[str], scale: float = 1.0, until: float | None = None
) -> WorkloadFigures:
    """Run one probe in a fresh session, in workloads of length `scale`; `bad`: verdicts so far.

    After `until`, a `time.monotonic()`, no answer is compared.

    Raises TargetError.
    """
    scale, name = max(SHORTEST_SCRIPT, scale), probe.workload.name
    lacks = NO_TOKENS if probe.ids and not session.takes_tokens else ""
    lacks = "the target has no salts" if probe.script is salted and session.salts is False else lacks
    if lacks:
        return WorkloadFigures(name, verdicts=(Verdict(probe.name, "cannot tell", lacks),), scale=scale)
    found = figures.judged(
        session, name, WorkloadRunner(session).converse(probe.workload, scale), until=until
    )
    requests, verdict = tuple(each.figures for each in found), Verdict(probe.name, *probe.judge(found, bad))
    return WorkloadFigures(name, requests, verdicts=(verdict,), scale=scale)


MEMORY = f"{PROBE}the same two prompts, over and over"
WARM, COUNTED, ROUNDS = 24, 40, 4
"""Requests before memory is measured, between two measurements, and number of further measurements."""
MEMORY_PROMPT = 120
"""Tokens of each of these requests."""
LEAST_WARM, LEAST_SCALE = 4, 0.25
"""The shortest measurement."""


def _memory_requests(scale: float) -> tuple[int, int]:
    """Return the requests before memory is measured, and between two measurements."""
    return max(LEAST_WARM, round(WARM * scale)), max(LEAST_WARM, round(COUNTED * scale))


def memory_cost(scale: float) -> Cost:
    """Return the cost of these requests, in workloads of this length, where nothing is reused."""
    warm, counted = _memory_requests(scale)
    requests = warm + ROUNDS * counted
    return Cost(round(requests * MEMORY_PROMPT * max(LEAST_SCALE, scale)), 2 * requests, compared=False)


def memory(session: Session, scale: float = 1.0) -> WorkloadFigures:
    """Measure memory during two prompts in turn, which give it no reason to grow.

    The median of several measurements counts, because an allocator takes pages by chance. `scale`: of the
    number of requests, and of the prompts' length. Raises TargetError.
    """
    name, vocabulary = "memory-flat", session.vocabulary
    first, state = session.resident(), session.state_bytes
    if first is None or state is None or vocabulary is None:
        untold = Verdict(name, "cannot tell", "its memory, or a state's size, is not told")
        return WorkloadFigures(MEMORY, verdicts=(untold,))
    speech = Speech(vocabulary, scale=max(LEAST_SCALE, scale))
    prompts = speech.words(MEMORY_PROMPT), speech.words(MEMORY_PROMPT)
    warm, counted = _memory_requests(scale)

    def say(count: int) -> None:
        for number in range(count):
            session.ask(Request(2, prompts[number % 2]))

    session.keep_no_rows()  # else the harness makes memory grow
    say(warm)
    looks = [session.resident() or 0]
    for _ in range(ROUNDS):
        say(counted)
        looks.append(session.resident() or 0)
    growth = int(statistics.median(b - a for a, b in pairwise(looks)) / counted)
    said = f"{growth:,} bytes a request; a conversation's state takes {state:,}"
    verdict = Verdict(name, "bad" if growth > state // 2 else "ok", said)
    return WorkloadFigures(MEMORY, verdicts=(verdict,))
