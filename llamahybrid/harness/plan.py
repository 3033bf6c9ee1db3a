"""Length of workloads for a given time, and the choice of those that are left out or cut short.

A model's speed is measured by a few short requests. The cost of each script and workload is known from a
conversation with made-up answers: every prompt decoded from its beginning, and every answer. All targets of a
model get the same lengths; how long the latest steps took decides what is begun. A step that does not fit is
cut short, if at least its first requests fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from llamahybrid.harness.conversation import Answer, Request
from llamahybrid.harness.runner import LEAST
from llamahybrid.harness.targets.base import Reply, Session
from llamahybrid.harness.traces.trace import rendered
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.harness.workloads.tokens import Workload

SCALES = (1.0, 0.5, 0.25, 0.125)
"""Possible lengths of messages and answers; few, so that two runs on a machine are often alike."""

MEASURING = 0.1
"""Share of the time in which the speed is measured."""

COMPARING, LATEST = 1.15, 1.25
"""Time after which no answer is compared, and after which requests are given up, as shares of the whole."""

SHORTEST, LONGEST = 6, 96
"""Words of the prompts by which the speed is measured."""

LETTERS_A_TOKEN = 4

PRETENDED = Vocabulary(tuple(range(16, 1016)), 1, 2)


@dataclass(frozen=True)
class Cost:
    """Tokens of all prompts, each decoded from its beginning, and of all answers."""

    prompt: int = 0
    answer: int = 0
    compared: bool = True
    """Answers are compared with fresh ones."""
    least: float = 1.0
    """Share of the requests that are sent whatever the time."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second."""

    prefill: float
    decode: float
    comparing: float = 1.0
    """Time of the comparison of an answer, over that of the answer where nothing is reused."""

    def seconds(self, cost: Cost) -> float:
        """Return how long the work of `cost` takes."""
        asking = cost.prompt / self.prefill + cost.answer / self.decode
        return asking * (1 + self.comparing * cost.compared)


@dataclass
class Plan:
    """The time of the steps of a target on a model."""

    seconds: float | None = None
    """None: time does not matter."""
    scale: float = 1.0
    """Length of messages and answers, as a share of the full one."""
    speed: Speed | None = None
    opening: float = 0.0
    """Seconds in which the model was opened last."""
    ask_until: float | None = field(default=None, init=False)
    """When no request of the running step begins any more, by `time.monotonic`."""
    _began: float = field(default_factory=lambda: time.monotonic(), init=False)
    _taken: float = field(default=0.0, init=False)
    _expected: float = field(default=0.0, init=False)

    @property
    def until(self) -> float | None:
        """When its time is over, by `time.monotonic`."""
        return None if self.seconds is None else self._began + self.seconds

    @property
    def compare_until(self) -> float | None:
        """When no answer is compared any more."""
        return None if self.seconds is None else self._began + COMPARING * self.seconds

    @property
    def gives_up(self) -> float | None:
        """When a request that still runs is given up, and with it the verdicts of its workload."""
        return None if self.seconds is None else self._began + LATEST * self.seconds

    def needed(self, cost: Cost) -> float:
        """Return the seconds for a step, by the speed of the latest ones; 0: not known.

        The measured speed counts as much as the time for its measurement, or one short step with a pause of
        the machine in it would exclude all others.
        """
        if self.speed is None or self.seconds is None:
            return 0.0
        sure = MEASURING * self.seconds + 1e-9
        pace = (sure + self._taken) / (sure + self._expected)
        return self.opening + pace * self.speed.seconds(cost)

    def begin(self, cost: Cost) -> str:
        """Set `ask_until` for a step; return the reason why not even its first requests fit, else nothing."""
        if self.until is None or self.speed is None:
            return ""
        now, needed = time.monotonic(), self.needed(cost)
        left, least = self.until - now, cost.least * needed
        asking = 1 / (1 + self.speed.comparing * cost.compared)
        self.ask_until = self.until if needed <= left else now + asking * max(0.0, left)
        if left < 0:
            return LATE
        return f"it needs about {least:.0f} s, more than is left (see --minutes)" if least > left else ""

    def took(self, seconds: float, cost: Cost) -> None:
        """Note how long a step took; it counts half as much as the next one, because load changes."""
        if self.speed is not None:
            self._taken = self._taken / 2 + seconds
            self._expected = self._expected / 2 + self.speed.seconds(cost)


LATE = "the time was over (see --minutes)"


def measured(session: Session, seconds: float, compared: bool = True) -> Speed:
    """Return the speed of a session's model, measured in about `seconds`. Raises TargetError.

    Each request is twice as long as the one before; the last one counts, and (`compared`) its comparison.
    """
    speech = Speech(session.vocabulary or PRETENDED, seed=f"speed/{session.nonce}")
    until = time.monotonic() + seconds

    def asked(words: int) -> tuple[Request, Reply]:
        message = {"role": "user", "content": speech.sentence(words)}
        tokens = tuple(speech.words(words)) if session.takes_tokens else ()
        request = Request(max(2, words // 6), tokens, messages=() if tokens else (message,))
        return request, session.ask(request)

    words = SHORTEST
    request, reply = asked(words)
    while words < LONGEST and time.monotonic() + 3 * reply.seconds <= until:
        words *= 2
        request, reply = asked(words)
    first = reply.ttft or reply.seconds / 2
    made = max(1, (len(reply.tokens) if reply.tokens else words // 6) - 1)
    rest = max(reply.seconds - first, 1e-6)
    total = reply.total or len(reply.prompt or ()) or words
    began = time.monotonic()
    if compared:
        session.sameness(request, reply)
    comparing = (time.monotonic() - began) / max(reply.seconds, 1e-6)
    return Speed(total / max(first, 1e-6), made / rest, comparing)


def fitting(seconds_at: Callable[[float], float], seconds: float) -> float:
    """Return the longest scale at which something takes `seconds` at most, else the shortest."""
    return next((scale for scale in SCALES if seconds_at(scale) <= seconds), SCALES[-1])


@cache
def cost_of(workload: Workload, scale: float, compared: bool = True) -> Cost:
    """Return the cost of a workload at a scale."""
    prompt = answered = requests = 0
    for number in range(workload.clients):
        speech = Speech(PRETENDED, seed=number, marked=workload.marked, scale=scale)
        conversation = workload.start(speech)
        request = next(conversation, None)
        while request is not None:
            n = speech.size(request.max_tokens)
            prompt += len(request.tokens) or len(rendered(request)) // LETTERS_A_TOKEN
            answered, requests = answered + n, requests + 1
            try:
                request = conversation.send(Answer(PRETENDED.words[:n], lambda tokens: "word" * len(tokens)))
            except StopIteration:
                break
    return Cost(prompt, answered, compared, min(1.0, LEAST * workload.clients / requests))
