"""RowSampler: upstream's sampler over logits that no longer lie in the context.

The output rows of a context are those of its last batch. Where several sequences share one, a row is copied
before another sequence's batch takes its place.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol
from weakref import ref

import numpy as np
from llama_cpp import llama_cpp
from llama_cpp._internals import LlamaSampler

from llamahybrid.capi.calls import Logits
from llamahybrid.capi.gbnf import require_parsed
from llamahybrid.capi.samplers import WithSamplers, insert
from llamahybrid.errors import LlamaHybridError

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data (include/llama.h)."""


MAX_DEPTH = 4_000
"""The library reads a grammar recursively: 20,000 parentheses, or 100,000 rules in a row, end the process."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
"""A literal, a character class or a comment of a grammar: parentheses in it open nothing."""


def deep(grammar: str) -> bool:
    """Return True for a grammar that may nest deeper than the library's stack takes."""
    bare = _LITERAL.sub("", grammar)
    return bare.count("(") > MAX_DEPTH or bare.count("::=") > MAX_DEPTH


def require_grammar(vocab: Any, grammar: Any) -> None:
    """Raise ValueError for a `LlamaGrammar` that the library cannot read.

    The library returns NULL then, which upstream puts into its chain, and the process ends at the next sample
    (src/llama-sampler.cpp, llama_sampler_init_grammar; llama_cpp/_internals.py, LlamaSampler.add_grammar).
    """
    if deep(grammar._grammar):
        raise ValueError(f"the grammar nests more than {MAX_DEPTH:,} deep, or has more rules than that")
    require_parsed(grammar._grammar, partial(_count, vocab))
    text, root = grammar._grammar.encode("utf-8"), grammar._root.encode("utf-8")
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text, root)
    if not sampler:
        raise ValueError("the grammar cannot be used: a rule begins with itself")
    llama_cpp.llama_sampler_free(sampler)


def _count(vocab: Any, text: bytes) -> int:
    """Tokens of a text, control tokens read as such."""
    return abs(int(llama_cpp.llama_tokenize(vocab, text, len(text), None, 0, False, True)))


class HasRow(Protocol):
    """A model whose rows of logits are copied for its caller's thread."""

    def last_row(self, index: int) -> Logits:
        """The logits of an evaluated token, shape (n_vocab,), counted from the last one, -1.

        Raises LlamaHybridError where there are none.
        """


class Constrains(Protocol):
    """A processor of logits that may find that nothing can follow."""

    waits: Callable[[], bool] | None
    """The answer that it constrains has not begun."""

    @property
    def error(self) -> str:
        """The reason; empty where there is none."""

    def __call__(self, ids: Any, scores: Any) -> Any:
        """Forbid tokens."""


class Limits(Protocol):
    """Tokens that an answer has in place of sampled ones."""

    @property
    def free(self) -> bool:
        """No grammar holds yet."""

    def next(self) -> int | None:
        """The token that comes next; None: the sampled one."""

    def took(self, token: int) -> None:
        """The answer has this token."""


