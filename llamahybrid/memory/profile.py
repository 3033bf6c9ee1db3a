"""MemoryProfile: the abilities of one context's memory, found by a trial.

The trial decodes eight tokens in the fresh context, looks at sizes, positions and one cut, and clears the
memory again. There is no list of architecture names.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaContext

from llamahybrid.capi.calls import NativeContext
from llamahybrid.memory.paging import Pager, RangePager, WindowPager, learn_pager
from llamahybrid.memory.streams import StreamPager

TRIAL = (2, 4, 8)
"""Tokens in memory at which the trial looks at sizes: two points give a line, the third confirms it."""


PAGED = (2, 7)
"""The range that the trial saves."""


@dataclass(frozen=True)
class MemoryProfile:
    """Abilities of a context's memory, and the rules for its positions and sizes.

    `position rule`: after tokens [0, n) the memory answers pos_max == n - 1; pos_min is n - 1 where a
    recurrent state is kept (`keeps_tip_only`), 0 for attention, and follows the window where one is used.
    `size rule`: `attention_base + attention_per_token * n` bytes is the difference between the full state
    and the PARTIAL one (plain attention: the full state itself). Duplicated and missing cells do not show
    in positions; they do show here.
    """

    has_memory: bool = False
    cuttable: bool = False
    """A tail may be cut at any position that `window` allows."""
    keeps_tip_only: bool = False
    """A recurrent state: pos_min == pos_max, and no cut goes back."""
    window: int = 0
    """Tokens of the model's sliding window; 0: it has none."""
    prunes: bool = False
    """Cells behind the window are freed. Otherwise only a saved state leaves them out."""
    partial_is_partial: bool = False
    """PARTIAL snapshots leave something out (attention KV of full layers)."""
    attention_base: int = 0
    attention_per_token: int = 0
    snapshot_bytes: int = 0
    """Size of every PARTIAL state; 0 where it depends on the tokens in memory (a sliding window)."""
    pager: Pager | None = None
    """Saves and loads attention KV of a range; None where that is impossible."""
    attention_is_all: bool = False
    """Attention KV, which can be cut anywhere, is the whole state, and `pager` saves all of it: a restore can
    end at any position of stored attention."""
    token_bytes: int = 0
    """Bytes of a token's cells in a state."""
    token_seconds: float = 0.0
    """Shortest duration of a token decoded alone in the trial."""
    linear: bool = True
    """The size rule has held so far (see `LiveSequence.learn_size_rule`). Otherwise no restore can be
    verified, and only the tip is reused."""

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
        """Checkpoints can be restored after another conversation was live."""
        if not self.needs_checkpoints:
            return self.attention_is_all
        return self.pager is not None or not self.needs_attention

    def slot_bytes(self, n_ctx: int) -> int:
        """Approximate bytes of a sequence of `n_ctx` tokens."""
        return self.token_bytes * n_ctx + self.snapshot_bytes

    def predicted_size(self, n: int) -> int:
        """Bytes of the attention state of n >= 1 tokens by the size rule."""
        return self.attention_base + self.attention_per_token * n

    def position_fault(self, n: int, pos_min: int, pos_max: int) -> str | None:
        """Return the fault of these positions for a sound sequence of n tokens; None if there is none."""
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
        """Return the lowest position to which a sound sequence of n tokens can be cut without a snapshot."""
        if not self.cuttable:
            return n
        if self.window and pos_min > 0:
            return min(n, pos_min + self.window)
        return 0


NO_MEMORY = MemoryProfile()
"""Profile of a context without usable memory."""


def probe(ctx: LlamaContext, swa_full: bool, slots: int = 1, paging: bool = True) -> MemoryProfile:
    """Return the profile of a fresh context, which is left cleared.

    `swa_full`: the context has full-size sliding-window caches. `slots`: live sequences; several have a KV
    stream each. `paging`: attention may be stored.
    Returns `NO_MEMORY` without context memory, for an encoder, and where a decode fails.
    """
    model = ctx.model.model
    native = NativeContext(ctx)
    window = int(llama_cpp.llama_model_n_swa(model))
    # A stream is saved and loaded as a state, which leaves out cells behind the window.
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
            kinds: list[type[Pager]] = [RangePager, StreamPager if slots > 1 else Pager]
            if slots == 1 and whole and window:
                kinds = [WindowPager]
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
