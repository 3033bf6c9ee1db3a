"""One request's work on the live sequence: restore, prefill with checkpoints, decode on schedule, finish.

`Keeper` joins the live sequence to the prompt cache for the life of a context; a `Turn` is one request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from llamahybrid.capi.calls import Outputs
from llamahybrid.errors import DecodeError, SnapshotError
from llamahybrid.memory.costs import SMALL_BATCH, CostMeter
from llamahybrid.memory.remembered_costs import RememberedCosts
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache.base import Bytes, Costs, LiveState, LiveView, Logits, Plan, Segment, Tokens
from llamahybrid.prompt_cache.cache import PromptCache
from llamahybrid.prompt_cache.placement import final_due, next_decode_checkpoint, recut, tip_due
from llamahybrid.prompt_cache.ram import new_buffer
from llamahybrid.prompt_cache.selection import DIFFERS
from llamahybrid.request.boundaries import Boundaries
from llamahybrid.request.gate import RequestGate
from llamahybrid.request.report import RequestReport
from llamahybrid.speculation.drafts import DraftCounts

ABORTED = 2
"""Result of llama_decode when its abort callback said so (include/llama.h)."""

logger = logging.getLogger("llamahybrid")


@dataclass
class Turn:
    """A request from its plan to its end."""

    plan: Plan
    started: float
    costs: Costs = field(default_factory=Costs)
    """Those that `cuts` were chosen by."""
    cuts: tuple[int, ...] = ()
    """Where the prefill is cut: as planned, then as what is measured meanwhile says."""
    plan_seconds: float = 0.0
    restore_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    generated: int = 0
    last: int = -1
    """The last token handed out."""
    sent: bool = False
    """Its caller sent tokens of his own into the generator."""
    steps: int = 0
    """Batches the answer took."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    checkpoints: int = 0
    prefilling: bool = True
    cancelled: bool = False
    next_checkpoint: int = 0
    last_checkpoint: int = 0
    staged: list[tuple[int, Bytes]] = field(default_factory=list)
    """Checkpoints of this prefill, kept back until its logits prove to be numbers."""

    def report(self, spell: Callable[[int], str] = str, *, explain: bool = False) -> RequestReport:
        """The request so far; `spell` gives a token's text.

        `explain`: the text that the prompt parts from is spelt, too. It may be another user's.
        """
        plan, reason = self.plan, self.plan.reason
        if plan.differs is not None and reason.startswith(DIFFERS):
            new, old = map(spell, plan.differs)
            where, _, rest = reason.partition(";")
            reason = f"{where}: {new!r} was {old!r};{rest}" if explain else f"{where}, {new!r};{rest}"
        return RequestReport(
            total=self.plan.total,
            matched=self.plan.matched,
            cached=self.plan.cached,
            source=self.plan.source,
            reason=reason,
            generated=self.generated,
            steps=self.steps,
            drafted=self.drafts.drafted,
            accepted=self.drafts.accepted,
            redecoded=self.drafts.redecoded,
            rollbacks=dict(self.drafts.rollbacks),
            checkpoints=self.checkpoints,
            cancelled=self.cancelled,
            plan_seconds=self.plan_seconds,
            restore_seconds=self.restore_seconds,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=self.first_token_seconds,
        )

    def token(self, token: int) -> None:
        """A token is about to be handed out."""
        if self.generated == 0:
            self.first_token_seconds = time.perf_counter() - self.started
        self.generated += 1
        self.last = token


