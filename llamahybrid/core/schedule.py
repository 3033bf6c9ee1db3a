"""Schedule: the checkpoint rules of one request, as events in and actions out.

The rules use no memory, cache or clock. `Runner` reports events and carries out the actions on a context; the
tests' fake engine and replay do so on numbers. Actions are iterators whose later steps may depend on earlier
results, so each action is carried out before the next one is taken.

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
"""A position that no sequence reaches."""


class Action(Enum):
    """An operation at the tip."""

    CHECKPOINT = auto()
    """Store a checkpoint."""
    CHECKPOINT_IF_FINITE = auto()
    """Store a checkpoint if the logits show that the state is free of NaN."""
    CHECKPOINT_WITH_LOGITS = auto()
    """Store a checkpoint with the logits, for a repeated prompt."""
    KEEP_LOGITS = auto()
    """Keep the logits alone: memory that can be cut anywhere needs no state for a repeated prompt."""
    STAGE = auto()
    """Copy the state, to be stored once the prompt's logits are finite."""
    ADMIT_STAGED = auto()
    """Hand the staged copies to the cache, in order."""
    REMEMBER = auto()
    """Tell the cache the decoded tokens."""
    PAGE_OUT = auto()
    """Store unstored attention that checkpoints of this path need."""
    PAGE_OUT_LATER = auto()
    """Store it once no request waits, or before the live tokens go; at once in a shared cache."""


Actions: TypeAlias = Iterator[Action]


def gives_up_tip(plan: Plan, tip: int) -> bool:
    """Carrying out `plan` removes tokens of the live sequence."""
    return plan.cached < tip or plan.source != "live"


def before_tip_goes(unstored: int) -> Actions:
    """Actions before the live tip is given up: a chat resumes there, and a checkpoint costs no batch.

    `unstored`: tokens behind the deepest checkpoint on its path. Only where checkpoints can be restored
    after another conversation was live.
    """
    if unstored:
        yield Action.CHECKPOINT_IF_FINITE
    yield Action.PAGE_OUT


def batch_borders(first: int, last: int, cuts: Sequence[int], n_batch: int) -> list[int]:
    """Return the borders of native batches of tokens [first, last): cuts, and no more than `n_batch` apart.

    Long ranges are split at multiples of `n_batch`, so that cold and warm prompts have the same batches.
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
        """`costs`: those of `plan`; `measured()`: the current ones.

        `together()`: answers in the current batch.
        `wanted` False: memory that can be cut anywhere needs no checkpoints. `keeps_chats`: a tip is stored
        before it is given up (`before_tip_goes`). `keeps_end`: attention of memory that needs no checkpoints
        is stored at the end of a request, for other processes. `stores_late`: attention is not stored at
        the end of each request, but once no request waits, or before the live tokens go.
        """
        self._stores_late = stores_late
        self._keeps_chats = keeps_chats
        self._keeps_end = keeps_end
        self.cuts = plan.cuts
        """Cuts of the prompt: as planned, later adapted to measured costs."""
        self.next_due = 0 if wanted else NEVER
        """Position of the next action of `before_token`."""
        self._wanted = wanted
        self._total, self._cached = plan.total, plan.cached
        self._stored = plan.stored
        self._outline = plan.outline
        self._costs = costs
        self._measured = measured
        self._together = together
        self._last = 0

    def begin(self, tip: int) -> Actions:
        """The restore point is live; `tip`: the live tip before.

        A new turn starts where the sequence is extended, and a message that is edited later differs there.
        """
        extends = self._cached == tip > 0 and tip_due(self._total - self._cached)
        if self._wanted and extends and not self._stored:
            yield Action.CHECKPOINT

    def decoded(self, position: int) -> Actions:
        """A batch of the prompt ended at `position`."""
        if position in self.cuts:
            yield Action.STAGE

    def recut(self, position: int) -> bool:
        """Choose the cuts behind `position` by measured costs; True if they changed."""
        costs = self._measured()
        if self._outline is None or replace(costs, snapshot_bytes=self._costs.snapshot_bytes) == self._costs:
            return False
        self._costs = costs
        taken = tuple(c for c in self.cuts if c <= position)
        last = max(taken, default=self._cached)
        self.cuts = taken + recut(self._outline, position, costs, last)
        return True

    def prompt_done(self, position: int, logits: bool) -> Actions:
        """The prompt is decoded and verified; `logits`: those of its end exist."""
        if not self._wanted:
            if logits and self._cached < self._total:
                yield Action.KEEP_LOGITS
            return
        self._await_next(position)
        yield Action.ADMIT_STAGED
        if logits and self._cached < self._total:
            yield Action.CHECKPOINT_WITH_LOGITS

    def stop(self) -> None:
        """Take no further checkpoints, since this memory cannot be verified."""
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
        """The request is over; `opaque`: the live sequence has natively decoded content.

        An answer's end is stored at any cost where the next request would store it: storing it now delays no
        first token. Attention stays live, and is not stored while other requests wait: a chat that continues
        in this slot never loads it.
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
