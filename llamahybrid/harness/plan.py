"""Length of workloads for a given time.

A model's speed is measured by a few short requests. The cost of each script and workload is known from a
conversation with made-up answers: every prompt decoded from its beginning, and every answer. All targets of a
model get the same lengths; how long their workloads really take decides how many of them are run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from llamahybrid.harness.conversation import Answer, Request
from llamahybrid.harness.targets.base import Reply, Session
from llamahybrid.harness.traces.trace import rendered
from llamahybrid.harness.workloads.speech import Speech, Vocabulary
from llamahybrid.harness.workloads.tokens import Workload

SCALES = (1.0, 0.5, 0.25, 0.125)
"""Possible lengths of messages and answers; few, so that two runs on a machine are often alike."""

COMPARED = 2
"""Each answer is computed twice, once for the comparison."""

MEASURING = 0.1
"""Share of the time in which the speed is measured."""

COMPARING = 0.25
"""Extra time, as a share, in which answers are still compared."""

SHORTEST, LONGEST = 6, 96
"""Words of the prompts by which the speed is measured."""

LETTERS_A_TOKEN = 4

PRETENDED = Vocabulary(tuple(range(16, 1016)), 1, 2)


@dataclass(frozen=True)
class Cost:
    """Tokens of all prompts, each decoded from its beginning, and of all answers."""

    prompt: int = 0
    answer: int = 0


@dataclass(frozen=True)
class Speed:
    """Tokens a second."""

    prefill: float
    decode: float

    def seconds(self, cost: Cost) -> float:
        """Return how long the work of `cost` takes."""
        return cost.prompt / self.prefill + cost.answer / self.decode


@dataclass
class Plan:
    """The time of a target on a model, and what fits into it."""

    seconds: float | None = None
    """None: time does not matter."""
    scale: float = 1.0
    """Length of messages and answers, as a share of the full one."""
    speed: Speed | None = None
    opening: float = 0.0
    """Seconds in which the model was opened last."""
    _began: float = field(default_factory=time.monotonic, init=False)
    _taken: float = field(default=0.0, init=False)
    _expected: float = field(default=0.0, init=False)

    @property
    def until(self) -> float | None:
        """When its time is over, by `time.monotonic`."""
        return None if self.seconds is None else self._began + self.seconds

    @property
    def compare_until(self) -> float | None:
        """When no answer is compared any more."""
        return None if self.seconds is None else self._began + (1 + COMPARING) * self.seconds

    @property
    def gives_up(self) -> float | None:
        """When a request that still runs is given up, and with it the verdicts of its workload."""
        return None if self.seconds is None else self._began + (1 + 2 * COMPARING) * self.seconds

    @property
    def over(self) -> bool:
        """True if nothing may begin any more."""
        return self.until is not None and time.monotonic() > self.until

    def needed(self, cost: Cost) -> float:
        """Return the seconds for something, by the speed of all that was done before; 0: not known."""
        if self.speed is None:
            return 0.0
        pace = self._taken / self._expected if self._expected else 1.0
        return self.opening + pace * self.speed.seconds(cost)

    def fits(self, cost: Cost) -> bool:
        """Tell whether there is time for something."""
        return self.until is None or time.monotonic() + self.needed(cost) <= self.until

    def took(self, opening: float, seconds: float, cost: Cost) -> None:
        """Take in how long something of this cost took."""
        self.opening = opening
        if self.speed is not None:
            self._taken += seconds
            self._expected += self.speed.seconds(cost)

    def share(self, cost: Cost, of: float) -> float:
        """Return the share of something that can be done in a share `of` the time; at most 1."""
        if self.seconds is None or self.speed is None:
            return 1.0
        return min(1.0, of * self.seconds / self.speed.seconds(cost))


def measured(session: Session, seconds: float) -> Speed:
    """Return the speed of a session's model, measured in about `seconds`. Raises TargetError.

    Each request is twice as long as the one before; the last one counts.
    """
    speech = Speech(session.vocabulary or PRETENDED, seed=f"speed/{session.nonce}")
    until = time.monotonic() + seconds

    def asked(words: int) -> Reply:
        message = {"role": "user", "content": speech.sentence(words)}
        tokens = tuple(speech.words(words)) if session.takes_tokens else ()
        return session.ask(Request(max(2, words // 6), tokens, messages=() if tokens else (message,)))

    words = SHORTEST
    reply = asked(words)
    while words < LONGEST and time.monotonic() + 3 * reply.seconds <= until:
        words *= 2
        reply = asked(words)
    first = reply.ttft or reply.seconds / 2
    made = max(1, (len(reply.tokens) if reply.tokens else words // 6) - 1)
    rest = max(reply.seconds - first, 1e-6)
    total = reply.total or len(reply.prompt or ()) or words
    return Speed(total / max(first, 1e-6), made / rest)


def fitting(seconds_at: Callable[[float], float], seconds: float) -> float:
    """Return the longest scale at which something takes `seconds` at most, else the shortest."""
    return next((scale for scale in SCALES if seconds_at(scale) <= seconds), SCALES[-1])


@cache
def cost_of(workload: Workload, scale: float, times: int = 1) -> Cost:
    """Return the cost of a workload at a scale, done `times` times."""
    prompt = answered = 0
    for number in range(workload.clients):
        speech = Speech(PRETENDED, seed=number, marked=workload.marked, scale=scale)
        conversation = workload.start(speech)
        request = next(conversation, None)
        while request is not None:
            n = speech.size(request.max_tokens)
            prompt += len(request.tokens) or len(rendered(request)) // LETTERS_A_TOKEN
            answered += n
            try:
                request = conversation.send(Answer(PRETENDED.words[:n], lambda tokens: "word" * len(tokens)))
            except StopIteration:
                break
    return Cost(times * prompt, times * answered)
