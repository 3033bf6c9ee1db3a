"""RowSampler: upstream's sampler over logits that no longer lie in the context.

The output rows of a context are those of its last batch. Where several sequences share one, a row is copied
before another sequence's batch takes its place.
"""

from __future__ import annotations

import ctypes
import math
import re
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import numpy as np
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaSampler

from llamahybrid.errors import LlamaHybridError

if TYPE_CHECKING:
    from llamahybrid.prompt_cache.base import Logits

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data (include/llama.h)."""


MAX_DEPTH = 4_000
"""The library reads a grammar recursively: 20,000 parentheses, or 100,000 rules in a row, end the process."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
"""What a grammar spells, and comments: parentheses in it open nothing."""


def deep(grammar: str) -> bool:
    """A grammar is nested deeper than the library's stack takes, or may be by its rules."""
    bare = _LITERAL.sub("", grammar)
    return bare.count("(") > MAX_DEPTH or bare.count("::=") > MAX_DEPTH


def require_grammar(vocab: Any, grammar: Any) -> None:
    """Raise ValueError for a `LlamaGrammar` that the library cannot read.

    It returns no sampler then, which upstream puts into its chain, and the process ends when one samples
    (src/llama-sampler.cpp, llama_sampler_init_grammar; llama_cpp/_internals.py, LlamaSampler.add_grammar).
    """
    if deep(grammar._grammar):
        raise ValueError(f"the grammar nests more than {MAX_DEPTH:,} deep, or has more rules than that")
    text, root = grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise ValueError("the grammar cannot be read; the library's message on stderr says where")
    llama_cpp.llama_sampler_free(sampler)


class HasRow(Protocol):
    """A model whose rows of logits are copied before others take their place."""

    def copied_row(self) -> Logits | None:
        """The logits of the last token, shape (n_vocab,), where they do not lie in the context any more."""


class RowSampler(LlamaSampler):  # type: ignore[misc]
    """A `LlamaSampler` that samples from a copied row where there is one, else from the context."""

    _model: ref[HasRow]
    _candidates: Any = None
    _n_vocab: int | None = None

    @classmethod
    def over(cls, sampler: LlamaSampler, model: HasRow, grammar_over: int | None = None) -> RowSampler:
        """Turn a sampler that upstream made for a model into one, in place.

        `grammar_over`: it has a grammar, and the vocabulary has so many tokens.
        """
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        sampler._model = ref(model)  # no cycle: a model is freed when nobody uses it any more
        sampler._n_vocab = grammar_over
        return sampler

    def sample(self, ctx: Any, idx: int = -1) -> int:
        """Sample and accept a token; `idx` as in `LlamaSampler.sample`.

        Raises LlamaHybridError where a grammar allows none, as `[b-a]` does, or what the vocabulary cannot
        spell: the library accepts one all the same, and the process ends (src/llama-grammar.cpp,
        llama_grammar_accept_token).
        """
        model = self._model()
        row = None if model is None or idx != -1 else model.copied_row()
        if row is None and self._n_vocab is not None:
            first = llama_cpp.llama_get_logits_ith(ctx.ctx, idx)
            row = np.ctypeslib.as_array(first, (self._n_vocab,))
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
        chosen = array.data[array.selected]
        if self._n_vocab is not None and not math.isfinite(chosen.logit):
            raise LlamaHybridError("the grammar leads nowhere: it allows no token here")
        token = int(chosen.id)
        llama_cpp.llama_sampler_accept(self.sampler, token)
        return token
