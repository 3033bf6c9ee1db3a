"""The choice of checkpoints to write, within a budget: an SSD wears, and most states never serve again.

A later start wants the places where conversations go on: their tip; the end of the last prompt (a chat
template may render that turn otherwise next time, without its thinking); branch points; the end of the first
message, from which a new conversation starts; and, for a history that parts anywhere else, rungs whose
distance from the tip grows: one that parts d tokens before the tip decodes at most `RUNG_FACTOR` d +
`RUNG_TOKENS` known tokens again, as far as RAM has checkpoints there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from llamahybrid.prompt_cache.blocks import Why
from llamahybrid.prompt_cache.nodes import Entry, Match

DEFAULT_WRITE_BYTES = 8 << 30
"""An hour: a disk that is rated for 600 TB lasts 8 years of nothing else."""

QUIET_SECONDS = 3.0
"""A state is written when its conversation has stood still for this time: one that is passed sooner is
not."""

REMOTE_QUIET_SECONDS = 0.0
"""Nothing wears on a server, and what lies there is wanted when a machine dies or another is asked next."""

MOST_SECONDS = 30.0
"""A conversation that never stands still is written so often all the same."""

RUNG_FACTOR = 4
RUNG_TOKENS = 256


class Point(NamedTuple):
    """A checkpoint that is worth writing."""

    position: int
    logits: bool
    why: Why


def restart_points(match: Match) -> list[Point]:
    """Checkpoints of a path that a later start would want, the best first."""
    entries = match.entries()
    if not entries:
        return []
    wanted: dict[Entry, Why] = {entries[-1]: Why.TIP}
    prompts = [e for e in entries if e.checkpoint.logits is not None]
    starts = [e for e in entries if e.marked and (not prompts or e.position < prompts[-1].position)]
    for entry in starts[-1:] or prompts[-1:]:
        wanted.setdefault(entry, Why.PROMPT)
    first = next((e for e in entries if e.marked), None)
    if first is not None and first.position < match.length:
        wanted[first] = Why.SYSTEM
    for node in reversed(match.path):
        parts = len(node.children) > 1 and node.end <= match.length
        if parts or (node.children and node.end == match.length):
            for entry in [e for e in entries if e.position <= node.end][-1:]:
                wanted.setdefault(entry, Why.BRANCH)
    for entry in rungs(entries, match.length):
        wanted.setdefault(entry, Why.RUNG)
    return [Point(e.position, e.checkpoint.logits is not None, why) for e, why in wanted.items()]


def rungs(entries: Sequence[Entry], total: int) -> list[Entry]:
    """The fewest checkpoints that bound the loss of a history that parts from a path of `total` tokens.

    The nearest to its end first: each as far from the end as the one before allows.
    """
    found: list[Entry] = []
    distance = 0
    while True:
        reach = distance + RUNG_FACTOR * distance + RUNG_TOKENS
        if reach >= total:
            return found  # to decode from the first token on is within the bound
        farther = [e for e in entries if total - e.position > distance]
        if not farther:
            return found
        within = [e for e in farther if total - e.position <= reach]
        found.append(within[0] if within else farther[-1])
        distance = total - found[-1].position


class WriteBudget:
    """Bytes that may be written in an hour."""

    def __init__(self, hourly: int) -> None:
        self.hourly = hourly
        self._left = float(hourly)
        self._asked = time.monotonic()

    def open(self) -> bool:
        """Return whether a write may begin now; the last one may exceed the rest of the budget."""
        now = time.monotonic()
        since = max(0.0, now - self._asked)  # a clock that a test has frozen may go back
        self._left = min(self.hourly, self._left + since * self.hourly / 3600)
        self._asked = now
        return self._left > 0

    def spend(self, n_bytes: int) -> None:
        """Note a write."""
        self._left -= n_bytes
