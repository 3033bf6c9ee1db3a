"""MemoryProfile: what one context's memory can do, found out by asking it.

Eight tokens are decoded in the fresh context, sizes, positions and one cut are looked at, and the
memory is cleared again. Nothing is read from a list of architecture names.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llama_cpp import llama_cpp

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.paging import Pager, RangePager, WindowPager, learn_pager
from llamahybrid.memory.streams import StreamPager, StreamRangePager

if TYPE_CHECKING:
    from llama_cpp._internals import LlamaContext

TRIAL = (2, 4, 8)
"""Tokens in memory at which the trial looks at sizes: two points make a line, the third proves it."""


PAGED = (2, 7)
"""The range that is saved and looked at in the trial."""


@dataclass(frozen=True)
class MemoryProfile:
    """What a context's memory can do, and what its positions and sizes must be.

    `position rule`: after tokens [0, n) the memory answers pos_max == n - 1; pos_min is n - 1 where a
    recurrent state is kept (`keeps_tip_only`), 0 for attention, and follows the window where one is used.
    `size rule`: `attention_base + attention_per_token * n` bytes is the difference between the full state
    and the PARTIAL one (plain attention: the full state itself). Duplicated and missing cells do not show
    in positions; they do show here.
    """

    has_memory: bool = False
    cuttable: bool = False
    """A tail may be cut off at any position that `window` allows."""
    keeps_tip_only: bool = False
    """A recurrent state: pos_min == pos_max, and the past cannot be cut back to."""
    window: int = 0
    """Tokens of the model's sliding window; 0: it has none."""
    prunes: bool = False
    """Cells behind the window are thrown away. Otherwise only a saved state leaves them out."""
    partial_is_partial: bool = False
    """PARTIAL snapshots leave something out (attention KV of full layers)."""
    attention_base: int = 0
    attention_per_token: int = 0
    snapshot_bytes: int = 0
    """Size of every PARTIAL state; 0 where it depends on the tokens in memory (a sliding window)."""
    pager: Pager | None = None
    """How attention KV of a range is saved and put back; None where that cannot be done."""
    attention_is_all: bool = False
    """Attention KV, in cells that can be cut anywhere, is all of the state, and `pager` takes all of it: it
    can be put back at any position that stored attention reaches."""
    token_bytes: int = 0
    """What the cells of a token take, as a state has them."""
    token_seconds: float = 0.0
    """What a token decoded alone took in the trial, at best."""
    linear: bool = True
    """The size rule holds, as far as seen (see `LiveSequence.learn_size_rule`). Where it does not, a restore
    cannot be verified and only the tip is reused."""

    @property
    def needs_checkpoints(self) -> bool:
        """Some cuts are impossible without a stored snapshot."""
        return self.has_memory and self.linear and (not self.cuttable or self.prunes)

    @property
    def needs_attention(self) -> bool:
        """A snapshot alone is not the whole state: full-attention KV must be live or stored too."""
        return self.attention_is_all or (self.partial_is_partial and self.attention_per_token > 0)

    @property
    def keeps_chats(self) -> bool:
        """A checkpoint taken here can serve after another conversation was live."""
        if not self.needs_checkpoints:
            return self.attention_is_all
        return self.pager is not None or not self.needs_attention

    def slot_bytes(self, n_ctx: int) -> int:
        """About what the memory of a sequence of so many tokens takes."""
        return self.token_bytes * n_ctx + self.snapshot_bytes

    def predicted_size(self, n: int) -> int:
        """Bytes of attention state that n >= 1 tokens must have (see the size rule)."""
        return self.attention_base + self.attention_per_token * n

    def position_fault(self, n: int, pos_min: int, pos_max: int) -> str | None:
        """Why these positions cannot be those of a sound sequence of n tokens; None if they can."""
        if pos_max != n - 1:
            return f"last position is {pos_max}, expected {n - 1}"
        if n == 0:
            return None
        if self.keeps_tip_only:
            return None if pos_min == n - 1 else f"first position is {pos_min}, expected {n - 1}"
        if self.window:
            limit = max(0, n - self.window)
            return None if 0 <= pos_min <= limit else f"first position is {pos_min}, expected at most {limit}"
        return None if pos_min == 0 else f"first position is {pos_min}, expected 0"

    def cut_floor(self, n: int, pos_min: int) -> int:
        """Lowest position c to which a sound sequence of n tokens can be cut without a snapshot."""
        if not self.cuttable:
            return n
        if self.window and pos_min > 0:
            return min(n, pos_min + self.window)
        return 0


