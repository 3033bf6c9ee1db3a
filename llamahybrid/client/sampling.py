"""RowSampler: upstream's sampler, checked, over copied rows of logits.

The output rows of a context belong to its last batch, so a row is copied for a caller's thread.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import numpy as np
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaSampler

from llamahybrid.capi.calls import Logits
from llamahybrid.capi.gbnf import require_grammar
from llamahybrid.capi.samplers import TokenBias, drop, taken_out
from llamahybrid.client.json_schema import Constraint, ConstraintGrammar
from llamahybrid.client.thought import ThoughtLimit
from llamahybrid.errors import LlamaHybridError

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data (include/llama.h)."""


class RowSampler(LlamaSampler):  # type: ignore[misc]
    """A sampler of upstream's that reads copied rows, and raises where the library would end the process.

    The library does so without logits (src/llama-sampler.cpp, llama_sampler_sample), and where a grammar
    allows no token.
    """

    processors: Iterable[Callable[[Any, Any], Any]] = ()
    """The caller's logits processors. They are called before all samplers with the tokens before the sampled
    one: upstream passes all decoded tokens, a draft's later guesses included, so that the length of drafts
    would change answers; and it calls them in a ctypes callback, which drops their exceptions."""
    constraint: Constraint | None = None
    """The form of the answer, applied behind the processors."""
    limits: ThoughtLimit | None = None
    _passing: Sequence[tuple[int, Any]] = ()
    """Samplers that only the first tokens of an answer have, each with the number of these."""
    _said: int = 0
    _model: ref[Any]
    _copied: bool
    _candidates: Any = None
    _ids: Any = None
    _grammar: bool = False

    @classmethod
    def over(cls, sampler: LlamaSampler, llm: Any, grammar: bool) -> RowSampler:
        """Turn a sampler that upstream made into one, in place; `grammar`: it has one."""
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        sampler._model = ref(llm)  # weak: no reference cycle
        sampler._copied = llm.requests.loop is not None
        sampler._grammar = grammar
        return sampler

    def limit(self, limits: ThoughtLimit) -> None:
        """Set the limits of an answer; a grammar or constraint holds where `limits.free` is False."""
        self.limits = limits
        if self.constraint is not None:
            self.constraint.waits = lambda: limits.free

    @property
    def calls_back(self) -> bool:
        """The sampler calls the caller's code for each token."""
        return bool(self.processors or self.custom_samplers)

    def lead(self, biases: Iterable[TokenBias], n_vocab: int) -> None:
        """Put biases before all other samplers."""
        rest, passing = taken_out(self.sampler, 0), list[tuple[int, Any]]()
        for bias in biases:
            part = bias.sampler(n_vocab)
            llama_cpp.llama_sampler_chain_add(self.sampler, part)
            if bias.first is not None:
                passing.append((bias.first, part))
        for part in rest:
            llama_cpp.llama_sampler_chain_add(self.sampler, part)
        self._passing = passing

    def sample(self, ctx: Any, idx: int = -1) -> int:
        """Sample and accept a token, as `LlamaSampler.sample`.

        Raises LlamaHybridError as `sample_at`.
        """
        llm = self._model()
        if llm is None or not ctx.ctx:
            raise LlamaHybridError("there are no logits to sample from: the model is closed")
        return self.sample_at(ctx, llm.last_row(idx) if self._copied else idx, idx)

    def sample_at(self, ctx: Any, place: int | Logits, idx: int = -1) -> int:
        """Sample and accept a token from a row of the context, by its index, or from a copy.

        `idx`: the token whose logits these are, counted from the last decoded one, -1.

        Raises what a logits processor raised, and LlamaHybridError without logits, and where a grammar or
        constraint allows no token. A grammar allows none for `[b-a]` and
        for text that the vocabulary cannot spell: the library accepts one nevertheless, and ends the process
        (src/llama-grammar.cpp, llama_grammar_accept_token).
        """
        token = None if self.limits is None else self._forced(self.limits)
        if token is None:
            token = self._sampled(ctx, place, idx)
            if self.constraint is not None:
                self.constraint.took(token)
        if self.limits is not None:
            self.limits.took(token)
        if self._passing:
            self._said += 1
            for last, part in self._passing:
                if last == self._said:
                    drop(self.sampler, part)
        return token

    def _forced(self, limits: ThoughtLimit) -> int | None:
        """The token that the limits demand, accepted by all samplers but a grammar; None: any."""
        token = limits.next()
        if token is not None:
            for part in self._parts():
                llama_cpp.llama_sampler_accept(part, token)
        return token

    def _parts(self) -> Iterator[Any]:
        """The samplers of the chain without a grammar."""
        nameless = {index for index, _ in self.custom_samplers}
        for index in range(llama_cpp.llama_sampler_chain_n(self.sampler)):
            part = llama_cpp.llama_sampler_chain_get(self.sampler, index)
            if index in nameless or llama_cpp.llama_sampler_name(part) != b"grammar":
                yield part

    def _sampled(self, ctx: Any, place: int | Logits, idx: int) -> int:
        if not isinstance(place, np.ndarray):
            if not ctx.ctx or not (first := llama_cpp.llama_get_logits_ith(ctx.ctx, place)):
                raise LlamaHybridError("there are no logits to sample from: eval a token first")
            if not (self._grammar or self.processors or self.constraint):
                return int(llama_cpp.llama_sampler_sample(self.sampler, ctx.ctx, place))
            n_vocab = int(llama_cpp.llama_vocab_n_tokens(ctx.model.vocab))
            place = np.ctypeslib.as_array(first, (n_vocab,))
        if self.processors or self.constraint:
            place = self._processed(place.copy(), idx)
        return self._sample_from(place)

    def _processed(self, row: Logits, idx: int) -> Logits:
        """Apply processors and constraint to a row, in place."""
        for processor in self.processors:
            llm = self._model()
            assert llm is not None, "its thread samples"
            ids = llm._input_ids
            row[:] = processor(ids[: idx + 1] if idx < -1 else ids, row)
        if self.constraint is not None:
            self.constraint.mask(row)
            if why := self.constraint.error:
                reason = why.strip().splitlines()[0]
                raise LlamaHybridError(f"the answer cannot go on as its form demands: {reason}")
        return row

    def _sample_from(self, row: Logits) -> int:
        """Sample from a row as llama_sampler_sample does from one of the context (src/llama-sampler.cpp)."""
        if self._candidates is None or len(self._candidates) != len(row):
            self._candidates = np.zeros(len(row), _CANDIDATE)
            self._ids = np.arange(len(row), dtype=np.int32)
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = row
        candidates["p"] = 0
        first = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=first, size=len(row), selected=-1, sorted=False)
        free = self._grammar and self.limits is not None and self.limits.free
        samplers = list(self._parts()) if free else [self.sampler]
        for each in samplers:
            llama_cpp.llama_sampler_apply(each, ctypes.byref(array))
        chosen = array.data[array.selected]
        if self._grammar and not math.isfinite(chosen.logit):
            raise LlamaHybridError("the grammar leads nowhere: it allows no token here")
        token = int(chosen.id)
        for each in samplers:
            llama_cpp.llama_sampler_accept(each, token)
        return token


