"""LiveSequence: all operations on one sequence of a context; after each its state is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from llamahybrid.capi.calls import NativeContext, Outputs
from llamahybrid.errors import DecodeError
from llamahybrid.memory.fingerprint import Computation, Identity
from llamahybrid.memory.profile import MemoryProfile
from llamahybrid.memory.segment import seal_segment
from llamahybrid.memory.shared import SharedContext
from llamahybrid.memory.state import OutputRow, Planes, SequenceState
from llamahybrid.prompt_cache.base import NOTHING, Bytes, LiveView, Logits, Segment, Tokens
from llamahybrid.prompt_cache.envelope import HEADER_BYTES, seal

UNCHANGED_BY_FAILURE = frozenset({1, -1})
"""Results of llama_decode that leave memory unchanged: no slot found, invalid batch (include/llama.h)."""


class LiveSequence:
    """A sequence of a context: its tokens, and every operation on its memory."""

    def __init__(
        self,
        shared: SharedContext,
        profile: MemoryProfile,
        computation: Computation,
        *,
        capacity: int,
        n_vocab: int,
        seq: int = 0,
    ) -> None:
        """`shared`: its context; `capacity`: tokens that it may hold; `seq`: its id."""
        if profile.pager is not None and seq:
            profile = replace(profile, pager=profile.pager.of(seq))
        self.shared = shared
        self.profile = profile
        """Replaced where its size rule proves wrong (see `learn_size_rule`)."""
        self.capacity = capacity
        self.n_vocab = n_vocab
        self.state = SequenceState.empty(capacity)
        """The believed content of memory; read-only for other code."""
        self.identity = Identity(computation, self.state, profile.pager)
        self.native = NativeContext(shared.ctx, seq, shared.batch)
        self.row = OutputRow(self.native, self.state, n_vocab, alone=shared.slots == 1)
        self.planes = Planes(self.native)
        shared.join(self)
        shared.recount()

    # -- content -------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Tokens in the sequence."""
        return self.state.n

    @property
    def tokens(self) -> Tokens:
        """The ids, shape (n,); negative where content is unknown. A view: copy to keep."""
        return self.state.tokens

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that stored state is valid for."""
        return self.identity.fingerprint

    def view(self, reuse_limit: int | None = None) -> LiveView:
        """Return the prompt cache's view of the sequence, with copied tokens."""
        state = self.state
        return replace(
            self.blank_view(self.identity.namespace),
            tokens=state.tokens.copy(),
            cut_floor=self.profile.cut_floor(state.n, self.native.positions()[0]),
            tip_logits=state.tip_logits,
            reuse_limit=reuse_limit,
            foreign=state.foreign,
        )

    def blank_view(self, namespace: str) -> LiveView:
        """Return a view of an empty sequence; calls no native code, so any thread may use it."""
        return LiveView(
            namespace=namespace,
            tokens=np.empty(0, np.int32),
            cut_floor=0,
            needs_checkpoints=self.profile.needs_checkpoints,
            needs_attention=self.profile.needs_attention,
            tip_logits=False,
            split=self.identity.splitter,
            attention_is_all=self.profile.attention_is_all and self.profile.linear,
        )

    # -- verification --------------------------------------------------------------------------------

    def fault(self, *, deep: bool = True) -> str | None:
        """Return the fault of memory, compared with `state`; None if there is none.

        Duplicated and missing cells show in the size of the state, not in positions: `deep` adds the size
        rule (0.7 ms at 30k cells). `MemoryProfile` has the rules for both.
        """
        state, profile = self.state, self.profile
        if state.is_invalid:
            return "the last operation did not finish"
        fault = profile.position_fault(state.n - state.lag, *self.native.positions())
        if fault or not deep or state.n == 0 or not profile.linear:
            return fault
        extra = self.extra_bytes(state.n) - state.extra_bytes
        return None if extra == 0 else f"attention has {extra} bytes more than {state.n} tokens take"

    def extra_bytes(self, n: int) -> int:
        """Bytes of attention beyond the size rule for n tokens."""
        profile, size = self.profile, self.native.state_size(partial=False)
        if profile.partial_is_partial:
            size -= self._partial_bytes()
        elif profile.keeps_tip_only:
            size = 0
        return size - (profile.attention_base + profile.attention_per_token * n)

    def _partial_bytes(self) -> int:
        """Bytes of the PARTIAL state, which are constant in recurrent memory."""
        return self.profile.snapshot_bytes or self.native.state_size(partial=True)

    def learn_size_rule(self) -> bool:
        """Verify the size rule after a prefill; False where memory has a fault.

        A rule that proves wrong where positions are right and only we decoded is given up, and only the tip
        is reused from then on. An example is compressed attention (src/llama-kv-cache-dsv4.cpp).
        """
        if self.fault() is None:
            return True
        if not self.state.grown or self.fault(deep=False) is not None:
            return False
        self.profile = replace(self.profile, linear=False)
        return True

    def invalidate(self) -> None:
        """Note that the content is unknown; the next alignment starts from zero."""
        self.state.n = self.state.extra_bytes = 0
        self.invalidate_tip()

    def lose(self) -> None:
        """Note that the buffers were zeroed for another sequence."""
        if self.state.n:
            self.invalidate()

    def require_zeroing(self) -> None:
        """Zero the buffers at the next `empty`, since they hold NaN or forgotten text.

        Rows are otherwise cleared by a multiplication with 0, which NaN survives (src/llama-graph.cpp,
        build_rs).
        """
        self.state.needs_zeroing = True
        self.invalidate_tip()

    def invalidate_tip(self) -> None:
        """Mark the state at the tip as unusable: an operation did not finish, or was not ours."""
        self.state.forget_row()
        self.planes.invalidate()
        self.state.invalidate_tip()

    # -- decoding ------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> None:
        """Append tokens, shape (k,), in one native batch.

        Raises DecodeError when the library refuses or fails; the sequence then keeps its verified tokens.
        """
        (fault,) = self.shared.decode_parts([(self, tokens, outputs)])
        if fault:
            raise DecodeError(0, f"context memory is wrong after a decode: {fault}")

    def decoded(self, tokens: Sequence[int] | Tokens, outputs: Outputs) -> str | None:
        """Note a decoded batch; return the fault, and invalidate the tip, if memory disagrees."""
        state = self.state
        end = state.n + len(tokens)
        state.tip_logits = state.row_covers_tip = False
        if self.planes.count:
            self.planes.wrote(len(tokens))
        state.lag = 0
        state.ids[state.n : end] = tokens
        state.n = end
        fault = self.profile.position_fault(end, *self.native.positions())
        if fault:
            self.invalidate_tip()
        else:
            state.tip_logits = state.row_covers_tip = outputs != "none"
        return fault

    def decode_failed(self, code: int) -> None:
        """Note that a decode was refused or failed; keep the tip only if memory agrees."""
        self.state.forget_row()
        if code not in UNCHANGED_BY_FAILURE or self.fault() is not None:
            self.invalidate_tip()

    def put_logits(self, logits: Logits) -> bool:
        """Make stored logits those of the tip; False where the context has no row for them yet."""
        if not self.row.put(logits):
            return False
        self.state.tip_logits = self.state.row_covers_tip = True
        return True

    # -- cutting -------------------------------------------------------------------------------------

    def cut(self, position: int) -> bool:
        """Remove the tail [position, n); False, with nothing changed, where that cannot be exact."""
        state = self.state
        if position == 0:
            if state.n:
                self.empty()
            return True
        if position >= state.n:
            return position == state.n
        if position < self.profile.cut_floor(state.n, self.native.positions()[0]):
            return self._roll_back(position)
        had_logits, state.tip_logits = state.tip_logits, False
        if not self.native.cut(position):
            state.tip_logits = had_logits
            return False
        state.cut(position)
        return True

    def _roll_back(self, position: int) -> bool:
        """Take back the last tokens through a rollback plane of this history; False where there is none."""
        state = self.state
        if state.n - position > self.planes.reach or state.opaque or self.shared.touched_outside():
            return False
        state.tip_logits = False
        self.planes.rolled_back()
        if not self.native.cut(position):
            self.planes.invalidate()
            return False
        state.cut(position)
        if self.fault(deep=False) is not None:
            self.invalidate_tip()
            return False
        return True

    def release_planes(self) -> None:
        """Carry out a pending rollback, after the last open draft.

        A copy of a sequence with a pending rollback is wrong (src/llama-memory-recurrent.cpp, seq_cp), so the
        state is saved and loaded as the current one.
        """
        self.planes.in_use = False
        if self.planes.pending and not self.state.is_invalid:
            state = np.empty(self.native.state_size(partial=True), dtype=np.uint8)
            moved = self.native.save_partial(state) and self.native.load_partial(state)
            if not moved or self.fault() is not None:
                self.invalidate_tip()
        self.planes.invalidate()

    def empty(self) -> None:
        """Remove all tokens; buffers are zeroed only where their content must not stay."""
        state = self.state
        state.forget_row()
        removed = not state.needs_zeroing and self.native.cut(0) and self.native.positions() == (-1, -1)
        if not removed:
            self.shared.clear(self)
            state.ids[:] = 0
        state.n = state.lag = state.extra_bytes = 0
        state.needs_zeroing = state.foreign = False
        state.grown = True
        self.planes.invalidate()
        if self.shared.slots == 1:  # else other code may have decoded in another sequence
            self.shared.recount()

    # -- saving --------------------------------------------------------------------------------------

    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot record of the tip, envelope included."""
        return HEADER_BYTES + self._partial_bytes()

    def snapshot(self, buffer: Callable[[int], Bytes], *, deep: bool = True) -> Bytes | None:
        """Save the tip's state as a sealed record; None where it is not verified.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill. `deep` as in `fault`: False is for a
        record that is used only after a deep verification of later tokens.
        """
        if not self._is_proven(deep=deep):
            return None
        record = buffer(self.snapshot_bytes())
        if not self.native.save_partial(record[HEADER_BYTES:]):
            return None
        seal(record, namespace=self.identity.namespace, tokens=self.tokens)
        return record

    def checkpoint(self, buffer: Callable[[int], Bytes], *, deep: bool = True) -> Bytes | None:
        """Return the record of a checkpoint at the tip: `snapshot`, or empty where attention is all."""
        if not self.profile.attention_is_all:
            return self.snapshot(buffer, deep=deep)
        return NOTHING if self._is_proven(deep=deep) else None

    def _is_proven(self, *, deep: bool) -> bool:
        """The tip's state is verified, and may be stored."""
        self.identity.verify_model()
        return self.state.n > 0 and not self.state.opaque and self.fault(deep=deep) is None

    def reading(self) -> AbstractContextManager[None]:
        """Around several calls of `page_out` without decodes, cuts or loads between them."""
        pager = self.profile.pager
        return nullcontext() if pager is None else pager.reading()

    def page_out(
        self, start: int, end: int, buffer: Callable[[int], Bytes | None], *, deep: bool = True
    ) -> Segment | None:
        """Save the attention KV of [start, end) as a sealed segment; None where it is not verified.

        `buffer(n)` gives a uint8 array of exactly n bytes to fill, or None: then nothing is saved. `deep` as
        in `fault`: False directly after a deep verification.
        """
        pager = self.profile.pager
        if self.planes.in_use:
            return None
        self.release_planes()
        self.identity.verify_model()
        if pager is None or end > self.state.n or self.state.opaque or self.fault(deep=deep) is not None:
            return None
        record = pager.save(start, end, buffer)
        if pager.moves_cells and self.fault() is not None:
            self.invalidate_tip()
            return None
        if record is None:
            return None
        identity = self.identity
        return seal_segment(record, identity.namespace, self.state.ids[:end], start, identity.splitter)