class Keeper:
    """Keeps a context's state worth keeping: plans, restores, takes checkpoints."""

    def __init__(
        self,
        live: LiveSequence,
        cache: PromptCache,
        boundaries: Boundaries,
        meter: CostMeter,
        gate: RequestGate,
        n_batch: int,
        remembered: RememberedCosts | None = None,
    ) -> None:
        self.live = live
        self._remembered = remembered
        self.cache = cache
        self.meter = meter
        self._boundaries = boundaries
        self._gate = gate
        self._n_batch = n_batch
        self._state = LiveState(lambda: live.tokens)
        self._warned: set[str] = set()
        self._batch_bytes: Bytes = np.empty(0, dtype=np.uint8)
        live.set_stop(gate.stop)

    # -- a request's start -----------------------------------------------------------------------

    def begin(self, prompt: Tokens, reuse_limit: int | None = None) -> Turn:
        """Plan a prompt, shape (n,), and bring the live sequence to the planned restore point, verified.

        What does not prove right is dropped and the next best taken, down to an empty sequence.
        """
        turn = Turn(plan=_nothing_planned(len(prompt)), started=time.perf_counter())
        self.check()
        self._follow(prompt)
        tip = self.live.n
        boundaries = self._boundaries.find(prompt) if self.live.profile.needs_checkpoints else []
        while True:
            clock = time.perf_counter()
            costs = self.meter.costs()
            plan = self._plan(prompt, boundaries, reuse_limit, costs)
            turn.plan_seconds += time.perf_counter() - clock
            clock = time.perf_counter()
            try:
                if plan.cached < tip or plan.source != "live":
                    self.leave()
                applied = self._apply(plan, prompt)
            finally:
                self.cache.release(plan)
            turn.restore_seconds += time.perf_counter() - clock
            if applied:
                break
        turn.plan, turn.cuts, turn.costs = plan, plan.cuts, costs
        extends = plan.cached == tip > 0 and tip_due(plan.left)
        if extends and not plan.stored and self.live.profile.needs_checkpoints:
            self.checkpoint(turn)
        return turn

    def _follow(self, prompt: Tokens) -> None:
        """Have the cache follow this request; what was forgotten while it was live goes, bytes and all."""
        live = self.live
        if live.opaque and not live.is_junk and np.array_equal(live.tokens, prompt[: live.n]):
            return  # native content cannot be decoded again: it goes on, and nothing of it is stored
        while not self.cache.follow(self._state, prompt):
            self._batch_bytes = np.empty(0, dtype=np.uint8)
            live.taint()
            live.empty()

    def store_nothing(self) -> None:
        """What is live belongs to a request that was forgotten while it waited: it goes on, unstored."""
        self._state.forgotten = True

    def leave(self) -> None:
        """The live tip is about to be given up: keep what is worth coming back to."""
        if not self.live.keeps_chats:
            return
        if self.cache.unstored(self._view()):  # a chat goes on from its very tip; it costs no batch
            self._checkpoint_if_finite(None, deep=False)  # `check` has looked, right before
        self._page_out(deep=False)

    def _page_out(self, *, deep: bool = True) -> None:
        """Store the attention that the live sequence's checkpoints need, where it is not stored yet."""
        view = self._view()
        for start, end in self.cache.missing(view):
            segment = self.live.page_out(start, end, partial(self.cache.room, view), deep=deep)
            if segment is None or not self.cache.keep(view, segment):
                break
        self.cache.settle(view)

    def check(self) -> None:
        """Compare memory with what is believed; what was changed by others is not trusted again."""
        live = self.live
        live.verify_model()
        if live.touched_outside():
            fault: str | None = "another caller decoded on this context"
        else:
            fault = None if live.is_junk else live.fault()
        if fault:
            self.warn(f"context memory was changed behind our back ({fault}); starting from zero")
            live.empty()

    def warn(self, message: str) -> None:
        """Log a message once in this object's life."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def _plan(self, prompt: Tokens, boundaries: Sequence[int], reuse_limit: int | None, costs: Costs) -> Plan:
        if not self.live.can_take_logits():
            reuse_limit = min(len(prompt) - 1, len(prompt) if reuse_limit is None else reuse_limit)
        return self.cache.plan(prompt, self._view(reuse_limit), boundaries, costs)

    def _view(self, reuse_limit: int | None = None) -> LiveView:
        """The live sequence as the cache needs to know it."""
        return replace(self.live.view(reuse_limit), state=self._state)

    def _apply(self, plan: Plan, prompt: Tokens) -> bool:
        """Carry out a plan; False when it did not prove right (its checkpoint is then forgotten)."""
        clock = time.perf_counter()
        damaged: object = None
        try:
            fault = self.live.apply(plan, prompt)
        except SnapshotError as error:
            fault, damaged = str(error), error.segment
        if fault is None:
            if plan.checkpoint is not None:
                loaded = sum(s.end - s.start for s in plan.segments)
                self.meter.restored(time.perf_counter() - clock, loaded)
            return True
        self.warn(f"restoring {plan.cached} tokens failed ({fault}); dropped")
        if isinstance(damaged, Segment):  # the checkpoints behind it may be sound
            self.cache.drop_segment(self.live.fingerprint.hex(), damaged)
        elif plan.checkpoint is not None:
            self.cache.drop(plan.checkpoint)
        self.live.empty()
        return False

    # -- decoding --------------------------------------------------------------------------------

    def decode(self, turn: Turn | None, tokens: Tokens, outputs: Outputs) -> Iterator[tuple[int, int]]:
        """Append tokens, cut into native batches, with checkpoints where `turn` planned them.

        Yields (start, end) after each batch while its output rows are live; `outputs` "last" asks for one
        row at the very end. Raises DecodeError, and RequestCancelled with every finished batch kept.
        """
        live = self.live
        prefilled = turn if turn is not None and turn.prefilling else None
        first, last = live.n, live.n + len(tokens)
        stops = self._stops(first, last, prefilled.cuts if prefilled else ())
        began = time.perf_counter()
        try:
            start = first
            while start < last:
                end = next(stop for stop in stops if stop > start)
                wanted: Outputs = outputs if outputs == "all" or end == last else "none"
                self._gate.check()
                clock = time.perf_counter()
                self._decode_batch(turn, tokens[start - first : end - first], wanted)
                if prefilled is not None:
                    self._measure(end - start, clock)
                    if end in prefilled.cuts:
                        self._stage(prefilled)
                    if end < last and self._recut(prefilled):
                        stops = self._stops(first, last, prefilled.cuts)
                yield start, end
                start = end
        finally:
            live.recount()  # waits for queued computation
        seconds = time.perf_counter() - began
        if prefilled is None and len(tokens) <= self._n_batch:
            self.meter.decoded(len(tokens), seconds)
        if turn is not None and turn.prefilling:
            turn.prefill_seconds += seconds

    def _measure(self, tokens: int, clock: float) -> None:
        """Note what a prompt's batch took that began at `clock`; the next one's undo waits for it anyway."""
        if tokens >= SMALL_BATCH[0] and self.live.profile.needs_checkpoints:
            self.live.recount()
            self.meter.decoded(tokens, time.perf_counter() - clock)

    def _recut(self, turn: Turn) -> bool:
        """Choose the cuts still to come by costs that the batches so far have shown; True if they changed."""
        costs, outline = self.meter.costs(), turn.plan.outline
        if outline is None or replace(costs, snapshot_bytes=turn.costs.snapshot_bytes) == turn.costs:
            return False
        turn.costs = costs
        n = self.live.n
        turn.cuts = tuple(c for c in turn.cuts if c <= n) + recut(outline, n, costs)
        return True

    def _decode_batch(self, turn: Turn | None, tokens: Tokens, outputs: Outputs) -> None:
        """Decode one native batch; one of a prompt may be stopped inside, and then all before it is kept.

        A single token, or a draft, is never stopped inside: it takes little time, and its undo would have to
        be taken for every one.
        """
        live = self.live
        if len(tokens) == 1 or (turn is not None and not turn.prefilling):
            live.decode(tokens, outputs)
            return
        undo = live.n, self._before_batch(turn)
        self._gate.stop.arm(True)
        try:
            live.decode(tokens, outputs)
        except BaseException as error:
            if live.is_junk:
                live.recover(undo)
            if isinstance(error, DecodeError) and error.code == ABORTED:
                self._gate.check()
            raise
        finally:
            self._gate.stop.arm(False)

    def _before_batch(self, turn: Turn | None) -> Bytes | None:
        """The state before a batch, where memory cannot be cut back to it."""
        live = self.live
        if not live.profile.needs_checkpoints:
            return None
        if turn is not None and turn.staged and turn.staged[-1][0] == live.n:
            return turn.staged[-1][1]
        return live.snapshot(self._batch_buffer, deep=False)

    def _batch_buffer(self, n_bytes: int) -> Bytes:
        if self._batch_bytes.nbytes != n_bytes:
            self._batch_bytes = new_buffer(n_bytes)
        return self._batch_bytes

    def append(self, token: int) -> None:
        """Append one token and ask for its logits: `decode` without its machinery.

        Raises RequestCancelled before it is decoded.
        """
        self._gate.check()
        clock = time.perf_counter()
        try:
            self.live.decode((token,), "last")
        finally:
            self.live.recount()  # waits for queued computation
        self.meter.decoded(1, time.perf_counter() - clock)

    def _stops(self, first: int, last: int, cuts: Sequence[int]) -> list[int]:
        """Batch borders: the planned cuts; long stretches on multiples of n_batch, cold and warm alike."""
        stops = [first, *(c for c in cuts if first < c < last), last]
        if last - first > self._n_batch:
            grid = range(first - first % self._n_batch + self._n_batch, last, self._n_batch)
            stops = sorted({*stops, *grid})
        return stops

    def prompt_done(self, turn: Turn) -> bool:
        """The prompt is decoded: keep its checkpoints and its end, with logits.

        False when the logits are not numbers, or memory is not what it should be: everything this request
        rested on is then forgotten, and the prompt must be decoded from zero.
        """
        turn.prefilling = False
        live = self.live
        if not live.profile.needs_checkpoints:
            return True
        logits = live.logits()
        if logits is not None and not bool(np.isfinite(logits).all()):
            self._forget(turn, "the model's logits are not finite numbers")
            return False
        if not live.learn_size_rule():
            self._forget(turn, "memory holds other cells than were decoded")
            return False
        if not live.profile.needs_checkpoints:  # learnt just now: this memory cannot be verified
            turn.staged.clear()
            return True
        self.keep_staged(turn)
        if logits is not None and turn.plan.cached < turn.plan.total:
            self.checkpoint(turn, logits.copy())
        turn.next_checkpoint = next_decode_checkpoint(live.n, turn.plan.total, self.meter.costs())
        return True

    def before_token(self, turn: Turn) -> None:
        """Generated tokens are about to be decoded: checkpoint what is there if the schedule says so."""
        turn.steps += 1
        if self.live.profile.needs_checkpoints and self.live.n >= turn.next_checkpoint:
            self._checkpoint_if_finite(turn)
            turn.next_checkpoint = next_decode_checkpoint(self.live.n, turn.plan.total, self.meter.costs())

    def end(self, turn: Turn) -> None:
        """The request is over, however it ended: keep what can be proven and is worth it."""
        live = self.live
        # A report outlives its request; the bytes that it began with are the cache's again.
        turn.plan = replace(turn.plan, checkpoint=None, logits=None, segments=())
        if turn.staged and live.fault() is not None:
            turn.staged.clear()
        self.keep_staged(turn)
        if live.opaque:  # junk is, too
            return
        if live.profile.needs_checkpoints:
            since = live.n - max(turn.last_checkpoint, turn.plan.total)
            if final_due(since, self.meter.costs()):
                self._checkpoint_if_finite(turn)
        self.cache.remember(live.namespace, live.tokens.copy(), self._state)
        self._page_out()
        if self._remembered is not None:
            self._remembered.save(self.meter.costs())

    def depth(self, prompt: Tokens) -> int:
        """Tokens of a prompt that a request would not have to decode now; changes nothing, reads no disk."""
        return self.cache.peek(prompt, self._view(), self.meter.costs())

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(self, turn: Turn | None, logits: Logits | None = None, *, deep: bool = True) -> bool:
        """Take and store a checkpoint at the tip; False if it cannot be vouched for or does not fit."""
        clock = time.perf_counter()
        record = self.live.snapshot(self.cache.buffer, deep=deep)
        if record is None:
            return False
        position = self.live.n
        kept = self.cache.admit(self._view(), position, record, logits)
        self.meter.saved(record.nbytes, time.perf_counter() - clock)
        if turn is not None and kept:
            turn.last_checkpoint = position
            turn.checkpoints += 1
        return kept

    def _checkpoint_if_finite(self, turn: Turn | None, *, deep: bool = True) -> None:
        if self.live.is_finite():
            self.checkpoint(turn, deep=deep)

    def _stage(self, turn: Turn) -> None:
        clock = time.perf_counter()
        record = self.live.snapshot(self.cache.buffer, deep=False)
        if record is not None:
            turn.staged.append((self.live.n, record))
            self.meter.saved(record.nbytes, time.perf_counter() - clock)

    def keep_staged(self, turn: Turn) -> None:
        """Hand this prefill's checkpoints to the cache."""
        if turn.staged:
            view = self._view()
            for position, record in turn.staged:
                if position <= len(view.tokens) and (view.tokens[:position] >= 0).all():
                    turn.checkpoints += self.cache.admit(view, position, record)
            turn.staged.clear()

    def _forget(self, turn: Turn, cause: str) -> None:
        turn.staged.clear()
        if turn.plan.checkpoint is not None:
            self.cache.drop(turn.plan.checkpoint)
        self.warn(f"{cause}; memory is zeroed and nothing of it kept")
        self.live.taint()


def _nothing_planned(total: int) -> Plan:
    return Plan(total=total, matched=0, cached=0, source="none", checkpoint=None, logits=None)