def sampler_for(llm: Any, make: Callable[..., LlamaSampler], *args: Any, **kwargs: Any) -> RowSampler:
    """Return the sampler that `make(*args, **kwargs)`, upstream's `_init_sampler`, gives, checked.

    Raises ValueError for a grammar that cannot be read, TypeError for a logits processor that is in no list,
    ModelClosed.
    """
    constraint: Constraint | None = None
    if (grammar := kwargs.get("grammar")) is not None:
        if isinstance(grammar, ConstraintGrammar):  # a mask for each row instead of rules
            constraint = grammar.constraint(llm)
            kwargs["grammar"] = grammar = None
        else:
            llm._calls.run(require_grammar, llm._model.vocab, grammar)
    given, biases = kwargs.pop("logits_processor", None), list[TokenBias]()
    if isinstance(given, list) and (biases := [each for each in given if isinstance(each, TokenBias)]):
        given = [each for each in given if not isinstance(each, TokenBias)] or None
    if given is not None:  # upstream's callback fails at what cannot be iterated, without effect
        try:
            iter(given)
        except TypeError:
            raise TypeError(f"logits_processor takes a LogitsProcessorList, not {given!r}") from None
    sampler = RowSampler.over(llm._calls.run(make, *args, **kwargs), llm, grammar is not None)
    sampler.constraint = constraint
    sampler.processors = () if given is None else given
    if biases:
        sampler.lead(biases, llm._n_vocab)
    return sampler
