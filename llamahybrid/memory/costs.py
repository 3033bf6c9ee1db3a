"""Measured costs of one context on this machine: decode, snapshot, restore.

What they decide must not swing with the clock: other load only ever makes a sample slower, so the fastest of
the recent ones counts, and what was said once stands until that has moved by half.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from statistics import median

from llamahybrid.prompt_cache.base import Costs

WINDOW = 15
"""Recent samples that count."""

FEW = 3
"""Samples that have to be there before a cost speaks against a restore, or for what a cut costs."""

LARGE_BATCH = 64
"""Tokens from which a batch says what prefill costs per token."""

SMALL_BATCH = 8, 32
"""Fewest and most tokens of a batch that says what a cut costs: chosen, not measured, for the sizes that
pieces near a prompt's end have."""

NO_TIME = 1e-6
"""Seconds that stand for none: 0 would say that nothing was measured."""

BAND = 1.5
"""How far a cost may move from what was said before it is said anew."""

FADE_SECONDS = 60.0
"""What a restore takes counts half for each such time since the last one. A machine that was busy during the
first few would else never restore a short chat again, and see that it is quick; nor would a later process."""


class CostMeter:
    """Steady figures from recent measurements; zero where nothing was measured yet.

    `snapshot_bytes`: size of a snapshot, where all have the same; `token_seconds`: a first sample of one
    token decoded alone.
    """

    def __init__(self, batch_tokens: int, snapshot_bytes: int = 0, token_seconds: float = 0.0) -> None:
        self.together = 1
        """Answers whose tokens were decoded in one batch just now."""
        self._said = Costs(batch_tokens=batch_tokens, snapshot_bytes=snapshot_bytes)
        self._token = deque([token_seconds] if token_seconds else [], WINDOW)
        self._prefill: deque[float] = deque(maxlen=WINDOW)
        self._batch: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._snapshot: deque[float] = deque(maxlen=WINDOW)
        self._restore: deque[float] = deque(maxlen=WINDOW)
        self._segment: deque[float] = deque(maxlen=WINDOW)
        self._restored = time.monotonic()
        self._told: tuple[float, Costs] | None = None
        """What was told last, and after how many times `FADE_SECONDS`; None where more was measured since."""

    def decoded(self, tokens: int, seconds: float) -> None:
        """A native batch of `tokens` took `seconds`."""
        self._told = None
        if tokens == 1:
            self._token.append(seconds)
        elif tokens >= LARGE_BATCH:
            self._prefill.append(seconds / tokens)
        elif SMALL_BATCH[0] <= tokens <= SMALL_BATCH[1]:
            self._batch.append((tokens, seconds))

    @property
    def token_seconds(self) -> float:
        """One token decoded alone, as the machine is now; 0 while not measured."""
        return median(self._token) if self._token else self._said.token_seconds

    def saved(self, n_bytes: int, seconds: float) -> None:
        """A snapshot of `n_bytes` was taken and stored."""
        self._told = None
        self._said = replace(self._said, snapshot_bytes=n_bytes)
        self._snapshot.append(seconds)

    def restored(self, seconds: float, tokens: int) -> None:
        """A snapshot, and attention of so many tokens, was loaded and verified."""
        self._restored, self._told = time.monotonic(), None
        if tokens < LARGE_BATCH:
            self._restore.append(seconds)
        else:
            alone = median(self._restore) if self._restore else 0.0
            self._segment.append(max(0.0, seconds - alone) / tokens)

    def costs(self) -> Costs:
        """What is known now."""
        told, times = self._told, (time.monotonic() - self._restored) // FADE_SECONDS
        if told is None or told[0] != times:
            told = self._told = times, self._known_after(0.5**times)
        return told[1]

    def _known_after(self, fade: float) -> Costs:
        """The same, where what a restore takes has faded to so much of it."""
        said = self._said
        self._said = replace(
            said,
            token_seconds=_steady(said.token_seconds, self._token),
            prefill_seconds=_steady(said.prefill_seconds, self._prefill),
            batch_seconds=_steady(said.batch_seconds, self._beyond(), FEW),
            snapshot_seconds=_steady(said.snapshot_seconds, self._snapshot),
            restore_seconds=_at_most(said.restore_seconds, self._restore),
            segment_seconds=_at_most(said.segment_seconds, self._segment),
        )
        return replace(
            self._said,
            restore_seconds=self._said.restore_seconds * fade,
            segment_seconds=self._said.segment_seconds * fade,
        )

    def _beyond(self) -> list[float]:
        """What small batches took beyond their share of large ones: both as they mostly are, sizes differ.

        One that was held up (a model read from disk, a machine that stood still) says nothing of that.
        """
        if not self._prefill or len(self._batch) < FEW:
            return []
        fastest = min(self._prefill)
        share = median(s for s in self._prefill if s <= fastest * BAND)
        beyond = median(seconds - tokens * share for tokens, seconds in self._batch)
        return [max(beyond, NO_TIME)] * len(self._batch)


def _steady(said: float, samples: Collection[float], least: int = 1) -> float:
    """What to say of a cost: `said`, unless at least `least` samples show that it is not that any more."""
    if len(samples) < least:
        return said
    now = min(samples)
    return said if said / BAND <= now <= said * BAND and said else now


def _at_most(said: float, samples: Collection[float]) -> float:
    """The same of a cost that, once said, keeps samples from being taken: one that is less is believed."""
    if samples and min(samples) < said / BAND:
        return min(samples)
    return _steady(said, samples, FEW)
