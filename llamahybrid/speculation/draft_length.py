"""How long drafts may be: by how often guesses are right, and only while drafts save time."""

from __future__ import annotations

from llamahybrid.memory.costs import CostMeter

MEMORY = 12.0
"""Guessed tokens that count for how often guesses are right: the last dozen or so."""

LEAST = 0.3
"""Chance that all tokens of a draft are right down to which it is made longer, or the share of a token's time
that one in a large batch takes, where that is more."""

SHARE = 0.04
"""Of the time of the tokens and prompts meanwhile: what pays back a loss on drafts, before the next one."""

HEAD_START = 1.0
"""Tokens' time that drafts of a request may lose at once where they gained as much in those before."""

READING = 32
"""Tokens from which a draft model that has not seen the prompt takes notable time to read it."""

WATCHED = 2
"""Tokens that a model is asked for only to see whether they would have been right."""

WATCHING = 0.01
"""Of the decode time: what such questions may take."""


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
    """Decides how long the next draft may be: none while drafts have cost more time than they saved."""

    def __init__(self, meter: CostMeter) -> None:
        self.chance = Chance()
        self._meter = meter
        self._balance = 0.0
        """Seconds that drafts have saved so far; below zero: that they have cost."""
        self._spent = self._read = 0.0
        self._batched = False
        self._watched = 0
        self._ask = 0.0
        """Seconds of the last guess."""

    def begin(self) -> None:
        """A request starts: a loss has to be paid back yet, of a gain a head start is left."""
        self.chance.begin()
        self._balance = min(self._balance - self._read, HEAD_START * self._meter.token_seconds)
        self._spent = self._read = 0.0
        self._batched = False
        self._watched = 0

    def prefilled(self, seconds: float) -> None:
        """The request's prompt took so long."""
        self._balance += SHARE * seconds

    # -- what to do ------------------------------------------------------------------------------

    def length(self, most: int) -> int:
        """How many guessed tokens are worth decoding now, at most `most`."""
        if not self._pays:
            return 0
        more = self._meter.costs().prefill_seconds / self._meter.token_seconds
        length, right = 0, self.chance.next
        while length < most and right >= max(LEAST, more):
            length += 1
            right *= self.chance.then
        return length

    def watch(self, tokens: int) -> int:
        """How many to ask for, `tokens` into the answer, only to see whether they would have been right."""
        if self._ask > WATCHING * self._meter.token_seconds * (tokens - self._watched):
            return 0
        self._watched = tokens
        return WATCHED

    @property
    def _pays(self) -> bool:
        return self._meter.token_seconds > 0 and self._balance >= 0

    # -- what happened ---------------------------------------------------------------------------

    def asked(self, seconds: float, behind: int = 0) -> None:
        """The draft model took so long for a guess, and to read the `behind` tokens before it.

        A prompt that it reads is paid for by the end of the request: it guesses until then.
        """
        if behind >= READING:
            self._read += seconds
        else:
            self._spent += seconds
            self._ask = seconds

    def decoded(self, seconds: float) -> None:
        """A batch of the answer took so long."""
        self._spent += seconds
        self._batched = True

    def undone(self, seconds: float) -> None:
        """A snapshot was taken, or loaded, so that a draft can be taken back."""
        self._spent += seconds

    def account(self, gained: int) -> None:
        """What was spent since the last call brought so many tokens."""
        plain = gained * self._meter.token_seconds
        self._balance += plain * (SHARE + self._batched) - self._spent
        self._spent, self._batched = 0.0, False
