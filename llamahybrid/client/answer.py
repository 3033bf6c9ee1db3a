"""Completions, whole or streamed, with the same text, end and log-probabilities either way.

The loop has the shape of upstream's (`Llama._create_completion`), whose own code runs up to the first token.
Upstream's stream loses characters of several tokens, text behind a byte that is not UTF-8, and text that
might have begun a stop string.
"""

from __future__ import annotations

import inspect
import time
import uuid
from codecs import utf_8_decode
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_tokenizer import LlamaTokenizer

from llamahybrid.capi.samplers import TokenBias
from llamahybrid.client.chat_template import is_idle
from llamahybrid.client.completion import WAIT, Pauses, keeps_rows
from llamahybrid.client.extras import Extras, StandIn
from llamahybrid.client.logprobs import (
    AnswerLogprobs,
    EchoedPrompt,
    Logprobs,
    logprobs_with_prompt,
    no_logprobs,
)
from llamahybrid.client.saved_state import load_from
from llamahybrid.core.request import Request

_DEFAULTS = {
    name: each.default
    for name, each in inspect.signature(llama_cpp.Llama._create_completion).parameters.items()
    if each.default is not each.empty
}
_SPELLING = LlamaTokenizer, llama_cpp.Llama.detokenize, LlamaTokenizer.detokenize
"""Upstream's, before a program replaces one of them."""
_UNKNOWN = "\ufffd".encode()
_LEADS = ((2, 0b1100_0000), (3, 0b1110_0000), (4, 0b1111_0000))
"""Bytes of a character in UTF-8, and the bits that its first one has set at least."""

Chunk = dict[str, Any]


def completion(llm: Any, extras: Extras, options: Mapping[str, Any]) -> Iterator[Any]:
    """Make a completion with upstream's arguments, or its chunks, as one request.

    The answers of a group are decoded together (see `answers.Group`).
    """

    def make(extras: Extras, **more: Any) -> tuple[Request, Generator[Any, None, None]]:
        request = llm.requests.request(completing=True, rows=keeps_rows(llm, options))
        made = partial(answer, llm, request, extras, {**options, **more})
        return request, llm.requests.drive(request, made)

    if (group := extras.group) is not None:
        alone = replace(extras, group=None)
        one = lambda i: make(replace(alone, index=i), seed=group.seeds[i])  # noqa: E731
        items: Iterator[Any] | None = group.items(extras.index, one, whole=not options.get("stream"))
        if items is not None:
            return items
    _, made = make(extras)
    if options.get("stream"):
        return made
    with closing(made):  # here, since upstream drops it and would lose errors of `on_request`
        return iter((next(made),))


