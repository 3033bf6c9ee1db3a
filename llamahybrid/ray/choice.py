"""Order replicas for a request: the one that can resume most of it first, unless its queue is long.

    1. the replica of the client's session, if the client names one
    2. for a known conversation: the replica that can resume the longest prefix
    3. for a new one: the shortest queue, then the fewest conversations

A replica with a full set of slots comes last while another one is idle, or if its queue is far longer than
the shortest: otherwise waiting for a slot costs less than decoding a conversation again.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from llamahybrid.ray.conversations import Hints, deepest

Id = TypeVar("Id", bound=Hashable)


FAR_MORE = 2
"""A queue is far longer if it exceeds the shortest by this many requests per slot."""


@dataclass(frozen=True)
class Candidate(Generic[Id]):
    """The router's knowledge of a replica."""

    id: Id
    queue: int = 0
    """Requests that run or wait."""
    known: Collection[int] = ()
    """The names of links that it can resume."""
    conversations: int = 0
    """Conversations routed there recently."""


def in_order(
    candidates: Sequence[Candidate[Id]], hints: Hints, slots: int, session: Id | None = None
) -> list[Id]:
    """All candidates, best first. `slots`: of each replica; `session`: the replica of the session."""
    least = min((each.queue for each in candidates), default=0)

    def rank(each: Candidate[Id]) -> tuple[bool, bool, int, int, int, float]:
        crowded = each.queue > slots and (least == 0 or each.queue - least > FAR_MORE * slots)
        link = deepest(hints.chain, each.known)
        own = link.length if link is not None and link.own else 0
        return (
            crowded,
            session is None or each.id != session,
            -own,
            each.queue,
            each.conversations,
            random.random(),
        )

    return [each.id for each in sorted(candidates, key=rank)]
