"""Answers: several answers to one prompt, as one completion or one stream of chunks.

Each answer is a separate completion with its own sampler and seed. With several slots that can load each
other's state they are decoded together, and the caller's thread reads them by turns; else one by one. The
prompt is decoded once, for the first answer.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from llamahybrid.client.completion import WAIT, keeps_rows, overrides
from llamahybrid.client.extras import Extras, asking, current_extras
from llamahybrid.client.handle import RequestHandle, advanced_for
from llamahybrid.client.salt import SHARED
from llamahybrid.core.request import Bell, Request
from llamahybrid.errors import LlamaHybridError

RANDOM_SEED = 0xFFFFFFFF
"""Seed for a random seed of the library (LLAMA_DEFAULT_SEED, include/llama.h)."""

Part = tuple[int, Any]
"""The index of an answer, and its completion or one of its chunks."""


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
    parts = _parts(llm, create, dict(options), count, handle, current_extras())
    if "prompt" in options and llm.requests.seen.handoff and llm.requests.seen.salt == handle.salt:
        raise LlamaHybridError("an image is answered once: use n of create_chat_completion instead")
    return _as_one_stream(parts) if options.get("stream") else merged(dict(parts))


class Siblings(RequestHandle):
    """The requests of one call: the first one decodes the prompt, and the others resume from its state."""

    def __init__(self, owner: Any, part_of: RequestHandle | None, salt: bytes = SHARED) -> None:
        super().__init__(owner, part_of, salt)
        self.entered()

    @property
    def first(self) -> Request | None:
        """The request that decodes the prompt."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """See `RequestHandle.add`."""
        first = self.first
        if first is None:
            request.leads = True
        elif self._owner.inside is not first:  # the first answer waits for a request made inside it
            request.after = first
        super().add(request)

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
    create: Callable[..., Any],
    options: dict[str, Any],
    count: int,
    handle: Siblings,
    extras: Extras,
) -> Generator[Part, None, None]:
    requests, stream = llm.requests, bool(options.get("stream"))
    seed, group = options.get("seed"), None
    each: list[int] = []

    def make(index: int) -> Any:
        with asking(replace(extras, index=index, group=group)):
            return handle.run(partial(create, **options | {"seed": each[index]}))

    try:
        if seed is None:  # as upstream draws it
            drawn = handle.run(lambda: llm._seed)  # a stream may be advanced in another context
            seed = random.Random(drawn).randint(0, 2**32)
        each = seeds(seed, count)
        if requests.inside is None and _go_on_from_each_other(llm, options):
            group = Group(handle, each, len(llm.slots))
        parts = _chunks(make, count, group, handle) if stream else ((n, make(n)) for n in range(count))
        with closing(parts):
            for index, item in parts:
                handle.made(item)
                if handle.first is not None and handle.first.progress is not None:
                    requests.note(handle.first)
                yield index, item
    finally:
        handle.open = False  # an interrupt may have left it in the context
        if group is not None:
            group.close()
        if requests.seed in each:
            llm.set_seed(seed)  # as after a single answer


def _go_on_from_each_other(llm: Any, options: Mapping[str, Any]) -> bool:
    """Slots can load the state of other slots, and no code of the caller stands between."""
    if len(llm.slots) < 2 or llm.chat_handler is not None or overrides(llm, "eval", "generate", "sample"):
        return False
    rows = llm.requests.seen.always_rows or keeps_rows(llm, options)
    return llm.slots.all[0].runner.live.profile.keeps_chats and not rows


def _chunks(
    make: Callable[[int], Any], count: int, group: Group | None, handle: Siblings
) -> Generator[Part, None, None]:
    """Yield the chunks of all answers: of each that has some, or of one after the other."""
    if group is None:
        for index in range(count):
            with closing(advanced_for(handle, make(index))) as chunks:
                yield from ((index, chunk) for chunk in chunks)
        return
    streams = {index: advanced_for(handle, make(index)) for index in range(count)}
    while streams:
        ready = [index for index in streams if group.ready(index)]
        if not ready:
            group.advance()
        for index in ready:
            while (chunk := next(streams[index], None)) is not None:
                yield index, chunk
                if not chunk["choices"][0].get("delta", {}).get("role"):
                    break  # that chunk is made of a completion's first one, whose text follows at once
            else:
                del streams[index]


class Group:
    """Answers that are decoded together, and advanced by one thread; each is a completion, or its chunks.

    An answer whose next token is not there yields `WAIT`, and the others go on.
    """

    def __init__(self, handle: Siblings, each: list[int], width: int) -> None:
        """`each`: their seeds; `width`: most that run at once."""
        self.seeds = each
        self._handle = handle
        self._width = width
        self._whole = False
        self._bell = Bell()
        self._answers: list[Generator[Any, None, None]] = []
        self._running: list[int] = []
        self._begun = 0
        """Number of answers that were begun, in order."""
        self._items: list[deque[Any]] = []
        """Chunks that nobody has read, of each."""
        self._asked: set[int] = set()
        """Answers whose items were asked for."""

    def items(
        self, index: int, make: Callable[[int], tuple[Request, Generator[Any, None, None]]], whole: bool
    ) -> Iterator[Any] | None:
        """Return the items of an answer; None where they were asked for before: a further completion.

        `make(index)` makes the request and the items of an answer, `whole` ones or chunks; the first call
        makes all of them.
        """
        if index in self._asked:
            return None
        self._asked.add(index)
        if not self._answers:
            self._whole = whole
            for number in range(len(self.seeds)):
                request, answer = make(number)
                request.bell = self._bell
                self._answers.append(advanced_for(self._handle, answer))
                self._items.append(deque())
        return self._items_of(index)

    def _items_of(self, index: int) -> Iterator[Any]:
        items = self._items[index]
        while items or not self._ended(index):
            if items:
                yield items.popleft()
            else:
                self.advance()

    def ready(self, index: int) -> bool:
        """The next item of an answer takes no wait for its tokens, or the answer is not one of the group."""
        return index not in self._asked or bool(self._items[index]) or self._ended(index)

    def _ended(self, index: int) -> bool:
        return index < self._begun and index not in self._running

    def advance(self) -> None:
        """Advance all answers; wait where none has anything. Raises the first error of one."""
        while True:
            while len(self._running) < self._width and self._begun < len(self._answers):
                self._running.append(self._begun)
                self._begun += 1
            told = False
            for index in list(self._running):
                item = next(self._answers[index], None)
                if item == WAIT:
                    continue
                told = True
                if item is not None:
                    self._handle.made(item)  # at once, however late it is read
                    self._items[index].append(item)
                if item is None or self._whole:
                    self._running.remove(index)
                    self._answers[index].close()
            if told:
                return
            self._bell.wait()

    def close(self) -> None:
        """End all answers, also where the end of one raises; later completions are not of the group."""
        self._asked.update(range(len(self.seeds)))
        if self._running:
            self._handle.cancel()
        with ExitStack() as ends:
            for answer in reversed(self._answers):
                ends.callback(answer.close)
