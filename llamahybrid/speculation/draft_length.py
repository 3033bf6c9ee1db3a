"""The length of drafts, by how often guesses are right and while drafts save time."""

from __future__ import annotations

from llamahybrid.memory.costs import CostMeter

MEMORY = 12.0
"""Guessed tokens over which the share of right ones is averaged."""

LEAST = 0.3
"""Chance that all tokens of a draft are right down to which it is made longer, or the share of a token's time
that one in a large batch takes, where that is more."""

SHARE = 0.04
"""Share of the time of tokens and prompts that counts as saved: a loss on drafts is paid back from it."""

HEAD_START = 1.0
"""Most tokens' time that a request takes over from what drafts gained in those before: it may lose that."""

READING = 32
"""Tokens from which a draft model that has not seen the prompt takes notable time to read it."""

WATCHED = 2
"""Tokens of a guess that is only compared with the answer, and not decoded."""

WATCHING = 0.01
"""Share of the decode time that such guesses may take."""


class Chance:
    """The recent share of right guesses: of those after a wrong one, and of those after a right one.

    Guesses go well and badly in stretches (a quotation, a new thought), which one number would not show.
    """

    def __init__(self) -> None:
        self._hits = [0.5, 0.8]
        self._trials = [1.0, 1.0]
        self._rolling = False

    def begin(self) -> None:
        """Start a request: its first guess does not follow the last one."""
        self._rolling = False

    def saw(self, right: bool) -> None:
        """Count a guessed token that was compared with the answer's."""
        kind = int(self._rolling)
        fade = min(1.0, (MEMORY - 1) / self._trials[kind])
        self._hits[kind] = fade * self._hits[kind] + right
        self._trials[kind] = fade * self._trials[kind] + 1
        self._rolling = right

    @property
    def next(self) -> float:
        """The chance that the next guessed token is right."""
        return self._hits[self._rolling] / self._trials[self._rolling]

    @property
    def then(self) -> float:
        """The chance that a guessed token behind a right one is right."""
        return self._hits[1] / self._trials[1]


class DraftLengthPolicy:
    """Decides how long the next draft may be: none while drafts have cost more time than they saved."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter
        self._batched = False
        self._watched = 0
        self.forget()

    def forget(self) -> None:
        """Drop all that drafts have shown and cost so far."""
        self.chance = Chance()
        self._balance = 0.0
        """Seconds that drafts have saved so far; below zero: cost."""
        self._spent = self._read = 0.0
        self._ask = 0.0
        """Seconds of the last guess."""

    def begin(self) -> None:
        """Start a request: a loss stays to be paid back, a gain counts up to `HEAD_START`."""
        self.chance.begin()
        self._balance = min(self._balance - self._read, HEAD_START * self._meter.token_seconds)
        self._spent = self._read = 0.0
        self._batched = False
        self._watched = 0

    def prefilled(self, seconds: float) -> None:
        """Note the seconds that the request's prompt took."""
        self._balance += SHARE * seconds

    # -- what to do ------------------------------------------------------------------------------

    def length(self, most: int) -> int:
        """Return the number of guessed tokens that are worth decoding now, at most `most`."""
        if not self.pays:
            return 0
        more = self._meter.costs().prefill_seconds / self._meter.token_seconds
        length, right = 0, self.chance.next
        while length < most and right >= max(LEAST, more):
            length += 1
            right *= self.chance.then
        return length

    def watch(self, tokens: int) -> int:
        """Return the number of tokens to guess for comparison only, `tokens` into the answer; mostly 0."""
        if self._ask > WATCHING * self._meter.token_seconds * (tokens - self._watched):
            return 0
        self._watched = tokens
        return WATCHED

    @property
    def pays(self) -> bool:
        """Drafts have saved at least as much time as they cost."""
        return self._meter.token_seconds > 0 and self._balance >= 0

    # -- what happened ---------------------------------------------------------------------------

    def asked(self, seconds: float, behind: int = 0) -> None:
        """Note the seconds of a guess, and of reading the `behind` tokens before it.

        Reading a prompt counts at the end of the request, which drafts may serve until then.
        """
        if behind >= READING:
            self._read += seconds
        else:
            self._spent += seconds
            self._ask = seconds

    def decoded(self, seconds: float) -> None:
        """Note the seconds of a batch of the answer."""
        self._spent += seconds
        self._batched = True

    def undone(self, seconds: float) -> None:
        """Note the seconds of a snapshot that was taken, or loaded, to take a draft back."""
        self._spent += seconds

    def account(self, gained: int) -> None:
        """Settle the time since the last call, in which the answer gained `gained` tokens."""
        plain = gained * self._meter.token_seconds
        self._balance += plain * (SHARE + self._batched) - self._spent
        self._spent, self._batched = 0.0, False
