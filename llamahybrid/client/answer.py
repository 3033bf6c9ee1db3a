"""Completions, whole or streamed, with the same text, end and log-probabilities either way.

Upstream's own stream (`Llama._create_completion`) loses characters of several tokens, text behind a byte that
is not UTF-8, and text that might have begun a stop string. Upstream's code still runs up to the first token,
and makes whole answers, with these exceptions: an answer that fills the context inside a character, one that
ends on a stop token of the request, log-probabilities, and the echo of a prompt.
"""

from __future__ import annotations

import inspect
import time
from codecs import getincrementaldecoder
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import llama_cpp

from llamahybrid.client.answer_text import AnswerSpelling
from llamahybrid.client.completion import Pauses
from llamahybrid.client.extras import NO_EXTRAS, Extras
from llamahybrid.client.logprobs import (
    AnswerLogprobs,
    EchoedPrompt,
    logprobs_of_answer,
    logprobs_with_prompt,
)
from llamahybrid.client.stand_in import StandIn

_DEFAULTS = {
    name: each.default
    for name, each in inspect.signature(llama_cpp.Llama._create_completion).parameters.items()
    if each.default is not each.empty
}
_Decoder = getincrementaldecoder("utf-8")
_UNKNOWN = "\ufffd".encode()
_LEADS = ((2, 0b1100_0000), (3, 0b1110_0000), (4, 0b1111_0000))
"""Bytes of a character in UTF-8, and the bits that its first one has set at least."""

Chunk = dict[str, Any]


def answer(llm: Any, options: Mapping[str, Any], extras: Extras = NO_EXTRAS) -> Generator[Any, Any, None]:
    """Make a completion with upstream's arguments, or its chunks. Raises upstream's errors."""
    asked = {**_DEFAULTS, **options}
    if asked["logit_bias"] is not None and isinstance(asked["logits_processor"], list):
        asked["logits_processor"] = _Processors(asked["logits_processor"])
    if extras.truncate is not None:
        asked["prompt"] = _tokens(llm, asked["prompt"])[-extras.truncate :]
    made = _stream(llm, asked, extras) if asked["stream"] else _whole(llm, asked, extras)
    try:
        yield from made
    except ValueError as error:
        said, window, _ = str(error).partition(" exceed context window of ")
        if not window:
            raise
        raise ValueError(f"{said}{window}{llm.n_ctx()}") from None  # upstream adds up the slots' contexts


