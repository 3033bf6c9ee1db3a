"""The order of eviction when the budget is full: the least worth per byte first.

A segment is evicted with the last checkpoint that needs it, a pinned entry never. The worth of a checkpoint
is the rate of requests for it times the tokens that it would save, per byte:

    worth = rate of requests on its path x chance that one ends up here
            x tokens to the next shallower checkpoint / bytes that go with it

Both chances are learned from the requests themselves, so that no constant has to fit the traffic. Time is
counted in requests. The rate follows the age of a path, learned from conversations of that age, as in LHD
(Beckmann et al., NSDI 2018), which ranks entries by hits per byte and time. A fixed rate of 1 in 2n does as
well on mixed traffic, but decodes up to 30 % more where conversations take turns.
The chance to end up here follows the kind of place: an answer's start is where histories part when thinking
is stripped, a system prompt's end is where new chats begin, and most places are only passed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, islice, pairwise
from typing import TypeAlias

from llamahybrid.prompt_cache.nodes import ENTRY_BYTES, ID_BYTES, LONGEST_TAIL, NODE_BYTES, Entry, Match, Node
from llamahybrid.prompt_cache.tree import Tree

LOOKS = 64
"""Checkpoints compared for one eviction; all of a smaller cache."""

WORST = 16
"""The least worth of these, which are compared again at the next eviction."""

TOKENS_SHARE = 16
"""Tokens without a checkpoint stay while all tokens take at most this part of the stored bytes: they show
which paths return, and where they diverge."""

OLDEST_PATHS = 128
"""Paths compared for tokens without a checkpoint that can be evicted in place of one."""

BINS = 40
"""Ages are counted in half octaves, which reach a million requests."""

HORIZON = 12
"""Bins in which a return is expected: to 64 times the age. A later return hardly pays for its bytes."""

STARTS = [2 ** (b / 2) - 1 for b in range(BINS + 1)]
SPANS = [after - start for start, after in pairwise(STARTS)]

PRIOR_LIVES, PRIOR_ONCE = 4.0, 2.0
"""Returns that the first guess counts as, of a conversation that came back before and of a prompt seen once:
a helper's prompts never come back, and are to be known for it soon."""

PRIOR_RATES = [1 / (2 * start + 4) for start in STARTS]
"""Before much was seen: a path that was silent for n requests comes back at a rate of about 1 in 2n."""

PRIOR_REQUESTS = 3.0
"""Requests that the first guess at a kind of place counts as."""

OWN_REQUESTS = 4
"""Requests by which a place is known better than its kind."""

LEAST_CHANCE = 0.005
"""No place is so unlikely that its tokens count for nothing."""

FADE_AFTER = 2000
"""Requests after which all counts are halved: traffic changes."""

Kind: TypeAlias = tuple[bool, int, int, bool, bool]

Victim: TypeAlias = Entry | Node
"""A checkpoint, or a leaf whose last tokens no checkpoint needs."""


def kind(entry: Entry) -> Kind:
    """Return the kind of a place: a message's start, its history, and checkpoints below."""
    return entry.marked, min(entry.hits, 2), min(entry.passes, 2), entry.leads_on, entry.abandoned


def first_guess(place: Kind) -> float:
    """Chance that a request on the path ends up at such a place, before any was seen."""
    marked, hits, passes, below, abandoned = place
    if abandoned:
        return 0.05
    if not below:
        return 0.6 if marked else 0.5
    if hits or passes:
        return 0.3
    return 0.6 if marked else 0.2


