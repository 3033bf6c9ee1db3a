"""Answers: several answers to one prompt, as one completion or one stream of chunks.

Each answer is a separate completion with its own sampler and seed. With several slots that can load each
other's state they run in parallel, in threads; else one by one. The prompt is decoded once, for the first
answer.
"""

from __future__ import annotations

import contextvars
import operator
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import finalize

from llamahybrid.client.collecting import collecting
from llamahybrid.client.completion import keeps_rows
from llamahybrid.client.extras import asking, current_extras
from llamahybrid.client.handle import RequestHandle, belonging_to
from llamahybrid.client.salt import SHARED
from llamahybrid.core.request import Request
from llamahybrid.errors import LlamaHybridError

RANDOM_SEED = 0xFFFFFFFF
"""Seed for a random seed of the library (LLAMA_DEFAULT_SEED, include/llama.h)."""

AHEAD = 8
"""Most unread chunks of each answer of a stream."""

Make = Callable[[int], Any]
"""Makes one answer, by its index: a completion, or an iterator of chunks."""

Part = tuple[int, Any]
"""The index of an answer, and its completion or one of its chunks."""


def answer_count(n: Any) -> int:
    """Return the number of answers; None is 1. Raises ValueError unless `n` is an integer of at least 1."""
    try:
        count = 1 if n is None else operator.index(n)
    except TypeError:
        count = 0
    if count < 1 or isinstance(n, bool):
        raise ValueError(f"n counts answers: an integer of at least 1, not {n!r}")
    return count


def seeds(first: int, count: int) -> list[int]:
    """Return the seeds of the answers, counted up from `first`; all the same for random seeds."""
    number = first & 0xFFFFFFFF  # as the library reads it
    if number == RANDOM_SEED:
        return [first] * count
    return [first, *((number + i) % RANDOM_SEED for i in range(1, count))]


def answers(llm: Any, create: Callable[..., Any], options: Mapping[str, Any], count: int) -> Any:
    """Return `count` answers of `create(**options)`, each as if alone: a completion, or a stream.

    A completion has all choices, one id, and a usage that counts the prompt once. In a stream each chunk's
    choice has the index of its answer. An error or a cancel of one answer ends all.
    Raises LlamaHybridError for natively decoded content (an image), which has one answer.
    """
    handle = Siblings(llm.requests, llm.requests.handle(), llm.requests.salt())
    extras = current_extras()

    def one(index: int, own: dict[str, Any]) -> Any:
        with asking(replace(extras, index=index)):
            return create(**own)

    parts = _parts(llm, one, dict(options), count, handle)
    if "prompt" in options and llm.requests.seen.handoff and llm.requests.seen.salt == handle.salt:
        raise LlamaHybridError("an image is answered once: use n of create_chat_completion instead")
    return _as_one_stream(parts) if options.get("stream") else merged(dict(parts))


