"""How long drafts may be: by measured acceptance and cost, within what a request may lose on them."""

from __future__ import annotations

from collections import deque
from statistics import median

from llamahybrid.memory.costs import LARGE_BATCH, CostMeter

SHARE = 0.04
"""Of the time that the request so far would have taken without drafts: what they may have cost it more."""

GAIN = 0.03
"""Of a token's time: what a draft must be expected to win to be worth its while."""

MEMORY = 12.0
"""Guessed tokens that count for how often guesses are right: the last dozen or so."""

FADE = 0.9
"""What a step counts for when the next one is done: how fast an answer goes tells what a token is worth."""

WATCHED = 2
"""Tokens that a model is asked for only to see whether they would have been right."""

WATCHING = 0.01
"""Of the decode time: what such questions may take."""

HOPEFUL = 0.3
"""Chance that a guess is right from which it may be worth decoding at once."""

UNASKED = 0.25
"""Of a token's time: what the draft model takes, until it was measured."""

UNPREFILLED = 0.5
"""Of a token's time: what one in a large batch takes, until it was measured."""

STALE = 500
"""Tokens without a draft after which what batches cost is measured anew: the machine may have been busy."""

READING = 32
"""Tokens from which a draft model that has not seen the prompt takes notable time to read it."""

PLANES_PRICE = 12.0
"""Tokens' time that growing and giving back rollback planes takes, until it was measured."""

HEAD_START = 4.0
"""Tokens' time that drafts may lose on the prompt's account, within its share: about one long one."""

SAMPLES = 5