class ReturnRates:
    """Returns per request of paths by the requests since their last one.

    Conversations that came back before are counted apart from prompts seen once: the one-off prompts of a
    helper are soon more than all others.
    """

    def __init__(self) -> None:
        self.requests: float = 0.0
        """Learned from; halved when they fade."""
        self.kinds = {False: Silences(PRIOR_ONCE), True: Silences(PRIOR_LIVES)}
        """By whether the path lives."""

    def learn(self, age: int | None, lived: bool = False) -> None:
        """A request came, on a path that was silent for `age` requests; None: on none known.

        `lived`: it had come back before.
        """
        self.requests += 1
        self.kinds[age is not None].begun += 1
        if age is not None:
            self.kinds[lived].returns[_bin(age)] += 1
        for silences in self.kinds.values():
            silences.rates = None

    def fade(self) -> None:
        """Halve all counts."""
        self.requests /= 2
        for silences in self.kinds.values():
            silences.begun /= 2
            silences.returns = [n / 2 for n in silences.returns]

    def at(self, age: int, lives: bool = True) -> float:
        """Returns per request of a path that was silent for `age` requests; never rises with age."""
        silences = self.kinds[lives]
        if silences.rates is None:
            silences.learned(self.requests)
        assert silences.rates is not None
        return silences.rates[_bin(age)]


class Silences:
    """The silences of one kind of path: how many began, and their ages when a request ended them."""

    def __init__(self, prior: float) -> None:
        """`prior`: returns that the first guess counts as."""
        self.begun: float = 0.0
        self.returns = [0.0] * BINS
        """By the age they had then."""
        self.rates: list[float] | None = None
        """Returns per request by age; None: not worked out yet."""
        self._prior = prior

    def learned(self, requests: float) -> None:
        """Work the rates out; `requests`: all that were learned from."""
        before = [0.0, *accumulate(self.returns)]
        # Silences that are old enough for a bin, and were not ended before, were in it.
        share = self.begun / max(1.0, requests)
        old = [share * (requests - start) for start in STARTS]
        reached = [max(0.0, n - b) for n, b in zip(old, before, strict=False)]
        exposed = [0.0, *accumulate(r * span for r, span in zip(reached, SPANS, strict=False))]
        rates = []
        for low in range(BINS):
            high = min(BINS, low + HORIZON)
            seen = before[high] - before[low] + self._prior
            rates.append(seen / (exposed[high] - exposed[low] + self._prior / PRIOR_RATES[low]))
        self.rates = list(accumulate(rates, min))


def freed(entry: Entry) -> int:
    """Bytes that go with a checkpoint: its own, and those of segments that only it needs."""
    n_bytes = entry.nbytes
    if entry.leads_on or entry.node is None:
        return n_bytes
    shallower = entry.shallower
    for node in entry.node.path():
        if node is not entry.node and node.weight > 1:
            break
        n_bytes += sum(s.nbytes for s in node.segments if s.start >= shallower)
        if node.start <= shallower:
            break
    return n_bytes


def _bin(age: int) -> int:
    return min(BINS - 1, int(2 * math.log2(age + 1)))


