"""The guarded LlamaContext that upstream code holds as `_ctx`.

Upstream and chat handlers change context memory through this object; each change is passed on to the
live sequence, so that its state follows what was done, and what cannot be done exactly is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaContext

from llamahybrid import upstream
from llamahybrid.capi.shim import library
from llamahybrid.devices.rpc import Watch
from llamahybrid.engine.content import Nameless
from llamahybrid.errors import DecodeError, LlamaHybridError
from llamahybrid.memory.outside import OutsideTokens
from llamahybrid.memory.sequence import LiveSequence
from llamahybrid.memory.watching import address, context_at, contexts, watch

SETTERS = (
    "llama_set_adapters_lora",
    "llama_set_adapter_cvec",
    "llama_set_causal_attn",
    "llama_set_warmup",
)
"""Functions that change what a context computes; the last makes a mixture of experts use all of them. llama.h
has no getters for that, so the calls are watched. `Llama.cache_salt` is for those by other ways."""

STATE_LOADERS = (
    "llama_set_state_data",
    "llama_load_session_file",
    "llama_state_set_data",
    "llama_state_load_file",
    "llama_state_seq_set_data",
    "llama_state_seq_set_data_ext",
    "llama_state_seq_load_file",
)
"""Functions that put another state into memory. Our own calls go by `capi.shim`, which nobody watches."""

upstream.require()  # once: `llamahybrid.llama` imports this module, and the class below leans on most of it


class GuardedContext(LlamaContext):  # type: ignore[misc]
    """`llama_cpp._internals.LlamaContext` whose memory operations keep a LiveSequence informed."""

    live: LiveSequence | None = None
    """The sequence that upstream's code means, which knows none but 0."""
    watch: Watch | None = None
    """Whether the RPC servers that the model lies on are still there; None: on none."""
    changes = 0
    """How often an adapter or a mode was put on the context, or taken off."""
    outside: OutsideTokens | None = None
    """What others decoded on it natively; None: that is not followed."""

    @classmethod
    def guard(cls, context: LlamaContext) -> GuardedContext:
        """Turn a context that upstream made into a guarded one, in place: its owners keep their reference."""
        context.__class__ = cls
        assert isinstance(context, cls)
        contexts[address(context.ctx)] = context
        return context

    def computes_otherwise(self) -> None:
        """Something was put on the context, or taken off: what is live was computed without it.

        What computes from now on has a name that nothing else has, so that no stored state is taken for its.
        """
        self.changes += 1
        name = Nameless()
        for live in [] if self.live is None else self.live.shared.members:
            if live.identity.computation is not None:
                live.identity.computed_by(replace(live.identity.computation, adapters=name))

    def state_loaded(self) -> None:
        """Another state was loaded, of as many tokens perhaps: neither positions nor counters tell."""
        if self.live is not None:
            self.live.shared.lose_all()
        if self.outside is not None:
            self.outside.forget()

    def decode(self, batch: Any) -> None:
        """Decode a batch; raises DecodeError with the library's result when it is not 0.

        What an RPC server computes is waited for: that it is gone shows only then. Raises DeviceLost.
        """
        if self.ctx is None:
            raise RuntimeError("the model is closed")  # the library would crash
        code = library().decode(self.ctx, batch.batch)
        if self.watch is not None and self.watch.counting:
            llama_cpp.llama_synchronize(self.ctx)
            self.watch.check()
        if code != 0:
            raise DecodeError(code, f"llama_decode returned {code}")

    def n_ctx(self) -> int:
        """Tokens that one sequence may hold."""
        return int(llama_cpp.llama_n_ctx_seq(self.ctx))

    @property
    def lost(self) -> bool:
        """What was read from memory just now may be nothing: a device is gone."""
        return self.watch is not None and bool(self.watch.lost)

    def kv_cache_clear(self) -> None:
        """Empty the memory."""
        if self.live is None or self.live.shared.slots == 1:
            super().kv_cache_clear()
        if self.live is not None:
            self.live.empty()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove [p0, p1) of a sequence; False, with nothing changed, where that cannot be exact.

        Stock says yes to cuts behind a sliding window and to holes in hybrid memory, and is wrong afterwards
        (seq_rm of src/llama-kv-cache-iswa.cpp and src/llama-memory-hybrid.cpp). A hole in plain attention is
        right (context shifting), but what lies where is then no longer known.
        """
        live = self.live
        if live is None or seq_id > 0:
            return bool(super().kv_cache_seq_rm(seq_id, p0, p1))
        start = max(p0, 0)
        if start >= live.n or 0 <= p1 <= start:
            return True  # an empty range
        if 0 <= p1 < live.n:
            removed = live.profile.cuttable and bool(super().kv_cache_seq_rm(live.native.seq, p0, p1))
            if removed:
                live.invalidate()
            return removed
        return live.cut(start)

    def kv_cache_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        """Copy a sequence; one that lands on the live sequence makes it unknown.

        Raises LlamaHybridError where there are several slots: the sequences are theirs, and the library ends
        the process when it is asked for a part of a KV stream.
        """
        if self.live is not None and self.live.shared.slots > 1:
            raise LlamaHybridError(
                "sequences of a context with several slots are not copied: they are theirs"
            )
        if self.live is not None and seq_id_src == 0:
            self.live.release_planes()
        super().kv_cache_seq_cp(seq_id_src, seq_id_dst, p0, p1)
        if self.live is not None and seq_id_dst == 0:
            self.live.invalidate()

    def kv_cache_seq_keep(self, seq_id: int) -> None:
        """Drop every sequence but one."""
        super().kv_cache_seq_keep(seq_id)
        if self.live is not None and seq_id != 0:
            self.live.empty()

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Shift positions: what is at which position is no longer known."""
        super().kv_cache_seq_shift(seq_id, p0, p1, shift)
        if self.live is not None and seq_id <= 0:
            self.live.invalidate()

    def reset_timings(self) -> None:
        """Reset the library's counters, which we compare to notice decodes by others."""
        known = self.live is not None and not self.live.shared.touched_outside()
        super().reset_timings()
        if known and self.live is not None:
            self.live.shared.recount()


def _set(result: Any, arguments: Any) -> None:
    if (context := context_at(arguments[0])) is not None:
        context.computes_otherwise()


def _loaded(result: Any, arguments: Any) -> None:
    if (context := context_at(arguments[0])) is not None:
        context.state_loaded()


for _name in SETTERS:
    watch(_name, _set)
for _name in STATE_LOADERS:
    watch(_name, _loaded)
