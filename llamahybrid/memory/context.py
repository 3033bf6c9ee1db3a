"""GuardedContext: the `LlamaContext` that upstream's code holds as `_ctx`.

Upstream and chat handlers change context memory through it. Each change is passed on to the live sequence;
changes that cannot be exact are refused.
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
from llamahybrid.memory.outside import OutsideTokens, address, context_at, contexts, watch
from llamahybrid.memory.sequence import LiveSequence

SETTERS = (
    "llama_set_adapters_lora",
    "llama_set_adapter_cvec",
    "llama_set_causal_attn",
    "llama_set_warmup",
)
"""Functions that change the numbers that a context computes; the last makes a mixture of experts use all of
them. llama.h has no getters, so the calls are watched. `Llama.cache_salt` covers changes by other ways."""

STATE_LOADERS = (
    "llama_set_state_data",
    "llama_load_session_file",
    "llama_state_set_data",
    "llama_state_load_file",
    "llama_state_seq_set_data",
    "llama_state_seq_set_data_ext",
    "llama_state_seq_load_file",
)
"""Functions that load another state. Our own calls go through `capi.shim` and are not watched."""

upstream.require()  # once: `llamahybrid.llama` imports this module, and the class below leans on most of it


class GuardedContext(LlamaContext):  # type: ignore[misc]
    """`llama_cpp._internals.LlamaContext` whose memory operations keep a LiveSequence informed."""

    live: LiveSequence | None = None
    """Sequence 0, the only one in upstream's code."""
    watch: Watch | None = None
    """Watches the RPC servers that hold the model; None: there are none."""
    changes = 0
    """Number of changes of adapters and modes."""
    outside: OutsideTokens | None = None
    """Tracks tokens that other code decodes natively; None: they are not tracked."""

    @classmethod
    def guard(cls, context: LlamaContext) -> GuardedContext:
        """Turn a context that upstream made into a guarded one, in place, so that references stay valid."""
        context.__class__ = cls
        assert isinstance(context, cls)
        contexts[address(context.ctx)] = context
        return context

    def computes_otherwise(self) -> None:
        """Note a change of adapters or modes: live tokens were computed without it.

        The computation gets a unique name, so that no stored state is used for it.
        """
        self.changes += 1
        name = Nameless()
        for live in [] if self.live is None else self.live.shared.members:
            live.identity.computed_by(replace(live.identity.computation, adapters=name))

    def state_loaded(self) -> None:
        """Note a loaded state, which neither positions nor counters may show."""
        if self.live is not None:
            self.live.shared.lose_all()
        if self.outside is not None:
            self.outside.forget()

    def decode(self, batch: Any) -> None:
        """Decode a batch. Raises DecodeError with the library's result when it is not 0, DeviceLost.

        Waits for the computation where RPC servers take part: only then does a lost server show.
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
        """A device is gone, and bytes just read from memory may be invalid."""
        return self.watch is not None and bool(self.watch.lost)

    def kv_cache_clear(self) -> None:
        """Empty the memory."""
        if self.live is None or self.live.shared.slots == 1:
            super().kv_cache_clear()
        if self.live is not None:
            self.live.empty()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove [p0, p1) of a sequence; False, with nothing changed, where that cannot be exact.

        Stock accepts cuts behind a sliding window and holes in hybrid memory, and its state is wrong
        afterwards (seq_rm of src/llama-kv-cache-iswa.cpp and src/llama-memory-hybrid.cpp). A hole in plain
        attention is right (context shifting), but makes the positions of tokens unknown.
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
        """Copy a sequence; a copy onto the live sequence makes that unknown.

        Raises LlamaHybridError with several slots, which own the sequences: the library ends the process on a
        partial copy of a KV stream.
        """
        if self.live is not None and self.live.shared.slots > 1:
            raise LlamaHybridError(
                "the sequences of a context with several slots belong to the slots, and cannot be copied"
            )
        if self.live is not None and seq_id_src == 0:
            self.live.release_planes()
        super().kv_cache_seq_cp(seq_id_src, seq_id_dst, p0, p1)
        if self.live is not None and seq_id_dst == 0:
            self.live.invalidate()

    def kv_cache_seq_keep(self, seq_id: int) -> None:
        """Remove every sequence but one."""
        super().kv_cache_seq_keep(seq_id)
        if self.live is not None and seq_id != 0:
            self.live.empty()

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Shift positions, which makes the positions of tokens unknown."""
        super().kv_cache_seq_shift(seq_id, p0, p1, shift)
        if self.live is not None and seq_id <= 0:
            self.live.invalidate()

    def reset_timings(self) -> None:
        """Reset the library's counters, whose changes show decodes by other code."""
        if self.live is None:
            super().reset_timings()
        else:
            self.live.shared.reset_counters()


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