class Eviction:
    """An order of eviction: the least worth first, among a few checkpoints that are compared in turn.

    Worth is learned from requests.
    """

    def __init__(self) -> None:
        self.rates = ReturnRates()
        self.places: dict[Kind, tuple[float, float]] = {}
        """Requests that ended up at a kind of place, and those that came by."""

    def learn(self, tree: Tree, match: Match, entries: Sequence[Entry]) -> None:
        """Note a request, before it follows this path with these checkpoints, shallowest first."""
        turns = match.turns(match.length + LONGEST_TAIL + 1)
        self.rates.learn(tree.requests - match.path[-1].seen if turns else None, turns > 1)
        deepest = entries[-1] if entries else None
        for entry in (*entries, *match.left_behind()):
            here, all_ = self.places.get(kind(entry), (0.0, 0.0))
            self.places[kind(entry)] = (here + (entry is deepest), all_ + 1)
        if self.rates.requests > FADE_AFTER:
            self.rates.fade()
            self.places = {k: (here / 2, all_ / 2) for k, (here, all_) in self.places.items()}

    def worth(self, entry: Entry, now: int) -> float:
        """Tokens that a checkpoint saves a request and a byte; `now`: the number of the last request."""
        n_bytes = freed(entry)
        if not n_bytes and not entry.leads_on:
            return 0.0  # one without a snapshot, whose attention could not be kept
        return (
            self.rate(entry, now) * self.chance(entry) * (entry.position - entry.shallower) / max(1, n_bytes)
        )

    def rate(self, entry: Entry, now: int) -> float:
        """Requests on its path per request: what was seen of it, and what silence says of any path."""
        silent = 1 / self.rates.at(now - entry.seen, entry.lives)
        return (entry.hits + entry.passes + 1) / (entry.seen - entry.born + silent)

    def chance(self, entry: Entry) -> float:
        """Chance that a request on its path ends up here."""
        place = kind(entry)
        here, all_ = self.places.get(place, (0.0, 0.0))
        chance = (here + PRIOR_REQUESTS * first_guess(place)) / (all_ + PRIOR_REQUESTS)
        own = entry.hits + entry.passes
        if own >= OWN_REQUESTS:
            chance = (entry.hits + OWN_REQUESTS * chance) / (own + OWN_REQUESTS)
        return chance + LEAST_CHANCE

    def victim(
        self, tree: Tree, path: Match | None, held: Collection[Entry], keep: Collection[Entry] = ()
    ) -> Victim | None:
        """Return the next victim; None if nothing may be evicted.

        `path`: tokens that must stay. `held`: checkpoints in use, or pinned. `keep`: checkpoints; the result
        is None if there are no others.
        """
        entry = self._least(tree, held, keep)
        return bare_leaf(tree, path, entry) or entry

    def going_next(self, tree: Tree, held: Collection[Entry], count: int) -> list[Entry]:
        """Return the least worth of the checkpoints compared next, without a change."""
        return self._ranked(tree, islice(tree.entries(), LOOKS), held)[:count]

    def _ranked(self, tree: Tree, line: Iterable[Entry], held: Collection[Entry]) -> list[Entry]:
        """Return the checkpoints of a line that may be evicted, the least worth first."""
        free = (e for e in line if e not in held)
        return sorted(free, key=lambda entry: self.worth(entry, tree.requests))

    def _least(self, tree: Tree, held: Collection[Entry], keep: Collection[Entry]) -> Entry | None:
        """The least worth of those looked at; None if none may go."""
        for _ in range(0, len(tree), LOOKS - WORST):  # the worst are looked at again
            line = list(islice(tree.entries(), LOOKS))
            ranked = self._ranked(tree, line, held)
            if len(tree) > LOOKS:
                tree.to_the_end(e for e in line if e not in ranked[:WORST])
            if not all(e in keep for e in ranked):
                return ranked[0]
        return None


def bare_leaf(tree: Tree, path: Match | None, entry: Entry | None) -> Node | None:
    """The longest unused leaf with tokens that nothing needs, if they are to go before `entry`."""
    nodes = tree.oldest_nodes()
    if entry is not None:
        if tree.path_bytes * TOKENS_SHARE <= tree.entry_bytes + tree.segment_bytes:
            return None
        nodes = islice(nodes, OLDEST_PATHS)
    return next((node for node in nodes if node.tail(path.needs(node) if path else 0)), None)


def bytes_to_stay(entries: Iterable[Entry], path: Match | None) -> int:
    """Bytes that stay when all has gone that may: these checkpoints of the tree with what leads to them, and
    a path's tokens."""
    tokens: dict[Node, int] = {} if path is None else {n: min(n.end, path.length) for n in path.path}
    attention: dict[Node, int] = {}
    n_bytes = 0
    for entry in entries:
        n_bytes += entry.nbytes + ENTRY_BYTES
        assert entry.node is not None
        for node in entry.node.path():
            end = min(node.end, entry.position)
            if attention.get(node, 0) >= end:
                break  # whoever needs this needs all above
            attention[node] = end
            tokens[node] = max(tokens.get(node, 0), end)
    for node, end in attention.items():
        for segment in (s for s in node.segments if s.start < end):
            n_bytes += segment.nbytes
            tokens[node] = max(tokens[node], segment.end)
    ids = sum(end - node.start for node, end in tokens.items())
    return n_bytes + ID_BYTES * ids + NODE_BYTES * len(tokens)