def answer(
    llm: Any, request: Request, extras: Extras, options: Mapping[str, Any]
) -> Generator[Any, None, None]:
    """Make the completion of a request, or its chunks. Raises upstream's errors."""
    options = _with_defaults(llm, extras, options)
    cache = _cache(llm, request)
    prompt, asked = _asked(llm, options, cache)
    if is_idle(llm, options["stopping_criteria"], prompt):  # the loop need not wait for each token's reader
        options["stopping_criteria"] = asked["stopping_criteria"] = None
    bounds, stream, bos_said = Bounds(llm, options, prompt), options["stream"], not len(options["prompt"])
    pauses = Pauses(llm, extras.stop_token_ids, bounds.stops)
    request.most, request.pauses = bounds.tokens, pauses
    if extras.samplers is not None:
        asked["samplers"] = extras.samplers
    thought = None if extras.thinking is None else extras.thinking.thought(llm, prompt)
    limits = request.limits = None if extras.thinking is None else extras.thinking.limit(llm, prompt)
    # Without a budget a form holds from the first token: only a grammar that spells the end has a thought.
    form, thinking = asked.get("grammar"), extras.thinking
    thinks = limits is not None or form is None or (thinking and thinking.markers.end in form._grammar)
    odds = None
    if options["logprobs"] is not None and (stream or not options["echo"]):
        odds = AnswerLogprobs(llm, options["logprobs"], len(options["prompt"]), prompt)
    common: Chunk = {"id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time())}
    common["model"] = llm.model_path if options["model"] is None else options["model"]

    def with_choice(text: str, logprobs: Logprobs | None, finish_reason: str | None = None) -> Chunk:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**common, "choices": [choice]}

    pieces, bos = token_bytes(llm, extras.spelt), llm.token_bos()
    said: list[int] = [bos] if bos_said else []  # as upstream's
    ending: list[int] = []  # the token that ends the answer, and is not part of it
    text, finish_reason = b"", "length"
    sent, end = 0, None  # bytes of the text: handed out, and up to a stop string
    forced = 0  # bytes up to the end of a thought that the budget ended
    start, mark = 0, b""  # bytes before the answer: a hidden thought, and space; the end of that thought
    if extras.thinking is not None and extras.thinking.hidden and thought is not None and thought.inside:
        mark = extras.thinking.markers.end.encode()
    for token in llm.generate(prompt, **asked):
        if token == WAIT:
            yield WAIT
            continue
        ends = pauses[token] and token in pauses.ends
        sampled = limits is None or len(said) - bos_said not in limits.forced
        if thought is not None and request.progress is not None:
            if thinks and not ends:
                thought.follow(token, sampled)
            request.progress.thinking = thought.tokens
        if ends:
            finish_reason, ending = "stop", [token]
            break
        if extras.on_token is not None:
            extras.on_token(extras.index, token)
        if odds is not None:
            odds.add(token, said, text)
        said.append(token)
        if pieces is None or (said[0] == bos and not extras.spelt):
            text = llm.detokenize(said, prev_tokens=prompt)
        else:
            text += pieces[token]
        if mark:
            sent = start = len(text) - len(text.partition(mark)[2].lstrip())
            mark = mark if start == len(text) else b""
        if not sampled:
            forced = len(text)  # no stop string: the model did not say it
        plain = not bounds.lacking and text[-3:].isascii()  # as most text: its characters are complete
        if not plain and not bounds.complete(text):
            if len(said) - bos_said > bounds.room:
                break
            continue
        if bounds.stops and (found := bounds.stop(text, max(sent, forced))) is not None:
            finish_reason, (end, stop) = "stop", found
            if request.progress is not None:
                request.progress.stop = stop.decode("utf-8")
            break
        if len(said) >= bounds.tokens:
            break
        held = len(text) if plain and not bounds.stops else bounds.held(text, max(sent, forced))
        if not stream:
            sent = held
            continue
        piece, used = utf_8_decode(text[sent:held], "ignore")
        sent += used
        if piece or sent == len(text):
            yield with_choice(piece, None if odds is None else odds.take())
    criteria = options["stopping_criteria"]
    if request.ended_early or (criteria is not None and criteria(llm._input_ids, llm._scores[-1, :])):
        finish_reason, end = "stop", None
    if llm.verbose:
        llm._ctx.print_timings()
    told = None if odds is None else odds.take()
    if stream:
        rest = text[sent:end].decode("utf-8", "ignore")
        if rest or told:
            yield with_choice(rest, told)
        made = with_choice("", None, finish_reason)
    else:
        if odds is not None:
            told = told or no_logprobs()
        made = with_choice(text[start:end].decode("utf-8", "ignore"), told, finish_reason)
        made["usage"] = _usage(prompt, said)
        if options["echo"]:
            scored = {**options, "logprobs": None} if llm.stock_logprobs else options
            _echo(llm, scored, extras, made, prompt, [*said, *ending])
        if llm.stock_logprobs and options["logprobs"] is not None:
            made["choices"][0]["logprobs"] = _stock_logprobs(llm, options, [*said[bos_said:], *ending])
    request.annotate(made)
    if cache is not None:
        cache[prompt + said] = llm.save_state()
    yield made


