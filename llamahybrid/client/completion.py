"""Upstream's completion and its `generate()` as requests of the decode loop."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from os import getpid
from typing import Any

import llama_cpp
import numpy as np

from llamahybrid.capi.samplers import Samplers, insert
from llamahybrid.client.native_calls import held
from llamahybrid.client.requests import Requests
from llamahybrid.client.sampling import RowSampler
from llamahybrid.core.answering import answer_steps
from llamahybrid.core.loop import DecodeLoop
from llamahybrid.core.report import RequestReport
from llamahybrid.core.request import Feed, Reply, Request
from llamahybrid.core.slot import Slot
from llamahybrid.errors import LlamaHybridError, ModelClosed, RequestCancelled, RequestSuperseded

Tokens = Generator[int, Sequence[int] | None, None]

WAIT = -1
"""In place of a token, or of a completion: it is not there yet, and the reader of several may go on."""

_SAMPLE = llama_cpp.Llama.sample
"""Upstream's, before a program replaces it."""

_SAMPLING = {
    name: inspect.signature(llama_cpp.Llama.generate).parameters[name].default
    for name in inspect.signature(llama_cpp.Llama._init_sampler).parameters
    if name != "self"
}
"""Arguments of upstream's sampler, with the defaults of its `generate`."""


def arguments(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that binds arguments to the parameters of an upstream method, without `self`."""
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()  # none of them is keyword-only, or takes several
    names = [each.name for each in parameters]
    known, required = {*names}, {each.name for each in parameters if each.default is each.empty}

    def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs) or not required <= given.keys() <= known:
            signature.bind(None, *args, **kwargs)  # raises TypeError
        return given

    return named


def answer_count(n: Any) -> int:
    """Return the number of answers; None is 1. Raises ValueError unless `n` is an integer of at least 1."""
    try:
        count = 1 if n is None else operator.index(n)
    except TypeError:
        count = 0
    if count < 1 or isinstance(n, bool):
        raise ValueError(f"n counts answers: an integer of at least 1, not {n!r}")
    return count


def keeps_rows(llm: Any, options: Mapping[str, Any]) -> bool:
    """A completion with these options keeps the logits of every token."""
    asked = options.get("logprobs")
    given = asked is not None and asked is not False  # 0 counts as given
    return given and (llm.requests.logprobs_on_request or llm._draft_model is not None)


class Pauses(dict[int, bool]):
    """Tells of a token whether an answer may end on it: the loop does not decode it ahead of the reader."""

    def __init__(self, llm: Any, ends: Collection[int] = (), stops: Sequence[bytes] = ()) -> None:
        """`ends`: the request's own stop tokens; `stops`: its stop strings."""
        super().__init__(dict.fromkeys(ends, True))
        self.ends = set(ends)
        """Tokens that end the answer and are not part of it, of those that were asked for."""
        self._calls, self._model = llm._calls, llm._model
        self._stops = [stop for stop in stops if stop]

    @held
    def __missing__(self, token: int) -> bool:
        if pauses := bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token)):
            self.ends.add(token)
        elif self._stops:
            piece: bytes = self._model.detokenize([token], special=True)
            heads = tuple(piece[:n] for n in range(1, len(piece) + 1))
            pauses = any(stop.endswith(heads) or stop in piece for stop in self._stops)
        self[token] = pauses
        return pauses


def generate(
    llm: Any,
    request: Request,
    tokens: Iterable[int],
    options: dict[str, Any],
    samplers: Samplers | None = None,
) -> Tokens:
    """Generate token ids from a prompt, in a request; `options`: those of upstream's `generate`."""
    requests: Requests = llm.requests
    loop = requests.loop
    assert loop is not None, "upstream generates where there is none"
    reset = options.pop("reset", True)
    asked = {name: options.get(name, default) for name, default in _SAMPLING.items()}
    sampler: RowSampler = llm._init_sampler(**asked)  # as upstream: a wrong argument costs no prefill
    prompt: Any = tokens if isinstance(tokens, (Sequence, np.ndarray)) else list(tokens)
    try:
        requests.begin(request, reset)
        request.prompt = _placed_by(llm, request, prompt, reset)
        rest: list[int] = []
        if overrides(llm, "eval", "sample"):  # a subclass sees each evaluation
            rest = loop.run(request, lambda ex: ex.begin(request, prompt, reset)).tolist()
        else:
            yield from _done(loop, request, lambda ex: ex.prefill(request, prompt, reset))
    except RequestCancelled:
        if request.completing:
            return
        raise
    finally:
        if request.progress is not None:
            requests.note(request)
    progress = request.progress
    assert progress is not None, "it has begun"
    if llm.verbose and reset and (cached := progress.plan.cached):
        left = progress.plan.total - cached
        said = f"{cached} prefix-match hit, remaining {left} prompt tokens to eval"
        print(f"Llama.generate: {said if left else 'full prompt already cached'}", file=sys.stderr)
    if samplers is not None:
        insert(llm, sampler, samplers.after(prompt), asked)
    inner = _answer(llm, request, options, rest, sampler)
    sent: Sequence[int] | None = None
    try:
        while True:
            try:
                if loop.closed:
                    raise ModelClosed("the model is closed")
                if request.over:
                    raise RequestSuperseded("the request is over: it was ended")
                if request.cancelled:
                    raise RequestCancelled(
                        "the request was cancelled; ask again to go on from where it stopped"
                    )
                token = inner.send(sent)
            except StopIteration:
                return
            except RequestCancelled:
                progress.cancelled = True
                if request.completing:
                    return
                raise
            if token != WAIT:
                progress.hand_out(token)
            sent = yield token
            request.sent |= sent is not None
    finally:
        inner.close()