class Curve:
    """Seconds of a batch by its size: medians of recent measurements, straight lines between them.

    On a CPU it is no straight line at all: with f16 weights two tokens took 2.3 times as long as one, eight
    3.7 times. So a size is not judged by a smaller one: beyond the largest that was measured each token costs
    what it does in a prompt, and until any was, the second token costs as much as the first.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def add(self, size: int, seconds: float) -> None:
        """A batch of `size` >= 2 tokens took so long."""
        seen = self._seen.setdefault(size, deque(maxlen=SAMPLES))
        seen.append(seconds)
        self._medians[size] = median(seen)

    def at(self, size: int, token: float, more: float) -> float:
        """Seconds for `size` >= 1 tokens; `token`: for one alone, `more`: for each in a large batch."""
        if size == 1:
            return token
        known = self._medians
        below = max((s for s in known if s <= size), default=1)
        above = min((s for s in known if s >= size), default=0)
        low = known.get(below, token)
        if above:
            return low + (known[above] - low) * (size - below) / max(1, above - below)
        return low + (token - more if below == 1 else 0.0) + more * (size - below)


class Chance:
    """How often a guessed token was right lately: the first after a wrong one, and those after a right one.

    Guesses go well and badly in stretches (a quotation, a new thought), which one number would not show.
    """

    def __init__(self) -> None:
        self._hits = [0.5, 0.8]
        self._trials = [1.0, 1.0]
        self._rolling = False

    def begin(self) -> None:
        """A request starts: that the last guess was right says nothing of the next one."""
        self._rolling = False

    def saw(self, right: bool) -> None:
        """The next token was compared with the guess."""
        kind = int(self._rolling)
        fade = min(1.0, (MEMORY - 1) / self._trials[kind])
        self._hits[kind] = fade * self._hits[kind] + right
        self._trials[kind] = fade * self._trials[kind] + 1
        self._rolling = right

    @property
    def next(self) -> float:
        """That the next guessed token is right."""
        return self._hits[self._rolling] / self._trials[self._rolling]

    @property
    def then(self) -> float:
        """That one is, the one before it being right."""
        return self._hits[1] / self._trials[1]


class DraftLengthPolicy:
    """Decides how long the next draft may be, by an account of what one context's drafts cost and won."""

    def __init__(self, meter: CostMeter) -> None:
        self.chance = Chance()
        self._meter = meter
        self._batches = Curve()
        self._asks: deque[float] = deque(maxlen=SAMPLES)
        self._each: deque[float] = deque(maxlen=SAMPLES)
        self._behind: deque[float] = deque(maxlen=SAMPLES)
        self._taken: deque[float] = deque(maxlen=SAMPLES)
        self._loaded: deque[float] = deque(maxlen=SAMPLES)
        self._idle = 0
        self._recent = (0.0, 0.0)
        """Seconds and tokens of the last steps, fading."""
        self._price: float | None = None
        self.begin()

    def begin(self) -> None:
        """A request starts: nothing won or lost yet."""
        self.chance.begin()
        self._grant = 0.0
        self._balance = 0.0
        self._spent = 0.0
        self._batched = False
        self._refused = False
        self._tokens = self._watched = 0
        self._rent = 0.0
        self._more = self._meter.costs().prefill_seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The request's prompt took so long: drafts may cost a share of that, too.

        It is there for a draft model to read the prompt, and what is left gives a head start.
        """
        self._grant = SHARE * seconds
        self._more = seconds / tokens if tokens >= LARGE_BATCH else self._meter.costs().prefill_seconds

    # -- what to do ------------------------------------------------------------------------------

    def length(self, tokens: int, most: int, owed: int, free: int, behind: int = 0) -> int:
        """How many guessed tokens are worth decoding now, at most `most`; 0: none.

        `tokens`: how far the answer is; `owed`: tokens to be decoded again in the same batch; `free`: up to
        so many are taken back at no cost; `behind`: tokens the draft model has yet to read. The length with
        the best expected gain wins, among those that the account can bear even if all are wrong.
        """
        self._tokens = tokens
        token = self._meter.token_seconds
        if not token:
            return 0
        self._idle += 1
        if self._idle > STALE:
            self._batches, self._idle = Curve(), 0
        credit = self._credit(token, behind)
        plain = self._batch(owed + 1, token)
        ask, each = self._asking(token)
        save, back = self._undoing(token, owed)
        seconds, said = self._recent
        worth = min(token, seconds / said) if said else token
        best, best_gain = 0, GAIN * token - plain
        expected, all_right = 1.0, self.chance.next
        for length in range(1, most + 1):
            expected += all_right
            cost = ask + length * each + self._batch(owed + 1 + length, token)
            undone = 0.0
            if length > free:
                cost, undone = cost + save, back
            gain = (expected - 1) * worth - cost - undone * (1 - all_right)
            if gain > best_gain and cost + undone - plain <= credit:
                best, best_gain = length, gain
            all_right *= self.chance.then
        return best

    def due(self, tokens: int) -> bool:
        """It is time to ask for a guess, if only to see whether it would have been right."""
        token = self._meter.token_seconds
        return token > 0 and (self.chance.next >= HOPEFUL or self._rested(tokens, token))

    def watch(self, tokens: int, behind: int = 0) -> int:
        """How many tokens to ask for when none are worth decoding, as `length` just said; 0: not now."""
        token = self._meter.token_seconds
        if self._watching(token) > self._credit(token, behind) or not self._rested(tokens, token):
            return 0
        self._watched = tokens
        return WATCHED

    def _rested(self, tokens: int, token: float) -> bool:
        """Enough tokens were said since guesses were last watched."""
        return self._watching(token) <= WATCHING * token * (tokens - self._watched)

    def _watching(self, token: float) -> float:
        """Seconds of a guess that is only watched."""
        ask, each = self._asking(token)
        return ask + WATCHED * each

    def planes_pay(self) -> bool:
        """Snapshots have cost what rollback planes would, and the account bears that price.

        Counted since the last checkpoint: planes do not outlive one.
        """
        token = self._meter.token_seconds
        price = PLANES_PRICE * token if self._price is None else self._price
        return not self._refused and price <= min(self._rent, self._credit(token))

    def _credit(self, token: float, behind: int = 0) -> float:
        """Seconds that may be lost from now on, once the draft model has read what it is behind."""
        left = self._grant - self._reading(behind)
        return self._balance + SHARE * token * self._tokens + min(left, HEAD_START * token)

    def _batch(self, size: int, token: float) -> float:
        return self._batches.at(size, token, self._more or UNPREFILLED * token)

    def _asking(self, token: float) -> tuple[float, float]:
        """Seconds of a guess, and of each token of it."""
        if not self._asks and not self._each:
            return UNASKED * token, 0.0
        return _median(self._asks, 0.0), _median(self._each, 0.0)

    def _undoing(self, token: float, owed: int) -> tuple[float, float]:
        """Seconds to take a snapshot, and to go back to it and decode again what is certain by then."""
        checkpoint = 0.0 if self._taken and self._loaded else self._meter.costs().snapshot_seconds
        again = self._batch(owed + 2, token) - token
        return _median(self._taken, checkpoint), _median(self._loaded, 2 * checkpoint) + again

    def _reading(self, behind: int) -> float:
        """Seconds until the draft model has read what it is behind."""
        return behind * _median(self._behind, self._more) if behind >= READING else 0.0

    # -- what happened ---------------------------------------------------------------------------

    def asked(self, seconds: float, tokens: int, behind: int = 0) -> None:
        """The draft model took so long for a guess; `tokens`: guessed one by one, 0 where not."""
        granted = min(self._grant, seconds) if behind >= READING else 0.0
        self._grant -= granted
        self._spent += seconds - granted
        if behind >= READING:
            self._behind.append(seconds / behind)
        elif tokens:
            self._each.append(seconds / tokens)
        else:
            self._asks.append(seconds)

    def decoded(self, tokens: int, seconds: float) -> None:
        """A batch of the answer took so long."""
        if tokens > 1:
            self._batches.add(tokens, seconds)
            self._idle = 0
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
        self._rent += seconds + self._batch(again + 1, token) - token

    def checkpointed(self) -> None:
        """A checkpoint was taken: planes that were bought are gone."""
        self._rent = 0.0

    def planes_made(self, seconds: float, grown: bool) -> None:
        """Rollback planes were made (or could not be)."""
        self._spent += seconds
        self._refused = not grown
        self._rent = 0.0
        # giving them back takes about as long
        self._price = 2 * seconds if self._price is None else (self._price + 2 * seconds) / 2

    def account(self, gained: int) -> None:
        """What was spent since the last call brought so many tokens."""
        plain = gained * self._meter.token_seconds
        seconds, said = self._recent
        took = self._spent + (0.0 if self._batched else plain)
        self._recent = (FADE * seconds + took, FADE * said + gained)
        if self._batched:
            self._balance += plain
        self._balance -= self._spent
        self._spent, self._batched = 0.0, False


def _median(samples: deque[float], unknown: float) -> float:
    return median(samples) if samples else unknown