def _with_defaults(llm: Any, extras: Extras, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with upstream's defaults, as its code takes them."""
    options = {**_DEFAULTS, **options}
    if (given := options["logit_bias"]) is not None:  # upstream makes a processor of it
        told = {int(token): float(bias) for token, bias in given.items()}
        bias = TokenBias(np.arange(llm._n_vocab)[np.array(list(told), np.int64)], list(told.values()))
        processors = llama_cpp.LogitsProcessorList([*(options["logits_processor"] or ()), bias])
        options["logits_processor"] = processors
        options["logit_bias"] = None
    if extras.truncate is not None:
        options["prompt"] = _tokens(llm, options["prompt"])[-extras.truncate :]
    return options


def _tokens(llm: Any, prompt: str | Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, as upstream does (llama.py, _create_completion)."""
    if not isinstance(prompt, str):
        return list(prompt)
    begin = llm._model.add_bos_token() and llm.token_bos() != -1
    tokens: list[int] = llm.tokenize(prompt.encode("utf-8"), add_bos=begin, special=True)
    return tokens


def _usage(prompt: Sequence[int], said: Sequence[int]) -> dict[str, int]:
    n, count = len(prompt), len(said)
    return {"prompt_tokens": n, "completion_tokens": count, "total_tokens": n + count}


class Bounds:
    """Ends of an answer besides end tokens: stop strings, the number of tokens, and the context."""

    def __init__(self, llm: Any, options: Mapping[str, Any], prompt: Sequence[int]) -> None:
        stop = options["stop"]
        stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        self.stops = [each.encode("utf-8") for each in stops]
        self._longest = max(map(len, self.stops), default=0)
        self._firsts = {each[0] for each in self.stops if each}
        self.lacking = 0
        """Tokens for which the text counts as incomplete."""
        most = options["max_tokens"]
        self.room = llm._n_ctx - len(prompt)
        """Tokens of an answer that the context takes; one more can be sampled."""
        self.tokens: int = self.room if most is None or most <= 0 else min(most, self.room)
        """The largest number of tokens, the BOS before the answer to an empty prompt included."""

    def complete(self, text: bytes) -> bool:
        """Upstream looks for stop strings and `max_tokens` after one more token made this text.

        Not while the text ends like an incomplete character, for as many tokens as bytes are missing; a text
        of less than three bytes counts as incomplete.
        """
        for left, byte in zip((3, 2, 1), text[-3:], strict=False):
            for width, lead in _LEADS:
                if byte & lead == lead and width > left:
                    self.lacking = width - left
        if self.lacking:
            self.lacking -= 1
            return False
        return True

    def stop(self, text: bytes, start: int) -> tuple[int, bytes] | None:
        """Return the position of the stop string that ends a text, from `start` on, and that string."""
        for each in self.stops:
            if (at := text.find(each, start)) >= 0:
                return at, each
        return None

    def held(self, text: bytes, start: int) -> int:
        """Return the position, from `start` on, behind which a text may still change.

        Its end may begin a stop string, or be an incomplete character of a tokenizer of `transformers`.
        """
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self.stops):
                return at
        known = text.rstrip(_UNKNOWN) if text.endswith(_UNKNOWN) else text
        return max(start, len(known))


class TokenBytes(dict[int, bytes]):
    """The bytes of tokens, each spelt once: upstream spells the whole answer anew after each token."""

    def __init__(self, llm: Any, spelt: frozenset[int] = frozenset()) -> None:
        """`spelt`: the control tokens that are part of the text."""
        super().__init__()
        self._model = llm._model
        self._bos: int = llm.token_bos()
        self._spelt = spelt

    def __missing__(self, token: int) -> bytes:
        if token == self._bos:  # upstream leaves out a space at the begin of a text that begins with it
            both: bytes = self._model.detokenize([token, token], special=token in self._spelt)
            piece = both[len(both) // 2 :]
        else:
            piece = self._model.detokenize([token], special=token in self._spelt)
        self[token] = piece
        return piece


def token_bytes(llm: Any, spelt: frozenset[int]) -> TokenBytes | None:
    """Return the bytes of a model's tokens; None where a text is not made of those of its tokens.

    `spelt`: the control tokens that are part of the text.
    """
    if (type(llm.tokenizer_), type(llm).detokenize, LlamaTokenizer.detokenize) != _SPELLING:
        return None
    if any("detokenize" in vars(each) for each in (llm, llm.tokenizer_)):
        return None
    known: TokenBytes = llm._token_bytes
    return TokenBytes(llm, spelt) if spelt else known


# -- with upstream's code ------------------------------------------------------------------------------


class _Asked(Exception):
    """Upstream is about to generate the first token."""

    def __init__(self, tokens: list[int], options: dict[str, Any]) -> None:
        self.tokens = tokens
        self.options = options


def _cache(llm: Any, request: Request) -> Any:
    """Return the user's cache of whole states; None without one, with several slots or a salt."""
    return llm.cache if llm.cache and not (llm.requests.several or request.salt) else None


class _Asking(StandIn):
    """Captures the arguments of upstream's `generate`; stands for the user's cache, too."""

    def __init__(self, llm: Any, cache: Any) -> None:
        super().__init__(llm)
        self._cache = cache

    @property
    def cache(self) -> _Asking | None:
        """Upstream takes a state from it, and loads that."""
        return None if self._cache is None else self

    def __getitem__(self, prompt: Sequence[int]) -> llama_cpp.LlamaState:
        return load_from(self._cache, self._llm, prompt)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Do nothing: the state was loaded when upstream took it."""

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        """Raises _Asked."""
        raise _Asked(tokens, options)


def _asked(llm: Any, options: Mapping[str, Any], cache: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt and the options with which upstream calls `generate`. Raises upstream's errors."""
    try:
        list(llama_cpp.Llama._create_completion(_Asking(llm, cache), **options))
    except _Asked as asked:
        return asked.tokens, asked.options
    except ValueError as error:
        said, window, _ = str(error).partition(" exceed context window of ")
        if not window:
            raise
        raise ValueError(f"{said}{window}{llm.n_ctx()}") from None  # upstream adds up the slots' contexts
    raise AssertionError("upstream's completion generates")


class _Replay(StandIn):
    """Says the tokens of an answer again, whose rows of logits are there."""

    cache = None
    verbose = False

    def __init__(self, llm: Any, said: list[int]) -> None:
        super().__init__(llm)
        self._said = said

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        """See `Llama.generate`."""
        return iter(self._said)

    def set_seed(self, seed: int) -> None:
        """The tokens are sampled already."""


def _stock_logprobs(llm: Any, options: Mapping[str, Any], said: list[int]) -> Any:
    """Return upstream's log-probabilities of an answer, `said`, with the token that ended it."""
    options = {**options, "stopping_criteria": None}
    (made,) = llama_cpp.Llama._create_completion(_Replay(llm, said), **options)
    return made["choices"][0]["logprobs"]


def _echo(
    llm: Any, options: Mapping[str, Any], extras: Extras, made: Chunk, tokens: list[int], said: list[int]
) -> None:
    """Put the prompt, `tokens`, before an answer, and log-probabilities of both.

    `said`: the answer's tokens, and the one that ended it: lm-eval takes the last score for the answer's.
    """
    (choice,), best = made["choices"], options["logprobs"]
    prompt = EchoedPrompt(llm, options["prompt"], tokens)
    if extras.prompt_only:
        said, choice["text"], choice["finish_reason"] = [], "", "length"
    if best is not None:
        answered = said if len(options["prompt"]) else said[1:]  # without the BOS, which the prompt has
        choice["logprobs"] = logprobs_with_prompt(llm, best, prompt, answered)
    if best is not None or extras.prompt_only:
        made["usage"] = _usage(tokens, said)
    choice["text"] = prompt.text + choice["text"]