def _done(loop: DecodeLoop, request: Request, begin: Callable[[Slot], Any]) -> Tokens:
    """Run a task of a request to its end (see `DecodeLoop.run`); one of several yields `WAIT` until then."""
    if request.bell is None:
        loop.run(request, begin)
        return
    reply = Reply(request.bell)
    try:
        loop.submit(request, begin, reply)
        while reply.empty():
            yield WAIT
        loop.result(request, reply)
    finally:
        request.awaits = False


def overrides(llm: Any, *names: str) -> bool:
    """A subclass or the object has such a method of its own, or a program upstream's `sample`."""
    replaced = "sample" in names and llama_cpp.Llama.sample is not _SAMPLE
    kind, own = type(llm), llm.own_methods
    return replaced or any(name in vars(llm) or getattr(kind, name) is not own[name] for name in names)


def _placed_by(llm: Any, request: Request, prompt: Sequence[int], reset: bool) -> Any:
    """Return the tokens by which a slot is chosen; None where they are invalid."""
    if request.rests_on is not None:
        return request.rests_on
    try:
        ids = np.asarray(prompt, dtype=np.int32).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        return None
    return ids if reset else np.concatenate([request.view.ids(), ids])


def _answer(
    llm: Any, request: Request, options: dict[str, Any], rest: list[int], sampler: RowSampler
) -> Tokens:
    """Return the answer's tokens, sampled in the loop unless code of the caller takes part."""
    lock_step = (
        overrides(llm, "eval", "sample")
        or options.get("stopping_criteria") is not None
        or llm.draft_model is not None
        or request.view.logits_all
        or llm.requests.loop.here
    )
    view = request.view
    view.sampler = sampler
    if request.limits is not None:
        sampler.limit(request.limits)
    if lock_step or sampler.calls_back:
        return _lock_step(llm, request, options, rest, view.n_tokens + len(rest) - 1)
    return _run_ahead(llm, request, options, sampler)


def _lock_step(llm: Any, request: Request, options: dict[str, Any], tokens: list[int], index: int) -> Tokens:
    """Yield the tokens of an answer, sampled in the caller's thread as in upstream's `Llama.generate`.

    `tokens` are evaluated first; the first sample uses the row of token `index`.
    """
    criteria = options.get("stopping_criteria")
    arguments = {name: options.get(name, default) for name, default in _SAMPLING.items()}
    while True:
        if tokens and request.bell is None:
            llm.eval(tokens)
        elif tokens:
            yield from _done(llm.requests.loop, request, partial(Slot.eval, tokens=tokens))
        while index < llm.n_tokens:
            token = llm.sample(idx=index, **arguments)
            index += 1
            if criteria is not None and criteria(
                llm._input_ids[:index], llm._scores[index - llm.n_tokens, :]
            ):
                return
            sent = yield token
            tokens = [token, *(sent or ())]
            if index < llm.n_tokens and token != llm._input_ids[index]:
                llm.n_tokens = index
                break
        end = llm.n_tokens + len(tokens)
        if (draft := llm.draft_model) is not None and end <= llm._n_ctx:
            llm.input_ids[llm.n_tokens : end] = tokens
            guessed = draft(llm.input_ids[:end]).astype(int)
            tokens.extend(guessed[: llm._n_ctx - end])


def _run_ahead(llm: Any, request: Request, options: dict[str, Any], sampler: RowSampler) -> Tokens:
    """Yield the tokens that the loop samples; continue in lock step once others are sent."""
    loop, view, feed, several = llm.requests.loop, request.view, Feed(request.bell), request.bell is not None
    progress = request.progress
    assert progress is not None, "its prompt is decoded"
    total = progress.plan.total
    sample, pauses = partial(sampler.sample_at, llm._ctx), request.pauses
    interrupted = partial(loop.cancel, request)
    count, last, process = 0, -1, getpid()
    try:
        loop.submit(request, lambda _: answer_steps(request, feed, sample, pauses), feed)
        while True:
            feed.asked += 1
            if feed.paused and feed.asked >= feed.needs:
                loop.resume(request)
            while several and feed.empty():
                yield WAIT
            token: int = feed.get(interrupted)
            request.aside = None  # of a signal handler that ran in this wait
            count += 1
            if count > 1:
                view.input_ids[total + count - 2] = last
                view.n_tokens = total + count - 1
            last = token
            sent = yield token
            if sent is not None or getpid() != process:  # a forked child continues in lock step
                ahead = progress.said[count:] if sent is None else []
                progress.said, progress.decoded = [], 0
                break
    finally:
        request.awaits = False
    for after in ahead:  # sampled before the fork: grammar and seed are behind them
        view.input_ids[view.n_tokens] = token
        view.n_tokens += 1
        token = after
        if (sent := (yield token)) is not None:
            break
    yield from _lock_step(llm, request, options, [token, *(sent or ())], view.n_tokens)


def decode_ahead(llm: Any, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> RequestReport:
    """Decode a prompt (text, token ids or chat messages), and return its report."""
    if isinstance(prompt, str):
        prompt = llm.tokenize(prompt.encode("utf-8"), special=True)
    words: list[Any] = list(prompt)
    if words and isinstance(words[0], dict):
        llm.create_chat_completion(words, max_tokens=1, seed=llm._seed)  # none is drawn for it
    else:
        stream = llm.generate(words, temp=0.0)
        next(stream)
        stream.close()
    report: RequestReport | None = llm.last_request
    if report is None:
        raise LlamaHybridError("there is no prompt cache to warm; leave out prompt_cache=False")
    return report
