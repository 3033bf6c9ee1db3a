"""Which replica a request goes to: where most of it can be resumed, unless others wait there already.

    1. the one that has the client's session, by its own word
    2. a conversation that is known somewhere: where the deepest part of it can be resumed
    3. a new one: the idlest, and of those the one with fewer conversations

A replica where a request would have to wait is passed over while another one is idle, and one where far more
wait than elsewhere in any case: to decode a conversation again costs more than to wait for a slot.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from llamahybrid.ray.conversations import Hints, deepest

Id = TypeVar("Id", bound=Hashable)


FAR_MORE = 2
"""Times as many requests as a replica has slots."""


@dataclass(frozen=True)
class Candidate(Generic[Id]):
    """A replica as the router knows it."""

    id: Id
    queue: int = 0
    """Requests that run or wait there."""
    known: Mapping[int, int] = field(default_factory=dict)
    """See `Asked.resumable`."""
    conversations: int = 0
    """Conversations that were sent there lately."""


def in_order(
    candidates: Sequence[Candidate[Id]], hints: Hints, slots: int, session: Id | None = None
) -> list[Id]:
    """All candidates, the best first. `slots`: requests that run at once on each; `session`: who has it."""
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