NO_MEMORY = MemoryProfile()
"""Of a context that cannot take part."""


def probe(ctx: LlamaContext, swa_full: bool, slots: int = 1, paging: bool = True) -> MemoryProfile:
    """Find out what the memory of a fresh context can do; leaves it cleared.

    `swa_full`: the context was made with full-size sliding-window caches. `slots`: live sequences; of several
    each has a KV stream. `paging`: attention may be stored.
    A context that cannot take part (no memory, an encoder, a decode that fails) yields `NO_MEMORY`.
    """
    model = ctx.model.model
    native = NativeContext(ctx)
    window = int(llama_cpp.llama_model_n_swa(model))
    # A stream is saved and loaded as a state, which leaves out what lies behind the window.
    prunes = window > 0 if slots > 1 else not swa_full and 0 < window < native.n_ctx
    if not native.has_memory or llama_cpp.llama_model_has_encoder(model):
        return NO_MEMORY
    sizes: list[tuple[int, int]] = []
    times: list[float] = []
    try:
        for start, end in itertools.pairwise((0, *TRIAL)):
            for position in range(start, end):  # one by one: no batch is larger than any n_batch
                clock = time.perf_counter()
                native.decode([position], position, "last")
                native.counters()  # waits for the computation
                times.append(time.perf_counter() - clock)
            sizes.append((native.state_size(partial=False), native.state_size(partial=True)))
        pos_min, pos_max = native.positions()
        if pos_max != TRIAL[-1] - 1:
            return NO_MEMORY
        partial_is_partial = sizes[0][0] != sizes[0][1]
        if partial_is_partial:
            attention = [full - part for full, part in sizes]
        else:  # a recurrent snapshot is everything, of constant size; one of plain attention is the KV
            attention = [0 if pos_min == pos_max else full for full, _ in sizes]
        per_token = (attention[1] - attention[0]) // (TRIAL[1] - TRIAL[0])
        base = attention[0] - per_token * TRIAL[0]
        linear = attention == [base + per_token * n for n in TRIAL]
        whole = not prunes and pos_min != pos_max
        pager = None
        if paging and linear and (partial_is_partial or whole) and per_token > 0:
            if slots > 1:
                kinds: list[type[Pager]] = [StreamRangePager, StreamPager]
            else:
                kinds = [WindowPager] if whole and window else [RangePager, Pager]
            pager = learn_pager(kinds, ctx, *PAGED, whole=whole, window=window)
        for position in range(native.positions()[1] + 1, TRIAL[0] + native.planes() + 1):
            native.decode([position], position, "last")  # a cut deeper than rollback planes reach
        cuttable = native.cut(TRIAL[0]) and native.positions()[1] == TRIAL[0] - 1
    except RuntimeError:
        return NO_MEMORY
    finally:
        native.clear()
        native.reset_counters()
    if whole and pager is not None:
        missed = sizes[1][0] - sizes[0][0] != pager.layout.size(TRIAL[1]) - pager.layout.size(TRIAL[0])
        pager = pager if cuttable and not missed else None
    return MemoryProfile(
        has_memory=True,
        cuttable=cuttable,
        keeps_tip_only=pos_min == pos_max,
        window=window,
        prunes=prunes,
        partial_is_partial=partial_is_partial,
        attention_base=base,
        attention_per_token=per_token,
        snapshot_bytes=sizes[0][1] if sizes[0][1] == sizes[-1][1] else 0,
        pager=pager,
        attention_is_all=whole and pager is not None,
        token_bytes=(sizes[1][0] - sizes[0][0]) // (TRIAL[1] - TRIAL[0]),
        token_seconds=min(times),
        linear=linear,
    )