class Processors:
    """A caller's processors of logits, shown the tokens up to the one that they say the next of.

    Upstream shows them all that was decoded, with a draft's guesses behind that: what an answer comes to then
    depends on how far was guessed.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        self.row = -1
        """The token whose logits are processed, counted from the last one that was decoded."""
        self._given = given

    def __iter__(self) -> Iterator[Callable[[Any, Any], Any]]:
        return (partial(self._process, each) for each in self._given)

    def _process(self, processor: Callable[[Any, Any], Any], ids: Any, scores: Any) -> Any:
        return processor(ids[: self.row + 1] if self.row < -1 else ids, scores)


class CheckedSampler(LlamaSampler):  # type: ignore[misc]
    """A `LlamaSampler` that raises where there are no logits: the library ends the process.

    (src/llama-sampler.cpp, llama_sampler_sample)
    """

    processors: Processors | None = None
    constraint: Constrains | None = None
    limits: Limits | None = None

    def limit(self, limits: Limits) -> None:
        """Set the limits of an answer, whose grammar holds where `limits.free` is False."""
        self.limits = limits
        if self.constraint is not None:
            self.constraint.waits = lambda: limits.free

    @classmethod
    def checking(cls, sampler: LlamaSampler) -> CheckedSampler:
        """Turn a sampler into one, in place."""
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        return sampler

    def sample(self, ctx: Any, idx: int = -1) -> int:
        """Sample and accept a token, as `LlamaSampler.sample`.

        Raises LlamaHybridError without logits, and where a constraint allows no token: the constraint itself
        runs in a callback of ctypes, which drops exceptions.
        """
        token = self._forced()
        if token is None:
            if self.processors is not None:
                self.processors.row = idx
            token = self._sampled(ctx, idx)
            if self.constraint is not None and (why := self.constraint.error):
                raise LlamaHybridError(f"the answer cannot go on as its JSON schema says: {why}")
        return self._took(token)

    def _forced(self) -> int | None:
        """The token that comes next, whatever would be sampled, accepted by all but a grammar."""
        token = None if self.limits is None else self.limits.next()
        if token is not None:
            for part in self._parts():
                llama_cpp.llama_sampler_accept(part, token)
        return token

    def _took(self, token: int) -> int:
        if self.limits is not None:
            self.limits.took(token)
        return token

    def _parts(self) -> Iterator[Any]:
        """The samplers of the chain that are no grammar."""
        nameless = {index for index, _ in self.custom_samplers}
        for index in range(llama_cpp.llama_sampler_chain_n(self.sampler)):
            part = llama_cpp.llama_sampler_chain_get(self.sampler, index)
            if index in nameless or llama_cpp.llama_sampler_name(part) != b"grammar":
                yield part

    def _sampled(self, ctx: Any, idx: int) -> int:
        _row(ctx, idx)
        return int(LlamaSampler.sample(self, ctx, idx))


def _row(ctx: Any, idx: int) -> Any:
    """The first logit of a row of the context. Raises LlamaHybridError where there is none."""
    if not ctx.ctx or not (first := llama_cpp.llama_get_logits_ith(ctx.ctx, idx)):
        raise LlamaHybridError("there are no logits to sample from: eval a token first")
    return first


class RowSampler(CheckedSampler):
    """A `LlamaSampler` that samples from a copied row, or from one of the context in the loop's thread."""

    _model: ref[HasRow]
    _candidates: Any = None
    _ids: Any = None
    _grammar: bool = False

    @classmethod
    def over(cls, sampler: LlamaSampler, model: HasRow, grammar: bool = False) -> RowSampler:
        """Turn a sampler that upstream made for a model into one, in place; `grammar`: it has one."""
        sampler.__class__ = cls
        assert isinstance(sampler, cls)
        sampler._model = ref(model)  # no cycle: a model is freed when nobody uses it any more
        sampler._grammar = grammar
        return sampler

    @property
    def calls_back(self) -> bool:
        """Code of the caller's is asked for each token."""
        return self.processors is not None or bool(self.custom_samplers)

    def _sampled(self, ctx: Any, idx: int) -> int:
        """Sample from a copied row; raises as `sample_at`."""
        model = self._model()
        if model is None or not ctx.ctx:
            raise LlamaHybridError("there are no logits to sample from: the model is closed")
        return self._sample_from(model.last_row(idx))

    def sample_at(self, ctx: Any, place: int | Logits) -> int:
        """Sample and accept a token: from a row of the context, by its index, or from a copy.

        Raises LlamaHybridError where a grammar allows no token, as `[b-a]` does, or what the vocabulary
        cannot spell: the library accepts one all the same, and the process ends
        (src/llama-grammar.cpp, llama_grammar_accept_token).
        """
        token = self._forced()
        return self._took(self._sampled_at(ctx, place) if token is None else token)

    def _sampled_at(self, ctx: Any, place: int | Logits) -> int:
        if isinstance(place, np.ndarray):
            return self._sample_from(place)
        if not self._grammar:
            return super()._sampled(ctx, place)
        n_vocab = int(llama_cpp.llama_vocab_n_tokens(ctx.model.vocab))
        return self._sample_from(np.ctypeslib.as_array(_row(ctx, place), (n_vocab,)))

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


def sampler_for(llm: Any, make: Callable[..., LlamaSampler], *args: Any, **kwargs: Any) -> CheckedSampler:
    """Return the sampler that `make(*args, **kwargs)`, upstream's `_init_sampler`, gives, checked.

    Raises ValueError for a grammar that cannot be read, ModelClosed.
    """
    llm._calls.require_open()
    constraint: Constrains | None = None
    given, more = kwargs.get("logits_processor"), None
    if isinstance(given, WithSamplers):
        more, given = given.samplers, given.processors
    if (grammar := kwargs.get("grammar")) is not None:
        if hasattr(grammar, "constraint"):  # a JSON schema: followed by a processor instead of rules
            constraint = grammar.constraint(llm)
            given = [*(given or ()), constraint]
            kwargs["grammar"] = grammar = None
        else:
            llm._calls.run(require_grammar, llm._model.vocab, grammar)
    kwargs["logits_processor"] = processors = None
    if given is not None:
        kwargs["logits_processor"] = processors = Processors(given)
    sampler = llm._calls.run(partial(make, *args, **kwargs))
    if more is not None:
        insert(llm, sampler, more, kwargs)
    checked: CheckedSampler
    if llm.requests.loop is None and grammar is None:
        checked = CheckedSampler.checking(sampler)
    else:
        checked = RowSampler.over(sampler, llm, grammar is not None)
    checked.processors, checked.constraint = processors, constraint
    return checked


def sampled(llm: Any, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Return the token that `llm.sample` gives; drop the sampler of a call that failed."""
    try:
        return int(llm._calls.run(partial(sample, *args, **kwargs)))
    except LlamaHybridError:
        llm._sampler = None  # upstream would use it for the next call, too
        raise