class Siblings(RequestHandle):
    """The requests of one call: the first one decodes the prompt, and the others resume from its state."""

    def __init__(self, owner: Any, part_of: RequestHandle | None, salt: bytes = SHARED) -> None:
        super().__init__(owner, part_of, salt)
        self.entered()
        self.began: Callable[[], object] | None = None
        """Called when the first request was made."""

    @property
    def first(self) -> Request | None:
        """The request that decodes the prompt."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """See `RequestHandle.add`."""
        first = self.first
        if first is None:
            request.leads = True
        else:
            request.after = first
        super().add(request)
        if first is None and self.began is not None:
            self.began()

    def made(self, item: Any) -> None:
        """Note a completion or chunk; one that ends as cancelled cancels the others."""
        if any(choice["finish_reason"] == "cancelled" for choice in item["choices"]):
            self.cancel()


# -- one completion of several -----------------------------------------------------------------------


def merged(completions: Mapping[int, Any]) -> dict[str, Any]:
    """Merge completions into one with all choices; the prompt is counted once."""
    whole = dict(completions[0])
    each = [completions[index]["choices"] for index in sorted(completions)]
    whole["choices"] = [{**choices[0], "index": index} for index, choices in enumerate(each)]
    if whole.get("usage"):
        said = sum(completion["usage"]["completion_tokens"] for completion in completions.values())
        usage = dict(whole["usage"], completion_tokens=said)
        if "completion_tokens_details" in usage:
            told = [each["usage"]["completion_tokens_details"] for each in completions.values()]
            thought = sum(each["reasoning_tokens"] for each in told)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        whole["usage"] = dict(usage, total_tokens=usage["prompt_tokens"] + said)
    return whole


def _as_one_stream(parts: Generator[Part, None, None]) -> Iterator[Any]:
    """Give the chunks of all answers the same id, and their index."""
    same: dict[str, Any] = {}
    with closing(parts):
        for index, chunk in parts:
            same = same or {"id": chunk["id"], "created": chunk["created"]}
            yield {**chunk, **same, "choices": [{**choice, "index": index} for choice in chunk["choices"]]}


# -- making them -------------------------------------------------------------------------------------


def _parts(
    llm: Any,
    create: Callable[[int, dict[str, Any]], Any],
    options: dict[str, Any],
    count: int,
    handle: Siblings,
) -> Generator[Part, None, None]:
    requests, stream = llm.requests, bool(options.get("stream"))
    seed = options.get("seed")
    if seed is None:  # as upstream draws it
        with belonging_to(handle):  # a stream may be advanced in another context
            seed = random.Random(llm._seed).randint(0, 2**32)
    each = seeds(seed, count)

    def make(index: int) -> Any:
        return create(index, dict(options, seed=each[index]))

    if requests.inside is None and _go_on_from_each_other(llm, options):
        parts = _side_by_side(llm, make, count, handle, stream)
    else:
        parts = _one_after_the_other(make, count, handle, stream)
    try:
        with closing(parts):
            for index, item in parts:
                if handle.first is not None and handle.first.progress is not None:
                    requests.note(handle.first)
                yield index, item
    finally:
        if requests.seed in each:
            llm.set_seed(seed)  # as after a single answer


def _go_on_from_each_other(llm: Any, options: Mapping[str, Any]) -> bool:
    """Slots can load the state of other slots."""
    if len(llm.slots) < 2 or llm.chat_handler is not None:
        return False
    rows = llm.requests.seen.always_rows or keeps_rows(llm, options)
    return llm.slots.all[0].runner.live.profile.keeps_chats and not rows


def _one_after_the_other(
    make: Make, count: int, handle: Siblings, stream: bool
) -> Generator[Part, None, None]:
    """Make the answers one by one, in the calling thread."""
    for index in range(count):
        with belonging_to(handle):
            made = make(index)
        if not stream:
            handle.made(made)
            yield index, made
            continue
        with _ending(made) as chunks:
            while True:
                with belonging_to(handle):
                    chunk = next(chunks, None)
                if chunk is None:
                    break
                handle.made(chunk)
                yield index, chunk


def _side_by_side(
    llm: Any, make: Make, count: int, handle: Siblings, stream: bool
) -> Generator[Part, None, None]:
    """Make the answers in parallel, in a thread for each slot; the threads end with this generator."""
    crew, threads, owner = _Crew(make, count, handle, stream), list[threading.Thread](), _Owner()
    dismiss = finalize(owner, crew.dismiss)
    dismiss.atexit = False
    try:
        yield from crew.parts(threads, min(count, len(llm.slots)))
    finally:
        dismiss()
        loop = llm.requests.loop
        if not (collecting() or llm.requests.inside is not None or (loop is not None and loop.here)):
            for thread in threads:
                thread.join()


class _Owner:
    """Lives as long as the generator of the answers."""


@dataclass(frozen=True)
class _Left:
    """A thread has ended, or failed."""

    error: BaseException | None


class _Crew:
    """Threads that make answers, and their queues; holds no reference to the reader."""

    def __init__(self, make: Make, count: int, handle: Siblings, stream: bool) -> None:
        self._make = make
        self._handle = handle
        self._stream = stream
        self._over = False
        # SimpleQueue is reentrant: the garbage collector may run `dismiss` inside any call.
        self._news: SimpleQueue[Part | _Left | None] = SimpleQueue()
        self._todo: SimpleQueue[int] = SimpleQueue()
        self._room: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(count)]
        for index in range(count):
            self._todo.put(index)
            for _ in range(AHEAD if stream else 0):
                self._room[index].put(None)
        handle.began = partial(self._news.put, None)

    def parts(self, threads: list[threading.Thread], width: int) -> Generator[Part, None, None]:
        """Yield completions or chunks of `width` threads, added to `threads`. Raises the first error."""
        self._start(threads)
        left = 0
        while left < len(threads):
            news = self._news.get()
            while len(threads) < width:  # the first thread has made its request
                self._start(threads)
            if isinstance(news, _Left):
                left += 1
                if news.error is not None:
                    raise news.error
            elif news is not None:
                yield news
                self._room[news[0]].put(None)

    def dismiss(self) -> None:
        """Cancel all answers; takes no lock."""
        self._over = True
        self._handle.drop()
        for room in self._room:
            room.put(None)

    def _start(self, threads: list[threading.Thread]) -> None:
        target = partial(contextvars.copy_context().run, self._work)
        threads.append(threading.Thread(target=target, name="llamahybrid-answer", daemon=True))
        threads[-1].start()

    def _work(self) -> None:
        error = None
        try:
            with belonging_to(self._handle):
                while not self._over and (index := self._next()) is not None:
                    self._answer(index)
        except BaseException as raised:
            error = raised
        self._news.put(_Left(error))

    def _next(self) -> int | None:
        try:
            return self._todo.get_nowait()
        except Empty:
            return None

    def _answer(self, index: int) -> None:
        made = self._make(index)
        if not self._stream:
            self._tell(index, made)
            return
        with _ending(made) as chunks:
            for chunk in chunks:
                self._tell(index, chunk)
                self._room[index].get()
                if self._over:
                    return

    def _tell(self, index: int, item: Any) -> None:
        self._handle.made(item)  # at once, however late it is read
        self._news.put((index, item))


@contextmanager
def _ending(made: Any) -> Iterator[Iterator[Any]]:
    """Close a stream of chunks at the end, where it can be closed."""
    chunks = iter(made)
    try:
        yield chunks
    finally:
        if isinstance(chunks, Generator):
            chunks.close()
