"""Several prompts in one completion request, each completed as if it was asked for alone.

As many at once as the model has slots, each in a thread of its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from queue import Empty, SimpleQueue
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
    """One completion, or its stream, with the choices of all prompts.

    `complete(i)` makes the completion of prompt i, whose choice j is choice `answers * i + j` here, as with
    OpenAI. `width`: prompts at once. `stop()` ends what runs where one prompt fails; its error is raised.
    """
    parts = _parts(complete, prompts, min(prompts, width), stop)
    return _stream(parts, answers) if stream else _merged(dict(parts), answers)


def _shifted(made: Any, prompt: int, answers: int) -> list[Any]:
    return [{**choice, "index": answers * prompt + choice["index"]} for choice in made["choices"]]


def _merged(made: dict[int, Any], answers: int) -> dict[str, Any]:
    choices = [choice for prompt in sorted(made) for choice in _shifted(made[prompt], prompt, answers)]
    usages = [each["usage"] for each in made.values()]
    usage: dict[str, Any] = {
        name: sum(each[name] for each in usages)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(each.get("prompt_tokens_details", {}).get("cached_tokens", 0) for each in usages)
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {**made[0], "choices": choices, "usage": usage}


def _stream(parts: Generator[Part, None, None], answers: int) -> Iterator[Any]:
    same: dict[str, Any] = {}
    with closing(parts):
        for prompt, chunk in parts:
            same = same or {"id": chunk["id"], "created": chunk["created"]}
            yield {**chunk, **same, "choices": _shifted(chunk, prompt, answers)}


def _parts(
    complete: Callable[[int], Any], prompts: int, width: int, stop: Callable[[], None]
) -> Generator[Part, None, None]:
    """What the threads make, as it comes. Raises what one of them raises."""
    todo, news = SimpleQueue[int](), SimpleQueue[Part | BaseException | None]()
    for prompt in range(prompts):
        todo.put(prompt)

    def work() -> None:
        try:
            while True:
                prompt = todo.get_nowait()
                made = complete(prompt)
                if isinstance(made, dict):
                    news.put((prompt, made))
                    continue
                with closing(made):
                    for chunk in made:
                        news.put((prompt, chunk))
        except Empty:
            news.put(None)
        except BaseException as error:
            news.put(error)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name="llamahybrid-prompt", daemon=True
        )
        for _ in range(width)
    ]
    for thread in threads:
        thread.start()
    running = width
    try:
        while running:
            item = news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        if running:
            while not todo.empty():
                todo.get()
            stop()
        for thread in threads:
            thread.join()
