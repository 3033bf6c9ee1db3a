"""StreamParams: parameters of a context with a KV stream for each slot.

The library divides `n_ctx` of such a context among its sequences. Upstream's code writes and reads the value
of one slot; the library gets the total.
"""

from __future__ import annotations

from typing import Any

import llama_cpp

PADDING = 256
"""Stream sizes are multiples of this number of cells (src/llama-context.cpp, n_ctx_seq)."""

_FLASH = llama_cpp.llama_context_params.flash_attn_type


def _told(name: str, native: Any) -> Any:
    """Return a property that reads as written, while the native field holds `native(params, value)`."""
    field = getattr(llama_cpp.llama_context_params, name)

    def get(params: StreamParams) -> int:
        return int(params.said.get(name, field.__get__(params)))

    def put(params: StreamParams, value: int) -> None:
        params.said[name] = value
        field.__set__(params, native(params, value))

    return property(get, put)


def _of_all(params: StreamParams, tokens: int) -> int:
    return -(-tokens // PADDING) * PADDING * params.slots


def _shared_out(params: StreamParams, tokens: int) -> int:
    """Some graphs need the same number of tokens of each sequence (kimi-linear)."""
    return -(-tokens // params.slots) * params.slots


class StreamParams(llama_cpp.llama_context_params):  # type: ignore[misc]
    """`llama_context_params` of several slots."""

    slots: int
    flash: bool
    """Use flash attention where the backend supports it. Slower on a CPU: a step of 3 answers of 3,000 tokens
    each takes 1.85 times as long, one of 4 answers of 500 tokens 1.17 times (100M, f16, one thread)."""
    said: dict[str, int]
    """Values that upstream wrote."""

    @classmethod
    def of(cls, params: llama_cpp.llama_context_params, slots: int, flash: bool) -> StreamParams:
        """Return the same parameters for a number of slots."""
        made: StreamParams = cls.from_buffer_copy(params)
        made.slots, made.flash, made.said = slots, flash, {}
        for name in ("n_ctx", "n_batch", "n_ubatch"):
            setattr(made, name, getattr(params, name))
        made.n_seq_max, made.kv_unified = slots, False
        return made

    n_ctx = _told("n_ctx", _of_all)
    n_batch = _told("n_batch", _shared_out)
    n_ubatch = _told("n_ubatch", _shared_out)

    @property
    def flash_attn_type(self) -> int:
        """Use of flash attention."""
        return int(_FLASH.__get__(self))

    @flash_attn_type.setter
    def flash_attn_type(self, kind: int) -> None:
        _FLASH.__set__(self, llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO if self.flash else kind)
