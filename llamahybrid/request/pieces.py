"""Pieces: how much of a prompt is decoded between two steps of the answers that wait for it, and whose.

Each piece costs a batch that reads all weights, and each step between two one of few rows, which takes hardly
less than one of all: the requests that answer already could have waited for those that decode their prompts.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from llamahybrid.memory.compute_thread import new_bell, ring
from llamahybrid.memory.costs import CostMeter
from llamahybrid.prompt_cache.base import Costs

if TYPE_CHECKING:
    from llamahybrid.request.ticket import Ticket

PIECE_STEPS = 16
"""A piece takes about as long as so many steps,"""

PIECE_SECONDS = 0.4
"""or so long, where that is more: two tokens a second still read as a text that is being written. Beside few
answers both are more (`pace`)."""

SMALLEST_PIECE = 32
"""Tokens that are decoded at once at least, where a prompt has so many; a rest is shared out between two."""

TIMED_PIECE = SMALLEST_PIECE // 2
"""Tokens from which a piece says what one takes."""

BURST_SECONDS = 4.0
"""Seconds up to which answers wait for prompts that had come before they began."""

UNMEASURED = 128
"""Tokens of a piece while nothing was measured."""

PIECE_OVER = 1.25
"""By so much a piece may be larger, rather than leave a small rest to a batch of its own."""


class PieceLine:
    """Requests that wait to decode a batch of their own. Who came first goes first."""

    def __init__(self) -> None:
        self._waiting: dict[Ticket, tuple[int, threading.Lock]] = {}

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._waiting

    def enter(self, ticket: Ticket, tokens: int) -> threading.Lock:
        """One more, with a batch of so many tokens; what is rung for it."""
        bell = new_bell()
        self._waiting[ticket] = tokens, bell
        return bell

    def leave(self, ticket: Ticket) -> None:
        """It waits no more: another one is the first."""
        self._waiting.pop(ticket, None)
        self.ring()

    def first(self) -> tuple[Ticket, int] | None:
        """Who goes first, and the tokens of its batch; those whose thread is gone do not count."""
        for ticket, (tokens, _) in self._waiting.items():
            if ticket.acts:
                return ticket, tokens
        return None

    def begins_with(self, ticket: Ticket) -> bool:
        """Nobody goes before that one."""
        first = self.first()
        return first is None or first[0] is ticket

    def ring(self) -> None:
        """Have them look whether it is their turn."""
        for _, bell in list(self._waiting.values()):
            ring(bell)


class Lately:
    """Seconds that something takes now: the fewer of its last two times.

    One may have been held up, by a process that was stopped and goes on, or a machine that slept.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=2)

    def took(self, seconds: float) -> None:
        """Once more, and so long."""
        self._times.append(seconds)

    @property
    def seconds(self) -> float:
        """0 while it never was timed."""
        return min(self._times, default=0.0)


def pace(step_seconds: float, answers: int, prompts: int, came_first: bool = False) -> float:
    """Seconds that prompts may take between two steps of so many answers, which take that long lately.

    The fewer of those that want to decode are answers, the longer: their steps are the less worth it.
    `came_first`: the next prompt had come before any of them began. It has waited longer, and answers that
    begin together go on together: a step of few takes hardly less time than one of all.
    """
    share = max(1, answers) / max(1, answers + prompts)
    seconds = max(PIECE_STEPS * step_seconds, PIECE_SECONDS) / share
    return max(seconds, BURST_SECONDS) if came_first else seconds


def pace_between(step_seconds: float, answering: Iterable[Ticket], prompts: Iterable[Ticket]) -> float:
    """`pace` for those requests; the first of `prompts` is the one that is decoded, where one is."""
    answers, asked = [t.began for t in answering if not t.over], [t.asked for t in prompts]
    came_first = bool(asked) and all(0 < asked[0] < began for began in answers)
    return pace(step_seconds, len(answers), len(asked), came_first)


def piece_of(tokens: int, seconds: float, each: float) -> int:
    """How many of a prompt's next tokens are decoded at once, if that is to take about so long.

    `tokens`: those up to the next border; pieces of them are of one size. `each`: seconds that one of them
    takes; 0: that was not measured.
    """
    largest = max(SMALLEST_PIECE, int(seconds / each)) if each else UNMEASURED
    if tokens <= PIECE_OVER * largest:
        return tokens
    return math.ceil(tokens / math.ceil(tokens / largest))


class Others(Protocol):
    """Knows the other requests."""

    def waiting(self) -> int:
        """How many wait for the one that runs."""


def costs_beside(meter: CostMeter, beside: Callable[[], Others | None] | None) -> Costs:
    """What was measured, and how many others the request that runs keeps waiting."""
    costs, others = meter.costs(), None if beside is None else beside()
    return costs if others is None else replace(costs, waiting=others.waiting())