def _tokens(llm: Any, prompt: str | Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, as upstream does (llama.py, _create_completion)."""
    if not isinstance(prompt, str):
        return list(prompt)
    begin = llm._model.add_bos_token() and llm.token_bos() != -1
    tokens: list[int] = llm.tokenize(prompt.encode("utf-8"), add_bos=begin, special=True)
    return tokens


def _generate(
    llm: Any, prompt: list[int], extras: Extras, options: dict[str, Any], bounds: Bounds
) -> Iterator[tuple[int, bool]]:
    """Yield the tokens of an answer, each with True if the answer ends before it."""
    request = llm.requests.inside
    assert request is not None, "a completion is a request"
    request.most, request.pauses = bounds.tokens, Pauses(llm, extras.stop_token_ids, bounds.stops)
    if extras.samplers is not None:
        options = {**options, "samplers": extras.samplers}
    thought = None if extras.thinking is None else extras.thinking.thought(llm, prompt)
    request.limits = None if extras.thinking is None else extras.thinking.limit(llm, prompt)
    for token in llm.generate(prompt, **options):
        ends = token in extras.stop_token_ids or llm._calls.run(
            llama_cpp.llama_vocab_is_eog, llm._model.vocab, token
        )
        if thought is not None and request.progress is not None:
            if not ends:
                thought.follow(token)
            request.progress.thinking = thought.tokens
        if extras.on_token is not None and not ends:
            extras.on_token(extras.index, token)
        yield token, ends


class _Processors(llama_cpp.LogitsProcessorList):  # type: ignore[misc]
    """Fixes upstream, which extends the caller's list by biases and uses `list.extend`'s result, None."""

    def extend(self, more: Iterable[Any]) -> _Processors:
        """A list with these, too."""
        return _Processors([*self, *more])


class Bounds:
    """Ends of an answer besides end tokens: stop strings, the number of tokens, and the context."""

    def __init__(self, llm: Any, options: Mapping[str, Any], prompt: Sequence[int]) -> None:
        stop = options["stop"]
        stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        self.stops = [each.encode("utf-8") for each in stops]
        self._longest = max(map(len, self.stops), default=0)
        self._lacking = 0
        most = options["max_tokens"]
        self.room = llm._n_ctx - len(prompt)
        """Tokens of an answer that the context takes; one more can be sampled."""
        self.tokens: int = self.room if most is None or most <= 0 else min(most, self.room)
        """The largest number of tokens, the BOS before the answer to an empty prompt included."""

    def asked(self, text: bytes) -> bool:
        """Upstream looks for stop strings and `max_tokens` after one more token made this text.

        Not while the text ends like an incomplete character, for as many tokens as bytes are missing; a text
        of less than three bytes counts as incomplete.
        """
        for left, byte in zip((3, 2, 1), text[-3:], strict=False):
            for width, lead in _LEADS:
                if byte & lead == lead and width > left:
                    self._lacking = width - left
        if self._lacking:
            self._lacking -= 1
            return False
        return True

    def stop(self, text: bytes, start: int) -> int | None:
        """Return the position of the stop string that ends a text, from `start` on; None: there is none."""
        for each in self.stops:
            if (at := text.find(each, start)) >= 0:
                return at
        return None

    def held(self, text: bytes, start: int) -> int:
        """Return the position, from `start` on, behind which a text may still change.

        Its end may begin a stop string, or be an incomplete character of a tokenizer of `transformers`.
        """
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if any(each.startswith(text[at:]) for each in self.stops):
                return at
        known = text.rstrip(_UNKNOWN) if text.endswith(_UNKNOWN) else text
        return max(start, len(known))


# -- whole -----------------------------------------------------------------------------------------------


class _Bounded(StandIn):
    """Ends an answer at a full context inside a character, where upstream continues.

    And on the request's own stop tokens.
    """

    def __init__(self, llm: Any, options: Mapping[str, Any], extras: Extras) -> None:
        super().__init__(llm)
        self._options = options
        self._extras = extras
        self.prompt: list[int] = []
        self.said: list[int] = []
        """The tokens of the answer so far."""
        self.end: int | None = None
        """The token that ended the answer and is not part of it."""
        self.ended: bytes | None = None
        """The text of an answer that was ended here."""
        self.detokenize = AnswerSpelling(llm, extras.spelt)
        """Upstream's method of that name."""

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        """See `Llama.generate`."""
        llm, said = self._llm, _begun(self._llm, self._options)
        self.prompt, self.said = tokens, said
        bounds = Bounds(llm, self._options, tokens)
        room = bounds.room
        generated = _generate(llm, tokens, self._extras, options, bounds)
        for count, (token, ends) in enumerate(generated, 1):
            if ends:
                self.end = token
                if token in self._extras.stop_token_ids:
                    self.ended = self.detokenize(said, prev_tokens=tokens)
                    return
            else:
                said.append(token)
            yield token
            if count > room:
                self.ended = self.detokenize(said, prev_tokens=tokens)
                return

    def finish(self, choice: Chunk) -> None:
        """Write the text and finish reason of an answer that was ended here into its choice."""
        if self.ended is None:
            return
        choice["text"] = self.ended.decode("utf-8", errors="ignore")
        if self.end in self._extras.stop_token_ids:
            choice["finish_reason"] = "stop"


def _whole(llm: Any, options: Mapping[str, Any], extras: Extras) -> Generator[Any, Any, None]:
    bounded = _Bounded(llm, options, extras)
    if llm.stock_logprobs:
        for made in llama_cpp.Llama._create_completion(bounded, **options):
            bounded.finish(made["choices"][0])
            if bounded.ended is not None and options["echo"]:
                made["choices"][0]["text"] = options["prompt"] + made["choices"][0]["text"]
            yield made
        return
    if options["logprobs"] is not None and not llm._logits_all:  # as upstream
        raise ValueError("logprobs is not supported for models created with logits_all=False")
    plain = {**options, "echo": False, "logprobs": None}
    for made in llama_cpp.Llama._create_completion(bounded, **plain):
        bounded.finish(made["choices"][0])
        _tell(llm, options, extras, bounded, made)
        yield made


def _tell(llm: Any, options: Mapping[str, Any], extras: Extras, bounded: _Bounded, made: Chunk) -> None:
    """Write the echoed prompt and the log-probabilities into a completion."""
    (choice,), best, said = made["choices"], options["logprobs"], list(bounded.said)
    if not options["echo"]:
        if best is not None:
            before = len(options["prompt"])
            choice["logprobs"] = logprobs_of_answer(llm, best, before, bounded.prompt, said)
        return
    prompt = EchoedPrompt(llm, options["prompt"], bounded.prompt)
    if extras.prompt_only:
        said, choice["text"], choice["finish_reason"] = [], "", "length"
    elif best is not None and bounded.end is not None:  # lm-eval takes the last score for the answer's
        said.append(bounded.end)
    if best is not None:
        choice["logprobs"] = logprobs_with_prompt(llm, best, prompt, said)
    if best is not None or extras.prompt_only:
        n = len(bounded.prompt)
        made["usage"].update(completion_tokens=len(said), total_tokens=n + len(said))
    choice["text"] = prompt.text + choice["text"]


# -- streamed --------------------------------------------------------------------------------------------


class _Asked(Exception):
    """Upstream is about to generate the first token."""

    def __init__(self, tokens: list[int], options: dict[str, Any]) -> None:
        self.tokens = tokens
        self.options = options


class _Asking(StandIn):
    """Captures the arguments of upstream's `generate`."""

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        """Raises _Asked."""
        raise _Asked(tokens, options)


def _asked(llm: Any, options: Mapping[str, Any]) -> _Asked:
    try:
        list(llama_cpp.Llama._create_completion(_Asking(llm), **options))
    except _Asked as asked:
        return asked.with_traceback(None)  # whose frames hold the model
    raise AssertionError("upstream's completion generates")


def _stream(llm: Any, options: Mapping[str, Any], extras: Extras) -> Generator[Chunk, Any, None]:
    named = {"id": f"cmpl-{uuid4()}", "object": "text_completion", "created": int(time.time())}
    named["model"] = llm.model_path if options["model"] is None else options["model"]

    def chunk(text: str, logprobs: Chunk | None, finish_reason: str | None = None) -> Chunk:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**named, "choices": [choice]}

    asked = _asked(llm, options)
    prompt, bounds = asked.tokens, Bounds(llm, options, asked.tokens)
    said, text, sent, spell = _begun(llm, options), b"", 0, AnswerSpelling(llm, extras.spelt)
    decoder, finish_reason, end = _Decoder(errors="ignore"), "length", None
    odds = AnswerLogprobs(llm, options["logprobs"], len(options["prompt"]), prompt)
    for count, (token, ends) in enumerate(_generate(llm, prompt, extras, asked.options, bounds), 1):
        if ends:
            finish_reason = "stop"
            break
        odds.add(token, said, text)
        said.append(token)
        text = spell(said, prev_tokens=prompt)
        if not bounds.asked(text):
            if count > bounds.room:
                break
            continue
        end = bounds.stop(text, sent)
        if end is not None:
            finish_reason = "stop"
            break
        if len(said) >= bounds.tokens:
            break
        held = bounds.held(text, sent)
        piece, sent = decoder.decode(text[sent:held]), held
        if piece or (held == len(text) and not decoder.getstate()[0]):
            yield chunk(piece, odds.take())
    criteria = options["stopping_criteria"]
    if criteria is not None and criteria(llm._input_ids, llm._scores[-1, :]):
        finish_reason, end = "stop", None
    if llm.verbose:
        llm._ctx.print_timings()
    piece, logprobs = decoder.decode(text[sent:end], final=True), odds.take()
    if piece or logprobs:
        yield chunk(piece, logprobs)
    yield chunk("", None, finish_reason)
    if llm.cache:
        llm.cache[prompt + said] = llm.save_state()


def _begun(llm: Any, options: Mapping[str, Any]) -> list[int]:
    """Return the first tokens of upstream's answer: a BOS for an empty prompt."""
    return [] if len(options["prompt"]) else [llm.token_bos()]
