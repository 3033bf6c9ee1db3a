"""What of a conversation is written to disk, and how much: an SSD wears, and most states never serve again.

What a later start wants is where conversations go on: at their tip; where the last prompt asks for its answer
(a chat template may render that turn otherwise next time, without what was thought); where paths have parted.
"""

from __future__ import annotations

import time

from llamahybrid.prompt_cache.nodes import Match

DEFAULT_WRITE_BYTES = 8 << 30
"""An hour: a disk that is rated for 600 TB lasts 8 years of nothing else."""

QUIET_SECONDS = 3.0
"""A state is written when the conversation has stood there for so long: what is gone past sooner is not."""

REMOTE_QUIET_SECONDS = 0.0
"""Nothing wears on a server, and what lies there is wanted when a machine dies or another is asked next."""

MOST_SECONDS = 30.0
"""A conversation that never stands still is written so often all the same."""


def restart_points(match: Match) -> list[tuple[int, bool]]:
    """Checkpoints of a path that a later start would want, the best first: (position, it has logits)."""
    entries = match.entries()
    if not entries:
        return []
    wanted = [entries[-1]]
    prompts = [e for e in entries if e.checkpoint.logits is not None]
    starts = [e for e in entries if e.marked and (not prompts or e.position < prompts[-1].position)]
    wanted += starts[-1:] or prompts[-1:]
    for node in reversed(match.path):
        parts = len(node.children) > 1 and node.end <= match.length
        if parts or (node.children and node.end == match.length):
            wanted += [e for e in entries if e.position <= node.end][-1:]
    return [(e.position, e.checkpoint.logits is not None) for e in dict.fromkeys(wanted)]


class WriteBudget:
    """Bytes that may be written: so many an hour, and no more at once."""

    def __init__(self, hourly: int) -> None:
        self.hourly = hourly
        self._left = float(hourly)
        self._asked = time.monotonic()

    def open(self) -> bool:
        """Something may be written now; the last thing may be larger than what is left."""
        now = time.monotonic()
        self._left = min(self.hourly, self._left + (now - self._asked) * self.hourly / 3600)
        self._asked = now
        return self._left > 0

    def spend(self, n_bytes: int) -> None:
        """So much was written."""
        self._left -= n_bytes
