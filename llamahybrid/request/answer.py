"""One answer, whole or as a stream of chunks, with the same text, end and log-probabilities either way.

Upstream's own stream (`Llama._create_completion`) loses characters of several tokens, all that follows a byte
which is no UTF-8, and what might have begun a stop string. What comes before the first token is upstream's,
and so is a whole answer, but for one that fills the context inside a character: upstream goes on.
"""

from __future__ import annotations

import inspect
import time
from codecs import getincrementaldecoder
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from llamahybrid.llama import Llama

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


def answer(llm: Llama, options: Mapping[str, Any]) -> Generator[Any, Any, None]:
    """Upstream's completion with these arguments of its, or the chunks of it. Raises what upstream raises."""
    asked = {**_DEFAULTS, **options}
    if asked["logit_bias"] is not None and isinstance(asked["logits_processor"], list):
        asked["logits_processor"] = _Processors(asked["logits_processor"])
    return _stream(llm, asked) if asked["stream"] else _whole(llm, asked)


class _Processors(llama_cpp.LogitsProcessorList):  # type: ignore[misc]
    """Upstream extends the caller's list by the biases, and takes what `list.extend` returns for it: none."""

    def extend(self, more: Iterable[Any]) -> _Processors:
        """A list with these, too."""
        return _Processors([*self, *more])


class Bounds:
    """What ends an answer beside the model: its stop strings, the number of its tokens, and the context."""

    def __init__(self, llm: Llama, options: Mapping[str, Any], prompt: Sequence[int]) -> None:
        stop = options["stop"]
        stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        self._stops = [each.encode("utf-8") for each in stops]
        self._longest = max(map(len, self._stops), default=0)
        self._lacking = 0
        most = options["max_tokens"]
        self.room = llm._n_ctx - len(prompt)
        """Tokens of an answer that the context takes. One more can be sampled, behind the last of them."""
        self.tokens: int = self.room if most is None or most <= 0 else min(most, self.room)
        """At most so many, with the one that upstream puts before the answer to an empty prompt."""

    def asked(self, text: bytes) -> bool:
        """After one more token, that made this text: upstream asks for a stop string and for `max_tokens`.

        Not while the end of it looks like a character whose other bytes come with as many tokens; a text of
        less than three bytes is taken for the beginning of such a one.
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
        """Where in a text the stop string begins that ends it, none of them before `start`; None: nowhere."""
        for each in self._stops:
            if (at := text.find(each, start)) >= 0:
                return at
        return None

    def held(self, text: bytes, start: int) -> int:
        """From where on, behind `start`, a text may become another one; its length: nowhere.

        It may be the beginning of a stop string, or of a character that a tokenizer of `transformers` has not
        seen all of.
        """
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if any(each.startswith(text[at:]) for each in self._stops):
                return at
        known = text.rstrip(_UNKNOWN) if text.endswith(_UNKNOWN) else text
        return max(start, len(known))


class _Stand:
    """What upstream takes for the `Llama`, with a `generate` of our own."""

    def __init__(self, llm: Llama) -> None:
        self.stands_for = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stands_for, name)


# -- whole -----------------------------------------------------------------------------------------------


class _Bounded(_Stand):
    """Generates no more than there is room for, where upstream does not look: inside a character."""

    def __init__(self, llm: Llama, options: Mapping[str, Any]) -> None:
        super().__init__(llm)
        self._options = options
        self.ended: bytes | None = None
        """The text of an answer that was ended here."""

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        """See `Llama.generate`."""
        llm, said = self.stands_for, _begun(self.stands_for, self._options)
        room = Bounds(llm, self._options, tokens).room
        for count, token in enumerate(llm.generate(tokens, **options), 1):
            said.append(token)
            yield token
            if count > room:
                self.ended = llm.detokenize(said, prev_tokens=tokens)
                return


def _whole(llm: Llama, options: Mapping[str, Any]) -> Generator[Any, Any, None]:
    bounded = _Bounded(llm, options)
    for made in llama_cpp.Llama._create_completion(bounded, **options):
        if bounded.ended is not None:
            (choice,) = made["choices"]
            said = bounded.ended.decode("utf-8", errors="ignore")
            choice["text"] = options["prompt"] + said if options["echo"] else said
        yield made


# -- streamed --------------------------------------------------------------------------------------------


class _Asked(Exception):
    """Upstream asks for the first token."""

    def __init__(self, tokens: list[int], options: dict[str, Any]) -> None:
        self.tokens = tokens
        self.options = options


class _Asking(_Stand):
    """Learns what upstream generates from."""

    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        """Raises _Asked."""
        raise _Asked(tokens, options)


def _asked(llm: Llama, options: Mapping[str, Any]) -> _Asked:
    try:
        list(llama_cpp.Llama._create_completion(_Asking(llm), **options))
    except _Asked as asked:
        return asked
    raise AssertionError("upstream's completion generates")


def _stream(llm: Llama, options: Mapping[str, Any]) -> Generator[Chunk, Any, None]:
    named = {"id": f"cmpl-{uuid4()}", "object": "text_completion", "created": int(time.time())}
    named["model"] = llm.model_path if options["model"] is None else options["model"]

    def chunk(text: str, logprobs: Chunk | None, finish_reason: str | None = None) -> Chunk:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**named, "choices": [choice]}

    asked = _asked(llm, options)
    prompt, bounds = asked.tokens, Bounds(llm, options, asked.tokens)
    said, text, sent = _begun(llm, options), b"", 0
    decoder, finish_reason, end = _Decoder(errors="ignore"), "length", None
    odds = _Odds(llm, options, prompt)
    for count, token in enumerate(llm.generate(prompt, **asked.options), 1):
        if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            finish_reason = "stop"
            break
        odds.add(token, said, text)
        said.append(token)
        text = llm.detokenize(said, prev_tokens=prompt)
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


def _begun(llm: Llama, options: Mapping[str, Any]) -> list[int]:
    """What upstream has an answer begin with."""
    return [] if len(options["prompt"]) else [llm.token_bos()]


class _Odds:
    """The log-probabilities of tokens, told with the text that they are of."""

    def __init__(self, llm: Llama, options: Mapping[str, Any], prompt: Sequence[int]) -> None:
        self._llm = llm
        self._best: int | None = options["logprobs"]
        self._before = len(options["prompt"])
        self._row = len(prompt) - 1
        self._told: Chunk | None = None

    def add(self, token: int, said: list[int], text: bytes) -> None:
        """The next token of an answer, and what was said before it."""
        if self._best is None:
            return
        row, self._row = self._llm._scores[self._row], self._row + 1
        if token == self._llm.token_bos():  # as upstream
            return
        odds = llama_cpp.Llama.logits_to_logprobs(row)
        order = np.lexsort((np.arange(len(odds)), odds))[::-1]
        top = {self._spell(int(each), said): float(odds[each]) for each in order[: self._best]}
        spelt = self._spell(token, said)
        top[spelt] = float(odds[token])
        offset = self._before + len(text.decode("utf-8", errors="ignore"))
        told = {"tokens": spelt, "text_offset": offset, "token_logprobs": top[spelt], "top_logprobs": top}
        self._told = self._told or {name: [] for name in told}
        for name, value in told.items():
            self._told[name].append(value)

    def take(self) -> Chunk | None:
        """Those that were not told yet."""
        told, self._told = self._told, None
        return told

    def _spell(self, token: int, before: list[int]) -> str:
        return self._llm.detokenize([token], prev_tokens=before).decode("utf-8", errors="ignore")
