"""Drafts: tokens that are guessed, decoded in one batch with the next one, and taken back where wrong.

Upstream's `generate()` asks a `LlamaDraftModel` for a guess, hands it to `eval()` and samples each token
against it. Here is what stands between: how a wrong guess is undone, and what guesses came to.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from ..prompt_cache.base import Bytes
from .cost import CostMeter
from .pace import Pace
from .sequence import LiveSequence

Rollback: TypeAlias = Literal["cut", "planes", "snapshot"]
"""How tokens were taken back: attention was cut, a rollback plane became the state, or a snapshot was loaded
(the tokens behind it are then decoded again)."""

NOTHING: npt.NDArray[np.intc] = np.empty(0, dtype=np.intc)


@dataclass
class DraftCounts:
    """What one request's drafts came to."""

    drafted: int = 0
    """Guessed tokens that were decoded."""
    accepted: int = 0
    """Those that the model would have said itself."""
    rollbacks: dict[str, int] = field(default_factory=dict)


class PacedDraft(LlamaDraftModel):  # type: ignore[misc]
    """A draft model whose work grows with the tokens it guesses, and which can be asked for fewer."""

    at_most: int
    """Set before each call: more tokens than these are thrown away."""


class Undo:
    """The live sequence's state before tokens that may have to go again."""

    def __init__(self, live: LiveSequence) -> None:
        self._live = live
        self._record: Bytes = np.empty(0, dtype=np.uint8)
        self.position: int | None = None
        """Tokens of the state that is saved; None: there is none."""

    def take(self) -> None:
        """Save the tip's state, unless that is what was saved last."""
        live = self._live
        if self.position != live.n and live.profile.linear:
            self.position = None if live.snapshot(self._buffer) is None else live.n

    def drop(self) -> None:
        """What was saved is of no use any more."""
        self.position = None

    def go_back(self, n: int) -> Rollback | None:
        """Take back what lies behind the first n tokens; how, or None if no exact way is known.

        After "snapshot" fewer than n tokens may be left: the others must be decoded again.
        """
        live = self._live
        if live.cut(n):
            return "planes" if live.planes.pending else "cut"
        if self.position is None or self.position > n or live.is_junk:
            return None
        tokens, vouched = live.tokens[: self.position].copy(), live.vouched
        if live.restore(self._record, tokens) is not None:
            return None
        live.vouched = vouched  # the rows that are there came after this state
        return "snapshot"

    def _buffer(self, n_bytes: int) -> Bytes:
        if self._record.nbytes != n_bytes:
            self._record = np.empty(n_bytes, dtype=np.uint8)
        return self._record


class Drafts(LlamaDraftModel):  # type: ignore[misc]
    """What `generate()` gets as its draft model: the real one, asked for what pays and can be taken back."""

    def __init__(self, live: LiveSequence, meter: CostMeter, n_batch: int, n_ubatch: int) -> None:
        self.model: LlamaDraftModel | None = None
        self.undo = Undo(live)
        self.pace = Pace(meter)
        self.counts = DraftCounts()
        """Of the running request."""
        self._live = live
        self._n_batch = n_batch
        self._most_planes = n_ubatch - 2  # the library wants n_ubatch > n_rs_seq + 1
        self._start = self._known = self._pending = 0
        self._longest = 0

    def begin(self, prompt: int) -> DraftCounts:
        """A request starts, with a prompt of so many tokens; what will be counted of its drafts."""
        self.counts = DraftCounts()
        self._pending = 0
        self._start = self._known = prompt
        self.undo.drop()
        self.pace.begin()
        return self.counts

    # -- for generate() --------------------------------------------------------------------------

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
        """Guess what follows `input_ids`, shape (n,), whose last is still to be decoded; shape (k,)."""
        live, model = self._live, self.model
        n = len(input_ids)
        self.settle(n)
        at = live.n if live.n < n else self.undo.position  # a rejected draft is still there, to be undone
        owed = 0 if at is None else n - 1 - at
        room = min(live.capacity - n, self._n_batch - 1 - owed)
        if not live.profile.cuttable and not live.profile.linear:  # a snapshot cannot be verified here
            room = min(room, live.planes.count)
        most = self.pace.length(n - self._start, room, owed, self._free)
        if model is None or most < 1:
            return NOTHING
        if isinstance(model, PacedDraft):
            model.at_most = most
        clock = time.perf_counter()
        guess = np.asarray(model(input_ids, **kwargs), dtype=np.int64).reshape(-1)
        self.pace.asked(most if isinstance(model, PacedDraft) else 1, time.perf_counter() - clock)
        self._longest = max(self._longest, len(guess))
        wrong = np.flatnonzero((guess[:most] < 0) | (guess[:most] >= live.n_vocab))
        draft = guess[: wrong[0] if wrong.size else most].astype(np.intc)
        self._pending = len(draft)
        self.counts.drafted += len(draft)
        return draft

    @property
    def _free(self) -> int:
        """Guessed tokens that can be taken back without a snapshot."""
        return self._live.capacity if self._live.profile.cuttable else self._live.planes.count

    # -- for eval() ------------------------------------------------------------------------------

    def prepare(self, tokens: int, unsure: int) -> None:
        """`tokens` are decoded next, the last `unsure` of which may have to go again: see that they can."""
        live = self._live
        live.planes.held = False
        if not unsure or live.profile.cuttable:
            return
        if tokens > self._n_batch or not self._planes_for(unsure):
            clock = time.perf_counter()
            self.undo.take()
            self.pace.saved(time.perf_counter() - clock)
        live.planes.held = True

    def _planes_for(self, unsure: int) -> bool:
        """There are planes for so many tokens; some are bought where snapshots have cost as much by now."""
        planes = self._live.planes
        count = min(max(self._longest, unsure), self._most_planes)
        if planes.count < unsure <= count and planes.resizable and self.pace.planes_pay():
            clock = time.perf_counter()
            grown = planes.grow(count)
            self.pace.bought(time.perf_counter() - clock, grown)
        return planes.count >= unsure

    def decoded(self, tokens: int, seconds: float) -> None:
        """A batch of the answer took so long."""
        self.pace.decoded(tokens, seconds)

    def go_back(self, n: int) -> bool:
        """Take back what lies behind the first n tokens; False if no exact way is known.

        Fewer than n may be left, to be decoded again.
        """
        clock = time.perf_counter()
        kind = self.undo.go_back(n)
        if kind == "snapshot":
            self.pace.loaded(time.perf_counter() - clock, n - self._live.n)
        if kind is not None:
            self._count(kind)
        return kind is not None

    def _count(self, kind: Rollback) -> None:
        rollbacks = self.counts.rollbacks
        rollbacks[kind] = rollbacks.get(kind, 0) + 1

    def settle(self, known: int, over: bool = False) -> None:
        """`known` tokens are certain now, the last one sampled: what became of the draft before.

        `over`: the request ended, maybe before all of the draft was looked at.
        """
        gained, pending = known - self._known, self._pending
        accepted = min(max(gained - 1, 0), pending)
        self.counts.accepted += accepted
        if pending and not over and accepted < pending and self._live.n == known - 1:
            self._count("planes" if self._live.planes.pending else "cut")
        self.pace.settled(gained, pending, accepted, over)
        self._known, self._pending = known, 0

    def end(self) -> None:
        """The request is over."""
        self.counts = DraftCounts()
        self.undo.drop()
        self._live.settle()
