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


class DraftLengthPolicy:
    """Decides how long the next draft may be: none while drafts have cost more time than they saved."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter
        self.forget()

    def forget(self) -> None:
        """Drop all that drafts have shown and cost so far."""
        self._right = 0.8
        """The recent share of right guesses, of those before which all of the draft was right."""
        self._balance = 0.0
        """Seconds that drafts have saved so far; below zero: cost."""
        self._spent = self._read = 0.0
        self._batched = False

    def begin(self) -> None:
        """Start a request: a loss stays to be paid back, a gain counts up to `HEAD_START`."""
        self._balance = min(self._balance - self._read, HEAD_START * self._meter.token_seconds)
        self._spent = self._read = 0.0
        self._batched = False

    def length(self, most: int) -> int:
        """Return the number of guessed tokens that are worth decoding now, at most `most`.

        One is tried however rarely guesses are right, once the loss of the last trial is paid back.
        """
        if not self.pays:
            return 0
        more = self._meter.costs().prefill_seconds / self._meter.token_seconds
        length, right = 1, self._right
        while length < most and (right := right * self._right) >= max(LEAST, more):
            length += 1
        return min(length, most)

    @property
    def pays(self) -> bool:
        """Drafts have saved at least as much time as they cost."""
        return self._meter.token_seconds > 0 and self._balance >= 0

    # -- what happened ---------------------------------------------------------------------------

    def prefilled(self, seconds: float) -> None:
        """Note the seconds that the request's prompt took."""
        self._balance += SHARE * seconds

    def asked(self, seconds: float, behind: int) -> None:
        """Note the seconds of a guess, and of reading the `behind` tokens before it.

        Reading a prompt counts at the end of the request, which drafts may serve until then.
        """
        if behind >= READING:
            self._read += seconds
        else:
            self._spent += seconds

    def decoded(self, seconds: float) -> None:
        """Note the seconds of a batch of the answer that holds several tokens."""
        self._spent += seconds
        self._batched = True

    def undone(self, seconds: float) -> None:
        """Note the seconds of a snapshot that was taken, or loaded, to take a draft back."""
        self._spent += seconds

    def account(self, gained: int, drafted: int = 0) -> None:
        """Settle the time since the last call, in which the answer gained `gained` tokens.

        `drafted`: number of guessed tokens that were decoded in that time.
        """
        accepted = min(max(gained - 1, 0), drafted)
        for _ in range(accepted):
            self._right += (1 - self._right) / MEMORY
        if accepted < drafted:
            self._right -= self._right / MEMORY
        plain = gained * self._meter.token_seconds
        self._balance += plain * (SHARE + self._batched) - self._spent
        self._spent, self._batched = 0.0, False
