"""LiveSequence: what the context holds now, and the only place where that changes.

It believes a list of tokens and checks the belief against the memory after every operation. Whatever
cannot be proven right is marked as *junk* (an id that no prompt contains), so that nothing built on it
is ever reused; the next alignment cuts or restores below it, or clears.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import DecodeError, SnapshotError
from ..native import NOT_RUN, Stop
from ..prompt_cache.base import Bytes, LiveView, Logits, Plan, Segment, Tokens
from .memory import MemoryProfile
from .native_calls import NativeContext, Outputs
from .paging import Splitter, open_segment, seal_segment
from .snapshot import HEADER_BYTES, open_snapshot, seal

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaContext

JUNK = int(np.iinfo(np.int32).min)
_unknown_ids = itertools.count(-1, -1)

UNCHANGED_BY_FAILURE = frozenset({1, -1})
"""Results of llama_decode that leave memory as it was: no slot found, invalid batch (include/llama.h)."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two id arrays."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


class LiveSequence:
    """Sequence 0 of one context: its tokens, and every operation on its memory."""

    def __init__(
        self, ctx: LlamaContext, profile: MemoryProfile, *, fingerprint: bytes, capacity: int, n_vocab: int
    ) -> None:
        """`fingerprint`: 16 bytes naming what stored state is valid for; `capacity`: tokens, n_ctx."""
        self.profile = profile
        self.fingerprint = fingerprint
        self.capacity = capacity
        self.n_vocab = n_vocab
        self.tip_logits = False
        self._native = NativeContext(ctx)
        self._ids: Tokens = np.zeros(capacity + 1, dtype=np.int32)
        self._n = 0
        self._lag = 0
        self._extra_bytes = 0
        self._tainted = False
        pager = profile.pager
        self._splitter = Splitter(pager.layout, fingerprint) if pager is not None else None
        self._grown = True  # by our own decodes alone, since it was empty
        self._counters = self._native.counters()

    # -- what is believed ------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Tokens in the sequence."""
        return self._n

    @property
    def tokens(self) -> Tokens:
        """The ids, shape (n,); negative where content is unknown. A view: copy to keep."""
        return self._ids[: self._n]

    @property
    def is_junk(self) -> bool:
        """The state at the tip is not to be used: an operation did not finish, or was not ours."""
        return self._n > 0 and bool(self._ids[self._n - 1] == JUNK)

    @property
    def opaque(self) -> bool:
        """Part of the sequence was decoded natively (an image, audio) or is not known."""
        return bool((self.tokens < 0).any())

    def holds(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is sound and is exactly `ids`, opaque positions aside."""
        return self._n == len(ids) and self.starts_with(ids)

    def starts_with(self, ids: npt.NDArray[np.integer]) -> bool:
        """The sequence is sound and begins with `ids`, opaque positions aside."""
        if self._n < len(ids) or self.is_junk:
            return False
        own = self._ids[: len(ids)]
        return bool(np.array_equal(own, ids) or np.all((own == ids) | (own < 0)))

    def view(self, reuse_limit: int | None = None) -> LiveView:
        """The sequence as the prompt cache needs to know it (tokens are copied)."""
        return LiveView(
            namespace=self.fingerprint.hex(),
            tokens=self.tokens.copy(),
            cut_floor=self.profile.cut_floor(self._n, self._native.positions()[0]),
            needs_checkpoints=self.profile.needs_checkpoints,
            needs_attention=self.profile.needs_attention,
            tip_logits=self.tip_logits,
            reuse_limit=reuse_limit,
            split=self._splitter,
        )

    @property
    def keeps_chats(self) -> bool:
        """A checkpoint taken here can serve after another conversation was live."""
        profile = self.profile
        return profile.needs_checkpoints and (profile.pager is not None or not profile.needs_attention)

    def logits(self) -> Logits | None:
        """The logits of the last token, shape (n_vocab,), as a view; None when they are not live."""
        return self._native.logits(self.n_vocab) if self.tip_logits else None

    def can_take_logits(self) -> bool:
        """There is an output row that stored logits can be put into (see `put_logits`)."""
        return self._native.logits(self.n_vocab) is not None

    # -- checking the belief ---------------------------------------------------------------------

    def fault(self, *, deep: bool = True) -> str | None:
        """Why memory is not what is believed; None when it is.

        `deep` adds the size rule, which sees duplicated and missing cells (0.7 ms at 30k cells).
        """
        if self.is_junk:
            return "the last operation did not finish"
        fault = self.profile.position_fault(self._n - self._lag, *self._native.positions())
        if fault or not deep or self._n == 0:
            return fault
        if not self.profile.linear:
            return None
        size = self._attention_bytes()
        expected = self.profile.predicted_size(self._n) + self._extra_bytes
        return None if size == expected else f"state has {size} bytes, expected {expected}"

    def learn_size_rule(self) -> bool:
        """Look at the size rule after a prefill; False when memory is not what it should be.

        A sequence that grew by our own decodes alone and breaks the rule refutes it (compressed attention,
        src/llama-kv-cache-dsv4.cpp): restores cannot be verified there, and only the tip is reused.
        """
        fault = self.fault()
        if fault is None:
            return True
        if not self._grown or self.fault(deep=False) is not None:
            return False
        self.profile = replace(self.profile, linear=False)
        return True

    def touched_outside(self) -> bool:
        """Someone decoded on this context, or reset its counters, since our last operation."""
        return self._native.counters() != self._counters

    def recount(self) -> None:
        """Take the library's counters as they are now for ours."""
        self._counters = self._native.counters()

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
            self._ids[i] = next(_unknown_ids)
        self._lag = n - 1 - self._native.positions()[1]
        self._n = n
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

    # -- operations ------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> None:
        """Append tokens, shape (k,), in one native batch; `recount` when a series of them is done.

        Raises DecodeError when the library refuses or fails; the sequence then keeps what can be proven.
        """
        try:
            self._native.decode(tokens, self._n, outputs)
        except DecodeError as error:
            self._after_failure(error.code)
            raise
        except BaseException:
            self._after_interrupt(tokens, outputs)
            raise
        fault = self._decoded(tokens, outputs)
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
        if position == 0:
            self.empty()
        elif record is not None:
            return self.restore(record, self._ids[:position].copy()) is None
        elif not self.cut(position) or self.fault() is not None:
            self._mark_junk()
            return False
        return True

    def cut(self, position: int) -> bool:
        """Remove the tail [position, n); False, with nothing changed, where memory cannot do it exactly."""
        if position == 0:
            if self._n:
                self.empty()
            return True
        if position >= self._n:
            return position == self._n
        if position < self.profile.cut_floor(self._n, self._native.positions()[0]):
            return False
        if not self._native.cut(position):
            return False
        self._n = position
        self._lag = 0
        self.tip_logits = False
        return True

    def empty(self) -> None:
        """Forget everything; buffers are zeroed only when something in them is not to be trusted."""
        removed = not self._tainted and self._native.cut(0) and self._native.positions() == (-1, -1)
        if not removed:
            self._native.clear()
        self._n = 0
        self._lag = 0
        self._extra_bytes = 0
        self._tainted = False
        self._grown = True
        self.tip_logits = False
        self.recount()

    def distrust(self) -> None:
        """Nothing that the context holds is known any more; the next alignment starts from zero."""
        self._n = 0
        self._mark_junk()

    def taint(self) -> None:
        """Numbers that are not finite got into memory: the next `empty` zeroes the buffers.

        Rows are otherwise cleared by a multiplication with 0, which NaN survives (src/llama-graph.cpp:3530).
        """
        self._tainted = True
        self._mark_junk()

    def snapshot_bytes(self) -> int:
        """Size of a snapshot record of the tip, envelope included."""
        return HEADER_BYTES + self._native.state_size(partial=True)

    def snapshot(self, buffer: Callable[[int], Bytes]) -> Bytes | None:
        """Save the tip's state as a sealed record; None when it cannot be vouched for.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill.
        """
        if self._n == 0 or self.opaque or self.fault() is not None:
            return None
        record = buffer(self.snapshot_bytes())
        payload = record[HEADER_BYTES:]
        if self._native.save_partial(payload) != payload.nbytes:
            return None
        seal(
            record,
            fingerprint=self.fingerprint,
            tokens=self.tokens,
            positions=self._native.positions(),
        )
        return record

    def page_out(self, start: int, end: int, buffer: Callable[[int], Bytes]) -> Segment | None:
        """Save the attention KV of [start, end) as a sealed segment; None when it cannot be vouched for.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill.
        """
        pager = self.profile.pager
        if pager is None or end > self._n or self.opaque or self.fault() is not None:
            return None
        record = pager.save(start, end, buffer)
        fault = self.fault()
        if fault is not None:
            self._mark_junk()
        if fault is not None or record is None:
            return None
        return seal_segment(record, self.fingerprint, self._ids[:end], start)

    def restore(
        self, record: Bytes, tokens: Tokens, segments: Sequence[Segment] = (), kept: int = 0
    ) -> str | None:
        """Go to the state saved in `record`, that of `tokens` (shape (c,)); the fault if it failed.

        Attention KV of [0, c) must be live, or `segments` bring it behind the first `kept` live tokens.
        The order matters: cut to what stays, append, load, cut the tail, verify. After a fault the
        sequence is junk and must be emptied.

        Raises SnapshotError, with nothing changed, when the record or a segment may not be used here.
        """
        if not self.profile.linear:
            raise SnapshotError(
                "a restore cannot be verified in this memory: its size follows no rule we know"
            )
        info = open_snapshot(record, fingerprint=self.fingerprint, tokens=tokens)
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
        self._mark_junk()  # until proven, even if we are interrupted on the way
        if payloads:
            fault = self._page_in(payloads, kept)
            if fault:
                return fault
        loaded = self._native.load_partial(info.payload)
        if loaded != info.payload.nbytes:
            return f"the library read {loaded} of {info.payload.nbytes} snapshot bytes"
        if not self._native.cut(position):
            return f"the library refused to cut at {position} after a restore"
        self._set(tokens)
        self._grown = False
        self._extra_bytes = 0
        fault = self.fault()
        if fault is None and self._native.state_size(partial=True) != info.payload.nbytes:
            fault = "the restored state has another size than its snapshot"
        if fault:
            self._mark_junk()
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
        self.tip_logits = True
        return True

    def _page_in(self, payloads: Sequence[Bytes], kept: int) -> str | None:
        """Put stored attention behind the first `kept` live tokens; the fault if it failed."""
        pager = self.profile.pager
        assert pager is not None, "segments were checked against it"
        pager.keep_attention(kept)
        return None if pager.append(payloads) else "the library refused stored attention"

    # -- helpers ---------------------------------------------------------------------------------

    def _set(self, ids: npt.NDArray[np.integer]) -> None:
        self._ids[: len(ids)] = ids
        self._n = len(ids)

    def _mark_junk(self) -> None:
        """Put an id that matches nothing at the tip: state there is not to be used."""
        self.tip_logits = False
        if not self.is_junk:
            self._ids[self._n] = JUNK
            self._n += 1

    def _decoded(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> str | None:
        """Believe a batch the library says it decoded; the fault (and junk) if memory says otherwise."""
        end = self._n + len(tokens)
        self._ids[self._n : end] = tokens
        self._n = end
        self._lag = 0
        self.tip_logits = outputs != "none"
        fault = self.fault(deep=False)
        if fault:
            self._mark_junk()
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
        self.tip_logits = False
        self.recount()
        if code not in UNCHANGED_BY_FAILURE or self.fault() is not None:
            self._mark_junk()
        elif code == -1:
            self.tip_logits = had_logits

    def _attention_bytes(self) -> int:
        full = self._native.state_size(partial=False)
        if self.profile.partial_is_partial:
            return full - self._native.state_size(partial=True)
        return 0 if self.profile.keeps_tip_only else full
