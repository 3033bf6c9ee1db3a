"""How long drafts may be: by measured acceptance and cost, within what a request may lose on them."""

from __future__ import annotations

from collections import deque
from statistics import median

from .cost import CostMeter

SHARE = 0.04
"""Of the time that the answer so far would have taken token by token: what drafts may have cost it more."""

FADE = 0.8
"""What a draft's verdict counts for when the next one is in: guesses go well and badly in stretches."""

GAIN = 1.03
"""Tokens per second over decoding one by one from which a draft is worth its while."""

UNMEASURED = 0.5
"""Of a token's time: what one more in the batch costs, until it was measured."""

TRIAL = 2
"""Tokens of a draft that is made to see whether drafts pay by now."""

PLANES_PRICE = 3.0
"""Tokens' time that growing and giving back rollback planes takes, until it was measured."""

SAMPLES = 5


class Curve:
    """Seconds by size: medians of recent measurements, with straight lines between and beyond them."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        """Something of that size took so long."""
        seen = self._seen.setdefault(size, deque(maxlen=SAMPLES))
        seen.append(seconds)
        self._medians[size] = median(seen)

    def at(self, size: int, first: float, slope: float) -> float:
        """Seconds for `size` >= 1, given those for 1; `slope`: for each more while none was measured."""
        known = self._medians
        below = max((s for s in known if 1 < s <= size), default=1)
        above = min((s for s in known if s >= size), default=0)
        low = known[below] if below > 1 else first
        if size == below:
            return low
        if above:
            return low + (known[above] - low) * (size - below) / (above - below)
        if below > 1:
            slope = max(0.0, (low - first) / (below - 1))
        return low + slope * (size - below)


class Pace:
    """The account of one context's drafts."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter
        self._batches = Curve()
        self._asks = Curve()
        self._hits, self._trials = 1.0, 2.0
        self._taken: deque[float] = deque(maxlen=SAMPLES)
        self._loaded: deque[float] = deque(maxlen=SAMPLES)
        self._price: float | None = None
        self._rent = 0.0
        self.begin()

    def begin(self) -> None:
        """A request starts: nothing won or lost yet."""
        self._balance = 0.0
        self._spent = 0.0
        self._batched = False
        self._refused = False
        self._tokens = self._tried = 0

    # -- what to do ------------------------------------------------------------------------------

    def length(self, tokens: int, most: int, owed: int, free: int) -> int:
        """How many tokens a draft may have now, at most `most`.

        `tokens`: how far the answer is; `owed`: tokens to be decoded again in the same batch; `free`: up to
        so many are taken back at no cost. The best rate of expected tokens per second wins, among those
        that the account can bear even if all are rejected; where none pays, a token or two is tried now and
        then.
        """
        self._tokens = tokens
        token = self._meter.token_seconds
        if not token:
            return 0
        credit = self._balance + SHARE * token * tokens
        plain = self._batches.at(owed + 1, token, UNMEASURED * token)
        chance = self._hits / self._trials
        best, trial, best_rate, expected = 0, 0, GAIN / plain, 1.0
        for length in range(1, most + 1):
            cost, undone = self._cost(length, owed, free, token)
            loss = cost + undone - plain
            if loss > credit:
                break
            expected += chance**length
            rate = expected / (cost + (1 - chance**length) * undone)
            if rate > best_rate:
                best, best_rate = length, rate
            if length <= TRIAL and loss <= SHARE * token * (tokens - self._tried):
                trial = length
        return best or trial

    def _cost(self, length: int, owed: int, free: int, token: float) -> tuple[float, float]:
        """Seconds of a step with a draft of that length, and how many more once it is rejected."""
        cost = self._batches.at(owed + 1 + length, token, UNMEASURED * token)
        cost += self._asks.at(length, self._asks.at(1, 0.0, 0.0), 0.0)
        if length <= free:
            return cost, 0.0
        unknown = UNMEASURED * token / 2
        return cost + _median(self._taken, unknown), _median(self._loaded, unknown)

    def planes_pay(self) -> bool:
        """Snapshots have cost by now what rollback planes would, and the account bears that price."""
        token = self._meter.token_seconds
        price = PLANES_PRICE * token if self._price is None else self._price
        credit = self._balance + SHARE * token * self._tokens
        return not self._refused and self._rent >= price and price <= credit

    # -- what happened ---------------------------------------------------------------------------

    def asked(self, tokens: int, seconds: float) -> None:
        """The draft model took so long for a guess of at most `tokens`."""
        self._asks.add(tokens, seconds)
        self._spent += seconds

    def decoded(self, tokens: int, seconds: float) -> None:
        """A batch of the answer took so long."""
        self._batches.add(tokens, seconds)
        self._spent += seconds
        self._batched = True

    def saved(self, seconds: float) -> None:
        """A snapshot was taken so that a draft can be taken back."""
        self._taken.append(seconds)
        self._spent += seconds
        self._rent += seconds

    def loaded(self, seconds: float, again: int) -> None:
        """A snapshot was loaded to take a draft back, and `again` tokens have to be decoded again."""
        self._loaded.append(seconds)
        self._spent += seconds
        token = self._meter.token_seconds
        self._rent += seconds + self._batches.at(again + 1, token, UNMEASURED * token) - token

    def bought(self, seconds: float, grown: bool) -> None:
        """Rollback planes were made (or could not be)."""
        self._spent += seconds
        self._refused = not grown
        self._rent = 0.0
        # giving them back takes about as long
        self._price = 2 * seconds if self._price is None else (self._price + 2 * seconds) / 2

    def settled(self, gained: int, drafted: int, accepted: int, over: bool) -> None:
        """What the time since the last call bought: `gained` tokens, `accepted` of `drafted` among them."""
        if self._batched:
            self._balance += gained * self._meter.token_seconds
        self._balance -= self._spent
        self._spent, self._batched = 0.0, False
        if drafted:
            self._tried = self._tokens
            missed = accepted < drafted and not over
            self._hits = FADE * self._hits + accepted
            self._trials = FADE * self._trials + accepted + missed


def _median(samples: deque[float], unknown: float) -> float:
    return median(samples) if samples else unknown
