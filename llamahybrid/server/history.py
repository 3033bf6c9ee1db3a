"""History: the reuse of the last requests, with reasons."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from llamahybrid.server.job import Done

MOST_REQUESTS = 100


@dataclass(frozen=True)
class Past:
    """A request that is over."""

    ended: float
    """Seconds since 1970."""
    tag: str
    """Tag of its salt, see `salt_tag`."""
    end: str
    """Either "done", "cancelled" or "failed"."""
    prompt: int = 0
    """Prompt tokens."""
    cached: int = 0
    """Prompt tokens that were not decoded again."""
    matched: int = 0
    """Tokens of the longest known prefix."""
    generated: int = 0
    """Tokens of all answers."""
    source: str = "none"
    reason: str = ""
    """Why the prompt started where it did; names no token."""
    waited: float = 0.0
    """Seconds in the queue."""
    first_token_seconds: float = 0.0
    """Seconds from the start to the first token."""


class History:
    """The last requests, the newest last."""

    def __init__(self) -> None:
        self._past: deque[Past] = deque(maxlen=MOST_REQUESTS)

    def __iter__(self) -> reversed[Past]:
        return reversed(self._past)

    def add(self, tag: str, done: Done | None, waited: float, end: str) -> None:
        """Add a request that is over; `done`: None if it failed."""
        now = time.time()
        if done is None or not done.reports:
            self._past.append(Past(now, tag, end, waited=waited))
            return
        first = done.reports[0]
        self._past.append(
            Past(
                now,
                tag,
                end,
                first.total,
                first.cached,
                first.matched,
                sum(report.generated for report in done.reports),
                first.source,
                next(iter(done.reasons), ""),
                waited,
                first.first_token_seconds,
            )
        )
