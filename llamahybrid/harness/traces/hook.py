"""Records the requests of a program to `llamahybrid.Llama`: token ids, and the messages behind them."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import llama_cpp

from llamahybrid.harness.conversation import Request
from llamahybrid.harness.traces.hashing import Hasher
from llamahybrid.harness.traces.trace import Entry, TraceWriter

logger = logging.getLogger("llamahybrid")


class Recorder:
    """Writes each finished request of every `Llama` in this process; errors of it never reach the program."""

    def __init__(self, path: Path, hashed: bool) -> None:
        """Raises OSError."""
        self._writer = TraceWriter(path, "llamahybrid.Llama", Hasher() if hashed else None)
        self._asked = threading.local()
        # not by `id`, which another model may get: its text would be shown as control tokens
        self._tokens: WeakKeyDictionary[Any, tuple[list[int], set[int]]] = WeakKeyDictionary()
        atexit.register(self._writer.close)

    def attach(self, kind: type[Any]) -> None:
        """Watch a class of ours, whose requests all pass through `generate`."""
        kind.generate = self._generate(kind.generate)
        kind.create_chat_completion = self._chat(kind.create_chat_completion)

    def _chat(self, create: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(create)
        def watched(llm: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            messages = list(messages)
            self._asked.chat = (_plain(messages), _plain(kwargs.get("tools")))
            try:
                made = create(llm, messages, *args, **kwargs)
            finally:
                noted, self._asked.chat = self._asked.chat, None
            return self._streamed(made, noted) if isinstance(made, Generator) else made

        return watched

    def _streamed(self, stream: Any, noted: Any) -> Generator[Any, Any, None]:
        """Set the chat of a stream, whose decoding begins long after the call."""
        self._asked.chat = noted
        try:
            for event in stream:
                yield event
                self._asked.chat = noted if event is None else self._asked.chat
        finally:
            self._asked.chat = None

    def _generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(generate)
        def watched(llm: Any, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            chat, self._asked.chat = getattr(self._asked, "chat", None), None
            tokens = list(tokens) if isinstance(tokens, Iterator) else tokens  # it can be read once
            stream = generate(llm, tokens, *args, **kwargs)
            return self._watch(llm, tuple(map(int, tokens)), stream, kwargs, chat)

        return watched

    def _watch(self, llm: Any, prompt: tuple[int, ...], stream: Any, options: Any, chat: Any) -> Any:
        at, began = self._writer.now(), time.perf_counter()
        first: float | None = None
        answer: list[int] = []
        salt, (words, control) = _salt(llm), self._of(llm)
        try:
            for token in stream:
                first = first or time.perf_counter() - began
                answer.append(int(token))
                yield token
        finally:
            stream.close()
            seconds = time.perf_counter() - began
            try:
                ask = _asked(prompt, answer, options, chat, salt)
                cached = getattr(getattr(llm, "last_request", None), "cached", None)
                entry = Entry(at, ask, "", tuple(answer), len(prompt), cached, seconds, first)
                self._writer.add(entry, words, control)
            except Exception as error:
                logger.warning("a request was not recorded: %s: %s", type(error).__name__, error)

    def _of(self, llm: Any) -> tuple[list[int], set[int]]:
        """Return the words and the control tokens of a model's vocabulary."""
        if llm not in self._tokens:
            vocab, every = llama_cpp.llama_model_get_vocab(llm.model), range(llm.n_vocab())
            control = {token for token in every if llama_cpp.llama_vocab_is_control(vocab, token)}
            self._tokens[llm] = [token for token in every if token not in control], control
        return self._tokens[llm]


def _asked(prompt: tuple[int, ...], answer: Sequence[int], options: Any, chat: Any, salt: str) -> Request:
    messages, tools = chat or ((), ())
    seed = None if options.get("temp", 0.8) == 0 else 0
    return Request(max(1, len(answer)), prompt, tuple(messages), tuple(tools), seed=seed, salt=salt)


def _plain(said: Any) -> list[Any]:
    """Return a copy of messages as JSON; empty if JSON cannot hold them."""
    try:
        found = json.loads(json.dumps(list(said or ()), default=str))
    except (TypeError, ValueError, RecursionError):
        return []
    return found if all(isinstance(each, dict) for each in found) else []


def _salt(llm: Any) -> str:
    """Return a name of the current salt, which is not the salt itself."""
    requests = getattr(llm, "requests", None)
    salt: bytes = b"" if requests is None else requests.salt()
    return salt.hex()


def record_into(path: Path, hashed: bool) -> None:
    """Record all requests of this process from now on; imports llama_cpp. Raises OSError."""
    from llamahybrid.llama import Llama

    Recorder(path, hashed).attach(Llama)
