"""Measured costs of one context on this machine: decode, snapshot, restore.

Decisions must not change with the load of the machine, which only makes samples slower. So a cost is the
fastest recent sample, and a published cost stays until that sample differs by half.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from statistics import median

from llamahybrid.prompt_cache.base import Costs

WINDOW = 15
"""Number of recent samples of each cost."""

FEW = 3
"""Fewest samples for the cost of a restore or of a cut."""

LARGE_BATCH = 64
"""Fewest tokens of a batch that measures prefill per token."""

SMALL_BATCH = 8, 32
"""Fewest and most tokens of a batch that measures a cut: assumed sizes of batches near a prompt's end."""

NO_TIME = 1e-6
"""Smallest duration, in seconds: 0 means not measured."""

BAND = 1.5
"""Factor by which the fastest sample must differ from a published cost to replace it."""

SLOW_READ = 0.02
"""Seconds of reading attention at an answer's end from which its reader would notice the wait."""

FADE_SECONDS = 60.0
"""Half-life of the cost of a restore since the last one. Otherwise a machine that was busy during the first
few restores would never try another one on short chats."""


class CostMeter:
    """Steady costs from recent measurements; 0 before the first one.

    `snapshot_bytes`: size of a snapshot, where all have the same; `token_seconds`: a first sample of one
    token decoded alone.
    """

    def __init__(self, batch_tokens: int, snapshot_bytes: int = 0, token_seconds: float = 0.0) -> None:
        self.together = 1
        """Number of answers in the last batch."""
        self._said = Costs(batch_tokens=batch_tokens, snapshot_bytes=snapshot_bytes)
        self._token = deque([token_seconds] if token_seconds else [], WINDOW)
        self._prefill: deque[float] = deque(maxlen=WINDOW)
        self._batch: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._snapshot: deque[float] = deque(maxlen=WINDOW)
        self._restore: deque[float] = deque(maxlen=WINDOW)
        self._segment: deque[float] = deque(maxlen=WINDOW)
        self._restored = time.monotonic()
        self._read: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._read_at = time.monotonic()
        self._told: tuple[float, Costs] | None = None
        """The last result of `costs`, and the half-lives before it; None after a new measurement."""

    def decoded(self, tokens: int, seconds: float) -> None:
        """Note the duration of a native batch of `tokens`."""
        self._told = None
        if tokens == 1:
            self._token.append(seconds)
        elif tokens >= LARGE_BATCH:
            self._prefill.append(seconds / tokens)
        elif SMALL_BATCH[0] <= tokens <= SMALL_BATCH[1]:
            self._batch.append((tokens, seconds))

    @property
    def token_seconds(self) -> float:
        """Median duration of a token decoded alone; 0 before the first measurement."""
        return median(self._token) if self._token else self._said.token_seconds

    def saved(self, n_bytes: int, seconds: float) -> None:
        """Note the duration of taking and storing a snapshot of `n_bytes`."""
        self._told = None
        self._said = replace(self._said, snapshot_bytes=n_bytes)
        self._snapshot.append(seconds)

    def restored(self, seconds: float, tokens: int) -> None:
        """Note the duration of loading and verifying a snapshot and the attention of `tokens`."""
        self._restored, self._told = time.monotonic(), None
        if tokens < LARGE_BATCH:
            self._restore.append(seconds)
        else:
            alone = median(self._restore) if self._restore else 0.0
            self._segment.append(max(0.0, seconds - alone) / tokens)

    def read(self, seconds: float, tokens: int) -> None:
        """Note the duration of reading a whole sequence of `tokens`."""
        self._read.append((seconds, max(1, tokens)))
        self._read_at = time.monotonic()

    @property
    def read_seconds(self) -> float:
        """Seconds a token of reading a whole sequence, the fastest of at least `FEW`; 0 before.

        Halved for each `FADE_SECONDS` since the last one: a high cost prevents further samples.
        """
        times = _half_lives(self._read_at)
        costs = [seconds / tokens for seconds, tokens in self._read]
        return min(costs) * 0.5**times if len(costs) >= FEW else 0.0

    @property
    def reads_slowly(self) -> bool:
        """Reading attention takes `SLOW_READ` here, whatever its range: on a GPU without flash attention V
        is read row by row (src/llama-kv-cache.cpp, state_write_data)."""
        return len(self._read) >= FEW and min(self._read)[0] >= SLOW_READ

    def costs(self) -> Costs:
        """Return the costs measured so far."""
        told, times = self._told, _half_lives(self._restored)
        if told is None or told[0] != times:
            told = self._told = times, self._known_after(0.5**times)
        return told[1]

    def _known_after(self, fade: float) -> Costs:
        """Return the costs, those of restores multiplied by `fade`."""
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
        """Seconds that small batches took beyond their share of the fastest large one."""
        if not self._prefill:
            return []
        share = min(self._prefill)
        return [max(seconds - tokens * share, NO_TIME) for tokens, seconds in self._batch]


def _half_lives(since: float) -> float:
    """Half-lives since a time; 0 where the clock went back, as one that a program's tests have frozen."""
    return max(0.0, time.monotonic() - since) // FADE_SECONDS


def _steady(said: float, samples: Collection[float], least: int = 1) -> float:
    """Return the published cost `said`; the fastest of at least `least` samples if it differs by `BAND`."""
    if len(samples) < least:
        return said
    now = min(samples)
    return said if said / BAND <= now <= said * BAND and said else now


def _at_most(said: float, samples: Collection[float]) -> float:
    """As `_steady`, for a cost whose high values prevent further samples: a single lower one is enough."""
    if samples and min(samples) < said / BAND:
        return min(samples)
    return _steady(said, samples, FEW)
