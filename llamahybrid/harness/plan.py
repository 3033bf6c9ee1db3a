"""Length of workloads for a given time.

A model's speed is measured by a few short requests. The cost of each script and workload is known from a run
on a pretended session: every prompt decoded from its beginning, every answer, and both once more for the
comparison with a context that reused nothing. All targets of a model get the same lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from llamahybrid.harness import directed
from llamahybrid.harness.conversation import Request
from llamahybrid.harness.report import Sameness
from llamahybrid.harness.runner import WorkloadRunner
from llamahybrid.harness.targets.base import Reply, Session
from llamahybrid.harness.traces.trace import rendered
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.harness.workloads.tokens import Workload

SCALES = (1.0, 0.5, 0.25, 0.125)
"""Possible lengths of messages and answers; few, so that two runs on a machine are often alike."""

SHORTEST_SCRIPT = 0.5
"""Scripts of directed probes are not shortened below this: a cache may keep nothing of very short prompts."""

COMPARED = 2
"""Each answer is computed twice, once for the comparison."""

LETTERS_A_TOKEN = 4


@dataclass(frozen=True)
class Speed:
    """Tokens a second."""

    prefill: float
    decode: float

    def seconds(self, cost: Cost) -> float:
        """Return how long the work of `cost` takes."""
        return cost.prompt / self.prefill + cost.answer / self.decode


@dataclass(frozen=True)
class Cost:
    """Tokens of all prompts, each decoded from its beginning, and of all answers."""

    prompt: int
    answer: int

    def at(self, scale: float) -> Cost:
        """Return the cost of prompts and answers that are shorter."""
        return Cost(round(self.prompt * scale), round(self.answer * scale))


@dataclass(frozen=True)
class Plan:
    """The length of workloads, and deadlines of a target on a model as of `time.monotonic()`."""

    scale: float = 1.0
    speed: Speed | None = None
    """None, as the rest: time does not matter."""
    until: float | None = None
    compare_until: float | None = None
    memory_seconds: float | None = None
    """For the requests between which memory is measured."""

    @property
    def script_scale(self) -> float:
        """Length of the directed probes' scripts."""
        return max(SHORTEST_SCRIPT, self.scale)

    @property
    def over(self) -> bool:
        """True if nothing may begin any more."""
        return self.until is not None and time.monotonic() > self.until

    def seconds(self, workload: Workload) -> float:
        """Return the time that a workload takes at most; 0 if time does not matter."""
        return 0.0 if self.speed is None else COMPARED * self.speed.seconds(cost_of(workload, self.scale))

    def fits(self, workload: Workload) -> bool:
        """Tell whether there is time for a workload."""
        return self.until is None or time.monotonic() + self.seconds(workload) <= self.until


QUICK = 1.0
"""Seconds; shorter requests are measured several times, because load varies."""

SLOW = 4.0
"""Seconds; if 16 tokens and an answer of 4 take more, no longer request is measured."""


def measured(session: Session) -> Speed:
    """Return the speed of a session's model. Raises TargetError."""
    speech = Speech(session.vocabulary or PRETENDED, seed=f"speed/{session.nonce}")

    def asked(words: int, answer: int) -> Reply:
        message = {"role": "user", "content": speech.sentence(words)}
        tokens = tuple(speech.words(words)) if session.takes_tokens else ()
        return session.ask(Request(answer, tokens, messages=() if tokens else (message,)))

    asked(16, 4)  # reads the model's file, too
    replies = [asked(16, 4)]
    if replies[0].seconds < SLOW:
        replies = [asked(96, 16)]
    while replies[-1].seconds < QUICK and len(replies) < 4:
        replies.append(asked(96, 16))
    reply = min(replies, key=lambda each: each.seconds)
    first = reply.ttft or reply.seconds / 2
    made = max(1, (len(reply.tokens) if reply.tokens else 16) - 1)
    rest = max(reply.seconds - first, 1e-6)
    total = reply.total or len(reply.prompt or ()) or 96
    return Speed(total / max(first, 1e-6), made / rest)


def longest_scale(workloads: Sequence[Workload], speed: Speed, seconds: float) -> float:
    """Return the longest scale at which directed probes and workloads take `seconds` at most."""

    def needed(scale: float) -> float:
        scripts = (cost_of(each.workload, max(SHORTEST_SCRIPT, scale)) for each in directed.PROBES)
        costs = (*scripts, *(cost_of(each, scale) for each in workloads))
        return COMPARED * sum(map(speed.seconds, costs))

    return fitting(needed, seconds)


def fitting(seconds_at: Callable[[float], float], seconds: float) -> float:
    """Return the longest scale at which something takes `seconds` at most, else the shortest."""
    return next((scale for scale in SCALES if seconds_at(scale) <= seconds), SCALES[-1])


@cache
def cost_of(workload: Workload, scale: float) -> Cost:
    """Return the cost of a workload at a scale."""
    asked = [each.request for each in WorkloadRunner(_Pretended()).converse(workload, scale)]
    prompt = sum(len(each.tokens) or len(rendered(each)) // LETTERS_A_TOKEN for each in asked)
    return Cost(prompt, sum(each.max_tokens for each in asked))


PRETENDED = Vocabulary(tuple(range(16, 1016)), 1, 2)


class _Pretended(Session):
    """A session that answers at once with `max_tokens` tokens."""

    takes_chats = True
    vocabulary = PRETENDED

    def ask(self, request: Request) -> Reply:
        """Return an answer of as many tokens as were asked for."""
        tokens = PRETENDED.words[: request.max_tokens]
        return Reply("", 0.0, tokens=tokens, total=len(request.tokens))

    def sameness(self, request: Request, reply: Reply) -> tuple[Sameness, str]:
        """Return that nothing is known."""
        return "unknown", "pretended"

    def spell(self, tokens: Sequence[int], special: bool = True) -> str:
        """Return a text of about as many tokens."""
        return "word" * len(tokens)
