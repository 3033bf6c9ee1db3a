"""Runner: prompts of requests on the live sequence of one slot: plan, restore, decode, checkpoint.

The `Schedule` of a request decides where checkpoints go; the runner carries out its actions with the prompt
cache. All of it runs in the decode loop's thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from llamahybrid.capi.calls import Outputs
from llamahybrid.core.checkpoints import Boundaries, Checkpoints
from llamahybrid.core.report import Progress
from llamahybrid.core.request import Decode, Steps
from llamahybrid.core.schedule import Schedule, batch_borders, before_tip_goes, gives_up_tip
from llamahybrid.errors import SnapshotError
from llamahybrid.memory.costs import CostMeter
from llamahybrid.memory.restore import apply_plan
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.prompt_cache import PromptCache
from llamahybrid.prompt_cache.base import Costs, Plan, Segment, Tokens
from llamahybrid.prompt_cache.nodes import common_prefix
from llamahybrid.prompt_cache.placement import tip_due

MOST_RESTORES = 4
"""Most restores from stored attention that a request tries: a disk may return dropped records again."""

logger = logging.getLogger("llamahybrid")


class Runner:
    """Runs requests on one slot: plans, restores, takes checkpoints."""

    def __init__(
        self,
        live: LiveSequence,
        cache: PromptCache,
        boundaries: Boundaries,
        meter: CostMeter,
        n_batch: int,
    ) -> None:
        self.live = live
        self.cache = cache
        self.meter = meter
        self.others_waiting: Callable[[], int] = lambda: 0
        """Number of other requests that decode or wait for a slot."""
        self.is_awaited: Callable[[Tokens], bool] = lambda prompt: False
        """Other requests wait for the checkpoints of the prompt that is decoded now."""
        self._boundaries = boundaries
        self._n_batch = n_batch
        self.checkpoints = Checkpoints(live, cache, meter)
        self._warned: set[str] = set()

    def _costs(self) -> Costs:
        """Return the measured costs, with the number of waiting requests."""
        return replace(self.meter.costs(), waiting=self.others_waiting())

    # -- a request's start -----------------------------------------------------------------------

    def begin(self, prompt: Tokens, reuse_limit: int | None = None) -> Progress:
        """Plan a prompt, shape (n,), and restore its restore point, verified.

        A restore point that fails verification is dropped and the next best one is used, down to none.
        """
        started = time.perf_counter()
        plan_seconds = restore_seconds = 0.0
        self.checkpoints.settle()
        self.check()
        self._follow(prompt)
        profile, tip = self.live.profile, self.live.n
        needs_checkpoints = profile.needs_checkpoints
        boundaries = self._boundaries.find(prompt) if needs_checkpoints else []
        for attempt in itertools.count():
            clock = time.perf_counter()
            costs = self._costs()
            plan = self._plan(prompt, boundaries, reuse_limit, costs, paged=attempt < MOST_RESTORES)
            plan_seconds += time.perf_counter() - clock
            clock = time.perf_counter()
            try:
                if gives_up_tip(plan, tip):
                    self.save_tip(plan.live_kept if plan.segments else plan.cached)
                applied = self._apply(plan, prompt)
            finally:
                self.cache.release(plan)
            restore_seconds += time.perf_counter() - clock
            if applied:
                break
        keeps_end = profile.attention_is_all and self.cache.leaves_process
        meter = self.meter
        schedule = Schedule(
            plan,
            costs,
            self._costs,
            together=lambda: meter.together,
            wanted=needs_checkpoints,
            keeps_chats=profile.keeps_chats,
            keeps_end=keeps_end,
            stores_late=meter.reads_slowly or (profile.pager is not None and profile.pager.reads_whole),
        )
        progress = Progress(plan, schedule, started, plan_seconds, restore_seconds)
        self.checkpoints.carry_out(schedule.begin(tip), progress)
        return progress

    def _follow(self, prompt: Tokens) -> None:
        """Have the cache follow this prompt; tokens that were forgotten while live are zeroed."""
        live = self.live
        if live.state.opaque and not live.state.is_invalid and np.array_equal(live.tokens, prompt[: live.n]):
            return  # native content cannot be decoded again: it is continued, and not stored
        if live.state.foreign and 2 * common_prefix(live.tokens, prompt) < live.n:
            live.empty()  # else a prefix that all prompts share would keep it live, and nothing be stored
        while not self.cache.follow(self.checkpoints.known, prompt):
            live.shared.forget_undo()
            live.require_zeroing()
            live.empty()

    def stop_storing(self) -> None:
        """Continue the live tokens of a preempted request that was forgotten, without storing them."""
        self.checkpoints.known.forgotten = True

    def save_tip(self, stays: int = 0) -> None:
        """Store the live tip before it is given up, if a later request may resume from it.

        `stays`: tokens that remain live; where attention is all of the state, only the rest is stored now.
        """
        self.checkpoints.settle()
        profile, points = self.live.profile, self.checkpoints
        after = stays if profile.attention_is_all else 0
        few = profile.attention_is_all and not tip_due(self.live.n - stays)
        if few or not profile.keeps_chats or self.live.shared.touched_outside():
            return
        if stays and not points.worth_reading(self.live.n - stays):
            return
        goes = before_tip_goes(self.cache.unstored(points.view()))
        deep = points.owes_since is not None  # else `check` verified just now
        points.carry_out(goes, deep=deep, after=after)

    def serve(self, salt: bytes) -> None:
        """Give the slot to requests of a salt; live tokens of another salt are stored and removed."""
        live = self.live
        if live.n:
            self.check()
            if self.checkpoints.known.forgotten:
                live.require_zeroing()
            self.save_tip()
        live.empty()
        live.identity.serve(salt)

    def computed_under(self, salt: str) -> None:
        """Change the model's own salt (`Llama.cache_salt`)."""
        identity = self.live.identity
        identity.computed_by(replace(identity.computation, salt=salt))

    def share(self) -> None:
        """Store unstored attention of the live tokens, which another slot is about to load."""
        if self.live.shared.touched_outside() or self.live.fault() is not None:
            return  # `store` trusts the tip, which `check` verified when its own request began
        self.store(tip=self.live.profile.attention_is_all)

    def store(self, *, tip: bool = False) -> None:
        """Store unstored attention that checkpoints need, before the live tokens go.

        `tip`: also a checkpoint at the tip.
        """
        self.checkpoints.settle()
        live = self.live
        if live.n and live.profile.keeps_chats and not live.shared.touched_outside():
            if tip:
                self.save_tip()
            self.checkpoints.page_out(deep=True)

    def check(self) -> None:
        """Verify memory; empty the sequence after changes by other code."""
        live = self.live
        live.identity.verify_model()
        fault = live.shared.look() or (None if live.state.is_invalid else live.fault())
        if fault:
            self.warn(f"other code changed context memory ({fault}); starting from zero")
            live.empty()

    def warn(self, message: str) -> None:
        """Log a message once."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def _plan(
        self,
        prompt: Tokens,
        boundaries: Sequence[int],
        reuse_limit: int | None,
        costs: Costs,
        *,
        paged: bool = True,
    ) -> Plan:
        """`paged` False: without stored attention."""
        if not self.live.row.takes():
            reuse_limit = min(len(prompt) - 1, len(prompt) if reuse_limit is None else reuse_limit)
        view = self.checkpoints.view(reuse_limit)
        if not paged:
            view = replace(view, split=None, attention_is_all=False)
        return self.cache.plan(prompt, view, boundaries, costs)

    def _apply(self, plan: Plan, prompt: Tokens) -> bool:
        """Carry out a plan; False, with its checkpoint dropped, where the restore fails."""
        clock = time.perf_counter()
        damaged: object = None
        try:
            fault = apply_plan(self.live, plan, prompt)
        except SnapshotError as error:
            fault, damaged = str(error), error.segment
        if fault is None:
            if plan.checkpoint is not None or plan.segments:
                loaded = sum(s.end - s.start for s in plan.segments)
                self.meter.restored(time.perf_counter() - clock, loaded)
            return True
        self.live.empty()
        self.warn(f"restoring {plan.cached} tokens failed ({fault}); dropped")
        if isinstance(damaged, Segment):  # later checkpoints may be sound
            self.cache.drop_segment(damaged)
        elif plan.checkpoint is not None:
            self.cache.drop(plan.checkpoint)
        else:
            for segment in plan.segments:
                self.cache.drop_segment(segment)
        return False

    # -- decoding --------------------------------------------------------------------------------

    def decode(
        self,
        progress: Progress | None,
        tokens: Tokens,
        outputs: Outputs,
        note: Callable[[int, int], None] | None = None,
        *,
        alone: bool = False,
    ) -> Steps[None]:
        """Append tokens in native batches, with checkpoints where `progress` planned them.

        Calls `note(start, end)` after each batch while its output rows are live; `outputs` "last" asks for
        one row at the very end. Raises DecodeError, and RequestCancelled with every finished batch kept.
        """
        live = self.live
        prefilled = progress if progress is not None and progress.prefilling else None
        first, last = live.n, live.n + len(tokens)
        borders = batch_borders(first, last, prefilled.schedule.cuts if prefilled else (), self._n_batch)
        stoppable = progress is None or progress.prefilling
        start = first
        while start < last:
            end = next(border for border in borders if border > start)
            wanted: Outputs = outputs if outputs == "all" or end == last else "none"
            clock = time.perf_counter()
            part = tokens[start - first : end - first]
            try:
                end = start + (yield Decode(live, part, wanted, prompt=stoppable, alone=alone))
            finally:
                if prefilled is not None:
                    prefilled.prefill_seconds += time.perf_counter() - clock
            if prefilled is not None:
                prefilled.reach(end)
                self.checkpoints.carry_out(prefilled.schedule.decoded(end), prefilled)
                if end < last and prefilled.schedule.recut(live.n):
                    borders = batch_borders(first, last, prefilled.schedule.cuts, self._n_batch)
            if note is not None:
                note(start, end)
            start = end

    def prompt_done(self, progress: Progress) -> bool:
        """Verify a decoded prompt, and store its checkpoints; `Checkpoints.settle` stores its end.

        False where the logits are not numbers or memory has a fault: the restore point is then dropped, and
        the prompt must be decoded from zero.
        """
        progress.prefilling = False
        sound = self._prompt_done(progress)
        if sound and self.is_awaited(self.live.tokens):
            # Requests that wait for this prompt's checkpoints need their attention.
            self.checkpoints.settle()
            self.checkpoints.page_out(deep=False)
        return sound

    def _prompt_done(self, progress: Progress) -> bool:
        live = self.live
        if not live.profile.needs_checkpoints:
            progress.schedule.stop()  # in case another request learnt that this memory cannot be verified
            finite = live.profile.cuttable and live.profile.linear and live.row.proves_finite()
            self.checkpoints.carry_out(progress.schedule.prompt_done(live.n, finite), progress)
            return True
        logits = live.row.logits()
        if logits is not None and not bool(np.isfinite(logits).all()):
            self._reject(progress, "the model's logits are not finite numbers")
            return False
        if not live.learn_size_rule():
            self._reject(progress, "memory does not hold the decoded cells")
            return False
        if not live.profile.needs_checkpoints:  # learnt just now: this memory cannot be verified
            progress.staged.clear()
            progress.schedule.stop()
            return True
        actions = progress.schedule.prompt_done(live.n, logits is not None)
        self.checkpoints.carry_out(actions, progress, deep=False)  # `learn_size_rule` verified deeply
        return True

    def before_token(self, progress: Progress) -> None:
        """Take a checkpoint before a batch of the answer, where the schedule says so."""
        progress.steps += 1
        self.checkpoints.settle()
        if self.live.state.n >= progress.schedule.next_due:
            self._stop_unprovable(progress)
            self.checkpoints.carry_out(progress.schedule.before_token(self.live.n), progress)

    def end(self, progress: Progress) -> None:
        """Store the end of a request, where it is verified and worth its cost."""
        self.checkpoints.settle()
        live = self.live
        progress.drop_records()
        if progress.staged and live.fault() is not None:
            progress.staged.clear()
        self._stop_unprovable(progress)
        opaque = live.state.opaque  # true for invalid states, too
        self.checkpoints.carry_out(progress.schedule.end(live.n, opaque), progress)

    def _stop_unprovable(self, progress: Progress) -> None:
        """Stop checkpoints where another request learnt that this memory cannot be verified."""
        if not self.live.profile.needs_checkpoints:
            progress.schedule.stop()

    def _reject(self, progress: Progress, cause: str) -> None:
        """Drop the checkpoints of this request, and its restore point."""
        progress.staged.clear()
        if progress.plan.checkpoint is not None:
            self.cache.drop(progress.plan.checkpoint)
        self.warn(f"{cause}; memory is zeroed, and nothing of it is kept")
        self.live.require_zeroing()
