"""Parameters of a context with a KV stream for each slot: `n_ctx` is what one request may hold.

The library divides the cells of such a context among its sequences. Upstream's code writes and reads `n_ctx`
as that of its one sequence, and so it stays: the library alone is told what all have together.
"""

from __future__ import annotations

import llama_cpp

PADDING = 256
"""The library makes streams of multiples of so many cells (src/llama-context.cpp, n_ctx_seq)."""

_WHOLE = llama_cpp.llama_context_params.n_ctx
_FLASH = llama_cpp.llama_context_params.flash_attn_type


class StreamParams(llama_cpp.llama_context_params):  # type: ignore[misc]
    """`llama_context_params` of so many slots."""

    slots: int
    asked: int
    """Tokens that one request is to hold at least."""
    flash_chosen: bool
    """`flash_attn` was given; else it is on where the backend supports it."""

    @classmethod
    def of(cls, params: llama_cpp.llama_context_params, slots: int, flash_chosen: bool) -> StreamParams:
        """The same parameters for so many slots."""
        made: StreamParams = cls.from_buffer_copy(params)
        made.slots, made.flash_chosen = slots, flash_chosen
        made.n_ctx = params.n_ctx
        made.n_seq_max, made.kv_unified = slots, False
        return made

    @property
    def n_ctx(self) -> int:
        """Tokens of one request."""
        return self.asked

    @n_ctx.setter
    def n_ctx(self, tokens: int) -> None:
        self.asked = tokens
        _WHOLE.__set__(self, -(-tokens // PADDING) * PADDING * self.slots)

    @property
    def flash_attn_type(self) -> int:
        """When to use flash attention."""
        return int(_FLASH.__get__(self))

    @flash_attn_type.setter
    def flash_attn_type(self, kind: int) -> None:
        chosen = self.flash_chosen or kind != llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        _FLASH.__set__(self, kind if chosen else llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO)
