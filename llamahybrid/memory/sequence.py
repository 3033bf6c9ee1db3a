"""LiveSequence: every change to what a context holds; after each the belief is checked against the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from llamahybrid.capi.calls import Outputs
from llamahybrid.capi.shim import NOT_RUN, Stop
from llamahybrid.errors import DecodeError, SnapshotError
from llamahybrid.memory.paging import open_segment, seal_segment
from llamahybrid.memory.snapshot import HEADER_BYTES, open_snapshot, seal
from llamahybrid.memory.state import Belief, common_prefix, unknown_ids
from llamahybrid.prompt_cache.base import Bytes, Logits, Plan, Segment, Tokens

UNCHANGED_BY_FAILURE = frozenset({1, -1})
"""Results of llama_decode that leave memory as it was: no slot found, invalid batch (include/llama.h)."""


class LiveSequence(Belief):
    """Sequence 0 of one context: its tokens, and every operation on its memory."""

    # -- content that others put there ---------------------------------------------------------------

    def adopt_native(self, n: int) -> bool:
        """Take content that other code decoded as an opaque range [self.n, n); False if it is not there.

        `n` counts positions, as chat handlers set `n_tokens` after an image (M-RoPE images take fewer
        positions than cells, so the size rule starts anew from what is measured).
        """
        if self.is_junk or n > self.capacity:
            return False
        if not self._n <= self._native.positions()[1] < n:
            return False
        for i in range(self._n, n):
            self._ids[i] = next(unknown_ids)
        self._lag = n - 1 - self._native.positions()[1]
        self._n = n
        self.planes.void()
        self.vouched = False
        self._grown = False
        self._extra_bytes = self._attention_bytes() - self.profile.predicted_size(n)
        self.tip_logits = False
        self.recount()
        return True

    def adopt_tokens(self, ids: npt.NDArray[np.integer]) -> str | None:
        """Believe `ids` after a whole state was loaded; the fault if memory does not bear it out.

        Ids below zero stand for opaque content, whose cells are taken as they are.
        """
        self._set(ids)
        self.planes.void()
        self._grown = False
        self._extra_bytes = 0
        if self.opaque:
            self._extra_bytes = self._attention_bytes() - self.profile.predicted_size(self._n)
        self.tip_logits = False
        self.recount()
        fault = self.fault()
        if fault:
            self.empty()
        return fault

    # -- decoding ------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> None:
        """Append tokens, shape (k,), in one native batch; `recount` when a series of them is done.

        Raises DecodeError when the library refuses or fails; the sequence then keeps what can be proven.
        """
        named = self.fingerprint
        try:
            self._native.decode(tokens, self._n, outputs)
        except DecodeError as error:
            self._after_failure(error.code)
            raise
        except BaseException:
            self._after_interrupt(tokens, outputs)
            raise
        fault = self._decoded(tokens, outputs)
        if named is not self.fingerprint:  # another thread has changed what computes
            self._disown()
        if fault:
            raise DecodeError(0, f"context memory is not what it should be after a decode: {fault}")

    def set_stop(self, stop: Stop) -> None:
        """Let `stop`, while it is armed, end decodes from inside, where the library can.

        Once, before anybody else sets an abort callback of their own: theirs then counts.
        """
        self._native.set_stop(stop)

    def recover(self, undo: tuple[int, Bytes | None]) -> bool:
        """Go back to before a batch that was stopped inside, as `undo` of then says; False if not proven.

        `undo`: tokens there were, and a snapshot of that state where the memory cannot be cut.
        """
        position, record = undo
        if record is not None:
            return self.restore(record, self._ids[:position].copy()) is None
        if not self.cut(position) or self.fault() is not None:
            self._mark_junk()
            return False
        return True

    def _decoded(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> str | None:
        """Believe a batch the library says it decoded; the fault (and junk) if memory says otherwise."""
        end = self._n + len(tokens)
        # What an interrupt between these lines leaves must say too little: planes and logits come first.
        self.tip_logits = self.vouched = False
        self.planes.wrote(len(tokens))
        self._lag = 0
        self._ids[self._n : end] = tokens
        self._n = end
        fault = self.fault(deep=False)
        if fault:
            self._mark_junk()
        else:
            self.tip_logits = self.vouched = outputs != "none"
        return fault

    def _after_interrupt(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> None:
        """An exception came out of a decode: keep what its result, if it left one, and memory bear out."""
        result = self._native.last_result()
        self.recount()
        if result == 0:
            self._decoded(tokens, outputs)
        elif result == NOT_RUN and self.fault() is None:
            return
        else:  # whether the batch finished cannot be told, or it did not
            self._mark_junk()

    def _after_failure(self, code: int) -> None:
        """A decode was refused or failed: keep the tip only if memory still bears it out."""
        had_logits = self.tip_logits
        self.tip_logits = self.vouched = False
        self.recount()
        if code not in UNCHANGED_BY_FAILURE or self.fault() is not None:
            self._mark_junk()
        elif code == -1:
            self.tip_logits = self.vouched = had_logits

    # -- cutting -------------------------------------------------------------------------------------

    def cut(self, position: int) -> bool:
        """Remove the tail [position, n); False, with nothing changed, where memory cannot do it exactly."""
        if position == 0:
            if self._n:
                self.empty()
            return True
        if position >= self._n:
            return position == self._n
        if position < self.profile.cut_floor(self._n, self._native.positions()[0]):
            return self._roll_back(position)
        had_logits, self.tip_logits = self.tip_logits, False
        if not self._native.cut(position):
            self.tip_logits = had_logits
            return False
        self._n = position
        self._lag = 0
        return True

    def _roll_back(self, position: int) -> bool:
        """Take the last tokens back through a rollback plane that the ledger says is of this history."""
        if self._n - position > self.planes.reach or self.opaque or self.touched_outside():
            return False
        self.tip_logits = False
        self.planes.used()
        if not self._native.cut(position):
            self.planes.void()
            return False
        self._n = position
        if self.fault(deep=False) is not None:
            self._mark_junk()
            return False
        return True

    def settle(self) -> None:
        """Nothing is drafted any more: planes that were grown go, and a rollback through one is made good.

        A copy of a sequence whose rollback is pending is wrong (src/llama-memory-recurrent.cpp:206), so the
        state goes out and comes back in as the current one.
        """
        self.planes.held = False
        self.planes.shed()
        if self.planes.pending and not self.is_junk:
            state = np.empty(self._native.state_size(partial=True), dtype=np.uint8)
            saved = self._native.save_partial(state) is not None
            if not saved or not self._native.load_partial(state) or self.fault() is not None:
                self._mark_junk()
        self.planes.void()

    def empty(self) -> None:
        """Forget everything; buffers are zeroed only when something in them is not to be trusted."""
        self.tip_logits = self.vouched = False
        removed = not self._tainted and self._native.cut(0) and self._native.positions() == (-1, -1)
        if not removed:
            self._native.clear()
            self._ids[:] = 0
        self._n = 0
        self._lag = 0
        self._extra_bytes = 0
        self._tainted = False
        self._grown = True
        self.planes.void()
        self.recount()

    # -- saving --------------------------------------------------------------------------------------

    def snapshot_bytes(self) -> int:
        """Size of a snapshot record of the tip, envelope included."""
        return HEADER_BYTES + self._partial_bytes()

    def snapshot(self, buffer: Callable[[int], Bytes], *, deep: bool = True) -> Bytes | None:
        """Save the tip's state as a sealed record; None when it cannot be vouched for.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill. `deep` as in `fault`: False is for a
        record that is used only after a deep look at what was decoded on top of it.
        """
        self.planes.shed()
        self.verify_model()
        if self._n == 0 or self.opaque or self.fault(deep=deep) is not None:
            return None
        record = buffer(self.snapshot_bytes())
        payload = record[HEADER_BYTES:]
        checksum = self._native.save_partial(payload)
        if checksum is None:
            return None
        seal(
            record,
            fingerprint=self.fingerprint,
            tokens=self.tokens,
            positions=self._native.positions(),
            checksum=checksum,
        )
        return record

    def page_out(
        self, start: int, end: int, buffer: Callable[[int], Bytes | None], *, deep: bool = True
    ) -> Segment | None:
        """Save the attention KV of [start, end) as a sealed segment; None when it cannot be vouched for.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill, or None: then nothing is saved. `deep` as
        in `fault`: False is for right after a deep look.
        """
        pager = self.profile.pager
        if self.planes.held:
            return None
        self.settle()
        self.verify_model()
        if pager is None or end > self._n or self.opaque or self.fault(deep=deep) is not None:
            return None
        saved = pager.save(start, end, buffer)
        if pager.moves_cells and self.fault() is not None:
            self._mark_junk()
            return None
        if saved is None:
            return None
        record, checksum = saved
        return seal_segment(record, self.fingerprint, self._ids[:end], start, checksum)

    # -- restoring -----------------------------------------------------------------------------------

    def restore(
        self, record: Bytes, tokens: Tokens, segments: Sequence[Segment] = (), kept: int = 0
    ) -> str | None:
        """Go to the state saved in `record`, that of `tokens` (shape (c,)); the fault if it failed.

        Attention KV of [0, c) must be live, or `segments` bring it behind the first `kept` live tokens.
        The order matters: cut to what stays, append, load, cut the tail, verify. Until that is through the
        sequence believes nothing, the old tokens least of all: whatever leaves here early, a fault or an
        interrupt, leaves it so, and it must be emptied.

        Raises SnapshotError, with nothing changed, when the record or a segment may not be used here.
        """
        if not self.profile.linear:
            raise SnapshotError(
                "a restore cannot be verified in this memory: its size follows no rule we know"
            )
        named = self.fingerprint
        info = open_snapshot(record, fingerprint=named, tokens=tokens)
        position = info.position
        payloads = [open_segment(s, self.fingerprint, tokens[: s.end]) for s in segments]
        pager = self.profile.pager
        sizes = [0 if pager is None else pager.layout.size(s.end - s.start) for s in segments]
        if sizes != [p.nbytes for p in payloads]:
            raise SnapshotError("a segment has another layout than this context's")
        if self.profile.needs_attention:
            starts = [*(s.start for s in segments), position]
            ends = [kept, *(s.end for s in segments)] if segments else [position]
            if starts != ends or common_prefix(self.tokens, tokens) < ends[0]:
                raise SnapshotError(f"attention of [0, {position}) is neither live nor stored")
        self.settle()
        self.distrust()
        if payloads:
            fault = self._page_in(payloads, kept)
            if fault:
                return fault
        if not self._native.load_partial(info.payload):
            return f"the library did not read all of {info.payload.nbytes} snapshot bytes"
        if not self._native.cut(position):
            return f"the library refused to cut at {position} after a restore"
        self._set(tokens)
        self._grown = False
        self._extra_bytes = 0
        fault = self.fault()
        if fault is None and self._native.state_size(partial=True) != info.payload.nbytes:
            fault = "the restored state has another size than its snapshot"
        if named is not self.fingerprint:
            fault = "another thread has changed what computes"
        if fault:
            self.distrust()
        return fault

    def apply(self, plan: Plan, tokens: Tokens) -> str | None:
        """Make the sequence `tokens[: plan.cached]` as planned; the fault if memory does not bear it out.

        Raises SnapshotError when the plan's snapshot or a segment may not be used here (nothing changed).
        """
        if plan.cached == 0:
            self.empty()
            return None
        if plan.checkpoint is not None:
            prefix = tokens[: plan.cached]
            fault = self.restore(plan.checkpoint.snapshot, prefix, plan.segments, plan.kept)
        else:
            fault = None if self.cut(plan.cached) else f"the library refused to cut at {plan.cached}"
            fault = fault or self.fault()
        if fault is None and plan.logits is not None and not self.put_logits(plan.logits):
            fault = "the context has no output row to put stored logits into"
        return fault

    def put_logits(self, logits: Logits) -> bool:
        """Put stored logits of the tip where the sampler reads them, so that it runs as ever.

        False when the context has no output row (`can_take_logits`).
        """
        row = self._native.logits(self.n_vocab)
        if row is None:
            return False
        row[:] = logits
        self.tip_logits = self.vouched = True
        return True

    def _page_in(self, payloads: Sequence[Bytes], kept: int) -> str | None:
        """Put stored attention behind the first `kept` live tokens; the fault if it failed."""
        pager = self.profile.pager
        assert pager is not None, "segments were checked against it"
        pager.keep_attention(kept)
        return None if pager.append(payloads) else "the library refused stored attention"
