"""Several prompts in one completion request, each completed as in a request of its own.

As many at once as the model has slots, each in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

Part = tuple[int, Any]
"""The index of a prompt, and its completion or a chunk of it."""


def completions(
    complete: Callable[[int], Any],
    prompts: int,
    answers: int,
    width: int,
    stop: Callable[[], None],
    stream: bool,
) -> Any:
    """Return a completion, or its stream, with the choices of all prompts.

    `complete(i)` makes the completion of prompt i; its choice j becomes choice `answers * i + j`, as OpenAI
    numbers them. `width`: prompts at once. If one fails, `stop()` ends the others and its error is raised.
    """
    parts = _parts(complete, prompts, min(prompts, width), stop)
    return _stream(parts, answers) if stream else _merged(dict(parts), answers)


def _shifted(made: Any, prompt: int, answers: int) -> list[Any]:
    return [{**choice, "index": answers * prompt + choice["index"]} for choice in made["choices"]]


def _merged(made: dict[int, Any], answers: int) -> dict[str, Any]:
    choices = [choice for prompt in sorted(made) for choice in _shifted(made[prompt], prompt, answers)]
    return {**made[0], "choices": choices}


def _stream(parts: Generator[Part, None, None], answers: int) -> Iterator[Any]:
    same: dict[str, Any] = {}
    with closing(parts):
        for prompt, chunk in parts:
            same = same or {"id": chunk["id"], "created": chunk["created"]}
            yield {**chunk, **same, "choices": _shifted(chunk, prompt, answers)}


def _parts(
    complete: Callable[[int], Any], prompts: int, width: int, stop: Callable[[], None]
) -> Generator[Part, None, None]:
    """Yield the parts of all prompts in the order of their making. Raises the first error of a prompt."""
    news = SimpleQueue[Part | Future[None]]()

    def work(prompt: int) -> None:
        made = complete(prompt)
        if isinstance(made, dict):
            news.put((prompt, made))
            return
        with closing(made):
            for chunk in made:
                news.put((prompt, chunk))

    with ThreadPoolExecutor(width, "llamahybrid-prompt") as threads:
        running = [threads.submit(copy_context().run, work, prompt) for prompt in range(prompts)]
        for each in running:
            each.add_done_callback(news.put)
        left = prompts
        try:
            while left:
                item = news.get()
                if isinstance(item, Future):
                    item.result()
                    left -= 1
                else:
                    yield item
        finally:
            for each in running:
                each.cancel()
            if left:
                stop()
