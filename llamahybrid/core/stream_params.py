"""Parameters of a context with a KV stream for each slot: upstream writes and reads those of one of them.

The library divides the cells of such a context among its sequences, and what is `n_ctx` to upstream's code is
what one of them has: the library alone is told what all have together.
"""

from __future__ import annotations

from typing import Any

import llama_cpp

PADDING = 256
"""The library makes streams of multiples of so many cells (src/llama-context.cpp, n_ctx_seq)."""

_FLASH = llama_cpp.llama_context_params.flash_attn_type


def _told(name: str, native: Any) -> Any:
    """A field that reads as it was written, and of which the library is told `native(params, value)`."""
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
    """Some graphs cannot be made for a batch that has not as many tokens of each sequence (kimi-linear)."""
    return -(-tokens // params.slots) * params.slots


class StreamParams(llama_cpp.llama_context_params):  # type: ignore[misc]
    """`llama_context_params` of so many slots."""

    slots: int
    flash: bool
    """Flash attention is on where the backend supports it. Not wanted on a CPU: a step of 3 answers of
    3,000 tokens each takes 1.85 times as long with it, one of 4 of 500 1.17 times (100M, f16, one thread)."""
    said: dict[str, int]
    """What upstream wrote."""

    @classmethod
    def of(cls, params: llama_cpp.llama_context_params, slots: int, flash: bool) -> StreamParams:
        """The same parameters for so many slots."""
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
        """When to use flash attention."""
        return int(_FLASH.__get__(self))

    @flash_attn_type.setter
    def flash_attn_type(self, kind: int) -> None:
        _FLASH.__set__(self, llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO if self.flash else kind)
