"""The checkpoint rules of one request: what is stored, and when, as plain actions.

No memory, no cache and no clock are touched here. Whoever runs a request says what happens to it and carries
out what the schedule answers: `RequestRunner` on a context, the laboratory's fake engine and its replay of
traces on numbers. An answer is an iterator: a rule may go on from what its action came to, so carry out each
action before the next one is taken.

A *tip* is the end of the live sequence; positions and tips are token counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TypeAlias

from llamahybrid.prompt_cache.base import Costs, Plan
from llamahybrid.prompt_cache.placement import final_due, next_decode_checkpoint, recut, tip_due

NEVER = sys.maxsize
"""A position that no sequence gets to."""


class Action(Enum):
    """What is to be done at the tip."""

    CHECKPOINT = auto()
    """Store a checkpoint."""
    CHECKPOINT_IF_FINITE = auto()
    """The same, where the logits show that no NaN is in the state, which nobody has looked at since."""
    CHECKPOINT_WITH_LOGITS = auto()
    """The same with the logits, for a prompt that is asked again."""
    KEEP_LOGITS = auto()
    """Keep the logits alone, beside what is live: memory that can be cut anywhere needs no more for that."""
    STAGE = auto()
    """Copy the state, and keep the copy back until the prompt's logits prove to be numbers."""
    ADMIT_STAGED = auto()
    """Hand the copies that were kept back to the cache, in order."""
    REMEMBER = auto()
    """Tell the cache which tokens were decoded."""
    PAGE_OUT = auto()
    """Store the attention that checkpoints of this path need and that is not stored yet."""
    PAGE_OUT_LATER = auto()
    """The same once nobody waits for that, or what is live is about to go; now if others may ask for it."""


Actions: TypeAlias = Iterator[Action]


def gives_up_tip(plan: Plan, tip: int) -> bool:
    """Carrying out `plan` takes tokens of the live sequence away."""
    return plan.cached < tip or plan.source != "live"


def before_tip_goes(unstored: int) -> Actions:
    """The live tip is about to be given up: a chat goes on from its very tip, and that costs no batch.

    `unstored`: tokens behind the deepest checkpoint on its path. Only where a checkpoint can serve after
    another conversation was live.
    """
    if unstored:
        yield Action.CHECKPOINT_IF_FINITE
    yield Action.PAGE_OUT


def batch_borders(first: int, last: int, cuts: Sequence[int], n_batch: int) -> list[int]:
    """Where native batches of tokens [first, last) begin and end: at cuts, and no more than `n_batch` apart.

    A long stretch is cut on multiples of `n_batch`, so that cold and warm prompts have the same batches.
    """
    borders = [first, *(c for c in cuts if first < c < last), last]
    if last - first > n_batch:
        grid = range(first - first % n_batch + n_batch, last, n_batch)
        borders = sorted({*borders, *grid})
    return borders


def _one() -> int:
    return 1


class Schedule:
    """The checkpoints of one request, from its restore point to its end.

    The order of events: `begin`; `decoded` after each batch of the prompt, and `recut` where more batches
    follow; `prompt_done`; `before_token` for each batch of the answer from `next_due` on; `end`. In between
    `stored`, whenever the cache took a checkpoint.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        measured: Callable[[], Costs],
        *,
        together: Callable[[], int] = _one,
        wanted: bool = True,
        keeps_chats: bool = True,
        keeps_end: bool = False,
        stores_late: bool = False,
    ) -> None:
        """`costs`: those that `plan` was made by; `measured()`: what they are now.

        `together()`: answers that are decoded in one batch now.
        `wanted` False: memory that can be cut anywhere needs no checkpoints. `keeps_chats`: a tip that is
        given up is stored before (`before_tip_goes`). `keeps_end`: attention of memory that needs no
        checkpoints is stored all the same when a request is over, so that another process finds it.
        `stores_late`: attention is stored once what is live goes, and not at the end of each request.
        """
        self._stores_late = stores_late
        self._keeps_chats = keeps_chats
        self._keeps_end = keeps_end
        self.cuts = plan.cuts
        """Where the prompt is cut: as planned, then as what is measured meanwhile says."""
        self.next_due = 0 if wanted else NEVER
        """Position from which on `before_token` has something to say."""
        self._wanted = wanted
        self._total, self._cached = plan.total, plan.cached
        self._stored = plan.stored
        self._outline = plan.outline
        self._costs = costs
        self._measured = measured
        self._together = together
        self._last = 0

    def begin(self, tip: int) -> Actions:
        """The restore point is live; `tip` was the live one before.

        A turn begins where the sequence is extended: a message that is edited later diverges from there.
        """
        extends = self._cached == tip > 0 and tip_due(self._total - self._cached)
        if self._wanted and extends and not self._stored:
            yield Action.CHECKPOINT

    def decoded(self, position: int) -> Actions:
        """A batch of the prompt ended at `position`."""
        if position in self.cuts:
            yield Action.STAGE

    def recut(self, position: int) -> bool:
        """Choose the cuts behind `position` by the costs that batches have shown; True if they changed."""
        costs = self._measured()
        if self._outline is None or replace(costs, snapshot_bytes=self._costs.snapshot_bytes) == self._costs:
            return False
        self._costs = costs
        taken = tuple(c for c in self.cuts if c <= position)
        last = max(taken, default=self._cached)
        self.cuts = taken + recut(self._outline, position, costs, last)
        return True

    def prompt_done(self, position: int, logits: bool) -> Actions:
        """The prompt is decoded and proven; `logits`: those of its end are there."""
        if not self._wanted:
            if logits and self._cached < self._total:
                yield Action.KEEP_LOGITS
            return
        yield Action.ADMIT_STAGED
        if logits and self._cached < self._total:
            yield Action.CHECKPOINT_WITH_LOGITS
        self._await_next(position)

    def stop(self) -> None:
        """No checkpoint of this memory can be proven right: none is taken any more."""
        self._wanted = False
        self.next_due = NEVER

    def before_token(self, position: int) -> Actions:
        """Tokens of the answer are about to be decoded at `position`."""
        if position >= self.next_due:
            yield Action.CHECKPOINT_IF_FINITE
            self._await_next(position)

    def _await_next(self, position: int) -> None:
        self.next_due = next_decode_checkpoint(position, self._total, self._measured(), self._together())

    def stored(self, position: int) -> None:
        """The cache took a checkpoint of this request."""
        self._last = position

    def end(self, position: int, opaque: bool = False) -> Actions:
        """The request is over, however it ended; `opaque`: some of what is live is no prompt's tokens.

        An answer's end is stored whatever that costs where the next request would store it, too: that pays
        for it either way, but then somebody waits for a first token. Attention, which stays live, is not
        stored while others wait: their own ends come next, and a chat that goes on here never needs it.
        """
        yield Action.ADMIT_STAGED
        if opaque:
            return
        generated = position - max(self._last, self._total)
        due = generated > 0 if self._keeps_chats else final_due(generated, self._measured())
        if (self._wanted and due) or self._keeps_end:
            yield Action.CHECKPOINT_IF_FINITE
        yield Action.REMEMBER
        later = self._stores_late or self._measured().waiting
        yield Action.PAGE_OUT_LATER if later else Action.PAGE_OUT
