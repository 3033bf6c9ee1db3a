"""RowSampler: upstream's sampler over logits that no longer lie in the context.

The output rows of a context are those of its last batch. Where several sequences share one, a row is copied
before another sequence's batch takes its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaSampler

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.base import Logits

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data (include/llama.h)."""


class RowSampler(LlamaSampler):  # type: ignore[misc]
    """A `LlamaSampler` that samples from a copied row where there is one, else from the context."""

    copied: Callable[[], Logits | None]
    """The logits of the last token, shape (n_vocab,), if they were copied."""
    _candidates: Any = None

    @classmethod
    def over(cls, sampler: LlamaSampler, copied: Callable[[], Logits | None]) -> RowSampler:
        """Turn a sampler that upstream made into one, in place."""
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        sampler.copied = copied
        return sampler

    def sample(self, ctx: Any, idx: int = -1) -> int:
        """Sample and accept a token; `idx` as in `LlamaSampler.sample`."""
        row = self.copied() if idx == -1 else None
        return int(super().sample(ctx, idx)) if row is None else self._sample_from(row)

    def _sample_from(self, row: Logits) -> int:
        """What llama_sampler_sample does with a row of the context (src/llama-sampler.cpp)."""
        if self._candidates is None or len(self._candidates) != len(row):
            self._candidates = np.zeros(len(row), _CANDIDATE)
        candidates = self._candidates
        candidates["id"] = np.arange(len(row), dtype=np.int32)
        candidates["logit"] = row
        candidates["p"] = 0
        first = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=first, size=len(row), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self.sampler, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(self.sampler, token)
        return token
