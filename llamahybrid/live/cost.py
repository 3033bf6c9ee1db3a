"""Measured costs of one context on this machine: decode, snapshot, restore."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

from ..prompt_cache.base import Costs

WINDOW = 15
"""Recent samples that count. Mostly their median, because other load on the machine comes in bursts; but the
mean for snapshots, whose share of decode time is a promise that dear ones count toward."""

FEW = 3
"""Samples that have to be there before a cost speaks against a restore."""

LARGE_BATCH = 64
"""Tokens from which a batch says what prefill costs per token."""


class CostMeter:
    """Medians of recent measurements; zero where nothing was measured yet."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._token: deque[float] = deque(maxlen=WINDOW)
        self._prefill: deque[float] = deque(maxlen=WINDOW)
        self._snapshot: deque[float] = deque(maxlen=WINDOW)
        self._restore: deque[float] = deque(maxlen=WINDOW)
        self._segment: deque[float] = deque(maxlen=WINDOW)
        self._bytes = 0

    def decoded(self, tokens: int, seconds: float) -> None:
        """A native batch of `tokens` took `seconds`."""
        if tokens == 1:
            self._token.append(seconds)
        elif tokens >= LARGE_BATCH:
            self._prefill.append(seconds / tokens)

    @property
    def token_seconds(self) -> float:
        """One token decoded alone; 0 while not measured."""
        return _median(self._token)

    def saved(self, n_bytes: int, seconds: float) -> None:
        """A snapshot of `n_bytes` was taken and stored."""
        self._bytes = n_bytes
        self._snapshot.append(seconds)

    def restored(self, seconds: float, tokens: int) -> None:
        """A snapshot, and attention of so many tokens, was loaded and verified."""
        if tokens < LARGE_BATCH:
            self._restore.append(seconds)
        else:
            self._segment.append(max(0.0, seconds - _median(self._restore)) / tokens)

    def costs(self) -> Costs:
        """What is known now."""
        return Costs(
            token_seconds=self.token_seconds,
            prefill_seconds=_median(self._prefill),
            snapshot_seconds=fmean(self._snapshot) if self._snapshot else 0.0,
            restore_seconds=_least(self._restore),
            segment_seconds=_least(self._segment),
            snapshot_bytes=self._bytes,
            batch_tokens=self._batch_tokens,
        )


def _least(samples: deque[float]) -> float:
    """What it takes at best: a few slow samples must not end what would give better ones."""
    return min(samples) if len(samples) >= FEW else 0.0


def _median(samples: deque[float]) -> float:
    return median(samples) if samples else 0.0
