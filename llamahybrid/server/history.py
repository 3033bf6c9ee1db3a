"""History: what the last requests reused, and why no more."""

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
    """Of its salt, see `salt_tag`."""
    end: str
    """How: "done", "cancelled" or "failed"."""
    prompt: int = 0
    """Tokens of the prompt."""
    cached: int = 0
    """Those of them that were not decoded again."""
    matched: int = 0
    """The longest prefix of it that was known to anything."""
    generated: int = 0
    """Tokens of all answers."""
    source: str = "none"
    reason: str = ""
    """How the prompt started; names no token."""
    waited: float = 0.0
    """Seconds in the queue."""
    first_token_seconds: float = 0.0
    """From then to the first token."""


class History:
    """The last requests, the newest last."""

    def __init__(self) -> None:
        self._past: deque[Past] = deque(maxlen=MOST_REQUESTS)

    def __iter__(self) -> reversed[Past]:
        return reversed(self._past)

    def add(self, tag: str, done: Done | None, waited: float, end: str) -> None:
        """A request is over; `done`: what came of it, None where it failed."""
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
