"""History: the reuse of the last requests, with reasons."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from llamahybrid.server.job import Done

MOST_REQUESTS = 100


@dataclass(frozen=True)
class Past:
    """A request that is over."""

    tag: str
    """Tag of its salt, see `salt_tag`."""
    done: Done | None
    """The end of the request; None if it failed."""
    waited: float
    """Seconds in the queue."""
    end: str
    """Either "done", "cancelled" or "failed"."""
    ended: float = field(default_factory=time.time)

    def shown(self) -> dict[str, Any]:
        """Return the request as the page shows it, without a token of its prompt."""
        reports = self.done.reports if self.done else ()
        first = reports[0] if reports else None
        return {
            "ended": self.ended,
            "end": self.end,
            "waited": self.waited,
            "prompt": first.total if first else 0,
            "cached": first.cached if first else 0,
            "matched": first.matched if first else 0,
            "generated": sum(report.generated for report in reports),
            "source": first.source if first else "none",
            "reason": next(iter(self.done.reasons), "") if self.done else "",
            "first_token_seconds": first.first_token_seconds if first else 0.0,
        }


def history() -> deque[Past]:
    """Return an empty history of the last requests, the newest first."""
    return deque(maxlen=MOST_REQUESTS)
