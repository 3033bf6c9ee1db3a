"""What a checkpoint is worth: how soon a request may want it, and the tokens that it would save, per byte.

    worth = rate of requests on its path x chance that one ends up here
            x tokens to the next shallower checkpoint / bytes that go with it

Time is counted in requests. As in LHD (Beckmann et al., NSDI 2018) entries are ranked by hits per byte and
time; the rate falls with the silence of a path, by a fixed rule: one learned from how many conversations came
back served 0.2 points fewer tokens. The chance to end up here is learned from the requests themselves, for
each kind of place: an answer's start is where histories part when thinking is stripped, a system prompt's end
is where new chats begin, and most places are only passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from llamahybrid.prompt_cache.nodes import Entry, Match

SOONEST_RETURN = 4
"""Requests after which a path that was just used comes back, about."""

PRIOR_REQUESTS = 3.0
"""Requests that the first guess at a kind of place counts as."""

OWN_REQUESTS = 4
"""Requests by which a place is known better than its kind."""

LEAST_CHANCE = 0.005
"""No place is so unlikely that its tokens count for nothing."""

FADE_AFTER = 2000
"""What was counted is halved after so many requests: traffic changes."""

Kind: TypeAlias = tuple[bool, bool, int, int, bool, bool, bool]


def kind(entry: Entry) -> Kind:
    """What places have in common: a message's start, a prompt's end, how it fared, and what lies below."""
    at_end = entry.checkpoint.logits is not None
    hits, passes = min(entry.hits, 2), min(entry.passes, 2)
    return entry.marked, at_end, hits, passes, bool(entry.below), entry.deeper_gone, entry.abandoned


def first_guess(place: Kind) -> float:
    """Chance that a request on the path ends up at such a place, before any was seen."""
    marked, at_end, hits, passes, below, deeper_gone, abandoned = place
    if abandoned:
        return 0.05
    if deeper_gone:
        return 0.8
    if not below:
        return 0.6 if marked else 0.5
    if hits or passes:
        return 0.3
    return 0.6 if marked else 0.3 if at_end else 0.2


class ReuseValue:
    """Learns from requests what checkpoints are worth."""

    def __init__(self) -> None:
        self.requests: float = 0.0
        """Learned from; halved now and then."""
        self.places: dict[Kind, tuple[float, float]] = {}
        """Requests that ended up at a kind of place, and those that came by."""

    def learn(self, match: Match, entries: Sequence[Entry]) -> None:
        """A request follows this path with these checkpoints, shallowest first; none was told of it yet."""
        self.requests += 1
        deepest = entries[-1] if entries else None
        for entry in (*entries, *match.left_behind()):
            here, all_ = self.places.get(kind(entry), (0.0, 0.0))
            self.places[kind(entry)] = (here + (entry is deepest), all_ + 1)
        if self.requests > FADE_AFTER:
            self.requests /= 2
            self.places = {k: (here / 2, all_ / 2) for k, (here, all_) in self.places.items()}

    def of(self, entry: Entry, now: int) -> float:
        """Tokens saved a request and a byte; `now`: the number of the last request."""
        shallower = 0 if entry.above is None else entry.above.position
        return request_rate(entry, now) * self.chance(entry) * (entry.position - shallower) / freed(entry)

    def chance(self, entry: Entry) -> float:
        """Chance that a request on its path ends up here."""
        place = kind(entry)
        here, all_ = self.places.get(place, (0.0, 0.0))
        chance = (here + PRIOR_REQUESTS * first_guess(place)) / (all_ + PRIOR_REQUESTS)
        own = entry.hits + entry.passes
        if own >= OWN_REQUESTS:
            chance = (entry.hits + OWN_REQUESTS * chance) / (own + OWN_REQUESTS)
        return chance + LEAST_CHANCE


def request_rate(entry: Entry, now: int) -> float:
    """Requests on its path per request: what was seen of it, and what silence says of any path.

    A path that was silent for n requests comes back at a rate of about 1 in 2n, whatever the traffic.
    """
    silent = 2 * (now - entry.seen) + SOONEST_RETURN
    return (entry.hits + entry.passes + 1) / (entry.seen - entry.born + silent)


def freed(entry: Entry) -> int:
    """Bytes that go with a checkpoint: its own, and those of segments that only it needs."""
    n_bytes = entry.nbytes
    if entry.below or entry.node is None:
        return n_bytes
    shallower = 0 if entry.above is None else entry.above.position
    for node in entry.node.path():
        if node is not entry.node and node.weight > 1:
            break
        n_bytes += sum(s.nbytes for s in node.segments if s.start >= shallower)
        if node.start <= shallower:
            break
    return n_bytes
