"""Drafts: tokens that are guessed, decoded in one batch with the next one, and taken back where wrong.

Upstream's `generate()` asks a `LlamaDraftModel` for a guess, hands it to `eval()` and samples each token
against it. `Drafts` stands between the two: it undoes wrong guesses and counts.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from llamahybrid.core.report import DraftCounts
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.restore import Rollback, Undo
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.speculation.draft_length import DraftLengthPolicy
from llamahybrid.speculation.model_draft import ModelDraft

USUAL = 10
"""Tokens that a draft model guesses which does not say how many (upstream's default)."""

NOTHING: npt.NDArray[np.intc] = np.empty(0, dtype=np.intc)


class Drafts(LlamaDraftModel):  # type: ignore[misc]
    """The draft model that `generate()` sees: asks the real one for drafts that pay and can be taken back."""

    def __init__(self, live: LiveSequence, meter: CostMeter, n_batch: int) -> None:
        self.model: LlamaDraftModel | None = None
        self.undo = Undo(live)
        self.policy = DraftLengthPolicy(meter)
        self.counts = DraftCounts()
        """Of the running request."""
        self._live = live
        self._n_batch = n_batch
        self._known = self._pending = self._longest = 0
        self._salt = live.identity.salt

    def begin(self, prompt: int) -> DraftCounts:
        """Start a request with a prompt of `prompt` tokens; return the counts of its drafts."""
        self.counts = DraftCounts()
        self._pending = 0
        self.undo.drop()
        self._known = prompt
        self._serve(self._live.identity.salt)
        self.policy.begin()
        return self.counts

    def _serve(self, salt: bytes) -> None:
        """Set the salt of the request; all that drafts have shown under another one is dropped."""
        if self._salt != salt:
            self._salt = salt
            self.policy.forget()
        if isinstance(self.model, ModelDraft):
            self.model.salt = salt

    def resume(self, counts: DraftCounts, prompt: int, known: int) -> None:
        """Continue a request after another one had its place: `known` tokens are certain."""
        self.begin(prompt)
        self.counts = counts
        self._known = known

    # -- for generate() --------------------------------------------------------------------------

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
        """Guess what follows `input_ids`, shape (n,), whose last is still to be decoded; shape (k,)."""
        clock = time.perf_counter()
        live, n = self._live, len(input_ids)
        self.confirm(n)
        at = live.n if live.n < n else self.undo.position  # a rejected draft is still there, to be undone
        owed = 0 if at is None else n - 1 - at
        room = min(live.capacity - n, self._n_batch - 1 - owed, self._limit, self._safe)
        # After many wrong guesses the certain tokens come first: else their number only grows.
        if room < 1 or owed > self._limit or not (length := self.policy.length(room)):
            return NOTHING
        behind = self.model.behind(input_ids) if isinstance(self.model, ModelDraft) else 0
        guess = self._ask(input_ids, length, kwargs)
        self.policy.asked(time.perf_counter() - clock, behind)
        self._pending = len(guess)
        self.counts.drafted += self._pending
        return guess

    def _ask(
        self, ids: npt.NDArray[np.intc], length: int, options: dict[str, object]
    ) -> npt.NDArray[np.intc]:
        """Return the draft model's guess, at most `length` tokens, up to the first id that is none."""
        assert self.model is not None, "generate() asks only where there is one"
        if isinstance(self.model, ModelDraft):
            self.model.at_most = length
        guess = np.asarray(self.model(ids, **options), dtype=np.int64).reshape(-1)
        self._longest = max(self._longest, len(guess))
        wrong = np.flatnonzero((guess < 0) | (guess >= self._live.n_vocab))
        return guess[: min(length, wrong[0] if wrong.size else length)].astype(np.intc)

    @property
    def _limit(self) -> int:
        """The most that can be expected of the draft model."""
        return max(self._longest, getattr(self.model, "num_pred_tokens", 0) or USUAL)

    @property
    def _safe(self) -> int:
        """Guessed tokens that can be taken back at all."""
        live = self._live
        if live.profile.cuttable:
            return live.capacity
        if live.state.opaque:  # content that was decoded natively is never in a snapshot
            return 0
        return live.capacity if live.profile.linear else live.planes.count

    # -- for eval() ------------------------------------------------------------------------------

    def prepare(self, unsure: int) -> None:
        """Prepare to decode tokens of which the last `unsure` may have to be taken back."""
        live = self._live
        live.planes.in_use = False
        if not unsure or live.profile.cuttable:
            return
        if live.planes.count < unsure:
            clock = time.perf_counter()
            self.undo.take()
            self.policy.undone(time.perf_counter() - clock)
        live.planes.in_use = True

    def go_back(self, n: int) -> bool:
        """Take back the tokens behind the first n; False if no exact way is known.

        Fewer than n may be left, to be decoded again.
        """
        clock = time.perf_counter()
        kind = self.undo.go_back(n)
        if kind == "snapshot":
            self.policy.undone(time.perf_counter() - clock)
            self.counts.redecoded += n - self._live.n
        if kind is not None:
            self._count(kind)
        return kind is not None

    def _count(self, kind: Rollback) -> None:
        rollbacks = self.counts.rollbacks
        rollbacks[kind] = rollbacks.get(kind, 0) + 1

    def confirm(self, known: int, over: bool = False) -> None:
        """Count the draft before, now that `known` tokens are certain, the last one sampled.

        `over`: the request ended, maybe before all of the draft was looked at.
        """
        self._live.planes.in_use = False
        gained, pending = known - self._known, self._pending
        accepted = min(max(gained - 1, 0), pending)
        self.counts.accepted += accepted
        if pending and not over and accepted < pending and self._live.n == known - 1:
            self._count("planes" if self._live.planes.pending else "cut")
        self.policy.account(gained, accepted if over else pending)
        self._known, self._pending = known, 0

    def end(self) -> None:
        """The request is over."""
        self.counts = DraftCounts()
        self._live.release_planes()


def asked_model() -> Any:
    """`draft_model` of `Llama`."""

    def get(llm: Any) -> LlamaDraftModel | None:
        """The draft model; inside a running request `Drafts`, which asks the model."""
        model: LlamaDraftModel | None = llm._draft_model
        inside = llm.requests.inside
        if model is None or not llm.slots.all or inside is None:
            return model
        return (
            None if len(llm.slots) > 1 else llm.slots.all[0].drafts
        )  # rollback planes hold the rows of others, too

    def put(llm: Any, model: LlamaDraftModel | None) -> None:
        llm._draft_model = model
        for slot in llm.slots:
            slot.drafts.model = model

    return property(get, put)
